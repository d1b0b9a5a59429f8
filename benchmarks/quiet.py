"""How busy a machine is with programs that are not being measured.

Two ranks on two cores leave nothing for anybody else, so a figure taken beside a running test or build is worth little.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

_SAMPLE_S = 0.5
_STAT = Path("/proc/stat")


class Meter:
    """Measures the share of the processor that went to other programs while it was entered.

    Add to ``own_s`` the processor time, in seconds, of what was measured meanwhile. Where the system keeps no such
    record (``/proc/stat``), the share is always zero.
    """

    def __init__(self) -> None:
        self.own_s = 0.0
        self._busy_s = 0.0
        self._elapsed_s = 0.0

    def __enter__(self) -> Meter:
        self._busy_s -= busy_s()
        self._elapsed_s -= time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._busy_s += busy_s()
        self._elapsed_s += time.monotonic()

    def foreign_share(self) -> float:
        """Between 0 and 1, of all cores."""
        available_s = self._elapsed_s * (os.cpu_count() or 1)
        return max(0.0, self._busy_s - self.own_s) / available_s if available_s else 0.0


def busy_s() -> float:
    """Seconds that programs have run since boot, over all cores, time stolen by other machines included."""
    if not _STAT.exists():
        return 0.0
    ticks = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, steal = ticks[0], ticks[1], ticks[2], ticks[7]
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def await_quiet(limit: float, timeout_s: float) -> float:
    """Waits until other programs take no more than the share ``limit``, not longer than ``timeout_s``.

    Call it while nothing of one's own runs. Returns the seconds that it waited.
    """
    begin_s = time.monotonic()
    while (left_s := timeout_s - (time.monotonic() - begin_s)) > 0:
        with Meter() as meter:
            time.sleep(min(_SAMPLE_S, left_s))
        if meter.foreign_share() <= limit:
            break
    return time.monotonic() - begin_s
