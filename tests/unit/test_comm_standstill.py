"""Ranks that wait for each other, and those that only wait."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from hp_sharding.comm import standstill
from hp_sharding.comm.agreement import Agreement, Message
from hp_sharding.comm.standstill import Ring, Standstill, Wait


class _Work:
    """A collective of which the test says whether it is over."""

    def __init__(self, lane: str, sequence: int) -> None:
        self.lane, self.sequence, self.over = lane, sequence, False

    def done(self) -> bool:
        return self.over

    def describe(self) -> str:
        return f"the {self.sequence}th"


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "_PATIENCE_S", 0.0)


def _wait(lane: str, sequence: int, **launched: int) -> Wait:
    return Wait(lane, sequence, f"{lane} {sequence}", launched)


def _hear(*waits: Wait) -> list[Ring | None]:
    """What rank 0 makes of what ranks 0, 1 ... say, in that order."""
    one = Standstill(0, lambda _: None)
    return [one.hear(rank, wait) for rank, wait in enumerate(waits)]


def test_two_that_wait_for_each_other() -> None:
    first, ring = _hear(_wait("reduce", 3, gather=5, reduce=4), _wait("gather", 5, gather=6, reduce=3))
    assert first is None
    assert ring is not None
    assert ring.peer == 1
    assert "rank 1 for rank 0 in gather 5 on lane 'gather', rank 0 for rank 1 in reduce 3 on lane 'reduce'" in ring.text
    assert "the ranks have gone different ways and wait for each other" in ring.text


@pytest.mark.parametrize(
    "waits",
    [
        # Rank 0 has launched what rank 1 waits for.
        (_wait("reduce", 3, gather=6, reduce=4), _wait("gather", 5, gather=6, reduce=3)),
        # Rank 1 has launched what rank 0 waits for.
        (_wait("reduce", 3, gather=5, reduce=4), _wait("gather", 5, gather=6, reduce=4)),
        # All have launched it, and it is under way.
        (_wait("gather", 5, gather=6), _wait("gather", 5, gather=6)),
        (_wait("gather", 5, gather=6), _wait("gather", 6, gather=7)),
    ],
    ids=str,
)
def test_who_only_waits_is_no_ring(waits: tuple[Wait, ...]) -> None:
    assert _hear(*waits) == [None] * len(waits)


def test_three_in_a_ring() -> None:
    found = _hear(
        _wait("a", 0, a=1, b=1),
        _wait("b", 0, b=1, c=1),
        _wait("c", 0, c=1, a=1),
    )
    assert found[:2] == [None, None]
    assert found[2] is not None
    # 0 waits for 1 on a, 1 for 2 on b, 2 for 0 on c.
    for part in ("rank 0 for rank 1 in a 0", "rank 1 for rank 2 in b 0", "rank 2 for rank 0 in c 0"):
        assert part in found[2].text
    assert found[2].peer == 1


def test_one_beside_the_ring_is_not_part_of_it() -> None:
    found = _hear(
        _wait("a", 9, a=10, b=1, c=1),
        _wait("b", 0, b=1),
        _wait("c", 0, c=1),
    )
    assert found[2] is not None
    assert "rank 0" not in found[2].text
    assert found[2].peer in (1, 2)


class _Rank:
    """A Standstill and what it has told."""

    def __init__(self) -> None:
        self.told: list[Message] = []
        self.one = Standstill(0, self.told.append)

    def wait(self, work: _Work) -> None:
        self.one.begin_wait(work)


def test_a_wait_is_told_once_with_what_was_launched() -> None:
    rank, work = _Rank(), _Work("gather", 2)
    rank.one.launch("gather", 2)
    rank.one.launch("reduce", 0)
    rank.wait(work)
    for _ in range(3):
        assert rank.one.speak() is None
    assert rank.told == [["wait", "gather", 2, "the 2th", {"gather": 3, "reduce": 1}]]


def test_a_short_wait_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "_PATIENCE_S", 60.0)
    rank = _Rank()
    rank.one.launch("gather", 0)
    rank.wait(_Work("gather", 0))
    rank.one.speak()
    assert rank.told == []


@pytest.mark.parametrize("how", ["ended", "over", "nothing launched", "another thread launches"])
def test_who_may_go_on_says_nothing(how: str) -> None:
    rank, work = _Rank(), _Work("gather", 0)
    stop = threading.Event()
    if how != "nothing launched":
        rank.one.launch("gather", 0)

    def launch_and_live_on() -> None:
        rank.one.launch("reduce", 0)
        stop.wait(10)

    other = threading.Thread(target=launch_and_live_on)
    if how == "another thread launches":
        other.start()
        while "reduce" not in rank.one._launched:
            time.sleep(0.001)
    rank.wait(work)
    if how == "ended":
        rank.one.end_wait(work)
    work.over = how == "over"
    assert rank.one.speak() is None
    assert rank.told == []
    stop.set()
    if how == "another thread launches":
        other.join()
        rank.one.speak()
        assert len(rank.told) == 1, "once that thread is gone nobody else launches"


def test_a_wait_of_a_lane_s_thread_is_not_the_rank_s() -> None:
    rank = _Rank()
    rank.one.launch("gather", 0)
    thread = threading.Thread(target=rank.wait, args=(_Work("reduce", 0),))
    thread.start()
    thread.join()
    rank.one.speak()
    assert rank.told == []


class _Lane:
    """Takes part in an agreement."""

    def __init__(self) -> None:
        self.dropped: list[Any] = []

    def drop_after(self, limit: int, cause: Any) -> None:
        self.dropped.append(cause)


def test_the_group_is_broken_off_on_all_ranks() -> None:
    outboxes: list[list[Message]] = [[], []]
    members = [Agreement((4, 5), rank, outbox.append) for rank, outbox in zip((4, 5), outboxes, strict=True)]
    lanes = [_Lane(), _Lane()]
    for member, lane in zip(members, lanes, strict=True):
        member.add_lane("gather", lane)
        member.add_lane("reduce", lane)
    members[0].standstill.launch("reduce", 0)
    members[1].standstill.launch("gather", 0)
    members[0].standstill.begin_wait(_Work("reduce", 0))
    members[1].standstill.begin_wait(_Work("gather", 0))
    for member in members:
        member.check_standstill()
    for receiver, sender in ((1, 0), (0, 1)):
        for message in list(outboxes[sender]):
            members[receiver].hear((4, 5)[sender], message)
    for number, member in enumerate(members):
        assert member.broken is not None
        assert "wait for each other" in member.broken.text
        assert member.broken.peer == (5, 4)[number]
        assert lanes[number].dropped
