"""Real collectives that are slow and leave their outputs poisoned meanwhile, so that a missing wait shows.

On a small model over loopback every collective is over before anybody could miss it. Here each one rests before it
starts, on each rank for another time, as over a slow link, and its output holds NaN from when it was asked for. On the
stand-in device the collectives are those of its streams, which have delays of their own, and so has its freed memory.
"""

from __future__ import annotations

import gc
import random
import time
from typing import Any, NamedTuple

import paddle

from hp_sharding.comm import Communicator, Work, current_device, fingerprint
from hp_sharding.comm.memory import bytes_of
from hp_sharding.config import ShardingConfig
from hp_sharding.optimizer import ShardedOptimizer
from hp_sharding.sharding import Grid, broadcast_model, build, connect
from tests.fakes import PoisoningPool

DELAY_S = 0.0008
"""Longest rest of a collective; the mean is half of it."""

_lanes: dict[tuple[int, int], dict[str, Communicator]] = {}


class Call(NamedTuple):
    """One collective as it was started."""

    lane: str
    op: str
    label: str
    nbytes: int


class _Delay(Work):
    """Takes ``delay_s`` once the lane has come to it and the work that it stands behind is done."""

    def __init__(self, delay_s: float, after: Work | None) -> None:
        self.op, self.label, self.lane, self.nbytes = "delay", "", "", 0
        self.start_s: float | None = None
        self.end_s: float | None = None
        self._delay_s = delay_s
        self._after = after

    def wait(self) -> None:
        if self._after is not None:
            self._after.wait()
        time.sleep(self._delay_s)

    def done(self) -> bool:
        return False


class LateLane(Communicator):
    """A lane whose collectives start late and whose outputs are NaN until then.

    Attributes:
        calls: everything that was started on this lane, in order.
    """

    def __init__(self, inner: Communicator, calls: list[Call], delay_s: float) -> None:
        self.lane, self.ranks, self.rank = inner.lane, inner.ranks, inner.rank
        self.calls = calls
        self._inner = inner
        self._delay_s = delay_s
        # Other delays on every rank: what one rank has by luck another one lacks.
        self._random = random.Random(inner.rank)

    def all_gather(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        wire_dtype: str | None = None,
    ) -> Work:
        shard = input.shape[0]
        own = input.data_ptr() == output.data_ptr() + self.rank * shard * output.element_size()
        for rank in range(self.nranks):
            if not own or rank != self.rank:
                _poison(output._slice(rank * shard, (rank + 1) * shard))
        work = self._inner.all_gather(output, input, label=label, after=self._late(after), wire_dtype=wire_dtype)
        return self._note(work)

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
        if not accumulate:
            _poison(output)
        work = self._inner.reduce_scatter(
            output, input, label=label, after=self._late(after), accumulate=accumulate, wire_dtype=wire_dtype
        )
        return self._note(work)

    def all_reduce(
        self, tensor: paddle.Tensor, *, label: str = "", after: Work | None = None, wire_dtype: str | None = None
    ) -> Work:
        return self._note(self._inner.all_reduce(tensor, label=label, after=self._late(after), wire_dtype=wire_dtype))

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "", after: Work | None = None) -> Work:
        return self._note(self._inner.broadcast(tensor, src=src, label=label, after=self._late(after)))

    def break_off(self, reason: str) -> None:
        self._inner.break_off(reason)

    @property
    def is_broken(self) -> bool:
        return self._inner.is_broken

    def close(self) -> None:
        """The lane below is shared with later tests."""

    def _note(self, work: Work) -> Work:
        self.calls.append(Call(self.lane, work.op, work.label, work.nbytes))
        return work

    def _late(self, after: Work | None) -> Work | None:
        return _Delay(self._random.uniform(0.1, 1.0) * self._delay_s, after) if self._delay_s else after


class Wrapped(NamedTuple):
    """A model wrapped over late lanes and a poisoning pool."""

    model: paddle.nn.Layer
    optimizer: ShardedOptimizer
    calls: list[Call]


def wrap(
    model: paddle.nn.Layer,
    inner: Any,
    nranks: int,
    *,
    n_replicas: int = 1,
    delay_s: float = DELAY_S,
    poison: bool = True,
    **settings: Any,
) -> Wrapped:
    """What ``hp_sharding.shard`` does, over late lanes and with freed memory of NaN. Collective.

    Args:
        nranks: all ranks of the test.
        n_replicas: among how many replicas they are divided.
        delay_s: longest delay of a collective, 0 for none. On a device there is none: a wait would hold up the host.
        poison: whether outputs of collectives and freed blocks hold NaN. Blocks of a device are the device's business.
        settings: those of ``ShardingConfig``.
    """
    lanes = real_lanes(nranks, n_replicas)
    broadcast_model(model, lanes)
    calls: list[Call] = []
    on_device = current_device().has_streams
    delay_s = 0.0 if on_device else delay_s
    late = {name: LateLane(lane, calls, delay_s) if poison else lane for name, lane in lanes.items()}
    late[fingerprint.LANE] = lanes[fingerprint.LANE]
    pool = PoisoningPool() if poison and not on_device else None
    return Wrapped(model, build(model, inner, ShardingConfig(**settings), lanes=late, pool=pool), calls)


def real_lanes(nranks: int, n_replicas: int = 1) -> dict[str, Communicator]:
    """The lanes over all ranks, made once per process. What an earlier test left on them is over before a new one.

    Neighbouring ranks form a shard group, as with fleet.
    """
    if (nranks, n_replicas) not in _lanes:
        degree = nranks // n_replicas
        me = paddle.distributed.get_rank()
        first = me - me % degree
        grid = Grid(list(range(first, first + degree)), list(range(me % degree, nranks, degree)))
        _lanes[nranks, n_replicas] = connect(grid, timeout_s=30)
    gc.collect()
    return _lanes[nranks, n_replicas]


def _poison(tensor: paddle.Tensor) -> None:
    if not tensor.is_floating_point():
        return
    if current_device().has_streams:
        with paddle.no_grad():
            tensor.scale_(0.0, float("nan"))  # behind whatever compute has still to read there
    else:
        bytes_of(tensor, tensor.size * tensor.element_size())[:] = 0xFF
