"""What the ranks tell each other once a backward, and what the reducer makes of it."""

from __future__ import annotations

import pytest

from hp_sharding.errors import StateError
from hp_sharding.facts import Agreement, Facts, largest, publish
from hp_sharding.timeline.meeting import Way
from tests.fakes import WaitingLane
from tests.pipeline import Pipeline


def test_a_repeat_on_another_rank_is_reduced_here_too() -> None:
    pipe = Pipeline(2)
    pipe.backward({1: 1.0, 0: 2.0})
    pipe.peers_say(repeats=[0])
    pipe.reducer.settle()
    assert pipe.order() == [1, 0, 0]
    assert (pipe.sums(1), pipe.sums(0)) == ([1, 1], [2, 2])


def test_the_largest_is_waited_for() -> None:
    lanes = [WaitingLane("agree"), WaitingLane("gather")]
    assert largest([3.0, -1.0, 0.5], [Way(lane) for lane in lanes], label="times") == [3.0, -1.0, 0.5]
    assert [lane.labels("all_gather") for lane in lanes] == [["times"]] * 2


def test_publish_gives_rank_0s_orders() -> None:
    lane = WaitingLane("gather")
    assert publish([[2, 0, 1], [1, 2, 0]], [lane]) == [[2, 0, 1], [1, 2, 0]]
    assert lane.labels("broadcast") == ["bucket order"]
    assert lane.n_pending == 0


@pytest.mark.parametrize("nranks", [1, 3])
def test_facts_survive_the_agreement(nranks: int) -> None:
    facts = Facts(True, False, [False, True, False], [True, False, False, True], [False, True])
    agreement = Agreement(facts, [WaitingLane("gather", nranks=nranks), WaitingLane("agree")], label="x")
    agreement.work.wait()
    assert agreement.result() == facts
    assert all(type(value) is bool for value in [agreement.result().new_order, *agreement.result().used])


def test_what_another_rank_used_counts_as_used() -> None:
    pipe = Pipeline(2)
    pipe.backward({0: 1.0})
    pipe.peers_say(used=[3])
    pipe.reducer.settle()
    assert pipe.reducer.used == [[True, True], [False, True]]


def test_the_agreement_of_each_backward_is_read_once() -> None:
    pipe = Pipeline(1)
    pipe.backward({0: 1.0})
    pipe.backward({0: 1.0})
    pipe.reducer.settle()
    pipe.reducer.settle()
    assert pipe.agree.labels("all_reduce") == ["agreement, backward 0", "agreement, backward 1"]
    assert pipe.agree.n_pending == 0


def test_a_failed_backward_is_refused_by_step_here_and_on_other_ranks() -> None:
    pipe = Pipeline(1)
    pipe.abort([0])
    pipe.reducer.finish_round()
    with pytest.raises(StateError, match=r"rank 0: the backward failed on some rank.*clear_grad\(\) on every rank"):
        pipe.reducer.settle()
    other = Pipeline(1)
    other.backward({0: 1.0})
    other.peers_say(failed=True)
    with pytest.raises(StateError, match="failed on some rank"):
        other.reducer.settle()
    other.reducer.clear(set_to_zero=True)
    other.backward({0: 4.0})
    assert other.sums(0) == [4, 4]
