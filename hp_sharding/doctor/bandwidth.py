"""How fast collectives are, by size: small ones show the latency, large ones the bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import paddle

from ..comm import Communicator
from .ranks import Team
from .report import MB, Request, Spread

OPS = ("all_gather", "reduce_scatter", "all_reduce")
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
    """

    rows: list[Row]

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


def measure(team: Team, request: Request) -> list[dict[str, Any]]:
    """Milliseconds of each repeat on this rank, for every collective and size."""
    (lane,) = team.open("gather")
    found = []
    for nbytes in sizes(request.max_mb):
        # As many elements as every rank can have the same number of, one at least.
        numel = max(nbytes // 4 // team.n_ranks, 1) * team.n_ranks
        for op, action in _actions(lane, numel).items():
            found.append({"op": op, "nbytes": numel * 4, "ms": _repeat(team, action, _BUDGET_MS[request.quick])})
    team.line_up()
    return found


def conclude(everyone: list[list[dict[str, Any]]]) -> Bandwidth:
    """The slowest rank of each repeat."""
    rows = []
    for of_ranks in zip(*everyone, strict=True):
        slowest = [max(times) for times in zip(*(row["ms"] for row in of_ranks), strict=True)]
        op, nbytes = of_ranks[0]["op"], of_ranks[0]["nbytes"]
        ms = Spread.of(slowest)
        algorithm_gb_s = nbytes / 1e6 / ms.median
        bus_gb_s = algorithm_gb_s * sent_share(op, len(everyone))
        rows.append(Row(op, nbytes, len(slowest), ms, algorithm_gb_s, bus_gb_s))
    return Bandwidth(sorted(rows, key=lambda row: (OPS.index(row.op), row.nbytes)))


def sizes(max_mb: float) -> list[int]:
    """Bytes of the messages, growing up to the largest."""
    largest = int(max_mb * MB)
    found = []
    nbytes = _SMALLEST_BYTES
    while nbytes < largest:
        found.append(nbytes)
        nbytes *= _GROWTH
    return [*found, largest]


def sent_share(op: str, n_ranks: int) -> float:
    """The least that leaves each rank, as a share of the whole message."""
    return (2 if op == "all_reduce" else 1) * (n_ranks - 1) / n_ranks


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
