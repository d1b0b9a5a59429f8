"""The arithmetic of buckets, over random models."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_sharding.layout import (
    ALIGNMENT_BYTES,
    TAPER,
    BucketLayout,
    BucketRules,
    ParamSpec,
    model_state_bytes,
    plan_buckets,
    round_up,
)

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@st.composite
def _models(draw: st.DrawFn) -> list[ParamSpec]:
    """Parameters in registration order: units may nest, so that a unit's parameters need not be neighbours."""
    n_units = draw(st.integers(1, 6))
    sizes = st.one_of(st.integers(1, 40), st.integers(1, 3000))
    raw = draw(
        st.lists(
            st.tuples(sizes, st.sampled_from(sorted(_ITEMSIZES)), st.integers(0, n_units - 1), st.booleans()),
            min_size=1,
            max_size=14,
        )
    )
    return [
        ParamSpec(f"p{index}", numel, dtype, _ITEMSIZES[dtype], unit, frozen)
        for index, (numel, dtype, unit, frozen) in enumerate(raw)
    ]


_RULES = st.builds(
    BucketRules,
    nranks=st.integers(1, 8),
    buffer_bytes=st.sampled_from([1, 512, 2048, 5000, 16384, 10**6]),
    fusion=st.booleans(),
    merge_units=st.booleans(),
)


def _plan(params: Sequence[ParamSpec], rules: BucketRules) -> list[BucketLayout]:
    return plan_buckets(params, [f"unit{unit}" for unit in range(6)], rules)


def _aligned_bytes(spec: ParamSpec) -> int:
    return round_up(spec.numel * spec.itemsize, ALIGNMENT_BYTES)


@given(_models(), _RULES)
@settings(max_examples=60, deadline=None)
def test_every_element_lies_in_exactly_one_shard(params: list[ParamSpec], rules: BucketRules) -> None:
    seen: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(params))}
    for bucket in _plan(params, rules):
        for rank in range(rules.nranks):
            shard_end = 0
            for piece in bucket.pieces(rank):
                slot = bucket.slots[piece.slot]
                assert piece.numel > 0
                assert shard_end <= piece.shard_offset_numel
                shard_end = piece.shard_offset_numel + piece.numel
                assert shard_end <= bucket.shard_numel
                in_bucket = rank * bucket.shard_numel + piece.shard_offset_numel
                assert in_bucket == slot.offset_numel + piece.param_offset_numel
                seen[slot.param].append((piece.param_offset_numel, piece.param_offset_numel + piece.numel))
    for index, ranges in seen.items():
        ranges.sort()
        assert [0, *(end for _, end in ranges)] == [*(start for start, _ in ranges), params[index].numel]


@given(_models(), _RULES)
@settings(max_examples=60, deadline=None)
def test_slots_and_shards_are_aligned_and_only_the_end_is_padded(params: list[ParamSpec], rules: BucketRules) -> None:
    for bucket in _plan(params, rules):
        assert bucket.shard_numel * bucket.itemsize % 512 == 0
        assert bucket.shard_numel * rules.nranks == bucket.numel
        end = 0
        for slot in bucket.slots:
            assert slot.offset_numel * bucket.itemsize == round_up(end * bucket.itemsize, ALIGNMENT_BYTES)
            end = slot.end_numel
        assert bucket.numel * bucket.itemsize == round_up(end * bucket.itemsize, rules.nranks * ALIGNMENT_BYTES)


@given(_models(), _RULES)
@settings(max_examples=40, deadline=None)
def test_gaps_are_what_the_slots_leave(params: list[ParamSpec], rules: BucketRules) -> None:
    for bucket in _plan(params, rules):
        covered = sorted([*bucket.gaps(), *((slot.offset_numel, slot.end_numel) for slot in bucket.slots)])
        assert all(start < end for start, end in covered)
        assert [0, *(end for _, end in covered)] == [*(start for start, _ in covered), bucket.numel]


@given(_models(), _RULES)
@settings(max_examples=40, deadline=None)
def test_a_bucket_is_of_one_dtype_and_frozen_parameters_stand_apart(
    params: list[ParamSpec], rules: BucketRules
) -> None:
    for number, bucket in enumerate(_plan(params, rules)):
        members = [params[slot.param] for slot in bucket.slots]
        assert bucket.number == number
        assert {(spec.dtype, spec.itemsize, spec.frozen) for spec in members} == {
            (bucket.dtype, bucket.itemsize, bucket.frozen)
        }
        assert [slot.numel for slot in bucket.slots] == [spec.numel for spec in members]
        assert list(bucket.units) == list(dict.fromkeys(spec.unit for spec in members))


@given(_models(), _RULES)
@settings(max_examples=60, deadline=None)
def test_a_unit_is_split_only_where_it_exceeds_a_bucket(params: list[ParamSpec], rules: BucketRules) -> None:
    buckets = _plan(params, rules._replace(fusion=True))
    for dtype in _ITEMSIZES:
        for frozen in (False, True):
            for unit in range(6):
                members = [
                    index
                    for index, spec in enumerate(params)
                    if (spec.dtype, spec.frozen, spec.unit) == (dtype, frozen, unit)
                ]
                holders = {b.number for b in buckets for slot in b.slots if slot.param in members}
                limit_bytes = rules.buffer_bytes // (TAPER if rules.merge_units else 1)
                fits = sum(_aligned_bytes(params[index]) for index in members) <= limit_bytes
                assert len(holders) <= 1 or not fits


@given(_models(), _RULES)
@settings(max_examples=60, deadline=None)
def test_a_bucket_exceeds_the_buffer_only_for_one_large_parameter(params: list[ParamSpec], rules: BucketRules) -> None:
    for bucket in _plan(params, rules._replace(fusion=True)):
        used_bytes = sum(_aligned_bytes(params[slot.param]) for slot in bucket.slots)
        assert used_bytes <= rules.buffer_bytes or len(bucket.slots) == 1


@given(_models(), _RULES)
@settings(max_examples=30, deadline=None)
def test_without_fusion_every_parameter_stands_alone(params: list[ParamSpec], rules: BucketRules) -> None:
    buckets = _plan(params, rules._replace(fusion=False))
    assert [slot.param for bucket in buckets for slot in bucket.slots] == list(range(len(params)))
    assert [bucket.name for bucket in buckets] == [f"{index}:p{index}" for index in range(len(params))]


@given(_models(), _RULES)
@settings(max_examples=40, deadline=None)
def test_the_order_follows_registration_and_never_the_number_of_ranks(
    params: list[ParamSpec], rules: BucketRules
) -> None:
    buckets = _plan(params, rules)
    firsts = [bucket.slots[0].param for bucket in buckets]
    assert firsts == sorted(firsts)
    for bucket in buckets:
        for unit in bucket.units:
            members = [slot.param for slot in bucket.slots if params[slot.param].unit == unit]
            assert members == sorted(members)
    one = _plan(params, rules._replace(nranks=1))
    assert [bucket.slots for bucket in one] == [bucket.slots for bucket in buckets]


def _equal_units(n_units: int, unit_bytes: int) -> list[ParamSpec]:
    return [ParamSpec(f"p{unit}", unit_bytes // 4, "float32", 4, unit, False) for unit in range(n_units)]


def test_merged_buckets_taper_from_the_buffer_to_a_quarter_of_it() -> None:
    buckets = plan_buckets(
        _equal_units(30, 512), [f"unit{unit}" for unit in range(30)], BucketRules(2, 512 * 8, True, True)
    )
    assert [len(bucket.slots) for bucket in buckets] == [2, 2, 4, 8, 7, 3, 2, 2]
    assert [bucket.name for bucket in buckets[:2]] == ["0:unit0..unit1", "1:unit2..unit3"]


def test_units_do_not_merge_unless_asked() -> None:
    rules = BucketRules(2, 512 * 8, fusion=True, merge_units=False)
    assert [bucket.name for bucket in _plan(_equal_units(5, 512), rules)] == [f"{unit}:p{unit}" for unit in range(5)]


def test_a_large_unit_between_small_ones_keeps_its_buckets_to_itself() -> None:
    sizes = [(0, 512), (1, 4096), (1, 2048), (1, 2048), (1, 9000), (2, 512), (3, 512)]
    params = [ParamSpec(f"p{i}", size // 4, "float32", 4, unit, False) for i, (unit, size) in enumerate(sizes)]
    buckets = _plan(params, BucketRules(1, 4096, True, True))
    assert [[slot.param for slot in bucket.slots] for bucket in buckets] == [[0], [1], [2, 3], [4], [5, 6]]
    assert [bucket.units for bucket in buckets] == [(0,), (1,), (1,), (1,), (2, 3)]


@pytest.mark.parametrize(("value", "rounded"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_round_up(value: int, rounded: int) -> None:
    assert round_up(value, 512) == rounded


def test_bytes_of_model_state_follow_the_formula() -> None:
    """1024 trained and 256 frozen float32 elements over two ranks, moments of 8 bytes an element."""
    params = [ParamSpec("a", 1024, "float32", 4, 0, False), ParamSpec("b", 256, "float32", 4, 0, True)]
    buckets = _plan(params, BucketRules(2, 10**6, True, True))
    first = model_state_bytes(buckets, 1, keeps_full=True, moment_bytes=8)
    assert first._asdict() == {
        "parameters": 4 * 1280, "gradients": 4 * 1024, "gradient_shard": 4 * 512, "shard": 0, "moments": 8 * 512,
    }  # fmt: skip
    assert first.total == 4 * 1280 + 4 * 1024 + 4 * 512 + 8 * 512
    second = model_state_bytes(buckets, 2, keeps_full=True, moment_bytes=8)
    assert second == first, "the only bucket is in flight"
    split = _plan([ParamSpec(f"p{i}", 512, "float32", 4, i, False) for i in range(4)], BucketRules(2, 1, True, False))
    assert model_state_bytes(split, 2, keeps_full=True, moment_bytes=8).gradients == 2 * 4 * 512
    freed = model_state_bytes(buckets, 2, keeps_full=False, moment_bytes=8)
    assert freed == second._replace(shard=4 * 640)
