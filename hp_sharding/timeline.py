"""Labelled spans of communication and waiting, and the numbers drawn from them. Costs a flag test when off.

A span is (lane, label, start, end, bytes). Lanes are ``gather``, ``reduce`` and ``replicate`` for the collectives and
``wait`` for the time in which compute (the main thread, or its stream on a device) did nothing but wait for one: that
time is *exposed*. What is left of a step is compute.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .comm import Stall, Work


class Span(NamedTuple):
    """One interval on one lane.

    Attributes:
        lane: ``"gather"``, ``"reduce"``, ``"replicate"``, ``"agree"`` or ``"wait"``.
        label: what was carried or waited for: bucket, backward.
        start_s: as ``time.perf_counter()``.
        end_s: likewise.
        nbytes: bytes of the whole message; 0 for waits.
    """

    lane: str
    label: str
    start_s: float
    end_s: float
    nbytes: int

    @property
    def duration_ms(self) -> float:
        """Length in milliseconds."""
        return (self.end_s - self.start_s) * 1e3


class StepTimes(NamedTuple):
    """One step in milliseconds.

    Attributes:
        step_ms: from the end of one ``step()`` to the end of the next.
        compute_ms: what is left of it without the exposed waiting.
        gather_ms: how long the lane was busy.
        reduce_ms: likewise.
        exposed_ms: how long the main thread did nothing but wait for communication.
        replicate_ms: how long the lane was busy.
    """

    step_ms: float
    compute_ms: float
    gather_ms: float
    reduce_ms: float
    exposed_ms: float
    replicate_ms: float = 0.0


MAX_STEPS = 1000
"""Steps kept; older ones are forgotten, so that a long run does not grow."""


class Timeline:
    """Collects spans while ``enabled`` and sums them up step by step.

    A step lasts from the end of one ``optimizer.step()`` to the end of the next; the first one has no beginning and is
    not counted. Attributes: ``enabled``, ``steps`` (a ``StepTimes`` each) and ``spans`` of the last counted step.

    Args:
        enabled: see above.
        on_device: compute runs on a device, which goes on while the host waits for another host.
    """

    def __init__(self, enabled: bool, *, on_device: bool = False) -> None:
        self.enabled = enabled
        self._on_device = on_device
        self.steps: list[StepTimes] = []
        self.spans: list[Span] = []
        self._works: list[Work] = []
        self._stalls: list[Stall] = []
        self._step_start_s: float | None = None

    def stop(self) -> None:
        """Records nothing more, and forgets what has been recorded."""
        self.enabled = False
        self.steps, self.spans, self._works, self._stalls, self._step_start_s = [], [], [], [], None

    def watch(self, work: Work) -> Work:
        """Has the work's span counted once it is done. Returns ``work``."""
        if self.enabled:
            self._works.append(work)
        return work

    def wait(self, work: Work) -> None:
        """``work.wait()``, counted as exposed time for as long as compute stands still."""
        if self.enabled and work.on_device == self._on_device:
            work.timed_wait(self._stalls)
        else:
            work.wait()

    def end_step(self) -> None:
        """Marks the end of ``optimizer.step()``. Works still under way count in the step in which they end."""
        if not self.enabled:
            return
        now_s = time.perf_counter()
        spans = [*self._take_done(), *self._take_stalls()]
        if self._step_start_s is not None:
            self.spans = spans
            self.steps.append(_sum_up(now_s - self._step_start_s, spans))
            del self.steps[:-MAX_STEPS]
        self._step_start_s = now_s

    def summary(self) -> dict[str, float]:
        """Medians over the recorded steps, in milliseconds, and ``overlap_percent``.

        Keys: ``steps``, ``step_ms``, ``compute_ms``, ``gather_ms``, ``reduce_ms``, ``replicate_ms``,
        ``exposed_ms``, ``overlap_percent`` (the part of the lanes' busy time in which the main thread did not wait).
        All zero where nothing was recorded.
        """
        if not self.steps:
            return dict.fromkeys(("steps", *StepTimes._fields, "overlap_percent"), 0.0)
        medians = {name: median(getattr(step, name) for step in self.steps) for name in StepTimes._fields}
        busy_ms = medians["gather_ms"] + medians["reduce_ms"] + medians["replicate_ms"]
        hidden = 1 - min(medians["exposed_ms"] / busy_ms, 1.0) if busy_ms else 1.0
        return {"steps": float(len(self.steps)), **medians, "overlap_percent": 100 * hidden}

    def _take_done(self) -> Iterable[Span]:
        watched, self._works = self._works, []
        for work in watched:
            # Asked once only: it may end at any moment.
            if not work.done():
                self._works.append(work)
            elif work.start_s is not None and work.end_s is not None:
                yield Span(work.lane, work.label, work.start_s, work.end_s, work.nbytes)

    def _take_stalls(self) -> Iterable[Span]:
        stalls, self._stalls = self._stalls, []
        for stall in stalls:
            start_s, end_s = stall.start_s, stall.end_s
            if start_s is None or end_s is None:
                self._stalls.append(stall)
            else:
                yield Span("wait", stall.label, start_s, end_s, 0)


def _sum_up(step_s: float, spans: Iterable[Span]) -> StepTimes:
    busy_ms = {"gather": 0.0, "reduce": 0.0, "replicate": 0.0, "wait": 0.0}
    for span in spans:
        busy_ms[span.lane] = busy_ms.get(span.lane, 0.0) + span.duration_ms
    step_ms = step_s * 1e3
    wait_ms = busy_ms.pop("wait")
    return StepTimes(
        step_ms=step_ms,
        compute_ms=step_ms - wait_ms,
        gather_ms=busy_ms["gather"],
        reduce_ms=busy_ms["reduce"],
        exposed_ms=wait_ms,
        replicate_ms=busy_ms["replicate"],
    )
