"""What belongs to a parameter in the user's optimizer goes on belonging to it: group, rate, decay, clip, state."""

from __future__ import annotations

import functools
import io
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.utils import unique_name

from hp_sharding import full_parameters
from tests import harness
from tests.lanes import wrap
from tests.models import loss_of, loss_on, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_equal, values
from tests.sides import BOTH, FEW, KEPT, Factory, Side, compare


def _steps(side: Side, count: int, name: str = "mlp") -> dict[str, Values]:
    for step in range(count):
        side.backward(loss_on(side.model, name, step))
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def _split(model: nn.Layer) -> tuple[list[Any], list[Any]]:
    params = model.parameters()
    return params[::2], params[1::2]


def _kind(name: str, **options: Any) -> Any:
    return lambda model: getattr(paddle.optimizer, name)(parameters=model.parameters(), **options)


KINDS: dict[str, Any] = {
    "Adagrad": _kind("Adagrad", learning_rate=0.05),
    "Adadelta": _kind("Adadelta", learning_rate=1.0),
    "Adam": _kind("Adam", learning_rate=0.01, weight_decay=0.1),
    "Adam, amsgrad": _kind("Adam", learning_rate=0.01, amsgrad=True),
    "AdamW, amsgrad": _kind("AdamW", learning_rate=0.01, amsgrad=True),
    "Adamax": _kind("Adamax", learning_rate=0.01),
    "ASGD": _kind("ASGD", learning_rate=0.05, batch_num=2),
    "Momentum, Nesterov": _kind("Momentum", learning_rate=0.05, use_nesterov=True, weight_decay=0.1),
    "NAdam": _kind("NAdam", learning_rate=0.01),
    "RAdam": _kind("RAdam", learning_rate=0.01),
    "RMSProp": _kind("RMSProp", learning_rate=0.01, momentum=0.9, centered=True),
    "Rprop": _kind("Rprop", learning_rate=0.01, learning_rate_range=(1e-4, 0.1)),
    "L1 decay": _kind("Momentum", learning_rate=0.05, weight_decay=paddle.regularizer.L1Decay(0.01)),
}


def _of_kind(new: Factory, name: str) -> dict[str, Values]:
    return _steps(new(lambda: make_model("mlp"), KINDS[name]), 4)


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str) -> None:
    harness.run(compare, 2, _of_kind, {key: FEW[key] for key in ("stage 2", "reshard")}, 1e-6, name)


def _groups(model: nn.Layer, kind: str, clips: bool) -> Any:
    first, second = _split(model)
    groups = [
        {"params": first, "learning_rate": 0.5, "weight_decay": 0.3},
        {"params": second, "weight_decay": 0.0},
    ]
    if clips:
        groups[0]["grad_clip"] = nn.ClipGradByGlobalNorm(0.1)
        groups[1]["grad_clip"] = nn.ClipGradByValue(0.001)
    return getattr(paddle.optimizer, kind)(learning_rate=0.05, parameters=groups)


def _grouped(new: Factory, kind: str, clips: bool) -> dict[str, Values]:
    return _steps(new(lambda: make_model("mlp"), functools.partial(_groups, kind=kind, clips=clips)), 5)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Momentum", "AdamW"])
def test_parameter_groups(kind: str, clips: bool) -> None:
    harness.run(compare, 2, _grouped, FEW, 5e-6 if clips else 1e-6, kind, clips)


def _one_clip_one_none(model: nn.Layer) -> Any:
    first, second = _split(model)
    groups = [{"params": first, "grad_clip": nn.ClipGradByNorm(0.1)}, {"params": second}]
    return paddle.optimizer.SGD(0.1, parameters=groups)


def _clip_for_all_groups(model: nn.Layer) -> Any:
    first, second = _split(model)
    groups = [{"params": first}, {"params": second, "learning_rate": 2.0}]
    return paddle.optimizer.SGD(0.1, parameters=groups, grad_clip=nn.ClipGradByGlobalNorm(0.05))


def _by_name(model: nn.Layer) -> Any:
    """Which parameters decay is asked of a function. Paddle has no ``lr_ratio`` on CPU."""
    no_decay = {param.name for name, param in model.named_parameters() if "bias" in name}
    return paddle.optimizer.AdamW(
        0.01, parameters=model.parameters(), weight_decay=0.5, apply_decay_param_fun=lambda name: name not in no_decay
    )


def _own_attributes(model: nn.Layer) -> Any:
    for index, param in enumerate(model.parameters()):
        param.optimize_attr["learning_rate"] = 1.0 + index
        param.regularizer = paddle.regularizer.L2Decay(0.1 * index) if index % 2 else None
    return paddle.optimizer.Momentum(0.02, parameters=model.parameters(), weight_decay=0.01)


SETUPS = {
    "one group clips": _one_clip_one_none,
    "one clip for all groups": _clip_for_all_groups,
    "by name": _by_name,
    "own attributes": _own_attributes,
}


def _set_up(new: Factory, name: str) -> dict[str, Values]:
    return _steps(new(lambda: make_model("mlp"), SETUPS[name]), 4)


@pytest.mark.parametrize("name", SETUPS)
def test_settings_of_single_parameters(name: str) -> None:
    harness.run(compare, 2, _set_up, FEW, 5e-6, name)


def _changing_rate(new: Factory) -> dict[str, Values]:
    """``set_lr``, a scheduler set later, a group's factor changed between steps."""
    side = new(lambda: make_model("mlp"), functools.partial(_groups, kind="SGD", clips=False))
    _steps(side, 1)
    side.optimizer.set_lr(0.2)
    assert side.optimizer.get_lr() == 0.2
    _steps(side, 1)
    scheduler = paddle.optimizer.lr.ExponentialDecay(0.1, 0.5)
    side.optimizer.set_lr_scheduler(scheduler)
    for _ in range(3):
        _steps(side, 1)
        scheduler.step()
    assert side.optimizer.get_lr() == scheduler()
    return {"end": side.values()}


def test_the_learning_rate_may_change() -> None:
    harness.run(compare, 2, _changing_rate, FEW, 1e-6)


def _part(rank: int, nranks: int, kind: str, steps: range, files: list[io.BytesIO]) -> Values:
    """Trains ``steps`` as a process of its own would, from what lies in ``files`` and then back into them."""
    with unique_name.guard():
        model = make_model("mlp")
        model, optimizer, _ = wrap(model, make_optimizer(kind, model), nranks, stage=2, **BOTH)
        for file, target in zip(files, (model, optimizer), strict=False):
            file.seek(0)
            target.set_state_dict(paddle.load(file))
        for step in steps:
            loss_of(model, make_batch("mlp", step, rank)).backward()
            optimizer.step()
            optimizer.clear_grad()
        files[:] = [io.BytesIO(), io.BytesIO()]
        paddle.save(model.state_dict(), files[0])
        paddle.save(optimizer.state_dict(), files[1])
        with full_parameters(model):
            return values(model)


def _resumes(rank: int, nranks: int, kind: str) -> None:
    at_once = _part(rank, nranks, kind, range(6), [])
    files: list[io.BytesIO] = []
    _part(rank, nranks, kind, range(3), files)
    assert_equal(_part(rank, nranks, kind, range(3, 6), files), at_once)


@pytest.mark.parametrize("kind", ["Momentum", "AdamW"])
def test_a_saved_state_goes_on_bitwise(kind: str) -> None:
    harness.run(_resumes, 2, kind)


def _weights_only(new: Factory) -> dict[str, Values]:
    """New weights loaded in mid-training stay; the moments stay too. At rate 0 nothing moves."""
    side = new(lambda: make_model("mlp"), lambda model: make_optimizer("AdamW", model))
    _steps(side, 2)
    state = {name: value.numpy() + 1.0 for name, value in side.model.state_dict().items()}
    side.model.set_state_dict(state)
    side.optimizer.set_lr(0.0)
    snapshots = {"loaded": side.values(), **{f"at rate 0, {k}": v for k, v in _steps(side, 1).items()}}
    for name, value in state.items():
        np.testing.assert_array_equal(snapshots["at rate 0, end"][name], value)
    side.optimizer.set_lr(0.01)
    return {**snapshots, **_steps(side, 2)}


def test_loaded_weights_stay() -> None:
    harness.run(compare, 2, _weights_only, KEPT)
