"""Fingerprints of what a rank has launched: equal on two ranks where these have launched the same, in the same order.

Every collective of a model's lanes enters the fingerprint of its lane, with its kind, label and bytes, in the order of
the launches. Which lane's launch comes first does not count: that may differ between ranks that take different
branches. What the ranks compare, and when, is the business of ``facts``.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from .communicator import Communicator, Mark, Work
from .history import History, Launch

if TYPE_CHECKING:
    from collections import deque

    import paddle

    from .statements import Statements

BITS = 32
"""Of a fingerprint."""
_MASK = (1 << BITS) - 1
_FACTOR = 0x9E3779B1
"""Odd, so that two fingerprints that differ still do after the same launch."""
_KINDS = {"all_gather": 0x2545F491, "reduce_scatter": 0x4A8BE922, "all_reduce": 0x6FD1DDB3, "broadcast": 0x9517D244}
"""Far apart, so that another kind is not made up for by another number of bytes."""


class Prints(NamedTuple):
    """Fingerprints of what one rank has launched up to a moment.

    Attributes:
        shared: of the lanes on which all data ranks launch the same; ``BITS`` bits.
        own: of those on which the ranks of one shard group do; replicas may differ.
        counts: lane -> how many launches that were.
    """

    shared: int
    own: int
    counts: dict[str, int]


class Fingerprint:
    """What this rank has launched for one model, lane by lane.

    Args:
        lanes: the model's, in one order on all ranks.
        own: names of those whose launches concern their shard group alone.

    Attributes:
        lanes: the same lanes; what is launched through these leaves a print.
        own: see above.
        history: the newest launches.
    """

    def __init__(self, lanes: Mapping[str, Communicator], *, own: Collection[str]) -> None:
        self.own = frozenset(own)
        self.history = History(lanes)
        self.lanes = {name: WatchedLane(lane, self.history.lanes[name]) for name, lane in lanes.items()}

    def take(self) -> Prints:
        """The fingerprints now."""
        shared = own = 0
        for name, lane in self.lanes.items():
            if name in self.own:
                own = (own * _FACTOR + lane.digest) & _MASK
            else:
                shared = (shared * _FACTOR + lane.digest) & _MASK
        return Prints(shared, own, {name: lane.count for name, lane in self.lanes.items()})


class WatchedLane(Communicator):
    """A communicator that passes everything on, and remembers each collective.

    Attributes:
        digest: fingerprint of all launches so far.
        count: how many there were.
    """

    def __init__(self, lane: Communicator, launches: deque[Launch]) -> None:
        self.lane = lane.lane
        self.ranks = lane.ranks
        self.rank = lane.rank
        self.carries_values = lane.carries_values
        self.digest = 0
        self.count = 0
        self._inner = lane
        self._launches = launches

    def all_gather(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        wire_dtype: str | None = None,
    ) -> Work:
        """See ``Communicator``."""
        return self._note(self._inner.all_gather(output, input, label=label, after=after, wire_dtype=wire_dtype))

    def reduce_scatter(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        accumulate: bool = False,
        wire_dtype: str | None = None,
    ) -> Work:
        """See ``Communicator``."""
        return self._note(
            self._inner.reduce_scatter(
                output, input, label=label, after=after, accumulate=accumulate, wire_dtype=wire_dtype
            )
        )

    def all_reduce(
        self, tensor: paddle.Tensor, *, label: str = "", after: Work | None = None, wire_dtype: str | None = None
    ) -> Work:
        """See ``Communicator``."""
        return self._note(self._inner.all_reduce(tensor, label=label, after=after, wire_dtype=wire_dtype))

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "", after: Work | None = None) -> Work:
        """See ``Communicator``."""
        return self._note(self._inner.broadcast(tensor, src=src, label=label, after=after))

    @property
    def is_broken(self) -> bool:
        """See ``Communicator``."""
        return self._inner.is_broken

    @property
    def statements(self) -> Statements | None:
        """See ``Communicator``."""
        return self._inner.statements

    @property
    def next_number(self) -> int:
        """See ``Communicator``."""
        return self._inner.next_number

    def n_under_way(self) -> int:
        """See ``Communicator``."""
        return self._inner.n_under_way()

    def break_off(self, reason: str) -> None:
        """See ``Communicator``."""
        self._inner.break_off(reason)

    def mark(self) -> Mark:
        """See ``Communicator``."""
        return self._inner.mark()

    def close(self) -> None:
        """See ``Communicator``."""
        self._inner.close()

    def _note(self, work: Work) -> Work:
        op, label, nbytes = work.op, work.label, work.nbytes
        self._launches.append(Launch(self.count, op, label, nbytes, time.perf_counter()))
        self.count += 1
        self.digest = (zlib.crc32(label.encode(), self.digest) * _FACTOR + nbytes + _KINDS[op]) & _MASK
        return work
