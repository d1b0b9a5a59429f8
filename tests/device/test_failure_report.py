"""The report where collectives are on streams: the watcher writes it before it ends a process that is stuck."""

from __future__ import annotations

import time
from typing import Any

import paddle
import pytest

from hp_sharding import CommError, ShardingConfig
from hp_sharding.comm import stream_group, watch
from hp_sharding.sharding import shard
from tests import harness
from tests.device.running import start
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.sides import BOTH

pytestmark = pytest.mark.usefixtures("standin_device")

_TIMEOUT_S = 2.0
_NOTICE_S = 8.0
_LIMIT_S = 90.0


def _wrapped(stage: int, **settings: Any) -> tuple[Any, Any]:
    stream_group._DESTRUCTORS_S = 1
    model = make_model("mlp")
    config = ShardingConfig(**{**BOTH, "stage": stage, "timeout_s": _TIMEOUT_S, **settings})
    return model, shard(model, make_optimizer("SGD", model), config)


def _step(model: Any, optimizer: Any, rank: int) -> None:
    loss_of(model, make_batch("mlp", 0, rank)).backward()
    optimizer.step()
    optimizer.clear_grad()
    paddle.device.synchronize()


def _stuck(rank: int, nranks: int) -> None:
    watch.GRACE_S = 1.0
    model, optimizer = _wrapped(stage=3)
    _step(model, optimizer, rank)
    if rank == 1:
        time.sleep(_TIMEOUT_S + _NOTICE_S)
        return
    # The host waits for a value inside the device's runtime, where no exception reaches it.
    float(model(make_batch("mlp", 1, rank)[0]).sum())


def test_a_process_that_is_stuck_writes_the_report_once_and_ends() -> None:
    outcomes = start(_stuck, 2, timeout_s=_LIMIT_S)
    stuck = outcomes[0]
    assert (stuck.reported, stuck.returncode) == (False, 1), stuck.output
    for part in (
        "cannot end: it was started 2 s ago",
        "  buckets of rank 0:",
        "SYNCING, gather under way",
        "  lane 'gather': rank 1 has not come to number ",
        "  rank 1 has launched, when it heard of this:",
        "in _stuck: time.sleep(_TIMEOUT_S + _NOTICE_S)",
        "The process ends, since its main thread stands still",
    ):
        assert part in stuck.output, part
    assert stuck.output.count("  buckets of rank 0:") == 1


def _raises(rank: int, nranks: int) -> tuple[str, str] | None:
    # Without overlap nothing in a backward waits for the device: the host waits for the facts, in step().
    model, optimizer = _wrapped(stage=2, reduce_overlap=False)
    _step(model, optimizer, rank)
    if rank == 1:
        time.sleep(_TIMEOUT_S + _NOTICE_S / 2)
        return None
    with pytest.raises(CommError) as caught:
        _step(model, optimizer, rank)
    return caught.value.message, caught.value.report


def test_an_error_that_is_raised_carries_the_report() -> None:
    outcomes = start(_raises, 2, timeout_s=_LIMIT_S)
    assert outcomes[0].error is None, outcomes[0].error
    message, report = outcomes[0].result
    assert "failed: " in message
    assert "\n" not in message
    assert "  buckets of rank 0:" in report
    assert "reduction under way" in report
    assert "in _raises: time.sleep(_TIMEOUT_S + _NOTICE_S / 2)" in report
    _assert_ends(outcomes)


def _assert_ends(outcomes: list[harness.Outcome]) -> None:
    for outcome in outcomes:
        assert not outcome.timed_out, outcome.output
