"""What a model and its optimizer hold on this rank, as parts of logical tensors: no padding, no buckets.

The value of a parameter is its shard, which is the float32 master where precision is mixed: what layers see comes of it
by rounding. What is in no bucket (buffers, running statistics, parameters that the optimizer does not hold) every rank
has whole and alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase

from ..buffer import FusedCommBuffer, Status
from ..config import SHORT_DTYPES
from ..errors import ConfigError
from ..optimizer import ShardedOptimizer
from ..plain import PlainOptimizer
from ..precision import dtype_name
from ..schedule import Schedule, schedule_of
from ..updates import optimizer_params
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
    """

    name: str
    info: TensorInfo
    parts: list[Part]
    param: EagerParamBase | None
    place: BucketPlace | None


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
    """

    def __init__(self, model: nn.Layer, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.inner = _inner_of(model, optimizer)
        self.schedule: Schedule | None = schedule_of(model)
        self.ranks = Ranks(optimizer)
        self.aliases: dict[str, str] = {}
        self._names: dict[int, str] = {}
        self._order: list[tuple[str, paddle.Tensor]] = []
        for key, tensor in _named_state(model):
            name = self._marked(key, tensor)
            first = self._names.setdefault(id(tensor), name)
            if first == name:
                self._order.append((name, tensor))
            else:
                self.aliases[MODEL + name] = MODEL + first

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
            elif tensor.size == 0 or tensor._is_initialized():  # buffers may get their value from the first forward
                found.append(_whole(name, tensor, masters.get(tensor.name)))
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
            return [name for name, tensor in self._order if id(tensor) in had]
        return [updated.name for updated in self.updated() if updated.param.grad is not None]

    def set_used(self, names: Sequence[str]) -> None:
        """Lets the next step find what ``used`` said; gradients are zero where there are none."""
        chosen = set(names)
        ids = {id(tensor) for name, tensor in self._order if name in chosen}
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
        names = {id(tensor): name for name, tensor in self._order}
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
        names = {id(tensor): name for name, tensor in self._order}
        of_buckets = [[names[id(param)] for param in buffer.params] for buffer in self.buffers]
        reducer.adopt_order(_by_first(of_buckets, orders["reduce"], reducer.order))
        schedule.adopt_gather_order(_by_first(of_buckets, orders["gather"], schedule.gathers.order))
        held_back = {bucket for bucket, params in enumerate(of_buckets) if last.intersection(params)}
        reducer._always_last = reducer._always_last | held_back
        reducer.round = orders["round"]

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
        """Before shards are written: what was written before is where it belongs, and no gather reads them."""
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

    def _marked(self, key: str, tensor: paddle.Tensor) -> str:
        rank, n_ranks = self.ranks.tensor
        is_split = n_ranks > 1 and bool(getattr(tensor, "is_distributed", False))
        return f"{key}{SPLIT_MARK}{rank}of{n_ranks}" if is_split else key


def _by_first(of_buckets: list[list[str]], names: Sequence[str], known: Sequence[int]) -> list[int]:
    """Buckets by the first of ``names`` that each has; those that have none come last, as ``known`` has them."""
    places = {name: place for place, name in enumerate(names)}
    firsts = [min((places.get(name, len(places)) for name in params), default=len(places)) for params in of_buckets]
    return sorted(known, key=firsts.__getitem__)


def _inner_of(model: nn.Layer, optimizer: Any) -> Any:
    """Paddle's own optimizer below what was given.

    Raises:
        ConfigError: the two do not belong together.
    """
    if not isinstance(model, nn.Layer):
        raise ConfigError(f"model: expected a paddle.nn.Layer, got {type(model).__name__}")
    schedule = schedule_of(model)
    if isinstance(optimizer, ShardedOptimizer):
        if optimizer._schedule is not schedule:
            raise ConfigError("the optimizer was wrapped with another model than the one given")
        return optimizer._inner
    if schedule is not None:
        raise ConfigError(
            f"this {type(model).__name__} is sharded, and what it holds is known to its optimizer only: pass the "
            "optimizer that fleet.distributed_optimizer or hp_sharding.shard returned"
        )
    if optimizer is None or isinstance(optimizer, PlainOptimizer):
        return None if optimizer is None else optimizer._inner
    if not isinstance(optimizer, paddle.optimizer.Optimizer):
        raise ConfigError(f"optimizer: expected a paddle.optimizer.Optimizer, got {type(optimizer).__name__}")
    return optimizer


def _named_state(layer: nn.Layer, prefix: str = "") -> Iterator[tuple[str, paddle.Tensor]]:
    """Keys and tensors of ``layer.state_dict()``, below every guard and tied ones under each of their names."""
    for name, param in layer._parameters.items():
        if param is not None:
            yield prefix + name, param
    for name, buffer in layer._buffers.items():
        if buffer is not None and name not in layer._non_persistable_buffer_names_set:
            yield prefix + name, buffer
    for name, child in layer._sub_layers.items():
        if child is not None:
            yield from _named_state(child, f"{prefix}{name}.")


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
        raise ConfigError(f"'{name}' is of {dtype}, which a checkpoint cannot hold; it can be {', '.join(STORAGE)}")
    return dtype
