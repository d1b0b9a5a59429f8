"""The file of a trace: Chrome's trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

Every rank is a process, every lane a thread of it, and so are the steps; exposed waits are red, and arrows lead to them
from what they waited for. What importers need of such a file stands in ``importing``, which looks for it.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .figures import Groups, step_numbers
from .importing import problems
from .seats import STEPS, Seat, Seats, process_of
from .spans import COLLECTIVES, LANES, Span, Step, Trace
from .writing import replace

__all__ = ["events", "problems", "read", "write"]

VERSION = 1
"""Of the file: goes up when older releases could not read it any more."""
_MARK = "hp_sharding_trace"
_RED = "terrible"
"""One of the names of colours that chrome://tracing knows. Perfetto chooses colours itself."""
_GZIP = b"\x1f\x8b"
_LEAST_ARROW_NS = 4
_MOST_RANK = 2**31
_SHORTEST_S = 1e-9
"""What takes no longer has no bandwidth."""
_HOW = "Traces come from optimizer.timeline.write(path), or from 'with optimizer.timeline.record(path=...)'"
_AGAIN = "Record it again"
Event = dict[str, Any]


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes a trace, all of it or nothing; compressed if the name ends in ``.gz``.

    Args:
        trace: whose numbers are finite, and whose ``about`` JSON can say.
        path: of the file, which is replaced if it is there.

    Raises:
        ConfigError: the system refuses; says which file and why.
        ValueError: a number is not finite.
    """
    path = Path(path)
    data = _as_json(trace).encode()
    try:
        replace(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise ConfigError(f"the trace cannot be written to {path}: {error.strerror or error}") from error


def read(path: str | os.PathLike[str]) -> Trace:
    """What ``write`` wrote: the same spans and steps in the same order, to the last bit, and ``about``.

    Raises:
        ConfigError: there is no such file, or it is something else; says what to do.
    """
    try:
        data = Path(path).read_bytes()
        if data.startswith(_GZIP):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"the trace {path} cannot be read: {said}. {_HOW}") from error
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no trace, since it is not JSON: {error}. {_HOW}") from error
    return _as_trace(found, path)


def events(trace: Trace) -> list[Event]:
    """All events of the file: names, steps and spans in the order of the trace, arrows."""
    seats = Seats(trace)
    groups = Groups.of(trace)
    steps = [_step_event(step, seats, seats.of_step(index, step)) for index, step in enumerate(trace.steps)]
    spans = [
        _span_event(span, seats, seats.of_span(index, span), groups, number)
        for index, (span, number) in enumerate(zip(trace.spans, step_numbers(trace), strict=True))
    ]
    return [*_names(trace, seats), *steps, *spans, *_arrows(trace, seats)]


# -- writing -----------------------------------------------------------------------------------------------------------


def _as_json(trace: Trace) -> str:
    """One event a line: for people, and for programs that compare lines."""
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in events(trace))
    other = json.dumps({_MARK: VERSION, "about": trace.about}, allow_nan=False)
    return f'{{"traceEvents":[\n{lines}\n],\n"displayTimeUnit":"ms",\n"otherData":{other}}}\n'


def _names(trace: Trace, seats: Seats) -> Iterator[Event]:
    for rank in trace.ranks:
        yield from _named("process", _process_name(trace, rank), rank, {"pid": process_of(rank)})
    for thread in seats.threads:
        yield from _named("thread", thread.name, thread.seat.tid, thread.seat._asdict())


def _named(what: str, name: str, order: int, numbers: dict[str, int]) -> Iterator[Event]:
    yield {"name": f"{what}_name", "ph": "M", **numbers, "args": {"name": name}}
    yield {"name": f"{what}_sort_index", "ph": "M", **numbers, "args": {"sort_index": order}}


def _process_name(trace: Trace, rank: int) -> str:
    hosts = trace.about.get("hosts")
    host = hosts[rank] if isinstance(hosts, list) and rank < len(hosts) else ""
    simulated = ", simulated" if trace.about.get("simulated") else ""
    return f"rank {rank} ({host}{simulated})" if host else f"rank {rank}{simulated}"


def _step_event(step: Step, seats: Seats, seat: Seat) -> Event:
    args = {"number": step.number, "start_s": step.start_s, "end_s": step.end_s, "figures": step.figures}
    return _slice(f"step {step.number}", STEPS, seats, seat, args)


def _span_event(span: Span, seats: Seats, seat: Seat, groups: Groups, number: int | None) -> Event:
    args: dict[str, Any] = {"label": span.label, "layer": span.layer}
    if number is not None:
        args["step"] = number
    if span.nbytes:
        duration_s = span.end_s - span.start_s
        args["bytes"] = span.nbytes
        sent_gb = span.nbytes * groups.sent_share(span.lane) / 1e9
        args |= {"GB/s": sent_gb / duration_s} if duration_s > _SHORTEST_S else {}
    args |= {"start_s": span.start_s, "end_s": span.end_s}
    event = _slice(_name(span), span.lane, seats, seat, args)
    return {**event, "cname": _RED} if span.lane == "wait" else event


def _name(span: Span) -> str:
    """What stands on the slice."""
    if span.lane == "compute":
        return f"{span.label} {span.layer}".strip() or span.lane
    return f"wait: {span.label}" if span.lane == "wait" else span.label or span.lane


def _slice(name: str, category: str, seats: Seats, seat: Seat, args: dict[str, Any]) -> Event:
    # Whole nanoseconds, as Perfetto keeps them: what ends where the next one begins must not reach into it.
    start_ns, end_ns = seats.ns(args["start_s"]), seats.ns(args["end_s"])
    times = {"ts": start_ns / 1e3, "dur": max(end_ns - start_ns, 0) / 1e3}
    return {"name": name, "cat": category, "ph": "X", **times, **seat._asdict(), "args": args}


def _arrows(trace: Trace, seats: Seats) -> Iterator[Event]:
    """From a collective to each wait that it ended."""
    by_label: dict[tuple[int, str], list[int]] = {}
    for index, span in enumerate(trace.spans):
        if span.lane in COLLECTIVES:
            by_label.setdefault((span.rank, span.label), []).append(index)
    arrow = 0
    for index, wait in enumerate(trace.spans):
        candidates = by_label.get((wait.rank, wait.label), []) if wait.lane == "wait" else []
        ended = [other for other in candidates if _meet_ns(trace.spans[other], wait, seats)]
        if ended:
            arrow += 1
            other = max(ended, key=lambda each: trace.spans[each].end_s)
            start_ns, length_ns = _meet_ns(trace.spans[other], wait, seats) or (0, 0)
            both = {"name": "waited for", "cat": "wait", "id": arrow}
            for phase, at, of in (("s", 1, other), ("f", 3, index)):
                ts = (start_ns + length_ns * at // 4) / 1e3
                bound = {"bp": "e"} if phase == "f" else {}
                yield {**both, "ph": phase, "ts": ts, **seats.of_span(of, trace.spans[of])._asdict(), **bound}


def _meet_ns(one: Span, other: Span, seats: Seats) -> tuple[int, int] | None:
    """Beginning and length of the time that they have in common; None where that is too short for an arrow."""
    start_ns = max(seats.ns(one.start_s), seats.ns(other.start_s))
    length_ns = min(seats.ns(one.end_s), seats.ns(other.end_s)) - start_ns
    return (start_ns, length_ns) if length_ns >= _LEAST_ARROW_NS else None


# -- reading -----------------------------------------------------------------------------------------------------------


def _as_trace(found: Any, path: str | os.PathLike[str]) -> Trace:
    other = found.get("otherData") if isinstance(found, dict) else None
    other = other if isinstance(other, dict) else {}
    version = other.get(_MARK)
    if version is None:
        is_foreign = isinstance(found, list) or (isinstance(found, dict) and "traceEvents" in found)
        what = "a trace of another program; ui.perfetto.dev opens it" if is_foreign else "some other JSON"
        raise ConfigError(f"{path} is no trace of hp_sharding but {what}. {_HOW}")
    if not _is_count(version):
        raise ConfigError(f"{path} is a trace that has been changed or is damaged: its version is {version!r}. {_HOW}")
    if version != VERSION:
        older = "an older release wrote" if version < VERSION else "a newer release wrote; use that one"
        raise ConfigError(f"{path} is a trace of version {version}, which {older}. This one reads version {VERSION}")
    try:
        every = _checked("traceEvents", found["traceEvents"], isinstance(found["traceEvents"], list), "a list")
        slices = [event for event in every if event["ph"] == "X"]
        steps = [_as_step(event) for event in slices if event["cat"] == STEPS]
        spans = [_as_span(event) for event in slices if event["cat"] != STEPS]
        about = _checked("about", other["about"], isinstance(other["about"], dict), "an object")
    except KeyError as error:
        raise ConfigError(f"{path} is a trace that has been changed or is damaged: no {error}. {_AGAIN}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is a trace that has been changed or is damaged: {error}. {_AGAIN}") from error
    return Trace(spans, steps, about)


def _as_step(event: Event) -> Step:
    args = event["args"]
    number = _checked("number", args["number"], _is_count(args["number"]), "a whole number")
    figures = args["figures"]
    if not isinstance(figures, dict) or not all(map(_is_number, figures.values())):
        raise ValueError(f"'figures' of step {number} are {figures!r}, not an object of finite numbers")
    return Step(_rank_of(event), number, *_times_of(event), dict(figures))


def _as_span(event: Event) -> Span:
    args, lane = event["args"], event["cat"]
    _checked("cat", lane, lane in LANES, f"one of {', '.join((STEPS, *LANES))}")
    label, layer = (_checked(key, args[key], isinstance(args[key], str), "a text") for key in ("label", "layer"))
    nbytes = args.get("bytes", 0)
    return Span(
        _rank_of(event), lane, label, *_times_of(event), _checked("bytes", nbytes, _is_count(nbytes), "bytes"), layer
    )


def _rank_of(event: Event) -> int:
    pid = event["pid"]
    rank = pid - process_of(0) if _is_count(pid) else -1
    _checked("pid", pid, 0 <= rank <= _MOST_RANK, "that of a rank")
    return rank


def _times_of(event: Event) -> tuple[float, float]:
    """Beginning and end in seconds."""
    start_s, end_s = (
        _checked(key, event["args"][key], _is_number(event["args"][key]), "a finite number of seconds")
        for key in ("start_s", "end_s")
    )
    _checked("end_s", end_s, end_s >= start_s, f"at or after its beginning {start_s!r}")
    return start_s, end_s


def _checked(key: str, value: Any, is_right: bool, expected: str) -> Any:
    """``value``; raises ValueError, which says what was expected, unless it is right."""
    if not is_right:
        raise ValueError(f"'{key}' is {value!r}, not {expected}")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    """Finite, and as seconds no longer than the file can say in nanoseconds."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 2**63
