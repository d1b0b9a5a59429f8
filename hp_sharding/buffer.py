"""``FusedCommBuffer``: the only owner of a bucket's storage, and the states that storage goes through."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import paddle
from paddle.base import core
from paddle.base.framework import EagerParamBase

from .comm import cast_into
from .errors import LayoutError, StateError
from .gradient_storage import GradientStorage
from .precision import dtype_name, keep_changes
from .views import dense, point_at, release, slice_of, slot_views

if TYPE_CHECKING:
    from .comm import Communicator, Work
    from .layout import BucketLayout
    from .pool import StoragePool


class Status(Enum):
    """State of a bucket's parameters on this rank, and what each state holds in memory.

    With P bytes of parameters in the bucket and S shard ranks:

    * ``SHARDED``: only this rank's shard is valid. P/S bytes; or P, with the rest stale, where storage is kept.
    * ``SYNCING``: an all-gather is writing the full tensor. P bytes, plus P/S where the shard has its own storage.
    * ``READY``: the parameters are views of the valid full tensor. Bytes as in ``SYNCING``.
    """

    SHARDED = "sharded"
    SYNCING = "syncing"
    READY = "ready"


class ShardSlice(NamedTuple):
    """The part of one parameter that this rank updates.

    Attributes:
        param: index of the parameter in its bucket's ``params``.
        tensor: one-dimensional parameter that shares the shard's storage; it has the name, learning-rate factor,
            regularizer and clipping flag of the whole parameter.
        start_numel: where it begins in the shard, in elements.
        param_start_numel: where it begins in the parameter.
        numel: elements.
    """

    param: int
    tensor: EagerParamBase
    start_numel: int
    param_start_numel: int
    numel: int


class BufferPlace(NamedTuple):
    """Where a buffer lives, and how it begins.

    Attributes:
        rank: in the shard group.
        gather: its gather lane.
        pool: where full tensors come from and go.
        keeps_full: leaves the full tensor allocated between steps (stages 1 and 2): the shard is then its own slice,
            unless precision is mixed.
        status: at first; SHARDED needs no more memory than the shard, and frees what the parameters had.
    """

    rank: int
    gather: Communicator
    pool: StoragePool
    keeps_full: bool
    status: Status = Status.READY


class FusedCommBuffer:
    """One bucket: parameters as views of a flat full tensor, this rank's shard of it, and the full gradient.

    Args:
        shard: this rank's shard, where it has storage of its own and is known already; None takes the parameters'
            values, which must then be there.

    Attributes:
        layout: the arithmetic of the bucket.
        params: its parameters, in slot order.
        status: see ``Status``; READY at first, since the user's initial weights are in place, but for stage 3.
        shard: flat tensor of ``layout.shard_numel`` elements of ``layout.dtypes.shard``, always valid; what the
            optimizer updates.
        place: its rank, lane and pool.
        slices: the parts of parameters that lie in the shard.
        gradient: its full gradient, while there is one.
    """

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[EagerParamBase],
        place: BufferPlace,
        *,
        shard: paddle.Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.params = list(params)
        self._shapes = [list(param.shape) for param in params]
        self.status = place.status
        self.place = place
        self._work: Work | None = None
        self._full: paddle.Tensor | None = None
        self._slot_views: list[core.DenseTensor] = []
        self._addresses: list[int] = []
        self._absent = self._absent_vectors()
        self._versions: list[int] = []
        # Looked at for each parameter in each step, where names would cost.
        self._param_dtype = getattr(paddle, layout.dtype)
        dtypes = layout.dtypes
        self._wire = None if dtypes.gather == dtypes.param else dtypes.gather
        self._shares = place.keeps_full and dtypes.shard_is_slice
        self.shard = self._adopt(shard)
        self.slices = self._make_slices()
        self.gradient = GradientStorage(layout, self.params, place.pool)

    @property
    def name(self) -> str:
        """Name for people, as in errors and in the timeline."""
        return self.layout.name

    @property
    def owns_shard(self) -> bool:
        """Whether the shard has storage of its own; else it is a slice of the full tensor."""
        return not self._shares

    def drop_shard(self) -> None:
        """Lets go of the shard and the slices of it. The bucket is of no more use, but that ``full`` may be read."""
        self.shard, self.slices = paddle.empty([0], self.layout.dtypes.shard), []

    def dissolve(self) -> None:
        """Lets go of all storage; its parameters belong to other buckets now."""
        self.drop_shard()
        self._full, self._slot_views = None, []

    @property
    def full(self) -> paddle.Tensor | None:
        """The flat full tensor, ``layout.numel`` elements of the bucket's dtype; None while its storage is freed."""
        return self._full

    @property
    def gather_work(self) -> Work | None:
        """The all-gather under way; None unless SYNCING."""
        return self._work

    def start_gather(self) -> Work:
        """SHARDED -> SYNCING: starts the all-gather of the shards into the full tensor.

        Raises:
            StateError: the bucket is not SHARDED.
        """
        self._require(Status.SHARDED, "start_gather")
        if self._full is None:
            self._set_full(self.place.pool.alloc(self.layout.numel, self.layout.dtype))
            assert self._full is not None
        else:
            # A function that is called with a parameter (paddle.sum(p)) passes every guard; let it fail, not read this.
            for param in self.params:
                release(param)
        self._work = self.place.gather.all_gather(self._full, self.shard, label=self.name, wire_dtype=self._wire)
        self.status = Status.SYNCING
        return self._work

    def finish_gather(self) -> None:
        """SYNCING -> READY: waits for the all-gather, then makes the parameters views of its result.

        Raises:
            StateError: the bucket is not SYNCING; or a parameter was written meanwhile, past the guards.
            CommError: the gather failed; the bucket stays SYNCING.
        """
        self._require(Status.SYNCING, "finish_gather")
        assert self._work is not None
        self._work.wait()
        self._work = None
        written = [param.name for index, param in enumerate(self.params) if self._was_written(index, param)]
        self._bind_params()
        self.status = Status.READY
        if written:
            raise StateError(
                f"bucket '{self.name}': parameter '{written[0]}' was written by a function that cannot be guarded "
                "(such as paddle.assign) while its value was away, and what was written is lost. Write with set_value "
                "or copy_, inside 'with hp_sharding.full_parameters(model):' on every rank"
            )

    def mark_stale(self) -> None:
        """READY -> SHARDED after the shard was updated; storage stays and is overwritten by the next gather.

        Raises:
            StateError: the bucket is not READY.
        """
        self._require(Status.READY, "mark_stale")
        self.status = Status.SHARDED

    def free(self) -> None:
        """READY -> SHARDED: parameters and full tensor let go of the memory. Shapes and dtypes stay readable.

        Raises:
            StateError: the bucket is not READY.
        """
        self._require(Status.READY, "free")
        assert not self.place.keeps_full
        self._release_params()
        # Views that autograd saved keep the block alive; the pool takes it back when the last of them is gone.
        self._full = None
        self._slot_views = []
        self.status = Status.SHARDED

    def store_full(self) -> None:
        """Copies this rank's part of the full tensor into the shard, so that writes to parameters are kept.

        In mixed precision the shard is more exact than the parameters: only what is not its rounded value is copied.

        Raises:
            StateError: the bucket is not READY.
        """
        self._require(Status.READY, "store_full")
        if self._shares:
            return
        assert self._full is not None
        layout = self.layout
        if not layout.dtypes.shard_is_slice:
            keep_changes(self.shard, self._own_slice(self._full), layout.dtypes.gather)
        elif self.place.pool.on_host:
            # By elements: what a layout says of bytes may be another model's, see ``plan``.
            nbytes = layout.shard_numel * layout.itemsize
            ctypes.memmove(self.shard.data_ptr(), self._full.data_ptr() + self.place.rank * nbytes, nbytes)
        else:
            self.shard.copy_(self._own_slice(self._full), False)

    def takes_as_master(self, index: int, value: Any) -> bool:
        """Whether ``value`` is a tensor or array like parameter ``index``, but of the dtype of its master."""
        dtypes = self.layout.dtypes
        if dtypes.shard == dtypes.param or not isinstance(value, (paddle.Tensor, np.ndarray)):
            return False
        return dtype_name(value) == dtypes.shard and list(value.shape) == self._shapes[index]

    @paddle.no_grad()
    def write_master(self, index: int, value: paddle.Tensor) -> None:
        """Gives parameter ``index``, which is READY, and its master a value of the master's dtype. Same on every rank.

        Raises:
            StateError: the bucket is not READY.
        """
        self._require(Status.READY, "write_master")
        assert self._full is not None
        value = value.detach().flatten()
        self._fill_slot(self._full, index, value)
        for piece in self.slices:
            if piece.param == index:
                cast_into(piece.tensor, value._slice(piece.param_start_numel, piece.param_start_numel + piece.numel))

    def follow_shard(self) -> None:
        """The shard was given another value: where the parameters are there, this rank's part of them follows.

        The rest is for the next gather, or for whoever writes them; until then nothing takes old parts for new writes.
        """
        if self.status is Status.READY and not self._shares and self._full is not None:
            self._round_into(self._own_slice(self._full), self.shard)

    def thaw(self) -> None:
        """Its parameters train from now on: a 16-bit shard becomes a float32 master where precision is mixed.

        The slices are then new ones.
        """
        dtypes = self.layout.dtypes
        if dtypes.shard == dtypes.sum:
            return
        master = paddle.empty([self.layout.shard_numel], dtypes.sum)
        cast_into(master, self.shard)
        self.layout = self.layout._replace(dtypes=dtypes._replace(shard=dtypes.sum))
        self._shares = False
        self.shard = master
        self.slices = self._make_slices()

    def check_params(self) -> None:
        """Raises LayoutError where a READY parameter has left its place in the full tensor (a cast, a swap)."""
        if self.status is not Status.READY or self._full is None:
            return
        for param, address in zip(self.params, self._addresses, strict=True):
            if param.data_ptr() != address or param.dtype is not self._param_dtype:
                raise LayoutError(
                    f"parameter '{param.name}' of bucket '{self.name}' no longer shares the bucket's storage: it was "
                    f"cast, moved or replaced after wrapping (expected {self.layout.dtype}, found "
                    f"{dtype_name(param)}). Call Layer.to(...) before fleet.distributed_model, and write "
                    "values with set_value or copy_"
                )

    def keep_writes(self, *, takes_back: bool = True) -> None:
        """Where a READY parameter was written past the guards, the shard gets the new value.

        Some functions give it other storage, which ``takes_back`` undoes. Others, such as an initializer or a write
        through NumPy, leave no sign at all, so this rank's part is stored whatever is seen: in mixed precision after a
        comparison, else as it is.

        Raises:
            LayoutError: a parameter was cast.
        """
        if self._shares:
            return
        for index, (param, address) in enumerate(zip(self.params, self._addresses, strict=True)):
            if takes_back and (param.data_ptr() != address or param.dtype is not self._param_dtype):
                self._take_back(index)
        self.store_full()

    def _take_back(self, index: int) -> None:
        """Copies the value of a parameter that has storage of its own into its place, and gives it that place again."""
        param, slot = self.params[index], self.layout.slots[index]
        if param.dtype is not self._param_dtype or param.size != slot.numel:
            self.check_params()
        assert self._full is not None
        here = self._full._slice(slot.offset_numel, slot.end_numel)
        here.copy_(EagerParamBase.detach(param).flatten(), False)
        point_at([self._slot_views[index]], [param])

    def _absent_vectors(self) -> dict[int, paddle.Tensor]:
        """What stands for each vector while it is freed: too little storage for its shape, which every kernel refuses.

        Without any, ``F.linear`` leaves a bias out, in silence; whatever else gets no storage raises. One element
        cannot be too little for a vector of one: it is NaN.
        """
        absent = {}
        for index, shape in enumerate(self._shapes):
            numel = self.layout.slots[index].numel
            if numel == max(shape, default=1):
                absent[index] = self.place.pool.absent(numel, self.layout.dtype)
                absent[index].get_tensor()._set_dims(shape)
        return absent

    def _release_params(self) -> None:
        for index, param in enumerate(self.params):
            if index in self._absent:
                point_at([dense(self._absent[index])], [param])
            else:
                release(param)
        self._versions = [param.inplace_version for param in self.params]

    def _was_written(self, index: int, param: EagerParamBase) -> bool:
        """Whether a parameter that is away has got storage of its own, or something in what stands for it."""
        if not param._is_initialized():
            return False
        absent = self._absent.get(index)
        if absent is None:
            return True
        if self.layout.slots[index].numel > 1:
            return not param._is_shared_buffer_with(absent)
        if param.place.is_cpu_place():
            written = bool(paddle.isfinite(EagerParamBase.detach(param)))
        else:
            written = param.inplace_version != self._versions[index]  # the value would have to be waited for
        if written:
            absent.set_value(paddle.full_like(absent, float("nan")))
        return written

    def _adopt(self, shard: paddle.Tensor | None) -> paddle.Tensor:
        """Takes over the parameters' values; returns the shard."""
        if self.status is Status.SHARDED:
            shard = self._adopt_shard() if shard is None else shard
            self._take_dtype()
            self._release_params()
            return shard
        if shard is None and not self._shares:
            shard = self._adopt_shard()
        full = self._adopt_full()
        return self._own_slice(full) if shard is None else shard

    def _adopt_full(self) -> paddle.Tensor:
        numel, dtype = self.layout.numel, self.layout.dtype
        full = paddle.zeros([numel], dtype) if self.place.keeps_full else self.place.pool.alloc(numel, dtype)
        if not self.place.keeps_full:
            full.zero_()
        for index, param in enumerate(self.params):
            self._fill_slot(full, index, EagerParamBase.detach(param).flatten())
        self._set_full(full)
        self._bind_params()
        return full

    def _fill_slot(self, full: paddle.Tensor, index: int, value: paddle.Tensor) -> None:
        slot = self.layout.slots[index]
        self._round_into(full._slice(slot.offset_numel, slot.end_numel), value)

    def _round_into(self, out: paddle.Tensor, value: paddle.Tensor) -> None:
        """As a gather will, so that what is computed before the next one is no other than after it."""
        if self._wire is not None:
            travelled = paddle.empty(value.shape, self._wire)
            cast_into(travelled, value)
            value = travelled
        cast_into(out, value)

    def _adopt_shard(self) -> paddle.Tensor:
        shard = paddle.zeros([self.layout.shard_numel], self.layout.dtypes.shard)
        for piece in self.layout.pieces(self.place.rank):
            own = EagerParamBase.detach(self.params[piece.slot]).flatten()
            own = own._slice(piece.param_offset_numel, piece.param_offset_numel + piece.numel)
            cast_into(shard._slice(piece.shard_offset_numel, piece.shard_offset_numel + piece.numel), own)
        return shard

    def _take_dtype(self) -> None:
        """Parameters that have never been gathered say what they will be."""
        for param, shape in zip(self.params, self._shapes, strict=True):
            if param.dtype is not self._param_dtype:
                typed = paddle.empty([0], self.layout.dtype)  # held: what lies below it goes with it
                dense(typed)._set_dims(shape)
                point_at([dense(typed)], [param])

    def _set_full(self, full: paddle.Tensor) -> None:
        self._full = full
        self._slot_views = slot_views(full, self.layout.slots, self._shapes)
        base, itemsize = full.data_ptr(), self.layout.itemsize
        self._addresses = [base + slot.offset_numel * itemsize for slot in self.layout.slots]

    def _bind_params(self) -> None:
        # The *same* parameter object gets the new memory: autograd, the layer and the user hold that object.
        point_at(self._slot_views, self.params)
        if not self.place.keeps_full:
            self._versions = [param.inplace_version for param in self.params]

    def _own_slice(self, full: paddle.Tensor) -> paddle.Tensor:
        start = self.place.rank * self.layout.shard_numel
        return full._slice(start, start + self.layout.shard_numel)

    def _make_slices(self) -> list[ShardSlice]:
        slices = []
        for piece in self.layout.pieces(self.place.rank):
            start = piece.shard_offset_numel
            view = self.shard._slice(start, start + piece.numel)
            part = slice_of(self.params[piece.slot], view)
            slices.append(ShardSlice(piece.slot, part, start, piece.param_offset_numel, piece.numel))
        return slices

    def _require(self, status: Status, call: str) -> None:
        if self.status is not status:
            raise StateError(
                f"bucket '{self.name}': {call} needs the state {status.name}, but it is {self.status.name}. This is "
                "a wrong order of calls on a FusedCommBuffer; let the optimizer drive it"
            )
