"""Runs shell lines on several machines at once: network namespaces of this one, which see each other by cable only.

The namespaces are those of ``benchmarks/links.py``. What is still running in them when a run is over, or has taken too
long, is killed: nothing but what was started here can be in them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.links import Host
from tests.harness import REPO_ROOT

_OUTPUT_LIMIT_CHARS = 6000
_GRACE_S = 5.0
"""How long the other machines may go on after one has failed."""


def run_everywhere(
    lines: Sequence[str], hosts: Sequence[Host], *, logs: Path, timeout_s: float, env: Mapping[str, str]
) -> list[str]:
    """Runs ``lines[i]`` with bash on ``hosts[i]``, from the repository's root, and returns what each wrote.

    Args:
        lines: one for each host.
        hosts: namespaces that hold nothing else.
        logs: a folder for the outputs.
        timeout_s: after that everything is killed.
        env: more variables, for all hosts.

    Raises:
        AssertionError: one ended with an error, or was killed; carries the ends of all outputs and logs.
    """
    outputs = [logs / f"machine{index}.log" for index in range(len(hosts))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for line, host, output in zip(lines, hosts, outputs, strict=True):
            processes.append(_start(line, host, output, env))
        codes = _wait(processes, timeout_s)
    finally:
        for host in hosts:
            _kill_all(host)
        for process in processes:
            process.wait()
    if any(codes):
        texts = [*outputs, *sorted(logs.rglob("workerlog.*"))]
        said = "\n".join(f"---- {path.relative_to(logs)}\n{_end_of(path)}" for path in texts)
        raise AssertionError(f"return codes {codes}; None: killed, {timeout_s:g} s at most\n{said}")
    return [output.read_text(errors="replace") for output in outputs]


def _start(line: str, host: Host, output: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # Without the variables of a job that this process may be part of, which the launcher would take for its own.
    base = {key: value for key, value in os.environ.items() if not key.startswith("PADDLE_")}
    with output.open("wb") as out:
        return subprocess.Popen(
            host.command(["bash", "-euc", line]),
            cwd=REPO_ROOT,
            env={**base, **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """Return codes, None for what is still running after the time, or a little after another one has failed."""
    deadline_s = time.monotonic() + timeout_s
    codes = [process.poll() for process in processes]
    while None in codes and time.monotonic() < deadline_s:
        if any(codes):
            deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        time.sleep(0.1)
        codes = [process.poll() for process in processes]
    return codes


def pids(host: Host) -> list[int]:
    """Everything that runs on ``host``."""
    found = subprocess.run(["ip", "netns", "pids", str(host.name)], check=True, capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def _kill_all(host: Host) -> None:
    """Again until nothing is left: what was about to start another process may have done so meanwhile."""
    deadline_s = time.monotonic() + _GRACE_S
    while (left := pids(host)) and time.monotonic() < deadline_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _end_of(path: Path) -> str:
    return path.read_text(errors="replace")[-_OUTPUT_LIMIT_CHARS:]
