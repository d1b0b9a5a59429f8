"""One colour for a layer, wherever it appears: neighbours share one where there are many.

Light to dark in the order of the layers, from yellow over green to blue; what is exposed is orange, which no kind of
colour blindness takes for any of them, and hatched besides.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .spans import COLLECTIVES, Span, Trace

PASSES = ("forward", "backward")
"""Labels of compute that belongs to layers, in the order of a step."""
MOST_GROUPS = 10
EXPOSED = "#d55e00"
OUTER = "#d9d9d9"
"""For what holds other layers, and for what is no layer of the model."""
_SCALE = ("#e8eb9a", "#bfe0a0", "#8fd0ac", "#5dbdb8", "#3ba3be", "#2f83b8", "#2b5fa5", "#243b7a", "#141d52")
_LIGHT = 0.5
_OFTEN = 3
_JOINT = ".."


class Group(NamedTuple):
    """Layers of one colour.

    Attributes:
        layers: in order.
        colour: as ``#rrggbb``.
    """

    layers: tuple[str, ...]
    colour: str

    @property
    def name(self) -> str:
        """For a legend."""
        return self.layers[0] if len(self.layers) == 1 else f"{self.layers[0]} to {self.layers[-1]}"


class Colours:
    """Of all layers of a trace.

    Attributes:
        groups: in the order of the model.
    """

    def __init__(self, trace: Trace) -> None:
        layers = layers_in_order(trace)
        size = -(-len(layers) // MOST_GROUPS)
        parts = [tuple(layers[at : at + size]) for at in range(0, len(layers), size or 1)]
        self.groups = [Group(part, _shade(number, len(parts))) for number, part in enumerate(parts)]
        self._by_layer = {layer: group.colour for group in self.groups for layer in group.layers}

    def of(self, layer: str) -> str:
        """Of several layers joined by "..", that of the first one."""
        return self._by_layer.get(layer) or self._by_layer.get(layer.split(_JOINT)[0], OUTER)


def layers_in_order(trace: Trace) -> list[str]:
    """Those that compute, as their forwards begin, without those that hold others; and those of buckets only."""
    outer = outer_layers(trace)
    first: dict[str, float] = {}
    for span in trace.spans:
        if span.lane == "compute" and span.label in PASSES and span.layer and span.layer not in outer:
            first[span.layer] = min(span.start_s, first.get(span.layer, span.start_s))
    found = sorted(first, key=lambda layer: first[layer])
    carried = _carried(trace)
    for number, layer in enumerate(carried):
        if layer not in found:
            # Before the next bucket's layer: buckets are in the order of the model.
            later = [found.index(other) for other in carried[number + 1 :] if other in first]
            found.insert(later[0] if later else len(found), layer)
    return found


def _carried(trace: Trace) -> list[str]:
    """Layers of buckets, and of what was carried or waited for, without those of several joined."""
    buckets = trace.about.get("buckets")
    named = [bucket.get("layer") for bucket in buckets if isinstance(bucket, dict)] if isinstance(buckets, list) else []
    layers = [layer for layer in named if isinstance(layer, str)]
    layers += [span.layer for span in trace.spans if span.lane in COLLECTIVES]
    return [layer for layer in dict.fromkeys(layers) if layer and _JOINT not in layer]


def outer_layers(trace: Trace) -> set[str]:
    """The model itself, and layers that others are parts of.

    These compute while another one does, or go on once and again in a forward when another one is over.
    """
    found = {trace.about["model"]} if isinstance(trace.about.get("model"), str) else set()
    compute = [span for span in trace.spans if span.lane == "compute" and span.layer]
    for rank in trace.ranks:
        spans = sorted((span for span in compute if span.rank == rank), key=lambda span: (span.start_s, -span.end_s))
        found |= _enclosing([span for span in spans if span.label in PASSES])
        for is_forward, run in itertools.groupby(spans, key=lambda span: span.label == PASSES[0]):
            found |= _recurring(span.layer for span in run) if is_forward else set()
    return found


def _enclosing(spans: Iterable[Span]) -> set[str]:
    found = set()
    outside: list[Span] = []
    for span in spans:
        while outside and outside[-1].end_s <= span.start_s:
            outside.pop()
        found |= {other.layer for other in outside if other.end_s >= span.end_s and other.layer != span.layer}
        outside.append(span)
    return found


def _recurring(layers: Iterable[str]) -> set[str]:
    """Those that come back often: twice is what a layer does that is used twice."""
    runs = Counter(layer for layer, _ in itertools.groupby(layers))
    return {layer for layer, count in runs.items() if count >= _OFTEN}


def short_names(layer: str) -> list[str]:
    """A layer's name and shorter forms of it, longest first: "blocks.3", "3"; "blocks.3..blocks.5", "3..5"."""
    parts = layer.split(_JOINT)
    last = [part.rsplit(".", 1)[-1] for part in parts]
    return list(dict.fromkeys([layer, _JOINT.join(last), last[0]]))


def is_light(colour: str) -> bool:
    """Whether black text is legible on it, and white is not."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > _LIGHT


def _shade(number: int, count: int) -> str:
    """Evenly over the scale."""
    at = number / max(count - 1, 1) * (len(_SCALE) - 1)
    low = min(int(at), len(_SCALE) - 2)
    return _mixed(_SCALE[low], _SCALE[low + 1], at - low)


def _mixed(one: str, other: str, share: float) -> str:
    channels: Sequence[int] = [
        round((1 - share) * int(one[at : at + 2], 16) + share * int(other[at : at + 2], 16)) for at in (1, 3, 5)
    ]
    return "#" + "".join(f"{channel:02x}" for channel in channels)
