"""No claim of overlap without proof: a link of known speed, layers that take a known time, and the time of a step."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import paddle
import pytest
from paddle import nn
from paddle.autograd import PyLayer

from hp_sharding.config import ShardingConfig
from hp_sharding.sharding import build
from tests.fakes import PoisoningPool, SlowLane

N_LAYERS = 8
LAYER_MS = 20.0
"""What the forward of one layer takes, and again its backward. It sleeps, so nobody competes for a core."""

WIDTH = 64
STEPS = 4


ATTEMPTS = 3


def _repeated(test: Callable[..., None]) -> Callable[..., None]:
    """A measurement that other programs disturbed is made again; what is wrong with us is wrong every time."""

    @functools.wraps(test)
    def attempt(*args: Any, **kwargs: Any) -> None:
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(AssertionError):
                return test(*args, **kwargs)
        return test(*args, **kwargs)

    return attempt


class _Sleep(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        time.sleep(LAYER_MS / 1e3)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        time.sleep(LAYER_MS / 1e3)
        return gradient * 1.0


class _Layer(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias_attr=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return _Sleep.apply(self.linear(x))


class _Times(NamedTuple):
    """Milliseconds of the fastest step, and what the timeline says about it."""

    step_ms: float
    exposed_ms: float
    gather_ms: float
    reduce_ms: float


def _train(comm_ms: float, **settings: Any) -> _Times:
    """Trains ``N_LAYERS`` buckets, each of whose gathers and reductions takes ``comm_ms`` on the link."""
    paddle.seed(0)
    model = nn.Sequential(*[_Layer() for _ in range(N_LAYERS)])
    bytes_per_s = WIDTH * WIDTH * 4 / (comm_ms / 1e3) if comm_ms else float("inf")
    lanes = {lane: SlowLane(lane, bytes_per_s=bytes_per_s) for lane in ("gather", "reduce")}
    config = ShardingConfig(timeline=True, comm_fusion=False, **settings)
    sgd = paddle.optimizer.SGD(1e-3, parameters=model.parameters())
    optimizer = build(model, sgd, config, lanes=dict(lanes), pool=PoisoningPool())
    assert len(optimizer.buffers) == N_LAYERS
    x = paddle.ones([2, WIDTH])
    for _ in range(STEPS + 1):
        model(x).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    for lane in lanes.values():
        lane.close()
    best = min(optimizer.timeline.steps, key=lambda step: step.step_ms)
    return _Times(best.step_ms, best.exposed_ms, best.gather_ms, best.reduce_ms)


NOMINAL_MS = 2 * N_LAYERS * LAYER_MS
"""Compute of a step. A busy machine adds to it, and to every other time here; nothing takes any away."""


def _eventually(check: Callable[[float, _Times], bool], comm_ms: float, **settings: Any) -> None:
    """Asserts that ``check(compute_ms, times)`` holds in one of a few tries, each beside compute alone."""
    tries = []
    for _ in range(4):
        alone, found = _train(0.0), _train(comm_ms, **settings)
        tries.append((alone.step_ms, found))
        if check(alone.step_ms, found):
            return
    raise AssertionError(f"compute alone, and with communication: {tries}")


BOTH: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True}
SHARE = 0.8
"""Communication as a part of the compute that may hide it."""

COMM_MS = SHARE * NOMINAL_MS


@pytest.mark.parametrize(
    "settings",
    [{"stage": 1, **BOTH}, {"stage": 2, **BOTH}, {"stage": 2, **BOTH, "reshard_after_step": True}],
    ids=["stage 1", "stage 2", "reshard"],
)
def test_communication_hides_behind_compute(settings: dict[str, Any]) -> None:
    def hides(compute_ms: float, found: _Times) -> bool:
        assert found.gather_ms + found.reduce_ms >= COMM_MS, "else there was nothing to hide"
        return found.step_ms < 1.25 * max(compute_ms, COMM_MS) and found.exposed_ms < 0.25 * COMM_MS

    _eventually(hides, SHARE * LAYER_MS, **settings)


def test_where_the_link_is_the_slower_side_it_is_never_idle() -> None:
    def is_busy(compute_ms: float, found: _Times) -> bool:
        assert found.step_ms > 2 * NOMINAL_MS
        return found.step_ms < 1.25 * 2 * NOMINAL_MS

    _eventually(is_busy, 2 * LAYER_MS, stage=2, **BOTH)


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2}, {"stage": 2, "reshard_after_step": True}])
def test_without_overlap_a_step_takes_the_sum(settings: dict[str, Any]) -> None:
    found = _train(SHARE * LAYER_MS, **settings)
    assert found.step_ms > 0.85 * (NOMINAL_MS + COMM_MS)
    assert found.exposed_ms > 0.85 * COMM_MS


@pytest.mark.parametrize("flag", list(BOTH))
def test_each_flag_hides_its_own_half(flag: str) -> None:
    half_ms = COMM_MS / 2

    def hides_half(compute_ms: float, found: _Times) -> bool:
        assert found.step_ms > NOMINAL_MS + 0.85 * half_ms
        assert found.exposed_ms > 0.85 * half_ms
        return found.step_ms < 1.25 * (compute_ms + half_ms) and found.exposed_ms < 1.4 * half_ms

    _eventually(hides_half, SHARE * LAYER_MS, stage=2, **{flag: True})
