"""What steps and runs come to, on traces that are small enough to be summed up by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_sharding.trace.figures import (
    BUSY_LANES,
    Groups,
    only_steps,
    over_steps,
    spans_by_step,
    stands_out,
    step_figures,
    summary,
    union,
)
from hp_sharding.trace.spans import Span, Step, Trace
from tests.traces import BUCKET_BYTES, Run, make


def _span(lane: str, start_ms: float, end_ms: float, label: str = "0:net", nbytes: int = 0, layer: str = "net") -> Span:
    return Span(0, lane, label, start_ms / 1e3, end_ms / 1e3, nbytes, layer)


def _step(start_ms: float, end_ms: float, number: int = 0, rank: int = 0, **figures: float) -> Step:
    return Step(rank, number, start_ms / 1e3, end_ms / 1e3, figures)


STEP = [
    _span("compute", 0, 40, "forward"),
    _span("compute", 10, 30, "forward", layer="net.0"),
    _span("compute", 40, 100, "backward"),
    _span("gather", 0, 10, nbytes=8_000_000),
    _span("gather", 5, 20, nbytes=8_000_000),
    _span("gather", 30, 40, nbytes=4_000_000),
    _span("reduce", 50, 90, nbytes=20_000_000),
    _span("replicate", 60, 80, nbytes=10_000_000),
    _span("wait", 30, 34),
    _span("wait", 32, 36, layer="net.0"),
    _span("wait", 98, 100, "1:net", layer=""),
]


def test_a_step_by_hand() -> None:
    found = step_figures(STEP, _step(0, 100, 7, peak_bytes=5.0), Groups(4, 2))
    assert (found["rank"], found["step"], found["peak_bytes"]) == (0, 7, 5.0)
    # The waits from 30 to 36 overlap, and so do the gathers from 0 to 20.
    assert found["exposed_ms"] == pytest.approx(8)
    assert found["compute_ms"] == pytest.approx(92)
    assert [found[f"{lane}_ms"] for lane in BUSY_LANES] == pytest.approx([30, 40, 20, 0])
    assert [found[f"{lane}_bytes"] for lane in BUSY_LANES] == [20_000_000, 20_000_000, 10_000_000, 0]
    # Of what went on from 0 to 20, 30 to 40 and 50 to 90 the waits from 30 to 36 are not hidden.
    assert (found["busy_ms"], found["hidden_ms"]) == pytest.approx((70, 64))
    assert found["overlap_percent"] == pytest.approx(100 * 64 / 70)
    # A rank sends three quarters of what four gather; of what two all-reduce, each sends the whole.
    assert found["gather_gb_s"] == pytest.approx(0.75 * 20e6 / 30e-3 / 1e9)
    assert found["reduce_gb_s"] == pytest.approx(0.75 * 20e6 / 40e-3 / 1e9)
    assert found["replicate_gb_s"] == pytest.approx(10e6 / 20e-3 / 1e9)
    # Of the forward 6 ms were waits, of the backward 2.
    assert found["phases_ms"] == pytest.approx({"forward": 34, "backward": 58})
    assert found["exposed_ms_by_layer"] == pytest.approx({"net": 4, "net.0": 4, "1:net": 2})


def test_an_empty_step_is_all_hidden() -> None:
    found = step_figures([], _step(0, 10))
    assert (found["exposed_ms"], found["compute_ms"], found["overlap_percent"]) == (0, 10, 100)
    assert found["gather_gb_s"] == 0


def test_more_exposed_than_busy_is_no_overlap_below_zero() -> None:
    found = step_figures([_span("wait", 0, 8), _span("gather", 0, 2)], _step(0, 10))
    assert found["overlap_percent"] == 0


def test_a_span_belongs_to_the_step_in_which_it_ends() -> None:
    spans = [_span("gather", 0, 10), _span("gather", 5, 11), _span("gather", 20, 21), _span("gather", 30, 31)]
    # Between 20 and 25 there is no step, and none after 30.
    trace = Trace(spans, [_step(25, 30, 2), _step(0, 10, 0), _step(10, 20, 1)])
    found = spans_by_step(trace)
    assert found == {(0, 0): [spans[0]], (0, 1): [spans[1]], (0, 2): []}
    assert only_steps(trace, [1, 2]) == Trace([spans[1]], [trace.steps[0], trace.steps[2]])


def test_over_steps_there_are_medians_totals_and_the_largest() -> None:
    steps = [
        step_figures([_span("gather", 0, busy, nbytes=1_000_000), _span("wait", 0, exposed, layer=layer)],
                     _step(0, ms, peak_bytes=peak, wrong_guesses=1.0))
        for ms, busy, exposed, layer, peak in [(10, 4, 1, "a", 7.0), (30, 6, 2, "b", 9.0), (20, 10, 3, "b", 8.0)]
    ]  # fmt: skip
    found = over_steps(steps)
    assert (found["steps"], found["step_ms"], found["peak_bytes"], found["wrong_guesses"]) == (3, 20, 9.0, 3.0)
    assert (found["gather_ms"], found["exposed_ms"]) == pytest.approx((6, 2))
    assert (found["busy_ms"], found["hidden_ms"]) == pytest.approx((6, 4))
    assert found["overlap_percent"] == pytest.approx(100 * 4 / 6)
    assert found["gather_gb_s"] == pytest.approx(3e6 / 20e-3 / 1e9)
    assert found["exposed_ms_by_layer"] == pytest.approx({"a": 1 / 3, "b": 5 / 3})
    assert list(found["exposed_ms_by_layer"]) == ["b", "a"], "the longest first"
    assert "rank" not in found
    assert over_steps([])["step_ms"] == 0


def test_the_summary_of_an_imagined_run() -> None:
    run = Run(n_layers=4, n_ranks=2, replicas=2, n_steps=3, forward_ms=10, gather_ms=8, slow_rank=3)
    found = summary(make(run))
    assert (found["ranks"], found["slowest_rank"], stands_out(found)) == ([0, 1, 2, 3], 3, 3)
    assert [(step["step"], step["rank"]) for step in found["steps"]][:5] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    mine = found["by_rank"][0]
    # Forward, twice that for backward, and a tenth for the updates.
    assert mine["compute_ms"] == pytest.approx(4 * 31)
    assert found["by_rank"][3]["compute_ms"] == pytest.approx(4 * 31 * 1.2)
    assert (mine["reduce_ms"], mine["replicate_ms"]) == pytest.approx((32, 16))
    assert mine["reduce_bytes"] == 4 * BUCKET_BYTES
    assert mine["reduce_gb_s"] == pytest.approx(0.5 * 4 * BUCKET_BYTES / 32e-3 / 1e9)
    assert found["run"]["steps"] == 12
    assert (found["run"]["peak_bytes"], found["run"]["wrong_guesses"]) == (1e8 + 2, 0)
    assert mine["step_ms"] == pytest.approx(mine["compute_ms"] + mine["exposed_ms"])


def test_nobody_stands_out_where_all_are_alike() -> None:
    assert stands_out(summary(make(Run(n_layers=1)))) is None
    assert stands_out(summary(make(Run(n_ranks=1)))) is None
    assert summary(Trace())["slowest_rank"] is None


_INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=8)


def _covered(intervals: list[tuple[int, int]]) -> set[int]:
    return {moment for start, length in intervals for moment in range(start, start + length)}


@given(_INTERVALS, _INTERVALS)
def test_unions_and_what_waits_take_from_phases_are_those_of_sets(
    compute: list[tuple[int, int]], waits: list[tuple[int, int]]
) -> None:
    spans = [Span(0, "compute", "forward", start, start + length) for start, length in compute]
    spans += [Span(0, "wait", "", start, start + length) for start, length in waits]
    found = step_figures(spans, Step(0, 0, 0, 50, {}))
    assert found["exposed_ms"] == len(_covered(waits)) * 1e3
    carried = [("gather", compute[::2]), ("reduce", compute[1::2])]
    lanes = [Span(0, lane, "", start, start + length) for lane, some in carried for start, length in some]
    hidden = step_figures([*lanes, *spans], Step(0, 0, 0, 50, {}))
    assert hidden["busy_ms"] == len(_covered(compute)) * 1e3
    assert hidden["hidden_ms"] == len(_covered(compute) - _covered(waits)) * 1e3
    if compute:
        assert found["phases_ms"]["forward"] == len(_covered(compute) - _covered(waits)) * 1e3
    joined = union(spans)
    assert all(end < later for (_, end), (later, _) in itertools.pairwise(joined))
    assert math.fsum(end - start for start, end in joined) == len(_covered(compute + waits))
