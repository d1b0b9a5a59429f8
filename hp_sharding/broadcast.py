"""``broadcast_state``: makes all ranks begin with the same parameters and buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import paddle

from .comm import current_device
from .errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .comm.communicator import Communicator, Work


def check_state_exists(model: paddle.nn.Layer) -> None:
    """Refuses a model with parameters that have no storage yet.

    Raises:
        ConfigError: a parameter was made under ``paddle.LazyGuard`` and not initialized since.
    """
    for name, tensor in _state(model):
        if not tensor._is_initialized():
            raise ConfigError(f"{name}: has no value yet (made under paddle.LazyGuard?); call its initialize() first")


def broadcast_state(model: paddle.nn.Layer, *communicators: Communicator, tensor: Communicator | None = None) -> None:
    """Overwrites parameters and buffers, running statistics included, with those of the first of all ranks.

    Every dtype and shape; buffers that ``state_dict()`` leaves out too. Tensors keep their storage. All ranks of the
    group call it together, and it returns when every tensor is in place.

    Args:
        model: built in the same way on every rank.
        communicators: one after the other they reach all ranks, beginning with the first; they must carry the dtypes
            at hand.
        tensor: over the ranks that split layers between them: they share all but the parameters that are split
            (``param.is_distributed``), of which each has its own.

    Raises:
        ConfigError: see ``check_state_exists``; before anything is sent.
        CommError: a peer is gone, late, or sends something of another name or size.
    """
    check_state_exists(model)
    if tensor is not None:
        shared = [(name, value) for name, value in _state(model) if not getattr(value, "is_distributed", False)]
        broadcast_tensors(shared, tensor)
    for communicator in communicators:
        broadcast_tensors(list(_state(model)), communicator)


@paddle.no_grad()
def broadcast_tensors(named: Sequence[tuple[str, paddle.Tensor]], communicator: Communicator) -> None:
    """Overwrites tensors in place with those of the first rank, in one order on all; returns when they are there.

    Args:
        named: name and tensor, of any dtype and shape, the same on all ranks; none without elements.
        communicator: over the ranks.

    Raises:
        CommError: a peer is gone, late, or sends something of another name or shape.
    """
    device = current_device()
    under_way = []
    for name, tensor in named:
        flat = tensor.detach().reshape([-1])
        if device.has_streams and flat.dtype == paddle.bool:
            flat = flat.cast("uint8")  # not every device can see it as bytes
        if not device.holds(flat):
            flat = flat._copy_to(device.place, True)
        # The label holds the shape, so that models that differ in it alone are told apart by the communicator.
        work = communicator.broadcast(flat, src=0, label=f"{name}{list(tensor.shape)}")
        under_way.append((tensor, flat, work))
    for tensor, flat, work in under_way:
        _finish(tensor, flat, work)


def _finish(tensor: paddle.Tensor, flat: paddle.Tensor, work: Work) -> None:
    work.wait()
    # Paddle reshapes a 0-d or a transposed tensor into a copy, anything else into a view; a buffer may lie on the host
    # while the model is on a device, and a bool travels as another type.
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.reshape(tensor.shape).cast(tensor.dtype), True)


def _state(model: paddle.nn.Layer) -> Iterator[tuple[str, paddle.Tensor]]:
    """Named parameters and buffers in the model's order, each once, without those of no elements."""
    for name, param in model.named_parameters():
        if param.size > 0:  # Paddle gives a tensor without elements no storage at all
            yield name, param
    for name, buffer in model.named_buffers():
        # Recurrent layers have a buffer that gets its value from their first forward with dropout, if ever.
        if buffer is not None and buffer.size > 0 and buffer._is_initialized():
            yield name, buffer
