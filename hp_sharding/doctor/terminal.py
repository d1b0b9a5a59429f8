"""How a report looks on a terminal and in a file. The only place that prints."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .asynchrony import Asynchrony
from .bandwidth import REPLICAS, Bandwidth
from .examination import CHECKS, NEEDS_RANKS
from .links import Fit
from .overlap import Overlap
from .parity import Parity
from .report import MB, Machine, Report, Spread

_WIDTH = 110
"""Where there is no terminal: what fits into a bug report."""
_MARKS = {True: Text("ok", style="green"), False: Text("FAIL", style="bold red")}


def say(line: str) -> None:
    """One line on stdout, as it is."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def show(report: Report) -> None:
    """Prints the report on stdout, in colour where that is a terminal."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    _print(console, report)


def as_text(report: Report) -> str:
    """The report without colour."""
    text = io.StringIO()
    _print(Console(file=text, highlight=False, width=_WIDTH, color_system=None), report)
    return text.getvalue()


# -- the parts ---------------------------------------------------------------------------------------------------------


def _print(console: Console, report: Report) -> None:
    console.print(Text(f"hp_sharding doctor, {report.date} UTC", style="bold"))
    if report.machine is not None:
        _print_machine(console, report.machine)
    for advice in report.advice:
        console.print(Text(f"warning: {advice.found}", style="yellow"))
        console.print(Text(f"    what to do: {advice.do}"))
    for name, check in CHECKS.items():
        if name in report.results:
            _print_result(console, check.title, report.results[name])
    _print_not_checked(console, report)
    for failure in report.failures:
        who = "" if failure.rank is None else f" on rank {failure.rank}"
        console.print(Text(f"\nFAILED: {failure.check}{who}: {failure.text}", style="red"), soft_wrap=True)
    _print_verdict(console, report)


def _print_machine(console: Console, machine: Machine) -> None:
    hosts = "; ".join(f"{host}: {_listed(ranks)}" for host, ranks in machine.hosts.items())
    count = f" of {machine.n_devices}" if machine.n_devices else ""
    rows = {
        "versions": ", ".join(f"{package} {version}" for package, version in machine.versions.items()),
        "system": machine.system,
        "processor": f"{machine.processor}, {machine.n_cores} cores, {machine.usable_cores} usable",
        "device": f"{machine.device}{count}, collectives by {machine.backend}, "
        f"storage aligned to {machine.alignment_bytes} bytes",
        "ranks": f"{machine.n_ranks} ({hosts})",
        **{name: value for name, value in machine.environment.items() if value},
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    console.print(table)


def _print_result(console: Console, title: str, result: Any) -> None:
    console.print(Text(f"\n{title[0].upper()}{title[1:]}", style="bold"))
    console.print(Text(result.verdict, style="" if result.passed else "bold red"))
    tables: dict[type, Callable[[Any], Table]] = {
        Parity: _parity_table,
        Asynchrony: _asynchrony_table,
        Bandwidth: _bandwidth_table,
        Overlap: _overlap_table,
    }
    console.print(tables[type(result)](result))
    if isinstance(result, Bandwidth) and result.links:
        console.print(_link_table(result.links))


def _parity_table(parity: Parity) -> Table:
    table = _table(f"{parity.steps} steps", "optimizer", "difference", "allowed", "ranks agree", "")
    for row in parity.rows:
        table.add_row(
            row.case,
            row.optimizer,
            "none: bitwise" if row.bitwise else f"{row.difference:.1e}",
            "none: bitwise" if row.tolerance == 0 else f"{row.tolerance:.0e}",
            "yes" if row.ranks_agree else "NO",
            _MARKS[row.passed],
        )
    if not parity.reference_repeats:
        table.caption = "one process does not repeat itself bit for bit on this device; so a difference is allowed"
    return table


def _asynchrony_table(asynchrony: Asynchrony) -> Table:
    table = _table("ms", "call returns", "done", "compute alone", "beside it", "both", "slower", "hidden")
    notes = []
    for row in asynchrony.rows:
        medians = [_number(spread.median) for spread in (row.compute_ms, row.beside_ms, row.both_ms)]
        more = (f"x {row.slowdown:.2f}", f"{row.hidden_percent:.0f} %")
        name = f"{row.op}, {row.mb:.3g} MB"
        table.add_row(name, _number(row.launch_ms.median), _spread(row.done_ms), *medians, *more)
        transfers = f"x {row.wire_slowdown:.2f}" if row.tells_wire_slowdown else "too short to tell"
        notes.append(f"{row.lane}: compute x {row.compute_slowdown:.2f}, transfers {transfers}")
    if asynchrony.flops_s is not None:
        notes.append(f"matrix products alone {asynchrony.flops_s / 1e9:.3g} GFLOP/s a rank")
    table.caption = "While a lane and compute are busy all the time, each takes longer. " + "; ".join(notes)
    return table


def _bandwidth_table(bandwidth: Bandwidth) -> Table:
    table = _table("collective", "size", "ms", "GB/s", "GB/s a rank sends", "repeats")
    named = [(row.op, row) for row in bandwidth.rows]
    named += [(f"{row.op}, {REPLICAS} replicas", row) for row in bandwidth.replicas]
    last = ""
    for name, row in named:
        rates = (f"{row.algorithm_gb_s:.3g}", f"{row.bus_gb_s:.3g}", str(row.repeats))
        table.add_row(name if name != last else "", _size(row.nbytes), _spread(row.ms), *rates)
        last = name
    return table


def _link_table(links: Sequence[Fit]) -> Table:
    table = _table("links, fitted", "ranks", "latency ms a hop", "GB/s a rank sends", "off by at most")
    for link in links:
        numbers = (_number(link.latency_ms), f"{link.gb_s:.3g}", f"{link.error_percent:.0f} %")
        table.add_row(f"{link.lane} lane", str(link.n_ranks), *numbers)
    table.caption = "a collective takes hops x latency + what a rank sends / bandwidth"
    return table


def _overlap_table(overlap: Overlap) -> Table:
    table = _table("ms a step", "compute alone", "not overlapped", "overlapped", "hidden")
    for row in overlap.rows:
        hidden = "-" if row.hidden_percent is None else f"{row.hidden_percent:.0f} %"
        table.add_row(row.case, *map(_spread, (row.compute_ms, row.serial_ms, row.overlapped_ms)), hidden)
    busy = [
        f"{row.case}, overlapped: {', '.join(f'{lane} {_number(ms)}' for lane, ms in row.lanes_ms.items())} ms"
        for row in overlap.rows
    ]
    size = f"{overlap.parameters_mb:.3g} MB of parameters, {overlap.batch_rows} rows a rank, {overlap.rounds} rounds"
    table.caption = "\n".join([size, *busy])
    return table


def _print_not_checked(console: Console, report: Report) -> None:
    for reason in dict.fromkeys(report.not_checked.values()):
        names = [name for name, why in report.not_checked.items() if why == reason]
        console.print(Text(f"\nNot checked, {reason}: {', '.join(names)}", style="yellow"))
    if NEEDS_RANKS in report.not_checked.values():
        console.print(
            Text(
                "To check that too, start it on several ranks of this machine,\n"
                "    python -m hp_sharding doctor --nproc 2\n"
                "or with the launcher, with its options as you start your training:\n"
                "    python -m paddle.distributed.launch --nproc_per_node 2 $(which hp-sharding) doctor"
            )
        )


def _print_verdict(console: Console, report: Report) -> None:
    took = f"took {report.took_s:.0f} s"
    if not report.passed:
        console.print(Text(f"\nsomething is wrong; {took}", style="bold red"))
    elif report.results:
        console.print(Text(f"\nall that was checked is right; {took}", style="bold green"))
    else:
        console.print(Text(f"\nnothing was checked but the machine; {took}", style="bold"))


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number == 0, overflow="fold")
    return table


def _spread(spread: Spread) -> str:
    return f"{_number(spread.median)} ({_number(spread.low)}-{_number(spread.high)})"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1024:.3g} KB" if nbytes < MB else f"{nbytes / MB:.3g} MB"


def _listed(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))
