"""The middle of ``step()``: buckets are updated and gathered, one after the other, and who breaks that off.

An exception between two updates, such as a KeyboardInterrupt while a reduction is waited for, leaves gradients and
optimizer as they are, so that the rest can follow later. One in the middle of an update leaves some parameters a step
ahead of the others, which nobody can undo.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .arena import GradientArena
from .schedule import Schedule
from .updates import InnerUpdates

if TYPE_CHECKING:
    from .timeline import Timeline

TOGETHER_BYTES = 1 << 18
"""Shards of neighbours that one call of the inner optimizer updates: a call costs 20 us whatever there is to do. Until
it returns the gathers of all of them wait; with AdamW, for this much, 0.15 ms."""


class StepUpdate:
    """The update of one step.

    Args:
        schedule: its gathers and its reductions are those of the buckets.
        arena: holds their gradients.
        updates: the inner optimizer, over this rank's slices.
        timeline: is told when what is updated.
        stale: buckets to update, in the order in which they are gathered; the same on every rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        arena: GradientArena,
        updates: InnerUpdates,
        *,
        timeline: Timeline,
        stale: Sequence[int],
    ) -> None:
        self._schedule = schedule
        self._reducer = schedule.reducer
        self._arena = arena
        self._updates = updates
        self._timeline = timeline
        self._waiting = deque(stale)
        self._due = set(stale)
        self._n_stale = len(self._due)
        self._current: list[int] = []

    @property
    def is_begun(self) -> bool:
        """Whether some bucket has been updated, or a part of one."""
        return len(self._due) < self._n_stale or self.is_torn

    @property
    def is_torn(self) -> bool:
        """Whether an update was broken off in its middle."""
        return bool(self._current) and self._updates.touched

    def run(self) -> None:
        """Updates the stale buckets, and has each gathered once all that stand before it are under way.

        While the first one's reduction is still on its way, later ones are updated: nothing waits that can work. Called
        again after an exception, it goes on where it was.
        """
        others = deque(bucket for bucket in self._reducer.order if bucket in self._due)
        while self._waiting:
            head = self._waiting[0]
            if head in self._due and not self._reducer.is_reduced(head):
                while others and others[0] not in self._due:
                    others.popleft()
                if others and others[0] != head and self._reducer.is_reduced(others[0]):
                    self._update([others.popleft()])
                    continue
            if head in self._due:
                self._update(self._next_in_line())
            self._schedule.gathers.take_update(head)
            self._waiting.popleft()

    def give_up(self) -> None:
        """Has what is left gathered as it is.

        Other ranks have done so, or will. So each rank's next collectives, such as those of loading, find their match.
        """
        while self._waiting:
            head = self._waiting[0]
            self._schedule.gathers.finish(head)
            self._schedule.gathers.take_update(head)
            self._waiting.popleft()

    def describe(self, error: BaseException) -> str:
        """What ``error`` has left behind, and what to do."""
        n_done = self._n_stale - len(self._due)
        names = ", ".join(f"'{self._schedule.buffers[bucket].name}'" for bucket in self._current)
        where = f" while it updated bucket {names}" if self._current else ""
        return (
            f"rank {self._reducer.rank}: step() was broken off{where} ({type(error).__name__}: {error}): {n_done} of "
            f"{self._n_stale} buckets had been updated, so parameters and optimizer state are those of no step. Load a "
            "checkpoint on every rank with hp_sharding.load, which makes them whole again, or start anew from one"
        )

    def _update(self, buckets: list[int]) -> None:
        for bucket in buckets:
            self._reducer.wait(bucket)
            # One that no forward has read since the last step may still be under way, into what is updated now.
            self._schedule.gathers.finish(bucket)
        if self._timeline.enabled:
            self._timeline.enter("update", self._timeline.subject.layers_of(buckets))
        self._arena.average(buckets)
        self._updates.touched = False
        self._current = buckets
        self._updates.apply(buckets, self._reducer.used)
        self._due.difference_update(buckets)
        self._current = []
        if self._timeline.enabled:
            self._timeline.leave()

    def _next_in_line(self) -> list[int]:
        """The first that waits, and those behind it that are due, reduced and small: see ``TOGETHER_BYTES``."""
        together: list[int] = []
        nbytes = 0
        for bucket in (bucket for bucket in self._waiting if bucket in self._due):
            layout = self._schedule.buffers[bucket].layout
            nbytes += layout.shard_nbytes
            if together and (nbytes > TOGETHER_BYTES or not self._reducer.is_reduced(bucket)):
                break
            together.append(bucket)
        return together
