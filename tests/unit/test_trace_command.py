"""``hp-sharding trace``: what it shows, what it draws, how it ends, and that it does so without Paddle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click.testing
import pytest

from hp_sharding.cli import main
from hp_sharding.trace import chrome, tables
from hp_sharding.trace.figures import summary
from hp_sharding.trace.spans import Trace
from tests.harness import REPO_ROOT
from tests.traces import Run, make

RUN = Run(n_layers=4, n_ranks=2, n_steps=3, forward_ms=10, gather_ms=8)


def _call(*arguments: Any) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, ["trace", *map(str, arguments)], terminal_width=120)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    chrome.write(make(RUN), tmp_path / "trace.json")
    return tmp_path / "trace.json"


@pytest.fixture
def slower(tmp_path: Path) -> Path:
    chrome.write(make(RUN._replace(gather_ms=30)), tmp_path / "slower.json.gz")
    return tmp_path / "slower.json.gz"


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_show_has_steps_ranks_lanes_and_waits(recorded: Path) -> None:
    found = _call("show", recorded)
    assert found.exit_code == 0, found.output
    lines = _lines(found.output)
    assert "median of steps 0 to 2, 2 ranks, stage 2, cpu, 2026-05-04 12:00:00, simulated" in found.output
    # Step, ms, compute, gather, reduce, exposed, overlap, wrong guesses.
    assert ["0", "132", "124", "0", "32", "8", "75", "%", "0"] in lines
    assert ["gather", "32", "15.3", "0.25"] in lines
    assert ["backward", "80"] in lines
    assert "of 64 ms of communication 51 hidden, overlap 80 %" in found.output
    assert "Lanes, medians over steps" in found.output
    assert [line[0] for line in lines if line[-4:] == ["mean", "ms", "a", "step"]] == ["phase", "waited"]
    assert ["blocks.0", "11.3"] in lines
    assert "model state 95.4 MiB at its peak, +1.0 % beside the formula" in found.output


def test_show_some_steps(recorded: Path) -> None:
    found = _call("show", recorded, "--steps", "0,2", "--json")
    assert found.exit_code == 0
    assert [(step["step"], step["rank"]) for step in json.loads(found.stdout)["steps"]] == [
        (0, 0), (0, 1), (2, 0), (2, 1)
    ]  # fmt: skip


def test_a_range_of_steps_may_reach_beyond_all_of_them(recorded: Path) -> None:
    found = _call("show", recorded, "--steps", "1-99999999999999", "--json")
    assert found.exit_code == 0
    assert {step["step"] for step in json.loads(found.stdout)["steps"]} == {1, 2}


def test_show_as_json_has_all_figures(recorded: Path) -> None:
    found = _call("show", recorded, "--json")
    assert found.exit_code == 0
    assert json.loads(found.stdout) == json.loads(json.dumps(summary(make(RUN))))


def test_show_draws_the_steps_that_it_shows(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("hp_sharding.trace.picture.draw", lambda *found, **options: drawn.append((*found, options)))
    _call("show", recorded, "--steps", "1-2", "--picture", tmp_path / "trace.png")
    assert drawn == [(make(RUN), tmp_path / "trace.png", {"steps": [1, 2]})]


def test_show_draws_too(recorded: Path, tmp_path: Path) -> None:
    found = _call("show", recorded, "--steps", "1-2", "--picture", tmp_path / "trace.png", "--json")
    assert found.exit_code == 0, found.output
    assert found.stderr == f"wrote {tmp_path / 'trace.png'}\n"
    assert len(json.loads(found.stdout)["steps"]) == 4
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_many_steps_are_shortened(tmp_path: Path) -> None:
    chrome.write(make(RUN._replace(n_layers=1, n_steps=25)), tmp_path / "trace.json")
    found = _call("show", tmp_path / "trace.json")
    assert "5 more steps are not shown" in found.output
    assert ["all"] in [line[:1] for line in _lines(found.output)]


def test_a_trace_without_steps_says_so(tmp_path: Path) -> None:
    chrome.write(Trace(), tmp_path / "trace.json")
    found = _call("show", tmp_path / "trace.json")
    assert (found.exit_code, found.output) == (0, "no whole step, 0 ranks\nit has no whole step\n")


def test_diff_shows_what_takes_longer(recorded: Path, slower: Path) -> None:
    found = _call("diff", recorded, slower)
    assert found.exit_code == 0, found.output
    lines = _lines(found.output)
    assert lines[0][:3] == ["a", "step", "takes"]
    assert lines[0][5] == "longer:"
    assert ["lane", "reduce", "32", "120", "+88", "+275", "%"] in lines
    assert ["reduce", "blocks.3", "8", "30", "+22", "+275", "%"] in lines
    data = json.loads(_call("diff", recorded, slower, "--json").stdout)
    assert data["changes"][0]["kind"] == "step"
    back = json.loads(_call("diff", slower, recorded, "--json").stdout)
    assert back["changes"][0]["change_ms"] == pytest.approx(-data["changes"][0]["change_ms"])


def test_diff_refuses_what_has_nothing_in_common(recorded: Path, tmp_path: Path) -> None:
    chrome.write(Trace(), tmp_path / "empty.json")
    found = _call("diff", recorded, tmp_path / "empty.json")
    assert found.exit_code == 1
    assert "error: the second trace has no whole step" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "nowhere.json"], "the trace nowhere.json cannot be read: No such file"),
        (["show", "setup.cfg"], "setup.cfg is no trace, since it is not JSON"),
        (["diff", "nowhere.json", "nowhere.json"], "cannot be read"),
        (["show", "RECORDED", "--steps", "5-"], "'5-' is not like 3, 5-7 or 1,3,5-7"),
        (["show", "RECORDED", "--steps", "one"], "'one' is not like 3"),
        (["show", "RECORDED", "--steps", "²"], "'²' is not like 3"),
        (["show", "RECORDED", "--steps", "2-1"], "'2-1' ends before it begins"),
        (["show", "RECORDED", "--steps", "9" * 5000], "is not like 3"),
        (["show", "RECORDED", "--steps", "7-99999999999999"], "none of [7-99999999999999]"),
        (["show", "RECORDED", "--steps", "7,9"], "the trace has steps [0, 1, 2], none of [7, 9]"),
        (["show", "RECORDED", "--picture", "/nowhere/at/all.png"], "cannot be written to /nowhere/at/all.png"),
    ],
)
def test_wrong_use_ends_with_2(recorded: Path, arguments: list[str], said: str) -> None:
    found = _call(*[str(recorded) if argument == "RECORDED" else argument for argument in arguments])
    assert found.exit_code == 2
    assert said in found.output


def test_it_needs_no_paddle(recorded: Path) -> None:
    code = (
        "import sys; sys.modules['paddle'] = None; sys.modules['numpy'] = None\n"
        f"from hp_sharding.cli import main; main(['trace', 'show', {str(recorded)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "computes" not in done.stdout
    assert "waited for" in done.stdout


def test_the_table_of_a_summary_is_plain_text() -> None:
    text = tables.table(summary(make(RUN))["run"])
    assert ["reduce", "32", "15.3", "0.25"] in _lines(text)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 110
