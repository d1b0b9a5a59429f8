"""Whatever has happened to a checkpoint's files is found, and the error names the file and the tensor."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_sharding.checkpoint.folder import Checkpoint, is_complete, open_checkpoint, read_index
from hp_sharding.checkpoint.index import FORMAT, Index, TensorEntry, parameter_of, seal
from hp_sharding.checkpoint.values import encode
from hp_sharding.errors import CheckpointError

from ..stored import contents, halves, piece, random_tensors, same, save_parts

_Change = Callable[[Index], Index]
_WEIGHT = "model/net.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two data files."""
    save_parts(tmp_path, halves(random_tensors(1)), state={"steps": 3, "é": 1.5e-7}, aliases={"model/tied": _WEIGHT})
    return tmp_path


_USES: list[Callable[[Checkpoint], Any]] = [
    Checkpoint.verify,
    lambda checkpoint: checkpoint.check(_WEIGHT),
    lambda checkpoint: checkpoint.read(_WEIGHT, 0, 1),
]
"""All that looks at data files."""


def _data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _verified(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        checkpoint.verify()


def test_parameters_are_named_as_users_know_them() -> None:
    assert parameter_of("model/net.0.weight") == "net.0.weight"
    assert parameter_of("optimizer/net.0.weight/moment1") == "net.0.weight"
    assert parameter_of("state/3") == "state/3"


@pytest.mark.parametrize("number", [0, 1])
def test_every_flipped_byte_of_a_data_file_is_found(folder: Path, number: int) -> None:
    path = _data_files(folder)[number]
    data = path.read_bytes()
    index = read_index(folder)
    first = index.places()[number][0]
    for at in range(len(data)):
        path.write_bytes(_flipped(data, at))
        with pytest.raises(CheckpointError) as caught:
            _verified(folder)
        hit = [
            place for place in index.places()[number] if place.offset_bytes <= at < place.offset_bytes + place.nbytes
        ]
        assert caught.value.file == str(path), at
        assert caught.value.parameter == parameter_of((hit or [first])[0].name), at
        assert str(path) in str(caught.value)
        assert is_complete(folder)  # which looks at sizes alone
    path.write_bytes(data)
    _verified(folder)


def test_every_flipped_byte_of_the_index_is_found(folder: Path) -> None:
    path = folder / "index.json"
    data = path.read_bytes()
    expected = read_index(folder)
    n_found = 0
    for at in range(len(data)):
        path.write_bytes(_flipped(data, at))
        if is_complete(folder):
            assert read_index(folder) == expected, at  # as where a blank is another kind of blank
            continue
        n_found += 1
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            open_checkpoint(folder)
    assert n_found > 0.98 * len(data)


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]


def test_another_length_is_found(folder: Path) -> None:
    for path in (*_data_files(folder), folder / "index.json"):
        data = path.read_bytes()
        for changed in [*(data[:length] for length in range(0, len(data) - 1, 3)), data + b"\0", data * 2]:
            path.write_bytes(changed)
            with pytest.raises(CheckpointError, match=r"truncated|too long|damaged") as caught:
                _verified(folder)
            assert caught.value.file == str(path)
            if path.suffix == ".safetensors":
                assert caught.value.parameter == "net.weight" and "optimizer/net.weight/moment1" in str(caught.value)
            assert not is_complete(folder)
        path.write_bytes(data)
    _verified(folder)


def test_a_missing_data_file_is_named_with_what_it_holds(folder: Path) -> None:
    for path in _data_files(folder):
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(CheckpointError, match="moment1 and others, is missing") as caught:
            _verified(folder)
        assert caught.value.file == str(path) and caught.value.parameter == "net.weight"
        assert not is_complete(folder)
        path.write_bytes(data)


def test_a_data_file_of_another_save_is_found(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    changed = {**random_tensors(2), "model/net.bias": np.ones(5, np.int16)}
    del changed[_WEIGHT]
    save_parts(other, halves({**changed, "model/net.weighs": random_tensors(2)[_WEIGHT]}))
    for path, another in zip(_data_files(folder), _data_files(other), strict=True):
        path.write_bytes(another.read_bytes()[: path.stat().st_size].ljust(path.stat().st_size))
    with pytest.raises(CheckpointError, match="checksum of its header is wrong"):
        _verified(folder)


def test_what_is_damaged_leaves_no_file_open(folder: Path) -> None:
    before = os.listdir("/proc/self/fd")
    path = _data_files(folder)[1]
    path.write_bytes(_flipped(path.read_bytes(), 20))
    with pytest.raises(CheckpointError, match="checksum of its header is wrong"):
        _verified(folder)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_folder_without_an_index_is_a_save_that_did_not_finish(folder: Path) -> None:
    (folder / "index.json").unlink()
    assert not is_complete(folder)
    with pytest.raises(CheckpointError, match=r"still running or did not finish.*latest_checkpoint"):
        open_checkpoint(folder)
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match=r"has no index\.json"):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(folder / "typo")
    (folder / "model.pdparams").touch()
    with pytest.raises(CheckpointError, match=r"is a file.*load_full"):
        open_checkpoint(folder / "model.pdparams")


def _resealed(folder: Path, **changes: Any) -> None:
    found = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**found, **changes}))


def test_a_newer_version_is_refused_by_name(folder: Path) -> None:
    _resealed(folder, version=2, content={"all": "new"})
    with pytest.raises(
        CheckpointError, match=r"index\.json is of version 2 .*reads version 1.*Update hp_sharding"
    ) as caught:
        open_checkpoint(folder)
    assert caught.value.file == str(folder / "index.json")


@pytest.mark.parametrize("changes", [{"version": 0}, {"version": "1"}, {"version": True}, {"checksum": None}])
def test_an_odd_version_or_checksum_is_damage(folder: Path, changes: dict[str, Any]) -> None:
    _resealed(folder, **changes)
    with pytest.raises(CheckpointError, match="checksum"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100000, "\ufeff{}", '{"format": "other"}'])
def test_what_is_no_index_is_damage(folder: Path, text: str) -> None:
    (folder / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        open_checkpoint(folder)


def test_an_index_of_another_format_is_damage(folder: Path) -> None:
    _resealed(folder, format="something else")
    with pytest.raises(CheckpointError, match="its format is 'something else', not 'hp_sharding checkpoint'"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": {"model/w": {"shape": [-1], "dtype": "float32", "chunks": []}}},
        {"tensors": {"model/w": {"shape": [1.0], "dtype": "float32", "chunks": []}}},
        {"tensors": {"model/w": {"shape": [True], "dtype": "float32", "chunks": []}}},
        {"tensors": {"model/w": {"shape": [1], "dtype": ["float32"], "chunks": []}}},
        {"tensors": {"model/w": {"shape": [1], "dtype": "float32", "chunks": [[0, 1]]}}},
        {"tensors": {}, "files": [{"name": "../secret", "nbytes": 1, "header_nbytes": 1, "header_crc32": 0}]},
        {"tensors": {}, "files": [{"name": "a\0b", "nbytes": 1, "header_nbytes": 1, "header_crc32": 0}]},
        {"tensors": {}, "files": [{"name": "é" * 128, "nbytes": 1, "header_nbytes": 1, "header_crc32": 0}]},
        {"tensors": {}, "files": [{"name": "\ud800", "nbytes": 1, "header_nbytes": 1, "header_crc32": 0}]},
        {"tensors": {}, "files": [{"name": "f", "nbytes": None, "header_nbytes": 1, "header_crc32": 0}]},
        {"tensors": {}, "saved_at": "yesterday"},
        {"tensors": {}, "save_id": 5},
        {"tensors": {}, "aliases": {"model/a": 1}},
        {"tensors": []},
        {"aliases": None},
    ],
)
def test_an_index_of_odd_types_is_damage(folder: Path, change: dict[str, Any]) -> None:
    content = {**json.loads((folder / "index.json").read_text())["content"], **change}
    (folder / "index.json").write_bytes(seal(content, FORMAT))
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        open_checkpoint(folder)


def _entry(change: Callable[[TensorEntry], TensorEntry]) -> _Change:
    """Changes what the index says of the weight."""
    return lambda index: index._replace(tensors={**index.tensors, _WEIGHT: change(index.tensors[_WEIGHT])})


def _chunk(number: int, **changes: int) -> _Change:
    """Changes a number in one of the weight's two chunks by so much."""

    def change(entry: TensorEntry) -> TensorEntry:
        chunks = list(entry.chunks)
        moved = {field: getattr(chunks[number], field) + by for field, by in changes.items()}
        chunks[number] = chunks[number]._replace(**moved)
        return entry._replace(chunks=tuple(chunks))

    return _entry(change)


_LIES: list[tuple[_Change, str]] = [
    (_chunk(1, start=1), "of its 12 elements those from 6 to 7 are in no file"),
    (_chunk(1, start=-1), "of its 12 elements those from 5 to 6 are there twice"),
    (_chunk(0, stop=-6), "from element 0 to 0"),
    (_chunk(1, stop=1), "those from 12 to 13 are beyond its shape"),
    (_chunk(1, stop=-1), "those from 11 to 12 are in no file"),
    (_entry(lambda entry: entry._replace(chunks=())), "those from 0 to 12 are in no file"),
    (_entry(lambda entry: entry._replace(shape=(4, 4))), "those from 12 to 16 are in no file"),
    (_entry(lambda entry: entry._replace(dtype="float64")), "it begins at byte|it has tensors for"),
    (_entry(lambda entry: entry._replace(dtype="int32")), "its header has .*'F32'.* where the index has .*'I32'"),
    (_entry(lambda entry: entry._replace(dtype="float8")), "its dtype 'float8' is unknown; known are"),
    (_chunk(0, offset_bytes=4), "it begins at byte .*, where byte .* was expected"),
    (_chunk(1, file=5), "not one of the 2 listed"),
    (_chunk(1, file=-1), "it begins at byte|it has tensors for"),
    (lambda index: index._replace(aliases={"model/tied": "model/gone"}), "said to be the same as model/gone, which"),
    (lambda index: index._replace(files=index.files[:1]), "not one of the 1 listed"),
    (
        lambda index: index._replace(files=tuple(file._replace(header_crc32=5) for file in index.files)),
        "the checksum of its header is wrong",
    ),
    (lambda index: index._replace(tensors={}), "it has tensors for"),
]


@pytest.mark.parametrize(("change", "message"), _LIES)
def test_an_index_that_lies_is_found(folder: Path, change: _Change, message: str) -> None:
    (folder / "index.json").write_bytes(change(read_index(folder)).to_json())
    with pytest.raises(CheckpointError, match=message) as caught:
        _verified(folder)
    assert caught.value.file.startswith(str(folder))


def test_files_of_no_bytes_are_no_checkpoint(folder: Path) -> None:
    index = read_index(folder)
    files = tuple(file._replace(nbytes=0, header_nbytes=0, header_crc32=0) for file in index.files)
    (folder / "index.json").write_bytes(index._replace(tensors={}, aliases={}, files=files).to_json())
    for path in _data_files(folder):
        os.truncate(path, 0)
    with open_checkpoint(folder) as checkpoint, pytest.raises(CheckpointError, match="its header cannot be parsed"):
        checkpoint.verify(0, 3)


def test_a_shape_of_as_many_elements_is_found_where_the_tensor_is_whole(tmp_path: Path) -> None:
    save_parts(tmp_path, [[piece(_WEIGHT, np.ones((3, 4), np.float32))]])
    turned = _entry(lambda entry: entry._replace(shape=(4, 3)))(read_index(tmp_path))
    (tmp_path / "index.json").write_bytes(turned.to_json())
    with pytest.raises(CheckpointError, match=r"header has .*\[3, 4\].* index has .*\[4, 3\]"):
        _verified(tmp_path)


@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize("use", _USES)
def test_a_disk_that_fails_is_an_error_that_names_file_and_parameter(
    folder: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Checkpoint], Any], is_used: bool
) -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    checkpoint = open_checkpoint(folder)
    if is_used:
        checkpoint.verify()
    monkeypatch.setattr(os, "preadv", failing)
    message = r"cannot be read, in .*net\.weight.*: Input/output error: the disk"
    with checkpoint, pytest.raises(CheckpointError, match=message) as caught:
        use(checkpoint)
    assert caught.value.parameter == "net.weight" and caught.value.file == str(_data_files(folder)[0])


def test_a_file_cut_short_after_it_was_opened_is_found(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        checkpoint.verify()
        os.truncate(_data_files(folder)[1], checkpoint.index.files[1].header_nbytes + 3)
        with pytest.raises(CheckpointError, match=r"it ends at byte .* were written") as caught:
            checkpoint.read(_WEIGHT, 0, 12)
        assert caught.value.parameter == "net.weight" and caught.value.file == str(_data_files(folder)[1])


def test_a_disk_that_fails_under_the_index_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_bytes(self: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read: Input/output error"):
        open_checkpoint(folder)
    assert not is_complete(folder)


def test_damage_is_found_by_whoever_has_that_share(folder: Path) -> None:
    path = _data_files(folder)[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with open_checkpoint(folder) as checkpoint:
        checkpoint.verify(0, 2)
        with pytest.raises(CheckpointError, match=r"in model/net.bias: a byte between"):
            checkpoint.verify(1, 2)


@pytest.mark.parametrize("use", _USES)
def test_a_file_is_checked_before_it_is_first_used(folder: Path, use: Callable[[Checkpoint], Any]) -> None:
    path = _data_files(folder)[0]
    data = path.read_bytes()
    for changed, message in (
        (None, "is missing"),
        (data[:-1], "is truncated"),
        (_flipped(data, 20), "the checksum of its header is wrong"),
    ):
        path.unlink() if changed is None else path.write_bytes(changed)
        with open_checkpoint(folder) as checkpoint:
            for _ in range(2):
                with pytest.raises(CheckpointError, match=message) as caught:
                    use(checkpoint)
                assert caught.value.file == str(path) and caught.value.parameter == "net.weight"
            path.write_bytes(data)
            use(checkpoint)


def test_each_flipped_byte_is_found_by_a_check_of_its_tensor_alone(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        for name, entry in checkpoint.index.tensors.items():
            for place in entry.places(name):
                path = _data_files(folder)[place.chunk.file]
                data = path.read_bytes()
                for at in (place.offset_bytes, place.offset_bytes + place.nbytes - 1):
                    path.write_bytes(_flipped(data, at))
                    with pytest.raises(CheckpointError, match=f"in {name}: a byte between") as caught:
                        checkpoint.check(name)
                    assert caught.value.file == str(path)
                    for other in checkpoint.tensors.keys() - {name}:
                        checkpoint.check(other)
                path.write_bytes(data)


def test_every_flipped_byte_of_arrays_in_the_state_is_found_when_it_is_decoded(tmp_path: Path) -> None:
    encoded = encode({"words": np.array(["a", "é"] * 200), "numbers": np.arange(400)}, where="")
    save_parts(tmp_path, [[piece(name, array) for name, array in encoded.arrays.items()]], state=encoded.json)
    path, index = _data_files(tmp_path)[0], read_index(tmp_path)
    data = path.read_bytes()
    for place in index.places()[0]:
        for at in range(place.offset_bytes, place.offset_bytes + place.nbytes, 61):
            path.write_bytes(_flipped(data, at))
            with (
                open_checkpoint(tmp_path) as checkpoint,
                pytest.raises(CheckpointError, match="a byte between") as caught,
            ):
                _ = checkpoint.state
            assert (caught.value.file, caught.value.parameter) == (str(path), place.name)


_BASE64 = {"base64": "AAAA"}


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"$": "array", "dtype": "float32", "shape": [2], "tensor": "state/0"}},
        {"a": {"$": "array", "dtype": "<U9", "shape": [2], "tensor": []}},
        {"a": {"$": "array", "dtype": "float99", "shape": [2], **_BASE64}},
        {"a": {"$": "array", "dtype": "float32", "shape": [1 << 70], **_BASE64}},
        {"a": {"$": "array", "shape": [1], **_BASE64}},
        {"a": {"$": "bytes", "base64": "é"}},
        {"a": {"$": "int", "hex": 5}},
        {"a": {"$": "dict", "items": [[[], 1]]}},
        {"a": {"$": "what"}},
    ],
)
def test_state_that_makes_no_sense_is_an_error_of_its_own(folder: Path, state: Any) -> None:
    (folder / "index.json").write_bytes(read_index(folder)._replace(state=state).to_json())
    with open_checkpoint(folder) as checkpoint, pytest.raises(CheckpointError):
        _ = checkpoint.state


def test_the_checkpoint_of_these_tests_is_whole(folder: Path) -> None:
    assert is_complete(folder) and same(contents(folder), random_tensors(1))
