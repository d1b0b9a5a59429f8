"""One update for all parameters that lie in a bucket's shard, where that is bitwise the same as one for each.

An update costs Paddle's optimizers 5 to 10 us whatever there is to do. What lies between the parameters is padding: its
gradients are zero, and so it stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import paddle
from paddle.base.framework import EagerParamBase

from .config import SHORT_DTYPES
from .layout import ITEM_BYTES
from .precision import dtype_name
from .views import slice_of

if TYPE_CHECKING:
    from .buffer import FusedCommBuffer

FUSABLE = (paddle.optimizer.SGD,)
"""Exactly these, and no subclass: SGD keeps nothing of a parameter. The others have moments, and powers of beta, by
parameter, which is how they are saved, loaded and skipped."""

WHOLE_VECTORS_BYTES = 64
"""Of as many bytes, or a part of them, a processor computes all elements together. For a tensor that does not consist
of such, Paddle takes other instructions, with one rounding less or more, and elsewhere for what is left at its end. So
all slices must consist of them: then what they are together does, too."""

_SETTINGS = ("optimize_attr", "regularizer", "need_clip")


class Part(NamedTuple):
    """A slice that the inner optimizer updates.

    Attributes:
        slot: of the parameter that it is part of, in its bucket; of the first one, where it spans several.
        group: of the optimizer.
        param: the parameter that it is part of.
        slice: what is updated.
        gradient: as many elements.
    """

    slot: int
    group: int
    param: EagerParamBase
    slice: EagerParamBase
    gradient: paddle.Tensor


def fused(inner: Any, buffer: FusedCommBuffer, parts: Sequence[Part], reduced: paddle.Tensor) -> Part | None:
    """All parts of a bucket's shard as one; None where they must be updated one by one, or there is but one.

    Args:
        inner: the user's optimizer.
        buffer: the bucket.
        parts: what ``inner`` updates of it.
        reduced: the gradient of the shard.
    """
    if type(inner) not in FUSABLE or len(parts) < 2 or len(parts) < len(buffer.slices):
        return None
    dtype = dtype_name(buffer.shard)
    if len({part.group for part in parts}) > 1 or dtype in SHORT_DTYPES:
        return None
    if any(piece.numel * ITEM_BYTES[dtype] % WHOLE_VECTORS_BYTES for piece in buffer.slices):
        return None
    start, last = buffer.slices[0].start_numel, buffer.slices[-1]
    end = last.start_numel + last.numel
    whole = slice_of(parts[0].param, buffer.shard._slice(start, end))
    return parts[0]._replace(slice=whole, gradient=reduced._slice(start, end))


def are_alike(parts: Sequence[Part], used: Sequence[bool]) -> bool:
    """Whether all of them are to be updated now, and alike: as the users may say anew before each step."""
    first = parts[0].param.__dict__
    for part in parts:
        if not used[part.slot] or part.param.stop_gradient:
            return False
        own = part.param.__dict__
        for name in _SETTINGS:
            value, other = own.get(name), first.get(name)
            if value is not other and (name == "regularizer" or value != other):
                return False
    return True
