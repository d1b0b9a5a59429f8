"""How long a training step takes with hp_sharding, and with what Paddle and PyTorch offer for the same purpose.

    python -m benchmarks.compare                               # as root: 2 and 4 hosts, three speeds of links
    python -m benchmarks.compare --cells 1000:2                # one of these: links of 1000 Mbit/s, 2 hosts
    python -m benchmarks.compare --results build/compare.json  # keeps what was measured, set by set
    python -m benchmarks.compare --page build/compare.json     # measures nothing: the tables as Markdown
    python -m benchmarks.compare --experiment ddp_buckets      # which settings suit PyTorch: one question
    python -m benchmarks.compare --quick --cells 1000:2        # a look at whether it works; its figures mean little

Everybody trains the GPT of ``benchmarks.step``: the same sizes, initial weights and batches, float32, AdamW. Every
contender has its own processes, one a rank and host, which wait while the others train. They take turns, in rounds,
and in each round the links are given one speed after the other. With two hosts a rank has a processor core to itself;
with four, two ranks share one. *Alone* is the same training with the same framework in the same seats without any
communication: what a step would take if the network were free.

PyTorch runs in an environment of its own, which is made where it is missing (``benchmarks.peers.environment``). Where
not all processes fit into memory at once, each framework's peers have sets of their own, with hp_sharding in each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import compare_page, compare_report, course, link_speed, links
from benchmarks.circumstances import machine
from benchmarks.contenders import CONTENDERS
from benchmarks.peers import environment
from benchmarks.peers.contenders import COMPARED, DDP_MB, EXPERIMENTS, PREFETCHED, in_sets, taking_part
from benchmarks.shape import Shape
from benchmarks.step import BUFFER_MB
from benchmarks.turns import ROOT, serve

if TYPE_CHECKING:
    from benchmarks.contenders import Trainee

RATES_MBIT = (10000, 1000, 500)
"""The fastest first: with it everybody gets warm."""
HOSTS = (2, 4)
_QUICK = {"layers": 2, "width": 128}
_MEMORY_SHARE = 0.9
"""Of what is available now, that the waiting processes may fill."""


class Cell(NamedTuple):
    """One setting: the speed of the links and the number of hosts."""

    rate_mbit: int
    nhosts: int

    @classmethod
    def parse(cls, text: str) -> Cell:
        """From ``RATE:HOSTS``."""
        rate, _, nhosts = text.partition(":")
        return cls(int(rate), int(nhosts))


def main() -> None:
    """Runs the benchmark, or one rank of it, or shows what was measured."""
    options = _options()
    if options.as_rank:
        _be_rank(options)
    elif options.page:
        _show(options)
    else:
        _run(options)


def _show(options: argparse.Namespace) -> None:
    cells = compare_report.read(options.page)
    if options.into:
        compare_page.put_into(options.into, compare_page.page(cells))
    else:
        print(compare_page.page(cells))
    if options.plot:
        compare_page.plot(cells, options.plot)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training step of hp_sharding beside Paddle's and PyTorch's ways.")
    parser.add_argument("--cells", nargs="+", type=Cell.parse, metavar="RATE:HOSTS", help="Mbit/s and number of hosts")
    parser.add_argument("--contenders", nargs="+", choices=COMPARED, metavar="NAME", help=", ".join(COMPARED))
    parser.add_argument("--experiment", choices=EXPERIMENTS, help="one question about PyTorch's settings")
    parser.add_argument(
        "--rounds", type=int, help="turns of each contender at each speed; default: 3, with four hosts 2"
    )
    parser.add_argument("--steps", type=int, help="timed steps of each turn; default: 2, with four hosts 1")
    parser.add_argument("--patience-s", type=float, default=60, help="for waiting while others are busy, for each set")
    parser.add_argument("--buffer-mb", type=float, default=BUFFER_MB, help="hp_sharding's comm_buffer_size_MB")
    parser.add_argument("--replicate-mb", type=float, default=BUFFER_MB / 2, help="its replicate_buffer_size_MB")
    parser.add_argument("--ddp-mb", type=int, default=DDP_MB, help="size of the buckets of PyTorch DDP")
    parser.add_argument("--prefetch", type=int, default=PREFETCHED, help="blocks that PyTorch FSDP2 gathers ahead")
    parser.add_argument("--memory-gb", type=float, help="for the processes of a set; default: most of what is free")
    parser.add_argument("--results", type=Path, metavar="FILE", help="adds what was measured to this file")
    parser.add_argument("--page", type=Path, metavar="FILE", help="prints the tables of such a file, and ends")
    parser.add_argument("--into", type=Path, metavar="MARKDOWN", help="with --page: puts them between the marks there")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="with --page: draws them (extra `plot`)")
    parser.add_argument("--quick", action="store_true", help="a small model, one round of one step")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--as-rank", choices=COMPARED, help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    parser.add_argument("--pipe", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    standard = [Cell(1000, 2)] if options.experiment else [Cell(rate, n) for n in HOSTS for rate in RATES_MBIT]
    options.cells = options.cells or standard
    if options.quick:
        options.rounds, options.steps, options.patience_s = 1, 1, 0.0
    options.shape = _QUICK if options.quick else {}
    return options


# -- one rank ----------------------------------------------------------------------------------------------------------


def _be_rank(options: argparse.Namespace) -> None:
    # Each framework as fast as it is here: Paddle without strided views, whose copies are a fifth of this step on CPU.
    os.environ.setdefault("FLAGS_use_stride_kernel", "0")
    shape = Shape(**options.shape)
    # Imports its framework now, while nobody is being measured.
    batches = _batches(COMPARED[options.as_rank].framework, shape, int(os.environ["PADDLE_TRAINER_ID"]))

    def build() -> tuple[Trainee, Any]:
        settings = {"bucket_mb": options.ddp_mb, "prefetched": options.prefetch}
        flags: dict[str, Any] = {"weights": options.weights, "settings": settings}
        if COMPARED[options.as_rank].framework == "paddle":
            flags = {"comm_buffer_size_MB": options.buffer_mb, "replicate_buffer_size_MB": options.replicate_mb}
        return CONTENDERS[options.as_rank].build(shape, flags), batches

    serve(connection.Connection(options.pipe), build)


def _batches(framework: str, shape: Shape, rank: int) -> Any:
    if framework == "torch":
        from benchmarks.peers import torch_model

        return torch_model.Batches(shape, rank)
    import paddle

    from benchmarks import gpt

    paddle.set_device("cpu")
    return gpt.Batches(shape, rank)


def _rank_command(options: argparse.Namespace, name: str, weights: Path) -> list[str]:
    torch = COMPARED[name].framework == "torch"
    command = [str(environment.interpreter()) if torch else sys.executable, "-W", "ignore"]
    command += ["-m", "benchmarks.compare", "--as-rank", name, "--weights", str(weights)]
    command += ["--buffer-mb", str(options.buffer_mb), "--replicate-mb", str(options.replicate_mb)]
    command += ["--ddp-mb", str(options.ddp_mb), "--prefetch", str(options.prefetch)]
    return [*command, "--quick"] if options.quick else command


# -- the run -----------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> None:
    # Ended from outside, it still takes its processes and namespaces away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    reason = links.available()
    if reason:
        sys.exit(f"nothing to compare without links of a known speed: {reason}")
    if options.experiment:
        print(f"{options.experiment}: {EXPERIMENTS[options.experiment]}")
    cells = []
    for nhosts in sorted({cell.nhosts for cell in options.cells}):
        rates_mbit = [cell.rate_mbit for cell in options.cells if cell.nhosts == nhosts]
        for cell in _measure(options, nhosts, rates_mbit):
            cells.append(cell)
            compare_report.print_cell(cell)
    if options.json:
        print(json.dumps({"benchmark": "compare", "cells": cells}))


def _measure(options: argparse.Namespace, nhosts: int, rates_mbit: list[int]) -> list[dict[str, Any]]:
    """The cells of ``nhosts`` hosts, at all speeds, measured by the same processes; kept after each set of those."""
    names = taking_part(nhosts, options.contenders, options.experiment or "")
    if any(COMPARED[name].framework == "torch" for name in names):
        environment.ensure()
    available_mb = options.memory_gb * 1024 if options.memory_gb else _MEMORY_SHARE * _free_mb()
    sets = in_sets(names, nhosts, available_mb)
    brought: list[course.Course] = []
    with tempfile.TemporaryDirectory() as folder, links.shaped(nhosts, rate_mbit=rates_mbit[0]) as hosts:
        weights = Path(folder, "weights.npz")
        _write_weights(options, weights)
        about = [_circumstances(options, rate_mbit, hosts) for rate_mbit in rates_mbit]
        for part in sets:
            brought.append(_take_turns(options, hosts, rates_mbit, part, weights))
            cells = _cells(about, brought, sets[len(brought) :])
            if options.results:
                compare_report.keep(cells, options.results)
    return cells


def _cells(about: list[dict[str, Any]], brought: list[course.Course], missing: list[list[str]]) -> list[dict[str, Any]]:
    """One for each speed, of the sets that have had their turns; ``missing`` are those that have not."""
    cells = []
    for index, circumstances in enumerate(about):
        found = [compare_report.Turns.of(one, index, len(about)) for one in brought]
        cells.append({**circumstances, **compare_report.cell(found), "missing": missing})
        cells[-1]["targets"] = compare_report.judge(cells[-1])
    return cells


def _free_mb() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 1024


def _write_weights(options: argparse.Namespace, file: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers.weights", str(file)]
    subprocess.run([*command, "--shape", json.dumps(options.shape)], check=True, cwd=ROOT, capture_output=True)


def _take_turns(
    options: argparse.Namespace, hosts: list[links.Host], rates_mbit: list[int], names: list[str], weights: Path
) -> course.Course:
    links.set_rate(hosts, rates_mbit[0])
    return course.run(
        names,
        links.seats(hosts, len(hosts)),
        command=lambda name: _rank_command(options, name, weights),
        schedule=course.Schedule(
            _rounds(options, len(hosts)) * len(rates_mbit), _steps(options, len(hosts)), options.patience_s
        ),
        before_round=lambda number: links.set_rate(hosts, rates_mbit[number % len(rates_mbit)]),
    )


def _steps(options: argparse.Namespace, nhosts: int) -> int:
    """Of each turn: over all ranks as many with many hosts as with few."""
    return options.steps or max(1, 4 // nhosts)


def _rounds(options: argparse.Namespace, nhosts: int) -> int:
    return options.rounds or (3 if nhosts == 2 else 2)


def _circumstances(options: argparse.Namespace, rate_mbit: int, hosts: list[links.Host]) -> dict[str, Any]:
    """Of a cell: what it is, what was asked for, and what its links really carry."""
    from importlib.metadata import version

    links.set_rate(hosts, rate_mbit)
    return {
        "command": f"python -m benchmarks.compare {' '.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "paddle": version("paddlepaddle"),
        "torch": environment.TORCH.partition("==")[2],
        "rate_mbit": rate_mbit,
        "hosts": len(hosts),
        "reached_mbit": link_speed.measure(hosts),
        "quick": options.quick,
        "experiment": options.experiment,
        "rounds": _rounds(options, len(hosts)),
        "steps": _steps(options, len(hosts)),
        "buffer_mb": options.buffer_mb,
        "replicate_mb": options.replicate_mb,
        "ddp_mb": options.ddp_mb,
        "prefetch": options.prefetch,
    }


if __name__ == "__main__":
    main()
