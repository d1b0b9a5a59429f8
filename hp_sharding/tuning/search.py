"""Which of a row of candidates makes the shortest steps, found with few measurements that are not exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

NEGLIGIBLE_EXPOSED = 0.01
"""Part of a step. Where no more is waited for, another setting has next to nothing to gain."""
MIN_MARGIN = 0.01
"""Part of a step by which candidates must differ at least to count as different."""
PATIENCE = 2
"""Candidates in a row that are no better, after which a direction is given up."""
_SIGMAS_OF_MEDIAN = 1.25
"""The standard error of a median, in those of the mean of normally distributed values."""
_SIGMA_OF_MAD = 1.4826


class Measured(NamedTuple):
    """Steps with one candidate, each as the rank saw it for which it took longest.

    Attributes:
        step_ms: duration of each.
        exposed_ms: what of it compute spent waiting for communication.
    """

    step_ms: list[float]
    exposed_ms: list[float]

    @property
    def step(self) -> float:
        """Median duration in milliseconds."""
        return median(self.step_ms)

    @property
    def exposed(self) -> float:
        """Median wait in milliseconds."""
        return median(self.exposed_ms)

    def __add__(self, other: Measured) -> Measured:  # type: ignore[override]
        return Measured([*self.step_ms, *other.step_ms], [*self.exposed_ms, *other.exposed_ms])


class Search:
    """Climbs down a row of candidates that stand in order, from ``start``: first towards smaller ones, then larger ones.

    A direction ends where steps get longer by more than chance explains, or after ``PATIENCE`` candidates that are no
    better. The two best are measured once more if chance may have decided between them. The same on every rank that
    takes the same figures.

    Args:
        n: how many candidates there are.
        start: the one that is in force, and measured first.

    Attributes:
        measured: what was taken of each candidate.
    """

    def __init__(self, n: int, start: int) -> None:
        self.measured: dict[int, Measured] = {}
        self._n = n
        self._start = start
        self._again: list[int] | None = None

    def take(self, candidate: int, steps: Measured) -> None:
        """Steps that were made with a candidate; they add to those taken before."""
        known = self.measured.get(candidate)
        self.measured[candidate] = steps if known is None else known + steps

    @property
    def best(self) -> int:
        """The candidate with the shortest steps; of several that cannot be told apart by 0.1 %, the smallest."""
        shortest = min(found.step for found in self.measured.values())
        return min(number for number, found in self.measured.items() if found.step <= shortest * 1.001)

    def next(self) -> int | None:
        """Which candidate to measure; None once the search is over."""
        if self._start not in self.measured:
            return self._start
        if self._again is None:
            first = self.measured[self._start]
            if first.exposed < NEGLIGIBLE_EXPOSED * first.step:
                return None
            for direction in (-1, 1):
                smaller = [number for number in self.measured if number <= self._start]
                if direction > 0 and self._is_better(min(smaller, key=self._step_of), self._start):
                    continue  # where smaller ones are better, larger ones are not
                candidate = self._next_towards(direction)
                if candidate is not None:
                    return candidate
            self._again = self._rivals()
        return self._again.pop(0) if self._again else None

    def margin(self) -> float:
        """Milliseconds by which two candidates may differ by chance."""
        rest = [abs(ms - found.step) for found in self.measured.values() for ms in found.step_ms]
        n_steps = min(len(found.step_ms) for found in self.measured.values())
        error = _SIGMAS_OF_MEDIAN * _SIGMA_OF_MAD * median(rest) / math.sqrt(n_steps)
        return max(MIN_MARGIN * self.measured[self.best].step, math.sqrt(2) * error)

    def _step_of(self, candidate: int) -> float:
        return self.measured[candidate].step

    def _is_better(self, candidate: int, other: int) -> bool:
        return self._step_of(candidate) < self._step_of(other) - self.margin()

    def _next_towards(self, direction: int) -> int | None:
        """The next one in that direction; None where it is given up."""
        last = self._start
        best, worse_in_a_row = self._start, 0
        while last + direction in self.measured:
            last += direction
            if self._is_better(best, last):
                return None
            worse_in_a_row = 0 if self._step_of(last) < self._step_of(best) else worse_in_a_row + 1
            best = min(best, last, key=self._step_of)
        candidate = last + direction
        return candidate if worse_in_a_row < PATIENCE and 0 <= candidate < self._n else None

    def _rivals(self) -> list[int]:
        """The best two, where they may have changed places by chance."""
        ranked: Sequence[int] = sorted(self.measured, key=self._step_of)
        if len(ranked) < 2 or self._is_better(ranked[0], ranked[1]):
            return []
        return [ranked[1], ranked[0]]
