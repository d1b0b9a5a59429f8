"""Communicators whose collectives take simulated time and carry nothing: a scale model's values mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import paddle

from ..comm import Communicator, Work
from .clock import Clock, Duty, Transfer


class Carried(NamedTuple):
    """What a stand-in's tensors stand for: bytes of the true message, and whose parameters these are."""

    nbytes: int
    layer: str


Look = Callable[[str, paddle.Tensor, str | None], Carried]
"""Given a collective's name, the tensor that has this rank's part of it, and ``wire_dtype``, says what that is."""


class SimulatedWork(Work):
    """A collective on a ``SimulatedLane``."""

    def __init__(self, clock: Clock, op: str, lane: str, transfer: Transfer) -> None:
        self.op, self.lane, self.label, self.nbytes = op, lane, transfer.label, transfer.duty.nbytes
        self.transfer = transfer
        self._clock = clock

    @property
    def start_s(self) -> float | None:  # type: ignore[override]
        """On the simulated clock."""
        return self.transfer.start_s

    @property
    def end_s(self) -> float | None:  # type: ignore[override]
        """On the simulated clock."""
        return self.transfer.end_s

    def wait(self) -> None:
        """See ``Work``."""
        self._clock.wait(self.transfer)

    def done(self) -> bool:
        """See ``Work``."""
        return self.transfer.end_s is not None


class SimulatedLane(Communicator):
    """One lane over ``true_nranks`` ranks that are all alike, of which there is one.

    Args:
        splits: whether storage is split among its ranks. That of a scale model is not, so it then has one rank.
    """

    def __init__(self, name: str, clock: Clock, true_nranks: int, look: Look, *, splits: bool) -> None:
        self.lane = name
        self.ranks = (0,) if splits else tuple(range(true_nranks))
        self.rank = 0
        self._n = true_nranks
        self._clock = clock
        self._queue = clock.lane(name)
        self._look = look

    def all_gather(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        wire_dtype: str | None = None,
    ) -> Work:
        """See ``Communicator``."""
        carried = self._look("all_gather", input, wire_dtype)
        return self._start("all_gather", carried, label, after, held=(output, input))

    def reduce_scatter(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        accumulate: bool = False,
        wire_dtype: str | None = None,
    ) -> Work:
        """See ``Communicator``."""
        carried = self._look("reduce_scatter", output, wire_dtype)
        return self._start("reduce_scatter", carried, label, after, held=(output, input))

    def all_reduce(
        self, tensor: paddle.Tensor, *, label: str = "", after: Work | None = None, wire_dtype: str | None = None
    ) -> Work:
        """See ``Communicator``."""
        return self._start("all_reduce", self._look("all_reduce", tensor, wire_dtype), label, after, held=tensor)

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "", after: Work | None = None) -> Work:
        """See ``Communicator``."""
        return self._start("broadcast", self._look("broadcast", tensor, None), label, after, held=tensor)

    def close(self) -> None:
        """Nothing to end."""

    def _start(self, op: str, carried: Carried, label: str, after: Work | None, *, held: object) -> Work:
        trips = 2 if op == "all_reduce" else 1
        hops = trips * (self._n - 1)
        # A broadcast passes the whole message on; the others an nth of it in each hop.
        sent = carried.nbytes * (1.0 if op == "broadcast" and hops else hops / self._n)
        before = after.transfer if isinstance(after, SimulatedWork) else None
        transfer = Transfer(label, carried.layer, Duty(carried.nbytes, sent, hops), before, held)
        self._clock.start(self._queue, transfer)
        return SimulatedWork(self._clock, op, self.lane, transfer)
