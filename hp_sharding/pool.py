"""Blocks of memory that come and go every step: reused, so that a step allocates nothing in steady state.

A fresh block of 12.8 MB costs 6.4 ms in page faults, a reused one 0.4 ms. A block returns to the pool only when the
last tensor that aliases it is gone, including the views that autograd saves (``w.T``, ``w[:4]``): handing it out
earlier would change, silently, what a later backward reads. On CPU that moment is known: the tensor is made over a
NumPy view, which dies with the last alias. On devices Paddle's caching allocator does this job, see ``DevicePool``.

The last alias may die in any thread, a collective's among them. So the tensor is not made with ``paddle.from_dlpack``:
that keeps one process-wide lock while a dying tensor runs Python code, and takes the same lock while it holds the
interpreter; two threads that do both wait for each other for ever.
"""

from __future__ import annotations

import bisect
import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import paddle
from paddle.base import core

from .layout import ALIGNMENT_BYTES

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # Paddle takes NumPy's uint16 for bfloat16
    "float64": np.dtype(np.float64),
}

_CPU = core.CPUPlace()

_Block = np.ndarray[Any, Any]
"""Bytes."""

MAX_WASTE = 8
"""How many times the size of a request a block for it may be. A vector must not take the block that the next layer is
about to need, and have it get another."""

MAX_NAN_NUMEL = 1 << 20
"""Elements of NaN behind what stands for a freed vector."""

DTYPES = tuple(_NUMPY_DTYPES)
"""Names of the dtypes that ``StoragePool`` gives out: all that can train."""


class StoragePool:
    """Flat tensors whose memory is reused once nothing aliases it.

    A request gets the smallest free block that it fits into, unless that is far too large, see ``MAX_WASTE``. Where
    none is large enough, the largest free one is given up for a new one: so among tensors of like sizes there are never
    more blocks than were alive at a time.

    Args:
        poison: called with each block as NumPy bytes when it comes back; tests fill it with 0xFF, which is NaN in every
            floating-point type, so that a read of freed storage shows.

    Attributes:
        allocated_bytes: of all blocks, in use or not.
        on_host: whether this process can read and write the memory at its address.
    """

    on_host = True

    def __init__(self, poison: Callable[[_Block], None] | None = None) -> None:
        self._free: list[_Block] = []  # by size
        # Blocks come back on whichever thread drops the last alias, perhaps while this one is in ``_take``: so no lock.
        self._returned: deque[_Block] = deque()
        self._poison = poison
        self._empty = {name: paddle.empty([0], name) for name in _NUMPY_DTYPES}
        self._nans: _Block = np.empty([0], np.uint8)
        self.allocated_bytes = 0
        self._self_ref = weakref.ref(self)
        self._lent: dict[int, _Lent] = {}

    def alloc(self, numel: int, dtype: str) -> paddle.Tensor:
        """A flat tensor of ``numel`` elements with undefined content; its memory comes back by itself."""
        nbytes = numel * _NUMPY_DTYPES[dtype].itemsize
        block = self._take(nbytes)
        view = block[:nbytes].view(_NUMPY_DTYPES[dtype])
        lent = _Lent(view, _take_back)
        lent.pool, lent.block = self._self_ref, block
        self._lent[id(lent)] = lent
        # What paddle.Tensor(value=view, zero_copy=True) does, in a quarter of its time.
        tensor = self._empty[dtype].clone()
        tensor.get_tensor().set(view, _CPU, True)
        return tensor

    def absent(self, numel: int, dtype: str) -> paddle.Tensor:
        """A tensor of one element, NaN, that is to be given the shape of one of ``numel`` elements.

        Every kernel that looks at the size of its storage refuses it; those that do not find NaN behind it, up to
        ``MAX_NAN_NUMEL``.
        """
        itemsize = _NUMPY_DTYPES[dtype].itemsize
        if numel == 1:
            run = self._nan_run(1, itemsize)  # its own: somebody may write to it
        else:
            nbytes = min(numel, MAX_NAN_NUMEL) * itemsize
            if len(self._nans) < nbytes:
                self._nans = self._nan_run(nbytes // itemsize, itemsize)
            run = self._nans
        tensor = self._empty[dtype].clone()
        tensor.get_tensor().set(run[:itemsize].view(_NUMPY_DTYPES[dtype]), _CPU, True)
        return tensor

    @staticmethod
    def _nan_run(numel: int, itemsize: int) -> _Block:
        # All ones is NaN in every floating-point type.
        return np.from_dlpack(paddle.full([numel * itemsize], 0xFF, "uint8"))

    def spoil(self, tensor: paddle.Tensor) -> None:
        """Says that nobody may read what is in a tensor that ``alloc`` gave."""
        if self._poison is not None:
            memory = (ctypes.c_char * (tensor.size * tensor.element_size())).from_address(tensor.data_ptr())
            self._poison(np.frombuffer(memory, np.uint8))

    def trim(self) -> None:
        """Gives the blocks that nobody uses back to the system."""
        self._collect()
        self.allocated_bytes -= sum(len(block) for block in self._free)
        self._free.clear()

    @staticmethod
    def zero(tensor: paddle.Tensor, ranges: Iterable[tuple[int, int]]) -> None:
        """Zeroes some ranges, as (start, end) in elements, of a tensor that ``alloc`` gave."""
        address, itemsize = tensor.data_ptr(), tensor.element_size()
        for start, end in ranges:
            # They are short: a view and a kernel for each took five times as long.
            ctypes.memset(address + start * itemsize, 0, (end - start) * itemsize)

    def _take(self, nbytes: int) -> _Block:
        if self._returned:
            self._collect()
        index = bisect.bisect_left(self._free, nbytes, key=len)
        if index < len(self._free) and len(self._free[index]) <= MAX_WASTE * nbytes:
            return self._free.pop(index)
        if index == len(self._free) > 0:
            self.allocated_bytes -= len(self._free.pop())
        self.allocated_bytes += nbytes
        return self._make_block(nbytes)

    @staticmethod
    def _make_block(nbytes: int) -> _Block:
        # Paddle's memory, so that its statistics count it.
        return np.from_dlpack(paddle.empty([nbytes], "uint8"))

    def _collect(self) -> None:
        while self._returned:
            bisect.insort(self._free, self._returned.popleft(), key=len)


class _Lent(weakref.ref[_Block]):
    """A block that is in use, seen through the array that the last alias takes with it."""

    __slots__ = ("block", "pool")
    block: _Block
    pool: weakref.ref[StoragePool]


def _take_back(lent: _Lent) -> None:
    # weakref.finalize does the same at twice the price.
    pool = lent.pool()
    if pool is None:
        return
    if pool._poison is not None:
        pool._poison(lent.block)
    pool._returned.append(lent.block)
    del pool._lent[id(lent)]


class DevicePool(StoragePool):
    """What takes the pool's place on a device: Paddle's own allocator, which keeps freed memory for later requests.

    Memory is given out anew, in the order of one stream: what is queued later on the stream that computes. Whoever uses
    it on another stream holds it until that one has been waited for.
    """

    on_host = False

    def alloc(self, numel: int, dtype: str) -> paddle.Tensor:
        """See ``StoragePool``."""
        return paddle.empty([numel], dtype)

    def absent(self, numel: int, dtype: str) -> paddle.Tensor:
        """See ``StoragePool``."""
        if numel == 1:
            return paddle.full([1], float("nan"), dtype)
        # The allocator rounds up what it is asked for, but a slice has only what is left from where it begins.
        run_numel = ALIGNMENT_BYTES // _NUMPY_DTYPES[dtype].itemsize
        return paddle.full([run_numel], float("nan"), dtype)._slice(run_numel - 1, run_numel)

    def trim(self) -> None:
        """Leaves it to the user: ``paddle.device.empty_cache()`` waits for the device."""

    @staticmethod
    def zero(tensor: paddle.Tensor, ranges: Iterable[tuple[int, int]]) -> None:
        """See ``StoragePool``."""
        for start, end in ranges:
            tensor._slice(start, end).zero_()
