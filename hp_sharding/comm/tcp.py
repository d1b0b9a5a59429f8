"""Collectives between processes on CPU that run behind the caller's back.

A lane hands its collectives to a thread of its own, first in, first out. What takes time there, waiting for data,
copying it and adding it up, releases the interpreter lock: communication and compute overlap.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import paddle

from ..errors import CommError, ConfigError
from .agreement import Agreement, Cause, Refused, Token
from .communicator import Communicator, Work
from .links import TcpLinks
from .memory import ELEMENT_TYPES, Bytes, bytes_of
from .ring import Ring, even_chunks
from .sums import Adder
from .wire import Carried, carried, plain

_log = logging.getLogger("hp_sharding")
# How long a failed transfer waits for the news that a peer is dead or silent, which says more.
_NEWS_S = 2.0


class TcpWork(Work):
    """A collective that a lane's thread carries out."""

    def __init__(self, lane: str, sequence: int, token: Token, op: str, rank: int) -> None:
        self.op = op
        self.label = token.label
        self.lane = lane
        self.nbytes = token.nbytes
        self.start_s: float | None = None
        self.end_s: float | None = None
        self.sequence = sequence
        self.token = token
        self._rank = rank
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._error: tuple[str, int | None] | None = None
        self._callbacks: list[Callable[[], None]] = []

    def wait(self) -> None:
        """See ``Work``."""
        self._over.wait()
        if self._error is not None:
            text, peer = self._error
            raise CommError(text, op=self.op, label=self.label, lane=self.lane, rank=self._rank, peer=peer)

    def done(self) -> bool:
        """See ``Work``."""
        return self._over.is_set()

    def failed(self) -> bool:
        """True if ``wait()`` would raise."""
        return self._error is not None

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once it is over, in whichever thread ends it; at once if it is over already."""
        with self._lock:
            if not self._over.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def end(self, cause: Cause | None = None) -> None:
        """Makes it done, or failed. The first call counts."""
        with self._lock:
            if self._over.is_set():
                return
            if cause is None:
                self.end_s = time.perf_counter()
            else:
                self._error = (self._describe(cause), cause.peer)
            self._over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _describe(self, cause: Cause) -> str:
        return f"rank {self._rank}: {self.op} of {self.label!r} on lane {self.lane!r} failed: {cause.text}"


@dataclass
class _Job:
    """A work, what carries it out (and holds the tensors), and the work it must follow."""

    work: TcpWork
    transfer: Callable[[], None] | None
    after: Work | None


class TcpCommunicator(Communicator):
    """One lane over TCP connections. Made by ``create_communicators``.

    Sums: float32, float64, float16, bfloat16, the integers and complex numbers. Copies: bool as well. Conversions go
    on in the lane's thread, piece by piece beside what travels.
    """

    def __init__(
        self,
        lane: str,
        ranks: tuple[int, ...],
        me: int,
        *,
        agreement: Agreement,
        links: TcpLinks,
        timeout_s: float,
        close: Callable[[str], None],
    ) -> None:
        self.lane = lane
        self.ranks = ranks
        self.rank = ranks.index(me)
        self._me = me
        self._agreement = agreement
        self._links = links
        self._timeout_s = timeout_s
        self._close = close
        self._is_closed = False
        self._ring = Ring(self.rank, len(ranks), links)
        self._next_sequence = 0
        self._submitting = threading.Lock()
        self._outstanding: deque[TcpWork] = deque()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._serve, name=f"hp_sharding-{lane}", daemon=True)
        agreement.add_lane(lane, self)

    def start(self) -> None:
        """Starts the lane's thread. Once only."""
        self._worker.start()

    def all_gather(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        wire_dtype: str | None = None,
    ) -> Work:
        """See ``Communicator``. Any dtype, where they are all the same."""
        numel = self._check("all_gather", output, input)
        types = self._carried("all_gather", input, output, wire_dtype)
        data = bytes_of(output, numel * types.result.item_bytes)
        own = bytes_of(input, numel // self.nranks * types.own.item_bytes)
        transfer = self._rounded_gather if types.converts else self._gather
        return self._submit("all_gather", types, numel, lambda: transfer(data, own, types), label=label, after=after)

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
        """See ``Communicator``. All dtypes but bool."""
        numel = self._check("reduce_scatter", input, output)
        types = self._carried("reduce_scatter", input, output, wire_dtype)
        adder = Adder(types)
        data = types.own.array(bytes_of(input, numel * types.own.item_bytes))
        result = types.result.array(bytes_of(output, numel // self.nranks * types.result.item_bytes))
        chunks = even_chunks(numel, self.nranks)

        def transfer() -> None:
            self._ring.reduce_scatter(result, data, chunks, adder, accumulate=accumulate)

        return self._submit("reduce_scatter", types, numel, transfer, label=label, after=after)

    def all_reduce(
        self, tensor: paddle.Tensor, *, label: str = "", after: Work | None = None, wire_dtype: str | None = None
    ) -> Work:
        """See ``Communicator``. All dtypes but bool."""
        numel = self._check("all_reduce", tensor)
        types = self._carried("all_reduce", tensor, tensor, wire_dtype)
        adder = Adder(types)
        data = types.own.array(bytes_of(tensor, numel * types.own.item_bytes))
        return self._submit(
            "all_reduce", types, numel, lambda: self._ring.all_reduce(data, adder), label=label, after=after
        )

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "", after: Work | None = None) -> Work:
        """See ``Communicator``."""
        numel = self._check("broadcast", tensor)
        if not 0 <= src < self.nranks:
            raise ConfigError(f"broadcast from group rank {src}: the group has ranks 0 to {self.nranks - 1}")
        types = plain(ELEMENT_TYPES[tensor.dtype])
        data = bytes_of(tensor, numel * types.wire.item_bytes)
        return self._submit(
            f"broadcast from {src}", types, numel, lambda: self._ring.broadcast(data, src), label=label, after=after
        )

    def close(self) -> None:
        """Ends the lane, on this rank and, as it cannot go on without it, on the others.

        Every rank finishes the collectives that one of them has entered; the rest fail.
        """
        self._is_closed = True
        self._close(self.lane)

    def break_off(self, reason: str) -> None:
        """See ``Communicator``."""
        self._agreement.break_off(Cause(reason))

    @property
    def is_broken(self) -> bool:
        """See ``Communicator``."""
        return self._agreement.broken is not None

    def join(self, timeout_s: float) -> bool:
        """Ends the threads after what is in flight; False if one does not end and was abandoned."""
        deadline_s = time.monotonic() + timeout_s
        self._jobs.put(None)
        self._worker.join(timeout_s)
        # Not before: what the worker still orders must be carried out.
        self._links.stop()
        return self._links.join(deadline_s) and not self._worker.is_alive()

    def drop_after(self, limit: int, cause: Cause) -> None:
        """Fails the outstanding works whose sequence number is above ``limit``."""
        with self._submitting:
            dropped = [work for work in self._outstanding if work.sequence > limit]
        for work in dropped:
            work.end(cause)
        if self._agreement.broken is not None:
            # Nobody knows any more what the bytes under way belong to; and a thread that waits for more is let go.
            self._links.cut()

    def _submit(
        self,
        what: str,
        types: Carried,
        numel: int,
        transfer: Callable[[], None],
        *,
        label: str,
        after: Work | None,
    ) -> TcpWork:
        token = Token(f"{what} ({types})", numel * types.wire.item_bytes, label)
        op = what.partition(" ")[0]
        with self._submitting:
            refusal = self._agreement.refusal(self.lane)
            work = TcpWork(self.lane, self._next_sequence, token, op, self._me)
            if refusal is not None:
                work.end(refusal)
                # A peer that has reached the end of the script sooner is no fault as long as nobody needs the result.
                if self._is_closed or self._agreement.broken is not None:
                    work.wait()
                return work
            self._next_sequence += 1
            self._outstanding.append(work)
            # A rank that still waits for another collective is not ready for this one: the others must not enter yet.
            if after is None:
                self._announce(work)
            elif isinstance(after, TcpWork):
                after.when_done(lambda: None if after.failed() else self._announce(work))
            # Last: from here on the lane's thread competes with the caller's for the interpreter.
            self._jobs.put(_Job(work, transfer, after))
        return work

    def _announce(self, work: TcpWork) -> None:
        self._agreement.announce(self.lane, work.sequence, work.token)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._carry_out(job)
            except Refused as refused:
                job.work.end(refused.cause)
                if refused.cause != self._agreement.refusal(self.lane):
                    self._agreement.break_off(refused.cause)
            with self._submitting:
                self._outstanding.popleft()
            # Do not hold the tensors of a failed one while waiting for the next.
            del job

    def _carry_out(self, job: _Job) -> None:
        work = job.work
        if work.done():
            return
        if job.after is not None:
            self._follow(work, job.after)
        self._agreement.enter(self.lane, work.sequence, self._timeout_s)
        work.start_s = time.perf_counter()
        try:
            assert job.transfer is not None
            job.transfer()
        except Exception as error:
            _log.debug("transfer failed", exc_info=True)
            cause = self._agreement.cause_of(error, _NEWS_S)
            # The links keep the error; its traceback would keep the tensors.
            error.__traceback__ = None
            raise Refused(cause) from error
        # Whoever sees the work done may use the memory again, and finds nobody else holding it.
        job.transfer = None
        work.end()
        self._agreement.finish(self.lane, work.sequence)

    def _follow(self, work: TcpWork, after: Work) -> None:
        try:
            after.wait()
        except Exception as error:
            # Whatever it is: without this thread all who wait would wait for ever. Where a rank has left, dropping one
            # work and those that follow it is all in order.
            text = f"the collective that it follows failed: {str(error) or repr(error)}"
            cause = Cause(text, getattr(error, "peer", None))
            raise Refused(self._agreement.refusal(self.lane) or cause) from error
        if not isinstance(after, TcpWork):
            self._announce(work)

    def _gather(self, data: Bytes, own: Bytes, types: Carried) -> None:
        chunks = even_chunks(len(data), self.nranks)
        mine = data[chunks[self.rank].start : chunks[self.rank].stop]
        if len(data) and mine.ctypes.data != own.ctypes.data:
            mine[:] = own
        self._ring.all_gather(data, chunks)

    def _rounded_gather(self, data: Bytes, own: Bytes, types: Carried) -> None:
        chunks = even_chunks(len(data) // types.result.item_bytes, self.nranks)
        self._ring.all_gather_rounded(data, chunks, types, types.own.array(own))

    def _check(self, op: str, whole: paddle.Tensor, part: paddle.Tensor | None = None) -> int:
        """Elements of the whole."""
        numel = self._numel(op, whole)
        if part is not None and self._numel(op, part) * self.nranks != numel:
            raise ConfigError(
                f"{self._where()}: {op} over {self.nranks} ranks got {numel} elements of {whole.dtype} and "
                f"{part.shape[0]} of {part.dtype}; one must be {self.nranks} times the other"
            )
        return numel

    def _numel(self, op: str, tensor: paddle.Tensor) -> int:
        shape = tensor.shape
        known = tensor.dtype in ELEMENT_TYPES
        if not known or len(shape) != 1 or not tensor.is_contiguous() or not tensor.place.is_cpu_place():
            raise ConfigError(
                f"{self._where()}: {op} takes contiguous, one-dimensional CPU tensors, not {tensor.dtype} of shape "
                f"{list(shape)} on {tensor.place}"
            )
        return int(shape[0])

    def _carried(self, op: str, own: paddle.Tensor, result: paddle.Tensor, wire_dtype: str | None) -> Carried:
        return carried(op, own, result, wire_dtype=wire_dtype, where=self._where())

    def _where(self) -> str:
        return f"rank {self._me}, lane {self.lane!r}"
