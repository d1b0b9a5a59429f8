"""What ``create_communicators`` refuses, and who may connect."""

from __future__ import annotations

import os
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

import paddle
import pytest

from hp_sharding.comm import close_all, create_communicators, rendezvous
from hp_sharding.comm.agreement import Message
from hp_sharding.comm.peers import Peers
from hp_sharding.errors import CommError, ConfigError

RANKS = (3, 5, 8)
LANES = ["gather", "reduce"]


@pytest.mark.parametrize(
    ("ranks", "lanes", "timeout_s", "part"),
    [
        ([], ["a"], 1.0, "distinct ranks"),
        ([0, 0], ["a"], 1.0, "distinct ranks"),
        ([1, 2], ["a"], 1.0, r"\(0\)"),
        ([0], [], 1.0, "names of lanes"),
        ([0], ["a", "a"], 1.0, "names of lanes"),
        ([0], ["a"], 0.0, "timeout_s"),
        ([0, 1], ["a"], 1.0, "init_parallel_env"),
    ],
)
def test_bad_arguments(ranks: list[int], lanes: list[str], timeout_s: float, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        create_communicators(ranks, lanes, timeout_s=timeout_s)


def test_a_device_needs_a_parallel_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")
    with pytest.raises(ConfigError, match="init_parallel_env"):
        create_communicators([0, 1], ["a"])


def test_closing_nothing() -> None:
    close_all()


def test_host_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", "10.1.2.3:6170")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert rendezvous.host_address() == "10.1.2.3"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert rendezvous.host_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(ConfigError, match="nosuch0"):
        rendezvous.host_address()


def test_free_port_is_free_and_not_one_the_kernel_gives_away() -> None:
    port = rendezvous.free_port()
    with socket.socket() as listener:
        listener.bind(("", port))
        listener.listen()
        assert all(rendezvous.free_port() != port for _ in range(20))
    assert port < 32768


class Ear:
    """Remembers what one rank hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, Message]] = []
        self.gone: list[int] = []

    def hear(self, peer: int, message: Message) -> None:
        if message == ["nonsense"]:
            raise ValueError("nonsense")
        self.heard.append((peer, message))

    def lost(self, peer: int) -> None:
        self.gone.append(peer)


def _connected(deadline_s: float = 10.0) -> tuple[dict[int, Peers], dict[int, Ear]]:
    everyone = {rank: Peers(RANKS, rank, lanes=LANES, host="127.0.0.1", key=bytes([rank])) for rank in RANKS}
    doors = {rank: peers.door for rank, peers in everyone.items()}
    until_s = time.monotonic() + deadline_s
    threads = [threading.Thread(target=peers.connect, args=(doors, until_s)) for peers in everyone.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s)
    return everyone, {rank: Ear() for rank in RANKS}


def _wait_for(condition: Any) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)


def test_everyone_hears_everyone_and_who_has_gone() -> None:
    everyone, ears = _connected()
    for rank, peers in everyone.items():
        peers.watch(ears[rank], lambda: None)
    for rank, peers in everyone.items():
        peers.tell(["token", rank, "ä"])
    _wait_for(lambda: all(len(ear.heard) == 2 for ear in ears.values()))
    assert sorted(ears[5].heard) == [(3, ["token", 3, "ä"]), (8, ["token", 8, "ä"])]
    everyone[5].close()
    everyone[5].close()
    _wait_for(lambda: ears[3].gone == [5] and ears[8].gone == [5])
    assert ears[5].gone == [], "who closes has lost nobody"
    everyone[3].tell(["to nobody and to 8"])
    _wait_for(lambda: len(ears[8].heard) == 3)
    for peers in everyone.values():
        peers.close()


def test_a_message_that_makes_no_sense_counts_as_a_loss() -> None:
    everyone, ears = _connected()
    for rank, peers in everyone.items():
        peers.watch(ears[rank], lambda: None)
    everyone[3].tell(["nonsense"])
    _wait_for(lambda: ears[5].gone == [3] and ears[8].gone == [3])
    for peers in everyone.values():
        peers.close()


def test_who_does_not_know_the_key_is_turned_away() -> None:
    first = Peers((0, 1), 0, lanes=[], host="127.0.0.1", key=b"secret")
    second = Peers((0, 1), 1, lanes=[], host="127.0.0.1", key=b"other")
    thread = threading.Thread(target=first.connect, args=({1: second.door}, time.monotonic() + 10))
    thread.start()
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        Client((first.door.host, first.door.port), family="AF_INET", authkey=b"guess").send(1)
    # The right caller still gets in.
    second.connect({0: first.door}, time.monotonic() + 10)
    thread.join(10)
    assert not thread.is_alive()
    first.close()
    second.close()


def test_every_lane_has_ways_of_its_own_round_the_ring() -> None:
    everyone, _ = _connected()
    ways = {(rank, lane): peers.take_ways(lane) for rank, peers in everyone.items() for lane in LANES}
    for (rank, lane), way in ways.items():
        way.to_next.sendall(f"{lane} from {rank}".encode())
    for rank, following in zip(RANKS, (*RANKS[1:], RANKS[0]), strict=True):
        for lane in LANES:
            assert ways[following, lane].from_before.recv(100) == f"{lane} from {rank}".encode()
    for peers in everyone.values():
        peers.close()
    for way in ways.values():
        for end in way:
            end.close()


def test_who_cannot_be_reached_is_named() -> None:
    alone = Peers((0, 1, 2), 1, lanes=["gather"], host="127.0.0.1", key=b"a")
    gone = Peers((0, 1, 2), 0, lanes=["gather"], host="127.0.0.1", key=b"b")
    gone.close()
    doors = {0: gone.door, 1: alone.door, 2: gone.door}
    with pytest.raises(CommError, match=r"no connection with ranks \[0, 2\]") as caught:
        alone.connect(doors, time.monotonic() + 0.5)
    assert f"127.0.0.1:{gone.door.port}" in str(caught.value)
    assert caught.value.peer == 0
    alone.close()


def test_a_lane_that_one_rank_did_not_call_is_named() -> None:
    first = Peers((0, 1), 0, lanes=["gather"], host="127.0.0.1", key=b"a")
    second = Peers((0, 1), 1, lanes=[], host="127.0.0.1", key=b"b")
    thread = threading.Thread(target=second.connect, args=({0: first.door}, time.monotonic() + 2))
    thread.start()
    with pytest.raises(CommError, match=r"no connection with ranks \[1\]"):
        first.connect({1: second.door}, time.monotonic() + 1)
    thread.join(5)
    first.close()
    second.close()


def test_a_stranger_who_stays_silent_keeps_nobody_out() -> None:
    first = Peers((0, 1), 0, lanes=["gather"], host="127.0.0.1", key=b"a")
    second = Peers((0, 1), 1, lanes=["gather"], host="127.0.0.1", key=b"b")
    doors = {0: first.door, 1: second.door}
    strangers = [socket.create_connection((door.host, door.port)) for door in doors.values()]
    until_s = time.monotonic() + 5
    thread = threading.Thread(target=second.connect, args=(doors, until_s))
    thread.start()
    first.connect(doors, until_s)
    thread.join(5)
    assert not thread.is_alive()
    for stranger in strangers:
        stranger.settimeout(2)
        while stranger.recv(1000):  # the door has closed: the stranger is sent away
            pass
        stranger.close()
    first.close()
    second.close()


def test_a_door_that_nobody_came_to_leaves_no_thread_and_no_port() -> None:
    before = set(threading.enumerate())  # some may be those of an earlier test that are about to end
    alone = Peers((0, 1), 0, lanes=["gather"], host="127.0.0.1", key=b"a")
    gone = Peers((0, 1), 1, lanes=["gather"], host="127.0.0.1", key=b"b")
    gone.close()
    with pytest.raises(CommError, match="no connection"):
        alone.connect({0: alone.door, 1: gone.door}, time.monotonic() + 0.2)
    alone.close()
    _wait_for(lambda: set(threading.enumerate()) <= before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((alone.door.host, alone.door.port), timeout=2)


def test_a_time_limit_of_the_script_for_its_sockets_is_not_ours() -> None:
    socket.setdefaulttimeout(0.1)
    try:
        everyone, _ = _connected()
    finally:
        socket.setdefaulttimeout(None)
    ways = [peers.take_ways(lane) for peers in everyone.values() for lane in LANES]
    assert all(end.gettimeout() is None for way in ways for end in way)
    lines = [line.connection for peers in everyone.values() for line in peers._lines.values()]
    assert all(os.get_blocking(connection.fileno()) for connection in lines)
    for peers in everyone.values():
        peers.close()
    for way in ways:
        for end in way:
            end.close()
