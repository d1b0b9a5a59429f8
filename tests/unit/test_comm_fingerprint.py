"""Fingerprints: equal where the same was launched in the same order, on each lane by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from hp_sharding.comm import Communicator, Fingerprint, Prints
from hp_sharding.comm.history import KEPT, History, Launch
from hp_sharding.comm.local import LocalCommunicator
from tests.fakes import WaitingLane

LANES = ("gather", "reduce", "replicate")
Lanes = dict[str, Any]


def _fingerprint(lanes: tuple[str, ...] = LANES) -> Fingerprint:
    return Fingerprint({name: LocalCommunicator(name, (0,)) for name in lanes}, own=("gather",))


def _prints(launch: Callable[[Lanes], None]) -> Prints:
    fingerprint = _fingerprint()
    launch(fingerprint.lanes)
    return fingerprint.take()


def _reduce(lanes: Lanes, label: str, *, numel: int = 4, lane: str = "reduce", dtype: str = "float32") -> None:
    lanes[lane].reduce_scatter(paddle.zeros([numel], dtype), paddle.zeros([numel], dtype), label=label)


def _gather(lanes: Lanes, label: str, *, numel: int = 4) -> None:
    lanes["gather"].all_gather(paddle.zeros([numel]), paddle.zeros([numel]), label=label)


def _usual(lanes: Lanes) -> None:
    for number in range(3):
        _reduce(lanes, f"{number}:blocks.{number}, backward 0")
        _gather(lanes, f"{number}:blocks.{number}")


def test_the_same_launches_give_the_same() -> None:
    assert _prints(_usual) == _prints(_usual)


def test_which_lane_comes_first_does_not_count() -> None:
    def lane_by_lane(lanes: Lanes) -> None:
        for number in range(3):
            _gather(lanes, f"{number}:blocks.{number}")
        for number in range(3):
            _reduce(lanes, f"{number}:blocks.{number}, backward 0")

    assert _prints(lane_by_lane) == _prints(_usual)


def _twice(lanes: Lanes) -> None:
    _reduce(lanes, "one")
    _reduce(lanes, "one")


DIFFERENT: dict[str, Callable[[Lanes], None]] = {
    "label": lambda lanes: _reduce(lanes, "another"),
    "bytes": lambda lanes: _reduce(lanes, "one", numel=8),
    "dtype": lambda lanes: _reduce(lanes, "one", dtype="float64"),
    "lane": lambda lanes: _reduce(lanes, "one", lane="replicate"),
    "kind": lambda lanes: lanes["reduce"].all_reduce(paddle.zeros([4]), label="one"),
    "nothing": lambda lanes: None,
    "twice": _twice,
    "no label": lambda lanes: _reduce(lanes, ""),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_is_different_shows_and_stays_so(what: str) -> None:
    """Also after any number of launches that are the same: fingerprints go on, they do not begin anew."""

    def one(lanes: Lanes) -> None:
        _usual(lanes)
        _reduce(lanes, "one")
        for _ in range(50):
            _usual(lanes)

    def other(lanes: Lanes) -> None:
        _usual(lanes)
        DIFFERENT[what](lanes)
        for _ in range(50):
            _usual(lanes)

    assert _prints(one).shared != _prints(other).shared
    assert _prints(one).own == _prints(other).own


@pytest.mark.parametrize("labels", [("one", "two"), ("", "two"), ("8:blocks.8", "9:blocks.9")])
def test_the_order_counts(labels: tuple[str, str]) -> None:
    def in_order(lanes: Lanes) -> None:
        for label in labels:
            _reduce(lanes, label)

    def reversed_(lanes: Lanes) -> None:
        for label in reversed(labels):
            _reduce(lanes, label)

    assert _prints(in_order).shared != _prints(reversed_).shared


def test_gathers_are_apart() -> None:
    def more(lanes: Lanes) -> None:
        _usual(lanes)
        _gather(lanes, "one")

    assert _prints(more).shared == _prints(_usual).shared
    assert _prints(more).own != _prints(_usual).own
    assert _prints(more).counts == {"gather": 4, "reduce": 3, "replicate": 0}


def test_no_two_of_many_sequences_are_taken_for_one() -> None:
    draw = np.random.default_rng(0)
    seen: dict[int, tuple[Any, ...]] = {}
    for _ in range(3000):
        chosen = tuple((int(draw.integers(3)), int(draw.integers(1, 3))) for _ in range(draw.integers(1, 5)))

        def launch(lanes: Lanes, chosen: tuple[tuple[int, int], ...] = chosen) -> None:
            for label, numel in chosen:
                _reduce(lanes, str(label), numel=numel)

        assert seen.setdefault(_prints(launch).shared, chosen) == chosen


def test_everything_is_passed_on() -> None:
    inner = WaitingLane("gather")
    lane = Fingerprint({"gather": inner}, own=()).lanes["gather"]
    output = paddle.zeros([2])
    work = lane.all_gather(output, paddle.ones([2]), label="a")
    lane.reduce_scatter(paddle.zeros([2]), paddle.ones([2]), label="b", after=work)
    lane.all_reduce(paddle.ones([2]), label="c")
    last = lane.broadcast(paddle.ones([2]), src=0, label="d")
    assert np.isnan(output.numpy()).all(), "not before anybody waits"
    last.wait()
    assert output.tolist() == [1, 1]
    assert [event[1:4] for event in inner.log if event.what == "start"] == [
        ("gather", "all_gather", "a"),
        ("gather", "reduce_scatter", "b"),
        ("gather", "all_reduce", "c"),
        ("gather", "broadcast", "d"),
    ]
    assert isinstance(lane, Communicator)
    assert (lane.lane, lane.rank, lane.nranks, lane.is_broken) == ("gather", 0, 1, False)


def test_the_history_has_the_newest_launches() -> None:
    fingerprint = _fingerprint()
    for number in range(KEPT + 5):
        _reduce(fingerprint.lanes, str(number))
    _gather(fingerprint.lanes, "0:blocks.0")
    history = fingerprint.history
    assert [launch.number for launch in history.recent("reduce", 3)] == [KEPT + 2, KEPT + 3, KEPT + 4]
    assert [launch.label for launch in history.recent("reduce", 2)] == [str(KEPT + 3), str(KEPT + 4)]
    assert len(history.recent("reduce", 10 * KEPT)) == KEPT
    (launch,) = history.recent("gather", 5)
    assert launch[:4] == (0, "all_gather", "0:blocks.0", 16)
    assert launch.at_s > history.recent("reduce", 1)[0].at_s
    assert history.recent("replicate", 5) == []
    assert history.recent("reduce", 0) == []


def test_a_history_of_its_own() -> None:
    history = History(["gather"])
    history.lanes["gather"].append(Launch(0, "all_reduce", "x", 4, 1.0))
    assert history.recent("gather", 1) == [Launch(0, "all_reduce", "x", 4, 1.0)]


class _Ended(LocalCommunicator):
    """Remembers that it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("end", ["close", "break_off"])
def test_the_end_is_passed_on(end: str) -> None:
    lane = _Ended("gather", (0,))
    watched = Fingerprint({"gather": lane}, own=()).lanes["gather"]
    watched.close() if end == "close" else watched.break_off("no memory is left")
    assert lane.is_closed
