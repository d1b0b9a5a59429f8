"""Compute that takes a given time without a processor: as an accelerator's would, seen from the host.

Several ranks on one core then do not slow each other down, nor does the copying of the stand-in's collectives.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import paddle
from paddle.autograd import PyLayer

BACKWARD_SHARE = 2 / 3
"""Of the modelled compute: a backward multiplies two pairs of matrices where the forward multiplies one."""


class Pauses(NamedTuple):
    """What one layer waits in its forward and in its backward, in seconds."""

    forward_s: float
    backward_s: float


def pause_in_matmuls(model: paddle.nn.Layer, total_ms: float) -> None:
    """Makes all ``Linear`` of ``model`` together take ``total_ms`` more in one forward and backward.

    Each takes its part by the size of its weight. It waits where the matrices would be multiplied, so in the backward
    after the gradient of its bias and before that of its weight.
    """
    linears = [layer for layer in model.sublayers() if isinstance(layer, paddle.nn.Linear)]
    numel = sum(layer.weight.size for layer in linears)
    for layer in linears:
        layer.__class__ = _PausingLinear
        layer.pauses = _pauses(total_ms * layer.weight.size / numel)


def _pauses(layer_ms: float) -> Pauses:
    return Pauses(layer_ms * (1 - BACKWARD_SHARE) / 1e3, layer_ms * BACKWARD_SHARE / 1e3)


class _PausingLinear(paddle.nn.Linear):
    """A ``Linear`` with a bias, and with ``pauses``."""

    pauses: Pauses

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return _Pause.apply(paddle.matmul(x, self.weight), self.pauses) + self.bias


class _Pause(PyLayer):
    """Hands on its input, and its gradient, some time later."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, pauses: Pauses) -> paddle.Tensor:
        ctx.pauses = pauses
        time.sleep(pauses.forward_s)
        return paddle.assign(x)

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        time.sleep(ctx.pauses.backward_s)
        return paddle.assign(grad)
