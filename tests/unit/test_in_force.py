"""A break can be put in force in a running process, and taken back."""

from __future__ import annotations

import pytest

from hp_sharding.foresight import Foresight, Phase
from hp_sharding.optimizer import ShardedOptimizer
from tests.mutation.breaks import Break
from tests.mutation.in_force import in_force

GREEDY = Break("foresight.py", "one unit more", "        use = self._next.get(self._last)\n        while n_units and",
               "        use, n_units = self._next.get(self._last), n_units + 1\n        while n_units and")  # fmt: skip
DECORATED = Break(
    "optimizer.py", "a step does nothing",
    "        if self._end_broken_step():\n            return\n        self.check_usable()\n",
    "        return\n        self.check_usable()\n",
)  # fmt: skip


def _ahead() -> list[int]:
    foresight = Foresight()
    for _ in range(2):
        foresight.begin()
        for unit in range(4):
            foresight.note(Phase.FORWARD, unit)
    foresight.begin()
    return foresight.ahead(1)


def test_it_is_in_force_inside_and_not_after() -> None:
    before = _ahead()
    with in_force(GREEDY):
        assert len(_ahead()) == len(before) + 1
    assert _ahead() == before


def test_it_reaches_what_is_decorated() -> None:
    nobody = ShardedOptimizer.__new__(ShardedOptimizer)
    with in_force(DECORATED):
        ShardedOptimizer.step(nobody)
    with pytest.raises(AttributeError):
        ShardedOptimizer.step(nobody)
