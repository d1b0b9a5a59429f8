"""A group of one: what its works keep, and until when."""

from __future__ import annotations

import weakref

import paddle

from hp_sharding.comm.local import LocalCommunicator
from tests.unit.test_comm_contract import Gate


def test_a_work_that_is_done_keeps_nothing_that_it_has_followed() -> None:
    comm, gate = LocalCommunicator("one", (0,)), Gate()
    first = comm.all_reduce(paddle.ones([3]), after=gate)
    second = comm.all_reduce(paddle.ones([3]))
    seen_gate, seen_first = weakref.ref(gate), weakref.ref(first)
    gate.open()
    second.wait()
    del gate
    assert first.done()
    assert seen_gate() is None
    del first
    assert seen_first() is None


def test_a_lane_keeps_no_work_once_what_was_ahead_is_done() -> None:
    comm, gate = LocalCommunicator("one", (0,)), Gate()
    comm.all_reduce(paddle.ones([3]), after=gate)
    gate.open()
    later = comm.all_reduce(paddle.ones([3]))
    assert later.done()
    seen = weakref.ref(later)
    del later
    assert seen() is None
