"""The file of a trace: taken back to the last bit, what it says to importers, and what becomes of other files."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_sharding.errors import ConfigError
from hp_sharding.trace import chrome
from hp_sharding.trace.figures import summary
from hp_sharding.trace.headline import headline
from hp_sharding.trace.seats import rows
from hp_sharding.trace.spans import LANES, Span, Step, Trace
from tests.traces import Run, make

_TIMES = st.floats(-1e3, 1e6, allow_nan=False)
_WORDS = st.text(max_size=8)
_NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _NUMBERS | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def _spans(draw: st.DrawFn) -> Span:
    start_s, end_s = sorted((draw(_TIMES), draw(_TIMES)))
    nbytes = draw(st.integers(0, 2**40))
    return Span(
        draw(st.integers(0, 5)), draw(st.sampled_from(LANES)), draw(_WORDS), start_s, end_s, nbytes, draw(_WORDS)
    )


@st.composite
def _steps(draw: st.DrawFn) -> Step:
    start_s, end_s = sorted((draw(_TIMES), draw(_TIMES)))
    figures = draw(st.dictionaries(_WORDS, _NUMBERS, max_size=3))
    return Step(draw(st.integers(0, 5)), draw(st.integers(0, 99)), start_s, end_s, figures)


_KEYS = st.sampled_from(["nranks", "replicas", "config", "clock", "buckets", "hosts", "model", "simulated"]) | _WORDS
_TRACES = st.builds(
    Trace, st.lists(_spans(), max_size=12), st.lists(_steps(), max_size=4), st.dictionaries(_KEYS, _JSON, max_size=4)
)


def _json(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


# A disk that others use takes as long as it likes.
@settings(deadline=None)
@given(trace=_TRACES, name=st.sampled_from(["trace.json", "trace.json.gz"]))
def test_what_was_written_is_read_back_and_can_be_imported(folder: Path, trace: Trace, name: str) -> None:
    """Any trace, overlaps within a lane and repeated spans among them."""
    chrome.write(trace, folder / name)
    assert chrome.read(folder / name) == trace
    assert headline(trace, trace, trace.ranks)
    assert summary(trace)["ranks"] == trace.ranks
    assert chrome.problems(_json(folder / name)) == []


def test_it_is_what_perfetto_shows(tmp_path: Path) -> None:
    trace = make(Run(n_layers=2, n_ranks=2, n_steps=1))
    trace.about["hosts"] = ["left", "right"]
    chrome.write(trace, tmp_path / "trace.json")
    events = _json(tmp_path / "trace.json")["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "rank 0 (left, simulated)", 2: "rank 1 (right, simulated)"}
    threads = [event for event in events if event["name"] == "thread_name" and event["pid"] == 2]
    assert [event["args"]["name"] for event in threads] == ["steps", "compute", "gather", "reduce", "wait"]
    assert [event["tid"] for event in threads] == sorted(event["tid"] for event in threads)
    (step,) = (event for event in events if event["name"] == "step 0" and event["pid"] == 1)
    assert step["dur"] == pytest.approx(trace.steps[0].duration_ms * 1e3)
    assert step["args"]["figures"]["formula_bytes"] == 9.9e7
    reduce = next(event for event in events if event.get("cat") == "reduce")
    args = reduce["args"]
    assert (reduce["name"], args["layer"], args["bytes"], args["step"]) == ("1:blocks.1", "blocks.1", 4_000_000, 0)
    assert args["GB/s"] == pytest.approx(0.5 * 4e6 / 6e-3 / 1e9)
    waits = [event for event in events if event.get("cat") == "wait" and event["ph"] == "X"]
    assert {event["cname"] for event in waits} == {"terrible"}


def test_arrows_lead_from_what_was_waited_for(tmp_path: Path) -> None:
    def span(lane: str, label: str, start_ms: float, end_ms: float, rank: int = 0) -> Span:
        return Span(rank, lane, label, start_ms / 1e3, end_ms / 1e3)

    trace = Trace(
        [
            span("gather", "0:net", 0, 5),
            span("gather", "0:net", 10, 20),
            span("gather", "1:net", 20, 30),
            span("gather", "0:net", 10, 20, rank=1),
            span("wait", "0:net", 12, 20),
            span("wait", "2:net", 21, 22),
            span("wait", "1:net", 22, 30, rank=1),
        ]
    )
    begin, end = (event for event in chrome.events(trace) if event["ph"] in "sf")
    assert (begin["ph"], begin["id"], end["ph"], end["id"]) == ("s", 1, "f", 1)
    assert begin["pid"] == end["pid"] == 1
    assert 12_000 < begin["ts"] < end["ts"] < 20_000
    seats = {event["args"]["name"]: event["tid"] for event in chrome.events(trace)
             if event["name"] == "thread_name" and event["pid"] == 1}  # fmt: skip
    assert (begin["tid"], end["tid"]) == (seats["gather"], seats["wait"])


def test_gathers_that_overlap_have_a_thread_each_and_compute_nests() -> None:
    assert rows([(0, 10), (5, 8), (8, 12), (10, 20)], nest=False) == [0, 1, 1, 0]
    assert rows([(5, 8), (0, 10), (8, 12), (10, 20)], nest=True) == [0, 0, 1, 0]
    assert rows([(0, 10), (0, 10)], nest=True) == [0, 0]
    spans = [Span(0, "gather", "a", 0.0, 2.0), Span(0, "gather", "b", 1.0, 3.0), Span(0, "gather", "c", 1.2, 1.8)]
    spans += [Span(0, "compute", "f", 0.0, 2.0), Span(0, "compute", "g", 0.5, 1.0)]
    names = [event["args"]["name"] for event in chrome.events(Trace(spans)) if event["name"] == "thread_name"]
    assert names == ["compute", "gather", "gather (2)", "gather (3)"]


def test_no_two_ranks_share_a_thread_and_none_is_the_first_of_another_process() -> None:
    events = chrome.events(make(Run(n_layers=1, n_ranks=16, n_steps=1)))
    seats = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    assert len({tid for _, tid in seats}) == len(seats)
    assert not {tid for _, tid in seats} & {pid for pid, _ in seats}


def test_slices_that_touch_do_not_overlap_by_rounding() -> None:
    """Neighbours in floating point, whose microseconds are not whole."""
    times = [number / 3 * 1e-6 for number in range(1, 200)]
    spans = [Span(0, "gather", "g", start_s, end_s) for start_s, end_s in itertools.pairwise(times)]
    events = [event for event in chrome.events(Trace(spans)) if event["ph"] == "X"]
    assert len({event["tid"] for event in events}) == 1
    # Perfetto cuts off what is below a nanosecond; so there must be nothing to cut.
    for event in events:
        for microseconds in (event["ts"], event["dur"]):
            assert microseconds * 1e3 == pytest.approx(round(microseconds * 1e3), abs=1e-6)


# -- what importers would choke on -------------------------------------------------------------------------------------


def _first(events: list[dict[str, Any]], phase: str) -> dict[str, Any]:
    return next(event for event in events if event["ph"] == phase)


def _widen(events: list[dict[str, Any]]) -> None:
    """Makes a slice reach into the middle of the next one."""
    one, other = [event for event in events if event.get("cat") == "reduce" and event["ph"] == "X"][:2]
    one["dur"] = other["ts"] + other["dur"] / 2 - one["ts"]


_FAULTS: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "no time": (lambda events: _first(events, "X").pop("ts"), "'ts' is None"),
    "no duration": (lambda events: _first(events, "X").pop("dur"), "'dur' is None"),
    "before zero": (lambda events: _first(events, "X").update(ts=-1.0), "'ts' is -1.0"),
    "a text for a time": (lambda events: _first(events, "X").update(ts="1"), "'ts' is '1'"),
    "the idle process": (lambda events: _first(events, "X").update(pid=0), "'pid' is 0"),
    "a text for a thread": (lambda events: _first(events, "X").update(tid="gather"), "'tid' is 'gather'"),
    "a list": (lambda events: _first(events, "X").update(stack=["a"]), "'stack' is a list"),
    "no name": (lambda events: _first(events, "X").pop("name"), "'name' is None"),
    "another phase": (lambda events: _first(events, "X").update(ph="B"), "'ph' is 'B'"),
    "no object": (lambda events: events.append(3), "no object"),  # type: ignore[arg-type]
    "metadata without a value": (lambda events: _first(events, "M").update(args={}), "process_name is None"),
    "a process without a name": (lambda events: events.remove(_first(events, "M")), "process 1 has no name"),
    "a thread without a name": (
        lambda events: events.remove(next(event for event in events if event["name"] == "thread_name")),
        "of process 1 has no name",
    ),
    "a thread of two processes": (
        lambda events: [event.update(tid=11) for event in events if event.get("tid") == 15],
        "thread 11 is in process 2 and in process 1",
    ),
    "an overlap": (_widen, "overlap on thread"),
    "an arrow without an end": (lambda events: events.remove(_first(events, "f")), "has 1 beginnings and 0 ends"),
    "an arrow back in time": (lambda events: _first(events, "s").update(ts=1e12), "ends before it begins"),
    "an arrow from nowhere": (lambda events: _first(events, "s").update(ts=0.001), "at which no slice is open"),
    "an arrow to the next slice": (lambda events: _first(events, "f").pop("bp"), "not to the one that is open"),
}


@pytest.fixture(scope="module")
def importable(folder: Path) -> dict[str, Any]:
    chrome.write(make(Run(n_layers=2, n_ranks=2, n_steps=2)), folder / "importable.json")
    found: dict[str, Any] = _json(folder / "importable.json")
    assert chrome.problems(found) == []
    return found


@pytest.mark.parametrize("fault", _FAULTS)
def test_problems_are_found(importable: dict[str, Any], fault: str) -> None:
    data = copy.deepcopy(importable)
    breaking, said = _FAULTS[fault]
    breaking(data["traceEvents"])
    found = chrome.problems(data)
    assert any(said in text for text in found), found


@pytest.mark.parametrize("data", [[], {"traceEvents": {}}, None])
def test_what_is_no_file_of_events_is_said(data: Any) -> None:
    assert chrome.problems(data) == ["expected an object with a list of 'traceEvents'"]


def test_many_problems_are_counted() -> None:
    *_, last = chrome.problems({"traceEvents": [3] * 100})
    assert last == "and 80 more"


# -- writing and reading -----------------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    chrome.write(make(Run(n_layers=1)), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match=rf"cannot be written to {path}: No space left on device"):
        chrome.write(make(Run(n_layers=2)), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["trace.json"]


def test_a_file_is_as_readable_as_others(tmp_path: Path) -> None:
    chrome.write(Trace(), tmp_path / "trace.json")
    (tmp_path / "other").write_text("")
    assert stat.S_IMODE((tmp_path / "trace.json").stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        chrome.write(Trace([], [Step(0, 0, 0.0, 1.0, {"peak_bytes": float("nan")})]), tmp_path / "trace.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is not JSON"),
        (b"\xff\x00", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b'[{"ph": "X"}]', "a trace of another program; ui.perfetto.dev opens it"),
        (b'{"traceEvents": []}', "a trace of another program"),
        (b'{"otherData": 3}', "some other JSON"),
        (b'"text"', "some other JSON"),
        (b'{"otherData": {"hp_sharding_trace": 2}}', "a trace of version 2, which a newer release wrote"),
        (b'{"otherData": {"hp_sharding_trace": 0}}', "a trace of version 0, which an older release wrote"),
        (b'{"otherData": {"hp_sharding_trace": "1"}}', "its version is '1'"),
        (b'{"otherData": {"hp_sharding_trace": 1, "about": {}}}', "changed or is damaged"),
        (
            b'{"traceEvents": [{"ph": "X"}], "otherData": {"hp_sharding_trace": 1, "about": {}}}',
            "changed or is damaged",
        ),
        (gzip.compress(b"{}")[:-4], "cannot be read"),
        (gzip.compress(b"{}" * 99)[:12] + b"\xff" * 30, "cannot be read"),
    ],
)
def test_other_files_are_refused_with_what_to_do(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as raised:
        chrome.read(path)
    assert said in str(raised.value)
    assert str(path) in str(raised.value)


def _slice(data: dict[str, Any], lane: str) -> dict[str, Any]:
    found: dict[str, Any] = next(event for event in data["traceEvents"] if event.get("cat") == lane)
    return found


def _set(lane: str, **args: Any) -> Callable[[dict[str, Any]], object]:
    """Changes what stands on the first slice of a lane."""
    return lambda data: _slice(data, lane)["args"].update(args)


_DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a text for a time": (_set("compute", start_s="a"), "'start_s' is 'a', not a finite number of seconds"),
    "no number": (_set("compute", start_s=float("nan")), "'start_s' is nan"),
    "an end that never comes": (_set("steps", end_s=float("inf")), "'end_s' is inf"),
    "an end before the beginning": (_set("steps", end_s=-5.0), "'end_s' is -5.0, not at or after its beginning 0.0"),
    "a text for a number": (_set("steps", number="1"), "'number' is '1', not a whole number"),
    "a yes for a number": (_set("steps", number=True), "'number' is True"),
    "a layer of nothing": (_set("compute", layer=None), "'layer' is None, not a text"),
    "a list for a label": (_set("compute", label=["x"]), "'label' is ['x'], not a text"),
    "a text for bytes": (_set("reduce", bytes="9"), "'bytes' is '9'"),
    "a lane of nobody": (lambda data: _slice(data, "reduce").update(cat="odd"), "'cat' is 'odd', not one of steps,"),
    "a text for a figure": (_set("steps", figures={"peak_bytes": "x"}), "'figures' of step 0 are {'peak_bytes': 'x'}"),
    "a list of figures": (_set("steps", figures=[1]), "'figures' of step 0 are [1]"),
    "a text for a process": (lambda data: _slice(data, "compute").update(pid="1"), "'pid' is '1', not that of a rank"),
    "the idle process": (lambda data: _slice(data, "compute").update(pid=0), "'pid' is 0"),
    "too many ranks": (lambda data: _slice(data, "compute").update(pid=10**12), "'pid' is 1000000000000"),
    "a list about it": (lambda data: data["otherData"].update(about=[]), "'about' is [], not an object"),
    "no list of events": (lambda data: data.update(traceEvents={}), "'traceEvents' is {}, not a list"),
    "an event of another program": (lambda data: _slice(data, "compute").pop("cat"), "no 'cat'"),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_a_file_that_was_changed_is_refused_with_what_is_wrong(
    importable: dict[str, Any], damage: str, tmp_path: Path
) -> None:
    data = copy.deepcopy(importable)
    breaking, said = _DAMAGE[damage]
    breaking(data)
    (tmp_path / "trace.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="has been changed or is damaged") as raised:
        chrome.read(tmp_path / "trace.json")
    assert said in str(raised.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory. Traces come from optimizer.timeline.write"):
        chrome.read(tmp_path / "trace.json")
