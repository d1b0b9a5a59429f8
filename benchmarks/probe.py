"""Where the time of a step goes on one rank: in its forward, its backward and its update, by what was being done.

hp_sharding's timeline sums up whole steps. ``Probe`` stands around the same calls and keeps begin and end of each, so
that a gather which starts in ``step()`` and ends in the next forward counts in both, each with its part. It takes the
time of all that happens around a gather and is neither handing over nor waiting: there a design that packs parameters
into a message, and unpacks them again, would copy. And it looks at addresses: what is sent should be the memory that
the optimizer updates, and what was received the memory that layers read; where it is not, the bytes count as copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.turns import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterable

    import paddle

    from hp_sharding.comm import Work

KINDS = ("pack", "submit", "unpack", "fill", "wait")
"""What the training thread does for communication: before handing a gather over; that; after the gather; putting a
gradient where it will be reduced; waiting."""
LANES = ("gather", "reduce", "replicate")
COPIED = ("copied_in_mb", "copied_out_mb", "copied_own_mb", "gathered_mb")
"""Megabytes (2**20 bytes) of parameters a step: copied into messages; out of them; this rank's own part, inside the
collective; and all that was gathered."""


class _Interval(NamedTuple):
    kind: str
    start_s: float
    end_s: float


class _Memory(NamedTuple):
    start: int
    end: int

    @classmethod
    def of(cls, tensor: paddle.Tensor) -> _Memory:
        start = tensor.data_ptr()
        return cls(start, start + tensor.size * tensor.element_size())

    def bytes_outside(self, tensors: Iterable[paddle.Tensor]) -> int:
        """Of those tensors that do not lie here."""
        memories = [_Memory.of(tensor) for tensor in tensors]
        outside = [other for other in memories if other.start < self.start or other.end > self.end]
        return sum(other.end - other.start for other in outside)


class Probe:
    """Records what the training thread and the lanes of one wrapped model do.

    Args:
        optimizer: a ``ShardedOptimizer`` whose timeline is on.
    """

    def __init__(self, optimizer: Any) -> None:
        self._buffers: list[Any] = list(optimizer.buffers)
        self._works: list[Work] = []
        self._handed: list[tuple[_Interval, paddle.Tensor, paddle.Tensor]] = []
        self.begin()
        self._watch_timeline(optimizer.timeline)
        for buffer in self._buffers:
            self._watch_buffer(buffer)
        for lane in {id(buffer.place.gather): buffer.place.gather for buffer in self._buffers}.values():
            self._watch_lane(lane)

    def begin(self) -> None:
        """Forgets what was recorded."""
        self._intervals: list[_Interval] = []
        self._phases: list[_Interval] = []
        self._copied = dict.fromkeys(COPIED, 0)

    def end_step(self, marks_s: Sequence[float]) -> None:
        """Takes a step's moments, as ``time.perf_counter()``: the begin of each of ``PHASES``, and the end."""
        for phase, begin_s, end_s in zip(PHASES, marks_s, marks_s[1:], strict=False):
            self._phases.append(_Interval(phase, begin_s, end_s))
        self._take_done()

    def summary(self) -> dict[str, float]:
        """Means over the steps since ``begin``; call it when nothing is under way.

        Keys: ``forward_gather_ms`` and its like, for each of ``PHASES``, and of ``KINDS`` and ``LANES``; ``COPIED``;
        and ``copying_in_ms`` and ``copying_out_ms``, what copying each gather's message once would take.
        """
        self._take_done()
        n_steps = len(self._phases) // len(PHASES)
        result = {f"{phase}_{kind}_ms": 0.0 for phase in PHASES for kind in (*KINDS, *LANES)}
        for phase in self._phases:
            for interval in self._intervals:
                shared_s = min(phase.end_s, interval.end_s) - max(phase.start_s, interval.start_s)
                key = f"{phase.kind}_{interval.kind}_ms"
                if shared_s > 0 and key in result:
                    result[key] += shared_s * 1e3 / n_steps
        result |= {name: nbytes / 2**20 / n_steps for name, nbytes in self._copied.items()}
        return result | _time_copies(self._buffers)

    def _take_done(self) -> None:
        works, self._works = self._works, []
        for work in works:
            if not work.done():
                self._works.append(work)
            elif work.start_s is not None and work.end_s is not None:
                self._intervals.append(_Interval(work.lane, work.start_s, work.end_s))

    # -- what is watched -----------------------------------------------------------------------------------------------

    def _watch_timeline(self, timeline: Any) -> None:
        watch, wait = timeline.watch, timeline.wait

        def noted_watch(work: Work) -> Any:
            self._works.append(work)
            return watch(work)

        timeline.watch, timeline.wait = noted_watch, self._noted("wait", wait)

    def _watch_buffer(self, buffer: Any) -> None:
        start, finish = buffer.start_gather, self._noted("unpack", buffer.finish_gather)

        def noted_start() -> Work:
            begin_s = time.perf_counter()
            work: Work = start()
            handing, output, shard = self._handed.pop()
            self._intervals.append(_Interval("pack", begin_s, handing.start_s))
            self._count_copied_in(buffer, output, shard)
            return work

        def noted_finish() -> None:
            if buffer.gather_work is not None:
                # Over already, unless nobody has waited for it in view of the timeline.
                self._noted("wait", buffer.gather_work.wait)()
            finish()
            self._copied["copied_out_mb"] += _Memory.of(buffer.full).bytes_outside(buffer.params)

        buffer.start_gather, buffer.finish_gather = noted_start, noted_finish
        buffer.gradient.put = self._noted("fill", buffer.gradient.put)

    def _watch_lane(self, lane: Any) -> None:
        all_gather = lane.all_gather

        def noted_all_gather(output: paddle.Tensor, shard: paddle.Tensor, **more: Any) -> Any:
            begin_s = time.perf_counter()
            work = all_gather(output, shard, **more)
            interval = _Interval("submit", begin_s, time.perf_counter())
            self._intervals.append(interval)
            self._handed.append((interval, output, shard))
            return work

        lane.all_gather = noted_all_gather

    def _noted(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return call(*args)
            finally:
                self._intervals.append(_Interval(kind, begin_s, time.perf_counter()))

        return noted

    def _count_copied_in(self, buffer: Any, output: paddle.Tensor, shard: paddle.Tensor) -> None:
        message, sent = _Memory.of(output), _Memory.of(shard)
        self._copied["gathered_mb"] += message.end - message.start
        self._copied["copied_in_mb"] += sent.bytes_outside(part.tensor for part in buffer.slices)
        self._copied["copied_own_mb"] += message.bytes_outside([shard])


def _time_copies(buffers: Sequence[Any]) -> dict[str, float]:
    """How long it takes, in ms, to copy every bucket's shard into a message, and its parameters out of one."""
    import paddle

    ins: list[tuple[paddle.Tensor, paddle.Tensor]] = []
    outs: list[tuple[paddle.Tensor, paddle.Tensor]] = []
    for buffer in buffers:
        message = paddle.zeros([buffer.layout.numel], buffer.layout.dtype)
        ins += [(message._slice(s.start_numel, s.start_numel + s.numel), s.tensor) for s in buffer.slices]
        views = [message._slice(slot.offset_numel, slot.end_numel) for slot in buffer.layout.slots]
        outs += [(paddle.zeros_like(view), view) for view in views]
    return {"copying_in_ms": _time_second(ins), "copying_out_ms": _time_second(outs)}


def _time_second(pairs: Sequence[tuple[paddle.Tensor, paddle.Tensor]]) -> float:
    """Milliseconds that copying takes where the memory has been touched before; in the cache is what fits there."""
    for _ in range(2):
        begin_s = time.perf_counter()
        for target, source in pairs:
            target.copy_(source, False)
        took_s = time.perf_counter() - begin_s
    return took_s * 1e3
