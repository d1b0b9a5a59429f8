"""``load``: every rank looks whether all fits and is undamaged, all agree, and only then each takes its share.

A rank verifies its part of the bytes and reads what it holds; nobody reads everything. What was verified is then read
again, mostly from memory, so that nothing has to be held twice. Then the ranks gather, as after a step.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple

import numpy.typing as npt
import paddle
from paddle import nn
from paddle.optimizer.lr import LRScheduler

from ..moments import drop_moments, keeps_master, make_moments, set_master
from ..updates import optimizer_params
from . import values
from .blocks import fill
from .folder import open_checkpoint
from .held import Held, HeldTensor, Part
from .matching import Matched, MomentsMatch, TensorMatch, match
from .ranks import Ranks
from .rng import set_rng_state
from .saving import finish_pending
from .schedulers import set_scheduler_state
from .source import TensorSource

LOG = logging.getLogger("hp_sharding")


class Loaded(NamedTuple):
    """What ``load`` has found besides what it has loaded.

    Attributes:
        steps: how many steps the saved run had made.
        extra: what was given to ``save``; None where nothing was.
        rank_extra: this rank's own; None where nothing was, or where the number of ranks is another one.
        rng_restored: whether random numbers go on as they would have: only on as many ranks, and the same device.
        missing: logical names that the model and its optimizer have and the checkpoint has not; with ``strict`` none.
        unexpected: those that the checkpoint has and they have not.
    """

    steps: int
    extra: Any
    rank_extra: Any
    rng_restored: bool
    missing: list[str]
    unexpected: list[str]


def load(
    path: str | PathLike[str], model: nn.Layer, optimizer: Any = None, *, scaler: Any = None, strict: bool = True
) -> Loaded:
    """Loads a checkpoint that ``save`` wrote, on any number of ranks, into any stage, bucket size or precision.

    With the same layout training goes on bit for bit as if it had not stopped. Collective: every rank calls it, after
    wrapping, between ``step()`` and the next forward. Gradients are forgotten. Where it raises, it does so on every
    rank, and nothing has changed.

    Args:
        path: the folder.
        model: wrapped or not; parameters and persistable buffers are overwritten where they lie.
        optimizer: as for ``save``. None loads the model alone and ignores optimizer state.
        scaler: a GradScaler, if one was saved.
        strict: False loads what both sides have. Shapes must fit all the same.

    Returns:
        Extra values, and what was not loaded.

    Raises:
        CheckpointError: it is incomplete, damaged, of a newer version, or does not fit; names file and parameter.
        ConfigError: model and optimizer do not belong together.
        CommError: a rank is gone or late.
    """
    return load_from(lambda: open_checkpoint(path), Held(model, optimizer), scaler=scaler, strict=strict)


def load_from(open_source: Callable[[], TensorSource], held: Held, *, scaler: Any, strict: bool) -> Loaded:
    """``load`` from any source. ``open_source`` may raise a CheckpointError on some ranks only."""
    finish_pending(held.model)
    ranks = held.ranks
    source: TensorSource | None = None
    try:
        with ranks.together():
            source = open_source()
            matched = match(held, source, scaler, strict=strict)
            own = _own_state(source, ranks)
            source.verify(ranks.rank, ranks.n_ranks)
        assert source is not None
        with ranks.together():
            _apply(held, matched, source)
        held.set_orders(source.state.get("orders", {}))
        held.gather()
        return _take_state(held, source, scaler, own=own, matched=matched)
    finally:
        if source is not None:
            source.close()


@paddle.no_grad()
def _apply(held: Held, matched: Matched, source: TensorSource) -> None:
    if held.optimizer is not None:
        held.optimizer.clear_grad(set_to_zero=False)  # gradients at other values
    held.prepare_writes()
    thawed = {match.held.place.buffer for match in matched.tensors if match.held.place and _thaws(match, source)}
    for buffer in thawed:
        buffer.thaw()  # as it was in the run that was saved; its slices are other tensors now
    held_now = {tensor.name: tensor for tensor in held.tensors()} if thawed else {}
    for tensor_match in matched.tensors:
        _load_tensor(held, held_now.get(tensor_match.held.name, tensor_match.held), tensor_match.name, source)
    updated_now = {updated.name: updated for updated in held.updated()} if thawed else {}
    for moments in matched.moments:
        updated = updated_now.get(moments.updated.name, moments.updated)
        for part in updated.parts:
            _load_moments(held, moments._replace(updated=updated), part, source)


def _thaws(match: TensorMatch, source: TensorSource) -> bool:
    """Whether the saved run trained, with a master, what was frozen when it was wrapped here."""
    place, param = match.held.place, match.held.param
    if place is None or param is None or param.stop_gradient:
        return False
    dtypes = place.buffer.layout.dtypes
    return dtypes.shard != dtypes.sum and source.tensors[match.name].dtype == dtypes.sum


def _load_tensor(held: Held, tensor: HeldTensor, name: str, source: TensorSource) -> None:
    for part in tensor.parts:
        _fill(part.tensor, source, name, part.start)
    if tensor.place is None and _keeps_master(held, tensor.param):
        _load_master(held, tensor.param, name, source)


def _keeps_master(held: Held, param: Any) -> bool:
    if param is None or held.inner is None or not keeps_master(held.inner, param):
        return False
    return any(param is theirs for theirs in optimizer_params(held.inner))


def _load_master(held: Held, param: Any, name: str, source: TensorSource) -> None:
    """Of an optimizer that is not sharded and keeps masters itself."""
    master = paddle.empty(param.shape, "float32")
    _fill(master, source, name, 0)
    set_master(held.inner, param, master)
    _fill(param, source, name, 0)


def _load_moments(held: Held, moments: MomentsMatch, part: Part, source: TensorSource) -> None:
    if not moments.names:
        drop_moments(held.inner, part.tensor)
        return
    numel = math.prod(moments.updated.shape)
    for moment in make_moments(held.inner, part.tensor):
        name = moments.names.get(moment.name)
        if name is None:
            continue
        if not moment.per_element:
            _fill(moment.tensor, source, name, 0)
        elif not moment.rows:
            _fill(moment.tensor, source, name, part.start)
        else:
            for row in range(moment.rows):
                _fill(moment.tensor._slice(row, row + 1), source, name, row * numel + part.start)


def _fill(tensor: paddle.Tensor, source: TensorSource, name: str, offset: int) -> None:
    dtype = source.tensors[name].dtype
    fill(tensor, lambda start, stop: source.read(name, offset + start, offset + stop), dtype)


def _own_state(source: TensorSource, ranks: Ranks) -> dict[str, Any]:
    """What this rank had of its own, if there were as many ranks; else nothing."""
    name = f"rank/{ranks.rank}/state"
    if source.state.get("n_ranks") != ranks.n_ranks or name not in source.tensors:
        return {}
    encoded = json.loads(_whole(source, name).tobytes())
    arrays = {key: _whole(source, key) for key in values.tensor_names(encoded)}
    own: dict[str, Any] = values.decode(encoded, arrays)
    return own


def _whole(source: TensorSource, name: str) -> npt.NDArray[Any]:
    return source.read(name, 0, source.tensors[name].numel)


def _take_state(held: Held, source: TensorSource, scaler: Any, *, own: dict[str, Any], matched: Matched) -> Loaded:
    state = source.state
    if held.inner is not None:
        _set_rate(held.inner, state)
        if "used" in state:
            held.set_used(state["used"])
        if hasattr(held.optimizer, "steps"):
            held.optimizer.steps = state.get("steps", 0)
    if scaler is not None and state.get("scaler") is not None:
        scaler.load_state_dict(state["scaler"])
    restored = "rng" in own and set_rng_state(own["rng"])
    if held.ranks.is_first and "rank/0/state" in source.tensors and not restored:
        LOG.info("%s: random states are of another number of ranks, or device, and stay as they are", source.where)
    return Loaded(
        steps=state.get("steps", 0),
        extra=state.get("extra"),
        rank_extra=own.get("rank_extra"),
        rng_restored=restored,
        missing=matched.missing,
        unexpected=matched.unexpected,
    )


def _set_rate(inner: Any, state: Any) -> None:
    rate = inner._learning_rate
    if isinstance(rate, LRScheduler):
        # What it does not say stays: Paddle refuses a state that lacks something.
        set_scheduler_state(rate, {**rate.state_dict(), **(state.get("lr_scheduler") or {})})
    elif state.get("lr") is not None:
        inner.set_lr(state["lr"])
