"""The fleet face with Paddle's real environment: in one process, on two and four ranks, and a second time."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed.fleet as paddle_fleet
import pytest

from hp_sharding import fleet
from hp_sharding.config import ShardingConfig
from hp_sharding.errors import ConfigError
from tests import harness


class _Net(paddle.nn.Layer):
    """Parameters and buffers that differ between ranks: norms with running statistics, 0-d, empty, int64, unsaved."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        paddle.seed(100 + rank)
        self.linear = paddle.nn.Linear(5, 3)
        self.norm = paddle.nn.BatchNorm1D(3)
        self.norm._mean[:] = rank + 1.0
        constant = paddle.nn.initializer.Constant(rank + 1.0)
        self.scalar = self.create_parameter([], default_initializer=constant)
        self.empty = self.create_parameter([0, 2], default_initializer=constant)
        self.register_buffer("count", paddle.to_tensor(rank + 1, dtype="int64"))
        self.register_buffer("mask", paddle.to_tensor([rank > 0, True]))
        self.register_buffer("unsaved", paddle.full([2], rank + 1.0), persistable=False)


def _strategy(nranks: int, **own: Any) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "sharding_degree": nranks}
    strategy.hp_sharding_configs = own
    return strategy


def _degrees() -> tuple[int, int]:
    groups = fleet.get_hybrid_communicate_group()
    return groups.get_data_parallel_world_size(), groups.get_sharding_parallel_world_size()


def _values(model: paddle.nn.Layer) -> dict[str, Any]:
    return {name: t.numpy() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def _init_alone(rank: int, nranks: int) -> dict[str, Any]:
    returned = fleet.init(is_collective=True, strategy=_strategy(nranks))
    total = paddle.full([2], rank + 1.0)
    if nranks > 1:
        paddle.distributed.all_reduce(total, group=fleet.get_hybrid_communicate_group().get_sharding_parallel_group())
    return {
        "is_paddles": returned is paddle_fleet.fleet,
        "worker": (fleet.worker_index(), fleet.worker_num()),
        "degrees": _degrees(),
        "total": total.numpy(),
    }


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_init_starts_everything(nranks: int) -> None:
    """As a script does it: nothing but ``fleet.init`` has been called before."""
    outcomes = harness.run(_init_alone, nranks, fresh=True, init=False)
    for rank, outcome in enumerate(outcomes):
        assert outcome.returncode == 0, outcome.output
        found = outcome.result
        assert found["is_paddles"]
        assert found["worker"] == (rank, nranks)
        assert found["degrees"] == (1, nranks)
        np.testing.assert_array_equal(found["total"], np.full(2, nranks * (nranks + 1) / 2))
        assert "will not do anything" not in outcome.output


def _refused(rank: int, nranks: int, degrees: dict[str, int], own: dict[str, Any]) -> tuple[str, bool]:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {**degrees, "sharding_configs": {"comm_overlap": True}}
    strategy.hp_sharding_configs = own
    with pytest.raises(ConfigError) as error:
        fleet.init(is_collective=True, strategy=strategy)
    return str(error.value), paddle.distributed.is_initialized()


@pytest.mark.parametrize(
    ("degrees", "own", "message"),
    [
        ({"sharding_degree": 3}, {}, "sharding_degree=3 does not divide 2 ranks"),
        ({"dp_degree": 2, "sharding_degree": 2}, {}, "is 4, but the job has 2 ranks"),
        ({}, {"reduce_overlap": False}, "contradicts"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(
    degrees: dict[str, int], own: dict[str, Any], message: str
) -> None:
    for outcome in harness.run(_refused, 2, degrees, own, fresh=True, init=False, timeout_s=30):
        assert outcome.error is None, outcome.error
        text, initialized = outcome.result
        assert message in text
        assert not initialized


def _wrap(rank: int, nranks: int) -> dict[str, Any]:
    fleet.init(is_collective=True, strategy=_strategy(nranks))
    model = _Net(rank)
    before, keys = _values(model), list(model.state_dict())
    pointers = [p.data_ptr() for p in model.parameters() if p.size]
    assert fleet.distributed_model(model) is model
    assert list(model.state_dict()) == keys
    assert [p.data_ptr() for p in model.parameters() if p.size] == pointers
    with pytest.raises(ConfigError, match="wrapped before"):
        fleet.distributed_model(model)
    return {"before": before, "after": _values(model)}


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_distributed_model_gives_all_ranks_the_state_of_rank_0(nranks: int) -> None:
    results = harness.run(_wrap, nranks)
    expected = results[0]["before"]
    for result in results[1:]:
        same = [name for name in expected if np.array_equal(result["before"][name], expected[name])]
        assert sorted(same) == ["empty", "linear.bias", "norm._variance", "norm.bias", "norm.weight"]
    for result in results:
        assert list(result["after"]) == list(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(result["after"][name], value, err_msg=name, strict=True)


def _two_inits(rank: int, nranks: int) -> list[Any]:
    fleet.init(is_collective=True, strategy=_strategy(nranks, stage=1))
    groups = fleet.get_hybrid_communicate_group()
    generator, discriminator = (fleet.distributed_model(paddle.nn.Linear(2, n)) for n in (2, 1))
    first = fleet.distributed_optimizer(paddle.optimizer.SGD(parameters=discriminator.parameters()))
    fleet.init(is_collective=True, strategy=_strategy(nranks, stage=2, reduce_overlap=True))
    assert fleet.get_hybrid_communicate_group() is groups
    second = fleet.distributed_optimizer(paddle.optimizer.SGD(parameters=generator.parameters()))
    for model, optimizer in ((generator, second), (discriminator, first)):
        before = _values(model)
        model(paddle.full([1, 2], rank + 1.0)).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        changed = [name for name, value in _values(model).items() if not np.array_equal(value, before[name])]
        assert changed == ["weight", "bias"], "each optimizer updates the model whose parameters it was made with"
    return [first.config, second.config]


@pytest.mark.parametrize("nranks", [1, 2])
def test_init_again_takes_the_new_strategy(nranks: int) -> None:
    for result in harness.run(_two_inits, nranks):
        assert result == [ShardingConfig(stage=1), ShardingConfig(stage=2, reduce_overlap=True)]


def _init_after_paddles(rank: int, nranks: int) -> dict[str, Any]:
    paddle_fleet.init(is_collective=True)
    before = _degrees()
    fleet.init(is_collective=True, strategy=_strategy(nranks))
    total = paddle.full([2], rank + 1.0)
    groups = fleet.get_hybrid_communicate_group()
    paddle.distributed.all_reduce(total, group=groups.get_sharding_parallel_group())
    return {
        "before": before,
        "after": _degrees(),
        "total": float(total[0]),
        "rank": groups.get_sharding_parallel_rank(),
    }


def test_groups_that_paddle_made_for_other_degrees_are_replaced() -> None:
    """Paddle itself would keep them, and samplers would then give every rank the same data."""
    for rank, result in enumerate(harness.run(_init_after_paddles, 2)):
        assert result == {"before": (2, 1), "after": (1, 2), "total": 3.0, "rank": rank}


def _no_degrees(rank: int, nranks: int) -> tuple[int, int]:
    fleet.init(is_collective=True)
    return _degrees()


def test_without_degrees_all_ranks_form_one_shard_group() -> None:
    assert harness.run(_no_degrees, 2) == [(1, 2)] * 2
