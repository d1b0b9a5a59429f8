"""Looks after collectives on streams: notes when they end, and reports those that do not.

Nobody waits on the host for a collective on a stream, so nobody on the host notices when one hangs: the program goes on
until it reads a value, and stays there, inside the device's runtime, where no exception reaches it. A thread of its own
asks from time to time instead.
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


class Watcher:
    """One thread for the lanes of one set of ranks.

    Args:
        who: names the rank and the group, for reports.
        timeout_s: after which a collective that has not ended makes all lanes fail.
        prepare: called first in the thread.

    Attributes:
        failure: why all lanes have failed; None while they have not.
    """

    def __init__(self, who: str, *, timeout_s: float, prepare: Callable[[], None]) -> None:
        self.failure: str | None = None
        self._who = who
        self._timeout_s = timeout_s
        self._interval_s = min(_IDLE_S, timeout_s / 4)
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

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is under way; False if something still is."""
        deadline_s = time.monotonic() + timeout_s
        while any(not work.done() for work in list(self._works)):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.001)
        return True

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
        overdue = [work for work in self._works if time.perf_counter() - work.issued_s > self._timeout_s]
        if overdue:
            self._give_up(overdue)
        return bool(self._works)

    def _give_up(self, overdue: list[Watched]) -> None:
        text = (
            f"{self._who}: {overdue[0].describe()} has not ended {self._timeout_s:g} s after it was started "
            f"({len(self._works)} under way). Some rank has not started it, or is gone: look at the logs of the others"
        )
        self.fail(text)
        _log.critical("%s", text)
        if self._told.wait(GRACE_S) or self._stopped:
            return
        # Whoever waits does so inside the device's runtime. To go on means to hang for ever.
        sys.stderr.write(f"{text}\nThe process ends, since nothing in it can be reached; its stacks:\n")
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)
