"""Pictures of traces: what is in them, and that every text in them can be read."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from hp_sharding.errors import ConfigError
from hp_sharding.trace import picture
from hp_sharding.trace.colours import EXPOSED, MOST_GROUPS, OUTER, Colours, is_light, short_names
from hp_sharding.trace.headline import headline
from hp_sharding.trace.spans import Span, Step, Trace
from tests.harness import REPO_ROOT
from tests.traces import Run, make

_OVERLAP_PX = 0.5


def _texts(figure: Figure) -> Iterator[tuple[str, Any]]:
    """All that is written, and where."""
    figure.draw_without_rendering()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    beyond = [tick.label1 for tick in axes.xaxis.get_major_ticks() if not low <= tick.get_loc() <= high]
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_visible() and text.get_text().strip() and text not in beyond:
            yield text.get_text(), text.get_window_extent()


def _overlapping(figure: Figure) -> list[tuple[str, str]]:
    return [
        (one, other)
        for (one, box), (other, place) in itertools.combinations(_texts(figure), 2)
        if min(box.x1, place.x1) - max(box.x0, place.x0) > _OVERLAP_PX
        and min(box.y1, place.y1) - max(box.y0, place.y0) > _OVERLAP_PX
    ]


def _boxes(figure: Figure, colour: str) -> list[tuple[float, float, float, float]]:
    """Left, right, top and bottom of what is painted in a colour that nothing shines through."""
    (axes,) = figure.axes
    found = []
    for boxes in axes.findobj(PolyCollection):
        faces = itertools.cycle(to_hex(face) for face in boxes.get_facecolor())
        for path, face in zip(boxes.get_paths(), faces, strict=False):
            corners = np.asarray(path.vertices)
            (left, top), (right, bottom) = corners.min(axis=0), corners.max(axis=0)
            found += [(left, right, top, bottom)] if face == colour and boxes.get_alpha() is None else []
    return sorted(found)


@pytest.mark.parametrize(
    "run",
    [
        Run(n_layers=8, n_ranks=2, gather_ms=14),
        Run(n_layers=8, n_ranks=2, replicas=2, gather_ms=12, slow_rank=3),
        Run(n_layers=64, n_ranks=1, n_steps=1),
        Run(n_layers=64, n_ranks=2, n_steps=3, gather_ms=12),
        Run(n_layers=3, n_ranks=8, n_steps=1, forward_ms=1000),
    ],
    ids=["8 layers", "2 x 2", "64 layers", "64 layers, 3 steps", "8 ranks"],
)
def test_no_text_lies_on_another_one_or_outside(run: Run) -> None:
    figure = picture.painted(make(run))
    assert _overlapping(figure) == []
    width, height = figure.canvas.get_width_height()
    for text, box in _texts(figure):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
    ranks = [text for text, _ in _texts(figure) if text.startswith("rank ")]
    assert len(ranks) == run.world


def test_layers_are_named_in_their_boxes_or_above_them() -> None:
    few = [text for text, _ in _texts(picture.painted(make(Run(n_layers=8, n_steps=1, n_ranks=1))))]
    assert {f"blocks.{number}" for number in range(8)} <= set(few)
    many = [text for text, _ in _texts(picture.painted(make(Run(n_layers=64, n_steps=1, n_ranks=1))))]
    # In the backward all of them, which takes twice as long; in the forward as many as there is room for.
    assert {str(number) for number in range(64)} <= set(many)
    assert sum(text.isdigit() for text in many) > 64 + 64 + 64 / 3
    assert {"forward", "backward", "step()"} <= set(many)


def test_exposed_time_has_a_colour_of_its_own_and_its_true_length() -> None:
    trace = make(Run(n_layers=4, n_ranks=1, n_steps=2, gather_ms=14))
    figure = picture.painted(trace)
    waits = sorted((span.start_s, span.end_s) for span in trace.spans if span.lane == "wait")
    assert [box[:2] for box in _boxes(figure, EXPOSED)] == waits
    assert EXPOSED not in {group.colour for group in Colours(trace).groups}


def test_a_layer_has_one_colour_on_all_lanes() -> None:
    trace = make(Run(n_layers=4, n_ranks=1, n_steps=2))
    colours = Colours(trace)
    assert [group.layers for group in colours.groups] == [(f"blocks.{number}",) for number in range(4)]
    assert len({group.colour for group in colours.groups}) == 4
    # The last gathers begin after the last step.
    end_s = trace.steps[-1].end_s
    mine = [span for span in trace.spans if span.layer == "blocks.2" and span.lane != "wait"]
    spans = [span for span in mine if span.start_s < end_s]
    assert len(spans) == len(mine) - 1
    assert len(_boxes(picture.painted(trace), colours.of("blocks.2"))) == len(spans)


def test_many_layers_share_colours_with_their_neighbours() -> None:
    colours = Colours(make(Run(n_layers=61, n_steps=1)))
    assert len(colours.groups) == 9 <= MOST_GROUPS
    assert [layer for group in colours.groups for layer in group.layers] == [f"blocks.{number}" for number in range(61)]
    assert colours.groups[0].name == "blocks.0 to blocks.6"
    assert colours.of("blocks.7..blocks.20") == colours.of("blocks.7") != colours.of("blocks.6")
    assert [is_light(group.colour) for group in colours.groups] == sorted(
        (is_light(group.colour) for group in colours.groups), reverse=True
    )


def test_what_holds_other_layers_is_grey() -> None:
    spans = [
        Span(0, "compute", "forward", 0.0, 0.9, 0, "outer"),
        Span(0, "compute", "forward", 0.1, 0.4, 0, "outer.a"),
        Span(0, "compute", "forward", 0.4, 0.8, 0, "outer.b"),
        Span(0, "compute", "forward", 0.9, 1.0, 0, "Net"),
    ]
    colours = Colours(Trace(spans, [], {"model": "Net"}))
    assert [group.layers for group in colours.groups] == [("outer.a",), ("outer.b",)]
    assert colours.of("outer") == colours.of("Net") == OUTER


def test_what_goes_on_again_and_again_between_others_is_grey_too() -> None:
    def forward(*layers: str) -> Trace:
        return Trace([Span(0, "compute", "forward", at, at + 1, 0, layer) for at, layer in enumerate(layers)])

    model = forward("Net", "a", "Net", "b", "Net", "b", "a", "Net")
    assert [group.name for group in Colours(model).groups] == ["a", "b"]
    # So often that only a forward is meant: in the backward and in step() parts of layers take turns.
    others = [span._replace(label="backward") for span in model.spans if span.layer != "Net"]
    assert len(Colours(Trace(others * 3)).groups) == 2
    # A wait cuts a layer's compute in two.
    assert [group.name for group in Colours(forward("a", "a", "a", "b")).groups] == ["a", "b"]


def test_without_compute_the_buckets_give_the_layers() -> None:
    spans = [Span(0, "gather", "1:b", 0.0, 1.0, 8, "b"), Span(0, "gather", "0:a", 1.0, 2.0, 8, "a")]
    buckets = [{"name": "0:a", "layer": "a", "nbytes": 8}]
    assert [group.name for group in Colours(Trace(spans, [], {"buckets": buckets})).groups] == ["a", "b"]


def test_what_is_carried_and_does_not_compute_has_its_place_in_the_model() -> None:
    spans = [Span(0, "compute", "forward", at, at + 1.0, 0, layer) for at, layer in enumerate(("b", "a"))]
    names = ("embed", "b", "b..a", "norm", "a", "head")
    buckets = [{"name": f"{number}:{name}", "layer": name, "nbytes": 8} for number, name in enumerate(names)]
    groups = Colours(Trace(spans, [], {"buckets": buckets})).groups
    assert [group.name for group in groups] == ["embed", "b", "norm", "a", "head"]


def test_short_names() -> None:
    assert short_names("gpt.blocks.3") == ["gpt.blocks.3", "3"]
    assert short_names("blocks.3..blocks.5") == ["blocks.3..blocks.5", "3..5", "3"]
    assert short_names("head") == ["head"]


def test_of_many_ranks_the_first_and_the_one_that_computes_longest_are_drawn() -> None:
    figure = picture.painted(make(Run(n_layers=2, n_ranks=9, n_steps=1, slow_rank=5)))
    written = [text for text, _ in _texts(figure)]
    assert [text.partition(":")[0] for text in written if text.startswith("rank ")] == [
        "rank 0", "rank 5, computes longest"
    ]  # fmt: skip
    assert any("ranks 0 and 5, the first and the one that computes longest, of 9" in text for text in written)


def test_of_many_steps_the_first_are_drawn_or_those_that_were_asked_for() -> None:
    trace = make(Run(n_layers=2, n_ranks=1, n_steps=5))
    written = " ".join(text for text, _ in _texts(picture.painted(trace)))
    assert "median of steps 0 to 2 of 5 recorded" in written
    assert "step 3" not in written
    assert "step 4: " in " ".join(text for text, _ in _texts(picture.painted(trace, [4])))


def test_the_title_has_the_figures() -> None:
    trace = make(Run(n_layers=2, n_ranks=1, n_steps=1, forward_ms=10, gather_ms=30))
    # Both reductions take 60 ms, of which 20 + 20 ms of backward hide all but 40 ms before the last one ends.
    title = next(text for text, _ in _texts(picture.painted(trace)) if "overlap" in text)
    assert title == "step 102 ms   overlap 33 %   exposed 40 ms"


def test_spans_side_by_side_on_a_lane_lie_below_each_other() -> None:
    spans = [Span(0, "gather", "a", 0.0, 0.6, 1, "a"), Span(0, "gather", "b", 0.4, 1.0, 1, "b")]
    trace = Trace(spans, [Step(0, 0, 0.0, 1.0, {})])
    colours = Colours(trace)
    figure = picture.painted(trace)
    (one,), (other,) = (_boxes(figure, colours.of(layer)) for layer in ("a", "b"))
    assert (one[:2], other[:2]) == ((0.0, 0.6), (0.4, 1.0))
    assert one[3] <= other[2]


def test_headline_says_how_it_was_run() -> None:
    trace = make(Run(n_layers=1, n_ranks=2, replicas=2, n_steps=2))
    trace.about["clock"]["uncertainty_s"] = 12e-6
    assert headline(trace, trace, trace.ranks) == [
        "median of steps 0 to 1", "4 ranks, 2 replicas", "stage 2", "cpu", "2026-05-04 12:00:00",
        "clocks agree within 0.012 ms", "simulated",
    ]  # fmt: skip
    assert headline(Trace(), Trace(), []) == ["no whole step", "0 ranks"]


def test_it_is_a_png_file(tmp_path: Path) -> None:
    picture.draw(make(Run(n_layers=2, n_steps=1)), tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing to draw: the trace has steps \[\], none of \[\]"):
        picture.draw(Trace(), tmp_path / "trace.png")
    with pytest.raises(ConfigError, match=r"the trace has steps \[0, 1\], none of \[7\]"):
        picture.draw(make(Run(n_layers=1)), tmp_path / "trace.png", steps=[7])
    with pytest.raises(ConfigError, match=r"cannot be written to .*nowhere"):
        picture.draw(make(Run(n_layers=1, n_steps=1)), tmp_path / "nowhere" / "trace.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'hp_sharding\[plot\]'"):
        picture.draw(make(Run(n_layers=1)), tmp_path / "trace.png")


def test_it_leaves_the_users_backend_alone(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.traces import Run, make; from hp_sharding.trace.picture import draw\n"
        f"draw(make(Run(n_layers=1, n_steps=1)), {str(tmp_path / 'a.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "import matplotlib; assert matplotlib.rcParams._get_backend_or_none() is None\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, check=True)


def test_a_picture_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.png"
    path.write_bytes(b"before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(ConfigError, match=r"cannot be written to .*: No space left on device"):
        picture.draw(make(Run(n_layers=1, n_steps=1)), path)
    assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [("trace.png", b"before")]
