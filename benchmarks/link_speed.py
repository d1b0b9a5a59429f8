"""What the links really carry on this machine, where the ends also have to pay for it with processor time.

    python -m benchmarks.link_speed --rates-mbit 500 1000 10000     # as root

Two processes, one on each of two hosts and one core each, send to each other for a second over one plain TCP
connection: *one way*, and *both ways* at the same time, as collectives do. Compare with the speed the link was given.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence

from benchmarks import links

_CHUNK = 1 << 20
_PATIENCE_S = 20.0


def main() -> None:
    """Measures, or is one of the two ends."""
    parser = argparse.ArgumentParser(description="What the shaped links really carry.")
    parser.add_argument("--rates-mbit", type=int, nargs="+", default=[500, 1000, 10000])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        print(json.dumps(_be_end(options.seconds)))
        return
    reason = links.available()
    if reason:
        sys.exit(f"no shaped links: {reason}")
    with links.shaped(2) as hosts:
        for rate_mbit in options.rates_mbit:
            links.set_rate(hosts, rate_mbit)
            reached = measure(hosts, seconds=options.seconds)
            print(f"{rate_mbit} Mbit/s: {reached['one_way']:.0f} one way, {reached['both_ways']:.0f} both ways")


def measure(hosts: Sequence[links.Host], *, seconds: float = 1.0) -> dict[str, float]:
    """Mbit/s of payload in each direction between the first two hosts, at their present speed."""
    argv = [sys.executable, "-m", "benchmarks.link_speed", "--as-rank", "--seconds", str(seconds)]
    outputs = links.run_ranks(argv, links.seats(hosts[:2], 2), timeout_s=30)
    found = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    return {way: min(end[way] for end in found if end[way] is not None) for way in ("one_way", "both_ways")}


def _be_end(seconds: float) -> dict[str, float | None]:
    """One of the two ends: the first listens, and sends in both parts; the other sends in the second part only."""
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    host, _, port = os.environ["PADDLE_MASTER"].rpartition(":")
    data, control = _listen(host, int(port)) if rank == 0 else _call(host, int(port))
    with data, control:
        one_way = _exchange(data, control, seconds if rank == 0 else None, receives=rank == 1)
        both_ways = _exchange(data, control, seconds, receives=True)
    return {"one_way": one_way, "both_ways": both_ways}


def _listen(host: str, port: int) -> tuple[socket.socket, socket.socket]:
    with socket.create_server((host, port)) as server:
        server.settimeout(_PATIENCE_S)
        return server.accept()[0], server.accept()[0]


def _call(host: str, port: int) -> tuple[socket.socket, socket.socket]:
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, port)), socket.create_connection((host, port))
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens at {host}:{port}")


def _exchange(data: socket.socket, control: socket.socket, send_s: float | None, *, receives: bool) -> float | None:
    """Mbit/s received; None for who only sends. The last byte of a part is a one, all others are zeros."""
    sender = threading.Thread(target=_send, args=(data, send_s)) if send_s else None
    if sender:
        sender.start()
    speed = _receive(data) if receives else None
    if sender:
        sender.join()
    # Nobody begins the next part before both have ended this one.
    control.sendall(b"!")
    control.recv(1)
    return speed


def _send(link: socket.socket, seconds: float) -> None:
    chunk = bytes(_CHUNK)
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        link.sendall(chunk)
    link.sendall(b"\1")


def _receive(link: socket.socket) -> float:
    buffer = bytearray(_CHUNK)
    nbytes, begin_s = 0, 0.0
    while True:
        found = link.recv_into(buffer)
        if not found:
            raise ConnectionError("the other end has gone")
        begin_s = begin_s or time.monotonic()
        nbytes += found
        if buffer[found - 1] != 0:
            return nbytes * 8 / 1e6 / (time.monotonic() - begin_s)


if __name__ == "__main__":
    main()
