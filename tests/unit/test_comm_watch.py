"""The thread that looks after collectives on streams, with works and times that the test makes."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from io import StringIO

import pytest

from hp_sharding.comm import watch
from hp_sharding.comm.agreement import Cause
from hp_sharding.comm.statements import Statements
from hp_sharding.comm.watch import Watcher


class _Control:
    """Nobody has gone."""

    statements = Statements((0,), 0, lambda _: None)

    def failure(self) -> Cause | None:
        return None

    def departure(self) -> Cause | None:
        return None

    def give_up(self, text: str) -> None:
        pass


class _Work:
    """Done as soon as the test says so."""

    def __init__(self) -> None:
        self.issued_s = time.perf_counter()
        self.is_over = threading.Event()
        self.looks = 0
        self.slow_s = 0.0

    def done(self) -> bool:
        self.looks += 1
        time.sleep(self.slow_s)
        return self.is_over.is_set()

    def fail(self, reason: str) -> None:
        pass

    def describe(self) -> str:
        return "a sum"


def _watcher(timeout_s: float = 60.0, at_rest: Callable[[], None] | None = None) -> Watcher:
    return Watcher("rank 0", timeout_s=timeout_s, control=_Control(), prepare=lambda: None, at_rest=at_rest)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)


def test_what_is_added_later_is_looked_at_too() -> None:
    watcher = _watcher()
    time.sleep(0.1)
    for _ in range(2):
        work = _Work()
        watcher.add(work)
        _wait_for(lambda work=work: work.looks > 0)  # type: ignore[misc]
        work.is_over.set()
        _wait_for(lambda: not watcher._works)
    watcher.stop()


def test_it_is_at_rest_again_when_all_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_AT_REST_S", 0.02)
    rests = threading.Event()
    watcher, work = _watcher(at_rest=rests.set), _Work()
    watcher.add(work)
    _wait_for(lambda: work.looks > 0)
    rests.clear()
    work.is_over.set()
    assert rests.wait(10)
    watcher.stop()


def test_whoever_stops_it_waits_for_its_last_look() -> None:
    watcher, work = _watcher(), _Work()
    work.slow_s = 0.4
    watcher.add(work)
    _wait_for(lambda: work.looks > 0)
    watcher.stop()
    assert not watcher._thread.is_alive(), "it may look at works whose lanes are gone"


def test_it_looks_several_times_within_a_short_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = time.sleep

    def noting_sleep(seconds: float) -> None:
        if threading.current_thread().name == "hp_sharding-watch":
            pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", noting_sleep)
    watcher, work = _watcher(timeout_s=0.4), _Work()
    work.is_over.set()
    watcher.add(work)
    _wait_for(lambda: len(pauses) >= 1)
    watcher.stop()
    assert pauses[0] == pytest.approx(0.1)


def test_a_process_whose_main_thread_goes_on_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "stderr", StringIO())
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda **_: None)
    watcher = _watcher(timeout_s=0.05)
    watcher.add(_Work())
    _wait_for(lambda: watcher.failure is not None)
    assert "a sum cannot end" in str(watcher.failure)
    for _ in range(30):
        time.sleep(0.02)
    watcher.stop()
    assert codes == []
