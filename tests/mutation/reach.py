"""Which unit tests reach which line, as ``covering.py`` has found it, and which of them to try first on a site."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.harness import REPO_ROOT
from tests.mutation.serving import Server
from tests.mutation.sites import Place

_FIRST = 6
"""Tests that are tried on a site at once, of at most half as many from one file."""
_FIRST_S = 4.0
_LIMIT_S = 900.0


class Reach:
    """The map: how long each test takes alone, and which lines it reaches.

    Attributes:
        took_s: by node id. What has failed or was skipped is not there.
        sound: those that are known to pass alone.
        unsound: those that are known not to.
    """

    def __init__(self, took_s: dict[str, float], lines: dict[str, dict[int, list[str]]]) -> None:
        self.took_s = took_s
        self._lines = lines
        self.sound: set[str] = set()
        self.unsound: set[str] = set()

    @classmethod
    def load(cls, path: Path) -> Reach:
        """What ``save`` has written."""
        found = json.loads(path.read_text())
        names = found["tests"]
        lines = {
            module: {int(line): [names[index] for index in tests] for line, tests in of.items()}
            for module, of in found["lines"].items()
        }
        return cls(found["took_s"], lines)

    def save(self, path: Path) -> None:
        """Writes it down, by numbers of tests."""
        names = sorted(self.took_s)
        numbers = {name: index for index, name in enumerate(names)}
        lines = {
            module: {line: [numbers[test] for test in tests] for line, tests in of.items()}
            for module, of in self._lines.items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"tests": names, "took_s": self.took_s, "lines": lines}))

    def tests(self, place: Place) -> list[str]:
        """Those that reach it, first those of the file that is named after the module, then by their time."""
        lines = self._lines.get(place.site.path.as_posix(), {})
        found = {test for line in place.lines for test in lines.get(line, ())}
        own = f"tests/unit/test_{place.site.module.removesuffix('.py').replace('/', '_')}.py::"
        return sorted(found, key=lambda test: (not test.startswith(own), self.took_s[test], test))

    def batches(self, place: Place, most_s: float) -> Iterator[list[str]]:
        """Tests that reach it, a few at first, then what fits into ``most_s``."""
        left = self.tests(place)
        first: list[str] = []
        per_file: Counter[str] = Counter()
        for test in left:
            file = test.partition("::")[0]
            took_s = sum(self.took_s[each] for each in first)
            if per_file[file] < _FIRST // 2 and (not first or took_s + self.took_s[test] < _FIRST_S):
                first.append(test)
                per_file[file] += 1
            if len(first) == _FIRST:
                break
        rest = sorted(set(left) - set(first), key=lambda test: (self.took_s[test], test))
        yield first
        second: list[str] = []
        for test in rest:
            if sum(self.took_s[each] for each in second) + self.took_s[test] > most_s:
                break
            second.append(test)
        yield second


def put_together(parts: Sequence[dict[str, Any]]) -> Reach:
    """One map of what several runs have found; without tests that failed, or that cannot be named again."""
    took_s: dict[str, float] = {}
    lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for part in parts:
        good = {test for test in part["took_s"] if _can_be_named(test)} - set(part["failed"])
        took_s |= {test: part["took_s"][test] for test in good}
        for module, of in part["lines"].items():
            for line, tests in of.items():
                lines[module][int(line)] |= good.intersection(tests)
    return Reach(took_s, {module: {line: sorted(tests) for line, tests in of.items()} for module, of in lines.items()})


def _can_be_named(test: str) -> bool:
    """Not where the name is another one each time."""
    return " at 0x" not in test and "\n" not in test


def unit_files() -> list[str]:
    """All files of unit tests but those about mutants, which make copies of the tree themselves."""
    paths = sorted((REPO_ROOT / "tests" / "unit").glob("test_*.py"))
    return [path.relative_to(REPO_ROOT).as_posix() for path in paths if "mutation" not in path.stem]


def of_file(server: Server, file: str) -> dict[str, Any]:
    """What the tests of one file reach."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "covered.json"
        server.cover([file], out, limit_s=_LIMIT_S)
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return found or {"took_s": {}, "failed": [], "lines": {}}
