"""The directed edges of rings: a Gloo group of two for each, kept for the next ring when a lane has been closed.

Paddle never lets go of a group (a thread, some file descriptors and 0.3 s each), so a process that makes and closes
communicators again and again would run out of them.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import CommError
from .rendezvous import Meeting, join_meeting, make_group, open_meeting


class Edge(NamedTuple):
    """A Gloo group used in one direction.

    Attributes:
        source: global rank that sends; rank 0 of the group.
        target: global rank that receives; rank 1 of the group.
        group_id: the group's number, the same in both processes.
        group: Paddle's process group.
    """

    source: int
    target: int
    group_id: int
    group: Any


class Ways(NamedTuple):
    """What one lane needs: the edge to the next rank of the ring and the one from the rank before."""

    to_next: Edge
    from_before: Edge


_idle: dict[tuple[int, int], dict[int, Edge]] = defaultdict(dict)


def idle_group_ids(source: int, target: int) -> list[int]:
    """Numbers of the groups that this process has to spare on an edge."""
    return sorted(_idle[source, target])


def give_back(ways: Ways) -> None:
    """Keeps edges for later. Both ends must have finished the same transfers, and no thread may use them."""
    for edge in ways:
        _idle[edge.source, edge.target][edge.group_id] = edge


class EdgePlan:
    """Makes the edges of several lanes at once.

    Both ends of an edge know what either has to spare; they use what both have, and make the rest.

    Args:
        nlanes: how many edges are needed in each direction.
        me: this process's global rank.
        timeout_s: for the stores' own patience.
    """

    def __init__(self, nlanes: int, me: int, timeout_s: float) -> None:
        self._nlanes = nlanes
        self._me = me
        self._timeout_s = timeout_s
        self._tasks: list[Callable[[], Edge]] = []

    def open(self, target: int, spare_there: list[int]) -> list[Meeting]:
        """Plans the edges to ``target``. Returns where it is to come for the new ones."""
        self._reuse(self._me, target, spare_there)
        opened = [open_meeting(self._me, self._timeout_s) for _ in range(self._nlanes - len(self._tasks))]
        for store, meeting in opened:
            self._tasks.append(_making(Edge(self._me, target, meeting.group_id, None), store, meeting))
        return [meeting for _, meeting in opened]

    def join(self, source: int, spare_there: list[int], meetings: list[Meeting]) -> None:
        """Plans the edges from ``source``, after ``open``."""
        self._reuse(source, self._me, spare_there)
        for meeting in meetings:
            self._tasks.append(_joining(Edge(source, self._me, meeting.group_id, None), meeting, self._timeout_s))

    def carry_out(self, deadline_s: float) -> list[Ways]:
        """Makes what is missing, all at once: each takes 0.3 s, nearly all of it waiting. One result per lane.

        Raises:
            CommError: it failed, or is not done at ``deadline_s`` (of ``time.monotonic``).
        """
        edges: dict[int, Edge] = {}
        errors: list[BaseException] = []

        def run(index: int, task: Callable[[], Edge]) -> None:
            try:
                edges[index] = task()
            except Exception as error:  # noqa: BLE001 - whatever Paddle raises, the main thread reports it
                errors.append(error)

        threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(self._tasks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.1, deadline_s - time.monotonic()))
        if len(edges) < len(self._tasks):
            reason = errors[0] if errors else f"not done within {self._timeout_s:g} s"
            raise CommError(
                f"rank {self._me} could not make its Gloo groups: {reason}", op="create_communicators", rank=self._me
            )
        return [Ways(edges[lane], edges[self._nlanes + lane]) for lane in range(self._nlanes)]

    def _reuse(self, source: int, target: int, spare_there: list[int]) -> None:
        idle = _idle[source, target]
        for group_id in sorted(idle.keys() & set(spare_there))[: self._nlanes]:
            self._tasks.append(_taking(idle.pop(group_id)))


def _taking(edge: Edge) -> Callable[[], Edge]:
    return lambda: edge


def _making(edge: Edge, store: Any, meeting: Meeting) -> Callable[[], Edge]:
    return lambda: edge._replace(group=make_group(store, meeting, 0))


def _joining(edge: Edge, meeting: Meeting, timeout_s: float) -> Callable[[], Edge]:
    return lambda: edge._replace(group=make_group(join_meeting(meeting, timeout_s), meeting, 1))
