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
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import paddle
from paddle.base import core

_NUMPY_CARRIER = {"float32": np.float32, "float16": np.float16, "bfloat16": np.int16, "float64": np.float64}


class StoragePool:
    """Flat tensors of given size and dtype whose memory is reused once nothing aliases it.

    Args:
        poison: called with each block's NumPy view when the block comes back; tests fill it with NaN, so that a read of
            freed storage shows.
    """

    def __init__(self, poison: Callable[[np.ndarray], None] | None = None) -> None:
        self._free: dict[tuple[int, str], list[paddle.Tensor]] = defaultdict(list)
        self._poison = poison
        self.allocated_bytes = 0

    def alloc(self, numel: int, dtype: str) -> paddle.Tensor:
        """A flat tensor of ``numel`` elements with undefined content; its memory comes back by itself."""
        free = self._free[numel, dtype]
        block = free.pop() if free else self._fresh(numel, dtype)
        carrier = np.from_dlpack(block)
        # Paddle takes NumPy's uint16 for bfloat16.
        view = carrier.view(np.uint16) if dtype == "bfloat16" else carrier.view()
        weakref.finalize(view, self._take_back, weakref.ref(self), block, (numel, dtype)).atexit = False
        return core.eager.Tensor(
            value=view, place=core.CPUPlace(), persistable=False, zero_copy=True, name="", stop_gradient=True
        )

    def trim(self) -> None:
        """Lets go of the blocks that nobody uses."""
        self._free.clear()

    def _fresh(self, numel: int, dtype: str) -> paddle.Tensor:
        # bfloat16 has no NumPy type: the block is carried as int16.
        self.allocated_bytes += numel * np.dtype(_NUMPY_CARRIER[dtype]).itemsize
        return paddle.empty([numel], "int16" if dtype == "bfloat16" else dtype)

    @staticmethod
    def _take_back(pool_ref: weakref.ref[StoragePool], block: paddle.Tensor, key: tuple[int, str]) -> None:
        pool = pool_ref()
        if pool is None:
            return
        if pool._poison is not None:
            pool._poison(np.from_dlpack(block))
        pool._free[key].append(block)
