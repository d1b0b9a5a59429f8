"""A stand-in for an accelerator: a custom device of Paddle's, type ``npu``, that needs no hardware.

Its memory is the host's, its compute stream works in the calling thread, its other streams are threads, and its
collectives go through memory that the processes share (``src/``, in C++). What is real about it is the *order*: a
collective is on its way while Python goes on, a tensor that is read before ``wait()`` is stale, and memory that is
freed too early is overwritten. So it shows every time what an accelerator shows by luck. Operations of 16-bit floats,
which Paddle's kernels for the CPU lack, are those of float32 between conversions, so that mixed precision and loss
scaling can be trained on it. About the kernels, limits and speed of any accelerator it says nothing.

    from tests.device import standin

    reason = standin.why_missing()                          # None, or what is not there to build it with
    env = standin.environment(standin.Pace(latency_ms=50))  # for processes that use it; builds it if need be

* ``why_missing``, ``built``: the plugin is built once for its source and compiler, and kept in a temporary folder.
* ``Pace`` and ``environment``: what a collective takes, and the variables of a process that has the device.
* ``Device``: inside such a process, the device's accounts, how far its collectives are, when the host waited, another
  pace, and a ``HeldStream`` that stands still until it is opened.
"""

from __future__ import annotations

from .building import PADDLE_VERSION, built, why_missing
from .device import Device, HeldStream, HostWaits, Pace, Progress, Waits, environment

__all__ = [
    "PADDLE_VERSION",
    "Device",
    "HeldStream",
    "HostWaits",
    "Pace",
    "Progress",
    "Waits",
    "built",
    "environment",
    "why_missing",
]
