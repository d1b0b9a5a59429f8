"""Sizes of the model that the benchmarks train, and the batches it sees, whatever framework trains it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Shape(NamedTuple):
    """Sizes of the model and of one rank's batch."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    context: int = 128
    vocabulary: int = 1024
    batch: int = 4


def draw_codes(shape: Shape, rank: int, count: int = 4) -> Any:
    """One rank's batches, int64 [count, batch, context + 1]: random, and the same in every run."""
    return np.random.default_rng([7, rank]).integers(0, shape.vocabulary, [count, shape.batch, shape.context + 1])
