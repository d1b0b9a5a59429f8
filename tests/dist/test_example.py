"""The example, from its command line to its last table, in small."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests import harness

ARGUMENTS = "--steps 12 --layers 2 --width 32 --context 32 --batch 8 --sample 20 --comm-buffer-size-mb 0.05".split()


def _run_example(rank: int, nranks: int, options: list[str]) -> None:
    sys.argv = ["train_gpt.py", *ARGUMENTS, *options]
    runpy.run_path(str(harness.REPO_ROOT / "examples" / "train_gpt.py"), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nranks", "options"), [(1, []), (2, []), (2, ["--stage", "1", "--no-reduce-overlap", "--no-allgather-overlap"])]
)
def test_example(nranks: int, options: list[str]) -> None:
    first, *others = harness.run(_run_example, nranks, options, fresh=True, init=False, timeout_s=90.0)
    for outcome in (first, *others):
        assert (outcome.returncode, outcome.error) == (0, None), outcome.output
    assert "training: 100%" in first.output
    before, after = _held_out(first.output)
    assert after < before - 0.3
    assert "exposed communication" in first.output
    assert all("held-out loss" not in outcome.output for outcome in others)


@pytest.mark.slow
def test_example_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """On as many ranks it ends where the run that was not stopped does, and on fewer not far from there."""
    whole, half = tmp_path / "whole", tmp_path / "half"
    saves = ["--save-every", "6", "--checkpoints"]
    expected = _run(2, [*saves, str(whole)])
    shutil.copytree(whole / "step-6", half / "step-6")
    resumed = _run(2, [*saves, str(half)])
    assert f"resumed from {half / 'step-6'}, after 6 steps" in resumed
    assert _held_out(resumed)[1] == _held_out(expected)[1]
    shutil.rmtree(half / "step-12")
    alone = _run(1, [*saves, str(half)])
    assert abs(_held_out(alone)[1] - _held_out(expected)[1]) < 0.3


def _run(nranks: int, options: list[str]) -> str:
    first, *others = harness.run(_run_example, nranks, options, fresh=True, init=False, timeout_s=90.0)
    for outcome in (first, *others):
        assert (outcome.returncode, outcome.error) == (0, None), outcome.output
    return first.output


def _held_out(output: str) -> tuple[float, float]:
    line = next(line for line in output.splitlines() if line.startswith("held-out loss: "))
    return float(line.split()[2]), float(line.split()[4])
