"""What the one-process tests train: models of every kind, with the settings that must not change their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from hp_sharding import full_parameters
from tests.fakes import Rig, values, wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer

SMALL_MB = 0.0005
"""A bucket size below that of most parameters: many buckets."""

SETTINGS: dict[str, dict[str, Any]] = {
    "no overlap": {},
    "gather": {"allgather_overlap": True},
    "reduce": {"reduce_overlap": True},
    "both": {"allgather_overlap": True, "reduce_overlap": True},
    "both, one bucket": {"allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": 25},
    "both, no fusion": {"allgather_overlap": True, "reduce_overlap": True, "comm_fusion": False},
    "reshard": {"reduce_overlap": True, "reshard_after_step": True},
    "reshard, ahead": {"allgather_overlap": True, "reshard_after_step": True, "prefetch_depth": 2},
}
STAGE_3: dict[str, dict[str, Any]] = {
    "no overlap": {},
    "both": SETTINGS["both"],
    "both, no fusion": SETTINGS["both, no fusion"],
    "two ahead": {**SETTINGS["both"], "prefetch_depth": 2},
    "kept": {**SETTINGS["both"], "reshard_after_forward": False},
}
BOTH = SETTINGS["both"]


class Odd(nn.Layer):
    """What a schedule can get wrong: everything used otherwise than held.

    A layer called twice, layers called out of order, a weight used by the model itself, transposed, sliced, through
    einsum and weight_norm; a ParameterList, a LayerDict; frozen, unused, 0-d and empty parameters; a branch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.towers = nn.LayerDict({"left": nn.Linear(6, 6), "right": nn.Linear(6, 6)})
        self.twice = nn.Linear(6, 6)
        self.first = nn.Linear(5, 6)
        self.borrowed = nn.Linear(6, 6)
        self.normed = nn.utils.weight_norm(nn.Linear(6, 6))
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(6, 6)
        for param in self.frozen.parameters():
            param.stop_gradient = True
        self.vectors = nn.ParameterList([self.create_parameter([6]) for _ in range(2)])
        self.scale = self.create_parameter([], default_initializer=nn.initializer.Constant(1.5))
        self.empty = self.create_parameter([0, 3])

    def forward(self, x: paddle.Tensor, branch: str = "left") -> paddle.Tensor:
        x = self.twice(F.gelu(self.first(x)))
        x = self.towers[branch](x) + self.vectors[1]
        x = x @ self.borrowed.weight.T + self.borrowed.bias
        x = paddle.einsum("bi,oi->bo", x, self.borrowed.weight) * self.vectors[0]
        x = x[:, :4] @ self.borrowed.weight[:4] + self.frozen(x)
        x = self.normed(self.twice(x)).unsqueeze(0) * self.borrowed.bias.unsqueeze(0)
        return self.last(x.squeeze(0)) * self.scale


def odd_batch(step: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(step).standard_normal([4, 5], dtype=np.float32))


class Task:
    """A model to be trained: how it is made and what its loss in a step is."""

    def __init__(self, make: Callable[[], nn.Layer], loss: Callable[[nn.Layer, int], paddle.Tensor]) -> None:
        self.make, self.loss = make, loss

    def run(self, step: int, model: nn.Layer, optimizer: Any) -> float:
        """One whole step. Returns the loss."""
        loss = self.loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return float(loss)


def make_odd() -> nn.Layer:
    paddle.seed(7)
    return Odd()


def _named(name: str) -> Task:
    return Task(lambda: make_model(name), lambda model, step: loss_of(model, make_batch(name, step, 0)))


TASKS = {
    **{name: _named(name) for name in ("mlp", "gpt", "gpt_recompute", "gpt_recompute_reentrant", "conv")},
    "odd": Task(make_odd, lambda model, step: model(odd_batch(step)).square().mean()),
    "odd, branches": Task(
        make_odd, lambda model, step: model(odd_batch(step), "left" if step % 3 else "right").square().mean()
    ),
}


def shard_task(model: nn.Layer, optimizer: str = "AdamW", **settings: Any) -> Rig:
    """Wraps a task's model over waiting lanes, in small buckets unless ``settings`` say otherwise."""
    trained = [param for param in model.parameters() if param.size]
    inner = make_optimizer(optimizer, model, parameters=trained)
    return wrap(model, inner, **{"comm_buffer_size_MB": SMALL_MB, **settings})


def plain_optimizer(model: nn.Layer, optimizer: str = "AdamW") -> Any:
    """The same optimizer, unwrapped."""
    return make_optimizer(optimizer, model, parameters=[param for param in model.parameters() if param.size])


def final_values(model: nn.Layer) -> list[np.ndarray[Any, Any]]:
    """All values, wrapped or not."""
    with full_parameters(model):
        return values([param for param in model.parameters() if param.size])


def assert_same(model: nn.Layer, plain: nn.Layer) -> None:
    """Bitwise."""
    names = [name for name, param in plain.named_parameters() if param.size]
    for name, found, expected in zip(names, final_values(model), final_values(plain), strict=True):
        np.testing.assert_array_equal(found, expected, err_msg=name, strict=True)
