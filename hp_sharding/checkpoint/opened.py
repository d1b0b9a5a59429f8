"""A checkpoint that is there: opened, read and verified."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .durable import failed
from .index import Index, Place, parameter_of
from .source import STORAGE, TensorInfo
from .tensor_file import BLOCK_BYTES, TensorFile
from .values import decode

INDEX_NAME = "index.json"
SAVE_ID = r"\d{8}-\d{6}-[0-9a-f]{8}"
OURS = re.compile(rf"({SAVE_ID})-(\d{{5}}-of-\d{{5}}\.(safetensors|json)|index\.json)(\.partial)?")
"""Names of the files that a save makes besides the index. Nothing else in a folder is ever touched."""
_logger = logging.getLogger("hp_sharding")

_MAX_OPEN = 256
"""Files that stay open. A process may have about a thousand, and has use for others."""
_UNEVEN = 1.2
"""How much more than its share one rank may verify for the sake of reading the files that it wrote itself."""

_Found = TypeVar("_Found")


def read_index(path: str | os.PathLike[str]) -> Index:
    """The index of the checkpoint in a folder.

    Raises:
        CheckpointError: there is none, it is damaged or of a newer version; says so of a save that did not finish.
    """
    folder = Path(path).absolute()
    try:
        data = (folder / INDEX_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_checkpoint(folder) from error
    except OSError as error:
        raise failed(error, folder / INDEX_NAME, "cannot be read") from error
    return Index.from_json(data, file=str(folder / INDEX_NAME))


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens the checkpoint in a folder, for reading; what it opened stays readable while another save replaces it.

    Raises:
        CheckpointError: there is none; its index is damaged, of a newer version, or contradicts itself; a data file
            is missing, has another size, or begins with something else. Names the file, and the first tensor in it.
    """
    return _steady(path, lambda index: Checkpoint(Path(path).absolute(), index))


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a checkpoint whose index is whole and whose data files are there, by their sizes."""
    try:
        _complete_index(path)
    except CheckpointError:
        return False
    return True


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in a folder of them that has the most steps; of equal ones, that which was saved last.

    Saves that did not finish are passed over, and so are damaged ones, with a warning. None where there is none.

    Raises:
        CheckpointError: the folder is there and cannot be read.
    """
    try:
        paths = sorted(path for path in Path(folder).iterdir() if os.path.exists(path / INDEX_NAME))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise failed(error, folder, "cannot be read") from error
    found = [item for item in map(_age, paths) if item is not None]
    if any(item.steps is None for item in found):
        found = [item._replace(steps=None) for item in found]
    return max(found, key=lambda item: (item.steps or 0, item.saved_at)).path if found else None


def _complete_index(path: str | os.PathLike[str]) -> Index:
    """The index, all of whose data files are there."""

    def checked(index: Index) -> Index:
        _check_sizes(Path(path).absolute(), index, index.places())
        return index

    return _steady(path, checked)


def _steady(path: str | os.PathLike[str], use: Callable[[Index], _Found]) -> _Found:
    """``use`` of the index; once more where a save replaced the checkpoint, and took its files away, meanwhile."""
    index = read_index(path)
    try:
        return use(index)
    except CheckpointError:
        again = read_index(path)
        if again.save_id == index.save_id:
            raise
    return use(again)


class Checkpoint:
    """A ``TensorSource``: the checkpoint in a folder. Reading is safe from several threads."""

    def __init__(self, path: Path, index: Index) -> None:
        """Opens all files and checks their sizes and headers; see ``open_checkpoint``."""
        self.path = path
        self.index = index
        self.tensors: Mapping[str, TensorInfo] = {name: entry.info for name, entry in index.tensors.items()}
        self.aliases: Mapping[str, str] = index.aliases
        self._places = index.places()
        self._files: list[TensorFile] = []
        _check_sizes(path, index, self._places)
        try:
            for file, places in zip(index.files, self._places, strict=True):
                stays_open = len(self._files) < _MAX_OPEN
                self._files.append(TensorFile(path / file.name, file, stays_open=stays_open))
                self._files[-1].check_header(self.tensors.__getitem__, places)
        except BaseException:
            self.close()
            raise

    @property
    def where(self) -> str:
        return str(self.path)

    @cached_property
    def state(self) -> Mapping[str, Any]:
        return decode(self.index.state, _Arrays(self)) or {}

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
        for chunk in entry.chunks:
            first, last = max(chunk.start, start), min(chunk.stop, stop)
            if first < last:
                offset_bytes = chunk.offset_bytes + (first - chunk.start) * dtype.itemsize
                own = data[(first - start) * dtype.itemsize : (last - start) * dtype.itemsize]
                self._files[chunk.file].read_into(own, offset_bytes, name)
        return values

    def verify(self, part: int = 0, n_parts: int = 1) -> None:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        for number, places in enumerate(self.share(part, n_parts)):
            for place in places:
                self._files[number].verify(place, buffer)

    def share(self, part: int, n_parts: int) -> list[list[Place]]:
        """Of each file the chunks that ``verify(part, n_parts)`` reads. Headers were read when it was opened."""
        owner = _by_file(self.index, n_parts) or _by_bytes(self.index, n_parts)
        return [
            [place for place in places if owner(number, place) == part] for number, places in enumerate(self._places)
        ]

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Arrays(Mapping[str, npt.NDArray[Any]]):
    """Tensors of a checkpoint by logical name, whole but flat, each read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._checkpoint.read(name, 0, self._checkpoint.tensors[name].numel)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.tensors)

    def __len__(self) -> int:
        return len(self._checkpoint.tensors)


class _ByFile(NamedTuple):
    """Whole files: what a rank verifies, it wrote itself or will read."""

    files_per_part: int

    def __call__(self, file: int, place: Place) -> int:
        return file // self.files_per_part


class _ByBytes(NamedTuple):
    """By where the middle of a chunk lies among all bytes."""

    starts: list[int]
    total_bytes: int
    n_parts: int

    def __call__(self, file: int, place: Place) -> int:
        middle = self.starts[file] + place.offset_bytes + place.nbytes // 2
        return middle * self.n_parts // self.total_bytes


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
    return _ByBytes(starts[:-1], starts[-1], n_parts)


def _check_sizes(path: Path, index: Index, places: list[list[Place]]) -> None:
    for file, inside in zip(index.files, places, strict=True):
        name = inside[0].name if inside else ""
        holds = f", which holds {name}{' and others' * (len(inside) > 1)}," if name else ""
        try:
            found = os.stat(path / file.name).st_size
        except FileNotFoundError as error:
            why = f"{path / file.name}{holds} is missing. Bring it back, or use another checkpoint"
            raise CheckpointError(why, file=str(path / file.name), parameter=parameter_of(name)) from error
        except OSError as error:
            raise failed(error, path / file.name, "cannot be read", parameter=parameter_of(name)) from error
        if found != file.nbytes:
            how = "truncated" if found < file.nbytes else "too long"
            why = f"{path / file.name}{holds} is {how}: it has {found} bytes, and {file.nbytes} were written"
            raise CheckpointError(
                f"{why}. Use another checkpoint or copy of it", file=str(path / file.name), parameter=parameter_of(name)
            )


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


class _Age(NamedTuple):
    """How far a checkpoint is, and when it was saved; ``steps`` is None where it does not say."""

    steps: int | None
    saved_at: float
    path: Path


def _age(path: Path) -> _Age | None:
    """None, with a warning, where it cannot be loaded."""
    try:
        index = _complete_index(path)
    except CheckpointError as error:
        _logger.warning("not a checkpoint to go on from: %s", error)
        return None
    steps = index.state.get("steps") if isinstance(index.state, dict) else None
    return _Age(steps if type(steps) is int else None, index.saved_at, path)
