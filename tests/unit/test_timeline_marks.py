"""What compute was at, from marks that the test sets."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hp_sharding.comm import Mark
from hp_sharding.timeline.marks import SCRIPT, ComputeMarks, Tile, tiles, without


class _Mark(Mark):
    """A mark of a clock that goes on by one each time it is read."""

    now_s = 0.0
    n_settled = 0

    def renew(self) -> None:
        type(self).now_s += 1.0
        self.time_s = self.now_s

    def settle(self) -> None:
        type(self).n_settled += 1


@pytest.fixture
def marks() -> ComputeMarks:
    _Mark.now_s, _Mark.n_settled = 0.0, 0
    return ComputeMarks(_Mark)


def _taken(marks: ComputeMarks, *, start_s: float = 0.0, end_s: float = 100.0) -> list[Tile]:
    before, entries = marks.take()
    return tiles(before, entries, start_s=start_s, end_s=end_s, whole="Net")


def test_a_forward_inside_another_one_interrupts_it(marks: ComputeMarks) -> None:
    marks.enter("forward", "Net")
    marks.enter("forward", "blocks.0")
    marks.leave()
    marks.leave()
    assert _taken(marks) == [
        Tile(0, 1, SCRIPT, ""), Tile(1, 2, "forward", "Net"), Tile(2, 3, "forward", "blocks.0"),
        Tile(3, 4, "forward", "Net"), Tile(4, 100, SCRIPT, ""),
    ]  # fmt: skip


def test_a_backward_is_named_by_the_gradients_that_come_in(marks: ComputeMarks) -> None:
    marks.enter("backward", None)
    for layer in ("blocks.1", "blocks.1", "blocks.0"):
        marks.until(layer)
    marks.reset()
    assert _taken(marks) == [
        Tile(0, 1, SCRIPT, ""), Tile(1, 3, "backward", "blocks.1"), Tile(3, 4, "backward", "blocks.0"),
        Tile(4, 5, "backward", "Net"), Tile(5, 100, SCRIPT, ""),
    ]  # fmt: skip


def test_recompute_lies_inside_the_backward_that_asks_for_it(marks: ComputeMarks) -> None:
    marks.enter("backward", None)
    marks.enter("recompute", "blocks.0")
    marks.leave()
    marks.until("blocks.0")
    marks.reset()
    assert [tile[2:] for tile in _taken(marks)] == [
        (SCRIPT, ""), ("backward", "blocks.0"), ("recompute", "blocks.0"), ("backward", "blocks.0"),
        ("backward", "Net"), (SCRIPT, ""),
    ]  # fmt: skip


def test_where_the_begin_of_a_backward_is_known_no_gradient_names_it(marks: ComputeMarks) -> None:
    marks.switch("backward", "nobody")
    marks.enter("backward", None)
    marks.switch("backward", "blocks.1")
    marks.until("blocks.2")
    marks.switch("backward", "blocks.0")
    marks.reset()
    assert [tile[2:] for tile in _taken(marks)] == [
        (SCRIPT, ""), ("backward", "blocks.2"), ("backward", "blocks.1"), ("backward", "blocks.0"), (SCRIPT, ""),
    ]  # fmt: skip


def test_what_is_under_way_goes_on_in_the_next_step(marks: ComputeMarks) -> None:
    marks.enter("forward", "Net")
    assert _taken(marks, end_s=10.0)[-1] == Tile(1, 10, "forward", "Net")
    marks.leave()
    assert _taken(marks, start_s=1.5) == [Tile(1.5, 2, "forward", "Net"), Tile(2, 100, SCRIPT, "")]


def test_more_ends_than_beginnings_do_no_harm(marks: ComputeMarks) -> None:
    marks.leave()
    marks.reset()
    assert _taken(marks) == [Tile(0, 100, SCRIPT, "")]


def test_a_mark_is_settled_once_and_not_moved_after_that(marks: ComputeMarks) -> None:
    marks.enter("backward", None)
    marks.until("blocks.1")
    marks.until("blocks.1")
    assert _Mark.n_settled == 1
    marks.take()
    assert _Mark.n_settled == 2
    marks.until("blocks.1")
    assert _taken(marks, start_s=3.0)[0] == Tile(3, 4, "backward", "blocks.1")


def test_waits_are_cut_out() -> None:
    parts = [Tile(0, 10, "forward", "a"), Tile(10, 20, "forward", "b"), Tile(20, 21, "forward", "c")]
    waits = [(1.0, 2.0), (8.0, 12.0), (15.0, 16.0), (20.0, 21.0)]
    left = list(without(parts, waits))
    assert [(tile.start_s, tile.end_s) for tile in left] == [(0, 1), (2, 8), (12, 15), (16, 20)]
    assert [tile.layer for tile in left] == ["a", "a", "b", "b"]
    assert list(without(parts, [])) == parts
    assert list(without(parts, [(-5.0, 30.0)])) == []


def test_tiles_lie_side_by_side_whatever_the_marks_say() -> None:
    """A device's marks may be seen late: after the end of the step, or in another order."""
    marks = ComputeMarks(Mark)
    marks.enter("forward", "a")
    marks.enter("forward", "b")
    marks.leave()
    before, entries = marks.take()
    for entry, time_s in zip(entries, (3.0, 2.0, 50.0), strict=True):
        entry.mark.time_s = time_s
    found = tiles(before, entries, start_s=1.0, end_s=5.0, whole="Net")
    assert (found[0].start_s, found[-1].end_s) == (1.0, 5.0)
    assert all(one.end_s == other.start_s for one, other in pairwise(found))
