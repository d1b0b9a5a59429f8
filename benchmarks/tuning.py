"""Whether ``"auto"`` finds what a grid of fixed settings finds, on links of several speeds.

    python -m benchmarks.tuning                    # as root: 500, 1000 and 2500 Mbit/s, stage 2; about eight minutes
    python -m benchmarks.tuning --stage 3          # sizes and depths
    python -m benchmarks.tuning --rates 1000 --quick --json

A GPT of 6 million parameters, AdamW, two ranks of one core each on two hosts. Every setting of the grid has processes
of its own, and so has ``"auto"``, which tunes while it warms up. Then all take turns, round after round. What counts is
the median over rounds of the quotient of ``"auto"`` and a fixed setting of the same round; the best setting of the grid
is the one for which that is largest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from multiprocessing import connection
from typing import Any, NamedTuple

from benchmarks import links
from benchmarks.course import FOREIGN_LIMIT, machine_environment
from benchmarks.quiet import Meter, await_quiet
from benchmarks.turns import Group, RankTurn, Turn, serve

RATES_MBIT = (500, 1000, 2500)
LIMIT = 1.03
SHAPE = {"layers": 8, "width": 256, "batch": 2}
"""The step takes about as long as its communication at 1 Gbit/s."""
SIZES_MB = (0.78125, 1.5625, 3.125, 6.25, 12.5, 25.0)
STAGE_3_SIZES_MB = (0.78125, 1.5625, 25.0)
"""A layer has 3 MB, and in stage 3 a bucket never spans layers."""
DEPTHS = (1, 2, 3)
AUTO = "auto"
_TUNING_TURN_STEPS = 10
_MAX_TUNING_TURNS = 20


class Setting(NamedTuple):
    """One contender: a bucket size in MB and a prefetch depth, or ``"auto"``; depth 0 is for stages without any."""

    size_mb: float | str
    depth: int | str = 0

    def __str__(self) -> str:
        return f"{self.size_mb}" + (f", depth {self.depth}" if self.depth else "")

    @property
    def is_auto(self) -> bool:
        return self.size_mb == AUTO


def main() -> None:
    """Runs the benchmark, or one rank of it."""
    options = _options()
    if options.as_rank:
        _be_rank(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    reason = links.available()
    if reason:
        sys.exit(f"no shaped links: {reason}")
    results = []
    for rate_mbit in options.rates:
        results.append(_measure(rate_mbit, options))
        _print(results[-1])
    if options.json:
        print(json.dumps({"benchmark": "tuning", "date": time.strftime("%Y-%m-%d"), "rates": results}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="'auto' beside a grid of fixed settings.")
    parser.add_argument("--rates", type=int, nargs="+", default=RATES_MBIT, help="speeds of the links in Mbit/s")
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each setting in each round")
    parser.add_argument(
        "--patience-s", type=float, default=30, help="seconds, for each speed, to wait for a quiet machine"
    )
    parser.add_argument("--quick", action="store_true", help="two rounds over half of the grid")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("--pipe", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.patience_s = 2, 0.0
    return options


# -- one rank ----------------------------------------------------------------------------------------------------------


class _Chosen:
    """Reports what is in force, in the place of a probe."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def begin(self) -> None: ...

    def end_step(self, marks_s: list[float]) -> None: ...

    def summary(self) -> dict[str, float]:
        config, tuning = self._optimizer.config, self._optimizer.tuning
        return {
            "size_mb": config.comm_buffer_size_MB,
            "depth": config.prefetch_depth or 0,
            "is_over": float(tuning is None or tuning.is_over),
            "n_buckets": len(self._optimizer.buffers),
        }


def _be_rank(options: argparse.Namespace) -> None:
    import paddle

    from benchmarks.contenders import ours
    from benchmarks.gpt import Batches, Shape

    setting = Setting(**json.loads(options.as_rank))
    shape = Shape(**SHAPE)

    def build() -> tuple[Any, Any]:
        flags = {"stage": options.stage, "allgather_overlap": True, "reduce_overlap": True}
        flags["comm_buffer_size_MB"] = setting.size_mb
        if setting.depth:
            flags["prefetch_depth"] = setting.depth
        trainee = ours(**flags)(shape, {})
        trainee.probe = _Chosen(trainee.optimizer)
        return trainee, Batches(shape, int(os.environ["PADDLE_TRAINER_ID"]))

    paddle.set_device("cpu")
    serve(connection.Connection(options.pipe), build)


# -- the run -----------------------------------------------------------------------------------------------------------


def _grid(options: argparse.Namespace) -> list[Setting]:
    if options.stage < 3:
        settings = [Setting(size_mb) for size_mb in SIZES_MB]
    else:
        settings = [Setting(size_mb, depth) for size_mb in STAGE_3_SIZES_MB for depth in DEPTHS]
    return settings[::2] if options.quick else settings


def _rank_command(options: argparse.Namespace, setting: Setting) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.tuning", "--stage", str(options.stage)]
    return [*command, "--as-rank", json.dumps(setting._asdict())]


def _measure(rate_mbit: int, options: argparse.Namespace) -> dict[str, Any]:
    auto = Setting(AUTO, AUTO if options.stage == 3 else 0)
    groups: dict[Setting, Group] = {}
    with links.shaped(2, rate_mbit=rate_mbit) as hosts:
        try:
            for setting in (auto, *_grid(options)):
                _say(f"{rate_mbit} Mbit/s, starting {setting}")
                command = _rank_command(options, setting)
                groups[setting] = Group(str(setting), command, links.seats(hosts, 2), machine_environment())
                groups[setting].await_ready()
            tuned = _set_up(groups)
            turns, share = _take_turns(groups, rate_mbit, options)
        finally:
            _say("")
            for group in groups.values():
                group.end()
    return {
        "rate_mbit": rate_mbit,
        "stage": options.stage,
        "tuned": tuned,
        "foreign_cpu_share": share,
        **_sum_up(turns),
    }


def _set_up(groups: dict[Setting, Group]) -> dict[str, float]:
    """Every setting gets warm; ``"auto"`` until it has chosen. Returns what it has, and the steps that it took."""
    tuned: dict[str, float] = {}
    for setting, group in groups.items():
        _say(f"warming up {setting}")
        group.set_up()
        if not setting.is_auto:
            group.take_turn(Turn(4, 1, 0))
            continue
        for turn in range(_MAX_TUNING_TURNS):
            parts = group.take_turn(Turn(_TUNING_TURN_STEPS - 1, 1, 0))[0].parts
            tuned = {**parts, "steps": (turn + 1) * _TUNING_TURN_STEPS}
            if parts["is_over"]:
                break
    return tuned


def _take_turns(
    groups: dict[Setting, Group], rate_mbit: int, options: argparse.Namespace
) -> tuple[dict[Setting, list[list[RankTurn]]], float]:
    turns: dict[Setting, list[list[RankTurn]]] = {setting: [] for setting in groups}
    shares, patience_s = [], options.patience_s
    for number in range(options.rounds):
        order = list(groups)[number % len(groups) :] + list(groups)[: number % len(groups)]
        for setting in order:
            _say(f"{rate_mbit} Mbit/s, round {number + 1} of {options.rounds}: {setting}")
            while True:
                begin_s = time.monotonic()
                await_quiet(FOREIGN_LIMIT, patience_s)
                with Meter() as meter:
                    turn = groups[setting].take_turn(Turn(1, options.steps))
                meter.own_s = sum(rank.turn_cpu_s for rank in turn)
                share = meter.foreign_share()
                if share <= FOREIGN_LIMIT or patience_s <= 0:
                    break
                patience_s -= time.monotonic() - begin_s
            turns[setting].append(turn)
            shares.append(share)
    return turns, statistics.fmean(shares)


def _step_ms(turn: list[RankTurn]) -> float:
    return statistics.median(ms for rank in turn for ms in rank.step_ms)


def _sum_up(turns: dict[Setting, list[list[RankTurn]]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    auto = next(setting for setting in turns if setting.is_auto)
    for setting, of_setting in turns.items():
        ratios = [_step_ms(own) / _step_ms(other) for own, other in zip(turns[auto], of_setting, strict=True)]
        rows.append(
            {
                "setting": str(setting),
                "step_ms": statistics.median(ms for turn in of_setting for rank in turn for ms in rank.step_ms),
                "exposed_ms": statistics.median(rank.timeline["exposed_ms"] for turn in of_setting for rank in turn),
                "n_buckets": of_setting[-1][0].parts["n_buckets"],
                "auto_over_it": statistics.median(ratios),
            }
        )
    fixed = [row for row in rows if row["setting"] != str(auto)]
    best: dict[str, Any] = max(fixed, key=lambda row: row["auto_over_it"])
    return {"rows": rows, "best": best["setting"], "auto_over_best": best["auto_over_it"]}


def _print(result: dict[str, Any]) -> None:
    tuned = result["tuned"]
    depth = f", prefetch_depth {tuned['depth']:g}" if result["stage"] == 3 else ""
    print(
        f"\nstage {result['stage']}, {result['rate_mbit']} Mbit/s: auto took {tuned['steps']} steps at most and chose "
        f"comm_buffer_size_MB {tuned['size_mb']:g}{depth}"
    )
    print(f"{'setting':<20}{'buckets':>9}{'step ms':>9}{'waiting':>9}{'auto / it':>11}")
    for row in result["rows"]:
        cells = f"{row['n_buckets']:>9.0f}{row['step_ms']:>9.1f}{row['exposed_ms']:>9.1f}{row['auto_over_it']:>11.3f}"
        print(f"{row['setting']:<20}{cells}")
    verdict = "met" if result["auto_over_best"] <= LIMIT else "missed"
    quotient = f"{result['auto_over_best']:.3f} times the best of the grid ({result['best']})"
    print(f"auto: {quotient}, limit {LIMIT}: {verdict}")
    if result["foreign_cpu_share"] > FOREIGN_LIMIT:
        share = f"{100 * result['foreign_cpu_share']:.0f} %"
        print(f"WARNING: other programs took {share} of the processor meanwhile; measure again on a quiet machine")


def _say(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text:<79}" if text else f"\r{'':<79}\r")
        sys.stderr.flush()


if __name__ == "__main__":
    main()
