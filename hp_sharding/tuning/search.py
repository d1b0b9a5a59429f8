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
FAR = 0.1
"""Part of a step by which a candidate must be worse than the best for those beyond it not to be tried."""
MAX_VISITS = 4
"""How often a candidate is measured at most."""
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
    """A race: candidates stand in order; all that are near enough are measured, the better half again, and so on.

    The first round goes from ``start`` to smaller ones and then to larger ones, and ends in a direction where steps are
    much longer than the best by more than chance explains. Each later round measures those again that may be the best,
    at most half of the round before; so what is close is measured often, and at times far apart. The same on every rank
    that takes the same figures.

    Args:
        n: how many candidates there are.
        start: the one that is in force, and measured first.

    Attributes:
        measured: what was taken of each candidate.
    """

    def __init__(self, n: int, start: int) -> None:
        self.measured: dict[int, Measured] = {}
        self._visits = [0] * n
        self._start = start
        self._round: list[int] = []
        self._field: list[int] | None = None

    def take(self, candidate: int, steps: Measured) -> None:
        """Steps that were made with a candidate; they add to those taken before."""
        known = self.measured.get(candidate)
        self.measured[candidate] = steps if known is None else known + steps
        self._visits[candidate] += 1

    @property
    def best(self) -> int:
        """The candidate with the shortest steps, among those measured most often."""
        visits = max(self._visits[number] for number in self.measured)
        return min((number for number in self.measured if self._visits[number] == visits), key=self._step_of)

    def next(self) -> int | None:
        """Which candidate to measure; None once the search is over."""
        if self._start not in self.measured:
            return self._start
        first = self.measured[self._start]
        if self._field is None and first.exposed < NEGLIGIBLE_EXPOSED * first.step:
            return None
        if self._field is None:
            for direction in (-1, 1):
                candidate = self._next_towards(direction)
                if candidate is not None:
                    return candidate
            self._field = list(self.measured)
        if not self._round:
            self._round = self._next_round(self._field)
            self._field = list(self._round)
        return self._round.pop(0) if self._round else None

    def margin(self) -> float:
        """Milliseconds by which two candidates may differ by chance."""
        rest = [abs(ms - found.step) for found in self.measured.values() for ms in found.step_ms]
        n_steps = min(len(self.measured[number].step_ms) for number in self._field or self.measured)
        error = _SIGMAS_OF_MEDIAN * _SIGMA_OF_MAD * median(rest) / math.sqrt(n_steps)
        return max(MIN_MARGIN * self._shortest, 1.5 * math.sqrt(2) * error)

    @property
    def _shortest(self) -> float:
        return min(found.step for found in self.measured.values())

    def _step_of(self, candidate: int) -> float:
        return self.measured[candidate].step

    def _next_towards(self, direction: int) -> int | None:
        """The next one that has not been measured; None where there is none, or nothing to be hoped for."""
        last = self._start
        while last + direction in self.measured:
            last += direction
        if self._step_of(last) > self._shortest + max(self.margin(), FAR * self._shortest):
            return None
        return last + direction if 0 <= last + direction < len(self._visits) else None

    def _next_round(self, field: Sequence[int]) -> list[int]:
        """Of the field those that may still be the best, at most half of it; nothing once one is left."""
        ranked = sorted(field, key=self._step_of)
        limit = self._step_of(ranked[0]) + self.margin()
        near = [number for number in ranked if self._step_of(number) <= limit]
        kept = near[: max(2, (len(field) + 1) // 2)]
        return kept if len(kept) > 1 and self._visits[kept[0]] < MAX_VISITS else []
