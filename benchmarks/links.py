"""Networks of a known speed on one machine.

``shaped(nhosts)`` makes one network namespace a host; two are joined by a cable, more by a bridge. Each end of each
cable lets through ``rate_mbit``. What the emulation does, it does on the cores that train, as no real cable would: so
there is no bridge where none is needed, none with a packet filter, and, whatever the machine is set to, a TCP that sets
no timer for every segment. It needs root and the ``ip`` and ``tc`` commands, and takes everything away at the end.
``loopback(nhosts)`` gives hosts of the same form that share the machine's own loopback, at whatever speed that has.

Try it: ``python -m benchmarks.links`` says whether shaped links work here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RATE_MBIT = 1000
_BURST_KB = 256
_LATENCY_MS = 100
_SUBNET = "10.213.77"
# Acknowledgements alone set its pace. BBR keeps one of its own, by a timer for each segment. On a cable that loses
# nothing all of them fill it; CUBIC, the most usual one, may not be asked for in a namespace.
_CONGESTION_CONTROL = "net.ipv4.tcp_congestion_control=reno"
_NO_FILTER = [f"net.bridge.bridge-nf-call-{table}=0" for table in ("iptables", "ip6tables", "arptables")]
# Ethernet, IP and TCP headers with time stamps take 66 + 24 of every 1514 + 24 bytes on a real cable; the shaper counts
# the frame without preamble, checksum and gap.
PAYLOAD_SHARE = 1448 / 1514


@dataclass(frozen=True)
class Host:
    """A place where ranks run: a namespace with one shaped interface, or the machine itself.

    Attributes:
        name: the namespace, None for the machine itself.
        address: IPv4 address at which the other hosts reach it.
        interface: what Gloo is to use.
        ends: that are shaped for it, the namespace and the interface of each; none for the machine itself.
    """

    name: str | None
    address: str
    interface: str
    ends: tuple[tuple[str, str], ...] = ()

    def command(self, argv: Sequence[str], *, core: int | None = None) -> list[str]:
        """The command line that runs ``argv`` here, on one core if ``core`` says which."""
        prefix = ["ip", "netns", "exec", self.name] if self.name else []
        pin = ["taskset", "-c", str(core)] if core is not None and shutil.which("taskset") else []
        return [*prefix, *pin, *argv]


@dataclass(frozen=True)
class Seat:
    """Where one rank runs.

    Attributes:
        host: its host.
        core: the CPU core it is tied to, None for any.
    """

    host: Host
    core: int | None = None


def available() -> str | None:
    """None if shaped links can be made, else the reason why not."""
    if os.geteuid() != 0:
        return "shaped links need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"shaped links need the command {' and '.join(missing)} (package iproute2)"
    try:
        with shaped(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextlib.contextmanager
def shaped(nhosts: int, *, rate_mbit: int = RATE_MBIT) -> Iterator[list[Host]]:
    """Makes ``nhosts`` namespaces that reach each other, each with a link of ``rate_mbit`` Mbit/s in each direction.

    Raises:
        subprocess.CalledProcessError: the machine does not allow it; ``available()`` says so beforehand.
    """
    prefix = f"hps-{secrets.token_hex(3)}"
    switch = None if nhosts == 2 else f"{prefix}-switch"
    hosts = [_host(f"{prefix}-{index}", index, switch) for index in range(nhosts)]
    names = [host.name for host in hosts if host.name]
    made: list[str] = []
    # Unlike an interrupt from the keyboard, this signal would end Python without the clean-up below.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        for name in ([switch] if switch else []) + names:
            _ip("netns", "add", name)
            made.append(name)
        if switch is None:
            _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        else:
            _plug_in(switch, hosts)
        for host in hosts:
            _bring_up(host)
        set_rate(hosts, rate_mbit, action="add")
        yield hosts
    finally:
        # The interfaces and the bridge go with their namespaces.
        for name in reversed(made):
            subprocess.run(["ip", "netns", "del", name], check=False)
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def loopback(nhosts: int) -> Iterator[list[Host]]:
    """Hosts that are all this machine itself, so that a benchmark runs without root."""
    yield [Host(None, "127.0.0.1", "lo")] * nhosts


def set_rate(hosts: Sequence[Host], rate_mbit: int, *, action: str = "change") -> None:
    """Gives the links of ``shaped`` another speed, also while something runs over them."""
    for host in hosts:
        for namespace, interface in host.ends:
            _run("tc", "-n", namespace, "qdisc", action, "dev", interface, "root", "tbf", *_shape(rate_mbit))


def _host(name: str, index: int, switch: str | None) -> Host:
    own = (name, "eth0")
    return Host(name, f"{_SUBNET}.{index + 1}", "eth0", (own, (switch, f"port{index}")) if switch else (own,))


def _plug_in(switch: str, hosts: Sequence[Host]) -> None:
    """Joins the hosts by a bridge in a namespace of its own."""
    _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge0", "up")
    _set(switch, *_NO_FILTER)
    for host in hosts:
        (name, own), (_, port) = host.ends
        _ip("link", "add", own, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
        _ip("-n", switch, "link", "set", port, "master", "bridge0")
        _ip("-n", switch, "link", "set", port, "up")


def _bring_up(host: Host) -> None:
    name = str(host.name)
    _ip("-n", name, "address", "add", f"{host.address}/24", "dev", host.interface)
    _ip("-n", name, "link", "set", host.interface, "up")
    _ip("-n", name, "link", "set", "lo", "up")
    _set(name, _CONGESTION_CONTROL)


def _set(namespace: str, *settings: str) -> None:
    """Where the kernel does not know one of them there is nothing to set."""
    subprocess.run(["ip", "netns", "exec", namespace, "sysctl", "-qw", *settings], check=False, capture_output=True)


def _shape(rate_mbit: int) -> list[str]:
    return ["rate", f"{rate_mbit}mbit", "burst", f"{_BURST_KB}kb", "latency", f"{_LATENCY_MS}ms"]


def _ip(*args: str) -> None:
    _run("ip", *args)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True)


def seats(hosts: Sequence[Host], nranks: int) -> list[Seat]:
    """Deals ranks out to hosts and cores in turn: as many to each as it takes."""
    cores = sorted(os.sched_getaffinity(0))
    return [Seat(hosts[rank % len(hosts)], cores[rank % len(cores)]) for rank in range(nranks)]


def rank_environments(seating: Sequence[Seat]) -> list[dict[str, str]]:
    """What ``paddle.distributed.launch --backend gloo`` would set for each rank. Fresh ports every time."""
    first_port = _free_port_range(len(seating))
    endpoints = [f"{seat.host.address}:{first_port + rank}" for rank, seat in enumerate(seating)]
    return [
        {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(len(seating)),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PADDLE_MASTER": endpoints[0],
            "PADDLE_LOCAL_RANK": str(rank),
            "PADDLE_RANK_IN_NODE": str(rank),
            "PADDLE_DISTRI_BACKEND": "gloo",
            "GLOO_SOCKET_IFNAME": seat.host.interface,
        }
        for rank, seat in enumerate(seating)
    ]


def run_ranks(
    argv: Sequence[str], seating: Sequence[Seat], *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Runs one process a rank, from the repository's root, and returns what each wrote to stdout.

    Args:
        argv: the command; the same for all ranks.
        seating: where each rank runs.
        timeout_s: after that all are killed.
        environment: more variables for all ranks.

    Raises:
        RuntimeError: a rank failed, or they were not done in time; carries the ends of their outputs.
    """
    with tempfile.TemporaryDirectory() as folder:
        # To files: a full pipe would stop a rank that nobody is reading from yet.
        logs = [Path(folder, str(rank)) for rank in range(len(seating))]
        codes = _run_all(argv, seating, logs, timeout_s, dict(environment or {}))
        outputs = [log.read_text(errors="replace") for log in logs]
    failed = [rank for rank, code in enumerate(codes) if code != 0]
    if failed:
        ends = "\n".join(f"---- rank {rank} ended with {codes[rank]}\n{outputs[rank][-4000:]}" for rank in failed)
        raise RuntimeError(f"{' '.join(argv)}: ranks {failed} failed, or were killed after {timeout_s:g} s\n{ends}")
    return outputs


def _run_all(
    argv: Sequence[str], seating: Sequence[Seat], logs: Sequence[Path], timeout_s: float, environment: dict[str, str]
) -> list[int]:
    root = Path(__file__).resolve().parent.parent
    deadline_s = time.monotonic() + timeout_s
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for seat, log, own in zip(seating, logs, rank_environments(seating), strict=True):
            command = seat.host.command(argv, core=seat.core)
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(command, env={**os.environ, **environment, **own}, cwd=root, stdout=output)
                )
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(max(0.0, deadline_s - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [process.returncode for process in processes]


def _free_port_range(count: int) -> int:
    """The first of ``count`` neighbouring ports on which nobody listens on this machine."""
    for _ in range(100):
        first = 15000 + secrets.randbelow(15000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("", port))
            return first
    raise RuntimeError("no free ports")


if __name__ == "__main__":
    reason = available()
    print(reason or f"shaped links of {RATE_MBIT} Mbit/s work here")
    sys.exit(reason is not None)
