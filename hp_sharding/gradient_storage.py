"""The full gradient of one bucket, while there is one: where autograd's gradients are put until they are reduced."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import paddle
from paddle.base.framework import EagerParamBase

from .comm import add_into, cast_into
from .config import SHORT_DTYPES
from .errors import StateError
from .layout import ITEM_BYTES
from .views import point_at, slot_views

if TYPE_CHECKING:
    from .layout import BucketLayout
    from .pool import StoragePool


class Used(NamedTuple):
    """A flat tensor of ``numel`` elements of ``dtype`` that held a gradient, and that nobody reads any more."""

    tensor: paddle.Tensor
    numel: int
    dtype: str


class GradientStorage:
    """The full gradient of one bucket: a flat tensor that exists from its first gradient until it has been reduced.

    It is of ``layout.dtypes.gradient``, which may be wider than what autograd gives.

    The padding holds zero whenever the storage is allocated, so that sums over the whole flat tensor are sums over the
    gradients.

    Attributes:
        full: the flat gradient, or None.
        filled: for each parameter, whether it holds a gradient.
        nbytes: bytes of ``full``, whether it exists or not.
        wire_dtype: what it is rounded to on its way; None for nothing else than it is of.
    """

    def __init__(self, layout: BucketLayout, params: Sequence[EagerParamBase], pool: StoragePool) -> None:
        self.full: paddle.Tensor | None = None
        self.filled = [False] * len(params)
        dtypes = layout.dtypes
        self.wire_dtype = None if dtypes.reduce == dtypes.gradient else dtypes.reduce
        self.nbytes = layout.gradient_nbytes
        self._numel = layout.numel
        self._slots = layout.slots
        self._shapes = [list(param.shape) for param in params]
        self._names = [param.name for param in params]
        self._bucket = layout.name
        self._pool = pool
        self._name = dtypes.gradient
        self._dtype = getattr(paddle, self._name)
        self._is_wide = self._name not in SHORT_DTYPES
        itemsize = ITEM_BYTES[self._name]
        # By address and in bytes: each of Paddle's views costs as much as all the rest for a bucket.
        self._places = [(slot.offset_numel * itemsize, slot.numel * itemsize) for slot in layout.slots]
        self._gaps = layout.gaps()
        self._address = 0
        self._views: dict[int, paddle.Tensor] = {}

    def alloc(self, used: Used | None = None) -> None:
        """Takes storage; its parameters' content is undefined until ``put``, its padding zero.

        Args:
            used: one that fits, to be taken.
        """
        assert self.full is None
        if used is not None:
            self.full = used.tensor
            self._pool.spoil(self.full)
        else:
            self.full = self._pool.alloc(self._numel, self._name)
        self._address = self.full.data_ptr()
        if self._gaps:
            self._pool.zero(self.full, self._gaps)

    def fits(self, used: Used) -> bool:
        """Whether it can hold this gradient."""
        return used.numel == self._numel and used.dtype == self._name

    def put(self, index: int, gradient: paddle.Tensor) -> None:
        """Copies parameter ``index``'s gradient in, or adds it to what is there. ``gradient`` is only read.

        Raises:
            StateError: it has another number of elements, as a hook of the user may have made it.
        """
        if gradient.shape != self._shapes[index]:
            gradient = self._in_shape(index, gradient)
        plain = self._is_wide and gradient.dtype is self._dtype
        adds = self.filled[index]
        self.filled[index] = True
        if plain and not adds and self._pool.on_host and gradient.is_contiguous():
            start_bytes, nbytes = self._places[index]
            ctypes.memmove(self._address + start_bytes, gradient.data_ptr(), nbytes)
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
        point_at(slot_views(self.full, [self._slots[index]], [self._shapes[index]]), [view])
        return view

    def holds(self, index: int, tensor: paddle.Tensor) -> bool:
        """Whether ``tensor`` already is parameter ``index``'s place in this storage."""
        return self.full is not None and tensor.data_ptr() == self._address + self._places[index][0]

    def fill_missing(self) -> None:
        """Zeros for every parameter that has no gradient."""
        if all(self.filled):
            return
        assert self.full is not None
        slots = [slot for slot, filled in zip(self._slots, self.filled, strict=True) if not filled]
        self._pool.zero(self.full, [(slot.offset_numel, slot.end_numel) for slot in slots])

    def reset(self) -> None:
        """Forgets all gradients and keeps the storage."""
        self.filled = [False] * len(self.filled)

    def free(self) -> None:
        """Lets go of the storage and of all gradients; a collective that reads it keeps it alive until it is done."""
        self.full = None
        self._views.clear()
        self.reset()

    def hand_over(self) -> Used | None:
        """As ``free``, while a collective reads the storage. Returns what is there for others once that is done.

        None on a device, which has an allocator that is asked for memory at little cost.
        """
        assert self.full is not None
        used = Used(self.full, self._numel, self._name) if self._pool.on_host else None
        self.free()
        return used

    def _in_shape(self, index: int, gradient: paddle.Tensor) -> paddle.Tensor:
        if gradient.size != self._slots[index].numel:
            raise StateError(
                f"parameter '{self._names[index]}' of bucket '{self._bucket}': its gradient has the shape "
                f"{list(gradient.shape)}, expected {self._shapes[index]}. A hook that was registered on the parameter "
                "returned something else than a gradient of the parameter; let it return one of the same shape, or None"
            )
        return gradient.detach().reshape(self._shapes[index])

    def _place(self, index: int) -> paddle.Tensor:
        if index not in self._views:
            self._views[index] = self.view(index)
        return self._views[index]
