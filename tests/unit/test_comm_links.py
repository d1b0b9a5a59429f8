"""Connections whose kernel wakes early, which fail, or which the script has given a time limit."""

from __future__ import annotations

import gc
import socket
import struct
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from hp_sharding.comm.links import TcpLinks, Transfer, Ways

PATIENCE_S = 5.0


def _connection(*, receive_bytes: int = 0, send_bytes: int = 0) -> tuple[socket.socket, socket.socket]:
    """Both ends of one; 0 leaves a buffer as large as the system makes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        if receive_bytes:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        source = socket.socket()
        if send_bytes:
            source.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        source.connect(server.getsockname())
        target, _ = server.accept()
    return source, target


def _is_over(transfer: Transfer) -> bool:
    if not transfer._over.acquire(timeout=PATIENCE_S):
        return False
    transfer._over.release()
    return True


@pytest.fixture
def ends() -> Iterator[tuple[TcpLinks, Ways]]:
    """Links, and what the neighbours hold: where the next rank receives is ``from_before`` of the other end."""
    to_next, next_end = _connection()
    before_end, from_before = _connection()
    links = TcpLinks("ends", Ways(to_next, from_before))
    yield links, Ways(before_end, next_end)
    links.cut()
    links.stop()
    assert links.join(time.monotonic() + PATIENCE_S)
    before_end.close()
    next_end.close()


def test_a_receiver_that_is_woken_early_gets_the_rest() -> None:
    """Small buffers: the kernel wakes for less than was asked for, and the last bytes come later."""
    source, target = _connection(receive_bytes=65_536, send_bytes=16_384)
    back = _connection()
    sender, receiver = TcpLinks("sender", Ways(source, back[1])), TcpLinks("receiver", Ways(back[0], target))
    for nbytes in (65_535, 65_536, 65_537, 100_000, 262_144, 300_001, 524_288, 524_289, 600_000, 1_000_000):
        content = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        found = np.zeros(nbytes, np.uint8)
        received = receiver.start_recv(found)
        sender.start_send(content)
        assert _is_over(received), f"the last of {nbytes} bytes are there and nobody takes them"
        assert np.array_equal(found, content)
    for links in (sender, receiver):
        links.stop()
        assert links.join(time.monotonic() + PATIENCE_S)


@pytest.mark.parametrize("missing", [1, 70_000, 262_143, 262_144, 262_145, 600_000])
def test_the_end_of_a_message_may_come_late(ends: tuple[TcpLinks, Ways], missing: int) -> None:
    """Nothing stands behind it that could wake a receiver who waits for more."""
    links, others = ends
    # It shall not have to look for itself.
    links._ways.from_before.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 60, 0))
    content = np.random.default_rng(missing).integers(0, 256, 1_000_000, np.uint8)
    found = np.zeros(len(content), np.uint8)
    received = links.start_recv(found)
    others.to_next.sendall(content[:-missing].data)
    time.sleep(0.05)
    assert not received._over.acquire(blocking=False), "over before all of it has come"
    others.to_next.sendall(content[-missing:].data)
    assert _is_over(received)
    assert np.array_equal(found, content)


def test_a_receiver_looks_again_where_nobody_wakes_it(ends: tuple[TcpLinks, Ways]) -> None:
    """As old kernels do: here it waits for more than will ever come."""
    links, others = ends
    received = links.start_recv(np.zeros(1, np.uint8))
    others.to_next.sendall(b"x")
    assert _is_over(received)
    links._ways.from_before.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 100_000)
    received = links.start_recv(np.zeros(1000, np.uint8))
    time.sleep(0.05)
    others.to_next.sendall(bytes(1000))
    assert _is_over(received)


def test_a_failed_send_ends_the_receive_too(ends: tuple[TcpLinks, Ways]) -> None:
    links, others = ends
    received = links.start_recv(np.zeros(100_000, np.uint8))
    others.from_before.close()
    for _ in range(20):
        links.start_send(np.zeros(1_000_000, np.uint8))
    assert _is_over(received), "it waits for a rank that cannot know"
    with pytest.raises(OSError):  # noqa: PT011 - whatever the kernel says
        received.wait()


def test_a_failed_message_is_not_kept(ends: tuple[TcpLinks, Ways]) -> None:
    links, others = ends
    message = np.zeros(100_000, np.uint8)
    alive = weakref.ref(message)
    received = links.start_recv(message)
    del message
    others.to_next.close()
    assert _is_over(received)
    gc.collect()
    assert alive() is None
