"""What a communicator on streams adds to the contract: the host goes on, streams wait, and nobody's memory goes early.

Every function whose name starts with an underscore and takes a rank runs in a process that has the stand-in device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle
import pytest

from hp_sharding.comm import Communicator, Stall, Work, create_communicators
from hp_sharding.errors import ConfigError
from tests.device import standin
from tests.device.gates import DeviceGate
from tests.device.parts import Found, Part, find
from tests.unit.test_comm_contract import SEEN_S, Gate, as_numpy, as_tensor, rounded_sum, see_done, term

pytestmark = pytest.mark.usefixtures("standin_device")

_LATE_MS = 50.0
_LATE = standin.Pace(latency_ms=_LATE_MS)
_REST_S = 0.05
"""After which a collective that nothing holds back would be over, at the pace at which processes start."""
_NUMEL = 1000

Start = Callable[[Work | None], Work]


@pytest.fixture(scope="module")
def found(standin_device: None, request: pytest.FixtureRequest) -> Found:
    """What all functions for that many ranks have found there."""
    return find(request.param, _parts()[request.param])


def _lanes(nranks: int) -> tuple[Communicator, Communicator]:
    lanes = create_communicators(range(nranks), ["one", "two"], timeout_s=20)
    return lanes["one"], lanes["two"]


# ---- the host goes on ----


def _starts(comm: Communicator) -> dict[str, Start]:
    """Every way to start a collective."""
    part, whole = paddle.ones([_NUMEL]), paddle.ones([comm.nranks * _NUMEL])
    narrow_part, narrow = part.cast("bfloat16"), whole.cast("bfloat16")
    return {
        "gather": lambda after: comm.all_gather(whole, part, after=after),
        "scatter": lambda after: comm.reduce_scatter(part, whole, after=after),
        "scatter and add": lambda after: comm.reduce_scatter(part, whole, after=after, accumulate=True),
        "scatter 16 bits": lambda after: comm.reduce_scatter(narrow_part, narrow, after=after),
        "scatter and add 16 bits": lambda after: comm.reduce_scatter(narrow_part, narrow, after=after, accumulate=True),
        "reduce": lambda after: comm.all_reduce(whole, after=after),
        "reduce 16 bits": lambda after: comm.all_reduce(narrow, after=after),
        "broadcast": lambda after: comm.broadcast(whole, src=0, after=after),
    }


def _blocked(device: standin.Device) -> list[int]:
    """How often the host has stood still, for each reason."""
    return [waits.blocked for waits in device.host_waits()]


def _start_everything(rank: int, nranks: int) -> list[tuple[str, list[int], bool]]:
    device = standin.Device()
    one, two = _lanes(nranks)
    device.set_pace(_LATE)
    found = []
    for name, start in _starts(one).items():
        for behind in ("nothing", "a lane", "a gate"):
            gate, data = DeviceGate(), paddle.ones([4])
            after = {"a lane": two.all_reduce(data, after=gate), "a gate": gate}.get(behind)
            before = _blocked(device)
            work = start(after)
            stood = [now - then for now, then in zip(_blocked(device), before, strict=True)]
            found.append((f"{name} behind {behind}", stood, after is not None and work.done()))
            gate.open()
            work.wait()
    return found


@pytest.mark.parametrize("found", [2, 3], indirect=True)
def test_the_host_waits_for_nothing_that_it_starts(found: Found) -> None:
    for result in found.of(_start_everything):
        for name, stood, done in result:
            assert (name, stood) == (name, [0] * len(standin.HostWaits._fields))
            assert (name, done) == (name, False)


def _compute_beside(rank: int, nranks: int) -> Any:
    device, gate = standin.Device(), DeviceGate()
    one, two = _lanes(nranks)
    shard = paddle.zeros([_NUMEL])
    reduced = one.reduce_scatter(shard, paddle.full([nranks * _NUMEL], rank + 1.0), after=gate)
    replicated = two.all_reduce(shard, after=reduced)
    before, weight = _blocked(device), paddle.ones([8, 8])
    for _ in range(10):
        weight = paddle.matmul(weight, weight) / 8.0
    computed = weight.numpy()
    under_way = not reduced.done() and not replicated.done() and _blocked(device) == before
    gate.open()
    replicated.wait()
    return under_way, computed, shard.numpy()


@pytest.mark.parametrize("found", [2], indirect=True)
def test_compute_goes_on_beside_a_reduction_and_the_one_that_follows_it(found: Found) -> None:
    for under_way, computed, shard in found.of(_compute_beside):
        assert under_way
        np.testing.assert_array_equal(computed, np.ones((8, 8)))
        np.testing.assert_array_equal(shard, np.full(_NUMEL, 6.0))


def _follow_the_host(rank: int, nranks: int) -> Any:
    one, _ = _lanes(nranks)
    data, gate = paddle.zeros([4]), Gate()

    def open_gate() -> None:
        data.fill_(rank + 1.0)
        gate.open()

    threading.Timer(_REST_S, open_gate).start()
    work = one.all_reduce(data, after=gate)
    opened = gate.done()
    work.wait()
    with pytest.raises(ConfigError, match=r"on npu:0, not .* on Place\(cpu\)"):
        one.all_reduce(paddle.ones([4]).cpu())
    return opened, data.numpy()


@pytest.mark.parametrize("found", [2], indirect=True)
def test_where_only_the_host_can_wait_it_does_and_what_lies_on_the_host_is_refused(found: Found) -> None:
    for opened, data in found.of(_follow_the_host):
        assert opened
        np.testing.assert_array_equal(data, np.full(4, 3.0))


# ---- order ----


def _held_begin(device: standin.Device, kind: str, queue: Callable[[], Work]) -> tuple[Work, int]:
    """What ``queue`` starts while the current stream stands still; how many of ``kind`` begin before it goes on."""
    held, before = device.held_stream(), device.collectives()[kind].begun
    with paddle.device.stream_guard(held.stream):
        work = queue()
    time.sleep(_REST_S)
    begun = device.collectives()[kind].begun - before
    held.open()
    work.wait()
    held.stream.synchronize()
    return work, begun


def _keep_order(rank: int, nranks: int) -> dict[str, Any]:
    device = standin.Device()
    one, _ = _lanes(nranks)
    data, computed = paddle.zeros([_NUMEL]), paddle.full([_NUMEL], rank + 1.0)

    def compute_then_reduce() -> Work:
        data.copy_(computed, False)
        return one.all_reduce(data)

    whole, own, read = paddle.full([nranks * _NUMEL], -1.0), paddle.ones([_NUMEL]), paddle.zeros([nranks * _NUMEL])

    def read_then_overwrite() -> Work:
        read.copy_(whole, False)
        return one.all_gather(whole, own)

    _, begun = _held_begin(device, "all_reduce", compute_then_reduce)
    _, overwritten = _held_begin(device, "all_gather", read_then_overwrite)
    values = data.numpy(), whole.numpy(), read.numpy()
    return {"begun": (begun, overwritten), "values": values, "copied": _wait_on_the_side(device, one, rank)}


def _wait_on_the_side(device: standin.Device, comm: Communicator, rank: int) -> Any:
    device.set_pace(_LATE)
    side, copied, data = paddle.device.Stream(), paddle.zeros([_NUMEL]), paddle.full([_NUMEL], rank + 1.0)
    work, before = comm.all_reduce(data), _blocked(device)
    with paddle.device.stream_guard(side):
        work.wait()
        copied.copy_(data, False)
    stood = _blocked(device) != before
    side.synchronize()
    return stood, copied.numpy()


@pytest.mark.parametrize("found", [2], indirect=True)
def test_a_collective_comes_after_what_was_computed_and_read_before_it(found: Found) -> None:
    for result in found.of(_keep_order):
        assert result["begun"] == (0, 0)
        reduced, gathered, read = result["values"]
        np.testing.assert_array_equal(reduced, np.full(_NUMEL, 3.0))
        np.testing.assert_array_equal(gathered, np.ones(2 * _NUMEL))
        np.testing.assert_array_equal(read, np.full(2 * _NUMEL, -1.0))
        stood, copied = result["copied"]
        assert not stood, "the wait of another stream held compute up"
        np.testing.assert_array_equal(copied, np.full(_NUMEL, 3.0))


def _follow_a_copy(rank: int, nranks: int) -> Any:
    """A copy of a group of one is made when somebody waits for it: here a lane that is busy for a while."""
    device = standin.Device()
    one, two = _lanes(nranks)
    alone = create_communicators([rank], ["alone"])["alone"]
    device.set_pace(_LATE)
    output, other = paddle.zeros([_NUMEL]), paddle.ones([_NUMEL])
    for _ in range(3):
        one.all_reduce(other)
    copy = alone.reduce_scatter(output, paddle.ones([_NUMEL]), after=two.all_reduce(paddle.ones([4])))
    follower = one.all_reduce(other, after=copy)
    copy.wait()
    found = output.numpy()
    follower.wait()
    return found, other.numpy()


@pytest.mark.parametrize("found", [2], indirect=True)
def test_a_copy_that_a_lane_has_made_is_waited_for_as_well(found: Found) -> None:
    for copied, other in found.of(_follow_a_copy):
        np.testing.assert_array_equal(copied, np.ones(_NUMEL))
        np.testing.assert_array_equal(other, np.full(_NUMEL, 16.0))


# ---- memory ----


class Case(NamedTuple):
    """A collective, and of what."""

    op: str
    dtype: str
    accumulate: bool = False


_CASES = [
    Case("all_gather", "float32"),
    Case("all_gather", "int16"),
    Case("reduce_scatter", "float32"),
    Case("reduce_scatter", "float32", accumulate=True),
    Case("reduce_scatter", "bfloat16"),
    Case("reduce_scatter", "bfloat16", accumulate=True),
    Case("all_reduce", "float32"),
    Case("all_reduce", "bfloat16"),
    Case("broadcast", "float32"),
]


def _values(rank: int, numel: int) -> npt.NDArray[np.float32]:
    """So small that every dtype has them and their sums."""
    return ((np.arange(numel) % 5 + 1) * (rank + 1)).astype(np.float32)


def _start(comm: Communicator, case: Case) -> tuple[Work, paddle.Tensor]:
    """With inputs that nobody has any more; and the output."""
    part = paddle.to_tensor(_values(comm.rank, _NUMEL)).cast(case.dtype)
    whole = paddle.to_tensor(_values(comm.rank, comm.nranks * _NUMEL)).cast(case.dtype)
    if case.op == "all_gather":
        return comm.all_gather(whole, part), whole
    if case.op == "reduce_scatter":
        return comm.reduce_scatter(part, whole, accumulate=case.accumulate), part
    return (comm.all_reduce(whole) if case.op == "all_reduce" else comm.broadcast(whole, src=1)), whole


def _expected(rank: int, nranks: int, case: Case) -> npt.NDArray[Any]:
    wholes = [_values(each, nranks * _NUMEL) for each in range(nranks)]
    if case.op == "all_gather":
        return np.concatenate([_values(each, _NUMEL) for each in range(nranks)])
    if case.op == "broadcast":
        return wholes[1]
    total = sum(wholes[1:], start=wholes[0])
    if case.op == "all_reduce":
        return total
    held = _values(rank, _NUMEL) if case.accumulate else 0.0
    return total[rank * _NUMEL : (rank + 1) * _NUMEL] + held


def _drop_everything(rank: int, nranks: int) -> Any:
    device = standin.Device()
    one, _ = _lanes(nranks)
    device.set_pace(standin.Pace(latency_ms=10.0))
    found = []
    for case in _CASES:
        work, output = _start(one, case)
        work.wait()
        found.append(output.cast("float32").numpy())
        del output
        # Neither input nor output, and nobody who waits for it.
        _start(one, case)
    last, _ = _start(one, _CASES[0])
    last.wait()
    return found, device.writes_after_free()


@pytest.mark.parametrize("found", [2, 3], indirect=True)
def test_what_a_collective_touches_lives_until_it_is_over(found: Found) -> None:
    for rank, (outputs, writes_after_free) in enumerate(found.of(_drop_everything)):
        for case, output in zip(_CASES, outputs, strict=True):
            expected = _expected(rank, found.nranks, case)
            np.testing.assert_array_equal(output, expected, err_msg=f"{case} on rank {rank}")
        assert writes_after_free == 0


_BLOCK_BYTES = 1 << 20


def _reduce_a_block(comm: Communicator) -> Work:
    return comm.all_reduce(paddle.ones([_BLOCK_BYTES // 4]))


def _live_after_waits(rank: int, nranks: int) -> dict[str, list[int]]:
    device = standin.Device()
    one, _ = _lanes(nranks)
    device.set_pace(standin.Pace(latency_ms=4 * _LATE_MS))
    paddle.ones([4]).sum().item()
    before, side, found = device.live_bytes(), paddle.device.Stream(), {}

    def live() -> int:
        return device.live_bytes() - before

    work = _reduce_a_block(one)
    found["on the way"] = [live()]
    with paddle.device.stream_guard(side):
        work.wait()
    found["another stream waits"] = [live()]
    work.wait()
    found["its own stream waits"] = [live()]
    work = _reduce_a_block(one)
    with paddle.device.stream_guard(side):
        work.wait()
    side.synchronize()
    found["seen done"] = [int(work.done()), live()]
    _reduce_a_block(one)
    found["nobody waits"] = [live()]
    deadline_s = time.monotonic() + SEEN_S
    while live() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    found["nobody waits"].append(live())
    found["writes after free"] = [device.writes_after_free()]
    return found


@pytest.mark.parametrize("found", [2], indirect=True)
def test_memory_goes_when_its_own_stream_has_waited_or_it_is_seen_done(found: Found) -> None:
    for result in found.of(_live_after_waits):
        assert result == {
            "on the way": [_BLOCK_BYTES],
            "another stream waits": [_BLOCK_BYTES],
            "its own stream waits": [0],
            "seen done": [1, 0],
            "nobody waits": [_BLOCK_BYTES, 0],
            "writes after free": [0],
        }


# ---- sums ----


def _sum_narrow(rank: int, nranks: int) -> list[tuple[str, bool]]:
    """Whether each sum is, bit for bit, the float32 sum in the order of ranks, rounded once."""
    one, _ = _lanes(nranks)
    found = []
    for dtype in ("float16", "bfloat16"):
        for numel in (1, 1001, 70_001):
            terms, held = [term(each, nranks * numel, dtype) for each in range(nranks)], term(77, numel, dtype)
            own = slice(rank * numel, (rank + 1) * numel)
            parts = [each[own] for each in terms]
            scattered, added = paddle.zeros([numel], dtype), as_tensor(held, dtype)
            # One element more, so that it does not fall into equal pieces.
            reduced = as_tensor(np.append(terms[rank], np.float32(1.0)).astype(terms[rank].dtype), dtype)
            for work in (
                one.reduce_scatter(scattered, as_tensor(terms[rank], dtype)),
                one.reduce_scatter(added, as_tensor(terms[rank], dtype), accumulate=True),
                one.all_reduce(reduced),
            ):
                work.wait()
            what = f"{dtype} of {numel}"
            found.append((f"scatter {what}", _equal(scattered, parts, dtype)))
            found.append((f"scatter and add {what}", _equal(added, [*parts, held], dtype)))
            found.append((f"reduce {what}", _equal(reduced[:-1], terms, dtype)))
    return found


def _equal(found: paddle.Tensor, terms: list[npt.NDArray[Any]], dtype: str) -> bool:
    return bool(np.array_equal(as_numpy(found), rounded_sum(terms, dtype)))


@pytest.mark.parametrize("found", [2, 3, 4], indirect=True)
def test_sums_of_16_bits_are_those_of_32_rounded_once(found: Found) -> None:
    """The stand-in's own, over more than two ranks, are rounded after each addition."""
    for result in found.of(_sum_narrow):
        assert [what for what, equal in result if not equal] == []


# ---- times ----


def _time_waits(rank: int, nranks: int) -> Any:
    device = standin.Device()
    one, two = _lanes(nranks)
    device.set_pace(_LATE)
    data, stalls = paddle.ones([4]), list[Stall]()
    for rest_s in (0.0, 2e-3 * _LATE_MS) * 3:
        work = one.all_reduce(data)
        time.sleep(rest_s)
        work.timed_wait(stalls)
    stalls_ms = [1e3 * ((stall.end_s or np.inf) - (stall.start_s or 0.0)) for stall in stalls]
    works = [comm.all_reduce(paddle.ones([4])) for _ in range(3) for comm in (one, two)]
    # Not wait(): in the stand-in's compute stream nobody else has the interpreter meanwhile, and so nobody the time.
    for work in reversed(works):
        see_done(work)
    return stalls_ms, [[(work.start_s, work.end_s) for work in works[lane::2]] for lane in range(2)]


@pytest.mark.parametrize("found", [2], indirect=True)
def test_times_are_those_of_the_device(found: Found) -> None:
    for stalls_ms, lanes in found.of(_time_waits):
        assert min(stalls_ms[::2]) > 0.8 * _LATE_MS
        # Another program may take the processor in one of them.
        assert min(stalls_ms[1::2]) < 0.2 * _LATE_MS
        for spans in lanes:
            moments = [moment for span in spans for moment in span]
            assert moments == sorted(moments), "one began before the other had ended"
            assert moments[-1] - moments[0] > 0.8 * 3 * _LATE_MS / 1e3
        assert lanes[0][0][0] < lanes[1][0][1] and lanes[1][0][0] < lanes[0][0][1], "the lanes took turns"


def _queue_many(rank: int, nranks: int) -> int:
    one, _ = _lanes(nranks)
    gate, data = DeviceGate(), paddle.zeros([1])
    works = [one.all_reduce(data, after=gate) for _ in range(1500)]
    gate.open()
    works[-1].wait()
    see_done(works[-1])
    return sum(work.end_s is None for work in works)


@pytest.mark.parametrize("found", [2], indirect=True)
def test_a_long_queue_is_seen_done_from_its_end(found: Found) -> None:
    assert found.of(_queue_many) == [0, 0], "works ahead of one that is over have no end"


def _parts() -> dict[int, list[Part]]:
    everywhere: list[Part] = [_sum_narrow]
    several: list[Part] = [_start_everything, _drop_everything]
    two: list[Part] = [_compute_beside, _follow_the_host, _keep_order, _follow_a_copy, _live_after_waits, _time_waits]
    return {2: [*everywhere, *several, *two, _queue_many], 3: [*everywhere, *several], 4: everywhere}
