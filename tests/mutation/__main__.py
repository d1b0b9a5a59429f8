"""The command line of the mutants; ``scripts/mutate`` sets everything up and runs it."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from tests.device import standin
from tests.harness import REPO_ROOT
from tests.mutation.breaks import Break
from tests.mutation.making import Mutant, mutants
from tests.mutation.running import MutationError, Verdict, find_tests, judge, judge_each
from tests.mutation.streams import BREAKS, TRIED, trial_of


def main() -> int:
    """Judges mutants of each module, or the breaks of the stream path.

    Returns 0 if all were caught, 1 if some were not, 2 if nothing could be said.
    """
    arguments = _parse()
    try:
        survivors = _judge_streams(arguments) if arguments.streams else _judge_modules(arguments)
    except MutationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(survivors)} survived", *survivors, sep="\n  ")
    return int(bool(survivors))


def _judge_modules(arguments: argparse.Namespace) -> list[str]:
    """Who survived."""
    survivors = []
    for module in arguments.modules:
        chosen = choose(mutants((REPO_ROOT / module).read_text()), arguments.limit, arguments.seed)
        tests = arguments.tests or find_tests(module)
        print(f"{module}: {len(chosen)} mutants, tried on {' '.join(tests) or 'nothing'}", flush=True)
        verdicts = judge(module, chosen, tests, jobs=arguments.jobs, tell=_tell)
        survivors += [f"{module}, {verdict.mutant}" for verdict in verdicts if not verdict.caught]
    return survivors


def _judge_streams(arguments: argparse.Namespace) -> list[str]:
    """Who survived of the breaks of the stream path, of which each has tests of its own."""
    reason = standin.why_missing()
    if reason is not None:
        raise MutationError(f"no stand-in device: {reason}")
    chosen = choose_breaks(arguments.limit, arguments.seed)
    print(f"{len(chosen)} of {len(BREAKS)} breaks of the stream path, each tried on its own tests", flush=True)
    for each in BREAKS:
        if each.equivalent:
            print(f"  the same        {each.path}, {each.what}: {each.equivalent}")
    verdicts = judge_each([trial_of(each) for each in chosen], node_ids_of(chosen), jobs=arguments.jobs, tell=_tell)
    return [str(verdict.mutant) for verdict in verdicts if not verdict.caught]


def choose_breaks(limit: int | None, seed: int) -> list[Break]:
    """``limit`` of the breaks that are tried, others for another seed, in the order of the list; or all."""
    if limit is None or limit >= len(TRIED):
        return TRIED
    return [TRIED[index] for index in sorted(random.Random(seed).sample(range(len(TRIED)), limit))]


def node_ids_of(chosen: list[Break]) -> list[str]:
    """All of their tests, each once."""
    return list(dict.fromkeys(test for each in chosen for test in each.tests))


def choose(found: list[Mutant], limit: int | None, seed: int) -> list[Mutant]:
    """``limit`` of the mutants, others for another seed, in the order of their lines; all where there are no more."""
    if limit is None or limit >= len(found):
        return found
    return sorted(random.Random(seed).sample(found, limit), key=lambda mutant: mutant.line)


def _tell(verdict: Verdict) -> None:
    print(f"  {'caught  ' if verdict.caught else 'SURVIVED'} {verdict.took_s:5.1f} s  {verdict.mutant}", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("modules", type=_module, nargs="*", help="such as hp_sharding/replication.py")
    parser.add_argument("--streams", action="store_true", help="instead: all waits and keep-alives of the stream path")
    parser.add_argument("--limit", type=int, help="try only so many, drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="another one draws other mutants (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at a time (default: 1)")
    parser.add_argument("--tests", nargs="+", help="default: unit tests named after the module, or importing from it")
    arguments = parser.parse_args()
    if arguments.streams == bool(arguments.modules):
        parser.error("name modules, or say --streams")
    return arguments


def _module(text: str) -> Path:
    path = (REPO_ROOT / text).resolve()
    if path.suffix != ".py" or not path.is_file() or not path.is_relative_to(REPO_ROOT / "hp_sharding"):
        raise argparse.ArgumentTypeError(f"{text} is not a module of hp_sharding")
    return path.relative_to(REPO_ROOT)


if __name__ == "__main__":
    sys.exit(main())
