"""Paddle's pickled files: what is written equals what paddle.save writes, and reading one runs nothing."""

from __future__ import annotations

import io
import os
import pickle
import resource
import signal
import threading
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from hp_sharding.checkpoint.lazy import LazyTensor
from hp_sharding.checkpoint.pickled import PickleWriter
from hp_sharding.checkpoint.unpickled import NAMES, PARTS, PickledFile
from hp_sharding.errors import CheckpointError
from tests.pickled import NamedTensor, put_all, write_pickled

PLAIN = {"last_epoch": 3, "last_lr": 0.1, "best": float("inf"), "text": "é" * 400, "list": [1, -(2**70), None, True],
         "tuple": (), "deep": {1: "one", "more": [{}]}, "of numpy": np.float64(0.1)}  # fmt: skip


def _arrays() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(7)
    return {
        "float32": rng.standard_normal((5, 7)).astype(np.float32),
        "float64": rng.standard_normal((3, 2, 4)),
        "float16": rng.standard_normal(9).astype(np.float16),
        "bfloat16": rng.integers(0, 2**15, (6, 6)).astype(np.uint16),
        "int64": rng.integers(-(2**60), 2**60, (4,)),
        "int32": rng.integers(-9, 9, (200, 3)).astype(np.int32),
        "uint8": rng.integers(0, 255, (300,)).astype(np.uint8),
        "bool": rng.integers(0, 2, (17,)).astype(np.bool_),
        "no axes": np.float32(2.5).reshape(()),
        "empty": np.empty((0, 4), np.float32),
    }


def _tensors() -> dict[str, paddle.Tensor]:
    tensors = {key: paddle.to_tensor(array) for key, array in _arrays().items()}
    for key, tensor in tensors.items():
        tensor.name = f"name of {key}"
    assert tensors["bfloat16"].dtype == paddle.bfloat16
    return tensors


def _named() -> dict[str, NamedTensor]:
    return {key: NamedTensor(f"name of {key}", array) for key, array in _arrays().items()}


def _assert_same(found: Any, expected: Any) -> None:
    """Equal in types, dtypes, shapes, names, the order of keys, and in every bit."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other)
    elif isinstance(expected, paddle.Tensor):
        assert (found.name, found.dtype, found.shape) == (expected.name, expected.dtype, expected.shape)
        assert found.numpy().tobytes() == expected.numpy().tobytes()
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


LOADS: dict[str, Callable[[str], Any]] = {
    "paddle.load": paddle.load,
    "paddle.load in numpy": lambda path: paddle.load(path, return_numpy=True),
    "pickle.load": lambda path: pickle.loads(Path(path).read_bytes()),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("in_dict", [False, True])
def test_equals_what_paddle_saves(tmp_path: Path, load: str, in_dict: bool) -> None:
    more = {"master_weights": _tensors()} if in_dict else {}
    paddle.save({**more, **_tensors(), "LR_Scheduler": PLAIN}, str(tmp_path / "theirs"))
    nested = {"master_weights": iter(_named().items())} if in_dict else {}
    write_pickled(tmp_path / "ours", {**nested, **_named(), "LR_Scheduler": PLAIN}, in_table=not in_dict)
    _assert_same(LOADS[load](str(tmp_path / "ours")), LOADS[load](str(tmp_path / "theirs")))


def test_writes_a_tied_tensor_once(tmp_path: Path) -> None:
    array = np.arange(5000, dtype=np.float32)
    for is_tied in (True, False):
        writer = PickleWriter(tmp_path / f"{is_tied}", in_table=True)
        writer.put("first", NamedTensor("w", array).streamed(), is_tied=is_tied)
        writer.put("between", NamedTensor("v", array[:2]).streamed())
        if is_tied:
            writer.put_again("second", "first")
        else:
            writer.put("second", NamedTensor("w", array).streamed())
        writer.close()
        writer.rename()
    _assert_same(paddle.load(str(tmp_path / "True")), paddle.load(str(tmp_path / "False")))
    assert (tmp_path / "True").stat().st_size < 1.1 * array.nbytes


def _write_40(path: Path) -> None:
    """Forty tensors of 2 MiB, in turn of the dict and of one in it."""
    numel = 1 << 19

    def items() -> Iterator[tuple[str, Any]]:
        for number in range(20):
            yield f"{number}", NamedTensor(f"n{number}", np.full(numel, number, np.float32))

    write_pickled(path, iter([("deep", items()), *[("plain", 3)]]))
    write_pickled(path.with_name("flat"), items(), in_table=True)


def test_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        _write_40(tmp_path / "deep")
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with PickledFile(tmp_path / "flat") as file:
            opened = tracemalloc.get_traced_memory()[1] - before
            assert file.content["7"].read(5, 7).tolist() == [7.0, 7.0]
    finally:
        tracemalloc.stop()
    assert 2 * 2**20 <= written < 2.5 * 2**20
    assert opened < 0.5 * 2**20


# -- reading -----------------------------------------------------------------------------------------------------------


def _assert_reads(file_content: Any, expected: Any) -> None:
    """``expected``: what ``pickle`` makes of it, with arrays in place of tensors."""
    if isinstance(file_content, LazyTensor):
        array = expected[1] if isinstance(expected, tuple) else expected
        assert file_content.name == (expected[0] if isinstance(expected, tuple) else file_content.name)
        _assert_same(file_content.array(), np.asarray(array, order="C"))
        flat, numel = array.reshape(-1), array.size
        for start, stop in ((0, numel // 2), (numel // 3, numel), (numel // 2, numel // 2)):
            _assert_same(file_content.read(start, stop), flat[start:stop])
    elif isinstance(file_content, dict):
        assert list(file_content) == list(expected)
        for key, value in file_content.items():
            _assert_reads(value, expected[key])
    else:
        _assert_same(file_content, expected)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("in_dict", [False, True])
def test_reads_what_paddle_saves(tmp_path: Path, protocol: int, in_dict: bool) -> None:
    more = {"master_weights": _tensors()} if in_dict else {}
    paddle.save({**_tensors(), **more, "LR_Scheduler": PLAIN}, str(tmp_path / "file"), protocol=protocol)
    expected = pickle.loads((tmp_path / "file").read_bytes())
    names = expected.pop(NAMES, {})
    with PickledFile(tmp_path / "file") as file:
        _assert_reads(file.content, expected)
        for key, tensor in file.content.items():
            assert not isinstance(tensor, LazyTensor) or tensor.name == names.get(key, f"name of {key}")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_any_pickle_of_arrays(tmp_path: Path, protocol: int) -> None:
    turned = np.asfortranarray(np.arange(1200, dtype=np.float32).reshape(30, 4, 10))
    value = OrderedDict(
        turned=turned, strided=turned[::2, 1], big_endian=np.arange(300, dtype=">f4"), number=np.float32(0.5),
        long_text="x" * 70_000, long_bytes=bytes(range(256)) * 300, some={1, 2}, frozen=frozenset(["a"]), i=1 + 2j,
        shared=[turned, turned],
    )  # fmt: skip
    (tmp_path / "file").write_bytes(pickle.dumps(value, protocol))
    with PickledFile(tmp_path / "file") as file:
        big_endian, shared = file.content.pop("big_endian"), file.content.pop("shared")
        _assert_same(big_endian.array(), np.arange(300, dtype=np.float32))
        assert shared[0] is shared[1] is file.content["turned"]
        del value["big_endian"], value["shared"]
        _assert_reads(file.content, value)


def test_reads_numpy_1_and_python_2(tmp_path: Path) -> None:
    array = np.arange(90, dtype=np.float32)
    by_numpy_1 = pickle.dumps({"a": array}, 2).replace(b"numpy._core", b"numpy.core")
    assert by_numpy_1 != pickle.dumps({"a": array}, 2)
    (tmp_path / "numpy 1").write_bytes(by_numpy_1)
    # Python 2 had no bytes, but a str that was both.
    begin = (
        b"\x80\x02}U\x01acnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R(K\x01K\x5a\x85"
        b"cnumpy\ndtype\nU\x02f4K\0K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89"
    )
    by_python_2 = begin + b"T" + array.nbytes.to_bytes(4, "little") + array.tobytes() + b"tbs."
    _assert_same(pickle.loads(by_python_2, encoding="latin1"), {"a": array})
    (tmp_path / "python 2").write_bytes(by_python_2)
    for name in ("numpy 1", "python 2"):
        with PickledFile(tmp_path / name) as file:
            _assert_same(file.content["a"].array(), array)


def test_joins_what_paddle_cut(tmp_path: Path) -> None:
    # As Paddle does it beyond a GiB.
    whole = np.arange(5000, dtype=np.float64).reshape(50, 100)
    parts = {f"w@@.{number}": whole.reshape(-1)[number * 1999 : (number + 1) * 1999] for number in range(3)}
    cut = {"w": {"OriginShape": whole.shape, "slices": list(parts)}}
    for protocol in (2, 3):
        file_path = tmp_path / f"{protocol}"
        file_path.write_bytes(pickle.dumps({**parts, PARTS: cut, NAMES: {"w": "linear_0.w_0"}}, protocol))
        assert list(paddle.load(str(file_path))) == ["w"]
        with PickledFile(file_path) as file:
            assert file.content["w"].name == "linear_0.w_0"
            _assert_reads(file.content, {"w": whole})


class _Harmful:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (os.system, ("touch harm",), r"posix\.system"),
        (eval, ("open('harm', 'w')",), r"(builtins|__builtin__)\.eval"),
        (getattr, (os, "system"), r"(builtins|__builtin__)\.getattr"),
        (paddle.load, ("harm",), r"paddle\.framework\.io\.load"),
        (np.lib.npyio.NpzFile, ("harm",), r"numpy.*\.NpzFile"),
    ],
)
def test_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int, function: Any, arguments: Any, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if function is getattr:
        arguments = ("os", "system")
    (tmp_path / "file").write_bytes(pickle.dumps({"w": _Harmful(function, *arguments)}, protocol))
    with pytest.raises(CheckpointError, match=rf"file refers to {named}, which no state dict needs. Nothing was run"):
        PickledFile(tmp_path / "file")
    assert not (tmp_path / "harm").exists()


def _saved() -> bytes:
    stream = io.BytesIO()
    paddle.save({**_tensors(), "master_weights": _tensors(), "LR_Scheduler": PLAIN}, stream)
    return stream.getvalue()


def _opened(path: Path, data: bytes) -> str:
    """What reading everything in it comes to."""
    path.write_bytes(data)
    try:
        with PickledFile(path) as file:
            for value in file.content.values():
                for tensor in value.values() if isinstance(value, dict) else [value]:
                    if isinstance(tensor, LazyTensor):
                        tensor.array()
    except CheckpointError as error:
        said = error
    else:
        return "read"
    assert said.file == str(path)
    assert str(path) in str(said)
    return str(said)


def test_finds_what_is_cut_off(tmp_path: Path) -> None:
    data = _saved()
    assert _opened(tmp_path / "file", data) == "read"
    for length in range(0, len(data), 37):
        assert "is cut off" in _opened(tmp_path / "file", data[:length])
    assert "damaged" in _opened(tmp_path / "file", data + b"\0")


def test_survives_flipped_bits(tmp_path: Path) -> None:
    data, rng = _saved(), np.random.default_rng(3)
    outcomes = []
    for at in rng.choice(len(data), 400, replace=False):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        started = time.monotonic()
        outcomes.append(_opened(tmp_path / "file", bytes(flipped)))
        assert time.monotonic() - started < 5
    assert "read" in outcomes  # a value or a name: there are no checksums
    assert len(set(outcomes)) > 20


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"\x80\x04.", b"\x80\x04}}.", b"\x80\x04}].", b"\x80\x04K\x01.", b"\x80\x04]q\0(h\0e.",
        b"\x80\x04(}.", b"\x80\x04}\x8c\x01aN.", b"\x80\x04}X\xff\xff\xff\xff", b"\x80\x04}K\x01.",
        b"\x80\x04\x8f(]\x90.", b"\x80\x02T\xfb\xff\xff\xff", b"\x80\x04}q\0X\1\0\0\0ah\0s.",
        b"\x80\x04}]}s.", b"\x80\x04\x8c\x02osR.", b"\x80\x09}.", b"\x80\x04}\x8e" + b"\xff" * 8, b"\x80\x04Q.",
        b"\x80\x04cnumpy\ndtype\n.", b"\x80\x04}\x8c\x01acnumpy\nndarray\ns.", b"\x80\x04}\x8b\xff\xff\xff\x7f.",
    ],
)  # fmt: skip
def test_refuses_what_makes_no_sense(tmp_path: Path, data: bytes) -> None:
    assert _opened(tmp_path / "file", data) != "read"


def test_refuses_a_shape_that_does_not_fit(tmp_path: Path) -> None:
    data = pickle.dumps({"w": np.zeros((3, 100), np.float32)}, 4)
    path = tmp_path / "file"
    assert _opened(path, data) == "read"
    # A bit of the 100, and of the 3.
    assert "takes 1212 bytes, but there are 1200" in _opened(path, data.replace(b"K\x03Kd", b"K\x03Ke"))
    assert "takes 800 bytes, but there are 1200" in _opened(path, data.replace(b"K\x03Kd", b"K\x02Kd"))
    assert "an array without a shape" in _opened(path, data.replace(b"K\x03Kd", b"\x88Kd"))


# -- failures of the disk ----------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    items = {f"w{number}": NamedTensor("n", np.ones(1 << 16, np.float32)) for number in range(8)}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        writer = PickleWriter(path, in_table=False)
        with pytest.raises(CheckpointError, match="file cannot be written: File too large") as caught:
            put_all(writer, items)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (caught.value.file, caught.value.parameter) == (str(path), "w3")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("value", [object(), [1, {"a": threading.Lock()}], paddle.zeros, b"bytes"])
def test_refuses_what_could_not_be_read_again(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^sampler.* is a \w+, which cannot be saved"):
        write_pickled(tmp_path / "file", {"sampler": value})
    assert os.listdir(tmp_path) == []


def test_an_error_of_the_caller_leaves_nothing(tmp_path: Path) -> None:
    def items() -> Iterator[tuple[str, Any]]:
        yield "w", NamedTensor("n", np.ones(1 << 20, np.float32))
        assert os.listdir(tmp_path) == ["file.partial"]
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs") as caught:
        write_pickled(tmp_path / "file", items())
    # Not only when the writer is forgotten, which the traceback keeps.
    assert os.listdir(tmp_path) == []
    assert caught.tb is not None


def test_reads_nothing_of_a_file_that_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_pickled(path, {"w": NamedTensor("n", np.ones(1 << 16, np.float32))}, in_table=True)
    with PickledFile(path) as file:
        os.truncate(path, 1000)
        with pytest.raises(CheckpointError, match="ends at byte 1000"):
            file.content["w"].read(0, 1 << 16)
