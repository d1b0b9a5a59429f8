"""How the ranks of an examination reach each other, start together, and end together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import paddle

from ..comm import (
    Communicator,
    Device,
    close_all,
    collision_free_groups,
    create_communicators,
    current_device,
    host_tensor,
    rendezvous,
)
from ..errors import ConfigError

_LANE = "doctor"


def join_job() -> None:
    """Sets up Paddle's parallel environment where the launcher has started several ranks.

    Raises:
        ConfigError: Paddle cannot do so.
    """
    if paddle.distributed.get_world_size() == 1 or paddle.distributed.is_initialized():
        return
    if current_device().kind == "cpu" and os.environ.get("PADDLE_DISTRI_BACKEND", "auto") == "auto":
        # On CPU Paddle would otherwise fall back to an older way of starting Gloo.
        os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"
    try:
        with collision_free_groups():
            paddle.distributed.init_parallel_env()
    except (RuntimeError, OSError, ValueError) as error:
        raise ConfigError(f"rank {paddle.distributed.get_rank()}: Paddle's parallel environment: {error}") from error


class Team:
    """All ranks of the job.

    Args:
        timeout_s: how long to wait for a late one.

    Attributes:
        me: this process's global rank.
        ranks: all of them.
        device: what this rank computes on.
        timeout_s: how long to wait for a late rank.
    """

    def __init__(self, timeout_s: float) -> None:
        self.me = int(paddle.distributed.get_rank())
        self.ranks = tuple(range(paddle.distributed.get_world_size()))
        self.device: Device = current_device()
        self.timeout_s = timeout_s
        self._host_lane: Communicator | None = None

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def has_replicas(self) -> bool:
        """Whether there are enough ranks for two replicas that are sharded."""
        return self.n_ranks >= 4 and self.n_ranks % 2 == 0

    def open(self, *lanes: str, ranks: Sequence[int] | None = None) -> list[Communicator]:
        """Lanes over all ranks, or some of them with this one, on the device. Collective over these."""
        made = create_communicators(self.ranks if ranks is None else ranks, lanes, timeout_s=self.timeout_s)
        return [made[lane] for lane in lanes]

    def close(self) -> None:
        """Ends all lanes of this process: those of models too. Other ranks that still need them get an error."""
        self._host_lane = None
        close_all()

    def settle(self) -> None:
        """Waits until what compute was given is done, and what it was made to wait for; not for other lanes."""
        if self.device.has_streams:
            paddle.device.current_stream().synchronize()

    def line_up(self) -> None:
        """Waits for the device, and then for all other ranks: what comes next begins together. Collective."""
        if self.device.has_streams:
            paddle.device.synchronize()
        self._host().all_reduce(host_tensor([0.0], "float32"), label="line up").wait()

    def agree(self, value: float) -> float:
        """Rank 0's value, in single precision. Collective."""
        mine = host_tensor([value], "float32")
        self._host().broadcast(mine, src=0, label="agree").wait()
        return float(mine[0])

    def time_ms(self, action: Callable[[], object]) -> float:
        """How long ``action`` takes, until compute is done with it, begun together. Collective."""
        self.line_up()
        begin_s = time.perf_counter()
        action()
        self.settle()
        return (time.perf_counter() - begin_s) * 1e3

    def tell_all(self, mine: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Every rank's ``mine``, which JSON can say, by rank. Collective; works when all lanes have failed.

        Raises:
            CommError: somebody has not come in time; says who.
        """
        # In reverse order, so that the meetings are counted apart from those at which lanes are made: a rank that
        # failed must not be taken for one that wants to connect.
        found = rendezvous.exchange(
            {"mine": mine}, ranks=self.ranks[::-1], me=self.me, timeout_s=timeout_s or self.timeout_s
        )
        return [found[rank]["mine"] for rank in self.ranks]

    def _host(self) -> Communicator:
        if self._host_lane is None:
            made = create_communicators(self.ranks, (), host_lanes=[_LANE], timeout_s=self.timeout_s)
            self._host_lane = made[_LANE]
        return self._host_lane
