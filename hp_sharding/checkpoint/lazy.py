"""Tensors that lie in a file and are read a range at a time, whatever kind of file it is.

Nothing is mapped: a mapped file that somebody else shortens would end the process.
"""

from __future__ import annotations

import codecs
import math
import os
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .durable import failed
from .source import STORAGE, TensorInfo

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

Coding = Literal["bytes", "text", "latin-1"]

_BLOCK_BYTES = 1 << 20
_NAMES = {dtype: name for name, dtype in STORAGE.items()}


class Payload(NamedTuple):
    """Bytes that were left in the file.

    Attributes:
        offset: where they begin.
        nbytes: how many bytes of the file they take.
        coding: "bytes", or UTF-8 of a "text", or "latin-1": UTF-8 of a text of which each character stands for one
            byte, as in pickles of protocol 2.
    """

    offset: int
    nbytes: int
    coding: Coding = "bytes"


class ByteRun(NamedTuple):
    """A run of a tensor's bytes: in the file, or here where they are few. ``nbytes`` of them in memory."""

    content: Payload | bytes
    nbytes: int


class OpenFile:
    """A file that is read at given places, from any thread.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._fd = -1
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self.nbytes = os.fstat(self._fd).st_size
        except OSError as error:
            raise failed(error, self.path, "cannot be read") from error

    def read_into(self, out: Bytes, offset: int) -> None:
        """Fills ``out`` with what begins at ``offset``.

        Raises:
            CheckpointError: the file ends before, was closed, or the disk failed.
        """
        view = out.data
        while view.nbytes:
            try:
                got = os.preadv(self._fd, [view], offset)
            except OSError as error:
                raise failed(error, self.path, f"cannot be read at byte {offset}") from error
            if not got:
                raise CheckpointError(f"{self.path} ends at byte {offset}; it is cut off: use a copy", file=self.path)
            view, offset = view[got:], offset + got

    def read(self, offset: int, nbytes: int) -> bytes:
        """A few bytes; errors as ``read_into``."""
        out = np.empty(nbytes, np.uint8)
        self.read_into(out, offset)
        return out.tobytes()

    def close(self) -> None:
        """Safe to call twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class FileReader:
    """Whatever reads tensors out of one file, which it keeps open for them.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = OpenFile(path)

    @property
    def path(self) -> str:
        """Of the file."""
        return self._file.path

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""
        return self._file.nbytes

    def close(self) -> None:
        """Its tensors can no longer be read. Safe to call twice."""
        self._file.close()


class LazyTensor:
    """A tensor whose values are still in the file.

    Attributes:
        name: what the file calls it, such as ``"linear_0.w_0"``; empty where it has no name.
        dtype: numpy's, in the byte order of the file; uint16 for bfloat16.
        shape: of the tensor.
    """

    def __init__(
        self, file: OpenFile, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], parts: tuple[ByteRun, ...]
    ) -> None:
        self.file, self.name, self.dtype, self.shape, self._parts = file, name, dtype, shape, parts
        self.is_column_major = False
        found, expected = sum(part.nbytes for part in parts), math.prod(shape) * dtype.itemsize
        if found != expected:
            raise CheckpointError(
                f"{file.path}: {name or 'a tensor'} of shape {list(shape)} and {dtype} takes {expected} bytes, but "
                f"there are {found}: the file is damaged",
                file=file.path,
                parameter=name,
            )

    @property
    def info(self) -> TensorInfo:
        """Shape and Paddle's dtype.

        Raises:
            CheckpointError: a dtype that a checkpoint does not hold.
        """
        native = self.dtype.newbyteorder("=")
        if native not in _NAMES:
            what = self.name or "a tensor"
            raise CheckpointError(
                f"{self.file.path}: {what} is of {self.dtype}, which is none of {', '.join(STORAGE)}",
                file=self.file.path,
                parameter=self.name,
            )
        return TensorInfo(self.shape, _NAMES[native])

    @property
    def parts(self) -> tuple[ByteRun, ...]:
        """Where its bytes are, in order."""
        return self._parts

    def named(self, name: str) -> LazyTensor:
        """The same values under another name."""
        other = LazyTensor(self.file, name, self.dtype, self.shape, self._parts)
        other.is_column_major = self.is_column_major
        return other

    def read(self, start: int, stop: int) -> Array:
        """Elements ``start`` to ``stop`` of the flattened tensor: own memory, native byte order.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if self.is_column_major and len(self.shape) > 1:
            whole = self._elements(0, math.prod(self.shape))
            return whole.reshape(self.shape, order="F").reshape(-1)[start:stop].copy()
        return self._elements(start, stop)

    def array(self) -> Array:
        """All of it, in its shape."""
        return self.read(0, math.prod(self.shape)).reshape(self.shape)

    def _elements(self, start: int, stop: int) -> Array:
        """As they follow each other in the file."""
        size = self.dtype.itemsize
        out = np.empty((stop - start) * size, np.uint8)
        begin = 0
        for part in self._parts:
            first, last = max(start * size, begin), min(stop * size, begin + part.nbytes)
            if first < last:
                self._read_part(part, first - begin, out[first - start * size : last - start * size])
            begin += part.nbytes
        return out.view(self.dtype).astype(self.dtype.newbyteorder("="), copy=False)

    def _read_part(self, part: ByteRun, start: int, out: Bytes) -> None:
        content = part.content
        if isinstance(content, bytes):
            out[:] = np.frombuffer(content, np.uint8)[start : start + len(out)]
        elif content.coding == "bytes":
            self.file.read_into(out, content.offset + start)
        else:
            _read_text(self.file, content, start, out)


def text_blocks(file: OpenFile, payload: Payload) -> Iterator[str]:
    """The characters of a text in the file, a block at a time.

    Raises:
        CheckpointError: that is not UTF-8, or the file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
    for offset in range(0, payload.nbytes, _BLOCK_BYTES):
        nbytes = min(_BLOCK_BYTES, payload.nbytes - offset)
        data = file.read(payload.offset + offset, nbytes)
        try:
            yield decoder.decode(data, final=offset + nbytes == payload.nbytes)
        except UnicodeDecodeError as error:
            raise _garbled(file, payload) from error


def _read_text(file: OpenFile, payload: Payload, start: int, out: Bytes) -> None:
    """Fills ``out`` with the bytes from ``start`` on that the text stands for."""
    begin = 0
    for text in text_blocks(file, payload):
        try:
            block = np.frombuffer(text.encode("latin-1"), np.uint8)
        except UnicodeEncodeError as error:
            raise _garbled(file, payload) from error
        first, last = max(start, begin), min(start + len(out), begin + len(block))
        if first < last:
            out[first - start : last - start] = block[first - begin : last - begin]
        begin += len(block)
        if begin >= start + len(out):
            return
    raise _garbled(file, payload)


def _garbled(file: OpenFile, payload: Payload) -> CheckpointError:
    return CheckpointError(
        f"{file.path}: the {payload.nbytes} bytes of a tensor at byte {payload.offset} are not what was written; the "
        "file is damaged: use a copy",
        file=file.path,
    )
