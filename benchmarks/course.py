"""The course of a run: the contenders' processes take turns, round after round, and what they report is kept."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.contenders import CONTENDERS
from benchmarks.links import Seat
from benchmarks.quiet import Meter, await_quiet
from benchmarks.turns import Group, RankTurn, Turn

FIRST_WARMUP_STEPS = 3
"""Before the first round: memory is touched for the first time, and hp_sharding learns the order of the layers."""
FOREIGN_LIMIT = 0.03
"""Share of the processor that other programs may take; beyond it a turn is repeated while patience lasts."""


class Schedule(NamedTuple):
    """How much is measured.

    Attributes:
        rounds: turns of each contender.
        steps: timed steps of each turn.
        patience_s: seconds for waiting while others are busy and for repeated turns.
    """

    rounds: int
    steps: int
    patience_s: float


class Course:
    """What a run brought.

    Attributes:
        turns: of each contender, by round; each a list over ranks.
        losses: of each contender and rank, of every step, turns that had to be repeated included.
        shares: of the processor, that other programs took during the turns that count.
        repeated: turns that do not count, because other programs took too much.
    """

    def __init__(self, groups: Sequence[Group], *, nranks: int, schedule: Schedule) -> None:
        self._groups = groups
        self._steps = schedule.steps
        self._patience_s = schedule.patience_s
        self.turns: dict[str, list[list[RankTurn]]] = {group.name: [] for group in groups}
        self.losses: dict[str, list[list[float]]] = {group.name: [[] for _ in range(nranks)] for group in groups}
        self.shares: list[float] = []
        self.repeated = 0

    @property
    def foreign_share(self) -> float:
        """Of the processor, that other programs took on average; 0 before the first round."""
        return statistics.fmean(self.shares) if self.shares else 0.0

    def set_up(self) -> None:
        """Has every group meet and get warm."""
        for group in self._groups:
            _say(f"setting up: {CONTENDERS[group.name].title}")
            group.set_up()
            self._train(group, Turn(FIRST_WARMUP_STEPS, 1))

    def go_round(self, what: str) -> None:
        """One turn of every group."""
        for group in self._groups:
            _say(f"{what}: {CONTENDERS[group.name].title}")
            turn, share = self._quiet_turn(group)
            self.turns[group.name].append(turn)
            self.shares.append(share)

    def _quiet_turn(self, group: Group) -> tuple[list[RankTurn], float]:
        """A turn that others did not disturb, or after all patience is used up, just a turn; and the others' share."""
        while True:
            begin_s = time.monotonic()
            await_quiet(FOREIGN_LIMIT, self._patience_s)
            with Meter() as meter:
                turn = self._train(group, Turn(1, self._steps))
            meter.own_s = sum(rank.turn_cpu_s for rank in turn)
            share = meter.foreign_share()
            if share <= FOREIGN_LIMIT or self._patience_s <= 0:
                return turn, share
            self._patience_s -= time.monotonic() - begin_s
            self.repeated += 1

    def _train(self, group: Group, turn: Turn) -> list[RankTurn]:
        reports = group.take_turn(turn)
        for losses, report in zip(self.losses[group.name], reports, strict=True):
            losses += report.losses
        return reports


def run(
    contenders: Sequence[str],
    seating: Sequence[Seat],
    *,
    command: Callable[[str], list[str]],
    schedule: Schedule,
    before_round: Callable[[int], None] = lambda number: None,
) -> Course:
    """Starts the contenders' processes, has them take turns, and ends them.

    Args:
        contenders: their names.
        seating: where each rank runs; the same for all contenders.
        command: with which a rank of a contender starts, interpreter included.
        schedule: how much is measured.
        before_round: called with the number of each round, from 0.

    Raises:
        RankFailed: a process ended or hung.
    """
    groups: list[Group] = []
    try:
        for name in contenders:
            _say(f"starting: {CONTENDERS[name].title}")
            groups.append(Group(name, command(name), seating, machine_environment()))
            groups[-1].await_ready()
        course = Course(groups, nranks=len(seating), schedule=schedule)
        course.set_up()
        for number in range(schedule.rounds):
            before_round(number)
            course.go_round(f"round {number + 1} of {schedule.rounds}")
        return course
    finally:
        _say("")
        for group in groups:
            group.end()


def machine_environment() -> dict[str, str]:
    """One thread a rank, and Paddle's MKL told not to pick slow kernels on AMD. Before Paddle is imported."""
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text():
        environment["MKL_DEBUG_CPU_TYPE"] = "5"
    return environment


def _say(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text:<79}" if text else f"\r{'':<79}\r")
        sys.stderr.flush()
