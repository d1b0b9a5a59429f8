"""How ranks find each other without treading on other groups.

Paddle gives every Gloo group the same store and keys that hold no more than the rank inside the group, so two groups
made at about the same time read each other's addresses. Here each gets a store of its own, whose address is published
in the default store, under a key that no other group has. Our own communicators meet in the default store, likewise.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import paddle
from paddle.base import core

from ..errors import CommError, ConfigError
from .slack import slow_timers

# The store's constructor aborts the process when its port is taken, so ports come from below the range out of which
# the kernel serves outgoing connections: only another server can be there, and that the probe sees.
_PORTS = range(15000, 32000)
_POLL_S = 0.02
# The store counts in 64-bit numbers.
_BITS = 32
_rendezvous_counts: Counter[tuple[int, ...]] = Counter()
_paddle_group_counts: Counter[str] = Counter()


def default_store() -> Any:
    """The store that ``init_parallel_env`` or ``fleet.init`` opened.

    Raises:
        ConfigError: neither has been called.
    """
    store = paddle.distributed.collective._default_store
    if store is None:
        raise ConfigError(
            "communicators were asked for before the parallel environment was set up: "
            "call fleet.init(is_collective=True) or paddle.distributed.init_parallel_env() first"
        )
    return store


def ready_default_store() -> None:
    """Readies the store that this process serves, if it does, for the end: see ``_see_callers_leave``."""
    first = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").partition(",")[0]
    port = (os.environ.get("PADDLE_MASTER") or first).rpartition(":")[2]
    if paddle.distributed.get_rank() == 0 and port.isdecimal():
        # Nobody there: the store is served by another process, such as the launcher.
        with contextlib.suppress(OSError):
            _see_callers_leave(int(port))


def host_address() -> str:
    """The IPv4 address at which other ranks reach this process.

    ``GLOO_SOCKET_IFNAME`` decides where it is set (as it does for Gloo itself), else this rank's own endpoint.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        request = struct.pack("256s", interface.encode()[:15])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                # SIOCGIFADDR: the address is in bytes 20 to 24 of the answer.
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])
            except OSError as error:
                raise ConfigError(
                    f"GLOO_SOCKET_IFNAME={interface!r} names no interface with an IPv4 address: {error}"
                ) from error
    endpoint = os.environ.get("PADDLE_CURRENT_ENDPOINT", "")
    return endpoint.rpartition(":")[0] or "127.0.0.1"


def free_port() -> int:
    """A TCP port on which nobody listens right now."""
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise CommError(f"no free TCP port found between {_PORTS.start} and {_PORTS.stop}")


def exchange(mine: dict[str, Any], *, ranks: tuple[int, ...], me: int, timeout_s: float) -> dict[int, dict[str, Any]]:
    """Hands every rank's ``mine`` to all ranks. Collective over ``ranks``; call it from the main thread only.

    Args:
        mine: anything JSON can say.
        ranks: global ranks; all members pass the same tuple.
        me: this process's global rank.
        timeout_s: how long to wait for the last one.

    Raises:
        CommError: somebody has not come in time; says who.
    """
    store = default_store()
    round_number = _rendezvous_counts[ranks]
    _rendezvous_counts[ranks] += 1
    prefix = f"hp_sharding/meet/{'-'.join(map(str, ranks))}/{round_number}"
    text = json.dumps(mine)
    store.set(f"{prefix}/{me}", text)
    _mark(store, prefix, ranks, me)
    deadline_s = time.monotonic() + timeout_s
    # `get` would block for the store's own 15 minutes, so look at the marks first.
    while missing := _unmarked(store, prefix, ranks):
        if time.monotonic() > deadline_s:
            raise CommError(
                f"rank {me} waited {timeout_s:g} s for ranks {missing} to create communicators over {list(ranks)}; "
                "every rank of the group must do so, in the same order",
                op="create_communicators",
                rank=me,
                peer=missing[0],
            )
        time.sleep(_POLL_S)
    return {peer: json.loads(text if peer == me else store.get(f"{prefix}/{peer}")) for peer in ranks}


def _mark(store: Any, prefix: str, ranks: tuple[int, ...], me: int) -> None:
    """Sets this rank's bit in a counter: every question to the store takes 44 ms, so one must do for many ranks."""
    word, bit = divmod(ranks.index(me), _BITS)
    store.add(f"{prefix}/come/{word}", 1 << bit)


def _unmarked(store: Any, prefix: str, ranks: tuple[int, ...]) -> list[int]:
    words = [store.add(f"{prefix}/come/{word}", 0) for word in range(-(-len(ranks) // _BITS))]
    return [rank for index, rank in enumerate(ranks) if not words[index // _BITS] >> (index % _BITS) & 1]


@contextlib.contextmanager
def collision_free_groups() -> Iterator[None]:
    """While active, Gloo groups that Paddle itself makes (``fleet.init``, ``new_group``) cannot collide.

    As Paddle asks, every rank must make the same groups in the same order, members or not.
    """
    collective = paddle.distributed.collective
    parallel = paddle.distributed.parallel
    original = collective._new_process_group_impl
    replacement = _apart(original)
    # `parallel` has imported the function by name.
    for module in (collective, parallel):
        module._new_process_group_impl = replacement
    try:
        yield
    finally:
        for module in (collective, parallel):
            module._new_process_group_impl = original


def _apart(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_process_group(
        backend: str, store: Any, rank: int, world_size: int, group_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        if backend == "gloo" and world_size > 1:
            store = _store_of_its_own(store, rank, group_name)
        # A device's library may well have threads that must not be late.
        with slow_timers() if backend == "gloo" else contextlib.nullcontext():
            return original(backend, store, rank, world_size, group_name, *args, **kwargs)

    return new_process_group


def _store_of_its_own(store: Any, rank: int, group_name: str) -> Any:
    timeout_s = float(os.environ.get("FLAGS_stop_check_timeout", "900"))
    key = f"hp_sharding/group/{group_name}/{_paddle_group_counts[group_name]}"
    _paddle_group_counts[group_name] += 1
    if rank == 0:
        port = free_port()
        own = core.TCPStore("127.0.0.1", port, True, 1, _whole_seconds(timeout_s))
        _see_callers_leave(port)
        store.set(key, json.dumps([host_address(), port]))
        return own
    host, port = json.loads(store.get(key))
    return core.TCPStore(host, port, False, 1, _whole_seconds(timeout_s))


def _see_callers_leave(port: int) -> None:
    """Lets two callers come to the store and go, one of them abruptly, before anybody else does.

    The store's thread reports each way of leaving through glog, which takes a lock the first time. Ranks end together:
    now and then the first to leave is a peer, while this process has destroyed that lock already, and glog aborts it.
    """
    for abruptly in (False, True):
        with socket.create_connection(("127.0.0.1", port)) as caller:
            if abruptly:
                # Nothing lingers: the connection is reset.
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _whole_seconds(timeout_s: float) -> int:
    return max(1, round(timeout_s))
