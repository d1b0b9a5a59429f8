"""Looks after collectives on streams: notes when they end, and reports those that do not.

Nobody waits on the host for a collective on a stream, so nobody on the host notices when one hangs: the program goes on
until it reads a value, and stays there, inside the device's runtime, where no exception reaches it. A thread of its own
asks from time to time instead. It asks the control connections between the hosts as well, which hear at once when a
process is gone: then nobody waits for ``timeout_s``.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ..errors import CommError
from .agreement import Cause

_log = logging.getLogger("hp_sharding")
_CLOSE_S = 0.0002
_IDLE_S = 0.25
GRACE_S = 10.0
"""How long a failure waits for somebody to raise it before the process is ended."""


class Watched(Protocol):
    """What the watcher asks a work for, and tells it."""

    issued_s: float

    def done(self) -> bool:
        """Whether it has ended."""

    def fail(self, reason: str) -> None:
        """Makes it failed."""

    def describe(self) -> str:
        """Names it, for a report."""


class Control(Protocol):
    """What the watcher asks the hosts' connections."""

    def failure(self) -> Cause | None:
        """Why nothing goes on any more."""

    def departure(self) -> Cause | None:
        """Who has left in order, or not."""


class Watcher:
    """One thread for the lanes of one set of ranks.

    Args:
        who: names the rank and the group, for reports.
        timeout_s: after which a collective that has not ended makes all lanes fail.
        control: knows which ranks are gone.
        prepare: called first in the thread.

    Attributes:
        failure: why all lanes have failed; None while they have not.
    """

    def __init__(self, who: str, *, timeout_s: float, control: Control, prepare: Callable[[], None]) -> None:
        self.failure: str | None = None
        self._who = who
        self._timeout_s = timeout_s
        self._interval_s = min(_IDLE_S, timeout_s / 4)
        self._control = control
        self._left_s: float | None = None
        self._prepare = prepare
        self._works: deque[Watched] = deque()
        self._wake = threading.Event()
        self._told = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name="hp_sharding-watch", daemon=True)
        self._thread.start()

    def add(self, work: Watched) -> None:
        """Watches a work until it is done; works of one lane in order."""
        self._works.append(work)
        if not self._wake.is_set():
            self._wake.set()

    def look_closely(self) -> None:
        """From now on looks so often that the times at which collectives end are good for a timeline."""
        self._interval_s = _CLOSE_S

    def tell(self) -> None:
        """Somebody raises the failure: the process need not be ended for it to be heard."""
        self._told.set()

    def fail(self, reason: str) -> None:
        """Makes every lane fail, and every work that is watched. The first reason counts."""
        if self.failure is None:
            self.failure = reason
        while self._works:
            self._works.popleft().fail(self.failure)

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _serve(self) -> None:
        self._prepare()
        while not self._stopped:
            self._wake.wait()
            # Cleared first: what is added from here on sets it again.
            self._wake.clear()
            # Not at once: to wake up for every collective takes the interpreter from the thread that starts it.
            time.sleep(self._interval_s)
            while self._look() and not self._stopped:
                time.sleep(self._interval_s)

    def _look(self) -> bool:
        """Whether something is still under way."""
        try:
            for _ in range(len(self._works)):
                work = self._works.popleft()
                if not work.done():
                    self._works.append(work)
        except CommError as error:
            self.fail(str(error))
        if self._works:
            reason = self._gone() or self._overdue()
            if reason is not None:
                self._give_up(f"{self._who}: {self._works[0].describe()} cannot end: {reason}")
        return bool(self._works)

    def _gone(self) -> str | None:
        failure, departure = self._control.failure(), self._control.departure()
        if failure is not None:
            return failure.text
        if departure is None:
            return None
        # It may have done its part of what is under way before it left.
        self._left_s = self._left_s or time.perf_counter()
        return departure.text if time.perf_counter() - self._left_s > GRACE_S else None

    def _overdue(self) -> str | None:
        if time.perf_counter() - self._works[0].issued_s <= self._timeout_s:
            return None
        return f"it was started {self._timeout_s:g} s ago. Some rank has not started it: look at the logs of the others"

    def _give_up(self, text: str) -> None:
        self.fail(text)
        _log.critical("%s", text)
        if self._told.wait(GRACE_S) or self._stopped:
            return
        # Whoever waits does so inside the device's runtime. To go on means to hang for ever.
        sys.stderr.write(f"{text}\nThe process ends, since nothing in it can be reached; its stacks:\n")
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)
