"""Tensors that are views of a flat one, made, moved and emptied below the guards: the objects that people hold stay.

Autograd, layers and users hold a parameter's object; what changes is the memory that it points at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import paddle
from paddle.base import core
from paddle.base.framework import EagerParamBase

if TYPE_CHECKING:
    from .layout import Slot

dense = paddle.Tensor.get_tensor
"""The tensor below a Python object, past its guards."""


def slot_views(flat: paddle.Tensor, slots: Sequence[Slot], shapes: Sequence[list[int]]) -> list[core.DenseTensor]:
    """Views of the slots of ``flat``, each of its shape. They keep its memory alive.

    They are the dense tensors below the Python objects, at a fifth of the cost of making new objects.
    """
    whole = flat.get_tensor()
    views = []
    for slot, shape in zip(slots, shapes, strict=True):
        view = whole._slice(slot.offset_numel, slot.end_numel)
        view._set_dims(shape)
        views.append(view)
    return views


def point_at(views: Sequence[core.DenseTensor], tensors: Sequence[paddle.Tensor]) -> None:
    """Makes each tensor the same view. The tensor object stays; no guard sees it."""
    for view, tensor in zip(views, tensors, strict=True):
        dense(tensor)._share_data_nocheck_with(view)


def release(tensor: paddle.Tensor) -> None:
    """Lets go of the storage and keeps the shape, seen by no guard."""
    dense(tensor)._clear()


_COPIED_ATTRIBUTES = ("optimize_attr", "regularizer", "need_clip", "is_distributed", "do_model_average", "no_sync")


def slice_of(param: EagerParamBase, view: paddle.Tensor) -> EagerParamBase:
    """A parameter over ``view`` that an optimizer treats as it would treat ``param``."""
    part = EagerParamBase(shape=view.shape, dtype=view.dtype, name=param.name)
    view._share_buffer_to(part)
    part.stop_gradient = param.stop_gradient
    for name in _COPIED_ATTRIBUTES:
        if hasattr(param, name):
            setattr(part, name, getattr(param, name))
    return part
