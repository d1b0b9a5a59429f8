"""Latency and bandwidth of the links between the ranks, fitted to what collectives of several sizes took.

``time = hops * latency + sent bytes / bandwidth``: over n ranks an all-gather or a reduce-scatter has n - 1 hops and
sends (n-1)/n of the message, an all-reduce twice that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..plan.hardware import Hardware, Link

LANES = {"all_gather": "gather", "reduce_scatter": "reduce"}
"""Of a training, by the collective that they carry; all-reduces between replicas are its ``replicate``."""


class Point(NamedTuple):
    """One size.

    Attributes:
        sent_bytes: by each rank, at least.
        seconds: that it took.
    """

    sent_bytes: float
    seconds: float


class Fit(NamedTuple):
    """One link, seen from one lane.

    Attributes:
        lane: "gather", "reduce" or "replicate".
        n_ranks: that the lane joins.
        latency_ms: of one hop, with all that a collective costs whatever its size.
        gb_s: 10**9 bytes a second that leave each rank.
        error_percent: by how much the formula is off at the size where it is worst.
    """

    lane: str
    n_ranks: int
    latency_ms: float
    gb_s: float
    error_percent: float

    @property
    def link(self) -> Link:
        """As a plan has it."""
        return Link(self.gb_s * 1e9, self.latency_ms / 1e3)


def sent_share(op: str, n_ranks: int) -> float:
    """The least that leaves each rank, as a share of the whole message."""
    return (2 if op == "all_reduce" else 1) * (n_ranks - 1) / n_ranks


def fit(op: str, n_ranks: int, points: Sequence[Point]) -> Fit | None:
    """The line through the points that is off by the least share of each; None with fewer than two sizes.

    Small messages count as much as large ones, so that there is a latency where the largest ones take seconds.
    """
    if len({point.sent_bytes for point in points}) < 2:
        return None
    start_s, per_byte_s = _line(points)
    largest = max(points)
    if start_s < 0 or per_byte_s <= 0:
        # The largest alone say the bandwidth, the smallest then the latency: there is no line with both.
        start_s = 0.0 if start_s < 0 else min(point.seconds for point in points)
        per_byte_s = max(largest.seconds - start_s, 0.01 * largest.seconds) / largest.sent_bytes
    hops = (2 if op == "all_reduce" else 1) * (n_ranks - 1)
    error = max(abs(start_s + per_byte_s * point.sent_bytes - point.seconds) / point.seconds for point in points)
    return Fit(LANES.get(op, "replicate"), n_ranks, start_s / hops * 1e3, 1 / per_byte_s / 1e9, 100 * error)


def hardware(results: Mapping[str, Any]) -> Hardware | None:
    """What a plan can use of the checks' results; None where links were not measured, or of one size only."""
    bandwidth, asynchrony = results.get("bandwidth"), results.get("asynchrony")
    fits = {found.lane: found for found in bandwidth.links} if bandwidth is not None else {}
    if "gather" not in fits:
        return None
    rows = {row.lane: row for row in asynchrony.rows} if asynchrony is not None else {}
    return Hardware(
        shard=fits["gather"].link,
        reduce=fits["reduce"].link if "reduce" in fits else None,
        replicate=fits["replicate"].link if "replicate" in fits else None,
        compute_slowdown={lane: max(1.0, row.compute_slowdown) for lane, row in rows.items()},
        wire_slowdown={lane: max(1.0, row.wire_slowdown) for lane, row in rows.items() if row.tells_wire_slowdown},
        launch_s=max((row.launch_ms.median for row in rows.values()), default=0.0) / 1e3,
        flops_s=asynchrony.flops_s if asynchrony is not None else None,
    )


def _line(points: Sequence[Point]) -> tuple[float, float]:
    """Beginning and slope, least squares of shares: each point weighs as the square of one over its seconds."""
    weights = [1 / point.seconds**2 for point in points]
    total = sum(weights)
    mean_x = sum(weight * point.sent_bytes for weight, point in zip(weights, points, strict=True)) / total
    mean_y = sum(weight * point.seconds for weight, point in zip(weights, points, strict=True)) / total
    spread = sum(weight * (point.sent_bytes - mean_x) ** 2 for weight, point in zip(weights, points, strict=True))
    common = sum(
        weight * (point.sent_bytes - mean_x) * (point.seconds - mean_y)
        for weight, point in zip(weights, points, strict=True)
    )
    slope = common / spread
    return mean_y - slope * mean_x, slope
