"""A save of several parts: what it replaces, refuses and leaves alone; and which checkpoint is the latest."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hp_sharding.checkpoint import opened
from hp_sharding.checkpoint.folder import (
    Save,
    is_complete,
    latest_checkpoint,
    new_save_id,
    open_checkpoint,
    read_index,
)
from hp_sharding.checkpoint.index import Index
from hp_sharding.checkpoint.tensor_file import Piece
from hp_sharding.errors import CheckpointError

from ..stored import contents, halves, names, piece, random_tensors, same, save_parts, whole

_ONE, _TWO = random_tensors(1), random_tensors(2)
_COMPLETE = ["00000-of-00002.safetensors", "00001-of-00002.safetensors", "index.json"]


def _saves(folder: Path, parts: Sequence[Sequence[Piece]]) -> list[Save]:
    """All parts written, and nothing committed."""
    save_id = new_save_id()
    saves = [Save(folder, save_id, part, len(parts)) for part in range(len(parts))]
    for save, pieces in zip(saves, parts, strict=True):
        save.write(pieces)
    return saves


def test_ids_differ() -> None:
    assert len({new_save_id() for _ in range(100)}) == 100


def test_a_save_makes_its_folder_and_those_above(tmp_path: Path) -> None:
    save_parts(tmp_path / "a" / "b", halves(_ONE))
    assert same(contents(tmp_path / "a" / "b"), _ONE)
    assert names(tmp_path / "a" / "b") == _COMPLETE


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


def test_what_is_open_stays_readable_while_it_is_replaced(tmp_path: Path) -> None:
    save_parts(tmp_path, halves(_ONE))
    with open_checkpoint(tmp_path) as checkpoint:
        save_parts(tmp_path, halves(_TWO))
        checkpoint.verify()
        assert same({name: whole(checkpoint, name) for name in checkpoint.tensors}, _ONE)


def test_opening_while_it_is_replaced_finds_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_parts(tmp_path, halves(_ONE))
    read, n_reads = read_index, 0

    def late(path: Path) -> Index:
        nonlocal n_reads
        index, n_reads = read(path), n_reads + 1
        if n_reads == 1:
            save_parts(tmp_path, halves(_TWO))
        return index

    monkeypatch.setattr(opened, "read_index", late)
    assert same(contents(tmp_path), _TWO)
    n_reads = 0
    assert is_complete(tmp_path)


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


def test_the_latest_checkpoint_has_the_most_steps(runs: Path) -> None:
    assert latest_checkpoint(runs) == runs / "step_20"
    save_parts(runs / "again", halves(_ONE), state={"steps": 20})
    assert latest_checkpoint(str(runs)) == runs / "again"


def test_without_steps_the_latest_checkpoint_is_the_one_that_was_saved_last(runs: Path) -> None:
    save_parts(runs / "a", halves(_ONE))
    assert latest_checkpoint(runs) == runs / "a"
    save_parts(runs / "step_9", halves(_ONE), state={"steps": 9})
    assert latest_checkpoint(runs) == runs / "step_9"


def test_unfinished_and_damaged_ones_are_passed_over(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    _saves(runs / "step_30", halves(_ONE))
    next((runs / "step_20").glob("*.safetensors")).unlink()
    (runs / "step_10" / "index.json").write_text("{}")
    assert latest_checkpoint(runs) == runs / "step_9"
    assert "step_20" in caplog.text and "step_10" in caplog.text and "step_30" not in caplog.text
    os.truncate(next((runs / "step_9").glob("*.safetensors")), 5)
    assert latest_checkpoint(runs) is None


def test_where_nothing_was_saved_there_is_no_latest_one(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "not there") is None
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        latest_checkpoint(tmp_path / "file")
