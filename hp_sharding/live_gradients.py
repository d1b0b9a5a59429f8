"""How much memory full gradients take during a backward of stage 2 or 3, and who waits for it to get less."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .buffer import FusedCommBuffer, GradientStorage
from .comm import Work
from .timeline import Timeline

MAX_LIVE_GRADIENTS = 2
"""Full gradients of the largest bucket that there is memory for: one filling, one being reduced. Smaller ones share
it. Waiting for older reductions costs nothing where compute is the slower side, and where the link is, it is busy all
the same; but near the end of a backward, where buckets are small, the link has still to begin with the last ones."""


class _InFlight(NamedTuple):
    work: Work
    nbytes: int


class LiveGradients:
    """Allocates the storage of full gradients.

    Args:
        buffers: all buckets.
        timeline: counts the waits.
    """

    def __init__(self, buffers: Sequence[FusedCommBuffer], timeline: Timeline) -> None:
        self._limit_bytes = MAX_LIVE_GRADIENTS * max(buffer.gradient.nbytes for buffer in buffers)
        self._timeline = timeline
        self._filling_bytes = 0
        self._in_flight: deque[_InFlight] = deque()

    def alloc(self, storage: GradientStorage, *, waits: bool) -> None:
        """Allocates storage; if it ``waits``, not before there is room for it beside what is being reduced."""
        while self._in_flight and self._in_flight[0].work.done():
            self._in_flight.popleft()
        while waits and self._in_flight and self._live_bytes() + storage.nbytes > self._limit_bytes:
            self._timeline.wait(self._in_flight.popleft().work)
        storage.alloc()
        self._filling_bytes += storage.nbytes

    def launch(self, storage: GradientStorage, work: Work) -> None:
        """Lets go of storage that a reduction reads, and keeps alive until it is done."""
        self._in_flight.append(_InFlight(work, storage.nbytes))
        self.free(storage)

    def free(self, storage: GradientStorage) -> None:
        """Lets go of storage."""
        storage.free()
        self._filling_bytes -= storage.nbytes

    def forget(self) -> None:
        """No reduction is under way any more."""
        self._in_flight.clear()

    def _live_bytes(self) -> int:
        return self._filling_bytes + sum(gradient.nbytes for gradient in self._in_flight)
