"""Files that survive a kill and a loss of power, and what to say when the system refuses one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import CheckpointError

_ADVICE = {
    errno.ENOSPC: "the disk is full. Free some space or save elsewhere; what was saved before is still there",
    errno.EDQUOT: "your quota of disk space is used up. Free some space or save elsewhere",
    errno.EACCES: "no permission. Check who owns the folder, or give another one",
    errno.EPERM: "no permission. Check who owns the folder, or give another one",
    errno.EROFS: "the file system is read-only. Give a folder that can be written to",
    errno.ENOTDIR: "a part of the path is a file. A checkpoint is a folder: give another path",
    errno.EEXIST: "there is something of that name already. A checkpoint is a folder that one save at a time writes to",
    errno.ENOENT: "it is not there, or no longer",
    errno.EFBIG: "larger than files may be here (ulimit -f, or the file system). Save elsewhere, or from more ranks",
    errno.EIO: "the disk or the network behind it failed. Look at the system's log, and use another copy",
    errno.ESTALE: "the network file system lost it. Mount it again, and use another copy",
    errno.ENAMETOOLONG: "the path is too long. Give a shorter one",
    errno.EMFILE: "too many files are open. Raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine",
}
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What file systems answer that cannot sync a folder, and need not."""

_SYNC_BYTES = 8 << 20
"""After how much the disk is set to work while more is written."""


def failed(error: OSError, path: str | os.PathLike[str], doing: str, *, parameter: str = "") -> CheckpointError:
    """What to raise in place of the system's error.

    Args:
        error: what the system said.
        path: the file it said it of.
        doing: what was tried, such as ``"cannot be written"``.
        parameter: whose bytes they were, where that is known.
    """
    advice = _ADVICE.get(error.errno or 0, "")
    said = error.strerror or str(error) or type(error).__name__
    text = f"{path} {doing}: {said}" + (f": {advice}" if advice else "")
    return CheckpointError(text, file=os.fspath(path), parameter=parameter)


def write_all(fd: int, data: memoryview) -> None:
    """Writes all bytes of ``data`` (items of one byte), however many the system takes at a time."""
    while data.nbytes:
        data = data[os.write(fd, data) :]


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[int]:
    """The descriptor of a new file, whose bytes are on the disk when the block ends; if that fails there is no file.

    Args:
        path: of the file.
        replace: whether it may take the place of another one, as a leftover of a killed process.

    Raises:
        OSError: it exists, or the system refused something.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if replace else os.O_EXCL) | os.O_CLOEXEC, 0o666)
    try:
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        remove(path)
        raise


def syncing_behind(fd: int) -> Callable[[int], None]:
    """While a large file is written, has the system put on the disk what is there already: less for the last sync.

    Gives a function to be told of the bytes that were written, one after the other. It waits for nothing; what fails
    is for the last sync to say.
    """
    written = begun = 0

    def wrote(nbytes: int) -> None:
        nonlocal written, begun
        written += nbytes
        if written - begun >= _SYNC_BYTES:
            # Says that nobody needs these pages soon: what is not on the disk yet begins its way there.
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, begun, written - begun, os.POSIX_FADV_DONTNEED)
            begun = written

    return wrote


def replace_file(path: Path, data: bytes, *, beside: Path) -> None:
    """Makes ``data`` the content of ``path``: all of it or, if anything stops this, none.

    The new name is safe from a loss of power only once the folder is synced too, see ``sync_folder``.

    Args:
        path: the file, there or not.
        data: its new content.
        beside: the file, in the same folder, that is written first and renamed then.

    Raises:
        CheckpointError: the system refused; ``path`` is as it was.
    """
    try:
        with new_file(beside, replace=True) as fd:
            write_all(fd, memoryview(data))
        try:
            os.replace(beside, path)
        except BaseException:
            remove(beside)
            raise
    except OSError as error:
        raise failed(error, path, "cannot be written") from error


def sync_folder(folder: Path) -> None:
    """Puts the names in a folder on the disk.

    Raises:
        CheckpointError: the system refused.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise failed(error, folder, "cannot be put on the disk") from error


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it where they are missing, on the disk.

    Raises:
        CheckpointError: something else is there, or the system refused.
    """
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise failed(error, folder, "cannot be made a folder") from error
    for path in missing:
        sync_folder(path.parent)


def remove(path: str | os.PathLike[str]) -> bool:
    """Removes a file if that is possible; whether it is gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
