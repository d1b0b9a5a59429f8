"""Buffers and running statistics: the first rank's on all, after every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding.running import ALWAYS_BYTES
from tests import harness
from tests.lanes import wrap
from tests.sides import BOTH

STEPS = 3


class _Net(nn.Layer):
    """Statistics, and buffers that are written in place, replaced, written by one rank alone, or never."""

    count: paddle.Tensor
    seen: paddle.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(6, 6), nn.BatchNorm1D(6), nn.SyncBatchNorm(6), nn.Linear(6, 3)])
        self.register_buffer("sum", paddle.zeros([3]))
        self.register_buffer("mean", paddle.zeros([], "float64"))
        self.register_buffer("last", paddle.zeros([5, 6]), persistable=False)
        self.register_buffer("count", paddle.zeros([1], "int64"))
        self.register_buffer("alone", paddle.zeros([2]))
        self.register_buffer("seen", paddle.zeros([4], "bool"))
        self.register_buffer("quiet", paddle.zeros([2]))
        self.register_buffer("large", paddle.zeros([ALWAYS_BYTES]))
        self.register_buffer("centre", paddle.zeros([3]))
        self.register_buffer("constant", paddle.arange(5))

    def forward(self, x: paddle.Tensor, rank: int) -> paddle.Tensor:
        # What SyncBatchNorm needs of a group it does not have here.
        y = self.layers[3](self.layers[1](self.layers[0](x)))
        with paddle.no_grad():
            self.sum.add_(y.sum(axis=0))
            self.mean = y.mean().astype("float64").reshape([])
            self.last = x
            self.count = self.count + rank + 1
            self.seen = self.seen.logical_or(paddle.to_tensor([rank == 0, rank == 1, True, False]))
            if rank == 1:
                self.alone.fill_(7.0)
            self.quiet.set_value(y[0, :2])  # leaves no sign
            self.large[rank + 1] = 5.0
        return y


def _state(model: _Net) -> dict[str, np.ndarray[Any, Any]]:
    norm = model.layers[1]
    buffers = {name: buffer.numpy().copy() for name, buffer in model.named_buffers() if name != "last"}
    return {**buffers, "norm mean": norm._mean.numpy().copy(), "norm variance": norm._variance.numpy().copy()}


def _run(rank: int, nranks: int, n_replicas: int, settings: dict[str, Any]) -> tuple[list[Any], list[Any], list[str]]:
    paddle.seed(3)
    model = _Net()
    inner = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    model, optimizer, calls = wrap(model, inner, nranks, n_replicas=n_replicas, **settings)
    before, after = [], []
    for step in range(STEPS):
        paddle.seed(100 * step + rank)
        x = paddle.randn([5, 6])
        kept = x.numpy().copy()
        model(x, rank).square().mean().backward()
        before.append(_state(model))
        model.centre.fill_(step + 0.1 * rank)  # between backward and step: it is given out with the next one
        optimizer.step()
        optimizer.clear_grad()
        np.testing.assert_array_equal(x.numpy(), kept, err_msg="what a layer merely keeps was overwritten")
        after.append(_state(model))
    model.eval()
    n_calls = len(calls)
    model.layers[3](model.layers[1](model.layers[0](paddle.randn([5, 6])))).mean().backward()
    optimizer.step()
    return before, after, [call.label for call in calls[n_calls:]]


@pytest.mark.parametrize(("nranks", "n_replicas"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_end_a_step_with_the_first_ones(nranks: int, n_replicas: int, stage: int) -> None:
    everyone = harness.run(_run, nranks, n_replicas, {"stage": stage, **BOTH})
    first, _, _ = everyone[0]
    for rank, (own, after, late_calls) in enumerate(everyone):
        for step in range(STEPS):
            for name, value in first[step].items():
                if name != "centre":
                    place = f"{rank}, {step}, {name}"
                    np.testing.assert_array_equal(after[step][name], value, err_msg=place, strict=True)
            assert abs(after[step]["centre"] - step).max() <= 0.1 * rank + 1e-6, "it drifts"
        if rank:
            assert (own[0]["norm mean"] != first[0]["norm mean"]).any()
            assert own[0]["sum"].tolist() != first[0]["sum"].tolist()
        assert not any("running" in label for label in late_calls), "nothing has been written"


def test_each_rank_may_keep_its_own() -> None:
    everyone = harness.run(_run, 2, 1, {"stage": 2, "broadcast_buffers": False})
    for own, after, _ in everyone:
        for step in range(STEPS):
            for name, value in own[step].items():
                if name == "centre":
                    continue
                np.testing.assert_array_equal(after[step][name], value, err_msg=name)
    assert everyone[1][1][-1]["alone"].tolist() == [7, 7]
    assert everyone[0][1][-1]["alone"].tolist() == [0, 0]
