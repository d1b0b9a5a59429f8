"""A training step on the stand-in device goes on without the host: nothing in it waits for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import paddle
import pytest
from paddle import nn

from hp_sharding import ShardingConfig, shard
from tests.device import standin
from tests.device.running import on_device
from tests.models import loss_of, make_batch, make_model, make_optimizer

pytestmark = pytest.mark.usefixtures("standin_device")

_WARM_STEPS, _STEPS = 3, 3
_LATE = standin.Pace(latency_ms=2.0, jitter_ms=2.0)
_STAGES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "reshard": {"stage": 2, "reshard_after_step": True},
    "stage 3": {"stage": 3},
    "timeline": {"stage": 2, "timeline": True},
}
_OVERLAP: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": 0.002}


class _Waits(NamedTuple):
    """For what a real device's host could have stood still.

    Attributes:
        reads: waits until a stream had done everything, or all of them; reading a value is one.
        events: waits for an event that was not reached yet. Of a reached one there are some: Paddle 3.3.1 waits for an
            event of a custom device when its object goes.
        streams: calls of ``Stream.wait_stream``, whose own event goes at once, so that the host waits for the stream.
    """

    reads: int
    events: int
    streams: int


@contextlib.contextmanager
def _wait_streams() -> Iterator[list[Any]]:
    """Collects calls: where compute works in the calling thread, nobody sees that they wait for it."""
    calls: list[Any] = []
    original = paddle.device.Stream.wait_stream

    def wait_stream(self: Any, stream: Any) -> None:
        calls.append(stream)
        original(self, stream)

    paddle.device.Stream.wait_stream = wait_stream
    try:
        yield calls
    finally:
        paddle.device.Stream.wait_stream = original


def _waits_of_steps(rank: int, nranks: int) -> dict[str, _Waits]:
    """For each of the settings the host's waits in some steps, and those of a script that reads each of its losses."""
    found = {name: _train(rank, nranks, chosen, reads=False) for name, chosen in _STAGES.items()}
    return {**found, "reads": _train(rank, nranks, _STAGES["stage 2"], reads=True)}


def _train(rank: int, nranks: int, chosen: dict[str, Any], *, reads: bool) -> _Waits:
    device = standin.Device()
    model = make_model("mlp")
    inner = make_optimizer("AdamW", model, grad_clip=nn.ClipGradByGlobalNorm(0.5))
    groups = {"shard_group": [rank - rank % 2, rank - rank % 2 + 1], "replicate_group": [rank % 2, rank % 2 + 2]}
    optimizer = shard(model, inner, ShardingConfig(**chosen, **_OVERLAP), **(groups if nranks == 4 else {}))
    batches = [make_batch("mlp", step, rank) for step in range(_WARM_STEPS + _STEPS)]
    losses = [_step(model, optimizer, batch, reads=reads) for batch in batches[:_WARM_STEPS]]
    before = device.host_waits()
    with _wait_streams() as calls:
        losses += [_step(model, optimizer, batch, reads=reads) for batch in batches[_WARM_STEPS:]]
    after = device.host_waits()
    assert paddle.isfinite(paddle.stack(losses)).all()
    reading = [after.stream.calls - before.stream.calls, after.device.calls - before.device.calls]
    return _Waits(sum(reading), after.event.blocked - before.event.blocked, len(calls))


def _step(model: nn.Layer, optimizer: Any, batch: Any, *, reads: bool) -> paddle.Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    if reads:
        float(loss)
    return loss


@pytest.mark.parametrize("nranks", [2, 4])
def test_no_step_waits_for_the_device(nranks: int) -> None:
    """Two by two on four ranks. With clipping by the global norm, which depends on every gradient."""
    for found in on_device(_waits_of_steps, nranks, pace=_LATE, timeout_s=90):
        assert found.pop("reads").reads >= _STEPS, "what is counted would not be seen"
        assert found == dict.fromkeys(_STAGES, _Waits(0, 0, 0))
