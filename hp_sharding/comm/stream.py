"""Collectives on streams of a device: NCCL, BKCL, and whatever a custom device brings.

A lane has a process group of Paddle's, for the communicator in it, and a stream of its own. A collective is queued like
this, and the host goes on at once:

1. the lane's stream waits for the current one as it is now: what is computed before is there to be sent, and what has
   read the memory that will be written is over;
2. it waits for the work that the collective is to follow, if there is one. Compute does not wait for that;
3. the collective runs on it, as "calculation" with the lane's stream as the current one. (Paddle would otherwise use
   a stream that nobody can reach, and whose collectives only the current stream can be made to wait for);
4. so does what has to be computed before its result is one;
5. an event is recorded. It is what waits for the work wait for.

Nothing is left to Paddle to keep alive. A work holds the memory that it touches until the stream from which it was
started has been made to wait for it: memory freed after that goes to whatever this stream does later, which is after
the collective. Where nobody waits, it is held until it is seen done.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import paddle
from paddle.base import core

from ..errors import CommError, ConfigError, HpShardingError
from .communicator import Communicator, Mark, Stall, Work
from .convert import queue_cast
from .device import CurrentStream, Device, same_stream
from .stream_marks import StreamMark, StreamStall
from .stream_sums import Exchange, Scratch, exchange
from .watch import Watcher
from .wire import SUMS, carried

_SUM = core.ReduceOp.SUM
_NARROW = (paddle.float16, paddle.bfloat16)
_NATIVE = (paddle.float32, paddle.float64, *_NARROW, paddle.int32, paddle.int64, paddle.uint8, paddle.int8)
"""What communication libraries can add up. Anything else is copied as bytes."""
_HIGH_PRIORITY = 1
_FLIGHT_S = 40.0
"""At the end, for what is in flight."""
_POLL_S = 0.001
RUNTIME_ERRORS = (RuntimeError, OSError, ValueError, SystemError)
"""What Paddle makes of an error of the device or of its communication library."""


class Message(NamedTuple):
    """What a collective is called: see the attributes of ``Work``."""

    op: str
    label: str
    lane: str
    nbytes: int


_looking = threading.RLock()
"""Who looks at works holds it. They note their times in the order in which they must be, whoever looks at which."""


class _Lane:
    """The works of a lane that have not been seen done, the oldest first."""

    def __init__(self) -> None:
        self._works: deque[StreamWork] = deque()

    def add(self, work: StreamWork) -> None:
        with _looking:
            self._works.append(work)

    def look(self) -> None:
        with _looking:
            while self._works and self._works[0].see():
                self._works.popleft()


class StreamWork(Work):
    """A collective on a stream. ``wait()`` makes the current stream wait.

    ``end_s`` is when it was first seen done; ``start_s`` when its lane first was seen at it. Both are exact to the
    interval at which the watcher looks.

    It keeps its events too: Paddle waits, on the host, for an event of a custom device that it is to destroy.
    """

    on_device = True

    def __init__(self, message: Message, lane: _Lane, watcher: Watcher, rank: int) -> None:
        self.op, self.label, self.lane, self.nbytes = message
        self.start_s: float | None = None
        self.end_s: float | None = None
        self.issued_s = time.perf_counter()
        self._lane = lane
        self._watcher = watcher
        self._rank = rank
        self._failure: str | None = None
        self._after: Work | None = None
        self._origin: Any = None
        self._held: list[Any] = []
        self._home: Any = None
        self._begun: Any = None
        self._ended: Any = None

    def wait(self) -> None:
        """See ``Work``."""
        if self._failure is not None:
            self._watcher.tell()
            raise self.error(self._failure)
        if self.end_s is not None:
            return
        stream = paddle.device.current_stream()
        with self.errors_translated():
            stream.wait_event(self._ended)
        if self._held and same_stream(stream, self._home):
            # Memory that is freed from now on goes to what this stream does after the collective.
            self._held = []

    def timed_wait(self, stalls: list[Stall]) -> None:
        """See ``Work``."""
        self._watcher.look_closely()
        stall = StreamStall(self.label)
        stalls.append(stall)
        try:
            self.wait()
        finally:
            stall.end()
            self._watcher.add(stall)

    def done(self) -> bool:
        """See ``Work``."""
        if self.end_s is None and self._failure is None:
            self._lane.look()
        return self.end_s is not None or self._failure is not None

    def see(self) -> bool:
        """Looks whether it is over, all before it on its lane being so, and notes the times."""
        if self.end_s is not None or self._failure is not None:
            return True
        if self._after is not None and self._after.done():
            self._after = None
        with self.errors_translated():
            if self.start_s is None and self._begun.query():
                self.start_s = time.perf_counter()
            if self.start_s is None or not self._ended.query():
                return False
        self.end_s = time.perf_counter()
        self._held = []
        self._origin = None
        return True

    def begin(self, home: Any, stream: Any, after: Work | None) -> None:
        """It is about to be queued on ``stream``, which waits for what is on ``home``, whose memory it will touch."""
        self._home = home
        self._after = after
        self._origin, self._begun, self._ended = (paddle.device.Event() for _ in range(3))
        self._origin.record(home)
        stream.wait_event(self._origin)

    def hold(self, tensors: Sequence[paddle.Tensor]) -> None:
        """Keeps their memory alive, whatever becomes of the objects."""
        for tensor in tensors:
            holder = core.DenseTensor()
            holder._share_data_with(tensor.get_tensor())
            self._held.append(holder)

    def mark_begin(self, lane: Any) -> None:
        """All that it waits for has been queued on its lane."""
        self._begun.record(lane)

    def mark_end(self, lane: Any) -> None:
        """All of it has been queued on its lane."""
        self._ended.record(lane)

    def fail(self, reason: str) -> None:
        """Makes it failed, unless it has ended. Its memory stays with it: the device may be at it still."""
        if self.end_s is None:
            self._failure = reason

    def describe(self) -> str:
        """Names it, for a report."""
        return f"{self.op} of {self.label!r} on lane {self.lane!r}"

    def error(self, reason: str) -> CommError:
        """What to raise where it fails."""
        text = f"rank {self._rank}: {self.describe()} failed: {reason}"
        return CommError(text, op=self.op, label=self.label, lane=self.lane, rank=self._rank)

    @contextmanager
    def errors_translated(self) -> Iterator[None]:
        """Raises what goes wrong in Paddle as a CommError that names this work."""
        try:
            yield
        except HpShardingError:
            raise
        except RUNTIME_ERRORS as error:
            raise self.error(f"the device or its communication library says: {error}") from error


class StreamCommunicator(Communicator):
    """One lane on a device. Made by ``create_communicators``.

    Sums: float32, float64, float16, bfloat16, int32, int64, uint8, int8. Copies: every dtype. 16-bit sums are formed in
    float32: over two ranks that is what a library does, and rounds; beyond that, and where the result is to be float32
    or what travels was, the terms themselves travel to where they are added up. ``after`` may be a work of any lane of
    the device; where only the host can wait for it, the host does.

    Args:
        lane: see ``Communicator``.
        ranks: see ``Communicator``.
        me: global rank.
        group: Paddle's process group over these ranks, used by nobody else.
        device: on which tensors must lie.
        watcher: looks after the works of this set of ranks.
    """

    def __init__(
        self, lane: str, ranks: tuple[int, ...], me: int, *, group: Any, device: Device, watcher: Watcher
    ) -> None:
        self.lane = lane
        self.ranks = ranks
        self.rank = ranks.index(me)
        self._me = me
        self._group = group
        self._device = device
        self._watcher = watcher
        # Compute waits for what is sent, so its few kernels go first where both want the device.
        self._stream = paddle.device.Stream(priority=_HIGH_PRIORITY)
        self._works = _Lane()
        self._scratch = Scratch()
        self._last: StreamWork | None = None
        self._closed = False

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
        wire = self._wire("all_gather", input, output, wire_dtype)
        gathered = output if output.dtype == wire else self._scratch.take("gathered", numel, wire)
        whole, part = _copyable(gathered), _copyable(input)

        def run() -> None:
            own = part
            if input.dtype != wire or gathered is not output:
                own = gathered._slice(self.rank * part.shape[0], (self.rank + 1) * part.shape[0])
                queue_cast(own, part)
            self._group.all_gather_into_tensor_on_calc_stream(whole, own)
            if gathered is not output:
                queue_cast(output, gathered)

        nbytes = numel * gathered.element_size()
        return self._start("all_gather", run, [output, input, gathered], nbytes=nbytes, label=label, after=after)

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
        """See ``Communicator``."""
        numel = self._check("reduce_scatter", input, output)
        wire = self._wire("reduce_scatter", input, output, wire_dtype)
        sent = input if input.dtype == wire else self._scratch.take("sent", numel, wire)
        if wire in _NARROW and (accumulate or self.nranks > 2 or output.dtype != input.dtype or sent is not input):
            in_place = output.dtype == paddle.float32 and not accumulate
            terms = exchange(self._scratch, sent, self.nranks, total=output if in_place else None)
            touched = [output, input, *terms]

            def run() -> None:
                terms.run(self._group, input)
                terms.leave_in(output, accumulate=accumulate)
        else:
            total = self._scratch.take("total", output.shape[0], wire) if accumulate else output
            touched = [output, input, total]

            def run() -> None:
                self._group.reduce_scatter_tensor_on_calc_stream(total, input, _SUM)
                if accumulate:
                    output.add_(total)

        nbytes = numel * sent.element_size()
        return self._start("reduce_scatter", run, touched, nbytes=nbytes, label=label, after=after)

    def all_reduce(
        self, tensor: paddle.Tensor, *, label: str = "", after: Work | None = None, wire_dtype: str | None = None
    ) -> Work:
        """See ``Communicator``."""
        numel = self._check("all_reduce", tensor)
        wire = self._wire("all_reduce", tensor, tensor, wire_dtype)
        exchanges = wire in _NARROW and self.nranks > 2
        sent_numel = -(-numel // self.nranks) * self.nranks if exchanges else numel
        sent = self._scratch.take("sent", sent_numel, wire) if exchanges or tensor.dtype != wire else tensor
        terms = exchange(self._scratch, sent, self.nranks) if exchanges else None

        def run() -> None:
            if sent is tensor:
                self._group.all_reduce_on_calc_stream(tensor, _SUM)
                return
            data = sent._slice(0, numel)
            queue_cast(data, tensor)
            if terms is None:
                self._group.all_reduce_on_calc_stream(sent, _SUM)
            else:
                self._exchange_all(terms, numel)
            queue_cast(tensor, data)

        nbytes = numel * sent.element_size()
        touched = [tensor, sent, *(terms or [])]
        return self._start("all_reduce", run, touched, nbytes=nbytes, label=label, after=after)

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "", after: Work | None = None) -> Work:
        """See ``Communicator``."""
        nbytes = self._check("broadcast", tensor) * tensor.element_size()
        if not 0 <= src < self.nranks:
            raise ConfigError(f"broadcast from group rank {src}: the group has ranks 0 to {self.nranks - 1}")
        data = _copyable(tensor)

        def run() -> None:
            self._group.broadcast_on_calc_stream(data, src)

        return self._start("broadcast", run, [tensor], nbytes=nbytes, label=label, after=after)

    def break_off(self, reason: str) -> None:
        """See ``Communicator``."""
        self._watcher.break_off(reason)

    def mark(self) -> Mark:
        """See ``Communicator``."""
        return StreamMark(self._watcher)

    def close(self) -> None:
        """Ends the lane: waits on the host for what is in flight, but not for ever. Safe to call twice."""
        self._closed = True
        deadline_s = time.monotonic() + _FLIGHT_S
        # Not in the device's runtime, which keeps the interpreter for itself while it waits.
        while self._last is not None and not self._last.done():
            if time.monotonic() > deadline_s:
                self._watcher.fail("its lane was closed, and it did not end")
                break
            time.sleep(_POLL_S)

    def _start(
        self,
        op: str,
        run: Callable[[], None],
        touched: Sequence[paddle.Tensor],
        *,
        nbytes: int,
        label: str,
        after: Work | None,
    ) -> StreamWork:
        work = StreamWork(Message(op, label, self.lane, nbytes), self._works, self._watcher, self._me)
        self._check_open(work)
        if after is not None and not after.on_device and not self._follow(after, work):
            return work
        home = paddle.device.current_stream()
        with work.errors_translated(), paddle.no_grad():
            work.begin(home, self._stream, after)
            if nbytes:
                work.hold(touched)
            # From here on: Paddle connects in the first collective of a kind, and a peer may not be there.
            self._watcher.add(work)
            try:
                with CurrentStream(self._device, self._stream, home):
                    self._queue(work, run if nbytes else None, after)
            finally:
                # Also where only a part of it was queued: that part uses its memory.
                work.mark_end(self._stream)
                # Not before: an event that has not been recorded says that it is reached.
                self._works.add(work)
                self._last = work
        return work

    def _queue(self, work: StreamWork, run: Callable[[], None] | None, after: Work | None) -> None:
        """With the lane's stream as the current one."""
        if after is not None and after.on_device and not self._follow(after, work):
            return
        work.mark_begin(self._stream)
        if run is not None:
            run()

    def _follow(self, after: Work, work: StreamWork) -> bool:
        """Makes the current stream wait for ``after``; False where that has failed: then ``work`` and its lanes do."""
        try:
            after.wait()
        except CommError as error:
            reason = f"the collective that it follows failed: {error}"
            work.fail(reason)
            self._watcher.fail(reason)
            return False
        return True

    def _exchange_all(self, terms: Exchange, numel: int) -> None:
        """Replaces all pieces of ``terms.sent``, of which ``numel`` elements count, by their sum."""
        padded_numel, own_numel = terms.sent.shape[0], terms.total.shape[0]
        if padded_numel > numel:
            # Nobody reads their sum, but whoever looks for NaN would find what was there before.
            terms.sent._slice(numel, padded_numel).fill_(0.0)
        terms.run(self._group, terms.sent)
        own = terms.sent._slice(self.rank * own_numel, (self.rank + 1) * own_numel)
        queue_cast(own, terms.total)
        self._group.all_gather_into_tensor_on_calc_stream(terms.sent, own)

    def _check_open(self, work: StreamWork) -> None:
        if self._watcher.failure is not None:
            self._watcher.tell()
            raise work.error(self._watcher.failure)
        if self._closed:
            raise work.error("this rank has closed the lane")
        if paddle.get_device() != self._device.name:
            raise ConfigError(
                f"rank {self._me}: {work.describe()} runs on {self._device.name}, but paddle.set_device has made "
                f"{paddle.get_device()} the current device since. Set it back before forward, backward and step()"
            )

    def _check(self, op: str, whole: paddle.Tensor, part: paddle.Tensor | None = None) -> int:
        """Elements of the whole."""
        for tensor in (whole, part):
            if tensor is not None:
                self._check_tensor(op, tensor)
        numel = whole.shape[0]
        if part is not None and part.shape[0] * self.nranks != numel:
            raise ConfigError(
                f"{self._where()}: {op} over {self.nranks} ranks got {numel} elements of {whole.dtype} and "
                f"{part.shape[0]} of {part.dtype}; one must be {self.nranks} times the other"
            )
        return int(numel)

    def _check_tensor(self, op: str, tensor: paddle.Tensor) -> None:
        fits = len(tensor.shape) == 1 and tensor.is_contiguous()
        # Without elements it has no memory, and so no place.
        if not fits or (tensor.shape[0] and not self._device.holds(tensor)):
            raise ConfigError(
                f"{self._where()}: {op} takes contiguous, one-dimensional tensors on {self._device.name}, not "
                f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.place}"
            )

    def _wire(self, op: str, own: paddle.Tensor, result: paddle.Tensor, wire_dtype: str | None) -> Any:
        """What travels, as Paddle's dtype."""
        if op in SUMS and own.dtype not in _NATIVE:
            raise ConfigError(f"{self._where()}: {op} cannot add up {own.dtype}")
        if wire_dtype is None and own.dtype == result.dtype:
            return own.dtype
        types = carried(op, own, result, wire_dtype=wire_dtype, where=self._where())
        return getattr(paddle, types.wire.name)

    def _where(self) -> str:
        return f"rank {self._me}, lane {self.lane!r}"


def _copyable(tensor: paddle.Tensor) -> paddle.Tensor:
    """The same memory, of a type that every library can move."""
    return tensor if tensor.dtype in _NATIVE or not tensor.shape[0] else tensor.view("uint8")
