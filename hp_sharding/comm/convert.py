"""Copying and adding tensors of different floating types, where they lie."""

from __future__ import annotations

import numpy as np
import paddle
from paddle.base import core

from ..errors import ConfigError
from .memory import ELEMENT_TYPES, ElementType, bytes_of
from .rounding import QUIETLY, Array, blocks, convert, narrow, widen

_FLOATS = ("float32", "float16", "bfloat16", "float64")


def cast_into(out: paddle.Tensor, source: paddle.Tensor) -> None:
    """Copies ``source`` into ``out``, each element rounded to nearest, ties to even.

    On CPU it is there on return, made without a temporary of that size; on a device it is queued on the current stream.
    float64 becomes a 16-bit type by way of float32. Nothing is recorded for autograd.

    Args:
        out: contiguous, of float32, float16, bfloat16 or float64, of any shape.
        source: the same, of as many elements in the same place; it shares no memory with ``out``, or is it.

    Raises:
        ConfigError: the two do not fit each other.
    """
    to, of = _types("cast_into", out, source)
    if not out.place.is_cpu_place() and out.size:
        with paddle.no_grad():
            queue_cast(_flat(out), _flat(source))
        return
    convert(_array(out, to), to, _array(source, of), of)


def add_into(out: paddle.Tensor, source: paddle.Tensor) -> None:
    """Adds ``source`` to ``out``. Sums are formed in float32, or in float64 where one of the two is, and rounded once.

    Arguments, errors, and when it is done: as for ``cast_into``.
    """
    to, of = _types("add_into", out, source)
    if not out.place.is_cpu_place() and out.size:
        _add_on_device(_flat(out), _flat(source), "float64" if "float64" in (to.name, of.name) else "float32")
        return
    _add(_array(out, to), to, _array(source, of), of)


def is_rounded(value: paddle.Tensor, source: paddle.Tensor, dtype: str) -> bool:
    """Whether ``value`` holds the bits of ``source`` rounded to ``dtype``, both on CPU.

    Args:
        value: contiguous, of ``dtype`` or float32.
        source: contiguous, float32, of as many elements.
        dtype: ``"float16"`` or ``"bfloat16"``, or ``"float32"`` for no rounding.

    Raises:
        ConfigError: the two do not fit each other.
    """
    seen, of = _types("is_rounded", value, source)
    through = next(element for element in ELEMENT_TYPES.values() if element.name == dtype)
    return _is_rounded(_array(value, seen), seen, _array(source, of), through)


@QUIETLY
def _is_rounded(value: Array, seen: ElementType, source: Array, through: ElementType) -> bool:
    bits = f"u{seen.item_bytes}"
    for block in blocks(len(value)):
        rounded = np.empty(len(value[block]), through.storage)
        narrow(rounded, source[block], through)
        expected = rounded if seen is through else widen(rounded, through)
        if not np.array_equal(value[block].view(bits), expected.view(bits)):
            return False
    return True


@QUIETLY
def _add(out: Array, to: ElementType, source: Array, of: ElementType) -> None:
    for block in blocks(len(out)):
        values = widen(source[block], of)
        if to.partial == to.storage:
            np.add(out[block], values, out=out[block], casting="unsafe")
        else:
            narrow(out[block], np.add(widen(out[block], to), values), to)


def queue_cast(out: paddle.Tensor, source: paddle.Tensor) -> None:
    """Queues a copy with conversion on the current stream, straight into the memory of ``out``, of the same shape.

    Within ``paddle.no_grad()``.
    """
    if out.dtype == source.dtype:
        out.copy_(source, False)
    else:
        paddle._C_ops.cast(source, out.dtype, out=out)


@paddle.no_grad()
def _add_on_device(out: paddle.Tensor, source: paddle.Tensor, wide: str) -> None:
    total = source.cast(wide)
    total.add_(out if out.dtype == total.dtype else out.cast(wide))
    queue_cast(out, total)


def _types(op: str, out: paddle.Tensor, source: paddle.Tensor) -> tuple[ElementType, ElementType]:
    types = [ELEMENT_TYPES.get(tensor.dtype) for tensor in (out, source)]
    fits = out.size == source.size and out.is_contiguous() and source.is_contiguous()
    # Without elements a tensor has no memory, and so no place.
    fits = fits and (not out.size or str(out.place) == str(source.place))
    to, of = types
    if to is None or of is None or to.name not in _FLOATS or of.name not in _FLOATS or not fits:
        raise ConfigError(
            f"{op} takes two contiguous tensors of one size and place, of {', '.join(_FLOATS)}, not {source.dtype} of "
            f"shape {list(source.shape)} on {source.place} into {out.dtype} of shape {list(out.shape)} on {out.place}"
        )
    return to, of


def _flat(tensor: paddle.Tensor) -> paddle.Tensor:
    """The same memory in one dimension, as a tensor that no gradient knows of. Queues nothing, as ``view`` does."""
    dense = core.DenseTensor()
    dense._share_data_with(tensor.get_tensor())
    dense._set_dims([tensor.size])
    return core.eager.Tensor(dense)


def _array(tensor: paddle.Tensor, element: ElementType) -> Array:
    return element.array(bytes_of(tensor, tensor.size * element.item_bytes))
