"""``History``: the collectives that one model has launched last, lane by lane, for whoever has to explain a failure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

KEPT = 1024
"""Launches of each lane that are kept: those of a step of a large model, so that two ranks can find where they part."""


class Launch(NamedTuple):
    """One launched collective.

    Attributes:
        number: counts the launches of its lane, from zero.
        op: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"`` or ``"broadcast"``.
        label: what it carries, as the user knows it.
        nbytes: bytes of the whole (unsharded) message, in the dtype that travels.
        at_s: ``time.perf_counter()`` when it was launched, which is not when it began to travel.
    """

    number: int
    op: str
    label: str
    nbytes: int
    at_s: float


class History:
    """The newest launches of each lane of one model. The lanes append to it; any thread may read it.

    Attributes:
        lanes: name of each lane -> its newest launches, the oldest first.
    """

    def __init__(self, lanes: Iterable[str]) -> None:
        self.lanes: dict[str, deque[Launch]] = {lane: deque(maxlen=KEPT) for lane in lanes}

    def recent(self, lane: str, count: int) -> list[Launch]:
        """The last ``count`` launches of a lane, the oldest first; fewer where there have been fewer.

        A copy, made in one go: no other thread launches anything meanwhile.
        """
        return list(self.lanes[lane].copy())[-count:] if count > 0 else []
