"""Sums of each element type, against numpy and Paddle's own rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_sharding.comm.memory import ELEMENT_TYPES, bytes_of
from hp_sharding.comm.sums import Adder
from hp_sharding.comm.wire import plain

Array = npt.NDArray[Any]
BFLOAT16 = Adder(plain(ELEMENT_TYPES[paddle.bfloat16]))
FLOAT16 = Adder(plain(ELEMENT_TYPES[paddle.float16]))


def _stored(adder: Adder, values: Array) -> Array:
    """Partial sums rounded to stored elements."""
    out = np.zeros(len(values), adder.element.storage)
    adder.store(out, values.astype(np.float32).copy(), accumulate=False)
    return out


def _by_paddle(values: Array, dtype: str) -> Array:
    return paddle.to_tensor(values).cast(dtype).view("int16").numpy().view(np.uint16)


@pytest.mark.parametrize(("adder", "dtype"), [(BFLOAT16, "bfloat16"), (FLOAT16, "float16")])
def test_rounding_is_paddles(adder: Adder, dtype: str) -> None:
    generator = np.random.default_rng(3)
    # Every exponent, and among them the ones that overflow and underflow; two full blocks and a part of one.
    bits = generator.integers(0, 2**32, 70_000, dtype=np.uint32)
    values = bits.view(np.float32)
    # Paddle 3.3 makes subnormals of what lies between 2e-27 and 7e-24; in float16 that is zero.
    values = values[~np.isnan(values) & ((dtype == "bfloat16") | (np.abs(values) > 1e-20))]
    np.testing.assert_array_equal(_stored(adder, values).view(np.uint16), _by_paddle(values, dtype))


def test_bfloat16_rounds_ties_to_even() -> None:
    bits = np.array([0x3F80_8000, 0x3F81_8000, 0x3F80_8001, 0x3F80_7FFF, 0x7F7F_FFFF], np.uint32)
    expected = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80]
    np.testing.assert_array_equal(_stored(BFLOAT16, bits.view(np.float32)), expected)


@pytest.mark.parametrize("adder", [BFLOAT16, FLOAT16])
def test_what_is_not_a_number_stays_so(adder: Adder) -> None:
    # These have all fraction bits set: a carry would turn them into zeros.
    bits = np.array([0x7FFF_FFFF, 0xFFFF_FFFF, 0x7F80_0001, 0x7F80_0000, 0xFF80_0000], np.uint32)
    out = np.zeros(5, adder.element.storage)
    adder.store(out, bits.view(np.float32).copy(), accumulate=False)
    back = np.zeros(5, np.float32)
    adder.add_to_partial(back, out)
    assert np.isnan(back[:3]).all()
    np.testing.assert_array_equal(back[3:], [np.inf, -np.inf])


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=50))
def test_sum_of_two_is_rounded_once(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    for adder, dtype in ((BFLOAT16, "bfloat16"), (FLOAT16, "float16")):
        first, second = _stored(adder, values), _stored(adder, values[::-1].copy())
        partial = np.zeros(len(values), np.float32)
        adder.add_first(partial, first, second)
        out = np.zeros_like(first)
        adder.store(out, partial, accumulate=False)
        wide = [paddle.to_tensor(each.view(np.int16)).view(dtype).cast("float32") for each in (first, second)]
        np.testing.assert_array_equal(out.view(np.uint16), _by_paddle((wide[0] + wide[1]).numpy(), dtype))


def test_accumulation_adds_to_what_is_there() -> None:
    out = _stored(BFLOAT16, np.full(10, 256.0))
    BFLOAT16.store(out, np.full(10, 1.5, np.float32), accumulate=True)
    # 257.5 lies between 256 and 258 in bfloat16.
    np.testing.assert_array_equal(out, _stored(BFLOAT16, np.full(10, 258.0)))
    whole = Adder(plain(ELEMENT_TYPES[paddle.int64]))
    numbers = np.arange(5)
    whole.store(numbers, np.ones(5, np.int64), accumulate=True)
    np.testing.assert_array_equal(numbers, [1, 2, 3, 4, 5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64"])
def test_bytes_of_shares_memory_and_keeps_it(dtype: str) -> None:
    tensor = paddle.ones([100]).cast(dtype)
    part = tensor._slice(10, 20)
    item_bytes = ELEMENT_TYPES[tensor.dtype].item_bytes
    view = bytes_of(part, 10 * item_bytes)
    view[:] = 0
    found = tensor.cast("float32").numpy()
    np.testing.assert_array_equal(found, [1] * 10 + [0] * 10 + [1] * 80)
    address = view.ctypes.data
    part._clear_data()
    tensor._clear_data()
    del tensor, part
    others = [paddle.full([100], 5.0).cast(dtype) for _ in range(50)]
    assert (view == 0).all()
    assert address not in {other.data_ptr() + 10 * item_bytes for other in others}


def test_bytes_of_nothing() -> None:
    assert len(bytes_of(paddle.zeros([0]), 0)) == 0
