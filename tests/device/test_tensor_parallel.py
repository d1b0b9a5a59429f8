"""Fleet's own parallel layers beside sharding, on the stand-in: the same training as whole layers in one process."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.distributed.fleet import meta_parallel
from paddle.utils import unique_name

from hp_sharding import facts, fleet, full_parameters
from hp_sharding.tuning import tuner
from tests.device.running import on_device
from tests.reference import Ranks, Values, assert_close, values

pytestmark = pytest.mark.usefixtures("standin_device")

VOCABULARY, WIDTH, INNER = 12, 6, 8
STEPS = 3
SPLIT_AXES = {"embedding.weight": 0, "column.weight": 1, "column.bias": 0, "row.weight": 0}
MAX_NORM = 0.02
OVERLAP = {"allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": 0.001}


class _Net(nn.Layer):
    def __init__(self, *, split: bool) -> None:
        super().__init__()
        if split:
            self.embedding = meta_parallel.VocabParallelEmbedding(VOCABULARY, WIDTH)
            self.column = meta_parallel.ColumnParallelLinear(WIDTH, INNER, has_bias=True, gather_output=False)
            self.row = meta_parallel.RowParallelLinear(INNER, WIDTH, has_bias=True, input_is_parallel=True)
        else:
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.column, self.row = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, words: paddle.Tensor) -> paddle.Tensor:
        x = self.embedding(words)
        return self.head(x + self.row(F.gelu(self.column(self.norm(x)))))


def _loss(model: nn.Layer, step: int, data_rank: int) -> paddle.Tensor:
    generator = np.random.default_rng([step, data_rank])
    return (model(paddle.to_tensor(generator.integers(VOCABULARY, size=[3, 4]))) ** 2).mean()


def _optimizer(model: nn.Layer) -> Any:
    clip = nn.ClipGradByGlobalNorm(MAX_NORM)
    return paddle.optimizer.SGD(0.5, parameters=model.parameters(), grad_clip=clip)


def _initial() -> Values:
    generator = np.random.default_rng(5)
    return {
        name: generator.standard_normal(param.shape, dtype=np.float32)
        for name, param in _Net(split=False).named_parameters()
    }


def _whole(initial: Values) -> Values:
    model = _Net(split=False)
    for name, param in model.named_parameters():
        param.set_value(initial[name])
    optimizer, ranks = _optimizer(model), Ranks(model, 2)
    for step in range(STEPS):
        ranks.backward(functools.partial(_loss, model, step))
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
    return values(model)


def _copy(tensor: paddle.Tensor, *_: Any) -> paddle.Tensor:
    return tensor.clone()


def _split(rank: int, nranks: int, initial: Values) -> list[tuple[int, Values]]:
    # A kernel that copies its input, and that Paddle has for no CPU, of which the stand-in has its kernels.
    paddle._C_ops.c_identity = _copy
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"mp_degree": 2, "sharding_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    groups = fleet.get_hybrid_communicate_group()
    part = groups.get_model_parallel_rank()
    found = []
    for stage in (2, 3):
        strategy.hp_sharding_configs = {"stage": stage, **OVERLAP}
        with unique_name.guard():
            model = _Net(split=True)
        for name, param in model.named_parameters():
            assert bool(param.is_distributed) == (name in SPLIT_AXES)
            whole = initial[name]
            param.set_value(np.split(whole, 2, SPLIT_AXES[name])[part] if name in SPLIT_AXES else whole)
        model = fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(_optimizer(model), strategy=strategy)
        for step in range(STEPS):
            _loss(model, step, groups.get_sharding_parallel_rank()).backward()
            optimizer.step()
            optimizer.clear_grad()
        with full_parameters(model):
            found.append((part, values(model)))
    return found


SIZES_MB = (0.00025, 0.001, 0.004)
TUNED_STEPS = 8


def _tune(rank: int, nranks: int, degrees: dict[str, int]) -> tuple[list[list[float]], int]:
    """The losses with sizes that are set and with those that are tuned, and how many of these there were."""
    paddle._C_ops.c_identity = _copy
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = degrees
    fleet.init(is_collective=True, strategy=strategy)
    initial: Values = {}
    found, counts = [], set()
    quickly: dict[str, Any] = {
        "FIRST_STEPS": 1,
        "SKIPPED_STEPS": 0,
        "COUNTED_STEPS": 1,
        "START_MB": 1.0,
        "FACTORS": SIZES_MB,
    }
    for size_mb in (SIZES_MB[1], "auto"):
        strategy.hp_sharding_configs = {**OVERLAP, "stage": 2, "comm_buffer_size_MB": size_mb}
        model = _Net(split="mp_degree" in degrees)
        initial = initial or values(model)
        model.set_state_dict({name: paddle.to_tensor(value) for name, value in initial.items()})
        with mock.patch.multiple(tuner, **quickly), mock.patch.object(tuner, "largest", _largest):
            model = fleet.distributed_model(model)
            optimizer = fleet.distributed_optimizer(_optimizer(model), strategy=strategy)
            losses = []
            for step in range(TUNED_STEPS):
                loss = _loss(model, step, 0 if "mp_degree" in degrees else rank)
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
                losses.append(float(loss))
                counts.add(len(optimizer.buffers))
        found.append(losses)
    return found, len(counts)


def _largest(numbers: list[float], ways: Any, *, label: str) -> list[float]:
    """Steps of a device that stands in for another have nothing to tell: all are alike here, and waited for."""
    times = [100.0, 30.0] if label.startswith("measured") else numbers[1:]
    return facts.largest([numbers[0], *times], ways, label=label)


@pytest.mark.parametrize("degrees", [{"sharding_degree": 2}, {"mp_degree": 2, "sharding_degree": 1}], ids=str)
def test_sizes_are_tuned(degrees: dict[str, int]) -> None:
    """All ranks agree on what they have measured, tensor-parallel ones on a lane of the device."""
    for (still, tuned), n_counts in on_device(_tune, 2, degrees):
        assert n_counts > 1
        np.testing.assert_allclose(tuned, still, rtol=1e-5)


def test_fleets_parallel_layers_train_as_whole_ones() -> None:
    initial = _initial()
    expected = _whole(initial)
    for found in zip(*on_device(_split, 4, initial, timeout_s=100), strict=True):
        for name, value in expected.items():
            parts = {part: params[name] for part, params in found}
            joined = np.concatenate([parts[0], parts[1]], SPLIT_AXES[name]) if name in SPLIT_AXES else parts[0]
            assert_close({name: joined}, {name: value}, 1e-5)
