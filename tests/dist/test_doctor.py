"""The doctor on several ranks: by itself, under the launcher, on a device, and with faults that it must find."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hp_sharding import ShardingConfig
from hp_sharding.cli import main
from hp_sharding.doctor import bandwidth, parity
from hp_sharding.doctor.ranks import Team
from hp_sharding.plan.hardware import Hardware
from tests import harness

MB = 1 << 20
CHECKS = ["parity", "asynchrony", "bandwidth", "overlap"]


def _run(*arguments: str, code: int = 0, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments from an empty environment of Paddle's, as a user would."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=harness.REPO_ROOT,
        env={**base, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


# -- all is well -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_starts_two_ranks_and_looks_at_all(tmp_path: Path) -> None:
    output = tmp_path / "report.txt"
    done = _run("-m", "hp_sharding", "doctor", "--nproc", "2", "--quick", "--json", "--output", str(output))
    *text, last = done.stdout.strip().splitlines()
    assert [line.rstrip() for line in output.read_text().splitlines()] == [line.rstrip() for line in text]
    data = json.loads(last)
    assert (data["passed"], data["exit_code"], data["complete"], data["failures"]) == (True, 0, True, [])
    assert list(data["results"]) == CHECKS
    assert data["machine"]["n_ranks"] == 2
    assert data["machine"]["environment"]["PADDLE_TRAINERS_NUM"] == "2"
    _look_at_parity(data["results"]["parity"])
    _look_at_asynchrony(data["results"]["asynchrony"])
    _look_at_bandwidth(data["results"]["bandwidth"])
    _look_at_overlap(data["results"]["overlap"])
    _look_at_hardware(data)


def _look_at_hardware(data: dict[str, Any]) -> None:
    found = Hardware.from_dict(data)
    assert found.link("gather") != found.link("reduce")
    for lane in ("gather", "reduce"):
        # Between processes of one machine; beside others that compute it may be slow.
        assert 1e6 < found.link(lane).bandwidth_bytes_s < 1e12
        assert 0 <= found.link(lane).latency_s < 1
    assert set(found.compute_slowdown) == set(found.wire_slowdown) == {"gather", "reduce"}
    assert 0 < found.launch_s < 1
    assert found.flops_s is not None


def _look_at_parity(found: dict[str, Any]) -> None:
    assert [(row["case"], row["optimizer"]) for row in found["rows"]] == [
        (f"stage {stage}", optimizer) for stage in (1, 2, 3) for optimizer in ("SGD", "AdamW")
    ]
    for row in found["rows"]:
        assert (row["bitwise"], row["difference"], row["tolerance"], row["ranks_agree"]) == (True, 0.0, 0.0, True)


def _look_at_asynchrony(found: dict[str, Any]) -> None:
    assert [row["op"] for row in found["rows"]] == ["all_gather", "reduce_scatter"]
    for row in found["rows"]:
        assert 0 < row["launch_ms"]["low"] < row["done_ms"]["low"] < row["both_ms"]["high"]
        # Beside others it may be late once, so not the median of it.
        assert row["launch_ms"]["low"] < 0.5 * row["done_ms"]["median"]


def _look_at_bandwidth(found: dict[str, Any]) -> None:
    for op in bandwidth.OPS:
        rows = [row for row in found["rows"] if row["op"] == op]
        assert [row["nbytes"] for row in rows] == [4096, 32768, 262144, 2 * MB, 16 * MB]
        assert rows[-1]["ms"]["median"] > rows[0]["ms"]["median"]
        for row in rows:
            assert row["ms"]["low"] <= row["ms"]["median"] <= row["ms"]["high"]
            assert row["repeats"] >= 3
            assert row["algorithm_gb_s"] == pytest.approx(row["nbytes"] / row["ms"]["median"] / 1e6)
            assert row["bus_gb_s"] == pytest.approx(row["algorithm_gb_s"] * (1 if op == "all_reduce" else 0.5))


def _look_at_overlap(found: dict[str, Any]) -> None:
    (row,) = found["rows"]
    assert row["case"] == "stage 2"
    assert found["rounds"] >= 3
    assert 0 < found["parameters_mb"] <= 17
    assert row["serial_ms"]["high"] > row["compute_ms"]["low"] > 0
    assert row["overlapped_ms"]["low"] > 0
    assert set(row["lanes_ms"]) == {"gather", "reduce", "exposed"}
    assert min(row["lanes_ms"]["gather"], row["lanes_ms"]["reduce"]) > 0
    assert row["hidden_percent"] is None or 0 <= row["hidden_percent"] <= 100


def test_the_launcher_takes_the_installed_command(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    command = Path(sys.executable).parent / "hp-sharding"
    launcher = ["-m", "paddle.distributed.launch", "--log_dir", str(tmp_path / "log"), "--nproc_per_node", "2"]
    arguments = ["--backend", "gloo", str(command), "doctor", "--only", "parity", "--output", str(output)]
    _run(*launcher, *arguments)
    data = json.loads(output.read_text())
    assert (data["exit_code"], data["machine"]["n_ranks"], list(data["results"])) == (0, 2, ["parity"])
    said = [(tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in (0, 1)]
    assert ["bit for bit" in text for text in said] == [True, False]


# -- as a function of ranks --------------------------------------------------------------------------------------------


def _examine(rank: int, nranks: int, output: str, fault: str, only: str) -> int:
    """The exit code of this rank."""
    with _FAULTS[fault](rank), pytest.raises(SystemExit) as ended:
        main(["doctor", "--quick", "--only", only, "--timeout-s", "30", "--output", output], standalone_mode=False)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@contextmanager
def _no_fault(_: int) -> Iterator[None]:
    yield


@contextmanager
def _wrong_divisor(_: int) -> Iterator[None]:
    with mock.patch.object(ShardingConfig, "gradient_divisor", lambda self, nranks: 1.001 * nranks):
        yield


@contextmanager
def _one_rank_differs(rank: int) -> Iterator[None]:
    """Its own copy of the parameters, at the end of a run, is not that of the others."""
    values = parity._values

    def changed(*arguments: Any) -> parity.Values:
        found = values(*arguments)
        if rank == 1:
            found["0.bias"][0] += 1e-7
        return found

    with mock.patch.object(parity, "_values", changed):
        yield


@contextmanager
def _one_rank_stops(rank: int, stop: Callable[[], None]) -> Iterator[None]:
    """In the middle of a check, while the others go on and wait for it in a collective."""
    time_ms, calls = Team.time_ms, itertools.count()

    def counted(team: Team, action: Callable[[], object]) -> float:
        if rank == 1 and next(calls) == 7:
            stop()
        return time_ms(team, action)

    with mock.patch.object(Team, "time_ms", counted):
        yield


def _one_rank_raises(rank: int) -> AbstractContextManager[None]:
    def stop() -> None:
        raise ZeroDivisionError("made on purpose")

    return _one_rank_stops(rank, stop)


def _one_rank_dies(rank: int) -> AbstractContextManager[None]:
    return _one_rank_stops(rank, lambda: os.kill(os.getpid(), signal.SIGKILL))


_FAULTS = {
    "none": _no_fault,
    "wrong divisor": _wrong_divisor,
    "one rank differs": _one_rank_differs,
    "one rank raises": _one_rank_raises,
    "one rank dies": _one_rank_dies,
}


def _examined(nranks: int, output: Path, fault: str, only: str) -> tuple[list[int], dict[str, Any]]:
    # In processes of their own: an examination ends with all lanes of its process closed.
    outcomes = harness.run(_examine, nranks, str(output), fault, only, fresh=True, timeout_s=60)
    assert [outcome.error for outcome in outcomes] == [None] * nranks
    return [outcome.result for outcome in outcomes], json.loads(output.read_text())


def test_four_ranks_have_replicas_too(tmp_path: Path) -> None:
    codes, data = _examined(4, tmp_path / "report.json", "none", "parity")
    assert codes == [0] * 4
    rows = data["results"]["parity"]["rows"]
    assert {row["case"] for row in rows} >= {"stage 1", "stage 3", "stage 2, 2 replicas", "stage 3, 2 replicas"}
    assert all(row["passed"] and row["tolerance"] > 0 for row in rows)
    assert any(row["difference"] > 0 for row in rows), "sums of four are formed in another order somewhere"


def test_four_ranks_have_links_between_replicas(tmp_path: Path) -> None:
    codes, data = _examined(4, tmp_path / "report.json", "none", "bandwidth")
    assert codes == [0] * 4
    found = data["results"]["bandwidth"]
    assert [(link["lane"], link["n_ranks"]) for link in found["links"]] == [
        ("gather", 4),
        ("reduce", 4),
        ("replicate", 2),
    ]
    assert {row["op"] for row in found["replicas"]} == {"all_reduce"}
    assert len(found["replicas"]) * 3 == len(found["rows"])
    assert Hardware.from_dict(data).replicate is not None


def test_wrong_numbers_are_found(tmp_path: Path) -> None:
    codes, data = _examined(2, tmp_path / "report.json", "wrong divisor", "parity")
    assert codes == [1, 1]
    assert (data["passed"], data["exit_code"], data["failures"]) == (False, 1, [])
    found = data["results"]["parity"]
    assert found["verdict"].startswith("WRONG NUMBERS: stage 1 with SGD")
    for row in found["rows"]:
        assert (row["passed"], row["bitwise"], row["ranks_agree"]) == (False, False, True)
        # A thousandth of what 20 steps of SGD do; AdamW hardly minds the scale of a gradient.
        assert 1e-9 < row["difference"] < 1e-2


def test_ranks_that_do_not_agree_are_found(tmp_path: Path) -> None:
    codes, data = _examined(2, tmp_path / "report.json", "one rank differs", "parity")
    assert codes == [1, 1]
    assert [row["ranks_agree"] for row in data["results"]["parity"]["rows"]] == [False] * 6


def test_a_rank_that_raises_is_named_and_holds_nobody_up(tmp_path: Path) -> None:
    codes, data = _examined(2, tmp_path / "report.json", "one rank raises", "bandwidth")
    assert codes == [1, 1]
    assert data["results"] == {}
    told = {failure["rank"]: failure["text"] for failure in data["failures"]}
    assert "ZeroDivisionError: made on purpose" in told[1]
    assert "CommError" in told[0], "it was waiting for the other one"
    assert data["took_s"] < 15


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    first, second = harness.run(_examine, 2, str(output), "one rank dies", "bandwidth", fresh=True, timeout_s=60)
    assert second.returncode == -signal.SIGKILL
    assert first.result == 1
    data = json.loads(output.read_text())
    assert data["exit_code"] == 1
    told = {failure["rank"]: failure["text"] for failure in data["failures"]}
    assert "rank 1 is gone" in told[0]
    assert "no word from it" in told[1]
    assert data["took_s"] < 30
