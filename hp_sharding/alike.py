"""What must be the same on all ranks that wrap a model, compared in the user's own terms before a tensor travels.

Ranks whose settings differ would launch different collectives, which is found as soon as they do; or the same ones,
and train on numbers that nobody has asked for: a shard is updated on one rank alone, with that rank's learning rate.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase
from paddle.nn.clip import GradientClipBase
from paddle.optimizer.lr import LRScheduler
from paddle.regularizer import WeightDecayRegularizer

from .assembly import control_lanes
from .comm import Communicator, current_device
from .config import ShardingConfig
from .errors import ConfigError
from .precision import dtype_name, with_master_grad
from .timeline.meeting import Meeting, Way
from .updates import ELEMENTWISE, optimizer_params

_EACH_RANKS_OWN = ("timeline", "timeout_s")
"""Settings that may differ: what a rank records, and how long it waits, changes neither numbers nor collectives."""
_ELSEWHERE = ("parameters", "learning_rate", "weight_decay", "grad_clip", "name")
"""Arguments of optimizers that are looked at apart, or are a rank's own affair."""
_ATTRIBUTES = {"batch_num": "_n"}
"""Where an optimizer keeps an argument under a name that is not made of the argument's."""

_OF_ALL = ("base_lr", "last_lr", "last_epoch", "clip_norm", "auto_skip_clip", "min", "max", "_coeff")
"""Attributes of schedulers, clips and regularizers that subclasses have as well. Others may be a rank's own affair."""


class About(NamedTuple):
    """What one rank says of itself: name of a thing -> what it is, in words.

    Attributes:
        settings: of the run as a whole.
        model: of this model, which ranks that split its layers between them have in different parts.
    """

    settings: dict[str, str]
    model: dict[str, str]


def about_model(model: nn.Layer, config: ShardingConfig) -> About:
    """What there is to compare before there is an optimizer."""
    settings = {"the version of hp_sharding": _version(), "the version of Paddle": paddle.__version__}
    config = with_master_grad(model, config)
    for field in dataclasses.fields(config):
        if field.name not in _EACH_RANKS_OWN:
            settings[field.name] = _text(getattr(config, field.name))
    tensors = {"the model": type(model).__name__}
    for number, (name, param) in enumerate(model.named_parameters()):
        tensors[f"parameter {number}"] = f"{name!r} {_shape(param)}{_traits(param)}"
    for number, (name, buffer) in enumerate(model.named_buffers()):
        if buffer is not None and buffer._is_initialized():
            tensors[f"buffer {number}"] = f"{name!r} {_shape(buffer)}"
    return About(settings, tensors)


def about_training(model: nn.Layer, optimizer: paddle.optimizer.Optimizer, config: ShardingConfig) -> About:
    """The same, and what there is to compare of the optimizer."""
    about = about_model(model, config)
    names = {id(param): name for name, param in model.named_parameters()}
    settings = {"the optimizer": type(optimizer).__name__}
    settings |= {f"{name} of the optimizer": _text(value) for name, value in _arguments(optimizer)}
    for number, group in enumerate(group for group in optimizer._param_groups or () if isinstance(group, dict)):
        plain = {key: _text(value) for key, value in sorted(group.items()) if key != "params"}
        settings[f"parameter group {number}"] = f"{len(group['params'])} parameters with {plain}"
    held = {
        f"parameter {number} of the optimizer": repr(names[id(param)])
        for number, param in enumerate(optimizer_params(optimizer))
    }
    return About({**about.settings, **settings}, {**about.model, **held})


def check_alike(about: About, lanes: Mapping[str, Communicator]) -> None:
    """Compares what all ranks say of themselves. Collective over all lanes.

    Args:
        about: this rank's.
        lanes: see ``sharding.build``. Where something differs they are closed.

    Raises:
        ConfigError: the first difference, and who has it; on all ranks that were compared.
    """
    gather = lanes["gather"]
    me = gather.ranks[gather.rank]
    try:
        _compare({**about.settings, **about.model}, [Way(lane) for lane in control_lanes(lanes)], me=me)
        if "tensor" in lanes:
            way = Way(lanes["tensor"], on_host=not current_device().has_streams)
            _compare(about.settings, [way], me=me)
    except ConfigError:
        for lane in lanes.values():
            lane.close()
        raise


def _compare(mine: Mapping[str, str], ways: Sequence[Way], *, me: int) -> None:
    meeting = Meeting(ways)
    digest = hashlib.blake2b(json.dumps(mine, sort_keys=True).encode(), digest_size=16).digest()
    if len(set(meeting.gather(digest))) == 1:
        return
    everyone: dict[int, dict[str, str]] = dict(map(json.loads, meeting.gather(json.dumps([me, mine]).encode())))
    peer = min(rank for rank, theirs in everyone.items() if theirs != mine)
    _raise_difference(me, mine, peer, everyone[peer])


def _raise_difference(me: int, mine: Mapping[str, str], peer: int, theirs: Mapping[str, str]) -> NoReturn:
    what = next(what for what in (*mine, *theirs) if mine.get(what) != theirs.get(what))
    raise ConfigError(
        f"rank {me}: the ranks do not wrap the same: {what} is {mine.get(what, 'not there')} on rank {me}, "
        f"{theirs.get(what, 'not there')} on rank {peer}. Build the same model, with the same optimizer and the same "
        "settings, on every rank"
    )


def _version() -> str:
    from . import __version__

    return __version__


def _shape(tensor: paddle.Tensor) -> str:
    return f"of shape {list(tensor.shape)}, {dtype_name(tensor)}"


def _traits(param: EagerParamBase) -> str:
    """What has been set on the parameter itself."""
    rate = (getattr(param, "optimize_attr", None) or {}).get("learning_rate", 1.0)
    decay = getattr(param, "regularizer", None)
    traits = [
        "frozen (stop_gradient)" if param.stop_gradient else "",
        f"learning rate times {_text(rate)}" if rate != 1.0 else "",
        f"regularizer {_text(decay)}" if decay is not None else "",
        "not clipped (need_clip)" if getattr(param, "need_clip", True) is False else "",
        "split (is_distributed)" if getattr(param, "is_distributed", False) else "",
    ]
    return "".join(f", {trait}" for trait in traits if trait)


def _arguments(optimizer: paddle.optimizer.Optimizer) -> Iterator[tuple[str, Any]]:
    """What the optimizer was made with, under the names of Paddle's constructor."""
    yield "learning_rate", optimizer._learning_rate
    decay = optimizer.regularization
    yield "weight_decay", getattr(optimizer, "_weight_decay", None) if decay is None else decay
    yield "grad_clip", optimizer._grad_clip
    kind = next(kind for kind in type(optimizer).__mro__ if kind.__name__ in ELEMENTWISE)
    held = vars(optimizer)
    for name in inspect.signature(kind).parameters:
        if name not in _ELSEWHERE:
            yield name, held.get(_ATTRIBUTES.get(name, f"_{name}"), held.get(name))


def _text(value: Any) -> str:
    """A setting in words that are the same wherever the setting is."""
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, numbers.Number):
        return repr(value.item() if hasattr(value, "item") else value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_text(key)}: {_text(item)}' for key, item in value.items()))}}}"
    if isinstance(value, type):
        return value.__name__
    kind = type(value).__name__
    if isinstance(value, (LRScheduler, GradientClipBase, WeightDecayRegularizer)):
        return f"{kind}({', '.join(f'{name}={_text(item)}' for name, item in _plain_attributes(value))})"
    return f"a {kind}"


def _plain_attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What such an object is set by. Schedulers of Paddle's differ in it; of a user's only what all of them have."""
    is_open = isinstance(value, LRScheduler) and type(value).__module__.startswith("paddle.")
    for name, item in sorted(vars(value).items()):
        if name in _OF_ALL or (is_open and name not in ("verbose", "_var_name")):
            yield name.lstrip("_"), item
