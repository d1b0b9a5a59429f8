"""What the current device is, asked once: everything else that depends on the kind of device reads it here."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle
from paddle.base import core

from ..layout import ALIGNMENT_BYTES

_BACKENDS = {"cpu": "tcp", "gpu": "nccl", "xpu": "bkcl"}
_CUSTOM_BACKEND = "xccl"


class Device(NamedTuple):
    """Where this process computes.

    Attributes:
        kind: ``"cpu"``, ``"gpu"``, ``"xpu"``, or the type of a custom device such as ``"npu"``.
        number: of the device of its kind; 0 on CPU.
        backend: what carries collectives: ``"tcp"`` (ours, on CPU), ``"nccl"``, ``"bkcl"``, or ``"xccl"`` for custom
            devices.
        alignment_bytes: what shards, parameters in a bucket and gradient slices begin at a multiple of: the same on
            every device, so that a layout does not depend on it. Paddle's own buffers are aligned to 256 bytes on GPU
            and XPU, to 512 on NPU.
    """

    kind: str
    number: int
    backend: str
    alignment_bytes: int

    @property
    def name(self) -> str:
        """As ``paddle.get_device()`` spells it."""
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.number}"

    @property
    def has_streams(self) -> bool:
        """Whether work is queued on streams of the device, so that the host runs ahead of it."""
        return self.kind != "cpu"

    @property
    def place(self) -> Any:
        """Paddle's place for tensors on it."""
        if self.kind == "cpu":
            return core.CPUPlace()
        if self.kind == "gpu":
            return core.CUDAPlace(self.number)
        if self.kind == "xpu":
            return core.XPUPlace(self.number)
        return core.CustomPlace(self.kind, self.number)

    def holds(self, tensor: paddle.Tensor) -> bool:
        """Whether a tensor lies on it."""
        return str(tensor.place) == _place_text(self)


def current_device() -> Device:
    """The device on which Paddle computes now, as ``paddle.set_device`` or the parallel environment has set it."""
    return _device(paddle.get_device())


def allocated_bytes() -> int:
    """Bytes of all live tensors on the current device, views counted once, as Paddle's allocator counts them."""
    device = current_device()
    if not device.has_streams:
        return int(core.host_memory_stat_current_value("Allocated", 0))
    return int(paddle.device.memory_allocated(device.name))


def host_tensor(values: npt.ArrayLike, dtype: str) -> paddle.Tensor:
    """A tensor on the host, whatever the device: the host reads it without waiting for the device."""
    return paddle.to_tensor(np.asarray(values, dtype), place=core.CPUPlace())


def same_stream(one: Any, other: Any) -> bool:
    """Whether two of Paddle's stream objects are one stream: each call for the current one returns a new object."""
    return bool(one.stream_base == other.stream_base)


class CurrentStream:
    """Within, a stream is the current one of the process; after it, ``home`` is, which must be so before.

    What ``paddle.device.stream_guard`` does, which asks for the current stream again and again: 13 us against 1.
    """

    def __init__(self, device: Device, stream: Any, home: Any) -> None:
        self._device = device
        self._stream = stream
        self._home = home

    def __enter__(self) -> None:
        _set_stream(self._device, self._stream)

    def __exit__(self, *_: object) -> None:
        _set_stream(self._device, self._home)


def _set_stream(device: Device, stream: Any) -> None:
    # As paddle.device.set_stream does. Which of these there are depends on what Paddle was built for.
    runtime: Any = core
    if device.kind == "gpu":
        runtime._set_current_stream(stream.stream_base)
    elif device.kind == "xpu":
        paddle.device.set_stream(stream)
    else:
        runtime._set_current_custom_device_stream(device.kind, device.number, stream.stream_base)


@functools.cache
def _place_text(device: Device) -> str:
    return str(device.place)


@functools.cache
def _device(name: str) -> Device:
    kind, _, index = name.partition(":")
    return Device(kind, int(index or 0), _BACKENDS.get(kind, _CUSTOM_BACKEND), ALIGNMENT_BYTES)
