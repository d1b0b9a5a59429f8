"""What ``benchmarks.plan_check`` measures before it predicts: compute without communication, links without compute, and
what each does to the other. No step of any sharded training is among it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

import paddle

from benchmarks.gpt import Batches, Shape, build_model
from benchmarks.turns import RankTurn, Turn
from hp_sharding.comm import Communicator, Work, collision_free_groups
from hp_sharding.config import ShardingConfig
from hp_sharding.plan.hardware import Hardware, Link
from hp_sharding.plan.measuring import Measured, measure
from hp_sharding.sharding import Grid, connect

_SMALL_NUMEL, _LARGE_NUMEL = 1 << 18, 1 << 21
"""Of the messages that a link's latency and bandwidth follow from: 1 MB and 8 MB."""
_ROW = 8
_MARGIN = 1.4
"""By how much more than enough is queued to keep a lane busy for a whole step."""
_PR_SET_PDEATHSIG = 1


@dataclass
class Calibration(RankTurn):
    """What a rank reports of its turn.

    Attributes:
        measured: of the model's compute.
        small_s: of each lane, seconds of a small message; ``large_s``, of a large one.
        large_s: see ``small_s``.
        launch_s: seconds that starting a collective takes.
        alone_s: of a forward and backward without transfers.
        slowdown: by how much longer that takes while a lane is busy, for each.
        carried_s: of each, seconds of a large message meanwhile.
    """

    measured: Measured | None = None
    small_s: dict[str, float] = field(default_factory=dict)
    large_s: dict[str, float] = field(default_factory=dict)
    launch_s: float = 0.0
    alone_s: float = 0.0
    slowdown: dict[str, float] = field(default_factory=dict)
    carried_s: dict[str, float] = field(default_factory=dict)


def serve(pipe: connection.Connection[Any, Any], shape: Shape, shard_ranks: int) -> None:
    """A rank's side, like ``turns.serve``; the first turn of the course only warms up."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pipe.send("ready")
    try:
        pipe.recv()
        rank = _Rank(shape, shard_ranks)
        pipe.send("set up")
        while True:
            pipe.send(rank.take_turn(pipe.recv()))
    except EOFError:
        return


class _Rank:
    def __init__(self, shape: Shape, shard_ranks: int) -> None:
        with collision_free_groups():
            paddle.distributed.init_parallel_env()
        me, world = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
        first = me // shard_ranks * shard_ranks
        grid = Grid(list(range(first, first + shard_ranks)), list(range(me % shard_ranks, world, shard_ranks)))
        self._lanes = {name: lane for name, lane in connect(grid, timeout_s=120).items() if lane.lane in _OPS}
        self._everyone = [self._lanes[name] for name in ("replicate", "gather") if name in self._lanes]
        self._model = build_model(shape)
        self._batches = Batches(shape, int(os.environ["PADDLE_TRAINER_ID"]))
        self._drops = True
        for param in self._model.parameters():
            param._register_backward_hook(_dropping(param))

    def take_turn(self, turn: Turn) -> Calibration:
        begin_cpu_s = time.process_time()
        found = Calibration()
        self._line_up()
        found.measured = measure(
            self._model, self._model, ShardingConfig(), draw=self._batches.draw, steps=turn.timed_steps
        )
        alone_s = [self._train() for _ in range(turn.timed_steps)]
        found.alone_s = min(alone_s)
        for name, lane in self._lanes.items():
            small, large = _Message(name, lane, _SMALL_NUMEL), _Message(name, lane, _LARGE_NUMEL)
            found.small_s[name], found.large_s[name] = self._time(small), self._time(large)
            found.launch_s = max(found.launch_s, small.launch_s)
            found.slowdown[name], found.carried_s[name] = self._train_beside(large, found, name)
        found.turn_cpu_s = time.process_time() - begin_cpu_s
        return found

    def _forward(self) -> paddle.Tensor:
        return self._model(*self._batches.draw())

    def _train(self) -> float:
        self._line_up()
        begin_s = time.perf_counter()
        self._forward().backward()
        return time.perf_counter() - begin_s

    def _train_beside(self, message: _Message, found: Calibration, name: str) -> tuple[float, float]:
        """How much longer they take while one message after the other is carried, and seconds of each of these."""
        works = message.start(int(_MARGIN * self._average(found.alone_s / found.large_s[name])) + 2)
        begin_s = time.perf_counter()
        self._forward().backward()
        end_s = time.perf_counter()
        for work in works:
            work.wait()
        ends_s = [work.end_s or 0.0 for work in works]
        # If the lane had nothing left to do, the rest of the step was as if alone.
        undisturbed_s = max(0.0, end_s - ends_s[-1])
        slowdown = (end_s - begin_s - undisturbed_s) / max(found.alone_s - undisturbed_s, 1e-3)
        return slowdown, _each_s(ends_s, end_s)

    def _time(self, message: _Message) -> float:
        """Of each of a row of messages. The first one does not count: after a pause a shaped link lets some pass."""
        self._line_up()
        works = message.start(_ROW + 1)
        for work in works:
            work.wait()
        ends_s = [work.end_s or 0.0 for work in works]
        return (ends_s[-1] - ends_s[0]) / _ROW

    def _line_up(self) -> None:
        self._average(0.0)

    def _average(self, value: float) -> float:
        """Over all ranks, and bitwise the same on each."""
        total = paddle.to_tensor([value], "float32")
        for lane in self._everyone:
            lane.all_reduce(total, label="average").wait()
        return float(total) / paddle.distributed.get_world_size()


def _each_s(ends_s: Sequence[float], until_s: float) -> float:
    """What each of some messages took that follow each other; those until then, if that is two or more."""
    meanwhile_s = [moment_s for moment_s in ends_s if moment_s <= until_s]
    counted_s = meanwhile_s if len(meanwhile_s) > 1 else ends_s[:2]
    return (counted_s[-1] - counted_s[0]) / (len(counted_s) - 1)


class _Message:
    """What one lane carries again and again."""

    def __init__(self, name: str, lane: Communicator, numel: int) -> None:
        self._call = _OPS[name]
        self._lane = lane
        self._full, self._part = paddle.zeros([numel]), paddle.zeros([numel // lane.nranks])
        self.launch_s = 0.0

    def start(self, count: int) -> list[Work]:
        works = []
        for _ in range(count):
            begin_s = time.perf_counter()
            works.append(self._call(self._lane, self._full, self._part))
            self.launch_s = time.perf_counter() - begin_s
        return works


_OPS: dict[str, Callable[[Communicator, paddle.Tensor, paddle.Tensor], Work]] = {
    "gather": lambda lane, full, part: lane.all_gather(full, part, label="calibration"),
    "reduce": lambda lane, full, part: lane.reduce_scatter(part, full, label="calibration"),
    "replicate": lambda lane, full, part: lane.all_reduce(full, label="calibration"),
}


def _dropping(param: paddle.Tensor) -> Callable[[], None]:
    def drop() -> None:
        param.clear_gradient(False)

    return drop


# -- what comes of it --------------------------------------------------------------------------------------------------


def conclude(turns: Sequence[Sequence[Calibration]], shard_ranks: int, replicas: int) -> tuple[Measured, Hardware]:
    """Medians over turns; of each the slower rank, since the others wait for it."""
    slowest = [max(ranks, key=lambda rank: rank.alone_s) for ranks in turns]
    names = list(slowest[0].small_s)
    sizes = {"gather": shard_ranks, "reduce": shard_ranks, "replicate": replicas}
    links = {name: _link(slowest, name, sizes[name]) for name in names}
    middle = sorted(slowest, key=lambda rank: rank.alone_s)[len(slowest) // 2]
    assert middle.measured is not None
    hardware = Hardware(
        shard=links["gather"],
        reduce=links["reduce"],
        replicate=links.get("replicate"),
        compute_slowdown={name: max(1.0, statistics.median(rank.slowdown[name] for rank in slowest)) for name in names},
        wire_slowdown={
            name: max(1.0, statistics.median(rank.carried_s[name] / rank.large_s[name] for rank in slowest))
            for name in names
        },
        launch_s=statistics.median(rank.launch_s for rank in slowest),
        update_bytes_s=middle.measured.update_bytes_s,
        copy_bytes_s=middle.measured.copy_bytes_s,
    )
    return middle.measured, hardware


def _link(ranks: Sequence[Calibration], name: str, nranks: int) -> Link:
    small_s = statistics.median(rank.small_s[name] for rank in ranks)
    large_s = statistics.median(rank.large_s[name] for rank in ranks)
    hops = (2 if name == "replicate" else 1) * (nranks - 1)
    sent = 4 * hops / nranks
    bandwidth = sent * (_LARGE_NUMEL - _SMALL_NUMEL) / (large_s - small_s)
    return Link(bandwidth, max(small_s - sent * _SMALL_NUMEL / bandwidth, 0.0) / hops)
