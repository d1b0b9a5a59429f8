"""Which thread of which process of the file a span goes to, and at what time: slices of a thread nest or lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .spans import LANES, Span, Step, Trace

STEPS = "steps"
"""The thread that shows where steps begin and end."""
_NESTING = (STEPS, "compute")
"""Threads where one slice inside another means what it looks like; a gather inside another one is not a part of it."""


class Seat(NamedTuple):
    """A thread of a process, by number."""

    pid: int
    tid: int


class Thread(NamedTuple):
    """One row of a rank: a lane, or what did not fit into the rows of that lane above it.

    Attributes:
        seat: its numbers.
        rank: whose it is.
        lane: what is on it.
        row: 0 for the first one of the lane.
    """

    seat: Seat
    rank: int
    lane: str
    row: int

    @property
    def name(self) -> str:
        """For people."""
        return self.lane if self.row == 0 else f"{self.lane} ({self.row + 1})"


class Seats:
    """Where everything of a trace goes.

    Attributes:
        threads: all of them, from above.
    """

    def __init__(self, trace: Trace) -> None:
        starts = [*(span.start_s for span in trace.spans), *(step.start_s for step in trace.steps)]
        # Older importers take no time below zero.
        self._zero_ns = min(0, *map(_whole_ns, starts)) if starts else 0
        self._span_rows = _rows_of(trace.spans)
        self._step_rows = _rows_of(trace.steps)
        self.threads: list[Thread] = []
        self._by_place: dict[tuple[int, str, int], Thread] = {}
        self._number(trace)

    def of_span(self, index: int, span: Span) -> Seat:
        """Of the span with this index in the trace."""
        return self._by_place[span.rank, span.lane, self._span_rows[index]].seat

    def of_step(self, index: int, step: Step) -> Seat:
        """Of the step with this index in the trace."""
        return self._by_place[step.rank, STEPS, self._step_rows[index]].seat

    def ns(self, time_s: float) -> int:
        """Nanoseconds, none below zero."""
        return _whole_ns(time_s) - self._zero_ns

    def _number(self, trace: Trace) -> None:
        # Beyond all processes: a thread with the number of a process is taken for its first one.
        first = 10 ** len(str(process_of(max(trace.ranks, default=0))))
        places = {(span.rank, span.lane, row) for span, row in zip(trace.spans, self._span_rows, strict=True)}
        places |= {(step.rank, STEPS, row) for step, row in zip(trace.steps, self._step_rows, strict=True)}
        for tid, place in enumerate(sorted(places, key=_from_above), first):
            thread = Thread(Seat(process_of(place[0]), tid), *place)
            self.threads.append(thread)
            self._by_place[place] = thread


def process_of(rank: int) -> int:
    """Number of a rank's process: 0 is the idle one."""
    return rank + 1


def rows(intervals: Sequence[tuple[int, int]], *, nest: bool) -> list[int]:
    """For each interval, the first row in which it lies apart from the others, or inside one of them if they ``nest``.

    Earlier ones are seated first, and of those that begin together the longer one.
    """
    found = [0] * len(intervals)
    # Of each row the ends of what is open, innermost last.
    open_ends: list[list[int]] = []
    for index in sorted(range(len(intervals)), key=lambda index: (intervals[index][0], -intervals[index][1])):
        start, end = intervals[index]
        for row in range(len(open_ends) + 1):
            if row == len(open_ends):
                open_ends.append([])
            ends = open_ends[row]
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or (nest and end <= ends[-1]):
                ends.append(end)
                found[index] = row
                break
    return found


def _rows_of(things: Sequence[Span | Step]) -> list[int]:
    by_lane: dict[tuple[int, str], list[int]] = {}
    for index, thing in enumerate(things):
        lane = thing.lane if isinstance(thing, Span) else STEPS
        by_lane.setdefault((thing.rank, lane), []).append(index)
    found = [0] * len(things)
    for (_, lane), indices in by_lane.items():
        intervals = [(_whole_ns(things[index].start_s), _whole_ns(things[index].end_s)) for index in indices]
        for index, row in zip(indices, rows(intervals, nest=lane in _NESTING), strict=True):
            found[index] = row
    return found


def _from_above(place: tuple[int, str, int]) -> tuple[int, int, str, int]:
    rank, lane, row = place
    order = (STEPS, *LANES)
    return rank, order.index(lane) if lane in order else len(order), lane, row


def _whole_ns(time_s: float) -> int:
    return round(time_s * 1e9)
