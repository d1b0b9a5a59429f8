"""How much of the processor other programs took while something was measured.

A figure taken beside a running build is worth little, and whoever reads a report cannot know what else was running.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

_STAT = Path("/proc/stat")


class Use(NamedTuple):
    """Of the processor, over some time or since some beginning.

    Attributes:
        busy_s: processor seconds of all programs on the machine; 0 where the system keeps no record.
        own_s: those of this process.
        elapsed_s: by the clock.
    """

    busy_s: float
    own_s: float
    elapsed_s: float

    @classmethod
    def until_now(cls) -> Use:
        """Since a beginning that is the same in every call of this process."""
        return cls(_busy_s(), time.process_time(), time.monotonic())

    def since(self, before: Use) -> Use:
        """What was used between two calls of ``until_now``."""
        return Use(*(now - then for now, then in zip(self, before, strict=True)))


def foreign_share(uses: list[Use], hosts: dict[str, list[int]], n_cores: int) -> float:
    """The share of the cores that went to other programs, between 0 and 1, on the host where it was the largest.

    Args:
        uses: of each rank, at about the same time.
        hosts: by name, the ranks on it.
        n_cores: of a host.
    """
    return max(_foreign_share([uses[rank] for rank in ranks], n_cores) for ranks in hosts.values())


def _foreign_share(uses: list[Use], n_cores: int) -> float:
    if not uses[0].busy_s or not uses[0].elapsed_s:
        return 0.0
    foreign_s = uses[0].busy_s - sum(use.own_s for use in uses)
    return min(1.0, max(0.0, foreign_s / (uses[0].elapsed_s * n_cores)))


def _busy_s() -> float:
    """Since boot, over all cores, time that other virtual machines took included."""
    if not _STAT.exists():
        return 0.0
    ticks = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, steal = ticks[0], ticks[1], ticks[2], ticks[7]
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")
