"""Where the figures of each step go: files, writers of scalars, and sinks that fail."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

from hp_sharding.errors import ConfigError
from hp_sharding.timeline import Timeline, json_lines, scalars
from tests.fakes import wrap


class _TensorBoard:
    """Signature of SummaryWriter.add_scalar."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, int]] = []

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None, walltime: float | None = None
    ) -> None:
        assert global_step is not None
        assert walltime is None
        self.found.append((tag, scalar_value, global_step))


class _VisualDl:
    """Signature of LogWriter.add_scalar."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int, walltime: float | None = None) -> None:
        assert walltime is None
        self.found.append((tag, value, step))


def _train(line: Timeline, n_steps: int) -> None:
    for number in range(n_steps + 1):
        line.end_step(number + 10)


@pytest.mark.parametrize("kind", [_TensorBoard, _VisualDl])
def test_scalars_take_what_both_writers_take(kind: type) -> None:
    writer = kind()
    line = Timeline(enabled=True)
    line.add_sink(scalars(writer, every=2))
    _train(line, 5)
    exposed = [(value, step) for tag, value, step in writer.found if tag == "hp_sharding/exposed_ms"]
    assert exposed == [(0.0, 12), (0.0, 14)]
    steps = [value for tag, value, step in writer.found if tag == "hp_sharding/step_ms" and step == 12]
    median = (line.steps[0].step_ms + line.steps[1].step_ms) / 2
    assert steps == [pytest.approx(median)]
    assert all(isinstance(value, float) for _, value, _ in writer.found)
    tags = {tag for tag, _, _ in writer.found}
    assert {"hp_sharding/gather_bytes", "hp_sharding/wrong_guesses", "hp_sharding/peak_bytes"} <= tags
    assert not any("by_layer" in tag or tag == "hp_sharding/steps" for tag in tags)


@pytest.mark.parametrize(
    ("writer", "every"), [(_VisualDl(), 0), (object(), 1), (_VisualDl(), "2"), (_VisualDl(), 1.5), (_VisualDl(), True)]
)
def test_scalars_say_what_they_need(writer: Any, every: int) -> None:
    with pytest.raises(ConfigError, match="add_scalar"):
        scalars(writer, every)


def test_json_lines_hold_every_counted_step(tmp_path: Path) -> None:
    line = Timeline(enabled=True)
    path = tmp_path / "run" / "steps-{rank}.jsonl"
    line.subject.rank = 3
    line.add_sink(json_lines(path))
    _train(line, 3)
    lines = [json.loads(text) for text in (tmp_path / "run" / "steps-3.jsonl").read_text().splitlines()]
    assert [(found["rank"], found["step"]) for found in lines] == [(3, 11), (3, 12), (3, 13)]
    assert lines[0] == json.loads(json.dumps(line.steps[0].figures))
    assert {"step_ms", "exposed_ms_by_layer", "wrong_guesses", "peak_bytes"} <= set(lines[0])


def test_what_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 1}\n')
    line = Timeline(enabled=True)
    line.add_sink(json_lines(path))
    _train(line, 1)
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [1, 11]


_KILLED = """
import os, signal, sys
from hp_sharding.timeline.sinks import json_lines
sink = json_lines(sys.argv[1])
for number in range(50):
    sink({"rank": int(sys.argv[2]), "step": number, "padding": "x" * 300})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_lines_are_whole_where_processes_share_a_file_and_are_killed(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    command = [sys.executable, "-W", "ignore", "-c", _KILLED, str(path)]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [-9, -9]
    found = [json.loads(text) for text in path.read_text().splitlines()]
    for rank in range(2):
        assert [each["step"] for each in found if each["rank"] == rank] == list(range(50))


def test_a_sink_that_hears_nothing_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    line = Timeline(enabled=False)
    heard: list[int] = []
    with caplog.at_level(logging.WARNING, logger="hp_sharding"):
        line.end_step(1)
        assert caplog.records == []
        line.add_sink(lambda figures: heard.append(figures["step"]))
        for number in (2, 3):
            line.end_step(number)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "the timeline is off" in caplog.text
        with line.record(steps=1):
            line.end_step(4)
        line.end_step(5)
    assert heard == [4]
    assert len(caplog.records) == 1


def test_a_sink_that_was_added_for_a_recording_is_no_matter_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    line = Timeline(enabled=False)
    line.add_sink(lambda _: None)
    with line.record(steps=1):
        line.end_step(1)
    line.end_step(2)
    assert caplog.records == []


def test_a_full_disk_is_told_of() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    with pytest.raises(OSError, match="space"):
        json_lines("/dev/full")({"rank": 0, "step": 1})


def test_a_sink_that_raises_is_told_of_once_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    rig = wrap(model, paddle.optimizer.SGD(0.1, parameters=model.parameters()), timeline=True)
    calls: list[int] = []

    def fails(figures: dict[str, Any]) -> None:
        calls.append(figures["step"])
        raise OSError("no space left")

    healthy: list[int] = []
    rig.optimizer.timeline.add_sink(fails)
    rig.optimizer.timeline.add_sink(lambda figures: healthy.append(figures["step"]))
    with caplog.at_level(logging.WARNING, logger="hp_sharding"):
        for _ in range(4):
            model(paddle.ones([2, 4])).sum().backward()
            rig.optimizer.step()
            rig.optimizer.clear_grad()
    assert calls == [2]
    assert healthy == [2, 3, 4]
    warned = [record for record in caplog.records if "has failed" in record.getMessage()]
    assert len(warned) == 1
    assert "no space left" in caplog.text
