"""Files of whole tensors, two for each prefix, as a source to load from, and how they are written.

======================  =========================  ====================================
format                  weights                    optimizer, where there is one
======================  =========================  ====================================
``paddle``              ``<prefix>.pdparams``      ``<prefix>.pdopt``
``safetensors``         ``<prefix>.safetensors``   ``<prefix>.optimizer.safetensors``
======================  =========================  ====================================

They have no checksums: what is cut off or no longer makes sense is found, a changed value is not. The two files are
renamed one after the other, the weights last; a kill between the two leaves the optimizer's of the new save beside the
weights of the old one.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from ..errors import CheckpointError
from . import paddle_files, safetensors_files
from .full_state import BLOCK_NUMEL, Fetch, Found, FullState, Wrote, write_to
from .source import TensorInfo
from .unpickled import PickledFile

FORMATS = {
    "paddle": (paddle_files.WEIGHTS, paddle_files.OPTIMIZER_STATE),
    "safetensors": (safetensors_files.WEIGHTS, safetensors_files.OPTIMIZER_STATE),
}
"""Name of the format -> endings of the files of weights and of the optimizer's state."""


class WholeFiles:
    """A ``TensorSource`` over the files of a prefix.

    Where the optimizer's file has a float32 master of a parameter, that is what the parameter is. Moments are called as
    in Paddle's optimizers, without the ``name`` of the optimizer. ``state`` has ``lr_scheduler`` where the files are
    Paddle's and there is an optimizer's, else what was saved.

    Args:
        path: the prefix, or one of the files.

    Raises:
        CheckpointError: there are no such files, they are damaged, or the two do not belong together.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._prefix, self._format = _prefix_and_format(os.fspath(path))
        weights, optimizer = (self._prefix + ending for ending in FORMATS[self._format])
        self._files: list[Any] = []
        try:
            found = self._opened(weights, optimizer if os.path.exists(optimizer) else None)
            self._tensors = found.tensors
            self._infos = {name: tensor.info for name, tensor in found.tensors.items()}
        except BaseException:
            self.close()
            raise
        self._aliases, self._state = found.aliases, found.state

    def _opened(self, weights: str, optimizer: str | None) -> Found:
        if self._format == "paddle":
            return paddle_files.found_in_paddle(*self._open(PickledFile, weights, optimizer))
        return safetensors_files.found_in_safetensors(*self._open(safetensors_files.TensorsFile, weights, optimizer))

    def _open(self, kind: Any, weights: str, optimizer: str | None) -> tuple[Any, Any]:
        for path in (weights, *([optimizer] if optimizer else [])):
            self._files.append(kind(path))
        return self._files[0], self._files[1] if optimizer else None

    @property
    def where(self) -> str:
        """The prefix."""
        return self._prefix

    @property
    def identity(self) -> str:
        """A checksum of the format, of the files' sizes, and of what the tensors in them are; of no values."""
        sizes = [file.nbytes for file in self._files]
        tensors = sorted((name, info.shape, info.dtype) for name, info in self._infos.items())
        return f"{zlib.crc32(json.dumps([self._format, sizes, tensors]).encode()):08x}"

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Logical name -> shape and dtype."""
        return self._infos

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other logical names of tied parameters."""
        return self._aliases

    @property
    def state(self) -> Mapping[str, Any]:
        """What is not tensors, as far as these files have it."""
        return self._state

    def read(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Elements ``start`` to ``stop``, flat."""
        try:
            return self._tensors[name].read(start, stop)
        except CheckpointError as error:
            raise CheckpointError(f"{error} (reading {name})", file=error.file, parameter=name) from error

    def file_of(self, name: str, element: int = 0) -> str:
        """The file that has it."""
        return self._tensors[name].file.path

    def verify(self, part: int = 0, n_parts: int = 1) -> None:
        """Reads a share of everything. That all of it is there was checked when the files were opened."""
        total = sum(info.nbytes for info in self._infos.values())
        first, last = total * part // n_parts, total * (part + 1) // n_parts
        begin = 0
        for name, info in self._infos.items():
            size = max(1, info.nbytes // max(1, info.numel))
            start, stop = (min(max(0, -(-(at - begin) // size)), info.numel) for at in (first, last))
            self._read_through(name, start, stop)
            begin += info.nbytes

    def check(self, name: str) -> None:
        """Reads one tensor."""
        self._read_through(name, 0, self._infos[name].numel)

    def _read_through(self, name: str, start: int, stop: int) -> None:
        for block in range(start, stop, BLOCK_NUMEL):
            self.read(name, block, min(block + BLOCK_NUMEL, stop))

    def close(self) -> None:
        """Closes the files. Safe to call twice."""
        for file in self._files:
            file.close()


def _prefix_and_format(path: str) -> tuple[str, str]:
    endings = [(ending, name) for name, both in FORMATS.items() for ending in both]
    for ending, name in sorted(endings, key=lambda item: -len(item[0])):
        if path.endswith(ending):
            return path.removesuffix(ending), name
    there = [name for name, (weights, _) in FORMATS.items() if os.path.exists(path + weights)]
    if len(there) == 1:
        return path, there[0]
    names = " and ".join(path + FORMATS[name][0] for name in there or FORMATS)
    what = "are both there: name the one to load" if there else "are both not there"
    raise CheckpointError(f"{names} {what}", file=path)


def write_paddle(prefix: str | os.PathLike[str], state: FullState, fetch: Fetch, *, wrote: Wrote | None = None) -> None:
    """Writes ``.pdparams`` and, with an optimizer, ``.pdopt``, which plain Paddle loads and continues from.

    Args:
        prefix: path without the ending. Folders are made.
        state: what there is to write.
        fetch: gives a logical tensor; called in order, once for each.
        wrote: told of the bytes of values as they are written.

    Raises:
        CheckpointError: they cannot be written. Files of that name stay as they were, but for the optimizer's where
            only the rename of the weights, the last step, failed.
    """
    write_to(paddle_files.PaddleTarget(os.fspath(prefix), state), state, fetch, wrote=wrote)


def write_safetensors(
    prefix: str | os.PathLike[str], state: FullState, fetch: Fetch, *, wrote: Wrote | None = None
) -> None:
    """Writes ``.safetensors`` and, with an optimizer, ``.optimizer.safetensors``; else as ``write_paddle``."""
    write_to(safetensors_files.SafetensorsTarget(os.fspath(prefix), state), state, fetch, wrote=wrote)
