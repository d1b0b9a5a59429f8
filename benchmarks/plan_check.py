"""How well ``hp-sharding plan`` predicts: step time and memory of real training on links of known speed, beside it.

    python -m benchmarks.plan_check            # as root: two and four hosts, three speeds; about eight minutes
    python -m benchmarks.plan_check --quick    # a look at whether it works; its figures mean little

The model of ``benchmarks.step``. In each round every configuration takes its turn, and so does the calibration: compute
without communication, links without compute, and what each costs the other, all on links of 1 Gbit/s. The predictions
follow from the calibration alone; for other speeds its links are scaled, not measured. *Measured* are medians over all
timed steps of all ranks, and over the peaks of what each rank allocated through Paddle in each round, in 2**20 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import contenders, course, links
from benchmarks.circumstances import machine
from benchmarks.contenders import OVERLAP, Contender, ours
from benchmarks.turns import Group, RankTurn

if TYPE_CHECKING:
    from benchmarks.contenders import Trainee
    from benchmarks.gpt import Batches

TIME_LIMIT, MEMORY_LIMIT = 0.10, 0.05
"""By how much a prediction may be off, relative to what was measured."""
_CALIBRATION = "calibration"
_QUICK = {"layers": 2, "width": 128}


class Check(NamedTuple):
    """One configuration.

    Attributes:
        nranks: each on a host of its own.
        replicas: of ``nranks // replicas`` ranks each.
        rate_mbit: of the links.
        flags: for ``hp_sharding_configs``.
    """

    nranks: int
    replicas: int
    rate_mbit: int
    flags: dict[str, Any]

    @property
    def title(self) -> str:
        """For people."""
        flags = self.flags
        overlap = "overlap" if flags.get("reduce_overlap") else "no overlap"
        depth = f", prefetch {flags['prefetch_depth']}" if "prefetch_depth" in flags else ""
        size = f"{flags['comm_buffer_size_MB']:g} MB"
        grid = f"{self.nranks // self.replicas} x {self.replicas}"
        return f"{grid}, {self.rate_mbit} Mbit/s, stage {flags['stage']}, {overlap}, {size}{depth}"


def _check(nranks: int, replicas: int, rate_mbit: int, stage: int, size_mb: float, **flags: Any) -> Check:
    return Check(nranks, replicas, rate_mbit, {"stage": stage, "comm_buffer_size_MB": size_mb, **flags})


CHECKS = {
    "fits": _check(2, 1, 1000, 2, 8, **OVERLAP),
    "serial": _check(2, 1, 1000, 2, 25),
    "lean": _check(2, 1, 1000, 3, 8, prefetch_depth=1, **OVERLAP),
    "slow": _check(2, 1, 500, 2, 2, **OVERLAP),
    "first": _check(2, 1, 500, 1, 25, **OVERLAP),
    "starved": _check(2, 1, 500, 3, 25, prefetch_depth=1, **OVERLAP),
    "fast": _check(2, 1, 2500, 2, 25, **OVERLAP),
    "far": _check(2, 1, 2500, 3, 2, prefetch_depth=2, **OVERLAP),
    "asked": _check(2, 1, 2500, 3, 25),
    "replicas": _check(4, 2, 1000, 2, 8, replicate_buffer_size_MB=4, **OVERLAP),
    "lean_replicas": _check(4, 2, 1000, 3, 8, prefetch_depth=1, **OVERLAP),
}
"""By their names on the command line."""


def main() -> None:
    """Runs the benchmark, or one rank of it."""
    options = _options()
    if options.as_rank:
        _be_rank(options)
        return
    # Ended from outside, it still takes its processes and namespaces away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    reason = links.available()
    if reason:
        sys.exit(f"plan_check needs links of known speed: {reason}")
    names = options.checks or list(CHECKS)
    rows: list[dict[str, Any]] = []
    hardware: dict[str, Any] = {}
    for nranks in sorted({CHECKS[name].nranks for name in names}):
        found = _run([name for name in names if CHECKS[name].nranks == nranks], nranks, options)
        rows += found["rows"]
        hardware[str(nranks)] = found["calibration"]
        _print(nranks, found)
    _print_verdict(rows)
    if options.json:
        print(json.dumps({**_circumstances(), "rows": rows, "calibration": hardware}))


def _circumstances() -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "benchmark": "plan_check",
        "command": f"python -m benchmarks.plan_check {' '.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "paddle": version("paddlepaddle"),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a plan predicts beside what is measured.")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, metavar="NAME", help=", ".join(CHECKS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each configuration in each round")
    parser.add_argument(
        "--patience-s", type=float, default=60, help="seconds for waiting while others are busy and for repeated turns"
    )
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--as-rank", choices=[*CHECKS, _CALIBRATION], help=argparse.SUPPRESS)
    parser.add_argument("--shard-ranks", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--pipe", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.patience_s = 1, 0.0
    return options


# -- one rank ----------------------------------------------------------------------------------------------------------


def _be_rank(options: argparse.Namespace) -> None:
    import paddle

    from benchmarks.gpt import Batches, Shape
    from benchmarks.turns import serve

    paddle.set_device("cpu")
    shape = Shape(**(_QUICK if options.quick else {}))
    pipe: connection.Connection[Any, Any] = connection.Connection(options.pipe)
    if options.as_rank == _CALIBRATION:
        from benchmarks import plan_calibration

        plan_calibration.serve(pipe, shape, options.shard_ranks)
        return
    check = CHECKS[options.as_rank]

    def build() -> tuple[Trainee, Batches]:
        train = ours(shard_ranks=check.nranks // check.replicas, **check.flags)
        return train(shape, {}), Batches(shape, int(os.environ["PADDLE_TRAINER_ID"]))

    serve(pipe, build)


# -- the run -----------------------------------------------------------------------------------------------------------


def _run(names: Sequence[str], nranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """All checks over so many ranks, and what their calibration predicts."""
    for name in (*names, _CALIBRATION):
        title = CHECKS[name].title if name in CHECKS else "calibration"
        contenders.CONTENDERS.setdefault(name, Contender(title, ours()))
    by_rate: dict[int, list[str]] = {links.RATE_MBIT: [_CALIBRATION]}
    for name in names:
        by_rate.setdefault(CHECKS[name].rate_mbit, []).append(name)
    with links.shaped(nranks) as hosts:
        turns = _take_turns(by_rate, hosts, nranks, options)
    return _compare(names, turns, options)


def _take_turns(
    by_rate: dict[int, list[str]], hosts: list[links.Host], nranks: int, options: argparse.Namespace
) -> dict[str, list[list[RankTurn]]]:
    seating = links.seats(hosts, nranks)
    schedule = course.Schedule(options.rounds, options.steps, options.patience_s / len(by_rate))
    groups: dict[str, Group] = {}
    try:
        for name in (name for names in by_rate.values() for name in names):
            groups[name] = Group(name, _rank_command(name, nranks, options), seating, course.machine_environment())
            groups[name].await_ready()
        courses = {
            rate: course.Course([groups[name] for name in names], nranks=nranks, schedule=schedule)
            for rate, names in by_rate.items()
        }
        for taken in courses.values():
            taken.set_up()
        for number in range(options.rounds):
            for rate, taken in courses.items():
                links.set_rate(hosts, rate)
                taken.go_round(f"round {number + 1} of {options.rounds}")
        return {name: turns for taken in courses.values() for name, turns in taken.turns.items()}
    finally:
        for group in groups.values():
            group.end()


def _rank_command(name: str, nranks: int, options: argparse.Namespace) -> list[str]:
    # All checks over so many ranks have one grid, and so has their calibration.
    (shard_ranks,) = {check.nranks // check.replicas for check in CHECKS.values() if check.nranks == nranks}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.plan_check", "--as-rank", name]
    command += ["--shard-ranks", str(shard_ranks)]
    return [*command, "--quick"] if options.quick else command


def _compare(
    names: Sequence[str], turns: dict[str, list[list[RankTurn]]], options: argparse.Namespace
) -> dict[str, Any]:
    from benchmarks.plan_calibration import conclude
    from hp_sharding.config import ShardingConfig
    from hp_sharding.plan.profile import to_dict
    from hp_sharding.plan.replay import Ranks, predict

    nranks, replicas = CHECKS[names[0]].nranks, CHECKS[names[0]].replicas
    measured, hardware = conclude(turns[_CALIBRATION], nranks // replicas, replicas)  # type: ignore[arg-type]
    rows = []
    for name in names:
        check = CHECKS[name]
        machines = hardware.with_links(check.rate_mbit / links.RATE_MBIT)
        ranks = Ranks(check.nranks // check.replicas, check.replicas)
        found = predict(measured.profile, machines, ranks, ShardingConfig(**check.flags))
        rows.append(_row(name, found, [rank for turn in turns[name] for rank in turn]))
    return {"rows": rows, "calibration": {"hardware": hardware.to_dict(), "profile": to_dict(measured.profile)}}


def _row(name: str, found: Any, ranks: Sequence[RankTurn]) -> dict[str, Any]:
    step_ms = [ms for rank in ranks for ms in rank.step_ms]
    measured_ms, measured_mb = statistics.median(step_ms), statistics.median(rank.peak_mb for rank in ranks)
    predicted_mb = found.memory_bytes / 2**20
    return {
        "check": name,
        "title": CHECKS[name].title,
        "measured_ms": measured_ms,
        "min_ms": min(step_ms),
        "max_ms": max(step_ms),
        "predicted_ms": found.step_ms,
        "time_error": found.step_ms / measured_ms - 1,
        "measured_exposed_ms": statistics.median(rank.timeline.get("exposed_ms", 0.0) for rank in ranks),
        "predicted_exposed_ms": found.exposed_ms,
        "measured_mb": measured_mb,
        "predicted_mb": predicted_mb,
        "memory_error": predicted_mb / measured_mb - 1,
        "timeline": {
            key: statistics.median(rank.timeline[key] for rank in ranks) for key in _numbers(ranks[0].timeline)
        },
        "figures": {key: found.figures[key] for key in _numbers(found.figures)},
        "phases_ms": {
            phase: statistics.median(ms for rank in ranks for ms in rank.phase_ms[phase]) for phase in ranks[0].phase_ms
        },
    }


def _numbers(figures: dict[str, Any]) -> list[str]:
    return [key for key, value in figures.items() if isinstance(value, (int, float))]


def _print(nranks: int, found: dict[str, Any]) -> None:
    rows, calibration = found["rows"], found["calibration"]
    compute_ms = sum(unit["forward_ms"] + unit["backward_ms"] for unit in calibration["profile"]["units"])
    print(f"{nranks} ranks: forward and backward alone {compute_ms:.0f} ms; {json.dumps(calibration['hardware'])}")
    width = max(len(check.title) for check in CHECKS.values())
    heads = f"{'step ms':>8} {'predicted':>9} {'error':>7} {'(range)':>13}  {'MB':>6} {'predicted':>9} {'error':>7}"
    print(f"{'':<{width}}  {heads}")
    for row in rows:
        spread = f"({row['min_ms']:.0f}-{row['max_ms']:.0f})"
        took = f"{row['measured_ms']:>8.0f} {row['predicted_ms']:>9.0f} {row['time_error']:>+7.1%} {spread:>13}"
        held = f"{row['measured_mb']:>6.0f} {row['predicted_mb']:>9.0f} {row['memory_error']:>+7.1%}"
        print(f"{row['title']:<{width}}  {took}  {held}")
    sys.stdout.flush()


def _print_verdict(rows: Sequence[dict[str, Any]]) -> None:
    time_hits = sum(abs(row["time_error"]) <= TIME_LIMIT for row in rows)
    memory_hits = sum(abs(row["memory_error"]) <= MEMORY_LIMIT for row in rows)
    print(
        f"of {len(rows)}: step time within {TIME_LIMIT:.0%} {time_hits}, memory within {MEMORY_LIMIT:.0%} {memory_hits}"
    )


if __name__ == "__main__":
    main()
