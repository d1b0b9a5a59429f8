"""What compute was at, from moment to moment: marks where it changes, and the intervals between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..comm import Mark

SCRIPT = "script"
"""Label of what lies outside forward, backward and ``step()``: the loss, reading data, what else the script does."""
MOST = 50_000
"""Marks kept of one step: where none ends, as in a long evaluation, the oldest are forgotten."""


class Doing(NamedTuple):
    """What compute is at: a label, and the layer as the user knows it; None where a later mark names it."""

    label: str
    layer: str | None


class Tile(NamedTuple):
    """An interval of compute; waits are still in it."""

    start_s: float
    end_s: float
    label: str
    layer: str


class Entry(NamedTuple):
    """A mark. ``doing`` begins there; where it is None, what has no name since the last mark is of ``layer``."""

    mark: Mark
    doing: Doing | None
    layer: str = ""


_OUTSIDE = Doing(SCRIPT, "")


class ComputeMarks:
    """Marks of one thread of compute.

    Args:
        new_mark: marks where compute is now.
    """

    def __init__(self, new_mark: Callable[[], Mark]) -> None:
        self._new_mark = new_mark
        self._stack: list[Doing] = []
        self._entries: list[Entry] = []
        self._before = _OUTSIDE

    def enter(self, label: str, layer: str | None) -> None:
        """From here on compute is at this, until ``leave``."""
        self._stack.append(Doing(label, layer))
        self._note(self._stack[-1])

    def leave(self) -> None:
        """It goes on with what it was at before."""
        if self._stack:
            self._stack.pop()
            self._note(self._stack[-1] if self._stack else _OUTSIDE)

    def switch(self, label: str, layer: str) -> None:
        """What is under way turns out to be this from here on, if it has that label."""
        if self._stack and self._stack[-1].label == label:
            self._stack[-1] = Doing(label, layer)
            self._note(self._stack[-1])

    def until(self, layer: str) -> None:
        """What has had no name until here is the layer's."""
        last = self._entries[-1] if self._entries else None
        if last is not None and last.doing is None and last.layer == layer:
            last.mark.renew()
            return
        self._add(Entry(self._new_mark(), None, layer))

    def reset(self) -> None:
        """Compute is outside of everything."""
        if self._stack:
            self._stack.clear()
            self._note(_OUTSIDE)

    def take(self) -> tuple[Doing, list[Entry]]:
        """What compute was at before, and the marks since the last call, or the last of them."""
        before, entries = self._before, self._entries
        if entries:
            entries[-1].mark.settle()
        self._before = self._stack[-1] if self._stack else _OUTSIDE
        self._entries = []
        return before, entries

    def _note(self, doing: Doing) -> None:
        self._add(Entry(self._new_mark(), doing))

    def _add(self, entry: Entry) -> None:
        # Those before are not moved any more.
        if self._entries:
            self._entries[-1].mark.settle()
        self._entries.append(entry)
        if len(self._entries) > MOST:
            del self._entries[: len(self._entries) // 2]
            self._before = _OUTSIDE


def tiles(before: Doing, entries: Sequence[Entry], *, start_s: float, end_s: float, whole: str) -> list[Tile]:
    """What compute was at from ``start_s`` to ``end_s``, without gaps. All marks must have their times.

    ``whole`` is the model's name: what nobody has named is its.
    """
    found: list[tuple[float, float, Doing]] = []
    unnamed: list[int] = []
    doing, since_s = before, start_s
    for entry in [*entries, None]:
        now_s = end_s if entry is None else min(max(entry.mark.time_s or since_s, since_s), end_s)
        if now_s > since_s:
            if doing.layer is None:
                unnamed.append(len(found))
            found.append((since_s, now_s, doing))
            since_s = now_s
        if entry is None:
            break
        if entry.doing is not None:
            doing = entry.doing
            continue
        for index in unnamed:
            found[index] = (*found[index][:2], Doing(found[index][2].label, entry.layer))
        unnamed = []
    named = (
        Tile(start, end, doing.label, whole if doing.layer is None else doing.layer) for start, end, doing in found
    )
    return list(_joined(named))


def without(parts: Iterable[Tile], waits: Sequence[tuple[float, float]]) -> Iterator[Tile]:
    """The tiles without what ``waits``, in order and apart from each other, cover."""
    at = 0
    for tile in parts:
        start_s = tile.start_s
        while at < len(waits) and waits[at][1] <= start_s:
            at += 1
        for wait_start_s, wait_end_s in waits[at:]:
            if wait_start_s >= tile.end_s:
                break
            if wait_start_s > start_s:
                yield tile._replace(start_s=start_s, end_s=wait_start_s)
            start_s = max(start_s, wait_end_s)
        if start_s < tile.end_s:
            yield tile._replace(start_s=start_s)


def _joined(parts: Iterable[Tile]) -> Iterator[Tile]:
    """Neighbours that are the same as one."""
    last: Tile | None = None
    for tile in parts:
        if last is not None and last[2:] == tile[2:]:
            last = last._replace(end_s=tile.end_s)
            continue
        if last is not None:
            yield last
        last = tile
    if last is not None:
        yield last
