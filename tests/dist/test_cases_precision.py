"""Mixed precision where dtypes meet: in one unit, and where a 16-bit gradient comes late to sums in float32."""

from __future__ import annotations

import contextlib
from typing import Any

import paddle
import pytest
from paddle import nn

from tests import harness
from tests.dist import test_precision
from tests.reference import Values
from tests.sides import BOTH, Factory, Settings, compare

ORDER = 2e-6
"""Micro-batches are added in another order than by the reference."""
FLIPPED = 0.01
"""So are four ranks, and where that flips the last of a parameter's 16 bits, all that follows differs a little."""


class _Net(test_precision._Net):
    """The last layer runs where it is asked for."""

    def forward(self, x: paddle.Tensor, late: bool) -> paddle.Tensor:  # type: ignore[override]
        for layer in self.layers[: 3 if late else 2]:
            x = layer(x)
        return x


def _loss(model: _Net, number: int, rank: int) -> paddle.Tensor:
    """Of the last of three micro-batches eight times that of the one before."""
    paddle.seed(1000 * number + rank)
    x = test_precision._Coarse.apply(paddle.randn([4, test_precision.WIDTHS[0]]))
    return model(x, late=number % 3 == 2).square().sum() * (1 + rank) / 4 * 8.0 ** (number % 3 - 2)


def _train(new: Factory, waits: bool) -> dict[str, Values]:
    side: Any = new(lambda: _Net("bfloat16"), lambda model: test_precision._optimizer("SGD", model))
    if not side.sharded:
        side.model.be_the_reference(("bfloat16", "bfloat16"))
    found = {}
    for step in range(3):
        for micro in range(3):
            with side.no_sync() if waits and micro < 2 else contextlib.nullcontext():
                side.backward(lambda rank, n=3 * step + micro: _loss(side.model, n, rank))
        side.step()
        side.clear_grad(set_to_zero=False)
        found[f"step {step}"] = test_precision._masters(side)
    return found


def _in(**settings: Any) -> Settings:
    short = {"param_dtype": "bfloat16", **BOTH, **settings}
    found: Settings = {f"stage {stage}": {"stage": stage, **short, "main_grad": True} for stage in (1, 2, 3)}
    found["sums in float32"] = {"stage": 2, **short, "reduce_dtype": "float32"}
    found["no overlap"] = {"stage": 1, "param_dtype": "bfloat16", "main_grad": True, **settings}
    return found


@pytest.mark.parametrize("waits", [True, False])
def test_a_layer_first_used_in_the_last_micro_batch(waits: bool) -> None:
    harness.run(compare, 2, _train, _in(), ORDER, waits)
    harness.run(compare, 4, _train, _in(n_replicas=2), FLIPPED, waits)


class _Block(nn.Layer):
    """16-bit matrices around a norm and a gain in float32, which are gathered and freed together."""

    def __init__(self) -> None:
        super().__init__()
        self.before = test_precision._Linear(16, 24, "bfloat16")
        self.norm = nn.LayerNorm(24)
        self.after = test_precision._Linear(24, 16, "bfloat16")
        self.gain = self.create_parameter([16], default_initializer=nn.initializer.Constant(0.5))
        for layer in (self.before, self.after):
            layer.to(dtype="bfloat16")

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.after(self.norm(self.before(x))) * self.gain


class _Blocks(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.LayerList([_Block() for _ in range(3)])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def be_the_reference(self) -> None:
        for block in self.blocks:
            for layer in (block.before, block.after):
                layer.to(dtype="float32")
                layer.rounds = ("bfloat16", "bfloat16")


def _train_blocks(new: Factory) -> dict[str, Values]:
    side: Any = new(_Blocks, lambda model: test_precision._optimizer("Momentum", model))
    if not side.sharded:
        side.model.be_the_reference()
    for step in range(4):

        def loss(rank: int, step: int = step) -> paddle.Tensor:
            paddle.seed(1000 * step + rank)
            return side.model(test_precision._Coarse.apply(paddle.randn([4, 16]))).square().sum() * (1 + rank) / 64

        side.backward(loss)
        if side.sharded:
            for param in side.model.parameters():
                assert param.grad is None or param.grad.dtype == param.dtype
                assert side.optimizer.full_grad(param).shape == param.shape
        side.step()
        side.clear_grad()
    return {"masters": test_precision._masters(side)}


def test_dtypes_in_one_unit() -> None:
    settings: Settings = {f"stage {stage}": {"stage": stage, "units": [_Block], **BOTH} for stage in (1, 2, 3)}
    harness.run(compare, 2, _train_blocks, settings)
    replicas = {name: {**chosen, "n_replicas": 2} for name, chosen in settings.items()}
    harness.run(compare, 4, _train_blocks, replicas, FLIPPED)
