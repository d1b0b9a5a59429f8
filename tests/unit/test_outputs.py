"""Tensors in what a layer takes or returns."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding.outputs import kept_tensors, tensors_in

A, B = paddle.ones([1]), paddle.zeros([2])
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    a: Any


class Bag:
    def __init__(self, **things: Any) -> None:
        self.__dict__.update(things)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (A, [A]),
        ((A, 1, "text", None, B), [A, B]),
        ([[A], {"b": [B]}], [A, B]),
        (OrderedDict(x=B, y=A), [B, A]),
        (Pair(A, B), [A, B]),
        (Plain(A, {"x": B}), [A, B]),
        (Slotted(A), [A]),
        (Bag(hidden=A, more=[B]), [A, B]),
        (None, []),
        (np.ones(3), []),
        (Plain, []),
        (nn.Linear(2, 2), []),
    ],
    ids=str,
)
def test_finds_them_in_order(value: Any, expected: list[paddle.Tensor]) -> None:
    found = list(tensors_in(value))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]


def test_a_structure_that_holds_itself_ends() -> None:
    value: list[Any] = [A]
    value.append(value)
    assert all(tensor is A for tensor in tensors_in(value))


def test_what_a_layer_keeps() -> None:
    layer = nn.Linear(2, 2)
    layer.register_buffer("statistic", B)
    layer.sub = nn.Linear(1, 1)
    layer.aux, layer.all, layer.by_name = A, [A, 3, B], {"x": B}
    found = dict(kept_tensors(layer))
    # Paddle holds a tensor that is set as an attribute among the buffers.
    assert {name for name, tensor in found.items() if tensor is A} == {"_buffers.1", "all.0"}
    assert {name for name, tensor in found.items() if tensor is B} == {"_buffers.0", "all.2", "by_name.0"}
    assert len(found) == 5, "neither parameters nor those of sublayers"
