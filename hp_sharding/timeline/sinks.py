"""Where the figures of each step go while training runs: files of JSON lines, and writers of scalars."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError
from ..trace.figures import Figures, over_steps

Sink = Callable[[Figures], None]
"""Is called with the figures of each step: see ``trace.figures.step_figures``; ``rank`` and ``step`` are among them."""


class ScalarWriter(Protocol):
    """What VisualDL's ``LogWriter`` and TensorBoard's ``SummaryWriter`` have in common."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> Any:
        """Notes a value."""


def json_lines(path: str | os.PathLike[str]) -> Sink:
    """A sink that writes one JSON object a step, with ``rank`` and ``step`` in it, to the end of a file.

    Each line goes to the system in one call, so a process that ends at any moment leaves whole lines, and ranks of one
    host may share a file. Over a network file system each rank needs its own: ``{rank}`` in the path becomes its
    number. Folders are made.

    Args:
        path: such as ``"run/steps.jsonl"`` or ``"run/steps-{rank}.jsonl"``.
    """
    return _JsonLines(os.fspath(path))


def scalars(writer: ScalarWriter, every: int = 1) -> Sink:
    """A sink that hands figures to ``writer.add_scalar(tag, value, step)``, by position.

    Tags are ``hp_sharding/`` and the name of the figure, such as ``hp_sharding/exposed_ms``; what is a table, such as
    the exposed time by layer, is left out. Values are those of ``summary()`` over the last ``every`` steps.

    Args:
        writer: VisualDL's ``LogWriter``, TensorBoard's ``SummaryWriter``, or anything with that method.
        every: how many steps come to one value.

    Raises:
        ConfigError: ``every`` is no number of steps above 0, or the writer has no ``add_scalar``.
    """
    counts = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    if not counts or not callable(getattr(writer, "add_scalar", None)):
        raise ConfigError(
            f"scalars({type(writer).__name__}, every={every!r}): expected a writer with add_scalar(tag, value, step), "
            "and 1 or more steps"
        )
    return _Scalars(writer, every)


class _JsonLines:
    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = None

    def __repr__(self) -> str:
        return f"json_lines({self._path!r})"

    def __call__(self, figures: Figures) -> None:
        if self._file is None:
            path = Path(self._path.replace("{rank}", str(figures["rank"])))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        line = json.dumps(figures).encode() + b"\n"
        if os.write(self._file, line) < len(line):
            raise OSError(f"{self._path}: only a part of a line could be written; is the disk full?")

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


class _Scalars:
    def __init__(self, writer: ScalarWriter, every: int) -> None:
        self._writer = writer
        self._every = every
        self._steps: list[Figures] = []

    def __repr__(self) -> str:
        return f"scalars({type(self._writer).__name__})"

    def __call__(self, figures: Figures) -> None:
        self._steps.append(figures)
        if len(self._steps) < self._every:
            return
        found = over_steps(self._steps)
        self._steps = []
        for name, value in found.items():
            if name != "steps" and not isinstance(value, Mapping):
                self._writer.add_scalar(f"hp_sharding/{name}", float(value), int(figures["step"]))
