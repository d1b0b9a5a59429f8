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
from .links import TcpLinks
from .peers import Door, Peers
from .rendezvous import exchange, host_address, ready_default_store
from .tcp import TcpCommunicator

_log = logging.getLogger("hp_sharding")
# At the end: for the others' last word, and for what is in flight.
_ANSWER_S = 10.0
_FLIGHT_S = 40.0
_JOIN_S = 2.0
_groups: list[TcpGroup] = []


class TcpGroup:
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
        ready_default_store()
        self._peers = Peers(ranks, me, lanes=list(lanes), host=host_address(), key=secrets.token_bytes(32))
        self._agreement = Agreement(ranks, me, self._peers.tell)
        try:
            self._meet(list(lanes), time.monotonic() + timeout_s)
        except BaseException:
            self._peers.close()
            raise
        self.communicators = {lane: self._make_lane(lane) for lane in lanes}
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
        if not self._agreement.await_quiet(lane, answer_s=_ANSWER_S, flight_s=_FLIGHT_S):
            # Cuts the connections, so that no thread is left behind; and the next lane need not wait as long once more.
            self._agreement.break_off(Cause(f"rank {self._me} waited in vain for the others to leave lane {lane!r}"))
        if not self.communicators[lane].join(_JOIN_S):
            _log.warning("rank %d: a transfer on lane %r does not end and was abandoned", self._me, lane)
        if is_last:
            self._peers.close()
            if self in _groups:
                _groups.remove(self)

    def failure(self) -> Cause | None:
        """Why no lane goes on: a peer is gone, say. None while all is well, and where peers left in order."""
        return self._agreement.broken

    def departure(self) -> Cause | None:
        """Who has left a lane, in order or not; None while everybody is there."""
        found = (self._agreement.refusal(lane) for lane in self.communicators)
        return next((cause for cause in found if cause is not None), None)

    def give_up(self, text: str) -> None:
        """Ends all lanes of the group for good, on all ranks; ``text`` says why. Not if they have ended already."""
        self._agreement.break_off(Cause(text))

    def is_of_this_process(self) -> bool:
        """False in a process that was forked from the one that made the group."""
        return self._pid == os.getpid()

    def _meet(self, lanes: list[str], deadline_s: float) -> None:
        mine = {"door": self._peers.door, "lanes": lanes}
        everyone = exchange(mine, ranks=self._ranks, me=self._me, timeout_s=self._timeout_s)
        for peer, theirs in everyone.items():
            if theirs["lanes"] != lanes:
                raise ConfigError(
                    f"rank {self._me} creates lanes {lanes} over ranks {list(self._ranks)}, rank {peer} creates "
                    f"{theirs['lanes']}; all must ask for the same"
                )
        self._peers.connect({peer: Door(*theirs["door"]) for peer, theirs in everyone.items()}, deadline_s)

    def _make_lane(self, lane: str) -> TcpCommunicator:
        return TcpCommunicator(
            lane,
            self._ranks,
            self._me,
            agreement=self._agreement,
            links=TcpLinks(f"hp_sharding-{lane}", self._peers.take_ways(lane)),
            timeout_s=self._timeout_s,
            close=self.close,
        )

    def _check_overdue(self) -> None:
        lane = self._agreement.overdue(self._timeout_s)
        if lane is not None:
            text = f"the transfer on lane {lane!r} did not end within {self._timeout_s:g} s after all ranks had arrived"
            self._agreement.break_off(Cause(text))


def _register(group: TcpGroup) -> None:
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
