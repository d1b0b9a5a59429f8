"""Lanes between ranks that are threads of one process: how they wait, fail and end. No store, no other process."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle
import pytest

from hp_sharding.comm import Work, group
from hp_sharding.comm.agreement import Agreement
from hp_sharding.comm.group import TcpGroup
from hp_sharding.comm.tcp import TcpCommunicator
from hp_sharding.errors import CommError

LANES = ["gather", "reduce"]
LIMIT_S = 30.0
Make = Callable[..., list[TcpGroup]]


def _on_each(act: Callable[[int], Any]) -> list[Any]:
    """What ``act`` returns for each of two ranks, in threads; the test's own raises what goes wrong in them."""
    found: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = act(rank)
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "a rank is stuck"
    return [found[rank] for rank in range(2)]


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)


class _Place:
    """Where two ranks meet that are threads."""

    def __init__(self) -> None:
        self._said: dict[int, str] = {}
        self._all_here = threading.Barrier(2, timeout=LIMIT_S)

    def exchange(self, mine: dict[str, Any], *, ranks: Sequence[int], me: int, timeout_s: float) -> dict[int, Any]:
        self._said[me] = json.dumps(mine)
        self._all_here.wait()
        return {rank: json.loads(self._said[rank]) for rank in ranks}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes the groups of both ranks. What is left of them in the end is closed."""
    for name in ("_ANSWER_S", "_FLIGHT_S"):
        monkeypatch.setattr(group, name, 3.0)
    monkeypatch.setattr(group, "ready_default_store", lambda: None)

    def groups(lanes: Sequence[str] = LANES, timeout_s: float = LIMIT_S) -> list[TcpGroup]:
        monkeypatch.setattr(group, "exchange", _Place().exchange)
        return _on_each(lambda rank: TcpGroup((0, 1), rank, lanes, timeout_s=timeout_s))

    yield groups
    group.close_all()


def _on_both(groups: list[TcpGroup], lane: str, all_reduce: Callable[..., object]) -> list[TcpCommunicator]:
    """A lane of each rank, whose sums are this instead."""
    lanes = [each.communicators[lane] for each in groups]
    for comm in lanes:
        comm._ring.all_reduce = all_reduce  # type: ignore[method-assign, assignment]
    return lanes


# ---- works ----


def test_ranks_that_wait_on_different_lanes_are_told_so(make: Make) -> None:
    groups = make(timeout_s=10.0)

    def wait(rank: int) -> str:
        with pytest.raises(CommError) as caught:
            groups[rank].communicators[LANES[rank]].all_reduce(paddle.ones([3]), label=f"of rank {rank}").wait()
        return str(caught.value)

    for text in _on_each(wait):
        assert "gone different ways and wait for each other" in text
        assert "of rank 0" in text
        assert "of rank 1" in text


def test_whoever_waits_goes_on_when_it_is_over(make: Make) -> None:
    lanes = _on_both(make(), "gather", lambda *_: time.sleep(0.3))

    def wait(rank: int) -> bool:
        work = lanes[rank].all_reduce(paddle.ones([3]))
        work.wait()
        return work.done()

    assert _on_each(wait) == [True, True]


def test_a_work_is_not_entered_before_the_one_that_it_follows_is_over(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, goes_on = make(), threading.Event()
    firsts: list[Work] = []
    entered: list[bool] = []
    enter = Agreement.enter

    def noting(self: Agreement, lane: str, sequence: int, timeout_s: float) -> None:
        if lane == "reduce":
            entered.append(all(first.done() for first in firsts))
        enter(self, lane, sequence, timeout_s)

    monkeypatch.setattr(Agreement, "enter", noting)
    firsts += [comm.all_reduce(paddle.ones([3])) for comm in _on_both(groups, "gather", lambda *_: goes_on.wait(10))]
    works = [
        each.communicators["reduce"].all_reduce(paddle.ones([3]), after=first)
        for each, first in zip(groups, firsts, strict=True)
    ]
    time.sleep(0.2)
    assert entered == []
    goes_on.set()
    _on_each(lambda rank: works[rank].wait())
    assert len(entered) == 2


def test_a_transfer_that_fails_says_why_and_lets_go_of_the_memory(make: Make) -> None:
    errors, seen = [RuntimeError("the link is down")], []

    def fails(data: Any, adder: Any) -> None:
        seen.append(weakref.ref(data))
        # As that of a link is, which raises it again for whoever comes later.
        raise errors[0]

    lanes = _on_both(make(), "gather", fails)

    def wait(rank: int) -> None:
        work: Any = lanes[rank].all_reduce(paddle.ones([3]), label="blocks.3")
        for wait_for_it in (work.wait, work.follow):
            with pytest.raises(CommError, match="the link is down"):
                wait_for_it()

    _on_each(wait)
    _wait_for(lambda: bool(seen) and all(ref() is None for ref in seen))


def test_a_sum_is_written_to_the_memory_of_its_output_and_not_beyond(make: Make) -> None:
    lengths: list[tuple[int, int]] = []

    def note(result: Any, data: Any, *_: Any, **__: Any) -> None:
        lengths.append((len(result), len(data)))

    lanes = [each.communicators["gather"] for each in make()]
    for comm in lanes:
        comm._ring.reduce_scatter = note  # type: ignore[method-assign, assignment]
    _on_each(lambda rank: lanes[rank].reduce_scatter(paddle.zeros([5]), paddle.zeros([10])).wait())
    assert lengths == [(5, 10)] * 2


def test_who_sees_a_work_done_finds_nobody_at_its_memory(make: Make) -> None:
    goes_on, seen = threading.Event(), []
    held: list[bool] = []

    def adds_up(data: Any, adder: Any) -> None:
        seen.append(weakref.ref(data))
        goes_on.wait(10)

    lanes = _on_both(make(), "gather", adds_up)
    works: list[Any] = [comm.all_reduce(paddle.ones([3])) for comm in lanes]
    _wait_for(lambda: len(seen) == 2)
    # So that the work of each rank is done when one of them looks.
    both = threading.Barrier(2, timeout=10)

    def note() -> None:
        both.wait()
        held.append(any(ref() is not None for ref in seen))
        both.wait()

    for work in works:
        work.when_done(note)
    goes_on.set()
    _on_each(lambda rank: works[rank].wait())
    _wait_for(lambda: len(held) == 2)
    assert held == [False, False]
    _wait_for(lambda: all(comm.n_under_way() == 0 for comm in lanes))


# ---- the end of a lane ----


def test_a_closed_lane_has_no_threads_and_takes_nothing_more(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    for each in make():
        for comm in each.communicators.values():
            comm.close()
            assert not comm._worker.is_alive()
            assert not comm._links._sender.is_alive()
            with pytest.raises(CommError, match="closed the lane"):
                comm.all_reduce(paddle.ones([3]))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_end_of_a_lane_waits_for_what_is_in_flight(make: Make) -> None:
    lanes = _on_both(make(), "gather", lambda *_: time.sleep(0.5))
    works: list[Work] = [comm.all_reduce(paddle.ones([3])) for comm in lanes]
    assert all(comm.join(10.0) for comm in lanes)
    assert all(work.done() for work in works)


def test_lanes_that_nobody_has_end_and_are_forgotten(make: Make) -> None:
    groups = make()
    handles = [each.handles() for each in groups]
    del handles
    gc.collect()
    _wait_for(lambda: not any(each in group._groups for each in groups))
    _wait_for(lambda: not any(comm._worker.is_alive() for each in groups for comm in each.communicators.values()))


def test_closing_all_ends_every_lane(make: Make) -> None:
    groups = make()
    group.close_all()
    assert not any(comm._worker.is_alive() for each in groups for comm in each.communicators.values())
    assert not any(each in group._groups for each in groups)


def test_closing_all_waits_for_a_thread_that_closes_a_lane_already(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_JOIN_S", 10.0)
    groups, begun, goes_on = make(["gather"]), threading.Event(), threading.Event()
    comm = groups[0].communicators["gather"]
    join = comm.join

    def late_join(timeout_s: float) -> bool:
        begun.set()
        goes_on.wait(10)
        return join(timeout_s)

    groups[1].close("gather")
    monkeypatch.setattr(comm, "join", late_join)
    closing = threading.Thread(target=groups[0].close, args=("gather",))
    closing.start()
    assert begun.wait(10)
    ending = threading.Thread(target=group.close_all)
    ending.start()
    ending.join(0.3)
    assert ending.is_alive(), "the process would end in the middle of it"
    goes_on.set()
    for thread in (ending, closing):
        thread.join(10)
        assert not thread.is_alive()


def test_joining_waits_for_a_watcher_that_has_closed_the_lanes_itself(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_unused = TcpGroup._end_unused

    def slow_end(self: TcpGroup) -> None:
        end_unused(self)
        time.sleep(0.3)

    monkeypatch.setattr(TcpGroup, "_end_unused", slow_end)
    groups = make(["gather"])
    for each in groups:
        each.handles().clear()
    gc.collect()
    _wait_for(groups[0]._over.is_set)
    groups[0].join()
    watcher = groups[0]._peers._watcher
    assert watcher is not None
    assert not watcher.is_alive()


def test_the_end_of_the_process_is_asked_for_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(atexit, "register", asked.append)
    monkeypatch.setattr(
        atexit, "unregister", lambda function: asked.__setitem__(slice(None), _without(asked, function))
    )
    for _ in range(2):
        make(["gather"])
    assert asked == [group.close_all]


def _without(asked: list[Any], function: Any) -> list[Any]:
    return [each for each in asked if each is not function]
