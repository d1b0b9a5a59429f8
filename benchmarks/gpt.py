"""The model that ``benchmarks.step`` trains: a GPT of 26 million parameters, and batches for it."""

from __future__ import annotations

import math

import paddle
import paddle.nn.functional as F

from benchmarks.shape import Shape, draw_codes

__all__ = ["GPT", "Batches", "Block", "Shape", "build_model", "build_optimizer"]


class Block(paddle.nn.Layer):
    """Causal attention and a perceptron of four times the width, each after a layer norm and around a shortcut."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = paddle.nn.LayerNorm(shape.width)
        self.qkv = paddle.nn.Linear(shape.width, 3 * shape.width)
        self.out = paddle.nn.Linear(shape.width, shape.width)
        self.norm2 = paddle.nn.LayerNorm(shape.width)
        self.up = paddle.nn.Linear(shape.width, 4 * shape.width)
        self.down = paddle.nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        """Maps float32 [batch, time, width] to the same shape; ``mask`` [time, time] is added to the scores."""
        x = x + self._attend(self.norm1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=True))

    def _attend(self, x: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).reshape([batch, length, 3, self.heads, width // self.heads]).transpose([2, 0, 3, 1, 4])
        query, key, value = heads[0], heads[1], heads[2]
        scores = paddle.matmul(query, key, transpose_y=True) * (width // self.heads) ** -0.5
        mixed = paddle.matmul(F.softmax(scores + mask), value)
        return self.out(mixed.transpose([0, 2, 1, 3]).reshape([batch, length, width]))


class GPT(paddle.nn.Layer):
    """A decoder whose output layer is the token embedding, used a second time."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        narrow = paddle.ParamAttr(initializer=paddle.nn.initializer.Normal(0.0, 1 / math.sqrt(shape.width)))
        self.tokens = paddle.nn.Embedding(shape.vocabulary, shape.width, weight_attr=narrow)
        self.positions = paddle.nn.Embedding(shape.context, shape.width, weight_attr=narrow)
        self.blocks = paddle.nn.LayerList([Block(shape) for _ in range(shape.layers)])
        self.norm = paddle.nn.LayerNorm(shape.width)

    def forward(self, codes: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        """The mean cross-entropy, float32 [], of ``targets`` given ``codes``, both int64 [batch, time]."""
        length = codes.shape[1]
        mask = paddle.triu(paddle.full([length, length], -1e9), 1)
        x = self.tokens(codes) + self.positions(paddle.arange(length))
        for block in self.blocks:
            x = block(x, mask)
        logits = paddle.matmul(self.norm(x), self.tokens.weight, transpose_y=True)
        return F.cross_entropy(logits.reshape([-1, logits.shape[-1]]), targets.reshape([-1]))


def build_model(shape: Shape) -> GPT:
    """The model with the same initial weights in every process."""
    paddle.seed(0)
    return GPT(shape)


def build_optimizer(model: paddle.nn.Layer) -> paddle.optimizer.AdamW:
    """AdamW over all parameters of ``model``."""
    return paddle.optimizer.AdamW(learning_rate=3e-4, parameters=model.parameters(), weight_decay=0.01)


class Batches:
    """One rank's batches: few, random, and the same in every run; they come round again and again."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self._codes = [paddle.to_tensor(batch) for batch in draw_codes(shape, rank)]
        self._next = 0

    def draw(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """What goes in and what should come out, each int64 [batch, context]."""
        batch = self._codes[self._next % len(self._codes)]
        self._next += 1
        return batch[:, :-1], batch[:, 1:]
