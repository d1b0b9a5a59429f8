"""Blocks of memory that come and go every step: reused, so that a step allocates nothing in steady state.

A fresh block of 12.8 MB costs 6.4 ms in page faults, a reused one 0.4 ms. A block returns to the pool only when the
last tensor that aliases it is gone, including the views that autograd saves (``w.T``, ``w[:4]``): handing it out
earlier would change, silently, what a later backward reads. On CPU that moment is known: the tensor is made over a
NumPy view, which dies with the last alias. On devices Paddle's caching allocator does this job.

The last alias may die in any thread, a collective's among them. So the tensor is not made with ``paddle.from_dlpack``:
that keeps one process-wide lock while a dying tensor runs Python code, and takes the same lock while it holds the
interpreter; two threads that do both wait for each other for ever.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle.base import core

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # Paddle takes NumPy's uint16 for bfloat16
    "float64": np.dtype(np.float64),
}

DTYPES = tuple(_NUMPY_DTYPES)
"""Names of the dtypes that ``StoragePool`` gives out: all that can train."""


class StoragePool:
    """Flat tensors whose memory is reused once nothing aliases it.

    A request gets the smallest free block that it fits into. Where none is large enough, the largest free one is given
    up for a new one: so there are never more blocks than tensors were alive at a time, whatever their sizes.

    Args:
        poison: called with each block as NumPy bytes when it comes back; tests fill it with 0xFF, which is NaN in every
            floating-point type, so that a read of freed storage shows.

    Attributes:
        allocated_bytes: of all blocks, in use or not.
    """

    def __init__(self, poison: Callable[[np.ndarray[Any, Any]], None] | None = None) -> None:
        self._free: list[paddle.Tensor] = []
        # Blocks come back on whichever thread drops the last alias, perhaps while this one is in ``_take``: so no lock.
        self._returned: deque[paddle.Tensor] = deque()
        self._poison = poison
        self.allocated_bytes = 0

    def alloc(self, numel: int, dtype: str) -> paddle.Tensor:
        """A flat tensor of ``numel`` elements with undefined content; its memory comes back by itself."""
        nbytes = numel * _NUMPY_DTYPES[dtype].itemsize
        block = self._take(nbytes)
        view = np.from_dlpack(block)[:nbytes].view(_NUMPY_DTYPES[dtype])
        weakref.finalize(view, self._take_back, weakref.ref(self), block).atexit = False
        return core.eager.Tensor(
            value=view, place=core.CPUPlace(), persistable=False, zero_copy=True, name="", stop_gradient=True
        )

    def _take(self, nbytes: int) -> paddle.Tensor:
        while self._returned:
            self._free.append(self._returned.popleft())
        self._free.sort(key=_capacity)
        for index, block in enumerate(self._free):
            if _capacity(block) >= nbytes:
                return self._free.pop(index)
        if self._free:
            self.allocated_bytes -= _capacity(self._free.pop())
        self.allocated_bytes += nbytes
        return paddle.empty([nbytes], "uint8")

    @staticmethod
    def _take_back(pool_ref: weakref.ref[StoragePool], block: paddle.Tensor) -> None:
        pool = pool_ref()
        if pool is None:
            return
        if pool._poison is not None:
            pool._poison(np.from_dlpack(block))
        pool._returned.append(block)


def _capacity(block: paddle.Tensor) -> int:
    return int(block.shape[0])
