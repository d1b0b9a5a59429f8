"""Tensors to and from host memory, in blocks: a rank holds no second copy of its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from ..comm.memory import ELEMENT_TYPES, bytes_of
from ..comm.rounding import convert
from ..views import dense, point_at
from .source import STORAGE

BLOCK_BYTES = 1 << 24
"""What is read, converted or copied from a device at a time."""
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_ELEMENTS = {element.name: element for element in ELEMENT_TYPES.values()}


def fits(stored: str, held: str) -> bool:
    """Whether values of one dtype may be loaded into a tensor of another: any float into any float, else the same."""
    return stored == held or (stored in _FLOATS and held in _FLOATS)


def host_blocks(tensor: paddle.Tensor) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of a tensor, in order; of a tensor on CPU they are its own memory, not a copy."""
    whole = flat(tensor)
    item_bytes = whole.element_size()
    step = max(1, BLOCK_BYTES // item_bytes)
    for start in range(0, whole.size, step):
        stop = min(start + step, whole.size)
        block = whole._slice(start, stop)
        if not block.place.is_cpu_place():
            block = block.cpu()
        yield bytes_of(block, (stop - start) * item_bytes)


def copied(tensor: paddle.Tensor) -> npt.NDArray[np.uint8]:
    """A copy of its bytes on the host."""
    nbytes = tensor.size * tensor.element_size()
    copy = np.empty(nbytes, np.uint8)
    start = 0
    for block in host_blocks(tensor):
        copy[start : start + len(block)] = block
        start += len(block)
    return copy


def fill(tensor: paddle.Tensor, read: Callable[[int, int], npt.NDArray[Any]], dtype: str) -> None:
    """Overwrites a tensor, block by block, and rounds where its dtype is narrower.

    Args:
        tensor: of any shape.
        read: gives elements ``start`` to ``stop`` of it, flat, as ``STORAGE[dtype]``.
        dtype: Paddle's name of theirs.
    """
    whole = flat(tensor)
    step = max(1, BLOCK_BYTES // whole.element_size())
    for start in range(0, whole.size, step):
        stop = min(start + step, whole.size)
        _put(whole._slice(start, stop), read(start, stop), dtype)
    if whole.size and whole.data_ptr() != tensor.data_ptr():
        paddle.Tensor.detach(tensor).copy_(whole.reshape(tensor.shape), True)


def as_dtype(values: npt.NDArray[Any], of: str, to: str) -> npt.NDArray[Any]:
    """Flat stored elements of one dtype as those of another; the same array where they are one."""
    if of == to:
        return values
    out = np.empty(values.size, STORAGE[to])
    convert(out, _ELEMENTS[to], values, _ELEMENTS[of])
    return out


def _put(target: paddle.Tensor, values: npt.NDArray[Any], dtype: str) -> None:
    name = str(target.dtype).split(".")[-1]
    if target.place.is_cpu_place():
        memory = bytes_of(target, target.size * target.element_size())
        if name == dtype:
            memory[:] = values.view(np.uint8)
        else:
            convert(memory.view(STORAGE[name]), _ELEMENTS[name], values, _ELEMENTS[dtype])
        return
    # Paddle takes uint16 for the bits of bfloat16.
    target.copy_(paddle.to_tensor(as_dtype(values, dtype, name), place=paddle.CPUPlace()), True)


def flat(tensor: paddle.Tensor) -> paddle.Tensor:
    """As one axis: the same memory, where it is contiguous. Unlike ``reshape`` also for a tensor without axes."""
    bare = paddle.Tensor.detach(tensor)
    if not bare.is_contiguous():
        bare = bare.contiguous()
    view = paddle.empty([0], bare.dtype)
    if bare.size:
        point_at([dense(bare)], [view])
        dense(view)._set_dims([bare.size])
    return view
