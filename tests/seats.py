"""Ranks that are threads of one process, and lanes that carry real values between them.

Each rank's part is a function of its ``Seats``; what it returns, or the error that it raises, comes back by rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from hp_sharding.comm import Communicator, Work
from hp_sharding.comm.local import LocalCommunicator, LocalWork
from hp_sharding.errors import HpShardingError

TIMEOUT_S = 20.0


class _Table:
    """Where the members of one lane lay down what they have, and see what the others have."""

    def __init__(self, n: int) -> None:
        self._rows: list[Any] = [None] * n
        self._barrier = threading.Barrier(n, timeout=TIMEOUT_S)

    def swap(self, place: int, row: Any) -> list[Any]:
        self._rows[place] = row
        self._barrier.wait()
        found = list(self._rows)
        self._barrier.wait()
        return found


class Seat(LocalCommunicator):
    """One rank's place on a lane. Gathers and sums are there at once; the rest is that of a group of one.

    Attributes:
        ended: why the lane was broken off, or "closed".
    """

    def __init__(self, lane: str, ranks: tuple[int, ...], rank: int, table: _Table) -> None:
        super().__init__(lane, (0,))
        self.ranks, self.rank = ranks, ranks.index(rank)
        self.ended: list[str] = []
        self._table = table

    def all_gather(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        wire_dtype: str | None = None,
    ) -> Work:
        rows = self._table.swap(self.rank, input.numpy())
        output.copy_(paddle.to_tensor(np.concatenate(rows)), False)
        return self._done("all_gather", label, output)

    def all_reduce(
        self, tensor: paddle.Tensor, *, label: str = "", after: Work | None = None, wire_dtype: str | None = None
    ) -> Work:
        rows = self._table.swap(self.rank, tensor.numpy())
        tensor.copy_(paddle.to_tensor(np.sum(rows, axis=0, dtype=rows[0].dtype)), False)
        return self._done("all_reduce", label, tensor)

    def break_off(self, reason: str) -> None:
        self.ended.append(reason)

    def close(self) -> None:
        self.ended.append("closed")

    def _done(self, op: str, label: str, whole: paddle.Tensor) -> LocalWork:
        work = LocalWork(op, label, self.lane, whole.size * whole.element_size())
        work.start_s = work.end_s = 0.0
        return work


Seats = dict[str, Seat]
"""One rank's lanes by name: "gather", and "agree" where there are replicas."""


def control(seats: Seats) -> list[Communicator]:
    """Lanes that one after the other reach all ranks, the replicas first."""
    return [seats[name] for name in ("agree", "gather") if name in seats]


def meet(part: Callable[[int, Seats], Any], nranks: int, n_replicas: int = 1) -> list[Any]:
    """Calls ``part(rank, seats)`` on every rank; what each returned, or the HpShardingError that it raised."""
    degree = nranks // n_replicas
    shards = [_Table(degree) for _ in range(n_replicas)]
    replicas = [_Table(n_replicas) for _ in range(degree)]
    found: list[Any] = [None] * nranks

    def run(rank: int) -> None:
        replica, place = divmod(rank, degree)
        group = tuple(range(replica * degree, (replica + 1) * degree))
        seats = {"gather": Seat("gather", group, rank, shards[replica])}
        if n_replicas > 1:
            seats["agree"] = Seat("agree", tuple(range(place, nranks, degree)), rank, replicas[place])
        try:
            found[rank] = part(rank, seats)
        except HpShardingError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(nranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
        assert not thread.is_alive(), "a rank waits for ever"
    return found
