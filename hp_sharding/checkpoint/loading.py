"""``load``: every rank looks whether all fits and is undamaged, all agree, and only then each takes its share.

A rank verifies its part of the bytes and reads what it holds; nobody reads everything. What was verified is then read
again, mostly from memory, so that nothing has to be held twice. Then the ranks gather, as after a step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle
from paddle import nn
from paddle.optimizer.lr import LRScheduler

from ..buffer import FusedCommBuffer
from ..errors import CheckpointError, CommError
from ..moments import drop_moments, keeps_master, make_moments, set_master
from ..updates import optimizer_params
from . import values
from .blocks import fill
from .folder import open_checkpoint
from .held import Held, HeldTensor, Part
from .matching import Matched, MomentsMatch, match
from .ranks import Ranks
from .rng import set_rng_state
from .saving import check_scaler, finish_pending
from .schedulers import scheduler_state, set_scheduler_state
from .source import TensorSource

LOG = logging.getLogger("hp_sharding")
_OPENINGS = 5
_REOPEN_S = 0.2


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
    rank, and nothing has changed, unless the message says that something has: a file that was whole when it was
    verified and cannot be read a moment later.

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
    check_scaler(scaler)
    _settle_pending(held)
    ranks = held.ranks
    with _opened(open_source, ranks) as source:
        with ranks.together():
            matched = match(held, source, scaler, strict=strict)
            own = _own_state(source, ranks)
        with ranks.together(takes_long=True):
            source.verify(ranks.rank, ranks.n_ranks)
        with _half_loaded(source):
            with ranks.together():
                held.prepare_writes()
            if held.take_tuned(source.state.get("tuned")):
                matched = match(held, source, scaler, strict=strict)
            with ranks.together(takes_long=True):
                _apply(held, matched, source)
            held.set_orders(source.state.get("orders", {}))
            held.gather()
            return _take_state(held, source, scaler, own=own, matched=matched)


def _settle_pending(held: Held) -> None:
    """A save that has failed does not keep anybody from going back to an earlier one."""
    try:
        finish_pending(held.model)
    except CommError:
        raise
    except Exception:  # on some rank a MemoryError, say, which on the others is a CheckpointError
        LOG.exception("before loading, the asynchronous save under way failed")


@contextlib.contextmanager
def _opened(open_source: Callable[[], TensorSource], ranks: Ranks) -> Iterator[TensorSource]:
    """The source, which all ranks have opened alike: the parts of different checkpoints must not be mixed.

    A save that replaces it meanwhile may show the new one to some ranks only; so they look again.
    """
    for attempt in range(_OPENINGS):
        source: TensorSource | None = None
        try:
            with ranks.together():
                source = open_source()
            assert source is not None
            first = ranks.text_of(0, f"{source.identity} {source.where}")
            if not ranks.sum_of(np.array([first.partition(" ")[0] != source.identity], np.int32))[0]:
                yield source
                return
            if attempt == _OPENINGS - 1:
                with ranks.together():
                    _check_same(ranks, source, first)
        finally:
            if source is not None:
                source.close()
        time.sleep(_REOPEN_S)


def _check_same(ranks: Ranks, source: TensorSource, first: str) -> None:
    identity, _, where = first.partition(" ")
    if source.identity != identity:
        raise CheckpointError(
            f"rank {ranks.rank}: expected the checkpoint that the first rank opened, at {where}, and found another one "
            f"at {source.where}. Let one rank choose, and tell the others; or another job keeps saving to that folder",
            file=source.where,
        )


@contextlib.contextmanager
def _half_loaded(source: TensorSource) -> Iterator[None]:
    """What fails within has changed something: says so. All ranks fail together, or their lanes are gone."""
    try:
        yield
    except CommError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{error}. Model and optimizer are half loaded from '{source.where}' now: load again before going on",
            file=getattr(error, "file", source.where),
            parameter=getattr(error, "parameter", ""),
        ) from error


@paddle.no_grad()
def _apply(held: Held, matched: Matched, source: TensorSource) -> None:
    thawed = set(_to_thaw(matched, source))
    for buffer in thawed:
        buffer.thaw()  # as it was in the run that was saved; its slices are other tensors now
    held_now = {tensor.name: tensor for tensor in held.tensors()} if thawed else {}
    for tensor_match in matched.tensors:
        _load_tensor(held, held_now.get(tensor_match.held.name, tensor_match.held), tensor_match.name, source)
    for name in matched.unmade:
        _fill(held.make(name, source.tensors[name]), source, name, 0)
    updated_now = {updated.name: updated for updated in held.updated()} if thawed else {}
    for moments in matched.moments:
        updated = updated_now.get(moments.updated.name, moments.updated)
        for part in updated.parts:
            _load_moments(held, moments._replace(updated=updated), part, source)


def _to_thaw(matched: Matched, source: TensorSource) -> Iterator[FusedCommBuffer]:
    """Buckets that were frozen when they were wrapped here, and have a master or moments in the run that was saved."""
    trained = {id(moments.updated.param) for moments in matched.moments if moments.names}
    for found in matched.tensors:
        place, param = found.held.place, found.held.param
        if place is None or param is None or place.buffer.layout.dtypes.shard == place.buffer.layout.dtypes.sum:
            continue
        has_master = source.tensors[found.name].dtype == place.buffer.layout.dtypes.sum and not param.stop_gradient
        if id(param) in trained or has_master:
            yield place.buffer


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
    if not moments.is_complete:
        drop_moments(held.inner, part.tensor)  # rather initial ones than those of another run
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
    encoded = json.loads(_checked(source, name).tobytes())
    arrays = {key: _checked(source, key) for key in values.tensor_names(encoded)}
    own: dict[str, Any] = values.decode(encoded, arrays)
    return own


def _checked(source: TensorSource, name: str) -> npt.NDArray[Any]:
    """All of a tensor, before everything has been verified."""
    source.check(name)
    return source.read(name, 0, source.tensors[name].numel)


def _take_state(held: Held, source: TensorSource, scaler: Any, *, own: dict[str, Any], matched: Matched) -> Loaded:
    state = source.state
    if held.inner is not None:
        _set_rate(held.inner, state)
        if "used" in state:
            held.set_used(state["used"])
        if "steps" in state and hasattr(held.optimizer, "steps"):
            held.optimizer.steps = state["steps"]
    if scaler is not None and state.get("scaler"):
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
        # What is not said stays, since Paddle refuses a state that lacks something; what it does not know is left out.
        own, saved = scheduler_state(rate), state.get("lr_scheduler") or {}
        set_scheduler_state(rate, {**own, **{key: value for key, value in saved.items() if key in own}})
    elif state.get("lr") is not None:
        inner.set_lr(state["lr"])
