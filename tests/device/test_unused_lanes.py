"""Lanes on a device that nobody has any more end by themselves, when what is under way on them has ended."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import paddle
import pytest

from hp_sharding.comm import create_communicators, stream_group
from tests.device import standin
from tests.device.running import on_device

pytestmark = pytest.mark.usefixtures("standin_device")

_GONE_S = 15.0
_LATENCY_MS = 300.0


def _threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("hp_sharding"))


def _drop(rank: int, nranks: int, host_lanes: list[str]) -> Any:
    """On one rank later than on the other, and with a collective under way; another set of lanes goes on."""
    kept = create_communicators(range(nranks), ["kept"], timeout_s=20)
    before, data = _threads(), paddle.ones([5])
    made = create_communicators(range(nranks), ["one", "two"], host_lanes=host_lanes, timeout_s=20)
    n_threads = len(_threads())
    standin.Device().set_pace(standin.Pace(latency_ms=_LATENCY_MS))
    work = made["one"].all_reduce(data, label="last")
    if rank == 1:
        time.sleep(1.0)
    del made
    gc.collect()
    deadline_s = time.monotonic() + _GONE_S
    while _threads() != before and time.monotonic() < deadline_s:
        time.sleep(0.05)
    left = (_threads(), len(stream_group._groups), len(stream_group._abandoned))
    standin.Device().set_pace(standin.Pace())
    kept["kept"].all_reduce(data, label="goes on").wait()
    return n_threads > len(before), left, before, work.end_s is not None, data.numpy()


@pytest.mark.parametrize("host_lanes", [[], ["control"]])
def test_lanes_that_nobody_has_end(host_lanes: list[str]) -> None:
    for more, left, before, ended, data in on_device(_drop, 2, host_lanes):
        assert more
        assert left == (before, 1, 0)
        assert ended
        np.testing.assert_array_equal(data, np.full(5, 4.0))
