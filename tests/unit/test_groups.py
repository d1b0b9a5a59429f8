"""Groups, rates and frozen parameters through the sharded optimizer itself, with its moments beside plain Paddle's.

What slices of many ranks make of groups is in ``test_options.py`` and ``test_rates.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.utils import unique_name

from hp_sharding import full_parameters
from tests.fakes import values, wrap
from tests.models import loss_of, make_batch, make_model

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
SETTINGS: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True}

Array = np.ndarray[Any, Any]
Scenario = Callable[[nn.Layer, Any], None]


def _adamw(model: nn.Layer, rate: Any = 0.01) -> Any:
    """Three groups: one has a rate, a decay and a clip of its own, one nothing of its own, one no decay."""
    params = model.parameters()
    groups = [
        {"params": params[:3], "learning_rate": 0.5, "weight_decay": 0.2, "grad_clip": nn.ClipGradByGlobalNorm(0.1)},
        {"params": params[3:6]},
        {"params": params[6:], "weight_decay": 0.0},
    ]
    return paddle.optimizer.AdamW(rate, parameters=groups, weight_decay=0.1)


def _backward(model: nn.Layer, number: int) -> None:
    loss_of(model, make_batch("mlp", number, 0)).backward()


def _play(scenario: Scenario, optimize: Callable[[nn.Layer], Any], stage: int | None) -> dict[str, Array]:
    """Parameters and state of the optimizer, flat, after the scenario; ``stage`` None is plain Paddle."""
    with unique_name.guard():
        model = make_model("mlp")
        optimizer = optimize(model)
        if stage is not None:
            optimizer = wrap(model, optimizer, **SETTINGS, stage=stage).optimizer
        scenario(model, optimizer)
        with full_parameters(model):
            found = dict(zip([name for name, _ in model.named_parameters()], values(model.parameters()), strict=True))
        state = optimizer.state_dict()
    tensors = {name: value.numpy() for name, value in state.items() if isinstance(value, paddle.Tensor)}
    return {name: value.reshape(-1) for name, value in {**found, **tensors}.items()}


def _assert_parity(
    scenario: Scenario, stage: int, optimize: Callable[[nn.Layer], Any] = _adamw, tolerance: float = 0.0
) -> None:
    expected, found = _play(scenario, optimize, None), _play(scenario, optimize, stage)
    assert set(found) == set(expected)
    assert any("moment" in name for name in found)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance / 10, err_msg=name)


NORM_ORDER = 1e-5
"""Norms are summed in another order than Paddle's; AdamW magnifies that."""


@STAGES
def test_groups_train_as_plain_ones_do(stage: int) -> None:
    def scenario(model: nn.Layer, optimizer: Any) -> None:
        for step in range(4):
            _backward(model, step)
            optimizer.step()
            optimizer.clear_grad()

    _assert_parity(scenario, stage, tolerance=NORM_ORDER)


@STAGES
def test_the_rate_is_set_and_asked_for_through_the_sharded_optimizer(stage: int) -> None:
    rates: list[float] = []

    def scenario(model: nn.Layer, optimizer: Any) -> None:
        for step, rate in enumerate((None, 0.1, 0.002)):
            if rate is not None:
                optimizer.set_lr(rate)
            rates.append(optimizer.get_lr())
            _backward(model, step)
            optimizer.step()
            optimizer.clear_grad()

    _assert_parity(scenario, stage, tolerance=NORM_ORDER)
    assert rates == 2 * [0.01, 0.1, 0.002]


@STAGES
def test_a_scheduler_is_the_one_source_of_the_rate(stage: int) -> None:
    """The one that the optimizer was made with, and one that is put in its place."""
    rates: list[float] = []

    def scenario(model: nn.Layer, optimizer: Any) -> None:
        scheduler = optimizer._learning_rate
        for step in range(5):
            if step == 3:
                scheduler = paddle.optimizer.lr.ExponentialDecay(0.05, gamma=0.5)
                optimizer.set_lr_scheduler(scheduler)
            _backward(model, step)
            optimizer.step()
            optimizer.clear_grad()
            scheduler.step()
            rates.append(optimizer.get_lr())
            assert optimizer.get_lr() == scheduler()
        with pytest.raises(RuntimeError, match="LRScheduler"):
            optimizer.set_lr(0.1)

    def optimize(model: nn.Layer) -> Any:
        return _adamw(model, paddle.optimizer.lr.StepDecay(0.02, step_size=2, gamma=0.1))

    _assert_parity(scenario, stage, optimize, tolerance=NORM_ORDER)
    assert rates[:5] == rates[5:] == pytest.approx([0.02, 0.002, 0.002, 0.025, 0.0125])


@STAGES
def test_a_group_that_is_frozen_for_a_while_keeps_its_moments(stage: int) -> None:
    """Neither the evaluation in between nor what was cleared how makes a difference."""

    def scenario(model: nn.Layer, optimizer: Any) -> None:
        group = model.parameters()[3:6]
        for step in range(7):
            for param in group:
                param.stop_gradient = step in (2, 3, 5)
            _backward(model, step)
            optimizer.step()
            optimizer.clear_grad(set_to_zero=bool(step % 2))
            model.eval()
            with paddle.no_grad():
                loss_of(model, make_batch("mlp", step, 1))
            model.train()

    _assert_parity(scenario, stage, tolerance=NORM_ORDER)


@STAGES
def test_what_is_frozen_between_backward_and_step_is_not_updated_and_not_in_the_norm(stage: int) -> None:
    def optimize(model: nn.Layer) -> Any:
        clip = nn.ClipGradByGlobalNorm(0.1)
        return paddle.optimizer.AdamW(0.01, parameters=model.parameters(), grad_clip=clip)

    def scenario(model: nn.Layer, optimizer: Any) -> None:
        late = model.layers[2].weight
        for step in range(4):
            _backward(model, step)
            late.stop_gradient = step == 1
            optimizer.step()
            late.stop_gradient = False
            optimizer.clear_grad()

    _assert_parity(scenario, stage, optimize, tolerance=NORM_ORDER)


@STAGES
def test_what_has_never_had_a_gradient_has_no_moments_and_does_not_decay(stage: int) -> None:
    """And goes on with zeros once it has had one, as long as gradients are set to zero."""

    def scenario(model: nn.Layer, optimizer: Any) -> None:
        first = model.layers[0]
        for step, whole in enumerate((False, False, True, False, False)):
            if whole:
                _backward(model, step)
            else:
                first(make_batch("mlp", step, 0)[0]).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad(set_to_zero=step < 3)

    def optimize(model: nn.Layer) -> Any:
        return paddle.optimizer.AdamW(0.01, parameters=model.parameters(), weight_decay=0.5)

    _assert_parity(scenario, stage, optimize)
