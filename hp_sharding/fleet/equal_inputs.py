"""Tensor parallelism: the ranks that hold a layer together must compute with the same inputs."""

from __future__ import annotations

import functools
from typing import Any

import paddle

from ..broadcast import broadcast_tensors
from ..comm import Communicator
from ..hooks import show_inputs
from ..outputs import tensors_in


def share_inputs(model: paddle.nn.Layer, lane: Communicator) -> None:
    """Gives each forward of ``model`` the tensors that the first rank of ``lane`` passes to it, in place of its own.

    All ranks of the lane then run the forward together, with tensors of the same shapes and dtypes; a ``CommError``
    names what differs. What is no tensor is not looked at.
    """
    show_inputs(model, functools.partial(_receive, lane))


@paddle.no_grad()
def _receive(lane: Communicator, inputs: Any) -> None:
    given = {id(tensor): tensor for tensor in tensors_in(inputs) if tensor.size}
    # Into tensors of their own: what was given may be a view of something that the script still needs.
    received = [tensor if lane.rank == 0 else paddle.empty_like(tensor) for tensor in given.values()]
    broadcast_tensors([(f"input {number} ", tensor) for number, tensor in enumerate(received)], lane)
    if lane.rank > 0:
        for tensor, found in zip(given.values(), received, strict=True):
            found._share_buffer_to(tensor)
