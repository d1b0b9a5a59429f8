"""What a script may ask of the reduced gradients, and do to them, between ``backward()`` and ``step()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle

from .arena import GradientArena
from .buffer import FusedCommBuffer
from .comm import cast_into
from .errors import ConfigError, StateError
from .nonfinite import NonFiniteCheck
from .numerics import scale_by_norm
from .precision import dtype_name
from .reduction import Reducer
from .scaling import stand_ins
from .updates import InnerUpdates


class LocalGrad(NamedTuple):
    """The part of one parameter's gradient that this rank has, and updates the parameter from.

    Attributes:
        name: structured name, as in ``model.state_dict()``.
        param: the whole parameter.
        gradient: flat, reduced and averaged, without a copy: what is written to it counts in ``step()``.
        start_numel: where it begins in the flattened parameter, in elements.
    """

    name: str
    param: paddle.Tensor
    gradient: paddle.Tensor
    start_numel: int


class ReducedGradients:
    """The gradients in the arena, as the user sees them.

    Whatever edits them in place goes through here, so that no later reduction divides them again or puts back what was
    there.

    Args:
        buffers: all buckets.
        reducer: fills the arena.
        arena: holds them.
        updates: computes their norms.
        names: structured names of the parameters of each bucket.
        check: looks at them before they are clipped; None where nobody asked for it.

    Attributes:
        names: see above.
    """

    def __init__(
        self,
        buffers: Sequence[FusedCommBuffer],
        reducer: Reducer,
        arena: GradientArena,
        *,
        updates: InnerUpdates,
        names: Sequence[Sequence[str]],
        check: NonFiniteCheck | None,
    ) -> None:
        self.names = names
        self._buffers = list(buffers)
        self._reducer = reducer
        self._arena = arena
        self._updates = updates
        self._check = check
        self._checked_round = -1
        self._verdict: paddle.Tensor | None = None

    def settle(self) -> bool:
        """Launches what has not been reduced and reads what the ranks agreed on; see ``Reducer.settle``."""
        self._reducer.reduce_leftovers()
        return self._reducer.settle()

    def finish(self) -> None:
        """Returns once all sums are final and divided."""
        self._arena.zero_unsummed()
        for bucket in range(len(self._buffers)):
            self._reducer.wait(bucket)
        self._arena.average(range(len(self._buffers)))

    def clip_for_step(self) -> None:
        """Clips by the norms that the optimizer was given, and checks, where that was asked for. Collective."""
        check = None if self._checked_round == self._reducer.round else self._check
        if check is not None or self._updates.clips_by_norm:
            self.finish()
            self._updates.clip(check)

    def end_step(self) -> None:
        """The gradients have been used, or forgotten: what was said of them counts no longer."""
        self._checked_round = -1
        self._verdict = None

    def norm(self) -> paddle.Tensor:
        """See ``ShardedOptimizer.grad_norm``; a tensor without axes."""
        self._collect()
        return self._updates.norm()

    def clip(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> paddle.Tensor:
        """See ``ShardedOptimizer.clip_grad_norm``."""
        check_norm_type(norm_type)
        self._collect()
        # What a scaler has found is the scaler's affair: it skips the step and lowers the scale.
        scaled_badly = self._check is not None and self._verdict is not None and bool(self._verdict)
        norm = self._updates.norm(None if scaled_badly else self._check)
        self._checked_round = self._reducer.round
        if error_if_nonfinite:
            check_finite_norm(norm, f"rank {self._reducer.rank}: ")
        scale_by_norm(self._arena.tensors, norm, float(max_norm))
        self._arena.take_all_values()
        return norm

    def full(self, param: paddle.Tensor) -> paddle.Tensor | None:
        """See ``ShardedOptimizer.full_grad``."""
        buffer, index = self._find(param)
        bucket = buffer.layout.number
        self.settle()
        if not self._reducer.used[bucket][index]:
            return None
        shard = self._finish_bucket(bucket)
        full = paddle.empty([buffer.layout.numel], shard.dtype)
        buffer.place.gather.all_gather(full, shard, label=f"{buffer.name}, full_grad").wait()
        slot = buffer.layout.slots[index]
        return full._slice(slot.offset_numel, slot.end_numel).clone().reshape(param.shape)

    def set_full(self, param: paddle.Tensor, value: Any) -> None:
        """See ``ShardedOptimizer.set_full_grad``."""
        buffer, index = self._find(param)
        given = check_gradient(param, value).flatten()
        bucket = buffer.layout.number
        self.settle()
        shard = self._finish_bucket(bucket)
        self._arena.take_values(bucket)
        for piece in buffer.layout.pieces(buffer.place.rank):
            if piece.slot == index:
                own = given._slice(piece.param_offset_numel, piece.param_offset_numel + piece.numel)
                cast_into(shard._slice(piece.shard_offset_numel, piece.shard_offset_numel + piece.numel), own)
        self._reducer.used[bucket][index] = True
        self._checked_round = -1

    def local(self) -> list[LocalGrad]:
        """See ``ShardedOptimizer.local_grads``."""
        self._collect()
        self._checked_round = -1
        for bucket, used in enumerate(self._reducer.used):
            if any(used):
                self._arena.take_values(bucket)
        return [grad for buffer in self._buffers for grad in self._local_of(buffer)]

    def for_scaler(self) -> list[paddle.Tensor]:
        """What a loss scaler divides; see ``scaling.stand_ins``. Collective."""
        self._collect()
        self._arena.take_all_values()
        given = stand_ins(self._arena.tensors, self._updates.sums)
        self._verdict = given.is_infinite
        return given.params

    def skips_step(self, inner: paddle.optimizer.Optimizer) -> bool:
        """Whether a loss scaler has found gradients that are not finite, so that nothing is to be updated.

        A scaler that serves several optimizers keeps one answer for all of them, that of the last one it has divided;
        the gradients of this one count as well.
        """
        found = inner._get_auxiliary_var("found_inf")
        if isinstance(found, paddle.Tensor) and self._verdict is not None:
            skips = bool(found.astype("bool") | self._verdict)  # together, so that the host waits once
        else:
            # A bool is of an earlier step: what a scaler has found since is a tensor or a number.
            is_new = found is not None and not isinstance(found, bool)
            skips = (is_new and bool(found)) or (self._verdict is not None and bool(self._verdict))
        if found is not None:
            inner._set_auxiliary_var("found_inf", skips)
        return skips

    def _collect(self) -> None:
        self.settle()
        self.finish()
        for bucket in range(len(self._buffers)):
            self._updates.is_due(bucket, self._reducer.used)  # one that has thawed takes part from now on

    def _finish_bucket(self, bucket: int) -> paddle.Tensor:
        self._arena.zero_unsummed()
        self._reducer.wait(bucket)
        self._arena.average([bucket])
        return self._arena.slice(bucket)

    def _local_of(self, buffer: FusedCommBuffer) -> list[LocalGrad]:
        bucket = buffer.layout.number
        used = self._reducer.used[bucket]
        shard = self._arena.slice(bucket) if any(used) else None
        found = []
        for piece in buffer.layout.pieces(buffer.place.rank):
            if used[piece.slot] and shard is not None:
                gradient = shard._slice(piece.shard_offset_numel, piece.shard_offset_numel + piece.numel)
                name, param = self.names[bucket][piece.slot], buffer.params[piece.slot]
                found.append(LocalGrad(name, param, gradient, piece.param_offset_numel))
        return found

    def _find(self, param: paddle.Tensor) -> tuple[FusedCommBuffer, int]:
        for buffer in self._buffers:
            for index, candidate in enumerate(buffer.params):
                if candidate is param:
                    return buffer, index
        raise ConfigError(f"parameter '{param.name}' is not one that this optimizer updates")


def check_norm_type(norm_type: float) -> None:
    """Raises ConfigError for any norm but the Euclidean one."""
    if float(norm_type) != 2.0:
        raise ConfigError(
            f"clip_grad_norm: norm_type={norm_type!r} is not supported; use 2.0. For bounds on single elements edit "
            "optimizer.local_grads() in place"
        )


def check_finite_norm(norm: paddle.Tensor, prefix: str = "") -> None:
    """Raises StateError where the norm is NaN or infinite. The host reads it."""
    if not bool(paddle.isfinite(norm)):
        raise StateError(
            f"{prefix}clip_grad_norm: the norm of the gradients is {float(norm)}, so they cannot be clipped. Call "
            "optimizer.clear_grad() on every rank and skip this batch, or leave error_if_nonfinite out"
        )


def check_gradient(param: paddle.Tensor, value: Any) -> paddle.Tensor:
    """``value`` as a tensor without history. Raises ConfigError where it cannot be a gradient of ``param``."""
    given = value.detach() if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)
    if list(given.shape) != list(param.shape) or not given.is_floating_point():
        raise ConfigError(
            f"set_full_grad: parameter '{param.name}' needs a floating-point gradient of shape {list(param.shape)}, "
            f"found {dtype_name(given)} of shape {list(given.shape)}"
        )
    return given
