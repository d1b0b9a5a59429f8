"""Which candidate a search settles on, with steps of known length and with noise; and how many steps it takes."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

import hp_sharding
from hp_sharding.tuning.search import MAX_VISITS, Measured, Search

STEPS = 3


def _race(true_ms: list[float], start: int, *, noise: float = 0.0, exposed: float = 0.3, seed: int = 0) -> list[int]:
    """The candidates in the order in which they were measured, and last the one that was chosen."""
    generator = random.Random(seed)
    search = Search(len(true_ms), start)
    order = []
    while (candidate := search.next()) is not None:
        order.append(candidate)
        step_ms = [true_ms[candidate] * (1 + generator.gauss(0, noise)) for _ in range(STEPS)]
        search.take(candidate, Measured(step_ms, [exposed * ms for ms in step_ms]))
    return [*order, search.best]


@pytest.mark.parametrize(
    ("true_ms", "start", "best"),
    [
        ([100.0], 0, 0),
        ([150, 120, 105, 100, 110, 130], 4, 3),
        ([100, 110, 120, 130, 140], 4, 0),
        ([140, 130, 120, 110, 100], 0, 4),
        ([160, 120, 100, 104, 130], 3, 2),
        ([108, 106, 104, 102, 100, 102, 104], 0, 4),
        ([108, 106, 104, 102, 100, 102, 104], 6, 4),
    ],
)
def test_finds_the_shortest_steps(true_ms: list[float], start: int, best: int) -> None:
    order = _race(true_ms, start)
    assert order[0] == start, "what is in force is measured first"
    assert order[-1] == best


def test_goes_no_further_where_steps_get_much_longer() -> None:
    assert _race([300, 200, 150, 100, 150, 200], 3) == [3, 2, 4, 3]
    assert _race([300, 200, 105, 100, 103, 200, 400], 3) == [3, 2, 1, 4, 5, 3]


def test_is_over_at_once_where_nothing_is_waited_for() -> None:
    assert _race([90, 100, 110], 1, exposed=0.005) == [1, 1]
    assert len(_race([90, 100, 110], 1, exposed=0.02)) > 2


def test_measures_what_is_close_again_and_again_and_nothing_for_ever() -> None:
    order = _race([100.2, 100.1, 100.0, 100.1, 100.3], 2)[:-1]
    visits = [order.count(candidate) for candidate in range(5)]
    assert sorted(visits)[-2:] == [MAX_VISITS, MAX_VISITS]
    assert visits[2] == MAX_VISITS
    assert sum(visits) <= 5 + 3 + 2 + 2


ROWS = [[494, 499, 492, 514, 521, 532], [160, 140, 120, 110, 104, 100, 99], [150, 100, 150]]


@pytest.mark.parametrize(("noise", "limit"), [(0.0, 1.0), (0.01, 1.005), (0.03, 1.03), (0.06, 1.06)])
@pytest.mark.parametrize("true_ms", ROWS)
def test_noise_costs_little(true_ms: list[float], noise: float, limit: float) -> None:
    races = [_race(true_ms, len(true_ms) - 1, noise=noise, seed=seed) for seed in range(100)]
    losses = sorted(true_ms[order[-1]] / min(true_ms) for order in races)
    assert losses[94] <= limit, "nineteen in twenty"
    assert max(len(order) for order in races) <= 3 * len(true_ms) + 2


def test_the_same_figures_lead_to_the_same_choice() -> None:
    for seed in range(20):
        assert _race([99, 100, 101], 1, noise=0.05, seed=seed) == _race([99, 100, 101], 1, noise=0.05, seed=seed)


def test_needs_no_paddle() -> None:
    code = (
        "import sys, types\n"
        "for name, path in {'hp_sharding': '', 'hp_sharding.tuning': '/tuning'}.items():\n"
        "    package = sys.modules[name] = types.ModuleType(name)\n"
        f"    package.__path__ = [{hp_sharding.__path__[0]!r} + path]\n"
        "import hp_sharding.tuning.search; sys.exit('paddle' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
