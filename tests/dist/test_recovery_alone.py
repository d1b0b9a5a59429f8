"""What one rank alone does: the others get an error and come back with it, or end; and a rank that is merely late."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from paddle import nn

from hp_sharding import CommError, ShardingConfig, StateError, full_parameters, shard
from tests import harness
from tests.bombs import CAUGHT, Bomb, Planned, mine
from tests.lanes import wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_all_equal, assert_equal, train, values
from tests.sides import BOTH, SETTINGS

STEPS = 5
BAD = 2
"""The step in which one rank fails."""
COUNT = 2
"""Micro-batches of a step."""
LATE_S = 35.0
"""Longer than Gloo waits for anybody."""


def _layers(model: Any) -> dict[str, nn.Layer]:
    return {f"layers.{number}": layer for number, layer in enumerate(model.layers)}


def _snapshot(model: nn.Layer) -> Values:
    with full_parameters(model):
        return values(model)


# -- one rank fails in a micro-batch ----------------------------------------------------------------------------------


def _accumulate(rank: int, nranks: int, settings: dict[str, Any], place: str, after: int) -> dict[str, Any]:
    """Rank 1 alone fails in a step over several backwards, each of which is reduced, and tries the batch again.

    After a failure in its forward or backward nobody does anything with that batch. The loss is not ours to see: there
    rank 1 begins anew while the others go on, and both are told in ``step()``.
    """
    bomb = Bomb()
    model = make_model("mlp")
    model, optimizer, _ = wrap(model, make_optimizer("Momentum", model), nranks, **settings)
    mine(model, _layers(model), bomb)
    errors: list[str] = []
    steps = [step for step in range(STEPS) if place or step != BAD]
    while steps:
        if rank == 1 and steps[0] == BAD and not errors:
            bomb.at, bomb.after = place, after
        try:
            for micro in range(COUNT):
                loss = loss_of(model, make_batch("mlp", COUNT * steps[0] + micro, rank))
                bomb("loss")
                loss.backward()
            optimizer.step()
        except CAUGHT as error:
            errors.append(f"{type(error).__name__}: {error}")
            optimizer.clear_grad()
            if place == "loss" and isinstance(error, Planned):
                continue
        else:
            optimizer.clear_grad()
        steps.pop(0)
    return {"errors": errors, "end": _snapshot(model)}


@pytest.mark.parametrize("after", range(COUNT))
@pytest.mark.parametrize("place", ["after layers.1", "backward of layers.1", "loss"])
def test_one_rank_raises_in_a_micro_batch(place: str, after: int) -> None:
    for name in ("stage 1", "stage 2", "no overlap"):
        expected = harness.run(_accumulate, 2, SETTINGS[name], "", 0, timeout_s=60)
        results = harness.run(_accumulate, 2, SETTINGS[name], place, after, timeout_s=60)
        if place == "loss" and after == 0:
            # Nothing had been reduced: it may leave a batch out, or begin it anew, as it does here.
            assert [len(result["errors"]) for result in results] == [0, 1]
            assert_all_equal([result["end"] for result in results], name)
            continue
        for rank, result in enumerate(results):
            assert any("failed on some rank" in error for error in result["errors"]) or rank == 1, (rank, result)
            assert_equal(result["end"], expected[rank]["end"], f"{name}, rank {rank}:")


# -- one rank fails where nobody can go on ----------------------------------------------------------------------------


def _ends(rank: int, nranks: int, settings: dict[str, Any], place: str) -> list[str]:
    """What each rank gets of a batch, and of ``clear_grad()`` after it."""
    bomb = Bomb()
    model = make_model("mlp")
    model, optimizer, _ = wrap(model, make_optimizer("Momentum", model), nranks, **settings)
    mine(model, _layers(model), bomb)
    apply = optimizer._inner._apply_optimize

    def apply_or_fail(*args: Any, **kwargs: Any) -> Any:
        bomb("update")
        return apply(*args, **kwargs)

    optimizer._inner._apply_optimize = apply_or_fail
    said = []
    for step in range(3):
        bomb.at = place if rank == 1 and step == 1 else ""
        try:
            loss_of(model, make_batch("mlp", step, rank)).backward()
            optimizer.step()
            optimizer.clear_grad()
        except CAUGHT as error:
            said.append(f"{type(error).__name__}: {error}")
            try:
                optimizer.clear_grad()
            except (CommError, StateError) as second:
                said.append(f"{type(second).__name__}: {second}")
                break
    return said


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("stage 3", "before layers.1"),
        ("stage 3", "after layers.3"),
        ("stage 3", "backward of layers.2"),
        ("stage 2", "update"),
        ("stage 3", "update"),
    ],
)
def test_one_rank_raises_where_nobody_can_go_on(name: str, place: str) -> None:
    """In stage 3 the others wait for parameters; and nobody has what an update that was broken off has left."""
    outcomes = harness.run(_ends, 2, SETTINGS[name], place, fresh=True, timeout_s=60)
    for outcome in outcomes:
        assert outcome.result, outcome.output
    others, its = (outcome.result for outcome in outcomes)
    assert "planned" in its[0]
    if place == "update":
        assert its[1].startswith("StateError: rank 1: step() was broken off while it updated bucket")
    assert others[0].startswith("CommError")
    assert "rank 1" in others[0]


# -- one rank is late -------------------------------------------------------------------------------------------------


def _late(rank: int, nranks: int, place: str, late_s: float) -> Values:
    """Rank 1 rests in the middle of a step."""
    model: Any = make_model("mlp")
    inner = make_optimizer("Momentum", model)
    optimizer = shard(model, inner, ShardingConfig(stage=3, timeout_s=120, **BOTH))
    rests = [rank == 1]

    def rest(*_: Any) -> None:
        if rests[0]:
            rests[0] = False
            time.sleep(late_s)

    apply = optimizer._inner._apply_optimize

    def rest_and_apply(*args: Any, **kwargs: Any) -> Any:
        rest()
        return apply(*args, **kwargs)

    for step in range(3):
        if step == 1 and place == "forward":
            model.layers[2].register_forward_pre_hook(rest)
        elif step == 1 and place == "backward":
            model.layers[2].register_forward_post_hook(lambda _, __, output: output.register_hook(rest) and None)
        elif step == 1:
            optimizer._inner._apply_optimize = rest_and_apply
        loss_of(model, make_batch("mlp", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
    return _snapshot(model)


@pytest.mark.slow
def test_a_rank_that_is_late_by_more_than_gloo_waits_is_no_fault() -> None:
    expected = train("mlp", "Momentum", 2, 3).params

    def run(place: str) -> list[harness.Outcome]:
        return harness.run(_late, 2, place, LATE_S, fresh=True, timeout_s=200)

    places = ["forward", "backward", "step"]
    with ThreadPoolExecutor(len(places)) as executor:
        for place, outcomes in zip(places, executor.map(run, places), strict=True):
            for outcome in outcomes:
                assert outcome.result is not None, f"{place}: {outcome.error}\n{outcome.output}"
                assert outcome.report_s is not None and outcome.report_s > LATE_S
                assert_equal(outcome.result, expected, f"late in {place}, rank {outcome.rank}:")
