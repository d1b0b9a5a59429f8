"""Decisions that need every rank's shard: the norms that clipping divides by.

Each rank sums the squares of what it holds, the sums of the shard group come together in one small gather, and every
rank adds them up and scales its own part. Formulas are those of paddle.nn.ClipGradByGlobalNorm and ClipGradByNorm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import paddle
from paddle import nn

from .arena import GradientArena
from .comm import Communicator, current_device
from .timeline import Timeline


class GradientPart(NamedTuple):
    """The part of one parameter's gradient that this rank holds; ``gradient`` is a slice of the arena."""

    param_name: str
    gradient: paddle.Tensor
    need_clip: bool


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


def norm_domains(clip: nn.clip.ClipGradBase | None, parts: Sequence[Sequence[GradientPart]]) -> list[NormDomain]:
    """The domains of one clip over parameters, given this rank's parts of each of them (none where it has none)."""
    if isinstance(clip, nn.ClipGradByGlobalNorm):
        members = [part for of_param in parts for part in of_param if part.need_clip]
        return [NormDomain(float(clip.clip_norm), members, bool(clip.auto_skip_clip))]
    if isinstance(clip, nn.ClipGradByNorm):
        clipped = [[part for part in of_param if part.need_clip] for of_param in parts]
        return [NormDomain(float(clip.clip_norm), members, True) for members in clipped]
    return []


class NormClipper:
    """Clips the arena in place by the norms of its domains.

    Args:
        domains: see ``norm_domains``; those of several parameter groups may be joined.
        whole: True where one domain covers every gradient in the arena: then each kernel runs on whole tensors.
    """

    def __init__(
        self,
        domains: Sequence[NormDomain],
        arena: GradientArena,
        comm: Communicator,
        *,
        whole: bool,
        timeline: Timeline,
    ) -> None:
        self._domains = list(domains)
        self._arena = arena
        self._comm = comm
        self._whole = whole
        self._timeline = timeline

    def clip(self) -> None:
        """One small gather, then at most one multiplication of each gradient. All sums must be final."""
        squares = paddle.stack([self._sum_of_squares(domain) for domain in self._domains])
        everyone = paddle.empty([self._comm.nranks * squares.shape[0]], squares.dtype)
        work = self._timeline.watch(self._comm.all_gather(everyone, squares, label="gradient norm"))
        self._timeline.wait(work)
        # Added up here, in the order of ranks: a library may take another order in each replica, and they would part.
        squares = everyone.reshape([self._comm.nranks, -1]).sum(axis=0)
        norms = paddle.sqrt(squares)
        if current_device().has_streams:
            self._scale_on_device(norms)
            return
        for domain, norm in zip(self._domains, norms.tolist(), strict=True):
            if domain.skip_below and norm <= domain.max_norm:
                continue
            factor = _clip_factor(norm, domain.max_norm)
            if factor != 1.0:
                for gradient in self._gradients(domain):
                    gradient.scale_(factor)

    def _scale_on_device(self, norms: paddle.Tensor) -> None:
        """The same products without a look at the norms, for which the host would have to wait for the device.

        What is multiplied by one keeps its bits.
        """
        for index, domain in enumerate(self._domains):
            bound = paddle.full([], domain.max_norm, "float32")
            factor = bound / paddle.maximum(norms[index], bound)
            for gradient in self._gradients(domain):
                gradient.multiply_(factor.astype(gradient.dtype))

    def _gradients(self, domain: NormDomain) -> list[paddle.Tensor]:
        return self._arena.tensors if self._whole else [part.gradient for part in domain.parts]

    def _sum_of_squares(self, domain: NormDomain) -> paddle.Tensor:
        gradients = self._gradients(domain)
        if not gradients:
            return paddle.zeros([], "float32")
        return paddle.stack([_square_sum(gradient) for gradient in gradients]).sum()


def _square_sum(gradient: paddle.Tensor) -> paddle.Tensor:
    return paddle._C_ops.squared_l2_norm(gradient).astype("float32").reshape([])


def _clip_factor(norm: float, max_norm: float) -> float:
    """``max_norm / max(norm, max_norm)`` as float32 arithmetic gives it, which is what Paddle multiplies by."""
    bound = paddle.to_tensor(max_norm, dtype="float32")
    return float(bound / paddle.maximum(paddle.to_tensor(norm, dtype="float32"), bound))
