"""Models whose parameters exist only while they are used, and the comparison of their training with plain Paddle's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn

from hp_sharding import full_parameters
from hp_sharding.buffer import Status
from tests.fakes import Rig, wrap
from tests.tasks import STAGE_3

SETTINGS = STAGE_3
SIZE = 6


class Block(nn.Layer):
    """Two layers and a parameter of its own, which is used last and so first in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.fc = nn.Linear(SIZE, SIZE)
        self.gain = self.create_parameter([SIZE], default_initializer=nn.initializer.Constant(0.7))

    def forward(self, x: paddle.Tensor) -> Any:
        return x + paddle.tanh(self.fc(self.norm(x))) * self.gain


class Net(nn.Layer):
    """A list of blocks, a parameter of the model's own, and a head."""

    block: type[nn.Layer] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.LayerList([self.block() for _ in range(3)])
        self.shift = self.create_parameter([SIZE], default_initializer=nn.initializer.Constant(0.3))
        self.head = nn.Linear(SIZE, 2)

    def run(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: paddle.Tensor) -> Any:
        return self.head(self.run(x) + self.shift)


def make_x(step: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(step).standard_normal([4, SIZE], dtype=np.float32))


Train = Callable[[Any, Any, int], list[float]]


def run_backward(loss: paddle.Tensor, **options: Any) -> float:
    loss.backward(**options)
    return float(loss)


def assert_alike(make: Callable[[], nn.Layer], train: Train, settings: dict[str, Any], steps: int = 4) -> Rig:
    """Trains plain and in stage 3; ``train(model, optimizer, step)`` returns what must be the same."""
    paddle.seed(1)
    plain = make()
    optimizer = paddle.optimizer.AdamW(0.05, parameters=plain.parameters())
    paddle.seed(1)
    rig = wrap_stage_3(make(), settings)
    for step in range(steps):
        expected = train(plain, optimizer, step)
        finish_step(optimizer)
        assert train(rig.model, rig.optimizer, step) == expected, f"step {step}"
        assert statuses(rig) == {Status.SHARDED}, "after the last backward of a step everything is freed"
        finish_step(rig.optimizer)
    with full_parameters(rig.model):
        for (name, found), value in zip(rig.model.named_parameters(), plain.parameters(), strict=True):
            np.testing.assert_array_equal(found.numpy(), value.numpy(), err_msg=name)
    assert rig.reduce.n_pending == 0
    return rig


def finish_step(optimizer: Any) -> None:
    optimizer.step()
    optimizer.clear_grad()


def wrap_stage_3(model: nn.Layer, settings: dict[str, Any]) -> Rig:
    return wrap(model, paddle.optimizer.AdamW(0.05, parameters=model.parameters()), stage=3, **settings)


def statuses(rig: Rig) -> set[Status]:
    return {buffer.status for buffer in rig.optimizer.buffers}


def gathered(rig: Rig) -> list[str]:
    return [event.label.partition(":")[2] for event in rig.log if event.what == "start" and event.op == "all_gather"]


def train_once(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
    return [run_backward(model(make_x(step)).square().mean())]


def train_siamese(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
    return [run_backward((model(make_x(step)) * model(make_x(step + 50))).mean())]


def train_without_sync(model: Any, optimizer: Any, step: int) -> list[float]:
    losses = []
    for micro in range(3):
        if micro < 2 and hasattr(optimizer, "no_sync"):
            with optimizer.no_sync():
                losses += train_once(model, optimizer, 10 * step + micro)
        else:
            losses += train_once(model, optimizer, 10 * step + micro)
    return losses


def resident(rig: Rig) -> list[str]:
    return [buffer.name.partition(":")[2] for buffer in rig.optimizer.buffers if buffer.full is not None]
