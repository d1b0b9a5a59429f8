"""The largest settings that still can be counted, for the library and, without Paddle, for its command line."""

from __future__ import annotations

MOST_MB = 2.0**40
"""In bytes 64 bits can count it, and sums of it."""
MOST_S = 1e6
"""What every way of waiting that the system has can count, in milliseconds too."""
