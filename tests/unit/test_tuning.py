"""``"auto"`` in one process: what is tried when, what is in force afterwards, and that no number changes by it."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_sharding import ConfigError, ShardingConfig, StateError, full_parameters, relayout, shard
from hp_sharding.buffer import Status
from hp_sharding.plain import PlainOptimizer
from hp_sharding.tuning import tuner
from hp_sharding.tuning.tuner import COUNTED_STEPS, FIRST_STEPS, SKIPPED_STEPS, Tuner
from tests.fakes import Rig, WaitingLane
from tests.models import make_model, make_optimizer
from tests.tasks import BOTH, SMALL_MB, TASKS, assert_same, final_values, plain_optimizer, shard_task

FACTORS = tuple(2.0**power for power in range(-4, 6))
AUTO = {"comm_buffer_size_MB": "auto", **BOTH}
NO_OVERLAP = {"allgather_overlap": False}
Cost = Callable[[ShardingConfig], float]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that make a difference to small models."""
    monkeypatch.setattr(tuner, "START_MB", 4 * SMALL_MB)
    monkeypatch.setattr(tuner, "FACTORS", FACTORS)
    monkeypatch.setattr("hp_sharding.config.START_MB", 4 * SMALL_MB)


class _Clock:
    """Steps take what a function of the settings says, whatever they really take.

    Attributes:
        asked: the settings in force whenever steps were compared.
        busy: that many times some other rank can change nothing.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost_ms: Cost) -> None:
        self.asked: list[ShardingConfig] = []
        self.busy = 0
        self.decides = True
        self.rig: Rig | None = None
        self._cost_ms = cost_ms
        monkeypatch.setattr(tuner, "largest", self._largest)

    def _largest(self, numbers: list[float], lanes: Any, *, label: str) -> list[float]:
        assert self.rig is not None
        assert len(numbers) == 1 + 2 * COUNTED_STEPS
        if not self.decides:
            return numbers
        if self.busy:
            self.busy -= 1
            return [1.0, *numbers[1:]]
        config = self.rig.optimizer.config
        self.asked.append(config)
        return [numbers[0]] + [self._cost_ms(config)] * COUNTED_STEPS + [0.2 * self._cost_ms(config)] * COUNTED_STEPS


def _train(rig: Rig, clock: _Clock, task: str = "mlp", plain: Any = None, optimizer: Any = None) -> int:
    """Until all has been chosen, beside plain Paddle if there is one. Returns the steps made."""
    clock.rig = rig
    step = 0
    while not rig.optimizer.tuning.is_over:  # type: ignore[union-attr]
        loss = TASKS[task].run(step, rig.model, rig.optimizer)
        if plain is not None:
            assert TASKS[task].run(step, plain, optimizer) == loss
        step += 1
        assert step < 200
    return step


def _nearest(size_mb: float) -> Cost:
    """Steps get longer by a quarter with each factor of two away from that size."""
    return lambda config: 100 * 1.25 ** abs(math.log2(float(config.comm_buffer_size_MB) / size_mb))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.25, 1, 4])
def test_the_best_size_is_in_force_and_nothing_else_has_changed(
    monkeypatch: pytest.MonkeyPatch, stage: int, factor: float
) -> None:
    wanted_mb = 4 * SMALL_MB * factor
    task = TASKS["odd, branches"]
    plain = task.make()
    optimizer = plain_optimizer(plain)
    model = task.make()
    rig = shard_task(model, **AUTO, stage=stage, tuning_budget_MB=1000)
    clock = _Clock(monkeypatch, _nearest(wanted_mb))
    steps = _train(rig, clock, "odd, branches", plain, optimizer)
    config = rig.optimizer.config
    values = [float(config.comm_buffer_size_MB) for config in clock.asked]
    assert abs(_size_mb(rig) / wanted_mb - 1) < 1e-6 or wanted_mb not in values, "not found, though tried"
    assert config.comm_buffer_size_MB == min(values, key=lambda size_mb: _nearest(wanted_mb)(_with(size_mb)))
    assert steps == FIRST_STEPS + COUNTED_STEPS + (len(values) - 1) * (SKIPPED_STEPS + COUNTED_STEPS)
    for step in range(steps, steps + 3):
        assert task.run(step, model, rig.optimizer) == task.run(step, plain, optimizer)
    assert_same(model, plain)
    assert rig.optimizer.tuning.asked.comm_buffer_size_MB == "auto"  # type: ignore[union-attr]
    assert rig.gather.n_pending <= len(rig.optimizer.buffers)


def _size_mb(rig: Rig) -> float:
    return float(rig.optimizer.config.comm_buffer_size_MB)


def _changed(rig: Rig, size_mb: float) -> ShardingConfig:
    return dataclasses.replace(rig.optimizer.config, comm_buffer_size_MB=size_mb)


def _with(size_mb: float) -> ShardingConfig:
    return ShardingConfig(comm_buffer_size_MB=size_mb)


def test_each_bucket_is_reduced_once_and_gathered_once_in_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks and guards of earlier buckets are not there any more."""
    rig = shard_task(TASKS["gpt"].make(), **AUTO)
    clock = _Clock(monkeypatch, _nearest(SMALL_MB))
    clock.rig = rig
    layouts = set()
    for step in range(40):
        rig.log.clear()
        before = [buffer.name for buffer in rig.optimizer.buffers]
        layouts.add(tuple(before))
        loss = TASKS["gpt"].loss(rig.model, step)
        loss.backward()
        rig.optimizer.step()
        reduced = rig.reduce.labels("reduce_scatter")
        assert sorted(label.partition(", backward")[0] for label in reduced) == sorted(before)
        assert sorted(rig.gather.labels("all_gather")) == sorted(before)
        rig.optimizer.clear_grad()
    assert len(layouts) > 2


def test_the_depth_is_chosen_too_and_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**AUTO, "stage": 3, "prefetch_depth": "auto"}

    def cost_ms(config: ShardingConfig) -> float:
        return 100.0 - 10 * (config.units_ahead or 0)

    chosen = {}
    for budget_mb in (1e-6, 1000):
        rig = shard_task(TASKS["gpt"].make(), **settings, tuning_budget_MB=budget_mb)
        _train(rig, _Clock(monkeypatch, cost_ms), "gpt")
        chosen[budget_mb] = rig.optimizer.config.prefetch_depth
        assert rig.optimizer._schedule.gathers.ahead == chosen[budget_mb]
        tried = {choice.value for choice in rig.optimizer.tuning.measured if choice.key == "prefetch_depth"}  # type: ignore[union-attr]
        assert max(tried) == chosen[budget_mb]
    assert chosen == {1e-6: 1, 1000: 3}


def test_without_effect_the_depth_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = shard_task(TASKS["mlp"].make(), stage=3, prefetch_depth="auto")
    with caplog.at_level(logging.DEBUG, logger="hp_sharding"):
        steps = _train(rig, _Clock(monkeypatch, lambda config: 100.0))
    assert steps == FIRST_STEPS + COUNTED_STEPS
    assert rig.optimizer.config.prefetch_depth is None
    assert "nothing is gathered ahead" in caplog.text


def test_the_budget_bounds_every_size_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    budget_mb = 0.01
    rig = shard_task(TASKS["gpt"].make(), **AUTO, tuning_budget_MB=budget_mb)
    largest = []
    clock = _Clock(monkeypatch, lambda config: 100 / float(config.comm_buffer_size_MB) ** 0.1)  # the larger, the better
    clock.rig = rig
    while not rig.optimizer.tuning.is_over:  # type: ignore[union-attr]
        largest.append(rig.optimizer.memory_report()["gradients_bytes"])
        TASKS["gpt"].run(0, rig.model, rig.optimizer)
    assert max(largest) <= budget_mb * 2**20
    assert float(rig.optimizer.config.comm_buffer_size_MB) < 4 * SMALL_MB * FACTORS[-1]
    unbounded = shard_task(TASKS["gpt"].make(), **AUTO, tuning_budget_MB=1000)
    clock.rig = unbounded
    _train(unbounded, clock, "gpt")
    assert _size_mb(unbounded) > _size_mb(rig)


def test_a_setting_that_takes_more_than_the_budget_later_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered ahead of use, stage 3 holds one unit more than when it was wrapped."""
    settings: dict[str, Any] = {"stage": 3, "reduce_overlap": True, "comm_buffer_size_MB": "auto"}
    first = shard_task(TASKS["gpt"].make(), **settings).optimizer
    (taken_bytes,) = tuner._taken_bytes(first.tuning._foundation, [first.config])  # type: ignore[union-attr]
    rig = shard_task(TASKS["gpt"].make(), **settings, tuning_budget_MB=taken_bytes / 2**20)
    rig.optimizer._set_all_gather_overlap_forward(True, rig.model)
    clock = _Clock(monkeypatch, _nearest(4 * SMALL_MB))
    _train(rig, clock, "gpt")
    assert clock.asked[0].comm_buffer_size_MB == _size_mb(rig) == 4 * SMALL_MB


def test_in_stage_1_the_budget_bounds_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There full gradients stay, whatever is chosen."""
    rig = shard_task(TASKS["gpt"].make(), **AUTO, stage=1, tuning_budget_MB=1e-6)
    assert _size_mb(rig) == 4 * SMALL_MB
    _train(rig, _Clock(monkeypatch, _nearest(8 * SMALL_MB)), "gpt")
    assert _size_mb(rig) == 8 * SMALL_MB
    assert not caplog.records


@pytest.mark.parametrize("settings", [AUTO, {**BOTH, "stage": 3, "prefetch_depth": "auto"}], ids=str)
def test_a_budget_that_nothing_fits_into_is_named(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    rig = shard_task(TASKS["gpt"].make(), **settings, tuning_budget_MB=1e-6)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("tuning_budget_MB=1e-06: nothing")
    assert _size_mb(rig) == (4 * SMALL_MB * FACTORS[0] if settings is AUTO else SMALL_MB)
    assert f"comm_buffer_size_MB={_size_mb(rig):g}" in caplog.text


def test_ranks_that_hold_other_parts_bound_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among tensor-parallel ranks the one that takes most decides."""
    asked = ShardingConfig(**AUTO, stage=2, tuning_budget_MB=0.05)
    rig = shard_task(TASKS["gpt"].make(), **AUTO)
    foundation = rig.optimizer.tuning._foundation  # type: ignore[union-attr]
    alone = tuner._fitting(foundation, asked.begun(), 0.02 * 2**20)
    split = foundation._replace(lanes={**foundation.lanes, "tensor": WaitingLane("tensor", nranks=2)})
    monkeypatch.setattr(tuner, "largest", lambda numbers, ways, *, label: [4 * number for number in numbers])
    beside = tuner._fitting(split, asked.begun(), 0.02 * 2**20)
    assert 1 < len(beside) < len(alone)
    assert tuner._fitting(split, asked.begun(), 0.08 * 2**20)[-1] == alone[-1]
    assert Tuner(rig.optimizer, split, asked)._ranks()["tensor_ranks"] == 2


def test_no_gradient_is_lost_and_no_bucket_changes_while_one_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without ``clear_grad()``, then backwards that add up over steps: tuning waits."""
    task = TASKS["mlp"]
    plain, model = task.make(), task.make()
    optimizer, rig = plain_optimizer(plain, "SGD"), shard_task(model, "SGD", **AUTO)
    clock = _Clock(monkeypatch, _nearest(SMALL_MB))
    clock.rig = rig
    for step in range(60):
        for side, steps in ((plain, optimizer), (model, rig.optimizer)):
            task.loss(side, step).backward()
            steps.step()
            if step % 7 == 6:
                steps.clear_grad()
        assert bool(clock.asked) == (step >= 6)
    assert len({config.comm_buffer_size_MB for config in clock.asked}) > 1
    assert_same(model, plain)


def test_a_forward_that_waits_for_its_backward_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Scripts that clear after the next forward: tuning puts it off, and says so once."""
    task = TASKS["mlp"]
    plain, model = task.make(), task.make()
    optimizer, rig = plain_optimizer(plain, "SGD"), shard_task(model, "SGD", **AUTO)
    clock = _Clock(monkeypatch, _nearest(SMALL_MB))
    clock.rig = rig
    n_buckets = len(rig.optimizer.buffers)
    clock.decides = False
    for step in range(40):
        for side, steps in ((plain, optimizer), (model, rig.optimizer)):
            loss = task.loss(side, step)
            steps.clear_grad()
            loss.backward()
            steps.step()
        assert len(rig.optimizer.buffers) == n_buckets
    assert_same(model, plain)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "right after optimizer.step()" in caplog.text


@pytest.mark.parametrize("asked", [False, True])
def test_scripts_that_clear_where_nobody_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: bool
) -> None:
    """Nothing can change, which is said once, and nothing is recorded for it any more; until they do it right."""
    rig = shard_task(TASKS["mlp"].make(), **AUTO, timeline=asked)
    clock = _Clock(monkeypatch, _nearest(SMALL_MB))
    for step in range(60):
        TASKS["mlp"].loss(rig.model, step).backward()
        rig.optimizer.step()
        rig.model.clear_gradients()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "optimizer.clear_grad() has not been called" in caplog.text
    assert rig.optimizer.timeline.enabled == asked
    rig.optimizer.clear_grad()
    assert rig.optimizer.timeline.enabled
    usual = shard_task(TASKS["mlp"].make(), **AUTO)
    assert _train(rig, clock) == _train(usual, clock)
    assert _size_mb(rig) == _size_mb(usual)
    assert len(caplog.records) == 1


def test_waits_until_every_rank_can(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = shard_task(TASKS["mlp"].make(), **AUTO)
    clock = _Clock(monkeypatch, _nearest(4 * SMALL_MB))
    clock.busy = 5
    usual = shard_task(TASKS["mlp"].make(), **AUTO)
    late = _train(rig, clock)
    assert late == _train(usual, clock) + 5


@pytest.mark.parametrize("asked", [False, True])
def test_steps_are_recorded_while_it_lasts(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    rig = shard_task(TASKS["mlp"].make(), **AUTO, timeline=asked)
    assert rig.optimizer.timeline.enabled
    _train(rig, _Clock(monkeypatch, _nearest(SMALL_MB)))
    assert rig.optimizer.timeline.enabled == asked
    assert (rig.optimizer.timeline.summary()["steps"] > 0) == asked


def test_says_once_what_was_chosen_and_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rig = shard_task(TASKS["mlp"].make(), **AUTO)
    with caplog.at_level(logging.INFO, logger="hp_sharding"):
        _train(rig, _Clock(monkeypatch, _nearest(SMALL_MB)))
    (record,) = caplog.records
    assert record.getMessage().startswith(f"comm_buffer_size_MB={rig.optimizer.config.comm_buffer_size_MB:g} chosen")
    measured = rig.optimizer.tuning.measured  # type: ignore[union-attr]
    assert all(
        f"{choice.value:g}: {choice.step_ms:.1f} ({choice.exposed_ms:.1f})" in caplog.text for choice in measured
    )


def test_one_process_has_nothing_to_tune(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("mlp")
    with caplog.at_level(logging.DEBUG, logger="hp_sharding"):
        optimizer = shard(model, make_optimizer("SGD", model), ShardingConfig(comm_buffer_size_MB="auto"))
    assert isinstance(optimizer, PlainOptimizer)
    assert "nothing to tune" in caplog.text


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, **NO_OVERLAP}], ids=str)
def test_what_was_chosen_is_taken_over_with_what_was_left_alone(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Where nothing is gathered ahead of use there is no depth to choose."""
    both = {**AUTO, "prefetch_depth": "auto", **settings}
    rig, other = shard_task(TASKS["mlp"].make(), **both), shard_task(TASKS["mlp"].make(), **both)
    _train(rig, _Clock(monkeypatch, _nearest(2 * SMALL_MB)))
    kept = rig.optimizer.tuning.kept()  # type: ignore[union-attr]
    assert kept is not None
    assert (kept["prefetch_depth"] is None) == (settings != {"stage": 3})
    other.optimizer.tuning.adopt(kept)  # type: ignore[union-attr]
    assert other.optimizer.tuning.is_over  # type: ignore[union-attr]
    assert other.optimizer.config == rig.optimizer.config
    assert other.optimizer.tuning.kept() == kept  # type: ignore[union-attr]


def test_what_was_chosen_is_not_taken_over_beyond_the_budget(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = shard_task(TASKS["gpt"].make(), **AUTO, tuning_budget_MB=1000)
    _train(rig, _Clock(monkeypatch, _nearest(16 * SMALL_MB)), "gpt")
    kept = rig.optimizer.tuning.kept()  # type: ignore[union-attr]
    assert kept is not None
    other = shard_task(TASKS["gpt"].make(), **AUTO, tuning_budget_MB=0.01)
    begun_mb = _size_mb(other)
    other.optimizer.tuning.adopt(kept)  # type: ignore[union-attr]
    assert not other.optimizer.tuning.is_over  # type: ignore[union-attr]
    assert _size_mb(other) == begun_mb
    assert "tuning_budget_MB=0.01" in caplog.text
    for key in ("stage", "shard_ranks", "replicas", "tensor_ranks"):
        third = shard_task(TASKS["gpt"].make(), **AUTO, tuning_budget_MB=1000)
        third.optimizer.tuning.adopt({**kept, key: 7})  # type: ignore[union-attr]
        assert not third.optimizer.tuning.is_over, key  # type: ignore[union-attr]


def test_buckets_do_not_change_while_whole_parameters_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = shard_task(TASKS["mlp"].make(), **AUTO, stage=3)
    foundation = rig.optimizer.tuning._foundation  # type: ignore[union-attr]
    other = ShardingConfig(stage=3, **BOTH, comm_buffer_size_MB=SMALL_MB)
    TASKS["mlp"].run(0, rig.model, rig.optimizer)
    with full_parameters(rig.model), pytest.raises(StateError, match="right after clear_grad"):
        relayout.relayout(rig.optimizer, foundation, other)
    TASKS["mlp"].loss(rig.model, 1).backward()
    with pytest.raises(StateError, match="right after clear_grad"):
        relayout.relayout(rig.optimizer, foundation, other)
    rig.optimizer.clear_grad()
    with rig.optimizer.no_sync(), pytest.raises(StateError, match="right after clear_grad"):
        relayout.relayout(rig.optimizer, foundation, other)
    relayout.relayout(rig.optimizer, foundation, other)
    away = next(buffer for buffer in rig.optimizer.buffers if buffer.status is Status.SHARDED)
    with pytest.raises(StateError, match="sharded"):
        away.params[0].numpy()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_graph_outlives_its_buckets(stage: int) -> None:
    """A second backward through a graph that was made, and run, over buckets that are no more."""
    losses, found = [], []
    for moves in (False, True):
        model = TASKS["odd"].make()
        rig = shard_task(model, "Momentum", **AUTO, stage=stage)
        rig.optimizer.tuning.is_over = True  # type: ignore[union-attr]
        TASKS["odd"].run(0, model, rig.optimizer)
        loss = TASKS["odd"].loss(model, 1)
        loss.backward(retain_graph=True)
        rig.optimizer.clear_grad()
        if moves:
            foundation = rig.optimizer.tuning._foundation  # type: ignore[union-attr]
            relayout.relayout(rig.optimizer, foundation, _changed(rig, SMALL_MB / 2))
        loss.backward()
        rig.optimizer.step()
        rig.optimizer.clear_grad()
        losses.append(TASKS["odd"].run(2, model, rig.optimizer))
        found.append(final_values(model))
    assert losses[0] == losses[1]
    for still, moved in zip(*found, strict=True):
        np.testing.assert_array_equal(moved, still)


def test_a_change_that_fails_half_way_says_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = shard_task(TASKS["mlp"].make(), **AUTO)
    foundation = rig.optimizer.tuning._foundation  # type: ignore[union-attr]
    TASKS["mlp"].run(0, rig.model, rig.optimizer)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(relayout, "_fill_buckets", fail)
    with pytest.raises(StateError, match=r"MemoryError: no room.*Start again from a checkpoint"):
        relayout.relayout(rig.optimizer, foundation, ShardingConfig(**BOTH, comm_buffer_size_MB=SMALL_MB))


def test_contradictions_come_before_anything_is_wrapped() -> None:
    with pytest.raises(ConfigError, match="comm_fusion"):
        ShardingConfig(comm_buffer_size_MB="auto", comm_fusion=False)
