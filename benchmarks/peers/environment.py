"""PyTorch in an environment of its own, which ``benchmarks.compare`` makes where it is missing.

    python -m benchmarks.peers.environment      # makes it, and says where its interpreter is

The build for processors is what is wanted; where PyTorch's own index cannot be reached, pip takes what its other
indexes have, which may carry libraries for GPUs and be several times as large. hp_sharding itself never needs any of
it.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.turns import ROOT

FOLDER = ROOT / "build" / "torch_env"
TORCH = "torch==2.13.0"
_PROCESSOR_INDEX = "https://download.pytorch.org/whl/cpu"
_STAMP = "installed"


class EnvironmentFailed(RuntimeError):
    """PyTorch could not be installed; carries the end of what pip said."""


def interpreter(folder: Path = FOLDER) -> Path:
    """Of the environment in ``folder``, whether that is there or not."""
    return folder / "bin" / "python"


def wanted_stamp() -> str:
    """What the environment depends on: where any of it has changed, it is made again."""
    return f"{TORCH} {sys.version.split()[0]} {sys.base_prefix}\n"


def is_made(folder: Path = FOLDER) -> bool:
    """Whether the environment is there, complete, and of this interpreter's version."""
    stamp = folder / _STAMP
    return interpreter(folder).exists() and stamp.exists() and stamp.read_text() == wanted_stamp()


def ensure(folder: Path = FOLDER) -> Path:
    """Makes the environment unless it is there already, and returns its interpreter.

    Raises:
        EnvironmentFailed: pip could not install PyTorch.
    """
    if is_made(folder):
        return interpreter(folder)
    sys.stderr.write(f"installing {TORCH} into {folder} (the first time about 200 MB are fetched)\n")
    venv.create(folder, clear=True, with_pip=True)
    # Without dependencies first: PyTorch's index need not have those, and is not asked for each of them.
    if not _install(folder, "--no-deps", "--index-url", _PROCESSOR_INDEX, TORCH)[0]:
        sys.stderr.write(f"nothing from {_PROCESSOR_INDEX}: asking pip's own indexes, where it may be larger\n")
    done, output = _install(folder, TORCH, "numpy")
    if not done:
        raise EnvironmentFailed(f"pip could not install {TORCH} into {folder}:\n{output[-3000:]}")
    (folder / _STAMP).write_text(wanted_stamp())
    return interpreter(folder)


def _install(folder: Path, *arguments: str) -> tuple[bool, str]:
    command = [str(interpreter(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.returncode == 0, found.stdout + found.stderr


if __name__ == "__main__":
    print(ensure())
