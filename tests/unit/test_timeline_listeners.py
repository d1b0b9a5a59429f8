"""Who listens to a timeline, and what it does not mind: copies, evaluations, other layouts, tuners, and failures."""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import paddle
import pytest

from hp_sharding import ShardingConfig, shard
from hp_sharding.comm import Work
from hp_sharding.errors import ConfigError
from hp_sharding.recorded import PlainSubject, ShardedSubject
from hp_sharding.timeline import Timeline, line, marks
from hp_sharding.timeline.subject import Subject
from tests.timelines import SETTINGS, Net, assert_tiled, record, rig_of, train_step


def _plain(**settings: Any) -> tuple[Net, Any]:
    paddle.seed(0)
    model = Net()
    adam = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    return model, shard(model, adam, ShardingConfig(**settings))


def test_copies_of_a_model_are_not_listened_to() -> None:
    model, optimizer = _plain()
    timeline = optimizer.timeline
    with timeline.record(steps=1):
        copied = copy.deepcopy(model)
        before = len(timeline._marks._entries)
        copied(paddle.ones([2, 8])).mean().backward()
        labels = {entry.doing.label for entry in timeline._marks._entries[before:] if entry.doing is not None}
        assert "forward" not in labels
        train_step(model, optimizer)
    copied(paddle.ones([2, 8]))
    assert timeline._marks._entries == []
    assert not timeline._marks._stack


@pytest.mark.parametrize("name", ["one process", "stage 2", "stage 3"])
def test_an_evaluation_without_a_step_does_not_grow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 40
    for module in (line, marks):
        monkeypatch.setattr(module, "MOST", most, raising=False)
    if name == "one process":
        model, optimizer = _plain(timeline=True)
    else:
        rig = rig_of(**SETTINGS[name], timeline=True)
        model, optimizer = rig.model, rig.optimizer
    for _ in range(2):
        train_step(model, optimizer)
    timeline = optimizer.timeline
    for _ in range(30):
        with paddle.no_grad():
            model(paddle.ones([2, 8]))
        sizes = [len(timeline._marks._entries), len(timeline._works), len(timeline._stalls)]
        assert max(sizes) <= most
    train_step(model, optimizer)
    trace = timeline.trace()
    assert trace is not None
    assert_tiled(trace)


class _Carried(Work):
    """Is done from the beginning."""

    def __init__(self, label: str) -> None:
        self.op, self.label, self.lane, self.nbytes = "all_gather", label, "gather", 64
        self.start_s, self.end_s = time.perf_counter(), time.perf_counter()

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class _LaidOut(Subject):
    """Buckets that the test lays out."""

    buckets: Mapping[str, str]

    @property
    def layers(self) -> Mapping[str, str]:
        """See ``Subject``."""
        return self.buckets


def test_what_was_sent_keeps_its_lane_and_layers_when_buckets_are_laid_out_anew() -> None:
    timeline, subject = Timeline(enabled=True), _LaidOut()
    timeline.subject = subject
    subject.buckets = {"0:a": "blocks.0", "1:a": "blocks.1"}
    timeline.end_step(1)
    timeline.wait(timeline.watch(_Carried("0:a")))
    subject.buckets = {"0:a": "blocks.0..blocks.1", "2:b": "head"}
    for label in ("2:b", "0:a"):
        timeline.wait(timeline.watch(_Carried(label)))
    subject.buckets = {"0:c": "blocks.0..head"}
    timeline.end_step(2)
    for lane in ("gather", "wait"):
        layers = [span.layer for span in timeline.spans if span.lane == lane]
        assert layers == ["blocks.0", "head", "blocks.0..blocks.1"]


def test_a_second_recording_is_summed_up_alone() -> None:
    timeline = Timeline(enabled=False)
    for n_steps in (3, 2):
        with timeline.record(steps=n_steps):
            for number in range(n_steps):
                timeline.end_step(number)
        assert timeline.summary()["steps"] == n_steps
    always = Timeline(enabled=True)
    always.end_step(0)
    always.end_step(1)
    with always.record(steps=1):
        always.end_step(2)
    assert always.summary()["steps"] == 2, "who always records has asked for all"


def _listened_to() -> Timeline:
    """As by a tuner, with two steps."""
    timeline = Timeline(enabled=False)
    timeline.enabled = True
    for number in range(3):
        timeline.end_step(number)
    assert len(timeline.steps) == 2
    return timeline


def test_a_recording_outlives_another_listener_that_stops() -> None:
    timeline = _listened_to()
    with timeline.record(steps=2) as recording:
        timeline.end_step(3)
        timeline.stop()
        timeline.end_step(4)
    assert recording.trace is not None
    assert recording.trace.numbers() == [3, 4]
    assert [step.figures["step"] for step in timeline.steps] == [3, 4]
    assert not timeline.enabled


def test_figures_of_a_recording_outlive_another_listener_that_stops() -> None:
    timeline = _listened_to()
    with timeline.record(steps=2):
        timeline.end_step(3)
        timeline.end_step(4)
    timeline.end_step(5)
    timeline.stop()
    assert [step.figures["step"] for step in timeline.steps] == [3, 4]
    assert not timeline.enabled


def test_a_recording_that_cannot_begin_leaves_nothing_behind() -> None:
    model, optimizer = _plain()
    with (
        mock.patch.object(PlainSubject, "begin", side_effect=MemoryError("none left")),
        pytest.raises(MemoryError),
        optimizer.timeline.record(),
    ):
        pass
    assert not optimizer.timeline.enabled
    with optimizer.timeline.record(steps=1) as recording:
        train_step(model, optimizer)
    assert recording.trace is not None


def test_a_trace_has_the_model_and_the_host() -> None:
    _, plain = model, optimizer = _plain()
    with plain.timeline.record(steps=1) as recording:
        train_step(model, optimizer)
    assert recording.trace is not None
    for trace in (recording.trace, record(rig_of(**SETTINGS["stage 2"]))):
        assert trace.about["model"] == "Net"
        assert trace.about["hosts"] == [platform.node()]


@pytest.mark.parametrize("path", [5, b"trace.json", "", ["trace.json"]])
def test_a_path_that_names_no_file(path: Any) -> None:
    with pytest.raises(ConfigError, match="expected the path of a file"):
        Timeline(enabled=False).record(path=path)


@pytest.mark.parametrize("name", ["a\0b", "no/such/folder.json"])
def test_a_path_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    timeline = Timeline(enabled=False)
    with pytest.raises(ConfigError, match="could not write the trace"), timeline.record(path=tmp_path / name):
        timeline.end_step(1)


def test_what_is_held_is_counted_anew_with_another_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is given the identity of one that is gone."""
    rig = rig_of(**SETTINGS["stage 2"])
    train_step(rig.model, rig.optimizer)
    subject = rig.optimizer.timeline.subject
    assert isinstance(subject, ShardedSubject)
    counted: list[Any] = []

    def count(optimizer: Any) -> int:
        counted.append(optimizer)
        return 1

    monkeypatch.setattr("hp_sharding.recorded._fixed_bytes", count)
    monkeypatch.setattr("hp_sharding.recorded.id", lambda _: 1, raising=False)
    for _ in range(2):
        subject.formula_bytes()
    assert len(counted) == 1
    rig.optimizer._arena = copy.copy(rig.optimizer._arena)
    subject.formula_bytes()
    assert len(counted) == 2
