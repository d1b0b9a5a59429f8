"""Learning rates: every scheduler of ``paddle.optimizer.lr``, factors of parameters and groups, changes on the way."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.optimizer import lr
from paddle.utils import unique_name

from tests.fakes import wrap
from tests.models import loss_of, make_batch, make_model
from tests.slices import assert_as_plain, sharded_steps

LOSSES = [4.0, 3.0, 3.5, 3.2, 3.1, 2.0]
"""What ``ReduceOnPlateau`` is told: it gets worse for a while."""

SCHEDULERS: dict[str, Callable[[], lr.LRScheduler]] = {
    "NoamDecay": lambda: lr.NoamDecay(64, warmup_steps=3),
    "PiecewiseDecay": lambda: lr.PiecewiseDecay([1, 3], [0.1, 0.05, 0.01]),
    "NaturalExpDecay": lambda: lr.NaturalExpDecay(0.1, gamma=0.5),
    "InverseTimeDecay": lambda: lr.InverseTimeDecay(0.1, gamma=0.5),
    "PolynomialDecay": lambda: lr.PolynomialDecay(0.1, decay_steps=4, power=2.0, cycle=True),
    "LinearWarmup": lambda: lr.LinearWarmup(0.1, warmup_steps=3, start_lr=0.01, end_lr=0.1),
    "LinearWarmup of another": lambda: lr.LinearWarmup(lr.StepDecay(0.1, 2), 2, start_lr=0.0, end_lr=0.1),
    "ExponentialDecay": lambda: lr.ExponentialDecay(0.1, gamma=0.7),
    "MultiStepDecay": lambda: lr.MultiStepDecay(0.1, milestones=[1, 3], gamma=0.3),
    "StepDecay": lambda: lr.StepDecay(0.1, step_size=2, gamma=0.3),
    "LambdaDecay": lambda: lr.LambdaDecay(0.1, lambda epoch: 0.9**epoch),
    "ReduceOnPlateau": lambda: lr.ReduceOnPlateau(0.1, factor=0.3, patience=0),
    "CosineAnnealingDecay": lambda: lr.CosineAnnealingDecay(0.1, T_max=4, eta_min=0.001),
    "MultiplicativeDecay": lambda: lr.MultiplicativeDecay(0.1, lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": lambda: lr.OneCycleLR(0.1, total_steps=6, phase_pct=0.5),
    "CyclicLR": lambda: lr.CyclicLR(0.01, max_learning_rate=0.1, step_size_up=2, mode="triangular2"),
    "LinearLR": lambda: lr.LinearLR(0.1, total_steps=4),
    "CosineAnnealingWarmRestarts": lambda: lr.CosineAnnealingWarmRestarts(0.1, T_0=2, T_mult=2),
}


def _advance(model: nn.Layer, optimizer: Any, step: int) -> None:
    scheduler = optimizer._learning_rate
    if isinstance(scheduler, lr.ReduceOnPlateau):
        scheduler.step(paddle.to_tensor(LOSSES[step]))
    else:
        scheduler.step()


def test_no_scheduler_is_missing() -> None:
    kinds = {name for name, kind in vars(lr).items() if inspect.isclass(kind) and issubclass(kind, lr.LRScheduler)}
    assert kinds - {name.split(" ")[0] for name in SCHEDULERS} == {"LRScheduler"}


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_schedulers(name: str) -> None:
    rates = []

    def advance(model: nn.Layer, optimizer: Any, step: int) -> None:
        rates.append(optimizer.get_lr())
        _advance(model, optimizer, step)

    def optimize(model: nn.Layer) -> Any:
        model.parameters()[1].optimize_attr["learning_rate"] = 0.5
        return paddle.optimizer.Momentum(SCHEDULERS[name](), parameters=model.parameters(), weight_decay=0.01)

    assert_as_plain(optimize, 2, change=advance)
    assert len({round(rate, 9) for rate in rates}) > 1, "the rate has never changed"


@pytest.mark.parametrize(
    "name", ["ReduceOnPlateau", "LambdaDecay", "OneCycleLR", "CyclicLR", "LinearWarmup of another"]
)
def test_schedulers_over_parameter_groups(name: str) -> None:
    def optimize(model: nn.Layer) -> Any:
        first, second = model.parameters()[:3], model.parameters()[3:]
        groups = [{"params": first, "learning_rate": 0.1}, {"params": second, "weight_decay": 0.3}]
        return paddle.optimizer.AdamW(SCHEDULERS[name](), parameters=groups)

    assert_as_plain(optimize, 3, change=_advance)


# -- with the model around it ------------------------------------------------------------------------------------------


def _train(model: nn.Layer, optimizer: Any, steps: range, scheduler: lr.LRScheduler) -> list[float]:
    seen = []
    for step in steps:
        loss = loss_of(model, make_batch("mlp", step, 0))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        scheduler.step(*([loss] if isinstance(scheduler, lr.ReduceOnPlateau) else []))
        seen += [float(loss), optimizer.get_lr()]
    return seen


def _plateau() -> lr.LRScheduler:
    return lr.ReduceOnPlateau(0.3, factor=0.5, patience=0, threshold=0.5)


def _adamw(model: nn.Layer, rate: Any) -> Any:
    return paddle.optimizer.AdamW(rate, parameters=model.parameters(), weight_decay=0.1)


@pytest.mark.parametrize("settings", [{}, {"allgather_overlap": True}, {"reshard_after_step": True}])
def test_a_scheduler_that_looks_at_the_loss(settings: dict[str, Any]) -> None:
    plain, model = make_model("mlp"), make_model("mlp")
    schedulers = [_plateau(), _plateau()]
    expected = _train(plain, _adamw(plain, schedulers[0]), range(6), schedulers[0])
    rig = wrap(model, _adamw(model, schedulers[1]), **settings)
    assert _train(model, rig.optimizer, range(6), schedulers[1]) == expected
    assert expected[-1] < 0.3


def test_the_schedulers_state_is_part_of_the_optimizers() -> None:
    def part(steps: range, state: dict[str, Any] | None) -> tuple[list[float], dict[str, Any]]:
        with unique_name.guard():  # as in a process of its own
            model, scheduler = make_model("mlp"), lr.ExponentialDecay(0.1, gamma=0.5)
            rig = wrap(model, _adamw(model, scheduler))
            if state is not None:
                model.set_state_dict(state["model"])
                rig.optimizer.set_state_dict(state["optimizer"])
            seen = _train(model, rig.optimizer, steps, scheduler)
            return seen, {"model": model.state_dict(), "optimizer": rig.optimizer.state_dict()}

    whole, _ = part(range(6), None)
    first, state = part(range(3), None)
    second, _ = part(range(3, 6), state)
    assert first + second == whole
    assert math.isclose(whole[-1], 0.1 * 0.5**6)


# -- factors -----------------------------------------------------------------------------------------------------------


def _set_rate(model: nn.Layer, optimizer: Any, step: int) -> None:
    optimizer.set_lr(0.1 / (step + 1))


def _set_scheduler(model: nn.Layer, optimizer: Any, step: int) -> None:
    if step == 0:
        optimizer.set_lr_scheduler(lr.ExponentialDecay(0.2, gamma=0.5))
    else:
        optimizer._learning_rate.step()


def _change_factor(model: nn.Layer, optimizer: Any, step: int) -> None:
    model.parameters()[0].optimize_attr["learning_rate"] = 0.5 * step


def _replace_factors(model: nn.Layer, optimizer: Any, step: int) -> None:
    for number, param in enumerate(model.parameters()):
        param.optimize_attr = {"learning_rate": float(number == step)}


@pytest.mark.parametrize("nranks", [1, 3])
@pytest.mark.parametrize("change", [_set_rate, _set_scheduler, _change_factor, _replace_factors])
def test_a_rate_that_changes_on_the_way(change: Any, nranks: int) -> None:
    def optimize(model: nn.Layer) -> Any:
        return paddle.optimizer.Momentum(0.1, parameters=model.parameters())

    assert_as_plain(optimize, nranks, change=change)


def test_a_rate_by_function_is_asked_about_whole_parameters() -> None:
    """Paddle's constructor refuses ``lr_ratio`` on CPU, its kernel does not."""

    def optimize(model: nn.Layer) -> Any:
        optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
        optimizer._lr_ratio = lambda param: 0.5 if param is model.parameters()[0] else 2.0
        return optimizer

    assert_as_plain(optimize, 2)
    with_ratio, without = sharded_steps(optimize, 2), sharded_steps(_without_ratio, 2)
    assert not any(np.array_equal(with_ratio[name], without[name]) for name in without)


def _without_ratio(model: nn.Layer) -> Any:
    return paddle.optimizer.AdamW(0.1, parameters=model.parameters())
