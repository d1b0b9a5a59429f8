"""What the package waits for and keeps alive on a device, each a line to take out, and the test that must miss it.

The list is made by hand: every wait, every order between streams, and everything that keeps memory or an event alive,
from the lanes up to ``step()``. ``scripts/mutate --streams`` tries it.
"""

from __future__ import annotations

from tests.mutation.breaks import Break
from tests.mutation.lane_breaks import KEPT, ORDERS
from tests.mutation.running import Trial
from tests.mutation.step_breaks import WAITS

BREAKS: list[Break] = [*ORDERS, *KEPT, *WAITS]
TRIED = [each for each in BREAKS if not each.equivalent]


def trial_of(each: Break) -> Trial:
    """What has to be run for it."""
    return Trial(each.path, each.mutant(), each.tests)
