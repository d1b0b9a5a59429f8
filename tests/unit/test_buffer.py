"""``FusedCommBuffer`` and ``GradientStorage``: states, storage, and whose memory is whose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base.framework import EagerParamBase

from hp_sharding.buffer import BufferPlace, FusedCommBuffer, Status
from hp_sharding.errors import CommError, LayoutError, StateError
from hp_sharding.gradient_storage import GradientStorage
from hp_sharding.layout import BucketLayout, BucketRules, ParamSpec, plan_buckets
from tests.fakes import PoisoningPool, WaitingLane, values

SHAPES = [(3, 5), (200,), (7,), ()]


def _params(shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: str = "float32") -> list[EagerParamBase]:
    paddle.seed(3)
    made = [paddle.randn(shape, "float32").astype(dtype) for shape in shapes]
    return [EagerParamBase.from_tensor(tensor, trainable=True) for tensor in made]


def _layout(params: Sequence[EagerParamBase], nranks: int = 1) -> BucketLayout:
    specs = [
        ParamSpec(f"p{i}", param.size, str(param.dtype).split(".")[-1], param.element_size(), 0, False)
        for i, param in enumerate(params)
    ]
    [layout] = plan_buckets(specs, ["root"], BucketRules(nranks, 10**9, True, True))
    return layout


def _buffer(
    params: Sequence[EagerParamBase], *, keeps_full: bool = False, nranks: int = 1, rank: int = 0
) -> FusedCommBuffer:
    lane = WaitingLane("gather", nranks=nranks, rank=rank)
    return FusedCommBuffer(_layout(params, nranks), params, BufferPlace(rank, lane, PoisoningPool(), keeps_full))


def _pool(buffer: FusedCommBuffer) -> PoisoningPool:
    assert isinstance(buffer.place.pool, PoisoningPool)
    return buffer.place.pool


# -- states --------------------------------------------------------------------------------------------------------

_REACH: dict[Status, Callable[[FusedCommBuffer], object]] = {
    Status.READY: lambda buffer: None,
    Status.SHARDED: lambda buffer: buffer.mark_stale(),
    Status.SYNCING: lambda buffer: [call() for call in (buffer.mark_stale, buffer.start_gather)],
}
_CALLS: dict[str, tuple[Status, Status]] = {
    "start_gather": (Status.SHARDED, Status.SYNCING),
    "finish_gather": (Status.SYNCING, Status.READY),
    "mark_stale": (Status.READY, Status.SHARDED),
    "free": (Status.READY, Status.SHARDED),
    "store_full": (Status.READY, Status.READY),
}


_FREEING = [(call, False) for call in _CALLS]
_KEEPING = [(call, True) for call in _CALLS if call != "free"]


@pytest.mark.parametrize("state", list(Status))
@pytest.mark.parametrize(("call", "keeps_full"), [*_FREEING, *_KEEPING])
def test_each_call_has_one_state_to_start_from(state: Status, call: str, keeps_full: bool) -> None:
    buffer = _buffer(_params(), keeps_full=keeps_full)
    assert buffer.status is Status.READY
    _REACH[state](buffer)
    assert buffer.status is state
    before, after = _CALLS[call]
    if state is before:
        getattr(buffer, call)()
        assert buffer.status is after
        return
    with pytest.raises(StateError, match=rf"bucket '0:root': {call} needs the state {before.name}.*is {state.name}"):
        getattr(buffer, call)()
    assert buffer.status is state


def test_a_refused_call_starts_no_collective() -> None:
    buffer = _buffer(_params())
    with pytest.raises(StateError):
        buffer.start_gather()
    assert isinstance(buffer.place.gather, WaitingLane)
    assert buffer.place.gather.log == []
    assert buffer.gather_work is None


def test_a_failed_gather_stays_under_way() -> None:
    buffer = _buffer(_params(), keeps_full=True)
    assert isinstance(buffer.place.gather, WaitingLane)
    buffer.place.gather.failing.add("all_gather")
    buffer.mark_stale()
    buffer.start_gather()
    with pytest.raises(CommError, match="'0:root' failed on request"):
        buffer.finish_gather()
    assert buffer.status is Status.SYNCING


# -- parameters and the full tensor ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("keeps_full", [False, True])
def test_parameters_become_views_of_one_tensor(dtype: str, keeps_full: bool) -> None:
    params = _params(dtype=dtype)
    before = [param.astype("float64").numpy() for param in params]
    buffer = _buffer(params, keeps_full=keeps_full)
    assert buffer.full is not None
    for param, slot, value in zip(params, buffer.layout.slots, before, strict=True):
        assert param.data_ptr() == buffer.full.data_ptr() + slot.offset_numel * buffer.layout.itemsize
        assert param.data_ptr() % 32 == buffer.full.data_ptr() % 32
        assert np.array_equal(param.astype("float64").numpy(), value)
        assert param.astype("float64").numpy().shape == value.shape
    for start, end in buffer.layout.gaps():
        assert (buffer.full._slice(start, end).astype("float32").numpy() == 0).all()


def test_the_shard_is_a_slice_of_a_full_tensor_that_stays() -> None:
    params = _params()
    buffer = _buffer(params, keeps_full=True)
    assert buffer.full is not None
    assert buffer.shard.data_ptr() == buffer.full.data_ptr()
    buffer.mark_stale()
    address = params[0].data_ptr()
    buffer.start_gather()
    buffer.finish_gather()
    assert params[0].data_ptr() == address


def test_free_lets_go_of_the_memory_and_keeps_what_can_be_known() -> None:
    params = _params()
    before = values(params)
    buffer = _buffer(params)
    buffer.free()
    assert buffer.full is None
    for param, shape in zip(params, SHAPES, strict=True):
        if param.size == 1:
            assert np.isnan(param.numpy()).all()
        else:
            with pytest.raises(RuntimeError, match=r"holder_ should not be null|memory_size\(\)"):
                param.sum()
        is_vector = param.size == max(shape, default=1)
        assert param._is_initialized() == is_vector, "a bias without any storage would be left out in silence"
        assert (tuple(param.shape), param.dtype, param.stop_gradient) == (shape, paddle.float32, False)
    held = _pool(buffer).allocated_bytes
    buffer.start_gather()
    assert _pool(buffer).allocated_bytes == held, "the freed block was not used again"
    buffer.finish_gather()
    assert all(map(np.array_equal, values(params), before))


def test_parameters_are_bound_only_once_the_gather_is_done() -> None:
    params = _params()
    buffer = _buffer(params)
    buffer.free()
    work = buffer.start_gather()
    under_way = buffer.gather_work
    assert under_way is work
    assert not work.done()
    assert not params[0]._is_initialized()
    assert buffer.full is not None
    assert np.isnan(buffer.full.numpy()).all()
    buffer.finish_gather()
    assert work.done()
    assert buffer.gather_work is None
    assert not np.isnan(params[0].numpy()).any()


def test_updates_of_the_shard_arrive_with_the_gather() -> None:
    params = _params()
    before = values(params)
    buffer = _buffer(params)
    for piece in buffer.slices:
        piece.tensor.set_value(piece.tensor + 1)
    assert all(map(np.array_equal, values(params), before))
    buffer.free()
    buffer.start_gather()
    buffer.finish_gather()
    assert all(map(np.array_equal, values(params), [value + 1 for value in before]))


def test_what_is_written_to_parameters_is_kept_by_store_full() -> None:
    params = _params()
    buffer = _buffer(params)
    params[1].set_value(paddle.full([200], 7.0))
    buffer.store_full()
    buffer.free()
    buffer.start_gather()
    buffer.finish_gather()
    assert (params[1].numpy() == 7).all()


class _Plan(BucketLayout):
    """Of small storage that stands for more."""

    @property
    def shard_nbytes(self) -> int:
        return 3 * self.shard_numel * self.itemsize


def test_a_shard_takes_as_much_as_it_has() -> None:
    params = _params()
    place = BufferPlace(1, WaitingLane("gather", nranks=2, rank=1), PoisoningPool(), keeps_full=False)
    buffer = FusedCommBuffer(_Plan(*_layout(params, 2)), params, place)
    layout, full = buffer.layout, paddle.full([10 * buffer.layout.numel], 5.0)
    buffer._full, around = full._slice(0, layout.numel), paddle.zeros([10 * layout.numel])
    full[: layout.shard_numel], full[layout.shard_numel : layout.numel] = 6.0, 7.0
    buffer.shard = around._slice(0, layout.shard_numel)
    buffer.store_full()
    assert (buffer.shard.numpy() == 7).all()
    assert np.count_nonzero(around.numpy()) == layout.shard_numel


@pytest.mark.parametrize("keeps_full", [False, True])
def test_a_parameter_that_left_its_place_is_named(keeps_full: bool) -> None:
    params = _params()
    buffer = _buffer(params, keeps_full=keeps_full)
    buffer.check_params()
    paddle.zeros([7])._share_buffer_to(params[2])
    with pytest.raises(LayoutError, match=f"'{params[2].name}' of bucket '0:root' no longer shares"):
        buffer.check_params()


def test_a_cast_after_wrapping_is_named() -> None:
    layer = nn.Linear(3, 5)
    buffer = _buffer(layer.parameters(), keeps_full=True)
    layer.to(dtype="float64")
    with pytest.raises(LayoutError, match="expected float32, found float64"):
        buffer.check_params()


def test_a_freed_bucket_has_nothing_to_check() -> None:
    buffer = _buffer(_params())
    buffer.free()
    buffer.check_params()


# -- slices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_full", [False, True])
@pytest.mark.parametrize("nranks", [1, 2, 3, 8])
def test_slices_of_all_ranks_make_up_the_parameters(nranks: int, keeps_full: bool) -> None:
    found: dict[int, list[np.ndarray]] = {index: [] for index in range(len(SHAPES))}
    for rank in range(nranks):
        params = _params()
        buffer = _buffer(params, nranks=nranks, rank=rank, keeps_full=keeps_full)
        for piece in buffer.slices:
            assert piece.tensor.shape == [piece.numel]
            assert piece.tensor.data_ptr() == buffer.shard.data_ptr() + 4 * piece.start_numel
            found[piece.param].append(piece.tensor.numpy())
    for index, param in enumerate(_params()):
        assert np.array_equal(np.concatenate(found[index]), param.numpy().reshape(-1))


def test_slices_are_treated_as_their_parameters() -> None:
    params = _params()
    params[0].optimize_attr = {"learning_rate": 0.25}
    params[1].regularizer = paddle.regularizer.L2Decay(0.5)
    params[1].need_clip = False
    params[2].stop_gradient = True
    buffer = _buffer(params)
    first, second, third, _ = (piece.tensor for piece in buffer.slices)
    assert [piece.tensor.name for piece in buffer.slices] == [param.name for param in params]
    assert first.optimize_attr == {"learning_rate": 0.25}
    assert second.regularizer is params[1].regularizer
    assert (first.need_clip, second.need_clip) == (True, False)
    assert (first.stop_gradient, third.stop_gradient) == (False, True)


# -- gradients -------------------------------------------------------------------------------------------------------


def _storage(dtype: str = "float32") -> tuple[GradientStorage, list[EagerParamBase], BucketLayout, PoisoningPool]:
    params, pool = _params(dtype=dtype), PoisoningPool()
    layout = _layout(params)
    return GradientStorage(layout, params, pool), params, layout, pool


def test_gradients_are_copied_in_and_added_up() -> None:
    storage, _, layout, _ = _storage()
    storage.alloc()
    gradient = paddle.full([200], 2.0)
    storage.put(1, gradient)
    storage.put(1, gradient)
    storage.put(0, paddle.ones([3, 5]))
    assert (gradient.numpy() == 2).all(), "what was handed in is only read"
    assert storage.filled == [True, True, False, False]
    assert storage.full is not None
    slot = layout.slots[1]
    assert (storage.full.numpy()[slot.offset_numel : slot.end_numel] == 4).all()
    assert (storage.view(0).numpy() == np.ones([3, 5])).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (1, 5), (4, 5)], ids=str)
def test_a_gradient_of_another_size_is_refused(dtype: str, adds: bool, shape: tuple[int, ...]) -> None:
    """What a hook returned: it would be read past its end, or each element be added everywhere."""
    storage, params, _, _ = _storage(dtype)
    storage.alloc()
    if adds:
        storage.put(0, paddle.ones([3, 5], dtype))
    with pytest.raises(StateError, match=rf"'{params[0].name}'.*expected \[3, 5\].*hook"):
        storage.put(0, paddle.ones(shape, dtype))
    assert storage.filled[0] == adds
    storage.put(0, paddle.ones([15], dtype))
    assert (storage.view(0).numpy() == storage.view(0).numpy()[0, 0]).all()


def test_padding_is_zero_and_missing_gradients_become_zero() -> None:
    storage, _, layout, _ = _storage("bfloat16")
    storage.alloc()
    assert storage.full is not None
    assert layout.gaps()
    for start, end in layout.gaps():
        assert (storage.full._slice(start, end).astype("float32").numpy() == 0).all()
    storage.put(1, paddle.ones([200], "bfloat16"))
    storage.fill_missing()
    flat = storage.full.astype("float32").numpy()
    assert flat.sum() == 200, "poison or padding is left"


def test_storage_knows_its_own_views() -> None:
    storage, params, _, _ = _storage()
    assert not storage.holds(0, params[0])
    storage.alloc()
    assert storage.holds(0, storage.view(0))
    assert not storage.holds(1, storage.view(0))
    assert not storage.holds(0, paddle.ones([3, 5]))
    assert storage.view(0).shape == [3, 5]


def test_reset_forgets_gradients_and_free_the_storage_too() -> None:
    storage, _, _, pool = _storage()
    storage.alloc()
    storage.put(2, paddle.ones([7]))
    storage.reset()
    storage.put(2, paddle.full([7], 3.0))
    assert (storage.view(2).numpy() == 3).all(), "added to what was forgotten"
    held = pool.allocated_bytes
    storage.free()
    assert storage.full is None
    assert storage.filled == [False] * 4
    storage.alloc()
    assert pool.allocated_bytes == held, "the freed block was not used again"


def test_a_collective_keeps_freed_gradients_alive() -> None:
    storage, _, layout, _ = _storage()
    storage.alloc()
    storage.put(0, paddle.ones([3, 5]))
    storage.fill_missing()
    assert storage.full is not None
    lane = WaitingLane("reduce")
    output = paddle.zeros([layout.numel])
    work = lane.reduce_scatter(output, storage.full)
    storage.free()
    storage.alloc()
    work.wait()
    assert output.numpy().sum() == 15
