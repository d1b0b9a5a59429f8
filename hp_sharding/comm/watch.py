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
from collections.abc import Callable
from typing import Protocol

from ..errors import CommError
from .agreement import Cause

_log = logging.getLogger("hp_sharding")
_CLOSE_S = 0.0002
_CLOSE_FOR_S = 2.0
_IDLE_S = 0.25
GRACE_S = 10.0
"""How long the main thread may stand where it is, once a collective cannot end, before the process is ended."""
_POLL_S = 0.2


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

    def give_up(self, text: str) -> None:
        """Tells the others that nothing goes on here."""


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
        self._idle_s = min(_IDLE_S, timeout_s / 4)
        self._close_until_s = 0.0
        self._control = control
        self._left_s: float | None = None
        self._prepare = prepare
        self._lock = threading.Lock()
        self._works: list[Watched] = []
        self._failed: list[Watched] = []
        self._wake = threading.Event()
        self._told = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name="hp_sharding-watch", daemon=True)
        self._thread.start()

    def add(self, work: Watched) -> None:
        """Watches a work until it is done; works of one lane in order."""
        with self._lock:
            self._works.append(work)
        if not self._wake.is_set():
            self._wake.set()

    def look_closely(self) -> None:
        """For a while looks so often that the times at which collectives end are good for a timeline."""
        self._close_until_s = time.perf_counter() + _CLOSE_FOR_S

    def tell(self) -> None:
        """Somebody raises the failure: the process need not be ended for it to be heard."""
        self._told.set()

    def fail(self, reason: str) -> None:
        """Makes every lane fail, and every work that is watched. The first reason counts."""
        with self._lock:
            if self.failure is None:
                self.failure = reason
            for work in self._works:
                work.fail(self.failure)
            # Kept for good: the device may be at their memory still.
            self._failed += self._works
            self._works = []

    def break_off(self, reason: str) -> None:
        """As ``fail``, and tells the other ranks, which wait for this one."""
        self.fail(reason)
        self._control.give_up(reason)

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
            self._rest()
            while self._look() and not self._stopped:
                self._rest()

    def _rest(self) -> None:
        time.sleep(_CLOSE_S if time.perf_counter() < self._close_until_s else self._idle_s)

    def _look(self) -> bool:
        """Whether something is still under way."""
        try:
            with self._lock:
                self._works = [work for work in self._works if not work.done()]
                oldest = self._works[0] if self._works else None
        except CommError as error:
            self._give_up(str(error))
            return False
        if oldest is None:
            return False
        reason = self._gone() or self._overdue(oldest)
        if reason is not None:
            self._give_up(f"{self._who}: {oldest.describe()} cannot end: {reason}")
        return reason is None

    def _await_movement(self) -> None:
        """Returns once the main thread has stood still for too long, or the lanes are closed.

        A script that has caught the error may have something long to do, such as to save; it gets ``timeout_s`` for it.
        """
        place, since_s = _main_thread_is_at(), time.perf_counter()
        while not self._stopped:
            time.sleep(_POLL_S)
            now = _main_thread_is_at()
            if now != place:
                place, since_s = now, time.perf_counter()
            grace_s = max(GRACE_S, self._timeout_s) if self._told.is_set() else GRACE_S
            if time.perf_counter() - since_s > grace_s:
                return

    def _gone(self) -> str | None:
        failure, departure = self._control.failure(), self._control.departure()
        if failure is not None:
            return failure.text
        if departure is None:
            return None
        # It may have done its part of what is under way before it left.
        self._left_s = self._left_s or time.perf_counter()
        return departure.text if time.perf_counter() - self._left_s > GRACE_S else None

    def _overdue(self, oldest: Watched) -> str | None:
        if time.perf_counter() - oldest.issued_s <= self._timeout_s:
            return None
        return f"it was started {self._timeout_s:g} s ago. Some rank has not started it: look at the logs of the others"

    def _give_up(self, text: str) -> None:
        self.fail(text)
        _log.critical("%s", text)
        # The others wait for this rank as well.
        self._control.give_up(text)
        self._await_movement()
        if self._stopped:
            return
        # Whoever waits does so inside the device's runtime. To go on means to hang for ever.
        sys.stderr.write(f"{text}\nThe process ends, since its main thread stands still; all stacks:\n")
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)


def _main_thread_is_at() -> list[tuple[int, int]]:
    """Its frames and where in each it is; the same as long as it is inside one call of the runtime."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places = []
    while frame is not None:
        places.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return places
