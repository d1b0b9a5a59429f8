"""16-bit gradients that come in late: a layer that runs in the last micro-batch only, beside sums in float32."""

from __future__ import annotations

import contextlib
from typing import Any

import paddle
import pytest

from tests import harness
from tests.dist import test_precision
from tests.reference import Values
from tests.sides import BOTH, Factory, Settings, compare

ORDER = 2e-6
"""Micro-batches and ranks are added in another order than by the reference."""


class _Net(test_precision._Net):
    """The last layer runs where it is asked for."""

    def forward(self, x: paddle.Tensor, late: bool) -> paddle.Tensor:  # type: ignore[override]
        for layer in self.layers[: 3 if late else 2]:
            x = layer(x)
        return x


def _loss(model: _Net, number: int, rank: int, late: bool) -> paddle.Tensor:
    paddle.seed(1000 * number + rank)
    x = test_precision._Coarse.apply(paddle.randn([4, test_precision.WIDTHS[0]]))
    return model(x, late).square().sum() * (1 + rank) / 4


def _train(new: Factory, waits: bool) -> dict[str, Values]:
    side: Any = new(lambda: _Net("bfloat16"), lambda model: test_precision._optimizer("SGD", model))
    if not side.sharded:
        side.model.be_the_reference(("bfloat16", "bfloat16"))
    found = {}
    for step in range(3):
        for micro in range(3):
            with side.no_sync() if waits and micro < 2 else contextlib.nullcontext():
                side.backward(
                    lambda rank, n=3 * step + micro, late=micro == 2: _loss(side.model, n, rank, late) * 8.0 ** -(n % 3)
                )
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
    harness.run(compare, 4, _train, _in(n_replicas=2), ORDER, waits)
