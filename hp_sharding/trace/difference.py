"""Two traces side by side: what takes longer in the second one, and where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import ConfigError
from .figures import BUSY_LANES, spans_by_step, summary, union
from .spans import Span, Trace

_LEAST_MS = 1e-3
"""Smaller changes are none."""
_SETTINGS = ("nranks", "replicas", "device", "model")
_WHOLE = ("step", "compute", "exposed", "phase", "lane")
_SHOWN = 5
Times = dict[tuple[str, str], float]
"""Milliseconds a step by kind and name."""


class Change(NamedTuple):
    """One thing, in milliseconds a step: means over steps and ranks, which add up.

    Attributes:
        kind: "step", "compute", "exposed", "phase", "lane", a phase or lane by layer ("backward", "gather", "wait").
        name: which one of that kind; "" where there is one only.
        before_ms: in the first trace; 0 where it has none.
        after_ms: in the second one; likewise.
    """

    kind: str
    name: str
    before_ms: float
    after_ms: float

    @property
    def change_ms(self) -> float:
        """Above 0 where the second takes longer."""
        return self.after_ms - self.before_ms

    @property
    def percent(self) -> float:
        """Of the first one; 0 where that has none."""
        return 100 * self.change_ms / self.before_ms if self.before_ms else 0.0

    @property
    def what(self) -> str:
        """For people."""
        return f"{self.kind} {self.name}".strip()


class Difference(NamedTuple):
    """All that changed.

    Attributes:
        changes: largest first. A change of a layer is in that of its lane, and of the step, as well.
        notes: what makes the two less comparable.
    """

    changes: list[Change]
    notes: list[str]

    @property
    def of_steps(self) -> list[Change]:
        """Those of whole steps, phases and lanes."""
        return [change for change in self.changes if change.kind in _WHOLE]

    @property
    def of_layers(self) -> list[Change]:
        """The others."""
        return [change for change in self.changes if change.kind not in _WHOLE]

    def of(self, kind: str, name: str = "") -> Change | None:
        """One of the changes; None where there is none."""
        return next((change for change in self.changes if (change.kind, change.name) == (kind, name)), None)

    @property
    def verdict(self) -> str:
        """In a sentence or two."""
        step = self.of("step")
        if step is None:
            return "a step takes the same time in both"
        word = "longer" if step.change_ms > 0 else "shorter"
        text = f"a step takes {abs(step.change_ms):.3g} ms {word}: {step.before_ms:.4g} to {step.after_ms:.4g} ms"
        parts = [self.of(kind) for kind in ("compute", "exposed")]
        said = [f"{part.kind} {part.change_ms:+.3g} ms" for part in parts if part is not None]
        return f"{text}, of which {' and '.join(said)}" if said else text

    def as_data(self) -> dict[str, Any]:
        """As JSON can say it."""
        changes = [{**each._asdict(), "change_ms": each.change_ms, "percent": each.percent} for each in self.changes]
        return {"verdict": self.verdict, "notes": self.notes, "changes": changes}


def compare(before: Trace, after: Trace) -> Difference:
    """What changed from one trace to another one.

    Raises:
        ConfigError: one has no step, or no layer of one is in the other.
    """
    _check(before, after)
    first, second = _times(before), _times(after)
    changes = [Change(*key, first.get(key, 0.0), second.get(key, 0.0)) for key in {**first, **second}]
    changes = [change for change in changes if abs(change.change_ms) >= _LEAST_MS]
    changes.sort(key=lambda change: (change.kind != "step", -abs(change.change_ms)))
    return Difference(changes, list(_notes(before, after)))


def _check(before: Trace, after: Trace) -> None:
    for which, trace in (("first", before), ("second", after)):
        if not trace.steps:
            raise ConfigError(f"the {which} trace has no whole step: record more steps of it")
    layers, others = _layers(before), _layers(after)
    if layers and others and not layers & others:
        raise ConfigError(
            f"the traces have no layer in common: one has {_some(layers)}, the other {_some(others)}. They are of "
            "different models; compare two runs of one"
        )


def _times(trace: Trace) -> Times:
    """Of each kind and name the mean over ranks and steps; what is not there in one of them takes no time in it."""
    totals: Times = defaultdict(float)
    for step in summary(trace)["steps"]:
        for kind in ("step", "compute", "exposed"):
            totals[kind, ""] += step[f"{kind}_ms"]
        for label, ms in step["phases_ms"].items():
            totals["phase", label] += ms
        for lane in BUSY_LANES:
            totals["lane", lane] += step[f"{lane}_ms"]
    for spans in spans_by_step(trace).values():
        parts: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in spans:
            kind = span.label if span.lane == "compute" else span.lane
            name = span.layer if span.lane == "compute" else span.layer or span.label
            parts[kind, name].append(span)
        for key, some in parts.items():
            totals[key] += sum(end_s - start_s for start_s, end_s in union(some)) * 1e3
    return {key: total / len(trace.steps) for key, total in totals.items()}


def _notes(before: Trace, after: Trace) -> Iterator[str]:
    one, other = _settings(before), _settings(after)
    different = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    if different:
        yield "not run alike: " + ", ".join(f"{key} {one.get(key)} and {other.get(key)}" for key in different)
    for missing, where in ((_layers(before) - _layers(after), "first"), (_layers(after) - _layers(before), "second")):
        if missing:
            yield f"only the {where} has {_some(missing)}"
    simulated = [bool(trace.about.get("simulated")) for trace in (before, after)]
    if simulated[0] != simulated[1]:
        yield f"the {'first' if simulated[0] else 'second'} one is simulated"


def _settings(trace: Trace) -> dict[str, Any]:
    config = trace.about.get("config")
    settings = {key: trace.about[key] for key in _SETTINGS if key in trace.about}
    return {**settings, **(config if isinstance(config, dict) else {})}


def _layers(trace: Trace) -> set[str]:
    """Layers that compute, or what is carried where no compute was recorded."""
    compute = {span.layer for span in trace.spans if span.lane == "compute" and span.layer}
    return compute or {span.layer or span.label for span in trace.spans}


def _some(names: set[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
