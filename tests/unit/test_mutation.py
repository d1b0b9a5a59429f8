"""Mutants are what they should be and are tried on the right tests; of some of our own modules most are caught."""

from __future__ import annotations

import ast
import sys
import zlib
from pathlib import Path

import pytest

from tests.device import standin
from tests.harness import REPO_ROOT
from tests.mutation.__main__ import choose, choose_breaks, main, node_ids_of
from tests.mutation.breaks import Break
from tests.mutation.making import Mutant, mutants
from tests.mutation.running import MutationError, Trial, find_tests, judge, judge_each
from tests.mutation.streams import TRIED

SOURCE = '''
"""Module."""

LIMIT = 3


def f(a: int, *, b: bool = True) -> int:
    """One line."""
    if a < LIMIT and not b:
        raise ValueError(f"a is {a + 1}")
    while a:
        a -= 2
    _LOGGER.debug("a")
    g(a, key=1, c=4)
    return max([a % 5, 6], default=7)
'''
EXPECTED = [
    (4, "off by one", "3", "4"),
    (7, "flipped", "True", "False"),
    (9, "the opposite", "a < LIMIT and not b", "(not (a < LIMIT and (not b)))"),
    (9, "another operator", "a < LIMIT and not b", "(a < LIMIT or not b)"),
    (9, "another operator", "a < LIMIT", "(a <= LIMIT)"),
    (9, "the opposite", "not b", "(b)"),
    (10, "left out", 'raise ValueError(f"a is {a + 1}")', "pass"),
    (11, "the opposite", "a", "(not (a))"),
    (12, "another operator", "a -= 2", "a += 2"),
    (12, "left out", "a -= 2", "pass"),
    (12, "off by one", "2", "3"),
    (14, "left out", "g(a, key=1, c=4)", "pass"),
    (14, "without an argument", "g(a, key=1, c=4)", "g(a, key=1)"),
    (14, "off by one", "1", "2"),
    (14, "off by one", "4", "5"),
    (15, "without an argument", "max([a % 5, 6], default=7)", "max([a % 5, 6])"),
    (15, "another operator", "a % 5", "(a // 5)"),
    (15, "off by one", "5", "6"),
    (15, "off by one", "6", "7"),
    (15, "off by one", "7", "8"),
]
FACTS = Path("hp_sharding/facts.py")
ROTATING = [Path("hp_sharding") / name for name in ("replication.py", "numerics.py", "layout.py")]
N_ROTATING = 10


def test_every_kind_of_mutant_is_made_and_nothing_is_changed_that_only_says_something() -> None:
    assert [(found.line, found.what, found.before, found.after) for found in mutants(SOURCE)] == EXPECTED


def test_a_mutant_differs_in_one_place() -> None:
    for found in mutants(SOURCE):
        lines, others = SOURCE.splitlines(), found.source.splitlines()
        differing = [n for n, (line, other) in enumerate(zip(lines, others, strict=True), 1) if line != other]
        assert differing == [found.line], found


@pytest.mark.parametrize("path", [REPO_ROOT / "hp_sharding" / name for name in ("facts.py", "comm/ring.py")])
def test_mutants_of_our_modules_are_other_programs(path: Path) -> None:
    source = path.read_text()
    programs = {ast.dump(ast.parse(found.source)) for found in mutants(source)}
    assert ast.dump(ast.parse(source)) not in programs


def test_columns_count_bytes() -> None:
    (found, *_) = mutants('x = "\u00e4\u00f6", 1\n')
    assert found.source == 'x = "\u00e4\u00f6", 2\n'


def test_a_seed_draws_the_same_again_and_another_seed_others() -> None:
    found = mutants(SOURCE)
    assert choose(found, 5, 1) == choose(found, 5, 1) != choose(found, 5, 2)
    assert len(choose(found, 5, 1)) == 5
    assert choose(found, 100, 1) == choose(found, None, 1) == found


def test_the_find_tests_a_module_are_found() -> None:
    assert find_tests(FACTS) == ["tests/unit/test_facts.py"]
    assert find_tests(Path("hp_sharding/comm/ring.py"))[0] == "tests/unit/test_comm_ring.py"
    assert set(find_tests(Path("hp_sharding/layout.py"))) > {"tests/unit/test_layout.py", "tests/unit/test_arena.py"}
    assert find_tests(Path("hp_sharding/none.py")) == []


def test_a_harmless_mutant_survives_and_others_do_not() -> None:
    source = (REPO_ROOT / FACTS).read_text()
    chosen = [
        Mutant(1, "fails", "", "", f"{source}\nraise RuntimeError\n"),
        Mutant(1, "nothing", "", "", f"{source}\n"),
    ]
    told: list[bool] = []
    verdicts = judge(FACTS, chosen, find_tests(FACTS), tell=lambda verdict: told.append(verdict.caught))
    assert [verdict.caught for verdict in verdicts] == told == [True, False]
    assert [verdict.mutant for verdict in verdicts] == chosen
    assert (REPO_ROOT / FACTS).read_text() == source


def test_each_trial_has_tests_of_its_own() -> None:
    broken = Mutant(1, "fails", "", "", f"{(REPO_ROOT / FACTS).read_text()}\nraise RuntimeError\n")
    tests = [*find_tests(FACTS), "tests/unit/test_mutation.py::test_columns_count_bytes"]
    verdicts = judge_each([Trial(FACTS, broken, [test]) for test in tests], tests)
    assert [verdict.caught for verdict in verdicts] == [True, False], "the second one does not import the module"


def test_a_break_changes_one_place_that_must_be_there() -> None:
    there = Break("facts.py", "is broken", "return Facts(", "return list(", ("tests/unit/test_facts.py",))
    found = there.mutant()
    source = (REPO_ROOT / FACTS).read_text()
    assert found.source == source.replace("return Facts(", "return list(") != source
    assert "return list(" in found.source.splitlines()[found.line - 1]
    for text, times in (("no such text", 0), ("def ", source.count("def "))):
        with pytest.raises(ValueError, match=f"facts.py: {times} times in it, expected once"):
            there._replace(text=text).mutant()


def test_some_of_the_breaks_are_drawn_and_their_tests_named_once() -> None:
    assert choose_breaks(None, 0) == choose_breaks(len(TRIED), 0) == TRIED
    few = choose_breaks(5, 1)
    assert few == choose_breaks(5, 1) != choose_breaks(5, 2)
    assert few == [each for each in TRIED if each in few]
    first = few[0]._replace(tests=("a", "b"))
    assert node_ids_of([first, first._replace(tests=("b", "c"))]) == ["a", "b", "c"]


def test_streams_need_the_stand_in(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mutate", "--streams"])
    monkeypatch.setattr(standin, "why_missing", lambda: "there is no g++")
    assert main() == 2
    assert "there is no g++" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["hp_sharding/facts.py", "--streams"]])
def test_what_is_to_be_broken_is_named_in_one_way(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mutate", *arguments])
    with pytest.raises(SystemExit):
        main()


@pytest.mark.parametrize(
    ("tests", "why"), [([], "name some with --tests"), (["tests/unit/test_none.py"], "fail without any mutant")]
)
def test_nothing_is_said_where_the_tests_are_no_good(tests: list[str], why: str) -> None:
    with pytest.raises(MutationError, match=why):
        judge(FACTS, [], tests)


@pytest.mark.slow
def test_most_mutants_of_a_module_are_caught() -> None:
    """Which module and which mutants changes with the code. A few are let go: some do the same as the code."""
    number = zlib.crc32(b"".join((REPO_ROOT / module).read_bytes() for module in ROTATING))
    module = ROTATING[number % len(ROTATING)]
    chosen = choose(mutants((REPO_ROOT / module).read_text()), N_ROTATING, number)
    verdicts = judge(module, chosen, find_tests(module)[:1], jobs=2)
    survivors = [str(verdict.mutant) for verdict in verdicts if not verdict.caught]
    assert len(survivors) <= N_ROTATING * 2 // 5, "\n".join([f"{module}:", *survivors])
