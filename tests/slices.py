"""The user's optimizer over slices of parameters, as each of several ranks has them, in one process without a lane.

Gradients are put where a reduction would leave them, so that only the update itself is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn

from hp_sharding.arena import GradientArena
from hp_sharding.buffer import BufferPlace, FusedCommBuffer
from hp_sharding.layout import BucketRules, ParamSpec, plan_buckets
from hp_sharding.timeline import Timeline
from hp_sharding.updates import InnerUpdates, optimizer_params
from tests.fakes import PoisoningPool, WaitingLane

MakeOptimizer = Callable[[nn.Layer], Any]
STEPS = 6
Change = Callable[[nn.Layer, Any, int], None]
"""What the user does to a model and its optimizer after a step, such as ``scheduler.step()``."""


def make_model() -> nn.Layer:
    """Parameters of several sizes, the largest of which lies in several shards."""
    paddle.seed(2)
    model = nn.Sequential(nn.Linear(40, 17), nn.Linear(17, 5))
    for number, param in enumerate(model.parameters()):
        param.name = f"p{number}"
    return model


def make_gradients(model: nn.Layer, step: int) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(step)
    return [generator.standard_normal(param.shape, dtype=np.float32) for param in model.parameters()]


class Rank:
    """One rank's slices of a model, and the optimizer over them."""

    def __init__(self, make_optimizer: MakeOptimizer, nranks: int, rank: int, model: nn.Layer | None = None) -> None:
        self.model = model or make_model()
        self.inner = make_optimizer(self.model)
        self.lane = WaitingLane("gather", nranks=nranks, rank=rank)
        params = optimizer_params(self.inner)
        specs = [
            ParamSpec(param.name, param.size, "float32", 4, number // 2, param.stop_gradient)
            for number, param in enumerate(params)
        ]
        layouts = plan_buckets(specs, ["u0", "u1"], BucketRules(nranks, 10**6, True, False))
        place = BufferPlace(rank, self.lane, PoisoningPool(), True)
        self.buffers = [
            FusedCommBuffer(layout, [params[slot.param] for slot in layout.slots], place) for layout in layouts
        ]
        self.arena = GradientArena(layouts, 1.0)
        self.updates = InnerUpdates(
            self.inner, self.buffers, self.arena, comm=self.lane, timeline=Timeline(enabled=False)
        )

    def put(self, gradients: list[np.ndarray[Any, Any]]) -> None:
        """Reduced gradients of all parameters, in the model's order, into this rank's arena."""
        by_name = {param.name: value for param, value in zip(self.model.parameters(), gradients, strict=True)}
        for buffer in self.buffers:
            self.arena.expect_sum(buffer.layout.number)
            for piece in buffer.layout.pieces(self.lane.rank):
                value = by_name[buffer.params[piece.slot].name].reshape(-1)
                part = value[piece.param_offset_numel : piece.param_offset_numel + piece.numel]
                start = piece.shard_offset_numel
                self.arena.slice(buffer.layout.number)._slice(start, start + piece.numel).copy_(
                    paddle.to_tensor(part), False
                )

    @paddle.no_grad()
    def apply(self, used: bool = True) -> None:
        for buffer in self.buffers:
            flags = [used] * len(buffer.params)
            if self.updates.is_due(buffer.layout.number, {buffer.layout.number: flags}):  # type: ignore[arg-type]
                self.updates.apply([buffer.layout.number], {buffer.layout.number: flags})  # type: ignore[arg-type]

    def pieces(self) -> dict[str, list[np.ndarray[Any, Any]]]:
        found: dict[str, list[np.ndarray[Any, Any]]] = {}
        for buffer in self.buffers:
            for piece in buffer.slices:
                found.setdefault(buffer.params[piece.param].name, []).append(piece.tensor.numpy())
        return found


def together(ranks: list[Rank]) -> dict[str, np.ndarray[Any, Any]]:
    """Whole parameters, flat, put together from every rank's slices."""
    found: dict[str, list[np.ndarray[Any, Any]]] = {}
    for rank in ranks:
        for name, pieces in rank.pieces().items():
            found.setdefault(name, []).extend(pieces)
    return {name: np.concatenate(pieces) for name, pieces in found.items()}


def plain_steps(
    make_optimizer: MakeOptimizer, steps: int, model: nn.Layer | None = None, *, change: Change | None = None
) -> nn.Layer:
    """Steps of an optimizer over whole parameters. Returns the model."""
    model = model or make_model()
    optimizer = make_optimizer(model)
    for step in range(steps):
        for param, gradient in zip(model.parameters(), make_gradients(model, step), strict=True):
            param.grad = paddle.to_tensor(gradient)
        optimizer.step()
        optimizer.clear_grad()
        if change is not None:
            change(model, optimizer, step)
    return model


def sharded_steps(
    make_optimizer: MakeOptimizer,
    nranks: int,
    *,
    change: Change | None = None,
    make: Callable[[], nn.Layer] = make_model,
) -> dict[str, np.ndarray[Any, Any]]:
    """``STEPS`` steps of all ranks over their slices. Returns whole parameters, flat."""
    ranks = [Rank(make_optimizer, nranks, rank, make()) for rank in range(nranks)]
    for step in range(STEPS):
        for rank in ranks:
            rank.put(make_gradients(rank.model, step))
            if rank.updates.clips_by_norm:
                rank.updates.clip()
            rank.apply()
            if change is not None:
                change(rank.model, rank.inner, step)
    return together(ranks)


def assert_as_plain(
    make_optimizer: MakeOptimizer,
    nranks: int,
    *,
    change: Change | None = None,
    tolerance: float = 0.0,
    make: Callable[[], nn.Layer] = make_model,
) -> None:
    """That slices of all ranks end where whole parameters do: bitwise, or within ``tolerance``."""
    found = sharded_steps(make_optimizer, nranks, change=change, make=make)
    for param in plain_steps(make_optimizer, STEPS, make(), change=change).parameters():
        expected = param.numpy().reshape(-1)
        if tolerance:
            np.testing.assert_allclose(found[param.name], expected, rtol=tolerance, atol=tolerance, err_msg=param.name)
        else:
            np.testing.assert_array_equal(found[param.name], expected, err_msg=param.name)
