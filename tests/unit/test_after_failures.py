"""What is left behind where a batch was bad, a check spoke up or a block of full parameters failed: nothing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding import ShardingConfig, full_parameters, shard
from hp_sharding.errors import StateError
from tests.fakes import Rig, wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.scalers import make_scaler, scale

SETTINGS: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True, "comm_fusion": False}
NAN = float("nan")


def _shard(**settings: Any) -> Rig:
    model = make_model("mlp")
    return wrap(model, make_optimizer("SGD", model), **{**SETTINGS, "stage": 2, **settings})


def _loss(rig: Rig, number: int) -> paddle.Tensor:
    return loss_of(rig.model, make_batch("mlp", number, 0))


def test_a_bad_batch_is_forgotten_where_parameters_were_frozen_too() -> None:
    rig = _shard()
    for param in rig.model.layers[0].parameters():
        param.stop_gradient = True
    (_loss(rig, 0) * NAN).backward()
    assert np.isnan(float(rig.optimizer.clip_grad_norm(1.0)))
    rig.optimizer.clear_grad()
    _loss(rig, 1).backward()
    assert np.isfinite(rig.optimizer.grad_norm())
    rig.optimizer.step()


def test_what_comes_in_after_clipping_is_checked_too() -> None:
    rig = _shard(check_nan_inf="raise")
    _loss(rig, 0).backward()
    rig.optimizer.clip_grad_norm(1.0)
    (_loss(rig, 1) * NAN).backward()
    with pytest.raises(StateError, match="NaN or infinite"):
        rig.optimizer.step()


def test_what_a_scaler_has_found_is_no_matter_for_a_check_while_clipping() -> None:
    rig = _shard(check_nan_inf="raise")
    scaler = make_scaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1)
    before = float(scaler._scale)
    scale(scaler, _loss(rig, 0) * NAN).backward()
    scaler.unscale_(rig.optimizer)
    rig.optimizer.clip_grad_norm(1.0)
    scaler.step(rig.optimizer)
    scaler.update()
    assert float(scaler._scale) < before
    rig.optimizer.clear_grad()
    scale(scaler, _loss(rig, 1)).backward()
    scaler.unscale_(rig.optimizer)
    assert np.isfinite(float(rig.optimizer.clip_grad_norm(1.0)))


@pytest.mark.parametrize("settings", [{"stage": 3}, {"stage": 2, "reshard_after_step": True}], ids=str)
def test_full_parameters_that_fail_pin_nothing(settings: dict[str, Any]) -> None:
    rig = _shard(**settings)
    weight = rig.model.layers[1].weight
    _loss(rig, 0).backward()
    rig.optimizer.step()
    rig.optimizer.clear_grad()
    paddle.assign(paddle.ones(weight.shape), output=weight)
    with pytest.raises(StateError, match="cannot be guarded"), full_parameters(rig.model):
        pass
    with full_parameters(rig.model):
        assert weight.numpy().shape == tuple(weight.shape)
    for step in range(2):
        _loss(rig, step).backward()
        rig.optimizer.step()
        rig.optimizer.clear_grad()
    with pytest.raises(StateError, match="full_parameters"):
        rig.model.layers[-1].weight.numpy()


def test_a_divisor_counts_in_one_process_too() -> None:
    found = []
    choices: list[dict[str, Any]] = [{}, {"gradient_scale": 8.0}]
    for settings in choices:
        model = make_model("mlp")
        optimizer = shard(model, make_optimizer("SGD", model), ShardingConfig(**settings))
        loss_of(model, make_batch("mlp", 0, 0)).backward()
        gradient = optimizer.full_grad(model.layers[0].weight)
        assert gradient is not None
        found.append(gradient.numpy())
    np.testing.assert_array_equal(found[0] / 8, found[1])


def test_frozen_parameters_that_are_replaced_are_let_go() -> None:
    rig = _shard()
    layer = rig.model.layers[0]
    gone = []
    for _ in range(2):
        frozen = nn.Linear(2, 2).weight
        frozen.stop_gradient = True
        layer.extra = frozen  # takes the place of the one before
        gone.append(weakref.ref(layer.extra))
    del frozen
    rig.optimizer.step()
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is layer.extra
