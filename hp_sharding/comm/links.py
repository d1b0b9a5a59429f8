"""Moves bytes to the next rank of a ring and from the one before, over one TCP connection in each direction.

Not over Gloo, which Paddle uses on CPU: it gives up after 30 s, for good, at times with the whole process; its groups
are never freed; and it wakes a thread for every segment that comes in. On one core a rank those wake-ups slow the
compute more than the copying does. Here a thread sleeps in the kernel until a good part of a message has come.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from .memory import Bytes

# What has to be there before a receiver is woken, where as much is expected. At 1 Gbit/s that is once in 2 ms.
_WAKE_BYTES = 256 << 10
# Older kernels may forget to wake anybody at all: after a second a receiver looks for itself. A ``struct timeval``.
_LOOK_AGAIN = struct.pack("ll", 1, 0)


class Transfer:
    """One message on its way. Memory that it reads or writes stays alive until it is over."""

    __slots__ = ("_over", "error")

    def __init__(self) -> None:
        self._over = threading.Lock()
        self._over.acquire()
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Blocks until the message has been sent or received; raises what went wrong."""
        with self._over:
            pass
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None = None) -> None:
        """Says that it is over. Once only."""
        self.error = error
        self._over.release()


class Links(Protocol):
    """What a ring algorithm needs: a way to the next rank and a way from the one before, each first in, first out."""

    def start_send(self, data: Bytes, after: Transfer | None = None) -> Transfer:
        """Sends to the next rank once ``after`` is over."""

    def start_recv(self, data: Bytes, after: Transfer | None = None) -> Transfer:
        """Receives from the rank before, once ``after`` is over."""

    def send(self, data: Bytes) -> None:
        """Sends in the calling thread. Nothing may be on its way."""

    def recv(self, data: Bytes) -> None:
        """Receives in the calling thread. Nothing may be on its way."""


class _Order(NamedTuple):
    transfer: Transfer
    data: Bytes
    after: Transfer | None


class _Pump(threading.Thread):
    """Carries out the transfers of one edge, one after the other."""

    def __init__(self, name: str, move: Callable[[Bytes], None], fail: Callable[[], None]) -> None:
        # A daemon, so that a thread stuck in a transfer cannot keep the interpreter from ending.
        super().__init__(name=name, daemon=True)
        self._move = move
        self._fail = fail
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._error: BaseException | None = None

    def order(self, data: Bytes, after: Transfer | None) -> Transfer:
        transfer = Transfer()
        self._orders.put(_Order(transfer, data, after))
        return transfer

    def stop(self) -> None:
        self._orders.put(None)

    def run(self) -> None:
        while (order := self._orders.get()) is not None:
            transfer, error = order.transfer, self._carry_out(order)
            # Whoever sees the transfer end may use the memory again, and finds nobody else holding it.
            del order
            transfer.end(error)

    def _carry_out(self, order: _Order) -> BaseException | None:
        # After a message that broke off, nobody knows where the next one begins.
        if self._error is None:
            try:
                if order.after is not None:
                    order.after.wait()
                self._move(order.data)
            except Exception as error:  # noqa: BLE001 - goes to whoever waits for the transfer
                # Its traceback would keep the memory of the message alive as long as this thread.
                self._error = error.with_traceback(None)
                # Whoever waits for what comes the other way would wait for ever.
                self._fail()
        return self._error


class Ways(NamedTuple):
    """What one lane needs: a connection to the next rank of the ring and one from the rank before."""

    to_next: socket.socket
    from_before: socket.socket


class TcpLinks:
    """Links over two connected sockets, which are closed with it.

    Args:
        name: begins the names of the threads.
        ways: the connections; each is used in one direction.
    """

    def __init__(self, name: str, ways: Ways) -> None:
        self._ways = ways
        self._wake_bytes = 1
        ways.from_before.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LOOK_AGAIN)
        self._sender = _Pump(f"{name}-send", self.send, self.cut)
        self._receiver = _Pump(f"{name}-recv", self.recv, self.cut)
        self._sender.start()
        self._receiver.start()

    def start_send(self, data: Bytes, after: Transfer | None = None) -> Transfer:
        """See ``Links``."""
        return self._sender.order(data, after)

    def start_recv(self, data: Bytes, after: Transfer | None = None) -> Transfer:
        """See ``Links``."""
        return self._receiver.order(data, after)

    def send(self, data: Bytes) -> None:
        """See ``Links``."""
        self._ways.to_next.sendall(data.data)

    def recv(self, data: Bytes) -> None:
        """See ``Links``."""
        rest = data.data
        if len(rest) > 2 * _WAKE_BYTES:
            # The end of the message is still to come then, so that the kernel always has enough to wake us once more.
            self._wake_at(_WAKE_BYTES)
            rest = self._fill(rest, len(rest) - _WAKE_BYTES)
        self._wake_at(1)
        self._fill(rest, len(rest))

    def cut(self) -> None:
        """Ends what is under way, with an error, from any thread; nothing can be sent or received any more."""
        for way in self._ways:
            # A close would let go of the descriptor under a thread that uses it; this wakes that thread.
            with contextlib.suppress(OSError):
                way.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Lets the threads end after what has been ordered."""
        self._sender.stop()
        self._receiver.stop()

    def join(self, deadline_s: float) -> bool:
        """Waits for the threads to end, until a time of ``time.monotonic``; False if one is still at work."""
        for pump in (self._sender, self._receiver):
            pump.join(max(0.0, deadline_s - time.monotonic()))
        if self._sender.is_alive() or self._receiver.is_alive():
            return False
        for way in self._ways:
            way.close()
        return True

    def _fill(self, rest: memoryview, nbytes: int) -> memoryview:
        """Receives so many bytes; returns what is left of the memory. Sleeps in the kernel, in one call mostly."""
        while nbytes:
            try:
                count = self._ways.from_before.recv_into(rest, nbytes, socket.MSG_WAITALL)
            except BlockingIOError:
                continue  # looked again
            if count == 0:
                raise ConnectionResetError("the rank before has closed the connection")
            rest, nbytes = rest[count:], nbytes - count
        return rest

    def _wake_at(self, nbytes: int) -> None:
        if nbytes != self._wake_bytes:
            self._ways.from_before.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._wake_bytes = nbytes
