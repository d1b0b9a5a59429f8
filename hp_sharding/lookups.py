"""Stage 3: which buckets a unit's forward waits for one by one, as its layers look their parameters up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .gathers import Place


class Lookups:
    """Learns which buckets need not be there when a unit's forward begins.

    To wait for a bucket when its first parameter is looked up is later and hides more, but takes a forward that looks
    its parameters up: one that a function got hold of some other way, and whose storage is away, may be left out in
    silence (see ``Schedule``). So a bucket is waited for at the beginning until a forward of its unit has looked up all
    that it holds.

    Args:
        unit_buckets: buckets of each unit.
        n_params: how many parameters each bucket holds.
        captured: for a unit, parameters that it may read without looking them up.
    """

    def __init__(
        self, unit_buckets: Sequence[Sequence[int]], n_params: Sequence[int], captured: Mapping[int, Sequence[Place]]
    ) -> None:
        held = {place.bucket for places in captured.values() for place in places}
        self._n_params = n_params
        self._open = [[bucket for bucket in buckets if bucket not in held] for buckets in unit_buckets]
        self._first = [list(buckets) for buckets in unit_buckets]

    def learn(self, unit: int, places: Iterable[tuple[int, int]]) -> None:
        """A forward of the unit has ended, which has looked up these, as (bucket, slot)."""
        if not self._open[unit]:
            return
        counts = Counter(bucket for bucket, _ in places)
        for bucket in [bucket for bucket in self._open[unit] if counts[bucket] == self._n_params[bucket]]:
            self._open[unit].remove(bucket)
            self._first[unit].remove(bucket)

    def at_once(self, unit: int) -> Sequence[int]:
        """Buckets that have to be there when the unit's forward begins."""
        return self._first[unit]
