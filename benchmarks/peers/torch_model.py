"""The model of ``benchmarks.gpt`` in PyTorch: the same layers, the same names, the same initial weights.

Only processes of PyTorch's own environment import this.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.shape import Shape, draw_codes


class Block(nn.Module):
    """Causal attention and a perceptron of four times the width, each after a layer norm and around a shortcut."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps float32 [batch, time, width] to the same shape."""
        x = x + self._attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """A decoder whose output layer is the token embedding, used a second time."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, codes: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy, float32 [], of ``targets`` given ``codes``, both int64 [batch, time]."""
        x = self.tokens(codes) + self.positions(torch.arange(codes.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def build_model(shape: Shape, weights: Path) -> GPT:
    """The model with the weights that ``benchmarks.peers.weights`` has written."""
    model = GPT(shape)
    with np.load(weights) as stored, torch.no_grad():
        given = {name: torch.from_numpy(stored[name]) for name in stored.files}
        for name, module in model.named_modules():
            # Paddle's layers multiply by the weight, PyTorch's by its transpose.
            if isinstance(module, nn.Linear):
                given[f"{name}.weight"] = given[f"{name}.weight"].T.contiguous()
        model.load_state_dict(given)
    return model


class Batches:
    """As ``benchmarks.gpt.Batches``: the same numbers in the same order."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self._codes = [torch.from_numpy(batch) for batch in draw_codes(shape, rank)]
        self._next = 0

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What goes in and what should come out, each int64 [batch, context]."""
        batch = self._codes[self._next % len(self._codes)]
        self._next += 1
        return batch[:, :-1], batch[:, 1:]
