"""A save in one process: behind the training, where it fails, and with what was left by those before."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding import CheckpointError, ConfigError, load, save, save_full
from hp_sharding.checkpoint import saving
from hp_sharding.checkpoint.folder import Save, is_complete, new_save_id
from hp_sharding.checkpoint.ranks import Ranks
from hp_sharding.checkpoint.saving import PendingSave
from tests.slow_disk import held_disk
from tests.stored import contents, halves, names, random_tensors, same, save_parts

_COMPLETE = ["00000-of-00001.safetensors", "index.json"]


def _full(fd: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def model() -> nn.Layer:
    return nn.Linear(3, 3)


@pytest.fixture
def failed(model: nn.Layer, tmp_path: Path) -> PendingSave:
    """A save behind the training that has come to nothing, of which nobody has heard."""
    with mock.patch.object(os, "fsync", _full):
        pending = save(tmp_path / "failed", model, asynchronous=True)
        while not pending.done():
            time.sleep(0.01)
    return pending


# -- behind the training -----------------------------------------------------------------------------------------------


def test_waiting_says_what_has_failed(failed: PendingSave) -> None:
    for _ in range(2):
        with pytest.raises(CheckpointError, match="the disk is full"):
            failed.wait()


def test_the_next_save_says_what_has_failed(failed: PendingSave, model: nn.Layer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"before this save, the asynchronous one failed: .*the disk is full"):
        save(tmp_path / "next", model)
    assert not (tmp_path / "next").exists()
    save(tmp_path / "next", model)
    assert is_complete(tmp_path / "next")


@pytest.mark.parametrize("then", ["wait", "save", "load", "save_full"])
def test_one_that_is_being_written_is_waited_for(then: str, model: nn.Layer, tmp_path: Path) -> None:
    with held_disk() as disk:
        pending = save(tmp_path / "c", model, asynchronous=True)
        assert not pending.done()
        threading.Timer(0.2, disk.set).start()
        if then == "wait":
            pending.wait()
        elif then == "save":
            save(tmp_path / "next", model)
        elif then == "load":
            load(tmp_path / "c", model)
        else:
            save_full(tmp_path / "whole", model)
        assert pending.done()
    assert names(tmp_path / "c") == _COMPLETE


def test_the_index_is_written_when_all_shares_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_POLL_S", 0.001)
    asked: list[str] = []
    missing: list[list[int]] = [[1], [1], []]

    def missing_parts() -> list[int]:
        asked.append("missing")
        return missing.pop(0)

    place = mock.Mock(spec=Save)
    place.missing_parts.side_effect = missing_parts
    place.bytes_so_far.side_effect = range(100)
    place.commit.side_effect = lambda state, aliases: asked.append("commit")
    _pending(place)._commit_when_all_is_there()
    assert asked == ["missing"] * 3 + ["commit"]


def _pending(place: Any, *, timeout_s: float = 10.0) -> PendingSave:
    ranks = Ranks(None)
    ranks.timeout_s = timeout_s
    return PendingSave(place, ranks, pieces=[], described=saving.Described({}, {}))


class _Asked(Exception):
    """More often than anybody should."""


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_shares_that_do_not_come_are_given_up(is_cancelled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where this rank's own has failed; after the time-out where nothing grows."""
    monkeypatch.setattr(saving, "_POLL_S", 0.001)
    monkeypatch.setattr(saving, "_LONGEST_POLL_S", 0.001)
    place = mock.Mock(spec=Save, path=Path("there"))
    place.missing_parts.side_effect = [[1, 3]] * 200 + [_Asked()]
    place.bytes_so_far.return_value = 7
    pending = _pending(place, timeout_s=100.0 if is_cancelled else 0.0)
    if is_cancelled:
        pending._cancelled.set()
    with pytest.raises(CheckpointError, match=r"'there': the shares of ranks \[1, 3\] are not there and do not grow"):
        pending._await_shares()


# -- what fails --------------------------------------------------------------------------------------------------------


def test_nothing_is_written_behind_the_back_of_a_save_that_failed(tmp_path: Path) -> None:
    place = Save(tmp_path / "c", new_save_id(), 0, 1)
    pending = _pending(place)
    with ThreadPoolExecutor(1) as executor, held_disk() as disk:
        pending._futures = [executor.submit(place.write, halves(random_tensors(1))[0])]
        threading.Timer(0.3, disk.set).start()
        with pytest.raises(OSError, match="another rank"), pending._cleaning_up():
            raise OSError("another rank")
        assert pending.done()
    assert os.listdir(tmp_path / "c") == []


def test_a_save_that_another_rank_could_not_begin_keeps_no_thread(
    model: nn.Layer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Ranks, error: Exception | None) -> None:
        if threading.active_count() > before:  # writers have begun
            raise CheckpointError("rank 1 of 2: no memory")

    before = threading.active_count()
    monkeypatch.setattr(Ranks, "_compare", fails)
    with pytest.raises(CheckpointError, match="no memory") as caught:
        save(tmp_path / "c", model, asynchronous=True)
    assert caught.tb is not None, "which keeps what was begun"
    _wait_until(lambda: threading.active_count() == before)


def _wait_until(is_so: Any) -> None:
    deadline_s = time.monotonic() + 5.0
    while not is_so():
        assert time.monotonic() < deadline_s, [thread.name for thread in threading.enumerate()]
        time.sleep(0.01)


def test_a_save_whose_index_cannot_be_written_leaves_nothing(model: nn.Layer, tmp_path: Path) -> None:
    def fails(self: Save, state: Any, aliases: Any) -> None:
        raise CheckpointError("no index")

    with mock.patch.object(Save, "commit", fails), pytest.raises(CheckpointError, match="no index"):
        save(tmp_path / "c", model)
    assert os.listdir(tmp_path / "c") == []


def test_a_loss_of_power_is_spoken_of_where_the_folder_cannot_be_synced(tmp_path: Path) -> None:
    place = Save(tmp_path, new_save_id(), 0, 1)
    (pieces,) = [[*one, *other] for one, other in [halves(random_tensors(1))]]
    place.write(pieces)
    fsync = os.fsync

    def of_files(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    message = "The new checkpoint is there, but after a loss of power it may be the old one again"
    with mock.patch.object(os, "fsync", of_files), pytest.raises(CheckpointError, match=message):
        place.commit({}, {})
    assert same(contents(tmp_path), random_tensors(1))


# -- what is there already ---------------------------------------------------------------------------------------------


def test_the_index_of_another_program_is_not_replaced(model: nn.Layer, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="not that of a checkpoint"):
        save(tmp_path, model)
    assert (tmp_path / "index.json").read_text() == '{"weight_map": {}}'
    assert names(tmp_path) == ["index.json"], "nor is anything put beside it"


def test_what_a_kill_has_left_goes_before_there_is_more(model: nn.Layer, tmp_path: Path) -> None:
    """There may be no room for both: so it is gone though the save fails."""
    save_parts(tmp_path, halves(random_tensors(1)))
    Save(tmp_path, new_save_id(), 0, 2).write(halves(random_tensors(2))[0])
    assert len(names(tmp_path)) == 5
    with mock.patch.object(os, "fsync", _full), pytest.raises(CheckpointError, match="disk is full"):
        save(tmp_path, model)
    assert same(contents(tmp_path), random_tensors(1))
    assert len(names(tmp_path)) == 3


# -- what ranks agree on -----------------------------------------------------------------------------------------------


class _Second(Ranks):
    """Hears from the first rank what that had to say."""

    rank = 1

    def __init__(self, said: str) -> None:
        super().__init__(None)
        self._said = said

    def text_of(self, rank: int, text: str) -> str:
        return self._said


def test_all_ranks_save_to_one_folder() -> None:
    with pytest.raises(CheckpointError, match="rank 1: expected every rank to save to one folder, found 'b' here and"):
        saving._agree_on_id(_Second("20260101-000000-01234567/5/a"), "b", 5)
    assert saving._agree_on_id(_Second("an id/5/a"), "a", 5) == "an id"


def test_all_ranks_save_the_same_beside() -> None:
    with pytest.raises(CheckpointError, match=r"rank 1: extra is not the same as on the first rank.*as rank_extra"):
        saving._agree_on_id(_Second("an id/5/a"), "a", 6)


def test_one_rank_alone_saves_what_is_not_sharded(
    model: nn.Layer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paddle.distributed, "get_rank", lambda: 1)
    with pytest.raises(ConfigError, match=r"rank 1: this Linear is not sharded.*Call it on rank 0 alone"):
        save(tmp_path / "c", model)
    assert not (tmp_path / "c").exists()


def _moments(optimizer: Any) -> Iterator[Any]:
    for of_kind in optimizer._accumulators.values():
        yield from of_kind.values()


def test_moments_with_an_axis_of_their_own_lie_row_by_row(tmp_path: Path) -> None:
    """Of ASGD, which keeps the gradients of several batches."""
    model = nn.Linear(3, 2)
    optimizer = paddle.optimizer.ASGD(0.1, batch_num=3, parameters=model.parameters())
    for step in range(4):
        model(paddle.full([2, 3], step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    save(tmp_path / "c", model, optimizer)
    kept = {tuple(moment.shape): moment.numpy() for moment in _moments(optimizer) if moment.ndim == 3}
    assert kept, "there is such a moment"
    found = contents(tmp_path / "c")
    for values in kept.values():
        assert any(array.shape == values.shape and np.array_equal(array, values) for array in found.values())
