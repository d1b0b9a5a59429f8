"""The tensors in what a layer takes or returns, whatever they are wrapped in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import paddle

_DEPTH = 6
"""Of containers in containers; deeper ones are taken for structures that refer to themselves."""

_NOT_KEPT = frozenset(("_parameters", "_sub_layers", "_hp_sharding_schedule"))

ATOMS = (str, bytes, int, float, bool, type(None))
"""Values without anything in them."""


def tensors_in(value: Any, *, depth: int = _DEPTH) -> Iterator[paddle.Tensor]:
    """Tensors in tuples, lists, dicts, dataclasses and other plain objects, in order. May yield one more than once."""
    if isinstance(value, paddle.Tensor):
        yield value
        return
    if depth == 0 or isinstance(value, ATOMS):
        return
    for part in _parts(value):
        yield from tensors_in(part, depth=depth - 1)


def kept_tensors(layer: paddle.nn.Layer) -> Iterator[tuple[str, paddle.Tensor]]:
    """Tensors that a layer holds in attributes, buffers and lists and dicts among them; parameters are left out."""
    for name, value in vars(layer).items():
        if isinstance(value, paddle.Tensor):
            yield name, value
        elif value and isinstance(value, (list, tuple, dict)) and name not in _NOT_KEPT:
            for number, part in enumerate(value.values() if isinstance(value, dict) else value):
                if isinstance(part, paddle.Tensor):
                    yield f"{name}.{number}", part


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, (type, paddle.nn.Layer)):
        return []  # a layer's tensors are its own affair
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _slots_of(kind: type) -> Iterable[str]:
    slots: str | Iterable[str] = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else slots
