"""How long a training step takes, beside the same step without communication and beside what Paddle offers.

    python -m benchmarks.step                  # as root: two hosts joined by links of 1 Gbit/s; about six minutes
    python -m benchmarks.step --quick          # a look at whether it works; its figures mean little
    python -m benchmarks.step --rate-mbit 2500 --contenders compute stage2_overlap --json
    python -m benchmarks.step --replicas 2                # four hosts: two replicas of two ranks each
    python -m benchmarks.step --experiment breakdown    # one of those in experiments.py

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
import sys
import time
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from benchmarks import course, links, report
from benchmarks.circumstances import machine
from benchmarks.contenders import CONTENDERS, SHARD_RANKS, STANDARD, STANDARD_OF_REPLICAS
from benchmarks.experiments import EXPERIMENTS
from benchmarks.turns import serve

if TYPE_CHECKING:
    from benchmarks.contenders import Trainee
    from benchmarks.gpt import Batches

BUFFER_MB = 8.0
"""On a link of 1 Gbit/s they take 34 ms, less than the forward of a layer; the default of 25 suits faster links."""


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
    if options.experiment:
        print(f"{options.experiment}: {EXPERIMENTS[options.experiment].question}")
    result = _measure(options, rate_mbit=None if reason else options.rate_mbit)
    report.print_tables(result)
    if options.json:
        print(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training step of hp_sharding beside Paddle's own ways.")
    parser.add_argument(
        "--experiment", choices=EXPERIMENTS, help="settings that answer one question; see experiments.py"
    )
    parser.add_argument("--rate-mbit", type=int, default=links.RATE_MBIT, help="speed of the links")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME", help=", ".join(CONTENDERS))
    parser.add_argument("--replicas", type=int, help=f"of {SHARD_RANKS} ranks each, a host for every rank")
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
    experiment = EXPERIMENTS.get(options.experiment)
    options.replicas = options.replicas or (experiment.replicas if experiment else 1)
    standard = STANDARD if options.replicas == 1 else STANDARD_OF_REPLICAS
    options.contenders = options.contenders or (experiment.contenders if experiment else standard)
    options.shape = {
        **(experiment.shape if experiment else {}),
        **({"layers": 2, "width": 128} if options.quick else {}),
    }
    if options.quick:
        options.rounds, options.steps, options.patience_s = 1, 2, 0.0
    return options


# -- one rank ----------------------------------------------------------------------------------------------------------


def _be_rank(options: argparse.Namespace) -> None:
    import paddle

    from benchmarks.gpt import Batches, Shape

    shape = Shape(**options.shape)

    def build() -> tuple[Trainee, Batches]:
        sizes = {"comm_buffer_size_MB": options.buffer_mb, "replicate_buffer_size_MB": options.replicate_mb}
        # An experiment looks into the steps that are timed.
        trainee = CONTENDERS[options.as_rank].build(shape, {**sizes, "timeline": bool(options.experiment)})
        if options.experiment and trainee.timeline is not None:
            from benchmarks.probe import Probe

            trainee.probe = Probe(trainee.optimizer)
        return trainee, Batches(shape, int(os.environ["PADDLE_TRAINER_ID"]))

    paddle.set_device("cpu")
    serve(connection.Connection(options.pipe), build)


# -- the run -----------------------------------------------------------------------------------------------------------


def _measure(options: argparse.Namespace, *, rate_mbit: int | None) -> dict[str, Any]:
    nranks = SHARD_RANKS * options.replicas
    network = links.shaped(nranks, rate_mbit=rate_mbit) if rate_mbit else links.loopback(nranks)
    schedule = course.Schedule(options.rounds, options.steps, options.patience_s)
    with network as hosts:
        brought = course.run(
            options.contenders,
            links.seats(hosts, nranks),
            command=lambda name: _rank_command(options, name),
            schedule=schedule,
        )
    rows = {name: report.row(turns, brought.turns.get("compute")) for name, turns in brought.turns.items()}
    # The targets are meant for the whole model, this speed of link, and a machine that does nothing else.
    comparable = rate_mbit == links.RATE_MBIT and not options.shape and brought.foreign_share <= course.FOREIGN_LIMIT
    targets = report.TARGETS if options.replicas == 1 else report.REPLICA_TARGETS
    return {
        **_circumstances(options, rate_mbit=rate_mbit),
        "foreign_cpu_share": brought.foreign_share,
        "turns_repeated": brought.repeated,
        "rows": rows,
        "losses": report.compare_losses(brought.losses),
        "targets": report.judge(rows, targets) if comparable else [],
    }


def _rank_command(options: argparse.Namespace, name: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.step", "--as-rank", name]
    command += ["--buffer-mb", str(options.buffer_mb), "--replicate-mb", str(options.replicate_mb)]
    command += ["--experiment", options.experiment] if options.experiment else []
    return [*command, "--quick"] if options.quick else command


def _circumstances(options: argparse.Namespace, *, rate_mbit: int | None) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "benchmark": "step",
        "command": f"python -m benchmarks.step {' '.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "paddle": version("paddlepaddle"),
        "rate_mbit": rate_mbit,
        "nranks": SHARD_RANKS * options.replicas,
        "experiment": options.experiment,
        "shape": options.shape,
        "quick": options.quick,
        "rounds": options.rounds,
        "steps": options.steps,
        "buffer_mb": options.buffer_mb,
        "replicate_mb": options.replicate_mb,
    }


if __name__ == "__main__":
    main()
