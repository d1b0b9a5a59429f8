"""Where the time of a step goes: labelled spans of compute, communication and waiting, and what they come to.

Lanes are ``compute``; ``gather``, ``reduce``, ``replicate`` and ``agree`` for the collectives; and ``wait`` for the
time in which compute (the main thread, or its stream on a device) did nothing but wait for one: that time is *exposed*.
What is left of a step is compute. ``line`` collects, ``recording`` does so for some steps and merges all ranks,
``clocks`` puts them on one clock, ``sinks`` passes the figures on. Costs the test of a flag when off.
"""

from __future__ import annotations

from ..trace.spans import Span
from .line import KEPT_STEPS, MAX_STEPS, Timeline
from .recording import Recording
from .sinks import json_lines, scalars
from .steps import StepTimes

__all__ = [
    "KEPT_STEPS",
    "MAX_STEPS",
    "Recording",
    "Span",
    "StepTimes",
    "Timeline",
    "json_lines",
    "scalars",
]
