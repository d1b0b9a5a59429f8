"""Who has arrived, who leaves, who is gone: the bookkeeping, with messages that the test carries."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import pytest

from hp_sharding.comm.agreement import Agreement, Cause, Message, Refused, Token

TOKEN = Token("all_gather (float32)", 4096, "blocks.0")
RANKS = (4, 5, 6)


class Dropped(NamedTuple):
    limit: int
    text: str


class Member:
    """One rank: its agreement, what was dropped, and the messages it has sent but nobody has got yet."""

    def __init__(self, me: int) -> None:
        self.me = me
        self.outbox: list[Message] = []
        self.dropped: list[Dropped] = []
        self.agreement = Agreement(RANKS, me, self.outbox.append)
        self.agreement.add_lane("gather", self)

    def drop_after(self, limit: int, cause: Cause) -> None:
        self.dropped.append(Dropped(limit, cause.text))

    def announce(self, sequence: int, token: Token = TOKEN) -> None:
        self.agreement.announce("gather", sequence, token)

    def enter(self, sequence: int, timeout_s: float = 0.05) -> None:
        self.agreement.enter("gather", sequence, timeout_s)


def _members() -> dict[int, Member]:
    return {rank: Member(rank) for rank in RANKS}


def _deliver(members: dict[int, Member], sender: int | None = None) -> None:
    """Carries messages until there are none, or once those of one member."""
    for member in [members[sender]] if sender is not None else list(members.values()) * 4:
        messages, member.outbox[:] = member.outbox[:], []
        for message in messages:
            for other in members.values():
                if other is not member:
                    other.agreement.hear(member.me, message)


def test_nobody_enters_before_all_have_come() -> None:
    members = _members()
    for rank in (4, 5):
        members[rank].announce(0)
    _deliver(members)
    with pytest.raises(Refused, match="rank 6 did not reach this collective") as caught:
        members[4].enter(0)
    assert caught.value.cause.peer == 6
    members[6].announce(0)
    _deliver(members)
    members[4].enter(0)


def test_a_token_wakes_whoever_waits() -> None:
    members = _members()
    for rank in (4, 5):
        members[rank].announce(0)
    _deliver(members)
    thread = threading.Thread(target=members[4].enter, args=(0, 20.0))
    thread.start()
    members[6].announce(0)
    begin_s = time.monotonic()
    _deliver(members)
    thread.join(10)
    assert not thread.is_alive()
    assert time.monotonic() - begin_s < 5


def test_tokens_of_later_collectives_do_not_count_for_this_one() -> None:
    members = _members()
    for rank in RANKS:
        members[rank].announce(1)
    _deliver(members)
    with pytest.raises(Refused):
        members[4].enter(0)


@pytest.mark.parametrize("other", [TOKEN._replace(nbytes=8), TOKEN._replace(label="head"), TOKEN._replace(what="x")])
def test_a_token_that_differs_is_an_error_that_names_both(other: Token) -> None:
    members = _members()
    members[4].announce(0)
    members[5].announce(0)
    members[6].announce(0, other)
    _deliver(members)
    for rank, its, theirs in ((4, TOKEN, other), (6, other, TOKEN)):
        with pytest.raises(Refused) as caught:
            members[rank].enter(0)
        for part in (f"rank {rank} has {its}", str(theirs), "collective 0 of lane 'gather'"):
            assert part in caught.value.cause.text


def _enter_everywhere(members: dict[int, Member], sequence: int) -> None:
    for member in members.values():
        member.announce(sequence)
    _deliver(members)
    for member in members.values():
        member.enter(sequence)


def test_leaving_finishes_what_somebody_has_entered_and_drops_the_rest() -> None:
    members = _members()
    _enter_everywhere(members, 0)
    for member in members.values():
        member.agreement.finish("gather", 0)
        member.announce(1)
        member.announce(2)
    _deliver(members)
    members[5].enter(1)
    members[4].agreement.leave(["gather"], Cause("rank 4 ends", 4))
    assert not members[4].dropped, "before all have answered the limit is not known"
    _deliver(members)
    # Rank 5 was inside collective 1: the others must join it there, and nobody may start collective 2.
    for rank in (4, 6):
        members[rank].enter(1)
    for rank in RANKS:
        assert members[rank].dropped[-1].limit == 1
        with pytest.raises(Refused):
            members[rank].enter(2)
        refusal = members[rank].agreement.refusal("gather")
        assert refusal is not None
        assert refusal.peer == 4, "not the one whose answer came first"
    assert "rank 4 has left" in members[6].dropped[-1].text
    _assert_quiet_only_after_the_last_has_finished(members)


def _assert_quiet_only_after_the_last_has_finished(members: dict[int, Member]) -> None:
    for rank in RANKS:
        assert not members[4].agreement.await_quiet("gather", answer_s=0.01, flight_s=0.01)
        members[rank].agreement.finish("gather", 1)
        _deliver(members)
    for rank in RANKS:
        assert members[rank].agreement.await_quiet("gather", answer_s=0.01, flight_s=0.01)


def test_leaving_an_idle_lane_is_quiet_at_once() -> None:
    members = _members()
    members[6].agreement.leave(["gather"], Cause("rank 6 ends", 6))
    _deliver(members)
    for member in members.values():
        assert member.agreement.await_quiet("gather", answer_s=0.01, flight_s=0.01)
    members[4].agreement.lost(6)
    assert members[4].agreement.broken is None, "whoever is quiet may go"


def test_all_lanes_are_left_at_the_same_moment() -> None:
    member = Member(4)
    member.agreement.add_lane("reduce", member)
    member.agreement.leave(["gather", "reduce"], Cause("rank 4 ends", 4))
    assert member.outbox == [["leave", 4, {"gather": -1, "reduce": -1}]], "one message, so that no lane lags behind"


def test_who_goes_without_a_goodbye_breaks_the_group() -> None:
    members = _members()
    members[4].agreement.lost(6)
    assert members[4].dropped == [Dropped(-1, "rank 6 is gone: its connection ended without a goodbye")]
    with pytest.raises(Refused, match="rank 6 is gone"):
        members[4].enter(0)
    _deliver(members, sender=4)
    assert members[5].agreement.refusal("gather") == Cause(
        "rank 4 gave up: rank 6 is gone: its connection ended without a goodbye", 6
    )


def test_the_first_cause_stays() -> None:
    member = Member(4)
    member.agreement.break_off(Cause("first", 5))
    member.agreement.break_off(Cause("second", 6))
    member.agreement.hear(6, ["abort", "third", None])
    assert member.agreement.refusal("gather") == Cause("first", 5)
    assert member.outbox == [["abort", "first", 5]]


def test_a_break_wakes_whoever_waits() -> None:
    member = Member(4)
    member.announce(0)
    found: list[str] = []

    def wait() -> None:
        try:
            member.enter(0, 20.0)
        except Refused as refused:
            found.append(refused.cause.text)

    thread = threading.Thread(target=wait)
    thread.start()
    member.agreement.hear(5, ["abort", "no memory", None])
    thread.join(10)
    assert found == ["rank 5 gave up: no memory"]


def test_a_roll_call_names_who_is_silent() -> None:
    members = _members()
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(members[4].agreement.roll_call(0.5)))
    thread.start()
    deadline_s = time.monotonic() + 5
    while not members[4].outbox and time.monotonic() < deadline_s:
        time.sleep(0.01)
    _deliver(members, sender=4)
    _deliver(members, sender=6)
    thread.join(10)
    assert found == [[5]]


def test_a_roll_call_that_ends_early_blames_who_gave_up_and_nobody_for_silence() -> None:
    member = Member(4)
    member.announce(0)
    found: list[Cause] = []

    def wait() -> None:
        try:
            member.enter(0, 0.5)
        except Refused as refused:
            found.append(refused.cause)

    thread = threading.Thread(target=wait)
    thread.start()
    deadline_s = time.monotonic() + 5
    while ["ping"] not in member.outbox and time.monotonic() < deadline_s:
        time.sleep(0.005)
    # Nobody has answered yet, and nobody will: rank 5 was faster to find that rank 6 does not come.
    member.agreement.hear(5, ["abort", "rank 6 did not reach this collective", 6])
    thread.join(10)
    assert found == [Cause("rank 5 gave up: rank 6 did not reach this collective", 6)]


def test_the_cause_of_a_failed_transfer_names_who_does_not_answer() -> None:
    member = Member(4)
    cause = member.agreement.cause_of(ConnectionResetError("reset"), 0.05)
    assert "each of ranks [5, 6] does not answer" in cause.text
    assert cause.text.endswith("the transfer failed: reset")
    assert cause.peer == 5
    member.agreement.lost(6)
    assert "rank 6 is gone" in member.agreement.cause_of(ConnectionResetError("reset"), 0.05).text


def test_overdue_names_the_lane_that_is_stuck() -> None:
    members = _members()
    _enter_everywhere(members, 0)
    agreement = members[4].agreement
    assert agreement.overdue(10) is None
    time.sleep(0.02)
    assert agreement.overdue(0.01) == "gather"
    agreement.finish("gather", 0)
    assert agreement.overdue(0.01) is None
