"""Stage 1: local gradients that have been sent, and what is written to them afterwards.

There ``param.grad`` stays readable after backward, though it has been reduced by then, or is just being read for that.
What is written to it would be lost in silence; so it is found at the next call that uses the reduced gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import paddle
from paddle.base.framework import EagerParamBase

from .arena import GradientArena
from .buffer import FusedCommBuffer
from .errors import StateError


class _Sent(NamedTuple):
    """A local gradient, and how often it had been written to in place when it was sent."""

    param: EagerParamBase
    gradient: paddle.Tensor
    version: int


class SentGradients:
    """Notices writes to local gradients that are reduced already."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], _Sent] = {}

    def note(self, buffer: FusedCommBuffer) -> None:
        """The bucket's reduction has been started."""
        for index, param in enumerate(buffer.params):
            gradient = _local_gradient(param)
            if gradient is not None:
                self._sent[buffer.layout.number, index] = _Sent(param, gradient, gradient.inplace_version)

    def forget(self, bucket: int, index: int) -> None:
        """The parameter's gradient is about to be cleared, as is what was reduced of it."""
        self._sent.pop((bucket, index), None)

    def clear(self) -> None:
        """Forgets all of them."""
        self._sent.clear()

    def set_aside(self, buffers: Sequence[FusedCommBuffer], arena: GradientArena, *, unsent: bool) -> set[int]:
        """A backward begins: reduced values that somebody has edited stay, and only what comes now is sent and added.

        The local gradient, which is theirs and has been reduced, becomes zero. All other buckets keep it, so that their
        shards are formed anew, from the sum of all backwards.

        Args:
            buffers: all buckets; no reduction reads them any more.
            arena: says which were edited.
            unsent: the local gradients are of ``no_sync()``, and have not been sent.

        Returns:
            The buckets that were edited. Each may be sent once in this backward: what is sent twice is added twice.
        """
        edited = [buffer for buffer in buffers if arena.is_edited(buffer.layout.number)]
        for buffer in edited:
            if not unsent and buffer.gradient.full is not None:
                for index in range(len(buffer.params)):
                    self.forget(buffer.layout.number, index)
                buffer.gradient.full.zero_()
        return {buffer.layout.number for buffer in edited}

    def check(self, rank: int) -> None:
        """Raises StateError for one that was written to since. Costs 0.2 us a parameter, and the device nothing."""
        for param, gradient, version in self._sent.values():
            if gradient.inplace_version != version:
                raise StateError(
                    f"rank {rank}: the gradient of parameter '{param.name}' was changed in place after backward had "
                    "sent it, which comes too late to count. Change the reduced one: optimizer.set_full_grad(param, "
                    "value) on every rank, or optimizer.local_grads() in place, or optimizer.clip_grad_norm(). Under "
                    "optimizer.no_sync(), where nothing is sent, changes count. Call optimizer.clear_grad() to go on"
                )


def _local_gradient(param: EagerParamBase) -> paddle.Tensor | None:
    gradient = getattr(param, "main_grad", None)
    return gradient if gradient is not None else EagerParamBase._grad_ivar(param)
