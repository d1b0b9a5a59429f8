"""Whether collectives run behind compute, or inside the call that starts them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import paddle

from ..comm import Communicator, Work
from .ranks import Team
from .report import MB, Request, Spread

LAUNCH_SHARE = 0.5
"""Of the time that a collective takes, that the call which starts it may take if it is to count as asynchronous."""
TOO_SHORT_MS = 1.0
"""A collective that is over sooner says nothing about that."""
_MOST_MS = 100.0
_ROWS, _WIDTH = 256, 512
_TIMES = ("launch_ms", "done_ms", "compute_ms", "beside_ms", "both_ms")
_REPEATS = {False: 5, True: 3}


class Row(NamedTuple):
    """One kind of collective, with compute of about the same length; times are those of the rank that took longest.

    Attributes:
        op: ``"all_gather"`` or ``"reduce_scatter"``.
        mb: size of the whole message, in units of 2**20 bytes.
        launch_ms: until the call that starts it returned.
        done_ms: until its result could be used, with nothing else to do.
        compute_ms: some matrix products alone.
        beside_ms: the same while the collective was under way.
        both_ms: until both were done.
    """

    op: str
    mb: float
    launch_ms: Spread
    done_ms: Spread
    compute_ms: Spread
    beside_ms: Spread
    both_ms: Spread

    @property
    def slowdown(self) -> float:
        """How many times longer compute takes while the collective is under way."""
        return self.beside_ms.median / self.compute_ms.median

    @property
    def hidden_percent(self) -> float:
        """The part of the shorter of the two that was hidden behind the other."""
        shorter = min(self.done_ms.median, self.compute_ms.median)
        hidden = self.done_ms.median + self.compute_ms.median - self.both_ms.median
        return 100 * min(1.0, max(0.0, hidden / shorter))

    @property
    def is_asynchronous(self) -> bool | None:
        """None where it was too short to tell."""
        if self.done_ms.median < TOO_SHORT_MS:
            return None
        return self.launch_ms.median <= LAUNCH_SHARE * self.done_ms.median


class Asynchrony(NamedTuple):
    """What was found of each kind.

    Attributes:
        rows: of each.
    """

    rows: list[Row]

    @property
    def passed(self) -> bool:
        """Always: slow is not wrong."""
        return True

    @property
    def verdict(self) -> str:
        """In one sentence."""
        found = [row.is_asynchronous for row in self.rows]
        if None in found:
            return "too short to tell; try a larger --max-mb"
        blocking = [row.op for row in self.rows if not row.is_asynchronous]
        if blocking:
            return f"NOT asynchronous: the call of {' and '.join(blocking)} returns only when it is nearly over"
        slower = " and ".join(f"{row.slowdown:.2g}" for row in self.rows)
        hidden = " and ".join(f"{row.hidden_percent:.0f}" for row in self.rows)
        return (
            f"asynchronous: calls return at once; compute beside them takes {slower} times as long, and of the shorter "
            f"of both {hidden} % are hidden"
        )


def measure(team: Team, request: Request) -> list[dict[str, Any]]:
    """Milliseconds of each repeat on this rank."""
    gather, reduce = team.open("gather", "reduce")
    numel = _fitting_numel(team, gather, request)
    return [
        {"op": op, "mb": numel * 4 / MB, **_measure(team, start, request)}
        for op, start in _starts(gather, reduce, numel).items()
    ]


def conclude(everyone: list[list[dict[str, Any]]]) -> Asynchrony:
    """Each time on the rank where its median is largest."""
    rows = []
    for of_ranks in zip(*everyone, strict=True):
        # Not the slowest of each repeat: with more ranks than cores one or the other is always held up.
        slowest = {name: max(Spread.of(row[name]) for row in of_ranks) for name in _TIMES}
        rows.append(Row(of_ranks[0]["op"], of_ranks[0]["mb"], **slowest))
    return Asynchrony(rows)


def _fitting_numel(team: Team, gather: Communicator, request: Request) -> int:
    """Of a message that takes no longer than ``_MOST_MS``, if it may be that large. Collective."""

    def whole(numel: float) -> int:
        return max(int(numel) // team.n_ranks, 1) * team.n_ranks

    most = request.max_mb * MB / 4
    probe = whole(most / 8)
    start = _starts(gather, gather, probe)["all_gather"]
    team.time_ms(lambda: start().wait())
    probe_ms = team.agree(team.time_ms(lambda: start().wait()))
    return whole(min(most, probe * _MOST_MS / max(probe_ms, 1e-3)))


def _starts(gather: Communicator, reduce: Communicator, numel: int) -> dict[str, Callable[[], Work]]:
    full = paddle.zeros([numel], "float32")
    shard_numel = numel // gather.nranks
    own = full._slice(gather.rank * shard_numel, (gather.rank + 1) * shard_numel)
    result = paddle.zeros([shard_numel], "float32")
    return {
        "all_gather": lambda: gather.all_gather(full, own, label="doctor"),
        "reduce_scatter": lambda: reduce.reduce_scatter(result, full, label="doctor"),
    }


def _measure(team: Team, start: Callable[[], Work], request: Request) -> dict[str, list[float]]:
    team.time_ms(lambda: start().wait())
    compute = _Compute(team, team.time_ms(lambda: start().wait()))
    found: dict[str, list[float]] = {name: [] for name in _TIMES}
    for _ in range(_REPEATS[request.quick]):
        launch_ms, done_ms = _alone(team, start)
        found["launch_ms"].append(launch_ms)
        found["done_ms"].append(done_ms)
        found["compute_ms"].append(team.time_ms(compute))
        beside_ms, both_ms = _together(team, start, compute)
        found["beside_ms"].append(beside_ms)
        found["both_ms"].append(both_ms)
    team.line_up()
    return found


def _alone(team: Team, start: Callable[[], Work]) -> tuple[float, float]:
    """Milliseconds until the call returned, and until the result was there."""
    team.line_up()
    begin_s = time.perf_counter()
    work = start()
    launched_s = time.perf_counter()
    work.wait()
    team.settle()
    return (launched_s - begin_s) * 1e3, (time.perf_counter() - begin_s) * 1e3


def _together(team: Team, start: Callable[[], Work], compute: _Compute) -> tuple[float, float]:
    """Milliseconds of the compute, and until both were done."""
    team.line_up()
    begin_s = time.perf_counter()
    work = start()
    compute_s = time.perf_counter()
    compute()
    team.settle()
    computed_s = time.perf_counter()
    work.wait()
    team.settle()
    return (computed_s - compute_s) * 1e3, (time.perf_counter() - begin_s) * 1e3


class _Compute:
    """Matrix products that take about ``wanted_ms`` on this rank."""

    def __init__(self, team: Team, wanted_ms: float) -> None:
        self._left = paddle.ones([_ROWS, _WIDTH], "float32")
        self._right = paddle.ones([_WIDTH, _WIDTH], "float32")
        self._n_products = 4
        self()
        per_product_ms = team.time_ms(self) / self._n_products
        self._n_products = max(1, round(wanted_ms / per_product_ms))

    def __call__(self) -> None:
        for _ in range(self._n_products):
            paddle.matmul(self._left, self._right)
