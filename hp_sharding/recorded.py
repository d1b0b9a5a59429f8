"""What timelines know of the runs that they record: ranks, layers, memory, and settings, which a trace is kept with."""

from __future__ import annotations

import dataclasses
import platform
import time
import weakref
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from . import backward, hooks
from .buffer import FusedCommBuffer
from .comm import Communicator, Work, current_device
from .config import ShardingConfig
from .optimizer import ShardedOptimizer
from .timeline import Timeline
from .timeline.meeting import Way
from .timeline.subject import Subject, range_of
from .trace.figures import Groups
from .units import UnitPlan, find_units
from .updates import optimizer_params


class ShardedSubject(Subject):
    """The run of a ``ShardedOptimizer``, which it does not keep alive."""

    def __init__(self, optimizer: ShardedOptimizer, plan: UnitPlan, tensor: Communicator | None) -> None:
        lanes = optimizer._reducer.lanes
        replicas = lanes.replicate.nranks if lanes.replicate is not None else 1
        self._optimizer = weakref.ref(optimizer)
        self.rank = lanes.reduce.ranks[lanes.reduce.rank]
        self.groups = Groups(lanes.reduce.nranks, replicas)
        self.ways = [Way(lane) for lane in lanes.agree]
        if tensor is not None:
            self.ways.append(Way(tensor, on_host=not current_device().has_streams))
        self.timeout_s = optimizer.config.timeout_s
        self.whole = plan.units[0].name
        self._units = [unit.name for unit in plan.units]
        self._known: list[FusedCommBuffer] | None = None
        self._layers: dict[str, str] = {}
        self._fixed_bytes = 0
        self._formula_bytes = 0
        self._counted: Any = None

    @property
    def layers(self) -> Mapping[str, str]:
        """See ``Subject``."""
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._schedule.buffers is not self._known:
            self._known = optimizer._schedule.buffers
            self._layers = {
                buffer.name: range_of([self._units[unit] for unit in buffer.layout.units]) for buffer in self._known
            }
        return self._layers

    def layers_of(self, buckets: Sequence[int]) -> str:
        """See ``Subject``."""
        layers = list(self.layers.values())
        return range_of([layers[bucket] for bucket in buckets])

    def under_way(self) -> list[Work]:
        """See ``Subject``."""
        optimizer = self._optimizer()
        buffers = optimizer.buffers if optimizer is not None else []
        return [buffer.gather_work for buffer in buffers if buffer.gather_work is not None]

    def held_bytes(self) -> int:
        """See ``Subject``."""
        optimizer = self._optimizer()
        if optimizer is None:
            return 0
        pool = optimizer._schedule.buffers[0].place.pool
        if not current_device().has_streams:
            return self._fixed_bytes + pool.allocated_bytes
        return self._fixed_bytes + sum(map(_live_bytes, optimizer._schedule.buffers))

    def formula_bytes(self) -> int:
        """See ``Subject``."""
        optimizer = self._optimizer()
        if optimizer is None:
            return 0
        inner, arena = optimizer._inner, optimizer._arena
        n_moments = sum(map(len, inner._accumulators.values()))
        counted = (weakref.ref(arena), n_moments, arena.spare_bytes, len(arena.tensors))
        if counted != self._counted:  # to count anew takes a look at every tensor
            self._counted = counted
            self._fixed_bytes = _fixed_bytes(optimizer)
            self._formula_bytes = optimizer.memory_report()["formula_bytes"]
        return self._formula_bytes

    def about(self) -> dict[str, Any]:
        """See ``Subject``."""
        optimizer = self._optimizer()
        buffers = optimizer.buffers if optimizer is not None else []
        config = optimizer.config if optimizer is not None else ShardingConfig()
        buckets = [
            {"name": buffer.name, "layer": self.layers[buffer.name], "nbytes": buffer.layout.nbytes}
            for buffer in buffers
        ]
        return {**_about(config, self.groups), "model": self.whole, "buckets": buckets}


class PlainSubject(Subject):
    """The run of a ``PlainOptimizer``: compute alone. Hooks stand on the model only while it is recorded."""

    def __init__(self, optimizer: Any, timeline: Timeline) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._timeline = weakref.ref(timeline)
        self._handles: list[Any] = []
        self._held_bytes = 0
        model = optimizer._model()
        self.whole = type(model).__name__ if model is not None else ""

    def begin(self) -> None:
        """See ``Subject``."""
        optimizer = self._optimizer()
        model = optimizer._model() if optimizer is not None else None
        timeline = self._timeline()
        if optimizer is None or model is None or timeline is None:
            return
        plan = find_units(model, optimizer.config.units)
        self._handles = hooks.mark_units(timeline, plan)
        backward.attach(self)

    def end(self) -> None:
        """See ``Subject``."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        backward.detach(self)

    def held_bytes(self) -> int:
        """See ``Subject``. As counted at the end of the last step, when all gradients were there."""
        return self._held_bytes

    def formula_bytes(self) -> int:
        """See ``Subject``."""
        optimizer = self._optimizer()
        if optimizer is None:
            return 0
        params = optimizer_params(optimizer._inner)
        moments = [tensor for tensors in optimizer._inner._accumulators.values() for tensor in tensors.values()]
        gradients = [param.grad for param in params if param.grad is not None]
        self._held_bytes = sum(tensor.size * tensor.element_size() for tensor in [*params, *gradients, *moments])
        return int(optimizer.memory_report()["formula_bytes"])

    def about(self) -> dict[str, Any]:
        """See ``Subject``."""
        optimizer = self._optimizer()
        config = optimizer.config if optimizer is not None else ShardingConfig()
        return {**_about(config, self.groups), "model": self.whole, "buckets": []}

    def begin_backward(self) -> None:
        """Part of ``backward.BackwardListener``."""
        timeline = self._timeline()
        if timeline is not None:
            timeline.enter("backward", None)

    def end_backward(self) -> None:
        """Part of ``backward.BackwardListener``."""
        timeline = self._timeline()
        if timeline is not None:
            timeline.reset()

    abort_backward = end_backward

    def end_nested(self, depth: int) -> None:
        """Part of ``backward.BackwardListener``."""

    def begin_partial(self) -> None:
        """Part of ``backward.BackwardListener``."""

    def end_partial(self, results: Sequence[Any]) -> None:
        """Part of ``backward.BackwardListener``."""

    def explain(self, error: Exception) -> Exception | None:
        """Part of ``backward.BackwardListener``."""
        return None


def _fixed_bytes(optimizer: ShardedOptimizer) -> int:
    """What does not come and go within a step: kept parameters, shards, reduced gradients, moments."""
    found = sum(tensor.size * tensor.element_size() for tensor in optimizer._arena.tensors)
    found += optimizer._arena.spare_bytes
    for buffer in optimizer.buffers:
        keeps = buffer.place.keeps_full
        found += buffer.layout.nbytes if keeps else 0
        found += 0 if keeps and buffer.layout.dtypes.shard_is_slice else buffer.layout.shard_nbytes
    for tensors in optimizer._inner._accumulators.values():
        found += sum(tensor.size * tensor.element_size() for tensor in tensors.values())
    return int(found)


def _live_bytes(buffer: FusedCommBuffer) -> int:
    """On a device, whose allocator does not tell what is ours: what of a bucket is there now and comes and goes."""
    nbytes = 0
    if not buffer.place.keeps_full and buffer.full is not None:
        nbytes += buffer.layout.nbytes
    if buffer.gradient.full is not None:
        nbytes += buffer.layout.gradient_nbytes
    return nbytes


def _about(config: ShardingConfig, groups: Groups) -> dict[str, Any]:
    return {
        "versions": {
            "hp_sharding": _version("hp_sharding"),
            "paddle": _version("paddlepaddle") or _version("paddlepaddle-gpu"),
            "python": platform.python_version(),
        },
        "device": current_device().name,
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "nranks": groups.shard * groups.replicas,
        "replicas": groups.replicas,
        "config": {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)},
        "simulated": False,
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _plain(value: Any) -> Any:
    """As JSON has it; layers' classes by their names."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, type):
        return value.__name__
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
