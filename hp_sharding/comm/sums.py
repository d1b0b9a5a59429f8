"""Adding up what ranks send. Sums of 16-bit types are formed in float32 and rounded once."""

from __future__ import annotations

import numpy as np

from .rounding import QUIETLY, Array, as_if, blocks, narrow, widen
from .wire import Carried


class Adder:
    """Sums of what travels as one element type.

    Four kinds of arrays, one-dimensional and of equal length: *own* ones hold this rank's terms as its tensor has
    them, *travelled* ones what came of another rank's, *partial* ones the type in which sums are formed, and *result*
    ones what a sum becomes. Mostly they are all of one type; for the 16-bit types partial sums are float32. Every own
    term is rounded to the type that travels, whether it does or not.
    """

    def __init__(self, carried: Carried) -> None:
        assert carried.wire.partial is not None, carried
        self.own, self.element, self.result = carried
        self.partial = carried.wire.partial
        self.widens = self.partial != self.element.storage
        self.rounds_own = self.own is not self.element

    @property
    def travelled(self) -> Adder:
        """Of what has travelled, to what can."""
        return Adder(Carried(self.element, self.element, self.element))

    @QUIETLY
    def add_first(self, out: Array, travelled: Array, own: Array) -> None:
        """Out (partial) = travelled + own."""
        if not self.widens:
            np.add(travelled, own, out=out)
            return
        for block in blocks(len(out)):
            np.add(widen(travelled[block], self.element), self._term(own[block]), out=out[block])

    @QUIETLY
    def add_to_partial(self, partial: Array, own: Array) -> None:
        """Partial += own."""
        if not self.widens:
            np.add(partial, own, out=partial)
            return
        for block in blocks(len(partial)):
            np.add(partial[block], self._term(own[block]), out=partial[block])

    @QUIETLY
    def store(self, result: Array, partial: Array, *, accumulate: bool) -> None:
        """Result = partial, or result + partial, rounded once. May overwrite ``partial``."""
        for block in blocks(len(result)) if self.widens else [slice(None)]:
            if accumulate:
                np.add(partial[block], widen(result[block], self.result), out=partial[block])
            narrow(result[block], partial[block], self.result)

    def _term(self, own: Array) -> Array:
        values = widen(own, self.own)
        return as_if(values, self.element) if self.rounds_own else values
