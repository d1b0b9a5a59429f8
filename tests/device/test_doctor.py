"""The doctor on devices whose collectives take a known time: it measures that, and sees that no call waits for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from hp_sharding.doctor.advice import FOREIGN_LIMIT
from hp_sharding.plan.hardware import Hardware
from tests import harness
from tests.device import standin

pytestmark = pytest.mark.usefixtures("standin_device")

_LATENCY_MS = 5.0
_MB_S = 200.0
_SET_BY_LAUNCHER = ("PADDLE_DISTRI_BACKEND", "FLAGS_selected_npus")


def _examine() -> dict[str, Any]:
    pace = standin.Pace(latency_ms=_LATENCY_MS, bandwidth_mb_s=_MB_S)
    base = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    environment = {**base, **standin.environment(pace, caching=True)}
    for name in _SET_BY_LAUNCHER:
        del environment[name]
    only = [part for name in ("asynchrony", "bandwidth", "overlap") for part in ("--only", name)]
    command = ["-m", "hp_sharding", "doctor", "--nproc", "2", "--quick", "--max-mb", "4", "--json", *only]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=harness.REPO_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.slow
def test_it_measures_the_pace_of_the_device() -> None:
    data = _examine()
    machine, results = data["machine"], data["results"]
    assert (machine["device"], machine["backend"], machine["has_streams"]) == ("npu:0", "xccl", True)
    assert machine["n_devices"] > 0
    for row in results["asynchrony"]["rows"]:
        assert row["launch_ms"]["low"] < _LATENCY_MS / 2
        assert row["done_ms"]["low"] > _LATENCY_MS
    assert results["asynchrony"]["verdict"].startswith("asynchronous")
    for row in results["bandwidth"]["rows"]:
        sent_mb = row["nbytes"] / 1e6 * (1.0 if row["op"] == "all_reduce" else 0.5)
        assert row["ms"]["low"] >= _LATENCY_MS + sent_mb / _MB_S * 1e3
        assert row["bus_gb_s"] <= _MB_S / 1e3
        if row["nbytes"] == 4 << 20:
            assert row["bus_gb_s"] > _MB_S / 1e3 / 4, "most of the time is that of the link"
    for lane in ("gather", "reduce"):
        link = Hardware.from_dict(data).link(lane)
        # Every time has the whole latency in it, and what a rank sends takes its time besides; nothing is quicker.
        assert link.latency_s * 1e3 > 0.5 * _LATENCY_MS
        assert _MB_S / 4 < link.bandwidth_bytes_s / 1e6 < 1.2 * _MB_S
    (step,) = results["overlap"]["rows"]
    assert step["lanes_ms"]["gather"] > _LATENCY_MS
    # Beside other programs compute takes its time from them, and what is hidden is theirs as well.
    if data["foreign_share"]["overlap"] <= FOREIGN_LIMIT:
        assert step["hidden_percent"] > 30
