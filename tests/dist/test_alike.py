"""Ranks that wrap different things are told what differs, before a tensor travels."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from hp_sharding import ConfigError, ShardingConfig, fleet, shard
from tests import harness
from tests.reference import Values, values


def _model(width: int = 6) -> nn.Layer:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))


def _wrap(model: nn.Layer, rate: float = 0.1, **settings: Any) -> Any:
    config = ShardingConfig(timeout_s=20, **settings)
    return shard(model, paddle.optimizer.SGD(rate, parameters=model.parameters()), config)


def _frozen() -> nn.Layer:
    model = _model()
    model[1].bias.stop_gradient = True
    return model


ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "model": (lambda: _wrap(_model(8)), "'0.weight' of shape [4, 8], float32"),
    "frozen": (lambda: _wrap(_frozen()), "'1.bias' of shape [2], float32, frozen (stop_gradient)"),
    "settings": (lambda: _wrap(_model(), stage=3), "stage is "),
    "rate": (lambda: _wrap(_model(), 0.2), "learning_rate of the optimizer is "),
}


def _differ(rank: int, nranks: int) -> dict[str, Any]:
    """What each of ``ODD`` on the last rank comes to; afterwards all is as if nobody had tried."""
    found: dict[str, Any] = {}
    _wrap(_model()).clear_grad()
    gc.collect()
    n_threads = threading.active_count()
    for name, (wrap, _) in ODD.items():
        paddle.seed(rank)
        model = _model()
        before = values(model)
        try:
            wrap() if rank == nranks - 1 else _wrap(model)
        except ConfigError as error:
            found[name] = str(error)
        assert all((before[key] == now).all() for key, now in values(model).items()), "a tensor has been sent"
    gc.collect()
    found["threads left"] = threading.active_count() - n_threads
    model = _model()
    optimizer = _wrap(model)
    model(paddle.ones([2, 4])).sum().backward()
    optimizer.step()
    found["end"] = values(model)
    return found


@pytest.mark.parametrize("nranks", [2, 3])
def test_every_rank_is_told_what_differs(nranks: int) -> None:
    everyone = harness.run(_differ, nranks, fresh=True, timeout_s=60)
    ends: list[Values] = []
    for rank, outcome in enumerate(everyone):
        assert outcome.error is None, outcome.error
        assert outcome.returncode == 0, outcome.output
        for name, (_, text) in ODD.items():
            said = outcome.result[name]
            assert said.startswith(f"rank {rank}: the ranks do not wrap the same: "), said
            assert text in said
            assert f"on rank {nranks - 1}" in said
        assert outcome.result["threads left"] <= 0, "lanes of models that could not be wrapped are still there"
        ends.append(outcome.result["end"])
    assert all((end[key] == value).all() for end in ends for key, value in ends[0].items())


def _differ_with_fleet(rank: int, nranks: int, when: str) -> str:
    strategy = fleet.DistributedStrategy()
    strategy.hp_sharding_configs = {"stage": 2 + rank if when == "strategy" else 2, "timeout_s": 20}
    fleet.init(is_collective=True, strategy=strategy)
    model = _model(6 + rank if when == "model" else 6)
    decay = 0.1 * rank if when == "optimizer" else 0.1
    inner = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), weight_decay=decay)
    if when == "optimizer":
        fleet.distributed_model(model)
    with pytest.raises(ConfigError) as caught:
        fleet.distributed_optimizer(inner) if when == "optimizer" else fleet.distributed_model(model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("when", "text"),
    [
        ("strategy", "stage is "),
        ("model", "parameter 0 is '0.weight' of shape [4, "),
        ("optimizer", "weight_decay of the optimizer is "),
    ],
)
def test_with_fleet_the_model_is_compared_first_and_then_the_optimizer(when: str, text: str) -> None:
    for rank, said in enumerate(harness.run(_differ_with_fleet, 2, when, timeout_s=60)):
        assert said.startswith(f"rank {rank}: the ranks do not wrap the same: {text}"), said
