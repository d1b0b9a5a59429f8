"""The ranks that save or load together: who writes what, and that all of them fail where one does."""

from __future__ import annotations

import contextlib
import heapq
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from ..comm import Communicator, current_device, host_tensor
from ..config import ShardingConfig
from ..errors import CheckpointError, CommError
from ..optimizer import ShardedOptimizer

_FIRST_SIGN_S = 0.02
_TEXT_BYTES = 2000
"""Of an error's message, as the other ranks show it."""


class Ranks:
    """All data ranks, times those that tensor parallelism splits layers over.

    Attributes:
        shard: (rank, number of ranks) in the shard group; and so on.
        replicate: among the replicas.
        tensor: among the tensor-parallel ranks.
        timeout_s: how long to wait for a late one.
    """

    def __init__(self, optimizer: Any) -> None:
        self.shard = self.replicate = self.tensor = (0, 1)
        self._agree: Sequence[Communicator] = ()
        self._tensor: Communicator | None = None
        self.timeout_s = ShardingConfig().timeout_s
        if isinstance(optimizer, ShardedOptimizer):
            lanes = optimizer._reducer.lanes
            self.shard = _place(lanes.reduce)
            self.replicate = _place(lanes.replicate)
            self._tensor = optimizer._updates.sums.tensor
            self.tensor = _place(self._tensor)
            self._agree = lanes.agree
            self.timeout_s = optimizer.config.timeout_s

    @property
    def n_ranks(self) -> int:
        """How many there are."""
        return self.shard[1] * self.replicate[1] * self.tensor[1]

    @property
    def rank(self) -> int:
        """This one's place among them."""
        return (self.tensor[0] * self.replicate[1] + self.replicate[0]) * self.shard[1] + self.shard[0]

    @property
    def is_first(self) -> bool:
        """Whether it is the one that speaks for all."""
        return self.rank == 0

    @property
    def is_broken(self) -> bool:
        """Whether one of them is known to be gone. Never blocks."""
        return any(lane.is_broken for lane in self._agree)

    def sum_of(self, values: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The sum of every rank's ``values``, of one length on all ranks. Collective."""
        summed = self._sum_over_data(values)
        if self._tensor is None:
            return summed
        # That lane carries what the device computes with. Small whole numbers stay exact.
        on_device = paddle.to_tensor(summed.astype(np.float32), place=current_device().place)
        self._tensor.all_reduce(on_device, label="checkpoint").wait()
        return np.rint(on_device.numpy()).astype(np.int32)

    def _sum_over_data(self, values: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The same over data ranks, by what the hosts tell each other."""
        table = host_tensor(values, "int32")
        for lane in self._agree:
            lane.all_reduce(table, label="checkpoint").wait()
        summed: npt.NDArray[np.int32] = table.numpy()
        return summed

    def text_of(self, rank: int, text: str) -> str:
        """That rank's ``text`` on every rank, cut to a reasonable length. Collective."""
        if self.n_ranks == 1:
            return text
        own = np.zeros(_TEXT_BYTES, np.int32)
        data = text.encode(errors="replace")[:_TEXT_BYTES]
        if self.rank == rank:
            own[: len(data)] = np.frombuffer(data, np.uint8)
        found = self.sum_of(own).astype(np.uint8).tobytes()
        return found.rstrip(b"\0").decode(errors="replace")

    @contextlib.contextmanager
    def together(self, *, takes_long: bool = False) -> Iterator[None]:
        """What stands within either succeeds on all ranks or fails on all. Collective, at its end.

        Args:
            takes_long: longer than ranks wait for each other, it may be: until all are through they tell each other now
                and then that they are still there, from another thread. No collective may stand within then.

        Raises:
            CheckpointError: where it succeeded, with the message of a rank where it did not.
        """
        signs = _Signs(self) if takes_long and self._agree else None
        try:
            yield
            if signs is not None:
                signs.end()
        except Exception as error:  # and not what ends the process, such as a KeyboardInterrupt
            if signs is not None:
                signs.end()
            self._compare(error)
            raise
        self._compare(None)

    def _compare(self, error: Exception | None) -> None:
        if self.n_ranks == 1:
            return
        failed = np.zeros(self.n_ranks, np.int32)
        failed[self.rank] = error is not None
        failing = np.flatnonzero(self.sum_of(failed))
        if not failing.size:
            return
        first = int(failing[0])
        message = self.text_of(first, str(error))
        name = self.text_of(first, str(getattr(error, "parameter", "")))
        if error is None:
            raise CheckpointError(f"rank {first} of {self.n_ranks}: {message}", parameter=name)


class _Signs:
    """Signs of life: a small sum over the ranks now and then, the same number of them on all, until all have ended."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._over = threading.Event()
        self._error: CommError | None = None
        self._thread = threading.Thread(target=self._run, name="hp_sharding-checkpoint-signs", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """This rank is through; returns when all are. Safe to call twice.

        Raises:
            CommError: a rank is gone or late.
        """
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        pause_s = _FIRST_SIGN_S
        try:
            while True:
                self._over.wait(pause_s)
                if not self._ranks._sum_over_data(np.array([not self._over.is_set()], np.int32))[0]:
                    return
                pause_s = min(2 * pause_s, self._ranks.timeout_s / 4)
        except CommError as error:
            self._error = error


def share_out(sizes: Sequence[int], n: int) -> list[int]:
    """For each of ``sizes``, which of ``n`` takes it, so that all have about as much; the same on every rank."""
    loads = [(0, owner) for owner in range(n)]
    owners = []
    for size in sizes:
        load, owner = heapq.heappop(loads)
        heapq.heappush(loads, (load + size, owner))
        owners.append(owner)
    return owners


def _place(lane: Communicator | None) -> tuple[int, int]:
    return (0, 1) if lane is None else (lane.rank, lane.nranks)
