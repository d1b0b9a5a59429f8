"""The benchmark of ``"auto"``: how it starts its ranks, and what it makes of their turns."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

import pytest

from benchmarks import tuning
from benchmarks.links import Host, Seat
from benchmarks.tuning import Setting
from benchmarks.turns import Group, RankTurn

_HERE = Seat(Host(None, "127.0.0.1", "lo"))


def _options(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> argparse.Namespace:
    monkeypatch.setattr("sys.argv", ["tuning", *arguments])
    return tuning._options()


@pytest.mark.parametrize("setting", [Setting("auto", "auto"), Setting(3.125), Setting(25.0, 2)])
def test_a_rank_is_told_what_it_is(monkeypatch: pytest.MonkeyPatch, setting: Setting) -> None:
    command = tuning._rank_command(_options(monkeypatch, "--stage", "3"), setting)
    assert command[0] == sys.executable
    module = command.index("-m")
    assert command[module + 1] == "benchmarks.tuning"
    options = _options(monkeypatch, *command[module + 2 :])
    assert options.stage == 3
    assert Setting(**json.loads(options.as_rank)) == setting


def test_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    command = tuning._rank_command(_options(monkeypatch), Setting("auto"))
    group = Group("auto", command, [_HERE], {})
    try:
        group.await_ready()
    finally:
        group.end()


def _turn(step_ms: float) -> list[RankTurn]:
    return [
        dataclasses.replace(RankTurn(), step_ms=[step_ms], timeline={"exposed_ms": 1.0}, parts={"n_buckets": 2.0})
        for _ in range(2)
    ]


def _turns(*step_ms: float) -> list[list[RankTurn]]:
    return [_turn(ms) for ms in step_ms]


def test_the_best_of_the_grid_is_found_by_rounds() -> None:
    """The machine got slower all the time, so that medians of steps say little."""
    found = tuning._sum_up(
        {
            Setting("auto"): _turns(100.0, 200.0, 300.0),
            Setting(3.125): _turns(110.0, 190.0, 280.0),
            Setting(25.0): _turns(120.0, 230.0, 330.0),
        }
    )
    assert found["best"] == "3.125"
    assert found["auto_over_best"] == pytest.approx(200 / 190)


@pytest.mark.parametrize(("arguments", "count"), [((), 6), (("--stage", "3"), 9), (("--quick",), 3)])
def test_the_grid(monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], count: int) -> None:
    options = _options(monkeypatch, *arguments)
    settings = tuning._grid(options)
    assert len({str(setting) for setting in settings}) == count
    assert all(bool(setting.depth) == (options.stage == 3) for setting in settings)
