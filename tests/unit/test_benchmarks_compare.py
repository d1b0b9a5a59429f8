"""What the comparison with peers derives: who takes part with whom, figures, verdicts, tables and a picture."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, compare_page, compare_report
from benchmarks.compare_report import Turns
from benchmarks.course import Course, Schedule
from benchmarks.peers.contenders import ALONE, COMPARED, EXPERIMENTS, in_sets, taking_part
from benchmarks.turns import RankFailed, RankTurn
from tests.harness import REPO_ROOT

# -- who takes part ----------------------------------------------------------------------------------------------------


def test_a_cell_is_a_speed_and_a_number_of_hosts() -> None:
    assert compare.Cell.parse("500:4") == (500, 4)
    with pytest.raises(ValueError, match="invalid literal"):
        compare.Cell.parse("500")


def test_replicas_need_four_hosts() -> None:
    assert set(taking_part(4)) - set(taking_part(2)) == {"stage2_overlap", "torch_hsdp"}
    assert taking_part(4) == [name for name, compared in COMPARED.items() if not compared.experiment]


def test_who_is_asked_for_brings_what_its_framework_does_alone() -> None:
    assert taking_part(2, ["torch_ddp"]) == ["torch_alone", "torch_ddp"]
    assert taking_part(2, ["torch_ddp", "stage2_all"]) == ["compute", "stage2_all", "torch_alone", "torch_ddp"]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_is_about_variants_of_one_framework(experiment: str) -> None:
    names = taking_part(2, experiment=experiment)
    assert {COMPARED[name].experiment for name in names} == {"", experiment}
    assert [name for name in names if not COMPARED[name].experiment] == ["torch_alone"]
    assert len(names) >= 4


def _needed_mb(names: list[str], nranks: int) -> int:
    return nranks * sum(COMPARED[name].process_mb for name in names)


def test_all_are_in_one_set_where_memory_allows() -> None:
    names = taking_part(4)
    assert in_sets(names, 4, _needed_mb(names, 4)) == [names]
    assert len(in_sets(names, 4, _needed_mb(names, 4) - 1)) > 1


OURS = ["stage2_all", "stage3_all", "stage2_overlap"]


@pytest.mark.parametrize("available_mb", [100.0, 8000.0, 14000.0, 20000.0, 28000.0])
def test_every_peer_is_in_one_set_with_ours_and_what_its_framework_does_alone(available_mb: float) -> None:
    names = taking_part(4)
    sets = in_sets(names, 4, available_mb)
    assert all(set(OURS) <= set(part) for part in sets)
    peers = [name for part in sets for name in part if name not in (*OURS, *ALONE.values())]
    assert sorted(peers) == sorted(set(names) - {*OURS, *ALONE.values()})
    for part in sets:
        assert part == [name for name in names if name in part]
        frameworks = {COMPARED[name].framework for name in part if name in peers}
        assert [name for name in ALONE.values() if name in part] == [ALONE[name] for name in frameworks]
        assert _needed_mb(part, 4) <= available_mb or len(set(part) & set(peers)) == 1


def test_without_peers_of_paddle_there_is_a_set_for_its_alone_all_the_same() -> None:
    names = taking_part(2, ["stage2_all", "torch_ddp"])
    assert in_sets(names, 2, 1.0) == [["compute", "stage2_all"], ["stage2_all", "torch_alone", "torch_ddp"]]


@pytest.mark.parametrize("available_mb", [100.0, 12000.0, 20000.0, 28000.0])
def test_whatever_the_sets_each_of_ours_is_beside_every_peer_once(available_mb: float) -> None:
    sets = [_turns(**dict.fromkeys(part, 100.0)) for part in in_sets(taking_part(4), 4, available_mb)]
    assert len(sets) > 1
    peers = set(taking_part(4)) - {*OURS, *ALONE.values()}
    against = _cell(*sets, hosts=4)["against"]
    assert list(against) == OURS
    for found in against.values():
        assert set(found) == peers
        assert all(len(one["ratio_by_round"]) == 1 for one in found.values())


def test_who_measures_knows_no_framework() -> None:
    """A rank of PyTorch's environment runs the same module, and there is no Paddle there."""
    code = "import sys, benchmarks.compare; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    found = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True, check=True)
    assert {"paddle", "torch", "hp_sharding", "matplotlib", "click"} & set(found.stdout.split()) == set()


# -- figures -----------------------------------------------------------------------------------------------------------


def _turn(*step_ms: float) -> list[RankTurn]:
    """A turn of two ranks that took the same times."""
    phases = {"forward": [1.0], "backward": [1.0], "update": [1.0]}
    return [dataclasses.replace(RankTurn(), step_ms=list(step_ms), phase_ms=phases) for _ in range(2)]


def _turns(shares: float = 0.0, **ms: float | list[float]) -> Turns:
    """A set in which each contender had a turn for each of its numbers, of two steps, both as long."""
    losses = {name: [[7.0, 6.0]] * 2 for name in ms}
    by_round = {name: value if isinstance(value, list) else [value] for name, value in ms.items()}
    return Turns({name: [_turn(one, one) for one in found] for name, found in by_round.items()}, losses, [shares], 0)


def _cell(*sets: Turns, rate_mbit: int = 1000, hosts: int = 2, **more: Any) -> dict[str, Any]:
    cell = {
        "command": "python -m benchmarks.compare",
        "machine": "a machine",
        "python": "3.11.0",
        "date": "2026-01-02",
        "paddle": "3.3.1",
        "torch": "2.13.0",
        "rate_mbit": rate_mbit,
        "hosts": hosts,
        "reached_mbit": {"one_way": 950.0, "both_ways": 940.0},
        "quick": False,
        "experiment": None,
        "missing": [],
        **more,
        **compare_report.cell(list(sets)),
    }
    return {**cell, "targets": compare_report.judge(cell)}


_STANDARD = {"compute": 100.0, "stage2_all": 109.0, "stage3_all": 120.0, "torch_alone": 50.0, "torch_ddp": 110.0}


def test_rounds_are_told_apart_by_the_speed_that_they_were_run_at() -> None:
    course = Course([], nranks=2, schedule=Schedule(4, 1, 0.0))
    course.turns = {name: [_turn(number + offset) for number in range(4)] for name, offset in (("a", 0.0), ("b", 10.0))}
    course.shares = [0.0, 0.1, 1.0, 1.1, 2.0, 2.1, 3.0, 3.1]
    second = Turns.of(course, 1, 2)
    assert [turn[0].step_ms for turn in second.turns["b"]] == [[11.0], [13.0]]
    assert second.shares == [1.0, 1.1, 3.0, 3.1]


def test_everybody_is_held_to_what_its_own_framework_does_alone() -> None:
    rows = _cell(_turns(**_STANDARD))["rows"]
    assert {name: round(row["ratio"], 3) for name, row in rows.items()} == {
        "compute": 1.0,
        "stage2_all": 1.09,
        "stage3_all": 1.2,
        "torch_alone": 1.0,
        "torch_ddp": 2.2,
    }


def test_over_several_sets_ours_are_pooled_and_peers_compared_within_theirs() -> None:
    """The machine was half as fast while the second set had its turns: only what ran beside a peer says anything."""
    fast = _turns(compute=100.0, stage2_all=110.0, data_parallel=150.0)
    slow = _turns(compute=200.0, stage2_all=220.0, sharding_v1_all=180.0)
    cell = _cell(fast, slow)
    assert cell["rows"]["stage2_all"]["step_ms"] == pytest.approx(165.0)
    assert cell["rows"]["stage2_all"]["ratio"] == pytest.approx(1.1)
    assert cell["rows"]["sharding_v1_all"]["ratio"] == pytest.approx(0.9)
    against = cell["against"]["stage2_all"]
    assert {name: found["ratio"] for name, found in against.items()} == pytest.approx(
        {"data_parallel": 110 / 150, "sharding_v1_all": 220 / 180}
    )
    assert compare_report.faster_than(against) == ["sharding_v1_all"]
    no_alone = _turns(stage2_all=330.0, torch_alone=100.0, torch_ddp=250.0)
    row = _cell(fast, no_alone)["rows"]["stage2_all"]
    assert (row["step_ms"], row["ratio"]) == pytest.approx((220.0, 1.1))
    assert cell["sets"] == [["compute", "stage2_all", "data_parallel"], ["compute", "stage2_all", "sharding_v1_all"]]


def test_losses_of_the_frameworks_are_compared_together_and_alone() -> None:
    found = _turns(**_STANDARD)
    found.losses["torch_ddp"] = [[7.0, 6.0], [7.0, 6.0006]]
    found.losses["torch_alone"] = [[7.0, 6.0], [7.0, 6.06]]
    (losses,) = _cell(found)["losses"]
    assert losses["largest_relative_difference"]["torch_ddp"] == pytest.approx(1e-4)
    assert losses["agree"] == (losses["largest_relative_difference"]["torch_ddp"] <= 1e-4)
    assert losses["alone_largest_relative_difference"] == pytest.approx(0.01)
    text = compare_report.losses_in_words(losses)
    assert "relative to those of hp_sharding: paddle within 0.0e+00, torch within 1.0e-04" in text


def test_where_none_of_ours_took_part_losses_are_relative_to_the_first() -> None:
    (losses,) = _cell(_turns(torch_alone=50.0, torch_ddp_1mb=100.0, torch_ddp_4mb=90.0))["losses"]
    assert "relative to those of PyTorch DDP, 1 MB: torch within 0.0e+00" in compare_report.losses_in_words(losses)


def test_who_does_not_train_the_same_is_told() -> None:
    found = _turns(**_STANDARD)
    found.losses["torch_ddp"] = [[7.0, 6.1], [7.0, 6.0]]
    (losses,) = _cell(found)["losses"]
    assert compare_report.losses_in_words(losses).startswith("WARNING")


# -- verdicts ----------------------------------------------------------------------------------------------------------


def _verdicts(cell: dict[str, Any]) -> dict[tuple[str, str], bool]:
    return {(target["ours"], target["target"]): target["met"] for target in cell["targets"]}


def test_wishes_are_about_the_ratio_and_about_every_peer() -> None:
    assert _verdicts(_cell(_turns(**_STANDARD))) == {
        ("stage2_all", "at most 1.1 x alone"): True,
        ("stage2_all", "below every peer"): True,
        ("stage3_all", "at most 1.15 x alone"): False,
        ("stage3_all", "below every peer"): False,
    }


def test_the_median_round_decides_and_its_neighbours_are_told() -> None:
    """The machine was slower at times: medians of steps would say that ours was faster than the other."""
    theirs = [100.0, 290.0, 130.0]
    cell = _cell(_turns(compute=theirs, stage2_all=[110.0, 300.0, 120.0], data_parallel=theirs))
    assert cell["rows"]["stage2_all"]["ratio"] == pytest.approx(300 / 290)
    found = cell["against"]["stage2_all"]["data_parallel"]
    assert found["ratio"] == pytest.approx(300 / 290)
    assert compare_report.spread_of(found) == "(0.92-1.10)"
    text = compare_report.against_in_words(cell["against"]["stage2_all"])
    assert text == "slower than a peer: 1.03 (0.92-1.10) of Paddle DataParallel"


def test_who_was_beside_nobody_is_faster_than_nobody() -> None:
    cell = _cell(_turns(compute=100.0, stage2_all=100.0))
    assert [target["target"] for target in cell["targets"]] == ["at most 1.1 x alone"]
    assert "peer" not in compare_page.page([cell])


@pytest.mark.parametrize("other", [{"rate_mbit": 500}, {"hosts": 4}, {"quick": True}, {"missing": [["torch_ddp"]]}])
def test_other_cells_are_not_judged(other: dict[str, Any]) -> None:
    assert _cell(_turns(**_STANDARD), **other)["targets"] == []


def test_a_disturbed_cell_is_not_judged() -> None:
    assert _cell(_turns(0.02, **_STANDARD))["targets"] != []
    assert _cell(_turns(0.05, **_STANDARD))["targets"] == []


# -- kept and shown ----------------------------------------------------------------------------------------------------


def test_a_cell_that_is_measured_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    for rate_mbit, hosts, ms in ((1000, 4, 1.0), (10000, 2, 2.0), (500, 2, 3.0), (1000, 4, 4.0)):
        compare_report.keep([_cell(_turns(compute=ms), rate_mbit=rate_mbit, hosts=hosts)], file)
    found = [
        (cell["hosts"], cell["rate_mbit"], cell["rows"]["compute"]["step_ms"]) for cell in compare_report.read(file)
    ]
    assert found == [(2, 500, 3.0), (2, 10000, 2.0), (4, 1000, 4.0)]


def test_what_lacks_a_set_is_kept_and_takes_the_place_of_nothing_that_is_finished(tmp_path: Path) -> None:
    file = tmp_path / "results.json"

    def kept() -> list[list[float]]:
        found = json.loads(file.read_text())
        return [[cell["rows"]["compute"]["step_ms"] for cell in found[kind]] for kind in ("cells", "unfinished")]

    found = []
    for ms, missing in ((1.0, []), (2.0, [["torch_ddp"]]), (3.0, [["torch_ddp"]]), (4.0, [])):
        compare_report.keep([_cell(_turns(compute=ms), missing=missing)], file)
        found.append(kept())
    assert found == [[[1.0], []], [[1.0], [2.0]], [[1.0], [3.0]], [[4.0], []]]


class Network:
    """Stands in for links, and for processes that take turns: every set brings one turn, and the last one fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails_at: int) -> None:
        self.sets: list[list[str]] = []
        self._fails_at = fails_at
        monkeypatch.setattr(
            "benchmarks.compare.links.shaped", lambda nhosts, **_: contextlib.nullcontext(["host"] * nhosts)
        )
        monkeypatch.setattr("benchmarks.compare._circumstances", self._about)
        monkeypatch.setattr("benchmarks.compare._write_weights", lambda *_: None)
        monkeypatch.setattr("benchmarks.compare._take_turns", self._take_turns)
        monkeypatch.setattr("benchmarks.compare.environment.ensure", lambda: None)

    def _about(self, _: Any, rate_mbit: int, hosts: list[Any]) -> dict[str, Any]:
        return {"rate_mbit": rate_mbit, "hosts": len(hosts), "quick": False, "experiment": None}

    def _take_turns(self, _: Any, hosts: list[Any], rates_mbit: list[int], names: list[str], weights: Path) -> Course:
        if len(self.sets) == self._fails_at:
            raise RankFailed("a process of a rank has ended")
        self.sets.append(names)
        course = Course([], nranks=2, schedule=Schedule(len(rates_mbit), 1, 0.0))
        course.turns = {name: [_turn(100.0) for _ in rates_mbit] for name in names}
        course.losses = {name: [[7.0]] * 2 for name in names}
        course.shares = [0.0] * len(names) * len(rates_mbit)
        return course


def test_a_set_that_fails_takes_nothing_away_from_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.json"
    network = Network(monkeypatch, fails_at=1)
    options = argparse.Namespace(contenders=None, experiment=None, memory_gb=20.0, results=file)
    with pytest.raises(RankFailed):
        compare._measure(options, 4, [500, 1000])
    unfinished = json.loads(file.read_text())["unfinished"]
    assert [cell["rate_mbit"] for cell in unfinished] == [500, 1000]
    assert all(cell["sets"] == network.sets and cell["missing"] for cell in unfinished)
    assert compare_report.read(file) == []
    network = Network(monkeypatch, fails_at=-1)
    cells = compare._measure(options, 4, [500, 1000])
    assert compare_report.read(file) == json.loads(json.dumps(cells))
    assert {name for part in network.sets for name in part} == set(taking_part(4))


def test_two_rounds_at_least_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["compare"])
    assert [compare._rounds(compare._options(), nhosts) for nhosts in compare.HOSTS] == [3, 2]
    monkeypatch.setattr("sys.argv", ["compare", "--rounds", "1"])
    assert compare._rounds(compare._options(), 2) == 1


def _cells() -> list[dict[str, Any]]:
    slow = {name: 1.5 * ms for name, ms in _STANDARD.items()}
    fast = {name: ms for name, ms in _STANDARD.items() if name != "torch_ddp"}
    return [
        _cell(_turns(**fast), rate_mbit=10000),
        _cell(_turns(**slow), rate_mbit=500),
        _cell(_turns(**_STANDARD)),
        _cell(_turns(**_STANDARD, torch_hsdp=90.0), hosts=4),
    ]


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_page_has_a_table_for_each_number_of_hosts() -> None:
    two, four = (_lines("| " + part) for part in compare_page.page(_cells()).split("\n\n| ")[1:])
    assert two[0] == "| 2 hosts, ms of a step | 500 Mbit/s | x alone | 1 Gbit/s | x alone | 10 Gbit/s | x alone |"
    assert [line.split("|")[1].strip() for line in two[2:]] == [
        "PyTorch, compute alone",
        "Paddle, compute alone",
        "**hp_sharding stage 2**",
        "PyTorch DDP",
        "**hp_sharding stage 3**",
    ]
    assert two[5] == "| PyTorch DDP | 165 (165-165) | 2.20 (2.20-2.20) | 110 (110-110) | 2.20 (2.20-2.20) |  |  |"
    assert len({line.count("|") for line in two}) == 1
    assert four[0].startswith("| 4 hosts")
    assert "| PyTorch HSDP, no reshard | 90 (90-90) | 1.80 (1.80-1.80) |" in four


def test_the_page_says_how_it_was_measured_what_was_wished_for_and_who_is_faster() -> None:
    text = compare_page.page(_cells())
    assert text.count("Measured on 2026-01-02, a machine") == 2
    remarks = {line.partition(":")[0]: line for line in text.splitlines() if line.startswith("* ")}
    assert "wished for: hp_sharding stage 3 at most 1.15 x alone: missed (1.20)" in text
    assert "wished for: hp_sharding stage 2 below every peer: met" in text
    assert "hp_sharding stage 3 is slower than a peer: 1.09 (1.09-1.09) of PyTorch DDP;" in text
    next_one = "hp_sharding stage 2 is faster than every peer (1): 0.99 (0.99-0.99) of PyTorch DDP, the next"
    assert next_one in remarks["* 500 Mbit/s"]


def test_an_experiment_has_a_table_of_its_own_after_the_others() -> None:
    variants = _turns(torch_alone=50.0, torch_ddp_1mb=100.0, torch_ddp_4mb=90.0)
    cells = [_cell(variants, experiment="ddp_buckets"), *_cells()]
    heads = [line for line in _lines(compare_page.page(cells)) if "ms of a step" in line]
    assert [head.split(",")[0] for head in heads] == ["| 2 hosts", "| 4 hosts", "| 2 hosts"]
    assert "PyTorch DDP, 4 MB" in compare_page.page(cells).rpartition("ms of a step")[2]


def test_the_page_takes_the_place_of_the_last_one(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("before\n<!-- compare: begin -->\nold\n<!-- compare: end -->\nafter\n")
    for text in ("first", "second"):
        compare_page.put_into(document, text)
    assert document.read_text() == ("before\n<!-- compare: begin -->\n\nsecond\n\n<!-- compare: end -->\nafter\n")


def test_a_document_without_marks_is_left_alone(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("<!-- compare: begin -->\nold\n")
    with pytest.raises(ValueError, match="has no <!-- compare: begin --> with an"):
        compare_page.put_into(document, "new")
    assert document.read_text() == "<!-- compare: begin -->\nold\n"


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "compare.png"
    compare_page.plot(_cells(), file)
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert 10_000 < len(data) < 200_000
