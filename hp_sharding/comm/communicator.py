"""``Communicator`` and ``Work``: the only door to collectives.

Everything above this package speaks of collectives in these two words alone. An implementation runs its collectives
in the order in which they were started, in the background, and never blocks the caller in a ``start``-like method.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import paddle


class Stall:
    """A wait for a collective, seen from what computes: the time in which it did nothing but wait.

    Attributes:
        label: what was waited for.
        start_s: ``time.perf_counter()`` when compute had come so far; None before it is known.
        end_s: ``time.perf_counter()`` when it could go on; None before it is known.
    """

    def __init__(self, label: str, start_s: float | None, end_s: float | None) -> None:
        self.label = label
        self.start_s = start_s
        self.end_s = end_s


class Mark:
    """A moment in what computes: of the host, or of the device's stream, which comes to it later.

    Attributes:
        time_s: ``time.perf_counter()`` when compute had come so far; None before it is known.
    """

    time_s: float | None

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Moves it to where compute is now. Not after ``settle``."""
        self.time_s = time.perf_counter()

    def settle(self) -> None:
        """It stays where it is: sees to it that its time becomes known."""


class Work(ABC):
    """One collective under way.

    Attributes:
        op: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"`` or ``"broadcast"``.
        label: what it carries, as the user knows it; shown in errors and in the timeline.
        lane: name of the communicator.
        nbytes: bytes of the whole (unsharded) message, in the dtype that travels.
        start_s: ``time.perf_counter()`` when the transfer itself began, None before that.
        end_s: ``time.perf_counter()`` when the result was in place, None before that.
        on_device: whether it runs on a stream of a device, so that waiting for it holds up a stream and not the host.
    """

    on_device: bool = False
    op: str
    label: str
    lane: str
    nbytes: int
    start_s: float | None
    end_s: float | None

    @abstractmethod
    def wait(self) -> None:
        """Returns once the result may be used by what the caller does next.

        On CPU that is when it is there. On a device what the caller does next is queued on the current stream, so that
        stream is made to wait, and the host is not. May be called any number of times.

        Raises:
            CommError: the collective failed, outlasted ``timeout_s``, or a peer is gone.
        """

    @abstractmethod
    def done(self) -> bool:
        """True once the result is in place, or the collective has failed. Never blocks."""

    def timed_wait(self, stalls: list[Stall]) -> None:
        """``wait()``, which notes in ``stalls`` for how long it held compute up, also where it raises."""
        start_s = time.perf_counter()
        try:
            self.wait()
        finally:
            stalls.append(Stall(self.label, start_s, time.perf_counter()))


class Communicator(ABC):
    """Ordered collectives over a fixed group of ranks: one *lane* of traffic.

    Tensors are contiguous and one-dimensional (float32, float16, bfloat16 everywhere; other dtypes where an
    implementation says so). A tensor handed in belongs to the collective until the work is done: it is kept alive, and
    the caller neither writes nor frees it. All ranks of the group start the same collectives in the same order.

    ``after`` names a work, of any lane, that must be done before the collective may read its input.
    ``label`` says what is carried, the same on all ranks.

    Input and output are of one dtype, which travels, unless a collective says otherwise. Where it converts, these rules
    hold, and a ConfigError says which one does not:

    * It converts between float32 and one of float16 and bfloat16. ``wire_dtype``, Paddle's name of what travels, is no
      wider than input and output.
    * Every rounding is to nearest, ties to even: once where something is sent, and once where a sum is formed, which is
      in float32. What is too large becomes infinite.
    * Every rank's part is rounded to what travels, this one's own too, although it stays where it is: the result does
      not depend on who forms it.
    * Input and output share no memory.

    Ranks that differ in one of these dtypes get an error that names both.

    Attributes:
        lane: name of the lane, such as ``"gather"``.
        ranks: global ranks, in group order.
        rank: this process's index in ``ranks``.
        nranks: number of ranks.
    """

    lane: str
    ranks: tuple[int, ...]
    rank: int

    @property
    def nranks(self) -> int:
        """Number of ranks of the group."""
        return len(self.ranks)

    @property
    def is_broken(self) -> bool:
        """Whether nothing goes on any more, as far as this process has heard, such as after the death of a rank.

        Never blocks; may be asked from any thread. False where an implementation does not know.
        """
        return False

    @abstractmethod
    def all_gather(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        wire_dtype: str | None = None,
    ) -> Work:
        """Fills ``output`` (``nranks * n`` elements) with every rank's ``input`` (``n`` elements), in rank order.

        ``input`` may be this rank's own slice of ``output``: then nothing is copied.

        Without ``wire_dtype`` what travels is of the narrower of the two dtypes: a float32 ``input`` is rounded into a
        16-bit ``output``. With it a float32 ``output`` holds what has travelled, in this rank's own slice too; a
        float32 ``input`` may be that slice all the same, and is then rounded where it lies.
        """

    @abstractmethod
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
        """Leaves in ``output`` (``n`` elements) the SUM over ranks of slice ``rank`` of ``input`` (``nranks * n``).

        16-bit sums are formed in float32 and rounded once, to the dtype of ``output``; where that is float32, not at
        all. ``accumulate`` adds that sum to what ``output`` holds before it is rounded. ``input`` is only read.

        ``wire_dtype`` is what the terms of a float32 ``input`` are rounded to. On CPU, over more than two ranks, the
        sums of some of them travel as well, and do so in float32.
        """

    @abstractmethod
    def all_reduce(
        self, tensor: paddle.Tensor, *, label: str = "", after: Work | None = None, wire_dtype: str | None = None
    ) -> Work:
        """Replaces ``tensor`` by its SUM over ranks, bitwise the same on every rank.

        16-bit sums are formed in float32 and rounded once. With a 16-bit ``wire_dtype`` a float32 ``tensor`` is treated
        so: it is rounded to that, summed up, rounded again and widened.
        """

    @abstractmethod
    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "", after: Work | None = None) -> Work:
        """Copies ``tensor`` of group rank ``src`` to all ranks. Any dtype."""

    def break_off(self, reason: str) -> None:
        """Ends the lane for good, and those made with it, on all ranks: they get a CommError that gives the reason.

        For a rank that cannot go on, so that others do not wait for it. No collective. An implementation that reaches
        no other process closes the lane.
        """
        self.close()

    def mark(self) -> Mark:
        """Marks where compute is now: of the host, or, on a lane of a device, of the current stream."""
        return Mark()

    @abstractmethod
    def close(self) -> None:
        """Ends the lane: finishes what is in flight, joins its threads. Safe to call twice. No collective."""
