"""``Timeline``: collects what schedule and lanes tell it while it is on, and sums it up step by step."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..comm import Mark
from ..errors import CommError, ConfigError
from ..trace.figures import union
from ..trace.spans import LANES, Span, Step, Trace
from .marks import MOST, ComputeMarks, Doing, Entry, tiles, without
from .recording import Recording, as_path, check_steps, merge, write_together
from .sinks import Sink
from .steps import EXTRA, StepTimes, summary_of, times_of
from .subject import Subject, is_bucket, layer_of

if TYPE_CHECKING:
    from ..comm import Stall, Work

LOG = logging.getLogger("hp_sharding")

MAX_STEPS = 1000
"""Steps kept; older ones are forgotten, so that a long run does not grow."""
KEPT_STEPS = 10
"""Steps whose spans are kept, for ``trace()``."""
_MAX_BEHIND = 100
"""Steps by which a device may be behind before the oldest is given up."""
_POLL_S = 0.0005


class _Watched(NamedTuple):
    """A work, and what the buckets held when it was started: buckets may be laid out anew before it is looked at."""

    work: Work
    layers: Mapping[str, str]


class _Ended(NamedTuple):
    """A step that has ended on the host; a device may come to its end later."""

    number: int
    start: Mark | None
    end: Mark
    before: Doing
    entries: list[Entry]
    stalls: list[tuple[Stall, Mapping[str, str]]]
    figures: dict[str, float]

    def is_known(self) -> bool:
        """Whether all of its times are."""
        if self.end.time_s is None or (self.start is not None and self.start.time_s is None):
            return False
        marks = all(entry.mark.time_s is not None for entry in self.entries)
        return marks and all(stall.start_s is not None and stall.end_s is not None for stall, _ in self.stalls)


class Timeline:
    """Collects spans while ``enabled`` and sums them up step by step.

    A step lasts from the end of one ``optimizer.step()`` to the end of the next; the first one has no beginning and is
    not counted, unless a recording has begun before it.

    Attributes:
        enabled: whether it collects now: always, or while a recording is under way.
        steps: a ``StepTimes`` for each counted step, the last ``MAX_STEPS`` of them.
        spans: of the last counted step.
        subject: what it knows of the run.

    Args:
        enabled: always, as the setting ``timeline`` says.
        on_device: compute runs on a device, which goes on while the host waits for another host.
        new_mark: marks where compute is now.
    """

    def __init__(self, enabled: bool, *, on_device: bool = False, new_mark: Callable[[], Mark] = Mark) -> None:
        self.enabled = enabled
        self.subject = Subject()
        self.steps: list[StepTimes] = []
        self.spans: list[Span] = []
        self._rests_after = False
        self._on_device = on_device
        self._new_mark = new_mark
        self._marks = ComputeMarks(new_mark)
        self._works: list[_Watched] = []
        self._stalls: list[Stall] = []
        self._stalled_in: list[Mapping[str, str]] = []
        self._ended: deque[_Ended] = deque()
        self._step_start: Mark | None = None
        self._n_ended = 0
        self._wrong_guesses = 0
        self._peak_bytes = 0
        self._recording: Recording | None = None
        self._kept: deque[tuple[Step, list[Span]]] = deque(maxlen=KEPT_STEPS)
        self._sinks: list[Sink] = []
        self._has_unheard = False
        # Whether the user has asked for it, who may not be the only one who listens.
        self._is_wanted = enabled
        self._of_recording: list[StepTimes] = []

    # -- told by those who send and wait -------------------------------------------------------------------------

    def watch(self, work: Work) -> Work:
        """Has the work's span counted once it is done. Returns ``work``."""
        if self.enabled:
            self._works.append(_Watched(work, self.subject.layers))
            if len(self._works) > MOST // 2:
                # No step ends any more, as in a long evaluation; and they are larger than marks.
                del self._works[: len(self._works) // 2]
        return work

    def wait(self, work: Work) -> None:
        """``work.wait()``, counted as exposed time for as long as compute stands still."""
        if self.enabled and work.on_device == self._on_device:
            self._note_layers()
            work.timed_wait(self._stalls)
        else:
            work.wait()

    # -- told by those who compute, only while enabled -----------------------------------------------------------

    def enter(self, label: str, layer: str | None) -> None:
        """From here on compute is at this, until ``leave``; a ``layer`` of None is named by ``until``."""
        self._marks.enter(label, layer)
        self._note_bytes()

    def leave(self) -> None:
        """Compute goes on with what it was at before."""
        self._marks.leave()
        self._note_bytes()

    def switch(self, label: str, layer: str) -> None:
        """What is under way, if it has that label, is of this layer from here on."""
        self._marks.switch(label, layer)
        self._note_bytes()

    def until(self, layer: str) -> None:
        """What compute has been at until here, and nobody has named, is of this layer."""
        self._marks.until(layer)
        self._note_bytes()

    def reset(self) -> None:
        """Compute is at nothing of ours: a step, a backward or a forward has ended, or raised."""
        self._marks.reset()

    def count_wrong_guesses(self, count: int) -> None:
        """So many gathers have turned out to be started too early, too late or for nothing."""
        self._wrong_guesses += count

    def end_step(self, number: int | None = None) -> None:
        """Marks the end of ``optimizer.step()``. Works still under way count in the step in which they end.

        Where a recording is over with it, all ranks merge what they have: collective then.

        Args:
            number: of the step, from 1 on; None to go on counting.

        Raises:
            CommError: a rank is gone, or late beyond ``timeout_s``; when a recording is over.
            ConfigError: its file could not be written; on every rank.
        """
        if not self.enabled:
            if self._has_unheard:
                self._warn_of_silence()
            return
        end = self._new_mark()
        end.settle()
        self._marks.reset()
        before, entries = self._marks.take()
        self._n_ended = self._n_ended + 1 if number is None else number
        stalls = list(zip(self._stalls, self._stalled_in, strict=True))
        self._stalls, self._stalled_in = [], []
        self._ended.append(_Ended(self._n_ended, self._step_start, end, before, entries, stalls, self._take_figures()))
        if len(self._ended) > _MAX_BEHIND:
            self._ended.popleft()
        self._step_start = end
        self._settle()
        if self._recording is not None:
            self._recording.note_step()

    # -- figures -------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """What the recorded steps come to: medians in milliseconds, and more; see ``trace.figures.over_steps``.

        Keys: ``steps``, ``step_ms``, ``compute_ms``, ``exposed_ms``, ``busy_ms`` (in which some communication was under
        way), ``hidden_ms`` (in which compute went on meanwhile), ``overlap_percent`` (the second in the first); of each
        lane ``gather``, ``reduce``, ``replicate`` and ``agree``
        ``<lane>_ms``, ``<lane>_bytes`` and ``<lane>_gb_s``; ``phases_ms`` and ``exposed_ms_by_layer``, which are
        dicts; ``wrong_guesses``, ``peak_bytes``, ``formula_bytes``. All zero where nothing was recorded. The figures of
        single steps are in ``steps``.
        """
        self._settle()
        return summary_of(self.steps)

    def table(self) -> str:
        """``summary()`` for a terminal."""
        from ..trace import tables

        return tables.table(self.summary())

    def __str__(self) -> str:
        return self.table()

    def add_sink(self, sink: Sink) -> None:
        """Has ``sink(figures)`` called after each step that is counted, on this rank; see ``json_lines``, ``scalars``.

        While the timeline is off, and nothing is recorded, it is not called; the first such step is told of in the log.
        A sink that raises is told of in the log, as a warning, and is not called any more: what one rank cannot write
        must not stop it while the others go on.
        """
        self._sinks.append(sink)
        self._has_unheard = True

    # -- records -------------------------------------------------------------------------------------------------

    def record(self, steps: int | None = None, path: str | os.PathLike[str] | None = None) -> Recording:
        """A context manager that records the next ``steps`` steps, whether the timeline is on or off.

        ``with optimizer.timeline.record(steps=3, path="trace.json") as recording:``. Once the steps are over, inside
        the last ``step()``, or at the end of the block where ``steps`` is None, the spans of all ranks are merged on
        the first rank, on one clock: ``recording.trace`` is a ``Trace`` there and None elsewhere, and ``path`` is
        written. Every rank enters it; beginning and end are collective. Where the block raises, nothing is merged.
        Where the timeline was off, ``summary()`` is of these steps alone afterwards.

        Args:
            steps: how many, 1 or more, the same on all ranks; None until the block ends.
            path: of the file, which ``hp-sharding trace show``, Perfetto and Chrome open; None for none. The first rank
                writes it; what the others say does not matter then.

        Raises:
            ConfigError: ``steps`` is no such number, or ``path`` none; or, on entry, another recording is under way;
                or, on every rank, ranks ask for different steps, or have a path of which the first one knows nothing.
        """
        check_steps(steps)
        return Recording(self, steps, as_path(path))

    def trace(self) -> Trace | None:
        """The last ``KEPT_STEPS`` steps of all ranks on the first one, None on the others. Collective.

        Raises:
            ConfigError: the timeline is off.
            CommError: a rank is gone, or late beyond ``timeout_s``.
        """
        if not self.enabled:
            raise ConfigError(
                f"rank {self.subject.rank}: nothing is recorded. Set timeline=True, or record some steps with "
                "'with optimizer.timeline.record(steps=3) as recording:'"
            )
        self._settle_all(self._ended)
        return merge(self.subject, list(self._kept), readings=[])

    def write(self, path: str | os.PathLike[str] | None) -> None:
        """Writes ``trace()`` to a file, on the first rank, whose ``path`` counts. Collective.

        Raises:
            ConfigError: the timeline is off, or the file could not be written; on every rank.
            CommError: a rank is gone, or late beyond ``timeout_s``.
        """
        write_together(self.subject, self.trace(), path)

    def stop(self) -> None:
        """Records nothing more of its own accord, and forgets all but the last recording, under way or over."""
        self.steps = list(self._of_recording)
        self.spans = self.spans if self.steps else []
        self._kept.clear()
        self._rests_after = True
        if self._recording is None:
            self._rest()

    # -- told by a recording -------------------------------------------------------------------------------------

    def check_free(self) -> None:
        """Raises ConfigError while a recording is under way."""
        if self._recording is not None:
            raise ConfigError(
                f"rank {self.subject.rank}: a recording is under way already; end its block, or its steps, before "
                "another one begins"
            )

    def begin_recording(self, recording: Recording) -> Mark:
        """Collects from here on. Returns the moment."""
        if not self.enabled:
            self.subject.formula_bytes()
            try:
                self.subject.begin()
            except BaseException:
                self.subject.end()
                raise
            layers = self.subject.layers
            self._works.extend(_Watched(work, layers) for work in self.subject.under_way())
        if not self._is_wanted:
            # An earlier recording is another matter.
            self.steps, self.spans = [], []
            self._kept.clear()
        start = self._new_mark()
        start.settle()
        self._recording, self._of_recording = recording, []
        self._rests_after = not self.enabled
        self.enabled = True
        # Where no step has ended yet, the first one has a beginning now.
        self._step_start = self._step_start or start
        return start

    def end_recording(self) -> None:
        """Collects no longer, unless always. Safe to call twice."""
        if self._recording is None:
            return
        self._recording = None
        if self._rests_after:
            self._rest()

    def complete(self) -> list[Span]:
        """Returns once all times of the steps so far are known; returns the spans of what was under way at their end.

        Raises:
            CommError: a collective failed, or did not end within ``timeout_s``.
        """
        watched = list(self._works)
        for under_way, _ in watched:
            under_way.wait()
        self._settle_all([work for work, _ in watched])
        end_s = self._step_start.time_s if self._step_start is not None else None
        return [self._span(each) for each in watched if end_s is not None and _ended_after(each.work, end_s)]

    def _rest(self) -> None:
        """Off, with nothing under way."""
        self.enabled = False
        self._works, self._stalls, self._stalled_in = [], [], []
        self._ended.clear()
        self._marks = ComputeMarks(self._new_mark)
        self._step_start = None
        self._wrong_guesses = self._peak_bytes = 0
        self.subject.end()

    # -- parts ---------------------------------------------------------------------------------------------------

    def _note_bytes(self) -> None:
        held = self.subject.held_bytes()
        if held > self._peak_bytes:
            self._peak_bytes = held

    def _take_figures(self) -> dict[str, float]:
        # First of all: the first update makes the moments, which are held from then on.
        formula_bytes = self.subject.formula_bytes()
        self._note_bytes()
        found = self._wrong_guesses, self._peak_bytes, formula_bytes
        self._wrong_guesses = self._peak_bytes = 0
        return dict(zip(EXTRA, map(float, found), strict=True))

    def _settle(self) -> None:
        """Sums up the steps whose times are known."""
        while self._ended and self._ended[0].is_known():
            self._sum_up(self._ended.popleft())

    def _settle_all(self, works: Iterable[Any]) -> None:
        """Has the host wait for the times of all that has ended, and of ``works``."""
        deadline_s = time.monotonic() + self.subject.timeout_s
        while True:
            self._settle()
            if not self._ended and all(work.done() for work in works):
                return
            if time.monotonic() > deadline_s:
                raise CommError(f"rank {self.subject.rank}: the end of the recorded steps did not come in time")
            time.sleep(_POLL_S)

    def _sum_up(self, ended: _Ended) -> None:
        end_s = ended.end.time_s
        assert end_s is not None
        works = self._take_done(end_s)
        start_s = ended.start.time_s if ended.start is not None else None
        if start_s is None:
            return
        rank = self.subject.rank
        waits = [
            Span(rank, "wait", stall.label, stall.start_s or 0.0, stall.end_s or 0.0, 0, layer_of(stall.label, layers))
            for stall, layers in ended.stalls
        ]
        parts = tiles(ended.before, ended.entries, start_s=start_s, end_s=end_s, whole=self.subject.whole)
        compute = [
            Span(rank, "compute", tile.label, tile.start_s, tile.end_s, 0, tile.layer)
            for tile in without(parts, union(waits))
        ]
        self._take_step(Step(rank, ended.number, start_s, end_s, ended.figures), [*works, *waits, *compute])

    def _take_step(self, step: Step, spans: list[Span]) -> None:
        self.spans = spans
        self.steps.append(times_of(spans, step, self.subject.groups))
        del self.steps[:-MAX_STEPS]
        self._kept.append((step, spans))
        self._has_unheard = False
        if self._recording is not None:
            self._of_recording.append(self.steps[-1])
            del self._of_recording[:-MAX_STEPS]
            self._recording.take(step, spans)
        for sink in list(self._sinks):
            self._tell(sink, self.steps[-1].figures)

    def _note_layers(self) -> None:
        """The wait that comes is for what buckets hold now."""
        if len(self._stalls) >= MOST:
            del self._stalls[: MOST // 2], self._stalled_in[: MOST // 2]
        self._stalled_in.append(self.subject.layers)

    def _warn_of_silence(self) -> None:
        self._has_unheard = False
        LOG.warning(
            "rank %d: the timeline is off, so that %s gets no steps but those of recordings. Set timeline=True for all",
            self.subject.rank, ", ".join(map(repr, self._sinks)),
        )  # fmt: skip

    def _tell(self, sink: Sink, figures: dict[str, Any]) -> None:
        try:
            sink(figures)
        except Exception:  # whatever a user's writer raises
            self._sinks.remove(sink)
            LOG.warning("rank %d: %r has failed and gets no more steps", self.subject.rank, sink, exc_info=True)

    def _take_done(self, end_s: float) -> list[Span]:
        """Of the works that have ended by then; those that failed, or never began, have none."""
        watched, self._works = self._works, []
        found = []
        for each in watched:
            work = each.work
            # Asked once only: it may end at any moment.
            if not work.done() or _ended_after(work, end_s):
                self._works.append(each)
            elif work.start_s is not None and work.end_s is not None:
                found.append(self._span(each))
        return found

    def _span(self, watched: _Watched) -> Span:
        work, layers = watched
        assert work.start_s is not None
        assert work.end_s is not None
        lane = "agree" if work.lane not in LANES or (layers and not is_bucket(work.label, layers)) else work.lane
        layer = layer_of(work.label, layers)
        return Span(self.subject.rank, lane, work.label, work.start_s, work.end_s, work.nbytes, layer)


def _ended_after(work: Work, moment_s: float) -> bool:
    return work.start_s is not None and work.end_s is not None and work.end_s > moment_s
