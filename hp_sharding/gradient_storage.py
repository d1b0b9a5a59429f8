"""The full gradient of one bucket, while there is one: where autograd's gradients are put until they are reduced."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import paddle
from paddle.base.framework import EagerParamBase

from .comm import add_into, cast_into
from .config import SHORT_DTYPES
from .layout import ITEM_BYTES
from .views import point_at, slot_views

if TYPE_CHECKING:
    from .layout import BucketLayout
    from .pool import StoragePool


class GradientStorage:
    """The full gradient of one bucket: a flat tensor that exists from its first gradient until it has been reduced.

    It is of ``layout.dtypes.gradient``, which may be wider than what autograd gives.

    The padding holds zero whenever the storage is allocated, so that sums over the whole flat tensor are sums over the
    gradients.

    Attributes:
        full: the flat gradient, or None.
        filled: for each parameter, whether it holds a gradient.
    """

    def __init__(self, layout: BucketLayout, params: Sequence[EagerParamBase], pool: StoragePool) -> None:
        self.full: paddle.Tensor | None = None
        self.filled = [False] * len(params)
        self._layout = layout
        self._pool = pool
        self._name = layout.dtypes.gradient
        self._dtype = getattr(paddle, self._name)
        self._is_wide = self._name not in SHORT_DTYPES
        self._gaps = layout.gaps()
        self._shapes = [list(param.shape) for param in params]
        itemsize = ITEM_BYTES[self._name]
        self._starts_bytes = [slot.offset_numel * itemsize for slot in layout.slots]
        self._sizes_bytes = [slot.numel * itemsize for slot in layout.slots]
        self._address = 0
        self._views: dict[int, paddle.Tensor] = {}

    def alloc(self) -> None:
        """Takes storage; its parameters' content is undefined until ``put``, its padding zero."""
        assert self.full is None
        self.full = self._pool.alloc(self._layout.numel, self._name)
        self._address = self.full.data_ptr()
        if self._gaps:
            self._pool.zero(self.full, self._gaps)

    def put(self, index: int, gradient: paddle.Tensor) -> None:
        """Copies parameter ``index``'s gradient in, or adds it to what is there. ``gradient`` is only read."""
        plain = self._is_wide and gradient.dtype is self._dtype
        adds = self.filled[index]
        self.filled[index] = True
        if plain and not adds and self._pool.on_host and gradient.is_contiguous():
            # A view of the place and Paddle's copy into it cost ten times as much, however little there is to copy.
            ctypes.memmove(self._address + self._starts_bytes[index], gradient.data_ptr(), self._sizes_bytes[index])
            return
        # Where gradients are differentiated in their turn, autograd must not record this.
        gradient = gradient.detach()
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
        place = self._place(index)
        if adds:
            place.add_(gradient) if plain else add_into(place, gradient)
        else:
            place.copy_(gradient, False) if plain else cast_into(place, gradient)

    def view(self, index: int) -> paddle.Tensor:
        """A new tensor object over parameter ``index``'s gradient, of its shape."""
        assert self.full is not None
        view = paddle.empty([0], self._name)
        point_at(slot_views(self.full, [self._layout.slots[index]], [self._shapes[index]]), [view])
        return view

    def holds(self, index: int, tensor: paddle.Tensor) -> bool:
        """Whether ``tensor`` already is parameter ``index``'s place in this storage."""
        return self.full is not None and tensor.data_ptr() == self._address + self._starts_bytes[index]

    def fill_missing(self) -> None:
        """Zeros for every parameter that has no gradient."""
        if all(self.filled):
            return
        assert self.full is not None
        slots = [slot for slot, filled in zip(self._layout.slots, self.filled, strict=True) if not filled]
        self._pool.zero(self.full, [(slot.offset_numel, slot.end_numel) for slot in slots])

    def reset(self) -> None:
        """Forgets all gradients and keeps the storage."""
        self.filled = [False] * len(self.filled)

    def free(self) -> None:
        """Lets go of the storage and of all gradients; a collective that reads it keeps it alive until it is done."""
        self.full = None
        self._views.clear()
        self.reset()

    def _place(self, index: int) -> paddle.Tensor:
        if index not in self._views:
            self._views[index] = self.view(index)
        return self._views[index]
