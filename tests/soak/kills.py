"""Kills a training while it saves, again and again, and starts it once more from what is left.

It saves at every step: over one folder and into new ones in turns, now and behind the training, to a disk that takes a
few bytes at a time. At a moment drawn at random all of its processes are killed, or one. The next start must find
a complete checkpoint, no older than the last save that had ended, and with the very state that a training nobody has
disturbed had in that step; from there it goes on, is killed, and so forth. The last one is left alone and must end
where that training ended.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hp_sharding
from tests import harness, logical
from tests.resuming import Run
from tests.sides import BOTH
from tests.slow_disk import slow_disk
from tests.soak.starts import Split

KIND = "odd, dropout"
SAVES_PER_LIFE = 3
"""At most so many saves are left to end before the one that is aimed at."""
TIMEOUT_S = 90.0
_REST_S = 0.003
_BYTES_AT_ONCE = 1500
_FIRST_SAVE_S = 0.15
_JOURNAL = "journal"
_OVER_AND_OVER = "same"
_INDEX = "index.json"


class Plan(NamedTuple):
    """One life of the training, as its ranks are told.

    Attributes:
        folder: of all that is saved.
        split: of the ranks.
        stage: of sharding.
        number: which life it is, beginning with 0.
        steps: after which the training is over.
        digests: of each step and rank, what the state must be after it.
        at_least: the step that the checkpoint found must have reached.
    """

    folder: str
    split: Split
    stage: int
    number: int
    steps: int
    digests: list[list[str]]
    at_least: int


class Save(NamedTuple):
    """What the journal says of one save: times in seconds, ``end_s`` None where it did not end."""

    step: int
    asynchronous: bool
    begin_s: float
    end_s: float | None


class Life(NamedTuple):
    """What came of one.

    Attributes:
        faults: what went wrong; nothing if it is empty.
        victims: the ranks that were killed; none in the last life.
        saves: those that it began.
        begin_step: at which it began.
        hit: what of the save under way was there when the ranks had ended, "" where none was under way.
        total_s: all of it.
    """

    faults: list[str]
    victims: list[int]
    saves: list[Save]
    begin_step: int
    hit: str
    total_s: float


def kill_many(
    count: int, split: Split, stage: int, *, seed: int = 0, tell: Callable[[int, Life], None] | None = None
) -> list[Life]:
    """``count`` lives that end by a kill and one that does not; ``tell`` hears of each. Ends early after a fault."""
    folder = tempfile.mkdtemp(prefix="hp_sharding_kills_")
    steps = count * (SAVES_PER_LIFE + 1) + 2
    try:
        by_rank = harness.run(_undisturbed, split.nranks, split, stage, steps, timeout_s=60 + steps)
        digests = [list(step) for step in zip(*by_rank, strict=True)]
        lives: list[Life] = []
        chance = random.Random(seed)
        for number in range(count + 1):
            plan = Plan(folder, split, stage, number, steps, digests, _last_ended(folder))
            lives.append(_live(plan, chance, lives) if number < count else _live_to_the_end(plan))
            if tell is not None:
                tell(number, lives[-1])
            if lives[-1].faults:
                break
        return lives
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- on the ranks ------------------------------------------------------------------------------------------------------


def _start(plan_split: Split, stage: int, rank: int, nranks: int) -> Run:
    settings = {"n_replicas": plan_split.n_replicas, "stage": stage, **BOTH}
    return Run(KIND, rank, nranks, settings)


def _undisturbed(rank: int, nranks: int, split: Split, stage: int, steps: int) -> list[str]:
    run = _start(split, stage, rank, nranks)
    digests = []
    for step in range(steps):
        run.train(range(step, step + 1))
        digests.append(logical.digest(run.parts()))
    return digests


def _train(rank: int, nranks: int, plan: Plan, rest_s: float) -> int:
    """Resumes, and saves at every step. Returns the step it began with."""
    run = _start(plan.split, plan.stage, rank, nranks)
    begin = _resume(run, plan)
    chance = random.Random(plan.number)
    _note(plan.folder, rank, f"pid {os.getpid()}", name=f"pid-{plan.number}-{rank}")
    pending: _Pending | None = None
    rests = random.Random(rank)  # and not the generator that the training draws from
    with slow_disk(lambda: rests.uniform(0, rest_s), bytes_at_once=_BYTES_AT_ONCE):
        for step in range(begin, plan.steps):
            run.train(range(step, step + 1))
            _end(plan, rank, pending)
            path = f"{plan.folder}/{_OVER_AND_OVER if step % 2 else f'step-{step}'}"
            asynchronous = chance.random() < 0.5
            _note(plan.folder, rank, f"begin {step} {int(asynchronous)} {time.time()}")
            save = hp_sharding.save(path, run.model, run.optimizer, extra={"step": step}, asynchronous=asynchronous)
            pending = _Pending(step, save)
            if not asynchronous:
                _end(plan, rank, pending)
                pending = None
                _forget(plan.folder, rank, step)
        _end(plan, rank, pending)
    assert logical.digest(run.parts()) == plan.digests[-1][rank], "it ended elsewhere"
    return begin


def _resume(run: Run, plan: Plan) -> int:
    newest = hp_sharding.latest_checkpoint(plan.folder)
    if newest is None:
        assert plan.at_least < 0, f"nothing is left, though step {plan.at_least} had been saved"
        return 0
    loaded = hp_sharding.load(newest, run.model, run.optimizer)
    step = int(loaded.extra["step"])
    assert step >= plan.at_least, f"{newest} is of step {step}, but step {plan.at_least} had been saved"
    assert logical.digest(run.parts()) == plan.digests[step][run.rank], f"{newest} is not what step {step} was"
    return step + 1


class _Pending(NamedTuple):
    """A save that has not been waited for."""

    step: int
    save: Any


def _end(plan: Plan, rank: int, pending: _Pending | None) -> None:
    if pending is not None:
        pending.save.wait()
        _note(plan.folder, rank, f"end {pending.step} {time.time()}")


def _note(folder: str, rank: int, text: str, *, name: str = _JOURNAL) -> None:
    """Writes a line. A kill does not take away what the system has been given."""
    if rank == 0 or name != _JOURNAL:
        with Path(folder, name).open("a") as file:
            file.write(f"{text}\n")


def _forget(folder: str, rank: int, step: int) -> None:
    """Removes older folders, now that this step is saved."""
    if rank == 0:
        for path in Path(folder).glob("step-*"):
            if int(path.name.removeprefix("step-")) < step - 2:
                shutil.rmtree(path)


# -- the killer --------------------------------------------------------------------------------------------------------


class _Killer(threading.Thread):
    """Kills the victims a while after a certain save of this life has begun."""

    def __init__(self, plan: Plan, victims: list[int], *, save: int, delay_s: float) -> None:
        super().__init__(daemon=True)
        self._plan = plan
        self._victims = victims
        self._save = save
        self._delay_s = delay_s
        self._begun = len(_journal(plan.folder))
        self.over = threading.Event()
        self.killed = False

    def run(self) -> None:
        while len(_journal(self._plan.folder)) <= self._begun + self._save:
            if self.over.wait(0.001):
                return
        if self.over.wait(self._delay_s):
            return
        for rank in self._victims:
            pid = Path(self._plan.folder, f"pid-{self._plan.number}-{rank}").read_text().split()[1]
            if b"tests.rank_main" in Path("/proc", pid, "cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)
                self.killed = True


def _live(plan: Plan, chance: random.Random, lives: Sequence[Life]) -> Life:
    nranks = plan.split.nranks
    victims = list(range(nranks)) if chance.random() < 0.5 else [chance.randrange(nranks)]
    took_s = [save.end_s - save.begin_s for life in lives for save in life.saves if save.end_s is not None]
    longest_s = 1.2 * statistics.median(took_s) if took_s else _FIRST_SAVE_S
    killer = _Killer(plan, victims, save=chance.randrange(SAVES_PER_LIFE), delay_s=chance.uniform(0.0, longest_s))
    killer.start()
    try:
        return _run(plan, victims, killer)
    finally:
        killer.over.set()
        killer.join()


def _live_to_the_end(plan: Plan) -> Life:
    return _run(plan, [], None)


def _run(plan: Plan, victims: list[int], killer: _Killer | None) -> Life:
    begin_s = time.monotonic()
    before = len(_journal(plan.folder))
    rest_s = _REST_S if killer is not None else 0.0
    outcomes = harness.run(_train, plan.split.nranks, plan, rest_s, fresh=True, timeout_s=TIMEOUT_S)
    saves = _journal(plan.folder)[before:]
    killed = victims if killer is not None and killer.killed else []
    faults = [fault for outcome in outcomes for fault in _faults(outcome, killed)]
    if killed != victims and not faults:
        faults.append("it was over before it could be killed")
    hit = _what_is_there(plan, saves[-1]) if killer is not None and saves and saves[-1].end_s is None else ""
    begin_step = saves[0].step if saves else -1
    return Life(faults, killed, saves, begin_step, hit, time.monotonic() - begin_s)


def _faults(outcome: harness.Outcome, victims: list[int]) -> list[str]:
    """What is wrong with a rank. That one whose peer was killed gives up with an error is right."""
    if outcome.timed_out:
        return [f"rank {outcome.rank} hung, killed after {TIMEOUT_S:g} s\n{outcome.output[-4000:]}"]
    if outcome.rank in victims and outcome.returncode == -signal.SIGKILL:
        return []
    if outcome.error is not None and not (victims and _is_ours(outcome.error)):
        return [f"rank {outcome.rank}\n{outcome.error}"]
    if outcome.error is None and outcome.returncode != 0:
        return [f"rank {outcome.rank} ended with {outcome.returncode}\n{outcome.output[-4000:]}"]
    return []


def _is_ours(error: str) -> bool:
    expected = ("hp_sharding.errors.CommError", "hp_sharding.errors.CheckpointError")
    return any(line.startswith(expected) for line in error.splitlines())


def _journal(folder: str) -> list[Save]:
    """All saves so far, of all lives."""
    path = Path(folder, _JOURNAL)
    saves: list[Save] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        kind, step, *rest = line.split()
        if kind == "begin":
            saves.append(Save(int(step), rest[0] == "1", float(rest[1]), None))
        elif kind == "end":
            saves[-1] = saves[-1]._replace(end_s=float(rest[0]))
    return saves


def _last_ended(folder: str) -> int:
    """The last step whose save has ended; -1 for none."""
    return max((save.step for save in _journal(folder) if save.end_s is not None), default=-1)


def _what_is_there(plan: Plan, save: Save) -> str:
    """How far the save has come that did not end, in words."""
    folder = Path(plan.folder, _OVER_AND_OVER if save.step % 2 else f"step-{save.step}")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if _INDEX in names:
        names.remove(_INDEX)
        content = json.loads((folder / _INDEX).read_text())["content"]
        complete = {name for name in names if name.startswith(content["save_id"])}
        if content["saved_at"] >= save.begin_s:
            return f"the new index, {'and more than' if names - complete else 'and'} its own files"
        names -= complete
    kinds = Counter(name.partition(".")[2] for name in names)
    return ", ".join(f"{number} .{kind}" for kind, number in sorted(kinds.items())) or "nothing"


def table(lives: Sequence[Life]) -> str:
    """How many failed, how many kills came while a save was under way, and what of it was there."""
    killed = [life for life in lives if life.victims]
    hits = [life for life in killed if life.hit]
    behind = sum(life.saves[-1].asynchronous for life in hits)
    saves = [save for life in lives for save in life.saves if save.end_s is not None]
    lines = [
        f"{sum(bool(life.faults) for life in lives)} of {len(lives)} lives failed; {len(killed)} ended by a kill, "
        f"{sum(len(life.victims) > 1 for life in killed)} of them of all ranks at once",
        f"  {len(hits)} kills came during a save, {behind} of them during one behind the training; {len(saves)} "
        "saves ended",
    ]
    lines += [f"    {number:3} left {what}" for what, number in Counter(life.hit for life in hits).most_common()]
    if saves:
        took_ms = [1e3 * (save.end_s - save.begin_s) for save in saves if save.end_s is not None]
        median_ms = statistics.median(took_ms)
        lines.append(f"  a save took {min(took_ms):.0f} to {max(took_ms):.0f} ms, {median_ms:.0f} in the median")
    return "\n".join(lines)
