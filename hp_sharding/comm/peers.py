"""The connections of one rank: a control line to each other member of its group, and the ways of each lane's ring.

Lines say that a rank has reached a collective, that it leaves, that it is gone; one thread listens to all of them. Ways
carry the data. Whoever calls proves first that it knows the key of the rank that it calls.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import NamedTuple, Protocol

from ..errors import CommError
from .agreement import Message
from .links import Ways
from .rendezvous import free_port

_log = logging.getLogger("hp_sharding")
_TICK_S = 0.5
# How long a line may take nothing more. Megabytes have to lie unread before that, so the peer is stopped or cut off.
_FULL_S = 5.0


class Hearer(Protocol):
    """Who is told what the others say."""

    def hear(self, peer: int, message: Message) -> None:
        """A message of ``peer`` has come."""

    def lost(self, peer: int) -> None:
        """The connection to ``peer`` has ended."""


class Door(NamedTuple):
    """Where a rank can be reached, and the key that proves a caller belongs to the group."""

    host: str
    port: int
    key_hex: str


class _Line:
    """One connection. Any thread may send; only the watcher receives."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._sending = threading.Lock()
        self._room = select.poll()
        self._room.register(connection, select.POLLOUT)
        # Without this a small message waits 40 ms for the acknowledgement of the one before (Nagle's algorithm).
        with _alias(connection) as alias:
            alias.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, body: bytes) -> None:
        try:
            with self._sending:
                if not self._room.poll(1000 * _FULL_S):
                    # Blocked here, nobody would ever notice that the time for a collective is up.
                    _shut_down(self.connection)
                self.connection.send_bytes(body)
        except OSError:
            # Whatever is wrong with the line, the watcher sees it too and names the peer.
            _log.debug("control message not sent", exc_info=True)


class Peers:
    """The connections to all other members.

    Create it, hand ``door`` to the others, then ``connect``, ``take_ways`` for each lane, and ``watch``.
    """

    def __init__(self, ranks: tuple[int, ...], me: int, *, lanes: list[str], host: str, key: bytes) -> None:
        position = ranks.index(me)
        self._ranks = ranks
        self._me = me
        self._before, self._next = ranks[position - 1], ranks[(position + 1) % len(ranks)]
        self._lanes = lanes
        self._to_next: dict[str, socket.socket] = {}
        self._from_before: dict[str, socket.socket] = {}
        self._lines: dict[int, _Line] = {}
        self._reasons: dict[int, str] = {}
        self._key = key
        self._listener = _listen(host)
        self.door = Door(host, self._listener.getsockname()[1], key.hex())
        self._arrival = threading.Condition()
        self._is_open = True
        # Those who have called and not yet said who they are.
        self._callers: set[Connection] = set()
        self._watcher: threading.Thread | None = None
        self._stopping = threading.Event()
        _alive.add(self)

    def connect(self, doors: dict[int, Door], deadline_s: float) -> None:
        """Connects with every member: the later one in the group calls the earlier one, and each the next of the ring.

        Args:
            doors: every member's door.
            deadline_s: when to give up, as ``time.monotonic``.

        Raises:
            CommError: somebody could not be reached, or has not called, in time.
        """
        position = self._ranks.index(self._me)
        calls: list[tuple[int, str | None]] = [(peer, None) for peer in self._ranks[:position]]
        calls += [(self._next, lane) for lane in self._lanes]
        targets: list[tuple[Callable[..., None], tuple[object, ...]]] = [(self._receive_calls, ())]
        targets += [(self._call, (peer, doors[peer], lane)) for peer, lane in calls]
        for target, args in targets:
            threading.Thread(target=target, args=args, daemon=True).start()
        with self._arrival:
            self._arrival.wait_for(lambda: not self._silent(), max(0.1, deadline_s - time.monotonic()))
        self._close_door()
        silent = self._silent()
        if silent:
            raise CommError(
                f"rank {self._me} at {self.door.host}:{self.door.port} has no connection with ranks {silent}"
                f"{self._why(silent)}; set GLOO_SOCKET_IFNAME to the interface that joins the hosts",
                op="create_communicators",
                rank=self._me,
                peer=silent[0],
            )

    def take_ways(self, lane: str) -> Ways:
        """The lane's own connections, once: who takes them closes them."""
        return Ways(self._to_next.pop(lane), self._from_before.pop(lane))

    def watch(self, hearer: Hearer, tick: Callable[[], None]) -> None:
        """Starts the thread that hands every message to ``hearer`` and calls ``tick`` about twice a second."""
        self._watcher = threading.Thread(
            target=self._listen_to_all, args=(hearer, tick), name="hp_sharding-watcher", daemon=True
        )
        self._watcher.start()

    def tell(self, message: Message) -> None:
        """Sends a message to all members. Never raises: a line that is down is the watcher's business."""
        body = json.dumps(message).encode()
        for line in list(self._lines.values()):
            line.send(body)

    def close(self) -> None:
        """Ends the watcher and the lines. Safe to call twice."""
        self._stopping.set()
        self._close_door()
        for line in self._lines.values():
            _shut_down(line.connection)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(2 * _TICK_S)
        for line in self._lines.values():
            line.connection.close()
        for way in (*self._to_next.values(), *self._from_before.values()):
            way.close()

    def _silent(self) -> list[int]:
        """The members without whom something is missing."""
        silent = [peer for peer in self._ranks if peer != self._me and peer not in self._lines]
        for peer, ways in ((self._next, self._to_next), (self._before, self._from_before)):
            if len(ways) < len(self._lanes) and peer not in silent:
                silent.append(peer)
        return silent

    def _call(self, peer: int, door: Door, lane: str | None) -> None:
        try:
            connection = Client((door.host, door.port), family="AF_INET", authkey=bytes.fromhex(door.key_hex))
            connection.send_bytes(json.dumps([self._me, lane]).encode())
        except (OSError, EOFError, AuthenticationError) as error:
            self._reasons[peer] = f"{door.host}:{door.port}: {error!r}"
            return
        self._keep(connection, peer, lane, self._to_next)

    def _receive_calls(self) -> None:
        """Lets in who calls, until the door closes."""
        while self._is_open:
            try:
                caller, _ = self._listener.accept()
            except OSError as error:
                if self._is_open:
                    _log.warning("rank %d could not take a call: %r", self._me, error)
                    time.sleep(_TICK_S)
                continue
            caller.setblocking(True)
            # Beside each other: one who stays silent, a stranger or a rank that is stopped, holds up nobody else.
            threading.Thread(target=self._greet, args=(Connection(caller.detach()),), daemon=True).start()

    def _greet(self, connection: Connection) -> None:
        """Keeps a connection whose caller knows the key."""
        self._callers.add(connection)
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            peer, lane = json.loads(connection.recv_bytes())
        except (OSError, EOFError, AuthenticationError) as error:
            # A port scanner, or a rank of another job: not one of ours.
            _log.warning("rank %d turned away a caller that is not of its group: %r", self._me, error)
            connection.close()
        else:
            self._keep(connection, peer, lane, self._from_before)
        finally:
            self._callers.discard(connection)

    def _keep(self, connection: Connection, peer: int, lane: str | None, ways: dict[str, socket.socket]) -> None:
        with self._arrival:
            if not self._is_open:
                connection.close()
            elif lane is None:
                self._lines[peer] = _Line(connection)
            else:
                ways[lane] = _bare_socket(connection)
            self._arrival.notify_all()

    def _close_door(self) -> None:
        """Nobody is let in any more, and who has not said yet who it is must go. Safe to call twice."""
        with self._arrival:
            self._is_open = False
        # A close alone would leave the thread that accepts asleep, and the port open.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._callers):
            _shut_down(connection)

    def _why(self, silent: list[int]) -> str:
        reasons = [f"rank {peer} at {self._reasons[peer]}" for peer in silent if peer in self._reasons]
        return f" ({'; '.join(reasons)})" if reasons else ""

    def _listen_to_all(self, hearer: Hearer, tick: Callable[[], None]) -> None:
        with selectors.DefaultSelector() as selector:
            for peer, line in self._lines.items():
                selector.register(line.connection, selectors.EVENT_READ, peer)
            while not self._stopping.is_set() and selector.get_map():
                for key, _ in selector.select(_TICK_S):
                    if not self._read_one(key.fileobj, key.data, hearer):
                        selector.unregister(key.fileobj)
                tick()

    def drop_in_child(self) -> None:
        """Closes this (forked) process's copies of the connections, which would hide the parent's death."""
        for line in self._lines.values():
            line.connection.close()

    def _read_one(self, connection: object, peer: int, hearer: Hearer) -> bool:
        assert isinstance(connection, Connection)
        try:
            message = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            if not self._stopping.is_set():
                hearer.lost(peer)
            return False
        try:
            hearer.hear(peer, message)
        except Exception:  # noqa: BLE001 - without the watcher every rank would wait for ever
            _log.exception("rank %d cannot make sense of %r from rank %d", self._me, message, peer)
            hearer.lost(peer)
            return False
        return True


_alive: weakref.WeakSet[Peers] = weakref.WeakSet()


def _drop_all_in_child() -> None:
    for peers in list(_alive):
        peers.drop_in_child()


# Workers of a data loader are forked, and may live on for a while after their parent was killed.
os.register_at_fork(after_in_child=_drop_all_in_child)


def _listen(host: str) -> socket.socket:
    try:
        listener = socket.create_server((host, free_port()), backlog=64)
    except OSError:
        # The endpoint's address belongs to a router or another container: listen on every interface.
        listener = socket.create_server(("", free_port()), backlog=64)
    # Here and below: whatever ``socket.setdefaulttimeout`` was told.
    listener.setblocking(True)
    return listener


def _alias(connection: Connection) -> socket.socket:
    """Another descriptor of the same connection. It blocks."""
    alias = socket.socket(fileno=os.dup(connection.fileno()))
    alias.setblocking(True)
    return alias


def _bare_socket(connection: Connection) -> socket.socket:
    """The socket below a connection, which is closed; what has gone through it before was small and answered."""
    way = _alias(connection)
    connection.close()
    # The last bytes of a message shall not wait for the acknowledgement of those before.
    way.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return way


def _shut_down(connection: Connection) -> None:
    # Closing a descriptor under a thread that selects on it is undefined; a shutdown wakes that thread first.
    try:
        with _alias(connection) as alias:
            alias.shutdown(socket.SHUT_RDWR)
    except OSError:
        _log.debug("control connection was already down")
