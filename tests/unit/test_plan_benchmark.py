"""The benchmark of the plan: what its ranks are told, and what its calibration makes of few messages."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from benchmarks import plan_check
from benchmarks.circumstances import machine
from benchmarks.plan_calibration import Calibration, _each_s, _Rank


@pytest.mark.parametrize("shard_ranks", [2, 4])
def test_ranks_are_told_their_shard_group(shard_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check = plan_check._check(8, 8 // shard_ranks, 1000, 2, 8)
    monkeypatch.setitem(plan_check.CHECKS, "more", check)
    command = plan_check._rank_command("calibration", 8, argparse.Namespace(quick=False))
    assert command[command.index("--shard-ranks") + 1] == str(shard_ranks)


def test_messages_are_timed_by_those_that_end_beside_compute() -> None:
    assert _each_s([1.0, 1.5, 2.0, 9.0], until_s=3.0) == pytest.approx(0.5)
    # Where compute is over before the second one, the first two say it.
    for until_s in (0.5, 1.2):
        assert _each_s([1.0, 1.5, 4.0], until_s=until_s) == pytest.approx(0.5)


class _Work:
    end_s = 0.0

    def wait(self) -> None:
        _Work.end_s += 1e9  # long after the step
        self.end_s = _Work.end_s


class _Message:
    def start(self, count: int) -> list[_Work]:
        return [_Work() for _ in range(count)]


def test_a_step_that_is_over_before_any_message_is_calibrated_too() -> None:
    rank: Any = object.__new__(_Rank)
    rank._average = lambda value: value
    rank._forward = lambda: argparse.Namespace(backward=lambda: None)
    found = Calibration(alone_s=0.001, large_s={"gather": 0.1})
    _, carried_s = rank._train_beside(_Message(), found, "gather")
    assert carried_s == pytest.approx(1e9)


def test_the_machine_is_named_by_its_processor() -> None:
    name, cores, system = machine().rsplit(", ", 2)
    assert name
    assert int(cores.removesuffix(" cores")) > 0
    assert system
