"""A group of one: what it is asked to move is there already, or one copy away, on CPU and on any device.

On a device the copy is queued on the current stream, and is done as soon as it is: all that comes later there finds it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import numpy as np
import paddle

from ..errors import CommError, ConfigError
from .communicator import Communicator, Mark, Work
from .device import current_device
from .memory import ELEMENT_TYPES, bytes_of
from .rounding import QUIETLY, narrow, rounded_blocks, widen
from .wire import Carried, carried, plain

_PLAIN = {id(dtype): plain(element) for dtype, element in ELEMENT_TYPES.items() if element.partial is not None}
"""What nothing has to be converted for, by the dtype's id: each dtype is one object, and slow to hash."""


class LocalWork(Work):
    """A copy, made at once, or as soon as somebody asks for it after the works that it follows are done."""

    def __init__(self, op: str, label: str, lane: str, nbytes: int) -> None:
        self.op = op
        self.label = label
        self.lane = lane
        self.nbytes = nbytes
        self.start_s: float | None = None
        self.end_s: float | None = None

    # Most works are done before anybody sees them, and have none of these.
    _lock: threading.Lock
    _copy: Callable[[], None] | None = None
    _after: Work | None = None
    _before: LocalWork | None = None

    def start(self, copy: Callable[[], None], after: Work | None, before: LocalWork | None) -> None:
        """Once only. ``before`` is the work ahead of it on its lane, if that is not done yet."""
        self._lock = threading.Lock()
        self._copy, self._after, self._before = copy, after, before
        self.done()

    def wait(self) -> None:
        """See ``Work``."""
        if self.end_s is not None:
            return
        if self._before is not None:
            # Its failure is its own.
            with contextlib.suppress(CommError):
                self._before.wait()
        if self._after is not None:
            try:
                self._after.wait()
            except CommError as error:
                text = f"{self.op} of {self.label!r} on lane {self.lane!r}: the collective that it follows failed: "
                raise CommError(
                    text + str(error),
                    op=self.op,
                    label=self.label,
                    lane=self.lane,
                    rank=error.rank,
                    peer=error.peer,
                ) from error
        self._run()

    def done(self) -> bool:
        """See ``Work``."""
        if self.end_s is not None:
            return True
        ahead = (work for work in (self._before, self._after) if work is not None)
        if all(work.done() for work in ahead):
            try:
                self.wait()
            except CommError:
                return True
        return self.end_s is not None

    def _run(self) -> None:
        with self._lock:
            if self._copy is None:
                return
            self.start_s = time.perf_counter()
            self._copy()
            # Whoever sees the work done may use the memory again, and finds nobody else holding it.
            self._copy = self._after = self._before = None
            self.end_s = time.perf_counter()


class LocalCommunicator(Communicator):
    """One lane of a group of one. Made by ``create_communicators``. Takes what larger groups take."""

    def __init__(self, lane: str, ranks: tuple[int, ...]) -> None:
        assert len(ranks) == 1, ranks
        self.lane = lane
        self.ranks = ranks
        self.rank = 0
        self._last: LocalWork | None = None

    def all_gather(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        wire_dtype: str | None = None,
    ) -> Work:
        """See ``Communicator``."""
        types = self._check("all_gather", output, input, wire_dtype)
        return self._start("all_gather", _Copy(output, input, types), label=label, after=after)

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
        types = self._check("reduce_scatter", output, input, wire_dtype)
        return self._start("reduce_scatter", _Copy(output, input, types, accumulate), label=label, after=after)

    def all_reduce(
        self, tensor: paddle.Tensor, *, label: str = "", after: Work | None = None, wire_dtype: str | None = None
    ) -> Work:
        """See ``Communicator``."""
        types = self._check("all_reduce", tensor, tensor, wire_dtype)
        return self._start("all_reduce", _Copy(tensor, tensor, types), label=label, after=after)

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "", after: Work | None = None) -> Work:
        """See ``Communicator``."""
        if src != 0:
            raise ConfigError(f"broadcast from group rank {src}: a group of one has only rank 0")
        types = self._check("broadcast", tensor, tensor, None)
        return self._start("broadcast", _Copy(tensor, tensor, types), label=label, after=after)

    def mark(self) -> Mark:
        """See ``Communicator``."""
        if not current_device().has_streams:
            return Mark()
        from .stream_marks import StreamMark, lone_watcher  # which a device alone needs

        return StreamMark(lone_watcher())

    def close(self) -> None:
        """Nothing to end."""

    def _start(self, op: str, copy: _Copy, *, label: str, after: Work | None) -> Work:
        work = LocalWork(op, label, self.lane, copy.numel * copy.types.wire.item_bytes)
        if self._last is not None and self._last.done():
            self._last = None
        if after is None and not copy.adds and self._last is None:
            # Most are of this kind. With nothing to wait for there is no memory to be held, which costs ten times more.
            work.start_s = time.perf_counter()
            copy.make_at_once()
            work.end_s = time.perf_counter()
            return work
        work.start(copy.held(), after, self._last)
        self._last = work
        return work

    def _check(self, op: str, output: paddle.Tensor, input: paddle.Tensor, wire_dtype: str | None) -> Carried:
        dtype, shape = output.dtype, output.shape
        types = _PLAIN.get(id(dtype))
        if types is not None and wire_dtype is None and len(shape) == 1 and output.is_contiguous():
            alike = input is output or (input.dtype is dtype and input.shape == shape and input.is_contiguous())
            if alike:  # as nearly all are; what follows costs five times as much
                return types
        for tensor in (output,) if input is output else (output, input):
            if tensor.dtype not in ELEMENT_TYPES or len(tensor.shape) != 1 or not tensor.is_contiguous():
                raise ConfigError(
                    f"{op} takes contiguous, one-dimensional tensors, not {tensor.dtype} of shape {tensor.shape}"
                )
        if input.shape != output.shape:
            raise ConfigError(
                f"lane {self.lane!r}: {op} over one rank needs two tensors of one length, not {output.shape[0]} of "
                f"{output.dtype} and {input.shape[0]} of {input.dtype}"
            )
        return carried(op, input, output, wire_dtype=wire_dtype, where=f"lane {self.lane!r}")


class _Copy:
    """What becomes of a rank's tensor where there is no other rank.

    Attributes:
        numel: its elements.
        types: what it is converted to on the way, as if it travelled.
        adds: whether it is added to what the output holds.
    """

    __slots__ = ("_input", "_output", "adds", "numel", "types")

    def __init__(self, output: paddle.Tensor, input: paddle.Tensor, types: Carried, adds: bool = False) -> None:
        self.numel = output.shape[0]
        self.types = types
        self.adds = adds
        self._output = output
        self._input = input

    @property
    def _in_place(self) -> bool:
        return self._input is self._output or self._input.data_ptr() == self._output.data_ptr()

    def make_at_once(self) -> None:
        """Carries it out."""
        if self.types.converts:
            self.held()()
        elif not self._in_place:
            self._output.copy_(self._input, False)

    def held(self) -> Callable[[], None]:
        """What carries it out, and keeps the memory, whatever becomes of the tensors."""
        if not self.numel:
            return lambda: None
        return self._on_host() if self._output.place.is_cpu_place() else self._on_device()

    def _on_host(self) -> Callable[[], None]:
        own, wire, result = self.types
        target = result.array(bytes_of(self._output, self.numel * result.item_bytes))
        source = own.array(bytes_of(self._input, self.numel * own.item_bytes))
        converts, adds, in_place = self.types.converts, self.adds, self._in_place

        @QUIETLY
        def copy() -> None:
            if converts or adds:
                for block, values in rounded_blocks(source, own, wire):
                    total = np.add(values, widen(target[block], result)) if adds else values
                    narrow(target[block], total, result)
            elif not in_place:
                np.copyto(target, source)

        return copy

    def _on_device(self) -> Callable[[], None]:
        """Queued on the current stream, like what comes before and after it."""
        numel, adds, in_place = self.numel, self.adds, self._in_place
        own, wire, result = self.types
        # Tensors of their own: what becomes of the caller's objects is their affair.
        target, source = self._output._slice(0, numel), self._input._slice(0, numel)
        wide = "float32" if wire.name in ("float16", "bfloat16") else wire.name

        @paddle.no_grad()
        def copy() -> None:
            if adds:
                total = target.astype(wide) + source.astype(wire.name).astype(wide)
                target.copy_(total.astype(result.name), False)
            elif own is not wire or wire is not result:
                target.copy_(source.astype(wire.name).astype(result.name), False)
            elif not in_place:
                target.copy_(source, False)

        return copy
