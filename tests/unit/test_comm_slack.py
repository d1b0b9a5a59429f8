"""Threads whose timers may be late."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

import paddle
import pytest

from hp_sharding.comm import collision_free_groups
from hp_sharding.comm.slack import SLACK_S, slow_timers

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such thing")
_GET = 30


def _slack_ns() -> int:
    return int(ctypes.CDLL(None).prctl(_GET, 0, 0, 0, 0))


def _slack_of_new_thread_ns() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(_slack_ns()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_started_inside_inherit_it_and_nobody_else() -> None:
    before_ns = _slack_ns()
    with slow_timers():
        assert _slack_of_new_thread_ns() == round(SLACK_S * 1e9)
    assert _slack_ns() == before_ns
    assert _slack_of_new_thread_ns() == before_ns


def test_it_ends_with_an_error_too() -> None:
    before_ns = _slack_ns()
    with pytest.raises(RuntimeError, match="inside"), slow_timers():
        raise RuntimeError("inside")
    assert _slack_ns() == before_ns


def test_where_it_may_not_be_asked_for_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class _Libc:
        @staticmethod
        def prctl(option: int, *_: Any) -> int:
            asked.append(option)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda _: _Libc)
    with slow_timers():
        pass
    assert asked == [_GET]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_gloo_groups_of_paddles_are_made_inside(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Its Gloo threads wake up a hundred times a second each, for as long as the process lives. Others do not."""
    found: list[int] = []

    def make(*args: Any, **more: Any) -> None:
        found.append(_slack_of_new_thread_ns())

    for module in (paddle.distributed.collective, paddle.distributed.parallel):
        monkeypatch.setattr(module, "_new_process_group_impl", make)
    with collision_free_groups():
        paddle.distributed.collective._new_process_group_impl(backend, None, 0, 1, "alone")
    assert found == [round(SLACK_S * 1e9) if backend == "gloo" else _slack_ns()]
