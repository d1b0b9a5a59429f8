"""Ranks that wait for each other: found when they do, and not when ``timeout_s`` is over.

A rank whose script has waited for a collective for a while tells the others which one, and how many it has launched on
each lane. While it waits it launches nothing. So if rank 0 waits for what rank 1 has not launched, and rank 1 for what
rank 0 has not launched, neither ever will; and the same for any ring of ranks. It does not matter how old the messages
are: of those in the ring somebody would have to be the first to go on, and all it waits for would have to be launched
by a rank that, when it spoke, had not launched it, and has waited since.

That holds as long as one thread launches. A rank where another one does says nothing, and neither does one that waits
for something else, such as data: these are waited for until ``timeout_s``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

_PATIENCE_S = 1.0
"""How long a wait lasts before it is told: most end sooner."""


class Awaited(Protocol):
    """A collective that somebody waits for."""

    lane: str
    sequence: int

    def done(self) -> bool:
        """Whether it has ended."""

    def describe(self) -> str:
        """What it is, for messages."""


class Wait(NamedTuple):
    """Where a rank stands.

    Attributes:
        lane: of the collective that it waits for.
        sequence: its number there.
        what: names it.
        launched: lane -> how many collectives the rank has launched.
    """

    lane: str
    sequence: int
    what: str
    launched: dict[str, int]


class Ring(NamedTuple):
    """Ranks that wait for each other: in words, and the one that this rank waits for, or else one of them."""

    text: str
    peer: int


class Standstill:
    """What the members of one group say of their waits.

    Args:
        me: this process's global rank.
        tell: sends a message to all other members.

    Attributes:
        me: see above.
    """

    def __init__(self, me: int, tell: Callable[[list[object]], None]) -> None:
        self.me = me
        self._tell = tell
        self._launched: dict[str, int] = {}
        self._last_launcher: threading.Thread | None = None
        self._launchers: set[threading.Thread] = set()
        self._changing = threading.Lock()
        self._awaited: Awaited | None = None
        self._waiter: threading.Thread | None = None
        self._since_s = 0.0
        self._told: Awaited | None = None
        self._waits: dict[int, Wait] = {}

    def launch(self, lane: str, sequence: int) -> None:
        """This rank launches a collective."""
        self._launched[lane] = sequence + 1
        thread = threading.current_thread()
        if thread is not self._last_launcher:
            with self._changing:
                self._last_launcher = thread
                self._launchers = {thread, *(other for other in self._launchers if other.is_alive())}

    def begin_wait(self, work: Awaited) -> None:
        """The calling thread waits for a collective that is not over."""
        thread = threading.current_thread()
        if thread in self._launchers:  # and not a lane's thread, which waits for what its next collective follows
            self._since_s, self._waiter, self._awaited = time.monotonic(), thread, work

    def end_wait(self, work: Awaited) -> None:
        """It waits no longer, also where the wait was interrupted."""
        if self._awaited is work:
            self._awaited = None

    def speak(self) -> Ring | None:
        """Tells the others of a long wait, once. Returns what ``hear`` does. Call now and then, from one thread."""
        work = self._awaited
        if work is None or work is self._told or time.monotonic() - self._since_s < _PATIENCE_S:
            return None
        wait = Wait(work.lane, work.sequence, work.describe(), dict(self._launched))
        others = any(thread.is_alive() for thread in self._launchers if thread is not self._waiter)
        # Looked at last: as it still waits, it has launched nothing since.
        if others or self._awaited is not work or work.done():
            return None
        self._told = work
        self._tell(["wait", *wait])
        return self._note(self.me, wait)

    def hear(self, peer: int, wait: Wait) -> Ring | None:
        """Takes in what another rank has told. Returns the ring that shows by it, or None."""
        return self._note(peer, wait)

    def _note(self, rank: int, wait: Wait) -> Ring | None:
        self._waits[rank] = wait
        ring = self._ring([rank])
        if ring is None:
            return None
        waits = [
            f"rank {one} for rank {other} in {self._waits[one].what} on lane {self._waits[one].lane!r}"
            for one, other in zip(ring, [*ring[1:], ring[0]], strict=True)
        ]
        text = (
            f"the ranks have gone different ways and wait for each other, {', '.join(waits)}; all ranks must start the "
            "same collectives in one order"
        )
        return Ring(text, ring[(ring.index(self.me) + 1) % len(ring)] if self.me in ring else ring[0])

    def _ring(self, path: list[int], seen: set[int] | None = None) -> list[int] | None:
        """A way from the first of ``path``, along who waits for whom, back to it."""
        seen = set() if seen is None else seen
        wait = self._waits[path[-1]]
        for other, theirs in self._waits.items():
            if theirs.launched.get(wait.lane, 0) > wait.sequence:
                continue
            if other == path[0] and len(path) > 1:
                return path
            if other not in seen and other not in path:
                seen.add(other)
                found = self._ring([*path, other], seen)
                if found is not None:
                    return found
        return None
