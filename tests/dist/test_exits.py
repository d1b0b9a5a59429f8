"""Scripts end right after ``step()``, in every way: soon, with their own exit code, and with nothing to say of ours."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

import hp_sharding
from tests import harness
from tests.leaving_script import MARK, Leave

SCRIPT = "tests/leaving_script.py"
END_S = 30.0
"""How long a process may take to end."""
START_S = 240.0
AT_ONCE = 2
SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM}
CODES = {"returns": 0, "raises": 1, "exit 0": 0, "exit 3": 3, "interrupt": -signal.SIGINT, "terminate": -signal.SIGTERM}


class Case(NamedTuple):
    """How ranks end; see ``Leave``. A signal goes to all of them, or to the last one alone."""

    how: str
    stage: int
    inside: str = ""
    n_replicas: int = 1
    nranks: int = 2
    alone: bool = False

    def __str__(self) -> str:
        where = f", in {self.inside}" if self.inside else ""
        whom = ", one" if self.alone else ""
        return f"{self.how}{whom}, stage {self.stage}, {self.n_replicas}x{self.nranks // self.n_replicas}{where}"


class End(NamedTuple):
    """What became of a rank: after how long since the end began, with what exit code, stderr since then, threads."""

    after_s: float
    code: int | None
    stderr: str
    threads: str


CASES = [
    Case("returns", 2),
    Case("returns", 3, "save"),
    Case("exit 0", 1, "timeline"),
    Case("raises", 3, "full_parameters"),
    Case("exit 3", 2, "no_sync", n_replicas=2, nranks=4),
    Case("interrupt", 2, "save"),
    Case("interrupt", 3, alone=True),
    Case("terminate", 1),
    Case("terminate", 2, alone=True),
]
PLAIN = [Case(how, 0, nranks=1) for how in ("raises", "interrupt", "terminate")]
"""What Paddle alone does, to compare with."""


def _leave(case: Case) -> list[End]:
    with tempfile.TemporaryDirectory(prefix="hp_sharding_exits_") as folder:
        leave = Leave(folder, case.how, case.inside, case.stage, case.n_replicas)
        argv = [sys.executable, "-W", "ignore", SCRIPT, json.dumps(leave._asdict())]
        base = {key: value for key, value in os.environ.items() if not key.startswith("PADDLE_")}
        base |= {**harness.machine_env(), "PYTHONPATH": str(harness.REPO_ROOT)}
        processes = []
        try:
            for rank, own in enumerate(harness.rank_envs(case.nranks) if case.stage else [{}]):
                with Path(folder, f"stderr-{rank}").open("wb") as err:
                    processes.append(_start(argv, {**base, **own}, err))
            begin_s = _begin(case, Path(folder), processes)
            ends = [_end(Path(folder), rank, process, begin_s) for rank, process in enumerate(processes)]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if case.inside == "save":
            assert hp_sharding.latest_checkpoint(folder) is not None, "the save under way was not finished"
        return ends


def _start(argv: Sequence[str], env: dict[str, str], err: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv, cwd=harness.REPO_ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err
    )  # type: ignore[call-overload]


def _begin(case: Case, folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> float:
    """Waits until all are at their ends, and sends the signal, if it is one. Returns when that was."""
    deadline_s = time.monotonic() + START_S
    while len(list(folder.glob("ready-*"))) < len(processes) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    time.sleep(0.2)
    if case.how in SIGNALS:
        for process in processes[-1:] if case.alone else processes:
            process.send_signal(SIGNALS[case.how])
    return time.monotonic()


def _end(folder: Path, rank: int, process: subprocess.Popen[bytes], begin_s: float) -> End:
    try:
        code = process.wait(max(1.0, begin_s + END_S + 5.0 - time.monotonic()))
    except subprocess.TimeoutExpired:
        code = None
    after_s = time.monotonic() - begin_s
    stderr = (folder / f"stderr-{rank}").read_text(errors="replace")
    threads = folder / f"threads-{rank}"
    return End(after_s, code, stderr.partition(f"{MARK}\n")[2], threads.read_text() if threads.exists() else "")


@pytest.fixture(scope="module")
def left(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[list[End]]]]:
    """Runs the cases that were asked for, several at a time, and what they are compared with."""
    asked = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]  # type: ignore[attr-defined]
    plain = [case for case in PLAIN if any(case.how == other.how for other in asked)]
    with ThreadPoolExecutor(AT_ONCE) as executor:
        yield {case: executor.submit(_leave, case) for case in [*plain, *asked]}
        executor.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processes_end_as_they_should(case: Case, left: dict[Case, Future[list[End]]]) -> None:
    ends = left[case].result()
    plain = next((left[other].result()[0].stderr for other in PLAIN if other.how == case.how), "")
    for rank, end in enumerate(ends):
        assert end.after_s < END_S, end
        assert end.threads == "", end
        if case.alone and rank < case.nranks - 1:
            assert end.code == 1, end.stderr
            assert _said(end.stderr)[-1].startswith(f"hp_sharding.errors.CommError: rank {rank}: "), end.stderr
            assert re.search(rf"rank {case.nranks - 1} (has left|is gone)", end.stderr), end.stderr
        else:
            assert end.code == CODES[case.how], end.stderr
            assert _said(end.stderr) == _said(plain), end.stderr


def _said(stderr: str) -> list[str]:
    """Without places in the script, and what Paddle itself says of a backward that was broken off."""
    lines = [line for line in stderr.splitlines() if line and not re.match(r"  |\[|\d |[IWE]\d{4} ", line)]
    return [re.sub(r"\d{5,}|0x[0-9a-f]+|@ .*|PID .*", "#", line) for line in lines]
