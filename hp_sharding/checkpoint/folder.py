"""A checkpoint is a folder: a data file of each part, and ``index.json``, which comes last and makes it one.

A save puts its files beside those of the save before, under an id of its own. Each part writes its data file, then a
manifest that says what is in it; one rank merges the manifests into the index, and renaming that is the moment at which
the new checkpoint takes the place of the old one. Only then, and when that is on the disk, the old files go. So a kill
leaves the one or the other, and a folder with data files alone is a save that did not finish.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .durable import failed, make_folder, remove, replace_file, sync_folder
from .index import Index, Written, merge
from .opened import (
    INDEX_NAME,
    OURS,
    SAVE_ID,
    Checkpoint,
    is_complete,
    latest_checkpoint,
    list_names,
    open_checkpoint,
    read_index,
)
from .tensor_file import Piece, write_tensors

__all__ = [
    "INDEX_NAME",
    "Checkpoint",
    "Save",
    "is_complete",
    "latest_checkpoint",
    "new_save_id",
    "open_checkpoint",
    "read_index",
]

_logger = logging.getLogger("hp_sharding")
_UNKNOWN = "unknown"


def new_save_id() -> str:
    """What to call a save; all its parts share it, and no other save has it."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + f"-{os.urandom(4).hex()}"


class Save:
    """One part's share in a save to a folder that all parts see."""

    def __init__(self, path: str | os.PathLike[str], save_id: str, part: int, n_parts: int) -> None:
        """Touches nothing yet.

        Args:
            path: the folder; it and those above it are made where they are missing.
            save_id: from ``new_save_id()``, the same on all parts.
            part: this one's number.
            n_parts: how many write a data file.
        """
        assert re.fullmatch(SAVE_ID, save_id) and 0 <= part < n_parts <= 99999
        self.path = Path(path).absolute()
        self.save_id = save_id
        self.part = part
        self.n_parts = n_parts
        self._own: list[Path] = []

    def write(self, pieces: Iterable[Piece]) -> None:
        """Writes this part's data file and manifest; they are on the disk when this returns.

        Raises:
            CheckpointError: the disk is full or the like; what the part had written is gone again.
        """
        make_folder(self.path)
        # The folder is synced by whoever wrote to it: another machine could not do that for it.
        data, manifest = (self.path / self._name(self.part, kind) for kind in ("safetensors", "json"))
        try:
            written = write_tensors(data, pieces)
            self._own = [data]
            replace_file(manifest, written.to_json(self.save_id), beside=Path(f"{manifest}.partial"))
            self._own = [manifest, data]
            sync_folder(self.path)
        except BaseException:
            self.discard()
            raise

    def missing_parts(self) -> list[int]:
        """Parts that have not written yet, or whose files cannot be seen from here.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        names = set(list_names(self.path))
        return [part for part in range(self.n_parts) if self._name(part, "json") not in names]

    def clear_leftovers(self) -> None:
        """Removes what saves that did not finish have left, so that they do not fill the disk. For one rank.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        if not os.path.isdir(self.path):
            return
        indexed = self._indexed_id()
        if indexed != _UNKNOWN:
            self._remove_others({self.save_id, indexed})

    def commit(self, state: Any, aliases: Mapping[str, str]) -> None:
        """Makes what all parts have written the checkpoint in this folder. For one rank, when all have written.

        Args:
            state: what is not tensors, as JSON.
            aliases: other logical names of tied parameters -> the one that was written.

        Raises:
            CheckpointError: parts are missing or do not fit together, or the system refused. The folder still holds
                the checkpoint that it held, unless only the last step failed, of which the message says so.
        """
        index_path = self.path / INDEX_NAME
        tensors, files = merge(self._manifests(), file=str(index_path))
        index = Index(tensors, files, aliases, state, self.save_id, time.time())
        index.check(str(index_path))
        before = self._index_now()
        self._put_index(index.to_json())
        missing = self.missing_parts()
        if missing:
            self._put_index(before)
            raise CheckpointError(f"{self.path}: parts {missing} have given up. What was there before is as it was")
        try:
            sync_folder(self.path)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. The new checkpoint is there, but after a loss of power it may be the old one again",
                file=error.file,
            ) from error
        self._remove_old()

    def discard(self) -> None:
        """Removes what this part has written, unless it belongs to the checkpoint by now. Never raises."""
        # The manifest before looking at the index, which the other rank writes before it looks for the manifests: if
        # it commits at this moment, one of the two sees the other.
        own, self._own = self._own, []
        for path in own:
            if path.suffix == ".json" or self._indexed_id() not in (self.save_id, _UNKNOWN):
                _remove(path)

    def _index_now(self) -> bytes | None:
        path = self.path / INDEX_NAME
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failed(error, path, "cannot be read") from error

    def _put_index(self, data: bytes | None) -> None:
        """Replaces the index, or removes it."""
        path = self.path / INDEX_NAME
        if data is None:
            _remove(path)
        else:
            replace_file(path, data, beside=self.path / f"{self.save_id}-{INDEX_NAME}.partial")

    def _indexed_id(self) -> str:
        """Of the checkpoint in the folder; empty where there is none, ``_UNKNOWN`` where that cannot be told."""
        try:
            return read_index(self.path).save_id if INDEX_NAME in os.listdir(self.path) else ""
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except (OSError, CheckpointError) as error:
            _logger.debug("what else is in %s stays there: %s", self.path, error)
            return _UNKNOWN

    def _remove_old(self) -> None:
        """What is of no more use once the index is there."""
        try:
            self._remove_others({self.save_id})
        except CheckpointError as error:
            _logger.warning("files of the checkpoint before are still there: %s", error)
        for part in range(self.n_parts):
            _remove(self.path / self._name(part, "json"))

    def _manifests(self) -> list[Written]:
        missing = self.missing_parts()
        if missing:
            raise self._unseen(self._name(missing[0], "json"), f"parts {missing} of {self.n_parts}")
        parts = []
        for part in range(self.n_parts):
            path = self.path / self._name(part, "json")
            try:
                data = path.read_bytes()
            except OSError as error:
                raise failed(error, path, "cannot be read") from error
            parts.append(Written.from_json(data, file=str(path), save_id=self.save_id))
            self._check_size(parts[-1])
        return parts

    def _check_size(self, part: Written) -> None:
        path = self.path / part.file.name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise self._unseen(part.file.name, f"its file {path.name}") from error
        if found != part.file.nbytes:
            raise CheckpointError(
                f"{path} has {found} bytes, and {part.file.nbytes} were written: does something else write here?",
                file=str(path),
            )

    def _unseen(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {what} cannot be seen from the rank that writes the index. All ranks must save to one "
            "folder that all of them see, such as one of a network file system",
            file=str(self.path / name),
        )

    def _remove_others(self, keep: set[str]) -> None:
        for name in list_names(self.path):
            match = OURS.fullmatch(name)
            if match and match[1] not in keep:
                _remove(self.path / name)

    def _name(self, part: int, kind: str) -> str:
        return f"{self.save_id}-{part:05d}-of-{self.n_parts:05d}.{kind}"


def _remove(path: Path) -> None:
    if not remove(path):
        _logger.warning("%s is of no more use and cannot be removed", path)
