"""Other buckets between two steps: the same state bit for bit, and the training that goes on as if nothing had been."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest

from hp_sharding.relayout import relayout
from tests import harness, logical
from tests.reference import assert_close, assert_equal
from tests.resuming import KINDS, Run, Settings
from tests.sides import BOTH, SMALL_MB

SIZES_MB = (SMALL_MB, 1e-6, 25, 0.01)
"""After each step another one: all parameters in a bucket of their own, all in one, and in between."""
STEPS = len(SIZES_MB) + 1


class Case(NamedTuple):
    """A training whose buckets change after every step.

    Attributes:
        kind: of ``tests.resuming``.
        nranks: of the training.
        settings: for ``Run``.
        tolerance: of the end of the training against one whose buckets stay; 0 is bitwise.
        thaws: what was frozen when wrapped trains from the second step on.
    """

    kind: str
    nranks: int
    settings: Settings
    tolerance: float = 0.0
    thaws: bool = False


FREED: Settings = {"stage": 2, **BOTH, "reshard_after_step": True}
NORM_ORDER = 1e-5
"""Norms, by which gradients are clipped, are sums over the elements of each rank, which other buckets change."""
SUM_ORDER = 2e-6
"""In which order more than two ranks add up an element depends on whose part it is."""
CASES = {
    "no overlap": Case("odd, dropout", 2, {"stage": 2}),
    "stage 1, bfloat16 gathers": Case("odd, momentum", 2, {"stage": 1, **BOTH, "gather_dtype": "bfloat16"}),
    "stage 3": Case("odd, dropout", 2, {"stage": 3, **BOTH}),
    "stage 3, kept": Case("odd, momentum", 2, {"stage": 3, **BOTH, "reshard_after_forward": False}),
    "reshard, bfloat16 gathers": Case("odd, dropout", 2, {**FREED, "gather_dtype": "bfloat16"}),
    "four ranks": Case("odd, sgd", 4, {"stage": 2, **BOTH}, SUM_ORDER),
    "two by two, stage 3": Case("odd, momentum", 4, {"n_replicas": 2, "stage": 3, **BOTH}),
    "bfloat16 by policy, stage 3": Case("odd, dropout", 2, {"stage": 3, **BOTH, "param_dtype": "bfloat16"}),
    "bfloat16 model": Case("odd, bfloat16", 2, {"stage": 2, **BOTH}, NORM_ORDER),
    "float64 model": Case("odd, float64", 2, {"stage": 3, **BOTH}, NORM_ORDER),
    "tied, clipped": Case("gpt", 2, {"stage": 2, **BOTH}, NORM_ORDER),
    "running statistics": Case("conv", 2, {"stage": 2, **BOTH}),
    "thawed": Case("odd, momentum", 2, {"stage": 2, **BOTH}, thaws=True),
    "thawed, bfloat16 model": Case("odd, bfloat16", 2, {"stage": 3, **BOTH}, NORM_ORDER, thaws=True),
    "scaler": Case("mlp, scaler", 2, {"stage": 2, **BOTH}),
    **{name: Case(f"odd, {name}", 2, {"stage": 2, **BOTH}) for name in ("ASGD", "Rprop")},
}
"""Each setting, each dtype and each kind of moment, and each stage with most of them."""


def _train(rank: int, nranks: int, case: Case) -> Any:
    settings = {**case.settings, "comm_buffer_size_MB": SMALL_MB}
    still = Run(case.kind, rank, nranks, settings)
    losses = still.train(range(1))
    _thaw(still, case)
    losses += still.train(range(1, STEPS))

    moving = Run(case.kind, rank, nranks, {**case.settings, "comm_buffer_size_MB": "auto"})
    tuning = moving.optimizer.tuning
    found, shares = moving.train(range(1)), []
    _thaw(moving, case)
    for step, size_mb in enumerate(SIZES_MB, start=1):
        before = moving.parts()
        config = dataclasses.replace(moving.optimizer.config, comm_buffer_size_MB=size_mb)
        relayout(moving.optimizer, tuning._foundation, config)
        shares.append((before, moving.parts()))
        found += moving.train(range(step, step + 1))
    return losses, found, shares, still.values(), moving.values()


def _thaw(run: Run, case: Case) -> None:
    for param in run.model.frozen.parameters() if case.thaws else ():
        param.stop_gradient = False


@pytest.mark.parametrize("name", CASES)
def test_the_buckets_change_after_every_step(name: str) -> None:
    case = CASES[name]
    assert case.kind in KINDS
    ranks = harness.run(_train, case.nranks, case)
    for number in range(len(SIZES_MB) if name != "ASGD" else 0):  # of which some moments puzzle ``logical``
        before = logical.join([shares[number][0] for _, _, shares, _, _ in ranks])
        after = logical.join([shares[number][1] for _, _, shares, _, _ in ranks])
        assert_equal(after, before, f"change {number}")
    for losses, found, _, still, moving in ranks:
        if case.tolerance:
            assert found == pytest.approx(losses, rel=case.tolerance)
            assert_close(moving, still, case.tolerance)
        else:
            assert found == losses
            assert_equal(moving, still)
