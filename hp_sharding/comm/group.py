"""All lanes over one set of ranks: how they are made, and how they end, with the process at the latest."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import secrets
import threading
import time
from collections.abc import Sequence

from ..errors import ConfigError
from .agreement import Agreement, Cause
from .edges import EdgePlan, Ways, give_back, idle_group_ids
from .gloo import GlooCommunicator
from .links import GlooLinks
from .peers import Door, Peers
from .rendezvous import Meeting, exchange, host_address

_log = logging.getLogger("hp_sharding")
# At the end: for the others' last word, and for what is in flight.
_ANSWER_S = 10.0
_FLIGHT_S = 40.0
_JOIN_S = 2.0
_groups: list[GlooGroup] = []


class GlooGroup:
    """The lanes of one call of ``create_communicators``: they share control connections and fail together.

    Args:
        ranks: global ranks in ring order.
        me: this process's global rank.
        lanes: names of the lanes.
        timeout_s: for making them, and for every collective.
    """

    def __init__(self, ranks: tuple[int, ...], me: int, lanes: Sequence[str], *, timeout_s: float) -> None:
        self._ranks = ranks
        self._me = me
        self._timeout_s = timeout_s
        self._closing = threading.Lock()
        self._closed: set[str] = set()
        self._pid = os.getpid()
        self._peers = Peers(ranks, me, host=host_address(), key=secrets.token_bytes(32))
        self._agreement = Agreement(ranks, me, self._peers.tell)
        try:
            ways = self._meet(list(lanes), time.monotonic() + timeout_s)
        except BaseException:
            self._peers.close()
            raise
        self._ways = dict(zip(lanes, ways, strict=True))
        self.communicators = {lane: self._make_lane(lane, each) for lane, each in self._ways.items()}
        self._peers.watch(self._agreement, self._check_overdue)
        for communicator in self.communicators.values():
            communicator.start()
        _register(self)

    def leave(self) -> None:
        """Tells the others that this rank ends all lanes; they answer by themselves, whatever their scripts do."""
        cause = Cause(f"rank {self._me} has ended its script", self._me)
        self._agreement.leave(list(self.communicators), cause)

    def close(self, lane: str) -> None:
        """Ends one lane, and with the last one the group. Only the first call for a lane does anything."""
        with self._closing:
            if lane in self._closed:
                return
            self._closed.add(lane)
            is_last = len(self._closed) == len(self.communicators)
        self._agreement.leave([lane], Cause(f"rank {self._me} has closed the lane", self._me))
        is_clean = self._agreement.await_quiet(lane, answer_s=_ANSWER_S, flight_s=_FLIGHT_S)
        if not self.communicators[lane].join(_JOIN_S):
            _log.warning("rank %d: lane %r is stuck inside Gloo and was abandoned", self._me, lane)
        elif is_clean:
            give_back(self._ways[lane])
        if is_last:
            self._peers.close()
            if self in _groups:
                _groups.remove(self)

    def is_of_this_process(self) -> bool:
        """False in a process that was forked from the one that made the group."""
        return self._pid == os.getpid()

    def _meet(self, lanes: list[str], deadline_s: float) -> list[Ways]:
        position = self._ranks.index(self._me)
        before, following = self._ranks[position - 1], self._ranks[(position + 1) % len(self._ranks)]
        mine = {
            "door": self._peers.door,
            "lanes": lanes,
            "spare_to_next": idle_group_ids(self._me, following),
            "spare_from_before": idle_group_ids(before, self._me),
        }
        everyone = exchange(mine, ranks=self._ranks, me=self._me, timeout_s=self._timeout_s)
        for peer, theirs in everyone.items():
            if theirs["lanes"] != lanes:
                raise ConfigError(
                    f"rank {self._me} creates lanes {lanes} over ranks {list(self._ranks)}, rank {peer} creates "
                    f"{theirs['lanes']}; all must ask for the same"
                )
        self._peers.connect({peer: Door(*theirs["door"]) for peer, theirs in everyone.items()}, deadline_s)
        plan = EdgePlan(len(lanes), self._me, self._timeout_s)
        meetings = plan.open(following, everyone[following]["spare_from_before"])
        self._peers.write_to(following, [list(meeting) for meeting in meetings])
        invitations = self._peers.read_from(before, deadline_s)
        plan.join(before, everyone[before]["spare_to_next"], [Meeting(*each) for each in invitations])
        return plan.carry_out(deadline_s)

    def _make_lane(self, lane: str, ways: Ways) -> GlooCommunicator:
        return GlooCommunicator(
            lane,
            self._ranks,
            self._me,
            agreement=self._agreement,
            links=GlooLinks(f"hp_sharding-{lane}", ways.to_next.group, ways.from_before.group),
            timeout_s=self._timeout_s,
            close=self.close,
        )

    def _check_overdue(self) -> None:
        lane = self._agreement.overdue(self._timeout_s)
        if lane is not None:
            text = f"the transfer on lane {lane!r} did not end within {self._timeout_s:g} s after all ranks had arrived"
            self._agreement.break_off(Cause(text))


def _register(group: GlooGroup) -> None:
    if not _groups:
        # Children of multiprocessing run only its own finalizers, scripts run both; the second finds nothing to do.
        atexit.register(close_all)
        multiprocessing.util.Finalize(None, close_all, exitpriority=100)
    _groups.append(group)


def close_all() -> None:
    """Closes every communicator of this process, in order. Runs by itself when the interpreter exits.

    What has not started is dropped, what is in flight is finished, and nobody goes before the others have what they
    need. Not a collective: the other ranks need not call it, but their lanes end too.
    """
    groups = [group for group in _groups if group.is_of_this_process()]
    for group in groups:
        group.leave()
    for group in groups:
        for lane in group.communicators:
            group.close(lane)
