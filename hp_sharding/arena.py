"""The gradient arena: one contiguous tensor with the reduced gradient shards of all buckets of a dtype.

The reduce-scatter of a bucket writes straight into its slice, the optimizer reads it there, and what concerns all
gradients at once (norm, averaging) is one kernel over one tensor. Slices lie in backward order, so that neighbours in
time are neighbours in memory: what the replicas have to add up is one contiguous range. Each slice starts 512-byte
aligned because shards are multiples of 512 bytes. Padding is zero: it is a sum of zeros.

Over several replicas a sum is *partial* while it is that of this shard group alone, and *total* once it is that of all.
A total cannot take part in another all-reduce, so what a later backward brings is summed up in a second tensor, made
when it is first needed, and added when it is total too.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import paddle

from .comm import add_into

if TYPE_CHECKING:
    from .layout import BucketLayout


class Place(enum.Enum):
    """Where a sum is formed. MAIN costs one shard of the gradients; SPARE, once used, as much again."""

    MAIN = "main"
    SPARE = "spare"


class Target(NamedTuple):
    """Where the next reduction of a bucket goes.

    Attributes:
        slice: flat, ``shard_numel`` elements.
        accumulate: whether the reduction adds to what is there.
    """

    slice: paddle.Tensor
    accumulate: bool


class Range(NamedTuple):
    """Partial sums that lie side by side, and the one tensor that they are.

    Attributes:
        buckets: in the order in which they lie.
        tensor: flat, no copy.
    """

    buckets: list[int]
    tensor: paddle.Tensor


class _Tensors:
    """One place: a flat tensor a dtype (and one for each bucket that thawed), cut into slices."""

    def __init__(self) -> None:
        self.all: list[paddle.Tensor] = []
        self.slices: dict[int, paddle.Tensor] = {}
        self.starts: dict[int, tuple[int, int]] = {}
        """Of each bucket: which tensor, and the first element there."""

    def alloc(self, layouts: Sequence[BucketLayout]) -> None:
        tensor = paddle.zeros([sum(layout.shard_numel for layout in layouts)], layouts[0].dtypes.sum)
        start = 0
        for layout in reversed(layouts):
            self.slices[layout.number] = tensor._slice(start, start + layout.shard_numel)
            self.starts[layout.number] = (len(self.all), start)
            start += layout.shard_numel
        self.all.append(tensor)


class GradientArena:
    """Reduced gradients of this rank: for each bucket the SUM over ranks of its shard, averaged once on request.

    Buckets that are frozen when wrapped take no room until they thaw.

    Args:
        layouts: all buckets, in registration order; their number is the key of every method.
        divisor: what ``average`` divides by.
        n_replicas: shard groups that hold the same; with more than one, a reduction leaves a partial sum.
    """

    def __init__(self, layouts: Sequence[BucketLayout], divisor: float, n_replicas: int = 1) -> None:
        self._layouts = list(layouts)
        self._divisor = divisor
        self._n_replicas = n_replicas
        self._places = {place: _Tensors() for place in Place}
        self._main = self._places[Place.MAIN]
        self._holds = [False] * len(layouts)
        self._partial: list[Place | None] = [None] * len(layouts)
        self._averaged = [False] * len(layouts)
        self._dirty = [False] * len(layouts)
        self._edited = [False] * len(layouts)
        # Together lies what the replicas add up together: of one dtype here and on the way.
        kinds = dict.fromkeys(_kind(layout) for layout in layouts)
        for kind in kinds:
            self._alloc(Place.MAIN, [layout for layout in layouts if _kind(layout) == kind and not layout.frozen])

    @property
    def tensors(self) -> list[paddle.Tensor]:
        """The flat tensors, one a dtype (and one for each bucket that thawed)."""
        return list(self._places[Place.MAIN].all)

    @property
    def spare_bytes(self) -> int:
        """Bytes of the second tensors; 0 unless backwards add up over several replicas."""
        return sum(tensor.size * tensor.element_size() for tensor in self._places[Place.SPARE].all)

    @property
    def holds_any(self) -> bool:
        """Whether some bucket has a sum, partial or total."""
        return any(self._holds) or any(place is not None for place in self._partial)

    def release(self) -> None:
        """Lets go of all tensors. It is of no more use."""
        self._places = {place: _Tensors() for place in Place}
        self._main = self._places[Place.MAIN]

    def slice(self, index: int) -> paddle.Tensor:
        """Bucket ``index``'s shard of the gradient: flat, ``shard_numel`` elements."""
        found = self._main.slices.get(index)
        return self._slice(Place.MAIN, index) if found is None else found

    def expect_sum(self, index: int) -> Target:
        """Readies a place for one more reduction of the bucket."""
        if self._n_replicas == 1 and not self._holds[index]:
            # Nearly all are of this kind.
            self._holds[index] = self._dirty[index] = True
            self._averaged[index] = False
            return Target(self.slice(index), False)
        place = self._partial[index]
        adds = place is not None
        if place is None:
            place = Place.SPARE if self._holds[index] and self._n_replicas > 1 else Place.MAIN
            adds = self._holds[index] and place is Place.MAIN
        if adds and place is Place.MAIN:
            self._undo_average(index)
        if self._n_replicas > 1:
            self._partial[index] = place
        if place is Place.MAIN:
            self._holds[index] = self._n_replicas == 1
            self._averaged[index] = False
            self._dirty[index] = True
        return Target(self._slice(place, index), adds)

    def partial(self) -> list[int]:
        """Buckets whose sums are not those of all replicas yet."""
        return [index for index, place in enumerate(self._partial) if place is not None]

    def are_neighbours(self, first: int, second: int) -> bool:
        """Whether the partial sum of bucket ``second`` begins where that of ``first`` ends."""
        place = self._partial[first]
        if place is None or place is not self._partial[second]:
            return False
        tensor, start = self._start(place, first)
        return self._start(place, second) == (tensor, start + self._layouts[first].shard_numel)

    def range(self, buckets: Sequence[int]) -> Range:
        """Partial sums of neighbours, in order, as one tensor without a copy."""
        place = self._partial[buckets[0]]
        assert place is not None
        tensor, start = self._start(place, buckets[0])
        numel = sum(self._layouts[bucket].shard_numel for bucket in buckets)
        return Range(list(buckets), self._places[place].all[tensor]._slice(start, start + numel))

    def take_total(self, index: int) -> None:
        """The bucket's partial sum has been added up over the replicas; joins it with what was total before."""
        place, self._partial[index] = self._partial[index], None
        if place is Place.SPARE:
            self._undo_average(index)
            add_into(self.slice(index), self._slice(Place.SPARE, index))
        self._holds[index] = True

    def average(self, indices: Sequence[int]) -> None:
        """Divides the finished sums of these buckets by the divisor, each sum once however often it is called."""
        for index in indices:
            if not self._holds[index] or self._averaged[index]:
                continue
            self._averaged[index] = True
            if self._divisor != 1:
                self.slice(index).scale_(1.0 / self._divisor)

    def zero_unsummed(self) -> None:
        """Zeros for the buckets that hold no sum: a norm over everything reads them, and a step without a backward."""
        for index in range(len(self._layouts)):
            if self._dirty[index] and not self._holds[index] and self._partial[index] is None:
                self.slice(index).zero_()
                self._dirty[index] = False

    def take_values(self, index: int) -> None:
        """What the bucket's slice holds is edited now: values, no longer sums of what ranks have sent.

        They are averages already, and what a later reduction brings is added to them. Of a bucket without a sum they
        are the zeros of ``zero_unsummed``.
        """
        assert self._partial[index] is None, index
        self.average([index])
        self._holds[index] = self._averaged[index] = self._edited[index] = self._dirty[index] = True

    def take_all_values(self) -> None:
        """The same for all buckets that hold a sum. The others' slices, too, may have been written to."""
        for index in range(len(self._layouts)):
            if self._holds[index]:
                self.take_values(index)
            elif index in self._places[Place.MAIN].starts:
                self._dirty[index] = True

    def is_edited(self, index: int) -> bool:
        """Whether the bucket holds values that no reduction could bring back."""
        return self._edited[index]

    def zero_part(self, index: int, start_numel: int, numel: int) -> None:
        """Zeros for a part of the finished sums of bucket ``index``, if it holds any."""
        places = [self._partial[index], Place.MAIN if self._holds[index] else None]
        for place in places:
            if place is not None:
                self._slice(place, index)._slice(start_numel, start_numel + numel).zero_()

    def forget(self, index: int) -> None:
        """Forgets the sums of one bucket; the next reduction overwrites them."""
        self._holds[index] = self._averaged[index] = self._edited[index] = False
        self._partial[index] = None

    def clear(self) -> None:
        """Forgets all sums; the next reductions overwrite them."""
        self._holds = [False] * len(self._layouts)
        self._partial = [None] * len(self._layouts)
        self._averaged = [False] * len(self._layouts)
        self._edited = [False] * len(self._layouts)

    def _undo_average(self, index: int) -> None:
        if self._averaged[index]:
            # step() divided what is there; it goes back to a sum, so that old and new are divided together, once.
            self.slice(index).scale_(self._divisor)
            self._averaged[index] = False

    def _slice(self, place: Place, index: int) -> paddle.Tensor:
        self._start(place, index)
        return self._places[place].slices[index]

    def _start(self, place: Place, index: int) -> tuple[int, int]:
        tensors = self._places[place]
        if index not in tensors.starts:
            layouts = [self._layouts[index]]
            if place is Place.SPARE:
                # All that lies together in the main place, so that neighbours stay neighbours.
                layouts = [layout for layout in self._layouts if self._lies_with(layout.number, index)]
            self._alloc(place, layouts)
        return tensors.starts[index]

    def _lies_with(self, index: int, other: int) -> bool:
        starts = self._places[Place.MAIN].starts
        return index in starts and starts[index][0] == starts[other][0]

    def _alloc(self, place: Place, layouts: Sequence[BucketLayout]) -> None:
        if layouts:
            self._places[place].alloc(layouts)


def _kind(layout: BucketLayout) -> tuple[str, str]:
    return layout.dtypes.sum, layout.dtypes.reduce
