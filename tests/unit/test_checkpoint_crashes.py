"""A save that is killed, or that the system refuses, leaves the checkpoint before it; the next one cleans up."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hp_sharding.checkpoint.durable import sync_folder
from hp_sharding.checkpoint.folder import Save, is_complete, new_save_id, open_checkpoint
from hp_sharding.checkpoint.tensor_file import write_tensors
from hp_sharding.errors import CheckpointError

from ..stored import contents, halves, names, piece, random_tensors, same, save_parts

_BEFORE, _AFTER, _THIRD = random_tensors(1), random_tensors(2), random_tensors(3)
_COMPLETE = ["00000-of-00002.safetensors", "00001-of-00002.safetensors", "index.json"]


class _Killed(BaseException):
    """The process is gone."""


class _Operation(NamedTuple):
    kind: str
    path: str


class _Disk:
    """Stands before the operations that change what is on the disk.

    ``log`` has those that were done. Before number ``limit`` the process is killed, in the middle of the last one where
    that is a write, and then does nothing any more.
    """

    def __init__(self, patch: pytest.MonkeyPatch, limit: int | None = None) -> None:
        self.log: list[_Operation] = []
        self._limit = limit
        self._real = {name: getattr(os, name) for name in ("open", "write", "fsync", "replace", "unlink", "mkdir")}
        for name in self._real:
            patch.setattr(os, name, getattr(self, f"_{name}"))

    @property
    def killed(self) -> bool:
        return self._limit is not None and len(self.log) >= self._limit

    def _do(self, kind: str, path: Any, *args: Any, **kwargs: Any) -> Any:
        if self.killed:
            raise _Killed
        self.log.append(_Operation(kind, os.readlink(f"/proc/self/fd/{path}") if type(path) is int else str(path)))
        return self._real[kind](path, *args, **kwargs)

    def _open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            return self._do("open", path, flags, *args, **kwargs)
        return self._real["open"](path, flags, *args, **kwargs)

    def _write(self, fd: int, data: memoryview) -> int:
        is_last = self._limit == len(self.log) + 1
        return self._do("write", fd, data[: len(data) // 2] if is_last else data)

    def _fsync(self, fd: int) -> None:
        self._do("fsync", fd)

    def _unlink(self, path: Any) -> None:
        self._do("unlink", path)

    def _replace(self, path: Any, to: Any) -> None:
        self._do("replace", path, to)

    def _mkdir(self, path: Any, mode: int = 0o777) -> None:
        self._do("mkdir", path, mode)


@pytest.fixture
def quick_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here cuts the power, and hundreds of syncs take long where others use the disk, too."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def _n_operations(tmp_path: Path) -> int:
    save_parts(tmp_path / "counted", halves(_BEFORE))
    with pytest.MonkeyPatch.context() as patch:
        disk = _Disk(patch)
        save_parts(tmp_path / "counted", halves(_AFTER))
    return len(disk.log)


def _killed_save(folder: Path, limit: int) -> list[_Operation]:
    with pytest.MonkeyPatch.context() as patch:
        disk = _Disk(patch, limit)
        with contextlib.suppress(_Killed):
            save_parts(folder, halves(_AFTER))
        assert disk.killed
    return disk.log


@pytest.mark.usefixtures("quick_sync")
def test_killed_before_any_operation_the_one_or_the_other_is_there_and_the_next_cleans_up(tmp_path: Path) -> None:
    n_operations = _n_operations(tmp_path)
    n_old = 0
    for limit in range(n_operations):
        folder = tmp_path / str(limit)
        save_parts(folder, halves(_BEFORE))
        (folder / "notes.txt").write_text("mine")
        log = _killed_save(folder, limit)
        renamed = any(kind == "replace" and path.endswith("index.json.partial") for kind, path in log)
        n_old += not renamed
        assert is_complete(folder)
        assert same(contents(folder), _AFTER if renamed else _BEFORE), log
        save_parts(folder, halves(_THIRD))
        assert same(contents(folder), _THIRD)
        assert names(folder) == [*_COMPLETE, "notes.txt"]
    assert n_old == n_operations - 5  # then the folder is synced, and two data files and two manifests go


@pytest.mark.usefixtures("quick_sync")
def test_killed_with_nothing_before_there_is_none_or_the_new_one(tmp_path: Path) -> None:
    for limit in range(_n_operations(tmp_path)):
        folder = tmp_path / str(limit) / "inner"
        log = _killed_save(folder, limit)
        if any(kind == "replace" and path.endswith("index.json.partial") for kind, path in log):
            assert same(contents(folder), _AFTER)
        else:
            assert not is_complete(folder)
            with pytest.raises(CheckpointError, match=r"did not finish|has no index|does not exist"):
                open_checkpoint(folder)
        save_parts(folder, halves(_THIRD))
        assert same(contents(folder), _THIRD) and names(folder) == _COMPLETE


def test_a_loss_of_power_finds_all_on_the_disk_that_the_index_speaks_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a" / "b"
    save_parts(folder, halves(_BEFORE))
    disk = _Disk(monkeypatch)
    save_parts(folder, halves(_AFTER))
    dirty: set[str] = set()  # files with bytes, and the folder with names, that are not on the disk yet
    for kind, path in disk.log:
        if kind in ("open", "write"):
            dirty.add(path)
        elif kind == "fsync":
            dirty.discard(path)
        elif kind == "replace":
            assert path not in dirty
            assert "index.json" not in path or not dirty
        elif kind == "unlink":
            assert str(folder) not in dirty, "the new index may still be lost"
        if kind in ("open", "replace") and not (kind == "open" and "index.json" in path):
            dirty.add(str(folder))
    assert [kind for kind, _ in disk.log].count("unlink") == 4  # two old data files, two manifests


def test_folders_that_were_made_are_put_on_the_disk_in_those_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = _Disk(monkeypatch)
    save_parts(tmp_path / "a" / "b", halves(_AFTER))
    first = next(number for number, (kind, _) in enumerate(disk.log) if kind == "open")
    assert disk.log[first - 2 : first] == [_Operation("fsync", str(tmp_path / "a")), _Operation("fsync", str(tmp_path))]


@pytest.mark.usefixtures("quick_sync")
@pytest.mark.parametrize("kind", ["open", "write", "fsync", "replace"])
def test_whatever_the_system_refuses_the_checkpoint_before_is_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    save_parts(tmp_path, halves(_BEFORE))
    real, n_left = getattr(os, kind), 0

    def refusing(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_left
        n_left -= 1
        if n_left == -1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(os, kind, refusing)
    for number in range(100):
        n_left = number
        save_id = new_save_id()
        saves = [Save(tmp_path, save_id, part, 2) for part in range(2)]
        error = _error_of(saves)
        n_left = 1 << 30
        if error is None:
            break
        if "may be the old one again" in str(error):
            assert same(contents(tmp_path), _AFTER)
            save_parts(tmp_path, halves(_BEFORE))
        assert "No space left on device: the disk is full. Free some space" in str(error) and error.file
        assert same(contents(tmp_path), _BEFORE) and names(tmp_path) == _COMPLETE
    assert number > 1 and same(contents(tmp_path), _AFTER) and names(tmp_path) == _COMPLETE


def _error_of(saves: list[Save]) -> CheckpointError | None:
    """Of a save whose parts discard what they wrote if any fails."""
    try:
        for save, pieces in zip(saves, halves(_AFTER), strict=True):
            save.write(pieces)
        saves[0].commit({}, {})
    except CheckpointError as error:
        for save in saves:
            save.discard()
        return error
    return None


def test_a_full_disk_names_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def full(fd: int, data: memoryview) -> int:
        if np.frombuffer(data, np.uint8).sum() == 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match="the disk is full") as caught:
        write_tensors(tmp_path / "f", [piece("model/a", np.ones(9, np.int8)), piece("model/b", np.full(5, 4, np.int8))])
    assert caught.value.parameter == "b" and caught.value.file == str(tmp_path / "f")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_files() -> Iterator[None]:
    """The kernel refuses files of more than a megabyte."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_files")
def test_a_file_that_the_kernel_cuts_off_is_gone(tmp_path: Path) -> None:
    large = np.zeros(3 << 20, np.uint8)
    with pytest.raises(CheckpointError, match="cannot be written: File too large: ") as caught:
        write_tensors(tmp_path / "f", [piece("model/small", large[:9]), piece("model/large", large)])
    assert caught.value.parameter == "large" and not list(tmp_path.iterdir())


def test_a_disk_that_fails_behind_the_writing_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says so when the file is synced."""

    def fsync(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match="cannot be written: Input/output error"):
        write_tensors(tmp_path / "f", [piece("model/w", np.ones(200))])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EACCES, "no permission"),
        (errno.EROFS, "read-only"),
        (errno.EDQUOT, "quota"),
        (errno.ENAMETOOLONG, "too long"),
    ],
)
def test_a_folder_that_cannot_be_written_to_comes_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    save = Save(tmp_path / "new", new_save_id(), 0, 1)
    for name in ("mkdir", "open"):
        monkeypatch.setattr(os, name, refused)
        with pytest.raises(CheckpointError, match=f"{os.strerror(number)}: .*{advice}") as caught:
            save.write([])
        assert caught.value.file.startswith(str(tmp_path))
        monkeypatch.undo()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("below", ["", "inner"])
def test_a_file_in_the_way_is_said_so(tmp_path: Path, below: str) -> None:
    (tmp_path / "taken").write_text("mine")
    save = Save(tmp_path / "taken" / below, new_save_id(), 0, 1)
    with pytest.raises(CheckpointError, match="A checkpoint is a folder"):
        save.write([])
    save.discard()
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_file_system_that_cannot_sync_folders_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    sync_folder(tmp_path)


def test_what_cannot_be_removed_stays_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unlink(_: Any) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    save_parts(tmp_path, halves(_BEFORE))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        save_parts(tmp_path, halves(_AFTER))
    assert "cannot be removed" in caplog.text
    assert same(contents(tmp_path), _AFTER) and len(names(tmp_path)) == 7
    save_parts(tmp_path, halves(_THIRD))
    assert names(tmp_path) == _COMPLETE


def test_a_part_that_fails_takes_back_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(CheckpointError, match=r"00000-of-00002\.json cannot be written: Input/output error"):
        Save(tmp_path, new_save_id(), 0, 2).write(halves(_AFTER)[0])
    assert not list(tmp_path.iterdir())


def _all_written(folder: Path) -> list[Save]:
    save_id = new_save_id()
    saves = [Save(folder, save_id, part, 2) for part in range(2)]
    for save, pieces in zip(saves, halves(_AFTER), strict=True):
        save.write(pieces)
    return saves


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("existed", [True, False])
def test_a_part_that_gives_up_at_the_moment_of_the_rename_takes_nothing_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, existed: bool
) -> None:
    if existed:
        save_parts(tmp_path, halves(_BEFORE))
    saves, replace = _all_written(tmp_path), os.replace

    def discarding(path: Any, to: Any) -> None:
        if moment == "before":
            saves[1].discard()
        replace(path, to)
        saves[1].discard()

    monkeypatch.setattr(os, "replace", discarding)
    with pytest.raises(CheckpointError, match=r"parts \[1\] have given up.*as it was"):
        saves[0].commit({}, {})
    saves[0].discard()
    if existed:
        assert same(contents(tmp_path), _BEFORE)
    else:
        assert not is_complete(tmp_path)
    monkeypatch.undo()
    save_parts(tmp_path, halves(_THIRD))
    assert names(tmp_path) == _COMPLETE


def test_a_part_that_is_killed_while_it_gives_up_takes_nothing_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_parts(tmp_path, halves(_BEFORE))
    saves, replace = _all_written(tmp_path), os.replace

    def discarding(path: Any, to: Any) -> None:
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(_Killed):
            _Disk(patch, limit=1)
            saves[1].discard()
        replace(path, to)

    monkeypatch.setattr(os, "replace", discarding)
    with pytest.raises(CheckpointError, match=r"parts \[1\] have given up"):
        saves[0].commit({}, {})
    assert same(contents(tmp_path), _BEFORE)
