"""The user's optimizer, run over slices of parameters: bucket by bucket, group by group."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase
from paddle.regularizer import L1Decay, L2Decay

from .arena import GradientArena
from .buffer import FusedCommBuffer
from .comm import Communicator
from .errors import ConfigError, LayoutError
from .fusing import Part, are_alike, fused
from .nonfinite import NonFiniteCheck
from .numerics import GradientPart, NormClipper, RankSums, measure, norm_domains, whole_parts
from .timeline import Timeline

ELEMENTWISE = (
    "SGD", "Momentum", "Adam", "AdamW", "Adagrad", "RMSProp", "Adamax", "Adadelta", "NAdam", "RAdam", "Rprop", "ASGD",
)  # fmt: skip
"""Paddle's optimizers that update each element by itself."""
_NOT_ELEMENTWISE = {
    "Lamb": "scales each update by the norms of the whole parameter and its update",
    "LBFGS": "uses inner products over all parameters",
    "LarsMomentum": "scales each update by the norms of the whole parameter and gradient",
}
_NORM_CLIPS = (nn.ClipGradByGlobalNorm, nn.ClipGradByNorm)


def check_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer whose update cannot be sharded by element.

    Raises:
        ConfigError: not a Paddle optimizer, one that is not elementwise, or an option that sharding cannot honour.
    """
    if not isinstance(optimizer, paddle.optimizer.Optimizer):
        raise ConfigError(f"expected a paddle.optimizer.Optimizer, got {type(optimizer).__name__}")
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    for kind in kinds:
        if kind in _NOT_ELEMENTWISE:
            raise ConfigError(
                f"{kind} cannot be sharded by element: it {_NOT_ELEMENTWISE[kind]}. Use one of {', '.join(ELEMENTWISE)}"
            )
    if not set(kinds) & set(ELEMENTWISE):
        raise ConfigError(
            f"{kinds[0]} is not known to update element by element, so its state cannot be sharded safely. Use one of "
            f"{', '.join(ELEMENTWISE)} or a subclass of it"
        )
    if optimizer._use_multi_tensor:
        raise ConfigError(f"{kinds[0]}(use_multi_tensor=True): not supported with sharding; leave it False")
    params = optimizer_params(optimizer)
    count = Counter(map(id, params))
    twice = next((param.name for param in params if count[id(param)] > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{kinds[0]} holds parameter '{twice}' more than once, so plain Paddle would update it as often in each "
            "step. Give it each parameter once; model.parameters() holds tied ones once"
        )
    for clip in _clips(optimizer):
        _check_clip(clip)
    _check_regularizer(optimizer.regularization, "weight_decay")
    for param in params:
        _check_regularizer(getattr(param, "regularizer", None), f"parameter '{param.name}'")


def check_fresh(optimizer: paddle.optimizer.Optimizer) -> None:
    """Refuses an optimizer that has state of whole parameters, which slices cannot go on from.

    Raises:
        ConfigError: it has made a step or loaded a state.
    """
    if any(optimizer._accumulators.values()) or optimizer._accumulators_holder:
        raise ConfigError(
            f"{type(optimizer).__name__} already has state of whole parameters, from a step or a loaded state_dict, "
            "which cannot be split over ranks. Wrap a new optimizer, before its first step; load a state that was "
            "saved from the wrapped optimizer into the wrapped one"
        )


def _check_clip(clip: Any) -> None:
    """Refuses what is not one of Paddle's own, or a subclass that clips as that one does."""
    kinds = (*_NORM_CLIPS, nn.ClipGradByValue)
    known = any(isinstance(clip, kind) and type(clip)._dygraph_clip is kind._dygraph_clip for kind in kinds)
    if clip is not None and not known:
        raise ConfigError(
            f"grad_clip {type(clip).__name__}: only ClipGradByGlobalNorm, ClipGradByNorm and ClipGradByValue are "
            "known to work on shards"
        )


def _check_regularizer(regularizer: Any, owner: str) -> None:
    """Refuses what is not one of Paddle's own, or a subclass that computes as that one does."""
    known = any(type(regularizer).__call__ is kind.__call__ for kind in (L1Decay, L2Decay))
    # AdamW takes a number from each group, and the others make an L2Decay of it.
    if regularizer is not None and not isinstance(regularizer, (int, float)) and not known:
        raise ConfigError(
            f"{owner}, regularizer {type(regularizer).__name__}: only L1Decay and L2Decay are known to work element "
            "by element"
        )


def optimizer_params(optimizer: paddle.optimizer.Optimizer) -> list[EagerParamBase]:
    """All parameters of the optimizer, over all groups, in order."""
    return [param for group in _groups(optimizer) for param in group["params"]]


def _groups(optimizer: paddle.optimizer.Optimizer) -> list[dict[str, Any]]:
    groups = optimizer._param_groups
    return groups if groups and isinstance(groups[0], dict) else [{"params": groups}]


def _clips(optimizer: paddle.optimizer.Optimizer) -> list[Any]:
    return [group.get("grad_clip", optimizer._grad_clip) for group in _groups(optimizer)]


class InnerUpdates:
    """Applies the inner optimizer to this rank's slices."""

    def __init__(
        self,
        inner: paddle.optimizer.Optimizer,
        buffers: Sequence[FusedCommBuffer],
        arena: GradientArena,
        *,
        comm: Communicator,
        timeline: Timeline,
        tensor: Communicator | None = None,
    ) -> None:
        self._inner = inner
        self._buffers = list(buffers)
        self._arena = arena
        self.sums = RankSums(comm, tensor, timeline)
        self._groups = _groups(inner)
        self._grouped = self._groups is inner._param_groups
        self._group_of = {id(param): number for number, group in enumerate(self._groups) for param in group["params"]}
        self._parts: dict[int, list[Part]] = {}
        self._fused: dict[int, Part] = {}
        self._clipper: NormClipper | None = None
        self._clip_settings: Any = None
        self._known_clips = _clips(inner)
        self._add_parts([buffer.layout.number for buffer in buffers if not buffer.layout.frozen])
        inner._add_param_group, inner.step, inner.minimize = _refuse_group, _refuse_step, _refuse_step
        ratio = getattr(inner, "_lr_ratio", None)
        if ratio is not None and not isinstance(ratio, _RatioOfWhole):
            inner._lr_ratio = _RatioOfWhole(ratio, optimizer_params(inner))

    @property
    def clips_by_norm(self) -> bool:
        """Whether ``clip`` has anything to do; the same on every rank.

        Raises:
            ConfigError: the optimizer was given a clip that is not known to work on shards.
        """
        clips = _clips(self._inner)
        if clips != self._known_clips:
            for clip in clips:
                _check_clip(clip)
            self._known_clips = clips
        return any(isinstance(clip, _NORM_CLIPS) for clip in clips)

    def clip(self, check: NonFiniteCheck | None = None) -> None:
        """Clips all gradients in the arena by the norms asked for. All sums must be final and averaged.

        Collective where ``clips_by_norm``, or with a ``check``, which looks at the gradients before they are clipped.

        Raises:
            StateError: what the check found. Nothing has been clipped.
        """
        settings = self._find_clip_settings()
        if settings != self._clip_settings:
            self._clip_settings, self._clipper = settings, self._make_clipper()
        members = self._clipper.members if self._clipper is not None else []
        if members or (check is not None and self._parts):
            norms = self._measure(members, check)
            if self._clipper is not None:
                self._clipper.clip(norms)
                self._arena.take_all_values()

    def norm(self, check: NonFiniteCheck | None = None) -> paddle.Tensor:
        """The norm of all gradients in the arena together, whatever is to be clipped: a tensor without axes.

        Collective. All sums must be final and averaged.

        Raises:
            StateError: what the check found.
        """
        parts = self._gradient_parts()
        whole = self._holds_all() and not any(part.is_split for part in parts)
        return self._measure([whole_parts(self._arena) if whole else parts], check)[0]

    def _measure(self, domains: Sequence[Sequence[GradientPart]], check: NonFiniteCheck | None) -> paddle.Tensor:
        buckets = sorted(self._parts)
        counted = check.shards(buckets) if check is not None else []
        measured = measure(domains, counted, self.sums, dtype=self._sum_dtype())
        if check is not None:
            check.judge(measured.counts, buckets)
        return measured.norms

    def is_due(self, bucket: int, used: Sequence[Sequence[bool]]) -> bool:
        """Whether any rank updates a parameter of the bucket: the same answer on every rank."""
        due = False
        for flag, param in zip(used[bucket], self._buffers[bucket].params, strict=True):
            if flag and not param.stop_gradient:
                due = True
                break
        if due and bucket not in self._parts:
            self._buffers[bucket].thaw()
            self._add_parts([bucket])  # frozen when wrapped, and thawed since
        return due

    def apply(self, buckets: Sequence[int], used: Sequence[Sequence[bool]]) -> None:
        """Updates the buckets' shards. Parameters that are frozen or never had a gradient are skipped, as by Paddle."""
        by_group: dict[int, list[tuple[EagerParamBase, paddle.Tensor]]] = defaultdict(list)
        for bucket in buckets:
            whole = self._fused.get(bucket)
            if whole is not None and are_alike(self._parts[bucket], used[bucket]):
                _follow(whole)
                by_group[whole.group].append((whole.slice, whole.gradient))
                continue
            for part in self._parts[bucket]:
                if used[bucket][part.slot] and not part.param.stop_gradient:
                    _follow(part)
                    by_group[part.group].append((part.slice, part.gradient))
        for group in sorted(by_group):
            self._apply_group(group, by_group[group])

    def holds(self, param: EagerParamBase) -> bool:
        """Whether the optimizer has the parameter."""
        return id(param) in self._group_of

    def trains(self, bucket: int) -> bool:
        """Whether the bucket's parameters train, or did when the model was wrapped. The same on every rank."""
        return bucket in self._parts

    def release(self) -> None:
        """Lets go of all slices and gradients. It is of no more use."""
        self._parts.clear()
        self._fused.clear()
        self._clipper = None

    def moment_bytes(self) -> int:
        """Bytes of optimizer state that each element has, as allocated by now (before the first step: 0)."""
        elements = sum(part.slice.size for parts in self._parts.values() for part in parts)
        state_bytes = 0
        for by_param in self._inner._accumulators.values():
            for tensor in by_param.values():
                # Step counters and powers of beta have one element a parameter and do not grow with it.
                state_bytes += tensor.size * tensor.element_size() if tensor.size > 1 else 0
        return round(state_bytes / elements) if elements else 0

    def _apply_group(self, group: int, pairs: list[tuple[EagerParamBase, paddle.Tensor]]) -> None:
        if self._grouped:
            settings = {key: value for key, value in self._groups[group].items() if key != "params"}
            if isinstance(settings.get("grad_clip"), _NORM_CLIPS):
                settings["grad_clip"] = None
            request = defaultdict(list, params=pairs, **settings)
            self._inner._apply_optimize(None, None, request, param_group_idx=group)
            return
        clip = self._inner._grad_clip
        try:
            if isinstance(clip, _NORM_CLIPS):
                self._inner._grad_clip = None  # done on the arena, over all ranks
            self._inner._apply_optimize(None, None, pairs, param_group_idx=0)
        finally:
            self._inner._grad_clip = clip

    def _add_parts(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            buffer = self._buffers[bucket]
            self._parts[bucket] = parts = self._bucket_parts(buffer)
            whole = fused(self._inner, buffer, parts, self._arena.slice(bucket))
            if whole is not None:
                self._fused[bucket] = whole

    def _bucket_parts(self, buffer: FusedCommBuffer) -> list[Part]:
        reduced = self._arena.slice(buffer.layout.number)
        parts = []
        for piece in buffer.slices:
            param = buffer.params[piece.param]
            if id(param) not in self._group_of:
                continue  # sharded to save memory, and updated by nobody
            gradient = reduced._slice(piece.start_numel, piece.start_numel + piece.numel)
            parts.append(Part(piece.param, self._group_of[id(param)], param, piece.tensor, gradient))
        return parts

    def _find_clip_settings(self) -> Any:
        """What the norms depend on, and may change from step to step."""
        bounds = [(clip, getattr(clip, "clip_norm", None)) for clip in _clips(self._inner)]
        params = [param for buffer in self._buffers for param in buffer.params]
        return bounds, [(_needs_clip(param), param.stop_gradient) for param in params], len(self._parts)

    def _make_clipper(self) -> NormClipper | None:
        by_param: dict[int, list[GradientPart]] = defaultdict(list)
        for part in (part for parts in self._parts.values() for part in parts):
            by_param[id(part.param)].append(_gradient_part(part))
        held = [param for bucket in self._parts for param in self._buffers[bucket].params]
        # Paddle leaves out what was frozen since its backward.
        known = {id(param) for param in held if not param.stop_gradient}
        clips = _clips(self._inner)
        domains = []
        for clip, group in zip(clips, self._groups, strict=True):
            domains += norm_domains(clip, [by_param[id(param)] for param in group["params"] if id(param) in known])
        whole = (
            isinstance(clips[0], nn.ClipGradByGlobalNorm)
            and len(clips) == 1
            and self._holds_all()
            and all(_needs_clip(param) and not param.stop_gradient for param in held)
            and not any(_is_split(param) for param in held)
        )
        return NormClipper(domains, self._arena, whole=whole) if domains else None

    def _gradient_parts(self) -> list[GradientPart]:
        return [_gradient_part(part) for parts in self._parts.values() for part in parts]

    def _holds_all(self) -> bool:
        """Whether the optimizer updates every parameter whose gradient lies in the arena."""
        return all(id(param) in self._group_of for bucket in self._parts for param in self._buffers[bucket].params)

    def _sum_dtype(self) -> str:
        return "float64" if any(tensor.dtype == paddle.float64 for tensor in self._arena.tensors) else "float32"


def _gradient_part(part: Part) -> GradientPart:
    param = part.param
    return GradientPart(param.name, part.gradient, _needs_clip(param), _is_split(param))


def _is_split(param: EagerParamBase) -> bool:
    return bool(getattr(param, "is_distributed", False))


def _needs_clip(param: EagerParamBase) -> bool:
    return getattr(param, "need_clip", True) is not False


def _follow(part: Part) -> None:
    """Gives the slice what the user has set on its parameter since: thawed, another rate, decay or clipping flag."""
    if part.slice.stop_gradient:
        part.slice.stop_gradient = False
    theirs, own = part.param.__dict__, part.slice.__dict__
    for name in _FOLLOWED:
        value = theirs.get(name)
        if value is not own.get(name):
            if name == "regularizer":
                _check_regularizer(value, f"parameter '{part.param.name}'")
            setattr(part.slice, name, value)


_FOLLOWED = ("optimize_attr", "regularizer", "need_clip")


def _refuse_group(group: Any) -> None:
    raise LayoutError(
        "a parameter group was added to an optimizer that is sharded: its parameters would not be trained. Add all "
        "groups before fleet.distributed_optimizer or hp_sharding.shard"
    )


def _refuse_step(*_: Any, **__: Any) -> None:
    raise ConfigError(
        "this optimizer is sharded, so a step of its own would leave the parameters as they are or different on each "
        "rank. Call step() of the one that fleet.distributed_optimizer or hp_sharding.shard returned"
    )


class _RatioOfWhole:
    """AdamW's ``lr_ratio`` for slices: the user's function is asked about the parameter that the slice is part of."""

    def __init__(self, ratio: Callable[[EagerParamBase], float], params: Sequence[EagerParamBase]) -> None:
        self._ratio = ratio
        self._params = {param.name: param for param in params}

    def __call__(self, part: EagerParamBase) -> float:
        return self._ratio(self._params[part.name])
