"""Layers that work on views of their parameters. Autograd keeps the views, while the blocks behind them come and go."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.nn.utils import spectral_norm, weight_norm

from tests import harness
from tests.models import SEED, make_optimizer
from tests.reference import Values
from tests.sides import SETTINGS, Factory, compare

SIZE = 16


class _Transposed(nn.Linear):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(x, self.weight.T) + self.bias


class _Sliced(nn.Linear):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        upper, lower = paddle.matmul(x[:, :4], self.weight[:4]), paddle.matmul(x[:, 4:], self.weight[4:])
        return upper * lower + self.bias[2:3]


class _Einsum(nn.Linear):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.einsum("bi,ij->bj", x, self.weight) + paddle.einsum("j->j", self.bias)


class _Unsqueezed(nn.Linear):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return (x.unsqueeze(-1) * self.weight.unsqueeze(0)).sum(1) + self.bias.reshape([1, -1])


class _Chunked(nn.Linear):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        first, second = paddle.split(self.weight, 2, axis=1)
        rows = paddle.concat([first, second], axis=1).transpose([1, 0]).contiguous()
        return F.linear(x, rows.T.expand([SIZE, SIZE]), self.bias.flatten())


class _Detached(nn.Linear):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.linear(x, self.weight * self.weight.detach().abs().sqrt(), self.bias)


class _Strided(nn.Linear):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(x[:, ::2], self.weight[::2, :]) * self.weight[1, :] + self.bias


KINDS: dict[str, Any] = {
    "w.T": lambda: _Transposed(SIZE, SIZE),
    "w[:4]": lambda: _Sliced(SIZE, SIZE),
    "w[::2]": lambda: _Strided(SIZE, SIZE),
    "einsum": lambda: _Einsum(SIZE, SIZE),
    "unsqueeze": lambda: _Unsqueezed(SIZE, SIZE),
    "split": lambda: _Chunked(SIZE, SIZE),
    "detach": lambda: _Detached(SIZE, SIZE),
    "weight_norm": lambda: weight_norm(nn.Linear(SIZE, SIZE)),
    "weight_norm, dim 1": lambda: weight_norm(nn.Linear(SIZE, SIZE), dim=1),
    "spectral_norm": lambda: spectral_norm(nn.Linear(SIZE, SIZE)),
}


class _Stack(nn.Layer):
    """Layers of one kind, of one size, so that they share the blocks of the pool."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.LayerList([KINDS[kind]() for _ in range(4)])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for layer in self.layers:
            x = paddle.tanh(layer(x)) + 0.1 * x
        return x


def _noise(step: int, rank: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng([SEED, step, rank]).standard_normal([3, SIZE], dtype=np.float32))


def _train(new: Factory, kind: str) -> dict[str, Values]:
    side = new(lambda: _Stack(kind), lambda model: make_optimizer("Momentum", model))
    for step in range(5):
        side.backward(lambda rank, step=step: side.model(_noise(step, rank)).square().mean())
        side.step()
        side.clear_grad()
    return {"end": side.values()}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_use_views(kind: str) -> None:
    harness.run(compare, 2, _train, SETTINGS, 0.0, kind)


def _alone(new: Factory, kind: str) -> dict[str, Values]:
    """The layer is the whole model: what stands in its own hooks runs before the model's forward."""
    side = new(KINDS[kind], lambda model: make_optimizer("Momentum", model))
    for step in range(4):
        side.backward(lambda rank, step=step: side.model(_noise(step, rank)).square().mean())
        side.step()
        side.clear_grad()
    return {"end": side.values()}


@pytest.mark.parametrize("kind", ["w.T", "weight_norm", "spectral_norm"])
def test_a_model_of_one_layer(kind: str) -> None:
    harness.run(compare, 2, _alone, SETTINGS, 0.0, kind)


def _second_order(new: Factory) -> dict[str, Values]:
    """A gradient penalty: gradients of gradients, with views of parameters in between."""
    side = new(lambda: _Stack("w.T"), lambda model: make_optimizer("SGD", model))

    def loss(rank: int, step: int) -> paddle.Tensor:
        x = _noise(step, rank)
        x.stop_gradient = False
        output = side.model(x).square().mean()
        (slope,) = paddle.grad(output, x, create_graph=True)
        return output + slope.square().sum()

    for step in range(4):
        side.backward(lambda rank, step=step: loss(rank, step))
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def test_gradient_penalty() -> None:
    harness.run(compare, 2, _second_order, SETTINGS, 1e-6)


def _several_graphs(new: Factory, pattern: str) -> dict[str, Values]:
    """Graphs that live at the same time, or longer than a step."""
    side = new(lambda: _Stack("w.T"), lambda model: make_optimizer("SGD", model))
    kept = []
    for step in range(4):
        if pattern == "two forwards, two backwards":
            losses = {
                rank: [side.model(_noise(2 * step + i, rank)).square().mean() for i in (0, 1)] for rank in side.ranks
            }
            side.backward(lambda rank, losses=losses: losses[rank][0])
            side.backward(lambda rank, losses=losses: losses[rank][1])
        elif pattern == "retain_graph":
            losses = {rank: [side.model(_noise(step, rank)).square().mean()] for rank in side.ranks}
            side.backward(lambda rank, losses=losses: _retained(losses[rank][0]))
        elif pattern == "one loss of two forwards":
            side.backward(
                lambda rank, step=step: (
                    side.model(_noise(2 * step, rank)).square().mean()
                    + side.model(side.model(_noise(2 * step + 1, rank))).mean()
                )
            )
        else:
            kept.append([side.model(_noise(step, rank)) for rank in side.ranks])
            side.backward(lambda rank, step=step: side.model(_noise(step, rank)).square().mean())
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def _retained(loss: paddle.Tensor) -> paddle.Tensor:
    """Has had one backward already, whose graph is kept for another."""
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize(
    "pattern", ["two forwards, two backwards", "retain_graph", "one loss of two forwards", "a graph that lives on"]
)
def test_several_graphs(pattern: str) -> None:
    harness.run(compare, 2, _several_graphs, SETTINGS, 1e-6, pattern)
