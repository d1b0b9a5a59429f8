"""The command line of the mutants; ``scripts/mutate`` sets everything up and runs it."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from tests.harness import REPO_ROOT
from tests.mutation.making import Mutant, mutants
from tests.mutation.running import MutationError, Verdict, find_tests, judge


def main() -> int:
    """Judges mutants of each module. Returns 0 if all were caught, 1 if some were not, 2 if nothing could be said."""
    arguments = _parse()
    survivors = []
    for module in arguments.modules:
        chosen = choose(mutants((REPO_ROOT / module).read_text()), arguments.limit, arguments.seed)
        tests = arguments.tests or find_tests(module)
        print(f"{module}: {len(chosen)} mutants, tried on {' '.join(tests) or 'nothing'}", flush=True)
        try:
            verdicts = judge(module, chosen, tests, jobs=arguments.jobs, tell=_tell)
        except MutationError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        survivors += [f"{module}, {verdict.mutant}" for verdict in verdicts if not verdict.caught]
    print(f"{len(survivors)} survived", *survivors, sep="\n  ")
    return int(bool(survivors))


def choose(found: list[Mutant], limit: int | None, seed: int) -> list[Mutant]:
    """``limit`` of the mutants, others for another seed, in the order of their lines; all where there are no more."""
    if limit is None or limit >= len(found):
        return found
    return sorted(random.Random(seed).sample(found, limit), key=lambda mutant: mutant.line)


def _tell(verdict: Verdict) -> None:
    print(f"  {'caught  ' if verdict.caught else 'SURVIVED'} {verdict.took_s:5.1f} s  {verdict.mutant}", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("modules", type=_module, nargs="+", help="such as hp_sharding/replication.py")
    parser.add_argument("--limit", type=int, help="try only so many, drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="another one draws other mutants (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at a time (default: 1)")
    parser.add_argument("--tests", nargs="+", help="default: unit tests named after the module, or importing from it")
    return parser.parse_args()


def _module(text: str) -> Path:
    path = (REPO_ROOT / text).resolve()
    if path.suffix != ".py" or not path.is_file() or not path.is_relative_to(REPO_ROOT / "hp_sharding"):
        raise argparse.ArgumentTypeError(f"{text} is not a module of hp_sharding")
    return path.relative_to(REPO_ROOT)


if __name__ == "__main__":
    sys.exit(main())
