"""``python -m hp_sharding.run`` under Paddle's launcher: a script written for Paddle's fleet, unchanged."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hp_sharding.config import ShardingConfig
from tests import harness, paddle_script
from tests.reference import Ranks, assert_close, values

SCRIPT = harness.REPO_ROOT / "tests" / "paddle_script.py"
MAIN = harness.REPO_ROOT / "hp_sharding" / "__main__.py"


def _launch(folder: Path, *options: str, **environment: str) -> list[dict[str, Any]]:
    """Runs the script on two ranks, as a user would; returns what each has left."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--backend", "gloo"]
    logs = folder / "log"
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            *launcher,
            "--log_dir",
            logs,
            MAIN,
            "run",
            *options,
            SCRIPT,
            folder,
            "--epochs",
        ],
        cwd=folder,
        env={**base, "PYTHONPATH": str(harness.REPO_ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + "".join(path.read_text() for path in sorted(logs.glob("workerlog.*")))
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(2)]


def test_a_script_for_paddles_fleet_is_sharded_unchanged(tmp_path: Path) -> None:
    settings = {"HP_SHARDING_CONFIGS": '{"stage": 1, "timeline": true, "comm_buffer_size_MB": 0.001}'}
    found = _launch(tmp_path, "--stage", "2", "--allgather-overlap", **settings)
    model = paddle_script.make_model()
    optimizer, ranks = paddle_script.make_optimizer(model), Ranks(model, 2)
    losses = []
    for step in range(paddle_script.STEPS):
        losses.append(ranks.backward(functools.partial(paddle_script.loss_of, model, step)))
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
    for rank, left in enumerate(found):
        assert left["config"] == ShardingConfig(
            stage=2, allgather_overlap=True, reduce_overlap=True, timeline=True, comm_buffer_size_MB=0.001
        )
        assert left["arguments"] == [str(SCRIPT), str(tmp_path), "--epochs"]
        np.testing.assert_allclose(left["losses"], [step[rank] for step in losses], rtol=1e-6)
        assert_close(left["params"], values(model), 1e-6)
