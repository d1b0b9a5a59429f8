"""What the storage of a scale model stands for: true bytes, true layers, and what stays allocated."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import paddle

from ..arena import GradientArena
from ..buffer import FusedCommBuffer
from ..layout import ITEM_BYTES
from .lanes import Carried
from .profile import Profile
from .scaled import ScaledLayout, Scaling


class Books:
    """Made once, when everything has its place.

    Args:
        keeps_full: whether the parameters stay gathered between steps.

    Attributes:
        fixed_bytes: of shards, reduced gradients and moments, and of parameters that stay.
        update_bytes: of each parameter of the scale model, by its name: what an update of its slice reads and writes.
    """

    def __init__(
        self,
        profile: Profile,
        scaling: Scaling,
        buffers: Sequence[FusedCommBuffer],
        arena: GradientArena,
        *,
        keeps_full: bool,
        moment_bytes: int,
    ) -> None:
        self._units = [unit.name for unit in profile.units]
        self._scaling = scaling
        self._shards = {
            buffer.shard.data_ptr(): layout for buffer, layout in zip(buffers, scaling.layouts, strict=True)
        }
        trained = [layout for layout in scaling.layouts if not layout.frozen]
        self._sums = sorted((arena.slice(layout.number).data_ptr(), layout.number) for layout in trained)
        self._layer_of: dict[str, str] = {}
        self.update_bytes: dict[str, float] = {}
        for buffer, layout in zip(buffers, scaling.layouts, strict=True):
            for param in buffer.params:
                self.update_bytes[param.name] = _update_bytes(layout, moment_bytes) / len(buffer.params)
                self._layer_of[param.name] = self.layer([layout])
        apart = [layout for layout in scaling.layouts if not (keeps_full and layout.dtypes.shard_is_slice)]
        self.fixed_bytes = sum(layout.sum_nbytes + layout.true.shard_numel * moment_bytes for layout in trained)
        self.fixed_bytes += sum(layout.shard_nbytes for layout in apart)
        self.fixed_bytes += sum(layout.nbytes for layout in scaling.layouts) if keeps_full else 0

    def layer(self, layouts: Sequence[ScaledLayout]) -> str:
        """The layers whose parameters some buckets hold, as a span has them."""
        units = [unit for layout in layouts for unit in layout.units]
        first, last = self._units[min(units)], self._units[max(units)]
        return first if first == last else f"{first}..{last}"

    def layer_of(self, names: Sequence[str]) -> str:
        """The layers of some parameters of the scale model, in the order of an update."""
        first, last = (self._layer_of[names[index]] for index in (0, -1))
        return first if first == last else f"{first.partition('..')[0]}..{last.rpartition('..')[2]}"

    def gradient_bytes(self, names: Sequence[str]) -> int:
        """Of the local gradients of some parameters, by their true names."""
        return sum(self._scaling.gradient_bytes(name) for name in names)

    def carried(self, op: str, tensor: paddle.Tensor, wire_dtype: str | None) -> Carried:
        """What a tensor in a collective stands for: a bucket, the reduced shards of several, or what it is itself."""
        address = tensor.data_ptr()
        if op == "all_gather" and address in self._shards:
            layout = self._shards[address]
            return Carried(layout.true.numel * ITEM_BYTES[layout.dtypes.gather], self.layer([layout]))
        first = bisect.bisect_left(self._sums, (address, -1))
        last = bisect.bisect_left(self._sums, (address + tensor.size * tensor.element_size(), -1))
        found = [self._scaling.layouts[number] for _, number in self._sums[first:last]]
        if not found or self._sums[first][0] != address:
            return Carried(int(tensor.size * tensor.element_size()), "")
        if op == "reduce_scatter":
            layout = found[0]
            nbytes = layout.true.numel * ITEM_BYTES[wire_dtype or layout.dtypes.gradient]
        else:
            nbytes = sum(layout.true.shard_numel * ITEM_BYTES[wire_dtype or layout.dtypes.sum] for layout in found)
        return Carried(nbytes, self.layer(found))


def _update_bytes(layout: ScaledLayout, moment_bytes: int) -> float:
    """Parameter and moments are read and written, the gradient is read, and divided before."""
    return 2.0 * layout.shard_nbytes + 2.0 * moment_bytes * layout.true.shard_numel + 3.0 * layout.sum_nbytes
