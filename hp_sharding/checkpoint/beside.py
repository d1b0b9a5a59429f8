"""A file that appears under its name only when it is complete and on the disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .durable import failed, make_folder, new_file, remove, sync_folder, syncing_behind, write_all

_SMALL_BYTES = 1 << 16


class _Discarded(Exception):
    """Nobody wants the file."""


class FileBeside:
    """Writes ``<path>.partial``, which ``rename`` gives its name; what was at ``path`` stays until then.

    Folders are made where they are missing.

    Args:
        path: of the file to come.

    Raises:
        CheckpointError: it cannot be written. From every method; nothing is left beside then.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._partial = self.path.with_name(self.path.name + ".partial")
        make_folder(self.path.parent)
        self._small = bytearray()
        self._stack = contextlib.ExitStack()
        try:
            self._fd = self._stack.enter_context(new_file(self._partial, replace=True))
            self._wrote = syncing_behind(self._fd)
        except OSError as error:
            raise failed(error, self.path, "cannot be written") from error

    def write(self, data: bytes | npt.NDArray[np.uint8], *, parameter: str = "") -> None:
        """Appends bytes. A large block is not copied.

        Args:
            data: one-dimensional.
            parameter: what they belong to, for errors.
        """
        view = memoryview(data) if isinstance(data, bytes) else data.data
        if view.nbytes < _SMALL_BYTES:
            self._small.extend(view)
            view = memoryview(b"")
        if view.nbytes or len(self._small) >= _SMALL_BYTES:
            self._put(view, parameter)

    def close(self) -> None:
        """Everything written is on the disk, still under the other name."""
        self._put(memoryview(b""), "")
        try:
            self._stack.close()
        except OSError as error:
            raise self._failed(error, "") from error

    def rename(self) -> None:
        """The file takes its place; ``close`` comes first."""
        try:
            os.replace(self._partial, self.path)
        except OSError as error:
            raise self._failed(error, "") from error
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Removes what was written and not renamed yet. Safe to call twice, and after ``rename``."""
        # new_file closes and removes it, without a last sync, where an error comes by.
        with contextlib.suppress(_Discarded), self._stack:
            raise _Discarded
        remove(self._partial)

    def _put(self, data: memoryview, parameter: str) -> None:
        small, self._small = self._small, bytearray()
        try:
            write_all(self._fd, memoryview(small))
            write_all(self._fd, data)
            self._wrote(len(small) + data.nbytes)
        except OSError as error:
            raise self._failed(error, parameter) from error

    def _failed(self, error: OSError, parameter: str) -> CheckpointError:
        self.discard()
        return failed(error, self.path, "cannot be written", parameter=parameter)
