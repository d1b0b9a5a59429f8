"""Recordings: some steps of all ranks, merged on the first rank onto one clock."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ConfigError, StateError
from ..trace.spans import Span, Step, Trace
from .clocks import ClockMap, Reading, about_clocks, clock_map, read_clock
from .meeting import Meeting, Round
from .subject import Subject

if TYPE_CHECKING:
    from ..comm import Mark
    from .line import Timeline

Recorded = tuple[Step, list[Span]]
"""A step, and what ends in it."""


class Recording:
    """Some steps under way, or over; what ``Timeline.record`` returns.

    Attributes:
        trace: what all ranks have recorded, once it is over, on the first rank; None before, and on the others.
        n_steps: steps recorded so far.
    """

    def __init__(self, line: Timeline, steps: int | None, path: str | None) -> None:
        self.trace: Trace | None = None
        self.n_steps = 0
        self._line = line
        self._asked = steps
        self._path = path
        self._is_written = False
        self._recorded: list[Recorded] = []
        self._start: Mark | None = None
        self._readings: list[Reading] = []
        self._over = False

    def __enter__(self) -> Recording:
        if self._start is not None:
            raise ConfigError("a recording is made once; call optimizer.timeline.record() again")
        self._line.check_free()
        meeting = Meeting(self._line.subject.ways)
        self._is_written = self._agree(meeting)
        self._readings.append(read_clock(meeting))
        self._start = self._line.begin_recording(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._over:
            return
        if kind is not None:
            # The other ranks may be anywhere: nothing that they would have to enter.
            self._over = True
            self._line.end_recording()
        elif self._asked is None:
            self._finish()
        else:
            self._over = True
            self._line.end_recording()
            raise StateError(
                f"rank {self._line.subject.rank}: record(steps={self._asked}): the block ended after {self.n_steps} "
                "steps, so nothing was merged or written. Make as many steps inside it, or leave steps out to record "
                "until it ends"
            )

    def note_step(self) -> None:
        """A step has ended on the host."""
        self.n_steps += 1
        if self.n_steps == self._asked:
            self._finish()

    def take(self, step: Step, spans: list[Span]) -> None:
        """A step whose times are known. What lies before the recording is cut off."""
        start_s = self._start.time_s if self._start is not None else None
        if start_s is None or step.end_s <= start_s:
            return
        step = step._replace(start_s=max(step.start_s, start_s))
        self._recorded.append((step, [_cut(span, start_s) for span in spans if span.end_s > start_s]))

    def _finish(self) -> None:
        """Merges. Collective."""
        self._over = True
        line, subject = self._line, self._line.subject
        try:
            rest = line.complete()
            recorded = self._recorded
            if recorded:
                recorded[-1][1].extend(rest)
        finally:
            line.end_recording()
        self.trace = merge(subject, recorded, readings=self._readings)
        self._recorded = []
        if self._is_written:
            write_together(subject, self.trace, self._path)

    def _agree(self, meeting: Meeting) -> bool:
        """Whether there is a file to be written: the first rank says which. Collective.

        Raises:
            ConfigError: not all ranks ask for the same; on every rank, so that none waits for the others in vain.
        """
        rank = self._line.subject.rank
        asked = _Asked(rank, meeting.is_first, self._asked, self._path is not None)
        everyone = sorted(_Asked(*json.loads(data)) for data in meeting.gather(json.dumps(asked).encode()))
        if len({each.steps for each in everyone}) > 1:
            said = ", ".join(f"rank {each.rank} {each.steps}" for each in everyone)
            raise ConfigError(f"rank {rank}: record(steps=...) differs: {said}. All ranks record the same steps")
        is_written = any(each.has_path for each in everyone if each.is_first)
        if not is_written and any(each.has_path for each in everyone):
            first = next(each.rank for each in everyone if each.is_first)
            having = [each.rank for each in everyone if each.has_path]
            raise ConfigError(
                f"rank {rank}: record(path=...): only ranks {having} have a path, but it is rank {first} that writes "
                "the file. Give it to all ranks, or to that one"
            )
        return is_written


class _Asked(NamedTuple):
    """What one rank wants of a recording."""

    rank: int
    is_first: bool
    steps: int | None
    has_path: bool


def as_path(path: str | os.PathLike[str] | None) -> str | None:
    """As a string; raises ConfigError for what names no file."""
    try:
        found = os.fspath(path) if path is not None else None
    except TypeError:
        found = ""
    if found is not None and not (found and isinstance(found, str)):
        raise ConfigError(f"path={path!r}: expected the path of a file, or None for none")
    return found


def check_steps(steps: object) -> None:
    """Raises ConfigError unless it is a number of steps, or None."""
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ConfigError(f"record(steps={steps!r}): expected 1 or more steps, or None to record until the block ends")


def merge(subject: Subject, recorded: Sequence[Recorded], *, readings: Sequence[Reading]) -> Trace | None:
    """The trace of all ranks, on the first one; None on the others. Collective.

    Args:
        recorded: this rank's, by its own clock.
        readings: of its clock, from before; one more is made here.

    Raises:
        CommError: a rank is gone, or late.
    """
    meeting = Meeting(subject.ways)
    own = _Part(subject.rank, platform.node(), [*readings, read_clock(meeting)], recorded)
    everyone = [_Part.unpack(data) for data in meeting.gather(own.pack())]
    if not meeting.is_first:
        return None
    return _on_one_clock(everyone, own, subject.about())


def write_together(subject: Subject, trace: Trace | None, path: str | os.PathLike[str] | None) -> None:
    """Writes the trace on the first rank, which has it; all ranks raise where that fails. Collective.

    Args:
        path: counts on the first rank only.
    """
    meeting = Meeting(subject.ways)
    trouble = ""
    if trace is not None:
        from ..trace import chrome

        try:
            chrome.write(trace, as_path(path) or "")
        except Exception as error:  # noqa: BLE001 - whatever it is, the others wait to hear of it
            trouble = f"the first rank could not write the trace to {path!r}: {str(error) or type(error).__name__}"
    trouble = meeting.share_text(trouble)
    if trouble:
        raise ConfigError(f"rank {subject.rank}: {trouble}")


class _Part(NamedTuple):
    """What one rank has recorded."""

    rank: int
    host: str
    readings: list[Reading]
    recorded: Sequence[Recorded]

    def pack(self) -> bytes:
        """As bytes that ``unpack`` takes."""
        readings = [[reading.host, reading.rounds] for reading in self.readings]
        recorded = [[step[1:], [span[1:] for span in spans]] for step, spans in self.recorded]
        return json.dumps([self.rank, self.host, readings, recorded]).encode()

    @classmethod
    def unpack(cls, data: bytes) -> _Part:
        """What ``pack`` gave on any rank."""
        rank, host, readings, recorded = json.loads(data)
        found = [Reading(host, [Round(*each) for each in rounds]) for host, rounds in readings]
        steps = [(Step(rank, *step), [Span(rank, *span) for span in spans]) for step, spans in recorded]
        return cls(rank, host, found, steps)

    def mapped(self, clock: ClockMap, zero_s: float) -> tuple[list[Step], list[Span]]:
        """Steps and spans by the first rank's clock, of which ``zero_s`` becomes zero."""

        def move(each: Any) -> Any:
            return each._replace(start_s=clock.map(each.start_s) - zero_s, end_s=clock.map(each.end_s) - zero_s)

        return [move(step) for step, _ in self.recorded], [move(span) for _, spans in self.recorded for span in spans]


def _on_one_clock(parts: Sequence[_Part], first: _Part, about: dict[str, Any]) -> Trace:
    clocks = {part.rank: clock_map(part.readings, first.readings) for part in parts}
    begins = [clocks[part.rank].map(step.start_s) for part in parts for step, _ in part.recorded]
    zero_s = min(begins, default=0.0)
    host_of = {part.rank: part.host for part in parts}
    hosts = [host_of.get(rank, "") for rank in range(max(host_of) + 1)]
    trace = Trace(about={**about, "hosts": hosts, "clock": about_clocks(clocks)})
    for part in sorted(parts, key=lambda part: part.rank):
        steps, spans = part.mapped(clocks[part.rank], zero_s)
        trace.steps += steps
        trace.spans += sorted(spans, key=lambda span: span.start_s)
    return trace


def _cut(span: Span, start_s: float) -> Span:
    """What is left of it from there on, and its share of the bytes."""
    if span.start_s >= start_s:
        return span
    share = (span.end_s - start_s) / (span.end_s - span.start_s)
    return span._replace(start_s=start_s, nbytes=round(span.nbytes * share))
