"""Measures what a plan needs to know of compute: each unit's forward and backward, updates, and copies.

The model runs as plain Paddle. Its gradients are dropped as they come, since sharded training takes them away as well.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import nn
from paddle.base import core

from ..comm import current_device
from ..config import ShardingConfig
from ..guard import GuardedParameters
from ..outputs import tensors_in
from ..units import find_units
from .hardware import Hardware
from .layers import profile_of
from .profile import Profile, Unit

_UPDATE_NUMEL = 1 << 24
"""Elements at the most that an update is tried on."""
_COPY_NUMEL = 1 << 20
_COPIES = 8
_UPDATE_BYTES = 36
"""That AdamW in float32 reads and writes for each element, as ``books`` counts it."""


class Cost(NamedTuple):
    """Of one unit in one step; see ``profile.Unit``."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    activation_bytes: int = 0
    transient_bytes: int = 0


class Measured(NamedTuple):
    """What was found.

    Attributes:
        profile: with times and activations.
        update_bytes_s: see ``Hardware``.
        copy_bytes_s: see ``Hardware``.
    """

    profile: Profile
    update_bytes_s: float
    copy_bytes_s: float


def measure(
    model: nn.Layer,
    run: Callable[..., Any],
    config: ShardingConfig,
    *,
    draw: Callable[[], Sequence[Any]] = tuple,
    steps: int = 3,
) -> Measured:
    """Medians over ``steps``, after one that does not count.

    Args:
        model: not wrapped.
        run: calls the model on a batch and returns the loss, or tensors whose sum is taken for it; may be the model.
        config: for its ``units``.
        draw: gives the arguments of ``run``; what that takes is not measured.
        steps: at least 1.
    """
    watch = _Watch(model, config)
    with watch:
        found = [watch.step(run, draw()) for _ in range(steps + 1)][1:]
    costs = [_median([step[number] for step in found]) for number in range(len(watch.profile.units))]
    units = [_with_cost(unit, cost) for unit, cost in zip(watch.profile.units, costs, strict=True)]
    units[0] = units[0]._replace(borrows=tuple(dict.fromkeys([*units[0].borrows, *watch.borrowed])))
    # In the order in which they ran; those that did not, last.
    order = [0, *watch.order, *(number for number in range(1, len(units)) if number not in watch.order)]
    profile = watch.profile._replace(units=tuple(units[number] for number in order))
    sizes = [param.numel for param in profile.params]
    return Measured(profile, update_bytes_s(sizes), copy_bytes_s())


def _median(costs: Sequence[Cost]) -> Cost:
    forward_s, backward_s, activation_bytes, transient_bytes = (
        statistics.median(values) for values in zip(*costs, strict=True)
    )
    return Cost(forward_s, backward_s, round(activation_bytes), round(transient_bytes))


def _with_cost(unit: Unit, cost: Cost) -> Unit:
    kept = max(cost.activation_bytes, 0)
    return unit._replace(**cost._replace(activation_bytes=kept, transient_bytes=max(cost.transient_bytes, 0))._asdict())


class _Watch:
    """Deals the time and the memory of a step out to units: what passes between two marks is that of one of them.

    A unit's forward has what no unit inside it has. In the backward each has what passes from the gradient of its
    result to that of the next. A forward that runs again in there, as with recompute, belongs to that backward.
    """

    def __init__(self, model: nn.Layer, config: ShardingConfig) -> None:
        plan = find_units(model, config.units)
        self.profile = profile_of(model, config)
        self.order: list[int] = []
        self.borrowed: list[str] = []
        self._layers = [unit.layer for unit in plan.units]
        self._places = {id(entry.param): entry for entry in plan.params}
        self._model = model
        self._removers: list[Any] = []
        self._memory = _memory()
        self._active: list[int] = []
        self._costs: list[Cost] = []
        self._start_s, self._start_bytes = 0.0, 0
        self._owner, self._part = 0, "forward"
        self._differentiates = False

    def __enter__(self) -> _Watch:
        for number, layer in enumerate(self._layers):
            self._removers.append(layer.register_forward_pre_hook(functools.partial(self._enter, number)))
            self._removers.append(layer.register_forward_post_hook(functools.partial(self._leave, number)))
        for param in self._model.parameters():
            if not param.stop_gradient:
                param._register_backward_hook(functools.partial(_drop_gradient, weakref.ref(self), weakref.ref(param)))
        for layer in self._model.sublayers(include_self=True):
            layer.__dict__["_parameters"] = GuardedParameters(layer._parameters, self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: object) -> None:
        for remover in self._removers:
            remover.remove()
        for layer in self._model.sublayers(include_self=True):
            layer.__dict__["_parameters"] = OrderedDict(OrderedDict.items(layer._parameters))

    def step(self, run: Callable[..., Any], given: Sequence[Any]) -> list[Cost]:
        """One forward and backward; the cost of each unit."""
        self._costs = [Cost() for _ in self._layers]
        self.order.clear()
        self._restart(0, "forward")
        result = run(*given)
        loss = result if isinstance(result, paddle.Tensor) else sum(tensor.sum() for tensor in tensors_in(result))
        self._begin(0, "backward")
        self._differentiates = True
        try:
            loss.sum().backward()
        finally:
            self._differentiates = False
        self._begin(0, "forward")
        return list(self._costs)

    def look_up(self, param: Any) -> None:
        """Part of ``guard.ValueKeeper``: what a layer outside its unit has use for, and the model after its units."""
        place = self._places.get(id(param))
        if not self._active or place is None:
            return
        is_late = place.unit == 0 and self._active == [0] and bool(self.order)
        if is_late or place.unit not in self._active:
            self.borrowed.append(place.name)

    def _enter(self, number: int, *_: Any) -> None:
        self._active.append(number)
        if number and number not in self.order:
            self.order.append(number)
        self._begin(number, "backward" if self._differentiates else "forward")

    def _leave(self, number: int, _: nn.Layer, __: Any, outputs: Any) -> None:
        self._active.pop()
        if self._differentiates:
            self._begin(self._active[-1] if self._active else number, "backward")
        else:
            self._begin(self._active[-1] if self._active else 0, "forward")
        for tensor in tensors_in(outputs) if number else ():
            if not (tensor.stop_gradient or tensor.is_leaf):
                tensor.register_hook(functools.partial(self._enter_backward, number))

    def _enter_backward(self, number: int, _: paddle.Tensor) -> None:
        self._begin(number, "backward")

    def _begin(self, number: int, part: str) -> None:
        """What has passed since the last mark belongs to its owner; from now on that is ``number``."""
        if (number, part) == (self._owner, self._part):
            return  # one stretch, so that what it holds at its peak is seen as a whole
        passed_s = self._memory.now_s() - self._start_s
        grown, peak = self._memory.current() - self._start_bytes, self._memory.peak() - self._start_bytes
        cost = self._costs[self._owner]
        if self._part == "forward":
            cost = cost._replace(forward_s=cost.forward_s + passed_s, activation_bytes=cost.activation_bytes + grown)
            peak -= max(grown, 0)  # what stays counts already
        else:
            cost = cost._replace(backward_s=cost.backward_s + passed_s)
        self._costs[self._owner] = cost._replace(transient_bytes=max(cost.transient_bytes, peak))
        self._restart(number, part)

    def _restart(self, number: int, part: str) -> None:
        self._owner, self._part = number, part
        self._start_bytes = self._memory.current()
        self._memory.reset_peak()
        self._start_s = self._memory.now_s()


def _drop_gradient(watch: weakref.ref[_Watch], param: weakref.ref[paddle.Tensor]) -> None:
    # Paddle cannot remove this hook; it goes quiet when nobody watches any more.
    trained = param()
    if watch() is not None and trained is not None:
        trained.clear_gradient(False)


# -- the machine -------------------------------------------------------------------------------------------------------


class _HostMemory:
    """What is allocated through Paddle, and the time."""

    def now_s(self) -> float:
        """When all that was asked for is done."""
        return time.perf_counter()

    def current(self) -> int:
        """Bytes."""
        return int(core.host_memory_stat_current_value("Allocated", 0))

    def peak(self) -> int:
        """Bytes since ``reset_peak``."""
        return int(core.host_memory_stat_peak_value("Allocated", 0))

    def reset_peak(self) -> None:
        """Begins anew."""
        core.host_memory_stat_reset_peak_value("Allocated", 0)


class _DeviceMemory(_HostMemory):
    """The same on the current device, which is waited for."""

    def now_s(self) -> float:
        paddle.device.synchronize()
        return time.perf_counter()

    def current(self) -> int:
        return int(paddle.device.memory_allocated())

    def peak(self) -> int:
        return int(paddle.device.max_memory_allocated())

    def reset_peak(self) -> None:
        paddle.device.reset_max_memory_allocated()


def _memory() -> _HostMemory:
    return _DeviceMemory() if current_device().has_streams else _HostMemory()


def update_bytes_s(sizes: Sequence[int], *, repeats: int = 3) -> float:
    """At which AdamW passes through its state, float32 slices of half these sizes; and divides the gradients."""
    slices = _some([max(size // 2, 1) for size in sizes])
    params = [paddle.create_parameter([size], "float32") for size in slices]
    gradients = [paddle.ones([size]) for size in slices]
    optimizer = paddle.optimizer.AdamW(parameters=params)
    pairs = list(zip(params, gradients, strict=True))
    memory = _memory()

    def update() -> None:
        for gradient in gradients:
            gradient.scale_(0.5)
        optimizer._apply_optimize(None, None, pairs, param_group_idx=0)

    with paddle.no_grad():
        return _UPDATE_BYTES * sum(slices) / _shortest_s(update, memory, repeats)


def _some(sizes: Sequence[int]) -> list[int]:
    """As many of them, from the first on, as have ``_UPDATE_NUMEL`` elements together."""
    chosen: list[int] = []
    for size in sizes:
        if sum(chosen) + size > _UPDATE_NUMEL:
            break
        chosen.append(size)
    return chosen or [_UPDATE_NUMEL]


def copy_bytes_s(*, repeats: int = 3) -> float:
    """At which fresh gradients are copied into larger storage."""
    gradient = paddle.ones([_COPY_NUMEL])
    storage = paddle.zeros([_COPY_NUMEL * _COPIES])
    views = [storage._slice(start * _COPY_NUMEL, (start + 1) * _COPY_NUMEL) for start in range(_COPIES)]

    def copy() -> None:
        for view in views:
            view.copy_(gradient, False)

    with paddle.no_grad():
        return 4 * _COPY_NUMEL * _COPIES / _shortest_s(copy, _memory(), repeats)


def _shortest_s(call: Callable[[], None], memory: _HostMemory, repeats: int) -> float:
    call()
    taken_s = []
    for _ in range(repeats):
        begin_s = memory.now_s()
        call()
        taken_s.append(memory.now_s() - begin_s)
    return max(min(taken_s), 1e-9)


def with_machine(hardware: Hardware, measured: Measured) -> Hardware:
    """Its rates of updates and copies, where ``hardware`` has none."""
    return dataclasses.replace(
        hardware,
        update_bytes_s=hardware.update_bytes_s or measured.update_bytes_s,
        copy_bytes_s=hardware.copy_bytes_s or measured.copy_bytes_s,
    )
