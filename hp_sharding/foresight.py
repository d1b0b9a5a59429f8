"""What is used next, learned from what was used last: so that a gather starts before it is needed.

The model says nothing about the order in which it will use its units; yesterday's step does. Each use is remembered
with the one that came after it, and told apart by how far the step had come: a layer that is called twice has two
uses, and so has the first of several forwards. A guess may be wrong, which costs time, never correctness; and since
all ranks make the same uses, all make the same guesses. No Paddle.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

MAX_TURN = 8
"""Forwards told apart between two beginnings; a longer loop, as in evaluation, repeats the last of them."""


class Phase(enum.IntEnum):
    """What a unit is used for."""

    FORWARD = 0
    EVALUATE = 1
    BACKWARD = 2


class Use(NamedTuple):
    """One use of one unit.

    Attributes:
        phase: what for; None for the beginning, before the first use.
        turn: number of the forward since the beginning.
        unit: which one.
        nth: how often it had been used in this turn.
    """

    phase: Phase | None
    turn: int
    unit: int
    nth: int


_BEGINNING = Use(None, 0, -1, 0)


class Foresight:
    """Learned successors. Holds no more than one entry for each different use.

    Attributes:
        wrong_guesses: uses that were not the one expected.
    """

    def __init__(self) -> None:
        self.wrong_guesses = 0
        self._next: dict[Use, Use] = {}
        self._last = _BEGINNING
        self._turn = 0
        self._counts: dict[tuple[Phase, int], int] = {}

    def begin(self) -> None:
        """A step, or the backward before, has ended: nothing beyond this point is expected or learned from before."""
        self._last = _BEGINNING
        self._turn = 0
        self._counts.clear()

    def begin_forward(self) -> None:
        """An outermost forward begins."""
        if self._last is not _BEGINNING:
            self._turn = min(self._turn + 1, MAX_TURN)
            self._counts.clear()

    def note(self, phase: Phase, unit: int) -> None:
        """A unit is used now."""
        nth = self._counts.get((phase, unit), 0)
        self._counts[phase, unit] = nth + 1
        use = Use(phase, self._turn, unit, nth)
        expected = self._next.get(self._last)
        if expected != use:
            self.wrong_guesses += expected is not None
            self._next[self._last] = use
        self._last = use

    def ahead(self, n_units: int, in_use: set[int] | frozenset[int] = frozenset()) -> list[int]:
        """Units expected next, nearest first, each once: up to ``n_units`` besides those ``in_use``."""
        found: dict[int, None] = {}
        seen: set[Use] = set()
        use = self._next.get(self._last)
        while n_units and use is not None and use not in seen:
            seen.add(use)
            if use.unit not in found:
                found[use.unit] = None
                n_units -= use.unit not in in_use
            use = self._next.get(use)
        return list(found)
