"""How the figures of a trace look on a terminal. The only place of this package that prints."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .difference import Change, Difference
from .figures import BUSY_LANES, Figures, over_steps, stands_out

_WIDTH = 110
"""Where there is no terminal."""
_MOST_STEPS = 20
_MOST_LAYERS = 10
_MOST_CHANGES = 25
MIB = 1 << 20


def table(figures: Figures) -> str:
    """What ``over_steps`` gives, without colour."""
    text = io.StringIO()
    _print_run(Console(file=text, highlight=False, width=_WIDTH, color_system=None), figures)
    return text.getvalue()


def show(summary: Figures, heading: Iterable[str]) -> None:
    """Prints on stdout what ``summary`` gives.

    Args:
        summary: of a trace.
        heading: what it is a summary of.
    """
    console = _console()
    console.print(Text(", ".join(heading), style="bold"))
    if not summary["steps"]:
        console.print(Text("it has no whole step", style="yellow"))
        return
    console.print(_step_table(summary))
    if len(summary["by_rank"]) > 1:
        console.print(_rank_table(summary))
    _print_run(console, summary["run"])


def show_difference(difference: Difference) -> None:
    """Prints on stdout what has changed, most first."""
    console = _console()
    console.print(Text(difference.verdict, style="bold"))
    for note in difference.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    for title, changes in (("Steps", difference.of_steps), ("By layer", difference.of_layers)):
        if changes:
            console.print(_change_table(title, changes))


def _number(value: float) -> str:
    """With three digits, more where it is large."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# -- the parts ---------------------------------------------------------------------------------------------------------


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def _table(*columns: str, title: str = "") -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title or None, title_justify="left", title_style="bold")
    made.caption_justify = "left"
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return made


def _step_table(summary: Figures) -> Table:
    """Medians over the ranks of each step, and over all."""
    lanes = _lanes(summary["run"])
    wrong = summary["run"].get("wrong_guesses")
    columns = ["step", "ms", "compute", *lanes, "exposed", "overlap"]
    made = _table(*columns, *(["wrong guesses"] if wrong is not None else []), title="Steps, in ms")
    numbers = list(dict.fromkeys(step["step"] for step in summary["steps"]))
    rows = {str(number): over_steps([s for s in summary["steps"] if s["step"] == number]) for number in numbers}
    for name, found in [*list(rows.items())[:_MOST_STEPS], ("all", summary["run"])]:
        style = "bold" if name == "all" else ""
        made.add_row(name, *_step_cells(found, lanes, with_guesses=wrong is not None), style=style)
    if len(rows) > _MOST_STEPS:
        made.caption = f"{len(rows) - _MOST_STEPS} more steps are not shown; 'all' has them, and so has --json"
    return made


def _step_cells(found: Figures, lanes: Iterable[str], *, with_guesses: bool) -> list[str]:
    times = (found["step_ms"], found["compute_ms"], *(found[f"{lane}_ms"] for lane in lanes), found["exposed_ms"])
    guesses = [f"{found.get('wrong_guesses', 0):.0f}"] if with_guesses else []
    return [*map(_number, times), f"{found['overlap_percent']:.0f} %", *guesses]


def _rank_table(summary: Figures) -> Table:
    lanes = _lanes(summary["run"])
    made = _table("rank", "ms", "compute", *lanes, "exposed", "overlap", title="Ranks, in ms")
    for rank, found in summary["by_rank"].items():
        name = f"{rank}, computes longest" if rank == stands_out(summary) else str(rank)
        made.add_row(name, *_step_cells(found, lanes, with_guesses=False))
    return made


def _print_run(console: Console, found: Figures) -> None:
    lanes = _table("lane", "busy ms a step", "MiB a step", "GB/s a rank sends", title="Lanes, medians over steps")
    for lane in _lanes(found):
        lanes.add_row(lane, _number(found[f"{lane}_ms"]), _mib(found[f"{lane}_bytes"]), f"{found[f'{lane}_gb_s']:.3g}")
    console.print(lanes)
    _print_times(console, "Compute", "phase", found["phases_ms"])
    _print_times(console, "Exposed", "waited for", dict(list(found["exposed_ms_by_layer"].items())[:_MOST_LAYERS]))
    console.print(Text(_said(found), style="bold"))


def _print_times(console: Console, title: str, column: str, times: Mapping[str, float]) -> None:
    if times:
        made = _table(column, "mean ms a step", title=title)
        for name, ms in times.items():
            made.add_row(Text(name), _number(ms))
        console.print(made)


def _said(found: Figures) -> str:
    """The figures that count, in a line or two."""
    text = (
        f"step {_number(found['step_ms'])} ms, of which compute {_number(found['compute_ms'])}; exposed "
        f"{_number(found['exposed_ms'])}; of {_number(found['busy_ms'])} ms of communication "
        f"{_number(found['hidden_ms'])} hidden, overlap {found['overlap_percent']:.0f} %"
    )
    peak, formula = found.get("peak_bytes"), found.get("formula_bytes")
    if peak and formula:
        text += f"\nmodel state {_mib(peak)} MiB at its peak, {100 * peak / formula - 100:+.1f} % beside the formula"
    return text


def _change_table(title: str, changes: Sequence[Change]) -> Table:
    made = _table("what", "before ms", "after ms", "change ms", "", title=title)
    hidden = len(changes) - _MOST_CHANGES
    made.caption = f"{hidden} smaller changes are left out; --json has all" if hidden > 0 else None
    for change in changes[:_MOST_CHANGES]:
        share = "new" if not change.before_ms else "gone" if not change.after_ms else f"{change.percent:+.0f} %"
        style = "red" if change.change_ms > 0 else "green"
        cells = (_number(change.before_ms), _number(change.after_ms))
        made.add_row(Text(change.what), *cells, Text(f"{change.change_ms:+.3g}", style=style), share)
    return made


def _lanes(found: Figures) -> list[str]:
    """Those that had something to do."""
    return [lane for lane in BUSY_LANES if found[f"{lane}_ms"] or lane in ("gather", "reduce")]


def _mib(nbytes: Any) -> str:
    return _number(nbytes / MIB)
