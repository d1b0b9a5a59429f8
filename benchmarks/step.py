"""How long a training step takes, beside the same step without communication and beside what Paddle offers.

    python -m benchmarks.step                  # as root: two hosts joined by links of 1 Gbit/s; about four minutes
    python -m benchmarks.step --quick          # a look at whether it works; its figures mean little
    python -m benchmarks.step --rate-mbit 2500 --contenders compute stage2_overlap --json
    python -m benchmarks.step --replicas 2     # four hosts: two replicas of two ranks each

A GPT of 26 million parameters, float32, AdamW, batch 4 x 128 a rank, one processor core a rank. Every contender has its
own processes, which wait while the others train: they take turns, round after round, in one run. *Compute alone* is the
same training without any communication, in as many processes at the same time. Medians are over all timed steps of all
ranks. Contenders that train together must come to the same losses; the program says whether they do.

Without root it runs over loopback, and says so: then the link is as fast as memory and there is little to hide.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import links
from benchmarks.contenders import CONTENDERS, SHARD_RANKS
from benchmarks.quiet import Meter, await_quiet
from benchmarks.turns import PHASES, Group, RankTurn, Turn, serve

if TYPE_CHECKING:
    from benchmarks.contenders import Trainee
    from benchmarks.gpt import Batches

BUFFER_MB = 8.0
"""On a link of 1 Gbit/s they take 34 ms, less than the forward of a layer; the default of 25 suits faster links."""
FIRST_WARMUP_STEPS = 3
"""Before the first round: memory is touched for the first time, and hp_sharding learns the order of the layers."""
FOREIGN_LIMIT = 0.03
"""Share of the processor that other programs may take; beyond it a turn is repeated while patience lasts."""
LOSS_TOLERANCE = 1e-5


class Target(NamedTuple):
    """How stage 2 with overlap should compare with another contender.

    Attributes:
        text: for people; the limit follows.
        other: the other contender.
        limit: of the quotient of the two medians.
        at_most: whether the quotient is ours over theirs and has to stay below; else theirs over ours, and above.
    """

    text: str
    other: str
    limit: float
    at_most: bool


TARGETS = (
    Target("times compute alone, at most", "compute", 1.15, True),
    Target("times faster than DataParallel, at least", "data_parallel", 1.35, False),
    Target("times faster than sharding V1, at least", "sharding_v1", 1.8, False),
)

REPLICA_TARGETS = (Target("times compute alone, at most", "compute", 1.25, True),)


def main() -> None:
    """Runs the benchmark, or one rank of it."""
    options = _options()
    if options.as_rank:
        _be_rank(options)
        return
    # Ended from outside, it still takes its processes and namespaces away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    reason = "asked for" if options.loopback else links.available()
    if reason:
        print(f"no shaped links ({reason}): over loopback, whose speed is that of memory")
    nranks = SHARD_RANKS * options.replicas
    network = links.loopback(nranks) if reason else links.shaped(nranks, rate_mbit=options.rate_mbit)
    with network as hosts:
        course = _run(links.seats(hosts, nranks), options)
    result = {
        **_circumstances(options, rate_mbit=None if reason else options.rate_mbit),
        "foreign_cpu_share": statistics.fmean(course.shares),
        "turns_repeated": course.repeated,
        "rows": {name: _row(turns, course.turns.get("compute")) for name, turns in course.turns.items()},
        "losses": _compare_losses(course.losses),
    }
    # They are meant for the whole model, this speed of link, and a machine that does nothing else.
    comparable = result["rate_mbit"] == links.RATE_MBIT and not options.quick
    undisturbed = result["foreign_cpu_share"] <= FOREIGN_LIMIT
    targets = TARGETS if options.replicas == 1 else REPLICA_TARGETS
    result["targets"] = _targets(result["rows"], targets) if comparable and undisturbed else []
    _print(result)
    if options.json:
        print(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training step of hp_sharding beside Paddle's own ways.")
    parser.add_argument("--rate-mbit", type=int, default=links.RATE_MBIT, help="speed of the links")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--replicas", type=int, default=1, help=f"of {SHARD_RANKS} ranks each, a host for every rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each contender in each round")
    parser.add_argument(
        "--patience-s", type=float, default=120, help="seconds for waiting while others are busy and for repeated turns"
    )
    parser.add_argument("--buffer-mb", type=float, default=BUFFER_MB, help="hp_sharding's comm_buffer_size_MB")
    parser.add_argument("--replicate-mb", type=float, default=BUFFER_MB / 2, help="its replicate_buffer_size_MB")
    parser.add_argument("--quick", action="store_true", help="a small model, one round of two steps")
    parser.add_argument("--loopback", action="store_true", help="no shaped links, even as root")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--as-rank", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--pipe", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.patience_s = 1, 2, 0.0
    return options


# -- one rank ----------------------------------------------------------------------------------------------------------


def _be_rank(options: argparse.Namespace) -> None:
    import paddle

    from benchmarks.gpt import Batches, Shape

    shape = Shape(layers=2, width=128) if options.quick else Shape()

    def build() -> tuple[Trainee, Batches]:
        sizes = {"comm_buffer_size_MB": options.buffer_mb, "replicate_buffer_size_MB": options.replicate_mb}
        trainee = CONTENDERS[options.as_rank].build(shape, sizes)
        return trainee, Batches(shape, int(os.environ["PADDLE_TRAINER_ID"]))

    paddle.set_device("cpu")
    serve(connection.Connection(options.pipe), build)


# -- the run -----------------------------------------------------------------------------------------------------------


class Course:
    """A run: its groups take turns, and what they report is kept.

    Attributes:
        turns: of each contender, by round; each a list over ranks.
        losses: of each contender and rank, of every step, turns that had to be repeated included.
        shares: of the processor, that other programs took during the turns that count.
        repeated: turns that do not count, because other programs took too much.
    """

    def __init__(self, groups: list[Group], *, nranks: int, steps: int, patience_s: float) -> None:
        self._groups = groups
        self._steps = steps
        self._patience_s = patience_s
        self.turns: dict[str, list[list[RankTurn]]] = {group.name: [] for group in groups}
        self.losses: dict[str, list[list[float]]] = {group.name: [[] for _ in range(nranks)] for group in groups}
        self.shares: list[float] = []
        self.repeated = 0

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


def _run(seating: list[links.Seat], options: argparse.Namespace) -> Course:
    shared = ["-m", "benchmarks.step", *(["--quick"] if options.quick else [])]
    shared += ["--buffer-mb", str(options.buffer_mb), "--replicate-mb", str(options.replicate_mb)]
    groups: list[Group] = []
    try:
        for name in options.contenders:
            _say(f"starting: {CONTENDERS[name].title}")
            groups.append(Group(name, [*shared, "--as-rank", name], seating, _machine_environment()))
            groups[-1].await_ready()
        course = Course(groups, nranks=len(seating), steps=options.steps, patience_s=options.patience_s)
        course.set_up()
        for number in range(options.rounds):
            course.go_round(f"round {number + 1} of {options.rounds}")
        return course
    finally:
        _say("")
        for group in groups:
            group.end()


def _machine_environment() -> dict[str, str]:
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


# -- what came of it ---------------------------------------------------------------------------------------------------


def _circumstances(options: argparse.Namespace, *, rate_mbit: int | None) -> dict[str, Any]:
    from importlib.metadata import version

    model = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "benchmark": "step",
        "command": f"python -m benchmarks.step {' '.join(sys.argv[1:])}".strip(),
        "machine": f"{model[0] if model else platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "paddle": version("paddlepaddle"),
        "rate_mbit": rate_mbit,
        "nranks": SHARD_RANKS * options.replicas,
        "quick": options.quick,
        "rounds": options.rounds,
        "steps": options.steps,
        "buffer_mb": options.buffer_mb,
        "replicate_mb": options.replicate_mb,
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _row(turns: list[list[RankTurn]], compute: list[list[RankTurn]] | None) -> dict[str, Any]:
    """Figures of one contender over all turns and ranks, in milliseconds."""
    ranks = [rank for turn in turns for rank in turn]
    step_ms = [ms for rank in ranks for ms in rank.step_ms]
    quartiles = statistics.quantiles(step_ms, n=4)
    by_round = []
    for turn, alone in zip(turns, compute or [], strict=False):
        by_round.append(_median_step(turn) / _median_step(alone))
    lanes = {name: statistics.median(rank.timeline[name] for rank in ranks) for name in ranks[0].timeline}
    return {
        "step_ms": statistics.median(step_ms),
        "min_ms": min(step_ms),
        "max_ms": max(step_ms),
        "quartiles_ms": [quartiles[0], quartiles[2]],
        **{f"{phase}_ms": statistics.median(ms for rank in ranks for ms in rank.phase_ms[phase]) for phase in PHASES},
        "cpu_ms": statistics.median(rank.cpu_ms for rank in ranks),
        "main_cpu_ms": statistics.median(rank.main_cpu_ms for rank in ranks),
        "ratio": statistics.median(step_ms) / statistics.median(_all_steps(compute)) if compute else None,
        "ratio_by_round": by_round,
        "timeline": lanes,
    }


def _all_steps(turns: list[list[RankTurn]]) -> list[float]:
    return [ms for turn in turns for rank in turn for ms in rank.step_ms]


def _median_step(turn: list[RankTurn]) -> float:
    return statistics.median(ms for rank in turn for ms in rank.step_ms)


def _compare_losses(losses: dict[str, list[list[float]]]) -> dict[str, Any]:
    """The largest relative difference between contenders that train together, over the steps that all have made."""
    together = [name for name in losses if not CONTENDERS[name].trains_alone]
    if not together:
        return {}
    reference = losses[together[0]]
    differences = {name: _largest_difference(losses[name], reference) for name in together[1:]}
    return {
        "reference": together[0],
        "largest_relative_difference": differences,
        "agree": all(difference <= LOSS_TOLERANCE for difference in differences.values()),
        "first": reference[0][0],
        "last": reference[0][-1],
    }


def _largest_difference(losses: list[list[float]], reference: list[list[float]]) -> float:
    pairs = [pair for ranks in zip(losses, reference, strict=True) for pair in zip(*ranks, strict=False)]
    return max(abs(loss - other) / abs(other) for loss, other in pairs)


def _targets(rows: dict[str, dict[str, Any]], targets: Sequence[Target]) -> list[dict[str, Any]]:
    found = []
    ours = rows.get("stage2_overlap")
    for target in targets:
        if ours is None or target.other not in rows:
            continue
        other_ms = rows[target.other]["step_ms"]
        value = ours["step_ms"] / other_ms if target.at_most else other_ms / ours["step_ms"]
        met = value <= target.limit if target.at_most else value >= target.limit
        found.append({"target": target.text, "limit": target.limit, "value": value, "met": met})
    return found


def _print(result: dict[str, Any]) -> None:
    rate = result["rate_mbit"]
    network = f"{rate} Mbit/s links" if rate else "loopback"
    print(f"{result['machine']}; Paddle {result['paddle']}; {result['date']}; {result['nranks']} ranks, {network}")
    head = ("forward", "backward", "update", "gather", "reduce", "exposed", "CPU")
    print(f"{'median ms of':<33}{'step':>7}{'(min-max)':>15}{'x alone':>9}" + "".join(f"{name:>10}" for name in head))
    for name, row in result["rows"].items():
        spread = f"({row['min_ms']:.0f}-{row['max_ms']:.0f})"
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else ""
        lanes = [row["timeline"].get(f"{lane}_ms") for lane in ("gather", "reduce", "exposed")]
        cells = [*(row[f"{phase}_ms"] for phase in PHASES), *lanes, row["cpu_ms"]]
        print(
            f"{CONTENDERS[name].title:<33}{row['step_ms']:>7.0f}{spread:>15}{ratio:>9}"
            + "".join(f"{'' if cell is None else format(cell, '.0f'):>10}" for cell in cells)
        )
    _print_verdicts(result)


def _print_verdicts(result: dict[str, Any]) -> None:
    losses = result["losses"]
    for name, difference in losses.get("largest_relative_difference", {}).items():
        print(f"losses of {CONTENDERS[name].title}: within {difference:.1e} of {CONTENDERS[losses['reference']].title}")
    if losses and not losses["agree"]:
        print(f"WARNING: losses differ by more than {LOSS_TOLERANCE:g}: these contenders do not train the same")
    for target in result["targets"]:
        verdict = "met" if target["met"] else "missed"
        print(f"stage 2 with overlap: {target['value']:.2f} {target['target']} {target['limit']:g}: {verdict}")
    if result["foreign_cpu_share"] > FOREIGN_LIMIT:
        share = f"{100 * result['foreign_cpu_share']:.0f} %"
        print(f"WARNING: other programs took {share} of the processor meanwhile; measure again on a quiet machine")


if __name__ == "__main__":
    main()
