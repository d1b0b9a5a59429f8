"""Running state: what forwards write beside parameters, such as the statistics of BatchNorm, kept equal on all ranks.

Each rank's forward sees its own batches, so that its running means would be its own too, and a model that is evaluated
or saved on another rank another model. ``step()`` gives the first rank's to all, as PyTorch's DistributedDataParallel
does with each forward; only what some rank has written since the last time travels, packed by dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import paddle
from paddle import nn

from .comm import Communicator, Work, current_device
from .units import is_statistic


class _Entry(NamedTuple):
    """One tensor: the layer that holds it, under which name, and whether a forward writes it past every sign."""

    layer: weakref.ref[nn.Layer]
    name: str
    is_statistic: bool

    def tensor(self) -> paddle.Tensor | None:
        """As it is held now; None for one that has no value, or is gone."""
        layer = self.layer()
        if layer is None:
            return None
        held: Mapping[str, paddle.Tensor | None] = layer._parameters if self.is_statistic else layer._buffers
        tensor = held.get(self.name)
        return tensor if tensor is not None and tensor.size > 0 and tensor._is_initialized() else None


class _Packed(NamedTuple):
    """Tensors of one dtype, end to end, under way."""

    tensors: list[paddle.Tensor]
    flat: paddle.Tensor
    work: Work


class RunningState:
    """Running statistics and buffers of one model.

    Args:
        model: holds them; it is not kept alive.
        lanes: one after the other they reach all data ranks, beginning with the first.
    """

    def __init__(self, model: nn.Layer, lanes: Sequence[Communicator]) -> None:
        self._entries = list(_find(model))
        self._lanes = list(lanes)
        self._signs = [_sign(entry) for entry in self._entries]
        self._agreed = [False] * len(self._entries)
        self._under_way: list[_Packed] = []

    def written(self) -> list[bool]:
        """For each tensor, whether this rank may have written it since it was last given out."""
        return [
            _in_training(entry) if entry.is_statistic else _sign(entry) != sign
            for entry, sign in zip(self._entries, self._signs, strict=True)
        ]

    def take_agreed(self, written: Sequence[bool]) -> None:
        """Takes in what some rank has written."""
        self._agreed = [old or new for old, new in zip(self._agreed, written, strict=True)]

    def start(self) -> None:
        """Starts to give the first rank's tensors to all, where some rank has written them. Same on every rank."""
        due = [entry.tensor() for entry, agreed in zip(self._entries, self._agreed, strict=True) if agreed]
        self._agreed = [False] * len(self._entries)
        by_dtype: dict[paddle.dtype, list[paddle.Tensor]] = {}
        for tensor in (tensor for tensor in due if tensor is not None):
            by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
        for tensors in by_dtype.values():
            self._under_way.append(self._send(tensors))

    def finish(self) -> None:
        """Returns once all that was started is in place.

        Raises:
            CommError: a broadcast failed.
        """
        under_way, self._under_way = self._under_way, []
        for packed in under_way:
            packed.work.wait()
            start = 0
            for tensor in packed.tensors:
                part = packed.flat._slice(start, start + tensor.size)
                tensor.copy_(part.reshape(tensor.shape).cast(tensor.dtype), False)
                start += tensor.size
        if under_way:
            self._signs = [_sign(entry) for entry in self._entries]

    def _send(self, tensors: list[paddle.Tensor]) -> _Packed:
        device = current_device()
        flat = paddle.concat([_on_device(tensor).reshape([-1]) for tensor in tensors])
        if device.has_streams and flat.dtype == paddle.bool:
            flat = flat.cast("uint8")  # not every device can see it as bytes
        work: Work | None = None
        for lane in self._lanes:
            work = lane.broadcast(flat, src=0, label="running state", after=work)
        assert work is not None
        return _Packed(tensors, flat, work)


def _on_device(tensor: paddle.Tensor) -> paddle.Tensor:
    device = current_device()
    return tensor if device.holds(tensor) else tensor._copy_to(device.place, True)


def _find(model: nn.Layer) -> Iterator[_Entry]:
    """In the model's order, each tensor once."""
    seen: set[int] = set()
    for layer in model.sublayers(include_self=True):
        statistics = [(name, param, True) for name, param in layer._parameters.items() if is_statistic(layer, name)]
        buffers = [(name, buffer, False) for name, buffer in layer._buffers.items()]
        for name, tensor, is_stat in [*statistics, *buffers]:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield _Entry(weakref.ref(layer), name, is_stat)


def _in_training(entry: _Entry) -> bool:
    layer = entry.layer()
    return layer is not None and bool(layer.training)


def _sign(entry: _Entry) -> tuple[int, int] | None:
    """Changes when a buffer is written or replaced. The kernels that write statistics leave no sign."""
    tensor = entry.tensor()
    return None if tensor is None else (id(tensor), tensor.inplace_version)
