"""Names the first collective in which ranks differ, once their fingerprints have shown that there is one.

Nobody can go on after that: what has been added up or gathered since belongs to different layers. So it may cost what
it likes: the ranks tell each other their newest launches, over the lanes that the hosts talk on.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from .comm import Communicator, Fingerprint, Prints, called, different_ways
from .errors import CommError
from .timeline.meeting import Meeting, Way

_ADVICE = (
    "Parameters or sums may be mixed up since, so nothing goes on: start again from a checkpoint. In stage 3 all ranks "
    "of a shard group must run the same layers in one order, forward and backward; stages 1 and 2 allow branches"
)


class Told(NamedTuple):
    """What one rank has launched, as it tells the others.

    Attributes:
        rank: global rank.
        replica: number of its shard group.
        counts: lane -> how many launches there were when the fingerprints were taken.
        launches: lane -> the newest ones, by number, as messages call them.
    """

    rank: int
    replica: int
    counts: Mapping[str, int]
    launches: Mapping[str, Mapping[int, str]]


class Difference(NamedTuple):
    """The first launch of a lane that is not the same on two ranks."""

    lane: str
    number: int
    mine: Told
    theirs: Told

    def __str__(self) -> str:
        one, other = ((told.rank, self._at(told)) for told in (self.mine, self.theirs))
        return different_ways(self.lane, self.number, one, other)

    def _at(self, told: Told) -> str:
        return told.launches[self.lane].get(self.number, "nothing more")


def raise_divergence(fingerprint: Fingerprint, prints: Prints, lanes: Sequence[Communicator]) -> NoReturn:
    """Finds out what differs, ends all lanes, and raises. Collective: the fingerprints differ on all ranks alike.

    Args:
        fingerprint: of this rank.
        prints: what of it was compared.
        lanes: see ``facts.Agreement``.

    Raises:
        CommError: always, on every rank.
    """
    meeting = Meeting([Way(lane) for lane in lanes])
    mine = tell(fingerprint, prints, lanes)
    everyone = [_read(text) for text in meeting.gather(_write(mine))]
    found = first_difference(mine, everyone, own=fingerprint.own)
    text = f"rank {mine.rank}: {found or 'the ranks have launched different collectives, long ago'}. {_ADVICE}"
    # Who ends its lanes first must not cut off those that are still being told.
    with contextlib.suppress(CommError):
        meeting.rounds(1)
    for lane in fingerprint.lanes.values():
        lane.break_off(text)
    error = CommError(text, rank=mine.rank)
    if found is not None:
        error = CommError(text, lane=found.lane, rank=mine.rank, peer=found.theirs.rank)
    statements = lanes[-1].statements
    raise error if statements is None else statements.explained(error)


def tell(fingerprint: Fingerprint, prints: Prints, lanes: Sequence[Communicator]) -> Told:
    """What this rank tells the others of its launches up to ``prints``."""
    me = lanes[-1]
    launches = {
        lane: {
            launch.number: called(launch.op, launch.nbytes, launch.label)
            for launch in kept
            if launch.number < prints.counts[lane]
        }
        for lane, kept in fingerprint.history.lanes.items()
    }
    return Told(me.ranks[me.rank], lanes[0].rank if len(lanes) > 1 else 0, prints.counts, launches)


def first_difference(me: Told, everyone: Sequence[Told], *, own: frozenset[str]) -> Difference | None:
    """Where two ranks part that should launch the same: this one and another, or else any two.

    Args:
        me: this rank.
        everyone: all data ranks, this one among them.
        own: lanes on which only the ranks of one replica launch the same.
    """
    for lane in me.counts:
        replicas = sorted({told.replica for told in everyone}) if lane in own else [None]
        groups = [
            sorted((told for told in everyone if number in (None, told.replica)), key=lambda told: told.rank)
            for number in replicas
        ]
        for group in sorted(groups, key=lambda group: me not in group):
            first = me if me in group else group[0]
            found = _first_in(lane, first, group)
            if found is not None:
                return found
    return None


def _first_in(lane: str, first: Told, group: Sequence[Told]) -> Difference | None:
    for other in group:
        number = _parting(lane, first, other)
        if number is not None:
            return Difference(lane, number, first, other)
    return None


def _parting(lane: str, one: Told, other: Told) -> int | None:
    launches, theirs = one.launches[lane], other.launches[lane]
    # Both have kept only so many; what one has forgotten is as good as equal.
    start = max(min(kept, default=told.counts[lane]) for kept, told in ((launches, one), (theirs, other)))
    stop = max(one.counts[lane], other.counts[lane])
    return next((number for number in range(start, stop) if launches.get(number) != theirs.get(number)), None)


def _write(told: Told) -> bytes:
    return json.dumps(told).encode()


def _read(text: bytes) -> Told:
    rank, replica, counts, launches = json.loads(text)
    by_number = {lane: {int(number): what for number, what in kept.items()} for lane, kept in launches.items()}
    return Told(rank, replica, counts, by_number)
