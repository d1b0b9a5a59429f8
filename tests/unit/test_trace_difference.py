"""What changed between two traces, and which ones cannot be compared."""

from __future__ import annotations

import dataclasses

import pytest

from hp_sharding.errors import ConfigError
from hp_sharding.trace.difference import compare
from hp_sharding.trace.spans import Span, Step, Trace
from tests.traces import Run, make

RUN = Run(n_layers=4, n_ranks=2, n_steps=3, forward_ms=10, gather_ms=8)


def _other_layers(trace: Trace, prefix: str) -> Trace:
    spans = [span._replace(layer=span.layer.replace("blocks", prefix)) for span in trace.spans]
    return dataclasses.replace(trace, spans=spans)


def test_nothing_changed() -> None:
    found = compare(make(RUN), make(RUN))
    assert (found.changes, found.notes) == ([], [])
    assert found.verdict == "a step takes the same time in both"


def test_a_slower_link_shows_in_lanes_waits_and_the_step() -> None:
    slower = RUN._replace(gather_ms=24)
    found = compare(make(RUN), make(slower))
    first, *_ = found.changes
    step, exposed, compute = found.of("step"), found.of("exposed"), found.of("compute")
    assert first == step
    assert step is not None and exposed is not None and compute is None
    # What compute does not do is waited for: all of the change is exposed.
    assert step.change_ms == pytest.approx(exposed.change_ms)
    assert step.change_ms > 0
    lane = found.of("lane", "reduce")
    assert lane is not None
    assert (lane.before_ms, lane.after_ms, lane.percent) == pytest.approx((32, 96, 200))
    layer = found.of("reduce", "blocks.2")
    assert layer is not None
    assert (layer.before_ms, layer.after_ms) == pytest.approx((8, 24))
    # Waits by layer add up to all that is exposed.
    waits = [change.change_ms for change in found.of_layers if change.kind == "wait"]
    assert sum(waits) == pytest.approx(exposed.change_ms)
    assert found.verdict.startswith(f"a step takes {step.change_ms:.3g} ms longer: ")
    assert f"exposed {exposed.change_ms:+.3g} ms" in found.verdict


def test_a_slower_layer_shows_in_its_phases() -> None:
    trace = make(RUN)
    spans = [
        span._replace(end_s=span.end_s + 3e-3) if (span.label, span.layer) == ("forward", "blocks.1") else span
        for span in make(RUN).spans
    ]
    found = compare(trace, dataclasses.replace(trace, spans=spans))
    change = found.of("forward", "blocks.1")
    assert change is not None
    assert change.change_ms == pytest.approx(3)
    assert [each.kind for each in found.of_layers] == ["forward"]


def test_a_part_of_a_step_that_is_of_no_layer_is_named_once() -> None:
    traces = []
    for end_s in (0.002, 0.005):
        trace = Trace([Span(0, "compute", "step()", 0.0, end_s)], [Step(0, 1, 0.0, end_s, {})])
        traces.append(trace)
    assert [change.what for change in compare(*traces).of_layers] == ["step()"]


def test_the_largest_changes_come_first() -> None:
    changes = compare(make(RUN), make(RUN._replace(gather_ms=20, forward_ms=11))).changes
    sizes = [abs(change.change_ms) for change in changes[1:]]
    assert sizes == sorted(sizes, reverse=True)


def test_what_only_one_has_is_new_or_gone() -> None:
    found = compare(make(RUN), make(RUN._replace(n_layers=5)))
    new = found.of("backward", "blocks.4")
    assert new is not None
    assert (new.before_ms, new.after_ms, new.percent) == pytest.approx((0, 20, 0))
    assert found.notes == ["only the second has blocks.4"]


def test_what_was_not_run_alike_is_noted() -> None:
    one, other = make(RUN), make(RUN._replace(replicas=2))
    other.about["config"]["stage"] = 3
    other.about["simulated"] = False
    assert compare(one, other).notes == [
        "not run alike: nranks 2 and 4, replicas 1 and 2, stage 2 and 3", "the first one is simulated"
    ]  # fmt: skip


def test_models_with_nothing_in_common_are_not_compared() -> None:
    with pytest.raises(ConfigError) as raised:
        compare(make(RUN._replace(n_layers=8)), _other_layers(make(RUN), "stages"))
    said = (
        "blocks.0, blocks.1, blocks.2, blocks.3, blocks.4 and 3 more, the other stages.0, stages.1, stages.2, stages.3"
    )
    assert f"no layer in common: one has {said}" in str(raised.value)


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_trace_without_steps_is_not_compared(which: str) -> None:
    traces = (Trace(), make(RUN)) if which == "first" else (make(RUN), Trace())
    with pytest.raises(ConfigError, match=f"the {which} trace has no whole step"):
        compare(*traces)


def test_it_can_be_said_in_json() -> None:
    data = compare(make(RUN), make(RUN._replace(gather_ms=24))).as_data()
    assert set(data) == {"verdict", "notes", "changes"}
    assert set(data["changes"][0]) == {"kind", "name", "before_ms", "after_ms", "change_ms", "percent"}
