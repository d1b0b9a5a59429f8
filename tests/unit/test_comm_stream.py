"""What a lane on a device refuses and lets go of, and how its group ends: with events and streams that do nothing.

What needs a device that runs beside the host is in ``tests/device``.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable
from typing import Any

import paddle
import pytest

from hp_sharding.comm import stream_group, stream_sums
from hp_sharding.comm.agreement import Cause
from hp_sharding.comm.device import current_device
from hp_sharding.comm.statements import Statements
from hp_sharding.comm.stream import Message, StreamCommunicator, StreamWork, _Lane
from hp_sharding.comm.stream_group import StreamGroup
from hp_sharding.comm.stream_marks import StreamMark
from hp_sharding.errors import CommError, ConfigError


class _Event:
    """Reached when the test says so."""

    reached = True

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes what Paddle's takes."""

    def record(self, stream: Any = None) -> None:
        """Stands for nothing."""

    def query(self) -> bool:
        return self.reached


class _Stream:
    stream_base = None

    def __init__(self, priority: int = 0) -> None:
        """Takes what Paddle's takes."""

    def wait_event(self, event: _Event) -> None:
        """Has nothing to wait for."""


class _Control:
    """Of the hosts' connections: nobody has gone."""

    statements = Statements((0,), 0, lambda _: None)

    def failure(self) -> Cause | None:
        return None

    def departure(self) -> Cause | None:
        return None

    def give_up(self, text: str) -> None:
        pass


class _Store:
    def add(self, key: str, number: int) -> int:
        return number


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle.device, "Stream", _Stream)
    monkeypatch.setattr(paddle.device, "Event", _Event)
    monkeypatch.setattr(paddle.device, "current_stream", _Stream)
    monkeypatch.setattr(stream_group, "default_store", _Store)
    monkeypatch.setattr(stream_group, "exchange", lambda mine, **_: {0: {"first_id": 7}})
    monkeypatch.setattr(stream_group, "_first_collectives", lambda comm: {"all_reduce": float(comm.nranks)})
    monkeypatch.setattr(paddle.distributed.collective, "_new_process_group_impl", lambda *_, **__: object())
    # Of what has failed here, the end of this process shall know nothing.
    for kept in ("_groups", "_abandoned"):
        monkeypatch.setattr(stream_group, kept, [])


def _group(nranks: int = 2) -> StreamGroup:
    control: Any = _Control()
    return StreamGroup(tuple(range(nranks)), 0, ["one"], device=current_device(), control=control, timeout_s=60.0)


Start = Callable[[StreamCommunicator], object]
_REFUSED: dict[str, tuple[Start, str]] = {
    "lengths": (
        lambda comm: comm.all_gather(paddle.zeros([8]), paddle.zeros([3])),
        "all_gather over 2 ranks got 8 elements .* one must be 2 times the other",
    ),
    "shape": (lambda comm: comm.all_reduce(paddle.zeros([2, 2])), "takes contiguous, one-dimensional tensors on cpu"),
    "part": (
        lambda comm: comm.reduce_scatter(paddle.zeros([2, 2]), paddle.zeros([8])),
        "reduce_scatter takes contiguous",
    ),
    "dtype": (lambda comm: comm.all_reduce(paddle.zeros([4], "bool")), "all_reduce cannot add up paddle.bool"),
    "source": (lambda comm: comm.broadcast(paddle.zeros([4]), src=2), "broadcast from group rank 2: .* ranks 0 to 1"),
}


@pytest.mark.parametrize("what", _REFUSED)
def test_what_does_not_fit_is_refused(what: str) -> None:
    group = _group()
    start, text = _REFUSED[what]
    with pytest.raises(ConfigError, match=text):
        start(group.communicators["one"])
    group.close()


def _is_closed(group: StreamGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group.communicators["one"].close()


def _has_failed(group: StreamGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group._watcher.fail("rank 1 is gone")


def _is_elsewhere(group: StreamGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:3")


@pytest.mark.parametrize(
    ("happens", "error", "text"),
    [
        (_is_closed, CommError, "this rank has closed the lane"),
        (_has_failed, CommError, "all_reduce of 'blocks.3' on lane 'one' failed: rank 1 is gone"),
        (_is_elsewhere, ConfigError, "paddle.set_device has made gpu:3 the current device"),
    ],
)
def test_a_lane_that_cannot_go_on_takes_nothing(
    happens: Callable[[StreamGroup, pytest.MonkeyPatch], None],
    error: type[Exception],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = _group()
    happens(group, monkeypatch)
    with pytest.raises(error, match=text):
        group.communicators["one"].all_reduce(paddle.zeros([4]), label="blocks.3")
    group.close()


def test_an_error_of_the_runtime_names_the_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    group = _group()

    def fails(self: _Stream, event: _Event) -> None:
        raise RuntimeError("the bus is gone")

    monkeypatch.setattr(_Stream, "wait_event", fails)
    with pytest.raises(CommError, match=r"all_reduce of 'blocks.3' .* library says: the bus is gone"):
        group.communicators["one"].all_reduce(paddle.zeros([4]), label="blocks.3")
    group.close()


class _After(StreamWork):
    """What another one follows."""


def _work(group: StreamGroup, kind: type[StreamWork] = StreamWork) -> StreamWork:
    work = kind(Message("all_reduce", "blocks.3", "one", 16), _Lane(), group._watcher, 0)
    work.begin(_Stream(), _Stream(), None)
    return work


def test_a_work_that_waits_lets_go_of_what_it_follows_once_that_is_done() -> None:
    group = _group()
    first = _work(group, _After)
    second = _work(group)
    second._after = first
    assert first.see()
    seen = weakref.ref(first)
    second._ended.reached = False
    assert not second.see()
    del first
    assert seen() is None
    group.close()


def test_a_work_that_is_done_lets_go_of_the_event_that_its_lane_has_waited_for() -> None:
    group = _group()
    work = _work(group)
    seen = weakref.ref(work._origin)
    assert seen() is not None
    assert work.see()
    assert seen() is None
    group.close()


def test_a_timed_wait_makes_the_stream_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    group = _group()
    work = _work(group)
    monkeypatch.setattr(_Stream, "wait_event", lambda self, event: waited.append(event))
    stalls: list[Any] = []
    work.timed_wait(stalls)
    assert waited == [work._ended]
    assert [stall.label for stall in stalls] == ["blocks.3"]
    group.close()


def test_a_mark_that_is_made_again_has_no_time_yet() -> None:
    group = _group()
    mark = StreamMark(group._watcher)
    before_s = mark.time_s
    mark._event.reached = False
    mark.renew()
    assert (before_s is not None, mark.time_s) == (True, None)
    group.close()


def test_what_is_exchanged_is_filled_up_to_a_multiple_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    group = _group(3)
    sizes: list[int] = []

    def note(self: StreamCommunicator, op: str, run: Any, touched: list[paddle.Tensor], **_: Any) -> None:
        sizes.extend(tensor.shape[0] for tensor in touched)

    monkeypatch.setattr(StreamCommunicator, "_start", note)
    group.communicators["one"].all_reduce(paddle.zeros([10], "bfloat16"))
    whole, sent, *terms = sizes
    assert (whole, sent) == (10, 12)
    assert terms == [12, 12, 4, 4]
    group.close()


def test_each_rank_is_sent_its_piece() -> None:
    asked: list[Any] = []

    class Group:
        def all_to_all_single_on_calc_stream(self, pieces: Any, sent: Any, *sizes: Any) -> None:
            asked.extend(sizes)
            pieces.copy_(sent, False)

    sent = paddle.to_tensor([1.0, 2.0, 10.0, 20.0, 100.0, 200.0], "bfloat16")
    terms = stream_sums.exchange(stream_sums.Scratch(), sent, 3)
    with paddle.no_grad():
        terms.run(Group(), sent)
    assert asked == [[2, 2, 2], [2, 2, 2]]
    assert terms.total.tolist() == [111.0, 222.0]


# ---- groups ----


def test_a_library_that_is_not_there_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError("not compiled with NCCL")

    monkeypatch.setattr(paddle.distributed.collective, "_new_process_group_impl", missing)
    with pytest.raises(ConfigError, match=r"rank 0: no tcp group on cpu: not compiled with NCCL. This build of Paddle"):
        _group()


def test_a_library_that_adds_up_wrongly_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_group, "_first_collectives", lambda comm: {"all_reduce": 2.0, "broadcast": 1.0})
    with pytest.raises(CommError, match=r"'one' over ranks \[0, 1\] give {'broadcast': 1.0}, expected 2"):
        _group()


def test_a_closed_group_has_no_thread_and_no_open_lane() -> None:
    group = _group()
    stream_group.close_all()
    assert not group._watcher._thread.is_alive()
    assert group.communicators["one"]._closed
    assert stream_group._groups == []


def test_lanes_that_nobody_has_end_and_are_forgotten() -> None:
    group = _group()
    group.handles(needs=[]).clear()
    deadline_s = time.monotonic() + 10
    while (group in stream_group._groups or group._watcher._thread.is_alive()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert group not in stream_group._groups
    assert not group._watcher._thread.is_alive()


def test_the_end_of_the_process_closes_them_and_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", asked.append)
    monkeypatch.setattr(
        atexit, "unregister", lambda function: asked.__setitem__(slice(None), _without(asked, function))
    )
    groups = [_group(), _group()]
    assert len(asked) == 1
    asked[0]()
    assert all(group._closed for group in groups)
    assert stream_group._groups == []


def _without(asked: list[Any], function: Any) -> list[Any]:
    return [each for each in asked if each is not function]
