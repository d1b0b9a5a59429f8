"""Tensors as plain memory: numpy arrays that share it and keep it alive."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle
from paddle.base import core

Bytes = npt.NDArray[np.uint8]
"""A one-dimensional array of uint8 that shares the memory of a tensor."""


class Span(NamedTuple):
    """A range of elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many elements it covers."""
        return self.stop - self.start


class ElementType(NamedTuple):
    """How numpy sees the elements of a Paddle dtype.

    Attributes:
        name: Paddle's name, such as ``"bfloat16"``.
        storage: numpy dtype of the bits; uint16 for bfloat16, which numpy does not know.
        partial: numpy dtype in which sums are formed, None where a sum has no meaning.
    """

    name: str
    storage: np.dtype[Any]
    partial: np.dtype[Any] | None

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return self.storage.itemsize

    def array(self, data: Bytes) -> npt.NDArray[Any]:
        """Memory of a tensor seen as its elements."""
        return data.view(self.storage)


def _element_types() -> dict[Any, ElementType]:
    table: dict[Any, ElementType] = {}
    for name in ("float32", "float64", "int8", "int16", "int32", "int64", "uint8"):
        table[getattr(paddle, name)] = ElementType(name, np.dtype(name), np.dtype(name))
    table[paddle.float16] = ElementType("float16", np.dtype(np.float16), np.dtype(np.float32))
    table[paddle.bfloat16] = ElementType("bfloat16", np.dtype(np.uint16), np.dtype(np.float32))
    table[paddle.bool] = ElementType("bool", np.dtype(np.uint8), None)
    table[paddle.complex64] = ElementType("complex64", np.dtype(np.complex64), np.dtype(np.complex64))
    table[paddle.complex128] = ElementType("complex128", np.dtype(np.complex128), np.dtype(np.complex128))
    return table


ELEMENT_TYPES = _element_types()


class _Shared:
    """Speaks numpy's array interface for memory that ``owner`` holds."""

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def bytes_of(tensor: paddle.Tensor, nbytes: int) -> Bytes:
    """The memory of a contiguous CPU tensor. Arrays and slices made of it keep that memory alive.

    They keep the memory as it is now: should the tensor be given another buffer, they stay with the old one.
    """
    if nbytes == 0:
        return np.empty(0, np.uint8)
    # This holds the allocation, whatever happens to the caller's tensor object, and costs a fifth of `_slice`.
    holder = core.DenseTensor()
    holder._share_data_with(tensor.get_tensor())
    return np.asarray(_Shared(holder, tensor.data_ptr(), nbytes))
