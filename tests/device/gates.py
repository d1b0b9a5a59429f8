"""A work of a device that is done when the test says so."""

from __future__ import annotations

import time

import paddle

from hp_sharding.errors import CommError
from tests.device import standin
from tests.unit.test_comm_contract import Gate


class DeviceGate(Gate):
    """An event on a stream that stands still until it is opened: ``wait()`` makes the current stream wait for it.

    The stand-in's compute stream works in the calling thread, and Paddle keeps hold of the interpreter meanwhile. So
    what makes that stream wait for it, or for a work that follows it, comes after ``open()``, in the same thread.
    """

    on_device = True

    def __init__(self, error: CommError | None = None) -> None:
        super().__init__(error)
        self._held = standin.Device().held_stream()

    def open(self) -> None:
        self._held.open()

    def open_soon(self) -> None:
        """Later than whatever did not wait for it, and before whoever must."""
        time.sleep(0.05)
        self.open()

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        paddle.device.current_stream().wait_event(self._held.event)

    def done(self) -> bool:
        return self._error is not None or self._held.event.query()
