"""The list of waits and keep-alives to take out fits the sources and has all of them; a few are tried each time.

All of them: ``scripts/mutate --streams``.
"""

from __future__ import annotations

import ast
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device import test_keep_alive
from tests.harness import REPO_ROOT
from tests.mutation.__main__ import choose_breaks, node_ids_of
from tests.mutation.breaks import Break
from tests.mutation.running import judge_each
from tests.mutation.streams import BREAKS, TRIED, trial_of

PACKAGE = REPO_ROOT / "hp_sharding"
N_ROTATING = 2
WAITS = {
    "wait", "timed_wait", "wait_event", "CurrentStream", "_set_stream", "record", "hold", "finish", "finish_gather",
    "finish_under_way", "_finish_layer", "make_readable", "_wait_all", "_finish_reductions",
}  # fmt: skip
"""What waiting, ordering and keeping is called."""
ON_HOSTS = {"communicator.py", "fingerprint.py", "links.py", "ring.py", "tcp.py", "watch.py"}
"""Of ``comm``: waits of threads and between hosts, which tests on the CPU hold."""


def _waits(path: Path) -> Iterator[int]:
    """Lines, from 1, of a module in which somebody waits for something or keeps something."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
            yield node.func.value.end_lineno or node.lineno
        elif isinstance(node.func, ast.Name) and node.func.id in WAITS:
            yield node.lineno


def _lines(each: Break) -> range:
    """That it changes, from 1."""
    first = each.mutant().line
    return range(first, first + each.text.rstrip("\n").count("\n") + 1)


@pytest.mark.parametrize("each", BREAKS, ids=lambda each: f"{each.module}: {each.what}")
def test_every_break_is_another_program_and_has_tests_that_are_there(each: Break) -> None:
    source = (REPO_ROOT / each.path).read_text()
    assert ast.dump(ast.parse(each.mutant().source)) != ast.dump(ast.parse(source))
    assert bool(each.tests) != bool(each.equivalent), "it is tried, or there is a reason why not"
    for test in each.tests:
        path, _, name = test.partition("::")
        function, _, parameters = name.partition("[")
        assert f"\ndef {function}(" in (REPO_ROOT / path).read_text(), test
        if path.endswith("test_keep_alive.py") and parameters:
            assert parameters.rstrip("]") in test_keep_alive.PLAYS, test


def test_every_play_is_for_something() -> None:
    named = {test.partition("[")[2].rstrip("]") for each in BREAKS for test in each.tests}
    assert set(test_keep_alive.PLAYS) - named == set()


def test_every_wait_of_the_package_is_in_the_list() -> None:
    paths = [
        *PACKAGE.glob("*.py"),
        *(PACKAGE / "timeline").glob("*.py"),
        *(path for path in (PACKAGE / "comm").glob("*.py") if path.name not in ON_HOSTS),
    ]
    missing = []
    for path in sorted(paths):
        broken = {line for each in BREAKS if REPO_ROOT / each.path == path for line in _lines(each)}
        lines = path.read_text().splitlines()
        missing += [f"{path.name}:{line}: {lines[line - 1].strip()}" for line in _waits(path) if line not in broken]
    assert missing == []


@pytest.mark.slow
@pytest.mark.usefixtures("standin_device")
def test_a_test_on_the_device_misses_what_was_taken_out() -> None:
    sources = {each.path for each in TRIED}
    number = zlib.crc32(b"".join((REPO_ROOT / path).read_bytes() for path in sorted(sources)))
    chosen = choose_breaks(N_ROTATING, number)
    verdicts = judge_each([trial_of(each) for each in chosen], node_ids_of(chosen), jobs=2)
    assert [str(verdict.mutant) for verdict in verdicts if not verdict.caught] == []
