"""Stage 2: how many full gradients exist at a time, and what becomes of their storage once they have been reduced."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from .errors import CommError
from .gradient_storage import GradientStorage, Used
from .timeline import Timeline

if TYPE_CHECKING:
    from .comm import Work

MAX_LIVE_GRADIENTS = 2
"""Full gradients of the largest bucket that there is memory for: one filling, one being reduced. Smaller ones share
it. Waiting for older reductions costs nothing where compute is the slower side, and where the link is, it is busy all
the same; but near the end of a backward, where buckets are small, the link has still to begin with the last ones."""


class _Flight(NamedTuple):
    """A gradient that is being reduced; ``used`` is its storage, for the next one, where a collective leaves it."""

    work: Work
    used: Used | None
    nbytes: int


class GradientsInFlight:
    """Counts the full gradients of one model, and gives the storage of those that have been reduced to the next ones.

    So that a bucket's storage is neither looked for nor given back: the tensor stays, and the next bucket of that size
    fills it.

    Args:
        storages: of all buckets.
        timeline: counts the waits.
    """

    def __init__(self, storages: Iterable[GradientStorage], timeline: Timeline) -> None:
        self._timeline = timeline
        self._flights: deque[_Flight] = deque()
        self._limit_bytes = MAX_LIVE_GRADIENTS * max(storage.nbytes for storage in storages)
        self._live_bytes = 0

    def alloc(self, storage: GradientStorage, *, limited: bool) -> None:
        """Storage for one more full gradient; where ``limited``, not before there is room beside what is reduced."""
        # What does not fit is back in the pool before it is asked: it may be what the pool gives.
        storage.alloc(self._take_used(storage, limited=limited))
        self._live_bytes += storage.nbytes

    def free(self, storage: GradientStorage) -> None:
        """Nobody will reduce it."""
        storage.free()
        self._live_bytes -= storage.nbytes

    def send(self, storage: GradientStorage, work: Work) -> None:
        """The gradient is being reduced by ``work``; its storage is free for another."""
        self._flights.append(_Flight(work, storage.hand_over(), storage.nbytes))

    def forget(self) -> None:
        """All reductions are done: their storage goes back to the pool."""
        while self._flights:
            self._live_bytes -= self._flights.popleft().nbytes

    def _take_used(self, storage: GradientStorage, *, limited: bool) -> Used | None:
        flights, found = self._flights, None
        while flights and flights[0].work.done():
            flight = flights.popleft()
            self._live_bytes -= flight.nbytes
            used = _left_by(flight)
            found = used if used is not None and storage.fits(used) else found
        while flights and limited and self._live_bytes + storage.nbytes > self._limit_bytes:
            flight = flights.popleft()
            self._live_bytes -= flight.nbytes
            self._timeline.wait(flight.work)
            found = flight.used if flight.used is not None and storage.fits(flight.used) else found
        return found


def _left_by(flight: _Flight) -> Used | None:
    """What a collective that is done has left for others. One that has failed may be read from still."""
    try:
        flight.work.wait()
    except CommError:
        return None
    return flight.used
