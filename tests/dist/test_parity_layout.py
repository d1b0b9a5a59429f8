"""What may change no bit: overlap, depth, stage, a second run, and on two ranks the layout of the buckets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import harness
from tests.lanes import Call
from tests.reference import assert_all_equal, assert_close, assert_equal
from tests.sides import SMALL_MB
from tests.training import Case, RankRun, train_all

STEPS = 5
LAYOUT = {"comm_buffer_size_MB": 0.002}
SAME_LAYOUT: list[dict[str, Any]] = [
    {"stage": 2},
    {"stage": 2, "reduce_overlap": True},
    {"stage": 2, "allgather_overlap": True},
    {"stage": 2, "allgather_overlap": True, "reduce_overlap": True, "timeline": True},
    {"stage": 1},
    {"stage": 1, "allgather_overlap": True, "reduce_overlap": True},
    {"stage": 2, "reshard_after_step": True},
    {"stage": 2, "reshard_after_step": True, "allgather_overlap": True, "reduce_overlap": True, "prefetch_depth": 0},
    {"stage": 1, "reshard_after_step": True, "allgather_overlap": True, "reduce_overlap": True, "prefetch_depth": 1},
    {"stage": 2, "reshard_after_step": True, "allgather_overlap": True, "reduce_overlap": True, "prefetch_depth": 3},
]
OTHER_LAYOUTS: list[dict[str, Any]] = [
    {"stage": 2, "allgather_overlap": True, "reduce_overlap": True, **layout}
    for layout in (
        {},
        {"comm_buffer_size_MB": 0.004},
        {"comm_buffer_size_MB": SMALL_MB},
        {"comm_buffer_size_MB": 1e-6},
        {"comm_fusion": False},
    )
]


def _runs(nranks: int, model: str, optimizer: str, settings: list[dict[str, Any]]) -> list[list[RankRun]]:
    """For each of ``settings`` the runs of all ranks."""
    cases = [Case(model, optimizer, chosen, STEPS) for chosen in settings]
    return [list(runs) for runs in zip(*harness.run(train_all, nranks, cases, timeout_s=200), strict=True)]


@pytest.mark.parametrize(
    ("nranks", "model", "optimizer"),
    [(2, "gpt_recompute_reentrant", "SGD"), (2, "conv", "Momentum"), (4, "mlp", "AdamW")],
)
def test_the_same_layout_gives_the_same_bits(nranks: int, model: str, optimizer: str) -> None:
    everything = _runs(nranks, model, optimizer, [{**chosen, **LAYOUT} for chosen in SAME_LAYOUT])
    for chosen, runs in zip(SAME_LAYOUT, everything, strict=True):
        for run, first in zip(runs, everything[0], strict=True):
            assert run.losses == first.losses, chosen
            assert_equal(run.params, first.params, str(chosen))
            assert_equal(run.statistics, first.statistics, str(chosen))


@pytest.mark.parametrize(("nranks", "model"), [(2, "gpt"), (2, "conv"), (4, "mlp")])
def test_another_layout(nranks: int, model: str) -> None:
    """Bitwise on two ranks; beyond, sums of more than two terms are formed in another order."""
    everything = _runs(nranks, model, "Momentum", OTHER_LAYOUTS)
    for chosen, runs in zip(OTHER_LAYOUTS, everything, strict=True):
        assert_all_equal([run.params for run in runs], str(chosen))
        if nranks == 2:
            assert_equal(runs[0].params, everything[0][0].params, str(chosen))
        else:
            assert_close(runs[0].params, everything[0][0].params, 1e-6, str(chosen))


@pytest.mark.parametrize("nranks", [2, 4])
def test_a_run_repeated_is_the_same(nranks: int) -> None:
    settings = {"stage": 2, "allgather_overlap": True, "reduce_overlap": True, **LAYOUT}
    first, second, third = _runs(nranks, "mlp", "AdamW", [settings] * 3)
    for again in (second, third):
        for run, before in zip(again, first, strict=True):
            assert run.losses == before.losses
            assert_equal(run.params, before.params)
            assert _by_lane(run.calls) == _by_lane(before.calls)


def _by_lane(calls: list[Call]) -> dict[str, list[Call]]:
    return {lane: [call for call in calls if call.lane == lane] for lane in ("gather", "reduce")}


def test_all_ranks_send_the_same_in_the_same_order() -> None:
    """Each rank hashes with a seed of its own. Buckets are of unequal size, and each has its own delays."""
    settings = [{**chosen, "comm_fusion": False} for chosen in SAME_LAYOUT[3::2]]
    for chosen, runs in zip(settings, _runs(4, "mlp", "SGD", settings), strict=True):
        lanes = [_by_lane(run.calls) for run in runs]
        assert all(lane == lanes[0] for lane in lanes), chosen
        assert all(run.orders == runs[0].orders for run in runs), chosen
        assert len({call.nbytes for call in runs[0].calls}) > 3


def test_more_than_twenty_buckets_below_a_parameter_each() -> None:
    chosen = {"stage": 2, "allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": 1e-6}
    for runs in _runs(2, "gpt", "AdamW", [chosen]):
        assert len(runs[0].orders[0]) > 20
        assert all(np.isfinite(value).all() for value in runs[0].params.values())


def test_the_gathers_follow_the_forward() -> None:
    """The order in which the forward uses the buckets is learned, and every later step gathers in it."""
    chosen = {"stage": 2, "allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": 0.002}
    (runs,) = _runs(2, "gpt", "SGD", [chosen])
    gathers = [call.label for call in runs[0].calls if call.op == "all_gather"]
    last = [int(label.split(":")[0]) for label in gathers[-len(runs[0].orders[1]) :]]
    assert last == runs[0].orders[1]
    blocks = [
        label.split(":")[1].split(".")[1] for label in gathers[-len(last) :] if label.split(":")[1].startswith("blocks")
    ]
    assert list(dict.fromkeys(blocks)) == ["0", "2", "1", "3"]
