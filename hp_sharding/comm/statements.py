"""What every rank of a group says of itself once something has failed, so that one of them can tell the whole story.

A rank speaks once, of its own accord when it hears of the failure, or when another one has spoken: from a thread of its
own, whatever its script does, and whatever becomes of a line that takes nothing more. Nobody speaks while all is well.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import paddle

from ..errors import CommError

_log = logging.getLogger("hp_sharding")
_ANSWER_S = 2.0
"""How long whoever raises waits for what the others say."""
_MAX_BYTES = 12_000
"""Of a statement: no more than a connection takes at once, even one at whose end nobody reads."""
_N_PLACES = 5
_MAX_ERROR_CHARS = 300
_OURS = f"{Path(__file__).resolve().parents[1]}{os.sep}"
_PADDLES = f"{Path(str(paddle.__file__)).resolve().parent}{os.sep}"
_PYTHONS = f"{Path(os.__file__).resolve().parent}{os.sep}"

Statement = dict[str, Any]
"""What JSON can carry. ``"at"`` says where the main thread stands; the rest is the reporter's."""


class Reporter(Protocol):
    """Knows what the lanes are used for. Called from any thread."""

    def statement(self) -> Statement:
        """What this rank is at; cheap, and without waiting for anything."""

    def report(self, error: CommError) -> str:
        """What all ranks were at when this happened. May take seconds."""


class Statements:
    """The statements of the members of one group.

    Args:
        ranks: global ranks of the group.
        me: this process's global rank.
        tell: sends a message to all other members.
    """

    def __init__(self, ranks: tuple[int, ...], me: int, tell: Callable[[list[object]], None]) -> None:
        self.ranks = ranks
        self._me = me
        self._tell = tell
        self._reporter: Callable[[], Reporter | None] = lambda: None
        self._changed = threading.Condition()
        self._said: dict[int, Statement] = {}
        self._lost: set[int] = set()
        self._speaks = False

    def report_with(self, reporter: Reporter) -> None:
        """From here on failures are explained by ``reporter``, which is held weakly."""
        self._reporter = weakref.ref(reporter)

    def explained(self, error: CommError) -> CommError:
        """The same error, with a report where somebody can make one. Blocks for seconds: for threads of the user's."""
        reporter = self._reporter()
        if reporter is not None:
            try:
                error.report = reporter.report(error)
            except Exception:  # noqa: BLE001 - the failure itself must be told, whatever is wrong with its report
                _log.debug("rank %d: no report of a failure", self._me, exc_info=True)
        return error

    def note_failure(self) -> None:
        """Nothing goes on any more: has this rank speak, where a model is wrapped. Does not block."""
        if self._reporter() is not None:
            self.speak()

    def say_goodbye(self) -> None:
        """The script ends: where an exception has ended it the others shall know which. Blocks while that is sent."""
        if getattr(sys, "last_value", None) is None or self._reporter() is None:
            return
        with self._changed:
            if self._speaks:
                return
            self._speaks = True
        self._speak()

    def speak(self) -> None:
        """Tells the others what this rank is at, unless it has done so. Does not block."""
        with self._changed:
            if self._speaks:
                return
            self._speaks = True
        # At the very end of a process no thread can be started any more.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._speak, name="hp_sharding-statement", daemon=True).start()

    def hear(self, peer: int, said: object) -> None:
        """Takes in what another rank says, and answers."""
        with self._changed:
            if isinstance(said, dict):
                self._said[peer] = said
            self._changed.notify_all()
        self.speak()

    def lose(self, peer: int) -> None:
        """The connection to ``peer`` has ended: it says nothing any more."""
        with self._changed:
            self._lost.add(peer)
            self._changed.notify_all()

    def collect(self, deadline_s: float) -> dict[int, Statement]:
        """What each rank has said, at ``time.monotonic()`` of ``deadline_s`` or earlier, when nobody is awaited."""
        self.speak()
        with self._changed:
            self._changed.wait_for(self._is_complete, max(0.0, deadline_s - time.monotonic()))
            return dict(self._said)

    def lost(self) -> set[int]:
        """Ranks whose connections have ended."""
        with self._changed:
            return set(self._lost)

    def _is_complete(self) -> bool:
        return all(rank in self._said or rank in self._lost for rank in self.ranks)

    def _speak(self) -> None:
        said: Statement = {}
        try:
            said = self._make()
        except Exception:  # noqa: BLE001 - somebody waits for it: better nothing than no answer
            _log.debug("rank %d: no statement", self._me, exc_info=True)
        self._tell(["state", said])
        with self._changed:
            self._said[self._me] = said
            self._changed.notify_all()

    def _make(self) -> Statement:
        said: Statement = {"at": main_thread_stands_at()}
        reporter = self._reporter()
        if reporter is not None:
            said.update(reporter.statement())
        lanes = said.get("lanes", {})
        while len(json.dumps(said)) > _MAX_BYTES and any(lane["last"] for lane in lanes.values()):
            for lane in lanes.values():
                lane["last"] = lane["last"][(len(lane["last"]) + 1) // 2 :]
        return said


def answer_deadline_s() -> float:
    """Until when to wait for the others' statements, as ``time.monotonic()``."""
    return time.monotonic() + _ANSWER_S


class _Place(NamedTuple):
    """Where a frame stands."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether neither this package, nor Paddle, nor Python itself has it."""
        if self.file.startswith("<") and self.file != "<stdin>":
            return False
        path = str(Path(self.file).resolve())
        if path.startswith((_OURS, _PADDLES)):
            return False
        return not path.startswith(_PYTHONS) or path.startswith(f"{_PYTHONS}site-packages{os.sep}")

    def __str__(self) -> str:
        path = Path(self.file)
        short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(*path.parts[-2:])
        text = linecache.getline(self.file, self.line).strip()
        return f"{short}:{self.line} in {self.function}" + (f": {text}" if text else "")


def main_thread_stands_at() -> list[str]:
    """Where the main thread of this process is, the innermost place last; of its calls those in the user's own code.

    Where none is the user's: the innermost ones; or, past the end of the script, what has ended it.
    """
    places = []
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        places.append(_Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    users = [place for place in places if place.is_users]
    if not users and any(place.function == "close_all" and place.file.startswith(_OURS) for place in places):
        return [_end_of_script()]
    found = [str(place) for place in (users or places)[:_N_PLACES][::-1]]
    if users and places and not places[0].is_users:
        found.append(f"and there in {places[0].function} of {Path(places[0].file).name}")
    return found


def _end_of_script() -> str:
    error = getattr(sys, "last_value", None)
    if error is None:
        return "the end of its script"
    text = error.message if isinstance(error, CommError) else str(error)
    # Paddle's errors have many lines.
    return f"the end of its script, which {type(error).__name__} has ended: {' '.join(text.split())[:_MAX_ERROR_CHARS]}"
