"""Writes what ``paddle.save`` would have written, item by item: no more than one tensor need be in memory.

The stream is put together here, since Python's pickler copies the bytes of an array before it writes them. What is
small it pickles; between that go the bytes of the arrays as they lie in memory. What comes out is protocol 4, like
Paddle's, and loads with ``paddle.load`` and with ``pickle``.
"""

from __future__ import annotations

import math
import os
import pickle
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .beside import FileBeside
from .unpickled import NAMES

Array = npt.NDArray[Any]

_PLAIN = (type(None), bool, int, float, complex, str)
"""What ``paddle.load`` gives back wherever it stands; it refuses bytes."""
_MEMO = 1 << 16
"""Numbers of tensors that are written under a second key. What Python's pickler makes counts from 0."""


class Streamed(NamedTuple):
    """A tensor that ``paddle.load`` gives that name. uint16 are the bits of bfloat16.

    ``blocks`` are flat arrays that together are all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    blocks: Iterable[Array]


class PickleWriter:
    """Writes a dict to ``path``, which has its old content until ``rename``.

    Tensors are written in one of the two forms that Paddle uses. Of a state dict of tensors only, it makes bare arrays
    and a table of their names at the end; of anything else, pairs of name and array.

    Args:
        path: of the file.
        in_table: the first of these forms; there are then no tensors in dicts within the dict.

    Raises:
        CheckpointError: from every method. The file cannot be written, or a value not read back; nothing is left.
    """

    def __init__(self, path: str | os.PathLike[str], *, in_table: bool) -> None:
        self._file = FileBeside(path)
        self._names: dict[str, str] | None = {} if in_table else None
        self._depth = 0
        self._memo: dict[str, int] = {}
        self._file.write(pickle.PROTO + b"\x04" + pickle.EMPTY_DICT)

    def put(self, key: str, value: Any, *, is_tied: bool = False) -> None:
        """Adds an item to the dict.

        Args:
            key: not used before.
            value: ``Streamed``, or what has none in it: None, numbers, texts, NumPy's scalars and arrays, and lists,
                tuples and dicts of those.
            is_tied: whether ``put_again`` will refer to it.
        """
        self._file.write(_pickled(key))
        if isinstance(value, Streamed):
            self._write_tensor(key, value)
        else:
            _check_plain(value, key)
            self._file.write(_pickled(value))
        if is_tied:
            self._memo[key] = _MEMO + len(self._memo)
            self._file.write(pickle.LONG_BINPUT + struct.pack("<I", self._memo[key]))
        self._file.write(pickle.SETITEM)

    def put_again(self, key: str, first: str) -> None:
        """Adds what is under the key ``first`` under another one, without writing it twice."""
        self._file.write(_pickled(key) + pickle.LONG_BINGET + struct.pack("<I", self._memo[first]) + pickle.SETITEM)
        if self._names is not None:
            self._names[key] = self._names[first]

    def begin(self, key: str) -> None:
        """What is put from now on goes into a dict under ``key``, until ``end``."""
        self._file.write(_pickled(key) + pickle.EMPTY_DICT)
        self._depth += 1

    def end(self) -> None:
        """The dict that was begun last is complete."""
        self._file.write(pickle.SETITEM)
        self._depth -= 1

    def close(self) -> None:
        """Everything is on the disk, but not yet under its name."""
        assert self._depth == 0, "a dict was begun and not ended"
        if self._names is not None:
            self.begin(NAMES)
            for key, name in self._names.items():
                self._file.write(_pickled(key) + _pickled(name) + pickle.SETITEM)
            self.end()
        self._file.write(pickle.STOP)
        self._file.close()

    def rename(self) -> None:
        """The file takes its place; ``close`` comes first."""
        self._file.rename()

    def discard(self) -> None:
        """Leaves everything as it was. Safe to call twice, and after ``rename``."""
        self._file.discard()

    def _write_tensor(self, key: str, tensor: Streamed) -> None:
        if self._names is not None:
            assert self._depth == 0, "a table has no names for dicts in dicts"
            self._names[key] = tensor.name
        else:
            self._file.write(_pickled(tensor.name))
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        self._file.write(_array_begin(tensor.shape, tensor.dtype, nbytes))
        for block in tensor.blocks:
            self._file.write(block.view(np.uint8), parameter=key)
            nbytes -= block.nbytes
        assert nbytes == 0, f"the blocks of {key} are {-nbytes} bytes more than its shape says"
        self._file.write(_ARRAY_END if self._names is not None else _ARRAY_END + pickle.TUPLE2)


def _pickled(value: Any) -> bytes:
    """The operations that make a small value. Those of protocol 3 have no frames, and all numbers in their memo."""
    return pickle.dumps(value, 3)[2:-1]


def _array_begin(shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int) -> bytes:
    """The operations of NumPy's own reduction, up to the bytes of the array."""
    reduced: Any = np.empty(0, dtype).__reduce__()
    function, arguments, (version, _, described, _, _) = reduced
    made = _pickled(function) + _pickled(arguments) + pickle.REDUCE
    state = pickle.MARK + _pickled(version) + _pickled(shape) + _pickled(described) + pickle.NEWFALSE
    return made + state + pickle.BINBYTES8 + struct.pack("<Q", nbytes)


_ARRAY_END = pickle.TUPLE + pickle.BUILD


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _check_plain(item, f"{where}[{number}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key, f"a key of {where}")
            _check_plain(item, f"{where}[{key!r}]")
    elif type(value) not in _PLAIN and not isinstance(value, np.generic) and type(value) is not np.ndarray:
        raise CheckpointError(f"{where} is a {type(value).__name__}, which cannot be saved; save numbers and texts")
