"""Recordings of several ranks: all of their spans on one clock, whatever their clocks say, and no numbers changed."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import paddle
import pytest

from hp_sharding import ShardingConfig, shard
from hp_sharding.errors import ConfigError, StateError
from hp_sharding.timeline import Timeline, json_lines
from hp_sharding.trace import chrome
from hp_sharding.trace.spans import Span, Trace
from tests import harness
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.sides import BOTH
from tests.timelines import assert_tiled

_GROUPS: dict[int, Any] = {
    2: lambda rank: {},
    4: lambda rank: {
        "shard_group": [rank // 2 * 2, rank // 2 * 2 + 1],
        "replicate_group": [rank % 2, rank % 2 + 2],
    },
}


class _Run(NamedTuple):
    """A training on one rank: losses, and what was recorded of it."""

    losses: list[float]
    traces: list[Trace | None]
    layers: dict[str, str]


def _wrap(rank: int, nranks: int, **settings: Any) -> Any:
    paddle.seed(0)
    model = make_model("gpt")
    config = ShardingConfig(**{**BOTH, "comm_buffer_size_MB": 0.02, **settings})
    return model, shard(model, make_optimizer("AdamW", model), config, **_GROUPS[nranks](rank))


def _step(model: Any, optimizer: Any, number: int, rank: int) -> float:
    loss = loss_of(model, make_batch("gpt", number, rank))
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return float(loss)


def _train(rank: int, nranks: int, settings: dict[str, Any], *, records: bool) -> _Run:
    """Five steps, of which two and then one are recorded."""
    model, optimizer = _wrap(rank, nranks, **settings)
    losses, traces = [_step(model, optimizer, 0, rank)], []
    for numbers in ((1, 2), (3,)):
        recording = optimizer.timeline.record(steps=len(numbers)) if records else None
        with recording or contextlib.nullcontext():
            losses += [_step(model, optimizer, number, rank) for number in numbers]
        traces.append(recording.trace if recording is not None else None)
    losses.append(_step(model, optimizer, 4, rank))
    assert not optimizer.timeline.enabled
    return _Run(losses, traces, dict(optimizer.timeline.subject.layers))


def _both(rank: int, nranks: int, settings: list[dict[str, Any]]) -> list[tuple[_Run, _Run]]:
    return [(_train(rank, nranks, each, records=True), _train(rank, nranks, each, records=False)) for each in settings]


def _lanes(trace: Trace, rank: int) -> set[str]:
    return {span.lane for span in trace.spans if span.rank == rank}


def _assert_met(trace: Trace, lane: str, group: tuple[int, ...], *, slack_s: float) -> None:
    """Ranks that are in one collective are in it at the same time: none ends before all have begun."""
    by_label: dict[tuple[str, int], list[Span]] = {}
    seen: Counter[tuple[str, int]] = Counter()
    for span in (span for span in trace.spans if span.lane == lane and span.rank in group):
        seen[span.label, span.rank] += 1  # gathers have the same label in each step
        by_label.setdefault((span.label, seen[span.label, span.rank]), []).append(span)
    met = {label: spans for label, spans in by_label.items() if len(spans) == len(group)}
    assert met, lane
    for label, spans in met.items():
        assert max(span.start_s for span in spans) <= min(span.end_s for span in spans) + slack_s, (lane, label)


@pytest.mark.parametrize(
    ("nranks", "settings"),
    [(2, [{"stage": 1}, {"stage": 2}, {"stage": 3}]), (4, [{"stage": 2}, {"stage": 3}])],
    ids=["two ranks", "two by two"],
)
def test_spans_of_all_ranks_are_merged_and_numbers_stay(nranks: int, settings: list[dict[str, Any]]) -> None:
    found = harness.run(_both, nranks, settings)
    for index, setting in enumerate(settings):
        runs = [of_rank[index] for of_rank in found]
        for recorded, plain in runs:
            assert recorded.losses == plain.losses, setting
        assert all(trace is None for recorded, _ in runs[1:] for trace in recorded.traces)
        first, second = runs[0][0].traces
        assert first is not None
        assert second is not None
        assert (first.numbers(), second.numbers()) == ([2, 3], [4])
        for trace in (first, second):
            _check(trace, nranks, set(runs[0][0].layers.values()))


def _check(trace: Trace, nranks: int, layers: set[str]) -> None:
    assert trace.ranks == list(range(nranks))
    assert len(trace.steps) == nranks * len(trace.numbers())
    assert min(step.start_s for step in trace.steps) == 0
    expected = {"compute", "wait", "gather", "reduce", "agree"} | ({"replicate"} if nranks == 4 else set())
    for rank in range(nranks):
        assert _lanes(trace, rank) == expected
    assert {span.layer for span in trace.spans if span.lane in ("gather", "reduce")} == layers
    assert_tiled(trace)
    assert trace.about["nranks"] == nranks
    assert trace.about["replicas"] == nranks // 2
    assert trace.about["clock"]["uncertainty_s"] == 0, "all ranks are on one host"
    json.dumps(trace.about)


# -- clocks ---------------------------------------------------------------------------------------------------------


class _Clock(NamedTuple):
    """A rank's clock: ahead by so much at the beginning of the test, and by so much more each second."""

    offset_s: float
    drift: float


@contextlib.contextmanager
def _set(clock: _Clock) -> Iterator[None]:
    right = time.perf_counter
    begin_s = right()

    def wrong() -> float:
        now_s = right()
        return now_s + clock.offset_s + clock.drift * (now_s - begin_s)

    with mock.patch("time.perf_counter", wrong):
        yield


def _wrong_clocks(rank: int, nranks: int, clocks: list[_Clock]) -> Trace | None:
    with _set(clocks[rank]):
        model, optimizer = _wrap(rank, nranks, stage=2)
        _step(model, optimizer, 0, rank)
        with optimizer.timeline.record(steps=3) as recording:
            for number in range(1, 4):
                _step(model, optimizer, number, rank)
        trace: Trace | None = recording.trace
    return trace


@pytest.mark.parametrize("nranks", [2, 4])
def test_clocks_that_differ_become_one(nranks: int) -> None:
    """As on several hosts. One is ahead, one behind, one goes wrong by two in a thousand, which is worse than any."""
    clocks = [_Clock(3.0, 0.0), _Clock(0.0, 0.002), _Clock(11.0, 0.0), _Clock(3.5, 0.0)][:nranks]
    trace = harness.run(_wrong_clocks, nranks, clocks)[0]
    assert trace is not None
    said = trace.about["clock"]
    assert 0 < said["uncertainty_s"] < 0.1
    for rank, clock in enumerate(clocks):
        found = said["ranks"][str(rank)]
        # The clock that drifts has gone some way by the time the recording begins.
        assert found["offset_s"] == pytest.approx(clock.offset_s - clocks[0].offset_s, abs=0.2)
    assert max(abs(span.start_s) for span in trace.spans) < 2.5, "less than the clocks differ by"
    slack_s = 2 * said["uncertainty_s"]
    for group in [(0, 1), (2, 3)][: nranks // 2]:
        for lane in ("agree", "reduce"):
            _assert_met(trace, lane, group, slack_s=slack_s)
    for group in [(0, 2), (1, 3)] if nranks == 4 else []:
        _assert_met(trace, "replicate", group, slack_s=slack_s)


# -- what goes wrong, and files -------------------------------------------------------------------------------------


def _fail_inside(line: Timeline, step: Callable[[], Any]) -> None:
    with line.record(steps=2):
        step()
        raise KeyError("mine")


def _ends(rank: int, nranks: int, folder: str) -> list[str]:
    """Blocks that fail in every way in which all ranks fail alike; then one that does not."""
    model, optimizer = _wrap(rank, nranks, stage=2)
    line = optimizer.timeline
    line.add_sink(json_lines(f"{folder}/run/steps.jsonl"))
    messages = []
    number = iter(range(20))
    with pytest.raises(StateError) as fewer, line.record(steps=2):
        _step(model, optimizer, next(number), rank)
    with pytest.raises(KeyError) as raised:
        _fail_inside(line, lambda: _step(model, optimizer, next(number), rank))
    Path(folder, "file").touch()
    with pytest.raises(ConfigError) as unwritten, line.record(steps=1, path=f"{folder}/file/trace.json"):
        _step(model, optimizer, next(number), rank)
    messages += [str(each.value) for each in (fewer, raised, unwritten)]
    with line.record(steps=1, path=f"{folder}/trace.json"):
        _step(model, optimizer, next(number), rank)
    return messages


def test_blocks_that_fail_leave_the_ranks_together(tmp_path: Path) -> None:
    for rank, messages in enumerate(harness.run(_ends, 2, str(tmp_path))):
        fewer, raised, unwritten = messages
        assert f"rank {rank}" in fewer
        assert "after 1 steps" in fewer
        assert raised == "'mine'"
        assert "the first rank could not write" in unwritten, "on every rank"
    trace = chrome.read(tmp_path / "trace.json")
    assert trace.ranks == [0, 1]
    assert trace.numbers() == [4]
    lines = [json.loads(text) for text in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    expected = [(rank, number) for rank in (0, 1) for number in range(1, 5)]
    assert sorted((found["rank"], found["step"]) for found in lines) == expected


def _alone(rank: int, nranks: int, folder: str) -> list[str]:
    """What ranks do not all say alike; the numbers of the steps show that none is behind."""
    model, optimizer = _wrap(rank, nranks, stage=2, timeout_s=20)
    line = optimizer.timeline
    number = iter(range(20))
    with line.record(steps=1, path=f"{folder}/first.json" if rank == 0 else None):
        _step(model, optimizer, next(number), rank)
    messages = []
    for steps, path in ((1 + rank, None), (None if rank else 1, None), (1, f"{folder}/second.json" if rank else None)):
        with pytest.raises(ConfigError) as raised, line.record(steps=steps, path=path):
            _step(model, optimizer, next(number), rank)
        messages.append(str(raised.value))
    assert not line.enabled
    with pytest.raises(ConfigError) as raised, line.record(steps=1, path=f"{folder}/a\0b"):
        _step(model, optimizer, next(number), rank)
    messages.append(str(raised.value))
    with line.record(steps=1, path=f"{folder}/last.json"):
        _step(model, optimizer, next(number), rank)
    return messages


def test_ranks_that_ask_for_different_recordings_all_hear_of_it(tmp_path: Path) -> None:
    for rank, messages in enumerate(harness.run(_alone, 2, str(tmp_path))):
        steps, until_the_end, path, unwritten = messages
        assert steps.startswith(f"rank {rank}: record(steps=...) differs: rank 0 1, rank 1 2.")
        assert "rank 0 1, rank 1 None." in until_the_end
        assert "only ranks [1] have a path, but it is rank 0 that writes" in path
        assert "the first rank could not write" in unwritten
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.json", "last.json"]
    assert chrome.read(tmp_path / "first.json").numbers() == [1]
    assert chrome.read(tmp_path / "last.json").numbers() == [3]


def _always(rank: int, nranks: int) -> tuple[Trace | None, dict[str, Any]]:
    model, optimizer = _wrap(rank, nranks, stage=2, timeline=True)
    for number in range(3):
        _step(model, optimizer, number, rank)
    return optimizer.timeline.trace(), optimizer.timeline.summary()


def test_a_timeline_that_is_always_on_gives_its_last_steps() -> None:
    (trace, figures), (nothing, others) = harness.run(_always, 2)
    assert nothing is None
    assert trace.numbers() == [2, 3]
    assert trace.ranks == [0, 1]
    for each in (figures, others):
        assert each["steps"] == 2
        assert each["gather_gb_s"] > 0 < each["reduce_gb_s"]
        assert each["peak_bytes"] == pytest.approx(each["formula_bytes"], rel=0.2)
        assert sum(each["exposed_ms_by_layer"].values()) > 0
