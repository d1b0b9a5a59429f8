"""Whether collectives run behind compute, or inside the call that starts them, and what each costs the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import paddle

from ..comm import Communicator, Work
from .bandwidth import REPLICAS
from .links import LANES
from .parity import groups
from .ranks import Team
from .report import MB, Request, Spread

LAUNCH_SHARE = 0.5
"""Of the time that a collective takes, that the call which starts it may take if it is to count as asynchronous."""
TOO_SHORT_MS = 1.0
"""A collective that is over sooner says nothing about that."""
_MOST_MS = 100.0
_ROWS, _WIDTH = 256, 512
_TIMES = (
    "launch_ms", "done_ms", "compute_ms", "beside_ms", "both_ms", "under_load_ms", "transfer_ms", "transfer_beside_ms",
)  # fmt: skip
_QUEUED = 3
"""Collectives, one after the other, that keep a lane busy for as long as compute of the length of one takes."""
_END_S = 1.0
"""How long to wait until a device has been seen to end a collective."""
_REPEATS = {False: 5, True: 3}


class Row(NamedTuple):
    """One kind of collective, with compute of about the same length; times are those of the rank that took longest.

    Attributes:
        op: ``"all_gather"``, ``"reduce_scatter"``, or ``"all_reduce"`` between replicas.
        mb: size of the whole message, in units of 2**20 bytes.
        launch_ms: until the call that starts it returned.
        done_ms: until its result could be used, with nothing else to do.
        compute_ms: some matrix products alone.
        beside_ms: the same while the collective was under way.
        both_ms: until both were done.
        under_load_ms: the same compute while one collective after the other was under way, to its end.
        transfer_ms: of a collective alone, what it took once its turn had come.
        transfer_beside_ms: the same while compute ran beside it, to its end.
    """

    op: str
    mb: float
    launch_ms: Spread
    done_ms: Spread
    compute_ms: Spread
    beside_ms: Spread
    both_ms: Spread
    under_load_ms: Spread
    transfer_ms: Spread
    transfer_beside_ms: Spread

    @property
    def lane(self) -> str:
        """Of a training, that carries such collectives."""
        return LANES.get(self.op, "replicate")

    @property
    def slowdown(self) -> float:
        """How many times longer compute of its length takes beside it."""
        return self.beside_ms.median / self.compute_ms.median

    @property
    def compute_slowdown(self) -> float:
        """How many times longer compute takes while the lane is busy all the time."""
        return self.under_load_ms.median / self.compute_ms.median

    @property
    def wire_slowdown(self) -> float:
        """How many times longer a collective takes while compute runs all the time."""
        return self.transfer_beside_ms.median / max(self.transfer_ms.median, 1e-6)

    @property
    def tells_wire_slowdown(self) -> bool:
        """Whether transfers are long enough for that: of short ones it is noise."""
        return self.transfer_ms.median >= TOO_SHORT_MS

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
        backend: what carries them.
        flops_s: floating-point operations a second of the matrix products alone, on the slowest rank.
    """

    rows: list[Row]
    backend: str = ""
    flops_s: float | None = None

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
        by = f" by {self.backend}" if self.backend else ""
        blocking = [row.op for row in self.rows if not row.is_asynchronous]
        if blocking:
            return (
                f"NOT asynchronous: the call of {' and '.join(blocking)}{by} returns only when it is nearly over, so "
                "nothing can be hidden behind compute"
            )
        slower = " and ".join(f"{row.slowdown:.2g}" for row in self.rows)
        hidden = " and ".join(f"{row.hidden_percent:.0f}" for row in self.rows)
        return (
            f"asynchronous: calls of collectives{by} return at once, and compute goes on meanwhile; beside them it "
            f"takes {slower} times as long, and of the shorter of both {hidden} % are hidden"
        )


def measure(team: Team, request: Request) -> list[dict[str, Any]]:
    """Milliseconds of each repeat on this rank."""
    gather, reduce = team.open("gather", "reduce")
    numel = _fitting_numel(team, gather, request)
    starts = _starts(gather, reduce, numel)
    if team.has_replicas:
        (replicate,) = team.open("replicate", ranks=groups(team.me, team.n_ranks, REPLICAS)["replicate_group"])
        total = paddle.zeros([numel], "float32")
        starts["all_reduce"] = lambda: replicate.all_reduce(total, label="doctor")
    return [{"op": op, "mb": numel * 4 / MB, **_measure(team, start, request)} for op, start in starts.items()]


def conclude(everyone: list[list[dict[str, Any]]], backend: str = "") -> Asynchrony:
    """Each time on the rank where its median is largest."""
    rows = []
    for of_ranks in zip(*everyone, strict=True):
        # Not the slowest of each repeat: with more ranks than cores one or the other is always held up.
        slowest = {name: max(Spread.of(row[name]) for row in of_ranks) for name in _TIMES}
        rows.append(Row(of_ranks[0]["op"], of_ranks[0]["mb"], **slowest))
    return Asynchrony(rows, backend, min(row["flops_s"] for rows in everyone for row in rows))


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


def _measure(team: Team, start: Callable[[], Work], request: Request) -> dict[str, Any]:
    team.time_ms(lambda: start().wait())
    compute = _Compute(team, team.time_ms(lambda: start().wait()))
    found: dict[str, list[float]] = {name: [] for name in _TIMES}
    for _ in range(_REPEATS[request.quick]):
        times = {"compute_ms": team.time_ms(compute), "under_load_ms": _under_load(team, start, compute)}
        times |= _alone(team, start) | _together(team, start, compute) | _beside_compute(team, start, compute)
        for name, ms in times.items():
            found[name].append(ms)
    team.line_up()
    return {**found, "flops_s": compute.n_flops / min(found["compute_ms"]) * 1e3}


def _alone(team: Team, start: Callable[[], Work]) -> dict[str, float]:
    team.line_up()
    begin_s = time.perf_counter()
    work = start()
    launched_s = time.perf_counter()
    work.wait()
    team.settle()
    done_s = time.perf_counter()
    times = {"launch_ms": launched_s - begin_s, "done_ms": done_s - begin_s, "transfer_ms": _transfer_s(work, begin_s)}
    return {name: seconds * 1e3 for name, seconds in times.items()}


def _together(team: Team, start: Callable[[], Work], compute: _Compute) -> dict[str, float]:
    team.line_up()
    begin_s = time.perf_counter()
    work = start()
    compute_s = time.perf_counter()
    compute()
    team.settle()
    computed_s = time.perf_counter()
    work.wait()
    team.settle()
    return {"beside_ms": (computed_s - compute_s) * 1e3, "both_ms": (time.perf_counter() - begin_s) * 1e3}


def _under_load(team: Team, start: Callable[[], Work], compute: _Compute) -> float:
    """Milliseconds of compute, while the lane has more to do than it can get done."""
    team.line_up()
    works = [start() for _ in range(_QUEUED)]
    begin_s = time.perf_counter()
    compute()
    team.settle()
    took_ms = (time.perf_counter() - begin_s) * 1e3
    for work in works:
        work.wait()
    return took_ms


def _beside_compute(team: Team, start: Callable[[], Work], compute: _Compute) -> dict[str, float]:
    """Of a collective, while compute lasts longer."""
    team.line_up()
    begin_s = time.perf_counter()
    work = start()
    for _ in range(_QUEUED):
        # Where compute keeps the interpreter to itself nobody else would see the end.
        compute(work.done)
    transfer_s = _transfer_s(work, begin_s)
    team.settle()
    work.wait()
    return {"transfer_beside_ms": transfer_s * 1e3}


def _transfer_s(work: Work, begin_s: float) -> float:
    """From where it was started to its end."""
    deadline_s = time.perf_counter() + _END_S
    while not (work.done() and work.end_s is not None) and time.perf_counter() < deadline_s:
        time.sleep(1e-4)
    return (work.end_s or time.perf_counter()) - begin_s


class _Compute:
    """Matrix products that take about ``wanted_ms`` on this rank."""

    def __init__(self, team: Team, wanted_ms: float) -> None:
        self._left = paddle.ones([_ROWS, _WIDTH], "float32")
        self._right = paddle.ones([_WIDTH, _WIDTH], "float32")
        self._n_products = 4
        self()
        per_product_ms = team.time_ms(self) / self._n_products
        self._n_products = max(1, round(wanted_ms / per_product_ms))
        self.n_flops = 2 * _ROWS * _WIDTH * _WIDTH * self._n_products

    def __call__(self, between: Callable[[], object] = lambda: None) -> None:
        for _ in range(self._n_products):
            paddle.matmul(self._left, self._right)
            between()
