"""What the doctor was asked for and what it found, as plain data, and how that is written and handed on."""

from __future__ import annotations

import json
import math
import pickle
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..trace.writing import replace
from .links import hardware

VERSION = 1
"""Of the JSON: goes up when a key changes its meaning or goes away."""
MB = 1 << 20


class Request(NamedTuple):
    """What is wanted.

    Attributes:
        quick: fewer repeats.
        only: names of checks; empty for all.
        max_mb: largest message, in units of 2**20 bytes.
        timeout_s: how long to wait for a late rank.
        as_json: whether JSON goes to stdout.
        output: a file for the report.
        hand_in: a folder where rank 0 leaves the report for the process that has started the ranks.
    """

    quick: bool
    only: tuple[str, ...]
    max_mb: float
    timeout_s: float
    as_json: bool
    output: Path | None
    hand_in: Path | None


class Spread(NamedTuple):
    """Milliseconds over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


class Advice(NamedTuple):
    """Something about the machine that makes training slow or fragile.

    Attributes:
        code: a name that stays the same.
        found: what it is.
        do: what to do about it.
    """

    code: str
    found: str
    do: str


class Machine(NamedTuple):
    """Where the ranks run.

    Attributes:
        versions: by package, Python included.
        system: the operating system.
        processor: its model.
        n_cores: of rank 0's machine.
        usable_cores: those that rank 0 may use.
        device: as ``paddle.get_device()`` names it, of rank 0.
        kind: ``"cpu"``, ``"gpu"``, ``"xpu"`` or the type of a custom device.
        backend: what carries collectives.
        alignment_bytes: what storage begins at a multiple of.
        has_streams: whether work is queued on streams of the device.
        n_devices: devices of this kind that rank 0's process sees; 0 on CPU.
        n_ranks: of the run.
        hosts: by name, the ranks on it.
        environment: rank 0's variables that matter here.
    """

    versions: dict[str, str]
    system: str
    processor: str
    n_cores: int
    usable_cores: int
    device: str
    kind: str
    backend: str
    alignment_bytes: int
    has_streams: bool
    n_devices: int
    n_ranks: int
    hosts: dict[str, list[int]]
    environment: dict[str, str]


class Failure(NamedTuple):
    """Why a check has no result, or why there is no report of a rank.

    Attributes:
        check: its name.
        rank: global rank; None where it is not known.
        text: what happened.
    """

    check: str
    rank: int | None
    text: str


class Report(NamedTuple):
    """All that was found.

    Attributes:
        date: when, in UTC.
        took_s: how long it took so far.
        complete: False for what was there when the ranks ended.
        machine: None where not even that is known.
        advice: about the machine.
        results: of each check that came to its end, by its name; a ``NamedTuple`` with ``passed`` and ``verdict``.
        foreign_share: of the processor, between 0 and 1, that other programs took during each check, by its name.
        not_checked: why each of the other checks was not run, by its name.
        failures: what went wrong.
    """

    date: str
    took_s: float
    complete: bool
    machine: Machine | None
    advice: list[Advice]
    results: dict[str, Any]
    foreign_share: dict[str, float]
    not_checked: dict[str, str]
    failures: list[Failure]

    @classmethod
    def begun(cls) -> Report:
        """One that knows nothing yet."""
        return cls(time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()), 0.0, False, None, [], {}, {}, {}, [])

    @property
    def passed(self) -> bool:
        """True if nothing that was checked is wrong."""
        return self.complete and not self.failures and all(result.passed for result in self.results.values())

    @property
    def exit_code(self) -> int:
        """0 or 1."""
        return 0 if self.passed else 1


def as_data(report: Report) -> dict[str, Any]:
    """The report as JSON can say it, with what follows from it, such as ``passed``.

    A number that is none, such as a difference that is not a number, is None. So is ``hardware``, which ``plan`` takes,
    where links were not measured.
    """
    data: dict[str, Any] = _plain(report)
    found = hardware(report.results)
    return {"doctor": VERSION, **data, "hardware": None if found is None else found.to_dict()}


def _plain(thing: Any) -> Any:
    if isinstance(thing, tuple) and hasattr(thing, "_asdict"):
        shown = {name: _plain(value) for name, value in thing._asdict().items()}
        derived = [name for name, value in vars(type(thing)).items() if isinstance(value, property)]
        return {**shown, **{name: _plain(getattr(thing, name)) for name in derived}}
    if isinstance(thing, dict):
        return {str(key): _plain(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_plain(value) for value in thing]
    return None if isinstance(thing, float) and not math.isfinite(thing) else thing


def as_json(report: Report) -> str:
    """One line."""
    return json.dumps(as_data(report), allow_nan=False)


def hand_in(folder: Path, report: Report) -> None:
    """Leaves the report for the process that has started this one; the last one counts."""
    replace(folder / "report", pickle.dumps(report))


def collect(folder: Path) -> Report | None:
    """What was handed in; None if nothing was."""
    path = folder / "report"
    report = pickle.loads(path.read_bytes()) if path.exists() else None
    assert report is None or isinstance(report, Report)
    return report
