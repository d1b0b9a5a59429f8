"""One data file: tensors and parts of tensors as safetensors, written as they come, read in any range.

A tensor that is whole is there under its logical name, a part of one flat, as ``name[start:stop]``. Nothing is mapped
into memory: a file that is cut short behind a map's back ends the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from . import values
from .durable import failed, new_file, syncing_behind, write_all
from .index import Chunk, DataFile, Place, TensorEntry, Written, parameter_of
from .source import SAFETENSORS, STORAGE, TensorInfo

Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES = 1 << 20
"""What gets its checksum and is written, or is read for its checksum, at a time: the second finds it in the cache."""
_ALIGNMENT_BYTES = 64
"""Where the tensors begin, for those who map the file."""
_METADATA = "__metadata__"


class Piece(NamedTuple):
    """A run of elements to be written.

    Attributes:
        name: logical name of the tensor.
        info: of the whole tensor.
        start: first element, of the flattened tensor.
        stop: the first element behind it.
        blocks: gives its bytes, in order, as one-dimensional contiguous arrays; called once. A block may be
            overwritten when the next one is asked for.
    """

    name: str
    info: TensorInfo
    start: int
    stop: int
    blocks: Callable[[], Iterator[Bytes]]

    @property
    def nbytes(self) -> int:
        """Bytes that ``blocks`` has to give."""
        return (self.stop - self.start) * STORAGE[self.info.dtype].itemsize

    @property
    def key(self) -> str:
        """What it is called in the file."""
        return _key(self.name, self.info, self.start, self.stop)


def array_piece(name: str, array: npt.NDArray[Any]) -> Piece:
    """A whole array, as ``values.encode`` gives them; uint16 are the bits of bfloat16."""
    info = values.info(array)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Piece(name, info, 0, info.numel, lambda: iter([data]))


def write_tensors(path: Path, pieces: Iterable[Piece]) -> Written:
    """Writes a data file; its bytes are on the disk when this returns. If it fails, there is no file.

    Never more than a block is held. Pieces are written in their order but for those with larger elements, which come
    before those with smaller ones, so that every element is aligned.

    Args:
        path: of the file, which must not be there.
        pieces: what goes into it. One of no elements counts only where its tensor has none.

    Raises:
        CheckpointError: the disk is full or the like; two pieces are of the same name; ``blocks`` gave a wrong number
            of bytes. What ``blocks`` raises comes through as it is.
    """
    wanted = [piece for piece in pieces if piece.stop > piece.start or not piece.info.numel]
    wanted.sort(key=lambda piece: -STORAGE[piece.info.dtype].itemsize)
    header = _header(path, wanted)
    try:
        with new_file(path) as fd:
            wrote = syncing_behind(fd)
            write_all(fd, memoryview(header))
            out = _Out(path, fd, wrote)
            sums = [out.write_piece(piece) for piece in wanted]
    except OSError as error:
        raise failed(error, path, "cannot be written") from error
    return _written(path, header, wanted, sums)


def _written(path: Path, header: bytes, pieces: Sequence[Piece], sums: Sequence[int]) -> Written:
    at = len(header)
    chunks: dict[str, list[Chunk]] = {}
    for piece, crc32 in zip(pieces, sums, strict=True):
        own = chunks.setdefault(piece.name, [])
        if piece.nbytes:
            own.append(Chunk(piece.start, piece.stop, 0, at, crc32))
        at += piece.nbytes
    infos = {piece.name: piece.info for piece in pieces}
    tensors = {name: TensorEntry(*infos[name], tuple(sorted(own))) for name, own in chunks.items()}
    return Written(DataFile(path.name, at, len(header), zlib.crc32(header)), tensors)


class _Out(NamedTuple):
    """The file that is written; ``wrote`` is to be told of bytes."""

    path: Path
    fd: int
    wrote: Callable[[int], None]

    def write_piece(self, piece: Piece) -> int:
        """Writes its blocks and returns their checksum."""
        crc32, nbytes = 0, 0
        for block in piece.blocks():
            nbytes += block.nbytes
            if nbytes > piece.nbytes:
                break
            try:
                crc32 = self._write_block(block.view(np.uint8).data, crc32)
            except OSError as error:
                parameter = parameter_of(piece.name)
                raise failed(error, self.path, "cannot be written", parameter=parameter) from error
        if nbytes != piece.nbytes:
            found = f"at least {nbytes}" if nbytes > piece.nbytes else str(nbytes)
            raise CheckpointError(
                f"{self.path}: {piece.key} has {piece.nbytes} bytes, and {found} came",
                file=str(self.path),
                parameter=parameter_of(piece.name),
            )
        return crc32

    def _write_block(self, block: memoryview, crc32: int) -> int:
        for at in range(0, block.nbytes, BLOCK_BYTES):
            data = block[at : at + BLOCK_BYTES]
            crc32 = zlib.crc32(data, crc32)
            write_all(self.fd, data)
            self.wrote(data.nbytes)
        return crc32


def _key(name: str, info: TensorInfo, start: int, stop: int) -> str:
    return name if stop - start == info.numel else f"{name}[{start}:{stop}]"


def _entry(info: TensorInfo, start: int, stop: int, at: int) -> dict[str, Any]:
    """What the file's header says of a run of elements that begins ``at`` bytes behind the header."""
    shape = list(info.shape) if stop - start == info.numel else [stop - start]
    nbytes = (stop - start) * STORAGE[info.dtype].itemsize
    return {"dtype": SAFETENSORS[info.dtype], "shape": shape, "data_offsets": [at, at + nbytes]}


def _header(path: Path, pieces: Iterable[Piece]) -> bytes:
    entries: dict[str, Any] = {_METADATA: {"format": "hp_sharding"}}
    at = 0
    for piece in pieces:
        if piece.key in entries:
            text = f"{path}: there are two tensors of the name {piece.key}"
            raise CheckpointError(text, file=str(path), parameter=parameter_of(piece.name))
        entries[piece.key] = _entry(piece.info, piece.start, piece.stop, at)
        at += piece.nbytes
    text = json.dumps(entries, separators=(",", ":"))
    text += " " * (-(len(text) + 8) % _ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text.encode()


class Inside(NamedTuple):
    """What lies in a data file: ``places``, in their order, and ``infos``, of logical names."""

    infos: Callable[[str], TensorInfo]
    places: Sequence[Place]

    @property
    def first(self) -> str:
        """Logical name of the first tensor; empty where there is none."""
        return self.places[0].name if self.places else ""


class OpenLimit:
    """How many files may stay open. Safe from several threads."""

    def __init__(self, n_files: int) -> None:
        self._left = n_files
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Whether one more may."""
        with self._lock:
            self._left -= 1
            return self._left >= 0


class TensorFile:
    """A data file to read from. Its methods may be called from several threads.

    It is opened, and its size and what precedes the tensors in it are checked, when it is read for the first time.
    """

    def __init__(self, path: Path, file: DataFile, inside: Inside, limit: OpenLimit) -> None:
        """Touches nothing yet.

        Args:
            path: of the file.
            file: what the index says of it.
            inside: what the index says lies in it.
            limit: whether it may stay open once it was read, or is to be opened for each read.
        """
        self.path = path
        self.file = file
        self._inside = inside
        self._limit = limit
        self._lock = threading.Lock()
        self._is_checked = False
        self._may_stay = True
        self._fd: int | None = None

    def close(self) -> None:
        """Closes it; it does not stay open any more. Safe to call twice."""
        self._may_stay = False
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def check_size(self) -> None:
        """Whether it is there, and as long as it was written; without opening it.

        Raises:
            CheckpointError: it is not.
        """
        try:
            found = os.stat(self.path).st_size
        except OSError as error:
            raise self._refused(error) from error
        self._check_size(found)

    def check(self) -> None:
        """Opens it and checks what precedes the tensors: its checksum, and that it says of them what the index says.

        Raises:
            CheckpointError: it is not there, has another size, cannot be read, or begins with something else.
        """
        with self._opened():
            pass

    def read_into(self, data: memoryview, offset_bytes: int, name: str) -> None:
        """Fills ``data``, of items of one byte, from a place in the file.

        Args:
            data: what to fill.
            offset_bytes: where to begin.
            name: whose bytes these are, for errors: a logical name, or empty.

        Raises:
            CheckpointError: the disk failed, the file is shorter than it was, or as ``check``.
        """
        with self._opened() as fd:
            self._fill(fd, data, offset_bytes, name)

    def verify(self, place: Place, buffer: memoryview) -> None:
        """Reads one chunk, a buffer at a time, and compares its checksum.

        Raises:
            CheckpointError: it cannot be read, or its bytes are not what was written.
        """
        crc32, at, end = 0, place.offset_bytes, place.offset_bytes + place.nbytes
        while at < end:
            data = buffer[: end - at]
            self.read_into(data, at, place.name)
            crc32 = zlib.crc32(data, crc32)
            at += data.nbytes
        if crc32 != place.chunk.crc32:
            why = f"a byte between {place.offset_bytes} and {end} is not what was written (wrong checksum)"
            raise self._damaged(why, place.name)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Its descriptor, once all but its tensors was checked."""
        with self._lock:
            fd = self._fd
            if fd is None:
                fd = self._open()
                if self._may_stay and self._limit.take():
                    self._fd = fd
            stays_open = self._fd is not None
        try:
            yield fd
        finally:
            if not stays_open:
                os.close(fd)

    def _open(self) -> int:
        fd = -1
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            if not self._is_checked:
                self._check_size(os.fstat(fd).st_size)
                self._check_header(fd)
                self._is_checked = True
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, OSError):
                raise self._refused(error) from error
            raise
        return fd

    def _fill(self, fd: int, data: memoryview, offset_bytes: int, name: str) -> None:
        try:
            while data.nbytes:
                nbytes = os.preadv(fd, [data], offset_bytes)
                if not nbytes:
                    why = f"it ends at byte {offset_bytes}, and {self.file.nbytes} bytes were written"
                    raise self._damaged(why, name)
                data = data[nbytes:]
                offset_bytes += nbytes
        except OSError as error:
            raise failed(error, self.path, f"cannot be read{_of(name)}", parameter=parameter_of(name)) from error

    def _check_size(self, found: int) -> None:
        if found != self.file.nbytes:
            how = "truncated" if found < self.file.nbytes else "too long"
            why = f"is {how}: it has {found} bytes, and {self.file.nbytes} were written"
            raise self._unusable(f"{why}. Use another checkpoint or copy of it")

    def _check_header(self, fd: int) -> None:
        infos, places = self._inside
        header = bytearray(self.file.header_nbytes)
        first = self._inside.first
        self._fill(fd, memoryview(header), 0, first)
        if zlib.crc32(header) != self.file.header_crc32:
            raise self._damaged("the checksum of its header is wrong", first)
        try:
            entries = json.loads(header[8:])
            found = [entries.get(_key_of(place, infos(place.name))) for place in places]
        except (ValueError, AttributeError, RecursionError) as error:
            raise self._damaged(f"its header cannot be parsed ({error})", first) from error
        for place, entry in zip(places, found, strict=True):
            at = place.offset_bytes - self.file.header_nbytes
            expected = _entry(infos(place.name), place.chunk.start, place.chunk.stop, at)
            if entry != expected:
                raise self._damaged(f"its header has {entry} where the index has {expected}", place.name)

    def _refused(self, error: OSError) -> CheckpointError:
        if isinstance(error, FileNotFoundError):
            return self._unusable("is missing. Bring it back, or use another checkpoint")
        parameter = parameter_of(self._inside.first)
        return failed(error, self.path, f"cannot be read{_of(self._inside.first)}", parameter=parameter)

    def _unusable(self, why: str) -> CheckpointError:
        first, others = self._inside.first, " and others" * (len(self._inside.places) > 1)
        holds = f", which holds {first}{others}," if first else ""
        return CheckpointError(f"{self.path}{holds} {why}", file=str(self.path), parameter=parameter_of(first))

    def _damaged(self, why: str, name: str) -> CheckpointError:
        text = f"{self.path} is damaged{_of(name)}: {why}. Use another checkpoint or copy of it"
        return CheckpointError(text, file=str(self.path), parameter=parameter_of(name))


def _key_of(place: Place, info: TensorInfo) -> str:
    return _key(place.name, info, place.chunk.start, place.chunk.stop)


def _of(name: str) -> str:
    return f", in {name}" if name else ""
