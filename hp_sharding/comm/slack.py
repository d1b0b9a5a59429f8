"""Threads that nobody asked for and that wake up all the time, such as Gloo's: how to have them sleep for longer.

Each of Paddle's Gloo groups has a thread that looks a hundred times a second whether it is to end, and ``fleet.init``
makes half a dozen groups. All together that is a percent of a core that computes. Linux lets a thread allow its timers
to be late, and threads that it starts inherit that. What comes over a connection wakes them at once all the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

_SET, _GET = 29, 30  # PR_SET_TIMERSLACK, PR_GET_TIMERSLACK
SLACK_S = 0.05
"""A Gloo connection that is closed waits for such a thread, so not for much longer."""


@contextlib.contextmanager
def slow_timers() -> Iterator[None]:
    """Threads started inside, from this thread, may wake up later than they wanted to, by up to ``SLACK_S``.

    So may this one until the end. Does nothing on other systems than Linux, nor where it may not ask.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None
    before_ns = prctl(_GET, 0, 0, 0, 0) if prctl is not None else -1
    if prctl is None or before_ns < 0:
        yield
        return
    prctl(_SET, ctypes.c_ulong(round(SLACK_S * 1e9)), 0, 0, 0)
    try:
        yield
    finally:
        # Zero would mean the value that this thread was born with.
        prctl(_SET, ctypes.c_ulong(max(1, before_ns)), 0, 0, 0)
