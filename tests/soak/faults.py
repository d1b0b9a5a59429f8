"""Every fault in every phase, one case after the other or several at a time: nobody may hang, and it must be named."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks import links
from tests import faults
from tests.faults import Case, Seen
from tests.faulty_script import FAULTS, PHASES
from tests.soak.starts import Split

AT_ONCE = 3


def cases(split: Split, stage: int) -> list[Case]:
    """All there are: each fault in each phase, to the first rank and to the last, alone and under the launcher."""
    found = []
    for fault, phase, rank in itertools.product(FAULTS, PHASES, (0, split.nranks - 1)):
        ways = ("hosts",) if fault == "cut" else ("alone", "launcher")
        found += [Case(fault, phase, stage, rank, split.n_replicas, split.nranks, way) for way in ways]
    # Before the ranks are connected with each other it is Paddle's own start that waits for the link.
    return [case for case in found if (case.fault, case.phase) != ("cut", "wrapping")]


def suffer_many(
    chosen: Sequence[Case], tell: Callable[[Case, Seen, list[str]], None]
) -> list[tuple[Case, Seen, list[str]]]:
    """Runs them; ``tell`` hears of each. Returns with each what went wrong."""
    found = []
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(AT_ONCE) as executor:
        futures = [executor.submit(faults.suffer, case, stack.enter_context(faults.places(case))) for case in chosen]
        for case, future in zip(chosen, futures, strict=True):
            seen = future.result()
            found.append((case, seen, faults.wrongs(case, seen)))
            tell(*found[-1])
    return found


def choose(count: int, split: Split, stage: int, *, seed: int) -> list[Case]:
    """So many cases, drawn at random; all of them where there are no more. No link goes down without root."""
    possible = cases(split, stage)
    if links.available() is not None:
        possible = [case for case in possible if case.way != "hosts"]
    random.Random(seed).shuffle(possible)
    return possible[:count]
