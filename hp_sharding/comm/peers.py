"""Control connections: one to each other member of a group, and one thread that listens to all of them.

They carry what Gloo cannot say: that a rank has reached a collective, that it leaves, that it is gone.
"""

from __future__ import annotations

import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import NamedTuple, Protocol

from ..errors import CommError
from .agreement import Message
from .rendezvous import free_port

_log = logging.getLogger("hp_sharding")
_TICK_S = 0.5


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
        # Without this a small message waits 40 ms for the acknowledgement of the one before (Nagle's algorithm).
        with socket.socket(fileno=_duplicate(connection)) as alias:
            alias.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, body: bytes) -> None:
        try:
            with self._sending:
                self.connection.send_bytes(body)
        except OSError:
            # Whatever is wrong with the line, the watcher sees it too and names the peer.
            _log.debug("control message not sent", exc_info=True)


class Peers:
    """The lines to all other members.

    Create it, hand ``door`` to the others, then ``connect``, then ``watch``.
    """

    def __init__(self, ranks: tuple[int, ...], me: int, *, host: str, key: bytes) -> None:
        self._ranks = ranks
        self._me = me
        self._lines: dict[int, _Line] = {}
        self._key = key
        self._listener = _listen(host, key)
        self.door = Door(host, self._listener.address[1], key.hex())
        self._watcher: threading.Thread | None = None
        self._stopping = threading.Event()

    def connect(self, doors: dict[int, Door], timeout_s: float) -> None:
        """Opens a line to every member: the later one in the group calls the earlier one.

        Raises:
            CommError: somebody could not be reached, or has not called, in time.
        """
        deadline_s = time.monotonic() + timeout_s
        position = self._ranks.index(self._me)
        callers = self._ranks[position + 1 :]
        receiver = threading.Thread(target=self._receive_calls, args=(len(callers),), daemon=True)
        receiver.start()
        for peer in self._ranks[:position]:
            self._lines[peer] = self._call(peer, doors[peer])
        receiver.join(max(0.1, deadline_s - time.monotonic()))
        silent = [peer for peer in callers if peer not in self._lines]
        self._listener.close()
        if silent:
            raise CommError(
                f"rank {self._me} waited {timeout_s:g} s for the control connections of ranks {silent} at "
                f"{self.door.host}:{self.door.port}; is that address reachable from there?",
                op="create_communicators",
                rank=self._me,
                peer=silent[0],
            )

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
        for line in self._lines.values():
            _shut_down(line.connection)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(2 * _TICK_S)
        for line in self._lines.values():
            line.connection.close()

    def _call(self, peer: int, door: Door) -> _Line:
        try:
            connection = Client((door.host, door.port), family="AF_INET", authkey=bytes.fromhex(door.key_hex))
        except (OSError, EOFError) as error:
            raise CommError(
                f"rank {self._me} cannot reach rank {peer} at {door.host}:{door.port}: {error}; set GLOO_SOCKET_IFNAME "
                "to the interface that joins the hosts",
                op="create_communicators",
                rank=self._me,
                peer=peer,
            ) from error
        connection.send_bytes(json.dumps(self._me).encode())
        return _Line(connection)

    def _receive_calls(self, ncalls: int) -> None:
        while ncalls > 0:
            try:
                connection = self._listener.accept()
                peer = json.loads(connection.recv_bytes())
            except (OSError, EOFError) as error:
                if self._listener_closed():
                    return
                # A port scanner, or a rank of another job: not one of ours.
                _log.debug("a caller was turned away: %s", error)
                continue
            except Exception as error:  # AuthenticationError has no narrower base than ProcessError
                _log.warning("rank %d turned away a caller without the key: %s", self._me, error)
                continue
            self._lines[peer] = _Line(connection)
            ncalls -= 1

    def _listener_closed(self) -> bool:
        return self._listener._listener is None  # type: ignore[attr-defined]

    def _listen_to_all(self, hearer: Hearer, tick: Callable[[], None]) -> None:
        with selectors.DefaultSelector() as selector:
            for peer, line in self._lines.items():
                selector.register(line.connection, selectors.EVENT_READ, peer)
            while not self._stopping.is_set() and selector.get_map():
                for key, _ in selector.select(_TICK_S):
                    if not self._read_one(key.fileobj, key.data, hearer):
                        selector.unregister(key.fileobj)
                tick()

    def _read_one(self, connection: object, peer: int, hearer: Hearer) -> bool:
        assert isinstance(connection, Connection)
        try:
            message = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            if not self._stopping.is_set():
                hearer.lost(peer)
            return False
        hearer.hear(peer, message)
        return True


def _listen(host: str, key: bytes) -> Listener:
    try:
        return Listener((host, free_port()), family="AF_INET", backlog=64, authkey=key)
    except OSError:
        # The endpoint's address belongs to a router or another container: listen on every interface.
        return Listener(("", free_port()), family="AF_INET", backlog=64, authkey=key)


def _duplicate(connection: Connection) -> int:
    with socket.socket(fileno=connection.fileno()) as borrowed:
        alias = borrowed.dup()
        borrowed.detach()
    return alias.detach()


def _shut_down(connection: Connection) -> None:
    # Closing a descriptor under a thread that selects on it is undefined; a shutdown wakes that thread first.
    try:
        with socket.socket(fileno=_duplicate(connection)) as alias:
            alias.shutdown(socket.SHUT_RDWR)
    except OSError:
        _log.debug("control connection was already down")
