"""What a failed batch or an interrupted wait leaves of the backward pipeline: nothing that the next batch sees."""

from __future__ import annotations

import contextlib
from typing import Any

import paddle
import pytest

from hp_sharding.errors import StateError
from hp_sharding.facts import _POSITION_BITS
from tests.pipeline import Pipeline


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


def test_a_failure_without_sync_makes_the_round_that_others_will() -> None:
    pipe = Pipeline(2)
    pipe.reducer.sync = False
    pipe.abort([1])
    pipe.reducer.sync = True
    assert pipe.log == []
    pipe.reducer.clear(set_to_zero=True)
    assert pipe.order() == [1, 0]
    assert len(pipe.agree.labels("all_reduce")) == 1
    pipe.backward({1: 1.0, 0: 1.0})
    assert pipe.sums(1) == [1, 1]


def test_after_a_failure_without_sync_a_step_is_refused() -> None:
    pipe = Pipeline(2)
    pipe.reducer.sync = False
    pipe.abort([1])
    pipe.reducer.sync = True
    pipe.backward({1: 1.0, 0: 1.0})
    with pytest.raises(StateError, match="failed on some rank"):
        pipe.reducer.settle()


def test_clear_after_a_failed_forward_makes_the_round_that_others_will() -> None:
    pipe = Pipeline(2)
    pipe.reducer.arm()
    pipe.reducer.abandon()
    pipe.reducer.clear(set_to_zero=True)
    assert pipe.order() == [1, 0]
    pipe.reducer.clear(set_to_zero=True)
    assert len(pipe.order()) == 2
    pipe.backward({1: 2.0, 0: 2.0})
    assert pipe.sums(1) == [2, 2]


def test_who_goes_on_after_a_failed_forward_sends_nothing_more_for_it() -> None:
    """Where ranks do not depend on each other's branches, one may leave a batch out."""
    pipe = Pipeline(2)
    pipe.reducer.arm()
    pipe.reducer.abandon()
    pipe.backward({1: 2.0, 0: 2.0})
    pipe.reducer.clear(set_to_zero=True)
    assert pipe.order() == [1, 0]


def test_clear_makes_rounds_until_all_ranks_are_in_it() -> None:
    """Others may have gone on with more backwards of the batch that has failed here."""
    pipe = Pipeline(2)
    pipe.abort([1])
    n_going_on = [1, 1, 0]
    finish = pipe.reducer.finish_round

    def finish_beside_others() -> None:
        finish()
        agreement = pipe.reducer._agreements[-1]
        agreement.work.wait()
        agreement._counts[-2 * _POSITION_BITS - 1] += n_going_on.pop(0)

    pipe.reducer.finish_round = finish_beside_others  # type: ignore[method-assign]
    pipe.reducer.clear(set_to_zero=True)
    assert pipe.order() == [1, 0] * 3
    assert n_going_on == []


def test_ranks_of_which_one_alone_has_forgotten_its_sums_are_told_apart() -> None:
    pipe = Pipeline(2)
    pipe.backward({1: 1.0, 0: 1.0})
    pipe.backward({1: 1.0, 0: 1.0})
    agreement = pipe.reducer._agreements[-1]
    agreement.work.wait()
    ours = agreement._counts[-2 * _POSITION_BITS :].tolist()
    assert ours == [1, *[0] * (_POSITION_BITS - 1), 0, *[1] * (_POSITION_BITS - 1)]
    theirs = [*[0] * _POSITION_BITS, *[1] * _POSITION_BITS]  # at no round since its clear_grad()
    agreement._counts[-2 * _POSITION_BITS :] = paddle.to_tensor(
        [a + b for a, b in zip(ours, theirs, strict=True)], dtype="int32"
    )
    with pytest.raises(StateError, match=r"a rank alone called clear_grad\(\)"):
        pipe.reducer.settle()


def test_a_wait_that_is_interrupted_is_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipeline(2, n_replicas=2)
    pipe.backward({1: 1.0, 0: 1.0})
    for n_waits in range(5):
        with monkeypatch.context() as patch:
            left = [n_waits]

            def wait(work: Any, left: list[int] = left) -> None:
                if not left[0]:
                    raise KeyboardInterrupt
                left[0] -= 1
                work.wait()

            patch.setattr(pipe.reducer._timeline, "wait", wait)
            with contextlib.suppress(KeyboardInterrupt):
                pipe.sums(1)
    assert pipe.sums(1) == [2, 2]
    assert pipe.sums(0) == [2, 2]
    assert (pipe.reduce.n_pending, pipe.agree.n_pending, pipe.replicate.n_pending) == (0, 0, 0)


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
