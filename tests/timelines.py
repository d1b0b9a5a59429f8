"""A model whose recordings are looked at, and what holds of all of them."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from hp_sharding.timeline import Span
from hp_sharding.trace.figures import spans_by_step, union
from hp_sharding.trace.spans import Trace
from tests.fakes import Rig, wrap

BOTH: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1, **BOTH},
    "stage 2": {"stage": 2, **BOTH},
    "stage 2, no overlap": {"stage": 2},
    "stage 2, reshard": {"stage": 2, **BOTH, "reshard_after_step": True},
    "stage 3": {"stage": 3, **BOTH},
}
_SMALL_MB = 1e-3
"""Each parameter has a bucket of its own."""


class Net(nn.Layer):
    """Blocks that are called in any order, some recomputed."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.LayerList([nn.Linear(width, width) for _ in range(4)])
        self.head = nn.Linear(width, width)
        self.order = list(range(4))
        self.recomputes = False

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x.stop_gradient = not self.recomputes
        for index in self.order:
            x = recompute(self.blocks[index], x) if self.recomputes else self.blocks[index](x)
        return self.head(x)


LAYERS = {"Net", *(f"blocks.{index}" for index in range(4)), "head"}


def rig_of(**settings: Any) -> Rig:
    """A wrapped ``Net``, over a group of one."""
    paddle.seed(0)
    model = Net()
    adam = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    return wrap(model, adam, comm_buffer_size_MB=_SMALL_MB, **settings)


def train_step(model: nn.Layer, optimizer: Any) -> float:
    """One step; returns the loss."""
    loss = model(paddle.ones([2, 8])).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return float(loss)


def record(rig: Rig, n_steps: int = 2) -> Trace:
    """The trace of the next steps."""
    with rig.optimizer.timeline.record(steps=n_steps) as recording:
        for _ in range(n_steps):
            train_step(rig.model, rig.optimizer)
    assert recording.trace is not None
    return recording.trace


def length_s(spans: list[Span]) -> float:
    """Of all together."""
    return sum(span.end_s - span.start_s for span in spans)


def assert_tiled(trace: Trace) -> None:
    """Compute and exposed waiting are the whole of each step, and lie side by side."""
    found = spans_by_step(trace)
    for step in trace.steps:
        spans = found[step.rank, step.number]
        compute = [span for span in spans if span.lane == "compute"]
        waits = union(span for span in spans if span.lane == "wait")
        exposed_s = sum(end_s - start_s for start_s, end_s in waits)
        assert length_s(compute) + exposed_s == pytest.approx(step.end_s - step.start_s, abs=1e-9)
        assert len(union(compute)) <= len(waits) + 1
