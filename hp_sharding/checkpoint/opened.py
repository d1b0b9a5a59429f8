"""A checkpoint that is there: opened, read and verified."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .durable import failed
from .index import Index, Place
from .source import STORAGE, TensorInfo
from .tensor_file import BLOCK_BYTES, Inside, OpenLimit, TensorFile
from .values import decode

INDEX_NAME = "index.json"
SAVE_ID = r"\d{8}-\d{6}-[0-9a-f]{8}"
OURS = re.compile(rf"({SAVE_ID})-(\d{{5}}-of-\d{{5}}\.(safetensors|json|failed)|index\.json)(\.partial)?")
"""Names of the files that a save makes besides the index. Nothing else in a folder is ever touched."""
_logger = logging.getLogger("hp_sharding")

_MAX_OPEN = 256
"""Files that stay open. A process may have about a thousand, and has use for others."""
_UNEVEN = 1.2
"""How much more than its share one rank may verify for the sake of reading the files that it wrote itself."""
_UNUSABLE = "not a checkpoint to go on from: %s"


def read_index(path: str | os.PathLike[str]) -> Index:
    """The index of the checkpoint in a folder.

    Raises:
        CheckpointError: there is none, it is damaged or of a newer version; says so of a save that did not finish.
    """
    index = find_index(path)
    if index is None:
        raise _no_checkpoint(Path(path).absolute())
    return index


def find_index(path: str | os.PathLike[str]) -> Index | None:
    """The index of the checkpoint in a folder, None where there is none; other errors as of ``read_index``."""
    file = Path(path).absolute() / INDEX_NAME
    # Opened without asking a listing first, which a network file system may answer with what was there a minute ago.
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise failed(error, file, "cannot be read") from error
    return Index.from_json(data, file=str(file))


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens the checkpoint in a folder, for reading. Only its index is looked at, so that many ranks can do so.

    Data files are opened and checked when they are read for the first time, and by ``verify``. If another save replaces
    the checkpoint before that, they are gone, and the error says so.

    Raises:
        CheckpointError: there is none; its index is damaged, of a newer version, or contradicts itself.
    """
    return Checkpoint(Path(path).absolute(), read_index(path))


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a checkpoint whose index is whole and whose data files are there, by their sizes."""
    try:
        open_complete(path).close()
    except CheckpointError:
        return False
    return True


def open_complete(path: str | os.PathLike[str]) -> Checkpoint:
    """As ``open_checkpoint``, and looks whether all data files are there, by their sizes. For one process.

    Raises:
        CheckpointError: a data file is missing or has another size; names the file, and the first tensor in it.
    """
    checkpoint = open_checkpoint(path)
    try:
        checkpoint.check_sizes()
    except CheckpointError:
        again = open_checkpoint(path)
        if again.identity == checkpoint.identity:
            raise
        # A save replaced it, and took its files away, meanwhile.
        again.check_sizes()
        return again
    return checkpoint


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in a folder of them that was saved last, however many steps it has.

    Who goes back to an earlier checkpoint goes on from there: those of the run that was given up are older than what is
    saved next. Saves that did not finish are passed over, and so are damaged ones, with a warning. None where there is
    none.

    Raises:
        CheckpointError: the folder is there and cannot be read.
    """
    try:
        paths = sorted(Path(folder).iterdir())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise failed(error, folder, "cannot be read") from error
    found = [item for item in map(_saved, paths) if item is not None]
    return next((item.path for item in sorted(found, reverse=True) if _is_usable(item.path)), None)


class Checkpoint:
    """A ``TensorSource``: the checkpoint in a folder. Reading is safe from several threads."""

    def __init__(self, path: Path, index: Index) -> None:
        """Opens nothing yet; see ``open_checkpoint``."""
        self.path = path
        self.index = index
        self.tensors: Mapping[str, TensorInfo] = {name: entry.info for name, entry in index.tensors.items()}
        self.aliases: Mapping[str, str] = index.aliases
        self._places = index.places()
        limit = OpenLimit(_MAX_OPEN)
        self._files = [
            TensorFile(path / file.name, file, Inside(self.tensors.__getitem__, places), limit)
            for file, places in zip(index.files, self._places, strict=True)
        ]

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> str:
        return self.index.save_id

    @cached_property
    def state(self) -> Mapping[str, Any]:
        """Its tensors are checked before they are decoded.

        Raises:
            CheckpointError: they are damaged, or it makes no sense.
        """
        try:
            return decode(self.index.state, _Arrays(self)) or {}
        except CheckpointError:
            raise
        except Exception as error:  # whatever NumPy and Paddle have to say of nonsense
            file = str(self.path / INDEX_NAME)
            why = f"what it says besides tensors makes no sense ({type(error).__name__}: {error})"
            raise CheckpointError(f"{file} is damaged: {why}. Use another checkpoint", file=file) from error

    def file_of(self, name: str, element: int = 0) -> str:
        for chunk in self.index.tensors[name].chunks:
            if chunk.start <= element < chunk.stop:
                return str(self._files[chunk.file].path)
        return str(self.path / INDEX_NAME)

    def read(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        entry = self.index.tensors[name]
        dtype = STORAGE[entry.dtype]
        assert 0 <= start <= stop <= entry.info.numel, (name, start, stop, entry.info)
        values: npt.NDArray[Any] = np.empty(stop - start, dtype)
        data = memoryview(values.view(np.uint8).data)
        with self._telling_if_replaced():
            for chunk in entry.chunks:
                first, last = max(chunk.start, start), min(chunk.stop, stop)
                if first < last:
                    offset_bytes = chunk.offset_bytes + (first - chunk.start) * dtype.itemsize
                    own = data[(first - start) * dtype.itemsize : (last - start) * dtype.itemsize]
                    self._files[chunk.file].read_into(own, offset_bytes, name)
        return values

    def verify(self, part: int = 0, n_parts: int = 1) -> None:
        """A share of all chunks, of what precedes them in the files, and of the files' sizes; all parts check all."""
        owner = self._owner(n_parts)
        buffer = memoryview(bytearray(BLOCK_BYTES))
        with self._telling_if_replaced():
            for number, (file, places) in enumerate(zip(self._files, self.share(part, n_parts), strict=True)):
                if owner(number, file.file.header_nbytes // 2) == part:
                    file.check()
                for place in places:
                    file.verify(place, buffer)

    def check(self, name: str) -> None:
        places = self.index.tensors[name].places(name)
        buffer = memoryview(bytearray(min(BLOCK_BYTES, max([place.nbytes for place in places], default=0))))
        with self._telling_if_replaced():
            for place in places:
                self._files[place.chunk.file].verify(place, buffer)

    def check_sizes(self) -> None:
        """Whether all files are there, by their sizes. For one process: of many ranks each would ask for all files.

        Raises:
            CheckpointError: the first one that is not; names it, and the first tensor in it.
        """
        for file in self._files:
            file.check_size()

    def share(self, part: int, n_parts: int) -> list[list[Place]]:
        """Of each file the chunks that ``verify(part, n_parts)`` reads."""
        owner = self._owner(n_parts)
        found: list[list[Place]] = []
        for number, places in enumerate(self._places):
            # Of many files most have nothing of this part, and their chunks need not be gone through.
            has_some = owner(number, 0) <= part <= owner(number, self.index.files[number].nbytes)
            inside = places if has_some else []
            found.append([place for place in inside if owner(number, place.offset_bytes + place.nbytes // 2) == part])
        return found

    def _owner(self, n_parts: int) -> _ByFile | _ByBytes:
        """Tells which part verifies what has its middle at a byte of a file."""
        return _by_file(self.index, n_parts) or _by_bytes(self.index, n_parts)

    @contextlib.contextmanager
    def _telling_if_replaced(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if not self._is_replaced():
                raise
            why = "Another save has replaced this checkpoint meanwhile: load it again"
            raise CheckpointError(f"{error}. {why}", file=error.file, parameter=error.parameter) from error

    def _is_replaced(self) -> bool:
        try:
            index = find_index(self.path)
        except CheckpointError:
            return False
        return index is not None and index.save_id != self.index.save_id

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Arrays(Mapping[str, npt.NDArray[Any]]):
    """Tensors of a checkpoint by logical name, whole but flat, each checked and read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint.tensors

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        self._checkpoint.check(name)
        return self._checkpoint.read(name, 0, self._checkpoint.tensors[name].numel)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.tensors)

    def __len__(self) -> int:
        return len(self._checkpoint.tensors)


class _ByFile(NamedTuple):
    """Whole files: what a rank verifies, it wrote itself or will read."""

    files_per_part: int

    def __call__(self, file: int, middle_bytes: int) -> int:
        return file // self.files_per_part


class _ByBytes(NamedTuple):
    """By where the middle of a chunk lies among all bytes."""

    starts: list[int]
    total_bytes: int
    n_parts: int

    def __call__(self, file: int, middle_bytes: int) -> int:
        return (self.starts[file] + middle_bytes) * self.n_parts // self.total_bytes


def _by_file(index: Index, n_parts: int) -> _ByFile | None:
    """None where files cannot be dealt out about evenly."""
    per_part, rest = divmod(len(index.files), n_parts)
    if rest or not per_part:
        return None
    sizes = [sum(file.nbytes for file in index.files[at * per_part :][:per_part]) for at in range(n_parts)]
    return _ByFile(per_part) if max(sizes) * n_parts <= _UNEVEN * sum(sizes) else None


def _by_bytes(index: Index, n_parts: int) -> _ByBytes:
    starts = [0]
    for file in index.files:
        starts.append(starts[-1] + file.nbytes)
    return _ByBytes(starts[:-1], max(1, starts[-1]), n_parts)


def list_names(folder: Path) -> list[str]:
    """Names of what is in a folder, sorted.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise failed(error, folder, "cannot be read") from error


def _no_checkpoint(folder: Path) -> CheckpointError:
    if not os.path.exists(folder):
        why = f"{folder} does not exist. Check the path"
    elif not os.path.isdir(folder):
        why = f"{folder} is a file, and a checkpoint is a folder. Whole .pdparams files are for load_full"
    elif any(OURS.fullmatch(name) for name in list_names(folder)):
        why = (
            f"{folder} is no checkpoint: it has data files but no {INDEX_NAME}. The save that wrote them is still "
            "running or did not finish. Load an earlier one; hp_sharding.latest_checkpoint finds it"
        )
    else:
        why = f"{folder} is no checkpoint: it has no {INDEX_NAME}. Check the path"
    return CheckpointError(why, file=str(folder))


class _Saved(NamedTuple):
    """A checkpoint, and when it was saved."""

    saved_at: float
    path: Path


def _saved(path: Path) -> _Saved | None:
    """None where there is none, and, with a warning, where it is damaged."""
    try:
        index = find_index(path)
    except CheckpointError as error:
        _logger.warning(_UNUSABLE, error)
        return None
    return None if index is None else _Saved(index.saved_at, path)


def _is_usable(path: Path) -> bool:
    """Whether all of it is there; with a warning where not."""
    try:
        open_complete(path).close()
    except CheckpointError as error:
        _logger.warning(_UNUSABLE, error)
        return False
    return True
