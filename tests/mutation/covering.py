"""Which lines of the package which unit test reaches, and how long each test takes: a plugin of pytest.

A line counts for a test only where it runs during that test. What runs while a module is imported counts for none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

_IMPORT = ""
"""The context of what runs before the first test, between two, and while tests are collected."""


class Covering:
    """Notes contexts and durations of one run.

    Args:
        tree: root of the copy that the tests run in.
        out: a JSON file that ``finish`` writes: ``took_s`` by node id, ``failed``, and ``lines``, by path and line,
            with the node ids that reach it.
    """

    def __init__(self, tree: Path, out: Path) -> None:
        self._tree, self._out = tree, out
        self._took_s: dict[str, float] = {}
        self._failed: list[str] = []
        self._coverage = coverage.Coverage(
            data_file=None, config_file=False, source=[str(tree / "hp_sharding")], branch=False, messages=False
        )
        self._coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        yield
        self._coverage.switch_context(_IMPORT)
        if (
            sys.gettrace() is None
        ):  # Python takes the tracer away where it raised itself, as on a stack that is too deep
            self._coverage.stop()
            self._coverage.start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took_s[report.nodeid] = self._took_s.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self._failed.append(report.nodeid)

    def finish(self) -> None:
        """Writes what was found."""
        self._coverage.stop()
        data = self._coverage.get_data()
        lines: dict[str, dict[int, list[str]]] = {}
        for name in data.measured_files():
            path = Path(name).relative_to(self._tree).as_posix()
            contexts = data.contexts_by_lineno(name).items()
            lines[path] = {line: sorted(set(tests) - {_IMPORT}) for line, tests in contexts}
        found: dict[str, Any] = {"took_s": self._took_s, "failed": sorted(set(self._failed)), "lines": lines}
        self._out.write_text(json.dumps(found))
