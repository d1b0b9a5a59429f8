"""What ``benchmarks.step`` makes of the turns: figures of each contender, targets, and tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.contenders import CONTENDERS
from benchmarks.course import FOREIGN_LIMIT
from benchmarks.turns import PHASES, RankTurn

_WIDTH = 2 + max(len(contender.title) for contender in CONTENDERS.values())
_PARTS = ("pack", "submit", "unpack", "fill", "wait", "gather", "reduce", "replicate")


class Target(NamedTuple):
    """How one of ours should compare with another contender.

    Attributes:
        ours: the contender that it is about.
        text: for people; the limit follows.
        other: the other contender.
        limit: of the quotient of the two medians.
        at_most: whether the quotient is ours over theirs and has to stay below; else theirs over ours, and above.
    """

    ours: str
    text: str
    other: str
    limit: float
    at_most: bool


TARGETS = (
    Target("stage2_overlap", "times compute alone, at most", "compute", 1.10, True),
    Target("stage2_overlap", "times faster than DataParallel, at least", "data_parallel", 1.35, False),
    Target("stage2_overlap", "times faster than sharding V1, at least", "sharding_v1", 1.8, False),
    Target("stage3_overlap", "times compute alone, at most", "compute", 1.15, True),
)
REPLICA_TARGETS = (Target("stage2_overlap", "times compute alone, at most", "compute", 1.25, True),)


# -- figures -----------------------------------------------------------------------------------------------------------


def row(turns: list[list[RankTurn]], compute: list[list[RankTurn]] | None) -> dict[str, Any]:
    """Figures of one contender over all turns and ranks, in milliseconds and units of 2**20 bytes."""
    ranks = [rank for turn in turns for rank in turn]
    step_ms = [ms for rank in ranks for ms in rank.step_ms]
    quartiles = statistics.quantiles(step_ms, n=4)
    by_round = [_median_step(turn) / _median_step(alone) for turn, alone in zip(turns, compute or [], strict=False)]
    return {
        "step_ms": statistics.median(step_ms),
        "min_ms": min(step_ms),
        "max_ms": max(step_ms),
        "quartiles_ms": [quartiles[0], quartiles[2]],
        **{f"{phase}_ms": statistics.median(ms for rank in ranks for ms in rank.phase_ms[phase]) for phase in PHASES},
        **{
            name: statistics.median(getattr(rank, name) for rank in ranks)
            for name in ("cpu_ms", "main_cpu_ms", "live_mb")
        },
        "peak_mb": max(rank.peak_mb for rank in ranks),
        "ratio": statistics.median(step_ms) / statistics.median(_all_steps(compute)) if compute else None,
        "ratio_by_round": by_round,
        "timeline": _medians([rank.timeline for rank in ranks]),
        "parts": _medians([rank.parts for rank in ranks]),
    }


def _medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of what is a number; tables within have no median."""
    numbers = [name for name, value in found[0].items() if isinstance(value, (int, float))]
    return {name: statistics.median(one[name] for one in found) for name in numbers}


def _all_steps(turns: list[list[RankTurn]]) -> list[float]:
    return [ms for turn in turns for rank in turn for ms in rank.step_ms]


def _median_step(turn: list[RankTurn]) -> float:
    return statistics.median(ms for rank in turn for ms in rank.step_ms)


def compare_losses(losses: dict[str, list[list[float]]]) -> dict[str, Any]:
    """The largest relative difference between contenders that train together, over the steps that all have made."""
    together = [name for name in losses if not CONTENDERS[name].trains_alone]
    if not together:
        return {}
    reference = losses[together[0]]
    differences = {name: largest_difference(losses[name], reference) for name in together[1:]}
    return {
        "reference": together[0],
        "largest_relative_difference": differences,
        "agree": all(difference <= CONTENDERS[name].loss_tolerance for name, difference in differences.items()),
        "first": reference[0][0],
        "last": reference[0][-1],
    }


def largest_difference(losses: list[list[float]], reference: list[list[float]]) -> float:
    """Relative to the reference, over the steps that both have made; each a list over ranks of lists over steps."""
    pairs = [pair for ranks in zip(losses, reference, strict=True) for pair in zip(*ranks, strict=False)]
    return max(abs(loss - other) / abs(other) for loss, other in pairs)


def judge(rows: dict[str, dict[str, Any]], targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Which of the targets are met, of those whose contenders took part."""
    found = []
    for target in targets:
        if target.ours not in rows or target.other not in rows:
            continue
        ours_ms, other_ms = rows[target.ours]["step_ms"], rows[target.other]["step_ms"]
        value = ours_ms / other_ms if target.at_most else other_ms / ours_ms
        met = value <= target.limit if target.at_most else value >= target.limit
        found.append({"ours": target.ours, "target": target.text, "limit": target.limit, "value": value, "met": met})
    return found


# -- for people --------------------------------------------------------------------------------------------------------


def print_tables(result: dict[str, Any]) -> None:
    """The rows, where the time of a step went, and the verdicts."""
    rate = result["rate_mbit"]
    network = f"{rate} Mbit/s links" if rate else "loopback"
    print(f"{result['machine']}; Paddle {result['paddle']}; {result['date']}; {result['nranks']} ranks, {network}")
    _print_rows(result["rows"])
    if any(row["parts"] for row in result["rows"].values()):
        _print_parts(result["rows"])
    _print_verdicts(result)


def _print_rows(rows: dict[str, dict[str, Any]]) -> None:
    lanes = ("gather", "reduce", "replicate", "exposed")
    head = (*PHASES, *lanes, "CPU", "MB", "peak MB")
    print(f"{'median ms of':<{_WIDTH}}{'step':>6}{'(min-max)':>15}{'x alone':>9}" + _line(head))
    for name, figures in rows.items():
        spread = f"({figures['min_ms']:.0f}-{figures['max_ms']:.0f})"
        ratio = f"{figures['ratio']:.2f}" if figures["ratio"] else ""
        cells = [figures[f"{phase}_ms"] for phase in PHASES]
        cells += [figures["timeline"].get(f"{lane}_ms") or None for lane in lanes]
        cells += [figures["cpu_ms"], figures["live_mb"], figures["peak_mb"]]
        start = f"{CONTENDERS[name].title:<{_WIDTH}}{figures['step_ms']:>6.0f}{spread:>15}{ratio:>9}"
        print(start + _line("" if cell is None else f"{cell:.0f}" for cell in cells))


def _print_parts(rows: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'ms of each phase':<{_WIDTH}}{'phase':<9}{'took':>6}{'alone':>7}" + _line(_PARTS))
    for name, figures in rows.items():
        for phase in PHASES if figures["parts"] else ():
            alone = rows.get("compute", {}).get(f"{phase}_ms")
            start = f"{CONTENDERS[name].title if phase == PHASES[0] else '':<{_WIDTH}}{phase:<9}"
            start += f"{figures[f'{phase}_ms']:>6.0f}{'' if alone is None else format(alone, '.0f'):>7}"
            print(start + _line(f"{figures['parts'][f'{phase}_{part}_ms']:.1f}" for part in _PARTS))
    print()
    for name, figures in rows.items():
        if figures["parts"]:
            print(f"{CONTENDERS[name].title}: {_copied(figures['parts'])}")


def _copied(parts: dict[str, float]) -> str:
    return (
        f"of {parts['gathered_mb']:.1f} MB gathered, {parts['copied_in_mb']:.1f} MB were copied in, "
        f"{parts['copied_out_mb']:.1f} MB out, {parts['copied_own_mb']:.1f} MB inside the collective; "
        f"copying would take {parts['copying_in_ms']:.1f} ms in, {parts['copying_out_ms']:.1f} ms out"
    )


def _line(cells: Any) -> str:
    return "".join(f"{cell:>10}" for cell in cells)


def _print_verdicts(result: dict[str, Any]) -> None:
    losses = result["losses"]
    for name, difference in losses.get("largest_relative_difference", {}).items():
        print(f"losses of {CONTENDERS[name].title}: within {difference:.1e} of {CONTENDERS[losses['reference']].title}")
    if losses and not losses["agree"]:
        print("WARNING: losses differ by more than rounding explains: these contenders do not train the same")
    for target in result["targets"]:
        verdict = "met" if target["met"] else "missed"
        title = CONTENDERS[target["ours"]].title
        print(f"{title}: {target['value']:.2f} {target['target']} {target['limit']:g}: {verdict}")
    if result["foreign_cpu_share"] > FOREIGN_LIMIT:
        share = f"{100 * result['foreign_cpu_share']:.0f} %"
        print(f"WARNING: other programs took {share} of the processor meanwhile; measure again on a quiet machine")
