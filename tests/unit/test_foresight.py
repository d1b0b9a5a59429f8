"""Learned successors: what is expected next, and what a model that alternates is expected to do."""

from __future__ import annotations

from hp_sharding.foresight import MAX_TURN, Foresight, Phase

F, E, B = Phase.FORWARD, Phase.EVALUATE, Phase.BACKWARD


def _forward(foresight: Foresight, units: list[int], phase: Phase = F) -> None:
    foresight.begin_forward()
    for unit in units:
        foresight.note(phase, unit)


def _step(foresight: Foresight, forwards: list[list[int]], backward: list[int]) -> None:
    for units in forwards:
        _forward(foresight, units)
    for unit in backward:
        foresight.note(B, unit)
    foresight.begin()


def test_nothing_is_expected_at_first() -> None:
    foresight = Foresight()
    foresight.note(F, 0)
    assert foresight.ahead(3) == []
    assert foresight.wrong_guesses == 0


def test_the_next_units_are_those_of_the_last_time() -> None:
    foresight = Foresight()
    _step(foresight, [[0, 1, 2]], [2, 1, 0])
    assert foresight.ahead(2) == [0, 1], "at the beginning of a step"
    foresight.begin_forward()
    foresight.note(F, 0)
    assert foresight.ahead(1) == [1]
    foresight.note(F, 1)
    foresight.note(F, 2)
    assert foresight.ahead(1) == [2], "what comes next is its own backward"
    assert foresight.ahead(1, in_use={2}) == [2, 1]
    foresight.note(B, 2)
    foresight.note(B, 1)
    assert foresight.ahead(5) == [0], "nothing beyond the end of the backward"


def test_units_in_use_do_not_count_but_are_named() -> None:
    foresight = Foresight()
    _step(foresight, [[0, 1, 0, 2, 3]], [])
    foresight.begin_forward()
    foresight.note(F, 0)
    assert foresight.ahead(1, in_use={0}) == [1]
    assert foresight.ahead(2, in_use={0}) == [1, 0, 2]
    assert foresight.ahead(0, in_use={0}) == []


def test_a_unit_used_twice_has_two_uses() -> None:
    foresight = Foresight()
    for _ in range(2):
        _step(foresight, [[0, 5, 1, 5, 2]], [])
    foresight.begin_forward()
    for unit, expected in [(0, 5), (5, 1), (1, 5), (5, 2)]:
        foresight.note(F, unit)
        assert foresight.ahead(1) == [expected]
    assert foresight.wrong_guesses == 0


def test_several_forwards_are_told_apart() -> None:
    foresight = Foresight()
    for _ in range(2):
        _step(foresight, [[0, 1], [0, 1]], [1, 0])
    assert foresight.wrong_guesses == 0
    _forward(foresight, [0, 1])
    assert foresight.ahead(1) == [0], "the second forward"
    _forward(foresight, [0, 1])
    assert foresight.ahead(1) == [1], "the backward"


def test_evaluation_between_steps_spoils_no_guess() -> None:
    foresight = Foresight()
    for step in range(6):
        if step % 2:
            for _ in range(3):
                _forward(foresight, [0, 1, 2], E)
            foresight.begin()
        before = foresight.wrong_guesses
        _step(foresight, [[0, 1, 2]], [2, 1, 0])
        assert foresight.wrong_guesses - before <= 1, "only which of both comes first"
    _forward(foresight, [0, 1])
    assert foresight.ahead(1) == [2]


def test_a_wrong_guess_is_counted_and_corrected() -> None:
    foresight = Foresight()
    _step(foresight, [[0, 1]], [])
    _step(foresight, [[0, 2]], [])
    assert foresight.wrong_guesses == 1
    _forward(foresight, [0])
    assert foresight.ahead(1) == [2]


def test_a_long_loop_does_not_grow() -> None:
    foresight = Foresight()
    for _ in range(5 * MAX_TURN):
        _forward(foresight, [0, 1, 2], E)
    assert len(foresight._next) <= 3 * (MAX_TURN + 2)
    _forward(foresight, [0], E)
    assert foresight.ahead(1) == [1]


def test_a_loop_of_guesses_ends() -> None:
    foresight = Foresight()
    for _ in range(5 * MAX_TURN):
        _forward(foresight, [0], E)
    assert foresight.ahead(4) == [0]
