"""The lanes of the soak are late where they say so, in every order that is allowed, and bring what was asked for."""

from __future__ import annotations

import sys
import time

import numpy as np
import paddle
import pytest

from hp_sharding.comm import Work
from tests.fakes import Event, SlowLane, WaitingLane
from tests.slow_lanes import LONGEST_S, Clock, DelayedLane, SeenLate, Turns


class _Pair:
    """Two lanes with delays over one log of events."""

    def __init__(self, seed: int) -> None:
        self.log: list[Event] = []
        lanes = [WaitingLane(name, log=self.log) for name in ("first", "second")]
        self.turns = Turns(f"{seed}", lanes)
        self.first, self.second = (DelayedLane(lane, self.turns) for lane in lanes)

    def delivered(self) -> tuple[str, ...]:
        return tuple(event.label for event in self.log if event.what == "deliver")


def _reduce(lane: DelayedLane, label: str, *, after: Work | None = None) -> tuple[Work, paddle.Tensor]:
    tensor = paddle.full([4], 3.0)
    return lane.all_reduce(tensor, label=label, after=after), tensor


def test_lanes_overtake_each_other_and_keep_their_own_order() -> None:
    orders = set()
    for seed in range(200):
        pair = _Pair(seed)
        pair.turns.stir()
        started = [_reduce(pair.first, "a"), _reduce(pair.second, "x"), _reduce(pair.first, "b")]
        started.append(_reduce(pair.second, "y"))
        for work, tensor in started:
            work.wait()
            np.testing.assert_array_equal(tensor.numpy(), 3.0)
        orders.add(pair.delivered())
    assert all(order.index("a") < order.index("b") and order.index("x") < order.index("y") for order in orders)
    assert len(orders) == 6, orders


@pytest.mark.parametrize("seed", range(5))
def test_what_follows_a_work_comes_after_it(seed: int) -> None:
    pair = _Pair(seed)
    pair.turns.stir()
    before, _ = _reduce(pair.first, "a")
    work, _ = _reduce(pair.second, "x", after=before)
    for _ in range(20):
        work.done()
    work.wait()
    assert pair.delivered() == ("a", "x")


def test_its_end_is_seen_later_than_it_is_there() -> None:
    n_unseen = 0
    for seed in range(20):
        pair = _Pair(seed)
        work, _ = _reduce(pair.first, "a")
        assert isinstance(work, SeenLate)
        work.inner.wait()
        n_unseen += not work.done()
        assert any(work.done() for _ in range(4))
        assert work.end_s is not None
    assert 5 < n_unseen < 20


def test_a_clock_is_mostly_short_and_now_and_then_long() -> None:
    drawn = [Clock("0").draw_s()] + [each for clock in [Clock("1")] for each in (clock.draw_s() for _ in range(20000))]
    assert max(drawn) == LONGEST_S
    assert 0.4 < drawn.count(0.0) / len(drawn) < 0.6
    assert 0.0003 < sum(drawn) / len(drawn) < 0.003
    assert 20 < sum(delay_s >= 0.02 for delay_s in drawn) < 400


def test_a_clock_lets_time_pass_before_the_end_is_seen() -> None:
    lane = SlowLane("first", bytes_per_s=1e9)
    clock = Clock("0")
    clock.draw_s = lambda: 0.02  # type: ignore[method-assign]
    begin_s = time.monotonic()
    work, tensor = _reduce(DelayedLane(lane, clock), "a")
    assert isinstance(work, SeenLate)
    work.inner.wait()
    assert time.monotonic() - begin_s > 0.04, "before it was handed over, and on the lane"
    assert not work.done()
    work.wait()
    assert work.done()
    assert time.monotonic() - begin_s > 0.06
    np.testing.assert_array_equal(tensor.numpy(), 3.0)
    lane.close()


def test_threads_take_turns_as_before_when_it_is_over() -> None:
    before_s = sys.getswitchinterval()
    clock = Clock("0")
    clock.stir()
    clock.over()
    assert sys.getswitchinterval() == pytest.approx(before_s)
