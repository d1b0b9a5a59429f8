"""Running state: what forwards write beside parameters, such as the statistics of BatchNorm, kept equal on all ranks.

Each rank's forward sees its own batches, so that its running means would be its own too, and a model that is evaluated
or saved on another rank another model. ``step()`` gives the first rank's to all, as PyTorch's DistributedDataParallel
does with each forward: statistics and persistable buffers, packed by dtype. What a layer merely keeps in an attribute
is not its state; Paddle files such tensors under its buffers, but not as persistable ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import nn

from .comm import Communicator, Work, current_device
from .timeline import Timeline
from .units import is_statistic

ALWAYS_BYTES = 1 << 18
"""Up to here a buffer is sent whether it shows a sign of a write or not: many functions leave none. Larger ones are
mostly tables that nobody writes."""
_LABEL_LETTERS = 200


class _Sign(NamedTuple):
    """Changes when most functions write a tensor, and when another one takes its place."""

    tensor: weakref.ref[Any]
    version: int

    @classmethod
    def of(cls, tensor: paddle.Tensor) -> _Sign:
        return cls(weakref.ref(tensor), tensor.inplace_version)

    def is_of(self, tensor: paddle.Tensor) -> bool:
        return self.version == tensor.inplace_version and self.tensor() is tensor


class _Entry:
    """One tensor: the layer that holds it, under which name, and what this rank knows of writes to it."""

    def __init__(self, path: str, layer: nn.Layer, name: str, *, is_stat: bool) -> None:
        self.path = path
        self._layer = weakref.ref(layer)
        self._name = name
        self._is_statistic = is_stat
        self.sign: _Sign | None = None
        self.written = False
        self.agreed = False
        self.sent()

    def tensor(self) -> paddle.Tensor | None:
        """As it is held now; None for one that has no value, or is gone."""
        layer = self._layer()
        if layer is None:
            return None
        held: Mapping[str, paddle.Tensor | None] = layer._parameters if self._is_statistic else layer._buffers
        tensor = held.get(self._name)
        return tensor if tensor is not None and tensor.size > 0 and tensor._is_initialized() else None

    def look(self) -> None:
        """After a forward: whether it may have written the tensor. Kernels leave no sign of that on statistics."""
        layer, tensor = self._layer(), self.tensor()
        if layer is None or tensor is None:
            return
        small = tensor.size * tensor.element_size() <= ALWAYS_BYTES
        changed = self.sign is None or not self.sign.is_of(tensor)
        self.written = self.written or changed or (layer.training and (small or self._is_statistic))

    def sent(self) -> None:
        """It is the first rank's now."""
        tensor = self.tensor()
        self.written = self.agreed = False
        self.sign = None if tensor is None else _Sign.of(tensor)

    def put(self, value: paddle.Tensor) -> None:
        """Takes the first rank's value: where the tensor lies, or in a new one where it is not the layer's own."""
        layer, tensor = self._layer(), self.tensor()
        if layer is None or tensor is None:
            return
        if self._is_statistic or (self.sign is not None and self.sign.tensor() is tensor):
            tensor.detach().copy_(value, not current_device().holds(tensor))  # the host may look at its own at once
        else:
            layer._buffers[self._name] = value.clone()  # the forward may have stored what belongs to somebody else
        self.sent()


class _Packed(NamedTuple):
    """Tensors of one dtype, end to end, under way."""

    entries: list[_Entry]
    shapes: list[list[int]]
    dtype: paddle.dtype
    flat: paddle.Tensor
    work: Work


class RunningState:
    """Running statistics and persistable buffers of one model.

    Args:
        model: holds them; it is not kept alive.
        lanes: one after the other they reach all data ranks, beginning with the first.
    """

    def __init__(self, model: nn.Layer, lanes: Sequence[Communicator], timeline: Timeline) -> None:
        self._timeline = timeline
        self._entries = list(_find(model))
        self._lanes = list(lanes)
        self._under_way: list[_Packed] = []

    def look(self) -> None:
        """After a backward, and so after a forward: notes what this rank may have written."""
        for entry in self._entries:
            entry.look()

    def written(self) -> list[bool]:
        """For each tensor, whether this rank may have written it since it was last given out."""
        return [entry.written for entry in self._entries]

    def take_agreed(self, written: Sequence[bool]) -> None:
        """Takes in what some rank has written."""
        for entry, flag in zip(self._entries, written, strict=True):
            entry.agreed = entry.agreed or flag

    def start(self) -> None:
        """Starts to give the first rank's tensors to all, where some rank has written them. Same on every rank."""
        self.drop()
        by_dtype: dict[paddle.dtype, list[_Entry]] = {}
        for entry in self._entries:
            tensor = entry.tensor() if entry.agreed else None
            if tensor is not None:
                by_dtype.setdefault(tensor.dtype, []).append(entry)
        for dtype, entries in by_dtype.items():
            self._under_way.append(self._send(entries, dtype))

    def finish(self) -> None:
        """Returns once all that was started is in place.

        Raises:
            CommError: a broadcast failed; where ranks hold tensors of other shapes, it names them.
        """
        under_way, self._under_way = self._under_way, []
        for packed in under_way:
            self._timeline.wait(packed.work)
            start = 0
            for entry, shape in zip(packed.entries, packed.shapes, strict=True):
                tensor = entry.tensor()
                numel = tensor.size if tensor is not None else 0
                entry.put(packed.flat._slice(start, start + numel).reshape(shape).cast(packed.dtype))
                start += numel

    def drop(self) -> None:
        """Waits for what a step that raised has left under way, and forgets it."""
        under_way, self._under_way = self._under_way, []
        for packed in under_way:
            packed.work.wait()

    def _send(self, entries: list[_Entry], dtype: paddle.dtype) -> _Packed:
        device = current_device()
        tensors = [tensor.detach() for tensor in (entry.tensor() for entry in entries) if tensor is not None]
        shapes = [list(tensor.shape) for tensor in tensors]
        flat = paddle.concat([_on_device(tensor).reshape([-1]) for tensor in tensors])
        if device.has_streams and flat.dtype == paddle.bool:
            flat = flat.cast("uint8")  # not every device can see it as bytes
        # It holds the shapes, so that ranks that differ in them are told apart.
        names = ", ".join(f"{entry.path}{shape}" for entry, shape in zip(entries, shapes, strict=True))
        work: Work | None = None
        for lane in self._lanes:
            work = lane.broadcast(flat, src=0, label=f"running state {names}"[:_LABEL_LETTERS], after=work)
        assert work is not None
        return _Packed(entries, shapes, dtype, flat, self._timeline.watch(work))


def _on_device(tensor: paddle.Tensor) -> paddle.Tensor:
    device = current_device()
    return tensor if device.holds(tensor) else tensor._copy_to(device.place, True)


def _find(model: nn.Layer) -> Iterator[_Entry]:
    """In the model's order, each tensor once."""
    seen: set[int] = set()
    for prefix, layer in model.named_sublayers(include_self=True):
        statistics = [(name, param, True) for name, param in layer._parameters.items() if is_statistic(layer, name)]
        buffers = [(name, buffer, False) for name, buffer in layer._buffers.items() if _is_persistable(layer, name)]
        for name, tensor, is_stat in [*statistics, *buffers]:
            if tensor is None or id(tensor) not in seen:
                seen.add(id(tensor))
                yield _Entry(f"{prefix}.{name}" if prefix else name, layer, name, is_stat=is_stat)


def _is_persistable(layer: nn.Layer, name: str) -> bool:
    return name not in layer._non_persistable_buffer_names_set
