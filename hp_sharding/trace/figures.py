"""Figures of a trace, step by step and over the run.

What they mean, here and in ``optimizer.timeline.summary()``:

* a step lasts from the end of one ``optimizer.step()`` to the end of the next; a span belongs to the step in which it
  ends, all of it;
* a lane is *busy* in the union of its spans: two that overlap count once;
* *exposed* is the union of the waits, compute what is left of the step without it;
* *communication* is busy in the union of the spans of gathers, reductions and replication, and *hidden* where, within
  that, there is no wait of the same step, whatever for; *overlap* is the hidden part of it;
* *bandwidth* is what a rank sends, in 10**9 bytes a second of busy time: of an all-gather or a reduce-scatter over n
  ranks (n-1)/n of the message, of an all-reduce twice that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from .spans import COLLECTIVES, LANES, Span, Step, Trace

BUSY_LANES = tuple(lane for lane in LANES if lane not in ("compute", "wait"))
"""Lanes with a busy time of their own."""
_LARGEST = ("peak_bytes", "formula_bytes")
_TOTAL = ("wrong_guesses",)
_BANDWIDTHS = {f"{lane}_gb_s": lane for lane in BUSY_LANES}
_STANDS_OUT = 1.01
"""How many times longer than any other a rank has to compute to be named for it."""
Figures = dict[str, Any]


class Groups(NamedTuple):
    """How many ranks a message goes to.

    Attributes:
        shard: ranks of a gather or a reduction; 0 where that is not known, and the whole message is taken as sent.
        replicas: ranks of a replication; likewise.
    """

    shard: int = 0
    replicas: int = 0

    @classmethod
    def of(cls, trace: Trace) -> Groups:
        """As ``about`` has them; else the ranks that there are, and one replica."""
        n_ranks, replicas = (_count(trace.about.get(key)) for key in ("nranks", "replicas"))
        return cls((n_ranks or len(trace.ranks)) // (replicas or 1), replicas or 1)

    def sent_share(self, lane: str) -> float:
        """What a rank sends, as a share of the message."""
        n_ranks = self.replicas if lane == "replicate" else self.shard
        return (2 if lane == "replicate" else 1) * ((n_ranks - 1) / n_ranks if n_ranks else 1.0)


def step_figures(spans: Iterable[Span], step: Step, groups: Groups | None = None) -> Figures:
    """What one step of one rank comes to, in milliseconds, bytes and 10**9 bytes a second.

    Args:
        spans: all of that rank that end in that step.
        step: the step.
        groups: for the bandwidths.

    Returns:
        ``rank``, ``step``, ``step_ms``, ``compute_ms``, ``exposed_ms``, ``busy_ms`` (of communication), ``hidden_ms``
        (what of that is), ``overlap_percent``; of each of ``BUSY_LANES`` ``<lane>_ms``, ``<lane>_bytes`` and
        ``<lane>_gb_s``; ``phases_ms`` (by label of compute, waits taken out); ``exposed_ms_by_layer``; and the step's
        own ``figures``.
    """
    by_lane: dict[str, list[Span]] = {lane: [] for lane in LANES}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    waits = union(by_lane["wait"])
    exposed_ms = _length_ms(waits)
    found: Figures = {"rank": step.rank, "step": step.number, "step_ms": step.duration_ms}
    found["compute_ms"] = max(step.duration_ms - exposed_ms, 0.0)
    for lane in BUSY_LANES:
        found |= _of_lane(lane, by_lane[lane], groups or Groups())
    found["exposed_ms"] = exposed_ms
    carried = union(span for lane in COLLECTIVES for span in by_lane[lane])
    found["busy_ms"], found["hidden_ms"] = _length_ms(carried), _without_ms(carried, waits)
    found["overlap_percent"] = overlap_percent(found)
    found["phases_ms"] = _phases_ms(by_lane["compute"], waits)
    found["exposed_ms_by_layer"] = _by_layer_ms(by_lane["wait"])
    return {**found, **{key: value for key, value in step.figures.items() if key not in found}}


def over_steps(steps: Sequence[Figures]) -> Figures:
    """What several steps, of one rank or of several, come to: medians, with these exceptions.

    ``overlap_percent`` follows from the medians, a bandwidth from all bytes and all busy time; ``wrong_guesses`` are
    added up; of ``peak_bytes`` and ``formula_bytes`` it is the largest. ``phases_ms`` and ``exposed_ms_by_layer`` are
    means, so that what few ranks wait for is not lost. ``steps`` is their number. All is zero where there are none.
    """
    if not steps:
        return {**dict.fromkeys(_SCALARS, 0.0), "steps": 0, "phases_ms": {}, "exposed_ms_by_layer": {}}
    found: Figures = {"steps": len(steps)}
    for key in dict.fromkeys(key for step in steps for key in step):
        values = [step[key] for step in steps if key in step]
        if isinstance(values[0], Mapping):
            found[key] = _means(values, len(steps))
            if key == "exposed_ms_by_layer":
                found[key] = _longest_first(found[key])
        elif key in _LARGEST:
            found[key] = max(values)
        elif key in _TOTAL:
            found[key] = sum(values)
        elif key in _BANDWIDTHS:
            found[key] = _bandwidth_of_all(steps, _BANDWIDTHS[key])
        elif key not in ("rank", "step"):
            found[key] = median(values)
    found["overlap_percent"] = overlap_percent(found)
    return found


def summary(trace: Trace) -> Figures:
    """The figures of a trace.

    Returns:
        ``about``, as the trace has it; ``ranks``; ``steps``, a list of ``step_figures`` by step and rank; ``by_rank``,
        what ``over_steps`` makes of each, by rank; ``run``, the same of all of them; and ``slowest_rank``, the one
        that computes longest, None without steps: the others wait for it.
    """
    spans = spans_by_step(trace)
    groups = Groups.of(trace)
    in_order = sorted(trace.steps, key=lambda step: (step.number, step.rank))
    steps = [step_figures(spans[step.rank, step.number], step, groups) for step in in_order]
    by_rank = {rank: over_steps([step for step in steps if step["rank"] == rank]) for rank in trace.ranks}
    with_steps = [rank for rank in by_rank if by_rank[rank]["steps"]]
    slowest = max(with_steps, key=lambda rank: by_rank[rank]["compute_ms"], default=None)
    return {
        "about": trace.about,
        "ranks": trace.ranks,
        "slowest_rank": slowest,
        "steps": steps,
        "by_rank": by_rank,
        "run": over_steps(steps),
    }


def stands_out(found: Figures) -> int | None:
    """Of what ``summary`` gives, the rank that computes noticeably longer than any other; None where there is none."""
    times = sorted((of_rank["compute_ms"] for of_rank in found["by_rank"].values()), reverse=True)
    return found["slowest_rank"] if len(times) > 1 and times[0] > _STANDS_OUT * times[1] else None


def step_numbers(trace: Trace) -> list[int | None]:
    """Of each span, in the order of the trace, the number of the step in which it ends; None between steps."""
    found: list[int | None] = [None] * len(trace.spans)
    steps: dict[int, list[Step]] = {}
    for step in sorted(trace.steps, key=lambda step: step.start_s):
        steps.setdefault(step.rank, []).append(step)
    for index in sorted(range(len(found)), key=lambda index: trace.spans[index].end_s):
        span = trace.spans[index]
        left = steps.get(span.rank, [])
        # They are in order, and so are the spans: what one has passed, no later one needs.
        while left and span.end_s > left[0].end_s:
            left.pop(0)
        if left and span.end_s > left[0].start_s:
            found[index] = left[0].number
    return found


def spans_by_step(trace: Trace) -> dict[tuple[int, int], list[Span]]:
    """By rank and number of every step, the spans that end in it."""
    found: dict[tuple[int, int], list[Span]] = {(step.rank, step.number): [] for step in trace.steps}
    for span, number in zip(trace.spans, step_numbers(trace), strict=True):
        if number is not None:
            found[span.rank, number].append(span)
    return found


def only_steps(trace: Trace, numbers: Iterable[int]) -> Trace:
    """The steps with these numbers, and the spans that end in them."""
    wanted = set(numbers)
    spans = [span for span, number in zip(trace.spans, step_numbers(trace), strict=True) if number in wanted]
    return Trace(spans, [step for step in trace.steps if step.number in wanted], trace.about)


def overlap_percent(figures: Mapping[str, Any]) -> float:
    """The hidden part of communication; 100 where there was none."""
    busy_ms = figures.get("busy_ms", 0.0)
    return 100 * min(max(figures["hidden_ms"] / busy_ms, 0.0), 1.0) if busy_ms else 100.0


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Where there is a span at least: intervals in seconds, in order, apart from each other."""
    found: list[tuple[float, float]] = []
    for start_s, end_s in sorted((span.start_s, span.end_s) for span in spans):
        if found and start_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_s))
        else:
            found.append((start_s, end_s))
    return found


def _count(value: Any) -> int:
    """What is no number of ranks is none of them."""
    return value if isinstance(value, int) and value > 0 else 0


def _of_lane(lane: str, spans: Sequence[Span], groups: Groups) -> Figures:
    busy_ms = _length_ms(union(spans))
    nbytes = sum(span.nbytes for span in spans)
    sent = nbytes * groups.sent_share(lane)
    return {f"{lane}_ms": busy_ms, f"{lane}_bytes": nbytes, f"{lane}_gb_s": sent / busy_ms / 1e6 if busy_ms else 0.0}


def _bandwidth_of_all(steps: Sequence[Figures], lane: str) -> float:
    busy_ms = sum(step[f"{lane}_ms"] for step in steps)
    return sum(step[f"{lane}_gb_s"] * step[f"{lane}_ms"] for step in steps) / busy_ms if busy_ms else 0.0


def _phases_ms(compute: Sequence[Span], waits: list[tuple[float, float]]) -> dict[str, float]:
    """In the order of their beginnings."""
    by_label: dict[str, list[Span]] = {}
    for span in sorted(compute, key=lambda span: span.start_s):
        by_label.setdefault(span.label, []).append(span)
    return {label: _without_ms(union(spans), waits) for label, spans in by_label.items()}


def _by_layer_ms(spans: Sequence[Span]) -> dict[str, float]:
    """What has no layer goes by its label."""
    by_layer: dict[str, list[Span]] = {}
    for span in spans:
        by_layer.setdefault(span.layer or span.label, []).append(span)
    return _longest_first({layer: _length_ms(union(some)) for layer, some in by_layer.items()})


def _longest_first(times: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def _means(tables: Sequence[Mapping[str, float]], count: int) -> dict[str, float]:
    """By key, where a table that lacks it has 0; in the order in which they first come."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return {key: sum(table.get(key, 0.0) for table in tables) / count for key in keys}


def _length_ms(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end_s - start_s for start_s, end_s in intervals) * 1e3


def _without_ms(intervals: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Length of the first without what the second cover; both in order and apart."""
    common_s, at = 0.0, 0
    for start_s, end_s in intervals:
        while at < len(others) and others[at][1] <= start_s:
            at += 1
        # An interval of the second may reach into several of the first.
        for other_start_s, other_end_s in others[at:]:
            if other_start_s >= end_s:
                break
            common_s += min(end_s, other_end_s) - max(start_s, other_start_s)
    return _length_ms(intervals) - common_s * 1e3


_SCALARS = (
    "step_ms", "compute_ms", *(f"{lane}_{what}" for lane in BUSY_LANES for what in ("ms", "bytes", "gb_s")),
    "exposed_ms", "busy_ms", "hidden_ms", "overlap_percent",
)  # fmt: skip
