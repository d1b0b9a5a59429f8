"""Times of a device's compute stream, for the timeline: seen by events that the watcher asks for."""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import paddle

from .agreement import Cause
from .communicator import Mark, Stall
from .device import current_device
from .watch import Watcher


class _NoControl:
    """There is one rank: nobody can be gone."""

    def failure(self) -> Cause | None:
        return None

    def departure(self) -> Cause | None:
        return None

    def give_up(self, text: str) -> None:
        pass


@functools.cache
def lone_watcher() -> Watcher:
    """For marks where no other rank is: one thread a process."""
    name = current_device().name
    return Watcher("timeline", timeout_s=math.inf, control=_NoControl(), prepare=lambda: paddle.set_device(name))


class StreamMark(Mark):
    """A moment of the current stream. Its time is when the event was first seen reached.

    It keeps its event: Paddle waits, on the host, for an event of a custom device that it is to destroy.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._event = paddle.device.Event()
        super().__init__()

    def renew(self) -> None:
        """See ``Mark``."""
        self.issued_s = time.perf_counter()
        self._event.record()
        self.time_s = None
        # Where the device has nothing left to do it is there already.
        self.done()

    def settle(self) -> None:
        """See ``Mark``."""
        if self.time_s is None:
            self._watcher.look_closely()
            self._watcher.add(self)

    def done(self) -> bool:
        """Part of ``Watched``: whether the stream has come so far."""
        if self.time_s is None and self._event.query():
            self.time_s = time.perf_counter()
        return self.time_s is not None

    def fail(self, reason: str) -> None:
        """Part of ``Watched``."""

    def describe(self) -> str:
        """Part of ``Watched``."""
        return "a mark of the timeline"


class StreamStall(Stall):
    """What the current stream does not do because it waits; seen by events on both sides of the wait."""

    def __init__(self, label: str) -> None:
        super().__init__(label, None, None)
        self.issued_s = time.perf_counter()
        self._before = paddle.device.Event()
        self._after: Any = None
        self._before.record()
        # Where compute is not ahead of the device the stall begins now, and nobody need look for it.
        self.done()

    def end(self) -> None:
        """The wait has been queued."""
        after = paddle.device.Event()
        after.record()
        # Only now: an event that has not been recorded says that it is reached.
        self._after = after
        self.done()

    def done(self) -> bool:
        """Part of ``Watched``: whether it is over."""
        if self.start_s is None and self._before.query():
            self.start_s = time.perf_counter()
        if self.end_s is None and self.start_s is not None and self._after is not None and self._after.query():
            self.end_s = time.perf_counter()
        return self.end_s is not None

    def fail(self, reason: str) -> None:
        """Part of ``Watched``."""

    def describe(self) -> str:
        """Part of ``Watched``."""
        return f"the wait for {self.label!r}"
