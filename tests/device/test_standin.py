"""The stand-in device does what tests on it rely on: it computes in place, and its collectives are right, late and in
order. Every function whose name starts with an underscore runs in a process that has the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn

from tests import harness
from tests.device import standin
from tests.device.running import on_device, start

pytestmark = pytest.mark.usefixtures("standin_device")

_LATE = standin.Pace(latency_ms=50.0)
_ISSUED_MS = 5.0
_VERY_LATE = standin.Pace(latency_ms=250.0)  # for waits that are to be seen on a busy machine, too
_WAITED_MS = 100.0
_PIECE_NUMEL = (1 << 20) // 4 + 77  # more than is sent in one piece, and no multiple of anything


# ---- computing ----


def _trained(device: str) -> list[npt.NDArray[np.float32]]:
    paddle.set_device(device)
    paddle.seed(0)
    rng = np.random.default_rng(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    for parameter in net.parameters():
        parameter.set_value(rng.standard_normal(parameter.shape, dtype=np.float32))
    optimizer = paddle.optimizer.AdamW(parameters=net.parameters(), learning_rate=0.1)
    for _ in range(3):
        loss = nn.functional.cross_entropy(
            net(paddle.to_tensor(rng.standard_normal((5, 8), dtype=np.float32))), paddle.arange(5) % 4
        )
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    assert all(str(parameter.place).startswith(f"Place({device}") for parameter in net.parameters())
    return [parameter.numpy() for parameter in net.parameters()]


def _train_on_both(rank: int, nranks: int) -> Any:
    return _trained("npu"), _trained("cpu")


def test_training_gives_what_it_gives_on_the_cpu_bit_for_bit() -> None:
    on_standin, on_cpu = on_device(_train_on_both, 1)[0]
    for ours, theirs in zip(on_standin, on_cpu, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _write_to_views(rank: int, nranks: int) -> Any:
    paddle.set_device("npu")
    flat = paddle.zeros([64])
    view = flat._slice(4, 8)
    view.add_(paddle.ones([4]))
    view.scale_(3.0)
    layer = nn.Linear(2, 2, bias_attr=False)
    flat._slice(16, 20)._share_buffer_to(layer.weight)
    layer.weight.get_tensor()._set_dims([2, 2])
    layer.weight.set_value(paddle.full([2, 2], 5.0))
    sgd = paddle.optimizer.SGD(0.5, parameters=layer.parameters())
    layer(paddle.ones([1, 2])).sum().backward()
    sgd.step()
    return flat.numpy()


def test_what_is_written_to_a_view_is_written_to_the_flat_buffer() -> None:
    flat = on_device(_write_to_views, 1)[0]
    expected = np.zeros(64, np.float32)
    expected[4:8], expected[16:20] = 3.0, 4.5
    np.testing.assert_array_equal(flat, expected)


# ---- memory ----


def _allocate_and_free(rank: int, nranks: int) -> Any:
    paddle.set_device("npu")
    device = standin.Device()
    paddle.ones([4]).sum().item()
    before = device.live_bytes(), paddle.device.memory_allocated()
    device.forget_peak()
    fresh = paddle.empty([1 << 18])
    held = device.live_bytes(), paddle.device.memory_allocated()
    unwritten = float(fresh[1000])
    del fresh
    return before, held, (device.live_bytes(), paddle.device.memory_allocated()), device.peak_bytes(), unwritten


def test_memory_is_counted_and_fresh_memory_is_nan() -> None:
    before, held, after, peak, unwritten = on_device(_allocate_and_free, 1)[0]
    assert after == before == (0, 0)
    assert held == (1 << 20, 1 << 20)
    assert 1 << 20 <= peak < (1 << 20) + 8192
    assert np.isnan(unwritten)


# ---- collectives ----


def _own(rank: int, numel: int, dtype: str) -> paddle.Tensor:
    """Whole numbers, small enough for every dtype and for their sums."""
    return ((paddle.arange(numel) * 7 + rank * 13) % 31).astype(dtype)


def _each_collective(rank: int, nranks: int, dtype: str) -> dict[str, Any]:
    own = _own(rank, _PIECE_NUMEL, dtype)
    whole = paddle.zeros([nranks * _PIECE_NUMEL], dtype)
    dist.stream.all_gather(whole, own)
    part = paddle.zeros([_PIECE_NUMEL], dtype)
    dist.stream.reduce_scatter(part, _own(rank, nranks * _PIECE_NUMEL, dtype))
    exchanged = paddle.zeros([nranks * _PIECE_NUMEL], dtype)
    dist.stream.alltoall_single(exchanged, _own(rank, nranks * _PIECE_NUMEL, dtype))
    summed, sent, reduced = own.clone(), own.clone(), own.clone()
    dist.stream.all_reduce(summed)
    dist.stream.broadcast(sent, nranks - 1)
    dist.stream.reduce(reduced, 0)
    received = paddle.zeros([_PIECE_NUMEL], dtype)
    _pass_on(rank, nranks, own, received)
    found = {"all_gather": whole, "reduce_scatter": part, "all_reduce": summed, "broadcast": sent, "reduce": reduced}
    return {kind: _numpy(tensor) for kind, tensor in {**found, "all_to_all": exchanged, "message": received}.items()}


def _pass_on(rank: int, nranks: int, own: paddle.Tensor, received: paddle.Tensor) -> None:
    """Each rank's to the next one. The first sends before it receives, so that nobody waits in a circle."""
    if rank > 0:
        dist.recv(received, rank - 1)
    dist.send(own, (rank + 1) % nranks)
    if rank == 0:
        dist.recv(received, nranks - 1)


def _numpy(tensor: paddle.Tensor) -> npt.NDArray[Any]:
    return tensor.astype("float32").numpy()


def _expected(rank: int, nranks: int) -> dict[str, npt.NDArray[Any]]:
    def own(of: int, numel: int = _PIECE_NUMEL) -> npt.NDArray[Any]:
        return ((np.arange(numel) * 7 + of * 13) % 31).astype(np.float32)

    ranks, piece = range(nranks), slice(rank * _PIECE_NUMEL, (rank + 1) * _PIECE_NUMEL)
    summed = sum((own(of) for of in ranks), np.zeros(_PIECE_NUMEL, np.float32))
    pieces = [own(of, nranks * _PIECE_NUMEL)[piece] for of in ranks]
    return {
        "all_gather": np.concatenate([own(of) for of in ranks]),
        "reduce_scatter": sum(pieces, np.zeros(_PIECE_NUMEL, np.float32)),
        "all_to_all": np.concatenate(pieces),
        "all_reduce": summed,
        "broadcast": own(nranks - 1),
        "reduce": summed if rank == 0 else own(rank),
        "message": own((rank - 1) % nranks),
    }


def _every_dtype(rank: int, nranks: int) -> Any:
    return {
        dtype: _each_collective(rank, nranks, dtype) for dtype in ("float32", "float16", "bfloat16", "int32", "int64")
    }


@pytest.mark.parametrize("nranks", [2, 3])
def test_each_collective_in_each_dtype(nranks: int) -> None:
    for rank, found in enumerate(on_device(_every_dtype, nranks, pace=standin.Pace(jitter_ms=5.0))):
        expected = _expected(rank, nranks)
        for dtype, results in found.items():
            for kind, result in results.items():
                np.testing.assert_array_equal(result, expected[kind], err_msg=f"{kind} of {dtype} on rank {rank}")


def _exchange_unequal(rank: int, nranks: int) -> Any:
    """Rank a sends a + 2b elements to rank b, so that rank 0 keeps none."""
    device = standin.Device()
    to_ranks, from_ranks = [rank + 2 * other for other in range(nranks)], [other + 2 * rank for other in range(nranks)]
    given, taken = paddle.arange(sum(to_ranks)) + 100 * rank, paddle.zeros([sum(from_ranks)], "int64")
    group = dist.communication.group._get_global_group().process_group
    held = device.held_stream()
    with paddle.device.stream_guard(held.stream):
        task = group.all_to_all_single(taken, given, from_ranks, to_ranks, False)
    stale = taken.numpy()
    held.open()
    task.wait()
    return stale, taken.numpy(), device.collectives()["all_to_all"]


def test_an_all_to_all_s_pieces_may_differ_in_size_and_arrive_later() -> None:
    to_rank_1 = [0, 1, *range(101, 104), *range(202, 206)]
    to_rank_2 = [*range(2, 6), *range(104, 109), *range(206, 212)]
    expected = [[100, 200, 201], to_rank_1, to_rank_2]
    for want, (stale, taken, progress) in zip(expected, on_device(_exchange_unequal, 3), strict=True):
        np.testing.assert_array_equal(stale, np.zeros(len(want)))
        np.testing.assert_array_equal(taken, want)
        assert progress == (1, 1, 1)


def _sum_in_turn(rank: int, nranks: int, dtype: str, values: list[list[float]]) -> Any:
    own = paddle.to_tensor(values[rank]).astype(dtype)
    part, summed = paddle.zeros([1], dtype), own.clone()
    dist.stream.reduce_scatter(part, own)
    dist.stream.all_reduce(summed)
    return part.astype("float32").item(), summed.astype("float32").tolist()


@pytest.mark.parametrize(("dtype", "large"), [("float16", 2048.0), ("bfloat16", 256.0), ("float32", 2048.0)])
def test_sums_of_16_bits_are_rounded_after_each_rank_in_turn(dtype: str, large: float) -> None:
    values = [[1.0, large, 1.0], [1.0, 1.0, large], [large, 1.0, 1.0]]
    lost = 0.0 if dtype == "float32" else 2.0
    expected = [large + 2.0, large + 2.0 - lost, large + 2.0 - lost]
    for rank, (part, summed) in enumerate(on_device(_sum_in_turn, 3, dtype, values)):
        assert (part, summed) == (expected[rank], expected)


# ---- order ----


def _ms(action: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = action()
    return (time.perf_counter() - begin) * 1e3, result


def _read_early(rank: int, nranks: int) -> Any:
    device = standin.Device()
    dist.stream.all_reduce(paddle.ones([4]))  # makes the communicator
    device.set_pace(_LATE)
    found = []
    for _ in range(3):
        values, part = paddle.full([4], rank + 1.0), paddle.zeros([2])
        issued_ms, task = _ms(lambda: dist.stream.reduce_scatter(part, values, sync_op=False))  # noqa: B023
        stale, done = part.numpy(), task.is_completed()
        waited_ms, _ = _ms(task.wait)
        found.append((issued_ms, stale, done, waited_ms, part.numpy(), task.is_completed()))
    return min(found, key=lambda one: one[0])


def test_a_collective_is_under_way_until_it_is_waited_for() -> None:
    for issued_ms, stale, early, waited_ms, right, late in on_device(_read_early, 2):
        assert issued_ms < _ISSUED_MS
        assert waited_ms > 30.0
        assert (early, late) == (False, True)
        np.testing.assert_array_equal(stale, np.zeros(2))
        np.testing.assert_array_equal(right, np.full(2, 3.0))


def _keep_order(rank: int, nranks: int) -> Any:
    device = standin.Device()
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (one, other):
        dist.stream.all_reduce(paddle.ones([4]), group=group)
    device.set_pace(_LATE)
    values = paddle.full([4], rank + 1.0)

    def in_turn() -> None:
        dist.stream.all_reduce(values, group=one, sync_op=False)
        dist.stream.all_reduce(values, group=one, sync_op=False).wait()

    def side_by_side() -> None:
        tasks = [dist.stream.all_reduce(paddle.ones([4]), group=group, sync_op=False) for group in (one, other)]
        for task in tasks:
            task.wait()

    in_turn_ms, _ = _ms(in_turn)
    return values.numpy(), in_turn_ms, min(_ms(side_by_side)[0] for _ in range(3))


def test_one_stream_keeps_order_and_two_go_side_by_side() -> None:
    for values, in_turn_ms, side_by_side_ms in on_device(_keep_order, 2):
        np.testing.assert_array_equal(values, np.full(4, 6.0))
        assert in_turn_ms > 100.0
        assert 50.0 <= side_by_side_ms < 95.0


def _events(rank: int, nranks: int) -> Any:
    device = standin.Device()
    group = dist.new_group([0, 1])
    dist.stream.all_reduce(paddle.ones([4]), group=group)
    device.set_pace(_LATE)
    compute, side = paddle.device.current_stream(), paddle.device.Stream("npu")
    before, after = paddle.device.Event(), paddle.device.Event()
    values = paddle.ones([4])
    before.record(compute)
    task = dist.stream.all_reduce(values, group=group, sync_op=False)
    early = before.query()
    task.wait()
    after.record(compute)
    side.wait_event(after)
    synchronized_ms, _ = _ms(side.synchronize)
    return early, after.query(), synchronized_ms, values.numpy()


def test_events_are_reached_in_their_stream_s_order() -> None:
    for early, late, synchronized_ms, values in on_device(_events, 2):
        assert early
        assert late
        assert synchronized_ms < _ISSUED_MS
        np.testing.assert_array_equal(values, np.full(4, 2.0))


def _work_on_the_side(rank: int, nranks: int) -> Any:
    device = standin.Device()
    own, part = paddle.full([4], rank + 1.0), paddle.zeros([2])
    dist.stream.reduce_scatter(part, paddle.zeros([4]))
    device.set_pace(_VERY_LATE)
    compute, side, done = paddle.device.current_stream(), paddle.device.Stream("npu"), paddle.device.Event()
    total, copied = paddle.full([2], 10.0), paddle.zeros([2])
    waits = [device.host_waits()]
    task = dist.stream.reduce_scatter(part, own, sync_op=False)
    with paddle.device.stream_guard(side):
        task.wait()
        copied.copy_(part, False)
        total.add_(part)
        scaled = total * 2.0
        rounded = scaled.cast("int32")
        done.record(side)
        waits.append(device.host_waits())
        largest = part.max()
        waits.append(device.host_waits())
    compute.wait_event(done)
    return [_numpy(one).tolist() for one in (total, copied, scaled, rounded, largest)], waits


def test_a_kernel_on_a_stream_of_its_own_comes_after_what_the_stream_was_told_before() -> None:
    for results, (before, queued, waited) in on_device(_work_on_the_side, 2):
        assert results == [[13.0] * 2, [3.0] * 2, [26.0] * 2, [26.0] * 2, 3.0]
        assert queued == before
        assert waited.blocked == before.blocked
        assert waited.kernel.blocked == before.kernel.blocked + 1
        assert waited.kernel.ms > before.kernel.ms + _WAITED_MS


def _drop_a_term(rank: int, nranks: int, keep: bool) -> Any:
    paddle.set_device("npu")
    total, term, held = paddle.zeros([4]), paddle.ones([4]), standin.Device().held_stream()
    with paddle.device.stream_guard(held.stream):
        total.add_(term)
    kept, early = term if keep else None, total.numpy()
    del term
    held.open()
    held.stream.synchronize()
    del kept
    return early, total.numpy()


@pytest.mark.parametrize("keep", [True, False])
def test_a_kernel_whose_turn_comes_late_reads_what_is_there_then(keep: bool) -> None:
    early, late = on_device(_drop_a_term, 1, keep)[0]
    np.testing.assert_array_equal(early, np.zeros(4))
    np.testing.assert_array_equal(late, np.full(4, 1.0 if keep else np.nan))


def _wait_behind_a_hold(rank: int, nranks: int) -> Any:
    device = standin.Device()
    values, side = paddle.ones([4]), paddle.device.Stream("npu")
    dist.stream.all_reduce(values)
    held = device.held_stream()
    with paddle.device.stream_guard(side):
        side.wait_event(held.event)
        task = dist.stream.all_reduce(values, sync_op=False)
    time.sleep(0.1)
    early = held.event.query(), device.collectives()["all_reduce"]
    held.open()
    task.wait()
    return early, (held.event.query(), device.collectives()["all_reduce"]), values.numpy()


def test_what_waits_for_a_held_stream_begins_when_it_is_opened() -> None:
    for early, late, values in on_device(_wait_behind_a_hold, 2):
        assert (early, late) == ((False, (2, 1, 1)), (True, (2, 2, 2)))
        np.testing.assert_array_equal(values, np.full(4, 4.0))


def _never_open(rank: int, nranks: int, drop: bool) -> None:
    paddle.set_device("npu")
    held = standin.Device().held_stream()
    event = held.event
    if drop:
        del held
    event.synchronize()


def test_a_held_stream_that_nobody_opens_ends_with_its_object_or_the_time_out() -> None:
    assert on_device(_never_open, 1, True) == [None]
    waiting = start(_never_open, 1, False, timeout_s=9.0)[0]
    assert waiting.returncode == 70
    assert "held back and not opened within 3.0" in waiting.output


def _wait_in_each_way(rank: int, nranks: int) -> list[standin.HostWaits]:
    device = standin.Device()
    values, side, event = paddle.ones([4]), paddle.device.Stream("npu"), paddle.device.Event()
    dist.stream.all_reduce(values)
    device.set_pace(_VERY_LATE)
    found = [device.host_waits()]
    for wait in (side.synchronize, event.synchronize, paddle.device.synchronize, None):
        task = dist.stream.all_reduce(values, sync_op=False)
        with paddle.device.stream_guard(side):
            if wait is not None:
                task.wait()
                event.record(side)
        (wait or task.wait)()
        found.append(device.host_waits())
    return found


def test_each_wait_of_the_host_is_counted_as_what_it_is() -> None:
    for found in on_device(_wait_in_each_way, 2):
        for turn, kind in enumerate(("stream", "event", "device", "compute")):
            before, after = found[turn]._asdict(), found[turn + 1]._asdict()
            assert [name for name in before if after[name].blocked > before[name].blocked] == [kind]
            assert [name for name in before if after[name].ms > before[name].ms + _WAITED_MS] == [kind]
        assert found[-1].blocked == found[0].blocked + 3


def _drop_the_output(rank: int, nranks: int, keep: bool) -> int:
    device = standin.Device()
    own, whole = paddle.ones([1 << 10]), paddle.zeros([nranks << 10])
    dist.stream.all_gather(whole, own)
    device.set_pace(_LATE)
    kept = dist.stream.all_gather(whole, own, sync_op=False), whole if keep else None
    del whole
    time.sleep(0.2)
    assert kept[0].is_completed()
    return device.writes_after_free()


def _drop_the_input(rank: int, nranks: int, keep: bool) -> Any:
    device = standin.Device()
    own, whole = paddle.ones([1 << 10]), paddle.zeros([nranks << 10])
    dist.stream.all_gather(whole, own)
    device.set_pace(_LATE)
    task, kept = dist.stream.all_gather(whole, own, sync_op=False), own if keep else None
    del own
    task.wait()
    del kept
    return whole.numpy()


@pytest.mark.parametrize("keep", [True, False])
def test_a_read_of_memory_that_was_freed_too_early_is_nan(keep: bool) -> None:
    for whole in on_device(_drop_the_input, 2, keep):
        np.testing.assert_array_equal(whole, np.full(2 << 10, 1.0 if keep else np.nan))


@pytest.mark.parametrize(("keep", "expected"), [(True, 0), (False, 1)])
def test_a_write_to_memory_that_was_freed_too_early_is_seen(keep: bool, expected: int) -> None:
    assert on_device(_drop_the_output, 2, keep) == [expected, expected]


# ---- faults ----


def _differ(rank: int, nranks: int) -> None:
    values = paddle.ones([4 + rank])
    dist.stream.all_reduce(values)


def test_ranks_in_different_collectives_end_and_name_both() -> None:
    outcomes = start(_differ, 2)
    assert [outcome.returncode for outcome in outcomes] == [70, 70]
    assert "rank 0 is in all_reduce of 16 bytes, rank 1 in all_reduce of 20 bytes" in outcomes[0].output


def _stay_away(rank: int, nranks: int) -> None:
    values = paddle.ones([4])
    dist.stream.all_reduce(values)
    if rank == 0:
        dist.stream.all_reduce(values)


def test_a_rank_that_waits_in_vain_ends_and_says_so() -> None:
    waiting = start(_stay_away, 2, timeout_s=9.0)[0]
    assert waiting.returncode == 70
    assert "all_reduce: another rank has not come" in waiting.output


def test_a_failure_on_the_device_reaches_the_test() -> None:
    with pytest.raises(harness.RankFailure, match="needs a group"):
        on_device(_fail, 1)


def _fail(rank: int, nranks: int) -> None:
    raise ValueError("needs a group")
