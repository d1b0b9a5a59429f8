"""Runs ``tests/faulty_script.py`` on several ranks, lets one fault happen, and says what became of everybody.

Three ways to run it: as processes of their own, under Paddle's launcher, and on hosts that only a cable joins (network
namespaces), where the cable can be pulled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import links
from tests import harness
from tests.faulty_script import Plan

SCRIPT = "tests/faulty_script.py"
DEATHS = ("killed", "raises", "exits")
"""Faults whose process ends, which the others hear of at once."""
CODES = {"killed": (-signal.SIGKILL,), "raises": (1,), "exits": (3, 1)}
"""How the process itself ends: where Paddle's C++ calls the script, it makes an error of a ``sys.exit``."""
TIMEOUT_S = 5.0
AMPLE_S = 30.0
"""A time-out so long that nobody who is told in time can have waited for it."""
TOLD_S = 10.0
"""How long the others may take to know of a death, with the machine busy; it takes 0.1 s where it is idle."""
GRACE_S = 10.0
"""How long after ``timeout_s`` every rank that still runs must have ended."""
LAUNCHER_GRACE_S = 35.0
"""The same, for the launcher."""
_LATE_S = 4.0
_START_S = 240.0
_POLL_S = 0.05
_LOG_CHARS = 4000


class Case(NamedTuple):
    """A fault, and what it happens to.

    Attributes:
        fault: one of ``faulty_script.FAULTS``.
        phase: one of ``faulty_script.PHASES``.
        stage: of sharding.
        rank: to whom it happens.
        n_replicas: among how many replicas the ranks are divided.
        nranks: how many there are.
        way: "alone", "launcher" or "hosts": how it is run.
    """

    fault: str
    phase: str
    stage: int = 2
    rank: int = 1
    n_replicas: int = 1
    nranks: int = 2
    way: str = "alone"

    def __str__(self) -> str:
        grid = f"{self.n_replicas}x{self.nranks // self.n_replicas}"
        return f"{self.fault}, {self.phase}, rank {self.rank}, stage {self.stage}, {grid}, {self.way}"

    @property
    def is_told_at_once(self) -> bool:
        """Whether the others hear of it long before the time is up. They must be connected for that."""
        return self.fault in DEATHS and self.phase != "wrapping"

    @property
    def timeout_s(self) -> float:
        """The setting."""
        return AMPLE_S if self.is_told_at_once and self.way == "alone" else TIMEOUT_S


class End(NamedTuple):
    """What became of one rank.

    Attributes:
        code: its exit code; None where only the launcher knows, or it has not ended.
        ended_s: from the fault to its end; None where it has not ended.
        told_s: from the fault to the CommError; None without one.
        error: the CommError's message.
    """

    code: int | None
    ended_s: float | None
    told_s: float | None
    error: str


class Seen(NamedTuple):
    """What became of all.

    Attributes:
        struck: whether the fault has happened at all.
        ends: of each rank.
        launcher_code: its exit code; None where there is none, or it has not ended.
        launcher_s: from the fault to its end.
        logs: the ends of all outputs.
    """

    struck: bool
    ends: dict[int, End]
    launcher_code: int | None
    launcher_s: float | None
    logs: str


def suffer(case: Case, hosts: Sequence[links.Host] = ()) -> Seen:
    """Runs one case; ``hosts`` are where ranks run, one on each, where they do not all run here."""
    with tempfile.TemporaryDirectory(prefix="hp_sharding_faults_") as folder:
        run = _Run(case, Path(folder), hosts)
        try:
            run.start()
            run.watch()
            return run.seen()
        finally:
            run.clean_up()


def wrongs(case: Case, seen: Seen) -> list[str]:
    """What is not as it should be."""
    found = []
    if not seen.struck:
        return [f"rank {case.rank} did not get as far as the fault"]
    for rank, end in seen.ends.items():
        if rank == case.rank and (case.fault in DEATHS or (case.fault, case.way) == ("stopped", "launcher")):
            expected = CODES.get(case.fault) if case.way == "alone" else None
            if expected is not None and end.code not in expected:
                found.append(f"rank {rank} has ended with {end.code}, expected one of {expected}")
            continue
        # Who is late or was stopped must first go on.
        limit_s = case.timeout_s + GRACE_S + (GRACE_S if rank == case.rank else 0.0)
        if end.ended_s is None or end.ended_s > limit_s:
            found.append(f"rank {rank} has not ended within {limit_s:g} s, but {end.ended_s}")
        if end.code == 0:
            found.append(f"rank {rank} has ended with 0")
        if case.way != "launcher" and rank != case.rank:
            found += _wrongs_of_message(case, rank, end)
    if case.way == "launcher" and (seen.launcher_s is None or seen.launcher_s > case.timeout_s + LAUNCHER_GRACE_S):
        found.append(f"the launcher has not ended in time, but after {seen.launcher_s} s")
    if case.way == "launcher" and seen.launcher_code == 0:
        found.append("the launcher has ended with 0")
    left = [rank for rank, end in seen.ends.items() if end.ended_s is None]
    if left:
        found.append(f"ranks {left} are still there when all is over")
    return found


def _wrongs_of_message(case: Case, rank: int, end: End) -> list[str]:
    if end.told_s is None:
        return [f"rank {rank} has had no CommError"]
    named = re.search(rf"ranks? \[?{case.rank}\b", end.error.removeprefix(f"rank {rank}"))
    found = [] if named else [f"rank {rank} is not told that it is rank {case.rank}: {end.error}"]
    if case.is_told_at_once and end.told_s > TOLD_S:
        found.append(f"rank {rank} is told after {end.told_s:.1f} s only")
    return found


class _Run:
    """One case, from the start of its processes until they are gone."""

    def __init__(self, case: Case, folder: Path, hosts: Sequence[links.Host]) -> None:
        self._case = case
        self._folder = folder
        self._hosts = list(hosts)
        plan = Plan(
            str(folder), case.fault, case.phase, case.rank, case.stage, case.n_replicas, case.timeout_s,
            case.timeout_s + _LATE_S,
        )  # fmt: skip
        self._argv = [sys.executable, "-W", "ignore", SCRIPT, json.dumps(plan._asdict())]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._fault_s: float | None = None
        self._ended: dict[int, float] = {}
        self._over: float | None = None

    def start(self) -> None:
        """Starts the launcher, or the ranks."""
        base = {key: value for key, value in os.environ.items() if not key.startswith("PADDLE_")}
        base |= {**harness.machine_env(), "PYTHONPATH": str(harness.REPO_ROOT)}
        if self._case.way == "launcher":
            launch = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(self._case.nranks)]
            launch += ["--backend", "gloo", "--log_dir", str(self._folder / "log")]
            self._open([sys.executable, *launch, *self._argv[3:]], {**base, "PYTHONWARNINGS": "ignore"}, "launcher")
        elif self._hosts:
            seats = [links.Seat(host) for host in self._hosts]
            for rank, own in enumerate(links.rank_environments(seats)):
                self._open(self._hosts[rank].command(self._argv), {**base, **own}, f"rank {rank}")
        else:
            for rank, own in enumerate(harness.rank_envs(self._case.nranks)):
                self._open(self._argv, {**base, **own}, f"rank {rank}")

    def watch(self) -> None:
        """Until all have ended, or have had far more time than they may take."""
        limit_s = time.time() + _START_S
        while time.time() < limit_s:
            time.sleep(_POLL_S)
            self._look()
            if self._fault_s is None and self._note_fault():
                limit_s = time.time() + self._case.timeout_s + LAUNCHER_GRACE_S + 5.0
            if self._only_stopped_left():
                os.kill(self._pids()[self._case.rank], signal.SIGCONT)
            if len(self._ended) == self._case.nranks and self._over is not None:
                return

    def seen(self) -> Seen:
        """What became of all. Before ``clean_up``."""
        ends = {rank: self._end(rank) for rank in range(self._case.nranks)}
        logs = "\n".join(f"---- {path.name}\n{path.read_text()[-_LOG_CHARS:]}" for path in self._outputs())
        if self._case.way != "launcher":
            return Seen(self._fault_s is not None, ends, None, None, logs)
        launcher_s = self._over - self._fault_s if self._over and self._fault_s else None
        return Seen(self._fault_s is not None, ends, self._processes[0].poll(), launcher_s, logs)

    def clean_up(self) -> None:
        """Ends what still runs: what was started here, and the ranks that a launcher has started for it."""
        for pid in self._pids().values():
            if _is_running(pid):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.kill()
            process.wait()

    def _open(self, argv: list[str], env: dict[str, str], name: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as out:
            process = subprocess.Popen(
                argv, cwd=harness.REPO_ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
        self._processes.append(process)

    def _look(self) -> None:
        now_s = time.time()
        for process in self._processes:
            process.poll()
        for rank, pid in self._pids().items():
            if rank not in self._ended and not _is_running(pid):
                self._ended[rank] = now_s
        if self._over is None and all(process.returncode is not None for process in self._processes):
            self._over = now_s

    def _note_fault(self) -> bool:
        moments = [at_s for what, at_s, _ in self._journal(self._case.rank) if what == "fault"]
        if not moments:
            return False
        self._fault_s = moments[0]
        if self._case.fault == "cut":
            host = self._hosts[self._case.rank]
            subprocess.run(["ip", "-n", str(host.name), "link", "set", host.interface, "down"], check=True)
            (self._folder / "is-cut").touch()
            self._fault_s = time.time()
        return True

    def _only_stopped_left(self) -> bool:
        """Whether a rank that was stopped is the last one, with no launcher to end it: it goes on, and must end."""
        if self._case.fault != "stopped" or self._case.way == "launcher" or self._fault_s is None:
            return False
        return len(self._ended) == self._case.nranks - 1 and self._case.rank not in self._ended

    def _end(self, rank: int) -> End:
        begin_s = self._fault_s or 0.0
        told = [(at_s, text) for what, at_s, text in self._journal(rank) if what == "error"]
        ended_s = self._ended.get(rank)
        return End(
            code=None if self._case.way == "launcher" else self._processes[rank].poll(),
            ended_s=None if ended_s is None else ended_s - begin_s,
            told_s=told[0][0] - begin_s if told else None,
            error=told[0][1] if told else "",
        )

    def _pids(self) -> dict[int, int]:
        lines = {rank: self._journal(rank) for rank in range(self._case.nranks)}
        return {rank: int(found[0][2]) for rank, found in lines.items() if found}

    def _journal(self, rank: int) -> list[tuple[str, float, str]]:
        path = self._folder / f"journal-{rank}"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def _outputs(self) -> list[Path]:
        return [*sorted(self._folder.glob("*.log")), *sorted(self._folder.glob("log/workerlog.*"))]


def _is_running(pid: int) -> bool:
    """Whether it is one of the script's processes, and more than a zombie."""
    try:
        state = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and SCRIPT.encode() in Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return False


@contextlib.contextmanager
def places(case: Case) -> Iterator[list[links.Host]]:
    """Where the ranks of a case run: hosts of their own, or, with none, here."""
    if case.way != "hosts":
        yield []
        return
    with links.shaped(case.nranks) as hosts:
        yield hosts


def row(case: Case, seen: Seen) -> str:
    """One line of a table: when the others knew, when they had ended, and when the launcher had."""
    others = [end for rank, end in seen.ends.items() if rank != case.rank]
    told, ended = (_latest(others, field) for field in ("told_s", "ended_s"))
    launcher = "" if seen.launcher_s is None else f"{seen.launcher_s:.1f}"
    return f"| {case} | {case.timeout_s:g} | {told} | {ended} | {launcher} |"


HEAD = "| fault | timeout_s | others told, s | others ended, s | launcher ended, s |\n|---|---|---|---|---|"


def _latest(ends: Sequence[End], field: str) -> Any:
    values = [getattr(end, field) for end in ends]
    return "" if None in values else f"{max(values):.1f}"
