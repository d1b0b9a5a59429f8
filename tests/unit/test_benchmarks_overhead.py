"""What the benchmark of hooks and states derives from its turns, and that PyTorch is asked the same."""

from __future__ import annotations

import argparse
import json
import subprocess
from typing import Any

import pytest

from benchmarks import overhead
from benchmarks.overhead import LAYERS, Phases
from benchmarks.peers import environment


def _turns(*step_ms: float) -> list[list[Phases]]:
    return [[Phases(0.25 * ms, 0.5 * ms, 0.25 * ms)] * 3 for ms in step_ms]


def test_a_difference_is_taken_within_a_round_and_for_each_layer() -> None:
    row = overhead._row(_turns(14.0, 30.0, 15.0), _turns(4.0, 18.0, 5.0))
    assert row["over_plain_us"] == pytest.approx(10.0 * 1e3 / LAYERS)
    assert row["backward_over_plain_us"] == pytest.approx(5.0 * 1e3 / LAYERS)
    assert (row["min_ms"], row["step_ms"], row["max_ms"]) == (14.0, 15.0, 30.0)


_OPTIONS = argparse.Namespace(rounds=3, steps=2, no_peers=False)


def test_pytorch_is_asked_for_as_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    found = {
        "torch_plain": _turns(4.0, 4.0, 5.0),
        "torch_fsdp_keep": _turns(24.0, 25.0, 26.0),
        "torch_fsdp": _turns(34.0, 35.0, 36.0),
    }

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, f"a word from the framework\n{json.dumps(found)}\n")

    monkeypatch.setattr(environment, "is_made", lambda: True)
    monkeypatch.setattr("benchmarks.overhead.subprocess.run", run)
    rows = overhead._peer_rows(_OPTIONS)
    assert list(rows) == list(overhead.PEER_ROWS)
    assert [row["over_plain_us"] for row in rows.values()] == pytest.approx([0.0, 210.0, 310.0])
    ((python, *arguments),) = commands
    assert python == str(environment.interpreter())
    assert arguments[-4:] == ["--rounds", "3", "--steps", "2"]


def test_without_its_environment_pytorch_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_made", lambda: False)
    assert overhead._peer_rows(_OPTIONS) == {}


def test_fsdp2_is_measured() -> None:
    if not environment.is_made():
        pytest.skip("no environment with PyTorch; python -m benchmarks.peers.environment makes it")
    rows = overhead._peer_rows(argparse.Namespace(rounds=2, steps=1, no_peers=False))
    assert rows["torch_plain"]["over_plain_us"] == 0
    assert rows["torch_fsdp_keep"]["over_plain_us"] > 0
