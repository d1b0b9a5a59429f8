"""Layers split over two ranks beside sharding over two: the same training as one process has with whole layers.

Fleet's own split layers have no kernels on CPU, so these are made of PyLayers and Paddle's public collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.autograd import PyLayer
from paddle.utils import unique_name

from hp_sharding import ShardingConfig, fleet, full_parameters, shard
from tests import harness
from tests.models import SEED
from tests.reference import Ranks, Values, assert_all_equal, assert_close, values

VOCABULARY, WIDTH, INNER, LENGTH, BATCH = 14, 6, 10, 5, 3
STEPS = 4
SPLIT_AXES = {"embedding.weight": 0, "column.weight": 1, "column.bias": 0, "row.weight": 0}
"""Of each parameter that is split, the axis; all others are whole on every rank."""


class _ToSplit(PyLayer):
    """What goes into a split layer: the same on all of its ranks, whose gradients add up."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Any) -> paddle.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return _summed(gradient, ctx.group)


class _FromSplit(PyLayer):
    """What comes out of a split layer: parts of a sum."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Any) -> paddle.Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return gradient


class _Joined(PyLayer):
    """Columns that lie on several ranks, side by side."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Any) -> paddle.Tensor:
        ctx.group = group
        parts: list[paddle.Tensor] = []
        paddle.distributed.all_gather(parts, x.contiguous(), group=group)
        return paddle.concat(parts, axis=-1)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return paddle.chunk(gradient, ctx.group.nranks, axis=-1)[ctx.group.rank]


def _summed(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    total = x.clone()
    paddle.distributed.all_reduce(total, group=group)
    return total


class _Net(nn.Layer):
    """A small language model with one embedding for both ends; whole where there is no group."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group
        ways = 1 if group is None else group.nranks
        self.first = 0 if group is None else group.rank * (VOCABULARY // ways)
        self.embedding = nn.Embedding(VOCABULARY // ways, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.column = nn.Linear(WIDTH, INNER // ways)
        self.row = nn.Linear(INNER // ways, WIDTH, bias_attr=False)
        self.bias = self.create_parameter([WIDTH], is_bias=True)
        self.head_norm = nn.LayerNorm(WIDTH)
        for name, param in self.named_parameters():
            param.is_distributed = group is not None and name in SPLIT_AXES

    def forward(self, words: paddle.Tensor) -> paddle.Tensor:
        x = self._embed(words)
        inner = F.gelu(self.column(self._pass(_ToSplit, self.norm(x))))
        x = x + self._pass(_FromSplit, self.row(inner)) + self.bias
        x = self._pass(_ToSplit, self.head_norm(x))
        return self._pass(_Joined, paddle.matmul(x, self.embedding.weight, transpose_y=True))

    def _embed(self, words: paddle.Tensor) -> paddle.Tensor:
        n_words = self.embedding.weight.shape[0]
        here = paddle.logical_and(words >= self.first, words < self.first + n_words)
        x = self.embedding(paddle.where(here, words - self.first, paddle.zeros_like(words)))
        return self._pass(_FromSplit, x * here.unsqueeze(-1).astype(x.dtype))

    def _pass(self, through: Any, x: paddle.Tensor) -> paddle.Tensor:
        return x if self.group is None else through.apply(x, self.group)


class _Case(NamedTuple):
    """How to divide the ranks, how many of the groups see data of their own, and with which settings to train."""

    degrees: dict[str, int]
    n_data: int
    settings: list[dict[str, Any]]


def _loss(model: nn.Layer, step: int, data_rank: int, *, seen_as: int = 0) -> paddle.Tensor:
    """The loss on a batch. Ranks that share layers (``seen_as`` odd) are wrong about the inputs until they are told."""
    generator = np.random.default_rng(100 * step + data_rank)
    words = paddle.to_tensor(generator.integers(VOCABULARY, size=[BATCH, LENGTH + 1]))
    logits = model(words[:, :-1] * (1 - seen_as % 2))
    return F.cross_entropy(logits.reshape([-1, VOCABULARY]), words[:, 1:].reshape([-1]))


def _whole() -> nn.Layer:
    paddle.seed(SEED)
    return _Net()


def _sgd(model: nn.Layer, max_norm: float) -> Any:
    clip = nn.ClipGradByGlobalNorm(max_norm)
    return paddle.optimizer.SGD(0.5, parameters=model.parameters(), grad_clip=clip)


def _adamw(model: nn.Layer, max_norm: float) -> Any:
    return paddle.optimizer.AdamW(1e-2, parameters=model.parameters(), weight_decay=0.1)


def _train_whole(make_optimizer: Callable[..., Any], n_data: int, max_norm: float) -> tuple[Values, list[list[float]]]:
    """One process with whole layers, which runs every data rank in turn."""
    model = _whole()
    optimizer = make_optimizer(model, max_norm)
    ranks = Ranks(model, n_data)
    losses = []
    for step in range(STEPS):
        losses.append(ranks.backward(functools.partial(_loss, model, step)))
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
    return values(model), losses


def _norm_of_first_step(n_data: int) -> float:
    model = _whole()
    Ranks(model, n_data).backward(functools.partial(_loss, model, 0))
    return float(np.sqrt(sum(float((param.grad**2).sum()) for param in model.parameters())))


def _split_model(rank: int) -> tuple[nn.Layer, int]:
    """This rank's part of the model, and which data it sees. What is whole differs by rank until it is wrapped."""
    groups = fleet.get_hybrid_communicate_group()
    mp, whole = groups.get_model_parallel_group(), _whole()
    model = _Net(mp)
    for (name, part), param in zip(model.named_parameters(), whole.parameters(), strict=True):
        if name in SPLIT_AXES:
            part.set_value(paddle.chunk(param, mp.nranks, axis=SPLIT_AXES[name])[mp.rank])
        else:
            part.set_value(param if rank == 0 else paddle.full_like(param, rank))
    n_shards, shard = groups.get_sharding_parallel_world_size(), groups.get_sharding_parallel_rank()
    return model, groups.get_data_parallel_rank() * n_shards + shard


def _strategy(degrees: dict[str, int]) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = degrees
    return strategy


def _train_split(rank: int, nranks: int, case: _Case, make: Callable[..., Any], max_norm: float) -> list[Any]:
    strategy = _strategy(case.degrees)
    fleet.init(is_collective=True, strategy=strategy)
    found = []
    for settings in case.settings:
        strategy.hp_sharding_configs = settings
        with unique_name.guard():
            model, data_rank = _split_model(rank)
            model = fleet.distributed_model(model)
            optimizer = fleet.distributed_optimizer(make(model, max_norm), strategy=strategy)
        losses = []
        for step in range(STEPS):
            loss = _loss(model, step, data_rank, seen_as=rank)
            loss.backward()
            if step == 0:
                assert optimizer.grad_norm() == pytest.approx(2 * max_norm, rel=1e-5)
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
        with full_parameters(model):
            found.append((data_rank, losses, values(model)))
    return found


def _joined(parts: list[Values]) -> Values:
    """Whole parameters from those of the ranks that have split them. What is not split must be equal on all."""
    whole = {name: [part[name] for part in parts] for name in parts[0]}
    for name, found in whole.items():
        if name not in SPLIT_AXES:
            assert_all_equal([{name: value} for value in found], "not split, but different:")
    return {
        name: np.concatenate(found, axis=SPLIT_AXES[name]) if name in SPLIT_AXES else found[0]
        for name, found in whole.items()
    }


OVERLAP: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": 0.0005}
CASES = {
    "mp 2 x sharding 2": _Case(
        {"mp_degree": 2, "sharding_degree": 2}, 2, [{"stage": 2}, *({"stage": stage, **OVERLAP} for stage in (1, 2, 3))]
    ),
    "mp 2 x dp 2": _Case({"mp_degree": 2, "dp_degree": 2, "sharding_degree": 1}, 2, [{"stage": 2, **OVERLAP}]),
    "mp 2 alone": _Case({"mp_degree": 2}, 1, [{"stage": 2, **OVERLAP}]),
}


@pytest.mark.parametrize("make_optimizer", [_sgd, _adamw])
@pytest.mark.parametrize("name", CASES)
def test_split_layers_train_as_whole_ones(name: str, make_optimizer: Callable[..., Any]) -> None:
    case = CASES[name]
    max_norm = _norm_of_first_step(case.n_data) / 2
    expected, losses = _train_whole(make_optimizer, case.n_data, max_norm)
    results = harness.run(_train_split, 2 * case.n_data, case, make_optimizer, max_norm)
    for number, settings in enumerate(case.settings):
        for data_rank in range(case.n_data):
            found = [result[number] for result in results if result[number][0] == data_rank]
            assert len(found) == 2, "two ranks see the same data"
            for _, of_rank, _ in found:
                np.testing.assert_allclose(of_rank, [step[data_rank] for step in losses], rtol=1e-6)
            assert_close(_joined([params for _, _, params in found]), expected, 1e-6, f"{name}, {settings}:")


def _train_without_fleets_face(rank: int, nranks: int, make: Callable[..., Any], max_norm: float) -> Values:
    fleet.init(is_collective=True, strategy=_strategy({"mp_degree": 2, "sharding_degree": 2}))
    groups = fleet.get_hybrid_communicate_group()
    model, data_rank = _split_model(rank)
    optimizer = shard(
        model,
        make(model, max_norm),
        ShardingConfig(stage=2, **OVERLAP),
        shard_group=groups.get_sharding_parallel_group(),
        tensor_parallel_group=groups.get_model_parallel_group(),
    )
    for step in range(STEPS):
        _loss(model, step, data_rank).backward()
        optimizer.step()
        optimizer.clear_grad()
    return values(model)


def test_groups_may_be_named_one_by_one() -> None:
    max_norm = _norm_of_first_step(2) / 2
    expected, _ = _train_whole(_sgd, 2, max_norm)
    parts = harness.run(_train_without_fleets_face, 4, _sgd, max_norm)
    for pair in (parts[:2], parts[2:]):  # neighbours split the layers
        assert_close(_joined(pair), expected, 1e-6)
