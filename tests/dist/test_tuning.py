"""``"auto"`` on several ranks: one choice for all, from what the slowest saw, and numbers as with any fixed setting."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base import core
from paddle.utils import unique_name

import hp_sharding
from hp_sharding import CommError, StateError, facts, fleet, full_parameters
from hp_sharding.relayout import relayout
from hp_sharding.tuning import tuner
from tests import harness, reference
from tests.dist import test_tensor_parallel as split
from tests.lanes import wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_all_equal, assert_close, assert_equal, values
from tests.resuming import Run
from tests.sides import BOTH, SMALL_MB

STEPS = 24
AUTO: dict[str, Any] = {**BOTH, "comm_buffer_size_MB": "auto"}


class Found(NamedTuple):
    """What came of a tuned training on one rank."""

    losses: list[float]
    params: Values
    chosen: tuple[Any, ...]
    tried: list[tuple[Any, ...]]
    is_over: bool


@contextlib.contextmanager
def _quickly(**more: Any) -> Iterator[None]:
    """Sizes that make a difference to small models, and few steps for each."""
    few = {"FIRST_STEPS": 1, "SKIPPED_STEPS": 0, "COUNTED_STEPS": 1, "START_MB": 4 * SMALL_MB}
    changed = {**few, "FACTORS": tuple(2.0**power for power in range(-3, 4)), **more}
    with mock.patch.multiple(tuner, **changed), mock.patch("hp_sharding.config.START_MB", changed["START_MB"]):
        yield


def _train(rank: int, nranks: int, name: str, optimizer_name: str, settings: dict[str, Any]) -> Found:
    """On the last rank each bucket costs 4 ms, of which the others know nothing."""

    def largest(numbers: list[float], lanes: Any, *, label: str) -> list[float]:
        step_ms = 100.0 + 4 * len(optimizer.buffers) * (rank == nranks - 1)
        return facts.largest([numbers[0], step_ms, step_ms, 30.0, 30.0], lanes, label=label)

    model = make_model(name)
    with _quickly(COUNTED_STEPS=2), mock.patch.object(tuner, "largest", largest):
        model, optimizer, _ = wrap(model, make_optimizer(optimizer_name, model), nranks, delay_s=0.0, **settings)
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, make_batch(name, step, rank))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
    tuning = optimizer.tuning
    assert isinstance(tuning, tuner.Tuner)
    with full_parameters(model):
        params = values(model)
    config = optimizer.config
    tried = [tuple(choice) for choice in tuning.measured]
    return Found(losses, params, (config.comm_buffer_size_MB, config.prefetch_depth), tried, tuning.is_over)


@pytest.mark.parametrize(
    ("nranks", "name", "optimizer", "settings", "tolerance"),
    [
        (2, "mlp", "AdamW", {"stage": 2}, 0.0),
        (2, "even_mlp", "SGD", {"stage": 3, "prefetch_depth": "auto", "tuning_budget_MB": 100}, 0.0),
        (2, "mlp", "Momentum", {"stage": 1}, 0.0),
        (4, "mlp", "SGD", {"stage": 2}, 2e-6),
        (4, "mlp", "AdamW", {"stage": 2, "n_replicas": 2}, 1e-5),
    ],
)
def test_all_ranks_choose_alike_and_numbers_stay(
    nranks: int, name: str, optimizer: str, settings: dict[str, Any], tolerance: float
) -> None:
    ranks = harness.run(_train, nranks, name, optimizer, {**AUTO, **settings})
    assert_all_equal([found.params for found in ranks])
    for found in ranks:
        assert found.chosen == ranks[0].chosen
        assert found.tried == ranks[0].tried, "the same figures on every rank"
    expected = reference.train(name, optimizer, nranks, STEPS)
    for rank, found in enumerate(ranks):
        plain = [of_ranks[rank] for of_ranks in expected.losses]
        if tolerance:
            np.testing.assert_allclose(found.losses, plain, rtol=tolerance)
            assert_close(found.params, expected.params, tolerance)
        else:
            assert found.losses == plain
            assert_equal(found.params, expected.params)


def test_what_the_slowest_rank_saw_decides() -> None:
    """There a bucket costs something, and so few buckets are chosen, on all."""
    ranks = harness.run(_train, 2, "gpt", "SGD", {**AUTO, "stage": 2, "tuning_budget_MB": 100})
    assert ranks[0].is_over
    sizes = {value: step_ms for _, value, step_ms, _, _ in ranks[0].tried}
    assert ranks[0].chosen[0] == max(sizes), sizes
    assert sizes[min(sizes)] > sizes[max(sizes)] + 20
    assert len(sizes) > 2


# -- split layers, checkpoints, memory -------------------------------------------------------------------------------


def _train_split(rank: int, nranks: int, case: Any, max_norm: float) -> tuple[list[Any], int]:
    changes = mock.Mock(side_effect=relayout)
    with _quickly(START_MB=0.002), mock.patch.object(tuner, "relayout", changes):
        return split._train_split(rank, nranks, case, split._adamw, max_norm), changes.call_count


def test_split_layers() -> None:
    degrees = {"mp_degree": 2, "sharding_degree": 2}
    case = split._Case(degrees, 2, [{"stage": stage, **AUTO} for stage in (2, 3)])
    max_norm = split._norm_of_first_step(2) / 2
    expected, _ = split._train_whole(split._adamw, 2, max_norm)
    results = harness.run(_train_split, 4, case, max_norm)
    assert min(n_changes for _, n_changes in results) >= 2
    for number, settings in enumerate(case.settings):
        for data_rank in range(2):
            found = [result[number][2] for result, _ in results if result[number][0] == data_rank]
            assert_close(split._joined(found), expected, 1e-6, f"{settings}:")


TUNED: dict[str, Any] = {**AUTO, "stage": 2, "tuning_budget_MB": 100}


def _save_tuned(rank: int, nranks: int, folder: str, steps: int) -> tuple[list[float], float, bool]:
    """Saves in the midst of tuning, or when it is over, and goes on."""
    with _quickly():
        run = Run("odd, momentum", rank, nranks, TUNED)
        run.train(range(steps))
        assert isinstance(run.optimizer.tuning, tuner.Tuner)
        is_over, size_mb = run.optimizer.tuning.is_over, float(run.optimizer.config.comm_buffer_size_MB)
        hp_sharding.save(folder, run.model, run.optimizer)
        run.optimizer.set_state_dict(run.optimizer.state_dict())
        return run.train(range(steps, steps + 3)), size_mb, is_over


def _load_tuned(
    rank: int, nranks: int, folder: str, steps: int, settings: dict[str, Any]
) -> tuple[list[float], float, bool]:
    with _quickly():
        run = Run("odd, momentum", rank, nranks, settings, seed=7)
        run.train(range(2))
        run.kind.loss(run.model, 2, rank, nranks).backward()
        run.optimizer.step()  # so that a change is due when the load clears gradients
        hp_sharding.load(folder, run.model, run.optimizer)
        tuning = run.optimizer.tuning
        is_over, size_mb = tuning is not None and tuning.is_over, float(run.optimizer.config.comm_buffer_size_MB)
        return run.train(range(steps, steps + 3)), size_mb, is_over


@pytest.mark.parametrize("steps", [3, 30])
def test_checkpoints_go_both_ways_and_keep_what_was_chosen(tmp_path: Path, steps: int) -> None:
    saved = harness.run(_save_tuned, 2, str(tmp_path / "a"), steps)
    assert saved[0][2] == (steps == 30)
    for settings in (TUNED, {**TUNED, "stage": 3}, {**BOTH, "stage": 1}):
        loaded = harness.run(_load_tuned, 2, str(tmp_path / "a"), steps, settings)
        for (losses, size_mb, is_over), (expected, expected_mb, was_over) in zip(loaded, saved, strict=True):
            assert losses == expected, settings
            adopts = settings is TUNED and was_over
            assert is_over == adopts
            assert (size_mb == expected_mb) or not adopts


WIDTH = 512
MATRIX_MB = WIDTH * WIDTH * 4 / 2**20


def _peak_of_a_change(rank: int, nranks: int, settings: dict[str, Any]) -> list[tuple[float, float, float]]:
    """MB before, at most during, and after each of several changes."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias_attr=False) for _ in range(24)])
    inner = paddle.optimizer.AdamW(parameters=model.parameters())
    settings = {**AUTO, **settings}
    model, optimizer, _ = wrap(model, inner, nranks, delay_s=0.0, poison=False, **settings)
    tuning = optimizer.tuning
    assert isinstance(tuning, tuner.Tuner)
    found = []
    for size_mb in (1.01 * MATRIX_MB, 3.01 * MATRIX_MB, 2.01 * MATRIX_MB, 1.01 * MATRIX_MB):
        model(paddle.ones([2, WIDTH])).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        optimizer._schedule.gathers.finish_under_way()
        optimizer.buffers[0].place.pool.trim()
        before = core.host_memory_stat_current_value("Allocated", 0)
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        relayout(optimizer, tuning._foundation, dataclasses.replace(optimizer.config, comm_buffer_size_MB=size_mb))
        peak = core.host_memory_stat_peak_value("Allocated", 0)
        after = core.host_memory_stat_current_value("Allocated", 0)
        found.append((before / 2**20, peak / 2**20, after / 2**20))
    return found


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2}, {"stage": 3}], ids=str)
def test_a_change_takes_a_few_buckets_more(settings: dict[str, Any]) -> None:
    for found in harness.run(_peak_of_a_change, 2, settings):
        for before, peak, after in found[1:]:
            # What is gathered, what was cut from it, and what a lane's thread has not let go of: of 72 MB in all.
            assert peak - before <= 4 * 3 * MATRIX_MB, found
            assert after - before <= 3 * MATRIX_MB, found


def _keeps_more(rank: int, nranks: int) -> str:
    """On rank 1 the optimizer also keeps the largest second moments."""
    model = make_model("mlp")
    inner = make_optimizer("AdamW", model, amsgrad=rank == 1)
    model, optimizer, _ = wrap(model, inner, nranks, **AUTO)
    tuning = optimizer.tuning
    assert isinstance(tuning, tuner.Tuner)
    for step in range(2):
        loss_of(model, make_batch("mlp", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
        n_buckets = len(optimizer.buffers)
        config = dataclasses.replace(optimizer.config, comm_buffer_size_MB=SMALL_MB)
        with pytest.raises(StateError, match="keeps other things") as error:
            relayout(optimizer, tuning._foundation, config)
        assert len(optimizer.buffers) == n_buckets
    return str(error.value)


def test_optimizers_that_differ_are_left_as_they_are() -> None:
    messages = harness.run(_keeps_more, 2)
    assert [message.partition(":")[0] for message in messages] == ["rank 0", "rank 1"]


def _fails_on_one(rank: int, nranks: int) -> str:
    """Rank 1 is interrupted in the middle of a move."""
    model = make_model("mlp")
    model, optimizer, _ = wrap(model, make_optimizer("AdamW", model), nranks, **AUTO)
    tuning = optimizer.tuning
    assert isinstance(tuning, tuner.Tuner)
    config = dataclasses.replace(optimizer.config, comm_buffer_size_MB=SMALL_MB)
    interrupted = mock.patch("hp_sharding.relayout._fill_buckets", side_effect=KeyboardInterrupt("by hand"))
    if rank:
        with interrupted, pytest.raises(KeyboardInterrupt):
            relayout(optimizer, tuning._foundation, config)
    began_s = time.perf_counter()
    try:
        if not rank:
            relayout(optimizer, tuning._foundation, config)
        for step in range(3):
            optimizer.clear_grad()
            loss_of(model, make_batch("mlp", step, rank)).backward()
            optimizer.step()
    except (StateError, CommError) as error:
        assert time.perf_counter() - began_s < 20
        return str(error)
    raise AssertionError("went on")


def test_no_rank_waits_for_one_that_has_half_moved() -> None:
    for outcome in harness.run(_fails_on_one, 2, fresh=True):
        assert not outcome.error, outcome.error
        assert "rank 1: buckets could not be laid out anew (KeyboardInterrupt: by hand)" in outcome.result


def _loads_masters(rank: int, nranks: int, moves: bool) -> tuple[list[float], Values]:
    """Of layers so small that rank 1 has no part of them, which thawed when the state was saved and are frozen here."""
    settings = {"stage": 2, **BOTH, "reshard_after_step": True, "comm_buffer_size_MB": "auto"}
    with unique_name.guard(), _quickly(START_MB=1e-6, FACTORS=(1.0,)):
        saved = Run("odd, bfloat16", rank, nranks, settings)
    _thaw(saved)
    saved.train(range(2))
    params, state = saved.values(), saved.optimizer.state_dict()
    with unique_name.guard(), _quickly(START_MB=1e-6, FACTORS=(1.0,)):
        run = Run("odd, bfloat16", rank, nranks, settings)
    optimizer = run.optimizer
    with full_parameters(run.model):
        run.model.set_state_dict({name: paddle.to_tensor(value) for name, value in params.items()})
    optimizer.set_state_dict(state)
    frozen = {id(param) for param in run.model.frozen.parameters()}
    held = [buffer for buffer in optimizer.buffers if any(id(param) in frozen for param in buffer.params)]
    assert len([piece for buffer in held for piece in buffer.slices]) == (0 if rank else len(frozen))
    optimizer.tuning.is_over = True
    if moves:
        config = dataclasses.replace(optimizer.config, comm_buffer_size_MB=25)
        relayout(optimizer, optimizer.tuning._foundation, config)
    _thaw(run)
    return run.train(range(2, 5)), run.values()


def _thaw(run: Run) -> None:
    for param in run.model.frozen.parameters():
        param.stop_gradient = False


def test_masters_of_what_is_frozen_on_ranks_that_have_no_part_of_it() -> None:
    for (losses, params), (expected, still) in zip(
        harness.run(_loads_masters, 2, True), harness.run(_loads_masters, 2, False), strict=True
    ):
        assert losses == expected
        assert_equal(params, still)


def _views(rank: int, nranks: int) -> bool:
    """What looks like Paddle's own buckets shows the new ones."""
    strategy = fleet.DistributedStrategy()
    strategy.hp_sharding_configs = {**AUTO, "stage": 2}
    fleet.init(is_collective=True, strategy=strategy)
    with _quickly():
        model = fleet.distributed_model(make_model("mlp"))
        optimizer = fleet.distributed_optimizer(make_optimizer("SGD", model))
        face, counts = optimizer._inner_opt, []
        for step in range(4):
            loss_of(model, make_batch("mlp", step, rank)).backward()
            optimizer.step()
            optimizer.clear_grad()
            counts.append(len(face._comm_buffer_list))
            assert counts[-1] == len(optimizer.buffers)
            assert {view._id for views in face.param2bucket.values() for view in views} == set(range(counts[-1]))
    return any(a != b for a, b in itertools.pairwise(counts))


def test_paddles_view_follows() -> None:
    assert all(harness.run(_views, 2))
