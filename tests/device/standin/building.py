"""Builds the plugin with g++ against the headers inside the installed Paddle, once, and finds it again."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

PADDLE_VERSION = "3.3.1"
"""The plugin uses what is not a stable interface of Paddle's: it is known to work with this one only."""
LIBRARY = "libstandin.so"
SOURCES = Path(__file__).resolve().parent / "src"
_COMPILER = "g++"
_COMPILE_S = 280.0
_OPTIONS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter", "-pthread")


def why_missing() -> str | None:
    """Says why the plugin cannot be built here; None if it can. Starts nothing and does not import Paddle."""
    version = _paddle_version()
    if version != PADDLE_VERSION:
        return f"it is written for paddlepaddle {PADDLE_VERSION}, and {version or 'none'} is installed"
    if platform.machine() != "x86_64":
        return f"it enters kernels in machine code for x86-64, and this is {platform.machine()}"
    if shutil.which(_COMPILER) is None:
        return f"there is no {_COMPILER} to build it with"
    return None


def built(cache: Path | None = None) -> Path:
    """Returns the folder that holds ``LIBRARY`` and nothing else, building it first where it is not there yet.

    Args:
        cache: where folders are kept, one for each source, Paddle and compiler; default: the user's own in the
            temporary folder. Any number of processes may call this at once.

    Raises:
        RuntimeError: ``why_missing()`` has a reason, or g++ fails; carries what it said.
    """
    reason = why_missing()
    if reason is not None:
        raise RuntimeError(f"the stand-in device cannot be built: {reason}")
    root = _own_folder() if cache is None else cache
    folder = root / _fingerprint()
    if not (folder / LIBRARY).exists():
        _build(folder)
    return folder


def _build(folder: Path) -> None:
    """Builds beside ``folder`` and moves the whole there: who finds a library finds all of it."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        _compile(new / LIBRARY)
        with contextlib.suppress(OSError):  # another process was faster, with the same result
            new.rename(folder)
    if not (folder / LIBRARY).exists():
        raise RuntimeError(f"{folder} has no {LIBRARY}, and is in the way of a new one: remove it")


def _compile(library: Path) -> None:
    paddle = _paddle_folder()
    headers = [option for path in ("include", "include/third_party") for option in ("-isystem", str(paddle / path))]
    libraries = [f"-L{paddle / 'libs'}", "-lphi", "-lphi_core", "-lcommon"]
    sources = [str(path) for path in _source_files() if path.suffix == ".cc"]
    defined = "-DPADDLE_WITH_CUSTOM_DEVICE"
    command = [_COMPILER, *_OPTIONS, defined, *headers, *sources, "-o", str(library), *libraries]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-6000:]}")


def _fingerprint() -> str:
    said = subprocess.run([_COMPILER, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    digest = hashlib.sha256("\0".join([PADDLE_VERSION, str(_paddle_folder()), said, *_OPTIONS]).encode())
    for path in _source_files():
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def _source_files() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cc", ".h"))


def _own_folder() -> Path:
    """A folder that no other user can have put a library into."""
    folder = Path(tempfile.gettempdir()) / f"hp_sharding_standin_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise RuntimeError(f"{folder} can be written by others: remove it")
    return folder


def _paddle_version() -> str | None:
    try:
        return importlib.metadata.version("paddlepaddle")
    except importlib.metadata.PackageNotFoundError:
        return None


def _paddle_folder() -> Path:
    found = importlib.util.find_spec("paddle")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("paddlepaddle is installed, but there is no package paddle")
    return Path(next(iter(found.submodule_search_locations)))
