"""A timeline whose device comes to its marks later, and what it forgets."""

from __future__ import annotations

import json
import os
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hp_sharding.comm import Mark
from hp_sharding.errors import CommError, ConfigError
from hp_sharding.timeline import line, marks, recording
from hp_sharding.timeline.line import Timeline
from hp_sharding.timeline.marks import SCRIPT, ComputeMarks
from hp_sharding.timeline.sinks import json_lines
from hp_sharding.trace.spans import Span


class _Device:
    """Makes marks to which it comes when it is told to, if they have been settled."""

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._on_the_way: list[_Late] = []

    def mark(self) -> _Late:
        """A new one."""
        return _Late(self)

    def add(self, mark: _Late) -> None:
        """It has been settled."""
        self._on_the_way.append(mark)
        if self._at_once:
            self.catch_up()

    def catch_up(self, _: float = 0.0) -> None:
        """It comes to all of them."""
        for mark in self._on_the_way:
            mark.time_s = mark.set_s
        self._on_the_way.clear()


class _Late(Mark):
    def __init__(self, device: _Device) -> None:
        self._device = device
        super().__init__()

    def renew(self) -> None:
        """See ``Mark``."""
        self.set_s, self.time_s = time.perf_counter(), None

    def settle(self) -> None:
        """See ``Mark``."""
        self._device.add(self)


@pytest.fixture
def device() -> _Device:
    return _Device()


def _timeline(device: _Device, *, enabled: bool) -> Timeline:
    made = Timeline(enabled, new_mark=device.mark)
    made.subject.timeout_s = 1.0
    return made


def test_a_step_ends_where_the_device_has_come_to_its_end(device: _Device) -> None:
    timeline = _timeline(device, enabled=True)
    timeline.end_step(1)
    timeline.end_step(2)
    assert timeline.steps == []
    device.catch_up()
    assert timeline.summary()["steps"] == 1


def test_marks_are_settled_so_that_they_are_known_in_time() -> None:
    timeline = _timeline(_Device(at_once=True), enabled=True)
    timeline.end_step(1)
    timeline.end_step(2)
    assert len(timeline.steps) == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_a_trace_waits_for_the_device(enabled: bool, device: _Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", device.catch_up)
    timeline = _timeline(device, enabled=enabled)
    with timeline.record(steps=2) as recorded:
        timeline.end_step(1)
        timeline.end_step(2)
    assert recorded.trace is not None
    assert recorded.trace.numbers() == [1, 2]


def test_the_last_steps_wait_for_the_device(device: _Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", device.catch_up)
    timeline = _timeline(device, enabled=True)
    timeline.end_step(1)
    timeline.end_step(2)
    found = timeline.trace()
    assert found is not None
    assert found.numbers() == [2]


def test_a_device_that_does_not_come_to_the_end_is_an_error(device: _Device, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = _timeline(device, enabled=True)
    timeline.subject.timeout_s = 0.05
    timeline.end_step(1)
    end_s = time.monotonic() + 10

    def sleep(_: float) -> None:
        assert time.monotonic() < end_s, "it waits for ever"

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(CommError, match="rank 0: the end of the recorded steps did not come in time"):
        timeline.trace()


def test_what_was_under_way_when_a_block_failed_is_forgotten(device: _Device) -> None:
    timeline = _timeline(device, enabled=False)
    block = timeline.record()
    block.__enter__()
    timeline.end_step(1)
    block.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    device.catch_up()
    assert timeline.summary()["steps"] == 0


def test_a_recording_begins_where_its_block_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now_s)
    timeline = Timeline(enabled=False)
    for _ in range(2):
        with timeline.record(steps=1):
            clock.now_s += 0.005
            timeline.end_step()
        clock.now_s += 1.0
    assert timeline.summary()["step_ms"] == pytest.approx(5)


# -- what is forgotten -------------------------------------------------------------------------------------------------


class _Labelled:
    """Stands for a work."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_of_works_without_a_step_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "MOST", 40)
    timeline = Timeline(enabled=True)
    for number in range(21):
        timeline.watch(_Labelled(number))  # type: ignore[arg-type]
    assert [watched.work.number for watched in timeline._works] == list(range(10, 21))  # type: ignore[attr-defined]


def test_of_marks_without_a_step_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "MOST", 40)
    found = ComputeMarks(Mark)
    for number in range(41):
        found.until(str(number))
    _, entries = found.take()
    assert [entry.layer for entry in entries] == [str(number) for number in range(20, 41)]


def test_after_a_failed_forward_compute_is_outside_of_it() -> None:
    found = ComputeMarks(Mark)
    found.enter("forward", "blocks.0")
    found.reset()
    found.take()
    before, _ = found.take()
    assert before.label == SCRIPT


def test_a_recording_has_no_steps_of_an_earlier_one() -> None:
    timeline = Timeline(enabled=False)
    with timeline.record(steps=2):
        timeline.end_step(1)
        timeline.end_step(2)
    with timeline.record():
        timeline.end_step(3)
        found = timeline.trace()
    assert found is not None
    assert found.numbers() == [3]


def test_stopped_it_keeps_no_spans() -> None:
    timeline = Timeline(enabled=True)
    timeline.end_step(1)
    timeline.end_step(2)
    assert len(timeline._kept) == 1
    timeline.stop()
    assert len(timeline._kept) == 0


def test_a_long_recording_keeps_figures_of_its_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "MAX_STEPS", 3)
    timeline = Timeline(enabled=False)
    with timeline.record():
        for number in range(6):
            timeline.end_step(number)
        timeline.stop()
        assert timeline.summary()["steps"] == 3


# -- recordings and sinks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "others", "said"),
    [
        ((2, None), (3, False), r"record\(steps=...\) differs: rank 0 2, rank 1 3"),
        ((2, None), (2, True), r"record\(path=...\): only ranks \[1\] have a path, but it is rank 0 that writes"),
    ],
)
def test_ranks_that_do_not_agree_on_a_recording_hear_of_it(mine: Any, others: Any, said: str) -> None:
    other = json.dumps(recording._Asked(1, False, *others)).encode()
    meeting: Any = SimpleNamespace(is_first=True, gather=lambda asked: [asked, other])
    steps, path = mine
    with pytest.raises(ConfigError, match=said):
        Timeline(enabled=True).record(steps=steps, path=path)._agree(meeting)


def test_a_span_that_is_cut_has_its_share_of_the_bytes() -> None:
    span = Span(0, "gather", "0:a", 10.0, 20.0, 100, "a")
    assert recording._cut(span, 14.0) == span._replace(start_s=14.0, nbytes=60)
    assert recording._cut(span, 9.0) == span


def test_half_a_line_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = json_lines(tmp_path / "steps.jsonl")
    monkeypatch.setattr(os, "write", lambda _, data: len(data) - 1)
    with pytest.raises(OSError, match="only a part of a line could be written; is the disk full"):
        sink({"rank": 0, "step": 1})


def test_a_sink_that_goes_closes_its_file(tmp_path: Path) -> None:
    sink: Any = json_lines(tmp_path / "steps.jsonl")
    sink({"rank": 0, "step": 1})
    number, gone = sink._file, weakref.ref(sink)
    assert os.fstat(number)
    del sink
    assert gone() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
