"""Runs the checks, one after the other, on all ranks; a rank that fails takes nobody with it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import CommError, HpShardingError
from . import advice, asynchrony, bandwidth, foreign, machine, overlap, parity
from .ranks import Team
from .report import Failure, Report, Request

_LAST_WORDS_S = 5.0
"""How long a rank that failed waits for what became of the others."""
NEEDS_RANKS = "since it takes several ranks"


class Check(NamedTuple):
    """One thing that is looked at.

    Attributes:
        title: for people.
        measure: what every rank does; what it returns, JSON can say.
        conclude: what all of that says together, by rank.
    """

    title: str
    measure: Callable[[Team, Request], Any]
    conclude: Callable[[list[Any], Team], Any]


CHECKS = {
    "parity": Check("numbers beside those of one process", parity.measure, lambda found, _: parity.conclude(found)),
    "asynchrony": Check(
        "whether collectives run behind compute",
        asynchrony.measure,
        lambda found, team: asynchrony.conclude(found, team.device.backend),
    ),
    "bandwidth": Check("bandwidth and latency", bandwidth.measure, lambda found, _: bandwidth.conclude(found)),
    "overlap": Check(
        "how much communication a step hides",
        overlap.measure,
        lambda found, team: overlap.conclude(found, on_cpu=not team.device.has_streams),
    ),
}
"""By name, in the order in which they run: numbers first."""


class Examination:
    """One run of the doctor on this rank.

    Args:
        request: what is wanted.
        team: all ranks.
        progress: called with what is being done now, and with the report so far.
    """

    def __init__(self, request: Request, team: Team, progress: Callable[[str, Report], None]) -> None:
        self._request = request
        self._team = team
        self._progress = progress
        self._begin_s = time.monotonic()
        self.report = Report.begun()

    def run(self) -> Report:
        """All checks. Collective. Never raises for what goes wrong in one."""
        self._tell("looking at the machine")
        self._look_at_machine()
        for number, (name, check) in enumerate(CHECKS.items(), 1):
            reason = self._why_not(name)
            if reason:
                self._note(not_checked={**self.report.not_checked, name: reason})
                continue
            self._tell(f"{number} of {len(CHECKS)}: {check.title}")
            self._run_check(name, check)
        self._note(complete=True, advice=[*self.report.advice, *advice.disturbed(self.report.foreign_share)])
        return self.report

    def _why_not(self, name: str) -> str:
        if self._request.only and name not in self._request.only:
            return "since it was not asked for"
        if self._team.n_ranks == 1:
            return NEEDS_RANKS
        return "since a rank has failed" if self.report.failures else ""

    def _look_at_machine(self) -> None:
        mine = machine.look(self._team)
        everyone = self._gather("machine", mine) if self._team.n_ranks > 1 else [mine]
        seen = machine.conclude(everyone or [mine], self._team.device)
        self._note(machine=seen, advice=advice.advise(seen, everyone or [mine]))

    def _run_check(self, name: str, check: Check) -> None:
        mine = self._measure(check)
        if "error" in mine:
            # At once: the launcher may end this rank before the others have answered.
            self._fail(name, self._team.me, mine["error"])
        # Where this rank failed, this is what makes the others stop waiting for it.
        self._team.close()
        everyone = self._gather(name, mine, timeout_s=_LAST_WORDS_S if "error" in mine else None)
        failed = {rank: told["error"] for rank, told in enumerate(everyone) if "error" in told}
        for rank, text in failed.items():
            if rank != self._team.me:
                self._fail(name, rank, text)
        if everyone and not failed:
            self._conclude(name, check, everyone)

    def _conclude(self, name: str, check: Check, everyone: list[dict[str, Any]]) -> None:
        """All ranks have come to the end of a check."""
        result = check.conclude([told["found"] for told in everyone], self._team)
        uses = [foreign.Use(*told["use"]) for told in everyone]
        assert self.report.machine is not None
        share = foreign.foreign_share(uses, self.report.machine.hosts, self.report.machine.n_cores)
        self._note(
            results={**self.report.results, name: result}, foreign_share={**self.report.foreign_share, name: share}
        )

    def _measure(self, check: Check) -> dict[str, Any]:
        """What this rank found, or what went wrong."""
        before = foreign.Use.until_now()
        try:
            found = check.measure(self._team, self._request)
        except HpShardingError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        except Exception:  # noqa: BLE001 - whatever it is belongs into the report, and the others wait
            return {"error": traceback.format_exc().strip()}
        return {"found": found, "use": foreign.Use.until_now().since(before)}

    def _gather(self, name: str, mine: dict[str, Any], timeout_s: float | None = None) -> list[dict[str, Any]]:
        """What every rank tells; nothing where one does not, which is noted."""
        try:
            return self._team.tell_all(mine, timeout_s=timeout_s)
        except CommError as error:
            waited_s = timeout_s or self._team.timeout_s
            self._fail(name, error.peer, f"no word from it in {waited_s:g} s: it has ended or hangs")
        except (RuntimeError, OSError, ValueError) as error:
            # What Paddle's store raises.
            self._fail(name, 0, f"it cannot be reached any more: {error}")
        return []

    def _fail(self, name: str, rank: int | None, text: str) -> None:
        self._note(failures=[*self.report.failures, Failure(name, rank, text)])

    def _tell(self, doing: str) -> None:
        self._progress(doing, self.report)

    def _note(self, **changes: Any) -> None:
        took_s = time.monotonic() - self._begin_s
        self.report = self.report._replace(took_s=took_s, **changes)
