"""What a model and its optimizer hold on this rank, as parts of logical tensors: no padding, no buckets.

The value of a parameter is its shard, which is the float32 master where precision is mixed: what layers see comes of it
by rounding. What is in no bucket (buffers, running statistics, parameters that the optimizer does not hold) every rank
has whole and alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase

from .. import guard
from ..buffer import FusedCommBuffer, Status
from ..config import SHORT_DTYPES
from ..errors import ConfigError, LayoutError
from ..layout import sorted_by_first
from ..optimizer import ShardedOptimizer
from ..plain import PlainOptimizer
from ..precision import dtype_name
from ..schedule import Schedule, schedule_of
from ..units import is_statistic
from ..updates import ELEMENTWISE, optimizer_params
from .ranks import Ranks
from .source import MODEL, SPLIT_MARK, STORAGE, TensorInfo


class Part(NamedTuple):
    """Elements of a logical tensor: ``tensor`` is flat and holds them from ``start`` on."""

    start: int
    tensor: paddle.Tensor


class BucketPlace(NamedTuple):
    """Where a parameter lies: its bucket, and which slot of it."""

    buffer: FusedCommBuffer
    slot: int


class HeldTensor(NamedTuple):
    """A parameter or a buffer.

    Attributes:
        name: logical name.
        info: shape, and the dtype in which it is held.
        parts: what this rank holds of it.
        param: the parameter, or None for a buffer.
        place: of a parameter that is sharded; None for what every data rank holds whole.
        is_running: a buffer or running statistic, which may differ between ranks: the first one's counts.
    """

    name: str
    info: TensorInfo
    parts: list[Part]
    param: EagerParamBase | None
    place: BucketPlace | None
    is_running: bool = False


class Updated(NamedTuple):
    """A parameter that the optimizer updates.

    Attributes:
        name: structured name, with a mark where tensor parallelism has split it.
        shape: of the whole parameter.
        param: the parameter.
        parts: what the inner optimizer updates on this rank: slices, or the parameter itself.
        place: where it lies; None where every data rank has the whole.
    """

    name: str
    shape: tuple[int, ...]
    param: EagerParamBase
    parts: list[Part]
    place: BucketPlace | None


class Held:
    """A model and its optimizer, if any, wrapped or not.

    Attributes:
        model: the model.
        optimizer: as given; None for the model alone.
        inner: Paddle's optimizer, or None.
        ranks: who takes part.
        schedule: of a wrapped model, else None.
        aliases: other logical names of tied parameters and buffers -> the name that stands for them.
        unmade: logical names of buffers that get their value from the first forward -> the layer, and its name there.
    """

    def __init__(self, model: nn.Layer, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.inner = _inner_of(model, optimizer)
        self.schedule: Schedule | None = schedule_of(model)
        self.ranks = Ranks(optimizer)
        self.aliases: dict[str, str] = {}
        self.unmade: dict[str, tuple[nn.Layer, str]] = {}
        self._keys: dict[int, str] = {}
        self._order: list[tuple[str, paddle.Tensor]] = []
        for key, tensor, layer in _named_state(model):
            if tensor is None or (tensor.size and not isinstance(tensor, EagerParamBase) and not _has_value(tensor)):
                self.unmade[MODEL + key] = (layer, key.rpartition(".")[2])
                continue
            first = self._keys.setdefault(id(tensor), key)
            if first == key:
                self._order.append((self._marked(key, tensor), tensor))
            else:
                self.aliases[MODEL + self._marked(key, tensor)] = MODEL + self._marked(first, tensor)
        for param in (param for buffer in self.buffers for param in buffer.params):
            if id(param) not in self._keys:
                raise LayoutError(
                    f"parameter '{param.name}' is no longer in the model that it was wrapped with, and nothing says "
                    "what to call it. Freeze layers that are of no more use instead of removing them"
                )
        self._statistics = {id(tensor) for tensor in _statistics(model)}

    def all_aliases(self) -> dict[str, str]:
        """``aliases`` of every tensor-parallel rank."""
        rank, n_ranks = self.ranks.tensor
        own = f"{SPLIT_MARK}{rank}of{n_ranks}"
        marks = [f"{SPLIT_MARK}{other}of{n_ranks}" for other in range(n_ranks)]
        pairs = self.aliases.items()
        return {alias.replace(own, mark): name.replace(own, mark) for alias, name in pairs for mark in marks}

    @property
    def buffers(self) -> list[FusedCommBuffer]:
        """All buckets; none where nothing is sharded."""
        return self.schedule.buffers if self.schedule is not None else []

    def tensors(self) -> list[HeldTensor]:
        """Parameters and persistable buffers, in the model's order, each once."""
        places = self._places()
        masters = {} if self.buffers else _masters_of(self.inner)
        found = []
        for name, tensor in self._order:
            if id(tensor) in places:
                found.append(_sharded(name, tensor, places[id(tensor)]))
            else:
                whole = _whole(name, tensor, masters.get(tensor.name))
                found.append(whole._replace(is_running=whole.param is None or id(tensor) in self._statistics))
        return found

    def updated(self) -> list[Updated]:
        """The parameters of the optimizer, in the model's order."""
        if self.inner is None:
            return []
        theirs = {id(param) for param in optimizer_params(self.inner)}
        places = self._places()
        found = []
        for name, tensor in self._order:
            if id(tensor) in theirs:
                place = places.get(id(tensor))
                parts = [Part(0, tensor)] if place is None else _slices(place)
                found.append(Updated(name, tuple(tensor.shape), tensor, parts, place))
        return found

    def _places(self) -> dict[int, BucketPlace]:
        """Of each sharded parameter, by its id."""
        buffers = self.buffers
        return {id(param): BucketPlace(buffer, i) for buffer in buffers for i, param in enumerate(buffer.params)}

    def used(self) -> list[str]:
        """Parameters that have had a gradient: the next step updates them even if they get no other one."""
        if isinstance(self.optimizer, ShardedOptimizer):
            flags = zip(self.buffers, self.optimizer._reducer.used, strict=True)
            had = {id(param) for buffer, used in flags for param, flag in zip(buffer.params, used, strict=True) if flag}
            return [self._keys[id(tensor)] for _, tensor in self._order if id(tensor) in had]
        return [updated.name for updated in self.updated() if updated.param.grad is not None]

    def set_used(self, names: Sequence[str]) -> None:
        """Lets the next step find what ``used`` said; gradients are zero where there are none."""
        chosen = set(names)
        others = {alias.removeprefix(MODEL): name.removeprefix(MODEL) for alias, name in self.aliases.items()}
        chosen |= {others[name] for name in names if name in others}
        ids = {id(tensor) for _, tensor in self._order if self._keys[id(tensor)] in chosen}
        if isinstance(self.optimizer, ShardedOptimizer):
            for buffer, used in zip(self.buffers, self.optimizer._reducer.used, strict=True):
                used[:] = [id(param) in ids for param in buffer.params]
            return
        for updated in self.updated():
            if id(updated.param) in ids and updated.param.grad is None and not updated.param.stop_gradient:
                updated.param.grad = paddle.zeros_like(updated.param)

    def orders(self) -> dict[str, Any]:
        """In which order buckets are gathered and reduced, as names of the parameters in them.

        Where more than two ranks add up, the order decides how sums are rounded; elsewhere it only saves the first
        steps from learning it again.
        """
        if not isinstance(self.optimizer, ShardedOptimizer):
            return {}
        reducer, gathers = self.optimizer._reducer, self.optimizer._schedule.gathers
        of_buckets = {"reduce": reducer.order, "gather": gathers.order, "last": sorted(reducer._always_last)}
        names = self._keys  # without marks: all tensor-parallel ranks read what one of them has written
        listed = {
            key: [names[id(param)] for bucket in buckets for param in self.buffers[bucket].params]
            for key, buckets in of_buckets.items()
        }
        return {"round": reducer.round, **listed}

    def set_orders(self, orders: Mapping[str, Any]) -> None:
        """Takes what ``orders`` said, here or in a run whose buckets were others. The same on every rank."""
        if not isinstance(self.optimizer, ShardedOptimizer) or not orders:
            return
        reducer, schedule = self.optimizer._reducer, self.optimizer._schedule
        last = set(orders["last"])
        names = self._keys
        of_buckets = [[names[id(param)] for param in buffer.params] for buffer in self.buffers]
        reducer.adopt_order(sorted_by_first(of_buckets, orders["reduce"], reducer.order))
        schedule.adopt_gather_order(sorted_by_first(of_buckets, orders["gather"], schedule.gathers.order))
        held_back = {bucket for bucket, params in enumerate(of_buckets) if last.intersection(params)}
        reducer._always_last = reducer._always_last | held_back
        reducer.round = orders["round"]

    def tuned(self) -> dict[str, Any] | None:
        """What was chosen by measurement; None while nothing has been."""
        tuning = getattr(self.optimizer, "tuning", None)
        return tuning.kept() if tuning is not None else None

    def take_tuned(self, tuned: Mapping[str, Any] | None) -> bool:
        """Puts it in force where it was asked for and not chosen yet. Collective; after ``prepare_writes``.

        Returns whether buckets are others now.
        """
        before = self.buffers[:1]
        tuning = getattr(self.optimizer, "tuning", None)
        if tuning is not None and tuned:
            tuning.adopt(tuned)
        return self.buffers[:1] != before

    def param_names(self) -> dict[str, str]:
        """Paddle's name of each parameter, by structured name: its own optimizer files know parameters by that."""
        return {name: tensor.name for name, tensor in self._order if isinstance(tensor, EagerParamBase)}

    def short_params(self) -> dict[str, str]:
        """Parameters that the model was given with 16 bits and that have a float32 master: name -> dtype."""
        config = getattr(self.optimizer, "config", None)
        if config is not None and config.param_dtype is not None:
            return {}  # the model was given in float32
        return {
            tensor.name.removeprefix(MODEL): dtype_name(tensor.param)
            for tensor in self.tensors()
            if tensor.param is not None and dtype_name(tensor.param) in SHORT_DTYPES and tensor.info.dtype == "float32"
        }

    def keep_writes(self) -> None:
        """Values that were written to parameters past every guard reach the shards, which are what counts."""
        for buffer in self.buffers:
            if buffer.status is Status.READY:
                buffer.keep_writes(takes_back=not buffer.place.keeps_full)
            buffer.check_params()

    def prepare_writes(self) -> None:
        """Before shards are written: gradients are forgotten, and no gather reads shards. Collective."""
        tuning = getattr(self.optimizer, "tuning", None)
        with tuning.paused() if tuning is not None else contextlib.nullcontext():
            if self.optimizer is not None:
                self.optimizer.clear_grad(set_to_zero=False)  # they are of other values
        if self.schedule is not None:
            self.schedule.begin_step()
            self.schedule.gathers.finish_under_way()

    def gather(self) -> None:
        """After shards were written: as after a step, but that parameters which stay are there on return."""
        if self.schedule is None:
            return
        gathers = self.schedule.gathers
        for bucket in gathers.order:
            gathers.take_update(bucket)
        gathers.end_step()
        if self.buffers[0].place.keeps_full:
            gathers.finish_under_way()

    def make(self, name: str, info: TensorInfo) -> paddle.Tensor:
        """Gives an unmade buffer a tensor, of undefined content."""
        layer, own_name = self.unmade[name]
        layer._buffers[own_name] = paddle.empty(list(info.shape), info.dtype)
        return layer._buffers[own_name]

    def _marked(self, key: str, tensor: paddle.Tensor) -> str:
        rank, n_ranks = self.ranks.tensor
        is_split = n_ranks > 1 and bool(getattr(tensor, "is_distributed", False))
        return f"{key}{SPLIT_MARK}{rank}of{n_ranks}" if is_split else key


def _inner_of(model: nn.Layer, optimizer: Any) -> Any:
    """Paddle's own optimizer below what was given.

    Raises:
        ConfigError: the two do not belong together.
        StateError: buckets were half moved, so that nothing is whole.
    """
    if not isinstance(model, nn.Layer):
        raise ConfigError(f"model: expected a paddle.nn.Layer, got {type(model).__name__}")
    schedule = schedule_of(model)
    if isinstance(optimizer, ShardedOptimizer):
        if optimizer._schedule is not schedule:
            raise ConfigError("the optimizer was wrapped with another model than the one given")
        optimizer.check_usable()
        return optimizer._inner
    if schedule is not None:
        raise ConfigError(
            f"this {type(model).__name__} is sharded, and what it holds is known to its optimizer only: pass the "
            "optimizer that fleet.distributed_optimizer or hp_sharding.shard returned. For the parameters alone, load "
            "before wrapping"
        )
    shared = guard.held_param(model)
    if shared is not None:
        raise ConfigError(
            f"parameter '{shared}' belongs to a model that is sharded, of which this {type(model).__name__} is a layer "
            "or a wrapper: pass the very model that was wrapped, and its optimizer"
        )
    inner = optimizer._inner if isinstance(optimizer, PlainOptimizer) else optimizer
    if inner is not None:
        _check_inner(model, inner)
    return inner


_KNOWN = (*ELEMENTWISE, "Lamb", "LarsMomentum")
"""Optimizers whose state is all in accumulators."""


def _check_inner(model: nn.Layer, optimizer: Any) -> None:
    if not isinstance(optimizer, paddle.optimizer.Optimizer):
        raise ConfigError(f"optimizer: expected a paddle.optimizer.Optimizer, got {type(optimizer).__name__}")
    if not {kind.__name__ for kind in type(optimizer).__mro__} & set(_KNOWN):
        raise ConfigError(
            f"{type(optimizer).__name__} keeps state that nobody here knows of, which would be lost. Known are "
            f"{', '.join(_KNOWN)} and subclasses"
        )
    names = {id(param) for param in model.parameters()}
    foreign = [param.name for param in optimizer_params(optimizer) if id(param) not in names]
    if foreign:
        raise ConfigError(
            f"the optimizer holds {len(foreign)} parameters that the model does not have, such as "
            f"'{foreign[0]}'; their state would be lost. Pass the model that it was made for"
        )


def _named_state(layer: nn.Layer, prefix: str = "") -> Iterator[tuple[str, paddle.Tensor | None, nn.Layer]]:
    """Keys and tensors of ``layer.state_dict()``, below every guard and tied ones under each of their names.

    With the layer of each; a persistable buffer that has no value yet is there too.
    """
    for name, param in layer._parameters.items():
        if param is not None:
            yield prefix + name, param, layer
    for name, buffer in layer._buffers.items():
        if name not in layer._non_persistable_buffer_names_set:
            yield prefix + name, buffer, layer
    for name, child in layer._sub_layers.items():
        if child is not None:
            yield from _named_state(child, f"{prefix}{name}.")


def _has_value(tensor: paddle.Tensor) -> bool:
    return bool(tensor._is_initialized())


def _statistics(model: nn.Layer) -> Iterator[paddle.Tensor]:
    for layer in model.sublayers(include_self=True):
        yield from (param for name, param in layer._parameters.items() if is_statistic(layer, name))


def _masters_of(inner: Any) -> dict[str, paddle.Tensor]:
    """Masters that an optimizer which is not sharded keeps itself, by name of the parameter."""
    return dict(getattr(inner, "_master_weights", {}) or {}) if inner is not None else {}


def _sharded(name: str, param: EagerParamBase, place: BucketPlace) -> HeldTensor:
    info = TensorInfo(tuple(param.shape), place.buffer.layout.dtypes.shard)
    return HeldTensor(MODEL + name, info, _slices(place), param, place)


def _slices(place: BucketPlace) -> list[Part]:
    pieces = [piece for piece in place.buffer.slices if piece.param == place.slot]
    return [Part(piece.param_start_numel, piece.tensor) for piece in pieces]


def _whole(name: str, tensor: paddle.Tensor, master: paddle.Tensor | None) -> HeldTensor:
    value = tensor if master is None else master
    info = TensorInfo(tuple(tensor.shape), _stored_dtype(name, value))
    param = tensor if isinstance(tensor, EagerParamBase) else None
    return HeldTensor(MODEL + name, info, [Part(0, value)], param, None)


def _stored_dtype(name: str, tensor: paddle.Tensor) -> str:
    dtype = dtype_name(tensor)
    if dtype not in STORAGE:
        raise ConfigError(
            f"'{name}' is of {dtype}, which a checkpoint cannot hold; it can be {', '.join(STORAGE)}. Register a "
            "buffer that can be computed again with persistable=False, or keep its real and imaginary parts"
        )
    return dtype
