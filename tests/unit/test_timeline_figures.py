"""Figures of recorded steps: wrong guesses, and what is held of model state."""

from __future__ import annotations

import paddle
import pytest

from hp_sharding.gathers import passed_over
from hp_sharding.trace.figures import summary
from tests.fakes import Rig, wrap
from tests.timelines import SETTINGS, Net, record, rig_of, train_step


def test_figures_of_a_step_are_those_of_its_trace() -> None:
    rig = rig_of(**SETTINGS["stage 2"])
    trace = record(rig)
    for ours, theirs in zip(rig.optimizer.timeline.steps, summary(trace)["steps"], strict=True):
        assert ours.figures["gather_bytes"] == theirs["gather_bytes"]
        assert ours.figures["exposed_ms"] == pytest.approx(theirs["exposed_ms"])
        assert ours.figures["exposed_ms_by_layer"].keys() == theirs["exposed_ms_by_layer"].keys()


def _guesses(rig: Rig, orders: list[list[int]]) -> list[float]:
    found = []
    for order in orders:
        rig.model.order = order
        train_step(rig.model, rig.optimizer)
        steps = rig.optimizer.timeline.steps
        found.append(steps[-1].figures["wrong_guesses"] if steps else -1.0)
    return found


@pytest.mark.parametrize(
    ("started", "uses", "count"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3], 0),
        ([0, 1, 2, 3], [0, 1], 0),  # nothing that was needed had to wait for the others
        ([0, 1, 2, 3], [0, 2, 1, 3], 1),
        ([0, 1, 2, 3], [2, 1, 3, 0], 2),
        ([0, 1, 2, 3], [3, 2, 1, 0], 3),
        ([0, 2], [1, 2], 1),  # the first of them is used by nobody, another one was there already
        ([], [0, 1], 0),
    ],
)
def test_a_gather_that_has_been_passed_over_counts_once(started: list[int], uses: list[int], count: int) -> None:
    assert passed_over(started, uses) == count


_FORWARD, _SWAPPED = [0, 1, 2, 3], [0, 2, 1, 3]


@pytest.mark.parametrize("name", ["stage 1", "stage 2", "stage 2, reshard", "stage 3"])
def test_a_model_that_keeps_its_order_is_guessed_right(name: str) -> None:
    rig = rig_of(**SETTINGS[name], timeline=True, comm_fusion=True)
    assert _guesses(rig, [_FORWARD] * 5)[1:] == [0.0] * 4


@pytest.mark.parametrize("name", ["stage 1", "stage 2", "stage 2, reshard"])
def test_a_gather_that_another_one_should_have_gone_before_is_a_wrong_guess(name: str) -> None:
    rig = rig_of(**SETTINGS[name], timeline=True)
    names = [buffer.name for buffer in rig.optimizer.buffers]
    assert len({name.partition(".weight")[0] for name in names}) >= 5, "blocks must not share buckets"
    # The new order is published in the step after it was seen, for the gathers after that.
    assert _guesses(rig, [_FORWARD, _FORWARD, _SWAPPED, _SWAPPED, _SWAPPED])[1:] == [0.0, 1.0, 0.0, 0.0]


def test_units_that_nobody_foresaw_or_needed_are_wrong_guesses() -> None:
    rig = rig_of(**SETTINGS["stage 3"], timeline=True)
    found = _guesses(rig, [_FORWARD, _FORWARD, _FORWARD, [0, 1, 3], [0, 1, 3], [0, 1, 3]])
    assert found[1:3] == [0.0, 0.0]
    # Block 3 is needed while 2 was gathered in its place, which is let go unused.
    assert found[3] >= 2.0
    assert found[5] == 0.0
    # Block 0 was gathered at the end of the step before.
    assert _guesses(rig, [[1, 3]])[0] >= 2.0


@pytest.mark.parametrize("name", ["stage 2", "stage 3"])
def test_what_was_guessed_in_an_earlier_recording_is_forgotten(name: str) -> None:
    rig = rig_of(**SETTINGS[name])
    found = [record(rig).steps[-1].figures["wrong_guesses"]]
    rig.model.order = [3, 2, 1, 0]
    for _ in range(3):
        train_step(rig.model, rig.optimizer)
    found += [step.figures["wrong_guesses"] for step in record(rig).steps]
    assert found == [0.0] * 3


def test_without_gathers_ahead_nothing_is_guessed() -> None:
    for settings in ({"stage": 2}, {"stage": 3}):
        rig = rig_of(**settings, timeline=True)
        assert _guesses(rig, [_FORWARD, _FORWARD, _SWAPPED, [3, 2, 1, 0]])[1:] == [0.0] * 3, settings


@pytest.mark.parametrize("name", SETTINGS)
def test_the_peak_of_what_is_held_is_close_to_the_formula(name: str) -> None:
    model = Net(width=128)
    adam = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    rig = wrap(model, adam, comm_buffer_size_MB=0.07, **SETTINGS[name], timeline=True)
    for _ in range(3):
        model(paddle.ones([1, 128])).mean().backward()
        rig.optimizer.step()
        rig.optimizer.clear_grad()
    figures = rig.optimizer.timeline.summary()
    assert figures["formula_bytes"] == rig.optimizer.memory_report()["formula_bytes"]
    if name != "stage 2, no overlap":  # which holds all gradients at the end of a backward
        assert figures["peak_bytes"] == pytest.approx(figures["formula_bytes"], rel=0.05)
    assert figures["peak_bytes"] >= rig.pool.allocated_bytes


@pytest.mark.parametrize("n_steps_before", [0, 2])
def test_the_first_recorded_step_knows_what_is_held(n_steps_before: int) -> None:
    """Also where it is the first of all, which makes the moments."""
    rig = rig_of(**SETTINGS["stage 2"])
    for _ in range(n_steps_before):
        train_step(rig.model, rig.optimizer)
    first, second = (step.figures["peak_bytes"] for step in record(rig).steps)
    assert first == second > 0
