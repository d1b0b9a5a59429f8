"""What reading and writing checkpoints refuses, each with its own words: a file that is damaged, a disk that fails."""

from __future__ import annotations

import _codecs
import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import paddle
import pytest

from hp_sharding.checkpoint import command, durable
from hp_sharding.checkpoint.beside import FileBeside
from hp_sharding.checkpoint.folder import Save, _size_now, _size_of, new_save_id
from hp_sharding.checkpoint.full_state import FullMoment, FullParam, FullState
from hp_sharding.checkpoint.held import _stored_dtype
from hp_sharding.checkpoint.index import PART_FORMAT, Written, seal
from hp_sharding.checkpoint.opened import list_names
from hp_sharding.checkpoint.paddle_files import PaddleTarget
from hp_sharding.checkpoint.safetensors_files import SafetensorsTarget, TensorsFile
from hp_sharding.checkpoint.source import TensorInfo
from hp_sharding.checkpoint.unpickled import PARTS, PickledFile
from hp_sharding.errors import CheckpointError, ConfigError

_RECONSTRUCT = np.zeros(1).__reduce__()[0]
_SCALAR = np.float32(1).__reduce__()[0]
_FROMBUFFER = np.zeros(1).__reduce_ex__(5)[0]
_F4, _F8 = np.dtype("f4"), np.dtype("f8")


class _Made:
    """What its pickle says how to make."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"w": _Made(_FROMBUFFER, b"1234", "f4", (1,), "C")}, "an array without a dtype"),
        ({"w": _Made(_FROMBUFFER, 3, _F4, (1,), "C")}, "values that are no bytes"),
        ({"w": _Made(_RECONSTRUCT, np.ndarray, (0,), b"b")}, "an array without values"),
        ({"w": _Made(_SCALAR, "f4", b"1234")}, "a number without a dtype or value"),
        ({"w": _Made(_SCALAR, _F8, b"1234")}, "a number cut off"),
        ({"w": _Made(_codecs.encode, "a", "utf-8")}, "an encoding 'utf-8'"),
        ({"w": _Made(set, [(1,)])}, "a set of what is no text or number"),
        (
            {"a": np.zeros(2, _F4), "b": np.zeros(2, _F8), PARTS: {"w": {"OriginShape": (4,), "slices": ["a", "b"]}}},
            "parts of w of different dtypes",
        ),
        (b"\x80\x02c" + b"a" * 1000, "a name without end"),
        (b"\x80\x04\x85.", "a tuple of nothing"),
        (b"\x80\x04}(K\x01u.", "a key without a value"),
        (b"\x80\x04K\x01K\x02\x93.", "a name that is no text"),
    ],
)
def test_a_pickle_that_makes_no_sense_is_told_what_it_has(tmp_path: Path, content: Any, said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, 4))
    with pytest.raises(CheckpointError, match=f"or is damaged: {said}, before byte") as raised:
        PickledFile(path)
    assert raised.value.file == str(path)


def _read(path: Path) -> None:
    with PickledFile(path) as file:
        file.content["w"].array()


@pytest.mark.parametrize(
    ("value", "written", "damaged"),
    [
        (np.full(400, 255, np.uint8), b"\xc3\xbf", b"\xc4\x80"),
        (np.full(400, 255, np.uint8), b"M\x90\x01\x85", b"M\x91\x01\x85"),
        (np.full(400, 255, np.uint8), b"\xc3\xbf", b"\xc3\x28"),
        ("\u00e9" * 400, b"\xc3\xa9", b"\xc3\x28"),
    ],
    ids=["no byte", "too few", "no text", "a text that is none"],
)
def test_a_text_that_stands_for_no_bytes_is_damage(tmp_path: Path, value: Any, written: bytes, damaged: bytes) -> None:
    path = tmp_path / "file"
    data = pickle.dumps({"w": value}, 2)
    assert written in data
    path.write_bytes(data.replace(written, damaged, 1))
    with pytest.raises(CheckpointError, match="are not what was written; the file is damaged: use a copy"):
        _read(path)


@pytest.mark.parametrize(
    ("header", "more", "said"),
    [
        ([], b"", "it is no object"),
        ({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"1234", "2 bytes be"),
    ],
)
def test_safetensors_with_another_header(tmp_path: Path, header: Any, more: bytes, said: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + more)
    with pytest.raises(CheckpointError, match=f"its header is damaged: {said}.*use a copy"):
        TensorsFile(tmp_path / "file")


def test_a_manifest_without_its_file_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"here\.json.*KeyError: 'file'"):
        Written.from_json(seal({"save_id": "a", "tensors": {}}, PART_FORMAT), file="here.json", save_id="a")


def test_a_dtype_that_no_checkpoint_holds_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"'net.phase' is of complex64, which a checkpoint cannot hold.*persistable=False"
    ):
        _stored_dtype("net.phase", paddle.zeros([1], "complex64"))


def _state() -> FullState:
    info = TensorInfo((3,), "float32")
    return FullState([FullParam("w", "linear_0.w_0", info, "float32")], {}, [FullMoment("w", "moment1", info)], True)


# -- failures of the disk ----------------------------------------------------------------------------------------------


def _endless(path: Path) -> Path:
    """A path that no system call gets through."""
    path.symlink_to(path)
    return path


@pytest.mark.parametrize("read", [_size_of, _size_now, list_names])
def test_what_cannot_be_looked_at_is_said_so(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    with pytest.raises(CheckpointError, match=f"loop cannot be read: {os.strerror(errno.ELOOP)}"):
        read(_endless(tmp_path / "loop"))


def test_a_manifest_and_an_index_that_cannot_be_read(tmp_path: Path) -> None:
    save = Save(tmp_path, new_save_id(), 0, 1)
    _endless(tmp_path / save._name(0, "json"))
    with pytest.raises(CheckpointError, match=r"of-00001\.json cannot be read"):
        save._read_manifest(0, {})
    _endless(tmp_path / "index.json")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        save._index_now()


def test_a_folder_that_cannot_be_read_is_named_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(command, "is_ours", fails)
    with pytest.raises(click.UsageError, match="cannot be read: Permission denied"):
        command._check_source(tmp_path)


def test_a_file_that_cannot_be_closed_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = FileBeside(tmp_path / "file")
    file.write(b"data")

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CheckpointError, match="file cannot be written: Input/output error"):
        file.close()
    assert os.listdir(tmp_path) == []


def test_a_file_that_cannot_get_its_name_is_not_left_beside(tmp_path: Path) -> None:
    file = FileBeside(tmp_path / "file")
    file.write(b"data")
    file.close()
    (tmp_path / "file").mkdir()
    with pytest.raises(CheckpointError, match="file cannot be written: Is a directory"):
        file.rename()
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("target", [PaddleTarget, SafetensorsTarget])
def test_no_half_of_a_pair_is_left(tmp_path: Path, target: Any) -> None:
    """Where the file of the optimizer cannot be begun, that of the weights goes."""
    names = {PaddleTarget: "ours.pdopt", SafetensorsTarget: "ours.optimizer.safetensors"}
    (tmp_path / f"{names[target]}.partial").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written: Is a directory"):
        target(str(tmp_path / "ours"), _state())
    assert os.listdir(tmp_path) == [f"{names[target]}.partial"]


def test_a_folder_that_cannot_be_put_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_before = os.listdir("/proc/self/fd")

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CheckpointError, match="cannot be put on the disk: Input/output error"):
        durable.sync_folder(tmp_path)
    assert os.listdir("/proc/self/fd") == open_before


def test_no_file_stays_open(tmp_path: Path) -> None:
    open_before = os.listdir("/proc/self/fd")
    with durable.new_file(tmp_path / "file"):
        assert os.listdir("/proc/self/fd") != open_before
    assert os.listdir("/proc/self/fd") == open_before
