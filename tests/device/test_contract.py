"""The contract of communicators, over streams of a device."""

from __future__ import annotations

import paddle
import pytest

from hp_sharding.comm import create_communicators
from tests.device import standin
from tests.device.gates import DeviceGate
from tests.device.running import on_device
from tests.unit.test_comm_contract import CHECKS, Lanes
from tests.unit.test_comm_wire import WIRE_CHECKS

pytestmark = pytest.mark.usefixtures("standin_device")

_PACE = standin.Pace(latency_ms=1.0, jitter_ms=1.0)
"""So long that what is read without a wait is stale."""


def _run_checks(rank: int, nranks: int) -> tuple[str, int]:
    if nranks == 1:
        paddle.set_device("npu")
    lanes = Lanes(create_communicators(range(nranks), ["one", "two"], timeout_s=20), DeviceGate)
    for check in (*WIRE_CHECKS.values(), *CHECKS.values()):
        check(lanes)
    for comm in lanes.values():
        comm.close()
    return type(lanes["one"]).__name__, standin.Device().writes_after_free()


@pytest.mark.parametrize(
    ("nranks", "kind"),
    [(1, "LocalCommunicator"), (2, "StreamCommunicator"), (3, "StreamCommunicator"), (4, "StreamCommunicator")],
)
def test_contract(nranks: int, kind: str) -> None:
    """All checks in one process, since each start of one takes seconds: the traceback names the one that fails."""
    assert on_device(_run_checks, nranks, pace=_PACE, timeout_s=45.0) == [(kind, 0)] * nranks
