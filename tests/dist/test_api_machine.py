"""Any order of calls of the public API: sharded, it does what plain Paddle does, which runs all ranks in turn.

Always the same programs, few enough for every change. More of them: ``scripts/soak api``. A failure prints the program.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from paddle.utils import unique_name

from tests import fakes, harness, lanes
from tests.api_machine import PlainSubject, Program, Seen, ShardedSubject, compare, play
from tests.api_programs import programs


def play_on_rank(rank: int, nranks: int, program: Program, folder: str) -> list[Seen]:
    """Rank function: the sharded side."""

    def wrap(model: object, inner: object, **chosen: object) -> lanes.Wrapped:
        return lanes.wrap(model, inner, nranks, **chosen)  # type: ignore[arg-type]

    with unique_name.guard():
        return play(ShardedSubject(program, rank, wrap, Path(folder)), program.commands)


def play_plain(program: Program, nranks: int) -> list[Seen]:
    """What it must equal."""
    with unique_name.guard():
        return play(PlainSubject(program, nranks), program.commands)


def check(program: Program, nranks: int) -> None:
    """Runs the program on both sides; on one rank over lanes that deliver only when somebody waits."""
    expected = play_plain(program, nranks)
    with tempfile.TemporaryDirectory() as folder:
        if nranks == 1:
            with unique_name.guard():
                subject = ShardedSubject(program, 0, fakes.wrap, Path(folder))
                everyone = [play(subject, program.commands)]
        else:
            everyone = harness.run(play_on_rank, nranks, program, folder, timeout_s=60)
    for found in everyone:
        compare(found, expected, program)


RUNS: list[tuple[int, int, dict[str, Any]]] = [
    (1, 40, {}), (2, 20, {}), (4, 3, {"n_replicas": 2}), (4, 2, {"n_replicas": 1}),
]  # fmt: skip
"""Ranks, how many programs every change is tried on, and settings that are not drawn."""


def run(nranks: int, count: int, given_ones: dict[str, Any], *, at_random: bool = False) -> None:
    """Draws programs and checks them."""

    @settings(
        max_examples=count,
        derandomize=not at_random,
        # Each failure costs the ranks their lives, and the next try new ones.
        phases=[Phase.generate, Phase.shrink] if at_random else [Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(st.data())
    def run_one(data: st.DataObject) -> None:
        check(data.draw(programs(nranks=nranks, given_ones=given_ones)), nranks)

    run_one()


@pytest.mark.parametrize(("nranks", "count", "given_ones"), RUNS)
def test_programs_of_calls(nranks: int, count: int, given_ones: dict[str, Any]) -> None:
    run(nranks, count, given_ones)
