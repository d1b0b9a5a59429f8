"""What ranks agree on when they save and load: one fails, all do; one is slow, all wait."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn

import hp_sharding
from hp_sharding import CheckpointError, ConfigError
from hp_sharding.checkpoint import loading
from hp_sharding.checkpoint.folder import open_checkpoint
from hp_sharding.config import ShardingConfig
from hp_sharding.sharding import Grid, build, connect
from tests import harness, logical
from tests.lanes import wrap
from tests.resuming import Run, Settings
from tests.sides import BOTH
from tests.slow_disk import slow_disk

SETTINGS: Settings = {"stage": 2, **BOTH}


def _different(rank: int, nranks: int, folder: str) -> None:
    """Two complete checkpoints of one shape; each rank picks another one."""
    run = Run("odd", rank, nranks, SETTINGS)
    for steps in range(2):
        run.train(range(steps, steps + 1))
        hp_sharding.save(f"{folder}/{steps}", run.model, run.optimizer)
        hp_sharding.save_full(f"{folder}/full{steps}", run.model, run.optimizer)
    before = logical.digest(run.parts())
    with pytest.raises(CheckpointError, match="expected the checkpoint that the first rank opened"):
        hp_sharding.load(f"{folder}/{rank % 2}", run.model, run.optimizer)
    assert logical.digest(run.parts()) == before
    hp_sharding.load(f"{folder}/0", run.model, run.optimizer)
    assert logical.digest(run.parts()) != before


def test_ranks_that_open_different_checkpoints_are_told(tmp_path: Path) -> None:
    harness.run(_different, 2, str(tmp_path))


@contextlib.contextmanager
def _reads_fail_after(n_reads: int) -> Iterator[None]:
    """From then on the file system says that it has lost the files."""
    read, left = os.preadv, [n_reads]

    def preadv(*args: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(*args)

    with mock.patch.object(os, "preadv", preadv):
        yield


def _load_with(n_reads: int, folder: str, run: Run) -> str:
    """What was said when the files went away after so many reads; nothing where those were enough."""
    with _reads_fail_after(n_reads):
        try:
            hp_sharding.load(folder, run.model, run.optimizer)
        except CheckpointError as error:
            return str(error)
    return ""


def _lost(rank: int, nranks: int, folder: str, settings: Settings) -> None:
    """The files go on one rank: before anything has changed, or halfway, of which every rank is told."""
    run = Run("odd", rank, nranks, settings)
    run.train(range(2))
    hp_sharding.save(folder, run.model, run.optimizer)
    expected = logical.digest(run.parts())
    run.train(range(2, 4))
    before, halfway = logical.digest(run.parts()), 0
    for n_reads in range(0, 200, 11):
        said = _load_with(n_reads if rank == 1 else 10**9, folder, run)
        if not said:
            break
        halfway += "half loaded" in said
        assert "Stale file handle" in said
        assert "half loaded" in said or logical.digest(run.parts()) == before, f"rank {rank}, {n_reads} reads: {said}"
    assert halfway, "some failures come after the first change"
    hp_sharding.load(folder, run.model, run.optimizer)
    assert logical.digest(run.parts()) == expected
    run.train(range(2, 3))


@pytest.mark.parametrize("stage", [2, 3])
def test_half_a_load_says_so_and_can_be_made_good(stage: int, tmp_path: Path) -> None:
    harness.run(_lost, 2, str(tmp_path / "checkpoint"), {**SETTINGS, "stage": stage})


def _patient(rank: int, nranks: int, folder: str) -> None:
    """One rank's disk takes longer than ranks wait for each other."""
    lanes = connect(Grid(list(range(nranks)), [rank]), timeout_s=2.0)
    paddle.seed(3)
    model = nn.Linear(8, 8)
    inner = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    optimizer = build(model, inner, ShardingConfig(stage=2, timeout_s=2.0), lanes=lanes)
    with slow_disk(1.5) if rank == 1 else contextlib.nullcontext():
        hp_sharding.save(folder, model, optimizer)
        pending = hp_sharding.save(folder, model, optimizer, asynchronous=True)
        pending.wait()
    model(paddle.ones([2, 8])).sum().backward()
    optimizer.step()
    hp_sharding.load(folder, model, optimizer)
    for lane in lanes.values():
        lane.close()


def test_a_slow_disk_does_not_end_the_run(tmp_path: Path) -> None:
    for outcome in harness.run(_patient, 2, str(tmp_path / "checkpoint"), fresh=True, timeout_s=60.0):
        assert outcome.error is None and outcome.returncode == 0, outcome.output


class _Counting(nn.Layer):
    """With a buffer that every rank writes differently."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1D(4)
        for name in ("first", "second", "third"):
            self.register_buffer(name, paddle.zeros([3]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for name in ("first", "second", "third"):
            getattr(self, name).add_(paddle.full([3], float(x.sum())))
        return self.norm(self.linear(x))


def _own_buffers(rank: int, nranks: int, folder: str) -> dict[str, Any]:
    """Where each rank keeps its own, the first one's are saved, and not some of each."""
    paddle.seed(5)
    model = _Counting()
    inner = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    wrapped = wrap(model, inner, nranks, **{**SETTINGS, "broadcast_buffers": False})
    model(paddle.full([2, 4], rank + 1.0) * paddle.randn([2, 4])).sum().backward()
    wrapped.optimizer.step()
    wrapped.optimizer.clear_grad()
    named = {"_mean": model.norm._mean, "_variance": model.norm._variance, **dict(model.named_buffers())}
    before = {name: buffer.numpy().copy() for name, buffer in named.items()}
    hp_sharding.save(folder, model, wrapped.optimizer)
    hp_sharding.load(folder, model, wrapped.optimizer)
    for name, buffer in named.items():
        assert rank == 0 or (buffer.numpy() != before[name]).any(), (
            f"{name} was the same everywhere, which shows nothing"
        )
    return {name: buffer.numpy() for name, buffer in named.items()} | {"before": before}


def test_buffers_are_the_first_rank_s(tmp_path: Path) -> None:
    found = harness.run(_own_buffers, 3, str(tmp_path / "checkpoint"))
    for name, expected in found[0]["before"].items():
        for rank in range(3):
            np.testing.assert_array_equal(found[rank][name], expected, err_msg=f"rank {rank}, {name}")


def _failed_behind(rank: int, nranks: int, folder: str) -> None:
    """An asynchronous save fails on one rank: waiting says so each time, loading goes on, saving says so once."""
    run = Run("odd", rank, nranks, SETTINGS)
    run.train(range(1))
    hp_sharding.save(f"{folder}/good", run.model, run.optimizer)
    expected = logical.digest(run.parts())
    run.train(range(1, 2))
    for then in ("wait", "load", "save"):
        with mock.patch.object(os, "fsync", _full) if rank == 1 else contextlib.nullcontext():
            pending = hp_sharding.save(f"{folder}/bad", run.model, run.optimizer, asynchronous=True)
            while rank == 1 and not pending.done():
                time.sleep(0.01)
        if then == "wait":
            for _ in range(2):
                with pytest.raises(CheckpointError, match="disk is full"):
                    pending.wait()
        elif then == "load":
            hp_sharding.load(f"{folder}/good", run.model, run.optimizer)
            assert logical.digest(run.parts()) == expected
        else:
            with pytest.raises(CheckpointError, match=r"before this save, the asynchronous one failed: .*disk is full"):
                hp_sharding.save(f"{folder}/next", run.model, run.optimizer)
            hp_sharding.save(f"{folder}/next", run.model, run.optimizer)
    if rank == 0:
        assert hp_sharding.latest_checkpoint(folder) == Path(folder, "next")


def _full(fd: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_failed_behind_the_training_is_not_forgotten(tmp_path: Path) -> None:
    harness.run(_failed_behind, 2, str(tmp_path))


def _not_sharded(rank: int, nranks: int, folder: str) -> None:
    """Of a teacher, or of averaged parameters, that every rank has: two saves to one folder would be one too many."""
    model = nn.Linear(3, 3)
    if rank == 0:
        hp_sharding.save(folder, model)
    else:
        with pytest.raises(ConfigError, match="Call it on rank 0 alone"):
            hp_sharding.save(folder, model)
    paddle.distributed.barrier()
    hp_sharding.load(folder, model)


def test_a_model_that_is_not_sharded_is_saved_once(tmp_path: Path) -> None:
    harness.run(_not_sharded, 2, str(tmp_path / "checkpoint"))


def _replaced(rank: int, nranks: int, folder: str) -> None:
    """A save puts another checkpoint in the place of the one that is loaded, when one rank has opened that."""
    run = Run("odd", rank, nranks, SETTINGS)
    for steps, name in enumerate(("before", "now")):
        run.train(range(steps, steps + 1))
        hp_sharding.save(f"{folder}/{name}", run.model, run.optimizer, extra=name)
    opened: list[str] = []

    def open_one(path: str) -> Any:
        opened.append(path)
        return open_checkpoint(f"{folder}/before" if len(opened) == 1 and rank == 1 else path)

    with mock.patch.object(loading, "open_checkpoint", open_one):
        loaded = hp_sharding.load(f"{folder}/now", run.model, run.optimizer)
    assert (loaded.extra, loaded.steps) == ("now", 2)
    assert len(opened) == 2, "all ranks look again"


def test_ranks_look_again_where_one_has_seen_an_older_one(tmp_path: Path) -> None:
    harness.run(_replaced, 2, str(tmp_path))
