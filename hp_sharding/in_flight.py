"""Stage 2: how many full gradients exist at a time, and what becomes of their storage once they have been reduced."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from .errors import CommError
from .gradient_storage import GradientStorage, Used
from .timeline import Timeline

if TYPE_CHECKING:
    from .comm import Work

MAX_LIVE_GRADIENTS = 2
"""Full gradients that exist at a time in stage 2: one filling, one being reduced. Waiting for the older reduction
costs nothing where compute is the slower side, and where the link is, it is busy all the same."""


class _Flight(NamedTuple):
    """A gradient that is being reduced; ``used`` is its storage, for the next one, where a collective leaves it."""

    work: Work
    used: Used | None


class GradientsInFlight:
    """Counts the full gradients of one model, and gives the storage of those that have been reduced to the next ones.

    So that a bucket's storage is neither looked for nor given back: the tensor stays, and the next bucket of that size
    fills it.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._flights: deque[_Flight] = deque()
        self._n_filling = 0

    def alloc(self, storage: GradientStorage, *, limited: bool) -> None:
        """Storage for one more full gradient; where ``limited``, not before at most one other is left."""
        used = self._take_used(limited=limited)
        if used is not None and not storage.fits(used):
            used = None  # back to the pool before it is asked: it may be what the pool gives
        storage.alloc(used)
        self._n_filling += 1

    def free(self, storage: GradientStorage) -> None:
        """Nobody will reduce it."""
        storage.free()
        self._n_filling -= 1

    def send(self, storage: GradientStorage, work: Work) -> None:
        """The gradient is being reduced by ``work``; its storage is free for another."""
        self._flights.append(_Flight(work, storage.hand_over()))
        self._n_filling -= 1

    def forget(self) -> None:
        """All reductions are done: their storage goes back to the pool."""
        self._flights.clear()

    def _take_used(self, *, limited: bool) -> Used | None:
        flights, used = self._flights, None
        while flights and flights[0].work.done():
            used = _left_by(flights.popleft())
        while flights and limited and self._n_filling + len(flights) >= MAX_LIVE_GRADIENTS:
            flight = flights.popleft()
            self._timeline.wait(flight.work)
            used = flight.used
        return used


def _left_by(flight: _Flight) -> Used | None:
    """What a collective that is done has left for others. One that has failed may be read from still."""
    try:
        flight.work.wait()
    except CommError:
        return None
    return flight.used
