"""What ``create_communicators`` refuses, and who may connect."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

import paddle
import pytest

from hp_sharding.comm import close_all, create_communicators, group, rendezvous
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


def test_where_no_port_is_free_an_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Taken(socket.socket):
        def bind(self, address: Any) -> None:
            raise OSError("in use")

    monkeypatch.setattr(socket, "socket", Taken)
    with pytest.raises(CommError, match="no free TCP port found between 15000 and 32000"):
        rendezvous.free_port()


class _Store:
    """A store whose keeper does not answer, or is gone."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    def set(self, key: str, value: str) -> None:
        """Is written into a buffer."""

    def add(self, key: str, number: int) -> int:
        return int(self._answer())


def _meet_over(store: _Store, monkeypatch: pytest.MonkeyPatch) -> CommError:
    monkeypatch.setattr(paddle.distributed.collective, "_default_store", store)
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.2)
    with pytest.raises(CommError) as caught:
        rendezvous.exchange({}, ranks=(0, 1), me=1, timeout_s=0.3)
    assert (caught.value.op, caught.value.rank, caught.value.peer) == ("create_communicators", 1, 0)
    return caught.value


def test_a_store_that_does_not_answer_is_waited_for_no_longer_than_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    begin_s = time.monotonic()
    text = str(_meet_over(_Store(answers.wait), monkeypatch))
    assert "got no answer from the store, which rank 0 keeps: its process is stopped, or its host is cut off" in text
    assert time.monotonic() - begin_s < 10
    answers.set()
    _wait_for(lambda: not any(thread.name == "hp_sharding-meeting" for thread in threading.enumerate()))


def test_a_store_whose_process_has_ended_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset() -> None:
        raise RuntimeError("Connection reset by peer")

    text = str(_meet_over(_Store(reset), monkeypatch))
    assert "rank 1 cannot reach the store, which rank 0 keeps: its process has ended, it seems (Connection" in text


class _Table(_Store):
    """A store that answers, and counts what it is asked."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self.n_asked = 0

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> Any:
        return self._values[key]

    def add(self, key: str, number: int) -> int:
        self.n_asked += 1
        self._values[key] = self._values.get(key, 0) + number
        return int(self._values[key])


def test_marks_of_many_ranks_take_one_question_for_each_32() -> None:
    store, ranks = _Table(), tuple(range(100, 230))
    for rank in ranks:
        if rank not in (100, 131, 132, 229):
            rendezvous._mark(store, "here", ranks, rank)
    store.n_asked = 0
    assert rendezvous._unmarked(store, "here", ranks) == [100, 131, 132, 229]
    assert store.n_asked == 5


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle.distributed.collective, "_default_store", _Table())
    with pytest.raises(CommError, match=r"rank 0 waited 0.2 s for ranks \[2, 5\] to create") as caught:
        rendezvous.exchange({}, ranks=(0, 2, 5), me=0, timeout_s=0.2)
    assert caught.value.peer == 2


def test_a_rank_that_comes_late_is_waited_for_without_asking_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _Table()
    monkeypatch.setattr(paddle.distributed.collective, "_default_store", store)
    found: list[dict[int, Any]] = []

    def meet(me: int) -> None:
        # Each as a process of its own would: as its first meeting.
        monkeypatch.setattr(rendezvous, "_rendezvous_counts", Counter())
        found.append(rendezvous.exchange({"I am": me}, ranks=(0, 1), me=me, timeout_s=20))

    first = threading.Thread(target=meet, args=(0,))
    first.start()
    time.sleep(0.3)
    assert store.n_asked < 30
    meet(1)
    first.join(20)
    assert found == [{0: {"I am": 0}, 1: {"I am": 1}}] * 2


def test_what_was_opened_is_closed_where_the_others_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Peers] = []

    def fails(self: group.TcpGroup, lanes: list[str], deadline_s: float) -> None:
        opened.append(self._peers)
        raise CommError("nobody came")

    monkeypatch.setattr(group, "ready_default_store", lambda: None)
    monkeypatch.setattr(group.TcpGroup, "_meet", fails)
    with pytest.raises(CommError, match="nobody came"):
        group.TcpGroup((0, 1), 0, ["gather"], timeout_s=1.0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((opened[0].door.host, opened[0].door.port), timeout=2)


def test_lanes_of_both_kinds_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(group, "close_all", lambda: closed.append("group"))
    close_all()
    assert closed == ["group"]


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


def test_nothing_stays_open_behind_what_was_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    everyone, ears = _connected()
    for rank, members in everyone.items():
        members.watch(ears[rank], lambda: None)
    for members in everyone.values():
        members.close()
    # They are still there, with their connections, and so nothing is closed by being forgotten.
    assert len(everyone) == len(RANKS)
    _wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_closing_wakes_the_watcher_and_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hp_sharding.comm.peers._TICK_S", 60.0)
    everyone, ears = _connected()
    for rank, members in everyone.items():
        members.watch(ears[rank], lambda: time.sleep(0.3))
    begin_s = time.monotonic()
    for members in everyone.values():
        members.close()
        watcher = members._watcher
        assert watcher is not None
        assert not watcher.is_alive(), "it may look at connections that are closed"
    assert time.monotonic() - begin_s < 30


def test_a_rank_that_is_left_alone_does_not_spin() -> None:
    ticks: list[float] = []
    first = Peers((0, 1), 0, lanes=[], host="127.0.0.1", key=b"a")
    second = Peers((0, 1), 1, lanes=[], host="127.0.0.1", key=b"b")
    doors = {0: first.door, 1: second.door}
    thread = threading.Thread(target=second.connect, args=(doors, time.monotonic() + 10))
    thread.start()
    first.connect(doors, time.monotonic() + 10)
    thread.join(10)
    ear = Ear()
    first.watch(ear, lambda: ticks.append(time.monotonic()))
    second.close()
    _wait_for(lambda: ear.gone == [1])
    ticks.clear()
    time.sleep(0.3)
    first.close()
    assert len(ticks) < 20


def test_who_does_not_listen_at_once_is_waited_for() -> None:
    """Its line is full for a while, which is no reason to give it up."""
    everyone, ears = _connected()
    message = ["token", 3, "x" * 100_000]

    def tell() -> None:
        for _ in range(200):
            everyone[3].tell(message)

    thread = threading.Thread(target=tell)
    thread.start()
    time.sleep(0.3)
    for rank, members in everyone.items():
        members.watch(ears[rank], lambda: None)
    thread.join(20)
    _wait_for(lambda: all(len(ears[rank].heard) == 200 for rank in (5, 8)))
    for members in everyone.values():
        members.close()


def test_a_line_that_takes_nothing_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever tells something must come back: it is the one that sees that time is up."""
    monkeypatch.setattr("hp_sharding.comm.peers._FULL_S", 0.1)
    everyone, ears = _connected()
    everyone[3].watch(ears[3], lambda: None)

    def tell() -> None:
        for _ in range(300):
            everyone[3].tell(["token", 3, "x" * 100_000])

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits for who does not listen"
    _wait_for(lambda: sorted(ears[3].gone) == [5, 8])
    for members in everyone.values():
        members.close()


def test_a_forked_child_has_none_of_the_lines() -> None:
    everyone, _ = _connected()
    lines = [line.connection for peers in everyone.values() for line in peers._lines.values()]
    child = os.fork()
    if child == 0:
        os._exit(sum(not line.closed for line in lines))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not any(line.closed for line in lines), "of the parent"
    for members in everyone.values():
        members.close()


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


def test_who_cannot_be_reached_is_named_at_once() -> None:
    """Its address was handed in, so it was there: it is gone, and the others on their way are not to blame."""
    alone = Peers((0, 1, 2), 1, lanes=["gather"], host="127.0.0.1", key=b"a")
    gone = Peers((0, 1, 2), 0, lanes=["gather"], host="127.0.0.1", key=b"b")
    late = Peers((0, 1, 2), 2, lanes=["gather"], host="127.0.0.1", key=b"c")
    gone.close()
    begin_s = time.monotonic()
    with pytest.raises(CommError, match=r"no connection with ranks \[0\]") as caught:
        alone.connect({0: gone.door, 1: alone.door, 2: late.door}, begin_s + 60)
    assert time.monotonic() - begin_s < 20
    assert f"127.0.0.1:{gone.door.port}" in str(caught.value)
    assert caught.value.peer == 0
    alone.close()
    late.close()


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
