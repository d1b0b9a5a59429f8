"""A job of two replicas of two comes up, trains and ends, every time; and what goes wrong with a start is named."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import REPO_ROOT, Outcome, free_ports, machine_env
from tests.soak import starts
from tests.soak.starts import Came, Split, start_many


@pytest.mark.slow
def test_five_starts() -> None:
    found = start_many(5, Split(2, 2), stage=2)
    assert [start.faults for start in found] == [[]] * 5, starts.table(found)


CODE = 3
_HOLDS_A_STORE = f"""
import ctypes, os, sys
os.dup2(int(sys.argv[1]), {CODE})
if int(sys.argv[1]) != {CODE}:
    os.close(int(sys.argv[1]))
libc = ctypes.CDLL(None)
# Asked for before Paddle is loaded, these come after its destructors, the last one first. Both get the exit code: one
# closes the descriptor of that number, which our parent sees, the other sleeps as many seconds.
for function in (libc.sleep, libc.close):
    libc.on_exit(ctypes.cast(function, ctypes.c_void_p), None)

from hp_sharding.comm import rendezvous

class Published:
    def set(self, key, value):
        print(value, flush=True)

if sys.argv[2] == "group":
    store = rendezvous._store_of_its_own(Published(), 0, "group")
else:
    from paddle.base import core

    store = core.create_or_get_global_tcp_store()
    rendezvous.ready_default_store()
    print(f'["127.0.0.1", {{os.environ["PADDLE_MASTER"].partition(":")[2]}}]', flush=True)
# Groups are held by globals of Paddle, and so are their stores: nobody ends them.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
sys.stdin.readline()
sys.exit({CODE})
"""


@pytest.mark.parametrize("kind", ["group", "default"])
def test_peers_may_leave_while_the_process_that_holds_their_store_ends(kind: str) -> None:
    """One of them did so in 3 of 50 starts, and the process was aborted."""
    ending, signal = os.pipe()
    with os.fdopen(ending, "rb") as reader, _start_holder(signal, kind) as process:
        os.close(signal)
        assert process.stdin is not None and process.stdout is not None
        published = next(line for line in process.stdout if line.startswith("["))
        polite, abrupt = (socket.create_connection(("127.0.0.1", json.loads(published)[1])) for _ in range(2))
        time.sleep(0.2)
        process.stdin.write("\n")
        process.stdin.flush()
        assert reader.read() == b""  # comes when the destructors are through
        polite.close()
        abrupt.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        abrupt.close()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == CODE, output


@contextlib.contextmanager
def _start_holder(signal: int, kind: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDS_A_STORE, str(signal), kind],
        cwd=REPO_ROOT,
        env={**os.environ, **machine_env(), "PADDLE_MASTER": f"127.0.0.1:{free_ports(1)[0]}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[signal],
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


CAME = Came(1.0, 0.5, 0.1, "abc")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"error": "ZeroDivisionError"}, "rank 1 ZeroDivisionError"),
        ({"returncode": -6}, "rank 1 ended with -6"),
        ({"reported": False, "result": None}, "rank 1 ended with 0"),
        ({"timed_out": True, "returncode": -9}, "rank 1 hung"),
        ({"output": "terminate called without an active exception"}, "rank 1 complained\nterminate called"),
        ({"result": CAME._replace(digest="abd")}, "rank 1 trained to other parameters"),
    ],
)
def test_what_counts_as_a_failure(changes: dict[str, Any], text: str | None) -> None:
    outcome = Outcome(**{"rank": 1, "result": CAME, "reported": True, **changes})
    faults = starts._faults(outcome, "abc")
    assert len(faults) == (text is not None)
    assert text is None or faults[0].startswith(text)


def _script_that_fails(rank: int, nranks: int, split: Split, stage: int) -> Came:
    if rank == 1:
        raise ZeroDivisionError("on purpose")
    return CAME


def test_failed_starts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "_script", _script_that_fails)
    told: list[int] = []
    found = start_many(2, Split(1, 2), stage=2, tell=lambda number, start: told.append(number))
    assert told == [0, 1]
    for start in found:
        assert [fault.splitlines()[-1] for fault in start.faults] == ["ZeroDivisionError: on purpose"]
    assert starts.table(found) == "2 of 2 starts failed"


def test_splits() -> None:
    assert Split.parse("2x4") == Split(2, 4)
    assert (str(Split(2, 4)), Split(2, 4).nranks) == ("2x4", 8)
    for text in ("2", "0x2", "2x", "x", "2x2x2"):
        with pytest.raises(ValueError, match=r".*"):
            Split.parse(text)
