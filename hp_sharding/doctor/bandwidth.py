"""How fast collectives are, by size: small ones show the latency, large ones the bandwidth.

They run over all ranks; with four or more, all-reduces between the replicas of two halves are timed as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import paddle

from ..comm import Communicator
from .links import Fit, Point, fit, sent_share
from .parity import groups
from .ranks import Team
from .report import MB, Request, Spread

OPS = ("all_gather", "reduce_scatter", "all_reduce")
REPLICAS = 2
"""That each pair of an all-reduce between replicas stands for."""
_SMALLEST_BYTES = 4096
_GROWTH = 8
_BUDGET_MS = {False: 400.0, True: 100.0}
"""For the repeats of one collective of one size."""
_LEAST, _MOST = 3, 20


class Row(NamedTuple):
    """One collective of one size.

    Attributes:
        op: one of ``OPS``.
        nbytes: of the whole message.
        repeats: how often it was timed.
        ms: until its result could be used, on the slowest rank.
        algorithm_gb_s: 10**9 bytes of the message a second.
        bus_gb_s: 10**9 bytes that leave each rank at least, a second: what to hold against the speed of a link.
    """

    op: str
    nbytes: int
    repeats: int
    ms: Spread
    algorithm_gb_s: float
    bus_gb_s: float


class Bandwidth(NamedTuple):
    """All that was timed.

    Attributes:
        rows: by collective and size.
        n_ranks: that these join.
        replicas: all-reduces between replicas, by size; empty where there are too few ranks for them.
    """

    rows: list[Row]
    n_ranks: int = 2
    replicas: Sequence[Row] = ()

    @property
    def passed(self) -> bool:
        """Always: slow is not wrong."""
        return True

    @property
    def latency_ms(self) -> float:
        """Of the smallest message, the slowest collective."""
        smallest = min(row.nbytes for row in self.rows)
        return max(row.ms.median for row in self.rows if row.nbytes == smallest)

    @property
    def verdict(self) -> str:
        """In one sentence."""
        best = {op: max(row.bus_gb_s for row in self.rows if row.op == op) for op in OPS}
        rates = ", ".join(f"{op} {rate:.3g}" for op, rate in best.items())
        return f"at best {rates} GB/s a rank; a small collective takes {self.latency_ms:.2g} ms"

    @property
    def links(self) -> list[Fit]:
        """As the lanes of a training see them."""
        found = [
            _fit(op, self.n_ranks, [row for row in self.rows if row.op == op])
            for op in ("all_gather", "reduce_scatter")
        ]
        return [each for each in (*found, _fit("all_reduce", REPLICAS, self.replicas)) if each is not None]


def _fit(op: str, n_ranks: int, rows: Sequence[Row]) -> Fit | None:
    return fit(op, n_ranks, [Point(row.nbytes * sent_share(op, n_ranks), row.ms.median / 1e3) for row in rows])


def measure(team: Team, request: Request) -> list[dict[str, Any]]:
    """Milliseconds of each repeat on this rank, for every collective and size."""
    (lane,) = team.open("gather")
    found = _measure(team, lane, OPS, request)
    if team.has_replicas:
        pair = groups(team.me, team.n_ranks, REPLICAS)["replicate_group"]
        (lane,) = team.open("replicate", ranks=pair)
        found += [{**row, "replicas": True} for row in _measure(team, lane, ("all_reduce",), request)]
    team.line_up()
    return found


def _measure(team: Team, lane: Communicator, ops: tuple[str, ...], request: Request) -> list[dict[str, Any]]:
    found = []
    for nbytes in sizes(request.max_mb):
        # As many elements as every rank can have the same number of, one at least.
        numel = max(nbytes // 4 // lane.nranks, 1) * lane.nranks
        actions = _actions(lane, numel)
        for op in ops:
            ms = _repeat(team, actions[op], _BUDGET_MS[request.quick])
            found.append({"op": op, "nbytes": numel * 4, "ms": ms})
    return found


def conclude(everyone: list[list[dict[str, Any]]]) -> Bandwidth:
    """The slowest rank of each repeat."""
    rows: list[Row] = []
    replicas: list[Row] = []
    for of_ranks in zip(*everyone, strict=True):
        is_replicated = of_ranks[0].get("replicas", False)
        row = _row(of_ranks, n_ranks=REPLICAS if is_replicated else len(everyone))
        (replicas if is_replicated else rows).append(row)
    rows.sort(key=lambda row: (OPS.index(row.op), row.nbytes))
    return Bandwidth(rows, len(everyone), sorted(replicas, key=lambda row: row.nbytes))


def _row(of_ranks: Sequence[dict[str, Any]], *, n_ranks: int) -> Row:
    slowest = [max(times) for times in zip(*(row["ms"] for row in of_ranks), strict=True)]
    op, nbytes = of_ranks[0]["op"], of_ranks[0]["nbytes"]
    ms = Spread.of(slowest)
    algorithm_gb_s = nbytes / 1e6 / ms.median
    return Row(op, nbytes, len(slowest), ms, algorithm_gb_s, algorithm_gb_s * sent_share(op, n_ranks))


def sizes(max_mb: float) -> list[int]:
    """Bytes of the messages, growing up to the largest."""
    largest = int(max_mb * MB)
    found = []
    nbytes = _SMALLEST_BYTES
    while nbytes < largest:
        found.append(nbytes)
        nbytes *= _GROWTH
    return [*found, largest]


def _actions(lane: Communicator, numel: int) -> dict[str, Callable[[], None]]:
    full = paddle.zeros([numel], "float32")
    part_numel = numel // lane.nranks
    own = full._slice(lane.rank * part_numel, (lane.rank + 1) * part_numel)
    result = paddle.zeros([part_numel], "float32")
    return {
        "all_gather": lambda: lane.all_gather(full, own, label="doctor").wait(),
        "reduce_scatter": lambda: lane.reduce_scatter(result, full, label="doctor").wait(),
        "all_reduce": lambda: lane.all_reduce(full, label="doctor").wait(),
    }


def _repeat(team: Team, action: Callable[[], None], budget_ms: float) -> list[float]:
    team.time_ms(action)
    once_ms = team.agree(team.time_ms(action))
    repeats = int(min(max(budget_ms / max(once_ms, 1e-3), _LEAST), _MOST))
    return [team.time_ms(action) for _ in range(repeats)]
