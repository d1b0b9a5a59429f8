"""Moves bytes to the next rank of a ring and from the one before, over two-rank Gloo groups.

Paddle's Gloo groups do their work inside the call, and number their messages by a counter for each group and rank. So
each directed edge of the ring has a group of its own, used in that one direction, by one thread at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import paddle

from .memory import Bytes


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

    def __init__(self, name: str, move: Callable[[Bytes], None]) -> None:
        # A daemon, so that a thread stuck inside Gloo cannot keep the interpreter from ending.
        super().__init__(name=name, daemon=True)
        self._move = move
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
        # The messages of an edge are numbered: after one has failed no later one can find its partner.
        if self._error is None:
            try:
                if order.after is not None:
                    order.after.wait()
                self._move(order.data)
            except Exception as error:  # noqa: BLE001 - goes to whoever waits for the transfer
                self._error = error
        return self._error


class GlooLinks:
    """Links over two Gloo groups of two ranks each.

    Args:
        name: begins the names of the threads.
        send_group: this rank (0 in it) and the next.
        recv_group: the rank before (0 in it) and this one.
    """

    def __init__(self, name: str, send_group: Any, recv_group: Any) -> None:
        self._send_group = send_group
        self._recv_group = recv_group
        self._sender = _Pump(f"{name}-send", self.send)
        self._receiver = _Pump(f"{name}-recv", self.recv)
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
        self._send_group.send(paddle.from_dlpack(data), 1, True)

    def recv(self, data: Bytes) -> None:
        """See ``Links``."""
        self._recv_group.recv(paddle.from_dlpack(data), 0, True)

    def stop(self) -> None:
        """Lets the threads end after what has been ordered."""
        self._sender.stop()
        self._receiver.stop()

    def join(self, deadline_s: float) -> bool:
        """Waits for the threads to end, until a time of ``time.monotonic``; False if one is still inside Gloo."""
        for pump in (self._sender, self._receiver):
            pump.join(max(0.0, deadline_s - time.monotonic()))
        return not (self._sender.is_alive() or self._receiver.is_alive())
