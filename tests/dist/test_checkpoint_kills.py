"""Trainings that are killed while they save; ``scripts/soak kills`` does it more often."""

from __future__ import annotations

import pytest

from tests.soak import kills
from tests.soak.starts import Split

KILLS = 5


@pytest.mark.slow
def test_a_killed_training_goes_on_from_its_last_checkpoint() -> None:
    lives = kills.kill_many(KILLS, Split(1, 2), 2)
    assert [life.faults for life in lives] == [[]] * (KILLS + 1)
    assert sum(bool(life.hit) for life in lives) >= 2, f"too few kills came during a save:\n{kills.table(lives)}"
