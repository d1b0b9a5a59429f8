"""Loss scaling: what a scaler of Paddle's is given where it looks for the gradients that it divides.

A ``paddle.amp.GradScaler`` reads ``optimizer._parameter_list``, divides each ``.grad`` in place and skips the step
where one of them is not finite. It is given stand-ins, whose gradients *are* the reduced ones of this rank; and one
more, whose gradient is infinite on every rank if any rank's is not finite, so that all skip the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle.amp import AmpScaler

from .errors import ConfigError
from .numerics import RankSums, count_nonfinite

SCALER_GRADIENTS = ("_parameter_list", "_local_parameter_list")
"""Where scalers look for parameters with gradients."""
_NOTHING: dict[str, Any] = {"_param_groups": [], "_comm_buffers": [], "_sharding_enable": False}
"""What they ask before that, and the answers that lead them there."""
SCALER_READS = (*SCALER_GRADIENTS, *_NOTHING)


def is_scaler(frame: FrameType) -> bool:
    """Whether the code that runs in ``frame`` is a method of a loss scaler, Paddle's own or one made of it."""
    return isinstance(frame.f_locals.get("self"), AmpScaler)


def plain_answer(name: str) -> Any:
    """What a scaler is told that asks for ``name``, one of ``SCALER_READS`` but not of ``SCALER_GRADIENTS``."""
    answer = _NOTHING[name]
    return list(answer) if isinstance(answer, list) else answer


class Given(NamedTuple):
    """What a scaler is given.

    Attributes:
        params: stand-ins for the optimizer's parameters.
        is_infinite: whether a gradient of any rank is not finite: one element, the same on all ranks.
    """

    params: list[paddle.Tensor]
    is_infinite: paddle.Tensor


def stand_ins(tensors: Sequence[paddle.Tensor], sums: RankSums) -> Given:
    """Parameters whose gradients share the memory of ``tensors``, and one that says whether all ranks' are finite.

    Collective. The host does not wait for the device.

    Args:
        tensors: flat, all reduced gradients of this rank.
        sums: adds up over the ranks that hold the others.
    """
    own = paddle.stack([paddle.zeros([], "int64"), *map(count_nonfinite, tensors)]).sum()
    is_infinite = sums.over_all(own.astype("float32").reshape([1]), label="found inf") > 0
    verdict = paddle.where(is_infinite, paddle.full([1], np.inf), paddle.zeros([1]))
    return Given([_stand_in(tensor) for tensor in (*tensors, verdict)], is_infinite)


def _stand_in(gradient: paddle.Tensor) -> paddle.Tensor:
    param = paddle.zeros([1], gradient.dtype)
    param.stop_gradient = False
    param._copy_gradient_from(gradient)
    param.main_grad = gradient  # where Paddle's scalers for main_grad look
    return param


def adopt_scaler(scaler: Any) -> Any:
    """The scaler to use with a sharded optimizer: the same one, which needs nothing more.

    Raises:
        ConfigError: not a ``paddle.amp.GradScaler`` or ``AmpScaler``, so nobody knows where it looks for gradients.
    """
    if not isinstance(getattr(scaler, "_inner_scaler", scaler), AmpScaler):
        raise ConfigError(
            f"distributed_scaler: expected a paddle.amp.GradScaler, got {type(scaler).__name__}. Only scalers made of "
            "it are known to read the optimizer's gradients in a way that works on shards"
        )
    return scaler
