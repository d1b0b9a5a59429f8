"""``scripts/mutate --all`` and ``--find``: tries the list of sites, and brings it up to date."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.harness import REPO_ROOT
from tests.mutation.listing import Entry, read, write
from tests.mutation.reach import Reach, of_file, put_together, unit_files
from tests.mutation.running import MutationError, find_tests
from tests.mutation.sites import KINDS, PACKAGE, Place, Site, all_places, places
from tests.mutation.trying import Farm, Tried, choose_places, farm, find, find_among, try_listed

MAP = REPO_ROOT / "build" / "reach_of_tests.json"
"""Where ``--find`` keeps what unit tests reach. A map that is older than the sources is made again."""
_MOST_S = 60.0
"""Of tests that are tried on one site."""


class Picked(NamedTuple):
    """Which of the list to try: of these modules, of this kind, and of what is left so many at random."""

    modules: Sequence[Path] = ()
    kind: str | None = None
    limit: int | None = None
    seed: int = 0

    def of(self, places: Sequence[Place]) -> list[Place]:
        """Those of them, in their order."""
        modules = [module.relative_to(PACKAGE).as_posix() for module in self.modules]
        fitting = [
            place
            for place in places
            if (not modules or place.site.module in modules) and self.kind in (None, place.site.kind)
        ]
        return choose_places(fitting, self.limit, self.seed)


def judge_listed(picked: Picked, *, jobs: int) -> list[str]:
    """Tries each picked site on its tests, and prints what became of it and how many there are of each kind.

    Returns:
        The survivors, and what the list has as open.

    Raises:
        MutationError: the list does not fit the sources; or the tests fail without anything taken out.
    """
    begin_s = time.monotonic()
    entries, places = read(), all_places()
    missing = missing_and_stale(entries, places)
    if missing:
        raise MutationError("\n".join(["the list does not fit the sources (scripts/mutate --find):", *missing]))
    chosen = picked.of(places)
    trials = [place for place in chosen if entries[place.site].tests]
    for place in chosen:
        if entries[place.site].is_open:
            print(f"  open             line {place.mutant.line} of {place.site}")
    print(f"{len(trials)} of {len(places)} sites, each tried on its own tests", flush=True)
    with farm(jobs, files_of(entries[place.site] for place in trials)) as on:
        found = try_listed(on, trials, entries, _tell)
    _print_table(chosen, entries, found)
    print(f"in {(time.monotonic() - begin_s) / 60:.1f} minutes")
    still_open = [place for place in chosen if entries[place.site].is_open]
    survived = [tried.place for tried in found if not tried.caught]
    return [f"line {place.mutant.line} of {place.site}" for place in [*still_open, *survived]]


def files_of(entries: Iterable[Entry]) -> list[str]:
    """Of the tests that these name, each once."""
    return sorted({test.partition("::")[0] for entry in entries for test in entry.tests})


def missing_and_stale(entries: dict[Site, Entry], places: Sequence[Place]) -> list[str]:
    """Sites that are not in the list, and entries without a site, a line each."""
    there = {place.site for place in places}
    return [
        *(
            f"not in the list: line {place.mutant.line} of {place.site}"
            for place in places
            if place.site not in entries
        ),
        *(f"not in the sources any more: {site}" for site in entries if site not in there),
    ]


def find_missing(modules: Sequence[Path], tests: Sequence[str] | None, *, again: bool, jobs: int) -> list[str]:
    """Looks for tests for sites that have none, writes them into the list, and drops entries without a site.

    Args:
        modules: only these; all of the package where there are none.
        tests: those to try, or None: of named modules the unit tests that are named after them or import from them,
            else all unit tests that reach the site.
        again: also where the list has tests.
        jobs: sites tried at a time.

    Returns:
        Sites that no test has missed. In the list they are open.
    """
    entries = read()
    wanted = [
        place
        for place in Picked(modules).of(all_places())
        if place.site not in entries or entries[place.site].is_open or (again and entries[place.site].tests)
    ]
    print(f"{len(wanted)} sites to find tests for", flush=True)
    survivors = []
    files = sorted({test.partition("::")[0] for test in tests}) if tests else unit_files()
    with farm(jobs, files) as on:
        for tried in _look(on, wanted, tests, by_name=bool(modules)):
            _tell(tried)
            if tried.caught:
                entries[tried.place.site] = Entry(tuple(map(_lasting, tried.tests)))
                _write(entries, tried.place.site.module)
            else:
                reached = "" if tests or modules else f", which {tried.reached} unit tests reach"
                entries[tried.place.site] = Entry(is_open=True)
                survivors.append(f"line {tried.place.mutant.line} of {tried.place.site}{reached}")
    for module in sorted({site.module for site in entries} | {place.site.module for place in all_places()}):
        _write(entries, module)
    return survivors


def _look(on: Farm, wanted: Sequence[Place], tests: Sequence[str] | None, *, by_name: bool) -> Iterator[Tried]:
    if tests:
        return on.each(lambda server, place: find_among(server, place, tests), wanted)
    if by_name:
        return on.each(lambda server, place: find_among(server, place, find_tests(place.site.path)), wanted)
    reach = _reach(on) if wanted else Reach({}, {})
    return on.each(lambda server, place: find(server, place, reach, _MOST_S), wanted)


def _reach(on: Farm) -> Reach:
    sources = [*(REPO_ROOT / PACKAGE).rglob("*.py"), *(REPO_ROOT / "tests").rglob("*.py")]
    newest_s = max(path.stat().st_mtime for path in sources)
    if not MAP.exists() or MAP.stat().st_mtime < newest_s:
        print("runs all unit tests first, to see what they reach", flush=True)
        put_together(list(on.each(of_file, unit_files()))).save(MAP)
    return Reach.load(MAP)


def _lasting(test: str) -> str:
    """Without parameters where these are bytes or patterns: some are others each time."""
    return test.partition("[")[0] if "\\" in test or "::" in test.partition("[")[2] else test


def _write(entries: dict[Site, Entry], module: str) -> None:
    """The module's file as its source stands: entries without a site go."""
    path = REPO_ROOT / PACKAGE / module
    there = [place.site for place in places(PACKAGE / module, path.read_text())] if path.exists() else []
    write(module, {site: entries[site] for site in there if site in entries})


def _tell(tried: Tried) -> None:
    what = "caught  " if tried.caught else "SURVIVED"
    print(f"  {what} {tried.took_s:5.1f} s  line {tried.place.mutant.line} of {tried.place.site}", flush=True)


def _print_table(chosen: Sequence[Place], entries: dict[Site, Entry], found: Sequence[Tried]) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for place in chosen:
        counts[place.site.kind, "equivalent"] += bool(entries[place.site].equivalent)
        counts[place.site.kind, "open"] += entries[place.site].is_open
    for tried in found:
        counts[tried.place.site.kind, "caught" if tried.caught else "survived"] += 1
    columns = ("caught", "equivalent", "open", "survived")
    print(f"{'':10}", *(f"{column:>10}" for column in columns))
    for kind in KINDS:
        print(f"{kind:10}", *(f"{counts[kind, column]:10}" for column in columns))
    totals = [sum(counts[kind, column] for kind in KINDS) for column in columns]
    print(f"{'all':10}", *(f"{total:10}" for total in totals), file=sys.stdout)
