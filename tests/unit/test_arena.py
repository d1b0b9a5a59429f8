"""``GradientArena``: where the reduced gradients lie, and that each sum is divided exactly once."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from hp_sharding.arena import GradientArena
from hp_sharding.layout import BucketLayout, BucketRules, ParamSpec, plan_buckets


def _layouts(
    *sizes: int, nranks: int = 2, frozen: tuple[int, ...] = (), wide: tuple[int, ...] = ()
) -> list[BucketLayout]:
    """A bucket for each size in elements; those in ``frozen`` take no gradient, those in ``wide`` are float64."""
    specs = [
        ParamSpec(f"p{i}", numel, *(("float64", 8) if i in wide else ("float32", 4)), i, i in frozen)
        for i, numel in enumerate(sizes)
    ]
    return plan_buckets(specs, [f"u{i}" for i in range(len(sizes))], BucketRules(nranks, 1, False, False))


def _reduce_into(arena: GradientArena, bucket: int, value: float) -> None:
    """What the reducer does: asks, then overwrites or adds as told."""
    target, adds = arena.expect_sum(bucket)
    target.copy_(paddle.full(target.shape, value, target.dtype) + (target if adds else 0), False)


def _value(arena: GradientArena, bucket: int) -> float:
    found = np.unique(arena.slice(bucket).numpy())
    assert found.size == 1
    return float(found[0])


def test_slices_lie_in_backward_order_without_gaps() -> None:
    layouts = _layouts(300, 1, 700, 90)
    arena = GradientArena(layouts, 2.0)
    [tensor] = arena.tensors
    address = tensor.data_ptr()
    for layout in reversed(layouts):
        piece = arena.slice(layout.number)
        assert (piece.shape, piece.dtype) == ([layout.shard_numel], paddle.float32)
        assert piece.data_ptr() == address
        address += layout.shard_numel * 4
        assert layout.shard_numel * 4 % 512 == 0
    assert address == tensor.data_ptr() + tensor.size * 4
    assert (tensor.numpy() == 0).all()


def test_each_dtype_has_a_tensor_of_its_own() -> None:
    arena = GradientArena(_layouts(300, 300, 300, wide=(1,)), 1.0)
    assert [tensor.dtype for tensor in arena.tensors] == [paddle.float32, paddle.float64]
    assert arena.slice(0).data_ptr() == arena.slice(2).data_ptr() + 4 * arena.slice(2).size


def test_frozen_buckets_take_no_room_until_they_thaw() -> None:
    arena = GradientArena(_layouts(300, 300, frozen=(0,)), 1.0)
    assert [tensor.size for tensor in arena.tensors] == [256]
    arena.average([0, 1])
    arena.zero_unsummed()
    assert len(arena.tensors) == 1
    _reduce_into(arena, 0, 5.0)
    assert [tensor.size for tensor in arena.tensors] == [256, 256]
    assert _value(arena, 0) == 5
    assert _value(arena, 1) == 0
    assert arena.slice(0).data_ptr() == arena.tensors[1].data_ptr()


@pytest.mark.parametrize(("divisor", "expected"), [(4.0, 2.0), (1.0, 8.0), (0.5, 16.0)])
def test_a_sum_is_divided_once_however_often_it_is_asked_for(divisor: float, expected: float) -> None:
    arena = GradientArena(_layouts(300, 300), divisor)
    _reduce_into(arena, 0, 8.0)
    _reduce_into(arena, 1, 80.0)
    for _ in range(3):
        arena.average([0])
    assert (_value(arena, 0), _value(arena, 1)) == (expected, 80)
    arena.average([0, 1])
    assert (_value(arena, 0), _value(arena, 1)) == (expected, 10 * expected)


def test_a_second_reduction_adds_to_the_sum_and_both_are_divided_once() -> None:
    arena = GradientArena(_layouts(300), 4.0)
    _reduce_into(arena, 0, 8.0)
    _reduce_into(arena, 0, 8.0)
    arena.average([0])
    assert _value(arena, 0) == 4


def test_a_reduction_after_the_division_adds_to_the_sum_as_it_was() -> None:
    arena = GradientArena(_layouts(300), 4.0)
    _reduce_into(arena, 0, 8.0)
    arena.average([0])
    _reduce_into(arena, 0, 4.0)
    assert _value(arena, 0) == 12
    arena.average([0])
    assert _value(arena, 0) == 3


def test_without_a_sum_nothing_is_divided() -> None:
    arena = GradientArena(_layouts(300), 4.0)
    arena.slice(0).fill_(8.0)
    arena.average([0])
    assert _value(arena, 0) == 8


def test_after_clear_the_next_reduction_overwrites() -> None:
    arena = GradientArena(_layouts(300), 4.0)
    _reduce_into(arena, 0, 8.0)
    arena.average([0])
    arena.clear()
    assert not arena.expect_sum(0).accumulate
    assert _value(arena, 0) == 2, "neither zeroed nor multiplied: it is about to be overwritten"
    arena.slice(0).fill_(4.0)
    arena.average([0])
    assert _value(arena, 0) == 1


def test_buckets_without_a_sum_become_zero_and_others_stay() -> None:
    arena = GradientArena(_layouts(300, 300), 4.0)
    _reduce_into(arena, 0, 8.0)
    _reduce_into(arena, 1, 8.0)
    arena.zero_unsummed()
    assert (_value(arena, 0), _value(arena, 1)) == (8, 8)
    arena.clear()
    _reduce_into(arena, 1, 5.0)
    arena.zero_unsummed()
    assert (_value(arena, 0), _value(arena, 1)) == (0, 5)


def _replicate(arena: GradientArena, *buckets: int, n_replicas: int = 2) -> None:
    """What an all-reduce over replicas that hold the same values does."""
    arena.range(buckets).tensor.scale_(float(n_replicas))
    for bucket in buckets:
        arena.take_total(bucket)


def test_a_partial_sum_is_added_to_until_it_is_total() -> None:
    arena = GradientArena(_layouts(300, 300), 4.0, n_replicas=2)
    _reduce_into(arena, 0, 3.0)
    _reduce_into(arena, 0, 4.0)
    assert arena.partial() == [0]
    arena.average([0])
    assert _value(arena, 0) == 7, "not to be divided before it is total"
    _replicate(arena, 0)
    assert arena.partial() == []
    assert _value(arena, 0) == 14
    assert arena.spare_bytes == 0
    arena.average([0])
    assert _value(arena, 0) == 3.5


@pytest.mark.parametrize("averaged", [False, True])
def test_what_comes_after_a_total_is_summed_up_beside_it(averaged: bool) -> None:
    arena = GradientArena(_layouts(300, 300), 4.0, n_replicas=2)
    _reduce_into(arena, 0, 3.0)
    _replicate(arena, 0)
    if averaged:
        arena.average([0])
    _reduce_into(arena, 0, 1.0)
    assert _value(arena, 0) == (1.5 if averaged else 6)
    assert arena.spare_bytes == 2 * arena.slice(0).size * 4
    _reduce_into(arena, 0, 4.0)
    _replicate(arena, 0)
    assert _value(arena, 0) == 16
    for _ in range(2):
        arena.average([0])
    assert _value(arena, 0) == 4


def test_neighbours_are_one_range_in_either_place() -> None:
    arena = GradientArena(_layouts(300, 1, 700, 90), 1.0, n_replicas=2)
    for bucket in (3, 2, 1, 0):
        _reduce_into(arena, bucket, bucket + 1.0)
    assert arena.are_neighbours(3, 2)
    assert not arena.are_neighbours(2, 3)
    assert not arena.are_neighbours(3, 1)
    found = arena.range([2, 1])
    assert found.buckets == [2, 1]
    assert found.tensor.data_ptr() == arena.slice(2).data_ptr()
    assert found.tensor.size == arena.slice(2).size + arena.slice(1).size
    _replicate(arena, 3, 2)
    _reduce_into(arena, 3, 1.0)
    _reduce_into(arena, 2, 1.0)
    assert arena.are_neighbours(3, 2)
    assert not arena.are_neighbours(2, 1), "one lies in the second tensor, the other in the first"
    _replicate(arena, 3, 2)
    _replicate(arena, 1)
    assert [_value(arena, bucket) for bucket in (3, 2, 1)] == [10, 8, 4]


def test_dtypes_and_thawed_buckets_have_ranges_of_their_own() -> None:
    arena = GradientArena(_layouts(300, 300, 300, wide=(1,), frozen=(0,)), 1.0, n_replicas=2)
    for _ in range(2):
        for bucket in (2, 1, 0):
            _reduce_into(arena, bucket, 1.0)
        assert not arena.are_neighbours(2, 1)
        assert not arena.are_neighbours(2, 0)
        for bucket in (2, 1, 0):
            _replicate(arena, bucket)
    assert [_value(arena, bucket) for bucket in range(3)] == [4, 4, 4]


def test_a_part_is_zeroed_wherever_it_is() -> None:
    arena = GradientArena(_layouts(300), 1.0, n_replicas=2)
    _reduce_into(arena, 0, 3.0)
    _replicate(arena, 0)
    _reduce_into(arena, 0, 1.0)
    arena.zero_part(0, 0, arena.slice(0).size)
    _replicate(arena, 0)
    assert _value(arena, 0) == 0


def test_a_forgotten_sum_is_overwritten() -> None:
    arena = GradientArena(_layouts(300), 2.0, n_replicas=2)
    _reduce_into(arena, 0, 3.0)
    _replicate(arena, 0)
    arena.average([0])
    arena.forget(0)
    _reduce_into(arena, 0, 5.0)
    assert arena.spare_bytes == 0
    _replicate(arena, 0)
    assert _value(arena, 0) == 10


def test_a_partial_sum_is_not_taken_for_none() -> None:
    arena = GradientArena(_layouts(300, 300), 1.0, n_replicas=2)
    _reduce_into(arena, 0, 3.0)
    arena.zero_unsummed()
    assert _value(arena, 0) == 3


def test_after_clear_a_partial_sum_is_overwritten_too() -> None:
    arena = GradientArena(_layouts(300), 1.0, n_replicas=2)
    _reduce_into(arena, 0, 3.0)
    arena.clear()
    assert arena.partial() == []
    assert not arena.expect_sum(0).accumulate
