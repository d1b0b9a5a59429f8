"""What the ranks tell each other once a backward, and what the reducer makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from hp_sharding.comm import Fingerprint
from hp_sharding.comm.local import LocalCommunicator
from hp_sharding.errors import CommError, StateError
from hp_sharding.facts import Agreement, Facts, largest, publish
from hp_sharding.timeline.meeting import Way
from tests.fakes import WaitingLane
from tests.pipeline import Pipeline
from tests.seats import Seats, control, meet


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


@pytest.mark.parametrize("position", [0, 1, 5, 255, 256, -3])
def test_ranks_that_are_at_one_position_are_not_parted(position: int) -> None:
    facts = Facts(False, True, [False], [True], goes_on=False, position=position)
    agreement = Agreement(facts, [WaitingLane("gather", nranks=3)], label="x")
    agreement.work.wait()
    assert agreement.result() == facts._replace(written=[])


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


# ---- fingerprints ----

FACTS = Facts(False, False, [False, True], [True, False, True], [])


def _launched(rank: int, seats: Seats, labels: dict[str, list[str]], failed: bool = False) -> Facts:
    """Launches on "gather" and "reduce", then agrees, as a reducer does. Both lanes stay with this rank."""
    fingerprint = Fingerprint({name: LocalCommunicator(name, (0,)) for name in ("gather", "reduce")}, own=("gather",))
    for lane, names in labels.items():
        for label in names:
            fingerprint.lanes[lane].all_reduce(paddle.zeros([2]), label=label)
    agreement = Agreement(FACTS._replace(failed=failed), control(seats), label="agreement", fingerprint=fingerprint)
    agreement.work.wait()
    return agreement.result()


def _agree(labels: list[dict[str, list[str]]], n_replicas: int = 1, failed: int = -1) -> list[Any]:
    return meet(lambda rank, seats: _launched(rank, seats, labels[rank], rank == failed), len(labels), n_replicas)


SAME = {"gather": ["0:a", "1:b"], "reduce": ["1:b, backward 0", "0:a, backward 0"]}


@pytest.mark.parametrize(("nranks", "n_replicas"), [(1, 1), (2, 1), (3, 1), (5, 1), (4, 2), (6, 2), (6, 3)])
def test_ranks_that_have_launched_the_same_agree(nranks: int, n_replicas: int) -> None:
    assert _agree([SAME] * nranks, n_replicas) == [FACTS] * nranks


@pytest.mark.parametrize(("nranks", "n_replicas"), [(2, 1), (3, 1), (5, 1), (4, 2), (6, 2), (6, 3)])
def test_one_that_has_not_is_found_on_every_rank(nranks: int, n_replicas: int) -> None:
    """Whichever it is, and whatever it launches: counts of bits are exact, with any number of ranks."""
    draw = np.random.default_rng(nranks)
    for odd_one in range(nranks):
        lane = ("gather", "reduce")[odd_one % 2]
        other = {**SAME, lane: [*SAME[lane][:-1], str(draw.integers(10**9))]}
        found = _agree([other if rank == odd_one else SAME for rank in range(nranks)], n_replicas)
        assert all(isinstance(error, CommError) for error in found), found
        for rank, error in enumerate(found):
            assert f"as collective 1 of lane {lane!r}" in str(error)
            assert f"rank {odd_one} has all_reduce of 8 bytes labelled {other[lane][1]!r}" in str(error)
            assert error.rank == rank
            assert error.lane == lane
            degree = nranks // n_replicas
            concerned = lane == "reduce" or rank // degree == odd_one // degree
            assert error.peer == odd_one or rank == odd_one or not concerned


def test_ranks_that_are_all_different_are_found() -> None:
    found = _agree([{"reduce": [str(rank)]} for rank in range(3)])
    for rank, error in enumerate(found):
        assert f"rank {rank} has all_reduce of 8 bytes labelled '{rank}'" in str(error)


def test_replicas_gather_for_themselves() -> None:
    """In stage 3 one replica may take another branch than the next; its own ranks may not."""
    left, right = SAME, {**SAME, "gather": ["0:a", "2:c", "1:b"]}
    assert _agree([left, left, right, right], n_replicas=2) == [FACTS] * 4
    for rank, error in enumerate(_agree([left, left, right, left], n_replicas=2)):
        assert "as collective 1 of lane 'gather'" in str(error), "those of the other replica hear of it too"
        assert "labelled '2:c', of layer 'c'" in str(error)
        assert (error.peer in (2, 3)) and error.rank == rank


def test_two_replicas_that_differ_alike_are_found() -> None:
    """Over both, each bit is counted as often as where one replica took another branch than the other one."""
    left, right = SAME, {**SAME, "gather": ["0:a", "2:c", "1:b"]}
    for error in _agree([left, right, left, right], n_replicas=2):
        assert "as collective 1 of lane 'gather'" in str(error)


def test_reductions_are_the_same_over_all_replicas() -> None:
    other = {**SAME, "reduce": SAME["reduce"][::-1]}
    for error in _agree([SAME, SAME, other, other], n_replicas=2):
        assert "as collective 0 of lane 'reduce'" in str(error)


def test_who_has_launched_less_is_named() -> None:
    for error in _agree([SAME, {**SAME, "gather": ["0:a"]}, SAME]):
        assert "rank 1 has nothing more" in str(error)
        assert "all_reduce of 8 bytes labelled '1:b', of layer 'b'" in str(error)


def test_after_a_backward_that_failed_nothing_is_compared() -> None:
    """That rank has launched what it could; the rest comes later, and then all are alike again."""
    found = _agree([SAME, {**SAME, "reduce": []}], failed=1)
    assert found == [FACTS._replace(failed=True)] * 2


def test_the_reducer_compares_at_step() -> None:
    pipe = Pipeline(1)
    fingerprint = Fingerprint({"gather": pipe.agree, "reduce": pipe.reduce}, own=("gather",))
    pipe.reducer.lanes = pipe.reducer.lanes._replace(
        reduce=fingerprint.lanes["reduce"], agree=[fingerprint.lanes["gather"]], fingerprint=fingerprint
    )
    pipe.backward({0: 1.0})
    pipe.reducer.settle()
    assert [launch.label for launch in fingerprint.history.recent("reduce", 5)] == ["0:b0, backward 0"]
    assert [launch.label for launch in fingerprint.history.recent("gather", 5)] == ["agreement, backward 0"]
    counts = pipe.log[-1].nbytes
    n_facts = 2 + 1 + 2 + 1 + 2 * 8
    assert counts == 4 * (n_facts + 2 * 32), "facts, and 32 bits each of what all share and of what the group does"
