"""From wrapping to the end of the process: averages, copies, second wraps, early ends, no CUDA asked for."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

from hp_sharding import ConfigError, ShardingConfig, full_parameters, shard
from tests import harness
from tests.dist import test_replicas
from tests.lanes import wrap
from tests.models import loss_of, loss_on, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_all_equal, assert_equal, values
from tests.sides import BOTH, FEW, Factory, Settings, compare

# -- averages ----------------------------------------------------------------------------------------------------------

DECAY = 0.75


class _Average:
    """The exponential moving average of scripts: updated after each step, put in place to evaluate, and taken out."""

    def __init__(self, model: nn.Layer) -> None:
        self.shadow = {name: param.clone().detach() for name, param in model.named_parameters()}
        self._backup: dict[str, paddle.Tensor] = {}

    @paddle.no_grad()
    def update(self, model: nn.Layer) -> None:
        for name, param in model.named_parameters():
            self.shadow[name] = DECAY * self.shadow[name] + (1 - DECAY) * param

    @paddle.no_grad()
    def apply(self, model: nn.Layer) -> None:
        self._backup = {name: param.clone() for name, param in model.named_parameters()}
        for name, param in model.named_parameters():
            param.set_value(self.shadow[name])

    @paddle.no_grad()
    def restore(self, model: nn.Layer) -> None:
        for name, param in model.named_parameters():
            param.copy_(self._backup[name], False)


def _averaged(new: Factory) -> dict[str, Values]:
    """The average is evaluated in the middle of the training, inside and outside ``full_parameters``."""
    side = new(lambda: make_model("mlp"), lambda model: make_optimizer("AdamW", model))
    with full_parameters(side.model):
        average, twin = _Average(side.model), copy.deepcopy(side.model)
    found: dict[str, Values] = {}
    for step in range(3):
        side.backward(loss_on(side.model, "mlp", step))
        side.step()
        side.clear_grad()
        with full_parameters(side.model):
            average.update(side.model)
            _follow(twin, side.model)
            average.apply(side.model)
            found[f"average {step}"] = {"inside": _evaluate(side.model), "twin": _evaluate(twin)}
        found[f"average {step}"]["outside"] = _evaluate(side.model)
        with full_parameters(side.model):
            average.restore(side.model)
    return {**found, "end": side.values(), "end of the average": {k: v.numpy() for k, v in average.shadow.items()}}


@paddle.no_grad()
def _follow(twin: nn.Layer, model: nn.Layer) -> None:
    for own, param in zip(twin.parameters(), model.parameters(), strict=True):
        own.scale_(DECAY).add_(param * (1 - DECAY))


def _evaluate(model: nn.Layer) -> Any:
    model.eval()
    with paddle.no_grad():
        output = model(make_batch("mlp", 99, 0)[0]).numpy().copy()
    model.train()
    return output


def test_averages_are_evaluated_and_taken_out_again() -> None:
    harness.run(compare, 2, _averaged, FEW)
    replicas = {name: test_replicas.SETTINGS[name] for name in ("stage 2", "stage 3")}
    harness.run(compare, 4, _averaged, replicas, 1e-5)


def _averaged_at_once(new: Factory) -> dict[str, Values]:
    """The same without ``full_parameters``, right after ``step()``, where parameters stay."""
    side = new(lambda: make_model("mlp"), lambda model: make_optimizer("Momentum", model))
    average = _Average(side.model)
    for step in range(4):
        side.backward(loss_on(side.model, "mlp", step))
        side.step()
        average.update(side.model)
        side.clear_grad()
        average.apply(side.model)
        with paddle.no_grad():
            loss_of(side.model, make_batch("mlp", 99, 0))
        average.restore(side.model)
    return {"end": side.values(), "average": {name: value.numpy() for name, value in average.shadow.items()}}


def test_averages_right_after_step() -> None:
    kept: Settings = {name: {**FEW[name], "delay_s": 0.005} for name in ("stage 1", "stage 2")}
    harness.run(compare, 2, _averaged_at_once, kept)


# -- wrapping ----------------------------------------------------------------------------------------------------------


def _twice(rank: int, nranks: int) -> Values:
    model = make_model("mlp")
    inner = make_optimizer("SGD", model)
    model, optimizer, calls = wrap(model, inner, nranks, n_replicas=nranks // 2, stage=3, **BOTH)
    before = len(calls)
    for again in (inner, optimizer, make_optimizer("SGD", model)):
        with pytest.raises(ConfigError, match="wrap it once"):
            shard(model, again, ShardingConfig(stage=3))
    with pytest.raises(ConfigError, match="belongs to a model that is already sharded"):
        shard(nn.Sequential(model), make_optimizer("SGD", model), ShardingConfig(stage=3))
    assert len(calls) == before
    assert len(model.parameters()) == len(make_model("mlp").parameters())
    loss_of(model, make_batch("mlp", 0, rank)).backward()
    optimizer.step()
    with full_parameters(model):
        return values(model)


def test_wrapping_again_changes_nothing_where_parameters_are_freed() -> None:
    once = harness.run(_once, 4)
    found = harness.run(_twice, 4)
    assert_all_equal(found)
    assert_equal(found[0], once[0])


def _once(rank: int, nranks: int) -> Values:
    model = make_model("mlp")
    model, optimizer, _ = wrap(model, make_optimizer("SGD", model), nranks, n_replicas=nranks // 2, stage=3, **BOTH)
    loss_of(model, make_batch("mlp", 0, rank)).backward()
    optimizer.step()
    with full_parameters(model):
        return values(model)


# -- the end -----------------------------------------------------------------------------------------------------------

NOTICE_S = 12.0
"""A launcher that has to end ranks itself takes 13 s and more: each must be gone before."""
WIDE = 1500
"""Layers of 9 MB, whose gathers are under way for a while."""


def _ends(rank: int, nranks: int, stage: int, how: str) -> str:
    """The last step is over, its gathers are not, and the script is at its end; or one rank fails there."""
    model = nn.Sequential(*[nn.Linear(WIDE, WIDE) for _ in range(4)])
    optimizer: Any = _shard(model, stage, nranks)
    for _ in range(2):
        model(paddle.rand([2, WIDE])).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    if rank == 1 and how == "raises":
        raise ArithmeticError("a mistake of the script")
    if how != "ends":
        time.sleep(0.5)
        model(paddle.rand([2, WIDE])).square().mean().backward()
        optimizer.step()
    return "at the end"


def _shard(model: nn.Layer, stage: int, nranks: int) -> Any:
    config = ShardingConfig(stage=stage, allgather_overlap=True, reduce_overlap=True, timeout_s=20)
    me = paddle.distributed.get_rank()
    first = me - me % 2
    groups = {} if nranks == 2 else {"shard_group": [first, first + 1], "replicate_group": [me % 2, me % 2 + 2]}
    return shard(model, paddle.optimizer.SGD(0.01, parameters=model.parameters()), config, **groups)


@pytest.mark.parametrize(("nranks", "stage"), [(2, 2), (4, 3)])
def test_a_script_may_end_with_gathers_under_way(nranks: int, stage: int) -> None:
    for outcome in harness.run(_ends, nranks, stage, "ends", fresh=True, timeout_s=60):
        assert (outcome.result, outcome.returncode) == ("at the end", 0), outcome
        assert outcome.exit_s < NOTICE_S
        assert "terminate called" not in outcome.output


def test_a_rank_that_fails_with_gathers_under_way_ends_the_others_in_time() -> None:
    outcomes = harness.run(_ends, 2, 2, "raises", fresh=True, timeout_s=60)
    assert [outcome.returncode for outcome in outcomes] == [1, 1]
    assert "a mistake of the script" in (outcomes[1].error or "")
    assert "rank 1" in (outcomes[0].error or ""), outcomes[0]
    assert all(outcome.exit_s < NOTICE_S for outcome in outcomes)


_SCRIPT = """
import sys
import paddle
from hp_sharding import fleet

strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 1, "sharding_degree": 2}
strategy.hp_sharding_configs = {"stage": 2, "allgather_overlap": True, "reduce_overlap": True}
fleet.init(is_collective=True, strategy=strategy)
model = fleet.distributed_model(paddle.nn.Sequential(*[paddle.nn.Linear(1500, 1500) for _ in range(3)]))
optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.01, parameters=model.parameters()))
for _ in range(2):
    model(paddle.rand([2, 1500])).square().mean().backward()
    optimizer.step()
sys.exit(int(sys.argv[1]) if fleet.worker_index() == 1 else 0)
"""


@pytest.mark.slow
def test_the_launcher_ends_in_time_where_a_rank_exits_with_gathers_under_way(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    began_s = time.monotonic()
    launch = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--backend", "gloo", "--log_dir"]
    done = subprocess.run(
        [sys.executable, *launch, str(tmp_path / "log"), str(script), "3"],
        env={**os.environ, "PYTHONPATH": str(harness.REPO_ROOT)}, cwd=tmp_path, capture_output=True, timeout=60,
    )  # fmt: skip
    logs = "".join(path.read_text() for path in sorted((tmp_path / "log").glob("workerlog.*")))
    assert done.returncode != 0, logs
    assert time.monotonic() - began_s < 30
    assert "terminate called" not in logs


# -- without CUDA ------------------------------------------------------------------------------------------------------

_WITHOUT_CUDA = """
import paddle

def refuse(*_, **__):
    raise AssertionError("CUDA or NCCL was asked for")

for module in (paddle.device.cuda, paddle.version):
    for name in ("nccl", "cuda", "cudnn", "current_stream", "device_count", "synchronize", "get_device_properties",
                 "get_device_capability", "max_memory_allocated", "memory_allocated", "empty_cache", "Event", "Stream"):
        if hasattr(module, name):
            setattr(module, name, refuse)
for name in ("nccl_version", "get_cuda_device_count", "get_cuda_current_device_id", "is_compiled_with_nccl"):
    if hasattr(paddle.base.core, name):
        setattr(paddle.base.core, name, refuse)

import hp_sharding.comm, hp_sharding.fleet
from tests.fakes import wrap
for stage in (1, 2, 3):
    model = paddle.nn.Linear(3, 3)
    rig = wrap(model, paddle.optimizer.AdamW(parameters=model.parameters()), stage=stage, allgather_overlap=True,
               reduce_overlap=True, timeline=True)
    for _ in range(2):
        model(paddle.ones([2, 3])).mean().backward()
        rig.optimizer.step()
        rig.optimizer.clear_grad()
print("trained")
"""


def test_nothing_of_cuda_is_asked_for_elsewhere() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT_CUDA], cwd=harness.REPO_ROOT, capture_output=True, text=True, timeout=100
    )
    assert run.stdout.endswith("trained\n"), run.stderr
