"""What ranks say of themselves after a failure: who speaks when, who is waited for, and what nobody may break."""

from __future__ import annotations

import functools
import gc
import json
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import paddle
import pytest

from hp_sharding.comm import statements
from hp_sharding.comm.statements import Statement, Statements, main_thread_stands_at
from hp_sharding.errors import CommError

RANKS = (3, 4, 5)
LIMIT_S = 20.0
"""Nothing here waits as long as that."""


class Reporter:
    """Says and reports what it was given."""

    def __init__(self, says: Callable[[], Statement] = dict, reports: Callable[[CommError], str] = str) -> None:
        self.says = says
        self.reports = reports

    def statement(self) -> Statement:
        return self.says()

    def report(self, error: CommError) -> str:
        return self.reports(error)


class Group:
    """Members whose messages arrive at once, unless they are cut off."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.cut_off: set[int] = set()
        self.members = {rank: Statements(RANKS, rank, self._teller(rank)) for rank in RANKS}
        self.reporters = {rank: Reporter(functools.partial(dict, lanes={}, of=rank)) for rank in RANKS}
        for rank, member in self.members.items():
            member.report_with(self.reporters[rank])

    def _teller(self, sender: int) -> Callable[[list[object]], None]:
        def tell(message: list[object]) -> None:
            self.told.append(sender)
            kind, said = json.loads(json.dumps(message))
            assert kind == "state"
            for rank, member in self.members.items():
                if rank != sender and not {rank, sender} & self.cut_off:
                    member.hear(sender, said)

        return tell


def _collect(member: Statements, timeout_s: float = LIMIT_S) -> tuple[dict[int, Any], float]:
    begin_s = time.monotonic()
    said = member.collect(begin_s + timeout_s)
    return {rank: each.get("of") for rank, each in said.items()}, time.monotonic() - begin_s


def test_who_asks_hears_everybody_and_everybody_speaks_once() -> None:
    group = Group()
    said, took_s = _collect(group.members[4])
    assert said == {3: 3, 4: 4, 5: 5}
    assert took_s < LIMIT_S / 2
    assert _collect(group.members[3])[0] == {3: 3, 4: 4, 5: 5}
    assert sorted(group.told) == list(RANKS)


def test_a_failure_is_enough_for_a_rank_to_speak() -> None:
    group = Group()
    group.members[5].note_failure()
    assert _collect(group.members[3])[0] == {3: 3, 4: 4, 5: 5}


def test_without_a_model_a_rank_speaks_when_it_is_asked_and_not_before() -> None:
    group = Group()
    group.reporters.clear()
    gc.collect()
    group.members[3].note_failure()
    time.sleep(0.05)
    assert group.told == []
    said = group.members[3].collect(time.monotonic() + LIMIT_S)
    assert all("lanes" not in each and each["at"] for each in said.values())
    assert sorted(said) == list(RANKS)


def test_who_is_gone_is_not_waited_for_and_who_is_silent_not_for_long() -> None:
    group = Group()
    group.cut_off = {5}
    group.members[3].lose(5)
    said, took_s = _collect(group.members[3])
    assert said == {3: 3, 4: 4}
    assert took_s < LIMIT_S / 2
    assert group.members[3].lost() == {5}
    said, took_s = _collect(group.members[4], 0.3)
    assert said == {3: 3, 4: 4}
    assert 0.3 <= took_s < LIMIT_S / 2


def _cannot_say() -> Statement:
    raise KeyError("missing")


def test_a_rank_that_cannot_say_anything_answers_all_the_same() -> None:
    group = Group()
    group.reporters[5].says = _cannot_say
    group.members[5].hear(4, "nonsense")
    assert _collect(group.members[3])[0] == {3: 3, 4: 4, 5: None}


def test_a_long_statement_loses_its_oldest_launches() -> None:
    group = Group()
    launches = [[number, "all_gather", "blocks.3" * 20, 10, 0.5] for number in range(400)]
    group.reporters[3].says = lambda: {"lanes": {"gather": {"last": launches}, "reduce": {"last": []}}, "of": 3}
    said = group.members[4].collect(time.monotonic() + LIMIT_S)
    kept = said[3]["lanes"]["gather"]["last"]
    assert len(json.dumps(said[3])) <= statements._MAX_BYTES
    assert 20 < len(kept) < 400
    assert kept == launches[-len(kept) :]


def _raises(_: CommError) -> str:
    raise ZeroDivisionError("a mistake in the report")


def test_an_error_gets_its_report_and_is_raised_whatever_the_report_does() -> None:
    group = Group()
    group.reporters[3].reports = lambda error: f"  all about {error.label}"
    error = group.members[3].explained(CommError("rank 3: it broke", label="blocks.1", rank=3))
    assert (error.message, error.report) == ("rank 3: it broke", "  all about blocks.1")
    assert str(error) == "rank 3: it broke\n  all about blocks.1"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    group.reporters[3].reports = _raises
    assert str(group.members[3].explained(CommError("it broke"))) == "it broke"


def test_a_model_that_is_gone_reports_nothing() -> None:
    group = Group()
    group.reporters.clear()
    gc.collect()
    assert group.members[3].explained(CommError("it broke")).report == ""


def _ask_from_elsewhere() -> list[str]:
    found: list[list[str]] = []
    gives_up = threading.Event()

    def ask() -> None:
        # The main thread is on its way from one line to the next.
        while not any("thread.join" in place for place in main_thread_stands_at()) and not gives_up.wait(0.01):
            pass
        found.append(main_thread_stands_at())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(LIMIT_S)
    gives_up.set()
    return found[0]


def test_the_users_own_code_is_shown_and_what_it_is_inside_of() -> None:
    *places, inside = _ask_from_elsewhere()
    assert "test_comm_statements.py" in places[-1]
    assert places[-1].endswith("in _ask_from_elsewhere: thread.join(LIMIT_S)")
    assert places[-2].endswith("*places, inside = _ask_from_elsewhere()")
    assert inside.startswith("and there in ")
    assert inside.endswith(" of threading.py")


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        ("/home/someone/train.py", True),
        ("<stdin>", True),
        ("<frozen runpy>", False),
        (threading.__file__, False),
        (statements.__file__, False),
        (str(paddle.__file__), False),
        (f"{statements._PYTHONS}site-packages/library/model.py", True),
    ],
)
def test_whose_code_it_is(file: str, is_users: bool) -> None:
    assert statements._Place(file, 1, "f").is_users == is_users
