"""Tries sites on servers, several at a time: on the tests that their entries name, or on whatever reaches them."""

from __future__ import annotations

import concurrent.futures
import queue
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, TypeVar

from tests.mutation.listing import Entry
from tests.mutation.reach import Reach
from tests.mutation.running import MutationError
from tests.mutation.serving import NO_SUCH_TEST, PASSED, Answer, Server, server
from tests.mutation.sites import Place, Site

T = TypeVar("T")
R = TypeVar("R")

_START_S = 15.0
_SLOWER = 6.0
"""How much longer a mutant's tests may take than the tests took without: a machine may be busy."""
_SHOWN_CHARS = 3000
_UNKNOWN_S = 60.0


class Tried(NamedTuple):
    """What became of a site.

    Attributes:
        caught: whether a test failed, or did not come to an end.
        tests: those that failed, where they were looked for; else those that ran.
        took_s: seconds.
        reached: tests that reach it, where they were looked for.
    """

    place: Place
    caught: bool
    tests: tuple[str, ...]
    took_s: float
    reached: int = 0


class Farm:
    """Servers, of which each does one thing at a time."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._idle: queue.SimpleQueue[Server] = queue.SimpleQueue()
        for each in servers:
            self._idle.put(each)

    def each(self, do: Callable[[Server, T], R], things: Sequence[T]) -> Iterator[R]:
        """What ``do`` returns for each of the things, as it comes."""

        def one(thing: T) -> R:
            free = self._idle.get()
            try:
                return do(free, thing)
            finally:
                self._idle.put(free)

        with concurrent.futures.ThreadPoolExecutor(len(self._servers)) as pool:
            futures = [pool.submit(one, thing) for thing in things]
            try:
                for future in concurrent.futures.as_completed(futures):
                    yield future.result()
            finally:
                for future in futures:
                    future.cancel()


@contextmanager
def farm(jobs: int, files: Sequence[str]) -> Iterator[Farm]:
    """So many servers that have collected these files of tests, gone afterwards."""
    with ExitStack() as stack:
        servers = [stack.enter_context(server(files)) for _ in range(jobs)]
        for each in servers:
            each.wait_until_ready()
        yield Farm(servers)


def choose_places(found: Sequence[Place], limit: int | None, seed: int) -> list[Place]:
    """``limit`` of them, others for another seed, in their order; all where there are no more."""
    if limit is None or limit >= len(found):
        return list(found)
    return [found[index] for index in sorted(random.Random(seed).sample(range(len(found)), limit))]


def take_out(on: Server, place: Place, tests: Sequence[str], limit_s: float) -> Answer:
    """Runs tests without the site.

    Raises:
        MutationError: there is no such test.
    """
    answer = on.run(tests, limit_s=limit_s, broken=(place.site.path, place.mutant.source))
    if answer.code == NO_SUCH_TEST:
        raise MutationError(f"{place.site}: no such test among {' '.join(tests)}\n{answer.output[-_SHOWN_CHARS:]}")
    return answer


def find(on: Server, place: Place, reach: Reach, most_s: float) -> Tried:
    """Looks for a test that misses the site, among those that reach it, and that pass alone as long as it is there."""
    took_s = 0.0
    for batch in reach.batches(place, most_s):
        tests = [test for test in batch if test not in reach.unsound]
        while tests:
            answer = take_out(on, place, tests, _limit_s(sum(reach.took_s[test] for test in tests)))
            took_s += answer.took_s
            if not answer.caught:
                break
            culprit = _culprit(answer, tests)
            if _is_sound(on, culprit, reach):
                return Tried(place, True, (culprit,), took_s, len(reach.tests(place)))
            tests.remove(culprit)
    return Tried(place, False, (), took_s, len(reach.tests(place)))


def _is_sound(on: Server, test: str, reach: Reach) -> bool:
    """Whether it passes alone with nothing taken out: some lean on what ran before them."""
    if test not in reach.sound and test not in reach.unsound:
        passes = on.run([test], limit_s=_limit_s(reach.took_s[test])).code == PASSED
        (reach.sound if passes else reach.unsound).add(test)
    return test in reach.sound


def _culprit(answer: Answer, tests: Sequence[str]) -> str:
    """The test that has failed; of a file that could not be imported the first one."""
    of_files = (test for test in tests if test.partition("::")[0] in answer.culprits)
    return next((test for test in answer.culprits if test in tests), next(of_files, tests[0]))


def find_among(on: Server, place: Place, tests: Sequence[str]) -> Tried:
    """Looks for a test that misses the site among these, which may be whole files."""
    if not tests:
        return Tried(place, False, (), 0.0)
    answer = take_out(on, place, tests, _limit_s(_UNKNOWN_S * len(tests)))
    named = tuple(test for test in answer.culprits if "::" in test)
    return Tried(place, answer.caught and bool(named), named[:1], answer.took_s)


def time_unbroken(on: Farm, tests: Sequence[str]) -> dict[str, float]:
    """Seconds that each file of them takes, without anything taken out. They must pass.

    Raises:
        MutationError: a test fails, or is not there.
    """
    by_file: dict[str, list[str]] = {}
    for test in dict.fromkeys(tests):
        by_file.setdefault(test.partition("::")[0], []).append(test)

    def run(on: Server, file: str) -> tuple[str, Answer]:
        return file, on.run(by_file[file], limit_s=_START_S + _UNKNOWN_S * len(by_file[file]))

    took_s = {}
    for file, answer in on.each(run, list(by_file)):
        if answer.code != PASSED:
            raise MutationError(f"{file} fails though nothing is taken out:\n{answer.output[-_SHOWN_CHARS:]}")
        took_s[file] = answer.took_s
    return took_s


def try_listed(
    on: Farm,
    chosen: Sequence[Place],
    entries: Mapping[Site, Entry],
    tell: Callable[[Tried], None] = lambda tried: None,
) -> list[Tried]:
    """Takes out each place and runs the tests that its entry names.

    Raises:
        MutationError: these tests fail without anything taken out, or are not there.
    """
    took_s = time_unbroken(on, [test for place in chosen for test in entries[place.site].tests])

    def run(on: Server, place: Place) -> Tried:
        tests = entries[place.site].tests
        limit_s = _limit_s(sum(took_s[file] for file in {test.partition("::")[0] for test in tests}))
        answer = take_out(on, place, tests, limit_s)
        return Tried(place, answer.caught, tests, answer.took_s)

    found = []
    for tried in on.each(run, chosen):
        tell(tried)
        found.append(tried)
    return found


def _limit_s(took_s: float) -> float:
    return _START_S + _SLOWER * took_s
