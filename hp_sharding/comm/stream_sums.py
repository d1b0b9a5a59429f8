"""What a lane on a device computes around its collectives: conversions, and sums of 16-bit types.

All of it writes into memory that is there before: what a kernel allocates belongs to the stream that computes as soon
as the host lets go of it, when the lane's stream has not even begun.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import paddle

from .convert import queue_cast

_KEPT_BYTES = 64 << 20
"""Of one kind. Only a parameter that is larger by itself has a bucket that needs more."""


class Scratch:
    """Memory of a lane, kept from one collective to the next, in which only the lane's own stream reads and writes.

    What is done there has one order, so that the collectives of a lane can share it without waiting for each other.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, Any], paddle.Tensor] = {}

    def take(self, name: str, numel: int, dtype: Any) -> paddle.Tensor:
        """``numel`` elements that hold anything; for the same name and dtype the same memory, until more is asked for.

        To be called while the stream that computes is the current one, to which all memory belongs. The work that uses
        it has to keep it alive like everything else that it touches: another one may be taken in its place, and what
        is very large is not kept here.
        """
        tensor = self._tensors.get((name, dtype))
        if tensor is None or tensor.shape[0] < numel:
            tensor = paddle.empty([numel], dtype)
            if numel * tensor.element_size() > _KEPT_BYTES:
                return tensor
            self._tensors[name, dtype] = tensor
        return tensor._slice(0, numel) if numel else tensor


class Exchange(NamedTuple):
    """A sum over ranks that is formed in float32 where it is needed: each rank gets its piece of everybody's terms.

    Attributes:
        sent: this rank's terms as they travel, a piece for each rank.
        pieces: everybody's terms of this rank's piece.
        total: their sum in float32.
        term: a piece in float32.
    """

    sent: paddle.Tensor
    pieces: paddle.Tensor
    total: paddle.Tensor
    term: paddle.Tensor

    def run(self, group: Any, own: paddle.Tensor) -> None:
        """Queues the sum on the current stream, in the order of ranks. ``own`` is what ``sent`` is made of."""
        if own is not self.sent:
            queue_cast(self.sent, own)
        numel = self.total.shape[0]
        sizes = [numel] * (self.sent.shape[0] // numel)
        group.all_to_all_single_on_calc_stream(self.pieces, self.sent, sizes, sizes)
        queue_cast(self.total, self.pieces._slice(0, numel))
        for rank in range(1, len(sizes)):
            self._add(self.pieces._slice(rank * numel, (rank + 1) * numel))

    def leave_in(self, output: paddle.Tensor, *, accumulate: bool) -> None:
        """Queues that ``output`` becomes the sum, or the sum and what it holds."""
        if self.total is output:
            return
        if accumulate and output.dtype == self.total.dtype:
            output.add_(self.total)
            return
        if accumulate:
            self._add(output)
        queue_cast(output, self.total)

    def _add(self, other: paddle.Tensor) -> None:
        queue_cast(self.term, other)
        self.total.add_(self.term)


def exchange(scratch: Scratch, sent: paddle.Tensor, nranks: int, *, total: paddle.Tensor | None = None) -> Exchange:
    """With memory of the lane for all but ``sent`` and, if there is one, ``total``."""
    numel = sent.shape[0] // nranks
    pieces = scratch.take("pieces", sent.shape[0], sent.dtype)
    total = scratch.take("total", numel, paddle.float32) if total is None else total
    return Exchange(sent, pieces, total, scratch.take("term", numel, paddle.float32))
