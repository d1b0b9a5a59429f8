"""The list of all sites, with what misses each: a file a module below ``tests/mutation/lists``, made to be read.

A module's file has the functions in the order of the source, in them the sites, and under each site the tests of which
one must fail without it, or why nobody can see that it is gone, or ``open``, as long as no test is known that does::

    FusedCommBuffer.finish_gather
        wait: self._work.wait()
            tests/unit/test_buffer.py::test_parameters_are_there_after_the_gather
        free: self._work = None
            equivalent: the next gather puts its own work there.
        check: raise StateError(...)
            open

``scripts/mutate --find`` writes it. Reasons are written by hand, and kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.harness import REPO_ROOT
from tests.mutation.sites import KINDS, PACKAGE, Site

FOLDER = REPO_ROOT / "tests" / "mutation" / "lists"
_SITE = re.compile(rf"    ({'|'.join(KINDS)})(?: (\d+))?: (.*)")
_EQUIVALENT = "equivalent: "
_OPEN = "open"


class Entry(NamedTuple):
    """What is known of a site.

    Attributes:
        tests: node ids; of these one must fail without it.
        equivalent: why nobody can see that it is gone, where that is so; then there are no tests.
        is_open: neither is known.
    """

    tests: tuple[str, ...] = ()
    equivalent: str = ""
    is_open: bool = False


def read() -> dict[Site, Entry]:
    """The whole list.

    Raises:
        ValueError: a file cannot be understood.
    """
    found: dict[Site, Entry] = {}
    for path in sorted(FOLDER.rglob("*.txt")):
        module = path.relative_to(FOLDER).with_suffix(".py").as_posix()
        found.update(_parse(module, path.read_text().splitlines()))
    return found


def _parse(module: str, lines: Sequence[str]) -> dict[Site, Entry]:
    found: dict[Site, Entry] = {}
    function, site = "", None
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        match = _SITE.fullmatch(line)
        if not line.startswith(" "):
            function = line
        elif match is not None:
            site = Site(module, function, match[1], match[3], int(match[2] or 1))
            if site in found:
                raise ValueError(f"lists/{module}, line {number}: twice in it: {line.strip()}")
            found[site] = Entry()
        elif site is None or not line.startswith("        "):
            raise ValueError(f"lists/{module}, line {number}: neither a function, nor a site, nor a test: {line}")
        elif line.strip().startswith(_EQUIVALENT):
            found[site] = Entry(equivalent=line.strip().removeprefix(_EQUIVALENT))
        elif line.strip() == _OPEN:
            found[site] = Entry(is_open=True)
        else:
            found[site] = Entry((*found[site].tests, line.strip()))
    return found


def write(module: str, entries: Mapping[Site, Entry]) -> None:
    """Writes the file of one module, in the order of ``entries``; no file where there are none."""
    path = (FOLDER / module).with_suffix(".txt")
    if not entries:
        path.unlink(missing_ok=True)
        return
    lines = [f"# {PACKAGE / module}: see tests/mutation/listing.py"]
    function = ""
    for site, entry in entries.items():
        if site.function != function:
            function = site.function
            lines.append(function)
        again = f" {site.ordinal}" if site.ordinal > 1 else ""
        lines.append(f"    {site.kind}{again}: {site.text}")
        lines += [f"        {test}" for test in entry.tests]
        lines += [f"        {_EQUIVALENT}{entry.equivalent}"] * bool(entry.equivalent)
        lines += [f"        {_OPEN}"] * entry.is_open
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def name_of(module: str) -> Path:
    """Of the module's file, below the root of the repository."""
    return (FOLDER / module).with_suffix(".txt").relative_to(REPO_ROOT)
