"""What ``benchmarks.compare`` has measured as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.compare_report import against_in_words, in_order, losses_in_words, spread_of
from benchmarks.peers.contenders import ALONE, COMPARED

_SORTED_BY_MBIT = 1000
_BEGIN, _END = "<!-- compare: begin -->", "<!-- compare: end -->"
_COLOURS = ("#b2cbe5", "#5b8fc7", "#1f4e82")
_OUR_COLOURS = ("#f4c59a", "#e5893a", "#a8500c")


# -- Markdown ----------------------------------------------------------------------------------------------------------


def page(cells: list[dict[str, Any]]) -> str:
    """A table for each number of hosts and each experiment, and what else there is to say about each cell."""
    return "\n\n".join(_section(of_hosts) for of_hosts in by_hosts(cells))


def by_hosts(cells: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The cells of each number of hosts, few hosts and slow links first; those of experiments after all others."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in sorted(cells, key=lambda cell: int(cell["rate_mbit"])):
        groups.setdefault((cell["experiment"] or "", cell["hosts"]), []).append(cell)
    return [groups[key] for key in sorted(groups)]


def names_in_order(cells: list[dict[str, Any]]) -> list[str]:
    """All contenders of these cells, the shortest step on links of 1 Gbit/s first, or else on the first."""
    cell = next((cell for cell in cells if cell["rate_mbit"] == _SORTED_BY_MBIT), cells[0])
    names = [name for name, _ in in_order(cell["rows"])]
    return names + [name for name in COMPARED if name not in names and any(name in one["rows"] for one in cells)]


def _section(cells: list[dict[str, Any]]) -> str:
    heads = [f"{_speed(cell)} | x alone" for cell in cells]
    lines = [
        *_made_by(cells),
        "",
        f"| {cells[0]['hosts']} hosts, ms of a step | " + " | ".join(heads) + " |",
        "|---" * (1 + 2 * len(cells)) + "|",
        *(_line(name, cells) for name in names_in_order(cells)),
        "",
        *(f"* {_speed(cell)}: {'; '.join(_remarks(cell))}." for cell in cells),
    ]
    return "\n".join(lines)


def _made_by(cells: list[dict[str, Any]]) -> list[str]:
    """Where, when and how the cells were measured, one line for each run."""
    runs = {
        f"Measured on {cell['date']}, {cell['machine']}, Python {cell['python']}, Paddle {cell['paddle']}, "
        f"PyTorch {cell['torch']}: `{cell['command']}`": None
        for cell in cells
    }
    return list(runs)


def _speed(cell: dict[str, Any]) -> str:
    mbit = cell["rate_mbit"]
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit} Mbit/s"


def _line(name: str, cells: list[dict[str, Any]]) -> str:
    mark = "**" if COMPARED[name].is_ours else ""
    texts = [COMPARED[name].title]
    for cell in cells:
        row = cell["rows"].get(name)
        texts += ["", ""] if row is None else [_step(row), f"{row['ratio']:.2f} {spread_of(row)}"]
    return "| " + " | ".join(f"{mark}{text}{mark}" if text else "" for text in texts) + " |"


def _step(row: dict[str, Any]) -> str:
    return f"{row['step_ms']:.0f} ({row['min_ms']:.0f}-{row['max_ms']:.0f})"


def _remarks(cell: dict[str, Any]) -> Iterable[str]:
    reached, share = cell["reached_mbit"], 100 * cell["foreign_cpu_share"]
    yield f"plain TCP carries {reached['one_way']:.0f} Mbit/s one way, {reached['both_ways']:.0f} both ways at once"
    for name, against in cell["against"].items():
        if against:
            yield f"{COMPARED[name].title} is {against_in_words(against)}"
    for target in cell["targets"]:
        value = f" ({target['value']:.2f})" if isinstance(target["value"], float) else ""
        verdict = "met" if target["met"] else "missed"
        yield f"wished for: {COMPARED[target['ours']].title} {target['target']}: {verdict}{value}"
    yield from (losses_in_words(losses) for losses in cell["losses"])
    yield f"other programs took {share:.1f} % of the processor"


def put_into(document: Path, text: str) -> None:
    """Puts the text between the document's two marks, in the place of what stands there.

    Raises:
        ValueError: the marks are not there.
    """
    before, begin, rest = document.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"{document} has no {_BEGIN} with an {_END} after it")
    document.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


# -- picture -----------------------------------------------------------------------------------------------------------


def plot(cells: list[dict[str, Any]], file: Path) -> None:
    """Bars of each contender, one for each speed: milliseconds on the left, times compute alone on the right.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("the picture needs matplotlib: pip install '.[plot]'") from None
    groups = by_hosts([cell for cell in cells if not cell["experiment"]])
    counts = [len(names_in_order(group)) for group in groups]
    figure = Figure(figsize=(11, 0.9 + sum(0.8 + 0.42 * count for count in counts)), layout="constrained")
    axes = figure.subplots(len(groups), 2, squeeze=False, gridspec_kw={"height_ratios": counts})
    for pair, group in zip(axes, groups, strict=True):
        names = names_in_order(group)
        _bars(pair[0], group, names, lambda row: row["step_ms"] / 1e3)
        pair[0].set_yticks(range(len(names)), [COMPARED[name].title for name in names])
        pair[0].set_xlabel(f"seconds of a step, {group[0]['hosts']} hosts")
        in_company = [name for name in names if name not in ALONE.values()]
        _bars(pair[1], group, in_company, lambda row: row["ratio"])
        pair[1].set_yticks(range(len(in_company)), [COMPARED[name].title for name in in_company])
        pair[1].axvline(1.0, color="black", linewidth=0.8)
        pair[1].set_xlabel("times compute alone of the same framework")
    _legend(figure, groups[0])
    figure.savefig(file, dpi=90)


def _bars(axes: Any, cells: list[dict[str, Any]], names: list[str], value: Callable[[dict[str, Any]], float]) -> None:
    height = 0.8 / len(cells)
    for index, cell in enumerate(cells):
        present = [(place, name) for place, name in enumerate(names) if name in cell["rows"]]
        lengths = [value(cell["rows"][name]) for _, name in present]
        colours = [(_OUR_COLOURS if COMPARED[name].is_ours else _COLOURS)[index % len(_COLOURS)] for _, name in present]
        places = [place - 0.4 + (index + 0.5) * height for place, _ in present]
        axes.barh(places, lengths, height=height, color=colours)
        for place, length in zip(places, lengths, strict=True):
            axes.annotate(f"{length:.2f}", (length, place), (2, 0), textcoords="offset points", va="center", size=6)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, cells: list[dict[str, Any]]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=_COLOURS[index % len(_COLOURS)], label=_speed(cell)) for index, cell in enumerate(cells)]
    figure.legend(
        handles=[*patches, Patch(color=_OUR_COLOURS[1], label="hp_sharding")], loc="outside upper right", ncols=4
    )
