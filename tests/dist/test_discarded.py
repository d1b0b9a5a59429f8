"""Models that are thrown away: their threads, connections, memory and hooks go with them, at once or a little later."""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.base import core

import hp_sharding
from hp_sharding import CommError, ConfigError, ShardingConfig, backward
from hp_sharding.schedule import schedule_of
from tests import harness
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_all_equal, assert_equal, values
from tests.sides import BOTH

GONE_S = 15.0
"""How long the threads of lanes may take to end once nobody has them: each rank looks twice a second."""
LATER_S = 1.5


def _shard(stage: int, nranks: int, timeout_s: float = 60.0) -> tuple[nn.Layer, Any]:
    """The real ``shard``, in replicas of two where there are four ranks."""
    model = make_model("mlp")
    me = paddle.distributed.get_rank()
    groups: dict[str, Any] = {}
    if nranks == 4:
        groups = {"shard_group": [me - me % 2, me - me % 2 + 1], "replicate_group": [me % 2, me % 2 + 2]}
    config = ShardingConfig(stage=stage, timeout_s=timeout_s, **BOTH)
    return model, hp_sharding.shard(model, make_optimizer("AdamW", model), config, **groups)


def _train(model: nn.Layer, optimizer: Any, rank: int, steps: range = range(2)) -> None:
    """The gathers of the last step are under way when it returns."""
    for step in steps:
        loss_of(model, make_batch("mlp", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()


def _threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("hp_sharding"))


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _until(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + GONE_S
    while not condition() and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.05)
    return condition()


@contextlib.contextmanager
def _nothing_stays() -> Iterator[None]:
    """What is made within goes when it is thrown away there, down to the last thread, descriptor and byte."""
    # What an earlier test has thrown away goes first.
    _until(lambda: _is_steady(_threads))
    gc.collect()
    before = (_threads(), _descriptors(), len(backward._listeners), core.host_memory_stat_current_value("Allocated", 0))
    yield

    def found() -> tuple[Any, ...]:
        n_bytes = core.host_memory_stat_current_value("Allocated", 0)
        return _threads(), _descriptors(), len(backward._listeners), n_bytes

    assert _until(lambda: found() == before), f"{found()} is left of {before}"


def _is_steady(look: Callable[[], Any]) -> bool:
    first = look()
    time.sleep(2.0)
    return bool(look() == first)


# -- two models ----------------------------------------------------------------------------------------------------------


def _two(rank: int, nranks: int, stage: int) -> Values:
    """The second of two goes, on one rank later than on the others, and with gathers under way; the first goes on."""
    model, optimizer = _shard(stage, nranks)
    _train(model, optimizer, rank)
    with hp_sharding.full_parameters(model):
        pass
    with _nothing_stays():
        other, other_optimizer = _shard(stage, nranks)
        made = _threads()
        _train(other, other_optimizer, rank)
        watched = [weakref.ref(thing) for thing in (other, other_optimizer, schedule_of(other))]
        watched += [weakref.ref(param) for param in other.parameters()]
        if rank == 1:
            time.sleep(LATER_S)
        del other, other_optimizer
        gc.collect()
        assert [reference() for reference in watched if reference() is not None] == []
        assert len(made) > len(set(made)), "a second model has threads of its own"
    _train(model, optimizer, rank, range(2, 4))
    with hp_sharding.full_parameters(model):
        return values(model)


@pytest.mark.parametrize(("nranks", "stage"), [(2, 2), (2, 3), (4, 2)])
def test_of_two_models_the_second_goes_and_the_first_goes_on(nranks: int, stage: int) -> None:
    found = harness.run(_two, nranks, stage)
    assert_all_equal(found)


def _alone(rank: int, nranks: int, stage: int) -> Values:
    model, optimizer = _shard(stage, nranks)
    _train(model, optimizer, rank, range(4))
    with hp_sharding.full_parameters(model):
        return values(model)


def test_the_first_trains_as_if_there_had_been_no_other() -> None:
    assert_equal(harness.run(_two, 2, 2)[0], harness.run(_alone, 2, 2)[0])


# -- who needs it longer -------------------------------------------------------------------------------------------------


def _reads_later(rank: int, nranks: int, throws_away: bool) -> Values | None:
    """One rank has thrown its model away before another has even started the gathers, in which both have a part."""
    model, optimizer = _shard(2, nranks)
    _train(model, optimizer, rank)
    loss_of(model, make_batch("mlp", 2, rank)).backward()
    if rank == 1:
        time.sleep(LATER_S)
    optimizer.step()
    if rank == 0 and throws_away:
        del model, optimizer
        gc.collect()
        time.sleep(2 * LATER_S)
        return None
    del optimizer
    gc.collect()
    return values(model)


def test_what_was_started_is_finished_for_those_who_read_later() -> None:
    expected = harness.run(_reads_later, 2, False)[1]
    found = harness.run(_reads_later, 2, True)[1]
    assert_equal(found, expected)


def _goes_on(rank: int, nranks: int, stage: int) -> str:
    with _nothing_stays():
        model, optimizer = _shard(stage, nranks)
        _train(model, optimizer, rank)
        text = ""
        if rank == 1:
            time.sleep(LATER_S)
            begin_s = time.monotonic()
            with pytest.raises(CommError) as caught:
                _train(model, optimizer, rank)
            text = str(caught.value)
            assert time.monotonic() - begin_s < GONE_S
            del caught
        del model, optimizer
    return text


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_who_goes_on_with_its_own_copy_is_told_who_has_left(stage: int) -> None:
    text = harness.run(_goes_on, 2, stage)[1]
    assert "rank 0 has left: it closed the lane, deleted its model, or its script ended" in text


def _outlives(rank: int, nranks: int, stage: int) -> Values:
    with _nothing_stays():
        model, optimizer = _shard(stage, nranks)
        _train(model, optimizer, rank)
        del optimizer
        gc.collect()
        time.sleep(LATER_S)
        model.eval()
        with paddle.no_grad():
            loss_of(model, make_batch("mlp", 0, rank))
        with hp_sharding.full_parameters(model):
            found = values(model)
        del model
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_without_its_optimizer_keeps_its_lanes(stage: int) -> None:
    assert_all_equal(harness.run(_outlives, 2, stage))


def _saves_on(rank: int, nranks: int, folder: str) -> None:
    with _nothing_stays():
        model, optimizer = _shard(2, nranks)
        _train(model, optimizer, rank)
        pending = hp_sharding.save(folder, model, optimizer, asynchronous=True)
        del model, optimizer
        gc.collect()
        time.sleep(LATER_S)
        pending.wait()
        del pending


def test_a_save_under_way_outlives_its_model(tmp_path: Path) -> None:
    harness.run(_saves_on, 2, str(tmp_path / "saved"))
    assert hp_sharding.latest_checkpoint(tmp_path) is not None


def _fails_to_wrap(rank: int, nranks: int) -> None:
    with _nothing_stays():
        model = make_model("mlp")
        config = ShardingConfig(stage=3, reshard_after_forward={"no such unit": True})
        with pytest.raises(ConfigError, match="no such unit") as caught:
            hp_sharding.shard(model, make_optimizer("SGD", model), config)
        del caught, model


def test_of_a_wrap_that_is_refused_nothing_stays() -> None:
    harness.run(_fails_to_wrap, 2)


# -- the garbage collector -----------------------------------------------------------------------------------------------


def _collects_at_odd_moments(rank: int, nranks: int) -> Values:
    """In other threads and in the middle of collectives, while models come and go and one goes on training."""
    over = threading.Event()

    def collect() -> None:
        while not over.wait(0.001 * (1 + rank)):
            gc.collect()

    model, optimizer = _shard(2, nranks)
    collector = threading.Thread(target=collect)
    collector.start()
    thresholds = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        for cycle in range(4):
            other, other_optimizer = _shard(1 + cycle % 3, nranks)
            _train(other, other_optimizer, rank, range(1))
            other.itself = [other, other_optimizer]  # goes when the collector comes to it, and not before
            del other, other_optimizer
            _train(model, optimizer, rank, range(cycle, cycle + 1))
    finally:
        gc.set_threshold(*thresholds)
        over.set()
        collector.join()
    with hp_sharding.full_parameters(model):
        return values(model)


def test_the_garbage_collector_may_come_at_any_moment() -> None:
    found = harness.run(_collects_at_odd_moments, 2)
    assert_all_equal(found)
    assert_equal(found[0], harness.run(_alone, 2, 2)[0])


def test_no_destructor_starts_anything() -> None:
    """It cannot know in which thread it runs and which locks are held there, and ranks collect at other moments."""
    found = []
    for path in sorted(Path(hp_sharding.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_destructor = isinstance(node, ast.FunctionDef) and node.name == "__del__"
            is_finalizer = isinstance(node, ast.Attribute) and node.attr == "finalize"
            if is_destructor or is_finalizer:
                found.append(path.name)
    assert found == ["lazy.py", "handles.py", "sinks.py"], "they close a file, add a name to a set, close a file"
