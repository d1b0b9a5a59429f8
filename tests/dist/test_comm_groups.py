"""Groups that Paddle itself makes do not collide, and neither do ours beside them."""

from __future__ import annotations

import paddle
import paddle.distributed as dist
import pytest

from hp_sharding.comm import collision_free_groups, create_communicators
from tests import harness


def _init_two_by_two(rank: int, nranks: int) -> list[float]:
    """Data groups {0, 2} and {1, 3}, sharding groups {0, 1} and {2, 3}: fleet makes them at the same time."""
    from paddle.distributed import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 2, "sharding_degree": 2}
    with collision_free_groups():
        fleet.init(is_collective=True, strategy=strategy)
    hcg = fleet.get_hybrid_communicate_group()
    sums = []
    for group in (hcg.get_data_parallel_group(), hcg.get_sharding_parallel_group()):
        value = paddle.full([3], float(rank))
        dist.all_reduce(value, group=group)
        sums.append(float(value[0]))
    sharding, data = hcg.get_sharding_parallel_group().ranks, hcg.get_data_parallel_group().ranks
    lanes = create_communicators(sharding, ["gather", "reduce"], timeout_s=60)
    lanes |= create_communicators(data, ["replicate"], timeout_s=60)
    value = paddle.full([3], float(rank))
    reduced = lanes["reduce"].all_reduce(value)
    lanes["replicate"].all_reduce(value, after=reduced).wait()
    return [*sums, float(value[0])]


def _assert_two_by_two() -> None:
    outcomes = harness.run(_init_two_by_two, 4, fresh=True, init=False, timeout_s=60)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        rank = outcome.rank
        replica, shard = rank // 2, rank % 2
        assert outcome.result == [2.0 * shard + 2.0, 4.0 * replica + 1.0, 6.0]
        assert outcome.returncode == 0, outcome.output


def test_fleet_comes_up_with_two_replicas_of_two_shards() -> None:
    _assert_two_by_two()


@pytest.mark.slow
def test_fleet_comes_up_every_time() -> None:
    for _ in range(5):
        _assert_two_by_two()


def _make_disjoint_groups(rank: int, nranks: int) -> list[float]:
    sums = []
    with collision_free_groups():
        for _ in range(3):
            for pairs in ([[0, 2], [1, 3]], [[0, 3], [1, 2]]):
                groups = [dist.new_group(pair, backend="gloo") for pair in pairs]
                mine = next(group for pair, group in zip(pairs, groups, strict=True) if rank in pair)
                value = paddle.full([2], float(rank))
                dist.all_reduce(value, group=mine)
                sums.append(float(value[0]))
    return sums


def test_disjoint_groups_made_at_the_same_time() -> None:
    for outcome in harness.run(_make_disjoint_groups, 4, fresh=True, timeout_s=60):
        assert outcome.error is None, outcome.error
        assert outcome.result == [[2.0, 3.0], [4.0, 3.0], [2.0, 3.0], [4.0, 3.0]][outcome.rank] * 3


def test_the_patch_goes_away() -> None:
    collective, parallel = dist.collective, dist.parallel
    before = collective._new_process_group_impl

    def fail_inside() -> None:
        with collision_free_groups():
            assert collective._new_process_group_impl is not before
            assert parallel._new_process_group_impl is collective._new_process_group_impl
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert collective._new_process_group_impl is before
    assert parallel._new_process_group_impl is before
