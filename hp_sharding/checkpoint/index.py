"""What a checkpoint's index says: which tensors there are, and which bytes of which file they are. No files here.

An index and the manifests that precede it are JSON objects of one form, ``{"format", "version", "checksum",
"content"}``. The checksum is that of the content's text, so that a bit that flipped in it is found.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .source import MODEL, OPTIMIZER, STORAGE, TensorInfo

FORMAT = "hp_sharding checkpoint"
PART_FORMAT = "hp_sharding checkpoint part"
VERSION = 1
"""Of the format. Readers refuse a higher one."""
_MAX_NAME_BYTES = 255
"""Of a file, on every file system."""


class Chunk(NamedTuple):
    """A run of elements of a tensor, in one place.

    Attributes:
        start: first element, of the flattened tensor.
        stop: the first element behind it.
        file: which of ``Index.files``.
        offset_bytes: where it begins in that file.
        crc32: checksum of its bytes.
    """

    start: int
    stop: int
    file: int
    offset_bytes: int
    crc32: int


class TensorEntry(NamedTuple):
    """One tensor: ``dtype`` is one of ``STORAGE``; in an index ``chunks`` are sorted and cover it exactly."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def info(self) -> TensorInfo:
        """Shape and dtype."""
        return TensorInfo(self.shape, self.dtype)

    def places(self, name: str) -> list[Place]:
        """Its chunks as bytes of files; ``name`` is what it is called."""
        item_bytes = STORAGE[self.dtype].itemsize
        return [
            Place(chunk.offset_bytes, (chunk.stop - chunk.start) * item_bytes, name, chunk) for chunk in self.chunks
        ]


class DataFile(NamedTuple):
    """A safetensors file: its name, its size, and the size and checksum of what precedes the tensors in it."""

    name: str
    nbytes: int
    header_nbytes: int
    header_crc32: int


class Written(NamedTuple):
    """What one data file holds; chunks of a tensor are those in it, whose ``file`` is 0."""

    file: DataFile
    tensors: Mapping[str, TensorEntry]

    def to_json(self, save_id: str) -> bytes:
        """The manifest of a part."""
        content = {"save_id": save_id, "file": self.file._asdict(), "tensors": _tensors_to_json(self.tensors)}
        return seal(content, PART_FORMAT)

    @classmethod
    def from_json(cls, data: bytes, *, file: str, save_id: str) -> Written:
        """Reads a manifest back.

        Raises:
            CheckpointError: it is damaged or of another save; names ``file``, its path.
        """
        content = unseal(data, file=file, of_format=PART_FORMAT)
        try:
            found = cls(_file_from_json(content["file"]), _tensors_from_json(content["tensors"], file))
            other = content["save_id"] != save_id
        except _MALFORMED as error:
            raise _damaged(file, f"{type(error).__name__}: {error}") from error
        if other:
            raise _damaged(file, "it belongs to another save")
        return found


class Index(NamedTuple):
    """All of a checkpoint.

    Attributes:
        tensors: logical name -> where it is.
        files: the data files, part 0 first.
        aliases: other logical names of tied parameters -> the one in ``tensors``.
        state: what is not tensors, as JSON.
        save_id: of the save that wrote it.
        saved_at: when, in seconds since 1970.
    """

    tensors: Mapping[str, TensorEntry]
    files: tuple[DataFile, ...]
    aliases: Mapping[str, str]
    state: Any
    save_id: str
    saved_at: float

    def to_json(self) -> bytes:
        """The text of ``index.json``."""
        content = {
            "save_id": self.save_id,
            "saved_at": self.saved_at,
            "files": [file._asdict() for file in self.files],
            "aliases": dict(self.aliases),
            "state": self.state,
            "tensors": _tensors_to_json(self.tensors),
        }
        return seal(content, FORMAT)

    @classmethod
    def from_json(cls, data: bytes, *, file: str) -> Index:
        """Reads an index back and checks that it agrees with itself.

        Args:
            data: the text.
            file: its path, for errors.

        Raises:
            CheckpointError: it is damaged, of a newer version, or contradicts itself.
        """
        content = unseal(data, file=file, of_format=FORMAT)
        try:
            index = cls(
                tensors=_tensors_from_json(content["tensors"], file),
                files=tuple(map(_file_from_json, content["files"])),
                aliases={_text(alias): _text(name) for alias, name in content["aliases"].items()},
                state=content["state"],
                save_id=_text(content["save_id"]),
                saved_at=float(content["saved_at"]),
            )
        except _MALFORMED as error:
            raise _damaged(file, f"{type(error).__name__}: {error}") from error
        index.check(file)
        return index

    def check(self, file: str) -> None:
        """Checks that every tensor is covered exactly once, and every byte of the files belongs to one chunk.

        Raises:
            CheckpointError: not so; names the index, which ``file`` is the path of, and the tensor.
        """
        for name, entry in self.tensors.items():
            _check_covered(name, entry, file)
            if any(chunk.file >= len(self.files) for chunk in entry.chunks):
                raise _wrong(file, name, f"it lies in a file that is not one of the {len(self.files)} listed")
        for data_file, places in zip(self.files, self.places(), strict=True):
            _check_filled(data_file, places, file)
        for alias, name in self.aliases.items():
            if name not in self.tensors:
                raise _wrong(file, alias, f"it is said to be the same as {name}, which is not there")

    def places(self) -> list[list[Place]]:
        """What lies in each file, in the order in which it lies there."""
        found: list[list[Place]] = [[] for _ in self.files]
        for name, entry in self.tensors.items():
            for place in entry.places(name):
                found[place.chunk.file].append(place)
        return [sorted(places) for places in found]


class Place(NamedTuple):
    """The bytes of one chunk in its file."""

    offset_bytes: int
    nbytes: int
    name: str
    chunk: Chunk


def merge(parts: Sequence[Written], *, file: str) -> tuple[dict[str, TensorEntry], tuple[DataFile, ...]]:
    """The tensors and files of all parts together, as an index has them.

    Args:
        parts: what each part wrote, in order.
        file: the index that it is for, for errors.

    Raises:
        CheckpointError: parts disagree about the shape or dtype of a tensor.
    """
    infos: dict[str, TensorInfo] = {}
    chunks: dict[str, list[Chunk]] = {}
    for number, part in enumerate(parts):
        for name, entry in part.tensors.items():
            known = infos.setdefault(name, entry.info)
            if known != entry.info:
                found = f"{parts[number].file.name} has it as {entry.dtype} {list(entry.shape)}"
                raise _wrong(file, name, f"{found}, another part as {known.dtype} {list(known.shape)}")
            chunks.setdefault(name, []).extend(chunk._replace(file=number) for chunk in entry.chunks)
    tensors = {name: TensorEntry(*infos[name], tuple(sorted(chunks[name]))) for name in sorted(infos)}
    return tensors, tuple(part.file for part in parts)


def parameter_of(name: str) -> str:
    """The structured name in a logical one, as users know it; of what is no parameter's, the logical name."""
    if name.startswith(OPTIMIZER):
        return name.removeprefix(OPTIMIZER).rpartition("/")[0]
    return name.removeprefix(MODEL)


def seal(content: Any, of_format: str) -> bytes:
    """``content`` as JSON text, with its checksum beside it."""
    text = _text_of(content)
    head = json.dumps({"format": of_format, "version": VERSION, "checksum": zlib.crc32(text)})
    return head.removesuffix("}").encode() + b', "content": ' + text + b"}\n"


def unseal(data: bytes, *, file: str, of_format: str) -> Any:
    """The content back.

    Raises:
        CheckpointError: it is not what ``seal`` wrote, or of a newer version; names ``file``, its path.
    """
    try:
        found = json.loads(data)
        kind, version, checksum, content = (found[key] for key in ("format", "version", "checksum", "content"))
    except _MALFORMED as error:
        raise _damaged(file, f"it cannot be parsed ({type(error).__name__}: {error})") from error
    if kind != of_format:
        raise _damaged(file, f"its format is {kind!r}, not {of_format!r}")
    if type(version) is not int or type(checksum) is not int:
        raise _damaged(file, f"its version is {version!r} and its checksum {checksum!r}")
    if version > VERSION:
        raise CheckpointError(
            f"{file} is of version {version} of the format, and this hp_sharding reads version {VERSION}: a newer one "
            "has written it. Update hp_sharding, or load a checkpoint that was saved by this one",
            file=file,
        )
    if version != VERSION or zlib.crc32(_text_of(content)) != checksum:
        raise _damaged(file, "its checksum is wrong")
    return content


_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)


def _text_of(content: Any) -> bytes:
    # Not sorted: parsing keeps the order, and so this is the same text before and after, whatever keys it has.
    return json.dumps(content, separators=(",", ":")).encode()


def _damaged(file: str, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: {why}. Use another checkpoint or copy of it", file=file)


def _wrong(file: str, name: str, why: str) -> CheckpointError:
    return CheckpointError(f"{file}: tensor {name}: {why}", file=file, parameter=parameter_of(name))


def _check_covered(name: str, entry: TensorEntry, file: str) -> None:
    at = 0
    for chunk in entry.chunks:
        if chunk.stop <= chunk.start:
            raise _wrong(file, name, f"there is a part of it from element {chunk.start} to {chunk.stop}")
        if chunk.start != at:
            first, last = sorted((chunk.start, at))
            how = "are in no file" if chunk.start > at else "are there twice"
            raise _wrong(file, name, f"of its {entry.info.numel} elements those from {first} to {last} {how}")
        at = chunk.stop
    if at != entry.info.numel:
        how = "are in no file" if at < entry.info.numel else "are beyond its shape"
        first, last = sorted((at, entry.info.numel))
        raise _wrong(file, name, f"of its {entry.info.numel} elements those from {first} to {last} {how}")


def _check_filled(data_file: DataFile, places: Iterable[Place], file: str) -> None:
    at = data_file.header_nbytes
    for place in places:
        if place.offset_bytes != at:
            why = f"it begins at byte {place.offset_bytes} of {data_file.name}, where byte {at} was expected"
            raise _wrong(file, place.name, why)
        at += place.nbytes
    if at != data_file.nbytes:
        raise _damaged(file, f"it has tensors for {at} bytes of {data_file.name}, which has {data_file.nbytes}")


def _tensors_to_json(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    return {
        name: {"shape": entry.shape, "dtype": entry.dtype, "chunks": entry.chunks} for name, entry in tensors.items()
    }


def _tensors_from_json(found: Any, file: str) -> dict[str, TensorEntry]:
    return {name: _tensor_from_json(name, entry, file) for name, entry in found.items()}


def _tensor_from_json(name: str, found: Any, file: str) -> TensorEntry:
    dtype = found["dtype"]
    if _text(dtype) not in STORAGE:
        raise _wrong(file, name, f"its dtype {dtype!r} is unknown; known are {', '.join(STORAGE)}")
    chunks = tuple(Chunk(*map(_count, chunk)) for chunk in found["chunks"])
    return TensorEntry(tuple(map(_count, found["shape"])), dtype, chunks)


def _file_from_json(found: Any) -> DataFile:
    name = _text(found["name"])
    if "/" in name or "\0" in name or name in ("", ".", "..") or len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"{name[:_MAX_NAME_BYTES]!r} is not the name of a data file")
    return DataFile(name, *(_count(found[field]) for field in DataFile._fields[1:]))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
