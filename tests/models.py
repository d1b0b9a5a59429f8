"""The models that the distributed tests train, and what each rank trains them on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed.fleet.utils import recompute

VOCABULARY = 37
WIDTH = 12
HEADS = 3
LENGTH = 7
SEED = 1234


class Mlp(nn.Layer):
    """Layers in a list, by default of widths that do not divide, and one parameter of the model itself."""

    def __init__(self, widths: tuple[int, ...] = (9, 31, 17, 23, 5)) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(a, b) for a, b in itertools.pairwise(widths)])
        self.gain = self.create_parameter([widths[-1]], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x) * self.gain


class Block(nn.Layer):
    """One layer of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        # Without biases whose gradient is zero but for rounding, which AdamW would magnify.
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias_attr=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH + 1), nn.GELU(), nn.Linear(2 * WIDTH + 1, WIDTH))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).reshape([batch, length, 3, HEADS, WIDTH // HEADS]).transpose([2, 0, 3, 1, 4])
        scores = qkv[0].matmul(qkv[1], transpose_y=True) * (WIDTH // HEADS) ** -0.5
        mask = paddle.triu(paddle.full([length, length], -1e9), diagonal=1)
        mixed = F.softmax(scores + mask).matmul(qkv[2]).transpose([0, 2, 1, 3]).reshape([batch, length, WIDTH])
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Layer):
    """Tied embedding, blocks called out of order and one of them twice, and a position table of the model itself.

    Args:
        recompute_blocks: None, or ``use_reentrant`` of a recompute around three consecutive blocks.
    """

    order = (0, 2, 1, 3, 2)

    def __init__(self, recompute_blocks: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = self.create_parameter([LENGTH, WIDTH])
        self.blocks = nn.LayerList([Block() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.recompute_blocks = recompute_blocks

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.embedding(tokens) + self.positions
        for place, number in enumerate(self.order):
            if self.recompute_blocks is not None and 1 <= place <= 3:
                x = recompute(self.blocks[number], x, use_reentrant=self.recompute_blocks)
            else:
                x = self.blocks[number](x)
        return paddle.matmul(self.norm(x), self.embedding.weight, transpose_y=True)


class ConvNet(nn.Layer):
    """Convolutions with BatchNorm, and so without biases, over images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2D(1, 5, 3, padding=1, bias_attr=False), nn.BatchNorm2D(5), nn.ReLU(), nn.MaxPool2D(2),
            nn.Conv2D(5, 7, 3, padding=1, bias_attr=False), nn.BatchNorm2D(7), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(7 * 16, 10)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.features(x).flatten(1))


class Branching(nn.Layer):
    """The signs of its input choose the layer that runs, or that the first of two runs twice, or that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.branches = nn.LayerList([nn.Linear(16, 16) for _ in range(2)])
        self.last = nn.Linear(16, 8)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        chosen = tuple((x[0, :2] > 0).tolist())
        x = self.first(x)
        for index in {(True, True): [0], (True, False): [1, 0], (False, True): [0, 0], (False, False): []}[chosen]:
            x = x + paddle.tanh(self.branches[index](x))
        return self.last(x)


class Shared(nn.Layer):
    """A layer that runs twice, and one that two lists hold; a weight that two layers hold and the model uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.twice.weight
        self.stages = nn.LayerList([nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)])
        self.again = nn.LayerList([self.stages[0], nn.Linear(8, 8, bias_attr=False)])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.twice(x)
        x = x + self.stages[0](x)
        x = self.twice(paddle.tanh(x))
        x = self.stages[1](x) + self.again[0](x)
        x = self.tied(x) + self.again[1](x)
        return paddle.matmul(x, self.tied.weight, transpose_y=True)


MODELS: dict[str, Any] = {
    "mlp": Mlp,
    "even_mlp": lambda: Mlp((8, 32, 16, 24, 8)),
    "gpt": Gpt,
    "gpt_recompute_reentrant": lambda: Gpt(recompute_blocks=True),
    "gpt_recompute": lambda: Gpt(recompute_blocks=False),
    "conv": ConvNet,
    "branching": Branching,
    "branching_alike": Branching,
    "shared": Shared,
}


def make_model(name: str) -> nn.Layer:
    """A new model of that name, with the same values every time."""
    paddle.seed(SEED)
    return MODELS[name]()


def make_optimizer(name: str, model: nn.Layer, **options: Any) -> Any:
    """SGD, Momentum or AdamW over all parameters of ``model``."""
    kind = getattr(paddle.optimizer, name)
    rate = {"SGD": 0.1, "Momentum": 0.05, "AdamW": 0.01}[name]
    return kind(**{"learning_rate": rate, "parameters": model.parameters(), "weight_decay": 0.01, **options})


def make_batch(name: str, step: int, rank: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """What ``rank`` trains on in ``step``: inputs and targets, other ones for every rank and step.

    The branches that "branching" takes differ from rank to rank, those of "branching_alike" do not.
    """
    generator = np.random.default_rng([SEED, step, rank])
    if name.endswith("mlp"):
        n_in, n_out = (9, 5) if name == "mlp" else (8, 8)
        x = generator.standard_normal([4, n_in], dtype=np.float32)
        return paddle.to_tensor(x), paddle.to_tensor(np.sin(x[:, :n_out] * (1 + rank)))
    if name in ("branching", "branching_alike", "shared"):
        x = generator.standard_normal([4, 8], dtype=np.float32)
        chooser = np.random.default_rng([SEED, step, rank if name == "branching" else 0])
        x[0, :2] = np.abs(x[0, :2]) * chooser.choice([-1, 1], 2)
        return paddle.to_tensor(x), paddle.to_tensor(np.sin(x * (1 + rank)))
    if name.startswith("gpt"):
        # Arithmetic progressions, which a model can learn to continue.
        tokens = generator.integers(0, VOCABULARY, [2, 1]) + generator.integers(1, 3, [2, 1]) * np.arange(LENGTH + 1)
        tokens %= VOCABULARY
        return paddle.to_tensor(tokens[:, :-1]), paddle.to_tensor(tokens[:, 1:])
    images, labels = _digits()
    chosen = generator.integers(0, len(labels), 6)
    return paddle.to_tensor(images[chosen]), paddle.to_tensor(labels[chosen])


def loss_of(model: nn.Layer, batch: tuple[paddle.Tensor, paddle.Tensor]) -> paddle.Tensor:
    """Mean loss of the model on a batch."""
    x, target = batch
    output = model(x)
    return F.mse_loss(output, target) if target.is_floating_point() else F.cross_entropy(output, target)


def loss_on(model: nn.Layer, name: str, step: int) -> Callable[[int], paddle.Tensor]:
    """A function from a rank to the loss of ``model`` on what that rank trains on in ``step``."""
    return lambda rank: loss_of(model, make_batch(name, step, rank))


@functools.cache
def _digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images[:, None] / 16).astype(np.float32), digits.target.astype(np.int64)
