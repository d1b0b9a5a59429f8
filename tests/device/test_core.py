"""The core of ``tests/dist`` on the stand-in device: delays in its collectives change no bit, and neither does it.

Every scenario runs with delays of random length in every collective and must give what the CPU gives. Some run without
delays too, and with delays in collectives of some kinds only. Memory that nobody keeps is given back at once, filled
with NaN and watched; a few run with Paddle's own caching as well.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests import harness
from tests.device import standin
from tests.device.running import on_device
from tests.device.training import CHECKS, GROUPS, REPLICAS, SETTINGS, Scene, Snapshots, check_all, play_all
from tests.reference import assert_close, assert_equal

pytestmark = pytest.mark.usefixtures("standin_device")

_TIMEOUT_S = 150.0
_LATE_MS = 3.0
_ALL = standin.Pace(jitter_ms=_LATE_MS)
_SOME = [
    standin.Pace(jitter_ms=2 * _LATE_MS, slowed=("all_gather", "broadcast")),
    standin.Pace(jitter_ms=2 * _LATE_MS, slowed=("reduce_scatter", "all_reduce")),
]
_ORDER = 1e-6
"""Of the largest element: over four ranks."""
_SEEDS = (1, 2)
_STEP = {"two ranks": 6, "four ranks": 3, "two by two": 4}
"""Of so many scenes one is played at other paces, and another one with caching."""

Everyone = list[list[Snapshots]]
"""For each rank, what each scene came to."""


@functools.cache
def _late(group: str) -> Everyone:
    nranks, scenes = GROUPS[group]
    found: list[Everyone] = _play(nranks, scenes, [_ALL], seed=_SEEDS[0])
    return found[0]


def _play(nranks: int, scenes: list[Scene], paces: list[standin.Pace], *, seed: int, caching: bool = False) -> Any:
    """What ``play_all`` returns, for each pace that of every rank. The seed is that of all delays."""
    pace = standin.Pace(seed=seed)
    found = on_device(play_all, nranks, scenes, paces, pace=pace, caching=caching, timeout_s=_TIMEOUT_S)
    return [[of_rank[number] for of_rank in found] for number in range(len(paces))]


def _assert_same(scenes: list[Scene], found: Everyone, expected: Everyone, what: str, tolerance: float = 0.0) -> None:
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for scene, snapshots, others in zip(scenes, ours, theirs, strict=True):
            place = f"{scene}, {what}, rank {rank}"
            assert list(snapshots) == list(others), place
            for name, values in others.items():
                finite = all(np.isfinite(value).all() for value in snapshots[name].values())
                assert finite, f"{place}, {name}: NaN equals NaN, so that nothing would be compared"
                if tolerance:
                    assert_close(snapshots[name], values, tolerance, f"{place}, {name}:")
                else:
                    assert_equal(snapshots[name], values, f"{place}, {name}:")


@pytest.mark.parametrize("group", GROUPS)
def test_the_device_gives_what_the_cpu_gives(group: str) -> None:
    """Over four ranks in one group a ring on the CPU adds in another order than the device, and rounds otherwise."""
    nranks, scenes = GROUPS[group]
    on_cpu = [of_rank[0] for of_rank in harness.run(play_all, nranks, scenes, [], timeout_s=_TIMEOUT_S)]
    tolerance = _ORDER if group == "four ranks" else 0.0
    _assert_same(scenes, _late(group), on_cpu, "against the CPU", tolerance)


@pytest.mark.parametrize("group", GROUPS)
def test_delays_change_no_bit(group: str) -> None:
    nranks, scenes = GROUPS[group]
    chosen = slice(0, None, _STEP[group])
    late = [of_rank[chosen] for of_rank in _late(group)]
    paces = [standin.Pace(), *_SOME]
    for pace, found in zip(paces, _play(nranks, scenes[chosen], paces, seed=_SEEDS[1]), strict=True):
        _assert_same(scenes[chosen], found, late, str(pace))


@pytest.mark.parametrize("group", GROUPS)
def test_with_paddle_s_own_caching(group: str) -> None:
    """Freed memory goes to the next tensor, and what a collective reads is kept by Paddle as well."""
    nranks, scenes = GROUPS[group]
    chosen = slice(1, None, _STEP[group])
    late = [of_rank[chosen] for of_rank in _late(group)]
    (found,) = _play(nranks, scenes[chosen], _SOME[:1], seed=_SEEDS[1], caching=True)
    _assert_same(scenes[chosen], found, late, "with caching")


def test_every_setting_has_scenes_of_every_kind() -> None:
    """Few of them, but each setting meets several modules, or the choice of scenes has lost its point."""
    for group, settings in (("two ranks", SETTINGS), ("two by two", REPLICAS)):
        for name in settings:
            met = {scene.scenario for scene in GROUPS[group].scenes if scene.name == name}
            assert len(met) > 1, f"{group}: {name!r} has only {met}"


def test_what_other_tests_check_on_ranks_holds_on_the_device() -> None:
    """Reads and writes under way, failures of one rank, states that are saved: bit for bit what the CPU gives."""
    found = on_device(check_all, 2, CHECKS, pace=_ALL, timeout_s=_TIMEOUT_S)
    expected = harness.run(check_all, 2, CHECKS, timeout_s=_TIMEOUT_S)
    for ours, theirs in zip(found, expected, strict=True):
        for check, result, other in zip(CHECKS, ours, theirs, strict=True):
            np.testing.assert_equal(result, other, err_msg=str(check))
