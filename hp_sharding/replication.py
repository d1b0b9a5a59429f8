"""Sums over the replicas: what a shard group has reduced, added up with what the others have, while backward goes on.

The reduce-scatters of a round write side by side into the arena, so that any run of them is one range of memory: it
goes out in one all-reduce, with no copy, as soon as it is large enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from .arena import GradientArena
from .comm import Communicator, Work
from .layout import BucketLayout
from .timeline import Timeline


class Replicator:
    """The all-reduces of one wrapped model.

    Args:
        layouts: all buckets; their number is the key of every method.
        arena: holds their sums.
        lane: over the replicas of this rank's shard.
        limit_bytes: up to which neighbours share an all-reduce; a larger bucket has one of its own.
    """

    def __init__(
        self,
        layouts: Sequence[BucketLayout],
        arena: GradientArena,
        *,
        lane: Communicator,
        limit_bytes: int,
        timeline: Timeline,
    ) -> None:
        self._layouts = list(layouts)
        self._arena = arena
        self._lane = lane
        self._limit_bytes = limit_bytes
        self._timeline = timeline
        self._run: list[int] = []
        self._run_bytes = 0
        self._last: Work | None = None
        self._works: dict[int, Work] = {}

    def add(self, bucket: int, reduction: Work | None) -> None:
        """Takes a partial sum that is there once ``reduction`` is done (None: it is), as then are all added before.

        The same sequence of calls on all replicas.
        """
        nbytes = self._layouts[bucket].sum_nbytes
        if self._run:
            neighbours = self._arena.are_neighbours(self._run[-1], bucket)
            if not neighbours or self._run_bytes + nbytes > self._limit_bytes:
                self.flush()
        self._run.append(bucket)
        self._run_bytes += nbytes
        self._last = reduction
        if self._run_bytes >= self._limit_bytes:
            self.flush()

    def flush(self) -> None:
        """Launches the all-reduce of what has been added since the last one."""
        if not self._run:
            return
        run = self._arena.range(self._run)
        names = [self._layouts[bucket].name for bucket in run.buckets]
        label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        dtypes = self._layouts[run.buckets[0]].dtypes
        # What a shard group has summed up may be more than float16 can hold, though none of its terms was.
        wire_dtype = None if dtypes.reduce in (dtypes.sum, "float16") else dtypes.reduce
        work = self._lane.all_reduce(run.tensor, label=label, after=self._last, wire_dtype=wire_dtype)
        self._timeline.watch(work)
        self._works.update(dict.fromkeys(run.buckets, work))
        self._run, self._run_bytes, self._last = [], 0, None

    def is_waited_for(self, bucket: int) -> bool:
        """Whether its sum is on the way over the replicas, or there and not taken yet."""
        return bucket in self._run or bucket in self._works

    def is_done(self, bucket: int) -> bool:
        """Whether ``wait`` would return at once."""
        work = self._works.get(bucket)
        return work is None or work.done()

    def wait(self, bucket: int) -> None:
        """Returns once the bucket's sum is that of all replicas, if it has been added; after ``flush``."""
        assert bucket not in self._run, bucket
        work = self._works.pop(bucket, None)
        if work is not None:
            self._timeline.wait(work)
            self._arena.take_total(bucket)
