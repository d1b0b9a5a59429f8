"""Clocks that are set wrong, or go wrong, and what meetings tell of them."""

from __future__ import annotations

import random

import pytest

from hp_sharding.timeline.clocks import ClockMap, Reading, about_clocks, clock_map, read_clock
from hp_sharding.timeline.meeting import Meeting, Round

_LATE_S = 0.002
"""A rank may come so late to a meeting, and hear so late that all have come."""


def _meetings(rng: random.Random, *, at_s: float, n_rounds: int = 12) -> list[tuple[Round, Round]]:
    """Of two ranks, by the true time: each leaves after both have entered."""
    found = []
    for number in range(n_rounds):
        enters = [at_s + 0.01 * number + rng.uniform(0, _LATE_S) for _ in range(2)]
        exits = [max(enters) + rng.uniform(1e-5, _LATE_S) for _ in range(2)]
        found.append((Round(enters[0], exits[0]), Round(enters[1], exits[1])))
    return found


def _reading(rounds: list[Round], *, offset_s: float = 0.0, drift: float = 0.0, host: str = "") -> Reading:
    """By a clock that is ahead by ``offset_s`` at 0 and goes wrong by ``drift``."""
    return Reading(host, [Round(*(time_s + offset_s + drift * time_s for time_s in each)) for each in rounds])


@pytest.mark.parametrize("seed", range(20))
def test_an_offset_is_found_to_within_what_is_said(seed: int) -> None:
    rng = random.Random(seed)
    offset_s = rng.uniform(-1e5, 1e5)
    rounds = [_meetings(rng, at_s=at_s) for at_s in (0.0, 5.0)]
    first = [_reading([own for own, _ in each]) for each in rounds]
    mine = [_reading([other for _, other in each], offset_s=offset_s) for each in rounds]
    found = clock_map(mine, first)
    assert 0 < found.uncertainty_s < _LATE_S / 2
    for true_s in (0.0, 2.5, 5.0):
        assert found.map(true_s + offset_s) == pytest.approx(true_s, abs=found.uncertainty_s + 1e-9)


def test_a_clock_that_goes_wrong_is_followed() -> None:
    rng = random.Random(1)
    drift, offset_s = 1e-3, 40.0
    rounds = [_meetings(rng, at_s=at_s) for at_s in (0.0, 10.0)]
    first = [_reading([own for own, _ in each]) for each in rounds]
    mine = [_reading([other for _, other in each], offset_s=offset_s, drift=drift) for each in rounds]
    found = clock_map(mine, first)
    assert found.drift == pytest.approx(drift, rel=0.1)
    for true_s in (0.0, 5.0, 10.0):
        # While it is read it goes wrong as well.
        said_s = found.uncertainty_s + drift * 0.12
        assert found.map(true_s + offset_s + drift * true_s) == pytest.approx(true_s, abs=said_s)


@pytest.mark.parametrize(("host", "offset_s", "exact"), [("a", 0.0, True), ("b", 0.0, False), ("a", 7.0, False)])
def test_ranks_of_one_host_share_a_clock_unless_it_is_seen_that_they_do_not(
    host: str, offset_s: float, exact: bool
) -> None:
    rounds = _meetings(random.Random(2), at_s=0.0)
    first = _reading([own for own, _ in rounds], host="a")
    mine = _reading([other for _, other in rounds], offset_s=offset_s, host=host)
    found = clock_map([mine], [first])
    assert (found == ClockMap()) is exact
    assert found.map(3.0 + offset_s) == pytest.approx(3.0, abs=_LATE_S)


def test_one_rank_needs_no_clock() -> None:
    reading = read_clock(Meeting())
    assert reading.rounds == []
    assert clock_map([reading], [reading]) == ClockMap()


def test_a_trace_says_how_exact_it_is() -> None:
    about = about_clocks({0: ClockMap(), 1: ClockMap(1.0, 5.0, 1e-6, 0.003), 2: ClockMap(1.0, 5.0, 0.0, 0.001)})
    assert about["uncertainty_s"] == 0.003
    assert about["ranks"]["1"] == {"offset_s": 5.0, "drift": 1e-6, "uncertainty_s": 0.003}
    assert "meetings" in about["method"]
