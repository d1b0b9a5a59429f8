"""Where a picture of a trace has what, in inches, before anything is painted."""

from __future__ import annotations

from typing import NamedTuple

from .colours import PASSES
from .figures import summary
from .spans import LANES, Trace

MOST_RANKS = 8
"""Drawn; of more, the first and the one that computes longest."""
_ALWAYS = ("compute", "gather", "reduce", "wait")
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.8, 0.25, 0.62, 0.95
_LEAST_WIDTH, _MOST_WIDTH = 13.0, 22.0
_BOX = 0.085
"""What a layer's forward should have at least."""
_LANE, _LANE_GAP, _STRIP = 0.24, 0.04, 0.16
_STEP_HEAD, _RANK_HEAD, _RANK_GAP = 0.2, 0.2, 0.3


class Panel(NamedTuple):
    """One rank. Distances from above.

    Attributes:
        rank: which one.
        top: where its heading is.
        phases_top: where the names of phases are.
        lanes: by name, where each begins.
        bottom: of the last one.
    """

    rank: int
    top: float
    phases_top: float
    lanes: dict[str, float]
    bottom: float

    @property
    def lanes_top(self) -> float:
        """Where the first one begins."""
        return next(iter(self.lanes.values()))


class Scene(NamedTuple):
    """The whole picture.

    Attributes:
        width: with margins.
        height: likewise.
        depth: without margins.
        start_s: at the left.
        end_s: at the right.
        panels: from above.
        lane: height of a lane.
        strip: height of a line of text above compute.
    """

    width: float
    height: float
    depth: float
    start_s: float
    end_s: float
    panels: list[Panel]
    lane: float = _LANE
    strip: float = _STRIP

    @property
    def frame(self) -> tuple[float, float, float, float]:
        """Left, bottom, width and height of what is between the margins, as shares of the whole."""
        across, down = self.width - _LEFT - _RIGHT, self.depth
        return _LEFT / self.width, _BOTTOM / self.height, across / self.width, down / self.height

    @property
    def inches_per_s(self) -> float:
        """Scale."""
        return (self.width - _LEFT - _RIGHT) / (self.end_s - self.start_s)


def lay_out(shown: Trace) -> Scene:
    """Room for all that is to be drawn, which has a step at least."""
    lanes = [lane for lane in LANES if lane in _ALWAYS or any(span.lane == lane for span in shown.spans)]
    panels: list[Panel] = []
    at = _STEP_HEAD
    for rank in ranks_to_draw(shown):
        phases_top = at + _RANK_HEAD
        # Two lines above compute: phases, and names of layers that have no room in their boxes.
        first = phases_top + 2 * _STRIP
        tops = {lane: first + number * (_LANE + _LANE_GAP) for number, lane in enumerate(lanes)}
        bottom = first + len(lanes) * (_LANE + _LANE_GAP) - _LANE_GAP
        panels.append(Panel(rank, at, phases_top, tops, bottom))
        at = bottom + _RANK_GAP
    start_s = min(step.start_s for step in shown.steps)
    end_s = max(max(step.end_s for step in shown.steps), start_s + 1e-6)
    return Scene(_width(shown, end_s - start_s), at + _TOP + _BOTTOM, at, start_s, end_s, panels)


def ranks_to_draw(shown: Trace) -> list[int]:
    """All, up to ``MOST_RANKS``; of more the first, and the one that computes longest."""
    if len(shown.ranks) <= MOST_RANKS:
        return shown.ranks
    return sorted({shown.ranks[0], summary(shown)["slowest_rank"]})


def _width(shown: Trace, length_s: float) -> float:
    """So that a usual forward of a layer can be told from its neighbours, within bounds."""
    passes = [span for span in shown.spans if span.lane == "compute" and span.label in PASSES]
    lengths = sorted(span.end_s - span.start_s for span in passes)
    usual_s = lengths[len(lengths) // 4] if lengths else length_s
    wanted = _BOX * length_s / max(usual_s, 1e-9)
    return min(max(wanted + _LEFT + _RIGHT, _LEAST_WIDTH), _MOST_WIDTH)
