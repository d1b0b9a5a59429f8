"""Real models over lanes that deliver only when waited for: every step must equal plain Paddle's, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from hp_sharding.buffer import FusedCommBuffer, Status
from hp_sharding.errors import CommError
from hp_sharding.reduction import Reducer
from tests.fakes import Rig, values
from tests.models import make_model
from tests.tasks import (
    BOTH,
    SETTINGS,
    STAGE_3,
    TASKS,
    assert_same,
    final_values,
    make_odd,
    odd_batch,
    plain_optimizer,
    shard_task,
)

# -- parity ------------------------------------------------------------------------------------------------------------


_EVERYWHERE = ("mlp", "gpt", "gpt_recompute_reentrant", "odd", "odd, branches")
_COMBINATIONS = [
    (task, settings)
    for task in TASKS
    for settings in SETTINGS
    if task in _EVERYWHERE or settings in ("both", "reshard, ahead")
]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("task", "settings"), _COMBINATIONS)
def test_training_equals_plain_paddle(task: str, settings: str, stage: int) -> None:
    plain, job = TASKS[task].make(), TASKS[task]
    optimizer = plain_optimizer(plain)
    rig = shard_task(job.make(), stage=stage, **SETTINGS[settings])
    for step in range(3):
        assert job.run(step, rig.model, rig.optimizer) == job.run(step, plain, optimizer), f"step {step}"
    assert_same(rig.model, plain)
    assert rig.gather.n_pending == rig.reduce.n_pending == 0


@pytest.mark.parametrize("settings", STAGE_3)
@pytest.mark.parametrize("task", TASKS)
def test_training_in_stage_3_equals_plain_paddle(task: str, settings: str) -> None:
    plain, job = TASKS[task].make(), TASKS[task]
    optimizer = plain_optimizer(plain)
    rig = shard_task(job.make(), stage=3, **STAGE_3[settings])
    for step in range(4):
        assert job.run(step, rig.model, rig.optimizer) == job.run(step, plain, optimizer), f"step {step}"
    assert_same(rig.model, plain)


@pytest.mark.parametrize("optimizer", ["SGD", "Momentum"])
def test_other_optimizers_too(optimizer: str) -> None:
    plain, job = make_model("gpt"), TASKS["gpt"]
    inner = plain_optimizer(plain, optimizer)
    rig = shard_task(make_model("gpt"), optimizer, **BOTH)
    for step in range(3):
        assert job.run(step, rig.model, rig.optimizer) == job.run(step, plain, inner)
    assert_same(rig.model, plain)


# -- the tests above can fail ------------------------------------------------------------------------------------------


def _differs(**settings: Any) -> bool:
    """Whether training shows that something is wrong: other numbers, or an exception."""
    plain, job = make_model("gpt"), TASKS["gpt"]
    optimizer = plain_optimizer(plain)
    rig = shard_task(make_model("gpt"), **settings)
    try:
        losses = [job.run(step, rig.model, rig.optimizer) for step in range(2)]
    except (RuntimeError, ValueError, AssertionError):
        return True
    return losses != [job.run(step, plain, optimizer) for step in range(2)]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("settings", ["both", "reshard", "reshard, ahead"])
def test_a_dropped_wait_for_a_gather_shows(monkeypatch: pytest.MonkeyPatch, settings: str, stage: int) -> None:
    assert not _differs(stage=stage, **SETTINGS[settings])

    def finish_without_waiting(buffer: FusedCommBuffer) -> None:
        buffer._work = None
        buffer._bind_params()
        buffer.status = Status.READY

    monkeypatch.setattr(FusedCommBuffer, "finish_gather", finish_without_waiting)
    monkeypatch.setattr("hp_sharding.timeline.Timeline.wait", lambda timeline, work: None)
    assert _differs(stage=stage, **SETTINGS[settings])


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("settings", ["no overlap", "both"])
def test_a_dropped_wait_for_a_reduction_shows(monkeypatch: pytest.MonkeyPatch, settings: str, stage: int) -> None:
    monkeypatch.setattr(Reducer, "wait", lambda reducer, bucket: None)
    assert _differs(stage=stage, **SETTINGS[settings])


# -- gathers -----------------------------------------------------------------------------------------------------------


def _status(rig: Rig) -> set[Status]:
    return {buffer.status for buffer in rig.optimizer.buffers}


def test_when_step_returns_gathers_are_done_or_all_under_way() -> None:
    job = TASKS["mlp"]
    rig = shard_task(make_model("mlp"))
    job.run(0, rig.model, rig.optimizer)
    assert _status(rig) == {Status.READY}
    assert rig.gather.n_pending == 0
    rig = shard_task(make_model("mlp"), allgather_overlap=True)
    job.run(0, rig.model, rig.optimizer)
    assert _status(rig) == {Status.SYNCING}
    assert rig.gather.n_pending == len(rig.optimizer.buffers) > 3


def test_each_layer_waits_for_its_own_gather_only() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    rig = shard_task(model, "SGD", allgather_overlap=True)
    model(paddle.ones([2, 8])).sum().backward()
    rig.optimizer.step()
    left = []
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: left.append(rig.gather.n_pending))
        layer.register_forward_post_hook(lambda *_: left.append(rig.gather.n_pending))
    per_layer = len(rig.optimizer.buffers) // 4
    model(paddle.ones([2, 8]))
    assert left == [n * per_layer for n in (4, 3, 3, 2, 2, 1, 1, 0)]


def test_gathers_follow_the_order_of_first_use_from_the_first_step_on() -> None:
    job = TASKS["odd"]
    rig = shard_task(make_odd(), comm_fusion=False, **BOTH)
    orders = []
    for step in range(3):
        before = len(rig.log)
        job.run(step, rig.model, rig.optimizer)
        gathers = [event.label for event in rig.log[before:] if event[:1] + event[2:3] == ("start", "all_gather")]
        orders.append([label.partition(":")[2] for label in gathers])
    layers = [name.partition(".")[0] for name in orders[0]]
    assert list(dict.fromkeys(layers)) == ["first", "twice", "towers", "vectors", "borrowed", "normed", "last", "scale"]
    assert layers[6:10] == ["vectors", "borrowed", "borrowed", "vectors"]
    assert orders[1:] == orders[:1] * 2
    assert rig.optimizer._schedule.learned_gather_order is None


def test_an_order_of_gathers_is_published_though_that_of_reductions_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reducer, "_learn_order", lambda reducer: None)
    rig = shard_task(make_odd(), comm_fusion=False, **BOTH)
    before = rig.optimizer._schedule.gathers.order
    TASKS["odd"].run(0, rig.model, rig.optimizer)
    assert rig.optimizer._schedule.gathers.order != before
    assert rig.gather.labels("broadcast") == ["bucket order"]


def test_unused_and_frozen_parameters_are_never_gathered_again() -> None:
    job = TASKS["odd"]
    rig = shard_task(make_odd(), comm_fusion=False, **BOTH)
    for step in range(3):
        job.run(step, rig.model, rig.optimizer)
    gathered = {label.partition(":")[2] for label in rig.gather.labels("all_gather")}
    assert not [name for name in gathered if name.startswith(("unused", "frozen", "towers.right"))]
    assert "last.weight" in gathered


@pytest.mark.parametrize(("depth", "ahead"), [(0, 0), (1, 1), (2, 2), (None, 1)])
def test_with_reshard_only_so_many_gathers_run_ahead(depth: int | None, ahead: int) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8, bias_attr=False) for _ in range(5)])
    rig = shard_task(model, "SGD", allgather_overlap=True, reshard_after_step=True, prefetch_depth=depth)
    assert len(rig.optimizer.buffers) == 5
    under_way = []
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: under_way.append(rig.gather.n_pending))
    for step in range(2):
        model(paddle.ones([2, 8])).sum().backward()
        rig.optimizer.step()
        assert _status(rig) == {Status.SHARDED}
        assert all(buffer.full is None for buffer in rig.optimizer.buffers)
        if step == 0:
            assert rig.gather.labels("all_gather") == []
    assert under_way[5:] == [min(ahead, left) for left in (4, 3, 2, 1, 0)]


def test_a_unit_that_is_asked_for_early_takes_those_before_it_along() -> None:
    """All ranks start gathers in one order, whatever each of them uses first."""
    model = nn.LayerList([nn.Linear(8, 8, bias_attr=False) for _ in range(4)])
    rig = shard_task(model, "SGD", reshard_after_step=True)
    model[0](paddle.ones([2, 8])).sum().backward()
    rig.optimizer.step()
    model[2](paddle.ones([2, 8]))
    assert [label.partition(":")[0] for label in rig.gather.labels("all_gather")] == ["0", "1", "2"]
    assert [buffer.status is Status.READY for buffer in rig.optimizer.buffers] == [False, False, True, False]


def test_gathers_that_no_layer_asked_for_start_at_the_end_of_the_forward() -> None:
    rig = shard_task(make_odd(), comm_fusion=False, reshard_after_step=True)
    TASKS["odd"].run(0, rig.model, rig.optimizer)
    rig.model(odd_batch(1))
    assert len(rig.gather.labels("all_gather")) == len(rig.optimizer.buffers)
    rig.optimizer.step()
    assert _status(rig) == {Status.SHARDED}


def test_evaluation_uses_the_new_values_and_reduces_nothing() -> None:
    plain, job = make_model("mlp"), TASKS["mlp"]
    optimizer = plain_optimizer(plain)
    rig = shard_task(make_model("mlp"), **BOTH)
    job.run(0, plain, optimizer)
    job.run(0, rig.model, rig.optimizer)
    reductions = len(rig.reduce.labels("reduce_scatter"))
    with paddle.no_grad():
        assert float(job.loss(rig.model, 5)) == float(job.loss(plain, 5))
    nn.Linear(2, 2)(paddle.ones([1, 2])).sum().backward()
    assert len(rig.reduce.labels("reduce_scatter")) == reductions


def test_a_failed_gather_comes_out_of_the_forward() -> None:
    rig = shard_task(make_model("mlp"), **BOTH)
    rig.gather.failing.add("all_gather")
    TASKS["mlp"].run(0, rig.model, rig.optimizer)
    with pytest.raises(CommError, match=r"all_gather of .* failed on request"):
        TASKS["mlp"].loss(rig.model, 1)


# -- backwards ---------------------------------------------------------------------------------------------------------


def test_reductions_start_under_the_backward_or_after_it() -> None:
    for overlap in (True, False):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        rig = shard_task(model, "SGD", reduce_overlap=overlap)
        started: list[int] = []
        x = paddle.ones([2, 8])
        x.stop_gradient = False
        first = model[0](x)

        def hook(gradient: paddle.Tensor, rig: Rig = rig, started: list[int] = started) -> None:
            started.append(len(rig.reduce.labels("reduce_scatter")))

        first.register_hook(hook)
        model[3](model[2](model[1](first))).sum().backward()
        n_buckets = len(rig.optimizer.buffers)
        assert started == ([n_buckets - n_buckets // 4] if overlap else [0])
        assert len(rig.reduce.labels("reduce_scatter")) == n_buckets


def test_after_a_step_no_reduction_is_under_way() -> None:
    """That of an unused layer included, which stands last once the order is learned, and which nobody updates."""
    layers = nn.LayerList([nn.Linear(4, 4, bias_attr=False) for _ in range(2)])
    rig = shard_task(layers, "SGD", **BOTH)
    for step in range(2):
        layers[0](paddle.ones([1, 4])).sum().backward()
        order = [label[0] for label in rig.reduce.labels("reduce_scatter")]
        assert order[2 * step :] == (["1", "0"] if step == 0 else ["0", "1"])
        rig.optimizer.step()
        assert rig.reduce.n_pending == 0


def test_tied_parameters_stand_last_from_the_beginning() -> None:
    rig = shard_task(_tied(), "SGD", comm_fusion=False)
    order = [rig.optimizer.buffers[bucket].name for bucket in rig.optimizer._reducer.order]
    assert order == ["4:last.bias", "3:middle.bias", "1:first.bias", "0:first.weight", "2:middle.weight"]


def _tied() -> nn.Layer:
    model = nn.Layer()
    model.first, model.middle, model.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    model.last.weight = model.middle.weight
    return model


def test_nothing_is_launched_early_that_may_get_another_gradient() -> None:
    rig = shard_task(make_odd(), comm_fusion=False, **BOTH)
    early: list[str] = []
    original = rig.optimizer._reducer.end_backward

    def end_backward() -> None:
        early.extend(label.partition(":")[2].partition(",")[0] for label in rig.reduce.labels("reduce_scatter"))
        original()

    rig.optimizer._reducer.end_backward = end_backward  # type: ignore[method-assign]
    for step in range(3):
        early.clear()
        before = len(rig.reduce.labels("reduce_scatter"))
        TASKS["odd"].run(step, rig.model, rig.optimizer)
        del early[:before]
    assert {"last.weight", "first.weight", "towers.left.bias"} <= set(early)
    assert not [name for name in early if name.startswith(("twice", "borrowed"))]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_run_again_by_recompute_holds_nothing_up(reentrant: bool) -> None:
    """It enters each unit a second time, but a parameter still gets one gradient."""
    layers = nn.LayerList([nn.Linear(8, 8, bias_attr=False) for _ in range(4)])
    rig = shard_task(layers, "SGD", reduce_overlap=True)
    early: list[int] = []
    original = rig.optimizer._reducer.end_backward

    def end_backward() -> None:
        early.append(len(rig.reduce.labels("reduce_scatter")))
        original()

    rig.optimizer._reducer.end_backward = end_backward  # type: ignore[method-assign]
    for step in range(2):
        x = paddle.ones([2, 8])
        x.stop_gradient = False
        for layer in layers:
            x = recompute(layer, x, use_reentrant=reentrant)
        x.sum().backward()
        assert early[-1] == 4 * (step + 1)


class _Skips(nn.Linear):
    """Its forward may take a branch without parameters."""

    def forward(self, x: paddle.Tensor, skip: bool = False) -> paddle.Tensor:
        return x * 2 if skip else super().forward(x)


def test_a_branch_without_parameters_takes_part_in_the_round() -> None:
    """Another rank may have taken the other branch."""
    model = _Skips(3, 3)
    rig = shard_task(model, "SGD", **BOTH)
    x = paddle.ones([1, 3])
    x.stop_gradient = False
    model(x, skip=True).sum().backward()
    assert len(rig.reduce.labels("reduce_scatter")) == len(rig.optimizer.buffers) == 2
    before = values(model.parameters())
    rig.optimizer.step()
    assert all(map(np.array_equal, values(model.parameters()), before))


def test_a_foreign_backward_starts_no_collective() -> None:
    """It may be this rank's alone."""
    rig = shard_task(make_model("mlp"), allgather_overlap=True, reshard_after_step=True)
    TASKS["mlp"].run(0, rig.model, rig.optimizer)
    before = len(rig.log)
    nn.Linear(2, 2)(paddle.ones([1, 2])).sum().backward()
    assert len(rig.log) == before


def test_two_models_train_side_by_side() -> None:
    """As a GAN does: each loss goes through both models, and only one of them is updated."""

    def train(shard: bool) -> list[np.ndarray[Any, Any]]:
        paddle.seed(3)
        models = [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2)]
        if shard:
            optimizers: list[Any] = [shard_task(model, "SGD", **BOTH).optimizer for model in models]
        else:
            optimizers = [plain_optimizer(model, "SGD") for model in models]
        for step in range(4):
            x = paddle.to_tensor(np.random.default_rng(step).standard_normal([3, 4], dtype=np.float32))
            models[1](models[0](x)).square().mean().backward()
            optimizers[step % 2].step()
            for optimizer in optimizers:
                optimizer.clear_grad()
        return [value for model in models for value in final_values(model)]

    for found, expected in zip(train(True), train(False), strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("pattern", ["two forwards, two backwards", "retained graph", "one loss of two forwards"])
def test_other_orders_of_forward_and_backward(pattern: str, stage: int) -> None:
    def train(model: nn.Layer, optimizer: Any) -> None:
        for step in range(0, 6, 2):
            losses = [TASKS["gpt"].loss(model, step)]
            if pattern == "retained graph":
                losses[0].backward(retain_graph=True)
                losses[0].backward()
            elif pattern == "one loss of two forwards":
                (losses[0] + TASKS["gpt"].loss(model, step + 1)).backward()
            else:
                losses.append(TASKS["gpt"].loss(model, step + 1))
                losses[1].backward()
                losses[0].backward()
            optimizer.step()
            optimizer.clear_grad()

    plain, rig = make_model("gpt"), shard_task(make_model("gpt"), "SGD", stage=stage, **BOTH)
    train(plain, plain_optimizer(plain, "SGD"))
    train(rig.model, rig.optimizer)
    assert_same(rig.model, plain)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("wanted", ["parameters", "inputs"])
def test_gradients_of_gradients(wanted: str, stage: int) -> None:
    def train(model: nn.Layer, optimizer: Any) -> None:
        for step in range(3):
            x = paddle.to_tensor(np.random.default_rng(step).standard_normal([3, 4], dtype=np.float32))
            x.stop_gradient = False
            loss = model(x).sum()
            gradients = paddle.grad(loss, model.parameters() if wanted == "parameters" else [x], create_graph=True)
            (loss + sum(gradient.square().sum() for gradient in gradients)).backward()
            optimizer.step()
            optimizer.clear_grad()

    def make() -> nn.Layer:
        paddle.seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    plain, rig = make(), shard_task(make(), "SGD", stage=stage, **BOTH)
    train(plain, plain_optimizer(plain, "SGD"))
    train(rig.model, rig.optimizer)
    assert_same(rig.model, plain)


def test_freezing_and_thawing_between_steps() -> None:
    plain, rig = make_model("mlp"), shard_task(make_model("mlp"), **BOTH)
    optimizer = plain_optimizer(plain)
    for step in range(6):
        for model in (plain, rig.model):
            for param in model.layers[1].parameters():
                param.stop_gradient = step in (2, 3)
        for model, inner in ((plain, optimizer), (rig.model, rig.optimizer)):
            loss = TASKS["mlp"].loss(model, step)
            loss.backward()
            inner.step()
            inner.clear_grad(set_to_zero=False)
    assert_same(rig.model, plain)


def test_what_was_frozen_when_wrapped_may_train_later() -> None:
    plain, sharded = make_model("mlp"), make_model("mlp")
    for model in (plain, sharded):
        for param in model.layers[1].parameters():
            param.stop_gradient = True
    rig, optimizer = shard_task(sharded, **BOTH), plain_optimizer(plain)
    for step in range(4):
        if step == 2:
            for model in (plain, sharded):
                for param in model.layers[1].parameters():
                    param.stop_gradient = False
        TASKS["mlp"].run(step, plain, optimizer)
        TASKS["mlp"].run(step, rig.model, rig.optimizer)
    assert_same(rig.model, plain)
