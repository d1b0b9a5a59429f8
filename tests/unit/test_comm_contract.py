"""What every communicator must do, whatever it is made of.

Each check takes one rank's lanes, at least ``"one"`` and ``"two"``, over the same ranks, and is called on all of them
at once. It makes its tensors on the device on which Paddle computes, and its gates with ``lanes.gate``. Here the checks
run over a group of one; ``tests/dist/test_comm_tcp.py`` runs them over more, ``tests/device/test_contract.py`` on
streams of a device.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import pytest

from hp_sharding.comm import Communicator, Stall, Work, create_communicators
from hp_sharding.errors import CommError, ConfigError

Array = npt.NDArray[Any]

SIZES = [0, 1, 3, 1000, 70_001]
FLOATS = ["float32", "float16", "bfloat16", "float64"]
WHOLE = ["int32", "int64", "uint8"]
SEEN_S = 10.0
"""How long the host may take to see that what was waited for is done."""


class Gate(Work):
    """A work that is done when the test says so, and that has failed from then on where there is an error."""

    def __init__(self, error: CommError | None = None) -> None:
        self.op = self.label = self.lane = "gate"
        self.nbytes = 0
        self.start_s = self.end_s = None
        self._error = error
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def open_soon(self) -> None:
        """Opens it, if it can while somebody waits for it, else before."""
        threading.Timer(0.05, self.open).start()

    def wait(self) -> None:
        self._open.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._open.is_set()


class Lanes(dict[str, Communicator]):
    """One rank's lanes by name, and what kind of gate stands for a work of the same kind as theirs."""

    def __init__(self, lanes: Mapping[str, Communicator], gate: type[Gate] = Gate) -> None:
        super().__init__(lanes)
        self.gate = gate


CHECKS: dict[str, Callable[[Lanes], None]] = {}


def _check(function: Callable[[Lanes], None]) -> Callable[[Lanes], None]:
    CHECKS[function.__name__] = function
    return function


def see_done(work: Work) -> None:
    """Of a work that was waited for. On a device a stream has waited, and the host sees it some time later."""
    deadline_s = time.perf_counter() + (SEEN_S if work.on_device else 0.0)
    while not work.done():
        assert time.perf_counter() < deadline_s, f"{work.op} of {work.label!r} was waited for and is not done"
        time.sleep(0.0005)


def term(rank: int, numel: int, dtype: str) -> Array:
    """What a rank contributes, in numpy's nearest type: float32 values that bfloat16 holds exactly for that dtype."""
    generator = np.random.default_rng(1000 + rank)
    if dtype in WHOLE:
        return generator.integers(0, 20, numel).astype(dtype)
    if dtype == "bool":
        return generator.integers(0, 2, numel).astype(bool)
    values = generator.standard_normal(numel)
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return bits.view(np.float32)
    return values.astype(dtype)


def as_tensor(values: Array, dtype: str) -> paddle.Tensor:
    tensor = paddle.to_tensor(values)
    return tensor.cast("bfloat16") if dtype == "bfloat16" else tensor


def as_numpy(tensor: paddle.Tensor) -> Array:
    return (tensor.cast("float32") if tensor.dtype == paddle.bfloat16 else tensor).numpy()


def _bits(tensor: paddle.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def rounded_sum(terms: list[Array], dtype: str) -> Array:
    """The sum in the order of ranks; 16-bit types in float32, rounded once at the end."""
    wide = [term.astype(np.float32) if dtype in ("float16", "bfloat16") else term for term in terms]
    total = wide[0].copy()
    for term in wide[1:]:
        total += term
    return as_numpy(paddle.to_tensor(total).cast(dtype))


def _assert_sum(found: paddle.Tensor, terms: list[Array], dtype: str) -> None:
    expected = rounded_sum(terms, dtype)
    if len(terms) <= 2 or dtype in WHOLE:
        np.testing.assert_array_equal(as_numpy(found), expected)
    else:
        # Another order of terms, then one rounding: at most one unit in the last place of the stored type.
        tolerance = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
        np.testing.assert_allclose(as_numpy(found), expected, rtol=tolerance, atol=4 * tolerance)


@_check
def all_gather_fills_the_output_in_rank_order(lanes: Lanes) -> None:
    comm = lanes["one"]
    for dtype in [*FLOATS, *WHOLE, "bool"]:
        for numel in SIZES:
            own = as_tensor(term(comm.rank, numel, dtype), dtype)
            before = _bits(own)
            output = paddle.zeros([comm.nranks * numel], "int32").cast(dtype)
            comm.all_gather(output, own, label="a").wait()
            expected = np.concatenate([term(rank, numel, dtype) for rank in range(comm.nranks)])
            np.testing.assert_array_equal(as_numpy(output), expected)
            assert _bits(own) == before


@_check
def all_gather_works_in_place(lanes: Lanes) -> None:
    comm = lanes["one"]
    for numel in [1, 1000, 70_001, 600_000]:
        values = np.full(comm.nranks * numel, -1, np.float32)
        values[comm.rank * numel : (comm.rank + 1) * numel] = term(comm.rank, numel, "float32")
        output = paddle.to_tensor(values)
        comm.all_gather(output, output._slice(comm.rank * numel, (comm.rank + 1) * numel)).wait()
        expected = np.concatenate([term(rank, numel, "float32") for rank in range(comm.nranks)])
        np.testing.assert_array_equal(output.numpy(), expected)


@_check
def reduce_scatter_sums_this_ranks_slice(lanes: Lanes) -> None:
    comm = lanes["one"]
    for dtype in [*FLOATS, *WHOLE]:
        for numel in SIZES:
            terms = [term(rank, comm.nranks * numel, dtype) for rank in range(comm.nranks)]
            data = as_tensor(terms[comm.rank], dtype)
            before = _bits(data)
            output = paddle.ones([numel]).cast(dtype)
            comm.reduce_scatter(output, data, label="a").wait()
            own = slice(comm.rank * numel, (comm.rank + 1) * numel)
            _assert_sum(output, [term[own] for term in terms], dtype)
            assert _bits(data) == before, "the input was written to"


@_check
def reduce_scatter_accumulates(lanes: Lanes) -> None:
    comm = lanes["one"]
    for dtype in FLOATS:
        for numel in SIZES:
            terms = [term(rank, comm.nranks * numel, dtype) for rank in range(comm.nranks)]
            own = slice(comm.rank * numel, (comm.rank + 1) * numel)
            held = term(77, numel, dtype)
            output = as_tensor(held, dtype)
            comm.reduce_scatter(output, as_tensor(terms[comm.rank], dtype), accumulate=True).wait()
            # Addition commutes: with the group's own sum first, two ranks still have one order.
            wide = np.float32 if dtype in ("float16", "bfloat16") else held.dtype
            parts = [term[own].astype(wide) for term in terms]
            total = parts[0] if len(parts) == 1 else sum(parts[1:], start=parts[0])
            _assert_sum(output, [total, held.astype(wide)] if comm.nranks <= 2 else [*parts, held.astype(wide)], dtype)


@_check
def all_reduce_sums_and_agrees_bitwise(lanes: Lanes) -> None:
    comm = lanes["one"]
    for dtype in [*FLOATS, *WHOLE]:
        for numel in [*SIZES, 2 * comm.nranks + 1]:
            terms = [term(rank, numel, dtype) for rank in range(comm.nranks)]
            tensor = as_tensor(terms[comm.rank], dtype)
            comm.all_reduce(tensor, label="a").wait()
            _assert_sum(tensor, terms, dtype)
            mine = tensor.view("uint8") if numel else paddle.zeros([0], "uint8")
            everyones = paddle.zeros([comm.nranks * mine.shape[0]], "uint8")
            comm.all_gather(everyones, mine).wait()
            assert len({row.tobytes() for row in everyones.numpy().reshape(comm.nranks, -1)}) == 1


@_check
def broadcast_copies_any_dtype_from_any_rank(lanes: Lanes) -> None:
    comm = lanes["one"]
    for dtype in [*FLOATS, *WHOLE, "bool"]:
        for numel in SIZES:
            for src in range(comm.nranks):
                tensor = as_tensor(term(comm.rank, numel, dtype), dtype)
                comm.broadcast(tensor, src=src, label="a").wait()
                np.testing.assert_array_equal(as_numpy(tensor), term(src, numel, dtype))


@_check
def repeated_sums_have_the_same_bits(lanes: Lanes) -> None:
    comm = lanes["one"]
    data = as_tensor(term(comm.rank, comm.nranks * 300_001, "float32"), "float32")
    found = set()
    for lane in ("one", "two", "one"):
        output = paddle.zeros([300_001])
        whole = data.clone()
        lanes[lane].reduce_scatter(output, data).wait()
        lanes[lane].all_reduce(whole).wait()
        found.add((_bits(output), _bits(whole)))
    assert len(found) == 1


@_check
def lanes_are_first_in_first_out_and_independent(lanes: Lanes) -> None:
    works: list[Work] = []
    tensors = [paddle.full([size], 1.0) for size in (300_000, 1, 50_000, 0, 20_000) * 4]
    for tensor in tensors:
        works.append(lanes["one"].all_reduce(tensor, label="o"))
        works.append(lanes["two"].all_reduce(tensor.clone(), label="t"))
    for work in works:
        work.wait()
    see_done(works[-1])
    see_done(works[-2])
    for lane in ("one", "two"):
        times = [(work.start_s, work.end_s) for work in works if work.lane == lane]
        flat = [moment for pair in times for moment in pair if moment is not None]
        assert len(flat) == 2 * len(times)
        assert flat == sorted(flat), "one began before the other had ended"
    nranks = lanes["one"].nranks
    assert all((tensor.numpy() == nranks).all() for tensor in tensors)


@_check
def works_say_what_they_are(lanes: Lanes) -> None:
    comm = lanes["two"]
    nranks = comm.nranks
    full, shard = paddle.zeros([nranks * 8]), paddle.zeros([8])
    begin_s = time.perf_counter()
    works = [
        comm.all_gather(full, shard, label="g"),
        comm.reduce_scatter(shard, full, label="s"),
        comm.all_reduce(full, label="r"),
        comm.broadcast(shard, src=0, label="b"),
    ]
    for work in works:
        work.wait()
        work.wait()
        see_done(work)
        assert work.start_s is not None
        assert work.end_s is not None
        assert begin_s <= work.start_s <= work.end_s <= time.perf_counter()
    assert [work.op for work in works] == ["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
    assert [work.label for work in works] == ["g", "s", "r", "b"]
    assert [work.nbytes for work in works] == [nranks * 32, nranks * 32, nranks * 32, 32]
    assert {work.lane for work in works} == {"two"}
    assert (comm.lane, len(comm.ranks)) == ("two", nranks)


@_check
def a_timed_wait_notes_from_when_to_when_it_held_compute_up(lanes: Lanes) -> None:
    begin_s = time.perf_counter()
    stalls: list[Stall] = []
    works = [lanes["one"].all_reduce(paddle.ones([1000]), label=label) for label in ("a", "b")]
    for work in works:
        work.timed_wait(stalls)
    for work, stall in zip(works, stalls, strict=True):
        see_done(work)
        deadline_s = time.perf_counter() + SEEN_S
        while stall.end_s is None and time.perf_counter() < deadline_s:
            time.sleep(0.0005)
        assert stall.label == work.label
        assert stall.start_s is not None
        assert stall.end_s is not None
        assert begin_s <= stall.start_s <= stall.end_s <= time.perf_counter()


@_check
def after_holds_a_collective_back(lanes: Lanes) -> None:
    comm = lanes["one"]
    gate = lanes.gate()
    data = paddle.zeros([comm.nranks * 5])
    output = paddle.full([5], -1.0)
    work = comm.reduce_scatter(output, data, after=gate)
    later = comm.all_reduce(paddle.zeros([1]))
    time.sleep(0.05)
    assert not work.done()
    assert work.start_s is None
    assert not later.done(), "a lane keeps its order"
    np.testing.assert_array_equal(output.numpy(), np.full(5, -1.0))
    data.fill_(3.0)
    gate.open()
    work.wait()
    later.wait()
    np.testing.assert_array_equal(output.numpy(), np.full(5, 3.0 * comm.nranks))


@_check
def after_chains_lanes(lanes: Lanes) -> None:
    shard = paddle.zeros([40_000])
    for repeat in range(5):
        full = paddle.full([lanes["one"].nranks * 40_000], float(repeat))
        first = lanes["one"].reduce_scatter(shard, full, label="bucket")
        second = lanes["two"].all_reduce(shard, label="bucket", after=first)
        second.wait()
        see_done(second)
        see_done(first)
        np.testing.assert_array_equal(shard.numpy(), np.full(40_000, repeat * lanes["one"].nranks ** 2, np.float32))
        assert second.start_s is not None
        assert first.end_s is not None
        assert second.start_s >= first.end_s


@_check
def a_later_collective_sees_what_an_earlier_one_leaves(lanes: Lanes) -> None:
    comm = lanes["one"]
    gate = lanes.gate()
    output, everyone = paddle.full([70_000], -1.0), paddle.zeros([comm.nranks * 70_000])
    comm.reduce_scatter(output, paddle.full([comm.nranks * 70_000], 3.0), after=gate)
    later = comm.all_gather(everyone, output)
    gate.open_soon()
    later.wait()
    np.testing.assert_array_equal(everyone.numpy(), np.full(comm.nranks * 70_000, 3.0 * comm.nranks))


@_check
def memory_lives_as_long_as_the_collective(lanes: Lanes) -> None:
    comm = lanes["one"]
    gate = lanes.gate()
    output = paddle.zeros([200_000])
    data = paddle.full([comm.nranks * 200_000], 2.0)
    work = comm.reduce_scatter(output, data, after=gate)
    # The caller's object takes other memory, and whoever allocates next may get what it had.
    data._clear_data()
    del data
    gc.collect()
    noise = [paddle.full([comm.nranks * 200_000], 9.0) for _ in range(8)]
    gate.open()
    work.wait()
    np.testing.assert_array_equal(output.numpy(), np.full(200_000, 2.0 * comm.nranks))
    assert len(noise) == 8


@_check
def bad_arguments_are_refused_before_anything_starts(lanes: Lanes) -> None:
    comm = lanes["one"]
    n = comm.nranks
    flat = paddle.zeros([n * 4])
    for start in (
        lambda: comm.all_gather(flat, paddle.zeros([3])),
        lambda: comm.all_gather(flat, paddle.zeros([4], "int32")),
        lambda: comm.reduce_scatter(paddle.zeros([5]), flat),
        lambda: comm.all_reduce(paddle.zeros([2, 2])),
        lambda: comm.all_reduce(paddle.zeros([])),
        lambda: comm.all_reduce(paddle.zeros([4], "bool")),
        lambda: comm.all_reduce(paddle.zeros([8])[::2]),
        lambda: comm.broadcast(flat, src=n),
        lambda: comm.broadcast(flat, src=-1),
    ):
        with pytest.raises(ConfigError):
            start()
    comm.all_reduce(flat).wait()


@_check
def a_failure_of_what_it_follows_is_its_own(lanes: Lanes) -> None:
    """Leaves the lanes failed. Another rank may be first: then even the start says what went wrong."""
    comm = lanes["one"]
    gate = lanes.gate(CommError("it broke", op="all_gather", rank=5, peer=7))
    work: Work | None = None

    def start_and_wait() -> None:
        nonlocal work
        work = comm.all_reduce(paddle.zeros([3]), label="bucket 1", after=gate)
        gate.open()
        work.wait()

    with pytest.raises(CommError, match="it broke") as caught:
        start_and_wait()
    assert (caught.value.op, caught.value.label, caught.value.lane) == ("all_reduce", "bucket 1", "one")
    if work is not None:
        with pytest.raises(CommError, match="it broke"):
            work.wait()
        assert work.done()
        assert work.end_s is None
    for each in lanes.values():
        each.close()
        each.close()


@pytest.mark.parametrize("name", list(CHECKS))
def test_group_of_one(name: str) -> None:
    lanes = Lanes(create_communicators([0], ["one", "two"]))
    CHECKS[name](lanes)
    for comm in lanes.values():
        comm.close()
