"""What ``benchmarks.device_step`` makes of the turns: figures, targets, and a table for people."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks import report
from benchmarks.contenders import CONTENDERS
from benchmarks.course import FOREIGN_LIMIT
from benchmarks.device_contenders import ON_DEVICE
from benchmarks.report import Target
from benchmarks.turns import PHASES, RankTurn

if TYPE_CHECKING:
    from benchmarks.device_pace import Traffic
    from tests.device.standin import Pace

_V2 = "sharding_v2_overlap"
_OURS = ("stage1_overlap", "stage2_overlap", "stage3_overlap")
_FASTER = "times faster than sharding V2 with its overlaps, at least"
TARGETS = tuple(Target(ours, _FASTER, _V2, 1.0, at_most=False) for ours in _OURS)
REPLICA_TARGETS = tuple(Target(ours, _FASTER, _V2, 1.2, at_most=False) for ours in _OURS)
_DRIFT_LIMIT = 0.1
_LANES = ("gather", "reduce", "replicate", "exposed")
_HOST_MEMORY = ("live_mb", "peak_mb")
_WIDTH = 2 + max(len(CONTENDERS[name].title) for name in ON_DEVICE)


def row(turns: list[list[RankTurn]], compute: list[list[RankTurn]] | None) -> dict[str, Any]:
    """As ``benchmarks.report.row``, and the median step of each round; without memory, which is the host's there."""
    figures = report.row(turns, compute)
    by_round = [statistics.median(ms for rank in turn for ms in rank.step_ms) for turn in turns]
    kept = {name: figure for name, figure in figures.items() if name not in _HOST_MEMORY}
    return {**kept, "step_ms_by_round": by_round}


def judge(rows: dict[str, dict[str, Any]], *, replicas: int) -> list[dict[str, Any]]:
    """As ``benchmarks.report.judge``, with the quotient in each round as well."""
    verdicts = report.judge(rows, TARGETS if replicas == 1 else REPLICA_TARGETS)
    for verdict in verdicts:
        pairs = zip(rows[_V2]["step_ms_by_round"], rows[verdict["ours"]]["step_ms_by_round"], strict=True)
        verdict["by_round"] = [theirs / ours for theirs, ours in pairs]
    return verdicts


def communication_share(rows: dict[str, dict[str, Any]], communication_ms: float) -> float | None:
    """The modelled communication over compute alone as it was in the comparison; None where that took no part."""
    return communication_ms / rows["compute"]["step_ms"] if "compute" in rows else None


def is_fair(share: float | None) -> bool:
    """Whether communication took as long as the compute, as far as is known."""
    return share is None or abs(share - 1.0) <= _DRIFT_LIMIT


def print_pace(compute_ms: float, sent: Traffic, pace: Pace) -> None:
    """Where the modelled speed of the links comes from, before anything is compared."""
    print(
        f"compute alone {compute_ms:.0f} ms; a rank sends {sent.wire_bytes / 1e6:.1f} MB in stage 2, in "
        f"{sent.n_collectives} collectives of {pace.latency_ms:g} ms: "
        f"{sent.wire_bytes / 1e6:.1f} MB / ({compute_ms:.0f} - {sent.n_collectives} x {pace.latency_ms:g} ms) "
        f"= {pace.bandwidth_mb_s:.1f} MB/s, fixed from here on",
        flush=True,
    )


def print_tables(result: dict[str, Any]) -> None:
    """The rows, what they add up to, and the verdicts."""
    compute = result["modelled_compute_ms"]
    how = f"modelled compute of {compute:g} ms" if compute else "real compute"
    ranks = f"{result['nranks']} ranks in {result['replicas']} replica(s)"
    print(f"{result['machine']}; Paddle {result['paddle']}; {result['date']}; {ranks}, {how}")
    lanes = _LANES if result["timeline"] else ()
    print(f"{'median ms of':<{_WIDTH}}{'step':>6}{'(min-max)':>15}{'x alone':>9}" + _line((*PHASES, "CPU", *lanes)))
    for name, figures in result["rows"].items():
        _print_row(CONTENDERS[name].title, figures, lanes)
    _print_losses(result["losses"])
    _print_verdicts(result)


def _print_row(title: str, figures: dict[str, Any], lanes: tuple[str, ...]) -> None:
    spread = f"({figures['min_ms']:.0f}-{figures['max_ms']:.0f})"
    ratio = f"{figures['ratio']:.2f}" if figures["ratio"] else ""
    cells = [*(figures[f"{phase}_ms"] for phase in PHASES), figures["cpu_ms"]]
    cells += [figures["timeline"].get(f"{lane}_ms") or None for lane in lanes]
    start = f"{title:<{_WIDTH}}{figures['step_ms']:>6.0f}{spread:>15}{ratio:>9}"
    print(start + _line(tuple("" if cell is None else f"{cell:.0f}" for cell in cells)))


def _line(cells: tuple[str, ...]) -> str:
    return "".join(f"{cell:>10}" for cell in cells)


def _print_losses(losses: dict[str, Any]) -> None:
    for name, difference in losses.get("largest_relative_difference", {}).items():
        print(f"losses of {CONTENDERS[name].title}: within {difference:.1e} of {CONTENDERS[losses['reference']].title}")
    if losses and not losses["agree"]:
        print("WARNING: losses differ by more than rounding explains: these do not train the same")


def _print_verdicts(result: dict[str, Any]) -> None:
    for verdict in result["targets"]:
        rounds = f"by rounds {min(verdict['by_round']):.2f} to {max(verdict['by_round']):.2f}"
        print(
            f"{CONTENDERS[verdict['ours']].title}: {verdict['value']:.2f} {verdict['target']} {verdict['limit']:g}: "
            f"{'met' if verdict['met'] else 'missed'} ({rounds})"
        )
    share = result["communication_of_compute"]
    if share is not None:
        print(f"the modelled communication was {share:.2f} of compute alone in the comparison")
    if not is_fair(share):
        print("WARNING: the machine's speed has changed since the pace was settled; no verdict; measure again")
    if result["foreign_cpu_share"] > FOREIGN_LIMIT:
        foreign = f"{100 * result['foreign_cpu_share']:.0f} %"
        print(f"WARNING: other programs took {foreign} of the processor meanwhile; no verdict; measure again")
