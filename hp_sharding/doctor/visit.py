"""A whole run: alone, as a rank that the launcher has started, or as the process that starts the ranks itself."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import paddle

from ..errors import ConfigError
from ..progress import showing_progress
from ..trace.writing import replace
from . import report as reports
from . import terminal
from .examination import Examination
from .ranks import Team, join_job
from .report import Failure, Report, Request
from .starting import start_ranks

_HANDED_IN = 0
"""The code where somebody else reads the report: with any other the launcher takes ten seconds longer to end."""
Progress = Callable[[str, Report], None]


class _Ended(BaseException):
    """This process was asked to end."""


def run(request: Request, *, nproc: int | None = None) -> int:
    """Examines, and prints what came of it on rank 0. Returns the exit code.

    Args:
        request: what is wanted.
        nproc: how many ranks to start here; None for those that there are.

    Raises:
        ConfigError: ranks that there are already, and ``nproc``; or Paddle's parallel environment cannot be set up.
    """
    world = paddle.distributed.get_world_size()
    if nproc and nproc > 1:
        if world > 1:
            raise ConfigError(f"--nproc {nproc} starts ranks, but the launcher has started {world}: leave it out")
        return _present(_start(nproc, request), request)
    return _examine(request)


def _start(nproc: int, request: Request) -> Report:
    """What ranks report that are started here. Ended from outside, this process still takes them away."""
    with showing_progress("doctor", wanted=True) as show:
        try:
            with _ended_by_signal():
                return start_ranks(nproc, request, show)
        except _Ended:
            return _cut_short(Report.begun())


def _examine(request: Request) -> int:
    """The checks on this rank."""
    join_job()
    team = Team(request.timeout_s)
    if request.hand_in is not None:
        replace(request.hand_in / f"rank{team.me}.pid", str(os.getpid()).encode())
    with _progress(request, team.me) as progress, _without_details():
        examination = Examination(request, team, progress)
        try:
            with _ended_by_signal():
                report = examination.run()
        except _Ended:
            report = _cut_short(examination.report)
    if team.me == 0:
        return _present(report, request)
    return _HANDED_IN if request.hand_in is not None else report.exit_code


@contextlib.contextmanager
def _without_details() -> Iterator[None]:
    """What is wrapped, and how, is of no interest here."""
    log = logging.getLogger("hp_sharding")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)


def _cut_short(report: Report) -> Report:
    text = "ended by a signal before all was done; the launcher does so when another rank has died: look at its log"
    return report._replace(failures=[*report.failures, Failure("ranks", None, text)])


@contextlib.contextmanager
def _progress(request: Request, me: int) -> Iterator[Progress]:
    """Shows what is being done: to the process that has started the ranks, or on rank 0's terminal."""
    if request.hand_in is not None:
        folder = request.hand_in

        def leave(doing: str, report: Report) -> None:
            if me == 0:
                replace(folder / "doing", doing.encode())
                reports.hand_in(folder, report)

        yield leave
        return
    with showing_progress("doctor", wanted=me == 0) as show:
        yield lambda doing, _: show(doing)


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[None]:
    """The launcher ends all ranks when one has died; what is known by then is worth printing."""

    def end(*_: Any) -> None:
        signal.signal(signal.SIGTERM, before)
        raise _Ended

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _present(report: Report, request: Request) -> int:
    """Prints and writes the report, or hands it in. Returns the exit code."""
    if request.hand_in is not None:
        reports.hand_in(request.hand_in, report)
        return _HANDED_IN
    terminal.show(report)
    if request.as_json:
        terminal.say(reports.as_json(report))
    if request.output is not None:
        is_json = request.output.suffix == ".json"
        text = reports.as_json(report) + "\n" if is_json else terminal.as_text(report)
        try:
            replace(request.output, text.encode())
        except OSError as error:
            sys.stderr.write(f"cannot write {request.output}: {error}\n")
            return 2
    return report.exit_code
