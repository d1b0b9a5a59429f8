"""Processes that take turns: each group of ranks trains one contender, and all wait while another one is training.

So the contenders can be interleaved in one run, and a machine that gets slower meanwhile is slower for all of them.
Those who wait are stopped: threads inside Gloo would otherwise wake up a hundred times a second each, and take some
percent of the processor from the one that is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.links import Seat, rank_environments

if TYPE_CHECKING:
    from benchmarks.contenders import Trainee
    from benchmarks.gpt import Batches

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("forward", "backward", "update")
_PR_SET_PDEATHSIG = 1
_READY_TIMEOUT_S = 120.0
_TURN_TIMEOUT_S = 180.0
_GOODBYE_S = 15.0


class Turn(NamedTuple):
    """What a rank is asked to do: steps that are not timed, steps that are, and steps that are recorded instead.

    A record costs time, if little, so what is timed has none. Those are for who has a timeline.
    """

    warmup_steps: int
    timed_steps: int
    recorded_steps: int = 2


@dataclass
class RankTurn:
    """What a rank reports of its turn.

    Attributes:
        step_ms: duration of each timed step.
        phase_ms: for each of ``PHASES``, its part of each timed step; update is ``step()`` and ``clear_grad()``.
        losses: of all steps, the warm-up included.
        cpu_ms: processor time of all threads for each timed step, on average.
        main_cpu_ms: the same for the thread that trains.
        turn_cpu_s: processor time of all threads over the whole turn.
        live_mb: what is allocated through Paddle after the last timed step, in units of 2**20 bytes.
        peak_mb: the most that was allocated during the timed steps.
        resident_mb: memory of the process that it does not share with others, after the last timed step.
        timeline: medians over the recorded steps, from hp_sharding's own record; empty for the others. Where the
            timeline is always on, of the timed steps.
        parts: what ``Trainee.probe`` found; empty where there is none.
    """

    step_ms: list[float] = field(default_factory=list)
    phase_ms: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    losses: list[float] = field(default_factory=list)
    cpu_ms: float = 0.0
    main_cpu_ms: float = 0.0
    turn_cpu_s: float = 0.0
    live_mb: float = 0.0
    peak_mb: float = 0.0
    resident_mb: float = 0.0
    timeline: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)


class RankFailed(RuntimeError):
    """A rank's process ended or hung; carries the end of its output."""


class Group:
    """The processes of one contender, one a rank. They import their framework at once and set up when told to.

    Args:
        name: the contender's.
        argv: the command, interpreter included; ``--pipe FD`` is added.
        seating: where each rank runs.
        environment: more variables for all ranks.
    """

    def __init__(self, name: str, argv: Sequence[str], seating: Sequence[Seat], environment: dict[str, str]) -> None:
        self.name = name
        self._pipes: list[connection.Connection[Any, Any]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs = tempfile.TemporaryDirectory(prefix="hp_sharding_step_")
        for rank, (seat, own) in enumerate(zip(seating, rank_environments(seating), strict=True)):
            self._start(rank, argv, seat, {**os.environ, **environment, **own})

    def _start(self, rank: int, argv: Sequence[str], seat: Seat, environment: dict[str, str]) -> None:
        ours, theirs = connection.Pipe()
        fd = theirs.fileno()
        command = seat.host.command([*argv, "--pipe", str(fd)], core=seat.core)
        with theirs, self._log(rank).open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, pass_fds=[fd]
                )
            )
        self._pipes.append(ours)

    def await_ready(self) -> None:
        """Waits until every rank has imported its framework."""
        self._collect(_READY_TIMEOUT_S)
        self._signal(signal.SIGSTOP)

    def set_up(self) -> None:
        """Has the ranks build their model and meet."""
        self._ask("set up", _READY_TIMEOUT_S)

    def take_turn(self, turn: Turn) -> list[RankTurn]:
        """Has the ranks train, all at the same time. Returns what each reports."""
        return self._ask(turn, _TURN_TIMEOUT_S)

    def end(self) -> None:
        """Lets the processes end by themselves, and kills those that do not."""
        for pipe in self._pipes:
            pipe.close()
        self._signal(signal.SIGCONT)
        deadline_s = time.monotonic() + _GOODBYE_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(max(0.1, deadline_s - time.monotonic()))
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self._logs.cleanup()

    def _ask(self, question: Any, timeout_s: float) -> list[Any]:
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # _collect sees it, and says more
            for pipe in self._pipes:
                pipe.send(question)
        answers = self._collect(timeout_s)
        self._signal(signal.SIGSTOP)
        return answers

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _collect(self, timeout_s: float) -> list[Any]:
        deadline_s = time.monotonic() + timeout_s
        silent = set(self._pipes)
        answers: dict[Any, Any] = {}
        try:
            while silent:
                ready = connection.wait(silent, max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    raise RankFailed(f"{self.name}: no answer within {timeout_s:g} s\n{self._outputs()}")
                for pipe in silent.intersection(ready):
                    answers[pipe] = pipe.recv()
                silent.difference_update(ready)
        except (EOFError, ConnectionResetError) as error:
            raise RankFailed(f"{self.name}: the process of a rank has ended\n{self._outputs()}") from error
        return [answers[pipe] for pipe in self._pipes]

    def _outputs(self) -> str:
        ends = (self._log(rank).read_text(errors="replace")[-3000:] for rank in range(len(self._processes)))
        return "\n".join(f"---- the end of rank {rank}'s output:\n{end}" for rank, end in enumerate(ends))

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name, f"rank{rank}.log")


def serve(pipe: connection.Connection[Any, Any], build: Any) -> None:
    """A rank's side of ``Group``: ``build()`` makes the trainee and its batches. Returns when the pipe closes."""
    # Stopped processes do not notice that the pipe has closed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pipe.send("ready")
    try:
        pipe.recv()
        trainee, batches = build()
        pipe.send("set up")
        while True:
            pipe.send(_train(trainee, batches, pipe.recv()))
    except EOFError:
        return


def _train(trainee: Trainee, batches: Batches, turn: Turn) -> RankTurn:
    report = RankTurn()
    begin_cpu_s = time.process_time()
    for _ in range(turn.warmup_steps):
        _step(trainee, batches, report)
    report.step_ms, report.phase_ms = [], {phase: [] for phase in PHASES}
    _time_steps(trainee, batches, turn.timed_steps, report)
    _record_steps(trainee, batches, turn.recorded_steps, report)
    trainee.drain()
    if trainee.probe is not None:
        report.parts = trainee.probe.summary()
    report.turn_cpu_s = time.process_time() - begin_cpu_s
    return report


def _time_steps(trainee: Trainee, batches: Batches, n_steps: int, report: RankTurn) -> None:
    if trainee.timeline is not None:
        trainee.timeline.steps.clear()
    if trainee.probe is not None:
        trainee.probe.begin()
    if trainee.memory is not None:
        trainee.memory.reset_peak()
    before = time.process_time(), time.thread_time()
    for _ in range(n_steps):
        marks_s = _step(trainee, batches, report)
        if trainee.probe is not None:
            trainee.probe.end_step(marks_s)
    report.cpu_ms = (time.process_time() - before[0]) * 1e3 / n_steps
    report.main_cpu_ms = (time.thread_time() - before[1]) * 1e3 / n_steps
    if trainee.memory is not None:
        report.live_mb, report.peak_mb = trainee.memory.live_mb(), trainee.memory.peak_mb()
    report.resident_mb = _resident_mb()


def _record_steps(trainee: Trainee, batches: Batches, n_steps: int, report: RankTurn) -> None:
    line = trainee.timeline
    if line is None:
        return
    if not line.enabled and n_steps > 0:
        aside = RankTurn(losses=report.losses)
        with line.record(steps=n_steps):
            for _ in range(n_steps):
                _step(trainee, batches, aside)
    report.timeline = line.summary()


def _resident_mb() -> float:
    """Of this process alone; what is mapped from files, such as code, counts once for all and so not here."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def _step(trainee: Trainee, batches: Batches, report: RankTurn) -> list[float]:
    """One step. Returns when each of ``PHASES`` began and the last ended, as ``time.perf_counter()``."""
    marks_s = [time.perf_counter()]
    loss = trainee.forward(*batches.draw())
    marks_s.append(time.perf_counter())
    loss.backward()
    marks_s.append(time.perf_counter())
    trainee.optimizer.step()
    trainee.optimizer.clear_grad()
    report.losses.append(float(loss))
    marks_s.append(time.perf_counter())
    report.step_ms.append((marks_s[-1] - marks_s[0]) * 1e3)
    for phase, begin_s, end_s in zip(PHASES, marks_s, marks_s[1:], strict=False):
        report.phase_ms[phase].append((end_s - begin_s) * 1e3)
    return marks_s
