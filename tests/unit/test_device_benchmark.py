"""What the benchmark on the stand-in device derives: the speed of the links, and the verdicts."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import paddle
import pytest

from benchmarks import device_compute, device_report, gpt
from benchmarks.device_pace import Traffic, bandwidth_mb_s, parameter_bytes, traffic

_TINY = {"layers": 2, "width": 32, "heads": 2, "context": 8, "vocabulary": 24, "batch": 1}


@pytest.mark.parametrize("changed", [{}, {"layers": 3, "width": 16}, {"vocabulary": 40, "context": 5}])
def test_the_size_of_the_parameters_is_that_of_the_model(changed: dict[str, int]) -> None:
    shape = {**_TINY, **changed}
    model = gpt.build_model(gpt.Shape(**shape))
    assert parameter_bytes(shape) == sum(4 * parameter.size for parameter in model.parameters())


@pytest.mark.parametrize(
    ("replicas", "replicate_mb", "expected"),
    [
        (1, 2.0, Traffic(16 * 2**20, 2 * 4)),
        (2, 2.0, Traffic(16 * 2**20 + 8 * 2**20, 2 * 4 + 4)),
        (4, 8.0, Traffic(16 * 2**20 + 12 * 2**20, 2 * 4 + 1)),
    ],
)
def test_what_a_rank_sends(replicas: int, replicate_mb: float, expected: Traffic) -> None:
    assert traffic(16 * 2**20, replicas=replicas, buffer_mb=4.0, replicate_mb=replicate_mb) == expected


def test_at_this_bandwidth_communication_takes_as_long_as_asked_for() -> None:
    sent = Traffic(wire_bytes=3e6, n_collectives=20)
    bandwidth = bandwidth_mb_s(sent, communication_ms=40.0, latency_ms=0.5)
    assert 20 * 0.5 + 3.0 / bandwidth * 1e3 == pytest.approx(40.0)


def test_latencies_that_leave_nothing_for_the_bandwidth_are_an_error() -> None:
    with pytest.raises(ValueError, match="20 collectives of 2 ms each take longer than 40 ms"):
        bandwidth_mb_s(Traffic(3e6, 20), communication_ms=40.0, latency_ms=2.0)


# -- modelled compute --------------------------------------------------------------------------------------------------


def _gradients(model: gpt.GPT) -> list[Any]:
    codes = paddle.arange(8).reshape([1, 8])
    model(codes, codes).backward()
    return [parameter.grad.numpy() for parameter in model.parameters()]


def test_modelled_compute_takes_its_time_and_changes_no_number() -> None:
    plain, pausing = gpt.build_model(gpt.Shape(**_TINY)), gpt.build_model(gpt.Shape(**_TINY))
    expected = _gradients(plain)
    device_compute.pause_in_matmuls(pausing, 120.0)
    begin_s = time.perf_counter()
    found = _gradients(pausing)
    took_ms = (time.perf_counter() - begin_s) * 1e3
    assert 120.0 <= took_ms < 1000.0
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_each_layer_takes_its_part_of_modelled_compute_and_two_thirds_of_that_in_the_backward() -> None:
    model = gpt.build_model(gpt.Shape(**_TINY))
    device_compute.pause_in_matmuls(model, 144.0)
    for block in model.blocks:
        found_ms = [1e3 * np.array(layer.pauses) for layer in (block.qkv, block.out, block.up, block.down)]
        np.testing.assert_allclose(found_ms, [[6.0, 12.0], [2.0, 4.0], [8.0, 16.0], [8.0, 16.0]])


# -- verdicts ----------------------------------------------------------------------------------------------------------


def _rows(**by_round: list[float]) -> dict[str, dict[str, Any]]:
    return {name: {"step_ms": float(np.median(ms)), "step_ms_by_round": ms} for name, ms in by_round.items()}


def test_never_slower_in_one_replica_and_faster_by_a_fifth_in_several() -> None:
    rows = _rows(sharding_v2_overlap=[110.0, 110.0], stage1_overlap=[100.0, 100.0], stage2_overlap=[90.0, 91.0])
    alone = {verdict["ours"]: verdict["met"] for verdict in device_report.judge(rows, replicas=1)}
    assert alone == {"stage1_overlap": True, "stage2_overlap": True}
    replicated = {verdict["ours"]: verdict["met"] for verdict in device_report.judge(rows, replicas=2)}
    assert replicated == {"stage1_overlap": False, "stage2_overlap": True}


def test_slower_than_the_other_is_a_target_missed() -> None:
    rows = _rows(sharding_v2_overlap=[99.0, 98.0, 110.0], stage3_overlap=[100.0, 100.0, 100.0])
    (verdict,) = device_report.judge(rows, replicas=1)
    assert (verdict["ours"], verdict["met"]) == ("stage3_overlap", False)
    assert verdict["by_round"] == pytest.approx([0.99, 0.98, 1.1])


@pytest.mark.parametrize(
    ("compute_ms", "fair"), [(100.0, True), (91.0, True), (109.0, True), (89.0, False), (115.0, False)]
)
def test_no_verdict_where_the_machine_s_speed_has_changed_since_the_pace_was_settled(
    compute_ms: float, fair: bool
) -> None:
    share = device_report.communication_share(_rows(compute=[compute_ms]), 100.0)
    assert share == pytest.approx(100.0 / compute_ms)
    assert device_report.is_fair(share) == fair


def test_without_compute_alone_nothing_is_known_of_the_machine_s_speed() -> None:
    assert device_report.communication_share(_rows(stage2_overlap=[100.0]), 100.0) is None
    assert device_report.is_fair(None)
