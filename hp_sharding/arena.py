"""The gradient arena: one contiguous tensor with the reduced gradient shards of all buckets of a dtype.

The reduce-scatter of a bucket writes straight into its slice, the optimizer reads it there, and what concerns all
gradients at once (norm, averaging) is one kernel over one tensor. Slices lie in backward order, so that neighbours in
time are neighbours in memory; each starts 512-byte aligned because shards are multiples of 512 bytes. Padding is zero:
it is a sum of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import paddle

if TYPE_CHECKING:
    from .layout import BucketLayout


class GradientArena:
    """Reduced gradients of this rank: for each bucket the SUM over ranks of its shard, averaged once on request.

    Buckets that are frozen when wrapped take no room until they thaw.

    Args:
        layouts: all buckets, in registration order; their number is the key of every method.
        divisor: what ``average`` divides by.
    """

    def __init__(self, layouts: Sequence[BucketLayout], divisor: float) -> None:
        self._layouts = list(layouts)
        self._divisor = divisor
        self._slices: dict[int, paddle.Tensor] = {}
        self._holds = [False] * len(layouts)
        self._averaged = [False] * len(layouts)
        self._dirty = [False] * len(layouts)
        self._tensors: list[paddle.Tensor] = []
        for dtype in dict.fromkeys(layout.dtype for layout in layouts):
            self._alloc([layout for layout in layouts if layout.dtype == dtype and not layout.frozen])

    @property
    def tensors(self) -> list[paddle.Tensor]:
        """The flat tensors, one a dtype (and one for each bucket that thawed)."""
        return list(self._tensors)

    def slice(self, index: int) -> paddle.Tensor:
        """Bucket ``index``'s shard of the gradient: flat, ``shard_numel`` elements."""
        if index not in self._slices:
            self._alloc([self._layouts[index]])
        return self._slices[index]

    def expect_sum(self, index: int) -> bool:
        """Readies the slice for one more reduction. Returns True where that reduction must add to what is there."""
        adds = self._holds[index]
        if adds and self._averaged[index]:
            # step() divided what is there; it goes back to a sum, so that old and new are divided together, once.
            self.slice(index).scale_(self._divisor)
        self._holds[index] = True
        self._averaged[index] = False
        self._dirty[index] = True
        return adds

    def average(self, indices: Sequence[int]) -> None:
        """Divides the finished sums of these buckets by the divisor, each sum once however often it is called."""
        due = [index for index in indices if self._holds[index] and not self._averaged[index]]
        for index in due:
            self._averaged[index] = True
            if self._divisor != 1:
                self.slice(index).scale_(1.0 / self._divisor)

    def zero_unsummed(self) -> None:
        """Zeros for the buckets that hold no sum: a norm over everything reads them, and a step without a backward."""
        for index, layout in enumerate(self._layouts):
            if self._dirty[index] and not self._holds[index]:
                self._slices[layout.number].zero_()
                self._dirty[index] = False

    def zero_part(self, index: int, start_numel: int, numel: int) -> None:
        """Zeros for a part of the finished sum of bucket ``index``, if it holds one."""
        if self._holds[index]:
            self.slice(index)._slice(start_numel, start_numel + numel).zero_()

    def clear(self) -> None:
        """Forgets all sums; the next reductions overwrite them."""
        self._holds = [False] * len(self._layouts)
        self._averaged = [False] * len(self._layouts)

    def _alloc(self, layouts: Sequence[BucketLayout]) -> None:
        if not layouts:
            return
        tensor = paddle.zeros([sum(layout.shard_numel for layout in layouts)], layouts[0].dtype)
        self._tensors.append(tensor)
        start = 0
        for layout in reversed(layouts):
            self._slices[layout.number] = tensor._slice(start, start + layout.shard_numel)
            start += layout.shard_numel
