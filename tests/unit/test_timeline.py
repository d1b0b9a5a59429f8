"""Spans and their sums, by a clock that the test turns."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import paddle
import pytest
from paddle import nn

from hp_sharding.comm import Work
from hp_sharding.errors import CommError
from hp_sharding.timeline import MAX_STEPS, Span, StepTimes, Timeline
from hp_sharding.timeline.steps import times_of
from hp_sharding.trace.figures import Groups
from hp_sharding.trace.spans import Step
from tests.fakes import wrap


class _Clock:
    """Stands still until told otherwise."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def pass_ms(self, ms: float) -> None:
        self.now_s += ms / 1e3

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    turned = _Clock()
    monkeypatch.setattr("time.perf_counter", turned.perf_counter)
    return turned


class _Work(Work):
    """A work whose times the test sets; waiting for it takes ``wait_ms``."""

    def __init__(self, clock: _Clock, lane: str = "gather", *, wait_ms: float = 0.0, error: bool = False) -> None:
        self.op, self.label, self.lane, self.nbytes = "all_gather", "0:net", lane, 64
        self.start_s: float | None = None
        self.end_s: float | None = None
        self._clock, self._wait_ms, self._error = clock, wait_ms, error

    def run(self, ms: float) -> None:
        """Begins now and has taken ``ms`` when this returns; the clock does not move."""
        self.start_s = self._clock.now_s
        self.end_s = self._clock.now_s + ms / 1e3

    def wait(self) -> None:
        self._clock.pass_ms(self._wait_ms)
        if self._error:
            raise CommError("gone")

    def done(self) -> bool:
        return self.end_s is not None


def _approx(*ms: float) -> object:
    return pytest.approx(StepTimes(*ms), abs=1e-6)


def test_a_step_is_compute_and_exposed_waiting(clock: _Clock) -> None:
    line = Timeline(enabled=True)
    line.end_step()
    gather, reduce, replicate = (
        _Work(clock, "gather", wait_ms=3), _Work(clock, "reduce", wait_ms=2), _Work(clock, "replicate")
    )  # fmt: skip
    assert line.watch(gather) is gather
    line.watch(reduce)
    line.watch(replicate)
    clock.pass_ms(10)
    gather.run(8)
    reduce.run(5)
    replicate.run(7)
    line.wait(gather)
    line.wait(reduce)
    clock.pass_ms(5)
    line.end_step()
    assert line.steps == [_approx(20, 15, 8, 5, 5, 7)]
    carried = [span for span in line.spans if span.lane != "compute"]
    assert [(span.lane, span.label, round(span.duration_ms, 6), span.nbytes) for span in carried] == [
        ("gather", "0:net", 8, 64), ("reduce", "0:net", 5, 64), ("replicate", "0:net", 7, 64),
        ("wait", "0:net", 3, 0), ("wait", "0:net", 2, 0),
    ]  # fmt: skip


def test_the_first_step_has_no_beginning_and_does_not_count(clock: _Clock) -> None:
    line = Timeline(enabled=True)
    line.wait(_Work(clock, wait_ms=50))
    work = _Work(clock)
    line.watch(work)
    work.run(4)
    clock.pass_ms(1000)
    line.end_step()
    assert line.steps == []
    clock.pass_ms(7)
    line.end_step()
    assert line.steps == [_approx(7, 7, 0, 0, 0)], "what came before the first step is counted in the second"


def test_a_work_counts_in_the_step_in_which_it_ends(clock: _Clock) -> None:
    line = Timeline(enabled=True)
    line.end_step()
    early, late = _Work(clock), _Work(clock)
    line.watch(early)
    line.watch(late)
    early.run(3)
    clock.pass_ms(10)
    line.end_step()
    late.run(4)
    clock.pass_ms(10)
    line.end_step()
    clock.pass_ms(10)
    line.end_step()
    assert [step.gather_ms for step in line.steps] == pytest.approx([3, 4, 0])


def test_a_work_that_ends_while_it_is_looked_at_is_not_lost(clock: _Clock) -> None:
    line = Timeline(enabled=True)
    line.end_step()
    work = _Work(clock)
    line.watch(work)
    answers = itertools.chain([False], itertools.repeat(True))
    work.run(6)
    work.done = lambda: next(answers)  # type: ignore[method-assign]
    clock.pass_ms(6)
    line.end_step()
    line.end_step()
    assert sum(step.gather_ms for step in line.steps) == pytest.approx(6)


def test_a_wait_that_fails_was_waiting_all_the_same(clock: _Clock) -> None:
    line = Timeline(enabled=True)
    line.end_step()
    failed = _Work(clock, wait_ms=9, error=True)
    line.watch(failed)
    with pytest.raises(CommError):
        line.wait(failed)
    failed.end_s = clock.now_s  # over, but it never began
    line.end_step()
    assert line.steps == [_approx(9, 0, 0, 0, 9)]


def test_a_collective_that_fails_midway_has_no_span_and_is_forgotten(clock: _Clock) -> None:
    line = Timeline(enabled=True)
    line.end_step()
    failed = _Work(clock)
    line.watch(failed)
    failed.start_s = clock.now_s
    failed.done = lambda: True  # type: ignore[method-assign]
    clock.pass_ms(5)
    line.end_step()
    assert line.steps[-1].gather_ms == 0
    assert line._works == []


def test_old_steps_are_forgotten(clock: _Clock) -> None:
    line = Timeline(enabled=True)
    for number in range(MAX_STEPS + 3):
        clock.pass_ms(number)
        line.end_step()
    assert len(line.steps) == MAX_STEPS
    assert line.steps[-1].step_ms == pytest.approx(MAX_STEPS + 2)
    assert line.steps[0].step_ms == pytest.approx(3)


def test_off_it_only_waits(clock: _Clock) -> None:
    line = Timeline(enabled=False)
    work = _Work(clock, wait_ms=5)
    assert line.watch(work) is work
    line.wait(work)
    line.end_step()
    line.end_step()
    assert clock.now_s == pytest.approx(100.005)
    assert (line.steps, line.spans, line._works, line._stalls) == ([], [], [], [])
    assert {value for value in line.summary().values() if not isinstance(value, dict)} == {0.0}
    assert line.summary()["exposed_ms_by_layer"] == {}
    with pytest.raises(CommError):
        line.wait(_Work(clock, error=True))


def test_off_it_calls_nothing_but_the_wait(clock: _Clock) -> None:
    line, work = Timeline(enabled=False), _Work(clock)
    called: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            called.append(frame.f_code.co_name if event == "call" else arg.__name__)

    sys.setprofile(note)
    try:
        line.watch(work)
        line.wait(work)
        line.end_step()
    finally:
        sys.setprofile(None)
    assert called == ["watch", "wait", "wait", "pass_ms", "end_step", "setprofile"]


def _line(steps: list[StepTimes]) -> Timeline:
    line = Timeline(enabled=True)
    line.steps = steps
    return line


def _step(step_ms: float, *spans: tuple[str, float, float]) -> StepTimes:
    """A step with spans of a lane, a beginning and an end in milliseconds."""
    found = [Span(0, lane, "0:net", start_ms / 1e3, end_ms / 1e3) for lane, start_ms, end_ms in spans]
    return times_of(found, Step(0, 1, 0.0, step_ms / 1e3, {}), Groups(2, 2))


@pytest.mark.parametrize(
    ("step", "busy_ms", "hidden_ms", "overlap_percent"),
    [
        (_step(20, ("gather", 0, 8), ("reduce", 8, 20), ("wait", 15, 20)), 20, 15, 75),
        (_step(20, ("gather", 0, 8), ("reduce", 8, 20)), 20, 20, 100),
        (_step(20, ("gather", 8, 10), ("wait", 0, 15)), 2, 0, 0),  # waited longer than it took: for a late peer
        (_step(20), 0, 0, 100),
        (_step(20, ("gather", 0, 10), ("reduce", 0, 10), ("wait", 5, 10)), 10, 5, 50),  # beside each other
        (_step(20, ("gather", 0, 10), ("replicate", 6, 16), ("wait", 4, 8)), 16, 12, 75),
        (_step(20, ("gather", 0, 10), ("agree", 12, 17), ("wait", 12, 17)), 10, 10, 100),  # for something else
        (_step(20, ("gather", 0, 10), ("wait", 8, 14), ("wait", 9, 12)), 10, 8, 80),
    ],
)
def test_overlap_is_the_part_of_communication_in_which_compute_went_on(
    step: StepTimes, busy_ms: float, hidden_ms: float, overlap_percent: float
) -> None:
    for found in (step.figures, _line([step]).summary(), _line([step] * 3).summary()):
        assert found["busy_ms"] == pytest.approx(busy_ms, abs=1e-9)
        assert found["hidden_ms"] == pytest.approx(hidden_ms, abs=1e-9)
        assert found["overlap_percent"] == pytest.approx(overlap_percent)


def test_a_summary_holds_medians() -> None:
    steps = [
        _step(10, ("gather", 0, 1), ("reduce", 0, 2), ("wait", 0, 2)),
        _step(11, ("gather", 0, 2), ("reduce", 0, 3), ("wait", 2, 4)),
        _step(900, ("gather", 0, 9), ("reduce", 0, 9), ("wait", 100, 300)),
    ]
    summary = _line(steps).summary()
    expected = {
        "steps": 3, "step_ms": 11, "compute_ms": 9, "gather_ms": 2, "reduce_ms": 3, "exposed_ms": 2, "replicate_ms": 0,
        "busy_ms": 3, "hidden_ms": 2, "overlap_percent": 200 / 3,
    }  # fmt: skip
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    assert list(summary) == list(Timeline(enabled=True).summary())


def test_milliseconds_of_a_span() -> None:
    assert Span(0, "gather", "x", 1.5, 1.75, 0).duration_ms == 250


@pytest.mark.parametrize("settings", [{}, {"allgather_overlap": True, "reduce_overlap": True}])
def test_a_training_run_is_covered(settings: dict[str, bool]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(1.0))
    rig = wrap(model, sgd, timeline=True, comm_fusion=False, **settings)
    for _ in range(4):
        model(paddle.ones([2, 4])).sum().backward()
        rig.optimizer.step()
        rig.optimizer.clear_grad()
    line = rig.optimizer.timeline
    assert len(line.steps) == 3
    for step in line.steps:
        assert step.compute_ms + step.exposed_ms == pytest.approx(step.step_ms)
        assert 0 < step.exposed_ms < step.step_ms
        assert step.gather_ms > 0
        assert step.reduce_ms > 0
    carried = {(span.lane, span.label) for span in line.spans}
    assert ("gather", "0:0.weight") in carried
    assert ("reduce", "0:0.weight, backward 3") in carried
    assert {("wait", "gradient norm"), ("wait", "0:0.weight"), ("wait", "0:0.weight, backward 3")} <= carried
    collectives = [event for event in rig.log if event.what == "start"]
    per_step = len(collectives) // 4
    assert len([span for span in line.spans if span.lane not in ("wait", "compute")]) == per_step
