"""What a process with the stand-in device is started with, and what it can ask of the device."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from .building import LIBRARY, built

_ROOT = "CUSTOM_DEVICE_ROOT"  # Paddle's own variable: it loads every library in this folder


@dataclass(frozen=True)
class Pace:
    """How long a collective takes, beside the copying itself. Without arguments: as fast as it can.

    Attributes:
        latency_ms: what every collective takes, whatever its size.
        bandwidth_mb_s: 10^6 bytes a second that a rank's link carries, for each communicator; 0: no limit. A gather or
            reduce-scatter of n ranks carries (n-1)/n of the whole, an all-reduce twice that, a broadcast the whole.
        jitter_ms: a rank comes to each collective late, by a random time of at most this.
        seed: of those times.
        slowed: kinds that this is for: all_gather, reduce_scatter, all_reduce, reduce, broadcast, send; none: all.
    """

    latency_ms: float = 0.0
    bandwidth_mb_s: float = 0.0
    jitter_ms: float = 0.0
    seed: int = 0
    slowed: tuple[str, ...] = ()

    def variables(self) -> dict[str, str]:
        """The environment variables that say so."""
        return {
            "STANDIN_LATENCY_MS": str(self.latency_ms),
            "STANDIN_BANDWIDTH_MB_S": str(self.bandwidth_mb_s),
            "STANDIN_JITTER_MS": str(self.jitter_ms),
            "STANDIN_SEED": str(self.seed),
            "STANDIN_SLOWED": ",".join(self.slowed),
        }


def environment(pace: Pace | None = None, *, timeout_s: float = 30.0, caching: bool = False) -> dict[str, str]:
    """Environment variables for a process that has the device, before it imports Paddle. Builds the plugin if need be.

    Args:
        pace: how long collectives take.
        timeout_s: how long a rank waits for another in a collective before its process ends (a message, code 70).
        caching: whether Paddle keeps freed memory for its next tensors and a collective's input until the collective
            is over, as by default. Without, every tensor's memory goes back to the device at once, which poisons and
            watches it: for tests, which then see what nobody keeps. For measurements of time say True.
    """
    return {
        _ROOT: str(built()),
        "PADDLE_DISTRI_BACKEND": "xccl",
        "FLAGS_selected_npus": "0",  # Paddle wants to be told; a process has devices of its own
        "FLAGS_free_idle_chunk": "0" if caching else "1",
        "FLAGS_use_stream_safe_cuda_allocator": "1" if caching else "0",
        "STANDIN_TIMEOUT_S": str(timeout_s),
        **(pace or Pace()).variables(),
    }


class Device:
    """The plugin of this process, for questions that Paddle cannot ask. All sizes are in bytes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(Path(os.environ[_ROOT]) / LIBRARY))
        for name in ("live_bytes", "peak_bytes", "writes_after_free"):
            getattr(self._library, f"standin_{name}").restype = ctypes.c_size_t

    def live_bytes(self) -> int:
        """What Paddle has taken and not given back, in blocks of 512."""
        return int(self._library.standin_live_bytes())

    def peak_bytes(self) -> int:
        """The most that was live since ``forget_peak``."""
        return int(self._library.standin_peak_bytes())

    def forget_peak(self) -> None:
        """Lets the peak begin again at what is live now."""
        self._library.standin_forget_peak()

    def writes_after_free(self) -> int:
        """How many freed blocks somebody has written to after they were freed, of those looked at so far.

        Freed blocks are kept for a while (``STANDIN_QUARANTINE_MB``, 64) and are looked at when they go; this lets
        all of them go.
        """
        return int(self._library.standin_writes_after_free())

    def set_pace(self, pace: Pace) -> None:
        """Takes another pace, from the next collective that begins on this rank. The seed stays as it was."""
        os.environ.update(pace.variables())
        self._library.standin_reload()
