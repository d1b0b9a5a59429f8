"""What holds for every split of the ranks, whatever is trained and however gradients add up, pairwise combined.

Each combination is trained under several settings and by one process that runs every rank in turn. After every step
all ranks hold the same bits, and the same as under every other setting; a run repeated gives them again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests import harness
from tests.models import loss_on, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_close, assert_equal
from tests.sides import Plain, Sharded, Side

STEPS = 3
STAGES = (1, 2, 3)
FACTORS: dict[str, list[Any]] = {
    "split": [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)],
    "model": ["mlp", "gpt", "conv", "branching", "branching_alike", "shared"],
    "optimizer": ["SGD", "AdamW"],
    "counts": [(1,), (3,), (3, 1, 2)],
    "before_last": ["reduces", "waits", "waits for replicas"],
}


class Case(NamedTuple):
    """What is trained.

    Attributes:
        split: ranks, and replicas among which they are divided.
        counts: backwards of each step, over and over.
        before_last: what a backward does that is not the last of its step: its gradients are reduced at once, or are
            kept under ``no_sync``, wholly or until the replicas add them up.
    """

    split: tuple[int, int]
    model: str
    optimizer: str
    counts: tuple[int, ...]
    before_last: str


class Trace(NamedTuple):
    """Losses of each backward, one for each rank that this process runs; parameters after each step."""

    losses: list[list[float]]
    params: list[Values]


def _pairs(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations(case._asdict().items(), 2))


@functools.cache
def _cases() -> list[Case]:
    """Few combinations in which every pair of values occurs: each time the best of some random ones."""
    generator = random.Random(0)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b]}
    cases = []
    while missing:
        drawn = [Case(*(generator.choice(values) for values in FACTORS.values())) for _ in range(60)]
        best = max(drawn, key=lambda case: len(_pairs(case) & missing))
        if _pairs(best) & missing:
            cases.append(best)
            missing -= _pairs(best)
    return cases


def _settings(case: Case) -> dict[str, dict[str, Any]]:
    """Those that may change no bit: every bucket holds one parameter, whatever the stage.

    Every stage with overlap, one of them without, another one for each case, and the last one a second time. Ranks that
    take different branches have no stage 3.
    """
    stages = STAGES[:2] if case.model == "branching" else STAGES
    same = {"n_replicas": case.split[1], "comm_buffer_size_MB": 1e-6, "replicate_buffer_size_MB": 0.001}
    flags = {"allgather_overlap": True, "reduce_overlap": True}
    found = {f"stage {stage}": {"stage": stage, **same, **flags} for stage in stages}
    apart = stages[_cases().index(case) % len(stages)]
    return {
        **found,
        f"stage {apart}, no overlap": {"stage": apart, **same},
        f"stage {stages[-1]}, once more": found[f"stage {stages[-1]}"],
    }


def _train(side: Side, case: Case) -> Trace:
    trace = Trace([], [])
    number = 0
    for step in range(STEPS):
        count = case.counts[step % len(case.counts)]
        for micro in range(count):
            with contextlib.nullcontext() if micro == count - 1 else _before_last(side, case.before_last):
                trace.losses.append(side.backward(loss_on(side.model, case.model, number)))
            number += 1
        side.step()
        side.clear_grad()
        trace.params.append(side.values())
    return trace


def _before_last(side: Any, how: str) -> Any:
    if how == "reduces" or not side.sharded:
        return contextlib.nullcontext()
    return side.optimizer.no_sync(replicate_only=how == "waits for replicas")


def _train_sharded(rank: int, nranks: int, case: Case, settings: dict[str, dict[str, Any]]) -> dict[str, Trace]:
    found = {}
    for name, chosen in settings.items():
        side = Sharded(
            lambda: make_model(case.model),
            lambda model: make_optimizer(case.optimizer, model),
            rank=rank,
            nranks=nranks,
            settings=chosen,
        )
        found[name] = _train(side, case)
    return found


def _train_plain(case: Case) -> Trace:
    nranks = case.split[0]
    side = Plain(lambda: make_model(case.model), lambda model: make_optimizer(case.optimizer, model), nranks)
    return _train(side, case)


def _tolerance(case: Case) -> float:
    """Against one process: 0 for bitwise, where every sum has two terms.

    Paddle's SGD rounds a parameter of 8n elements in another way than others, so that slices can differ from the whole.
    """
    sizes = {param.size % 8 for param in make_model(case.model).parameters()}
    if case.split[0] == 2 and case.counts == (1,) and (case.optimizer != "SGD" or sizes == {0}):
        return 0.0
    return 2e-6 if case.optimizer == "SGD" else 1e-5


def _group(case: Case, name: str) -> str:
    """Settings of one group give the same bits.

    Where several backwards of one step are reduced, stage 1 adds gradients up before the sum over the ranks, and the
    others after it.
    """
    several = max(case.counts) > 1 and case.before_last != "waits"
    return "stage 1" if several and name.startswith("stage 1") else "all"


@pytest.mark.parametrize("case", _cases(), ids=lambda case: ", ".join(map(str, case)))
def test_contracts(case: Case) -> None:
    everyone = harness.run(_train_sharded, case.split[0], case, _settings(case), timeout_s=90)
    expected, tolerance = _train_plain(case), _tolerance(case)
    first: dict[str, str] = {}
    for name, begin in everyone[0].items():
        before = first.setdefault(_group(case, name), name)
        for rank, found in enumerate(everyone):
            assert found[name].losses == found[before].losses, f"{name} against {before}"
            _assert_same(found[name], begin, f"{name}, rank {rank} against rank 0")
            _assert_same(found[name], found[before], f"{name} against {before}")
            losses = [[of_rank[rank]] for of_rank in expected.losses]
            np.testing.assert_allclose(found[name].losses, losses, rtol=10 * tolerance, err_msg=name)
        _assert_near(begin, expected, tolerance, name)


def _assert_same(found: Trace, expected: Trace, what: str) -> None:
    for step, (values, others) in enumerate(zip(found.params, expected.params, strict=True)):
        assert_equal(values, others, f"{what}, step {step},")


def _assert_near(found: Trace, expected: Trace, tolerance: float, what: str) -> None:
    if not tolerance:
        return _assert_same(found, expected, what)
    for step, (values, others) in enumerate(zip(found.params, expected.params, strict=True)):
        assert_close(values, others, tolerance, f"{what}, step {step},")
    return None


def test_every_pair_of_values_occurs() -> None:
    found = set().union(*map(_pairs, _cases()))
    assert len(found) == sum(len(x) * len(y) for x, y in itertools.combinations(FACTORS.values(), 2))


def test_the_models_are_what_they_should_be() -> None:
    """The ranks of "branching" take every branch, not all of them the same; those of "branching_alike" do."""
    for name, alike in (("branching", False), ("branching_alike", True)):
        taken = [{_branch(name, step, rank) for rank in range(4)} for step in range(8)]
        assert all(len(of_ranks) == 1 for of_ranks in taken) == alike
        assert len(set().union(*taken)) == 4
    shared = make_model("shared")
    assert len(shared.parameters()) == 12
    assert shared.tied.weight is shared.twice.weight


def _branch(name: str, step: int, rank: int) -> tuple[bool, ...]:
    x, _ = make_batch(name, step, rank)
    return tuple((x[0, :2] > 0).tolist())
