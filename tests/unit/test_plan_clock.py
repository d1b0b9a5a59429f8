"""The simulated clock: what passes while, and what disturbs what."""

from __future__ import annotations

import pytest

from hp_sharding.plan.clock import Clock, Duty, Transfer
from hp_sharding.plan.hardware import Hardware, Link

MB = 1e6
ONE = Hardware(Link(100 * MB, 0.001))


def _transfer(sent: float, hops: int = 1, after: Transfer | None = None) -> Transfer:
    return Transfer("bucket", "layer", Duty(int(2 * sent), sent, hops), after, None)


def _start(clock: Clock, name: str, *transfers: Transfer) -> None:
    lane = clock.lane(name)
    for transfer in transfers:
        clock.start(lane, transfer)


def test_a_transfer_takes_its_hops_and_then_its_bytes() -> None:
    clock, transfer = Clock(ONE), _transfer(50 * MB, hops=3)
    _start(clock, "gather", transfer)
    clock.wait(transfer)
    assert clock.now_s == pytest.approx(0.003 + 0.5)
    assert [span.lane for span in clock.spans] == ["gather", "wait"]
    assert clock.spans[0].nbytes == 100 * MB
    assert clock.waited_s == {"gather": pytest.approx(0.503)}


def test_transfers_of_one_lane_follow_each_other() -> None:
    clock, first, second = Clock(ONE), _transfer(10 * MB), _transfer(20 * MB)
    _start(clock, "gather", first, second)
    clock.wait(second)
    assert first.end_s == pytest.approx(0.101)
    assert second.start_s == first.end_s
    assert second.end_s == pytest.approx(0.302)


def test_lanes_share_their_cable_while_both_are_busy() -> None:
    clock, long, short = Clock(Hardware(Link(100 * MB, 0.0))), _transfer(30 * MB), _transfer(10 * MB)
    _start(clock, "gather", long)
    _start(clock, "reduce", short)
    clock.wait(long)
    # Half of the cable each until the short one is over; the rest alone.
    assert short.end_s == pytest.approx(0.2)
    assert long.end_s == pytest.approx(0.4)


@pytest.mark.parametrize(("shares", "end_s"), [(True, 0.2), (False, 0.1)])
def test_replicas_may_have_a_cable_of_their_own(shares: bool, end_s: float) -> None:
    hardware = Hardware(Link(100 * MB, 0.0), replicate=Link(100 * MB, 0.0), shares_link=shares)
    clock, one, other = Clock(hardware), _transfer(10 * MB), _transfer(10 * MB)
    _start(clock, "reduce", one)
    _start(clock, "replicate", other)
    clock.wait(one)
    assert one.end_s == pytest.approx(end_s)


def test_compute_is_slower_while_a_lane_is_busy_and_only_then() -> None:
    hardware = Hardware(Link(100 * MB, 0.0), compute_slowdown={"reduce": 1.25})
    clock, transfer = Clock(hardware), _transfer(50 * MB)
    _start(clock, "reduce", transfer)
    clock.compute(1.0, "backward", "layer")
    # 0.4 s of compute pass in the 0.5 s of the transfer.
    assert clock.now_s == pytest.approx(0.5 + 0.6)


def test_latency_disturbs_no_compute() -> None:
    hardware = Hardware(Link(100 * MB, 0.5), compute_slowdown={"reduce": 2.0})
    clock, transfer = Clock(hardware), _transfer(10 * MB)
    _start(clock, "reduce", transfer)
    clock.compute(0.5, "backward", "layer")
    assert clock.now_s == pytest.approx(0.5)


def test_two_lanes_disturb_compute_by_what_they_have_of_the_cable() -> None:
    hardware = Hardware(Link(100 * MB, 0.0), compute_slowdown={"gather": 1.25, "reduce": 2.0})
    clock, one, other = Clock(hardware), _transfer(100 * MB), _transfer(100 * MB)
    _start(clock, "gather", one)
    _start(clock, "reduce", other)
    clock.compute(1.0, "backward", "layer")
    assert clock.now_s == pytest.approx(1.0 / (1 - 0.2 / 2 - 0.5 / 2))


def test_compute_slows_the_wire_and_waiting_does_not() -> None:
    hardware = Hardware(Link(100 * MB, 0.0), wire_slowdown={"gather": 2.0})
    clock, transfer = Clock(hardware), _transfer(100 * MB)
    _start(clock, "gather", transfer)
    clock.compute(1.0, "forward", "layer")
    clock.wait(transfer)
    assert transfer.end_s == pytest.approx(1.0 + 0.5)


def test_what_follows_another_lane_begins_when_that_is_done() -> None:
    clock, first = Clock(Hardware(Link(100 * MB, 0.0))), _transfer(10 * MB)
    second = _transfer(10 * MB, after=first)
    lane = clock.lane("replicate")
    clock.start(lane, second)
    assert second.start_s is None
    _start(clock, "reduce", first)
    clock.wait(second)
    assert second.start_s == first.end_s == pytest.approx(0.1)


def test_a_collective_of_nothing_is_done_at_once() -> None:
    clock, transfer = Clock(ONE), _transfer(0.0, hops=0)
    _start(clock, "gather", transfer)
    assert transfer.end_s == 0.0
    assert transfer.held is None


def test_a_transfer_holds_its_tensors_until_it_is_done() -> None:
    clock = Clock(ONE)
    transfer = Transfer("bucket", "layer", Duty(1, 10 * MB, 1), None, held := object())
    _start(clock, "gather", transfer)
    clock.compute(0.05, "forward", "layer")
    assert transfer.held is held
    clock.compute(0.06, "forward", "layer")
    assert transfer.held is None
    assert transfer.end_s == pytest.approx(0.101)


def test_starting_a_collective_takes_the_thread_that_trains() -> None:
    clock = Clock(Hardware(Link(100 * MB, 0.0), launch_s=0.01))
    transfer = _transfer(10 * MB)
    _start(clock, "gather", transfer)
    assert clock.now_s == pytest.approx(0.01)
    clock.wait(transfer)
    assert clock.now_s == pytest.approx(0.1)


def test_nobody_waits_for_what_never_comes() -> None:
    clock = Clock(ONE)
    with pytest.raises(AssertionError, match="nobody has started"):
        clock.wait(_transfer(1.0))
