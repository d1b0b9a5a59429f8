"""Copies and sums of tensors of different floating types, and the conversions in numpy that they are made of."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import pytest

from hp_sharding.comm import add_into, cast_into, is_rounded
from hp_sharding.comm.memory import ELEMENT_TYPES
from hp_sharding.comm.rounding import convert, convert_backwards
from hp_sharding.errors import ConfigError
from tests.unit.test_comm_wire import SPECIAL, assert_same_bits, rounded, tensor_of, terms_of, values_of

Array = npt.NDArray[Any]

FLOATS = ["float32", "float16", "bfloat16", "float64"]
PAIRS = list(itertools.product(FLOATS, FLOATS))
NUMEL = 70_001
"""Two full blocks and a part of one."""


def _wide(values: Array, dtype: str) -> Array:
    """What a tensor of that dtype holds of float32 values, in numpy's nearest type."""
    return values.astype(np.float64) if dtype == "float64" else rounded(values, dtype)


def _found(tensor: paddle.Tensor) -> Array:
    return tensor.numpy() if tensor.dtype == paddle.float64 else values_of(tensor)


def _assert_equal(found: Array, expected: Array) -> None:
    assert found.dtype == expected.dtype
    if expected.dtype == np.float32:
        assert_same_bits(found, expected)
    else:
        np.testing.assert_array_equal(found, expected)


def _pair(out_dtype: str, source_dtype: str) -> tuple[paddle.Tensor, paddle.Tensor, Array, Array]:
    """An output and a source, and what they hold; special values meet all kinds of others."""
    held, given = terms_of(2, NUMEL, "float32")
    return (
        tensor_of(_wide(held, out_dtype), out_dtype),
        tensor_of(_wide(given, source_dtype), source_dtype),
        _wide(held, out_dtype),
        _wide(given, source_dtype),
    )


@pytest.mark.parametrize(("out_dtype", "source_dtype"), PAIRS)
def test_a_copy_is_rounded_to_nearest(out_dtype: str, source_dtype: str) -> None:
    out, source, _, given = _pair(out_dtype, source_dtype)
    cast_into(out, source)
    _assert_equal(_found(out), _wide(given.astype(np.float32), out_dtype))
    _assert_equal(_found(source), given)


@pytest.mark.parametrize(("out_dtype", "source_dtype"), PAIRS)
def test_a_sum_is_formed_in_float32_and_rounded_once(out_dtype: str, source_dtype: str) -> None:
    out, source, held, given = _pair(out_dtype, source_dtype)
    add_into(out, source)
    with np.errstate(all="ignore"):
        # In float64 where one of the two is.
        total = held + given
        expected = total if out_dtype == "float64" else rounded(total.astype(np.float32), out_dtype)
    _assert_equal(_found(out), expected.astype(np.float64 if out_dtype == "float64" else np.float32))
    _assert_equal(_found(source), given)


def test_float64_keeps_what_float32_has_not() -> None:
    out, source = paddle.to_tensor([1.0], "float64"), paddle.to_tensor([2.0**-40], "float64")
    add_into(out, source)
    assert out.item() == 1.0 + 2.0**-40
    cast_into(out, source)
    assert out.item() == 2.0**-40
    narrow = paddle.to_tensor([-1.0])
    add_into(narrow, paddle.to_tensor([1.0 + 2.0**-40], "float64"))
    assert narrow.item() == 2.0**-40, "the sum is formed in float64"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_shapes_may_differ_and_no_gradient_knows_of_it(dtype: str) -> None:
    layer = paddle.nn.Linear(6, 4)
    weight = layer.weight
    source = paddle.arange(24).cast(dtype)
    cast_into(weight, source)
    add_into(weight, source)
    np.testing.assert_array_equal(weight.numpy(), 2 * np.arange(24, dtype=np.float32).reshape(6, 4))
    assert (weight.stop_gradient, weight.is_leaf, weight.shape) == (False, True, [6, 4])
    cast_into(source, weight)
    np.testing.assert_array_equal(values_of(source), 2 * np.arange(24, dtype=np.float32))
    scalar = paddle.to_tensor(0.0)
    cast_into(scalar, paddle.to_tensor([3.0], dtype))
    assert scalar.item() == 3.0
    cast_into(paddle.zeros([0]), paddle.zeros([0, 3], dtype))


def test_parts_of_tensors_are_written_alone() -> None:
    whole = paddle.zeros([30])
    cast_into(whole._slice(10, 20), paddle.ones([10], "float16"))
    add_into(whole._slice(15, 20), paddle.ones([5], "bfloat16"))
    np.testing.assert_array_equal(whole.numpy(), [0] * 10 + [1] * 5 + [2] * 5 + [0] * 10)


@pytest.mark.parametrize("act", [cast_into, add_into])
@pytest.mark.parametrize(("out_dtype", "source_dtype"), [("bfloat16", "float32"), ("float32", "float16")])
def test_nothing_of_that_size_is_made_on_the_way(
    act: Callable[[paddle.Tensor, paddle.Tensor], None], out_dtype: str, source_dtype: str
) -> None:
    out, source = paddle.zeros([2_000_000], out_dtype), paddle.ones([2_000_000], source_dtype)
    tracemalloc.start()
    act(out, source)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert values_of(out)[-1] == 1.0


@pytest.mark.parametrize("act", [cast_into, add_into])
def test_what_does_not_fit_is_refused(act: Callable[[paddle.Tensor, paddle.Tensor], None]) -> None:
    flat = paddle.zeros([4])
    for out, source in (
        (flat, paddle.zeros([5])),
        (flat, paddle.zeros([4], "int32")),
        (paddle.zeros([4], "int64"), flat),
        (flat, paddle.zeros([8])[::2]),
        (paddle.zeros([4, 2]).T, paddle.zeros([8])),
    ):
        with pytest.raises(ConfigError, match=act.__name__):
            act(out, source)


def test_float16_is_that_of_numpy_everywhere() -> None:
    """Every float16 and what lies half-way to the next one, each with its neighbours in float32; and back."""
    halves = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    near = [halves.astype(np.float32)]
    with np.errstate(all="ignore"):
        following = (halves.view(np.uint16) + np.uint16(1)).view(np.float16).astype(np.float32)
        near.append((near[0] + following) / 2)
    values = np.concatenate([(each.view(np.int32) + away).view(np.float32) for each in near for away in (-1, 0, 1)])
    single, half = (ELEMENT_TYPES[dtype] for dtype in (paddle.float32, paddle.float16))
    found, back = np.empty(len(values), np.float16), np.empty(len(values), np.float32)
    convert(found, half, values, single)
    convert(back, single, found, half)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16)
    assert_same_bits(back, expected.astype(np.float32))
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(found[is_number].view(np.uint16), expected[is_number].view(np.uint16))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("numel", [1, 3, 32_768, NUMEL])
def test_memory_may_be_shared_where_a_conversion_says_so(name: str, numel: int) -> None:
    wide, narrow = (ELEMENT_TYPES[getattr(paddle, dtype)] for dtype in ("float32", name))
    values = terms_of(1, numel, "float32")[0]
    values[: len(SPECIAL)] = np.array(SPECIAL, np.float32)[:numel]
    expected = rounded(values, name)
    # Rounded to the first half of its own memory, or to the second; and back.
    for round_it, widen_it, begins in ((convert, convert_backwards, 0), (convert_backwards, convert, 2 * numel)):
        memory = values.copy()
        part = narrow.array(memory.view(np.uint8)[begins : begins + 2 * numel])
        round_it(part, narrow, memory, wide)
        widen_it(memory, wide, part, narrow)
        assert_same_bits(memory, expected)


@pytest.mark.parametrize(("seen", "through"), [("bfloat16",) * 2, ("float16",) * 2, ("float32", "bfloat16")])
def test_what_was_rounded_is_told_from_what_was_written(seen: str, through: str) -> None:
    source = paddle.to_tensor(np.random.default_rng(3).standard_normal(70_000).astype(np.float32))
    source[5:9] = paddle.to_tensor([float("nan"), float("inf"), 1e-42, -0.0])
    travelled, value = paddle.empty(source.shape, through), paddle.empty(source.shape, seen)
    cast_into(travelled, source)
    cast_into(value, travelled)
    assert is_rounded(value, source, through)
    for place in (0, 5, 69_999):
        changed = value.clone()
        changed[place] = 0.5
        assert not is_rounded(changed, source, through)
