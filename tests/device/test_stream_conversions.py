"""What a lane on a device computes around its collectives: in its own stream, and in memory that it keeps.

Every function whose name starts with an underscore and takes a rank runs in a process that has the stand-in device.
"""

from __future__ import annotations

import gc
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt
import paddle
import pytest

from hp_sharding.comm import Communicator, Work, add_into, cast_into, create_communicators, stream_sums
from tests.device import standin
from tests.device.gates import DeviceGate
from tests.device.parts import Found, Part, find
from tests.unit.test_comm_convert import PAIRS

pytestmark = pytest.mark.usefixtures("standin_device")

_SLOW = standin.Pace(latency_ms=10.0)
_NUMEL = 1000


@pytest.fixture(scope="module")
def found(standin_device: None, request: pytest.FixtureRequest) -> Found:
    """What all functions for that many ranks have found there."""
    return find(request.param, _PARTS[request.param])


def _lane(nranks: int) -> Communicator:
    return create_communicators(range(nranks), ["one"], timeout_s=20)["one"]


class Case(NamedTuple):
    """A collective: the dtypes of input, wire and output, and whether it adds."""

    op: str
    own: str
    wire: str
    result: str
    accumulate: bool = False


_CASES = [
    Case("all_gather", "float32", "bfloat16", "bfloat16"),
    Case("all_gather", "float32", "bfloat16", "float32"),
    Case("all_gather", "float16", "float16", "float32"),
    Case("reduce_scatter", "float32", "float32", "float32", accumulate=True),
    Case("reduce_scatter", "float16", "float16", "float16", accumulate=True),
    Case("reduce_scatter", "bfloat16", "bfloat16", "float32"),
    Case("reduce_scatter", "bfloat16", "bfloat16", "float32", accumulate=True),
    Case("reduce_scatter", "float32", "float16", "float32"),
    Case("reduce_scatter", "float32", "float16", "float32", accumulate=True),
    Case("reduce_scatter", "float32", "bfloat16", "bfloat16"),
    Case("all_reduce", "float16", "float16", "float16"),
    Case("all_reduce", "float32", "bfloat16", "float32"),
]


def _values(rank: int, numel: int) -> npt.NDArray[np.float32]:
    """So small that every dtype has them and their sums."""
    return ((np.arange(numel) % 5 + 1) * (rank + 1)).astype(np.float32)


def _start(
    comm: Communicator, case: Case, numel: int = _NUMEL, after: Work | None = None
) -> tuple[Work, paddle.Tensor]:
    """With an input that nobody else has; and the output. A rank's part has ``numel`` elements."""
    part, whole = _values(comm.rank, numel), _values(comm.rank, comm.nranks * numel)
    named: Any = {"after": after} | ({} if case.own == case.wire else {"wire_dtype": case.wire})
    if case.op == "all_gather":
        output = paddle.to_tensor(whole).cast(case.result)
        return comm.all_gather(output, paddle.to_tensor(part).cast(case.own), **named), output
    data = paddle.to_tensor(whole).cast(case.own)
    if case.op == "all_reduce":
        return comm.all_reduce(data, **named), data
    output = paddle.to_tensor(part).cast(case.result)
    return comm.reduce_scatter(output, data, accumulate=case.accumulate, **named), output


def _expected(rank: int, nranks: int, case: Case, numel: int = _NUMEL) -> npt.NDArray[Any]:
    if case.op == "all_gather":
        return np.concatenate([_values(each, numel) for each in range(nranks)])
    total = np.sum([_values(each, nranks * numel) for each in range(nranks)], axis=0)
    if case.op == "all_reduce":
        return total
    held = _values(rank, numel) if case.accumulate else 0.0
    return total[rank * numel : (rank + 1) * numel] + held


def _wrong(rank: int, nranks: int, case: Case, output: paddle.Tensor, numel: int = _NUMEL) -> list[str]:
    """The name of the case where its output is not as expected."""
    is_right = np.array_equal(output.cast("float32").numpy(), _expected(rank, nranks, case, numel))
    return [] if is_right else [f"{case} of {numel} on rank {rank}"]


# ---- the host goes on ----


def _start_everything(rank: int, nranks: int) -> list[tuple[Case, int, bool]]:
    """How often the host has stood still while each case was started, and whether that was done at once."""
    device, comm, found = standin.Device(), _lane(nranks), []
    for case in _CASES:
        gate = DeviceGate()
        before = sum(waits.blocked for waits in device.host_waits())
        work, _ = _start(comm, case, after=gate)
        found.append((case, sum(waits.blocked for waits in device.host_waits()) - before, work.done()))
        gate.open()
        work.wait()
    return found


@pytest.mark.parametrize("found", [2, 3], indirect=True)
def test_the_host_waits_for_nothing_that_it_starts(found: Found) -> None:
    for result in found.of(_start_everything):
        assert result == [(case, 0, False) for case in _CASES]


# ---- memory ----


def _drop_everything(rank: int, nranks: int) -> tuple[list[str], int]:
    """Nobody has the inputs, and of every second collective nobody has anything."""
    device, comm, wrong = standin.Device(), _lane(nranks), []
    device.set_pace(_SLOW)
    for case in _CASES:
        work, output = _start(comm, case)
        work.wait()
        wrong += _wrong(rank, nranks, case, output)
        del output
        _start(comm, case)
    last, _ = _start(comm, _CASES[0])
    last.wait()
    paddle.ones([1]).numpy()
    return wrong, device.writes_after_free()


@pytest.mark.parametrize("found", [2, 3], indirect=True)
def test_what_a_conversion_touches_lives_until_it_is_over(found: Found) -> None:
    assert found.of(_drop_everything) == [([], 0)] * found.nranks


def _grow(rank: int, nranks: int) -> tuple[list[str], int]:
    """Each collective needs more of the lane's memory than the one before, which has not begun yet."""
    device, comm, wrong = standin.Device(), _lane(nranks), []
    device.set_pace(_SLOW)
    for number, case in enumerate(_CASES):
        gate, sizes = DeviceGate(), [10, (2 * number + 1) * _NUMEL, (2 * number + 2) * _NUMEL, 20]
        started = [_start(comm, case, numel, gate if numel == sizes[0] else None) for numel in sizes]
        gc.collect()
        noise = [paddle.full([numel], float("nan")) for numel in sizes * 4]
        gate.open()
        for (work, output), numel in zip(started, sizes, strict=True):
            work.wait()
            wrong += _wrong(rank, nranks, case, output, numel)
        assert len(noise) == 4 * len(sizes)
    return wrong, device.writes_after_free()


@pytest.mark.parametrize("found", [2, 3], indirect=True)
def test_memory_of_a_lane_that_grows_leaves_what_is_under_way_alone(found: Found) -> None:
    assert found.of(_grow) == [([], 0)] * found.nranks


_BLOCK_NUMEL = 1 << 18
_N_QUEUED = 6
_QUEUED = [
    Case("all_gather", "float32", "bfloat16", "float32"),
    Case("reduce_scatter", "float32", "float16", "float32", accumulate=True),
    Case("all_reduce", "float32", "bfloat16", "float32"),
]


def _queue_on_one_lane(rank: int, nranks: int) -> dict[str, list[float]]:
    """How much lives on the device, in bytes an element of a whole, while many of a kind are on their way."""
    device, found = standin.Device(), {}
    device.set_pace(_SLOW)
    for case in _QUEUED:
        comm = _lane(nranks)  # which has no memory of its own yet
        paddle.ones([4]).sum().item()
        whole, part = paddle.ones([nranks * _BLOCK_NUMEL], case.own), paddle.ones([_BLOCK_NUMEL], case.own)
        outputs = [paddle.ones([_BLOCK_NUMEL], case.result), paddle.ones([nranks * _BLOCK_NUMEL], case.result)]
        named: Any = {} if case.own == case.wire else {"wire_dtype": case.wire}
        before, live = device.live_bytes(), []
        for _ in range(_N_QUEUED):
            if case.op == "all_gather":
                work = comm.all_gather(outputs[1], part, **named)
            elif case.op == "reduce_scatter":
                work = comm.reduce_scatter(outputs[0], whole, accumulate=case.accumulate, **named)
            else:
                work = comm.all_reduce(whole, **named)
            live.append((device.live_bytes() - before) / (nranks * _BLOCK_NUMEL))
        work.wait()
        live.append((device.live_bytes() - before) / (nranks * _BLOCK_NUMEL))
        found[str(case)] = live
    return found


@pytest.mark.parametrize("found", [2, 3], indirect=True)
def test_all_that_is_queued_on_a_lane_shares_its_memory(found: Found) -> None:
    for result in found.of(_queue_on_one_lane):
        for case, live in result.items():
            assert live == [live[0]] * (_N_QUEUED + 1), f"{case}: it grows with what is queued"
            # What is sent and what is received, in 16 bits, and two pieces in float32.
            assert live[0] <= 4 + 8 / found.nranks + 0.1, case


def _send_much(rank: int, nranks: int) -> list[int]:
    """How much lives on the device after collectives that need more than a lane keeps."""
    device, comm, live = standin.Device(), _lane(nranks), []
    for case in _QUEUED:
        paddle.ones([4]).sum().item()
        before = device.live_bytes()
        with mock.patch.object(stream_sums, "_KEPT_BYTES", 1000):
            work, output = _start(comm, case)
        work.wait()
        del output
        live.append(device.live_bytes() - before)
    return live


@pytest.mark.parametrize("found", [2], indirect=True)
def test_a_lane_keeps_nothing_that_is_very_large(found: Found) -> None:
    assert found.of(_send_much) == [[0] * len(_QUEUED)] * found.nranks


# ---- copies and sums without a collective ----


def _convert_behind(rank: int, nranks: int) -> list[str]:
    """Queued behind what is still to be computed, on a stream that stands still."""
    device, wrong = standin.Device(), []
    paddle.set_device("npu")
    held = device.held_stream()
    before = sum(waits.blocked for waits in device.host_waits())
    outputs = []
    with paddle.device.stream_guard(held.stream):
        for out_dtype, source_dtype in PAIRS:
            source = paddle.zeros([_NUMEL], source_dtype)
            source.copy_(paddle.full([_NUMEL], 3.0, source_dtype), False)
            copied, added = paddle.full([_NUMEL // 10, 10], 2.0, out_dtype), paddle.full([_NUMEL], 2.0, out_dtype)
            cast_into(copied, source)
            add_into(added, source)
            outputs.append((copied, added))
    if sum(waits.blocked for waits in device.host_waits()) != before:
        wrong.append("the host stood still")
    held.open()
    held.stream.synchronize()
    for pair, (copied, added) in zip(PAIRS, outputs, strict=True):
        if not (copied.cast("float32").numpy() == 3.0).all() or copied.shape != [_NUMEL // 10, 10]:
            wrong.append(f"copied {pair}")
        if not (added.cast("float32").numpy() == 5.0).all():
            wrong.append(f"added {pair}")
    return wrong


@pytest.mark.parametrize("found", [2], indirect=True)
def test_copies_and_sums_of_other_dtypes_are_queued(found: Found) -> None:
    assert found.of(_convert_behind) == [[]] * found.nranks


_EVERYWHERE: list[Part] = [_start_everything, _drop_everything, _grow, _queue_on_one_lane]
_PARTS: dict[int, list[Part]] = {2: [*_EVERYWHERE, _send_much, _convert_behind], 3: _EVERYWHERE}
