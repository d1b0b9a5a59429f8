"""The schedule benchmark runs, and its contenders train the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import harness

pytestmark = pytest.mark.usefixtures("standin_device")

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 240.0


def _run(*options: str) -> tuple[dict[str, Any], str]:
    """What the benchmark found, and all that it printed."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.device_step", "--quick", "--json", *options]
    env = {**os.environ, **harness.machine_env()}
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["stage1_overlap", "stage2_overlap", "stage3_overlap", "sharding_v2", "sharding_v2_overlap"], []),
        (["stage2_overlap", "sharding_v2_overlap"], ["--replicas", "2"]),
        (["compute", "stage2_overlap", "sharding_v2_overlap"], ["--modelled-compute", "30"]),
    ],
    ids=["all", "replicas", "modelled"],
)
def test_all_contenders_train_the_same(names: list[str], options: list[str]) -> None:
    result, printed = _run("--contenders", *names, *options)
    assert list(result["rows"]) == names
    assert all(row["step_ms"] > 0.0 for row in result["rows"].values())
    together = [name for name in names if name != "compute"]
    assert set(result["losses"]["largest_relative_difference"]) == set(together[1:])
    assert result["losses"]["agree"], result["losses"]
    assert "Paddle sharding V2, overlap" in printed


def test_the_pace_is_settled_before_anything_is_compared() -> None:
    result, printed = _run("--contenders", "compute")
    found = result["calibration"]
    latencies_ms = found["n_collectives"] * found["latency_ms"]
    wire_ms = found["wire_bytes"] / found["bandwidth_mb_s"] / 1e3
    assert latencies_ms + wire_ms == pytest.approx(found["compute_ms"])
    assert f"= {found['bandwidth_mb_s']:.1f} MB/s, fixed from here on" in printed.splitlines()[0]
