"""The backward pipeline, driven by hand: gradients come in one by one, lanes deliver only when waited for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_sharding.comm import Work
from hp_sharding.reduction import PUBLISH_ALWAYS_ROUNDS, PUBLISH_EVERY_ROUNDS
from tests.pipeline import NUMEL, Pipeline

# -- when a bucket is launched -----------------------------------------------------------------------------------------


def test_a_bucket_is_launched_with_its_last_gradient() -> None:
    pipe = Pipeline()
    pipe.reducer.arm()
    pipe.reducer.begin_backward()
    pipe.gradient(2, 0, 1.0)
    assert pipe.order() == []
    pipe.gradient(2, 1, 1.0)
    assert pipe.order() == [2]
    pipe.fill(1, 1.0)
    assert pipe.order() == [2, 1]
    pipe.reducer.end_backward()
    assert pipe.reduced() == ["2, backward 0", "1, backward 0", "0, backward 0"]


def test_without_overlap_all_wait_for_the_end() -> None:
    pipe = Pipeline(overlap=False)
    pipe.reducer.arm()
    pipe.reducer.begin_backward()
    for bucket in (2, 1, 0):
        pipe.fill(bucket, 1.0)
    assert pipe.order() == []
    pipe.reducer.end_backward()
    assert pipe.order() == [2, 1, 0]


def test_buckets_that_fill_up_out_of_order_are_launched_in_order() -> None:
    pipe = Pipeline(4)
    pipe.reducer.begin_backward()
    for bucket, launched in [(0, []), (2, []), (3, [3, 2]), (1, [3, 2, 1, 0])]:
        pipe.fill(bucket, 1.0)
        assert pipe.order() == launched


def test_a_bucket_held_back_waits_for_the_end_and_so_do_those_behind_it() -> None:
    pipe = Pipeline(4)
    pipe.reducer.arm()
    pipe.reducer.hold_back(2)
    pipe.reducer.begin_backward()
    for bucket in (3, 2, 1, 0):
        pipe.fill(bucket, 1.0)
    assert pipe.order() == [3]
    pipe.reducer.end_backward()
    assert pipe.order() == [3, 2, 1, 0]
    assert pipe.reducer.learned_order == [3, 1, 0, 2]


def test_what_is_held_back_is_learned_to_stand_last_behind_what_got_no_gradient() -> None:
    pipe = Pipeline(4)
    pipe.reducer.hold_back(2)
    pipe.backward({3: 1.0, 2: 1.0, 1: 1.0})
    assert pipe.reducer.learned_order == [3, 1, 0, 2]


def test_a_bucket_is_held_back_for_one_backward_only() -> None:
    pipe = Pipeline(2)
    pipe.reducer.hold_back(1)
    pipe.backward({1: 1.0, 0: 1.0})
    pipe.reducer.begin_backward()
    pipe.fill(1, 1.0)
    assert pipe.reduced()[2:] == ["1, backward 1"]


def test_tied_buckets_stand_last_and_always_wait_for_the_end() -> None:
    pipe = Pipeline(3, tied=[2])
    assert pipe.reducer.order == [1, 0, 2]
    for _ in range(2):
        before = len(pipe.order())
        pipe.reducer.arm()
        pipe.reducer.begin_backward()
        for bucket in (2, 1, 0):
            pipe.fill(bucket, 1.0)
        assert pipe.order()[before:] == [1, 0]
        pipe.reducer.end_backward()
        assert pipe.order()[before:] == [1, 0, 2]


def test_buckets_without_gradients_are_reduced_all_the_same() -> None:
    """Another rank may have gradients for them."""
    pipe = Pipeline(3)
    pipe.backward({1: 5.0})
    assert pipe.order() == [2, 1, 0]
    assert [pipe.sums(bucket) for bucket in range(3)] == [[0, 0], [5, 5], [0, 0]]
    assert pipe.reducer.used == [[False, False], [True, True], [False, False]]


def test_a_parameter_without_a_gradient_is_zero_and_not_used() -> None:
    pipe = Pipeline(1)
    pipe.reducer.begin_backward()
    pipe.gradient(0, 1, 3.0)
    assert pipe.order() == []
    pipe.reducer.end_backward()
    assert pipe.sums(0) == [0, 3]
    assert pipe.reducer.used == [[False, True]]


def test_frozen_buckets_take_no_part() -> None:
    pipe = Pipeline(2)
    for param in pipe.buffers[1].params:
        param.stop_gradient = True
    pipe.backward({0: 1.0})
    assert pipe.order() == [0]
    for param in pipe.buffers[1].params:
        param.stop_gradient = False
    pipe.backward({1: 1.0, 0: 1.0})
    assert pipe.order() == [0, 1, 0]


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_what_was_frozen_since_wait_until_it_thaws(stage: int) -> None:
    """Whether a rank holds any may differ from rank to rank."""
    pipe = Pipeline(2, stage=stage)
    pipe.reducer.sync = False
    pipe.backward({1: 1.0, 0: 1.0})
    pipe.reducer.sync = True
    for param in pipe.buffers[1].params:
        param.stop_gradient = True
    pipe.backward({0: 10.0})
    assert pipe.order() == [0]
    for param in pipe.buffers[1].params:
        param.stop_gradient = False
    pipe.backward({1: 100.0, 0: 100.0})
    assert (pipe.sums(1), pipe.sums(0)) == ([101, 101], [111, 111])


def test_a_backward_of_something_else_sends_nothing() -> None:
    pipe = Pipeline()
    pipe.reducer.begin_backward()
    pipe.reducer.end_backward()
    assert pipe.log == []
    pipe.reducer.arm()
    pipe.reducer.begin_backward()
    pipe.reducer.end_backward()
    assert len(pipe.order()) == 3, "a forward of the model was differentiated: peers may have gradients"


@pytest.mark.parametrize("nranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_arena_holds_this_ranks_shard_of_the_sum(nranks: int, stage: int) -> None:
    rank = nranks // 2
    pipe = Pipeline(2, stage=stage, nranks=nranks, rank=rank)
    pipe.backward({1: 2.0, 0: 4.0})
    pipe.reducer.settle()
    for bucket, value in [(1, 2.0), (0, 4.0)]:
        pipe.reducer.wait(bucket)
        pieces = pipe.buffers[bucket].layout.pieces(rank)
        assert pieces
        for piece in pieces:
            start = piece.shard_offset_numel
            part = pipe.arena.slice(bucket)._slice(start, start + piece.numel)
            assert (part.numpy() == nranks * value).all()


# -- who waits for what ------------------------------------------------------------------------------------------------


def test_a_sum_that_nobody_waited_for_is_not_there() -> None:
    """What makes the other tests able to fail."""
    pipe = Pipeline(1)
    pipe.backward({0: 1.0})
    assert np.isnan(pipe.arena.slice(0).numpy()).all()
    assert not pipe.reducer.is_reduced(0)
    pipe.reducer.wait(0)
    assert pipe.reducer.is_reduced(0)
    assert not np.isnan(pipe.arena.slice(0).numpy()).any()
    pipe.reducer.wait(0)


def test_ten_buckets_never_hold_more_than_two_full_gradients() -> None:
    pipe = Pipeline(10)
    pipe.pool.allocated_bytes = 0
    bucket_bytes = pipe.buffers[0].layout.nbytes
    for _ in range(3):
        pipe.reducer.begin_backward()
        for bucket in reversed(range(10)):
            pipe.fill(bucket, 1.0)
            assert pipe.reduce.n_pending <= 2
        pipe.reducer.end_backward()
    assert pipe.pool.allocated_bytes <= 2 * bucket_bytes


def test_without_sync_nobody_waits_for_an_earlier_reduction() -> None:
    pipe = Pipeline(4)
    pipe.backward(dict.fromkeys((3, 2, 1, 0), 1.0))
    under_way = pipe.reduce.n_pending
    assert under_way == 2
    pipe.reducer.sync = False
    pipe.backward(dict.fromkeys((3, 2, 1, 0), 1.0))
    assert pipe.reduce.n_pending == under_way


def test_gradients_that_fill_up_at_once_are_not_waited_for() -> None:
    """Out of order, three buckets fill at a time: nothing is under way whose end would give one of them back."""
    pipe = Pipeline(4)
    pipe.reducer.begin_backward()
    for bucket in (0, 1, 2):
        pipe.fill(bucket, 1.0)
    assert pipe.order() == []
    pipe.fill(3, 1.0)
    pipe.reducer.end_backward()
    assert [pipe.sums(bucket) for bucket in range(4)] == [[1, 1]] * 4


def test_in_stage_1_the_full_gradient_stays_where_users_look() -> None:
    pipe = Pipeline(2, stage=1)
    pipe.backward({1: 2.0, 0: 3.0})
    assert [(param.grad.numpy() == value).all() for param, value in zip(pipe.params, [3, 3, 2, 2], strict=True)]
    address = pipe.params[0].grad.data_ptr()
    pipe.backward({1: 20.0, 0: 30.0})
    assert (pipe.params[0].grad.numpy() == 33).all()
    assert pipe.params[0].grad.data_ptr() == address
    pipe.reducer.clear(set_to_zero=True)
    assert all(param.grad is None for param in pipe.params)


def test_in_stage_2_no_gradient_stays() -> None:
    pipe = Pipeline(2)
    pipe.backward({1: 2.0, 0: 3.0})
    assert all(param.grad is None for param in pipe.params)
    assert all(buffer.gradient.full is None for buffer in pipe.buffers)


# -- accumulation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
def test_a_later_backward_adds_to_the_sum(stage: int) -> None:
    pipe = Pipeline(2, stage=stage)
    pipe.backward({1: 1.0, 0: 2.0})
    pipe.backward({1: 10.0, 0: 20.0})
    pipe.backward({1: 100.0})
    assert pipe.sums(1) == [111, 111]
    assert pipe.sums(0) == [22, 22]
    pipe.reducer.clear(set_to_zero=True)
    pipe.backward({1: 5.0, 0: 6.0})
    assert (pipe.sums(1), pipe.sums(0)) == ([5, 5], [6, 6])


@pytest.mark.parametrize("stage", [1, 2])
def test_without_sync_nothing_is_sent_and_the_sum_goes_once(stage: int) -> None:
    pipe = Pipeline(2, stage=stage)
    pipe.reducer.sync = False
    pipe.backward({1: 1.0, 0: 2.0})
    pipe.backward({1: 10.0})
    assert pipe.log == []
    pipe.reducer.sync = True
    pipe.backward({0: 20.0})
    assert pipe.reduced() == ["1, backward 0", "0, backward 0"]
    assert (pipe.sums(1), pipe.sums(0)) == ([11, 11], [22, 22])


def test_without_sync_all_full_gradients_stay() -> None:
    pipe = Pipeline(5)
    pipe.reducer.sync = False
    pipe.backward(dict.fromkeys(reversed(range(5)), 1.0))
    assert all(buffer.gradient.full is not None for buffer in pipe.buffers)


@pytest.mark.parametrize("stage", [1, 2])
def test_leftovers_are_reduced_once_when_step_asks(stage: int) -> None:
    pipe = Pipeline(2, stage=stage)
    pipe.reducer.reduce_leftovers()
    assert pipe.log == []
    pipe.reducer.sync = False
    pipe.backward({1: 1.0, 0: 2.0})
    pipe.reducer.sync = True
    pipe.reducer.reduce_leftovers()
    pipe.reducer.reduce_leftovers()
    assert pipe.order() == [1, 0]
    assert (pipe.sums(1), pipe.sums(0)) == ([1, 1], [2, 2])


@pytest.mark.parametrize("stage", [1, 2])
def test_an_average_is_undone_before_more_is_added(stage: int) -> None:
    pipe = Pipeline(1, stage=stage, nranks=2)
    pipe.backward({0: 1.0})
    pipe.reducer.wait(0)
    pipe.arena.average([0])
    pipe.backward({0: 10.0})
    pipe.reducer.wait(0)
    pipe.arena.average([0])
    assert set(pipe.arena.slice(0).numpy()[:NUMEL]) == {11.0}


# -- a gradient that comes in twice ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradient_after_the_launch_is_reduced_once_more(stage: int) -> None:
    pipe = Pipeline(2, stage=stage)
    # In stage 1 autograd adds in place to what is being read. That sum is worth nothing, and the second replaces it.
    pipe.reduce.checks_inputs = stage == 2
    pipe.reducer.begin_backward()
    pipe.fill(1, 1.0)
    assert pipe.order() == [1]
    pipe.gradient(1, 0, 10.0)
    pipe.fill(0, 2.0)
    pipe.reducer.end_backward()
    assert pipe.order() == [1, 0]
    pipe.reducer.settle()
    assert pipe.order() == [1, 0, 1]
    assert (pipe.sums(1), pipe.sums(0)) == ([11, 1], [2, 2])


def test_from_then_on_such_a_bucket_waits_for_the_end() -> None:
    pipe = Pipeline(2)
    pipe.reducer.begin_backward()
    pipe.fill(1, 1.0)
    pipe.gradient(1, 0, 10.0)
    pipe.fill(0, 2.0)
    pipe.reducer.end_backward()
    pipe.reducer.settle()
    assert pipe.reducer.learned_order == [0, 1]
    pipe.reducer.arm()
    pipe.reducer.begin_backward()
    pipe.fill(1, 1.0)
    pipe.fill(0, 1.0)
    assert len(pipe.order()) == 3
    pipe.reducer.end_backward()
    pipe.reducer.settle()
    assert len(pipe.order()) == 5


def test_a_gradient_that_comes_twice_before_the_launch_is_added_up() -> None:
    pipe = Pipeline(1)
    pipe.reducer.begin_backward()
    pipe.gradient(0, 0, 1.0)
    pipe.gradient(0, 0, 10.0)
    assert pipe.order() == [], "counted twice"
    pipe.gradient(0, 1, 5.0)
    pipe.reducer.end_backward()
    assert pipe.sums(0) == [11, 5]


# -- orders ----------------------------------------------------------------------------------------------------------


def test_the_order_in_which_buckets_fill_up_is_learned_and_adopted() -> None:
    pipe = Pipeline(4)
    pipe.backward({1: 1.0, 3: 1.0, 0: 1.0})
    learned = pipe.reducer.learned_order
    assert learned == [1, 3, 0, 2]
    assert pipe.reducer.order == [3, 2, 1, 0], "not before it is agreed"
    pipe.reducer.adopt_order([1, 3, 0, 2])
    assert pipe.reducer.learned_order is None
    pipe.reducer.begin_backward()
    pipe.fill(1, 1.0)
    assert pipe.order()[4:] == [1]
    pipe.fill(3, 1.0)
    pipe.fill(0, 1.0)
    pipe.reducer.end_backward()
    assert pipe.order()[4:] == [1, 3, 0, 2]
    assert pipe.reducer.learned_order is None


def test_only_rank_0_publishes() -> None:
    for rank, wants in [(0, True), (1, False)]:
        pipe = Pipeline(2, nranks=2, rank=rank)
        pipe.backward({0: 1.0, 1: 1.0})
        assert pipe.reducer.learned_order == [0, 1]
        assert pipe.reducer.settle() is wants


def test_an_order_that_stays_is_not_published() -> None:
    pipe = Pipeline(2)
    pipe.backward({1: 1.0, 0: 1.0})
    assert pipe.reducer.settle() is False
    pipe.reducer.gather_order_changed = True
    pipe.backward({1: 1.0, 0: 1.0})
    assert pipe.reducer.settle() is True


def test_an_order_that_changes_all_the_time_is_published_now_and_then() -> None:
    pipe = Pipeline(2)
    published = []
    for number in range(PUBLISH_EVERY_ROUNDS + 2):
        pipe.backward({0: 1.0, 1: 1.0})
        if pipe.reducer.settle():
            published.append(number)
            assert pipe.reducer.settle(), "whoever settles first may not be the one who publishes"
            pipe.reducer.adopt_order(pipe.reducer.order)
        pipe.reducer.clear(set_to_zero=True)
    assert published == [*range(PUBLISH_ALWAYS_ROUNDS), PUBLISH_EVERY_ROUNDS]


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("filled", [[], [2], [2, 1], [0], [2, 1, 0]])
def test_clear_completes_the_round_of_a_failed_backward(stage: int, filled: list[int]) -> None:
    """Ranks on which the same backward went well have reduced every bucket once, and so must this one."""
    pipe = Pipeline(3, stage=stage)
    pipe.abort(filled)
    pipe.reducer.clear(set_to_zero=True)
    assert pipe.order() == [2, 1, 0]
    assert len(pipe.agree.labels("all_reduce")) == 1
    assert pipe.reduce.n_pending == 0
    pipe.reducer.clear(set_to_zero=True)
    assert len(pipe.order()) == 3
    pipe.backward({2: 1.0, 1: 2.0, 0: 3.0})
    assert [pipe.sums(bucket) for bucket in (2, 1, 0)] == [[1, 1], [2, 2], [3, 3]]


def test_a_failed_backward_of_something_else_is_not_ours() -> None:
    pipe = Pipeline(1)
    pipe.reducer.begin_backward()
    pipe.reducer.abort_backward()
    pipe.reducer.clear(set_to_zero=True)
    assert pipe.log == []


def test_a_failure_without_sync_sends_nothing() -> None:
    pipe = Pipeline(2)
    pipe.reducer.sync = False
    pipe.abort([1])
    pipe.reducer.sync = True
    pipe.reducer.clear(set_to_zero=True)
    assert pipe.log == []
    pipe.backward({1: 1.0, 0: 1.0})
    assert pipe.sums(1) == [1, 1]


@pytest.mark.parametrize("set_to_zero", [True, False])
def test_clear_forgets_who_was_used_as_paddle_does(set_to_zero: bool) -> None:
    pipe = Pipeline(1)
    pipe.backward({0: 1.0})
    pipe.reducer.clear(set_to_zero)
    assert pipe.reducer.used == [[set_to_zero, set_to_zero]]


def test_after_clear_a_backward_of_something_else_sends_nothing() -> None:
    pipe = Pipeline(2)
    pipe.reducer.arm()  # a forward that raised
    pipe.reducer.clear(set_to_zero=True)
    pipe.reducer.begin_backward()
    pipe.reducer.end_backward()
    assert pipe.log == []


def test_clear_waits_for_what_is_under_way() -> None:
    pipe = Pipeline(2)
    pipe.backward({1: 1.0, 0: 1.0})
    pipe.reducer.clear(set_to_zero=True)
    assert (pipe.reduce.n_pending, pipe.agree.n_pending) == (0, 0)


def test_clear_without_sync_gives_the_gradients_up() -> None:
    pipe = Pipeline(2)
    pipe.reducer.sync = False
    pipe.backward({1: 1.0, 0: 1.0})
    pipe.reducer.clear(set_to_zero=True)
    pipe.reducer.sync = True
    pipe.reducer.reduce_leftovers()
    assert pipe.log == []
    pipe.backward({1: 2.0, 0: 2.0})
    assert pipe.sums(1) == [2, 2]


def test_a_work_under_way_is_a_work_of_the_interface() -> None:
    pipe = Pipeline(1)
    pipe.backward({0: 1.0})
    work: Any = pipe.reducer._works[0]
    assert isinstance(work, Work)
    assert (work.op, work.lane, work.label) == ("reduce_scatter", "reduce", "0:b0, backward 0")
    assert work.nbytes == pipe.buffers[0].layout.nbytes
