"""The long loops: starts that must not fail, kills that may cost nothing, steps in which nothing may grow.

Ends with 1 if anything did.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from tests import harness
from tests.soak import growth, kills, starts
from tests.soak.starts import Split

MB = 2**20


class _Loop(NamedTuple):
    """A loop and what it runs on if the command line does not say. It returns whether all was well."""

    run: Callable[[argparse.Namespace, Split, int], bool]
    splits: list[Split]
    stages: list[int]


def main() -> int:
    """Runs one loop on every split and stage. Returns 0 if nothing failed and nothing grew, else 1."""
    arguments = _parse()
    loop = LOOPS[arguments.loop]
    well = [
        loop.run(arguments, split, stage)
        for split in arguments.split or loop.splits
        for stage in arguments.stage or loop.stages
    ]
    return int(not all(well))


def _starts(arguments: argparse.Namespace, split: Split, stage: int) -> bool:
    print(f"{arguments.count} starts, {split}, stage {stage}", flush=True)
    found = starts.start_many(arguments.count, split, stage, tell=_tell)
    print(starts.table(found), flush=True)
    return not any(start.faults for start in found)


def _tell(number: int, start: starts.Start) -> None:
    print(f"  {number + 1:3}: {start.total_s:6.2f} s, {'FAILED' if start.faults else 'ok'}", flush=True)
    for fault in start.faults:
        print(fault, flush=True)


def _kills(arguments: argparse.Namespace, split: Split, stage: int) -> bool:
    print(f"{arguments.count} kills, {split}, stage {stage}", flush=True)
    found = kills.kill_many(arguments.count, split, stage, seed=arguments.seed, tell=_tell_life)
    print(kills.table(found), flush=True)
    return not any(life.faults for life in found)


def _tell_life(number: int, life: kills.Life) -> None:
    killed = f"killed {', '.join(map(str, life.victims))}" if life.victims else "left alone"
    what = f"left {life.hit}" if life.hit else "between saves"
    print(f"  {number + 1:3}: {life.total_s:6.2f} s, {len(life.saves)} saves, {killed}, {what}", flush=True)
    for fault in life.faults:
        print(fault, flush=True)


def _steps(arguments: argparse.Namespace, split: Split, stage: int) -> bool:
    print(f"{arguments.count} steps of {arguments.model}, {split}, stage {stage}", flush=True)
    settings = {"stage": stage, "allgather_overlap": True, "reduce_overlap": True}
    begin_s = time.monotonic()
    course = growth.Course(arguments.model, split.n_replicas, settings, arguments.count)
    timeout_s = 60 + 2.0 * arguments.count
    samples_of_ranks = harness.run(growth.train_cycles, split.nranks, course, timeout_s=timeout_s)
    print(f"  {time.monotonic() - begin_s:.1f} s", flush=True)
    grown = [growth.grown(samples) for samples in samples_of_ranks]
    for rank, samples in enumerate(samples_of_ranks):
        print(f"  rank {rank}: {_first_and_last(samples)}")
        for field, text in grown[rank].items():
            print(f"  rank {rank}: {field} HAS GROWN: {text}", flush=True)
    return not any(grown)


def _first_and_last(samples: list[growth.Sample]) -> str:
    """From the first sample to the last: bytes in MB, the others as they are."""
    parts = []
    for field in growth.Sample._fields:
        first, last = (getattr(sample, field) for sample in (samples[0], samples[-1]))
        if field.endswith("_bytes"):
            parts.append(f"{field.removesuffix('_bytes')} {first / MB:.2f} to {last / MB:.2f} MB")
        else:
            parts.append(f"{field} {first} to {last}")
    return ", ".join(parts)


LOOPS = {
    "starts": _Loop(_starts, [Split(2, 2)], [2]),
    "kills": _Loop(_kills, [Split(1, 2), Split(2, 2)], [2, 3]),
    "steps": _Loop(_steps, [Split(1, 2), Split(2, 2)], [1, 2, 3]),
}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    loops = parser.add_subparsers(dest="loop", required=True)
    again = loops.add_parser("starts", help="start a job again and again: groups, three steps, a clean end")
    again.add_argument("--count", type=_at_least_one, default=50, help="starts of each split and stage (default: 50)")
    killed = loops.add_parser("kills", help="kill a training while it saves, and go on from what is left")
    killed.add_argument("--count", type=_at_least_one, default=50, help="kills of each split and stage (default: 50)")
    killed.add_argument("--seed", type=int, default=0, help="of the moments and victims (default: 0)")
    steps = loops.add_parser("steps", help="train many steps, in which nothing may grow")
    steps.add_argument("--count", type=_at_least_one, default=2000, help="steps after the warm-up (default: 2000)")
    steps.add_argument("--model", choices=["mlp", "gpt", "gpt_recompute", "conv"], default="gpt", help="default: gpt")
    for name, each in (("starts", again), ("kills", killed), ("steps", steps)):
        splits, stages = (" ".join(map(str, usual)) for usual in (LOOPS[name].splits, LOOPS[name].stages))
        each.add_argument("--split", type=Split.parse, nargs="+", help=f"replicas x shard ranks (default: {splits})")
        each.add_argument("--stage", type=int, choices=[1, 2, 3], nargs="+", help=f"default: {stages}")
    return parser.parse_args()


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
