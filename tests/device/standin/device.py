"""What a process with the stand-in device is started with, and what it can ask of the device."""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .building import LIBRARY, built

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "reduce", "broadcast", "all_to_all", "send", "receive")
_ROOT = "CUSTOM_DEVICE_ROOT"  # Paddle's own variable: it loads every library in this folder


@dataclass(frozen=True)
class Pace:
    """How long a collective takes, beside the copying itself. Without arguments: as fast as it can.

    Attributes:
        latency_ms: what every collective takes, whatever its size.
        bandwidth_mb_s: 10^6 bytes a second that a rank's link carries, for each communicator; 0: no limit. A gather or
            reduce-scatter of n ranks carries (n-1)/n of the whole, an all-reduce twice that, a broadcast the whole, an
            all-to-all what a rank sends to others.
        jitter_ms: a rank comes to each collective late, by a random time of at most this.
        seed: of those times.
        slowed: which of ``KINDS`` this is for; none: all. A message's time is its sender's.
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


class Progress(NamedTuple):
    """How many collectives of one kind have been put on a stream, have had their turn come, and are over."""

    issued: int
    begun: int
    finished: int


class Waits(NamedTuple):
    """Waits of the host: how many, how many of them had something to wait for, and how many ms those took."""

    calls: int
    blocked: int
    ms: float


class HostWaits(NamedTuple):
    """Why the host waited. The first three are a program's own, as they would be on any device.

    Attributes:
        stream: until a stream had done everything; reading a value (``numpy()``, ``item()``) does so.
        event: until an event was reached.
        device: until all streams had done everything.
        compute: the compute stream had to wait for an event, or carried out a collective. It works in the calling
            thread, so the host waits with it; a real device's host would have gone on.
        kernel: a kernel on another stream waited for what that stream was told before, for the same reason. ``add``,
            ``subtract``, ``multiply``, ``divide``, ``scale``, ``cast``, ``assign``, ``full``, ``full_like``, ``fill``,
            and copies do not: the stream carries them out in their turn.
    """

    stream: Waits
    event: Waits
    device: Waits
    compute: Waits
    kernel: Waits

    @property
    def blocked(self) -> int:
        """How often a real device's host could have stood still."""
        return self.stream.blocked + self.event.blocked + self.device.blocked


class HeldStream:
    """A stream of one's own that stands still until it is opened.

    Whoever waits for ``event`` waits as long. What works in the calling thread must not: the compute stream, and those
    kernels on any stream that ``HostWaits.kernel`` counts. A stream that nobody opens is opened when the object is
    dropped; after the time-out of collectives it ends the process.

    Attributes:
        stream: the ``paddle.device.Stream``; what it is told waits.
        event: a ``paddle.device.Event`` recorded on it, behind the hold.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        from paddle.device import Event, Stream  # here: whoever starts the processes may do without Paddle

        self.stream: Any = Stream("npu")
        self.event: Any = Event()
        gate = ctypes.c_void_p(library.standin_hold(ctypes.c_void_p(self.stream.stream_base.raw_stream)))
        self._open = weakref.finalize(self, library.standin_open, gate)
        self.event.record(self.stream)

    def open(self) -> None:
        """Lets the stream go on. Another time it does nothing."""
        self._open()


class Device:
    """The plugin of this process, for questions that Paddle cannot ask. All sizes are in bytes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(Path(os.environ[_ROOT]) / LIBRARY))
        for name in ("live_bytes", "peak_bytes", "writes_after_free", "collectives", "host_waits"):
            getattr(self._library, f"standin_{name}").restype = ctypes.c_size_t
        self._library.standin_hold.restype = ctypes.c_void_p

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

    def collectives(self) -> dict[str, Progress]:
        """How far the collectives of each of ``KINDS`` are on this rank, since the process began."""
        return {kind: Progress(*(self._collectives(kind, stage) for stage in range(3))) for kind in KINDS}

    def host_waits(self) -> HostWaits:
        """How often and how long the host has waited in this process. Take the difference of two of these."""
        return HostWaits(*(self._waits(why) for why in range(len(HostWaits._fields))))

    def held_stream(self) -> HeldStream:
        """Makes a stream that does nothing until it is opened, and an event that is reached then."""
        return HeldStream(self._library)

    def _collectives(self, kind: str, stage: int) -> int:
        return int(self._library.standin_collectives(kind.encode(), ctypes.c_size_t(stage)))

    def _waits(self, why: int) -> Waits:
        blocked, ms = ctypes.c_size_t(), ctypes.c_double()
        calls = self._library.standin_host_waits(ctypes.c_size_t(why), ctypes.byref(blocked), ctypes.byref(ms))
        return Waits(int(calls), blocked.value, ms.value)
