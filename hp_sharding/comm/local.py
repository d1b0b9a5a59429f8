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
from .communicator import Communicator, Work
from .memory import ELEMENT_TYPES, ElementType, bytes_of
from .sums import Adder


class LocalWork(Work):
    """A copy, made at once, or as soon as somebody asks for it after the works that it follows are done."""

    def __init__(self, op: str, label: str, lane: str, nbytes: int) -> None:
        self.op = op
        self.label = label
        self.lane = lane
        self.nbytes = nbytes
        self.start_s: float | None = None
        self.end_s: float | None = None
        self._lock = threading.Lock()
        self._copy: Callable[[], None] | None = None
        self._after: Work | None = None
        self._before: LocalWork | None = None

    def start(self, copy: Callable[[], None], after: Work | None, before: LocalWork | None) -> None:
        """Once only. ``before`` is the work ahead of it on its lane, if that is not done yet."""
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
        ahead = (work for work in (self._before, self._after) if work is not None)
        if self.end_s is None and all(work.done() for work in ahead):
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
        self, output: paddle.Tensor, input: paddle.Tensor, *, label: str = "", after: Work | None = None
    ) -> Work:
        """See ``Communicator``."""
        return self._start("all_gather", output, input, label=label, after=after)

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
        return self._start("reduce_scatter", output, input, label=label, after=after, accumulate=accumulate)

    def all_reduce(self, tensor: paddle.Tensor, *, label: str = "", after: Work | None = None) -> Work:
        """See ``Communicator``."""
        return self._start("all_reduce", tensor, tensor, label=label, after=after)

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "", after: Work | None = None) -> Work:
        """See ``Communicator``."""
        if src != 0:
            raise ConfigError(f"broadcast from group rank {src}: a group of one has only rank 0")
        return self._start("broadcast", tensor, tensor, label=label, after=after)

    def close(self) -> None:
        """Nothing to end."""

    def _start(
        self,
        op: str,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str,
        after: Work | None,
        accumulate: bool = False,
    ) -> Work:
        element = _element(op, output)
        in_place = input is output or (input.data_ptr() == output.data_ptr() and input.shape == output.shape)
        if not in_place and (_element(op, input) is not element or input.shape != output.shape):
            raise ConfigError(
                f"lane {self.lane!r}: {op} over one rank needs two tensors of one dtype and length, not "
                f"{output.shape[0]} of {output.dtype} and {input.shape[0]} of {input.dtype}"
            )
        nbytes = output.shape[0] * element.item_bytes
        work = LocalWork(op, label, self.lane, nbytes)
        if self._last is not None and self._last.done():
            self._last = None
        if after is None and not accumulate and self._last is None:
            # Most are of this kind. With nothing to wait for there is no memory to be held, which costs ten times more.
            work.start_s = time.perf_counter()
            if not in_place:
                output.copy_(input, False)
            work.end_s = time.perf_counter()
            return work
        on_host = not nbytes or output.place.is_cpu_place()
        copy = _copy_on_host if on_host else _copy_on_device
        work.start(copy(output, input, element, accumulate=accumulate), after, self._last)
        self._last = work
        return work


def _copy_on_host(
    output: paddle.Tensor, input: paddle.Tensor, element: ElementType, *, accumulate: bool
) -> Callable[[], None]:
    nbytes = output.shape[0] * element.item_bytes
    target, source = bytes_of(output, nbytes), bytes_of(input, nbytes)

    def copy() -> None:
        if accumulate:
            adder = Adder(element)
            partial = np.zeros(len(source) // element.item_bytes, adder.partial)
            adder.add_to_partial(partial, adder.stored(source))
            adder.store(adder.stored(target), partial, accumulate=True)
        elif target.ctypes.data != source.ctypes.data:
            np.copyto(target, source)

    return copy


def _copy_on_device(
    output: paddle.Tensor, input: paddle.Tensor, element: ElementType, *, accumulate: bool
) -> Callable[[], None]:
    """Queued on the current stream, like what comes before and after it."""
    numel = output.shape[0]
    # Tensors of their own: what becomes of the caller's objects is their affair.
    target, source = output._slice(0, numel), input._slice(0, numel)
    wide = "float32" if element.storage.itemsize == 2 and element.partial == np.float32 else element.name

    @paddle.no_grad()
    def copy() -> None:
        if accumulate:
            target.copy_((target.astype(wide) + source.astype(wide)).astype(element.name), False)
        elif target.data_ptr() != source.data_ptr():
            target.copy_(source, False)

    return copy


def _element(op: str, tensor: paddle.Tensor) -> ElementType:
    element = ELEMENT_TYPES.get(tensor.dtype)
    if element is None or len(tensor.shape) != 1 or not tensor.is_contiguous():
        raise ConfigError(f"{op} takes contiguous, one-dimensional tensors, not {tensor.dtype} of shape {tensor.shape}")
    if op in ("reduce_scatter", "all_reduce") and element.partial is None:
        raise ConfigError(f"{op} cannot add up {element.name}")
    return element
