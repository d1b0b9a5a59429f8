"""One clock for all ranks. ``time.perf_counter()`` is common to the processes of a host, and not to hosts.

When all ranks meet in a collective, nobody leaves before the last one has entered. So where rank r entered and left at
``a`` and ``b`` by its own clock, and the first rank at ``A`` and ``B`` by its, r's clock is ahead of the first one's by
at least ``a - B`` and at most ``b - A``: bounds, and no guess, whatever the way there takes. Several meetings narrow
them down; the middle is taken, and half of what is between them is the uncertainty. Meetings at the beginning and at
the end of a record tell how far the clocks have drifted apart meanwhile.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .meeting import Meeting, Round

N_ROUNDS = 12
"""Meetings each time; the first may wait for a late rank, and of the others the closest counts."""
METHOD = (
    "bounds from meetings of all ranks, in which nobody leaves before the last one has entered; the middle is taken. "
    "Ranks of the first one's host share its clock"
)


class Reading(NamedTuple):
    """A rank's clock at one time.

    Attributes:
        host: names the machine since it was started; "" where that is not known.
        rounds: meetings, by its own clock.
    """

    host: str
    rounds: list[Round]


class Bounds(NamedTuple):
    """How far a clock is ahead of the first rank's, in seconds, at about ``at_s`` by its own."""

    at_s: float
    low_s: float
    high_s: float


class ClockMap(NamedTuple):
    """From a rank's clock to the first rank's: ``time_s - offset_s - drift * (time_s - at_s)``.

    Attributes:
        at_s: by the rank's own clock.
        offset_s: how far it is ahead then.
        drift: seconds a second.
        uncertainty_s: how far a mapped time may be off.
    """

    at_s: float = 0.0
    offset_s: float = 0.0
    drift: float = 0.0
    uncertainty_s: float = 0.0

    def map(self, time_s: float) -> float:
        """A time of the rank, by the first rank's clock."""
        return time_s - self.offset_s - self.drift * (time_s - self.at_s)

    def about(self) -> dict[str, float]:
        """For the trace."""
        return {"offset_s": self.offset_s, "drift": self.drift, "uncertainty_s": self.uncertainty_s}


def read_clock(meeting: Meeting) -> Reading:
    """Has all ranks meet. Collective."""
    return Reading(_host(), meeting.rounds(N_ROUNDS))


def clock_map(mine: Sequence[Reading], first: Sequence[Reading]) -> ClockMap:
    """How a rank's clock goes beside the first rank's, from readings of both at the same meetings."""
    pairs = list(zip(mine, first, strict=True))
    bounds = [_bounds(reading, other) for reading, other in pairs if reading.rounds and other.rounds]
    if not bounds:
        return ClockMap()
    same_host = all(reading.host and reading.host == other.host for reading, other in pairs)
    if same_host and all(each.low_s <= 0 <= each.high_s for each in bounds):
        return ClockMap()
    return _through(bounds[0], bounds[-1])


def _through(begin: Bounds, end: Bounds) -> ClockMap:
    """The line through the middles; that of a clock that goes evenly, at whatever rate, is between the same bounds."""
    begin_s, end_s = (begin.low_s + begin.high_s) / 2, (end.low_s + end.high_s) / 2
    drift = (end_s - begin_s) / (end.at_s - begin.at_s) if end.at_s > begin.at_s else 0.0
    uncertainty_s = max(begin.high_s - begin.low_s, end.high_s - end.low_s) / 2
    return ClockMap(begin.at_s, begin_s, drift, uncertainty_s)


def _bounds(mine: Reading, first: Reading) -> Bounds:
    pairs = list(zip(mine.rounds, first.rounds, strict=True))
    low_s = max(own.enter_s - other.exit_s for own, other in pairs)
    high_s = min(own.exit_s - other.enter_s for own, other in pairs)
    # Where a clock drifts visibly while it is read, the bounds of different meetings miss each other.
    low_s, high_s = min(low_s, high_s), max(low_s, high_s)
    return Bounds((mine.rounds[0].enter_s + mine.rounds[-1].exit_s) / 2, low_s, high_s)


def about_clocks(maps: dict[int, ClockMap]) -> dict[str, Any]:
    """What a trace says of its clock, given the map of every rank."""
    return {
        "method": METHOD if len(maps) > 1 else "one rank",
        "uncertainty_s": max((each.uncertainty_s for each in maps.values()), default=0.0),
        "ranks": {str(rank): each.about() for rank, each in sorted(maps.items())},
    }


@functools.cache
def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return f"{platform.node()} {boot}"
