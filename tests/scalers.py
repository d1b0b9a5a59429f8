"""Loss scalers that are switched on: Paddle's own switch themselves off on CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import paddle
import paddle.amp.grad_scaler


def make_scaler(**options: Any) -> paddle.amp.GradScaler:
    """A ``GradScaler(**options)`` as it is on a device; its numbers lie where the process computes."""
    place = SimpleNamespace(is_gpu_place=lambda: True)
    with mock.patch.object(
        paddle.amp.grad_scaler, "_dygraph_tracer", return_value=SimpleNamespace(_expected_place=place)
    ):
        scaler = paddle.amp.GradScaler(**options)
    assert scaler.is_enable()
    # Paddle prints it when it decreases, which numpy 2.4 refuses for a vector of one element.
    scaler._scale = scaler._scale.reshape([])
    return scaler


def scale(scaler: paddle.amp.GradScaler, loss: paddle.Tensor) -> paddle.Tensor:
    """``scaler.scale(loss)`` under float16 autocast, without which a scaler of changing scale switches itself off."""
    with paddle.amp.auto_cast(dtype="float16"):
        return scaler.scale(loss)
