"""What ``benchmarks.compare`` makes of the turns: figures of each cell, targets, a table, a file that keeps them."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.course import FOREIGN_LIMIT, Course
from benchmarks.peers.contenders import ALONE, COMPARED
from benchmarks.turns import RankTurn

TARGET_CELL = (1000, 2)
"""Mbit/s and hosts for which something was wished for."""
ALONE_LIMITS = {"stage2_all": 1.10, "stage3_all": 1.15}
"""Times compute alone, at most; and below every peer in milliseconds."""
_WIDTH = 2 + max(len(compared.title) for compared in COMPARED.values())


class Turns(NamedTuple):
    """What one set of contenders brought at one speed of the links.

    Attributes:
        turns: of each contender, by round; each a list over ranks.
        losses: of each contender and rank, of every step at every speed.
        shares: of the processor, that other programs took during each turn.
        repeated: turns that do not count, at all speeds.
    """

    turns: dict[str, list[list[RankTurn]]]
    losses: dict[str, list[list[float]]]
    shares: list[float]
    repeated: int

    @classmethod
    def of(cls, course: Course, index: int, n_rates: int) -> Turns:
        """Of a course whose rounds went through ``n_rates`` speeds in turn, those at speed ``index``."""
        n_groups = len(course.turns)
        rounds = [course.shares[begin : begin + n_groups] for begin in range(0, len(course.shares), n_groups)]
        return cls(
            {name: turns[index::n_rates] for name, turns in course.turns.items()},
            course.losses,
            [share for shares in rounds[index::n_rates] for share in shares],
            course.repeated,
        )


# -- figures -----------------------------------------------------------------------------------------------------------


def cell(sets: list[Turns]) -> dict[str, Any]:
    """Figures of all contenders of one cell, whichever sets they were in."""
    names = [name for name in COMPARED if any(name in one.turns for one in sets)]
    return {
        "rows": {name: _row(name, sets) for name in names},
        "against": {name: _against(name, sets) for name in names if COMPARED[name].is_ours},
        "losses": [_losses(one.losses) for one in sets],
        "foreign_cpu_share": statistics.fmean(share for one in sets for share in one.shares),
        "turns_repeated": sum(one.repeated for one in sets),
        "sets": [list(one.turns) for one in sets],
    }


def _row(name: str, sets: list[Turns]) -> dict[str, Any]:
    """Of one contender in milliseconds; ``ratio`` to its framework's alone, in the sets in which both were."""
    turns = [turn for one in sets for turn in one.turns.get(name, [])]
    figures = report.row(turns, None)
    by_round = _by_round(name, ALONE[COMPARED[name].framework], sets)
    kept = ("step_ms", "min_ms", "max_ms", "quartiles_ms", "cpu_ms")
    resident_mb = statistics.median(rank.resident_mb for turn in turns for rank in turn)
    exposed = {key: figures["timeline"][key] for key in ("exposed_ms",) if key in figures["timeline"]}
    return {**{key: figures[key] for key in kept}, **_ratio(by_round), "resident_mb": resident_mb, **exposed}


def _by_round(name: str, other: str, sets: list[Turns]) -> list[float]:
    """The step of one over that of the other in each round of the sets in which both were."""
    both = [(one.turns[name], one.turns[other]) for one in sets if name in one.turns and other in one.turns]
    pairs = [pair for mine, theirs in both for pair in zip(mine, theirs, strict=True)]
    return [_median_ms(mine) / _median_ms(theirs) for mine, theirs in pairs]


def _median_ms(turn: list[RankTurn]) -> float:
    return statistics.median(ms for rank in turn for ms in rank.step_ms)


def _ratio(by_round: list[float]) -> dict[str, Any]:
    return {"ratio": statistics.median(by_round), "ratio_by_round": by_round}


def _against(name: str, sets: list[Turns]) -> dict[str, Any]:
    """Each peer that one of ours was beside, with how long our step took in units of theirs."""
    found = {other: _by_round(name, other, sets) for other in COMPARED if _is_peer(other)}
    return {other: _ratio(by_round) for other, by_round in found.items() if by_round}


def _is_peer(name: str) -> bool:
    return not COMPARED[name].is_ours and name not in ALONE.values()


def faster_than(against: dict[str, Any]) -> list[str]:
    """Peers whose step was no longer than ours in the median round."""
    return [name for name, found in against.items() if found["ratio"] >= 1]


def _losses(losses: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Of those that train together; and of both frameworks where each rank is alone."""
    found = report.compare_losses(losses)
    if set(ALONE.values()) <= set(losses):
        paddle, torch = losses[ALONE["paddle"]], losses[ALONE["torch"]]
        found["alone_largest_relative_difference"] = report.largest_difference(torch, paddle)
    return found


def judge(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Which wishes were met; none where the cell is not the one that they are about, or was disturbed."""
    comparable = (cell["rate_mbit"], cell["hosts"]) == TARGET_CELL and not cell["quick"]
    if not comparable or cell["missing"] or cell["foreign_cpu_share"] > FOREIGN_LIMIT:
        return []
    found: list[dict[str, Any]] = []
    for name, limit in ALONE_LIMITS.items():
        if name in cell["rows"]:
            value = cell["rows"][name]["ratio"]
            found.append({"ours": name, "target": f"at most {limit:g} x alone", "value": value, "met": value <= limit})
            if against := cell["against"][name]:
                faster = faster_than(against)
                found.append({"ours": name, "target": "below every peer", "value": faster, "met": not faster})
    return found


# -- for people --------------------------------------------------------------------------------------------------------


def print_cell(cell: dict[str, Any]) -> None:
    """The rows of one cell, the shortest step first, and what there is to say about them."""
    reached = cell["reached_mbit"]
    print(f"\n{cell['machine']}; Paddle {cell['paddle']}; PyTorch {cell['torch']}; {cell['date']}")
    print(
        f"{cell['hosts']} hosts, links of {cell['rate_mbit']} Mbit/s (plain TCP reaches {reached['one_way']:.0f} "
        f"one way, {reached['both_ways']:.0f} both ways at once)"
    )
    heads = f"{'(min-max)':>15}{'x alone':>9}{'(by rounds)':>13}{'CPU':>7}{'exposed':>9}{'MB':>6}"
    print(f"{'median ms of':<{_WIDTH}}{'step':>6}{heads}")
    for name, row in in_order(cell["rows"]):
        limits = f"({row['min_ms']:.0f}-{row['max_ms']:.0f})"
        exposed = f"{row['exposed_ms']:.0f}" if "exposed_ms" in row else ""
        step = f"{row['step_ms']:>6.0f}{limits:>15}{row['ratio']:>9.2f}{spread_of(row):>13}"
        print(f"{COMPARED[name].title:<{_WIDTH}}{step}{row['cpu_ms']:>7.0f}{exposed:>9}{row['resident_mb']:>6.0f}")
    _print_verdicts(cell)


def in_order(rows: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Names and rows, the shortest step first."""
    return sorted(rows.items(), key=lambda pair: pair[1]["step_ms"])


def _print_verdicts(cell: dict[str, Any]) -> None:
    for losses in cell["losses"]:
        print(losses_in_words(losses))
    for name, against in cell["against"].items():
        if against:
            print(f"{COMPARED[name].title}: {against_in_words(against)}")
    for target in cell["targets"]:
        value = f"{target['value']:.2f}: " if isinstance(target["value"], float) else ""
        verdict = "met" if target["met"] else "missed"
        print(f"{COMPARED[target['ours']].title}: {target['target']}: {value}{verdict}")
    if cell["foreign_cpu_share"] > FOREIGN_LIMIT:
        share = f"{100 * cell['foreign_cpu_share']:.0f} %"
        print(f"WARNING: other programs took {share} of the processor meanwhile; measure again on a quiet machine")


def spread_of(found: dict[str, Any]) -> str:
    """The least and the largest ratio of a round, in brackets."""
    return f"({min(found['ratio_by_round']):.2f}-{max(found['ratio_by_round']):.2f})"


def against_in_words(against: dict[str, Any]) -> str:
    """Whether one of ours is faster than every peer it was beside, and by how much: its step in units of theirs."""
    slower = faster_than(against)
    shown = slower or [max(against, key=lambda name: float(against[name]["ratio"]))]
    parts = [f"{against[name]['ratio']:.2f} {spread_of(against[name])} of {COMPARED[name].title}" for name in shown]
    verdict = "slower than a peer" if slower else f"faster than every peer ({len(against)})"
    return f"{verdict}: {' and '.join(parts)}{'' if slower else ', the next'}"


def losses_in_words(losses: dict[str, Any]) -> str:
    """How far apart the losses are, of those who train together, and of the frameworks alone."""
    by_framework: dict[str, float] = {}
    for name, difference in losses.get("largest_relative_difference", {}).items():
        framework = COMPARED[name].framework
        by_framework[framework] = max(difference, by_framework.get(framework, 0.0))
    parts = [f"{framework} within {largest:.1e}" for framework, largest in by_framework.items()]
    if "alone_largest_relative_difference" in losses:
        parts.append(f"the frameworks alone within {losses['alone_largest_relative_difference']:.1e} of each other")
    verdict = "" if losses.get("agree", True) else "WARNING: more than rounding explains: they do not train the same; "
    reference = COMPARED[losses["reference"]] if "reference" in losses else None
    whose = "hp_sharding" if reference is None or reference.is_ours else reference.title
    return f"{verdict}losses, relative to those of {whose}: {', '.join(parts)}"


# -- kept --------------------------------------------------------------------------------------------------------------


def read(file: Path) -> list[dict[str, Any]]:
    """The finished cells of a file that ``keep`` has written."""
    return _read(file)["cells"]


def _read(file: Path) -> dict[str, list[dict[str, Any]]]:
    found = json.loads(file.read_text()) if file.exists() else {}
    return {kind: found.get(kind, []) for kind in ("cells", "unfinished")}


def keep(cells: list[dict[str, Any]], file: Path) -> None:
    """Puts cells into the file, in the place of older ones of the same speed, number of hosts and experiment.

    Those of which sets are missing stand by themselves, under ``unfinished``: a finished one is not lost to them.
    """
    found = _read(file)
    for cell in cells:
        found["unfinished"] = [old for old in found["unfinished"] if _key(old) != _key(cell)]
        kind = "unfinished" if cell["missing"] else "cells"
        found[kind] = sorted([*(old for old in found[kind] if _key(old) != _key(cell)), cell], key=_key)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps({"benchmark": "compare", **found}, indent=1) + "\n")
    os.replace(partial, file)


def _key(cell: dict[str, Any]) -> tuple[str, int, int]:
    return cell["experiment"] or "", cell["hosts"], cell["rate_mbit"]
