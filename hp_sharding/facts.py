"""What the ranks of a shard group tell each other once a backward: small facts that no rank may decide alone.

Which parameters got a gradient anywhere, which buckets need one more reduction, and whether rank 0 has learned a better
order. They travel as counts in one small all-reduce, started at the end of backward and read in ``step()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .comm import Communicator, Work, host_tensor
from .timeline.meeting import Way


class Facts(NamedTuple):
    """One rank's facts, or, once agreed, those that hold on any rank.

    Attributes:
        new_order: rank 0 wants to publish an order of buckets.
        failed: the backward raised, so that the sums are not what they should be.
        repeats: for each bucket, whether a gradient came in after its reduction was launched.
        used: for each parameter, whether it got a gradient.
        written: for each tensor of ``RunningState``, whether a forward may have written it.
    """

    new_order: bool
    failed: bool
    repeats: list[bool]
    used: list[bool]
    written: Sequence[bool] = ()


class Agreement:
    """``Facts`` under way: added up over the ranks of one lane after the other, which reach all data ranks together."""

    def __init__(self, facts: Facts, lanes: Sequence[Communicator], *, label: str) -> None:
        counts = [facts.new_order, facts.failed, *facts.repeats, *facts.used, *facts.written]
        self._counts = host_tensor(counts, "int32")
        self._facts = facts
        self.work: Work = lanes[0].all_reduce(self._counts, label=label)
        for lane in lanes[1:]:
            self.work = lane.all_reduce(self._counts, label=label, after=self.work)

    def result(self) -> Facts:
        """The facts that hold on any rank. Call only after ``work.wait()``."""
        agreed = (self._counts.numpy() > 0).tolist()
        used_from = 2 + len(self._facts.repeats)
        written_from = used_from + len(self._facts.used)
        return Facts(agreed[0], agreed[1], agreed[2:used_from], agreed[used_from:written_from], agreed[written_from:])


def publish(orders: Sequence[Sequence[int]], lanes: Sequence[Communicator]) -> list[list[int]]:
    """Rank 0's ``orders`` (each a permutation of the same length everywhere) on every rank of all lanes. Blocks."""
    table = host_tensor(np.reshape(orders, -1), "int32")
    for lane in lanes:
        lane.broadcast(table, src=0, label="bucket order").wait()
    return [list(map(int, order)) for order in table.numpy().reshape(len(orders), -1)]


def largest(numbers: Sequence[float], ways: Sequence[Way], *, label: str) -> list[float]:
    """The largest of each of ``numbers`` over the ranks of all lanes, as float32 has it, on every rank. Blocks."""
    table = np.asarray(numbers, np.float32)
    for way in ways:
        everyone = way.tensor(np.zeros([way.lane.nranks * len(table)], np.float32))
        way.lane.all_gather(everyone, way.tensor(table), label=label).wait()
        table = everyone.numpy().reshape([way.lane.nranks, -1]).max(axis=0)
    return [float(number) for number in table]
