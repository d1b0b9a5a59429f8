"""Exceptions at chosen places of a training, and what must be as before once they have been caught."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import paddle
from paddle import nn
from paddle.autograd import PyLayer

from hp_sharding import HpShardingError
from hp_sharding.comm import allocated_bytes
from hp_sharding.optimizer import ShardedOptimizer

CAUGHT = (SystemError, OSError, RuntimeError, KeyboardInterrupt)
"""What Paddle makes of an exception in a hook of the user's, and what it is raised as elsewhere."""


class Planned(RuntimeError):
    """What a bomb raises."""


class Bomb:
    """Raises at one of the places at which it is asked, once.

    Attributes:
        at: the place; empty for none.
        after: how often it is asked there without raising.
        kind: what it raises.
    """

    def __init__(self) -> None:
        self.at = ""
        self.after = 0
        self.kind: type[BaseException] = Planned

    def __call__(self, place: str) -> None:
        """A training has come to this place."""
        if place != self.at:
            return
        if self.after:
            self.after -= 1
            return
        self.at = ""
        raise self.kind(f"planned: {place}")

    @contextlib.contextmanager
    def armed(self, place: str, *, after: int = 0, kind: type[BaseException] = Planned) -> Iterator[None]:
        """What stands within must come to the place, and ends there. Catches what is raised."""
        self.at, self.after, self.kind = place, after, kind
        try:
            yield
        except CAUGHT as error:
            if isinstance(error, HpShardingError):
                raise
        assert not self.at, f"nothing came to {place!r}"


class _Trap(PyLayer):
    """The identity, whose backward calls a bomb."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, bomb: Bomb, place: str) -> paddle.Tensor:
        ctx.bomb, ctx.place = bomb, place
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        ctx.bomb(ctx.place)
        return grad * 1.0


def trap(x: paddle.Tensor, bomb: Bomb, place: str) -> paddle.Tensor:
    """``x``, whose backward comes to the place."""
    result: paddle.Tensor = _Trap.apply(x, bomb, place)
    return result


def mine_before(layers: dict[str, nn.Layer], bomb: Bomb) -> None:
    """Hooks of parameters that are there before the model is wrapped."""
    for name, layer in layers.items():
        param = layer.parameters()[0]
        param.register_hook(lambda _, name=name: bomb(f"early hook of a parameter of {name}"))
        param._register_backward_hook(lambda name=name: bomb(f"early hook after a gradient of {name}"))


def mine(model: nn.Layer, layers: dict[str, nn.Layer], bomb: Bomb) -> None:
    """Hooks at every place of the wrapped model itself and of ``layers``."""
    for name, layer in {"model": model, **layers}.items():
        # The one runs before our own hooks, the other after them.
        layer.register_forward_pre_hook(lambda *_, name=name: bomb(f"first before {name}"), prepend=True)
        layer.register_forward_pre_hook(lambda *_, name=name: bomb(f"before {name}"))
        layer.register_forward_post_hook(lambda *_, name=name: bomb(f"first after {name}"), prepend=True)
        layer.register_forward_post_hook(
            lambda _, __, output, name=name: trap(output, bomb, f"backward of {name}") if bomb.at else None
        )
        layer.register_forward_post_hook(
            lambda _, __, output, name=name: _hook_output(output, bomb, f"gradient of {name}")
        )
        layer.register_forward_post_hook(lambda *_, name=name: bomb(f"after {name}"))
    for name, layer in layers.items():
        param = layer.parameters()[0]
        param.register_hook(lambda _, name=name: bomb(f"hook of a parameter of {name}"))
        param._register_backward_hook(lambda name=name: bomb(f"hook after a gradient of {name}"))


def _hook_output(output: paddle.Tensor, bomb: Bomb, place: str) -> None:
    if not output.stop_gradient:
        output.register_hook(lambda _: bomb(place))


class Left(NamedTuple):
    """What a process holds. Nothing of it may grow by what has failed."""

    nbytes: int
    n_hooks: int
    n_threads: int


def left(model: nn.Layer, optimizer: ShardedOptimizer) -> Left:
    """What is held now, but for memory that is kept for what comes next."""
    gc.collect()
    optimizer.buffers[0].place.pool.trim()
    layers = model.sublayers(include_self=True)
    n_hooks = sum(len(layer._forward_pre_hooks) + len(layer._forward_post_hooks) for layer in layers)
    return Left(allocated_bytes(), n_hooks, threading.active_count())
