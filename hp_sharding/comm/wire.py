"""What travels, where that is of another type than what a collective is made of, or what it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError
from .memory import ELEMENT_TYPES, ElementType

if TYPE_CHECKING:
    import paddle

SUMS = ("reduce_scatter", "all_reduce")
"""Collectives that add up."""
_BY_NAME = {element.name: element for element in ELEMENT_TYPES.values()}
_CONVERTED = ("float32", "float16", "bfloat16")


class Carried(NamedTuple):
    """The element types of one collective.

    Attributes:
        own: of the tensor that is read.
        wire: what travels.
        result: of the tensor that is written.
    """

    own: ElementType
    wire: ElementType
    result: ElementType

    @property
    def converts(self) -> bool:
        """Whether they are not all the same."""
        return self.own is not self.wire or self.wire is not self.result

    def __str__(self) -> str:
        if not self.converts:
            return self.wire.name
        return f"{self.own.name} as {self.wire.name} into {self.result.name}"


def plain(element: ElementType) -> Carried:
    """All of one type."""
    return Carried(element, element, element)


def carried(op: str, own: paddle.Tensor, result: paddle.Tensor, *, wire_dtype: str | None, where: str) -> Carried:
    """Checks what a collective is to convert.

    Args:
        op: the collective.
        own: the tensor that is read.
        result: the tensor that is written; it may be the same one.
        wire_dtype: what is to travel. None stands for what is read, or in a gather for the narrower of the two.
        where: rank and lane, for errors.

    Raises:
        ConfigError: there is no sum or no conversion of these types, what travels would be wider than one of the two,
            or a conversion would overwrite what it has still to read.
    """
    own_type, result_type = (_element(tensor, where) for tensor in (own, result))
    if op in SUMS and own_type.partial is None:
        raise ConfigError(f"{where}: {op} cannot add up {own_type.name}")
    if wire_dtype is not None:
        wire = _BY_NAME.get(wire_dtype)
    else:
        wire = own_type if op in SUMS or own_type.item_bytes <= result_type.item_bytes else result_type
    if wire is own_type is result_type:
        return plain(wire)
    if wire is None or not (_holds(own_type, wire) and _holds(result_type, wire)):
        raise ConfigError(
            f"{where}: {op} of {own_type.name} into {result_type.name} cannot travel as "
            f"{wire_dtype or own_type.name!r}: where types differ it must be float32, float16 or bfloat16, and no "
            "wider than what is read and what is written. Use tensors of one dtype, or another wire_dtype"
        )
    if own is not result and _overlap(own, result) and not (op == "all_gather" and _is_slice(own, result)):
        raise ConfigError(
            f"{where}: {op} of {own_type.name} as {wire.name} into {result_type.name}: input and output share memory, "
            "which a conversion would overwrite before it is read. Use a tensor of its own"
        )
    return Carried(own_type, wire, result_type)


def _element(tensor: paddle.Tensor, where: str) -> ElementType:
    element = ELEMENT_TYPES.get(tensor.dtype)
    if element is None:
        raise ConfigError(f"{where}: there is no conversion of {tensor.dtype}. Use tensors of one dtype")
    return element


def _holds(outer: ElementType, wire: ElementType) -> bool:
    """Whether every value of ``wire`` is one of ``outer``, and there is a conversion."""
    known = outer.name in _CONVERTED and wire.name in _CONVERTED
    return known and (outer is wire or outer.item_bytes > wire.item_bytes)


def _overlap(one: paddle.Tensor, other: paddle.Tensor) -> bool:
    start, other_start = one.data_ptr(), other.data_ptr()
    return start < other_start + _nbytes(other) and other_start < start + _nbytes(one)


def _is_slice(part: paddle.Tensor, whole: paddle.Tensor) -> bool:
    """Whether it is one rank's slice of a tensor that it lies in."""
    return part.dtype == whole.dtype and (part.data_ptr() - whole.data_ptr()) % _nbytes(part) == 0


def _nbytes(tensor: paddle.Tensor) -> int:
    return int(tensor.shape[0] * tensor.element_size())
