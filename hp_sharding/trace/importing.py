"""What programs that open trace-event JSON need of it, and whether a file has that.

* The Trace Event Format (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): complete events
  ("X") have ``ts`` and ``dur`` in microseconds; slices of one thread nest or lie apart; names and order of processes
  and threads come as metadata events ("M").
* Perfetto (docs/getting-started/other-formats.md) puts slices that overlap without nesting on a track of its own
  choice; releases before 2025 showed them wrongly. It keeps times as whole nanoseconds.
* Its tokenizer (src/trace_processor/importers/json/json_trace_tokenizer.cc) passes by an event without ``ts`` and
  gives up the file at one that has a list as the value of a key of its own.
* Its parser (json_trace_parser.cc) long named a thread by ``tid`` alone, so no two processes may share one; process
  and thread 0 are the idle ones. Since November 2025 it honours the sort indices; older ones sort by number.
* An arrow ("s" to "f") begins and ends at the slice that is open on its thread at that moment (flow_tracker.cc), and
  its beginning must have been seen before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_PHASES = "XMsf"
"""All that is written here. The format has more."""
_METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index",
             "thread_sort_index": "sort_index"}  # fmt: skip
_MOST_ID = 2**32
_MOST = 20
"""Problems of one kind that are told; the rest is counted."""
Slices = dict[Any, list[tuple[int, int, str]]]


def problems(data: Any) -> list[str]:
    """What Perfetto or Chrome would refuse, pass by or show wrongly in a file, in words; empty if all is well.

    Args:
        data: the file's JSON.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("traceEvents"), list):
        return ["expected an object with a list of 'traceEvents'"]
    events = data["traceEvents"]
    found = [f"event {index}: {text}" for index, event in enumerate(events) for text in _of_event(event)]
    if found:
        return _shortened(found)
    slices = _slices(events)
    return _shortened([*_of_names(events), *_of_nesting(slices), *_of_arrows(events, slices)])


def _of_event(event: Any) -> Iterator[str]:
    """What can be seen of one event alone."""
    if not isinstance(event, Mapping):
        yield "no object"
        return
    phase, name = event.get("ph"), event.get("name")
    if not isinstance(phase, str) or len(phase) != 1 or phase not in _PHASES:
        yield f"'ph' is {phase!r}, not one of {', '.join(_PHASES)}"
        return
    if not isinstance(name, str) or not name:
        yield f"'name' is {name!r}"
    needed = ("pid",) if phase == "M" and str(name).startswith("process") else ("pid", "tid")
    for key in needed:
        if not _is_int(event.get(key)) or not 0 < event[key] < _MOST_ID:
            yield f"'{key}' is {event.get(key)!r}, not a whole number from 1 to {_MOST_ID - 1}"
    for key in {"X": ("ts", "dur"), "M": ()}.get(phase, ("ts",)):
        if not _is_number(event.get(key)) or event[key] < 0:
            yield f"'{key}' is {event.get(key)!r}, not a time of at least 0"
    yield from (f"'{key}' is a list" for key, value in event.items() if isinstance(value, list))
    if not isinstance(event.get("args", {}), Mapping):
        yield "'args' is no object"
    elif phase == "M":
        yield from _of_metadata(event)
    if phase in "sf" and not (_is_int(event.get("id")) and isinstance(event.get("cat"), str)):
        yield "an arrow without 'id' and 'cat'"


def _of_metadata(event: Mapping[str, Any]) -> Iterator[str]:
    key = _METADATA.get(event["name"])
    value = event.get("args", {}).get(key)
    if key is None:
        yield f"metadata of an unknown name {event['name']!r}"
    elif not (isinstance(value, str) and value if key == "name" else _is_int(value)):
        yield f"{event['name']} is {value!r}"


def _of_names(events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Whether every process and thread has a name, and no thread two processes."""
    processes, threads = set(), set()
    process_of: dict[int, int] = {}
    used: dict[tuple[int, int], None] = {}
    for event in events:
        if event["ph"] == "M":
            processes |= {event["pid"]} if event["name"] == "process_name" else set()
            threads |= {(event["pid"], event["tid"])} if event["name"] == "thread_name" else set()
        else:
            used[event["pid"], event["tid"]] = None
    for pid, tid in used:
        if pid not in processes:
            yield f"process {pid} has no name"
        if (pid, tid) not in threads:
            yield f"thread {tid} of process {pid} has no name"
        if process_of.setdefault(tid, pid) != pid:
            yield f"thread {tid} is in process {process_of[tid]} and in process {pid}"


def _slices(events: Iterable[Mapping[str, Any]]) -> Slices:
    """By process and thread: beginning, end and name, outer ones first."""
    found: Slices = {}
    for event in events:
        if event["ph"] == "X":
            start_ns = _ns(event["ts"])
            seat = found.setdefault((event["pid"], event["tid"]), [])
            seat.append((start_ns, start_ns + _ns(event["dur"]), event["name"]))
    for seat in found.values():
        seat.sort(key=lambda each: (each[0], -each[1]))
    return found


def _of_nesting(slices: Slices) -> Iterator[str]:
    for (pid, tid), seat in slices.items():
        open_slices: list[tuple[int, int, str]] = []
        for one in seat:
            while open_slices and open_slices[-1][1] <= one[0]:
                open_slices.pop()
            if open_slices and one[1] > open_slices[-1][1]:
                yield f"'{one[2]}' and '{open_slices[-1][2]}' overlap on thread {tid} of process {pid}"
            open_slices.append(one)


def _of_arrows(events: Iterable[Mapping[str, Any]], slices: Slices) -> Iterator[str]:
    ends: dict[Any, dict[str, list[Mapping[str, Any]]]] = {}
    for event in events:
        if event["ph"] in "sf":
            pair = ends.setdefault((event["cat"], event["name"], event["id"]), {"s": [], "f": []})
            pair[event["ph"]].append(event)
    for (_, name, number), pair in ends.items():
        if len(pair["s"]) != 1 or len(pair["f"]) != 1:
            yield f"arrow {number} '{name}' has {len(pair['s'])} beginnings and {len(pair['f'])} ends"
            continue
        begin, end = pair["s"][0], pair["f"][0]
        if _ns(begin["ts"]) >= _ns(end["ts"]):
            yield f"arrow {number} '{name}' ends before it begins"
        if end.get("bp") != "e":
            yield f"arrow {number} '{name}' leads to the next slice, not to the one that is open: 'bp' is not 'e'"
        yield from (
            f"arrow {number} '{name}' has an end at which no slice is open"
            for one in (begin, end)
            if not any(start <= _ns(one["ts"]) < stop for start, stop, _ in slices.get((one["pid"], one["tid"]), []))
        )


def _shortened(found: list[str]) -> list[str]:
    return found if len(found) <= _MOST else [*found[:_MOST], f"and {len(found) - _MOST} more"]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _ns(microseconds: float) -> int:
    return round(microseconds * 1e3)
