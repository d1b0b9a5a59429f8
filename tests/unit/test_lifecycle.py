"""Wrapped models that meet exceptions, are copied, and are forgotten."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base import core

from hp_sharding import backward
from hp_sharding.errors import LayoutError, StateError
from hp_sharding.schedule import schedule_of
from tests.models import make_model
from tests.tasks import BOTH, SETTINGS, TASKS, assert_same, make_odd, plain_optimizer, shard_task

# -- failures ----------------------------------------------------------------------------------------------------------


class _Stop(Exception):
    pass


def _raise_in_forward(model: nn.Layer, step: int) -> None:
    def fail(*_: Any) -> None:
        raise _Stop

    handle = model.layers[2].register_forward_pre_hook(fail)
    try:
        TASKS["mlp"].loss(model, step)
    finally:
        handle.remove()


def _raise_in_backward(model: nn.Layer, step: int) -> None:
    middle: list[paddle.Tensor] = []

    def fail(gradient: paddle.Tensor) -> None:
        backward.keep_error(_Stop())
        raise _Stop

    def keep(layer: nn.Layer, x: Any, y: paddle.Tensor) -> None:
        middle.append(y)

    handle = model.layers[1].register_forward_post_hook(keep)
    loss = TASKS["mlp"].loss(model, step)
    handle.remove()
    middle[0].register_hook(fail)
    loss.backward()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("settings", ["no overlap", "both", "reshard, ahead"])
@pytest.mark.parametrize("fails", [_raise_in_forward, _raise_in_backward])
def test_after_an_exception_training_goes_on(fails: Callable[[nn.Layer, int], None], settings: str, stage: int) -> None:
    plain, job = make_model("mlp"), TASKS["mlp"]
    optimizer = plain_optimizer(plain)
    rig = shard_task(make_model("mlp"), stage=stage, **SETTINGS[settings])
    for step in range(5):
        if step == 2:
            with pytest.raises(_Stop):
                fails(rig.model, step)
            rig.optimizer.clear_grad()
            continue
        assert job.run(step, rig.model, rig.optimizer) == job.run(step, plain, optimizer)
    assert_same(rig.model, plain)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("settings", ["no overlap", "both", "reshard, ahead"])
def test_a_step_after_a_failed_backward_is_refused(settings: str, stage: int) -> None:
    """Some layers have their gradients and others do not."""
    plain, job = make_model("mlp"), TASKS["mlp"]
    optimizer = plain_optimizer(plain)
    rig = shard_task(make_model("mlp"), stage=stage, **SETTINGS[settings])
    for step in range(4):
        if step == 2:
            with pytest.raises(_Stop):
                _raise_in_backward(rig.model, step)
            for _ in range(2):
                with pytest.raises(StateError, match=r"rank 0: the backward failed.*clear_grad\(\) on every rank"):
                    rig.optimizer.step()
            rig.optimizer.clear_grad()
            continue
        assert job.run(step, rig.model, rig.optimizer) == job.run(step, plain, optimizer)
    assert_same(rig.model, plain)


def test_after_an_exception_nobody_thinks_that_a_forward_is_under_way() -> None:
    """A list of layers has no forward whose beginning would tell."""
    layers = nn.LayerList([nn.Linear(4, 4, bias_attr=False) for _ in range(3)])
    rig = shard_task(layers, "SGD", reshard_after_step=True)
    layers[0](paddle.ones([1, 4])).sum().backward()
    rig.optimizer.step()

    def fail(*_: Any) -> None:
        raise _Stop

    layers[0].register_forward_pre_hook(fail)
    with pytest.raises(_Stop):
        layers[0](paddle.ones([1, 4]))
    rig.optimizer.clear_grad()
    before = len(rig.log)
    assert layers[2].weight.shape == [4, 4]
    assert len(rig.log) == before, "looking at a parameter started a gather on this rank alone"


def test_an_exception_of_ours_in_a_hook_comes_out_as_itself() -> None:
    rig = shard_task(make_model("mlp"), **BOTH)

    def fail(*_: Any) -> None:
        raise _Stop("in the reducer")

    rig.optimizer._reducer.take_gradient = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(_Stop, match="in the reducer"):
        TASKS["mlp"].loss(rig.model, 0).backward()


def test_a_backward_that_nobody_announces_is_an_error() -> None:
    rig = shard_task(make_model("mlp"), **BOTH)
    wrapped = core.eager.run_backward
    core.eager.run_backward = backward._original
    try:
        with pytest.raises((StateError, OSError, SystemError)) as caught:
            TASKS["mlp"].loss(rig.model, 0).backward()
        assert "nobody announced its backward" in str(caught.value) or caught.type is not StateError
    finally:
        core.eager.run_backward = wrapped


def test_a_model_that_was_cast_is_refused_by_step() -> None:
    rig = shard_task(make_model("mlp"), **BOTH)
    rig.model.layers[0].to(dtype="float64")
    with pytest.raises(LayoutError, match=r"Layer.to\(\.\.\.\) before"):
        rig.optimizer.step()


# -- life and death ----------------------------------------------------------------------------------------------------


def _hooks(model: nn.Layer) -> int:
    return sum(
        len(layer._forward_pre_hooks) + len(layer._forward_post_hooks) for layer in model.sublayers(include_self=True)
    )


def test_hooks_and_memory_stay_the_same_over_many_steps() -> None:
    rig = shard_task(make_model("mlp"), **{**SETTINGS["reshard, ahead"], "reduce_overlap": True})
    seen: list[Sequence[int]] = []
    for step in range(30):
        TASKS["mlp"].run(step, rig.model, rig.optimizer)
        rig.log.clear()
        if step in (10, 20, 29):
            gc.collect()
            live = core.host_memory_stat_current_value("Allocated", 0)
            seen.append((_hooks(rig.model), rig.pool.allocated_bytes, live))
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_a_model_and_its_optimizer_can_be_forgotten() -> None:
    rig = shard_task(make_model("mlp"), **BOTH)
    TASKS["mlp"].run(0, rig.model, rig.optimizer)
    model, schedule = weakref.ref(rig.model), weakref.ref(rig.optimizer._schedule)
    buffer = weakref.ref(rig.optimizer.buffers[0])
    del rig
    gc.collect()
    assert (model(), schedule(), buffer()) == (None, None, None)
    assert core.eager.run_backward is not backward._run_backward


def test_a_model_outlives_its_optimizer_with_the_newest_values() -> None:
    plain, rig = make_model("mlp"), shard_task(make_model("mlp"), **BOTH)
    TASKS["mlp"].run(0, plain, plain_optimizer(plain))
    TASKS["mlp"].run(0, rig.model, rig.optimizer)
    model = rig.model
    del rig
    gc.collect()
    assert_same(model, plain)


def test_a_layer_outlives_its_model_with_the_newest_values() -> None:
    plain, rig = make_model("mlp"), shard_task(make_model("mlp"), **{**BOTH, "comm_fusion": False})
    TASKS["mlp"].run(0, plain, plain_optimizer(plain))
    TASKS["mlp"].run(0, rig.model, rig.optimizer)
    layer = rig.model.layers[2]
    assert rig.gather.n_pending
    del rig
    gc.collect()
    x = paddle.ones([1, plain.layers[2].weight.shape[0]])
    assert np.array_equal(layer(x).numpy(), plain.layers[2](x).numpy())
    assert_same(layer, plain.layers[2])


def test_a_deep_copy_is_a_plain_model() -> None:
    plain, rig = make_model("mlp"), shard_task(make_model("mlp"), **BOTH)
    TASKS["mlp"].run(0, plain, plain_optimizer(plain))
    TASKS["mlp"].run(0, rig.model, rig.optimizer)
    other = copy.deepcopy(rig.model)
    assert schedule_of(other) is None
    assert other.__dict__["_hp_sharding_schedule"].schedule is None, "a copy of all buckets came along"
    assert schedule_of(rig.model) is rig.optimizer._schedule
    assert_same(other, plain)
    before = len(rig.log)
    TASKS["mlp"].run(1, other, plain_optimizer(other))
    assert len(rig.log) == before
    assert_same(rig.model, plain)


def test_state_dict_keeps_its_keys() -> None:
    rig = shard_task(make_odd(), **BOTH)
    assert list(rig.model.state_dict()) == list(make_odd().state_dict())
