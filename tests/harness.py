"""Runs a function on several ranks and brings back what every rank returned, or every rank's traceback.

A test with it::

    from tests import harness

    def _sum_ranks(rank, nranks, start):            # module level: it is sent by name
        x = paddle.full([4], rank + start)
        paddle.distributed.all_reduce(x)            # paddle.distributed is ready, on CPU with Gloo
        return x.numpy()                            # anything that pickles; Paddle tensors do as well

    def test_all_reduce():
        for found in harness.run(_sum_ranks, 2, 10.0):      # one result per rank, in rank order
            np.testing.assert_array_equal(found, np.full(4, 21.0))

* ``run`` raises ``RankFailure`` with all tracebacks when a rank raises, exits, hangs or reports nothing. Asserts may
  stand inside the function. The ranks are processes that are reused by later calls with the same number of ranks
  (importing Paddle costs seconds), within a module and over modules, until a call fails: then they are replaced.
* Before every call a rank seeds Paddle, numpy and random with 0 (the same on every rank), starts Paddle's parameter
  names afresh, sets the default dtype back, and forgets earlier ``fleet.init`` calls: one ``fleet.init`` per call
  works, with any degrees. (Paddle ignores a second one in a process silently, whatever its degrees. Making the groups
  costs 0.55 s, so those made for one set of degrees are kept for later calls.) Call ``fleet.init`` at most once in a
  function; a test about the making of groups takes ``fresh=True``.
* ``env`` is set in the ranks for this call only. What is read while Paddle is imported (``FLAGS_*``, ``MKL_*``,
  ``PYTHONHASHSEED``) needs ``fresh=True``, where it is there from the start.
* ``run(..., fresh=True)`` starts processes for this one call and lets them end by themselves, as a script does, atexit
  handlers and all. It never raises for what a rank did: it returns an ``Outcome`` per rank (return code, output, times,
  result). For tests that kill ranks, crash or look at the exit. ``init=False`` leaves ``init_parallel_env`` (or
  ``fleet.init``) to the function.
* Nothing waits for ever: after ``timeout_s``, or ``GRACE_S`` after the first rank has failed, the ranks that are still
  busy print the stacks of all their threads (they are in the error) and are killed, by process id.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

TIMEOUT_S = 120.0
GRACE_S = 8.0
"""How long the other ranks may go on after one rank has failed. They often wait for it in a collective."""
START_TIMEOUT_S = 90.0
REPO_ROOT = Path(__file__).resolve().parent.parent
_STACKS_WAIT_S = 1.0
_OUTPUT_LIMIT_CHARS = 6000


class Job(NamedTuple):
    """What a rank is asked to do. ``call`` is a pickled ``(fn, args)``; ``fn`` travels as module and name."""

    call: bytes
    env: dict[str, str]


class Report(NamedTuple):
    """What a rank answers: a pickled result, or the traceback of what it raised."""

    result: bytes | None
    error: str | None


@dataclass
class Outcome:
    """How one rank of a ``fresh`` call fared.

    Attributes:
        rank: the rank.
        result: what the function returned; None when it returned nothing, raised, or never got that far.
        error: the traceback of what the function raised, else None.
        reported: True if the function ended, by returning or by raising. False: the process ended, or hung, first.
        report_s: seconds from the start of the function (the latest rank's) to its report, None without one.
        exit_s: seconds from the report (or the start of the function) to the end of the process.
        returncode: as ``subprocess``: 0 to 255, or minus the signal's number. Minus SIGKILL after a time-out too.
        timed_out: True if the harness had to kill it. ``output`` then ends with the stacks of its threads.
        output: all of stdout and stderr.
    """

    rank: int
    result: Any = None
    error: str | None = None
    reported: bool = False
    report_s: float | None = None
    exit_s: float = 0.0
    returncode: int = 0
    timed_out: bool = False
    output: str = ""


class RankFailure(AssertionError):
    """At least one rank raised, exited, hung or reported nothing.

    Attributes:
        reasons: for each failed rank its traceback, or what became of its process with the stacks of its threads.
    """

    def __init__(self, what: str, reasons: dict[int, str]) -> None:
        self.reasons = reasons
        parts = [f"{what}: rank(s) {', '.join(map(str, sorted(reasons)))} failed"]
        parts += [f"---- rank {rank} ----\n{reasons[rank].rstrip()}" for rank in sorted(reasons)]
        super().__init__("\n".join(parts))


def machine_env() -> dict[str, str]:
    """Environment for every test, before Paddle's import: one thread, MKL told about AMD, our own debug mode."""
    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HP_SHARDING_DEBUG": "1"}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text():
        env["MKL_DEBUG_CPU_TYPE"] = "5"
    return env


def free_ports(count: int) -> list[int]:
    """Returns ``count`` different TCP ports that nobody listens on right now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def rank_envs(nranks: int) -> list[dict[str, str]]:
    """Environment of each rank on one machine, as ``paddle.distributed.launch --backend gloo`` sets it; fresh ports."""
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(nranks)]
    return [
        {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(nranks),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),  # the first is that of the default store
            "PADDLE_RANK_IN_NODE": str(rank),
            "PADDLE_DISTRI_BACKEND": "gloo",
            "PADDLE_WITH_GLOO": "0",
        }
        for rank in range(nranks)
    ]


@overload
def run(
    fn: Callable[..., Any],
    nranks: int,
    *args: Any,
    timeout_s: float = ...,
    env: Mapping[str, str] | None = ...,
    fresh: Literal[False] = ...,
) -> list[Any]: ...


@overload
def run(
    fn: Callable[..., Any],
    nranks: int,
    *args: Any,
    timeout_s: float = ...,
    env: Mapping[str, str] | None = ...,
    fresh: Literal[True],
    init: bool = ...,
) -> list[Outcome]: ...


def run(
    fn: Callable[..., Any],
    nranks: int,
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
    init: bool = True,
) -> list[Any]:
    """Calls ``fn(rank, nranks, *args)`` on ``nranks`` ranks; the module's docstring says how.

    Args:
        fn: a function at the top level of an importable module.
        nranks: number of processes, 1 included.
        *args: anything that pickles; the same for every rank.
        timeout_s: seconds for the call itself; starting the processes does not count.
        env: environment variables for this call.
        fresh: one-off processes and an ``Outcome`` per rank, instead of reused ones and the results.
        init: with ``fresh``: whether ``paddle.distributed.init_parallel_env`` is called before ``fn``.

    Returns:
        A result, or an ``Outcome``, per rank.

    Raises:
        RankFailure: a rank failed (only without ``fresh``), or the ranks could not be started.
        TypeError: ``fn`` cannot be sent by name.
    """
    job = Job(_pack_call(fn, args), dict(env or {}))
    if fresh:
        return _run_fresh(fn.__qualname__, nranks, job, timeout_s=timeout_s, init=init)
    return _pool(nranks).run(fn.__qualname__, job, timeout_s=timeout_s)


def _pack_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    if "<" in fn.__qualname__ or fn.__module__ == "__main__":
        raise TypeError(f"{fn.__module__}.{fn.__qualname__} cannot be sent by name: move it to the top of its module")
    return pickle.dumps((fn, args))


@dataclass
class _Rank:
    """One process, the pipe to it and the file with its output."""

    rank: int
    process: subprocess.Popen[bytes]
    pipe: connection.Connection[Any, Any]
    log: Path
    log_start: int = 0
    reports: list[Report] = field(default_factory=list)

    def send(self, job: Job) -> None:
        self.log_start = self.log.stat().st_size
        self.reports.clear()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # seen as a rank that reports nothing
            self.pipe.send(job)

    def receive(self) -> bool:
        """Takes one message. Returns False if there is none because the process has ended."""
        try:
            self.reports.append(self.pipe.recv())
        except (EOFError, ConnectionResetError):
            return False
        return True

    def output(self) -> str:
        return self.log.read_bytes()[self.log_start :].decode(errors="replace")

    def dump_stacks(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> int:
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()

    def why_silent(self, waited_s: float) -> str:
        """Kills a rank that has not reported and says what became of it."""
        code = self.process.poll()
        text = f"reported nothing; its process ended with {code}"
        if code is None:
            text = f"still busy after {waited_s:.1f} s, killed; the stacks of its threads are below"
            self.kill()
        return f"{text}\n{self.output()[-_OUTPUT_LIMIT_CHARS:]}"


class _Ranks:
    """``nranks`` processes that have imported Paddle and wait for a job."""

    def __init__(self, nranks: int, *, env: Mapping[str, str], init: bool, reuse: bool) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="hp_sharding_ranks_"))
        base = {k: v for k, v in os.environ.items() if not k.startswith("PADDLE_") and not k.endswith("_proxy")}
        options = ["--init"] * init + ["--reuse"] * reuse
        self.ranks: list[_Rank] = []
        try:
            for rank, own in enumerate(rank_envs(nranks)):
                self.ranks.append(self._start(rank, {**base, **machine_env(), **own, **env}, options))
            self._wait_until_ready()
        except BaseException:
            self.end()
            raise

    def _start(self, rank: int, env: dict[str, str], options: list[str]) -> _Rank:
        ours, theirs = connection.Pipe()
        log = self.directory / f"rank{rank}.log"
        with theirs, log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.rank_main", str(theirs.fileno()), *options],
                cwd=REPO_ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to pytest alone, which then ends them
            )
        return _Rank(rank, process, ours, log)

    def _wait_until_ready(self) -> None:
        failed = self.collect(START_TIMEOUT_S, grace_s=1.0)
        if failed:
            raise RankFailure("starting the ranks", failed)

    def collect(self, timeout_s: float, *, grace_s: float) -> dict[int, str]:
        """Waits for one report of every rank. Returns the reasons of those that failed; the silent ones are dead."""
        begin = time.monotonic()
        deadline = begin + timeout_s
        silent = {rank.pipe: rank for rank in self.ranks}
        gone: list[_Rank] = []
        while silent and time.monotonic() < deadline:
            for pipe in connection.wait(list(silent), timeout=deadline - time.monotonic()):
                rank = silent.pop(pipe)  # type: ignore[call-overload]
                if not rank.receive():
                    gone.append(rank)
                    rank.process.wait(timeout=START_TIMEOUT_S)
                if rank in gone or rank.reports[-1].error is not None:
                    deadline = min(deadline, time.monotonic() + grace_s)
        waited_s = time.monotonic() - begin
        _dump_stacks(list(silent.values()))
        reasons = {rank.rank: rank.why_silent(waited_s) for rank in [*gone, *silent.values()]}
        raised = {rank.rank: rank.reports[-1].error for rank in self.ranks if rank.reports}
        return reasons | {rank: error for rank, error in raised.items() if error is not None}

    def end(self) -> None:
        """Ends the processes. They hold nothing worth a goodbye."""
        for rank in self.ranks:
            rank.kill()
            rank.pipe.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _dump_stacks(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.dump_stacks()
    if ranks:
        time.sleep(_STACKS_WAIT_S)


class _Pool:
    """Ranks that stay alive between calls, until one fails."""

    def __init__(self, nranks: int) -> None:
        self.nranks = nranks
        self._ranks: _Ranks | None = None

    def run(self, what: str, job: Job, *, timeout_s: float) -> list[Any]:
        ranks = self._ranks = self._ranks or _Ranks(self.nranks, env={}, init=True, reuse=True)
        healthy = False
        try:
            for rank in ranks.ranks:
                rank.send(job)
            failed = ranks.collect(timeout_s, grace_s=GRACE_S)
            if failed:
                raise RankFailure(f"{what} on {self.nranks} ranks", failed)
            healthy = True
            return [pickle.loads(rank.reports[-1].result or b"") for rank in ranks.ranks]
        finally:
            if not healthy:  # an interrupt from the keyboard included: the next call must not get this one's reports
                self.close()

    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks.ranks] if self._ranks else []

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.end()
        self._ranks = None


_pools: dict[int, _Pool] = {}


def _pool(nranks: int) -> _Pool:
    return _pools.setdefault(nranks, _Pool(nranks))


@atexit.register
def close_all() -> None:
    """Ends the reused processes of every size."""
    for pool in _pools.values():
        pool.close()


def _run_fresh(what: str, nranks: int, job: Job, *, timeout_s: float, init: bool) -> list[Outcome]:
    ranks = _Ranks(nranks, env=job.env, init=init, reuse=False)
    try:
        begin = time.monotonic()
        for rank in ranks.ranks:
            rank.send(job)
        outcomes = [Outcome(rank.rank) for rank in ranks.ranks]
        _watch_exits(ranks.ranks, outcomes, begin, timeout_s)
        for rank, outcome in zip(ranks.ranks, outcomes, strict=True):
            outcome.output = rank.output()
        return outcomes
    finally:
        ranks.end()


def _watch_exits(ranks: list[_Rank], outcomes: list[Outcome], begin: float, timeout_s: float) -> None:
    """Fills in the outcomes while the processes report and end; kills those that outlast ``timeout_s``."""
    alive = {rank.pipe: rank for rank in ranks}  # the pipe of a process that has ended reads as end of file
    while alive and time.monotonic() < begin + timeout_s:
        for pipe in connection.wait(list(alive), timeout=begin + timeout_s - time.monotonic()):
            rank = alive[pipe]  # type: ignore[index]
            outcome = outcomes[rank.rank]
            now = time.monotonic()
            if rank.receive():
                report = rank.reports[-1]
                outcome.reported, outcome.report_s, outcome.error = True, now - begin, report.error
                outcome.result = None if report.result is None else pickle.loads(report.result)
                continue
            outcome.returncode = rank.process.wait(timeout=START_TIMEOUT_S)
            outcome.exit_s = now - begin - (outcome.report_s or 0.0)
            del alive[rank.pipe]
    _dump_stacks(list(alive.values()))
    for rank in alive.values():
        outcome = outcomes[rank.rank]
        outcome.timed_out, outcome.returncode = True, rank.kill()
        outcome.exit_s = time.monotonic() - begin - (outcome.report_s or 0.0)
