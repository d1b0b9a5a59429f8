"""Decisions that need every rank's shard: the norms that clipping divides by, and whether a gradient is finite.

Each rank sums up what it holds, the sums of the shard group come together in one small gather, and every rank adds
them up and scales its own part; so each element counts once, however often it is replicated. What tensor parallelism
has split (``is_distributed``) is added up over those ranks as well, the rest is the same on all of them. Formulas are
those of paddle.nn.ClipGradByGlobalNorm, ClipGradByNorm and paddle.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import paddle
from paddle import nn

from .arena import GradientArena
from .comm import Communicator, cast_into, current_device
from .timeline import Timeline

BLOCK_NUMEL = 1 << 20
"""Elements that are cast or looked at together, so that no temporary grows with the model."""


class GradientPart(NamedTuple):
    """The part of one parameter's gradient that this rank holds; ``gradient`` is a slice of the arena."""

    param_name: str
    gradient: paddle.Tensor
    need_clip: bool
    is_split: bool = False
    """Whether other ranks of the tensor-parallel group hold other parts of the parameter."""


class NormDomain(NamedTuple):
    """Gradients whose common norm is held below ``max_norm``; the same list of domains on every rank.

    Attributes:
        max_norm: the bound.
        parts: this rank's parts; may be empty.
        skip_below: multiply only where the norm exceeds the bound (``ClipGradByNorm`` and ``auto_skip_clip``).
    """

    max_norm: float
    parts: list[GradientPart]
    skip_below: bool


class Measured(NamedTuple):
    """Sums over all ranks, the same bits on each of them.

    Attributes:
        norms: of each domain, in the dtype of the sums.
        counts: elements that are not finite in each tensor that was counted, in the same dtype.
    """

    norms: paddle.Tensor
    counts: paddle.Tensor


def norm_domains(clip: nn.clip.ClipGradBase | None, parts: Sequence[Sequence[GradientPart]]) -> list[NormDomain]:
    """The domains of one clip over parameters, given this rank's parts of each of them (none where it has none)."""
    if isinstance(clip, nn.ClipGradByGlobalNorm):
        members = [part for of_param in parts for part in of_param if part.need_clip]
        return [NormDomain(float(clip.clip_norm), members, bool(clip.auto_skip_clip))]
    if isinstance(clip, nn.ClipGradByNorm):
        clipped = [[part for part in of_param if part.need_clip] for of_param in parts]
        return [NormDomain(float(clip.clip_norm), members, True) for members in clipped]
    return []


class RankSums:
    """Adds up a few numbers over the ranks that hold other parts of the gradients. The replicas hold the same.

    Args:
        shard: over the shard group.
        tensor: over the ranks that hold the other parts of tensor-parallel parameters; None without any.
    """

    def __init__(self, shard: Communicator, tensor: Communicator | None, timeline: Timeline) -> None:
        self._shard = shard
        self._tensor = tensor
        self._timeline = timeline

    @property
    def tensor(self) -> Communicator | None:
        """The lane over the tensor-parallel ranks; None where there are none."""
        return self._tensor

    @property
    def has_tensor(self) -> bool:
        """Whether there are tensor-parallel ranks."""
        return self._tensor is not None

    @property
    def is_first_of_tensor(self) -> bool:
        """Whether this is the first of the tensor-parallel ranks, or there are none."""
        return self._tensor is None or self._tensor.rank == 0

    @property
    def rank(self) -> int:
        """Global rank, for errors."""
        return self._shard.ranks[self._shard.rank]

    def over_shards(self, numbers: paddle.Tensor, *, label: str) -> paddle.Tensor:
        """The sum over the shard group of a vector that has one length on all ranks. Collective; a new tensor."""
        return self._over(self._shard, numbers, label)

    def over_tensor(self, numbers: paddle.Tensor, *, label: str) -> paddle.Tensor:
        """The same over the tensor-parallel ranks; ``numbers`` itself where there are none."""
        return numbers if self._tensor is None else self._over(self._tensor, numbers, label)

    def over_all(self, numbers: paddle.Tensor, *, label: str) -> paddle.Tensor:
        """The sum over both."""
        return self.over_tensor(self.over_shards(numbers, label=label), label=label)

    def _over(self, lane: Communicator, numbers: paddle.Tensor, label: str) -> paddle.Tensor:
        everyone = paddle.empty([lane.nranks * numbers.shape[0]], numbers.dtype)
        self._timeline.wait(self._timeline.watch(lane.all_gather(everyone, numbers, label=label)))
        # Added up here, in the order of ranks: a library may take another order in each replica, and they would part.
        return everyone.reshape([lane.nranks, -1]).sum(axis=0)


def measure(
    domains: Sequence[Sequence[GradientPart]], counted: Sequence[paddle.Tensor], sums: RankSums, *, dtype: str
) -> Measured:
    """Norms of the domains, and how many elements of each tensor are not finite, in one gather over the shard group.

    Collective. ``dtype`` is that of the sums, float32 or float64, the same on every rank.
    """
    whole = [sum_of_squares(_gradients(parts, sums, split=False), dtype) for parts in domains]
    split = [sum_of_squares(_gradients(parts, sums, split=True), dtype) for parts in domains if sums.has_tensor]
    counts = [count_nonfinite(tensor).astype(dtype) for tensor in counted]
    label = "gradient norm" if domains else "non-finite gradients"
    numbers = sums.over_shards(paddle.stack([*whole, *split, *counts]), label=label)
    squares, rest = numbers[: len(whole)], numbers[len(whole) :]
    if sums.has_tensor:
        rest = sums.over_tensor(rest, label=label)
        squares = squares + rest[: len(split)]
    return Measured(paddle.sqrt(squares), rest[len(split) :])


def _gradients(parts: Sequence[GradientPart], sums: RankSums, *, split: bool) -> list[paddle.Tensor]:
    """Those of parameters that are split over tensor-parallel ranks, or the others."""
    return [part.gradient for part in parts if (sums.has_tensor and part.is_split) == split]


class NormClipper:
    """Clips gradients in place by the norms of domains.

    Args:
        domains: see ``norm_domains``; those of several parameter groups may be joined.
        arena: what the gradients are slices of.
        whole: True where one domain covers every gradient in the arena: then each kernel runs on whole tensors.
    """

    def __init__(self, domains: Sequence[NormDomain], arena: GradientArena, *, whole: bool) -> None:
        self._domains = list(domains)
        self._arena = arena
        self._whole = whole

    @property
    def members(self) -> list[list[GradientPart]]:
        """What each domain's norm is of, for ``measure``."""
        if self._whole:
            return [whole_parts(self._arena)]
        return [domain.parts for domain in self._domains]

    def clip(self, norms: paddle.Tensor) -> None:
        """At most one multiplication of each gradient. ``norms`` are those of ``members``."""
        if current_device().has_streams:
            self._scale_on_device(norms)
            return
        for index, (domain, norm) in enumerate(zip(self._domains, norms.tolist(), strict=True)):
            if domain.skip_below and norm <= domain.max_norm:
                continue
            factor = float(_clip_factor(norms[index], domain.max_norm))
            if factor != 1.0:
                for gradient in self._gradients(domain):
                    gradient.scale_(factor)

    def _scale_on_device(self, norms: paddle.Tensor) -> None:
        """The same products without a look at the norms, for which the host would have to wait for the device.

        What is multiplied by one keeps its bits.
        """
        for index, domain in enumerate(self._domains):
            factor = _clip_factor(norms[index], domain.max_norm)
            for gradient in self._gradients(domain):
                gradient.multiply_(factor.astype(gradient.dtype))

    def _gradients(self, domain: NormDomain) -> list[paddle.Tensor]:
        return self._arena.tensors if self._whole else [part.gradient for part in domain.parts]


def whole_parts(arena: GradientArena) -> list[GradientPart]:
    """Everything that the arena holds, where nothing of it is split over tensor-parallel ranks."""
    return [GradientPart("", tensor, True) for tensor in arena.tensors]


def scale_by_norm(tensors: Sequence[paddle.Tensor], norm: paddle.Tensor, max_norm: float) -> None:
    """Multiplies in place by ``max_norm / (norm + 1e-6)`` where that is below one, as ``clip_grad_norm_`` does."""
    factor = paddle.clip(max_norm / (norm + 1e-6), max=1.0)
    if current_device().has_streams:
        for tensor in tensors:
            tensor.multiply_(factor.astype(tensor.dtype))
    elif float(factor) != 1.0:
        for tensor in tensors:
            tensor.scale_(float(factor))


def count_nonfinite(tensor: paddle.Tensor) -> paddle.Tensor:
    """How many elements of a flat tensor are NaN or infinite: a tensor without axes. The host does not wait for it."""
    on_host = not current_device().has_streams
    if on_host and math.isfinite(float(_square_sum(tensor))):
        return paddle.zeros([], "int64")  # a sum that is finite has finite terms, and takes an eighth of the time
    counts = [paddle.count_nonzero(paddle.isfinite(block)) for block in _blocks(tensor)]
    return tensor.size - paddle.stack(counts).sum()


def sum_of_squares(gradients: Sequence[paddle.Tensor], dtype: str) -> paddle.Tensor:
    """Sum of the squares of all elements of flat tensors: a tensor without axes of ``dtype``."""
    if not gradients:
        return paddle.zeros([], dtype)
    return paddle.stack([_square_sum(gradient).astype(dtype) for gradient in gradients]).sum()


def _square_sum(gradient: paddle.Tensor) -> paddle.Tensor:
    """Sum of squares of a flat tensor, formed in float32, or float64 for such a tensor: one without axes."""
    if gradient.element_size() >= 4:
        return paddle._C_ops.squared_l2_norm(gradient).reshape([])
    wide = paddle.empty([min(gradient.size, BLOCK_NUMEL)], "float32")
    squares = []
    for block in _blocks(gradient):
        part = wide._slice(0, block.size)
        cast_into(part, block)
        squares.append(paddle._C_ops.squared_l2_norm(part).reshape([]))
    return paddle.stack(squares).sum()


def _blocks(tensor: paddle.Tensor) -> Iterator[paddle.Tensor]:
    for start in range(0, tensor.size, BLOCK_NUMEL):
        yield tensor._slice(start, min(start + BLOCK_NUMEL, tensor.size))


def _clip_factor(norm: paddle.Tensor, max_norm: float) -> paddle.Tensor:
    """``max_norm / max(norm, max_norm)`` in the norm's dtype, which is what Paddle multiplies by."""
    bound = paddle.full([], max_norm, norm.dtype)
    return bound / paddle.maximum(norm, bound)
