"""Where the backward of one wrapped model sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .comm import Communicator, Fingerprint


class ReduceLanes(NamedTuple):
    """Where reductions and agreements travel.

    Attributes:
        reduce: over the shard group; carries the reduce-scatters.
        agree: lanes that one after the other reach all data ranks, the replicas first; idle during backward.
        replicate: over the replicas of this rank's shard; None where there is one.
        fingerprint: of what is launched on all lanes of the model; None where nobody compares it.
    """

    reduce: Communicator
    agree: Sequence[Communicator]
    replicate: Communicator | None = None
    fingerprint: Fingerprint | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all data ranks."""
        return all(lane.rank == 0 for lane in self.agree)

    @property
    def is_broken(self) -> bool:
        """Whether a collective of the shard group or of the replicas has failed, so that nothing goes on."""
        return any(lane.is_broken for lane in self.agree)
