"""What the members of a group must agree on before and after they send each other data.

A stream of bytes does not say what it is. So a lane begins a collective only when the *tokens* of all members say that
they have reached the same one, which also tells whom one waits for; and it leaves the group by agreement:

1. Whoever wants to leave a lane stops entering collectives and tells the others the last one that it has entered.
2. Everyone who hears that does the same at once, wherever its script is.
3. When all have answered, the largest number named is the *limit*. Somebody may be inside that collective, and so may
   all who have promised their tokens for it: everyone finishes up to the limit and drops the rest.
4. Who has nothing left to finish says that it is quiet. When all are quiet nobody's connections can hurt anybody.

This file is pure bookkeeping: it sends through a function that it is given and never looks at a clock but to wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

# How long a process that is alive may take to say so: its watcher answers whatever its script does.
_ROLL_CALL_S = 2.0

Message = list[object]
"""A control message: its kind, then strings and whole numbers (what JSON can carry)."""


class Token(NamedTuple):
    """Says that a rank has reached a collective. Equal on all ranks, or the ranks have gone different ways."""

    what: str
    nbytes: int
    label: str

    def __str__(self) -> str:
        return f"{self.what} of {self.nbytes} bytes labelled {self.label!r}"


class Cause(NamedTuple):
    """Why collectives cannot go on: in words, and the global rank at fault where it is known."""

    text: str
    peer: int | None = None


class Listener(Protocol):
    """The lane's own side: it owns the outstanding works."""

    def drop_after(self, limit: int, cause: Cause) -> None:
        """Fails the outstanding works whose sequence number is above ``limit`` (-1: all of them)."""


class Refused(Exception):
    """A collective may not be entered."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.text)
        self.cause = cause


@dataclass
class _Ledger:
    """What is known about one lane. Sequence numbers count the lane's collectives from zero."""

    listener: Listener
    changed: threading.Condition
    tokens: dict[int, dict[int, Token]] = field(default_factory=dict)
    entered: int = -1
    entered_s: float = 0.0
    finished: int = -1
    leaving: Cause | None = None
    last_entered_by: dict[int, int] = field(default_factory=dict)
    quiet: set[int] = field(default_factory=set)

    def limit(self) -> int:
        return max(self.last_entered_by.values())


class Agreement:
    """The state that all lanes of one group of ranks share. Every method may be called from any thread.

    Args:
        ranks: global ranks of the group.
        me: this process's global rank.
        tell: sends a message to all other members; must not call back.
    """

    def __init__(self, ranks: tuple[int, ...], me: int, tell: Callable[[Message], None]) -> None:
        self.ranks = ranks
        self.me = me
        self.broken: Cause | None = None
        self._tell = tell
        # One lock for all, but a condition for each lane: what concerns one does not wake the threads of the others.
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._answers: set[int] = set()
        self._ledgers: dict[str, _Ledger] = {}

    def add_lane(self, lane: str, listener: Listener) -> None:
        """Makes a lane known. Before the first message can come."""
        self._ledgers[lane] = _Ledger(listener, threading.Condition(self._lock))

    def refusal(self, lane: str) -> Cause | None:
        """Why the lane takes no more collectives, or None."""
        return self.broken or self._ledgers[lane].leaving

    def announce(self, lane: str, sequence: int, token: Token) -> None:
        """Tells the others that this rank has reached a collective and can enter it."""
        self._note(lane, sequence, self.me, token)
        self._tell(["token", lane, sequence, *token])

    def enter(self, lane: str, sequence: int, timeout_s: float) -> None:
        """Blocks until all members have announced the collective, which the caller must then carry out.

        Raises:
            Refused: a token differs, somebody has not come in time, is gone, or leaves before this collective.
        """
        ledger = self._ledgers[lane]
        with self._lock:
            if ledger.changed.wait_for(lambda: self._may_enter(ledger, sequence), timeout_s):
                self._check_tokens(ledger, lane, sequence)
                ledger.entered = sequence
                ledger.entered_s = time.monotonic()
                return
            # All may have come while one that is to leave has not answered yet.
            tokens = ledger.tokens.get(sequence, {})
            missing = [peer for peer in self.ranks if peer not in tokens or peer not in ledger.last_entered_by]
            missing = [peer for peer in missing if peer not in tokens] or missing
            mine = tokens.get(self.me)
        raise Refused(self._late(missing, timeout_s, mine))

    def finish(self, lane: str, sequence: int) -> None:
        """Says that a collective which was entered has ended well."""
        with self._lock:
            ledger = self._ledgers[lane]
            ledger.finished = sequence
            ledger.tokens.pop(sequence, None)
            ledger.changed.notify_all()
        self._settle(lane)

    def overdue(self, timeout_s: float) -> str | None:
        """The name of a lane that has been inside one collective for longer than ``timeout_s``."""
        now_s = time.monotonic()
        with self._lock:
            for lane, ledger in self._ledgers.items():
                if ledger.entered > ledger.finished and now_s - ledger.entered_s > timeout_s:
                    return lane
        return None

    def break_off(self, cause: Cause, *, tell: bool = True) -> None:
        """Ends all lanes of the group for good. The first cause stays; later ones are consequences."""
        with self._lock:
            if self.broken is not None:
                return
            self.broken = cause
            for ledger in self._ledgers.values():
                ledger.changed.notify_all()
            self._answered.notify_all()
        if tell:
            self._tell(["abort", cause.text, cause.peer])
        for ledger in self._ledgers.values():
            ledger.listener.drop_after(-1, cause)

    def cause_of(self, error: Exception, timeout_s: float) -> Cause:
        """Why a transfer failed: a connection does not say whose fault it is, but a dead or a silent member tells.

        Blocks for up to ``timeout_s``; not for the thread that calls ``hear``.
        """
        silent = self.roll_call(timeout_s)
        with self._lock:
            if self.broken is not None:
                return self.broken
        text = f"the transfer failed: {str(error) or repr(error)}"
        if silent:
            return Cause(f"{_names(silent)} does not answer: stopped, or cut off; {text}", silent[0])
        return Cause(text)

    def roll_call(self, timeout_s: float) -> list[int]:
        """Which members' processes do not answer within ``timeout_s``. Ends early when all have, or one is gone."""
        with self._lock:
            self._answers = {self.me}
        self._tell(["ping"])
        with self._lock:
            self._answered.wait_for(lambda: self.broken or len(self._answers) == len(self.ranks), timeout_s)
            return [rank for rank in self.ranks if rank not in self._answers]

    def leave(self, lanes: Sequence[str], cause: Cause) -> None:
        """Starts to leave lanes, all at the same moment: a work of one may follow a work of another. Does not block.

        Args:
            lanes: the lanes.
            cause: why; ``peer`` is the rank that was the first to leave.
        """
        entered: dict[str, int] = {}
        with self._lock:
            for lane in lanes:
                ledger = self._ledgers[lane]
                if ledger.leaving is None:
                    ledger.leaving = cause
                    ledger.last_entered_by[self.me] = entered[lane] = ledger.entered
                ledger.changed.notify_all()
        if entered:
            self._tell(["leave", cause.peer, entered])
        for lane in lanes:
            self._settle(lane)

    def await_quiet(self, lane: str, *, answer_s: float, flight_s: float) -> bool:
        """After ``leave``: blocks until no member will send or receive on this lane again.

        Args:
            lane: the lane.
            answer_s: how long the others may take to answer.
            flight_s: how long, beyond that, a collective of this rank that is in flight may take.

        Returns:
            True if all went well; False if the group is broken or time is up.
        """
        ledger = self._ledgers[lane]
        everyone = set(self.ranks)

        def is_settled() -> bool:
            return self.broken is not None or ledger.quiet == everyone

        with self._lock:
            if not ledger.changed.wait_for(is_settled, answer_s):
                ledger.changed.wait_for(lambda: is_settled() or ledger.entered == ledger.finished, flight_s)
            return self.broken is None and ledger.quiet == everyone

    def hear(self, peer: int, message: Message) -> None:
        """Takes in a message of another member."""
        kind, rest = message[0], message[1:]
        if kind == "token":
            lane, sequence, what, nbytes, label = rest
            self._note(str(lane), _whole(sequence), peer, Token(str(what), _whole(nbytes), str(label)))
        elif kind == "leave":
            self._hear_leave(peer, _whole(rest[0]), rest[1])
        elif kind == "quiet":
            ledger = self._ledgers[str(rest[0])]
            with self._lock:
                ledger.quiet.add(peer)
                ledger.changed.notify_all()
        elif kind == "ping":
            self._tell(["pong"])
        elif kind == "pong":
            with self._lock:
                self._answers.add(peer)
                self._answered.notify_all()
        elif kind == "abort":
            at_fault = rest[1] if isinstance(rest[1], int) else peer
            self.break_off(Cause(f"rank {peer} gave up: {rest[0]}", at_fault), tell=False)

    def lost(self, peer: int) -> None:
        """Takes in that a member's connection has ended."""
        with self._lock:
            at_peace = all(peer in ledger.quiet for ledger in self._ledgers.values())
        if not at_peace:
            self.break_off(Cause(f"rank {peer} is gone: its connection ended without a goodbye", peer))

    def _hear_leave(self, peer: int, first: int, entered: Any) -> None:
        with self._lock:
            for lane, sequence in entered.items():
                self._ledgers[lane].last_entered_by[peer] = _whole(sequence)
        # The message may be an answer: the cause is who was the first.
        cause = Cause(f"rank {first} has left: it closed the lane, or its script has ended", first)
        self.leave(list(entered), cause)

    def _note(self, lane: str, sequence: int, rank: int, token: Token) -> None:
        ledger = self._ledgers[lane]
        with self._lock:
            tokens = ledger.tokens.setdefault(sequence, {})
            tokens[rank] = token
            if len(tokens) == len(self.ranks):
                ledger.changed.notify_all()

    def _may_enter(self, ledger: _Ledger, sequence: int) -> bool:
        if self.broken is not None:
            raise Refused(self.broken)
        if ledger.leaving is not None:
            if len(ledger.last_entered_by) < len(self.ranks):
                return False
            if sequence > ledger.limit():
                raise Refused(ledger.leaving)
        return len(ledger.tokens.get(sequence, {})) == len(self.ranks)

    def _check_tokens(self, ledger: _Ledger, lane: str, sequence: int) -> None:
        tokens = ledger.tokens[sequence]
        mine = tokens[self.me]
        for peer in self.ranks:
            if tokens[peer] != mine:
                text = (
                    f"the ranks have gone different ways: as collective {sequence} of lane {lane!r} rank {self.me} has "
                    f"{mine}, rank {peer} has {tokens[peer]}; all ranks must start the same collectives in one order"
                )
                raise Refused(Cause(text, peer))

    def _late(self, missing: list[int], timeout_s: float, mine: Token | None) -> Cause:
        silent = set(missing) & set(self.roll_call(min(_ROLL_CALL_S, timeout_s)))
        with self._lock:
            if self.broken is not None:
                return self.broken  # another rank was faster, and the roll call ended before all could answer
        reason = "busy, much slower, or on another path through the model; raise timeout_s if it is only late"
        elsewhere = self._waits_elsewhere(missing)
        if silent:
            reason = f"{_names(sorted(silent))} does not even answer: stopped, or cut off"
        elif elsewhere is not None:
            reason = f"{elsewhere}; all ranks must go the same way through the model"
        what = f" ({mine})" if mine is not None else ""
        text = f"{_names(missing)} did not reach this collective{what} within {timeout_s:g} s: {reason}"
        return Cause(text, missing[0])

    def _waits_elsewhere(self, peers: Sequence[int]) -> str | None:
        """What one of ``peers`` has reached and this rank has not, in words; None where there is nothing."""
        with self._lock:
            for lane, ledger in self._ledgers.items():
                for tokens in ledger.tokens.values():
                    for peer in peers:
                        if peer in tokens and self.me not in tokens:
                            return f"rank {peer} waits for rank {self.me} on lane {lane!r} in {tokens[peer]}"
        return None

    def _settle(self, lane: str) -> None:
        """Once all have answered a wish to leave: drops what lies beyond the limit and says when this rank is quiet."""
        ledger = self._ledgers[lane]
        with self._lock:
            if ledger.leaving is None or len(ledger.last_entered_by) < len(self.ranks) or self.broken is not None:
                return
            limit = ledger.limit()
            became_quiet = ledger.finished >= limit and self.me not in ledger.quiet
            if became_quiet:
                ledger.quiet.add(self.me)
                ledger.changed.notify_all()
        ledger.listener.drop_after(limit, ledger.leaving)
        if became_quiet:
            self._tell(["quiet", lane])


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {ranks}"


def _whole(value: object) -> int:
    assert isinstance(value, int), value
    return value
