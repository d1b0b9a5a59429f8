"""``check_nan_inf``: which bucket and which parameter has a gradient that is NaN or infinite."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import paddle

from .arena import GradientArena
from .buffer import FusedCommBuffer
from .errors import StateError
from .numerics import RankSums, count_nonfinite

LOG = logging.getLogger("hp_sharding")
MAX_NAMES = 5
"""Parameters that a message names; it counts the others."""


class Finding(NamedTuple):
    """A parameter, by its structured name, with the elements of its gradient that are not finite.

    ``bucket`` is empty where there are no buckets.
    """

    bucket: str
    param: str
    n_found: int


class NonFiniteCheck:
    """Reports gradients that are not finite, with the same outcome on every rank.

    Args:
        buffers: all buckets.
        arena: holds their gradients, whose sums must be final and averaged when they are looked at.
        names: the structured names of the parameters of each bucket.
        sums: adds up what the ranks count.
        raises: whether what is found is a StateError on all ranks; else it is a line in the log.
        speaks: whether this is the rank that logs.
    """

    def __init__(
        self,
        buffers: Sequence[FusedCommBuffer],
        arena: GradientArena,
        *,
        names: Sequence[Sequence[str]],
        sums: RankSums,
        raises: bool,
        speaks: bool,
    ) -> None:
        self._buffers = list(buffers)
        self._arena = arena
        self._names = names
        self._sums = sums
        self._raises = raises
        self._speaks = speaks and sums.is_first_of_tensor

    def shards(self, buckets: Sequence[int]) -> list[paddle.Tensor]:
        """What is to be counted: this rank's part of the gradients of each bucket."""
        return [self._arena.slice(bucket) for bucket in buckets]

    def judge(self, counts: paddle.Tensor, buckets: Sequence[int]) -> None:
        """Reports what was counted in ``shards(buckets)``. Collective where something was found; all ranks see it.

        Args:
            counts: of the elements that are not finite, over all ranks. The host reads them.
            buckets: the same list on every rank.

        Raises:
            StateError: something was found, and ``raises``.
        """
        found = [bucket for bucket, count in zip(buckets, counts.tolist(), strict=True) if count]
        if not found:
            return
        message = describe(self._find(found))
        if self._raises:
            raise non_finite_error(self._sums.rank, message)
        if self._speaks:
            LOG.warning("%s", not_raised(message))

    def _find(self, buckets: Sequence[int]) -> list[Finding]:
        params = [(self._buffers[bucket].name, name) for bucket in buckets for name in self._names[bucket]]
        own = paddle.concat([self._count(bucket) for bucket in buckets])
        counts = self._sums.over_all(own, label="non-finite gradients").tolist()
        return [Finding(*where, count) for where, count in zip(params, counts, strict=True) if count]

    def _count(self, bucket: int) -> paddle.Tensor:
        """Of each parameter of the bucket, in this rank's shard."""
        buffer, reduced = self._buffers[bucket], self._arena.slice(bucket)
        counts = [paddle.zeros([], "int64") for _ in buffer.params]
        for piece in buffer.slices:
            split = getattr(buffer.params[piece.param], "is_distributed", False)
            if not (split or self._sums.is_first_of_tensor):
                continue  # the tensor-parallel ranks have the same, and it counts once
            counts[piece.param] = count_nonfinite(reduced._slice(piece.start_numel, piece.start_numel + piece.numel))
        return paddle.stack(counts)


def describe(findings: Sequence[Finding]) -> str:
    """The findings in words, at most ``MAX_NAMES`` of them by name."""
    named = [f"'{finding.param}' ({_where(finding)}{finding.n_found})" for finding in findings[:MAX_NAMES]]
    more = f" and {len(findings) - MAX_NAMES} other parameters" if len(findings) > MAX_NAMES else ""
    return f"gradients with elements that are NaN or infinite: {', '.join(named)}{more}"


def _where(finding: Finding) -> str:
    return f"bucket '{finding.bucket}', " if finding.bucket else ""


def non_finite_error(rank: int, message: str) -> StateError:
    """What ``check_nan_inf="raise"`` raises."""
    return StateError(
        f"rank {rank}: {message}. No parameter has changed. Call optimizer.clear_grad() on every rank and skip this "
        "batch, or look for what overflowed in it"
    )


def not_raised(message: str) -> str:
    """What ``check_nan_inf="warn"`` writes into the log."""
    return f"{message}; check_nan_inf='raise' would end such a step"
