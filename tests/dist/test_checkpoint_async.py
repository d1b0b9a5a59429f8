"""Saves that are written behind the training."""

from __future__ import annotations

import errno
import os
import signal
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest import mock

import paddle
import pytest

import hp_sharding
from hp_sharding import CheckpointError, CommError
from hp_sharding.checkpoint import saving
from tests import harness, logical
from tests.resuming import Run, Settings
from tests.sides import BOTH
from tests.slow_disk import held_disk, slow_disk

PLACES: dict[str, tuple[int, Settings | str]] = {
    "stage 1": (2, {"stage": 1, **BOTH}),
    "stage 2": (3, {"stage": 2, **BOTH}),
    "stage 3": (2, {"stage": 3, **BOTH}),
    "two by two": (4, {"n_replicas": 2, "stage": 2, **BOTH}),
    "one process": (1, "plain"),
    "unwrapped": (1, "bare"),
}


def _goes_on(rank: int, nranks: int, folder: str, settings: Settings | str) -> None:
    """While nothing reaches the disk, three steps are made; what is saved is what was there at the call."""
    kind = "odd, dropout"
    run = Run(kind, rank, nranks, settings)
    run.train(range(3))
    with held_disk() as disk:
        pending = hp_sharding.save(folder, run.model, run.optimizer, extra={"step": 3}, asynchronous=True)
        expected = logical.digest(run.parts())
        losses = run.train(range(3, 6))
        assert not pending.done()
        assert not Path(folder, "index.json").exists()
        disk.set()
        pending.wait()
    assert pending.done()
    pending.wait()
    resumed = Run(kind, rank, nranks, settings, seed=7)
    loaded = hp_sharding.load(folder, resumed.model, resumed.optimizer)
    assert loaded.extra == {"step": 3}
    assert logical.digest(resumed.parts()) == expected
    assert resumed.train(range(3, 6)) == losses


@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on_while_it_is_written(place: str, tmp_path: Path) -> None:
    nranks, settings = PLACES[place]
    harness.run(_goes_on, nranks, str(tmp_path / "checkpoint"), settings)


def _one_after_the_other(rank: int, nranks: int, folder: str, same: bool) -> None:
    """The second save begins when the first one is complete; so does a load."""
    run = Run("odd", rank, nranks, {"stage": 2, **BOTH})
    paths = [f"{folder}/{0 if same else number}" for number in range(3)]
    digests, pending = [], []
    with slow_disk(0.05):
        for number in range(3):
            run.train(range(number, number + 1))
            digests.append(logical.digest(run.parts()))
            pending.append(hp_sharding.save(paths[number], run.model, run.optimizer, asynchronous=number < 2))
            assert all(before.done() for before in pending[:-1])
    assert pending[2].done(), "a save that is not asynchronous is complete when it returns"
    assert len(list(Path(paths[2]).iterdir())) == nranks + 1
    for path, digest in list(zip(paths, digests, strict=True))[2 if same else 0 :]:
        hp_sharding.load(path, run.model, run.optimizer)
        assert logical.digest(run.parts()) == digest
    with slow_disk(0.05):
        run.train(range(3, 4))
        expected = logical.digest(run.parts())
        pending[0] = hp_sharding.save(paths[0], run.model, run.optimizer, asynchronous=True)
        run.train(range(4, 5))
        hp_sharding.load(paths[0], run.model, run.optimizer)
    assert pending[0].done()
    assert logical.digest(run.parts()) == expected


@pytest.mark.parametrize("same", [True, False])
def test_one_save_at_a_time(same: bool, tmp_path: Path) -> None:
    harness.run(_one_after_the_other, 2, str(tmp_path), same)


def _failing_fsync(fd: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fails(rank: int, nranks: int, folder: str, where: str) -> str:
    """One rank's disk is full, which comes out where the training next meets the save, on every rank."""
    run = Run("odd", rank, nranks, {"stage": 2, **BOTH})
    run.train(range(2))
    hp_sharding.save(folder, run.model, run.optimizer)
    expected = logical.digest(run.parts())
    run.train(range(2, 3))
    with mock.patch.object(os, "fsync", _failing_fsync if rank == 1 else os.fsync):
        pending = hp_sharding.save(folder, run.model, run.optimizer, asynchronous=True)
        run.train(range(3, 4))
        while rank == 1 and not pending.done():
            time.sleep(0.01)
    error = None
    if where == "load":  # which is the way back
        hp_sharding.load(folder, run.model, run.optimizer)
    else:
        with pytest.raises(CheckpointError) as error:  # noqa: PT012 - two ways to meet it
            if where == "wait":
                pending.wait()
            else:
                hp_sharding.save(f"{folder}-2", run.model, run.optimizer)
    hp_sharding.save(f"{folder}-3", run.model, run.optimizer)  # the failure has been told once
    paddle.distributed.barrier()
    assert len(list(Path(folder).iterdir())) == nranks + 1, "something was left behind"
    hp_sharding.load(folder, run.model, run.optimizer)
    assert logical.digest(run.parts()) == expected
    return "" if error is None else str(error.value)


@pytest.mark.parametrize("where", ["wait", "save", "load"])
def test_a_failure_is_raised_where_the_save_is_met_again(where: str, tmp_path: Path) -> None:
    for text in harness.run(_fails, 2, str(tmp_path / "checkpoint"), where):
        assert ("space" in text) == (where != "load")


_KEPT = ExitStack()


def _ends_at_once(rank: int, nranks: int, folder: str) -> str:
    run = Run("odd", rank, nranks, {"stage": 2, **BOTH})
    run.train(range(2))
    expected = logical.digest(run.parts())
    _KEPT.enter_context(slow_disk(0.2))  # for as long as the process lives
    hp_sharding.save(folder, run.model, run.optimizer, extra="the end", asynchronous=True)
    assert not Path(folder, "index.json").exists()
    return expected


def _load(rank: int, nranks: int, folder: str) -> str:
    run = Run("odd", rank, nranks, {"stage": 2, **BOTH}, seed=7)
    assert hp_sharding.load(folder, run.model, run.optimizer).extra == "the end"
    return logical.digest(run.parts())


def test_a_process_that_ends_writes_first(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    outcomes = harness.run(_ends_at_once, 2, folder, fresh=True, timeout_s=60)
    for outcome in outcomes:
        assert (outcome.returncode, outcome.error) == (0, None), outcome.output
    assert [outcome.result for outcome in outcomes] == harness.run(_load, 2, folder)


def _loses_a_rank(rank: int, nranks: int, folder: str) -> None:
    """Rank 1 is killed before its share is there, and rank 0 hears of it while it trains."""
    saving._LAST_SHARES_S = 0.5
    run = Run("odd", rank, nranks, {"stage": 2, **BOTH})
    run.train(range(2))
    hp_sharding.save(folder, run.model, run.optimizer, extra="the end")
    Path(f"{folder}-{rank}").write_text(logical.digest(run.parts()))
    with held_disk() if rank == 1 else nullcontext():
        run.train(range(2, 3))
        hp_sharding.save(folder, run.model, run.optimizer, asynchronous=True)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CommError):
            run.train(range(3, 10))


def test_a_rank_that_dies_holds_nobody_up(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    survivor, victim = harness.run(_loses_a_rank, 2, folder, fresh=True, timeout_s=60)
    assert victim.returncode == -signal.SIGKILL
    assert (survivor.returncode, survivor.error) == (0, None), survivor.output
    assert survivor.exit_s < 15.0, "it waited for a share that will not come"
    digests = [Path(f"{folder}-{rank}").read_text() for rank in range(2)]
    assert harness.run(_load, 2, folder) == digests, "the checkpoint before is not what it was"
