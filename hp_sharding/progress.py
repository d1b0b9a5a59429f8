"""What a command is doing, for whoever watches it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console


@contextlib.contextmanager
def showing_progress(command: str, *, wanted: bool) -> Iterator[Callable[[str], None]]:
    """Gives a function that shows what is being done, on stderr; it does nothing where that is no terminal."""
    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield lambda doing: status.update(f"{command}: {doing}")
