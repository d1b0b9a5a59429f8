"""The example, from its command line to its last table, in small."""

from __future__ import annotations

import runpy
import sys

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
    line = next(line for line in first.output.splitlines() if line.startswith("held-out loss: "))
    before, after = float(line.split()[2]), float(line.split()[4])
    assert after < before - 0.3
    assert "exposed communication" in first.output
    assert all("held-out loss" not in outcome.output for outcome in others)
