"""Whole files that cannot be written, or take long: all ranks stop together, or none has to wait for long."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn

import hp_sharding
from hp_sharding import CheckpointError, full_parameters
from hp_sharding.checkpoint import beside, blocks, durable, full_state, whole
from hp_sharding.comm import Communicator
from hp_sharding.moments import moments_of
from hp_sharding.sharding import Grid, connect
from tests import harness, lanes, logical
from tests.reference import Values, assert_equal, values
from tests.sides import BOTH
from tests.slow_disk import slow_disk

PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, {"stage": 2, **BOTH}),
    "two by two": (4, {"stage": 3, "n_replicas": 2, **BOTH}),
}
WIDTH = 20
_SECONDS = 10.0
"""Less than any rank waits for another one."""


class _Run(NamedTuple):
    """A small model on this rank."""

    model: nn.Layer
    optimizer: Any
    rank: int
    calls: list[lanes.Call]

    def train(self, steps: range) -> None:
        for step in steps:
            paddle.seed(10 * step + self.rank)
            self.model(paddle.randn([4, WIDTH])).square().mean().backward()
            self.optimizer.step()
            self.optimizer.clear_grad()

    def values(self) -> Values:
        with full_parameters(self.model):
            return values(self.model)


def _start(
    rank: int, nranks: int, settings: dict[str, Any], *, kind: type[paddle.optimizer.Optimizer] | None = None
) -> _Run:
    paddle.seed(4)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 7))
    inner = (kind or paddle.optimizer.AdamW)(0.01, parameters=model.parameters())
    model, optimizer, calls = lanes.wrap(model, inner, nranks, **settings)
    run = _Run(model, optimizer, rank, calls)
    run.train(range(2))
    return run


@contextmanager
def _in_small_pieces(portion_bytes: int) -> Iterator[None]:
    """Much is sent, and all that is written goes to the system at once."""
    with ExitStack() as stack:
        for module, name, value in [
            (whole, "_BLOCK_BYTES", 300),
            (whole, "_PORTION_BYTES", portion_bytes),
            (beside, "_SMALL_BYTES", 0),
        ]:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


# -- what fails on one rank --------------------------------------------------------------------------------------------


class _Failing:
    """Calls a function, and raises from the call of that number on."""

    def __init__(self, function: Callable[..., Any], at: int, error: Exception) -> None:
        self._function, self._left, self._error = function, at, error
        self.has_failed = False

    def __call__(self, *args: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            self.has_failed = True
            raise self._error
        return self._function(*args)


class _Without:
    """NumPy, but for the memory that it has not."""

    def __init__(self, empty: _Failing) -> None:
        self.empty = empty

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _disk(at: int) -> tuple[_Failing, Any]:
    failing = _Failing(durable.write_all, at, _FULL)
    return failing, mock.patch.object(beside, "write_all", failing)


def _memory(at: int) -> tuple[_Failing, Any]:
    failing = _Failing(np.empty, at, MemoryError("no memory"))
    return failing, mock.patch.object(whole, "np", _Without(failing))


def _copy(at: int) -> tuple[_Failing, Any]:
    failing = _Failing(blocks.host_blocks, at, MemoryError("no memory"))
    return failing, mock.patch.object(whole, "host_blocks", failing)


class _Trouble(NamedTuple):
    """What fails, how far from one place to the next, and what is said of it."""

    make: Callable[[int], tuple[_Failing, Any]]
    step: int
    own: type[Exception]
    words: str


TROUBLES = {
    "disk full": _Trouble(_disk, 29, CheckpointError, "the disk is full"),
    "no memory for a tensor": _Trouble(_memory, 2, MemoryError, "no memory"),
    "halfway through a tensor": _Trouble(_copy, 5, MemoryError, "no memory"),
}


def _error_of(path: str, run: _Run) -> Exception | None:
    try:
        hp_sharding.save_full(path, run.model, run.optimizer)
    except (CheckpointError, MemoryError) as error:
        return error
    return None


def _digest(run: _Run) -> Any:
    return logical.digest(logical.parts(run.model, run.optimizer))


def _stopped(rank: int, nranks: int, folder: str, settings: dict[str, Any], trouble: str) -> int:
    """Fails at one place after the other, until there is none left; returns at how many."""
    run, twin = (_start(rank, nranks, settings) for _ in range(2))
    path, case = f"{folder}/model", TROUBLES[trouble]
    hp_sharding.save_full(path, run.model, run.optimizer)
    before = _digest(run)
    run.train(range(2, 3))
    n_sent = []
    for number in itertools.count():
        failing, patched = case.make(number * case.step)
        # Where all meet often, and where they never do.
        with _in_small_pieces(2000 if number % 2 else 1 << 28), ExitStack() as stack:
            if rank == 0:
                stack.enter_context(patched)
            run.calls.clear()
            started_s = time.monotonic()
            error = _error_of(saved := f"{folder}/other" if number % 3 else path, run)
            assert time.monotonic() - started_s < _SECONDS
            n_sent.append(sum(call.op == "broadcast" for call in run.calls))
        if error is None:
            assert not failing.has_failed
            break
        assert type(error) is (case.own if rank == 0 else CheckpointError)
        assert case.words in str(error)
        assert rank == 0 or str(error).startswith(f"rank 0 of {nranks}: ")
        if rank == 0:
            assert sorted(os.listdir(folder)) == ["model.pdopt", "model.pdparams"]
        if number == 0:
            hp_sharding.load_full(path, twin.model, twin.optimizer)
            assert _digest(twin) == before
            twin.train(range(2, 3))
            assert _digest(twin) == _digest(run)
    assert n_sent[0] == n_sent[-1], "where nobody meets, everything is sent"
    assert n_sent[1] < n_sent[0] or not n_sent[0], "more was sent than up to where all have met"
    hp_sharding.load_full(saved, twin.model, twin.optimizer)  # sent in many small blocks
    assert _digest(twin) == _digest(run)
    for each in (run, twin):
        each.train(range(3, 5))
    assert_equal(run.values(), twin.values())
    return number


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("place", PLACES)
def test_wherever_the_first_rank_fails_all_stop_and_train_on(place: str, trouble: str, tmp_path: Path) -> None:
    nranks, settings = PLACES[place]
    n_places = harness.run(_stopped, nranks, str(tmp_path), settings, trouble)[0]
    assert n_places >= 6, "hardly anything has failed"


def _early(rank: int, nranks: int, path: str, settings: dict[str, Any]) -> None:
    run, other = (_start(rank, nranks, settings) for _ in range(2))
    broadcast = lanes.LateLane.broadcast

    def at_once(self: lanes.LateLane, *args: Any, **kwargs: Any) -> Any:
        work = broadcast(self, *args, **kwargs)
        work.wait()
        return work

    other.train(range(2, 3))
    with _in_small_pieces(2000), mock.patch.object(lanes.LateLane, "broadcast", at_once):
        hp_sharding.save_full(path, run.model, run.optimizer)
    hp_sharding.load_full(path, other.model, other.optimizer)
    assert _digest(other) == _digest(run)


def test_a_block_that_arrives_early_does_not_overwrite_the_one_before(tmp_path: Path) -> None:
    nranks, settings = PLACES["two"]
    harness.run(_early, nranks, str(tmp_path / "model"), settings)


# -- what takes long ---------------------------------------------------------------------------------------------------

TIMEOUT_S = 1.5
_REST_S = 0.06
"""Of every write."""


def _slowly(rank: int, nranks: int, path: str, settings: dict[str, Any]) -> float:
    with mock.patch.object(lanes, "connect", _connect_briefly), mock.patch.dict(lanes._lanes, clear=True):
        run = _start(rank, nranks, settings, kind=paddle.optimizer.SGD)
        opened = dict(lanes._lanes)
    started_s = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(_in_small_pieces(200))
        stack.enter_context(mock.patch.object(full_state, "_WRITE_NUMEL", 12))
        if rank == 0:
            stack.enter_context(slow_disk(_REST_S, bytes_at_once=1 << 20))
        hp_sharding.save_full(path, run.model, run.optimizer, format="safetensors")
    took_s = time.monotonic() - started_s
    run.train(range(2, 4))
    hp_sharding.load_full(path, run.model, run.optimizer)
    for lane in [lane for made in opened.values() for lane in made.values()]:
        lane.close()
    return took_s


def _connect_briefly(grid: Grid, *, timeout_s: float) -> dict[str, Communicator]:
    """With a shorter wait for late ranks than was asked for."""
    return connect(grid, timeout_s=min(TIMEOUT_S, timeout_s))


def test_no_rank_waits_for_all_of_it(tmp_path: Path) -> None:
    """Nor for all of a parameter: those of the second replica send nothing, and would be late."""
    nranks, settings = PLACES["two by two"]
    for took_s in harness.run(_slowly, nranks, str(tmp_path / "model"), settings):
        assert took_s > 1.5 * TIMEOUT_S, "it was over before anybody could be late"


# -- what an optimizer keeps on some ranks only ------------------------------------------------------------------------


class _Keeping(paddle.optimizer.AdamW):
    """Makes something of its own where it updates."""

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> Any:
        param = param_and_grad[0] if isinstance(param_and_grad, (list, tuple)) else param_and_grad["params"][0]
        if param.name not in self._accumulators.get("seen", {}):
            self._add_accumulator("seen", param)
        return super()._append_optimize_op(block, param_and_grad)


def _keeping(rank: int, nranks: int, path: str, settings: dict[str, Any]) -> str:
    run = _start(rank, nranks, settings, kind=_Keeping)
    with pytest.raises(CheckpointError) as error:
        hp_sharding.save_full(path, run.model, run.optimizer)
    run.train(range(2, 3))
    assert not Path(path).parent.exists() or not os.listdir(Path(path).parent)
    return str(error.value)


@pytest.mark.parametrize("place", PLACES)
def test_moments_that_only_some_ranks_know_of(place: str, tmp_path: Path) -> None:
    nranks, settings = PLACES[place]
    for text in harness.run(_keeping, nranks, str(tmp_path / "files" / "model"), settings):
        assert "the optimizer keeps" in text
        assert "not the same on the first rank" in text
        assert "hp_sharding.save" in text


def _raising(rank: int, nranks: int, path: str, settings: dict[str, Any]) -> str:
    run = _start(rank, nranks, settings)

    def raise_it(inner: Any, param: Any) -> Any:
        if rank == nranks - 1:
            raise hp_sharding.ConfigError("this rank alone")
        return moments_of(inner, param)

    with mock.patch.object(whole, "moments_of", raise_it), pytest.raises(hp_sharding.HpShardingError) as error:
        hp_sharding.save_full(path, run.model, run.optimizer)
    hp_sharding.save_full(path, run.model, run.optimizer)
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_cannot_tell_what_it_keeps(place: str, tmp_path: Path) -> None:
    nranks, settings = PLACES[place]
    *others, last = harness.run(_raising, nranks, str(tmp_path / "model"), settings)
    assert last == "ConfigError: this rank alone"
    assert set(others) == {f"CheckpointError: rank {nranks - 1} of {nranks}: this rank alone"}
