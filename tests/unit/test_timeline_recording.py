"""Recordings of one process: what they hold, when they begin and end, and that nothing is left of them."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import paddle
import pytest
from paddle import nn

from hp_sharding import ShardingConfig, shard
from hp_sharding.errors import CommError, ConfigError, StateError
from hp_sharding.timeline import KEPT_STEPS, Timeline
from hp_sharding.trace import chrome
from hp_sharding.trace.figures import spans_by_step, union
from tests.timelines import LAYERS, SETTINGS, Net, assert_tiled, length_s, record, rig_of, train_step


@pytest.mark.parametrize("name", SETTINGS)
def test_compute_and_exposed_waiting_are_the_whole_of_a_step(name: str) -> None:
    rig = rig_of(**SETTINGS[name])
    train_step(rig.model, rig.optimizer)
    trace = record(rig, 3)
    assert [step.number for step in trace.steps] == [2, 3, 4]
    assert trace.steps[0].start_s == 0
    assert_tiled(trace)


@pytest.mark.parametrize("name", SETTINGS)
def test_labels_are_the_layers_names(name: str) -> None:
    rig = rig_of(**SETTINGS[name])
    trace = record(rig)
    for label in ("forward", "backward"):
        assert {span.layer for span in trace.spans if span.lane == "compute" and span.label == label} == LAYERS
    names = {bucket["name"] for bucket in trace.about["buckets"]}
    assert names == {buffer.name for buffer in rig.optimizer.buffers}
    for span in trace.spans:
        if span.lane in ("gather", "reduce"):
            assert set(span.layer.split("..")) <= LAYERS
            assert span.label.partition(", backward ")[0] in names
            assert span.nbytes > 0
    assert "agreement" in {span.layer for span in trace.spans if span.lane == "agree"}
    updated = [span.layer for span in trace.spans if span.label == "update"]
    assert updated
    assert all(set(layer.split("..")) <= LAYERS for layer in updated)


def test_the_layers_of_a_backward_come_in_its_order() -> None:
    for name in ("stage 2", "stage 3"):
        trace = record(rig_of(**SETTINGS[name]))
        first = spans_by_step(trace)[0, trace.steps[0].number]
        layers = [span.layer for span in sorted(first, key=lambda span: span.start_s) if span.label == "backward"]
        seen = [layer for layer in dict.fromkeys(layers) if layer != "Net"]
        assert seen == ["head", "blocks.3", "blocks.2", "blocks.1", "blocks.0"], name


def test_in_stage_3_the_backward_of_frozen_layers_is_seen_as_well() -> None:
    rig = rig_of(**SETTINGS["stage 3"])
    for param in rig.model.blocks[1].parameters():
        param.stop_gradient = True
    trace = record(rig)
    assert "blocks.1" in {span.layer for span in trace.spans if span.label == "backward"}


@pytest.mark.parametrize("name", ["stage 2", "stage 3"])
def test_what_is_recomputed_is_told_apart(name: str) -> None:
    rig = rig_of(**SETTINGS[name])
    rig.model.recomputes = True
    trace = record(rig)
    again = {span.layer for span in trace.spans if span.label == "recompute"}
    assert again == {f"blocks.{index}" for index in range(4)}
    assert_tiled(trace)


@pytest.mark.parametrize("name", SETTINGS)
def test_numbers_are_the_same_while_recording(name: str) -> None:
    losses = []
    for records in (False, True):
        rig = rig_of(**SETTINGS[name])
        losses.append([train_step(rig.model, rig.optimizer) for _ in range(2)])
        if records:
            with rig.optimizer.timeline.record():
                losses[-1] += [train_step(rig.model, rig.optimizer) for _ in range(2)]
        losses[-1] += [train_step(rig.model, rig.optimizer) for _ in range(2 if records else 4)]
    assert losses[0] == losses[1]


def test_a_recording_until_the_end_of_its_block() -> None:
    rig = rig_of(**SETTINGS["stage 2"])
    with rig.optimizer.timeline.record() as recording:
        for _ in range(3):
            train_step(rig.model, rig.optimizer)
        before = recording.trace
    assert before is None
    assert recording.n_steps == 3
    assert recording.trace is not None
    assert recording.trace.numbers() == [1, 2, 3]


def test_one_after_the_other() -> None:
    rig = rig_of(**SETTINGS["stage 2"])
    first, second = record(rig), record(rig)
    assert (first.numbers(), second.numbers()) == ([1, 2], [3, 4])
    assert len(rig.optimizer.timeline.steps) == 2, "those of the second"
    assert second.steps[0].start_s == 0


def test_it_is_over_with_its_last_step() -> None:
    rig = rig_of(**SETTINGS["stage 2"])
    line = rig.optimizer.timeline
    with line.record(steps=1) as recording:
        train_step(rig.model, rig.optimizer)
        assert recording.trace is not None
        assert not line.enabled
        train_step(rig.model, rig.optimizer)
    assert recording.trace.numbers() == [1]


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "3"])
def test_a_wrong_number_of_steps(steps: Any) -> None:
    with pytest.raises(ConfigError, match="1 or more steps"):
        Timeline(enabled=False).record(steps=steps)


def test_recordings_do_not_nest_and_the_outer_one_goes_on() -> None:
    rig = rig_of(**SETTINGS["stage 2"])
    line = rig.optimizer.timeline
    with line.record(steps=1) as recording:
        with pytest.raises(ConfigError, match="under way already"), line.record(steps=1):
            pass
        train_step(rig.model, rig.optimizer)
    assert recording.trace is not None
    with pytest.raises(ConfigError, match="made once"), recording:
        pass


def test_fewer_steps_than_asked_for() -> None:
    rig = rig_of(**SETTINGS["stage 2"])
    with (
        pytest.raises(StateError, match=r"record\(steps=3\): the block ended after 1"),
        rig.optimizer.timeline.record(steps=3) as recording,
    ):
        train_step(rig.model, rig.optimizer)
    assert recording.trace is None
    assert not rig.optimizer.timeline.enabled
    assert record(rig).numbers() == [2, 3]


def test_an_error_inside_ends_it_and_comes_out_as_itself() -> None:
    rig = rig_of(**SETTINGS["stage 2"])
    sent = len(rig.log)
    with pytest.raises(KeyError, match="mine"), rig.optimizer.timeline.record(steps=2) as recording:
        raise KeyError("mine")
    assert len(rig.log) == sent, "the other ranks would not enter what was sent"
    assert recording.trace is None
    assert not rig.optimizer.timeline.enabled
    assert record(rig).numbers() == [1, 2]


def test_a_failed_forward_or_backward_leaves_later_steps_right() -> None:
    for name in ("stage 2", "stage 3"):
        rig = rig_of(**SETTINGS[name])
        with rig.optimizer.timeline.record(steps=1) as recording:
            with pytest.raises(ValueError, match="dimension"):
                rig.model(paddle.ones([2, 3]))
            rig.optimizer.clear_grad()
            train_step(rig.model, rig.optimizer)
        assert recording.trace is not None
        assert_tiled(recording.trace)
        last = max((span for span in recording.trace.spans if span.lane == "compute"), key=lambda span: span.end_s)
        assert last.label == "step()"


# -- nothing is left of it ------------------------------------------------------------------------------------------


def _calls_in_a_step(model: nn.Layer, optimizer: Any) -> dict[str, int]:
    """Calls into ``hp_sharding.timeline`` and its neighbours in one step, by name."""
    counts: dict[str, int] = {}

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and "hp_sharding/timeline" in frame.f_code.co_filename:
            counts[frame.f_code.co_name] = counts.get(frame.f_code.co_name, 0) + 1

    gc.collect()  # wrapped models of earlier tests hear of this one's backward
    sys.setprofile(note)
    try:
        train_step(model, optimizer)
    finally:
        sys.setprofile(None)
    return counts


@pytest.mark.parametrize("name", SETTINGS)
def test_off_there_are_flag_tests_and_nothing_else(name: str) -> None:
    rig = rig_of(**SETTINGS[name])
    train_step(rig.model, rig.optimizer)
    assert set(_calls_in_a_step(rig.model, rig.optimizer)) == {"watch", "wait", "end_step"}
    record(rig)
    assert set(_calls_in_a_step(rig.model, rig.optimizer)) == {"watch", "wait", "end_step"}
    line = rig.optimizer.timeline
    before, entries = line._marks.take()
    assert (line._works, line._stalls, list(line._ended), entries) == ([], [], [], [])
    assert before.label == "script"


def _hooks(model: nn.Layer) -> list[int]:
    layers = model.sublayers(include_self=True)
    return [len(layer._forward_pre_hooks) + len(layer._forward_post_hooks) for layer in layers]


def _plain(**settings: Any) -> tuple[Net, Any]:
    paddle.seed(0)
    model = Net()
    adam = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    return model, shard(model, adam, ShardingConfig(**settings))


def test_one_process_has_the_same_face_with_compute_alone() -> None:
    plain_model, plain = _plain()
    expected = [train_step(plain_model, plain) for _ in range(4)]
    model, optimizer = _plain()
    hooks, run_backward = _hooks(model), paddle.base.core.eager.run_backward
    losses = [train_step(model, optimizer)]
    with optimizer.timeline.record(steps=2) as recording:
        losses += [train_step(model, optimizer) for _ in range(2)]
    losses.append(train_step(model, optimizer))
    assert losses == expected
    assert _hooks(model) == hooks
    assert paddle.base.core.eager.run_backward is run_backward
    trace = recording.trace
    assert trace is not None
    assert trace.numbers() == [2, 3]
    assert {span.lane for span in trace.spans} == {"compute"}
    assert_tiled(trace)
    for label in ("forward", "backward"):
        assert {span.layer for span in trace.spans if span.label == label} == LAYERS
    assert {span.layer for span in trace.spans if span.label == "update"} == {"Net"}
    assert trace.about["nranks"] == 1
    assert set(_calls_in_a_step(model, optimizer)) == {"end_step"}


def test_one_process_whose_timeline_is_always_on() -> None:
    model, optimizer = _plain(timeline=True)
    for _ in range(3):
        train_step(model, optimizer)
    figures = optimizer.timeline.summary()
    assert figures["steps"] == 2
    assert {"forward", "backward", "update"} <= set(figures["phases_ms"])
    assert figures["peak_bytes"] == figures["formula_bytes"] == optimizer.memory_report()["formula_bytes"] > 0


def test_minimize_is_a_step_as_well() -> None:
    model, optimizer = _plain(timeline=True)
    for _ in range(2):
        loss = model(paddle.ones([2, 8])).mean()
        loss.backward()
        optimizer.minimize(loss)
        optimizer.clear_grad()
    assert optimizer.timeline.summary()["steps"] == 1


def test_a_model_does_not_keep_a_timeline_alive() -> None:
    model, optimizer = _plain(timeline=True)
    train_step(model, optimizer)
    line = weakref.ref(optimizer.timeline)
    del optimizer
    assert line() is None
    model(paddle.ones([2, 8])).mean().backward()


# -- always on ------------------------------------------------------------------------------------------------------


def test_the_last_steps_can_be_had_at_any_time(tmp_path: Path) -> None:
    rig = rig_of(**SETTINGS["stage 2"], timeline=True)
    for _ in range(KEPT_STEPS + 3):
        train_step(rig.model, rig.optimizer)
    trace = rig.optimizer.timeline.trace()
    assert trace is not None
    assert trace.numbers() == list(range(4, KEPT_STEPS + 4))
    assert_tiled(trace)
    rig.optimizer.timeline.write(tmp_path / "trace.json")
    assert chrome.read(tmp_path / "trace.json").numbers() == trace.numbers()


def test_a_recording_within_does_not_end_it() -> None:
    rig = rig_of(**SETTINGS["stage 2"], timeline=True)
    train_step(rig.model, rig.optimizer)
    assert record(rig).numbers() == [2, 3]
    train_step(rig.model, rig.optimizer)
    assert len(rig.optimizer.timeline.steps) == 3


def test_a_recording_from_the_first_step_on_has_it() -> None:
    assert record(rig_of(**SETTINGS["stage 2"], timeline=True)).numbers() == [1, 2]


def test_a_collective_that_fails_ends_a_recording_and_its_wait_counts_in_the_step_that_ends_next() -> None:
    rig = rig_of(**SETTINGS["stage 2"], timeline=True)
    line = rig.optimizer.timeline
    train_step(rig.model, rig.optimizer)
    rig.reduce.failing = {"reduce_scatter"}
    with pytest.raises(CommError, match="on request"), line.record(steps=1) as recording:
        train_step(rig.model, rig.optimizer)
    rig.reduce.failing = set()
    failed = [buffer.name for buffer in rig.optimizer.buffers]
    assert recording.trace is None
    with pytest.raises(CommError, match="on request"):
        rig.optimizer.clear_grad()
    while rig.reduce.n_pending:
        with contextlib.suppress(CommError):
            rig.optimizer.clear_grad()
    line.end_step(2)
    waited = [span for span in line.spans if span.lane == "wait" and span.label.partition(", backward")[0] in failed]
    assert waited
    spans = [span for span in line.spans if span.lane == "compute"]
    exposed_s = sum(end_s - start_s for start_s, end_s in union(span for span in line.spans if span.lane == "wait"))
    assert length_s(spans) + exposed_s == pytest.approx(line.steps[-1].step_ms / 1e3, abs=1e-9)


def test_what_lies_before_a_recording_is_cut_off() -> None:
    """The gathers that the step before has started, and their bytes in proportion; and a step under way."""
    rig = rig_of(**SETTINGS["stage 2"], timeline=True)
    train_step(rig.model, rig.optimizer)
    loss = rig.model(paddle.ones([2, 8])).square().mean()
    with rig.optimizer.timeline.record(steps=1) as recording:
        loss.backward()
        rig.optimizer.step()
    trace = recording.trace
    assert trace is not None
    assert min(span.start_s for span in trace.spans) >= 0 == trace.steps[0].start_s
    assert not any(span.label == "forward" for span in trace.spans)
    assert_tiled(trace)


def test_gathers_under_way_when_it_begins_are_in_it() -> None:
    rig = rig_of(**SETTINGS["stage 2"])
    train_step(rig.model, rig.optimizer)
    with rig.optimizer.timeline.record(steps=1) as recording:
        train_step(rig.model, rig.optimizer)
    trace = recording.trace
    assert trace is not None
    first = spans_by_step(trace)[0, 2]
    assert {span.label for span in first if span.lane == "gather"} == {buffer.name for buffer in rig.optimizer.buffers}


def test_gathers_under_way_when_it_ends_are_in_it_behind_its_last_step() -> None:
    rig = rig_of(**SETTINGS["stage 2"])
    trace = record(rig)
    behind = [span for span in trace.spans if span.end_s > trace.steps[-1].end_s]
    assert {span.label for span in behind if span.lane == "gather"} == {buffer.name for buffer in rig.optimizer.buffers}


def test_off_there_is_no_trace(tmp_path: Path) -> None:
    line = Timeline(enabled=False)
    for call in (line.trace, lambda: line.write(tmp_path / "trace.json")):
        with pytest.raises(ConfigError, match="timeline=True"):
            call()


def test_a_file_that_cannot_be_written_is_an_error_and_the_trace_is_there(tmp_path: Path) -> None:
    rig = rig_of(**SETTINGS["stage 2"])
    (tmp_path / "file").write_text("")
    line = rig.optimizer.timeline
    with (
        pytest.raises(ConfigError, match="could not write the trace"),
        line.record(steps=1, path=tmp_path / "file" / "trace.json") as recording,
    ):
        train_step(rig.model, rig.optimizer)
    assert recording.trace is not None
    assert record(rig).numbers() == [2, 3]


def test_it_can_be_stopped_for_good() -> None:
    rig = rig_of(**SETTINGS["stage 2"], timeline=True)
    for _ in range(3):
        train_step(rig.model, rig.optimizer)
    line = rig.optimizer.timeline
    line.stop()
    assert (line.enabled, line.steps, line.spans) == (False, [], [])
    assert set(_calls_in_a_step(rig.model, rig.optimizer)) == {"watch", "wait", "end_step"}


def test_the_table_has_what_counts() -> None:
    rig = rig_of(**SETTINGS["stage 2"], timeline=True)
    for _ in range(3):
        train_step(rig.model, rig.optimizer)
    text = str(rig.optimizer.timeline)
    assert text == rig.optimizer.timeline.table()
    for word in ("exposed", "gather", "reduce"):
        assert word in text
