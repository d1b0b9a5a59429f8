"""Resuming elsewhere: other numbers of ranks, replicas, stages, buckets and dtypes, from one to the next and back.

At each stop the state must be, bit for bit, the one that was saved at the stop before, and three steps must lead to
where a plain process comes that was given this state by hand and sees the batches of all ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import hp_sharding
from tests import harness, logical
from tests.reference import Array, Values, assert_close
from tests.resuming import OPTIMIZERS, Run, Settings
from tests.sides import BOTH, SMALL_MB

STEPS = 3
TOLERANCE = 1e-6
"""Relative: other groupings of the same sums."""


class Stop(NamedTuple):
    """Where a training goes on for three steps.

    Attributes:
        nranks: how many ranks.
        settings: for ``Run``.
        kind: of ``tests.resuming``.
        exact: whether it computes as plain Paddle does in float32.
    """

    nranks: int
    settings: Settings | str
    kind: str = "odd"
    exact: bool = True


class State(NamedTuple):
    """What a rank leaves behind: its parts, the learning rate's state, and how many ranks there were."""

    parts: list[logical.Part]
    rates: dict[str, Any]
    nranks: int


SHORT = {"param_dtype": "bfloat16"}
ROUTES: dict[str, list[Stop]] = {
    "ranks and stages": [
        Stop(4, {"stage": 2, **BOTH}),
        Stop(2, {"stage": 3, **BOTH}),
        Stop(3, {"stage": 1, "allgather_overlap": True}),
        Stop(1, "plain"),
        Stop(4, {"stage": 3, "comm_fusion": False}),
        Stop(3, {"stage": 2, **BOTH, "reshard_after_step": True}),
        Stop(1, "bare"),
        Stop(2, {"stage": 1, "comm_buffer_size_MB": SMALL_MB / 4}),
        Stop(4, {"stage": 2}),
    ],
    "replicas": [
        Stop(4, {"n_replicas": 2, "stage": 2, **BOTH}),
        Stop(4, {"n_replicas": 4, "stage": 1, "reduce_overlap": True}),
        Stop(4, {"n_replicas": 1, "stage": 3, **BOTH}),
        Stop(3, {"n_replicas": 3, "stage": 3}),
        Stop(2, {"n_replicas": 2, "stage": 2, **BOTH}),
        Stop(4, {"n_replicas": 2, "stage": 3, "comm_buffer_size_MB": SMALL_MB}),
        Stop(1, "bare"),
        Stop(4, {"n_replicas": 2, "stage": 2}),
    ],
    "momentum": [
        Stop(3, {"stage": 2, **BOTH}, "odd, momentum"),
        Stop(1, "bare", "odd, momentum"),
        Stop(4, {"stage": 3, **BOTH}, "odd, momentum"),
    ],
    "dtypes": [
        Stop(4, {"stage": 2, **BOTH}),
        Stop(2, {"stage": 3, **BOTH, **SHORT}, exact=False),
        Stop(3, {"stage": 2, "gather_dtype": "bfloat16"}, exact=False),
        Stop(1, {"stage": 2, **SHORT}, exact=False),
        Stop(2, {"stage": 1, **BOTH, "n_replicas": 2, "param_dtype": "float16"}, exact=False),
        Stop(4, {"stage": 3, **BOTH}),
        Stop(4, {"stage": 2, **BOTH}, "odd, bfloat16", exact=False),
        Stop(1, "plain"),
    ],
}


def _stop(rank: int, nranks: int, stop: Stop, number: int, folder: str, before: State | None) -> State:
    """One stop: loads what was saved at the last one, if any, trains and saves."""
    run = Run(stop.kind, rank, nranks, stop.settings, seed=100 + number)
    steps = range(number * STEPS, (number + 1) * STEPS)
    plain = None
    if "comm_buffer_size_MB" in stop.settings:
        assert len(run.optimizer.buffers) > 2, "there is no other layout to come to"
    if before is not None:
        expected = logical.join([before.parts])
        loaded = hp_sharding.load(f"{folder}/{number - 1}", run.model, run.optimizer)
        assert (loaded.missing, loaded.unexpected) == ([], [])
        same_number = nranks == before.nranks
        assert loaded.rank_extra == (f"rank {rank}" if same_number else None)
        assert loaded.rng_restored == same_number
        # Those without a master are rounded: nothing updates them, and they are kept as layers see them.
        found = [part for part in run.parts() if part.values.dtype not in (np.uint16, np.float16)]
        logical.check(found, expected, f"stop {number}:")
        # Paddle's own optimizer counts no steps.
        assert {**run.rates(), "steps": 0} == {**before.rates, "steps": 0}
        if stop.exact:
            plain = Run(stop.kind, rank, nranks, "bare", seed=7)
            logical.put(plain.model, plain.optimizer, expected, before.rates["scheduler"])
    run.train(steps)
    if plain is not None:
        plain.train(steps, alone=True)
        assert_close(run.values(), plain.values(), TOLERANCE, f"stop {number}:")
    hp_sharding.save(f"{folder}/{number}", run.model, run.optimizer, rank_extra=f"rank {rank}")
    return State(run.parts(), run.rates(), nranks)


@pytest.mark.parametrize("route", ROUTES)
def test_a_state_moves_through_layouts(route: str, tmp_path: Path) -> None:
    before: State | None = None
    for number, stop in enumerate(ROUTES[route]):
        found = harness.run(_stop, stop.nranks, stop, number, str(tmp_path), before)
        whole = logical.join(state.parts for state in found)
        before = State(_as_parts(whole), found[0].rates, stop.nranks)
        split = [part.name for state in found for part in state.parts if part.start > 0]
        n_replicas = stop.settings.get("n_replicas", 1) if isinstance(stop.settings, dict) else 1
        n_shards = stop.nranks // n_replicas
        assert split or n_shards == 1 or not stop.exact, "no parameter lies on several ranks"
        assert all(state.rates == found[0].rates for state in found)


def _as_parts(values: Values) -> list[logical.Part]:
    return [logical.Part(name, 0, _widened(value).reshape([-1]), value.shape) for name, value in values.items()]


def _widened(value: Array) -> Array:
    """In float32 if it has 16 bits: bfloat16 is there as integers."""
    if value.dtype == np.uint16:
        return (value.astype(np.uint32) << 16).view(np.float32)
    return value.astype(np.float32) if value.dtype == np.float16 else value


# -- every optimizer ---------------------------------------------------------------------------------------------------

NAMES = [f"odd, {name}" for name in OPTIMIZERS]
HERE: Settings = {"stage": 2, **BOTH}
THERE: Settings = {"stage": 3, "comm_fusion": False}


def _leave(rank: int, nranks: int, folder: str) -> list[list[float]]:
    """Saves after three steps. Returns the losses of the next ones."""
    losses = []
    for name in NAMES:
        run = Run(name, rank, nranks, HERE)
        run.train(range(3))
        hp_sharding.save(f"{folder}/{name}", run.model, run.optimizer)
        losses.append(run.train(range(3, 6)))
    return losses


def _pass_on(rank: int, nranks: int, folder: str) -> None:
    """Loads and saves."""
    for name in NAMES:
        run = Run(name, rank, nranks, THERE, seed=7)
        hp_sharding.load(f"{folder}/{name}", run.model, run.optimizer)
        hp_sharding.save(f"{folder}/{name} from elsewhere", run.model, run.optimizer)


def _come_back(rank: int, nranks: int, folder: str) -> list[list[float]]:
    losses = []
    for name in NAMES:
        run = Run(name, rank, nranks, HERE, seed=7)
        hp_sharding.load(f"{folder}/{name} from elsewhere", run.model, run.optimizer)
        losses.append(run.train(range(3, 6)))
    return losses


def test_the_state_of_every_optimizer_comes_back_as_it_went(tmp_path: Path) -> None:
    expected = harness.run(_leave, 3, str(tmp_path))
    harness.run(_pass_on, 2, str(tmp_path))
    for found, losses in zip(harness.run(_come_back, 3, str(tmp_path)), expected, strict=True):
        assert dict(zip(NAMES, found, strict=True)) == dict(zip(NAMES, losses, strict=True))
