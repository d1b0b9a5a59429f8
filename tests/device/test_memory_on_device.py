"""Model state on the stand-in device, by the device's own count, beside the arithmetic, at every point of a step.

No memory is kept for later there, so what comes and goes within a step is seen to go.
"""

from __future__ import annotations

import pytest

from tests.device import standin
from tests.device.running import on_device
from tests.dist.test_memory import BUCKET_MB, PARAMETERS_MB, TOLERANCE, Measured, measure

pytestmark = pytest.mark.usefixtures("standin_device")

_IN_FLIGHT_MB = 2 * BUCKET_MB
"""Gradients of a bucket that fills up and of one that is reduced, at most."""
_GATHERED_MB = 2 * BUCKET_MB
"""In stage 3: the unit in use and the one ahead."""
_LATE = standin.Pace(latency_ms=2.0, jitter_ms=2.0)


def _measure_all(rank: int, nranks: int, n_replicas: int, backwards: int, stages: list[int]) -> dict[int, Measured]:
    """By stage."""
    device = standin.Device()
    found = {
        stage: measure(device, nranks, n_replicas, backwards=backwards, settings={"stage": stage}) for stage in stages
    }
    assert device.writes_after_free() == 0
    return found


def _state_mb(stage: int, nshards: int, *, spare: bool) -> tuple[float, float]:
    """Once wrapped, and from the third step on. Without gradients in flight; in stage 1 they are part of the state.

    ``spare``: replicas have a second arena for what is to be added to the first.
    """
    shard = PARAMETERS_MB / nshards
    wrapped = (PARAMETERS_MB if stage < 3 else shard) + shard
    steady = wrapped + 2 * shard + {1: PARAMETERS_MB, 2: 0.0, 3: _GATHERED_MB}[stage] + (shard if spare else 0.0)
    return wrapped, steady


def _assert_as_said(found: Measured, stage: int, nshards: int, *, backwards: int, spare: bool) -> None:
    wrapped, steady = _state_mb(stage, nshards, spare=spare)
    in_flight = _IN_FLIGHT_MB if stage > 1 else 0.0
    gathered = _GATHERED_MB if stage == 3 else 0.0
    between = {"wrap": wrapped, "step": steady, "clear_grad": steady}
    if backwards == 1:
        between["forward"] = steady
    for point, mb in between.items():
        assert found.points[point] == pytest.approx(mb, rel=TOLERANCE), f"{point}: {found}"
    for point in {"forward", "backward"} - set(between):
        least = (steady - gathered) * (1 - TOLERANCE)
        most = (steady + in_flight) * (1 + TOLERANCE)
        assert least <= found.points[point] <= most, f"{point}: {found}"
    assert found.peak_mb <= (steady + in_flight) * (1 + TOLERANCE) + 2 * BUCKET_MB, f"autograd's own two: {found}"
    assert found.formula_mb == pytest.approx(steady + in_flight, rel=TOLERANCE), found
    assert found.report_mb == pytest.approx(found.points["clear_grad"], rel=0.01), f"another count: {found}"
    assert found.points["full_parameters"] <= found.points["clear_grad"] * (1 + TOLERANCE), f"it keeps nothing: {found}"


@pytest.mark.parametrize(("nranks", "n_replicas", "backwards"), [(2, 1, 1), (4, 2, 2)])
def test_every_point_of_a_step_is_what_the_formula_says(nranks: int, n_replicas: int, backwards: int) -> None:
    for everything in on_device(_measure_all, nranks, n_replicas, backwards, [1, 2, 3], pace=_LATE):
        for stage, found in everything.items():
            spare = n_replicas > 1 and backwards > 1 and stage > 1
            _assert_as_said(found, stage, nranks // n_replicas, backwards=backwards, spare=spare)


def test_the_report_does_not_count_what_paddle_keeps_for_later() -> None:
    """Paddle's own caching takes more from the device than is in use; the report counts what is in use."""
    _, steady = _state_mb(2, 2, spare=False)
    for everything in on_device(_measure_all, 2, 1, 1, [2], caching=True):
        assert everything[2].points["clear_grad"] > steady * (1 + TOLERANCE)
        assert everything[2].report_mb == pytest.approx(steady, rel=TOLERANCE)
