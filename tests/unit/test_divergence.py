"""Where two ranks part: what is told, and what becomes of the lanes."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from hp_sharding.comm import Fingerprint, Prints
from hp_sharding.comm.history import KEPT
from hp_sharding.comm.local import LocalCommunicator
from hp_sharding.divergence import Told, first_difference, raise_divergence, tell
from hp_sharding.errors import CommError
from tests.seats import Seats, control, meet

OWN = frozenset({"gather"})


def _told(rank: int, *labels: str, lane: str = "reduce", replica: int = 0, first: int = 0) -> Told:
    """Has launched these, and ``first`` before them that it has forgotten."""
    launches = dict(enumerate(labels, first))
    counts = {"gather": 0, "reduce": 0, lane: first + len(labels)}
    return Told(rank, replica, counts, {"gather": {}, "reduce": {}, lane: launches})


def test_nothing_differs() -> None:
    everyone = [_told(rank, "a", "b") for rank in range(3)]
    assert first_difference(everyone[0], everyone, own=OWN) is None


@pytest.mark.parametrize(
    ("mine", "theirs", "number", "words"),
    [
        (("a", "b"), ("a", "c"), 1, "rank 0 has b, rank 1 has c"),
        (("a", "b"), ("a",), 1, "rank 0 has b, rank 1 has nothing more"),
        (("a",), ("a", "b"), 1, "rank 0 has nothing more, rank 1 has b"),
        (("b", "a"), ("a", "b"), 0, "rank 0 has b, rank 1 has a"),
        ((), ("a",), 0, "rank 0 has nothing more, rank 1 has a"),
    ],
)
def test_the_first_difference(mine: tuple[str, ...], theirs: tuple[str, ...], number: int, words: str) -> None:
    me = _told(0, *mine)
    found = first_difference(me, [me, _told(1, *theirs)], own=OWN)
    assert found is not None
    assert (found.lane, found.number) == ("reduce", number)
    assert words in str(found)


def test_what_one_of_them_has_forgotten_is_no_difference() -> None:
    me = _told(0, "d", "e", first=3)
    same = _told(1, "a", "b", "c", "d", "e")
    assert first_difference(me, [me, same], own=OWN) is None
    other = _told(1, "a", "b", "c", "d", "f")
    found = first_difference(me, [me, other], own=OWN)
    assert found is not None
    assert found.number == 4


def test_own_lanes_are_compared_within_a_replica() -> None:
    replicas = [_told(0, "a", lane="gather"), _told(1, "b", lane="gather", replica=1)]
    assert first_difference(replicas[0], replicas, own=OWN) is None
    assert first_difference(replicas[0], replicas, own=frozenset()) is not None
    everyone = [*replicas, _told(2, "c", lane="gather", replica=1)]
    found = first_difference(everyone[0], everyone, own=OWN)
    assert found is not None, "who is not concerned names two that are"
    assert (found.mine.rank, found.theirs.rank) == (1, 2)


def _part(rank: int, seats: Seats) -> Any:
    lanes = {name: LocalCommunicator(name, (0,)) for name in ("gather", "reduce")}
    ended: list[str] = []
    for lane in lanes.values():
        lane.break_off = ended.append  # type: ignore[method-assign, assignment]
    fingerprint = Fingerprint(lanes, own=OWN)
    label = "4:experts.1" if rank == 1 else "3:experts.0"
    fingerprint.lanes["gather"].all_gather(paddle.zeros([2]), paddle.zeros([2]), label=label)
    prints = fingerprint.take()
    # Later than what was compared: it is another's business.
    fingerprint.lanes["gather"].all_gather(paddle.zeros([2]), paddle.zeros([2]), label=f"later {rank}")
    with pytest.raises(CommError) as caught:
        raise_divergence(fingerprint, prints, control(seats))
    return caught.value, ended


def test_every_rank_names_the_first_difference_and_ends_its_lanes() -> None:
    for rank, (error, ended) in enumerate(meet(_part, 3)):
        assert f"rank {rank}: the ranks have gone different ways: as collective 0 of lane 'gather'" in str(error)
        assert "rank 1 has all_gather of 8 bytes labelled '4:experts.1', of layer 'experts.1'" in str(error)
        assert "has all_gather of 8 bytes labelled '3:experts.0', of layer 'experts.0'" in str(error)
        assert "stages 1 and 2 allow branches" in str(error)
        assert (error.lane, error.rank, error.peer) == ("gather", rank, 0 if rank == 1 else 1)
        assert ended == [str(error)] * 2


def _long_ago(rank: int, seats: Seats) -> None:
    fingerprint = Fingerprint({"reduce": LocalCommunicator("reduce", (0,))}, own=OWN)
    for number in range(KEPT + 2):
        label = "odd" if (number, rank) == (0, 1) else str(number)
        fingerprint.lanes["reduce"].all_reduce(paddle.zeros([1]), label=label)
    raise_divergence(fingerprint, fingerprint.take(), control(seats))


def test_a_difference_that_nobody_remembers_is_an_error_all_the_same() -> None:
    for error in meet(_long_ago, 2):
        assert isinstance(error, CommError)
        assert "launched different collectives, long ago" in str(error)


def test_only_what_was_compared_is_told() -> None:
    fingerprint = Fingerprint({"reduce": LocalCommunicator("reduce", (0,))}, own=OWN)
    for number in range(3):
        fingerprint.lanes["reduce"].all_reduce(paddle.zeros([1]), label=str(number))
    lane = LocalCommunicator("gather", (0,))
    told = tell(fingerprint, Prints(0, 0, {"reduce": 2}), [lane])
    assert list(told.launches["reduce"]) == [0, 1]
