"""Gathers in stages 1 and 2: one queue, in one agreed order, whatever branches a rank takes.

``step()`` queues every bucket that it has updated. Where storage stays, all gathers start at once; where parameters are
freed after ``step()``, they start in that same order as the forward proceeds, ``ahead`` buckets before their use. The
order never depends on what this rank does, so ranks always match; a wrong guess costs time, never correctness.

``Gathers`` is what the two policies have in common; stage 3 has the other one, in ``residency``.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .buffer import FusedCommBuffer, Status
from .timeline import Timeline


class Place(NamedTuple):
    """Where a parameter lies: its bucket, its slot there, and its unit."""

    bucket: int
    slot: int
    unit: int


class Gathers(abc.ABC):
    """Makes buckets READY, and lets go of them.

    Args:
        ahead: how many may be gathered ahead of use; None for all at once.

    Attributes:
        buffers: all buckets, by index.
        order: agreed order of first use.
    """

    def __init__(self, buffers: Sequence[FusedCommBuffer], *, ahead: int | None, timeline: Timeline) -> None:
        self.buffers = list(buffers)
        self.order = list(range(len(buffers)))
        self._ahead = ahead
        self._timeline = timeline
        self._under_way = 0
        self._started: list[int] = []
        self._pins = 0

    @property
    def ahead(self) -> int | None:
        """How many are gathered ahead of use; None for all at once."""
        return self._ahead

    @property
    def is_pinned(self) -> bool:
        """Whether somebody has asked for all parameters, and has not given them back."""
        return self._pins > 0

    def set_ahead(self, ahead: int | None) -> None:
        """Sets how many are gathered ahead of use from now on."""
        self._ahead = ahead

    def finish(self, bucket: int) -> None:
        """Waits for the bucket's gather if one is under way."""
        buffer = self.buffers[bucket]
        if buffer.status is not Status.SYNCING:
            return
        work = buffer.gather_work
        assert work is not None
        self._timeline.wait(work)
        try:
            buffer.finish_gather()
        finally:
            self._under_way -= buffer.gather_work is None

    def finish_under_way(self) -> None:
        """Waits for every gather under way."""
        for bucket in range(len(self.buffers)):
            self.finish(bucket)

    @abc.abstractmethod
    def unshard(self) -> list[int]:
        """Gathers every bucket that is not READY. Returns what ``reshard`` wants to know."""

    @abc.abstractmethod
    def reshard(self, freed: Sequence[int]) -> None:
        """Keeps what was written to the parameters since ``unshard``, and frees what had been freed before it."""

    @abc.abstractmethod
    def take_wrong_guesses(self, uses: Sequence[int]) -> int:
        """How many gathers since the last call were started too early, too late or for nothing; while recorded.

        Args:
            uses: buckets in the order in which the forward has used them first.
        """

    @abc.abstractmethod
    def begin_step(self) -> None:
        """Start of ``step()``: no forward or backward is under way."""

    @abc.abstractmethod
    def take_update(self, bucket: int) -> None:
        """The bucket's shard has been updated, in the agreed order."""

    @abc.abstractmethod
    def end_step(self) -> None:
        """End of ``step()``."""

    @abc.abstractmethod
    def begin_anew(self) -> None:
        """All buckets are new ones, between two steps, and each is READY, or SHARDED where storage is freed."""

    def _start(self, buffer: FusedCommBuffer) -> None:
        self._timeline.watch(buffer.start_gather())
        self._under_way += 1
        if self._timeline.enabled:
            self._started.append(buffer.layout.number)


class QueuedGathers(Gathers):
    """The queue.

    Args:
        ahead: None starts all in ``step()``. 0 does too, where storage stays, and ``step()`` waits for them.
    """

    def __init__(self, buffers: Sequence[FusedCommBuffer], *, ahead: int | None, timeline: Timeline) -> None:
        super().__init__(buffers, ahead=ahead, timeline=timeline)
        self.keeps_full = self.buffers[0].place.keeps_full
        self._queue: deque[int] = deque()
        self._stepped = False

    def queue(self, buckets: Iterable[int]) -> None:
        """Says which buckets are stale and must be gathered, in what order. Starts nothing."""
        self._queue.extend(buckets)

    def start_all(self) -> None:
        """Starts every queued gather."""
        while self._queue:
            self._start_next()

    def start_up_to(self, bucket: int, *, looks_ahead: bool) -> None:
        """Starts the bucket's gather, and some more if it ``looks_ahead``."""
        buffer = self.buffers[bucket]
        if buffer.status is Status.READY:
            return
        while buffer.status is Status.SHARDED:
            # Everything that stands before it in the agreed order starts first, on every rank alike.
            assert self._queue, f"bucket '{buffer.name}' is SHARDED but not queued"
            self._start_next()
        ahead = (self._ahead or 0) if looks_ahead else 0
        while self._queue and self._under_way <= ahead:
            self._start_next()

    def unshard(self) -> list[int]:
        """Part of ``Gathers``; returns the buckets that were freed."""
        freed = [buffer.layout.number for buffer in self.buffers if buffer.full is None]
        self.start_all()
        self.finish_under_way()
        self._pins += 1
        return freed

    def reshard(self, freed: Sequence[int]) -> None:
        """Part of ``Gathers``."""
        try:
            for buffer in self._ready():
                buffer.keep_writes(takes_back=not self.keeps_full)
        finally:
            self._pins -= 1
        if self._pins:
            return
        if self._stepped:
            self._stepped = False
            self._free_all()
            return
        for bucket in (bucket for bucket in self.order if bucket in set(freed)):
            self.buffers[bucket].free()
            self.queue([bucket])

    def take_wrong_guesses(self, uses: Sequence[int]) -> int:
        """Part of ``Gathers``: those that were started before one that was used before them, each once."""
        started, self._started = self._started, []
        return passed_over(started, uses) if self._ahead != 0 else 0

    def begin_step(self) -> None:
        """Part of ``Gathers``."""
        self.start_all()
        for buffer in self._ready():
            buffer.keep_writes(takes_back=self._pins > 0 and not self.keeps_full)

    def take_update(self, bucket: int) -> None:
        """Part of ``Gathers``."""
        if not self.keeps_full and not self._pins:
            return
        buffer = self.buffers[bucket]
        if buffer.status is Status.READY:
            buffer.mark_stale()
        if self._queue:
            self.queue([bucket])
            self.start_all()
        elif buffer.status is Status.SHARDED:
            self._start(buffer)

    def end_step(self) -> None:
        """Part of ``Gathers``."""
        if self._started and not self._timeline.enabled:
            self._started.clear()
        if self._pins:
            self._stepped = not self.keeps_full
            self.finish_under_way()
        elif not self.keeps_full:
            self._free_all()
        elif self._ahead is not None:
            self.finish_under_way()

    def begin_anew(self) -> None:
        """Part of ``Gathers``."""
        if not self.keeps_full:
            self.queue(self.order)

    def _ready(self) -> list[FusedCommBuffer]:
        return [buffer for buffer in self.buffers if buffer.status is Status.READY]

    def _free_all(self) -> None:
        self.start_all()
        self.finish_under_way()
        for buffer in self.buffers:
            if buffer.status is Status.READY:
                buffer.free()
        self.queue(self.order)
        # This memory is what the user has asked for; the next forward pays for having it again.
        self.buffers[0].place.pool.trim()

    def _start_next(self) -> None:
        buffer = self.buffers[self._queue.popleft()]
        if buffer.status is Status.SHARDED:
            self._start(buffer)


def passed_over(started: Sequence[int], uses: Sequence[int]) -> int:
    """How many of ``started``, in order, had not been used yet when one that was started after them was."""
    left = list(started)
    count = 0
    for bucket in uses:
        if bucket in left:
            place = left.index(bucket)
            count += place
            # What has been passed over counts once, whenever it is used.
            del left[: place + 1]
    return count
