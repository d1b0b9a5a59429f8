"""Real models over lanes that deliver only when waited for: every step must equal plain Paddle's, bit for bit."""

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
from paddle.nn import functional as F

from hp_sharding import backward, full_parameters
from hp_sharding.buffer import FusedCommBuffer, Status
from hp_sharding.errors import CommError, LayoutError, StateError
from hp_sharding.reduction import Reducer
from hp_sharding.schedule import schedule_of
from tests.fakes import Rig, values, wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer

SMALL_MB = 0.0005
"""A bucket size below that of most parameters: many buckets."""

SETTINGS: dict[str, dict[str, Any]] = {
    "no overlap": {},
    "gather": {"allgather_overlap": True},
    "reduce": {"reduce_overlap": True},
    "both": {"allgather_overlap": True, "reduce_overlap": True},
    "both, one bucket": {"allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": 25},
    "both, no fusion": {"allgather_overlap": True, "reduce_overlap": True, "comm_fusion": False},
    "reshard": {"reduce_overlap": True, "reshard_after_step": True},
    "reshard, ahead": {"allgather_overlap": True, "reshard_after_step": True, "prefetch_depth": 2},
}
BOTH = SETTINGS["both"]


class Odd(nn.Layer):
    """What a schedule can get wrong: everything used otherwise than held.

    A layer called twice, layers called out of order, a weight used by the model itself, transposed, sliced, through
    einsum and weight_norm; a ParameterList, a LayerDict; frozen, unused, 0-d and empty parameters; a branch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.towers = nn.LayerDict({"left": nn.Linear(6, 6), "right": nn.Linear(6, 6)})
        self.twice = nn.Linear(6, 6)
        self.first = nn.Linear(5, 6)
        self.borrowed = nn.Linear(6, 6)
        self.normed = nn.utils.weight_norm(nn.Linear(6, 6))
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(6, 6)
        for param in self.frozen.parameters():
            param.stop_gradient = True
        self.vectors = nn.ParameterList([self.create_parameter([6]) for _ in range(2)])
        self.scale = self.create_parameter([], default_initializer=nn.initializer.Constant(1.5))
        self.empty = self.create_parameter([0, 3])

    def forward(self, x: paddle.Tensor, branch: str = "left") -> paddle.Tensor:
        x = self.twice(F.gelu(self.first(x)))
        x = self.towers[branch](x) + self.vectors[1]
        x = x @ self.borrowed.weight.T + self.borrowed.bias
        x = paddle.einsum("bi,oi->bo", x, self.borrowed.weight) * self.vectors[0]
        x = x[:, :4] @ self.borrowed.weight[:4] + self.frozen(x)
        x = self.normed(self.twice(x)).unsqueeze(0) * self.borrowed.bias.unsqueeze(0)
        return self.last(x.squeeze(0)) * self.scale


def _odd_batch(step: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(step).standard_normal([4, 5], dtype=np.float32))


class _Task:
    """A model to be trained: how it is made and what its loss in a step is."""

    def __init__(self, make: Callable[[], nn.Layer], loss: Callable[[nn.Layer, int], paddle.Tensor]) -> None:
        self.make, self.loss = make, loss

    def run(self, step: int, model: nn.Layer, optimizer: Any) -> float:
        loss = self.loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return float(loss)


def _make_odd() -> nn.Layer:
    paddle.seed(7)
    return Odd()


def _named(name: str) -> _Task:
    return _Task(lambda: make_model(name), lambda model, step: loss_of(model, make_batch(name, step, 0)))


TASKS = {
    **{name: _named(name) for name in ("mlp", "gpt", "gpt_recompute", "gpt_recompute_reentrant", "conv")},
    "odd": _Task(_make_odd, lambda model, step: model(_odd_batch(step)).square().mean()),
    "odd, branches": _Task(
        _make_odd, lambda model, step: model(_odd_batch(step), "left" if step % 3 else "right").square().mean()
    ),
}


def _shard(model: nn.Layer, optimizer: str = "AdamW", **settings: Any) -> Rig:
    trained = [param for param in model.parameters() if param.size]
    inner = make_optimizer(optimizer, model, parameters=trained)
    return wrap(model, inner, **{"comm_buffer_size_MB": SMALL_MB, **settings})


def _plain(model: nn.Layer, optimizer: str = "AdamW") -> Any:
    return make_optimizer(optimizer, model, parameters=[param for param in model.parameters() if param.size])


def _final(model: nn.Layer) -> list[np.ndarray[Any, Any]]:
    with full_parameters(model):
        return values([param for param in model.parameters() if param.size])


def _assert_same(model: nn.Layer, plain: nn.Layer) -> None:
    names = [name for name, param in plain.named_parameters() if param.size]
    for name, found, expected in zip(names, _final(model), _final(plain), strict=True):
        np.testing.assert_array_equal(found, expected, err_msg=name, strict=True)


# -- parity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("settings", list(SETTINGS))
@pytest.mark.parametrize("task", list(TASKS))
def test_training_equals_plain_paddle(task: str, settings: str, stage: int) -> None:
    plain, job = TASKS[task].make(), TASKS[task]
    optimizer = _plain(plain)
    rig = _shard(job.make(), stage=stage, **SETTINGS[settings])
    for step in range(4):
        assert job.run(step, rig.model, rig.optimizer) == job.run(step, plain, optimizer), f"step {step}"
    _assert_same(rig.model, plain)
    assert all(pending <= len(rig.optimizer.buffers) for pending in (rig.gather.n_pending, rig.reduce.n_pending))


@pytest.mark.parametrize("optimizer", ["SGD", "Momentum"])
def test_other_optimizers_too(optimizer: str) -> None:
    plain, job = make_model("gpt"), TASKS["gpt"]
    inner = _plain(plain, optimizer)
    rig = _shard(make_model("gpt"), optimizer, **BOTH)
    for step in range(3):
        assert job.run(step, rig.model, rig.optimizer) == job.run(step, plain, inner)
    _assert_same(rig.model, plain)


# -- the tests above can fail ------------------------------------------------------------------------------------------


def _differs(**settings: Any) -> bool:
    """Whether training shows that something is wrong: other numbers, or an exception."""
    plain, job = make_model("gpt"), TASKS["gpt"]
    optimizer = _plain(plain)
    rig = _shard(make_model("gpt"), **settings)
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
    rig = _shard(make_model("mlp"))
    job.run(0, rig.model, rig.optimizer)
    assert _status(rig) == {Status.READY}
    assert rig.gather.n_pending == 0
    rig = _shard(make_model("mlp"), allgather_overlap=True)
    job.run(0, rig.model, rig.optimizer)
    assert _status(rig) == {Status.SYNCING}
    assert rig.gather.n_pending == len(rig.optimizer.buffers) > 3


def test_each_layer_waits_for_its_own_gather_only() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    rig = _shard(model, "SGD", allgather_overlap=True)
    model(paddle.ones([2, 8])).sum().backward()
    rig.optimizer.step()
    left = []
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: left.append(rig.gather.n_pending))
    per_layer = len(rig.optimizer.buffers) // 4
    model(paddle.ones([2, 8]))
    assert left == [3 * per_layer, 2 * per_layer, per_layer, 0]


def test_gathers_follow_the_order_of_first_use_from_the_second_step_on() -> None:
    job = TASKS["odd"]
    rig = _shard(_make_odd(), comm_fusion=False, **BOTH)
    orders = []
    for step in range(3):
        before = len(rig.log)
        job.run(step, rig.model, rig.optimizer)
        gathers = [event.label for event in rig.log[before:] if event[:1] + event[2:3] == ("start", "all_gather")]
        orders.append([label.partition(":")[2] for label in gathers])
    assert orders[0][:2] == ["last.weight", "last.bias"] or "scale" in orders[0][0]
    used = [name for name in orders[1] if not name.startswith("scale") and not name.startswith("vectors")]
    assert used[:4] == ["first.weight", "first.bias", "twice.weight", "twice.bias"]
    assert used[4:8] == ["towers.left.weight", "towers.left.bias", "borrowed.weight", "borrowed.bias"]
    assert orders[2] == orders[1]
    assert rig.optimizer._schedule.learned_gather_order is None


def test_unused_and_frozen_parameters_are_never_gathered_again() -> None:
    job = TASKS["odd"]
    rig = _shard(_make_odd(), comm_fusion=False, **BOTH)
    for step in range(3):
        job.run(step, rig.model, rig.optimizer)
    gathered = {label.partition(":")[2] for label in rig.gather.labels("all_gather")}
    assert not [name for name in gathered if name.startswith(("unused", "frozen", "towers.right"))]
    assert "last.weight" in gathered


@pytest.mark.parametrize(("depth", "ahead"), [(0, 0), (1, 1), (2, 2), (None, 1)])
def test_with_reshard_only_so_many_gathers_run_ahead(depth: int | None, ahead: int) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8, bias_attr=False) for _ in range(5)])
    rig = _shard(model, "SGD", allgather_overlap=True, reshard_after_step=True, prefetch_depth=depth)
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
    rig = _shard(model, "SGD", reshard_after_step=True)
    model[0](paddle.ones([2, 8])).sum().backward()
    rig.optimizer.step()
    model[2](paddle.ones([2, 8]))
    assert [label.partition(":")[0] for label in rig.gather.labels("all_gather")] == ["0", "1", "2"]
    assert [buffer.status is Status.READY for buffer in rig.optimizer.buffers] == [False, False, True, False]


def test_gathers_that_no_layer_asked_for_start_at_the_end_of_the_forward() -> None:
    rig = _shard(_make_odd(), comm_fusion=False, reshard_after_step=True)
    TASKS["odd"].run(0, rig.model, rig.optimizer)
    rig.model(_odd_batch(1))
    assert len(rig.gather.labels("all_gather")) == len(rig.optimizer.buffers)


def test_evaluation_uses_the_new_values_and_reduces_nothing() -> None:
    plain, job = make_model("mlp"), TASKS["mlp"]
    optimizer = _plain(plain)
    rig = _shard(make_model("mlp"), **BOTH)
    job.run(0, plain, optimizer)
    job.run(0, rig.model, rig.optimizer)
    reductions = len(rig.reduce.labels("reduce_scatter"))
    with paddle.no_grad():
        assert float(job.loss(rig.model, 5)) == float(job.loss(plain, 5))
    nn.Linear(2, 2)(paddle.ones([1, 2])).sum().backward()
    assert len(rig.reduce.labels("reduce_scatter")) == reductions


def test_a_failed_gather_comes_out_of_the_forward() -> None:
    rig = _shard(make_model("mlp"), **BOTH)
    rig.gather.failing.add("all_gather")
    TASKS["mlp"].run(0, rig.model, rig.optimizer)
    with pytest.raises(CommError, match="all_gather of '0:gain' failed on request"):
        TASKS["mlp"].loss(rig.model, 1)


# -- backwards ---------------------------------------------------------------------------------------------------------


def test_reductions_start_under_the_backward_or_after_it() -> None:
    for overlap in (True, False):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        rig = _shard(model, "SGD", reduce_overlap=overlap)
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


def test_nothing_is_launched_early_that_may_get_another_gradient() -> None:
    rig = _shard(_make_odd(), comm_fusion=False, **BOTH)
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


def test_a_foreign_backward_starts_no_collective() -> None:
    """It may be this rank's alone."""
    rig = _shard(make_model("mlp"), allgather_overlap=True, reshard_after_step=True)
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
            optimizers: list[Any] = [_shard(model, "SGD", **BOTH).optimizer for model in models]
        else:
            optimizers = [_plain(model, "SGD") for model in models]
        for step in range(4):
            x = paddle.to_tensor(np.random.default_rng(step).standard_normal([3, 4], dtype=np.float32))
            models[1](models[0](x)).square().mean().backward()
            optimizers[step % 2].step()
            for optimizer in optimizers:
                optimizer.clear_grad()
        return [value for model in models for value in _final(model)]

    for found, expected in zip(train(True), train(False), strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "pattern", ["two forwards, two backwards", "retained graph", "one loss of two forwards", "gradients of gradients"]
)
def test_other_orders_of_forward_and_backward(pattern: str, stage: int) -> None:
    def train(model: nn.Layer, optimizer: Any) -> None:
        for step in range(0, 6, 2):
            losses = [TASKS["gpt"].loss(model, step)]
            if pattern == "retained graph":
                losses[0].backward(retain_graph=True)
                losses[0].backward()
            elif pattern == "one loss of two forwards":
                (losses[0] + TASKS["gpt"].loss(model, step + 1)).backward()
            elif pattern == "gradients of gradients":
                gradients = paddle.grad(losses[0], [model.positions, model.norm.weight], create_graph=True)
                (losses[0] + sum(gradient.square().sum() for gradient in gradients)).backward()
            else:
                losses.append(TASKS["gpt"].loss(model, step + 1))
                losses[1].backward()
                losses[0].backward()
            optimizer.step()
            optimizer.clear_grad()

    plain, rig = make_model("gpt"), _shard(make_model("gpt"), "SGD", stage=stage, **BOTH)
    train(plain, _plain(plain, "SGD"))
    train(rig.model, rig.optimizer)
    _assert_same(rig.model, plain)


def test_freezing_and_thawing_between_steps() -> None:
    plain, rig = make_model("mlp"), _shard(make_model("mlp"), **BOTH)
    optimizer = _plain(plain)
    for step in range(6):
        for model in (plain, rig.model):
            for param in model.layers[1].parameters():
                param.stop_gradient = step in (2, 3)
        for model, inner in ((plain, optimizer), (rig.model, rig.optimizer)):
            loss = TASKS["mlp"].loss(model, step)
            loss.backward()
            inner.step()
            inner.clear_grad(set_to_zero=False)
    _assert_same(rig.model, plain)


def test_what_was_frozen_when_wrapped_may_train_later() -> None:
    plain, sharded = make_model("mlp"), make_model("mlp")
    for model in (plain, sharded):
        for param in model.layers[1].parameters():
            param.stop_gradient = True
    rig, optimizer = _shard(sharded, **BOTH), _plain(plain)
    for step in range(4):
        if step == 2:
            for model in (plain, sharded):
                for param in model.layers[1].parameters():
                    param.stop_gradient = False
        TASKS["mlp"].run(step, plain, optimizer)
        TASKS["mlp"].run(step, rig.model, rig.optimizer)
    _assert_same(rig.model, plain)


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

    handle = model.layers[1].register_forward_post_hook(lambda layer, x, y: (middle.append(y), None)[1])
    loss = TASKS["mlp"].loss(model, step)
    handle.remove()
    middle[0].register_hook(fail)
    loss.backward()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("settings", ["no overlap", "both", "reshard, ahead"])
@pytest.mark.parametrize("fails", [_raise_in_forward, _raise_in_backward])
def test_after_an_exception_training_goes_on(
    fails: Callable[[nn.Layer, int], None], settings: str, stage: int
) -> None:
    plain, job = make_model("mlp"), TASKS["mlp"]
    optimizer = _plain(plain)
    rig = _shard(make_model("mlp"), stage=stage, **SETTINGS[settings])
    for step in range(5):
        if step == 2:
            with pytest.raises(_Stop):
                fails(rig.model, step)
            rig.optimizer.clear_grad()
            continue
        assert job.run(step, rig.model, rig.optimizer) == job.run(step, plain, optimizer)
    _assert_same(rig.model, plain)


def test_an_exception_of_ours_in_a_hook_comes_out_as_itself() -> None:
    rig = _shard(make_model("mlp"), **BOTH)

    def fail(*_: Any) -> None:
        raise _Stop("in the reducer")

    rig.optimizer._reducer.take_gradient = fail  # type: ignore[method-assign]
    with pytest.raises(_Stop, match="in the reducer"):
        TASKS["mlp"].loss(rig.model, 0).backward()


def test_a_step_after_a_failed_backward_is_refused() -> None:
    rig = _shard(make_model("mlp"), **BOTH)
    with pytest.raises(_Stop):
        _raise_in_backward(rig.model, 0)
    rig.optimizer._reducer.finish_round()  # what another rank, on which it went well, has done
    with pytest.raises(StateError, match="Call optimizer.clear_grad"):
        rig.optimizer.step()


def test_a_backward_that_nobody_announces_is_an_error() -> None:
    rig = _shard(make_model("mlp"), **BOTH)
    wrapped = core.eager.run_backward
    core.eager.run_backward = backward._original
    try:
        with pytest.raises((StateError, OSError, SystemError)) as caught:
            TASKS["mlp"].loss(rig.model, 0).backward()
        assert "nobody announced its backward" in str(caught.value) or caught.type is not StateError
    finally:
        core.eager.run_backward = wrapped


def test_a_model_that_was_cast_is_refused_by_step() -> None:
    rig = _shard(make_model("mlp"), **BOTH)
    rig.model.layers[0].to(dtype="float64")
    with pytest.raises(LayoutError, match=r"Layer.to\(\.\.\.\) before"):
        rig.optimizer.step()


# -- life and death ----------------------------------------------------------------------------------------------------


def _hooks(model: nn.Layer) -> int:
    return sum(
        len(layer._forward_pre_hooks) + len(layer._forward_post_hooks) for layer in model.sublayers(include_self=True)
    )


def test_hooks_and_memory_stay_the_same_over_many_steps() -> None:
    rig = _shard(make_model("mlp"), **{**SETTINGS["reshard, ahead"], "reduce_overlap": True})
    seen: list[Sequence[int]] = []
    for step in range(30):
        TASKS["mlp"].run(step, rig.model, rig.optimizer)
        rig.log.clear()
        if step >= 10:
            gc.collect()
            live = core.host_memory_stat_current_value("Allocated", 0)
            seen.append((_hooks(rig.model), rig.pool.allocated_bytes, live))
    assert len(set(seen)) == 1


def test_a_model_and_its_optimizer_can_be_forgotten() -> None:
    rig = _shard(make_model("mlp"), **BOTH)
    TASKS["mlp"].run(0, rig.model, rig.optimizer)
    model, schedule = weakref.ref(rig.model), weakref.ref(rig.optimizer._schedule)
    buffer = weakref.ref(rig.optimizer.buffers[0])
    del rig
    gc.collect()
    assert (model(), schedule(), buffer()) == (None, None, None)
    assert core.eager.run_backward is not backward._run_backward


def test_a_model_outlives_its_optimizer_with_the_newest_values() -> None:
    plain, rig = make_model("mlp"), _shard(make_model("mlp"), **BOTH)
    TASKS["mlp"].run(0, plain, _plain(plain))
    TASKS["mlp"].run(0, rig.model, rig.optimizer)
    model = rig.model
    del rig
    gc.collect()
    _assert_same(model, plain)


def test_a_deep_copy_is_a_plain_model() -> None:
    plain, rig = make_model("mlp"), _shard(make_model("mlp"), **BOTH)
    TASKS["mlp"].run(0, plain, _plain(plain))
    TASKS["mlp"].run(0, rig.model, rig.optimizer)
    other = copy.deepcopy(rig.model)
    assert schedule_of(other) is None
    assert schedule_of(rig.model) is rig.optimizer._schedule
    _assert_same(other, plain)
    before = len(rig.log)
    TASKS["mlp"].run(1, other, _plain(other))
    assert len(rig.log) == before
    _assert_same(rig.model, plain)


def test_state_dict_keeps_its_keys() -> None:
    rig = _shard(_make_odd(), **BOTH)
    assert list(rig.model.state_dict()) == list(_make_odd().state_dict())
