"""What every communicator must do where what travels is of another dtype than what it is made of, or what it becomes.

The checks are of the kind of ``test_comm_contract``, and run where those do: here over a group of one, in
``tests/dist/test_comm_tcp.py`` over more, in ``tests/device/test_contract.py`` on streams of a device. What is expected
is formed in numpy. Up to two ranks every bit must be that; beyond them the order of a float32 sum is the lane's own.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle
import pytest

from hp_sharding.comm import create_communicators
from hp_sharding.errors import ConfigError
from tests.unit.test_comm_contract import Lanes

Array = npt.NDArray[Any]

SHORT = ["float16", "bfloat16"]
SIZES = [0, 1, 3, 1000, 70_001]
SPECIAL = [
    *(np.nan, np.inf, -np.inf, 0.0, -0.0),
    *(65504.0, 65519.9, 65520.0, -70000.0, 1e30, -3.4e38),  # the largest of float16, its tie to infinity, and beyond
    *(2.0**-14, 2.0**-24, 2.0**-25, 3 * 2.0**-25, -(2.0**-23), 1e-39, -2e-40),  # subnormal in float16, or in bfloat16
    *(1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-11), 1 + 3 * 2.0**-11),  # ties of both, down and up
]


class Types(NamedTuple):
    """Dtypes of one collective: of its input, of what travels, of its output."""

    own: str
    wire: str
    result: str


WIRE_CHECKS: dict[str, Callable[[Lanes], None]] = {}


def _check(function: Callable[[Lanes], None]) -> Callable[[Lanes], None]:
    WIRE_CHECKS[function.__name__] = function
    return function


def rounded(values: Array, dtype: str) -> Array:
    """Float32 values as they are after they were of ``dtype``: the nearer neighbour, or the even one."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    below = values.view(np.uint32) & np.uint32(0xFFFF0000)
    above = below + np.uint32(0x10000)
    # Beyond the largest number comes what would be the next one, if there were one.
    with np.errstate(invalid="ignore"):
        wide = [each.view(np.float32).astype(np.float64) for each in (below, above)]
        wide[1] = np.where(np.isinf(wide[1]), np.sign(wide[1]) * 2.0**128, wide[1])
        down, up = np.abs(values - wide[0]), np.abs(wide[1] - values)
    bits = np.where((down < up) | ((down == up) & (below & 0x10000 == 0)), below, above)
    return np.where(np.isfinite(values), bits.view(np.float32), values)


def terms_of(nranks: int, numel: int, dtype: str) -> list[Array]:
    """What each rank has, as float32 values that ``dtype`` can hold; special ones meet all kinds of others."""
    generator = np.random.default_rng(numel)
    terms = []
    for rank in range(nranks):
        values = generator.standard_normal(numel).astype(np.float32)
        special = np.array(SPECIAL * 2, np.float32)[: max(numel - 500, 0)]
        values[7 * rank : 7 * rank + len(special)] = special
        terms.append(rounded(values, dtype))
    return terms


def tensor_of(values: Array, dtype: str) -> paddle.Tensor:
    """A tensor that holds just these values."""
    if dtype == "bfloat16":
        return paddle.to_tensor((values.view(np.uint32) >> 16).astype(np.uint16).view(np.int16)).view("bfloat16")
    return paddle.to_tensor(values.astype(dtype))


def values_of(tensor: paddle.Tensor) -> Array:
    """Its values in float32."""
    if tensor.dtype == paddle.bfloat16:
        return (tensor.view("int16").numpy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return tensor.numpy().astype(np.float32)


def assert_same_bits(found: Array, expected: Array) -> None:
    """But for those of a NaN."""
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(found[is_number].view(np.uint32), expected[is_number].view(np.uint32))


def _sum(terms: list[Array], types: Types, held: Array | None = None) -> Array:
    with np.errstate(all="ignore"):
        total = rounded(terms[0], types.wire)
        for term in terms[1:]:
            total = total + rounded(term, types.wire)
        return rounded(total if held is None else total + held, types.result)


def _assert_sum(found: paddle.Tensor, expected: Array, types: Types, n_terms: int) -> None:
    if n_terms <= 2:
        assert_same_bits(values_of(found), expected)
        return
    # Another order of terms: what cancels out leaves an error of the terms' own size. Then one rounding.
    tolerance = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[types.result]
    large = np.abs(expected) > 1e29
    np.testing.assert_allclose(values_of(found)[~large], expected[~large], rtol=tolerance, atol=4 * tolerance)


def _each_sum() -> Iterator[tuple[Types, int, bool]]:
    for wire in SHORT:
        for types in (Types(wire, wire, "float32"), Types("float32", wire, "float32"), Types("float32", wire, wire)):
            yield from ((types, numel, adds) for numel, adds in itertools.product(SIZES, (False, True)))


def _named(types: Types) -> dict[str, Any]:
    """``wire_dtype`` where it has to be named."""
    return {} if types.own == types.wire else {"wire_dtype": types.wire}


@_check
def all_gather_rounds_what_is_wider_than_the_output(lanes: Lanes) -> None:
    comm = lanes["one"]
    for dtype, numel in itertools.product(SHORT, SIZES):
        terms = terms_of(comm.nranks, numel, "float32")
        own, output = tensor_of(terms[comm.rank], "float32"), paddle.zeros([comm.nranks * numel], dtype)
        comm.all_gather(output, own, label="a").wait()
        assert_same_bits(values_of(output), rounded(np.concatenate(terms), dtype))
        assert_same_bits(values_of(own), terms[comm.rank])


@_check
def all_gather_leaves_what_has_travelled_in_a_wider_output(lanes: Lanes) -> None:
    comm = lanes["one"]
    for wire, numel, own_dtype in itertools.product(SHORT, SIZES, ("float32", "wire")):
        dtype = wire if own_dtype == "wire" else own_dtype
        terms = terms_of(comm.nranks, numel, dtype)
        own, output = tensor_of(terms[comm.rank], dtype), paddle.full([comm.nranks * numel], -1.0)
        comm.all_gather(output, own, **_named(Types(dtype, wire, "float32"))).wait()
        assert_same_bits(values_of(output), rounded(np.concatenate(terms), wire))
        assert_same_bits(values_of(own), terms[comm.rank])


@_check
def all_gather_rounds_in_place(lanes: Lanes) -> None:
    comm = lanes["one"]
    for wire, numel in itertools.product(SHORT, SIZES):
        terms = terms_of(comm.nranks, numel, "float32")
        own = slice(comm.rank * numel, (comm.rank + 1) * numel)
        values = np.full(comm.nranks * numel, -1, np.float32)
        values[own] = terms[comm.rank]
        output = tensor_of(values, "float32")
        comm.all_gather(output, output._slice(own.start, own.stop), wire_dtype=wire).wait()
        assert_same_bits(values_of(output), rounded(np.concatenate(terms), wire))


@_check
def reduce_scatter_sums_what_has_travelled_in_float32(lanes: Lanes) -> None:
    comm = lanes["one"]
    for types, numel, adds in _each_sum():
        terms = terms_of(comm.nranks, comm.nranks * numel, types.own)
        held = terms_of(comm.nranks + 1, numel, types.result)[-1]
        data, output = tensor_of(terms[comm.rank], types.own), tensor_of(held, types.result)
        comm.reduce_scatter(output, data, accumulate=adds, **_named(types)).wait()
        parts = [term[comm.rank * numel : (comm.rank + 1) * numel] for term in terms]
        _assert_sum(output, _sum(parts, types, held if adds else None), types, comm.nranks)
        assert_same_bits(values_of(data), terms[comm.rank])


@_check
def all_reduce_rounds_terms_and_sum_and_agrees_bitwise(lanes: Lanes) -> None:
    comm = lanes["one"]
    for wire, numel in itertools.product(SHORT, [*SIZES, 2 * comm.nranks + 1]):
        types = Types("float32", wire, wire)
        terms = terms_of(comm.nranks, numel, "float32")
        tensor = tensor_of(terms[comm.rank], "float32")
        comm.all_reduce(tensor, wire_dtype=wire).wait()
        _assert_sum(tensor, _sum(terms, types), types, comm.nranks)
        assert_same_bits(values_of(tensor), rounded(values_of(tensor), wire))
        everyones = paddle.zeros([comm.nranks * numel])
        comm.all_gather(everyones, tensor).wait()
        assert len({row.tobytes() for row in everyones.numpy().reshape(comm.nranks, -1)}) == 1


@_check
def naming_what_travels_anyway_changes_nothing(lanes: Lanes) -> None:
    comm = lanes["one"]
    for dtype in ("float32", "float16", "bfloat16", "float64", "int32"):
        full = paddle.arange(comm.nranks * 1000).cast(dtype)
        own, total = full._slice(comm.rank * 1000, (comm.rank + 1) * 1000).clone(), full.clone()
        everyones, part = paddle.zeros([comm.nranks * 1000], dtype), paddle.zeros([1000], dtype)
        works = [
            comm.all_gather(everyones, own, wire_dtype=dtype),
            comm.reduce_scatter(part, full, wire_dtype=dtype),
            comm.all_reduce(total, wire_dtype=dtype),
        ]
        for work in works:
            work.wait()
            assert work.nbytes == comm.nranks * 1000 * full.element_size()
        expected = [values.cast("float64").numpy() for values in (full, own, full)]
        np.testing.assert_array_equal(everyones.cast("float64").numpy(), expected[0])
        for found, values in zip((part, total), expected[1:], strict=True):
            exact = paddle.to_tensor(values * comm.nranks).cast(dtype).cast("float64").numpy()
            np.testing.assert_array_equal(found.cast("float64").numpy(), exact)


@_check
def works_count_the_bytes_that_travel(lanes: Lanes) -> None:
    comm = lanes["two"]
    wide, part = paddle.zeros([comm.nranks * 8]), paddle.zeros([8])
    narrow, narrow_part = paddle.zeros([comm.nranks * 8], "float16"), paddle.zeros([8], "bfloat16")
    works = [
        comm.all_gather(narrow, part, label="g"),
        comm.all_gather(wide, narrow_part, label="g"),
        comm.all_gather(wide, part, label="g", wire_dtype="bfloat16"),
        comm.reduce_scatter(part, narrow, label="s"),
        comm.reduce_scatter(part, wide, label="s", wire_dtype="float16"),
        comm.all_reduce(wide, label="r", wire_dtype="float16"),
    ]
    for work in works:
        work.wait()
    assert [work.nbytes for work in works] == [comm.nranks * 16] * len(works)
    assert [work.label for work in works] == ["g", "g", "g", "s", "s", "r"]


@_check
def memory_lives_as_long_as_the_conversion(lanes: Lanes) -> None:
    comm = lanes["one"]
    numel, nranks = 200_000, comm.nranks
    for types in (Types("float32", "bfloat16", "float32"), Types("float32", "float16", "float16")):
        gate = lanes.gate()
        full, shard = paddle.zeros([nranks * numel], types.result), paddle.full([numel], 2.0)
        total, data = paddle.zeros([numel], types.result), paddle.full([nranks * numel], 2.0)
        both = paddle.full([numel], 2.0)
        works = [
            comm.all_gather(full, shard, after=gate, wire_dtype=types.wire),
            comm.reduce_scatter(total, data, wire_dtype=types.wire),
            comm.all_reduce(both, wire_dtype=types.wire),
        ]
        # The callers' objects take other memory, and whoever allocates next may get what they had.
        for tensor in (shard, data):
            tensor._clear_data()
        del shard, data
        gc.collect()
        noise = [paddle.full([nranks * numel], 9.0) for _ in range(8)]
        gate.open()
        for work in works:
            work.wait()
        for tensor, value in ((full, 2.0), (total, 2.0 * nranks), (both, 2.0 * nranks)):
            np.testing.assert_array_equal(values_of(tensor), np.full(tensor.shape, value, np.float32))
        assert len(noise) == 8


@_check
def conversions_that_cannot_be_are_refused(lanes: Lanes) -> None:
    comm = lanes["one"]
    n = comm.nranks
    wide, narrow, whole = paddle.zeros([n * 4]), paddle.zeros([n * 4], "float16"), paddle.zeros([n * 4], "int32")
    double, brain = paddle.zeros([4], "float64"), paddle.zeros([4], "bfloat16")
    part, narrow_part = paddle.zeros([4]), paddle.zeros([4], "float16")
    # Memory of both kinds, in which an input and an output begin at the same place.
    shared = paddle.zeros([n * 16], "float16")
    as_wide = shared.view("float32")
    for message, start in (
        ("wider", lambda: comm.all_gather(narrow, narrow_part, wire_dtype="float32")),
        ("wider", lambda: comm.all_gather(narrow, part, wire_dtype="float32")),
        ("wider", lambda: comm.all_gather(narrow, brain)),
        ("wider", lambda: comm.all_gather(wide, double)),
        ("wider", lambda: comm.all_gather(wide, paddle.zeros([4], "int32"))),
        ("wider", lambda: comm.all_gather(wide, part, wire_dtype="int8")),
        ("'short'", lambda: comm.all_gather(wide, part, wire_dtype="short")),
        ("wider", lambda: comm.reduce_scatter(narrow_part, wide)),
        ("wider", lambda: comm.reduce_scatter(brain, narrow)),
        ("wider", lambda: comm.reduce_scatter(paddle.zeros([4], "int32"), whole, wire_dtype="float16")),
        ("wider", lambda: comm.all_reduce(whole, wire_dtype="float16")),
        ("wider", lambda: comm.all_reduce(narrow, wire_dtype="bfloat16")),
        ("share memory", lambda: comm.all_gather(shared._slice(0, n * 4), as_wide._slice(0, 4))),
        ("share memory", lambda: comm.all_gather(as_wide._slice(0, n * 4), as_wide._slice(1, 5), wire_dtype="float16")),
        ("share memory", lambda: comm.reduce_scatter(as_wide._slice(0, 4), shared._slice(0, n * 4))),
        (
            "share memory",
            lambda: comm.reduce_scatter(as_wide._slice(0, 4), as_wide._slice(0, n * 4), wire_dtype="float16"),
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            start()
    comm.all_reduce(wide, wire_dtype="float16").wait()


@pytest.mark.parametrize("name", list(WIRE_CHECKS))
def test_group_of_one(name: str) -> None:
    lanes = Lanes(create_communicators([0], ["one", "two"]))
    WIRE_CHECKS[name](lanes)
    for comm in lanes.values():
        comm.close()


def test_the_reference_rounds_as_ieee_754_does() -> None:
    bits = {0x3F80_8000: 0x3F80, 0x3F81_8000: 0x3F82, 0x3F80_8001: 0x3F81, 0x7F7F_FFFF: 0x7F80, 0x8000_8000: 0x8000}
    found = rounded(np.array(list(bits), np.uint32).view(np.float32), "bfloat16")
    np.testing.assert_array_equal(found.view(np.uint32) >> 16, list(bits.values()))
