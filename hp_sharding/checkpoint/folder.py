"""A checkpoint is a folder: a data file of each part, and ``index.json``, which comes last and makes it one.

A save puts its files beside those of the save before, under an id of its own. Each part writes its data file, then a
manifest that says what is in it; one rank merges the manifests into the index, and renaming that is the moment at which
the new checkpoint takes the place of the old one. Only then, and when that is on the disk, the old files go. So a kill
leaves the one or the other, and a folder with data files alone is a save that did not finish.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .durable import failed, make_folder, remove, replace_file, sync_folder
from .index import FORMAT, Index, Written, merge
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
SEEN_WITHIN_S = 60.0
"""How long what another machine has written may take to show here. Network file systems keep what they know of names
and sizes for as long, and of names that were not there, too."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 2.0
_UNSEEN = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""What the system answers of a file that is not there, or no longer the one that it was."""


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
        self._seen: set[int] = set()
        self._indexed: tuple[tuple[int, ...], str] = ((), "")

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

        A part that was seen once is not asked for again.

        Raises:
            CheckpointError: one of them has given up, or the folder cannot be read.
        """
        self._seen.update(self._there(part for part in range(self.n_parts) if part not in self._seen))
        missing = [part for part in range(self.n_parts) if part not in self._seen]
        failed_parts = sorted(self._there(missing, "failed"))
        if failed_parts:
            raise CheckpointError(f"{self.path}: parts {failed_parts} could not be written; those ranks say why")
        return missing

    def give_up(self) -> None:
        """Lets whoever waits for this part know that it will not come. Never raises: the disk may be full."""
        path = self.path / self._name(self.part, "failed")
        try:
            path.touch()
        except OSError as error:
            _logger.debug("%s: %s", path, error)
        else:
            self._own.append(path)

    def check_place(self) -> None:
        """Refuses a folder whose index is something else's, and would be replaced. For one rank, before writing.

        Raises:
            CheckpointError: so it is.
        """
        path = self.path / INDEX_NAME
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return  # none, or one of ours that is damaged
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is not that of a checkpoint, and a save would replace it. Save to another folder",
                file=str(path),
            )

    def bytes_so_far(self) -> int:
        """Bytes of all files of this save that can be seen from here, whole or not: a save that is alive adds some.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        kinds = ("safetensors", "json", "json.partial")
        paths = (self.path / self._name(part, kind) for part in range(self.n_parts) for kind in kinds)
        return sum(map(_size_now, paths))

    def clear_leftovers(self) -> None:
        """Removes what saves that did not finish have left, so that they do not fill the disk. For one rank.

        Whatever is neither this save's nor the checkpoint's goes, and so do files of another save to the same folder
        that is still running: one save at a time writes to a folder.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        if os.path.isdir(self.path):
            self._remove_others()

    def commit(self, state: Any, aliases: Mapping[str, str]) -> None:
        """Makes what all parts have written the checkpoint in this folder. For one rank, when all have written.

        What other machines have written may take up to ``SEEN_WITHIN_S`` to show here, and is waited for.

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
        there = self._there(range(self.n_parts))
        missing = [part for part in range(self.n_parts) if part not in there]
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
            if path.suffix == ".json" or self._may_go(self.save_id):
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

    def _may_go(self, save_id: str) -> bool:
        """Whether files of that save are surely not those of the checkpoint that is there now."""
        return self._indexed_id() not in (save_id, _UNKNOWN)

    def _indexed_id(self) -> str:
        """Of the checkpoint in the folder; empty where there is none, ``_UNKNOWN`` where that cannot be told."""
        path = self.path / INDEX_NAME
        try:
            # Opened and not looked for: only this asks a network file system what is there now.
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                version = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
                if version != self._indexed[0]:
                    self._indexed = (version, Index.from_json(file.read(), file=str(path)).save_id)
                return self._indexed[1]
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except (OSError, CheckpointError) as error:
            _logger.debug("what else is in %s stays there: %s", self.path, error)
            return _UNKNOWN

    def _remove_old(self) -> None:
        """What is of no more use once the index is there."""
        try:
            self._remove_others()
        except CheckpointError as error:
            _logger.warning("files of the checkpoint before are still there: %s", error)
        for part in range(self.n_parts):
            _remove(self.path / self._name(part, "json"))

    def _there(self, parts: Iterable[int], kind: str = "json") -> set[int]:
        """Those of ``parts`` whose manifest is there, or another file of theirs."""
        return {part for part in parts if _size_of(self.path / self._name(part, kind), missing=-1) >= 0}

    def _manifests(self) -> list[Written]:
        """All of them, once they and their data files are seen."""
        read: dict[int, Written] = {}
        seen: set[int] = set()
        for _ in _looks():
            for part in range(self.n_parts):
                if part not in read:
                    self._read_manifest(part, read)
                if part in read and part not in seen and self._has_data(read[part]):
                    seen.add(part)
            if len(seen) == self.n_parts:
                return [read[part] for part in range(self.n_parts)]
        missing = [part for part in range(self.n_parts) if part not in read]
        if missing:
            raise self._unseen(self._name(missing[0], "json"), f"parts {missing} of {self.n_parts}")
        first = min(part for part in range(self.n_parts) if part not in seen)
        raise self._unseen(read[first].file.name, f"all of its file {read[first].file.name}")

    def _read_manifest(self, part: int, read: dict[int, Written]) -> None:
        """Adds it to ``read``, if it is there."""
        path = self.path / self._name(part, "json")
        try:
            data = path.read_bytes()
        except OSError as error:
            if error.errno not in _UNSEEN:
                raise failed(error, path, "cannot be read") from error
            return
        read[part] = Written.from_json(data, file=str(path), save_id=self.save_id)

    def _has_data(self, part: Written) -> bool:
        """Whether all of its data file is there."""
        path = self.path / part.file.name
        found = _size_of(path)
        if found > part.file.nbytes:
            raise CheckpointError(
                f"{path} has {found} bytes, and {part.file.nbytes} were written: does something else write here?",
                file=str(path),
            )
        return found == part.file.nbytes

    def _unseen(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {what} cannot be seen from the rank that writes the index. All ranks must save to one "
            "folder that all of them see, such as one of a network file system",
            file=str(self.path / name),
        )

    def _remove_others(self) -> None:
        """Files of saves that are neither this one nor, at the moment when they would go, the checkpoint."""
        # Whoever else commits now makes files that are listed here those of the checkpoint. So the index is asked last.
        for name in list_names(self.path):
            match = OURS.fullmatch(name)
            if match and match[1] != self.save_id and self._may_go(match[1]):
                _remove(self.path / name)

    def _name(self, part: int, kind: str) -> str:
        return f"{self.save_id}-{part:05d}-of-{self.n_parts:05d}.{kind}"


def _remove(path: Path) -> None:
    if not remove(path):
        _logger.warning("%s is of no more use and cannot be removed", path)


def _size_of(path: Path, *, missing: int = 0) -> int:
    """Bytes of a file, ``missing`` where it is not there."""
    try:
        # Opened, since a network file system asks anew only then.
        with path.open("rb", buffering=0) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        if error.errno in _UNSEEN:
            return missing
        raise failed(error, path, "cannot be read") from error


def _size_now(path: Path) -> int:
    """Bytes of a file that may be just being written; cheaper, and on a network file system some seconds old."""
    try:
        return path.stat().st_size
    except OSError as error:
        if error.errno in _UNSEEN:
            return 0
        raise failed(error, path, "cannot be read") from error


def _looks() -> Iterator[None]:
    """Gives a turn at once and then, after pauses that grow, until ``SEEN_WITHIN_S`` is over; the last one then."""
    deadline_s, pause_s = time.monotonic() + SEEN_WITHIN_S, _FIRST_PAUSE_S
    yield
    while (left_s := deadline_s - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        yield
