"""Over 200 steps nothing grows: neither memory, nor threads, nor open files, nor objects."""

from __future__ import annotations

import pytest

from tests import harness
from tests.sides import BOTH
from tests.soak.growth import LEAKS, Course, train_cycles
from tests.soak.growth import grown as what_has_grown

STEPS = 200
# How many ranks, and what they train.
CASES = {
    "stage 1": (2, Course("mlp", 1, {"stage": 1, **BOTH}, STEPS)),
    "stage 2": (2, Course("gpt", 1, {"stage": 2, **BOTH}, STEPS)),
    "stage 2, reshard": (2, Course("conv", 1, {"stage": 2, **BOTH, "reshard_after_step": True}, STEPS)),
    "stage 3": (2, Course("gpt", 1, {"stage": 3, **BOTH}, STEPS)),
    "two by two": (4, Course("mlp", 2, {"stage": 2, **BOTH}, STEPS)),
    "two by two, stage 3": (4, Course("mlp", 2, {"stage": 3, **BOTH}, STEPS)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_nothing_grows_over_many_steps(case: str) -> None:
    nranks, course = CASES[case]
    for rank, samples in enumerate(harness.run(train_cycles, nranks, course)):
        assert what_has_grown(samples) == {}, f"rank {rank}: {samples}"


@pytest.mark.parametrize("leak", list(LEAKS))
def test_a_leak_would_be_seen(leak: str) -> None:
    course = Course("mlp", 1, {"stage": 2, **BOTH}, 40, leak)
    (samples,) = harness.run(train_cycles, 1, course)
    assert leak in what_has_grown(samples), samples
