"""Scripts on the stand-in device as users start them: by Paddle's launcher, and in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import paddle
import pytest

from hp_sharding import ShardingConfig, fleet, full_parameters, shard
from hp_sharding.plain import PlainOptimizer
from tests import harness, reference
from tests.device import standin
from tests.device.running import on_device
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.record_example import Record, read_records, run_example
from tests.reference import Values, assert_equal, values

pytestmark = pytest.mark.usefixtures("standin_device")

_STEPS = 4
_SMALL = "--steps 4 --layers 2 --width 32 --context 32 --batch 8 --sample 5 --comm-buffer-size-mb 0.02".split()
_LAUNCHER_SETS = ("PADDLE_DISTRI_BACKEND", "FLAGS_selected_npus")
_TIMEOUT_S = 100.0


def _environment() -> dict[str, str]:
    """That of a shell on a machine with the device, where nothing says yet which device a process is to take."""
    base = {key: value for key, value in os.environ.items() if not key.startswith("PADDLE_")}
    device = standin.environment(standin.Pace(jitter_ms=2.0), timeout_s=_TIMEOUT_S / 3)
    for name in _LAUNCHER_SETS:
        del device[name]
    return {**base, **harness.machine_env(), **device, "PYTHONPATH": str(harness.REPO_ROOT), "PYTHONWARNINGS": "ignore"}


def _launch(folder: Path, options: list[str]) -> list[Record]:
    """Runs the example, whose lines are those of the README, on two devices; what each rank noted."""
    records = folder / "records"
    records.mkdir()
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--devices", "0,1", "--log_dir", str(folder)]
    done = subprocess.run(
        [*launcher, "tests/record_example.py", str(records), *options],
        cwd=harness.REPO_ROOT,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("workerlog.*")))
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{logs}"
    return read_records(records)


def _on_cpu(rank: int, nranks: int, options: list[str]) -> Record:
    return run_example(options)


@pytest.mark.slow
def test_the_launcher_starts_a_script_that_trains_as_on_cpu(tmp_path: Path) -> None:
    found = _launch(tmp_path, _SMALL)
    assert len(found) == 2
    assert found == harness.run(_on_cpu, 2, _SMALL, timeout_s=_TIMEOUT_S)


def _train(model: paddle.nn.Layer, optimizer: Any) -> Values:
    for step in range(_STEPS):
        loss_of(model, make_batch("mlp", step, 0)).backward()
        optimizer.step()
        optimizer.clear_grad()
    with full_parameters(model):
        return values(model)


def _alone(rank: int, nranks: int) -> list[Values]:
    """One process: what ``shard`` gives, and what fleet gives."""
    paddle.set_device("npu")
    device = standin.Device()
    config = ShardingConfig(stage=3, allgather_overlap=True, reduce_overlap=True)
    model = make_model("mlp")
    optimizer = shard(model, make_optimizer("AdamW", model), config)
    assert isinstance(optimizer, PlainOptimizer)
    found = [_train(model, optimizer)]
    assert optimizer.memory_report()["measured_bytes"] > 0

    strategy = fleet.DistributedStrategy()
    strategy.hp_sharding_configs = {"stage": 2, "allgather_overlap": True, "reduce_overlap": True}
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(make_model("mlp"))
    found.append(_train(model, fleet.distributed_optimizer(make_optimizer("AdamW", model))))
    assert all(str(param.place) == "Place(npu:0)" for param in model.parameters())
    assert device.writes_after_free() == 0
    return found


def test_one_process_trains_as_plain_paddle_does() -> None:
    expected = reference.train("mlp", "AdamW", 1, _STEPS).params
    for name, found in zip(("shard", "fleet"), on_device(_alone, 1)[0], strict=True):
        assert_equal(found, expected, name)
