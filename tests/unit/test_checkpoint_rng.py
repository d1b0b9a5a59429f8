"""Random numbers go on after a load where they were at the save."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest

from hp_sharding.checkpoint.rng import rng_state, set_rng_state
from hp_sharding.checkpoint.values import decode, encode


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    before = rng_state()
    yield
    set_rng_state(before)


def _written(state: Any) -> Any:
    encoded = encode(state, where="rng")
    return decode(json.loads(json.dumps(encoded.json)), encoded.arrays)


def _draw() -> list[Any]:
    """Odd numbers of them: normal ones come in pairs, and the second of a pair is kept for the next call."""
    return [
        [random.random(), random.gauss(0, 1), random.getrandbits(100)],
        [np.random.randn(3).tolist(), np.random.permutation(9).tolist()],
        [paddle.randn([3]).tolist(), paddle.randperm(9).tolist()],
        paddle.nn.functional.dropout(paddle.ones([50]), 0.5).tolist(),
    ]


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "as it comes"])
def test_everything_goes_on_bitwise(seeded: bool) -> None:
    if seeded:
        paddle.seed(3)
        np.random.seed(4)
        random.seed(5)
    _draw()
    state = _written(rng_state())
    first = _draw()
    second = _draw()
    assert first != second
    assert set_rng_state(state)
    assert [_draw(), _draw()] == [first, second]


def test_the_state_is_small_in_the_index() -> None:
    """Of a thousand ranks the index has a thousand."""
    encoded = encode(rng_state(), where="rng")
    assert len(json.dumps(encoded.json)) < 2000
    assert sum(array.nbytes for array in encoded.arrays.values()) < 20_000


def test_drawing_from_one_changes_nothing_of_the_others() -> None:
    """A state that is not restored shows: each generator is one of its own."""
    state = rng_state()
    first = _draw()
    for left_out in range(3):
        set_rng_state(state)
        [random.random, np.random.rand, lambda: paddle.rand([1])][left_out]()
        assert [a == b for a, b in zip(first, _draw(), strict=True)] == [
            left_out != 0,
            left_out != 1,
            left_out != 2,
            left_out != 2,
        ]


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("paddle", {"cpu": None, "gpu": None}),
        ("fleet", {"model_parallel_rng": None}),
        ("python", {"version": 99}),
        ("numpy", {"bit_generator": "PCG64"}),
    ],
)
def test_other_generators_are_left_alone(part: str, value: Any) -> None:
    state = {**rng_state(), part: value}
    before = encode(rng_state(), where="rng").json
    arrays = encode(rng_state(), where="rng").arrays
    assert not set_rng_state(state)
    after = encode(rng_state(), where="rng")
    assert after.json == before
    assert all(np.array_equal(array, arrays[name]) for name, array in after.arrays.items())


def test_generators_of_fleet_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("paddle.distributed.fleet.layers.mpu.random")
    assert sys.modules["paddle.distributed.fleet.layers.mpu.random"] is module
    tracker = module.RNGStatesTracker()
    monkeypatch.setattr(module, "RNG_STATE_TRACKER", tracker)
    for name, seed in (("model_parallel_rng", 7), ("other", 8)):
        tracker.add(name, seed)

    def draw() -> list[Any]:
        found: list[Any] = [paddle.rand([2]).tolist()]
        for name in tracker.states_:
            with tracker.rng_state(name):
                found.append(paddle.rand([2]).tolist())
        return found

    draw()
    state = _written(rng_state())
    assert set(state["fleet"]) == {"model_parallel_rng", "other"}
    first, second = draw(), draw()
    assert set_rng_state(state)
    assert [draw(), draw()] == [first, second]
    tracker.reset()
    assert not set_rng_state(state)
