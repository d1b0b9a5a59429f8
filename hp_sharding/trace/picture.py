"""A trace as a PNG: lanes of each rank below each other, layers in colours of their own, exposed time in orange."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .colours import EXPOSED, OUTER, Colours, is_light, outer_layers, short_names
from .figures import only_steps, stands_out, summary, union
from .headline import headline
from .scene import Panel, Scene, lay_out
from .seats import rows
from .spans import Span, Trace
from .writing import replace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_STEPS = 3
"""Drawn where nobody says which."""
_DPI = 150
_FONT, _SMALL = 7.5, 5.5
"""Points."""
_GREY, _DARK = "#8a8a8a", "#222222"
_FITS = 0.92
"""Of a box, that a text may take."""
_APART = 0.05
"""Inches between two texts side by side."""
_SLIM = 0.03
"""Inches."""
_MOST_ROWS = 3
_MOST_MISSING = 0.1
"""Of the boxes of a row, that may be without a name."""


def draw(trace: Trace, path: str | os.PathLike[str], *, steps: Sequence[int] | None = None) -> None:
    """Draws a trace into a PNG file.

    Args:
        trace: with at least one step.
        path: of the file, which is replaced if it is there, once all of the picture is.
        steps: numbers of the steps to draw; None for all, or for the first ``MOST_STEPS`` of more.

    Raises:
        ConfigError: matplotlib is missing, there is nothing to draw, or the file cannot be written.
    """
    image = io.BytesIO()
    painted(trace, steps).savefig(image, format="png")
    try:
        replace(Path(path), image.getvalue())
    except OSError as error:
        raise ConfigError(f"the picture cannot be written to {path}: {error.strerror or error}") from error


def painted(trace: Trace, steps: Sequence[int] | None = None) -> Figure:
    """What ``draw`` writes, as a figure of matplotlib's; arguments and errors as there."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"a picture needs matplotlib ({error}): pip install 'hp_sharding[plot]'") from error
    wanted = trace.numbers()[:MOST_STEPS] if steps is None else steps
    shown = only_steps(trace, wanted)
    if not shown.steps:
        raise ConfigError(f"there is nothing to draw: the trace has steps {trace.numbers()}, none of {list(wanted)}")
    scene = lay_out(shown)
    # Neither pyplot nor a backend of the user's is touched.
    figure = Figure(figsize=(scene.width, scene.height), dpi=_DPI)
    _Painter(figure, FigureCanvasAgg(figure).get_renderer(), scene, Colours(trace)).paint(trace, shown)
    return figure


class _Painter:
    """Paints on one axes that is measured in seconds across and in inches down."""

    def __init__(self, figure: Figure, renderer: Any, scene: Scene, colours: Colours) -> None:
        self._figure, self._renderer, self._scene, self._colours = figure, renderer, scene, colours
        self._widths: dict[tuple[str, float], float] = {}
        self._axes = figure.add_axes(scene.frame)
        self._axes.set_xlim(scene.start_s, scene.end_s)
        self._axes.set_ylim(scene.depth, 0)

    def paint(self, trace: Trace, shown: Trace) -> None:
        """Everything."""
        figures = summary(shown)
        outer = outer_layers(shown)
        for panel in self._scene.panels:
            spans = [self._cut(span) for span in trace.spans if span.rank == panel.rank and self._is_seen(span)]
            self._paint_head(panel, figures)
            self._paint_exposed(panel, [span for span in spans if span.lane == "wait"])
            self._paint_compute(panel, [span for span in spans if span.lane == "compute"], outer)
            for lane in panel.lanes:
                if lane not in ("compute", "wait"):
                    self._paint_collectives(panel, lane, [span for span in spans if span.lane == lane])
        self._paint_steps(shown)
        self._paint_axis()
        self._paint_legend()
        self._paint_title(trace, shown, figures)

    def _is_seen(self, span: Span) -> bool:
        return span.end_s > self._scene.start_s and span.start_s < self._scene.end_s

    def _cut(self, span: Span) -> Span:
        start_s, end_s = max(span.start_s, self._scene.start_s), min(span.end_s, self._scene.end_s)
        return span._replace(start_s=start_s, end_s=end_s)

    # -- one rank ------------------------------------------------------------------------------------------------------

    def _paint_head(self, panel: Panel, figures: dict[str, Any]) -> None:
        found = figures["by_rank"][panel.rank]
        name = f"rank {panel.rank}" + (", computes longest" if panel.rank == stands_out(figures) else "")
        text = f"{name}: step {_ms(found['step_ms'])}, exposed {_ms(found['exposed_ms'])}"
        self._text(self._scene.start_s, panel.top, text, va="top", ha="left", fontweight="bold", size=_FONT)
        for top in panel.lanes.values():
            self._axes.axhspan(top, top + self._scene.lane, color="#f4f4f4", zorder=0)

    def _paint_exposed(self, panel: Panel, waits: Sequence[Span]) -> None:
        """Over all lanes, where compute stands still; and what for, on the lane of waits."""
        depth = panel.bottom - panel.lanes_top
        self._boxes(union(waits), panel.lanes_top, depth, EXPOSED, alpha=0.16, edgecolor="none", zorder=1)
        places = [(span.start_s, span.end_s) for span in waits]
        top = panel.lanes["wait"]
        self._boxes(places, top, self._scene.lane, EXPOSED, edgecolor="white", hatch="////", linewidth=0, zorder=3)
        self._label_waits(panel, waits)

    def _label_waits(self, panel: Panel, waits: Sequence[Span]) -> None:
        """Below its lane, the longest first, as many as there is room for."""
        taken: list[tuple[float, float]] = []
        seen = [span for span in waits if span.end_s - span.start_s >= _SLIM / self._scene.inches_per_s]
        for span in sorted(seen, key=lambda span: span.start_s - span.end_s):
            text = f"{short_names(span.layer or span.label)[0]}: {_ms((span.end_s - span.start_s) * 1e3)}"
            half_s = (self._width_of(text, _SMALL) / 2 + _APART) / self._scene.inches_per_s
            middle_s = (span.start_s + span.end_s) / 2
            middle_s = min(max(middle_s, self._scene.start_s + half_s), self._scene.end_s - half_s)
            place = (middle_s - half_s, middle_s + half_s)
            if all(place[1] <= start_s or place[0] >= end_s for start_s, end_s in taken):
                taken.append(place)
                self._text(middle_s, panel.bottom + 0.02, text, va="top", ha="center", size=_SMALL, color=_DARK)

    def _paint_compute(self, panel: Panel, spans: Sequence[Span], outer: set[str]) -> None:
        top = panel.lanes["compute"]
        inner = [span for span in spans if span.layer not in outer]
        for some, order in (([span for span in spans if span.layer in outer], 2), (inner, 3)):
            self._paint_layers(some, top, self._scene.lane, order)
        self._paint_phases(panel, spans)
        self._label_compute(panel, [span for span in inner if span.layer])

    def _paint_phases(self, panel: Panel, spans: Sequence[Span]) -> None:
        """Above compute: forward, backward and ``step()``, each from the first of its spans to the last."""
        for label, start_s, end_s in phases(spans):
            y = panel.phases_top + self._scene.strip * 0.85
            gap_s = min(0.02 / self._scene.inches_per_s, (end_s - start_s) / 4)
            self._axes.plot([start_s + gap_s, end_s - gap_s], [y, y], color=_GREY, linewidth=1.5, solid_capstyle="butt")
            if self._fits(label, _SMALL, end_s - start_s):
                middle_s = (start_s + end_s) / 2
                self._text(middle_s, y - 0.02, label, va="bottom", ha="center", size=_SMALL, color=_DARK)

    def _label_compute(self, panel: Panel, spans: Sequence[Span]) -> None:
        """In their boxes; every so many above the lane, with a tick, in phases where not all have room."""
        top = panel.lanes["compute"]
        outside = []
        for label in dict.fromkeys(span.label for span in spans):
            of_phase = [span for span in spans if span.label == label]
            outside += [] if self._label_inside(of_phase, top) else of_phase
        for middle_s, text in self._thinned(outside):
            self._axes.plot([middle_s] * 2, [top - 0.03, top], color=_GREY, linewidth=0.5)
            self._text(middle_s, top - 0.03, text, va="bottom", ha="center", size=_SMALL, color=_DARK)

    def _paint_collectives(self, panel: Panel, lane: str, spans: Sequence[Span]) -> None:
        """Those that overlap lie below each other."""
        row_of = rows([(round(span.start_s * 1e9), round(span.end_s * 1e9)) for span in spans], nest=False)
        n_rows = min(max(row_of, default=0) + 1, _MOST_ROWS)
        height = self._scene.lane / n_rows
        for row in range(n_rows):
            some = [span for span, own in zip(spans, row_of, strict=True) if min(own, n_rows - 1) == row]
            self._paint_layers(some, panel.lanes[lane] + row * height, height, 3)
        if n_rows > 1 or self._label_inside(spans, panel.lanes[lane]):
            return
        for middle_s, text in self._thinned(spans):
            y = panel.lanes[lane] + height / 2
            self._text(middle_s, y, text, va="center", ha="center", size=_SMALL, path_effects=self._halo())

    # -- all ranks -----------------------------------------------------------------------------------------------------

    def _paint_steps(self, shown: Trace) -> None:
        """Where they end, as lines; and their numbers and times, above."""
        for panel in self._scene.panels:
            ends = [step.end_s for step in shown.steps if step.rank == panel.rank]
            reach = panel.lanes_top, panel.bottom
            self._axes.vlines(ends, *reach, color="black", linewidth=0.9, linestyle=(0, (4, 2)), zorder=2.5)
        first = self._scene.panels[0].rank
        for step in [step for step in shown.steps if step.rank == first]:
            for text in (f"step {step.number}: {_ms(step.duration_ms)}", f"step {step.number}", str(step.number)):
                if self._fits(text, _FONT, step.end_s - step.start_s):
                    middle_s = (step.start_s + step.end_s) / 2
                    self._text(middle_s, 0.02, text, va="top", ha="center", size=_FONT)
                    break

    def _paint_axis(self) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        places = [
            (top + self._scene.lane / 2, lane) for panel in self._scene.panels for lane, top in panel.lanes.items()
        ]
        self._axes.set_yticks([y for y, _ in places], [lane for _, lane in places], fontsize=_FONT)
        self._axes.tick_params(axis="y", length=0)
        self._axes.tick_params(axis="x", labelsize=_FONT)
        self._axes.xaxis.set_major_locator(MaxNLocator(nbins=int(self._scene.width), steps=[1, 2, 5, 10]))
        self._axes.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _: f"{time_s * 1e3:g}"))
        self._axes.set_xlabel("ms", fontsize=_FONT)
        self._axes.grid(axis="x", color="#dddddd", linewidth=0.5)
        self._axes.set_axisbelow(True)
        for side in ("left", "right", "top"):
            self._axes.spines[side].set_visible(False)

    def _paint_legend(self) -> None:
        from matplotlib.patches import Patch

        patches = [Patch(facecolor=group.colour, label=_cut(group.name, 40)) for group in self._colours.groups]
        patches.append(Patch(facecolor=OUTER, label="outside of these"))
        exposed = Patch(facecolor=EXPOSED, edgecolor="white", hatch="////", linewidth=0, label="exposed: compute waits")
        self._figure.legend(
            handles=[exposed, *patches], loc="lower center", ncols=min(len(patches) + 1, int(self._scene.width // 2.4)),
            fontsize=_FONT, frameon=False, handlelength=1.5, bbox_to_anchor=(0.5, 0.0),
        )  # fmt: skip

    def _paint_title(self, trace: Trace, shown: Trace, figures: dict[str, Any]) -> None:
        found = figures["run"]
        title = (
            f"step {_ms(found['step_ms'])}   overlap {found['overlap_percent']:.0f} %   "
            f"exposed {_ms(found['exposed_ms'])}"
        )
        left, top = self._scene.frame[0], 1 - 0.12 / self._scene.height
        self._figure.text(left, top, title, va="top", ha="left", fontsize=12, fontweight="bold")
        below = top - 0.27 / self._scene.height
        line = " | ".join(headline(trace, shown, [panel.rank for panel in self._scene.panels]))
        room = int((self._scene.width - 1.0) * 72 / (0.5 * _FONT))
        self._figure.text(left, below, _cut(line, room), va="top", ha="left", fontsize=_FONT, color="#444444")

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _paint_layers(self, spans: Sequence[Span], top: float, height: float, order: int) -> None:
        """Boxes in the colours of their layers, with white between them where they are not too slim for that."""
        slim_s = _SLIM / self._scene.inches_per_s
        edges = [0.0 if span.end_s - span.start_s < slim_s else 0.3 for span in spans]
        colours = [self._colours.of(span.layer) for span in spans]
        places = [(span.start_s, span.end_s) for span in spans]
        self._boxes(places, top, height, colours, edgecolor="white", linewidths=edges, zorder=order)

    def _boxes(
        self, places: Sequence[tuple[float, float]], top: float, height: float, colours: Any, **style: Any
    ) -> None:
        from matplotlib.collections import PolyCollection

        bottom = top + height
        corners = [[(start, top), (end, top), (end, bottom), (start, bottom)] for start, end in places]
        if corners:
            self._axes.add_collection(PolyCollection(corners, facecolors=colours, **style), autolim=False)

    def _label_inside(self, spans: Sequence[Span], top: float) -> bool:
        """Writes into each box the longest form of its name that fits, if some form fits into nearly all of them."""
        fitting = []
        for span in spans:
            length_s = span.end_s - span.start_s
            fitting.append(next((name for name in short_names(span.layer) if self._fits(name, _SMALL, length_s)), ""))
        if fitting.count("") > _MOST_MISSING * len(fitting):
            return False
        for span, name in zip(spans, fitting, strict=True):
            colour = "black" if is_light(self._colours.of(span.layer)) else "white"
            place = (span.start_s + span.end_s) / 2, top + self._scene.lane / 2
            self._text(*place, name, va="center", ha="center", size=_SMALL, color=colour)
        return True

    def _thinned(self, spans: Sequence[Span]) -> Iterator[tuple[float, str]]:
        """Middles and short names of as many as have room beside each other, from the left; of a row of parts one."""
        free_from_s = self._scene.start_s
        last = ("", "")
        for span in sorted(spans, key=lambda span: span.start_s):
            if (span.label, span.layer) == last:
                continue
            text = short_names(span.layer)[-1]
            middle_s = (span.start_s + span.end_s) / 2
            half_s = (self._width_of(text, _SMALL) + _APART) / 2 / self._scene.inches_per_s
            if middle_s - half_s >= free_from_s and middle_s + half_s <= self._scene.end_s:
                free_from_s = middle_s + half_s
                last = (span.label, span.layer)
                yield middle_s, text

    def _halo(self) -> list[Any]:
        from matplotlib.patheffects import withStroke

        return [withStroke(linewidth=1.6, foreground="white")]

    def _text(self, x: float, y: float, text: str, **style: Any) -> None:
        # No mathematics in the names of layers.
        self._axes.text(x, y, text, parse_math=False, zorder=5, **style)

    def _fits(self, text: str, size: float, length_s: float) -> bool:
        return self._width_of(text, size) <= _FITS * length_s * self._scene.inches_per_s

    def _width_of(self, text: str, size: float) -> float:
        """Inches."""
        from matplotlib.font_manager import FontProperties

        if (text, size) not in self._widths:
            width, _, _ = self._renderer.get_text_width_height_descent(text, FontProperties(size=size), False)
            self._widths[text, size] = float(width) / _DPI
        return self._widths[text, size]


def phases(spans: Sequence[Span]) -> list[tuple[str, float, float]]:
    """Runs of compute of one kind: label, beginning and end in seconds. All that ``step()`` does is one kind."""
    found: list[tuple[str, float, float]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        label = "step()" if span.label == "update" or span.label.startswith("step()") else span.label
        if found and found[-1][0] == label:
            found[-1] = (label, found[-1][1], max(found[-1][2], span.end_s))
        elif not found or span.end_s > found[-1][2]:
            found.append((label, max(span.start_s, found[-1][2]) if found else span.start_s, span.end_s))
    return found


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
