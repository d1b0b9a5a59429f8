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
from .communicator import Communicator, Stall, Work
from .device import CurrentStream, Device, same_stream
from .watch import Watcher

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

_Keep = Callable[[Sequence[paddle.Tensor]], None]
"""Takes what has been allocated on the lane's stream while it is the current one."""


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


class StreamStall(Stall):
    """What the current stream does not do because it waits; seen by events on both sides of the wait."""

    def __init__(self, label: str) -> None:
        super().__init__(label, None, None)
        self.issued_s = time.perf_counter()
        self._before = paddle.device.Event()
        self._after: Any = None
        self._before.record()
        # Where compute is not ahead of the device the stall begins now, and nobody need look for it.
        self.done()

    def end(self) -> None:
        """The wait has been queued."""
        after = paddle.device.Event()
        after.record()
        # Only now: an event that has not been recorded says that it is reached.
        self._after = after
        self.done()

    def done(self) -> bool:
        """Part of ``Watched``: whether it is over."""
        if self.start_s is None and self._before.query():
            self.start_s = time.perf_counter()
        if self.end_s is None and self.start_s is not None and self._after is not None and self._after.query():
            self.end_s = time.perf_counter()
        return self.end_s is not None

    def fail(self, reason: str) -> None:
        """Part of ``Watched``."""

    def describe(self) -> str:
        """Part of ``Watched``."""
        return f"the wait for {self.label!r}"


class StreamCommunicator(Communicator):
    """One lane on a device. Made by ``create_communicators``.

    Sums: float32, float64, float16, bfloat16, int32, int64, uint8, int8. Copies: every dtype. 16-bit sums are formed in
    float32: over two ranks that is what a library does, beyond that the pieces themselves travel to where they are
    added up. ``after`` may be a work of any lane of the device; where only the host can wait for it, the host does.

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
        self._last: StreamWork | None = None
        self._closed = False

    def all_gather(
        self, output: paddle.Tensor, input: paddle.Tensor, *, label: str = "", after: Work | None = None
    ) -> Work:
        """See ``Communicator``. Any dtype."""
        nbytes = self._check("all_gather", output, input)
        whole, part = _copyable(output), _copyable(input)

        def run(keep: _Keep) -> None:
            self._group.all_gather_into_tensor_on_calc_stream(whole, part)

        return self._start("all_gather", run, [output, input], nbytes=nbytes, label=label, after=after)

    def reduce_scatter(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        accumulate: bool = False,
    ) -> Work:
        """See ``Communicator``."""
        nbytes = self._check("reduce_scatter", input, output)
        self._check_sum("reduce_scatter", input)
        exchanges = input.dtype in _NARROW and (accumulate or self.nranks > 2)
        # Allocated here, for the stream on which all other memory is.
        scratch = paddle.empty_like(input if exchanges else output) if exchanges or accumulate else output

        def run(keep: _Keep) -> None:
            if exchanges:
                self._sum_pieces(output, scratch, input, keep, adds=accumulate)
                return
            self._group.reduce_scatter_tensor_on_calc_stream(scratch, input, _SUM)
            if accumulate:
                output.add_(scratch)

        touched = [output, input, scratch]
        return self._start("reduce_scatter", run, touched, nbytes=nbytes, label=label, after=after)

    def all_reduce(self, tensor: paddle.Tensor, *, label: str = "", after: Work | None = None) -> Work:
        """See ``Communicator``."""
        nbytes = self._check("all_reduce", tensor)
        self._check_sum("all_reduce", tensor)
        exchanges = tensor.dtype in _NARROW and self.nranks > 2
        padded_numel = -(-tensor.shape[0] // self.nranks) * self.nranks
        scratch = [paddle.zeros([padded_numel], tensor.dtype) for _ in range(2)] if exchanges else []

        def run(keep: _Keep) -> None:
            if not exchanges:
                self._group.all_reduce_on_calc_stream(tensor, _SUM)
                return
            whole, pieces = scratch
            own_numel = padded_numel // self.nranks
            own = whole._slice(self.rank * own_numel, (self.rank + 1) * own_numel)
            whole._slice(0, tensor.shape[0]).copy_(tensor, False)
            self._sum_pieces(own, pieces, whole, keep)
            self._group.all_gather_into_tensor_on_calc_stream(whole, own)
            tensor.copy_(whole._slice(0, tensor.shape[0]), False)

        return self._start("all_reduce", run, [tensor, *scratch], nbytes=nbytes, label=label, after=after)

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "", after: Work | None = None) -> Work:
        """See ``Communicator``."""
        nbytes = self._check("broadcast", tensor)
        if not 0 <= src < self.nranks:
            raise ConfigError(f"broadcast from group rank {src}: the group has ranks 0 to {self.nranks - 1}")
        data = _copyable(tensor)

        def run(keep: _Keep) -> None:
            self._group.broadcast_on_calc_stream(data, src)

        return self._start("broadcast", run, [tensor], nbytes=nbytes, label=label, after=after)

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
        run: Callable[[_Keep], None],
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

    def _queue(self, work: StreamWork, run: Callable[[_Keep], None] | None, after: Work | None) -> None:
        """With the lane's stream as the current one."""
        if after is not None and after.on_device and not self._follow(after, work):
            return
        work.mark_begin(self._stream)
        if run is not None:
            run(work.hold)

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

    def _sum_pieces(
        self, output: paddle.Tensor, pieces: paddle.Tensor, whole: paddle.Tensor, keep: _Keep, *, adds: bool = False
    ) -> None:
        """Sends each rank its piece of ``whole``, and sums up those that come, rounding once.

        In float32, in the order of ranks. ``output`` may lie in ``whole``; where it ``adds``, what it holds comes last.
        """
        numel = whole.shape[0] // self.nranks
        sizes = [numel] * self.nranks
        self._group.all_to_all_single_on_calc_stream(pieces, whole, sizes, sizes)
        terms = [pieces._slice(rank * numel, (rank + 1) * numel) for rank in range(self.nranks)]
        wide = [term.cast("float32") for term in (*terms, *([output] if adds else []))]
        keep(wide)
        for term in wide[1:]:
            wide[0].add_(term)
        rounded = wide[0].cast(output.dtype)
        keep([rounded])
        output.copy_(rounded, False)

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
        """Bytes of the whole."""
        for tensor in (whole, part):
            if tensor is not None:
                self._check_tensor(op, tensor)
        numel = whole.shape[0]
        if part is not None and (part.dtype != whole.dtype or part.shape[0] * self.nranks != numel):
            raise ConfigError(
                f"rank {self._me}, lane {self.lane!r}: {op} over {self.nranks} ranks got {numel} elements of "
                f"{whole.dtype} and {part.shape[0]} of {part.dtype}; one must be {self.nranks} times the other, of one "
                "dtype"
            )
        return int(numel * whole.element_size())

    def _check_tensor(self, op: str, tensor: paddle.Tensor) -> None:
        fits = len(tensor.shape) == 1 and tensor.is_contiguous()
        # Without elements it has no memory, and so no place.
        if not fits or (tensor.shape[0] and not self._device.holds(tensor)):
            raise ConfigError(
                f"rank {self._me}, lane {self.lane!r}: {op} takes contiguous, one-dimensional tensors on "
                f"{self._device.name}, not {tensor.dtype} of shape {list(tensor.shape)} on {tensor.place}"
            )

    def _check_sum(self, op: str, tensor: paddle.Tensor) -> None:
        if tensor.dtype not in _NATIVE:
            raise ConfigError(f"rank {self._me}, lane {self.lane!r}: {op} cannot add up {tensor.dtype}")


def _copyable(tensor: paddle.Tensor) -> paddle.Tensor:
    """The same memory, of a type that every library can move."""
    return tensor if tensor.dtype in _NATIVE or not tensor.shape[0] else tensor.view("uint8")
