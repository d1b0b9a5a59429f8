"""What is said of a file that makes no sense, by what exactly is wrong with it; and what writers never do."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest

from hp_sharding.checkpoint.folder import Save, new_save_id, open_checkpoint
from hp_sharding.checkpoint.index import FORMAT, seal
from hp_sharding.checkpoint.pickled import PickleWriter
from hp_sharding.checkpoint.safetensors_files import TensorsFile, TensorsWriter, found_in_safetensors
from hp_sharding.checkpoint.source import TensorInfo
from hp_sharding.checkpoint.unpickled import PickledFile
from hp_sharding.checkpoint.whole_files import WholeFiles
from hp_sharding.cli import main
from hp_sharding.errors import CheckpointError
from tests.pickled import NamedTensor, write_pickled
from tests.stored import halves, random_tensors, save_parts

# -- pickles -----------------------------------------------------------------------------------------------------------

_PICKLES: dict[str, tuple[bytes, str]] = {
    "another protocol": (b"\x80\x09}.", "it does not begin as a pickle of protocol 2 to 5, before byte 2"),
    "no pickle": (b"{}", "it does not begin as a pickle of protocol 2 to 5, before byte 1"),
    "an operation": (b"\x80\x04}Q0.", "operation b'Q', before byte 4"),
    "a call of a number": (b"\x80\x04K\x01)R.", "a call of 1, before byte 6"),
    "a call with a number": (b"\x80\x04ccollections\nOrderedDict\nK\x01R.", "a call of Global"),
    "a call of a class": (b"\x80\x04cnumpy\nndarray\n)R.", r"a call of Global\(module='numpy', name='ndarray'\)"),
    "added to a dict": (b"\x80\x04}(K\x01\x90.", "something added to what is no set, before byte 7"),
    "appended to a dict": (b"\x80\x04}K\x01a.", "something appended to what is no list, before byte 6"),
    "a key for a list": (b"\x80\x04]K\x01K\x02s.", "a key for what is no dict, before byte 8"),
    "a state for a dict": (b"\x80\x04}}b.", "a state for what has none, before byte 5"),
    "a list as a key": (b"\x80\x04}]K\x01s.", "a key that is no text or number, before byte 7"),
    "a tuple in a set": (b"\x80\x04\x8f()\x90.", "a key that is no text or number, before byte 6"),
    "a number of many bytes": (
        b"\x80\x04\x8b\x01\x01\0\0" + b"\0" * 257 + b".",
        "a number of 257 bytes, before byte 7",
    ),
    "a number of fewer than none": (b"\x80\x04\x8b\xff\xff\xff\xff.", "a number of -1 bytes, before byte 7"),
    "a list": (b"\x80\x04].", "a list, not a dict, before byte 4"),
    "a dtype as a value": (
        pickle.dumps({"w": np.dtype("f4")}, 4),
        "a dtype, class or function as a value, before byte",
    ),
    "a class as a value": (pickle.dumps({"w": np.ndarray}, 4), "a dtype, class or function as a value, before byte"),
    "dates": (pickle.dumps({"w": np.zeros(2, "M8[s]")}, 4), "an array of dtype 'M8', before byte"),
}


@pytest.mark.parametrize("name", _PICKLES)
def test_a_pickle_is_refused_for_what_is_wrong_with_it(name: str, tmp_path: Path) -> None:
    data, said = _PICKLES[name]
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"state_dict\\(\\), or is damaged: {said}") as caught:
        PickledFile(path)
    assert caught.value.file == str(path)


def test_bytes_beyond_the_end_of_a_pickle_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\x80\x04}\x8c\x01wB\xe8\x03\0\0" + b"x" * 700)
    with pytest.raises(CheckpointError, match=r"file is cut off: 1000 bytes from byte 11 on are 700$"):
        PickledFile(path)


def test_what_a_pickle_names_and_does_not_call_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\x80\x02}U\x01wcos\nsystem\ns.")
    with pytest.raises(CheckpointError, match=r"file refers to os\.system, which no state dict needs. Nothing was run"):
        PickledFile(path)


@pytest.mark.parametrize("key", [b"bytes", (1, b"bytes")])
def test_a_key_that_paddle_does_not_give_back_is_not_written(tmp_path: Path, key: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^a key of sampler\S* is a bytes, which cannot be saved"):
        write_pickled(tmp_path / "file", {"sampler": [{key: 1}]})


# -- whole files -------------------------------------------------------------------------------------------------------

_W = NamedTensor("linear_0.w_0", np.ones((2, 2), np.float32))


@pytest.mark.parametrize(
    ("optimizer", "stranger"),
    [({"master_weights": {"v": _W}}, "v"), ({"linear_1.w_0_moment1_0": _W}, "linear_1.w_0_moment1_0")],
    ids=["master", "moment"],
)
def test_files_of_two_saves_are_not_mixed(tmp_path: Path, optimizer: Any, stranger: str) -> None:
    write_pickled(tmp_path / "both.pdparams", {"w": _W})
    write_pickled(tmp_path / "both.pdopt", optimizer)
    with pytest.raises(CheckpointError, match=r"belong to no parameter in .*take both from the same save") as caught:
        WholeFiles(tmp_path / "both")
    assert caught.value.parameter == stranger


def _safetensors(path: Path, header: Any, more: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + more)
    return path


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (("F8_E4M3", [4], [0, 4]), "w is of F8_E4M3, which is none of "),
        (("U8", [-4], [0, 4]), "its header is damaged: shape or place of w"),
        (("U8", [4], [-4, 0]), "its header is damaged: shape or place of w"),
        (("U8", [4.0], [0, 4]), "its header is damaged: shape or place of w"),
        (("U8", [0], [4, 3]), "its header is damaged: shape or place of w"),
    ],
)
def test_a_tensor_that_cannot_be_is_named(tmp_path: Path, entry: Any, said: str) -> None:
    header = {"w": dict(zip(("dtype", "shape", "data_offsets"), entry, strict=True))}
    with pytest.raises(CheckpointError, match=said) as caught:
        TensorsFile(_safetensors(tmp_path / "file", header, b"1234"))
    assert caught.value.file == str(tmp_path / "file")


def test_a_file_without_room_for_a_header_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234567")
    with pytest.raises(CheckpointError, match="file is cut off: it has no header; use a copy"):
        TensorsFile(tmp_path / "file")


def test_a_tie_to_what_is_not_there_is_damage(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"hp_sharding.tied": '{"head": "gone"}'},
        "w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    }
    file = TensorsFile(_safetensors(tmp_path / "file", header, b"1234"))
    with pytest.raises(CheckpointError, match="its metadata name gone, which is not in it: the file is dam") as caught:
        found_in_safetensors(file, None)
    assert caught.value.parameter == "gone"


# -- folders, and the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"save_id": 5}, {"aliases": {"model/a": ["model/net.bias"]}}], ids=["number", "list"]
)
def test_an_index_whose_names_are_no_texts_is_damage(tmp_path: Path, change: dict[str, Any]) -> None:
    save_parts(tmp_path, halves(random_tensors(1)))
    path = tmp_path / "index.json"
    path.write_bytes(seal({**json.loads(path.read_text())["content"], **change}, FORMAT))
    with pytest.raises(CheckpointError, match=r"index\.json is damaged: TypeError: .* is not text"):
        open_checkpoint(tmp_path)


def test_what_is_not_there_is_not_converted(tmp_path: Path) -> None:
    arguments = ["checkpoint", "convert", str(tmp_path / "typo"), str(tmp_path / "out"), "--to", "paddle"]
    found = click.testing.CliRunner().invoke(main, arguments, terminal_width=200)
    assert found.exit_code == 2, "wrong use, and no damage"
    assert "there is no folder" in found.output
    assert "typo.pdparams" in found.output


# -- what is our own fault ---------------------------------------------------------------------------------------------


def _begun(path: Path, then: Callable[[PickleWriter], None], *, in_table: bool = True) -> None:
    writer = PickleWriter(path, in_table=in_table)
    try:
        then(writer)
    finally:
        writer.discard()


def _deeper(writer: PickleWriter) -> None:
    writer.begin("deep")
    writer.put("w", _W.streamed())


def _too_few(writer: PickleWriter) -> None:
    writer.put("w", _W.streamed()._replace(shape=(3, 2)))


def _not_ended(writer: PickleWriter) -> None:
    writer.begin("deep")
    writer.close()


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (_deeper, "no names for dicts in dicts"),
        (_too_few, "the blocks of w are -8 bytes more"),
        (_not_ended, "begun and not ended"),
    ],
)
def test_a_pickle_is_not_written_wrongly(tmp_path: Path, then: Callable[[PickleWriter], None], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        _begun(tmp_path / "file", then)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("puts", "said"),
    [
        ([("v", 4)], "v before w"),
        ([("w", 3)], "the blocks of w are -4 bytes more"),
        ([("w", 5)], "the blocks of w are 4 bytes more"),
        ([("w", 4)], "v was never written"),
    ],
)
def test_safetensors_are_not_written_wrongly(tmp_path: Path, puts: list[tuple[str, int]], said: str) -> None:
    info = TensorInfo((4,), "float32")
    writer = TensorsWriter(str(tmp_path / "file"), [("w", info), ("v", info)])
    with pytest.raises(AssertionError, match=said):  # noqa: PT012 - which of them it is is in the message
        for key, numel in puts:
            writer.put(key, [np.zeros(numel, np.float32)])
        writer.close()
    writer.discard()


@pytest.mark.parametrize(("save_id", "part", "n_parts"), [("today", 0, 1), ("", 1, 1), ("", -1, 1), ("", 0, 100_000)])
def test_a_save_is_not_called_just_anything(tmp_path: Path, save_id: str, part: int, n_parts: int) -> None:
    with pytest.raises(AssertionError):
        Save(tmp_path, save_id or new_save_id(), part, n_parts)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_nothing_is_read_beyond_a_tensor(tmp_path: Path, start: int, stop: int) -> None:
    save_parts(tmp_path, halves(random_tensors(1)))
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(AssertionError, match=r"net\.weight"):
        checkpoint.read("model/net.weight", start, stop)
