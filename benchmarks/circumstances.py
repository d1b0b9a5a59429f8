"""On what a benchmark ran."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> str:
    """Such as ``"AMD EPYC 7763, 2 cores, Linux"``."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
