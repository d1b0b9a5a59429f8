"""A save of several parts: what it replaces, refuses and leaves alone; and which checkpoint is the latest."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_sharding.checkpoint import folder as saving_to
from hp_sharding.checkpoint import opened
from hp_sharding.checkpoint.folder import (
    Checkpoint,
    Save,
    is_complete,
    latest_checkpoint,
    new_save_id,
    open_checkpoint,
    read_index,
)
from hp_sharding.checkpoint.index import Index
from hp_sharding.checkpoint.source import TensorInfo
from hp_sharding.checkpoint.tensor_file import Bytes, Piece
from hp_sharding.errors import CheckpointError

from ..stored import contents, halves, names, piece, random_tensors, same, save_parts, whole

_ONE, _TWO = random_tensors(1), random_tensors(2)
_WEIGHT = "model/net.weight"
_COMPLETE = ["00000-of-00002.safetensors", "00001-of-00002.safetensors", "index.json"]


def _saves(folder: Path, parts: Sequence[Sequence[Piece]]) -> list[Save]:
    """All parts written, and nothing committed."""
    save_id = new_save_id()
    saves = [Save(folder, save_id, part, len(parts)) for part in range(len(parts))]
    for save, pieces in zip(saves, parts, strict=True):
        save.write(pieces)
    return saves


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of this machine shows everything at once."""
    monkeypatch.setattr(saving_to, "SEEN_WITHIN_S", 0)


def test_ids_differ() -> None:
    assert len({new_save_id() for _ in range(100)}) == 100


def test_a_save_makes_its_folder_and_those_above(tmp_path: Path) -> None:
    save_parts(tmp_path / "a" / "b", halves(_ONE))
    assert same(contents(tmp_path / "a" / "b"), _ONE)
    assert names(tmp_path / "a" / "b") == _COMPLETE


@pytest.mark.usefixtures("no_wait")
def test_parts_are_missing_until_they_have_written(tmp_path: Path) -> None:
    saves = [Save(tmp_path, save_id, part, 2) for save_id in [new_save_id()] for part in range(2)]
    assert saves[0].missing_parts() == [0, 1]
    saves[1].write(halves(_ONE)[1])
    assert saves[0].missing_parts() == saves[1].missing_parts() == [0]
    with pytest.raises(CheckpointError, match=r"parts \[0\] of 2 cannot be seen .* one folder that all of them see"):
        saves[1].commit({}, {})
    saves[0].write(halves(_ONE)[0])
    assert saves[0].missing_parts() == []


def test_until_the_commit_the_old_one_is_there_and_then_the_new_one(tmp_path: Path) -> None:
    save_parts(tmp_path, halves(_ONE))
    saves = _saves(tmp_path, [*halves(_TWO), []])
    assert same(contents(tmp_path), _ONE)
    saves[2].commit({}, {})
    assert same(contents(tmp_path), _TWO)
    assert names(tmp_path) == [f"0000{part}-of-00003.safetensors" for part in range(3)] + ["index.json"]


def test_what_was_read_from_stays_readable_while_it_is_replaced(tmp_path: Path) -> None:
    save_parts(tmp_path, halves(_ONE))
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.verify()
        save_parts(tmp_path, halves(_TWO))
        checkpoint.verify()
        assert same({name: whole(checkpoint, name) for name in checkpoint.tensors}, _ONE)


def test_what_was_replaced_before_it_was_read_is_said_so(tmp_path: Path) -> None:
    save_parts(tmp_path, halves(_ONE))
    for use in (Checkpoint.verify, lambda opened: opened.check(_WEIGHT), lambda opened: opened.read(_WEIGHT, 0, 1)):
        with open_checkpoint(tmp_path) as checkpoint:
            save_parts(tmp_path, halves(_TWO))
            with pytest.raises(
                CheckpointError, match=r"is missing.* has replaced this checkpoint .*load it again"
            ) as caught:
                use(checkpoint)
            assert caught.value.file.startswith(str(tmp_path)) and caught.value.parameter == "net.weight"


def test_looking_while_it_is_replaced_finds_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_parts(tmp_path, halves(_ONE))
    read, n_reads = read_index, 0

    def late(path: Path) -> Index:
        nonlocal n_reads
        index, n_reads = read(path), n_reads + 1
        if n_reads == 1:
            save_parts(tmp_path, halves(_TWO))
        return index

    monkeypatch.setattr(opened, "read_index", late)
    assert is_complete(tmp_path) and n_reads == 2
    n_reads = 0
    with opened.open_complete(tmp_path) as checkpoint:
        assert checkpoint.identity == read(tmp_path).save_id


class _StaleListings:
    """A network file system: listings are those of before, and a name that was not there stays so for a while.

    Names turn up once ``n_sleeps`` more pauses were made.
    """

    def __init__(self, patch: pytest.MonkeyPatch, hidden: str, n_sleeps: int) -> None:
        self.n_left = n_sleeps
        self.pauses_s: list[float] = []
        self._hidden = hidden
        self._listed = os.listdir
        patch.setattr(os, "listdir", lambda path: [name for name in self._listed(path) if name[0].isalpha()])
        patch.setattr(Path, "open", lambda path, *args, **kwargs: self._open_path(path, *args, **kwargs))
        patch.setattr(Path, "read_bytes", lambda path: self._open_path(path, "rb").read())
        patch.setattr(time, "sleep", self._sleep)

    def _open_path(self, path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name.endswith(self._hidden) and self.n_left:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return open(path, *args, **kwargs)

    def _sleep(self, time_s: float) -> None:
        self.pauses_s.append(time_s)
        self.n_left = max(0, self.n_left - 1)


@pytest.mark.parametrize("hidden", ["00001-of-00002.json", "00000-of-00002.safetensors"])
def test_what_other_machines_wrote_may_take_a_while_to_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    save_parts(tmp_path, halves(_ONE))
    saves = _saves(tmp_path, halves(_TWO))
    with monkeypatch.context() as patch:
        system = _StaleListings(patch, hidden, 4)
        assert saves[0].missing_parts() == ([1] if hidden.endswith("json") else [])
        saves[0].commit({}, {})
        assert len(system.pauses_s) == 4 and system.pauses_s == sorted(set(system.pauses_s))
    assert same(contents(tmp_path), _TWO)


def test_a_file_that_shows_only_in_part_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = _saves(tmp_path, halves(_ONE))
    path = tmp_path / f"{saves[0].save_id}-00001-of-00002.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-9])
    monkeypatch.setattr(time, "sleep", lambda _: path.write_bytes(data))
    saves[0].commit({}, {})
    assert same(contents(tmp_path), _ONE)


def test_what_never_shows_is_an_error_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves, now_s = _saves(tmp_path, halves(_ONE)), [0.0]
    path = tmp_path / f"{saves[0].save_id}-00001-of-00002.safetensors"
    os.truncate(path, 9)

    def sleep(time_s: float) -> None:
        now_s[0] += time_s

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    with pytest.raises(CheckpointError, match=r"00001-of-00002\.safetensors cannot be seen .* one folder") as caught:
        saves[0].commit({}, {})
    assert caught.value.file == str(path) and now_s[0] == pytest.approx(60)
    saves[1].discard()
    with pytest.raises(CheckpointError, match=r"parts \[1\] of 2 cannot be seen"):
        saves[0].commit({}, {})


def test_only_parts_that_were_missing_are_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = [Save(tmp_path, save_id, part, 2) for save_id in [new_save_id()] for part in range(2)]
    saves[0].write(halves(_ONE)[0])
    assert saves[0].missing_parts() == [1]
    asked: list[str] = []
    real = Path.open

    def noting(path: Path, *args: Any, **kwargs: Any) -> Any:
        asked.append(path.name)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", noting)
    assert saves[0].missing_parts() == [1]
    assert {name.rpartition(".")[0] for name in asked} == {f"{saves[0].save_id}-00001-of-00002"}


def test_what_was_committed_is_kept_whatever_a_listing_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = _saves(tmp_path, halves(_ONE))
    saves[0].commit({}, {})
    monkeypatch.setattr(os, "listdir", lambda _: [])
    for save in saves:
        save.discard()
    monkeypatch.undo()
    assert same(contents(tmp_path), _ONE)


def test_bytes_so_far_are_those_of_all_parts_whole_or_not(tmp_path: Path) -> None:
    save_parts(tmp_path, halves(_ONE))
    save_id = new_save_id()
    saves = [Save(tmp_path / "new", save_id, part, 2) for part in range(2)]
    assert saves[0].bytes_so_far() == 0

    def blocks() -> Iterator[Bytes]:
        yield np.zeros(8, np.uint8)
        assert saves[1].bytes_so_far() > 8
        yield np.zeros(8, np.uint8)

    saves[0].write([Piece("model/w", TensorInfo((16,), "int8"), 0, 16, blocks)])
    saves[1].write(halves(_TWO)[1])
    (tmp_path / "new" / f"{save_id}-00001-of-00002.json.partial").write_bytes(b"12345")
    (tmp_path / "new" / f"{new_save_id()}-00001-of-00002.json").write_bytes(b"12345")
    assert saves[1].bytes_so_far() == sum(path.stat().st_size for path in (tmp_path / "new").iterdir()) - 5


@pytest.mark.parametrize("clearing", ["leftovers", "old"])
def test_what_another_process_commits_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clearing: str
) -> None:
    save_parts(tmp_path, halves(_ONE))
    own, others = _saves(tmp_path, halves(_ONE)), _saves(tmp_path, halves(_TWO))
    left, read = _saves(tmp_path, halves(_ONE)), Save._indexed_id
    n_reads = 0

    def late(save: Save) -> str:
        nonlocal n_reads
        found, n_reads = read(save), n_reads + (save is own[0])
        if save is own[0] and n_reads == 1:  # the moment between the index and the first removal
            with monkeypatch.context() as patch:
                patch.setattr(Save, "_remove_others", lambda _: None)
                others[0].commit({}, {})
        return found

    monkeypatch.setattr(Save, "_indexed_id", late)
    own[0].clear_leftovers() if clearing == "leftovers" else own[0].commit({}, {})
    assert n_reads > 1 and same(contents(tmp_path), _TWO)
    assert not any(name.startswith(left[0].save_id) for name in os.listdir(tmp_path))


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    foreign = [
        "model-00001-of-00002.safetensors",
        "20260101-000000-00000-of-00002.safetensors",
        "20260101-000000-0123456g-00000-of-00002.safetensors",
        "20260101-000000-01234567-00000-of-00002.safetensors.bak",
        "x20260101-000000-01234567-00000-of-00002.json",
        "index.json.partial",
        "notes.txt",
    ]
    for name in foreign:
        (tmp_path / name).write_text("mine")
    (tmp_path / "inner").mkdir()
    for tensors in (_ONE, _TWO):
        save_parts(tmp_path, halves(tensors))
    assert all((tmp_path / name).read_text() == "mine" for name in foreign)
    assert len(list(tmp_path.iterdir())) == len(foreign) + 4
    assert same(contents(tmp_path), _TWO)


def test_what_an_unfinished_save_left_goes_with_the_next(tmp_path: Path) -> None:
    save_parts(tmp_path, halves(_ONE))
    _saves(tmp_path, halves(_TWO))
    (tmp_path / f"{new_save_id()}-index.json.partial").touch()
    (tmp_path / f"{new_save_id()}-00003-of-00004.json.partial").touch()
    assert len(names(tmp_path)) == 9
    running = Save(tmp_path, new_save_id(), 1, 2)
    running.write(halves(_TWO)[1])
    Save(tmp_path, running.save_id, 0, 2).clear_leftovers()
    assert len(names(tmp_path)) == 5
    assert same(contents(tmp_path), _ONE) and running.missing_parts() == [0]


def test_leftovers_stay_where_the_index_cannot_tell_what_is_one(tmp_path: Path) -> None:
    Save(tmp_path / "not there", new_save_id(), 0, 1).clear_leftovers()
    save_parts(tmp_path, halves(_ONE))
    (tmp_path / "index.json").write_text("{")
    saves = _saves(tmp_path, halves(_TWO))
    Save(tmp_path, new_save_id(), 0, 2).clear_leftovers()
    saves[1].discard()
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    save_parts(tmp_path, halves(_TWO))
    assert same(contents(tmp_path), _TWO) and names(tmp_path) == _COMPLETE


def test_discarding_takes_back_what_the_part_wrote_and_nothing_else(tmp_path: Path) -> None:
    save_parts(tmp_path, halves(_ONE))
    saves = _saves(tmp_path, halves(_TWO))
    saves[1].discard()
    saves[1].discard()
    assert saves[0].missing_parts() == [1]
    saves[0].discard()
    assert same(contents(tmp_path), _ONE) and names(tmp_path) == _COMPLETE
    Save(tmp_path / "not there", new_save_id(), 0, 1).discard()


def test_discarding_what_was_committed_keeps_it(tmp_path: Path) -> None:
    saves = _saves(tmp_path, halves(_ONE))
    saves[0].commit({}, {})
    for save in saves:
        save.discard()
    assert same(contents(tmp_path), _ONE)


def test_a_part_is_written_once(tmp_path: Path) -> None:
    saves = _saves(tmp_path, halves(_ONE))
    with pytest.raises(CheckpointError, match="File exists"):
        Save(tmp_path, saves[0].save_id, 0, 2).write(halves(_TWO)[0])
    saves[0].commit({}, {})
    assert same(contents(tmp_path), _ONE)


_VALUES = np.arange(6, dtype=np.float32)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([piece("model/w", _VALUES, 0, 3), piece("model/w", _VALUES, 4)], "from 3 to 4 are in no file"),
        ([piece("model/w", _VALUES, 0, 4), piece("model/w", _VALUES, 3)], "from 3 to 4 are there twice"),
        ([piece("model/w", _VALUES), piece("model/w", _VALUES)], "from 0 to 6 are there twice"),
        ([piece("model/w", _VALUES, 0, 3), piece("model/v", _VALUES)], "from 3 to 6 are in no file"),
        (
            [piece("model/w", _VALUES, 0, 3), piece("model/w", _VALUES.astype("int8"), 3)],
            r"int8 \[6\], another part as",
        ),
        ([piece("model/w", _VALUES, 0, 3), piece("model/w", _VALUES.reshape(2, 3), 3)], r"\[2, 3\], another part as"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path, parts: list[Piece], message: str) -> None:
    save_parts(tmp_path, halves(_ONE))
    saves = _saves(tmp_path, [[part] for part in parts])
    with pytest.raises(CheckpointError, match=f"tensor model/w: .*{message}") as caught:
        saves[0].commit({}, {})
    assert caught.value.parameter == "w"
    for save in saves:
        save.discard()
    assert same(contents(tmp_path), _ONE) and names(tmp_path) == _COMPLETE


def test_an_alias_of_what_nobody_wrote_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="said to be the same as model/gone"):
        _saves(tmp_path, halves(_ONE))[0].commit({}, {"model/tied": "model/gone"})
    assert not is_complete(tmp_path)


@pytest.mark.usefixtures("no_wait")
def test_a_data_file_that_is_not_what_was_written_is_refused(tmp_path: Path) -> None:
    saves = _saves(tmp_path, halves(_ONE))
    path = tmp_path / f"{saves[0].save_id}-00001-of-00002.safetensors"
    with path.open("ab") as file:
        file.write(b"!")
    with pytest.raises(CheckpointError, match="does something else write here") as caught:
        saves[0].commit({}, {})
    assert caught.value.file == str(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be seen .* one folder") as caught:
        saves[0].commit({}, {})
    assert caught.value.file == str(path) and not is_complete(tmp_path)


def test_a_manifest_that_is_damaged_or_of_another_save_is_refused(tmp_path: Path) -> None:
    saves = _saves(tmp_path, halves(_ONE))
    path = tmp_path / f"{saves[0].save_id}-00001-of-00002.json"
    other = _saves(tmp_path, halves(_ONE))[0].save_id
    for data, message in (
        (path.read_bytes().replace(b"int8", b"int3"), "checksum is wrong"),
        ((tmp_path / f"{other}-00001-of-00002.json").read_bytes(), "belongs to another save"),
        (json.dumps({**json.loads(path.read_text()), "format": "hp_sharding checkpoint"}).encode(), "its format is"),
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message) as caught:
            saves[0].commit({}, {})
        assert caught.value.file == str(path)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with checkpoints of 10, 20 and 9 steps, and with what is none."""
    for steps in (10, 20, 9):
        save_parts(tmp_path / f"step_{steps}", halves(_ONE), state={"steps": steps})
    (tmp_path / "log.txt").touch()
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_the_latest_checkpoint_is_the_one_that_was_saved_last(runs: Path) -> None:
    assert latest_checkpoint(runs) == runs / "step_9"  # after going back to an earlier one
    save_parts(runs / "step_20", halves(_ONE), state={"steps": 20})
    assert latest_checkpoint(str(runs)) == runs / "step_20"
    save_parts(runs / "a", halves(_ONE))
    assert latest_checkpoint(runs) == runs / "a"


def test_only_the_files_of_the_latest_checkpoint_are_looked_at(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = Checkpoint.check_sizes, []

    def check_sizes(self: Checkpoint) -> None:
        asked.append(self.path.name)
        real(self)

    monkeypatch.setattr(Checkpoint, "check_sizes", check_sizes)
    next((runs / "step_9").glob("*.safetensors")).unlink()
    assert latest_checkpoint(runs) == runs / "step_20"
    assert asked == ["step_9", "step_20"]


def test_unfinished_and_damaged_ones_are_passed_over(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    _saves(runs / "step_30", halves(_ONE))
    next((runs / "step_20").glob("*.safetensors")).unlink()
    (runs / "step_10" / "index.json").write_text("{}")
    os.truncate(next((runs / "step_9").glob("*.safetensors")), 5)
    save_parts(runs / "step_31", halves(_ONE))
    _saved_at(runs / "step_31", 1.0)
    assert latest_checkpoint(runs) == runs / "step_31"
    assert all(name in caplog.text for name in ("step_9", "step_10", "step_20")) and "step_30" not in caplog.text
    os.truncate(next((runs / "step_31").glob("*.safetensors")), 5)
    assert latest_checkpoint(runs) is None


def _saved_at(folder: Path, time_s: float) -> None:
    index = read_index(folder)
    (folder / "index.json").write_bytes(index._replace(saved_at=time_s).to_json())


def test_where_nothing_was_saved_there_is_no_latest_one(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "not there") is None
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        latest_checkpoint(tmp_path / "file")


def test_a_part_that_gives_up_need_not_be_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save_id = new_save_id()
    first, second = (Save(folder, save_id, part, 2) for part in range(2))
    first.write([piece(_WEIGHT, np.zeros(4, np.float32))])
    assert first.missing_parts() == [1]
    second.give_up()
    with pytest.raises(CheckpointError, match=r"parts \[1\] could not be written"):
        first.missing_parts()
    for save in (first, second):
        save.discard()
    assert os.listdir(folder) == []
    second.give_up()  # and where nobody takes it back, the next save does
    save_parts(folder, halves(_ONE))
    assert not any(name.endswith(".failed") for name in os.listdir(folder))


def test_an_index_of_something_else_stays(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="not that of a checkpoint"):
        Save(tmp_path, new_save_id(), 0, 1).check_place()
    (tmp_path / "index.json").write_text("half of on")
    Save(tmp_path, new_save_id(), 0, 1).check_place()
    save_parts(tmp_path / "c", halves(_ONE))
    Save(tmp_path / "c", new_save_id(), 0, 1).check_place()
