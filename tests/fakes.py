"""Stand-ins that make faults show on one process: collectives that deliver late, a slow link, freed memory of NaN."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle

from hp_sharding.comm import Communicator, Work
from hp_sharding.comm.local import LocalCommunicator
from hp_sharding.comm.memory import ELEMENT_TYPES, Bytes, ElementType, bytes_of
from hp_sharding.comm.rounding import narrow, rounded_blocks, widen
from hp_sharding.comm.wire import Carried, carried
from hp_sharding.config import ShardingConfig
from hp_sharding.errors import CommError
from hp_sharding.optimizer import ShardedOptimizer
from hp_sharding.pool import StoragePool
from hp_sharding.sharding import build


class Event(NamedTuple):
    """What a lane did: ``what`` is ``"start"`` or ``"deliver"``; the rest as in ``Work``."""

    what: str
    lane: str
    op: str
    label: str
    nbytes: int


class Transfer(NamedTuple):
    """Memory of one collective: its types, where the result goes, what it is made of, and whether it is added."""

    types: Carried
    output: Bytes
    input: Bytes
    copies: int
    adds: bool

    @property
    def in_place(self) -> bool:
        return self.output.ctypes.data == self.input.ctypes.data

    def overlaps(self, other: Transfer) -> bool:
        """Whether both write to some of the same memory."""
        start, other_start = self.output.ctypes.data, other.output.ctypes.data
        return start < other_start + other.output.size and other_start < start + self.output.size


class WaitingWork(Work):
    """A collective of which nothing is done before somebody waits for it, or for a later one on its lane."""

    def __init__(self, lane: WaitingLane, op: str, label: str, nbytes: int) -> None:
        self.op, self.label, self.lane, self.nbytes = op, label, lane.lane, nbytes
        self.start_s: float | None = None
        self.end_s: float | None = None
        self.error: CommError | None = None
        self._lane = lane

    def wait(self) -> None:
        self._lane.deliver(self)
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self.end_s is not None


class _Pending:
    """A work that is not done. Armed, its output holds poison, and what that memory held before is kept aside."""

    def __init__(self, work: WaitingWork, transfer: Transfer, after: Work | None) -> None:
        self.work, self.transfer, self.after = work, transfer, after
        self.before: Bytes | None = None
        self.input_seen: Bytes | None = None

    def arm(self, *, checks_input: bool) -> None:
        transfer = self.transfer
        if checks_input and not transfer.in_place and self.after is None:
            self.input_seen = transfer.input.copy()
        self.before = transfer.output.copy()
        transfer.output[:] = _poison(transfer.types.result)

    def deliver(self) -> None:
        """The transfer, all at once. What it checks is promised by ``Communicator``: nobody touches its tensors."""
        transfer, name = self.transfer, f"{self.work.op} of {self.work.label!r}"
        assert self.before is not None
        assert (transfer.output == _poison(transfer.types.result)).all(), f"somebody wrote into the output of {name}"
        if self.input_seen is not None:
            assert np.array_equal(transfer.input, self.input_seen), f"somebody wrote into the input of {name}"
        source = self.before if transfer.in_place else transfer.input
        transfer.output[:] = self.before
        own, wire, result = transfer.types
        if transfer.copies == 1 and not transfer.adds and not transfer.types.converts:
            transfer.output[:] = source
            return
        target = result.array(transfer.output)
        for block, values in rounded_blocks(own.array(source), own, wire):
            total = sum([values] * (transfer.copies - 1), start=values)
            narrow(target[block], total + widen(target[block], result) if transfer.adds else total, result)


_ALIKE = ("gradient norm",)
"""Labels of gathers in which every rank has the same to give, where all ranks hold the same."""


class WaitingLane(Communicator):
    """A deterministic lane: the output is NaN from the start of a collective until its ``wait()``.

    A work is delivered by ``wait()`` on it or on a later one of the lane, since lanes are first-in-first-out; until
    then ``done()`` is False. Whoever writes into a tensor that a collective has been given gets an AssertionError.

    Args:
        nranks: 1, or more ranks that all hold the same values; of shards those have no ``all_gather``.
        rank: index of this one.
        log: events of this lane go here; lanes that share a list show their common order.

    Attributes:
        failing: collectives of these ops end in a CommError instead of a result.
        checks_inputs: whether writing into the input of a collective is an error.
    """

    def __init__(self, lane: str, *, nranks: int = 1, rank: int = 0, log: list[Event] | None = None) -> None:
        self.lane = lane
        self.ranks = tuple(range(nranks))
        self.rank = rank
        self.log = log if log is not None else []
        self.failing: set[str] = set()
        self.checks_inputs = True
        self._pending: list[_Pending] = []

    def all_gather(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        wire_dtype: str | None = None,
    ) -> Work:
        if label in _ALIKE:
            input = input.tile([self.nranks])
        else:
            assert self.nranks == 1, "what other ranks hold of other shards is not known"
        types = carried("all_gather", input, output, wire_dtype=wire_dtype, where=self.lane)
        return self._start("all_gather", label, _transfer(output, input, types), after)

    def reduce_scatter(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        accumulate: bool = False,
        wire_dtype: str | None = None,
    ) -> Work:
        numel = output.shape[0]
        assert input.shape[0] == numel * self.nranks
        types = carried("reduce_scatter", input, output, wire_dtype=wire_dtype, where=self.lane)
        own = input._slice(self.rank * numel, (self.rank + 1) * numel)
        return self._start("reduce_scatter", label, _transfer(output, own, types, self.nranks, accumulate), after)

    def all_reduce(
        self, tensor: paddle.Tensor, *, label: str = "", after: Work | None = None, wire_dtype: str | None = None
    ) -> Work:
        types = carried("all_reduce", tensor, tensor, wire_dtype=wire_dtype, where=self.lane)
        return self._start("all_reduce", label, _transfer(tensor, tensor, types, self.nranks), after)

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "", after: Work | None = None) -> Work:
        types = carried("broadcast", tensor, tensor, wire_dtype=None, where=self.lane)
        return self._start("broadcast", label, _transfer(tensor, tensor, types), after)

    def close(self) -> None:
        """Nothing to end."""

    def labels(self, op: str) -> list[str]:
        """Labels of all collectives of this kind, in the order in which they were started."""
        return [event.label for event in self.log if event[:3] == ("start", self.lane, op)]

    @property
    def n_pending(self) -> int:
        """Collectives that nobody has waited for."""
        return len(self._pending)

    def deliver(self, work: WaitingWork) -> None:
        """Delivers ``work`` and all before it."""
        while not work.done():
            self._deliver_first()

    def _start(self, op: str, label: str, transfer: Transfer, after: Work | None) -> WaitingWork:
        numel = transfer.input.size // transfer.types.own.item_bytes
        nbytes = numel * transfer.types.wire.item_bytes * (self.nranks if op == "reduce_scatter" else 1)
        work = WaitingWork(self, op, label, nbytes)
        if op in self.failing:
            work.error = CommError(f"{op} of {label!r} failed on request", op=op, label=label, lane=self.lane, rank=0)
        self.log.append(Event("start", self.lane, op, label, nbytes))
        self._pending.append(_Pending(work, transfer, after))
        self._arm()
        return work

    def _arm(self) -> None:
        """A work that follows one, or whose output an earlier one writes, begins with what that one leaves there."""
        for position, pending in enumerate(self._pending):
            earlier = self._pending[:position]
            if pending.after is not None and not pending.after.done():
                continue
            if pending.before is None and not any(pending.transfer.overlaps(other.transfer) for other in earlier):
                pending.arm(checks_input=self.checks_inputs)

    def _deliver_first(self) -> None:
        pending = self._pending[0]
        if pending.after is not None:
            pending.after.wait()
            self._arm()
        work = pending.work
        work.start_s = time.perf_counter()
        if work.error is None:
            pending.deliver()
        work.end_s = time.perf_counter()
        self.log.append(Event("deliver", self.lane, work.op, work.label, work.nbytes))
        del self._pending[0]
        self._arm()


def _transfer(
    output: paddle.Tensor, input: paddle.Tensor, types: Carried, copies: int = 1, adds: bool = False
) -> Transfer:
    assert output.ndim == input.ndim == 1
    assert output.is_contiguous()
    assert input.is_contiguous()
    assert output.shape == input.shape
    numel = output.shape[0]
    memory = bytes_of(output, numel * types.result.item_bytes), bytes_of(input, numel * types.own.item_bytes)
    return Transfer(types, *memory, copies, adds)


def _poison(element: ElementType) -> int:
    """The byte that, repeated, is NaN in every floating dtype, and a large number in integers."""
    return 0xFF if "float" in element.name else 0x7F


class SlowWork(Work):
    """A collective on a ``SlowLane``."""

    def __init__(self, lane: str, op: str, label: str, nbytes: int) -> None:
        self.op, self.label, self.lane, self.nbytes = op, label, lane, nbytes
        self.start_s: float | None = None
        self.end_s: float | None = None
        self.finished = threading.Event()

    def wait(self) -> None:
        self.finished.wait()

    def done(self) -> bool:
        return self.finished.is_set()


class SlowLane(Communicator):
    """A group of one behind a slow link: each collective takes ``nbytes / bytes_per_s``, in order, at no CPU time."""

    def __init__(self, lane: str, *, bytes_per_s: float) -> None:
        self.lane = lane
        self.ranks = (0,)
        self.rank = 0
        self._local = LocalCommunicator(lane, (0,))
        self._bytes_per_s = bytes_per_s
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"slow-{lane}", daemon=True)
        self._thread.start()

    def all_gather(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        wire_dtype: str | None = None,
    ) -> Work:
        def transfer() -> Work:
            return self._local.all_gather(output, input, wire_dtype=wire_dtype)

        narrower = min(output, input, key=lambda tensor: int(tensor.element_size()))
        return self._put("all_gather", label, after, transfer, nbytes=_wire_bytes(narrower, wire_dtype))

    def reduce_scatter(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        accumulate: bool = False,
        wire_dtype: str | None = None,
    ) -> Work:
        def transfer() -> Work:
            return self._local.reduce_scatter(output, input, accumulate=accumulate, wire_dtype=wire_dtype)

        return self._put("reduce_scatter", label, after, transfer, nbytes=_wire_bytes(input, wire_dtype))

    def all_reduce(
        self, tensor: paddle.Tensor, *, label: str = "", after: Work | None = None, wire_dtype: str | None = None
    ) -> Work:
        def transfer() -> Work:
            return self._local.all_reduce(tensor, wire_dtype=wire_dtype)

        return self._put("all_reduce", label, after, transfer, nbytes=_wire_bytes(tensor, wire_dtype))

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "", after: Work | None = None) -> Work:
        def transfer() -> Work:
            return self._local.broadcast(tensor, src=src)

        return self._put("broadcast", label, after, transfer, nbytes=_wire_bytes(tensor, None))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _put(self, op: str, label: str, after: Work | None, transfer: Callable[[], Work], *, nbytes: int) -> SlowWork:
        work = SlowWork(self.lane, op, label, nbytes)

        def job() -> None:
            if after is not None:
                after.wait()
            work.start_s = time.perf_counter()
            time.sleep(work.nbytes / self._bytes_per_s)
            transfer().wait()
            work.end_s = time.perf_counter()
            work.finished.set()

        self._queue.put(job)
        return work

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job  # it holds tensors


def _wire_bytes(tensor: paddle.Tensor, wire_dtype: str | None) -> int:
    dtype = getattr(paddle, wire_dtype) if wire_dtype else tensor.dtype
    return int(tensor.shape[0] * ELEMENT_TYPES[dtype].item_bytes)


class PoisoningPool(StoragePool):
    """A pool whose blocks hold NaN when they are handed out and again when they have come back."""

    def __init__(self) -> None:
        super().__init__(poison=_fill_with_nan)

    def alloc(self, numel: int, dtype: str) -> paddle.Tensor:
        tensor = super().alloc(numel, dtype)
        bytes_of(tensor, numel * tensor.element_size())[:] = 0xFF
        return tensor


def _fill_with_nan(block: np.ndarray[Any, Any]) -> None:
    block.view(np.uint8)[:] = 0xFF


class Rig(NamedTuple):
    """A model wrapped over waiting lanes that share ``log``, with a poisoning pool."""

    model: paddle.nn.Layer
    optimizer: ShardedOptimizer
    gather: WaitingLane
    reduce: WaitingLane
    log: list[Event]
    pool: PoisoningPool

    def started(self, *ops: str) -> list[str]:
        """``op label`` of all collectives of these kinds, over both lanes, in the order in which they were started."""
        return [f"{event.op} {event.label}" for event in self.log if event.what == "start" and event.op in ops]


def wrap(model: paddle.nn.Layer, optimizer: Any, **settings: Any) -> Rig:
    """``build`` over waiting lanes; ``settings`` are those of ``ShardingConfig``."""
    log: list[Event] = []
    gather, reduce = WaitingLane("gather", log=log), WaitingLane("reduce", log=log)
    pool = PoisoningPool()
    config = ShardingConfig(**settings)
    sharded = build(model, optimizer, config, lanes={"gather": gather, "reduce": reduce}, pool=pool)
    return Rig(model, sharded, gather, reduce, log, pool)


def values(params: Sequence[paddle.Tensor]) -> list[np.ndarray[Any, Any]]:
    """Copies of all values."""
    return [param.numpy().copy() for param in params]
