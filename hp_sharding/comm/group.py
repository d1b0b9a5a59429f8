"""All lanes over one set of ranks: how they are made, and how they end with the process."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CommError, ConfigError
from .agreement import Agreement, Cause
from .gloo import GlooCommunicator
from .links import GlooLinks
from .peers import Door, Peers
from .rendezvous import Meeting, exchange, host_address, join_meeting, make_group, open_meeting

_log = logging.getLogger("hp_sharding")
# At exit: for what is in flight, and for the others' last word.
_EXIT_S = 40.0
_JOIN_S = 2.0
_groups: list[GlooGroup] = []


class GlooGroup:
    """The lanes of one call of ``create_communicators``: they share control connections and fail together."""

    def __init__(self, ranks: tuple[int, ...], me: int, lanes: Sequence[str], *, timeout_s: float) -> None:
        self._ranks = ranks
        self._me = me
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._peers = Peers(ranks, me, host=host_address(), key=secrets.token_bytes(32))
        self._agreement = Agreement(ranks, me, self._peers.tell)
        edges = self._meet(lanes)
        self.communicators: dict[str, GlooCommunicator] = {}
        for lane in lanes:
            send_group, recv_group = edges[lane, "send"], edges[lane, "recv"]
            self.communicators[lane] = GlooCommunicator(
                lane,
                ranks,
                me,
                agreement=self._agreement,
                links=GlooLinks(f"hp_sharding-{lane}", send_group, recv_group),
                timeout_s=timeout_s,
            )
        self._peers.watch(self._agreement, self._check_overdue)
        for communicator in self.communicators.values():
            communicator.start()
        _register(self)

    def leave(self) -> None:
        """Tells the others that this rank ends; they answer without their scripts' doing."""
        cause = Cause(f"rank {self._me} has ended its script", self._me)
        for lane in self.communicators:
            self._agreement.leave(lane, cause)

    def end(self, timeout_s: float) -> None:
        """After ``leave``: waits until nobody needs this rank any more, then lets go of everything."""
        self._agreement.await_quiet(timeout_s)
        for lane, communicator in self.communicators.items():
            if not communicator.join(_JOIN_S):
                _log.warning("rank %d: lane %r is stuck inside Gloo and was abandoned", self._me, lane)
        self._peers.close()

    def _meet(self, lanes: Sequence[str]) -> dict[tuple[str, str], Any]:
        opened = {lane: open_meeting(self._me, self._timeout_s) for lane in lanes}
        meetings = {lane: meeting for lane, (_, meeting) in opened.items()}
        mine = {"door": self._peers.door, "lanes": list(lanes), "meetings": meetings}
        everyone = exchange(mine, ranks=self._ranks, me=self._me, timeout_s=self._timeout_s)
        for peer, theirs in everyone.items():
            if theirs["lanes"] != list(lanes):
                raise ConfigError(
                    f"rank {self._me} creates lanes {list(lanes)} over ranks {list(self._ranks)}, rank {peer} creates "
                    f"{theirs['lanes']}; all must ask for the same"
                )
        self._peers.connect({peer: Door(*theirs["door"]) for peer, theirs in everyone.items()}, self._left_s())
        before = everyone[self._ranks[self._ranks.index(self._me) - 1]]
        tasks: dict[tuple[str, str], Callable[[], Any]] = {}
        for lane in lanes:
            tasks[lane, "send"] = _sending(*opened[lane])
            tasks[lane, "recv"] = _receiving(Meeting(*before["meetings"][lane]), self._timeout_s)
        return self._all_at_once(tasks)

    def _all_at_once(self, tasks: dict[tuple[str, str], Callable[[], Any]]) -> dict[tuple[str, str], Any]:
        """Runs each task in a thread of its own: making a group takes 0.3 s, nearly all of it waiting."""
        results: dict[tuple[str, str], Any] = {}
        errors: list[Exception] = []

        def run(name: tuple[str, str], task: Callable[[], Any]) -> None:
            try:
                results[name] = task()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=item, daemon=True) for item in tasks.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self._left_s())
        if len(results) < len(tasks):
            reason = errors[0] if errors else f"not done within {self._timeout_s:g} s"
            raise CommError(
                f"rank {self._me} could not make the Gloo groups between ranks {list(self._ranks)}: {reason}",
                op="create_communicators",
                rank=self._me,
            )
        return results

    def _left_s(self) -> float:
        return max(0.1, self._deadline_s - time.monotonic())

    def _check_overdue(self) -> None:
        lane = self._agreement.overdue(self._timeout_s)
        if lane is not None:
            text = f"the transfer on lane {lane!r} did not end within {self._timeout_s:g} s after all ranks had arrived"
            self._agreement.break_off(Cause(text))


def _sending(store: Any, meeting: Meeting) -> Callable[[], Any]:
    return lambda: make_group(store, meeting, 0)


def _receiving(meeting: Meeting, timeout_s: float) -> Callable[[], Any]:
    return lambda: make_group(join_meeting(meeting, timeout_s), meeting, 1)


def _register(group: GlooGroup) -> None:
    if not _groups:
        # Children of multiprocessing run only its own finalizers, scripts run both; the second finds nothing to do.
        atexit.register(end_all)
        multiprocessing.util.Finalize(None, end_all, exitpriority=100)
    _groups.append(group)


def end_all() -> None:
    """Ends every group of this process in order. Runs by itself when the interpreter exits."""
    groups = _groups[:]
    _groups.clear()
    for group in groups:
        group.leave()
    deadline_s = time.monotonic() + _EXIT_S
    for group in groups:
        group.end(max(0.0, deadline_s - time.monotonic()))
