"""Sums over the replicas: which share an all-reduce, when it starts, and that none is lost or counted twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.pipeline import Pipeline

SHARD_BYTES = 2048
"""Of a bucket of the pipeline: two parameters of 200 float32 elements, each aligned to 512 bytes."""


def _all_reduces(pipe: Pipeline) -> list[str]:
    return pipe.replicate.labels("all_reduce")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("replicate_bytes", "expected"),
    [
        (1, ["2:b2", "1:b1", "0:b0"]),
        (SHARD_BYTES, ["2:b2", "1:b1", "0:b0"]),
        (2 * SHARD_BYTES, ["2:b2 to 1:b1", "0:b0"]),
        (2 * SHARD_BYTES + 1, ["2:b2 to 1:b1", "0:b0"]),
        (3 * SHARD_BYTES, ["2:b2 to 0:b0"]),
        (10**9, ["2:b2 to 0:b0"]),
    ],
)
def test_neighbours_share_an_all_reduce(replicate_bytes: int, expected: list[str], overlap: bool) -> None:
    pipe = Pipeline(3, n_replicas=2, replicate_bytes=replicate_bytes, overlap=overlap)
    pipe.backward({2: 1.0, 1: 2.0, 0: 3.0})
    assert _all_reduces(pipe) == expected
    assert [pipe.sums(bucket) for bucket in range(3)] == [[6, 6], [4, 4], [2, 2]]
    assert pipe.replicate.n_pending == 0


def test_every_range_begins_empty() -> None:
    pipe = Pipeline(4, n_replicas=2, replicate_bytes=2 * SHARD_BYTES)
    pipe.backward({3: 1.0, 2: 1.0, 1: 1.0, 0: 1.0})
    assert _all_reduces(pipe) == ["3:b3 to 2:b2", "1:b1 to 0:b0"]


def test_an_all_reduce_starts_while_backward_goes_on() -> None:
    pipe = Pipeline(3, n_replicas=2, replicate_bytes=SHARD_BYTES)
    pipe.reducer.arm()
    pipe.reducer.begin_backward()
    pipe.fill(2, 1.0)
    assert _all_reduces(pipe) == ["2:b2"]
    assert pipe.replicate.n_pending == 1, "nobody has waited"
    pipe.fill(1, 1.0)
    pipe.fill(0, 1.0)
    pipe.reducer.end_backward()
    launches = [event.lane for event in pipe.log if event.what == "start" and event.lane != "gather"]
    assert launches == ["reduce", "replicate"] * 3


def test_a_reduction_and_the_all_reduce_of_the_bucket_before_are_under_way_together() -> None:
    pipe = Pipeline(3, n_replicas=2, replicate_bytes=SHARD_BYTES)
    pipe.reducer.arm()
    pipe.reducer.begin_backward()
    pipe.fill(2, 1.0)
    pipe.fill(1, 1.0)
    delivered = {event.label.partition(",")[0] for event in pipe.log if event.what == "deliver"}
    assert "1:b1" not in delivered, "the reduce-scatter of bucket 1 ..."
    assert _all_reduces(pipe)[0] == "2:b2"
    assert pipe.replicate.n_pending == 2, "... while the all-reduce of bucket 2 is under way, and its own waits for it"
    assert pipe.reduce.n_pending >= 1


def test_what_is_not_next_to_it_goes_alone() -> None:
    pipe = Pipeline(3, n_replicas=2, replicate_bytes=10**9, tied=[1])
    pipe.backward({2: 1.0, 1: 2.0, 0: 3.0})
    assert pipe.order() == [2, 0, 1]
    assert _all_reduces(pipe) == ["2:b2", "0:b0", "1:b1"]
    assert [pipe.sums(bucket) for bucket in range(3)] == [[6, 6], [4, 4], [2, 2]]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("n_backwards", [2, 3])
@pytest.mark.parametrize("wait", [False, True])
def test_backwards_add_up(wait: bool, n_backwards: int, stage: int) -> None:
    pipe = Pipeline(2, n_replicas=3, stage=stage, replicate_bytes=10**9)
    for _ in range(n_backwards):
        pipe.backward({1: 1.0, 0: 10.0})
        if wait:
            pipe.sums(0), pipe.sums(1)
    assert (pipe.sums(1), pipe.sums(0)) == ([3 * n_backwards] * 2, [30 * n_backwards] * 2)
    assert (pipe.arena.spare_bytes > 0) == (stage == 2), "stage 1 keeps the sum in the full gradient"


def _replicate_last(pipe: Pipeline, n: int, *, first_is_total: bool = False) -> None:
    if first_is_total:
        pipe.backward({1: 1.0, 0: 10.0})
    pipe.reducer.replicate = False
    for _ in range(n):
        pipe.backward({1: 1.0, 0: 10.0})
    pipe.reducer.replicate = True


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("first_is_total", [False, True])
def test_only_the_last_of_several_backwards_is_replicated(first_is_total: bool, stage: int) -> None:
    pipe = Pipeline(2, n_replicas=3, stage=stage, replicate_bytes=10**9)
    _replicate_last(pipe, 2, first_is_total=first_is_total)
    before = len(_all_reduces(pipe))
    assert before == first_is_total
    pipe.backward({1: 1.0, 0: 10.0})
    assert len(_all_reduces(pipe)) == before + 1
    n = 4 if first_is_total else 3
    assert (pipe.sums(1), pipe.sums(0)) == ([3 * n] * 2, [30 * n] * 2)
    assert (pipe.arena.spare_bytes > 0) == (first_is_total and stage == 2)


@pytest.mark.parametrize("finish", [lambda pipe: pipe.reducer.reduce_leftovers()])
@pytest.mark.parametrize("stage", [1, 2])
def test_what_was_never_replicated_is_before_a_step(stage: int, finish: Callable[[Pipeline], None]) -> None:
    pipe = Pipeline(2, n_replicas=3, stage=stage, replicate_bytes=10**9)
    _replicate_last(pipe, 2)
    finish(pipe)
    assert _all_reduces(pipe) == ["1:b1 to 0:b0"]
    assert (pipe.sums(1), pipe.sums(0)) == ([6, 6], [60, 60])
    finish(pipe)
    assert len(_all_reduces(pipe)) == 1, "once"


def test_before_a_step_nothing_is_replicated_twice() -> None:
    pipe = Pipeline(2, n_replicas=2, replicate_bytes=10**9)
    pipe.backward({1: 1.0, 0: 2.0})
    pipe.reducer.reduce_leftovers()
    assert _all_reduces(pipe) == ["1:b1 to 0:b0"]
    assert (pipe.sums(1), pipe.sums(0)) == ([2, 2], [4, 4])


def test_a_repeat_is_replicated_too() -> None:
    pipe = Pipeline(2, n_replicas=2, replicate_bytes=10**9)
    pipe.backward({1: 1.0, 0: 2.0})
    pipe.peers_say(repeats=[0])
    assert (pipe.sums(1), pipe.sums(0)) == ([2, 2], [4, 4])
    assert _all_reduces(pipe) == ["1:b1 to 0:b0", "0:b0"]


@pytest.mark.parametrize("filled", [[], [2], [2, 1]])
def test_after_a_failed_backward_the_round_is_completed(filled: list[int]) -> None:
    """The other ranks have launched all of theirs, in the same ranges."""
    pipe = Pipeline(3, n_replicas=2, replicate_bytes=2 * SHARD_BYTES)
    pipe.abort(filled)
    pipe.reducer.clear(set_to_zero=False)
    assert _all_reduces(pipe) == ["2:b2 to 1:b1", "0:b0"]
    assert pipe.replicate.n_pending == 0
    pipe.backward({2: 1.0, 1: 2.0, 0: 3.0})
    assert [pipe.sums(bucket) for bucket in range(3)] == [[6, 6], [4, 4], [2, 2]]


def test_a_cleared_gradient_is_gone() -> None:
    pipe = Pipeline(2, n_replicas=2, replicate_bytes=10**9)
    pipe.backward({1: 1.0, 0: 2.0})
    pipe.reducer.clear(set_to_zero=False)
    assert pipe.replicate.n_pending == 0
    pipe.backward({1: 5.0, 0: 7.0})
    assert (pipe.sums(1), pipe.sums(0)) == ([10, 10], [14, 14])
    assert pipe.arena.spare_bytes == 0
