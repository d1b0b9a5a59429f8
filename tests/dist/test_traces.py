"""What ranks have recorded, from the file to the picture: importers take it, and the command shows it."""

from __future__ import annotations

import json
from pathlib import Path

import click.testing
import paddle
import pytest
from paddle import nn

from hp_sharding import ShardingConfig, shard
from hp_sharding.cli import main
from hp_sharding.trace import chrome
from hp_sharding.trace.figures import summary
from tests.harness import run

LAYERS = 5


def _record(rank: int, nranks: int, path: str, stage: int) -> None:
    paddle.seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(LAYERS)])
    inner = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    config = ShardingConfig(stage=stage, allgather_overlap=True, reduce_overlap=True, comm_buffer_size_MB=0.02)
    optimizer = shard(net, inner, config)

    def step() -> None:
        net(paddle.ones([4, 64])).mean().backward()
        optimizer.step()
        optimizer.clear_grad()

    step()
    with optimizer.timeline.record(steps=2, path=path):
        step()
        step()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_recording_can_be_imported_shown_and_drawn(tmp_path: Path, stage: int) -> None:
    path = tmp_path / "trace.json"
    run(_record, 2, str(path), stage)
    assert chrome.problems(json.loads(path.read_text())) == []
    trace = chrome.read(path)
    assert trace.ranks == [0, 1]
    assert trace.numbers() == [2, 3]
    lanes = {(span.rank, span.lane) for span in trace.spans}
    assert lanes >= {(rank, lane) for rank in (0, 1) for lane in ("compute", "gather", "reduce")}
    found = summary(trace)
    for step in found["steps"]:
        assert step["compute_ms"] + step["exposed_ms"] == pytest.approx(step["step_ms"])
        assert step["peak_bytes"] > 0
    # Every layer computes, forwards and backwards.
    for label in ("forward", "backward"):
        layers = {span.layer for span in trace.spans if span.lane == "compute" and span.label == label}
        assert {str(number) for number in range(LAYERS)} <= layers
    shown = click.testing.CliRunner().invoke(main, ["trace", "show", str(path), "--picture", f"{path}.png"])
    assert shown.exit_code == 0, shown.output
    assert f"2 ranks, stage {stage}, cpu" in shown.output
