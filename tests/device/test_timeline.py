"""Recordings on a device: marks are times of its stream, not of the host, which runs ahead."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import paddle
import pytest
from paddle import nn

from hp_sharding import ShardingConfig, shard
from hp_sharding.comm import create_communicators
from hp_sharding.trace.figures import spans_by_step, union
from hp_sharding.trace.spans import Trace
from tests.device import standin
from tests.device.running import on_device
from tests.lanes import wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.sides import SETTINGS
from tests.unit.test_comm_contract import SEEN_S

pytestmark = pytest.mark.usefixtures("standin_device")

_LATE_MS = 8.0
_REST_S = 0.05


class _Found(NamedTuple):
    traces: list[Trace | None]
    losses: list[list[float]]
    layers: set[str]


def _train(rank: int, nranks: int, settings: dict[str, Any], *, records: bool) -> tuple[list[float], Trace | None]:
    model = make_model("mlp")
    wrapped = wrap(model, make_optimizer("SGD", model), nranks, **settings)
    losses, trace = [], None
    for numbers in ((0,), (1, 2), (3,)):
        if records and len(numbers) == 2:
            with wrapped.optimizer.timeline.record(steps=2) as recording:
                losses += [_step(wrapped, number, rank) for number in numbers]
            trace = recording.trace
        else:
            losses += [_step(wrapped, number, rank) for number in numbers]
    return losses, trace


def _step(wrapped: Any, number: int, rank: int) -> float:
    loss = loss_of(wrapped.model, make_batch("mlp", number, rank))
    loss.backward()
    wrapped.optimizer.step()
    wrapped.optimizer.clear_grad()
    return float(loss)


def _recorded(rank: int, nranks: int) -> _Found:
    found = _Found([], [], set())
    for name in ("stage 2", "stage 3"):
        losses, trace = _train(rank, nranks, SETTINGS[name], records=True)
        found.traces.append(trace)
        found.losses.append(losses)
        found.losses.append(_train(rank, nranks, SETTINGS[name], records=False)[0])
    found.layers.update(name for name, layer in make_model("mlp").named_sublayers() if layer._parameters)
    return found


def test_recordings_of_a_device() -> None:
    found = on_device(_recorded, 2, pace=standin.Pace(latency_ms=_LATE_MS))
    assert found[1].traces == [None, None]
    for each in found:
        assert each.losses[0] == each.losses[1]
        assert each.losses[2] == each.losses[3]
    for trace in found[0].traces:
        assert trace is not None
        _check(trace, found[0].layers)


def _check(trace: Trace, layers: set[str]) -> None:
    assert trace.ranks == [0, 1]
    assert trace.about["device"] == "npu:0"
    for (rank, number), spans in spans_by_step(trace).items():
        step = next(step for step in trace.steps if (step.rank, step.number) == (rank, number))
        compute_s = sum(span.end_s - span.start_s for span in spans if span.lane == "compute")
        waits = union(span for span in spans if span.lane == "wait")
        exposed_s = sum(end_s - start_s for start_s, end_s in waits)
        assert compute_s + exposed_s == pytest.approx(step.end_s - step.start_s, abs=1e-6)
        assert exposed_s > _LATE_MS / 1e3, "the last reduction has nothing behind it to hide behind"
        for label in ("forward", "backward"):
            seen = {span.layer for span in spans if span.lane == "compute" and span.label == label}
            assert layers & seen, label
    named = {span.layer for span in trace.spans if span.lane == "compute" and span.label == "forward"}
    assert layers <= named


def _held_up(rank: int, nranks: int) -> None:
    """A mark is where its stream is: nobody knows its time before the stream comes there."""
    lane = create_communicators(list(range(nranks)), ["one"])["one"]
    held = standin.Device().held_stream()
    with paddle.device.stream_guard(held.stream):
        mark = lane.mark()
        mark.renew()
        mark.settle()
    time.sleep(_REST_S)
    too_early_s = mark.time_s
    assert too_early_s is None
    opened_s = time.perf_counter()
    held.open()
    while mark.time_s is None and time.perf_counter() - opened_s < SEEN_S:
        time.sleep(0.001)
    assert mark.time_s is not None, "nobody has looked"
    assert opened_s <= mark.time_s <= time.perf_counter()
    free = lane.mark()
    free.settle()
    assert free.time_s is not None, "the stream is there already"


def test_a_mark_is_where_its_stream_is() -> None:
    on_device(_held_up, 2)


def _alone(rank: int, nranks: int) -> tuple[list[float], list[float], Trace | None]:
    """One process: nothing is sent, and its compute is on a stream all the same."""
    paddle.set_device("npu")
    losses: list[list[float]] = []
    trace = None
    for records in (True, False):
        paddle.seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = shard(model, paddle.optimizer.SGD(0.1, parameters=model.parameters()), ShardingConfig())
        losses.append([])
        if records:
            with optimizer.timeline.record(steps=2) as recording:
                losses[-1] += [_plain_step(model, optimizer) for _ in range(2)]
            trace = recording.trace
        else:
            losses[-1] += [_plain_step(model, optimizer) for _ in range(2)]
    return losses[0], losses[1], trace


def _plain_step(model: nn.Layer, optimizer: Any) -> float:
    loss = model(paddle.ones([2, 8])).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return float(loss)


def test_one_process_on_a_device() -> None:
    ((recorded, plain, trace),) = on_device(_alone, 1)
    assert recorded == plain
    assert trace is not None
    assert {span.lane for span in trace.spans} == {"compute"}
    assert {"0", "1"} <= {span.layer for span in trace.spans if span.label == "backward"}
