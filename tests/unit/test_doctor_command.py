"""The command line of the doctor, alone in one process; and what becomes of ranks that it starts and that fail."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click.testing
import pytest

from hp_sharding.cli import main
from hp_sharding.doctor import Request, machine, starting
from hp_sharding.doctor.ranks import Team
from hp_sharding.doctor.report import Report
from tests.harness import REPO_ROOT


def _call(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, list(arguments))


def test_help_has_examples_and_exit_codes() -> None:
    found = _call("doctor", "--help")
    assert found.exit_code == 0
    for wanted in ("python -m hp_sharding doctor --nproc 2", "$(which hp-sharding) doctor", "Exit code: 0 all is well"):
        assert wanted in found.output
    assert "--hand-in" not in found.output
    assert "doctor" in _call("--help").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc", "0"], "x>=1"),
        (["--only", "speed"], "'speed' is not one of"),
        (["--max-mb", "0"], "--max-mb"),
        (["--output", "/nowhere/at/all.txt"], "no folder /nowhere/at"),
    ],
)
def test_wrong_use_ends_with_2(arguments: list[str], said: str) -> None:
    found = _call("doctor", *arguments)
    assert found.exit_code == 2
    assert said in found.output


def test_ranks_are_not_started_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle.distributed.get_world_size", lambda: 4)
    found = _call("doctor", "--nproc", "2")
    assert found.exit_code == 2
    assert "the launcher has started 4" in found.output


def test_alone_it_shows_the_machine_and_says_how_to_check_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    found = _call("doctor", "--json", "--output", str(file))
    assert found.exit_code == 0
    assert "python -m hp_sharding doctor --nproc 2" in found.stdout
    *_, last = found.stdout.strip().splitlines()
    data = json.loads(last)
    assert data == json.loads(file.read_text())
    assert data["results"] == {}
    assert set(data["not_checked"]) == {"parity", "asynchrony", "bandwidth", "overlap"}
    assert data["machine"]["n_ranks"] == 1
    assert data["machine"]["n_cores"] == os.cpu_count()
    assert data["machine"]["environment"]["OMP_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"]


def test_ended_by_the_launcher_it_prints_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    look, before = machine.look, signal.getsignal(signal.SIGTERM)

    def look_and_be_ended(team: Team) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return look(team)

    monkeypatch.setattr(machine, "look", look_and_be_ended)
    found = _call("doctor")
    assert found.exit_code == 1
    assert "ended by a signal before all was done" in found.output
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    found = _call("doctor", "--output", str(tmp_path / "report.txt"))
    assert found.exit_code == 2
    assert f"cannot write {tmp_path / 'report.txt'}: disk full" in found.output


def test_the_package_needs_neither_the_command_line_nor_tables() -> None:
    code = "import sys; sys.modules['click'] = sys.modules['rich'] = None; import hp_sharding"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=REPO_ROOT, check=True, capture_output=True)


# -- ranks that are started --------------------------------------------------------------------------------------------


def _replace_launcher(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Runs a script in its place, whose argument is the folder for the report."""

    def command(nproc: int, request: Request, folder: Path) -> list[str]:
        return [sys.executable, "-c", script, str(folder)]

    monkeypatch.setattr(starting, "_command", command)


def _start(monkeypatch: pytest.MonkeyPatch, script: str) -> Report:
    _replace_launcher(monkeypatch, script)
    request = Request(True, (), 1.0, 1.0, False, None, None)
    return starting.start_ranks(2, request, lambda _: None)


_HAND_IN = r"""
import os, pathlib, pickle, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "log").mkdir()
(folder / "log" / "workerlog.1").write_text("Segmentation fault in rank 1")
(folder / "launcher.log").write_text("starting\nthe trainer process with rank=[1] was aborted.\nending\n")
(folder / "doing").write_text("3 of 4: bandwidth")
"""


def test_ranks_that_die_leave_what_they_had_and_their_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    partial = Report.begun()._replace(took_s=3.5)
    monkeypatch.setenv("PARTIAL", pickle.dumps(partial).hex())
    script = _HAND_IN + "(folder / 'report').write_bytes(bytes.fromhex(os.environ['PARTIAL'])); sys.exit(7)"
    found = _start(monkeypatch, script)
    assert found.took_s == 3.5
    assert found.exit_code == 1
    (failure,) = found.failures
    assert "starting" not in failure.text
    for wanted in (
        "the launcher ended with 7; the trainer process with rank=[1] was aborted",
        "3 of 4: bandwidth",
        "Segmentation fault in rank 1",
        "workerlog.1",
    ):
        assert wanted in failure.text


def test_ranks_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_START_S", 0.0)
    monkeypatch.setattr(starting, "_GOODBYE_S", 0.5)
    sleeper = subprocess.Popen(["sleep", "300"])
    script = _HAND_IN + (
        f"(folder / 'rank1.pid').write_text('{sleeper.pid}')\n"
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    )
    try:
        begin_s = time.monotonic()
        found = _start(monkeypatch, script)
        assert time.monotonic() - begin_s < 30
        assert sleeper.wait(10) == -9
    finally:
        sleeper.kill()
        sleeper.wait()
    assert found.exit_code == 1
    assert "nothing moved any more" in found.failures[0].text


def test_a_complete_report_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = Report.begun()._replace(complete=True)
    monkeypatch.setenv("COMPLETE", pickle.dumps(complete).hex())
    script = _HAND_IN + "(folder / 'report').write_bytes(bytes.fromhex(os.environ['COMPLETE']))"
    assert _start(monkeypatch, script) == complete


def test_ended_from_outside_it_takes_its_ranks_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    pid = tmp_path / "pid"
    script = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(300)"
    _replace_launcher(monkeypatch, script)

    def end_soon() -> None:
        while not pid.exists() or not pid.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end_soon)
    thread.start()
    found = _call("doctor", "--nproc", "2")
    thread.join()
    assert found.exit_code == 1
    assert "ended by a signal" in found.output
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert list(tmp_path.iterdir()) == [pid], "the folder of the run is gone too"
