"""Model state in bytes, by Paddle's own statistics, beside the arithmetic, at every point of a step."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import paddle
import pytest
from paddle import nn
from paddle.base import core

from hp_sharding import ShardingConfig, full_parameters
from hp_sharding.sharding import build
from tests import harness
from tests.lanes import real_lanes

WIDTH, LAYERS = 1024, 6
MB = 2**20
PARAMETERS_MB = LAYERS * (WIDTH * WIDTH + WIDTH) * 4 / MB
BUCKET_MB = (WIDTH * WIDTH + WIDTH) * 4 / MB
POINTS = ("wrap", "forward", "backward", "step", "clear_grad")
TOLERANCE = 0.05


class Measured(NamedTuple):
    """MB beyond what the process had before the model was made; of the third step, but for ``wrap``."""

    points: dict[str, float]
    report_mb: float
    formula_mb: float
    peak_mb: float


class Meter(Protocol):
    """Counts what is live where tensors lie, in bytes."""

    def live_bytes(self) -> int:
        """Of all tensors, views counted once."""

    def peak_bytes(self) -> int:
        """The most that was live since ``forget_peak``."""

    def forget_peak(self) -> None:
        """Lets the peak begin again at what is live now."""


class HostMeter:
    """Paddle's own statistics."""

    def live_bytes(self) -> int:
        return int(core.host_memory_stat_current_value("Allocated", 0))

    def peak_bytes(self) -> int:
        return int(core.host_memory_stat_peak_value("Allocated", 0))

    def forget_peak(self) -> None:
        core.host_memory_stat_reset_peak_value("Allocated", 0)


class _Cast(nn.Linear):
    """Computes in float32, for which CPUs have kernels, with parameters of any dtype."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        weight, bias = self.weight.astype("float32"), self.bias.astype("float32")
        return nn.functional.linear(x.astype("float32"), weight, bias)


def _measure(rank: int, nranks: int, n_replicas: int, backwards: int, settings: dict[str, Any]) -> Measured:
    return measure(HostMeter(), nranks, n_replicas, backwards=backwards, settings=settings)


def measure(meter: Meter, nranks: int, n_replicas: int, *, backwards: int, settings: dict[str, Any]) -> Measured:
    """Three steps of ``backwards`` backwards each, on this rank."""
    lanes = real_lanes(nranks, n_replicas)
    before = meter.live_bytes()
    layer = _Cast if settings.get("param_dtype") else nn.Linear
    model = nn.Sequential(*[layer(WIDTH, WIDTH) for _ in range(LAYERS)])
    inner = paddle.optimizer.AdamW(parameters=model.parameters())
    bucket_mb = BUCKET_MB / 2 if settings.get("param_dtype") else BUCKET_MB
    config = ShardingConfig(allgather_overlap=True, reduce_overlap=True, comm_buffer_size_MB=bucket_mb, **settings)
    baseline = meter.live_bytes() - int(PARAMETERS_MB * MB)
    optimizer = build(model, inner, config, lanes=lanes)
    optimizer._baseline_bytes = baseline
    points = {"wrap": meter.live_bytes() - before}
    meter.forget_peak()
    for _ in range(3):
        for _ in range(backwards):
            loss = model(paddle.ones([1, WIDTH])).mean()
            points["forward"] = meter.live_bytes() - before
            loss.backward()
        points["backward"] = meter.live_bytes() - before
        del loss
        optimizer.step()
        points["step"] = meter.live_bytes() - before
        optimizer.clear_grad()
        points["clear_grad"] = meter.live_bytes() - before
    report = optimizer.memory_report()
    peak = meter.peak_bytes() - before
    with full_parameters(model):
        pass  # a gather under way would hold its memory while the next test begins
    points["full_parameters"] = meter.live_bytes() - before
    return Measured(
        {point: nbytes / MB for point, nbytes in points.items()},
        report["measured_bytes"] / MB,
        report["formula_bytes"] / MB,
        peak / MB,
    )


def _expected(stage: int, nshards: int, *, spare: bool) -> dict[str, float]:
    """From the third step on everything that comes and goes has its place."""
    shard = PARAMETERS_MB / nshards
    wrap = (PARAMETERS_MB if stage < 3 else shard) + shard
    gradients = PARAMETERS_MB if stage == 1 else 2 * BUCKET_MB
    gathered = 2 * BUCKET_MB if stage == 3 else 0.0  # the unit in use and the one ahead
    steady = wrap + gradients + gathered + 2 * shard + (shard if spare else 0.0)
    return {"wrap": wrap, **dict.fromkeys(POINTS[1:], steady)}


def _assert_between(found_mb: float, expected_mb: float, fewer_mb: float, found: object) -> None:
    """``fewer_mb``: a storage that need not exist, as a gradient that is reduced before the next one leaves its own."""
    least_mb, most_mb = (expected_mb - fewer_mb) * (1 - TOLERANCE), expected_mb * (1 + TOLERANCE)
    assert least_mb <= found_mb <= most_mb, f"{found_mb} is not in {least_mb} .. {most_mb}: {found}"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("nranks", "n_replicas", "backwards"), [(2, 1, 1), (2, 1, 2), (4, 1, 1), (4, 2, 1), (4, 2, 2)], ids=str
)
def test_every_point_of_a_step_is_what_the_formula_says(
    nranks: int, n_replicas: int, backwards: int, stage: int
) -> None:
    spare = n_replicas > 1 and backwards > 1 and stage > 1
    expected = _expected(stage, nranks // n_replicas, spare=spare)
    fewer = BUCKET_MB if stage > 1 else 0.0
    for found in harness.run(_measure, nranks, n_replicas, backwards, {"stage": stage}):
        for point, mb in expected.items():
            _assert_between(found.points[point], mb, fewer if point != "wrap" else 0.0, (point, found))
        assert found.formula_mb == pytest.approx(expected["step"], rel=TOLERANCE), found
        assert found.report_mb == pytest.approx(found.points["clear_grad"], rel=TOLERANCE), found
        _assert_between(found.report_mb, found.formula_mb, fewer, found)
        assert found.peak_mb <= expected["step"] * (1 + TOLERANCE) + 2 * BUCKET_MB, f"autograd's own two: {found}"
        assert found.points["full_parameters"] <= found.points["clear_grad"] * (1 + TOLERANCE), "it keeps nothing"


def test_parameters_that_are_freed_after_a_step_are_given_back() -> None:
    """Stage 2: what is left are a shard of the parameters, one of the gradients and two of moments."""
    for found in harness.run(_measure, 2, 1, 1, {"stage": 2, "reshard_after_step": True}):
        for point in ("step", "clear_grad"):
            assert found.points[point] == pytest.approx(4 * PARAMETERS_MB / 2, rel=TOLERANCE), f"{point}: {found}"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "mixed",
    [{"gather_dtype": "bfloat16"}, {"param_dtype": "bfloat16"}, {"param_dtype": "bfloat16", "main_grad": True}],
    ids=str,
)
def test_mixed_precision_costs_what_the_formula_says(mixed: dict[str, Any], stage: int) -> None:
    """A master and its gradient are float32 whatever travels; parameters and full gradients are what layers see."""
    shard = PARAMETERS_MB / 2
    param = 0.5 if "param_dtype" in mixed else 1.0
    gradient = param if "main_grad" not in mixed else 1.0
    gathered = param * (PARAMETERS_MB if stage < 3 else 2 * BUCKET_MB)
    gradients = gradient * (PARAMETERS_MB if stage == 1 else 2 * BUCKET_MB)
    expected = gathered + gradients + 4 * shard
    for found in harness.run(_measure, 2, 1, 1, {"stage": stage, **mixed}):
        _assert_between(found.points["clear_grad"], expected, gradient * BUCKET_MB if stage > 1 else 0.0, found)
        assert found.formula_mb == pytest.approx(expected, rel=TOLERANCE), found
        assert found.points["full_parameters"] <= found.points["clear_grad"] * (1 + TOLERANCE), "it keeps nothing"
