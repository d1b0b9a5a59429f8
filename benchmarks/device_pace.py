"""How fast the stand-in's links have to be for communication to take as long as the compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.contenders import SHARD_RANKS

_FLOAT_BYTES = 4


class Traffic(NamedTuple):
    """What one rank has to send in a step of stage 2.

    Attributes:
        wire_bytes: over its links: gathers, reduce-scatters, and over replicas the all-reduces.
        n_collectives: how many these are, if every bucket is full.
    """

    wire_bytes: float
    n_collectives: int


def parameter_bytes(shape: Mapping[str, int]) -> int:
    """Size of the float32 parameters of ``benchmarks.gpt.GPT``, without any padding.

    Args:
        shape: fields of ``benchmarks.gpt.Shape``. Not the shape itself, which only those have who import Paddle.
    """
    width = shape["width"]
    block = 12 * width * width + 13 * width  # four matrices of the attention's kind, eight of the perceptron's
    return _FLOAT_BYTES * (shape["layers"] * block + (shape["vocabulary"] + shape["context"]) * width + 2 * width)


def traffic(total_bytes: int, *, replicas: int, buffer_mb: float, replicate_mb: float) -> Traffic:
    """What a step of stage 2 sends, for parameters of ``total_bytes`` in buckets of ``buffer_mb``.

    Of n ranks each sends (n-1)/n of the whole in a gather and in a reduce-scatter, and twice that in an all-reduce; a
    replica's part in the all-reduce is the shard of one rank.
    """
    shard_bytes = total_bytes / SHARD_RANKS
    sharding = 2 * _others(SHARD_RANKS) * total_bytes
    n_sharding = 2 * math.ceil(total_bytes / (buffer_mb * 2**20))
    if replicas == 1:
        return Traffic(sharding, n_sharding)
    n_replicating = math.ceil(shard_bytes / (replicate_mb * 2**20))
    return Traffic(sharding + 2 * _others(replicas) * shard_bytes, n_sharding + n_replicating)


def bandwidth_mb_s(sent: Traffic, *, communication_ms: float, latency_ms: float) -> float:
    """The bandwidth, in 10^6 bytes a second, at which ``sent`` takes ``communication_ms`` in all.

    Raises:
        ValueError: the latencies alone take longer.
    """
    wire_ms = communication_ms - sent.n_collectives * latency_ms
    if wire_ms <= 0.0:
        raise ValueError(
            f"{sent.n_collectives} collectives of {latency_ms:g} ms each take longer than {communication_ms:.0f} ms"
        )
    return sent.wire_bytes / (wire_ms * 1e3)


def _others(nranks: int) -> float:
    return (nranks - 1) / nranks
