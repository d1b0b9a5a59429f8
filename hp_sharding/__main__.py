"""``python -m hp_sharding``, and a script that the launcher can be given by its path."""

from __future__ import annotations

import sys
from pathlib import Path


def _leave_the_package() -> None:
    """Started by its path, Python would look for every import inside the package first: our ``config``, for one."""
    folder = Path(__file__).resolve().parent
    if sys.path and Path(sys.path[0] or ".").resolve() == folder:
        sys.path[0] = str(folder.parent)


if __name__ == "__main__":
    _leave_the_package()
    from hp_sharding.cli import main

    main(prog_name="python -m hp_sharding")
