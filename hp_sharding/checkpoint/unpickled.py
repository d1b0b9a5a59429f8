"""Reads what ``paddle.save`` wrote, without unpickling it: tensors stay in the file, and no code can run.

The pickle is interpreted by ``pickle_machine``, with what is here in place of the functions that NumPy's arrays are
made by. Whatever else it asks for, such as a call of ``os.system``, is an error that names it. Read are protocols 2 to
5, from Python 2 as well, with the parts that Paddle makes of large tensors in protocols 2 and 3.

These files have no checksums. What is cut off, or no longer makes sense, is found; a byte of a tensor that has another
value than the one that was written is not.
"""

from __future__ import annotations

import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .lazy import ByteRun, FileReader, LazyTensor, OpenFile, Payload, text_blocks
from .pickle_machine import MEANINGLESS, Built, Global, Machine

NAMES = "StructuredToParameterName@@"
"""Key under which Paddle keeps the names of the tensors, where these are bare arrays."""
PARTS = "UnpackBigParamInfor@@"
"""Key under which Paddle says which tensors it cut, and into what, in protocols 2 and 3."""

_DTYPE = re.compile(r"[<>=|]?([biufc])(1|2|4|8|16)")


class PickledFile(FileReader):
    """A pickled dict, open for reading.

    Attributes:
        content: the dict, and those in it, with a ``LazyTensor`` for every array. Names of tensors have gone into
            those, and parts have been joined.

    Raises:
        CheckpointError: it cannot be read, is cut off or damaged, or holds what a state dict does not.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        try:
            self.content = _content(self._file)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PickledFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _content(file: OpenFile) -> dict[Any, Any]:
    machine = Machine(file, _CALLS, _CLASSES)
    try:
        top = _Settling(file).settled(machine.run())
        if not isinstance(top, dict):
            raise TypeError(f"a {type(top).__name__}, not a dict")
        _join(file, top)
        _name(top)
    except MEANINGLESS as error:
        what = str(error) or type(error).__name__
        raise CheckpointError(
            f"{file.path} is not what paddle.save writes of a state_dict(), or is damaged: {what}, before byte "
            f"{machine.at}",
            file=file.path,
        ) from error
    return top


# -- what stands for NumPy's functions ---------------------------------------------------------------------------------


class _Dtype(Built):
    """What ``numpy.dtype(...)`` and its state make."""

    def __init__(self, text: Any, align: Any = False, copy: Any = False) -> None:
        if not isinstance(text, str) or not _DTYPE.fullmatch(text):
            raise ValueError(f"an array of dtype {str(text)[:40]!r}")
        self.value = np.dtype(text)

    def build(self, state: Any) -> None:
        if state[1] in ("<", ">"):
            self.value = self.value.newbyteorder(state[1])


class _Array(Built):
    """What ``_reconstruct`` and the state of an array make."""

    def __init__(self, kind: Any = None, shape: Any = (), code: Any = b"") -> None:
        self._shape: tuple[int, ...] | None = None
        self._dtype = np.dtype(np.uint8)
        self._data: Payload | bytes = b""
        self._is_column_major = False

    def build(self, state: Any) -> None:
        _, shape, dtype, is_column_major, data = state
        self.fill(data, dtype, shape)
        self._is_column_major = bool(is_column_major)

    def fill(self, data: Any, dtype: Any, shape: Any, order: Any = "C") -> _Array:
        """As ``numpy.frombuffer`` with a shape."""
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("an array without a shape")
        if not isinstance(dtype, _Dtype):
            raise TypeError("an array without a dtype")
        self._shape, self._dtype, self._data = shape, dtype.value, _as_bytes(data)
        self._is_column_major = order == "F"
        return self

    def tensor(self, file: OpenFile, name: str) -> LazyTensor:
        """Of that name, in the file."""
        if self._shape is None:
            raise ValueError("an array without values")
        nbytes = math.prod(self._shape) * self._dtype.itemsize
        if not isinstance(self._data, Payload):
            nbytes = len(self._data)
        elif self._data.coding == "bytes":
            nbytes = self._data.nbytes
        # Of a text it is not known before it is read how many bytes it stands for.
        tensor = LazyTensor(file, name, self._dtype, self._shape, (ByteRun(self._data, nbytes),))
        tensor.is_column_major = self._is_column_major
        return tensor


def _as_bytes(data: Any) -> Payload | bytes:
    if isinstance(data, str):
        return data.encode("latin-1")  # Python 2 has no bytes, and hands them over as a text
    if not isinstance(data, (bytes, Payload)):
        raise TypeError("values that are no bytes")
    return data


def _scalar(dtype: Any, data: Any) -> Any:
    content = _as_bytes(data)
    if not isinstance(dtype, _Dtype) or not isinstance(content, bytes):
        raise TypeError("a number without a dtype or value")
    if len(content) != dtype.value.itemsize:
        raise ValueError("a number cut off")
    return np.frombuffer(content, dtype.value)[0]


def _encoded(text: Any, coding: Any = "latin1") -> Any:
    """``codecs.encode``: how protocol 2 writes bytes."""
    if coding not in ("latin1", "latin-1"):
        raise ValueError(f"an encoding {str(coding)[:40]!r}")
    return text._replace(coding="latin-1") if isinstance(text, Payload) else text.encode("latin-1")


def _set_of(items: Iterable[Any] = ()) -> set[Any]:
    found = list(items)
    if not all(isinstance(item, (str, int, float, bool, bytes, type(None))) for item in found):
        raise TypeError("a set of what is no text or number")
    return set(found)


def _ordered(items: Iterable[Any] = ()) -> OrderedDict[Any, Any]:
    pairs = [(key, value) for key, value in items]
    _set_of(key for key, _ in pairs)
    return OrderedDict(pairs)


_CLASSES = (Global("numpy", "ndarray"),)
_CALLS: dict[Global, Callable[..., Any]] = {
    Global("numpy", "dtype"): _Dtype,
    Global("_codecs", "encode"): _encoded,
    Global("collections", "OrderedDict"): _ordered,
}
for _module in ("numpy._core", "numpy.core"):
    _CALLS[Global(f"{_module}.multiarray", "_reconstruct")] = _Array
    _CALLS[Global(f"{_module}.multiarray", "scalar")] = _scalar
    _CALLS[Global(f"{_module}.numeric", "_frombuffer")] = lambda *arguments: _Array().fill(*arguments)
for _module in ("builtins", "__builtin__"):
    for _name_of, _call in (
        ("tuple", tuple), ("list", list), ("set", _set_of), ("frozenset", lambda items=(): frozenset(_set_of(items))),
        ("complex", complex), ("bytes", bytes),
    ):  # fmt: skip
        _CALLS[Global(_module, _name_of)] = _call


# -- what the machine made, as others want it --------------------------------------------------------------------------


class _Settling:
    """Replaces arrays by tensors, and byte strings left in the file by what they are. Each object once."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._done: dict[int, Any] = {}

    def settled(self, value: Any) -> Any:
        """``value`` with all that is in it."""
        if isinstance(value, (_Dtype, Global)):
            raise TypeError("a dtype, class or function as a value")
        if isinstance(value, Payload):
            return _content_of(self._file, value)
        if not isinstance(value, (_Array, tuple, list, dict)):
            return value
        number = id(value)
        if number not in self._done:
            self._done[number] = self  # until it is known
            self._done[number] = self._settled(value)
        if self._done[number] is self:
            raise ValueError("something that contains itself")
        return self._done[number]

    def _settled(self, value: Any) -> Any:
        if isinstance(value, _Array):
            return value.tensor(self._file, "")
        if isinstance(value, dict):
            return type(value)((key, self.settled(item)) for key, item in value.items())
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], _Array):
            return value[1].tensor(self._file, value[0])
        return type(value)([self.settled(item) for item in value])


def _content_of(file: OpenFile, payload: Payload) -> str | bytes:
    """A long text, or many bytes, that are no tensor."""
    if payload.coding == "bytes":
        return file.read(payload.offset, payload.nbytes)
    text = "".join(text_blocks(file, payload))
    return text if payload.coding == "text" else text.encode("latin-1")


def _join(file: OpenFile, top: dict[Any, Any]) -> None:
    """Makes one tensor of the parts that Paddle cut it into."""
    for key, cut in top.pop(PARTS, {}).items():
        parts = [top.pop(name) for name in cut["slices"]]
        if len({part.dtype for part in parts}) != 1:
            raise ValueError(f"parts of {key} of different dtypes")
        pieces = tuple(piece for part in parts for piece in part.parts)
        top[key] = LazyTensor(file, "", parts[0].dtype, tuple(cut["OriginShape"]), pieces)


def _name(top: dict[Any, Any]) -> None:
    for key, name in top.pop(NAMES, {}).items():
        if isinstance(top[key], LazyTensor) and isinstance(name, str):
            top[key] = top[key].named(name)
