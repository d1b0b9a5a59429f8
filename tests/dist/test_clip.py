"""Clipping over shards: the norms are those of whole gradients, whoever holds which part of them."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

from hp_sharding import full_parameters
from tests import harness
from tests.lanes import wrap
from tests.models import loss_of, loss_on, make_batch, make_model, make_optimizer
from tests.reference import Ranks, Values, assert_all_equal, values
from tests.sides import BOTH, FEW, SETTINGS, STAGES_1_2, Factory, compare

NORM_ORDER = 2e-6
"""The norm is summed in another order than Paddle's."""


def _norm(name: str, nranks: int) -> float:
    """The true global norm of the first gradient."""
    model = make_model(name)
    Ranks(model, nranks).backward(loss_on(model, name, 0))
    squares = [float((param.grad**2).sum()) for param in model.parameters() if param.grad is not None]
    return float(sum(squares) ** 0.5)


CLIPS: dict[str, Any] = {
    "global norm": lambda norm: nn.ClipGradByGlobalNorm(norm / 2),
    "global norm, far below": lambda norm: nn.ClipGradByGlobalNorm(norm / 1000),
    "global norm, not reached": lambda norm: nn.ClipGradByGlobalNorm(norm * 1000),
    "global norm, auto_skip_clip": lambda norm: nn.ClipGradByGlobalNorm(norm / 2, auto_skip_clip=True),
    "norm": lambda norm: nn.ClipGradByNorm(norm / 20),
    "value": lambda norm: nn.ClipGradByValue(norm / 200),
    "value, both bounds": lambda norm: nn.ClipGradByValue(max=norm / 200, min=-norm / 50),
}


def _clipped(new: Factory, name: str, optimizer: str, clip: str, nranks: int, left_out: str) -> dict[str, Values]:
    """Five steps under a learning rate that changes; parameters with ``left_out`` in their name are not clipped."""
    norm = _norm(name, nranks)

    def build() -> nn.Layer:
        model = make_model(name)
        for key, param in model.named_parameters():
            param.need_clip = not (left_out and left_out in key)
        return model

    schedulers = []

    def optimize(model: nn.Layer) -> Any:
        schedulers.append(paddle.optimizer.lr.StepDecay(0.1, step_size=2, gamma=0.3))
        return make_optimizer(optimizer, model, learning_rate=schedulers[-1], grad_clip=CLIPS[clip](norm))

    side = new(build, optimize)
    for step in range(5):
        scale = 1.0 if step != 3 else 1e-3
        side.backward(lambda rank, step=step, scale=scale: loss_of(side.model, make_batch(name, step, rank)) * scale)
        side.step()
        side.clear_grad()
        schedulers[-1].step()
        assert side.optimizer.get_lr() == schedulers[-1]()
    return {"end": side.values()}


@pytest.mark.parametrize("clip", CLIPS)
def test_clips(clip: str) -> None:
    harness.run(compare, 2, _clipped, SETTINGS, NORM_ORDER, "mlp", "SGD", clip, 2, "")


@pytest.mark.parametrize("clip", ["global norm", "norm", "value"])
def test_need_clip_false(clip: str) -> None:
    harness.run(compare, 2, _clipped, FEW, NORM_ORDER, "gpt", "Momentum", clip, 2, "norm")


@pytest.mark.parametrize("clip", ["global norm", "norm"])
def test_four_ranks(clip: str) -> None:
    harness.run(compare, 4, _clipped, FEW, NORM_ORDER, "mlp", "SGD", clip, 4, "")


def test_with_batch_norm() -> None:
    harness.run(compare, 2, _clipped, FEW, NORM_ORDER, "conv", "SGD", "global norm", 2, "")


def _unused_and_repeated(new: Factory) -> dict[str, Values]:
    """Layers without a gradient add nothing to the norm, and a norm is taken of sums that are whole."""
    side = new(_Half, lambda model: make_optimizer("SGD", model, grad_clip=nn.ClipGradByGlobalNorm(0.01)))
    for step in range(6):
        for micro in range(1 + step % 2):
            side.backward(lambda rank, n=2 * step + micro: side.model(make_batch("mlp", n, rank)[0], (rank + n) % 2))
        side.step()
        side.clear_grad(set_to_zero=bool(step % 3))
    return {"end": side.values()}


class _Half(nn.Layer):
    """Runs one of two layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9)])

    def forward(self, x: paddle.Tensor, choice: int) -> paddle.Tensor:
        return self.layers[choice](paddle.tanh(self.layers[choice](x))).square().mean()


def test_norm_of_what_is_there() -> None:
    harness.run(compare, 2, _unused_and_repeated, STAGES_1_2, NORM_ORDER)


def _every_rank(rank: int, nranks: int) -> list[Values]:
    """All ranks clip by the same factor, or their parameters drift apart."""
    model = make_model("mlp")
    inner = make_optimizer("AdamW", model, grad_clip=nn.ClipGradByGlobalNorm(0.1))
    model, optimizer, _ = wrap(model, inner, nranks, stage=2, **BOTH)
    found = []
    for step in range(5):
        loss_of(model, make_batch("mlp", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
        with full_parameters(model):
            found.append(values(model))
    return found


@pytest.mark.parametrize("nranks", [2, 4])
def test_all_ranks_clip_alike(nranks: int) -> None:
    results = harness.run(_every_rank, nranks)
    for step in range(5):
        assert_all_equal([result[step] for result in results], f"step {step}")
