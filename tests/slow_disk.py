"""A disk that takes its time, so that something can happen while a checkpoint is being written."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def slow_disk(seconds: Callable[[], float] | float, *, bytes_at_once: int | None = None) -> Iterator[None]:
    """Inside, each ``os.fsync`` of this process takes that much longer.

    Args:
        seconds: how long, or a function that is asked each time.
        bytes_at_once: if given, no ``os.write`` takes more, and each takes that much longer, too.
    """
    sync, write = os.fsync, os.write

    def rest() -> None:
        time.sleep(seconds() if callable(seconds) else seconds)

    def slow_sync(fd: int) -> None:
        rest()
        sync(fd)

    def slow_write(fd: int, data: memoryview) -> int:
        rest()
        return write(fd, data[:bytes_at_once])

    with mock.patch.object(os, "fsync", slow_sync):
        if bytes_at_once is None:
            yield
            return
        with mock.patch.object(os, "write", slow_write):
            yield


@contextmanager
def held_disk() -> Iterator[threading.Event]:
    """Inside, no ``os.fsync`` of this process ends before the event is set, which happens at the end at the latest."""
    original = os.fsync
    goes_on = threading.Event()

    def fsync(fd: int) -> None:
        goes_on.wait()
        original(fd)

    with mock.patch.object(os, "fsync", fsync):
        try:
            yield goes_on
        finally:
            goes_on.set()
