"""What the ranks of a shard group tell each other once a backward: small facts that no rank may decide alone.

Which parameters got a gradient anywhere, which buckets need one more reduction, and whether rank 0 has learned a better
order. They travel as counts in one small all-reduce, started at the end of backward and read in ``step()``.

With them travel the fingerprints of what each rank has launched up to then, bit by bit: a bit that is the same on all
ranks is counted on none of them or on all. By contract all data ranks have launched the same reductions by then, and
the ranks of one shard group the same gathers. Replicas gather for themselves: in stage 3 one may take another branch
than the next. So those fingerprints have a row for each replica, and all ranks see all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .comm import BITS, Communicator, Fingerprint, Prints, Work, host_tensor
from .divergence import raise_divergence
from .timeline.meeting import Way

_POSITION_BITS = 8
"""Positions are compared up to so many bits."""


class Facts(NamedTuple):
    """One rank's facts, or, once agreed, those that hold on any rank.

    Attributes:
        new_order: rank 0 wants to publish an order of buckets.
        failed: the backward raised, so that the sums are not what they should be.
        repeats: for each bucket, whether a gradient came in after its reduction was launched.
        used: for each parameter, whether it got a gradient.
        written: for each tensor of ``RunningState``, whether a forward may have written it.
        goes_on: this rank is not in ``clear_grad()`` after a failure.
        position: how many rounds this rank has made since its last ``clear_grad()``.
        parted: agreed, ranks are at different positions: what one still adds to, another has forgotten.
    """

    new_order: bool
    failed: bool
    repeats: list[bool]
    used: list[bool]
    written: Sequence[bool] = ()
    goes_on: bool = True
    position: int = 0
    parted: bool = False


class Agreement:
    """``Facts`` under way: added up over the ranks of one lane after the other, which reach all data ranks together.

    Args:
        facts: this rank's.
        lanes: the replicas first, where there are several, then the shard group.
        label: see ``Communicator``.
        fingerprint: of what this rank has launched; None compares nothing.
    """

    def __init__(
        self, facts: Facts, lanes: Sequence[Communicator], *, label: str, fingerprint: Fingerprint | None = None
    ) -> None:
        counts = [facts.new_order, facts.failed, *facts.repeats, *facts.used, *facts.written]
        counts += [facts.goes_on, *_position_bits(facts.position)]
        self._facts = facts
        self._n_facts = len(counts)
        self._lanes = lanes
        self._fingerprint = fingerprint
        self._prints = fingerprint.take() if fingerprint is not None else None
        rows = _rows(self._prints, lanes) if self._prints is not None else []
        self._counts = host_tensor([*counts, *rows], "int32")
        self.work: Work = lanes[0].all_reduce(self._counts, label=label)
        for lane in lanes[1:]:
            self.work = lane.all_reduce(self._counts, label=label, after=self.work)

    def result(self) -> Facts:
        """The facts that hold on any rank. Call only after ``work.wait()``, on all ranks.

        Raises:
            CommError: the ranks have launched different collectives; says which. Not where a backward has failed: that
                rank has not launched all it should.
        """
        agreed = (self._counts.numpy()[: self._n_facts] > 0).tolist()
        used_from = 2 + len(self._facts.repeats)
        written_from = used_from + len(self._facts.used)
        position_from = self._n_facts - 2 * _POSITION_BITS
        ones, zeros = agreed[position_from : position_from + _POSITION_BITS], agreed[position_from + _POSITION_BITS :]
        facts = Facts(
            agreed[0],
            agreed[1],
            agreed[2:used_from],
            agreed[used_from:written_from],
            agreed[written_from : position_from - 1],
            goes_on=agreed[position_from - 1],
            position=self._facts.position,
            parted=any(one and zero for one, zero in zip(ones, zeros, strict=True)),
        )
        is_whole = not facts.failed and not facts.parted
        if is_whole and self._fingerprint is not None and self._prints is not None and not self._is_alike():
            raise_divergence(self._fingerprint, self._prints, self._lanes)
        return facts

    def _is_alike(self) -> bool:
        """Whether all ranks have launched the same. The same answer on all of them."""
        if not self._lanes[0].carries_values:
            return True
        counts = self._counts.numpy()[self._n_facts :]
        expected = np.full(len(counts), self._lanes[-1].nranks)
        expected[:BITS] = math.prod(lane.nranks for lane in self._lanes)
        return not ((counts > 0) & (counts < expected)).any()


def _rows(prints: Prints, lanes: Sequence[Communicator]) -> list[int]:
    """What all data ranks share, then what the shard group of each replica does, of which this rank knows its own."""
    replicas = lanes[0] if len(lanes) > 1 else None
    rows = np.zeros([1 + (replicas.nranks if replicas is not None else 1), BITS], np.int32)
    rows[0] = _bits(prints.shared)
    rows[1 + (replicas.rank if replicas is not None else 0)] = _bits(prints.own)
    flat: list[int] = rows.reshape(-1).tolist()
    return flat


def _bits(number: int) -> npt.NDArray[np.uint8]:
    return np.unpackbits(np.array([number], ">u4").view(np.uint8))


def _position_bits(position: int) -> list[bool]:
    """Which bits are one, then which are zero: ranks differ where both are so on any."""
    ones = [bool(position >> bit & 1) for bit in range(_POSITION_BITS)]
    return [*ones, *(not one for one in ones)]


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
