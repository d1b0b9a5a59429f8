"""The schedule: where everything goes that the hooks see.

A unit's forward makes its parameters valid and says what comes next; gradients go
to the reducer. Which gathers start when is decided by one of two policies: one agreed queue in stages 1 and 2, see
``gathers``, and what is used now and next in stage 3, see ``residency``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase

from . import backward, guard, hooks
from .buffer import FusedCommBuffer, Status
from .errors import StateError
from .gathers import Gathers, QueuedGathers
from .outputs import tensors_in
from .ownership import keep_schedule, schedule_of
from .places import Places, UnitMap
from .reduction import Reducer
from .residency import Call, ResidencyRules, UnitGathers
from .timeline import Timeline
from .units import UnitPlan

__all__ = ["Schedule", "keep_schedule", "schedule_of"]

ROOT = 0
"""Index of the unit that is the model itself."""

_SIGNS_OF_FREED = ("holder_ should not be null", "memory_size()", "is not initialized")
"""What Paddle's kernels say of a tensor without storage, or with too little."""


class Schedule:
    """Hooks and order of one wrapped model.

    Args:
        ahead: see ``Gathers``.
        kept: stage 3, units that stay gathered from forward to backward; None for stages 1 and 2.

    Attributes:
        model: the wrapped model.
        buffers: its buckets, by index.
        reducer: gets the backward's events.
        gathers: which gathers start when.
        learned_gather_order: a better one than ``gathers.order``, as this rank saw it; None where it is the same.
    """

    def __init__(
        self,
        model: nn.Layer,
        plan: UnitPlan,
        *,
        buffers: Sequence[FusedCommBuffer],
        reducer: Reducer,
        ahead: int | None,
        kept: frozenset[int] | None,
        timeline: Timeline,
    ) -> None:
        self._model = weakref.ref(model)
        self._timeline = timeline
        self._unit_names = [unit.name for unit in plan.units]
        self.buffers = list(buffers)
        self.reducer = reducer
        self.learned_gather_order: list[int] | None = None
        self._unit_map = UnitMap(plan)
        self._kept = kept
        self._first_uses: list[int] = []
        self._used: set[int] = set()
        self._active = [0] * len(plan.units)
        self._active_total = 0
        self._parts: list[int] = []
        self._trains = False
        self._entries = [0] * len(plan.units)
        self._sleeping: list[EagerParamBase] = []
        self._written: set[int] = set()
        self._lists = guard.layer_lists(model)
        self._late: list[tuple[str, weakref.ref[Any]]] = []
        self._queued: QueuedGathers | None = None
        self._units: UnitGathers | None = None
        self._find_places(ahead)
        self._register(plan, [param for buffer in self.buffers for param in buffer.params])

    @property
    def model(self) -> nn.Layer | None:
        """The wrapped model; None once it is gone."""
        return self._model()

    @property
    def is_idle(self) -> bool:
        """Whether no forward is under way, and nobody has asked for whole parameters."""
        return not self._active_total and not self.gathers.is_pinned

    # -- forward -------------------------------------------------------------------------------------------------

    def enter_unit(self, unit: int) -> None:
        """Before a unit's forward: its parameters are there, or under way, and the next ones start.

        Where all gathers are queued at once, a bucket is waited for when a layer looks its first parameter up, which
        is later and hides more. Parameters that a layer also holds in a list of its own need not be looked up: they are
        waited for here, and so is everything where gathers run only so far ahead.
        """
        if self._timeline.enabled:
            self._timeline.enter("recompute" if backward.in_backward() else "forward", self._unit_names[unit])
        if self._written:
            self._check_written()
        if not self._active_total:
            self._trains = False
        # Reentrant recompute switches gradients off inside: what the outer forward does counts.
        self._trains = self._trains or paddle.is_grad_enabled()
        self._active[unit] += 1
        self._active_total += 1
        if self._trains and not backward.in_backward():
            self.reducer.arm()
            self._count_entry(unit)
        if self._units is not None:
            self._units.enter(unit, trains=self._trains)
        elif self._queued is not None:
            self._make_ready(unit, self._queued)

    def leave_unit(self, unit: int) -> None:
        """After a unit's forward."""
        if self._active[unit]:
            self._active[unit] -= 1
            self._active_total -= 1
        if self._units is not None:
            self._units.leave(unit)
        elif self._queued is not None and unit == ROOT:
            # What this rank had no use for: another one may stand in its forward and wait for our part of it.
            self._queued.start_all()
        if self._timeline.enabled:
            self._timeline.leave()

    def look_up(self, param: EagerParamBase) -> None:
        """A layer looked the parameter up. Part of ``guard.ValueKeeper``."""
        place = self._places.get(id(param))
        if place is None:
            return
        if not self._active_total:
            self._finish_layer(place.bucket)
            return
        if not backward.in_backward():
            if self._trains:
                self._note_use(place.bucket)
            if not self._active[place.unit]:
                # Used by a layer that is not its own: it may get a gradient from several places.
                self.reducer.hold_back(place.bucket)
        if self._units is not None:
            self._units.need(place, trains=self._trains)
            if not self._parts or self._parts[-1] != place.unit:
                self._units.note_use_by_function()
        elif self._queued is not None and self.buffers[place.bucket].status is not Status.READY:
            self._queued.start_up_to(place.bucket, looks_ahead=False)
            self._queued.finish(place.bucket)

    def _make_ready(self, unit: int, gathers: QueuedGathers) -> None:
        for bucket in self._unit_buckets[unit]:
            gathers.start_up_to(bucket, looks_ahead=True)
        if not gathers.keeps_full:
            for bucket in self._unit_buckets[unit]:
                gathers.finish(bucket)
        for bucket in self._unlooked[unit]:
            gathers.start_up_to(bucket, looks_ahead=False)
            gathers.finish(bucket)

    def _count_entry(self, unit: int) -> None:
        self._entries[unit] += 1
        looks_up = self._queued is not None and self._queued.keeps_full
        for bucket in self._unlooked[unit] if looks_up else self._unit_buckets[unit]:
            self._note_use(bucket)
        if self._entries[unit] > 1:
            for bucket in self._unit_buckets[unit]:
                self.reducer.hold_back(bucket)

    def _note_use(self, bucket: int) -> None:
        if bucket not in self._used:
            self._used.add(bucket)
            self._first_uses.append(bucket)

    # -- hooks.HookTarget ----------------------------------------------------------------------------------------

    @property
    def call(self) -> Call | None:
        """Stage 3: the innermost run of a unit's forward."""
        return self._units.call if self._units is not None else None

    def enter_part(self, unit: int) -> bool:
        """Before the forward of a layer of the unit that holds parameters. Returns whether it stands for the unit.

        It does where it is called from outside: its unit is then used by it alone.
        """
        stands = not self._active[unit]
        self._parts.append(unit)
        if stands:
            self.enter_unit(unit)
        return stands

    def leave_part(self, unit: int, *, stands: bool) -> None:
        """After it, also where it raised."""
        if self._parts:
            self._parts.pop()
        if stands:
            self.leave_unit(unit)

    def pass_on(self, values: Any) -> None:
        """A unit has returned parameters: whoever called it uses them."""
        if self._active_total:
            returned = {id(tensor): tensor for tensor in tensors_in(values) if id(tensor) in self._places}
            for tensor in sorted(returned.values(), key=lambda tensor: self._places[id(tensor)]):
                self.look_up(tensor)

    def enter_backward(self, call: Call) -> None:
        """A gradient of something that the call returned is in."""
        if self._timeline.enabled:
            self._timeline.switch("backward", self._unit_names[call.unit])
        if self._units is not None:
            self._units.enter_backward(call)

    def arrive(self, awaited: tuple[int, int]) -> None:
        """A gradient is in that says when a call is over."""
        if self._units is not None:
            self._units.arrive(awaited)

    def take_gradient(self, param: int) -> None:
        """The gradient of the parameter with this ``id`` is in."""
        place = self._places[param]
        self.reducer.take_gradient(place.bucket, place.slot)
        if self._units is not None:
            self._units.arrive((place.bucket, place.slot))
        if self._timeline.enabled:
            self._timeline.until(self._unit_names[place.unit])

    def has_frozen(self, unit: int) -> bool:
        """Whether some parameter of the unit takes no gradient."""
        buffers = [self.buffers[bucket] for bucket in self._unit_buckets[unit]]
        return any(param.stop_gradient for buffer in buffers for param in buffer.params)

    # -- gathers -------------------------------------------------------------------------------------------------

    def unshard(self) -> list[int]:
        """Gathers every bucket that is not READY. Returns what ``reshard`` wants to know."""
        return self.gathers.unshard()

    def reshard(self, freed: Sequence[int]) -> None:
        """Keeps what was written to the parameters, and frees what had been freed before ``unshard``."""
        try:
            self._check_written()
        finally:
            self.gathers.reshard(freed)

    def _finish_layer(self, bucket: int) -> None:
        """Waits for the bucket, and for vectors of its layers, where nobody but the user knows what comes next.

        ``F.linear`` with a bias whose storage is away leaves it out, in silence; with such a weight it raises.
        """
        if self.buffers[bucket].status is not Status.SYNCING:
            return
        self.gathers.finish(bucket)
        for other in self._vectors_beside.get(bucket, ()):
            self.gathers.finish(other)

    # -- guard.ValueKeeper ---------------------------------------------------------------------------------------

    def make_readable(self, param: EagerParamBase) -> None:
        """Waits for the parameter's gather if one is under way; never starts one."""
        place = self._places.get(id(param))
        if place is None:
            return
        buffer = self.buffers[place.bucket]
        self._finish_layer(place.bucket)
        if buffer.status is Status.SHARDED:
            raise StateError(
                f"parameter '{param.name}' (bucket '{buffer.name}') is sharded: its value exists only while its layer "
                "runs. Read or write it inside 'with hp_sharding.full_parameters(model):', on every rank"
            )

    def note_write(self, param: EagerParamBase) -> None:
        """A write to a parameter reaches the shard, which may have storage of its own."""
        place = self._places.get(id(param))
        if place is not None:
            self._written.add(place.bucket)
            if self.buffers[place.bucket].status is Status.READY:
                self.buffers[place.bucket].store_full()

    def write_master(self, param: EagerParamBase, value: Any) -> bool:
        """Part of ``guard.ValueKeeper``."""
        place = self._places.get(id(param))
        if place is None or not self.buffers[place.bucket].takes_as_master(place.slot, value):
            return False
        self.make_readable(param)
        tensor = value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)
        self.buffers[place.bucket].write_master(place.slot, tensor)
        return True

    def note_late(self, name: str, param: EagerParamBase) -> None:
        """A frozen parameter came after the model was wrapped. ``step()`` sees to it that it stays frozen."""
        self._late.append((name, weakref.ref(param)))

    def _check_written(self) -> None:
        """Raises LayoutError where a write, such as that of ``Layer.to``, gave a parameter other storage."""
        for bucket in self._written:
            self.buffers[bucket].check_params()
        self._written.clear()

    def note_clear(self, param: EagerParamBase, *, set_to_zero: bool) -> None:
        """What has been reduced or added up of the parameter's gradient goes too."""
        place = self._places.get(id(param))
        if place is not None:
            self.reducer.forget(place.bucket, place.slot, set_to_zero=set_to_zero)

    # -- backward.BackwardListener -------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Part of ``backward.BackwardListener``."""
        if self._timeline.enabled and self.reducer.armed:
            self._timeline.enter("backward", None)
        self._start_unasked()  # a forward without the model around it, such as one of a sublayer, has not yet
        self._wake()
        self.reducer.begin_backward()
        if self._units is not None and not backward.in_backward():
            self._units.begin_backward()

    def end_backward(self) -> None:
        """Part of ``backward.BackwardListener``."""
        self._start_unasked()
        self._end_units()
        self._entries = [0] * len(self._entries)
        self._learn_order()
        self.reducer.gather_order_changed = self.learned_gather_order is not None
        self.reducer.end_backward()
        if self._timeline.enabled:
            self._timeline.reset()

    def abort_backward(self) -> None:
        """Part of ``backward.BackwardListener``."""
        self._end_units()
        self.reducer.abort_backward()
        if self._timeline.enabled:
            self._timeline.reset()

    def end_nested(self, depth: int) -> None:
        """Part of ``backward.BackwardListener``."""
        if self._units is not None:
            self._units.end_nested(depth)

    def begin_partial(self) -> None:
        """Part of ``backward.BackwardListener``."""
        if self._units is not None and not backward.in_backward():
            self._units.begin_backward()

    def end_partial(self, results: Sequence[Any]) -> None:
        """Part of ``backward.BackwardListener``."""
        if self._units is None:
            return
        if backward.in_backward():
            self._units.end_nested(backward.depth() + 1)
            return
        call = self._units.end_partial()
        if call is not None:
            hooks.watch_tensors(self, results, call)

    def explain(self, error: Exception) -> Exception | None:
        """Part of ``backward.BackwardListener``: what an operation without its parameter's value says is no help."""
        if self._units is None or not any(sign in str(error) for sign in _SIGNS_OF_FREED):
            return None
        return StateError(
            f"rank {self.reducer.rank}: the backward needs the value of a parameter that is sharded again. An "
            "operation outside every layer's forward has used it, or one whose result a layer neither returned nor "
            "kept as an attribute. Run forward and backward inside 'with hp_sharding.full_parameters(model):', or use "
            "the parameter in the forward of a layer that returns what comes of it"
        )

    def _end_units(self) -> None:
        if self._units is None:
            return
        if backward.in_backward():  # recompute, inside paddle.grad
            self._units.end_nested(backward.depth() + 1)
        else:
            self._units.end_backward()

    def _start_unasked(self) -> None:
        """Gathers that no layer asked for on this rank: another one may stand in its forward and wait for them.

        Not in a backward that has nothing to do with this model: it may be this rank's alone.
        """
        if self._queued is not None and self.reducer.armed:
            self._queued.start_all()

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start of ``step()``: nothing is inside a forward any more, and no parameter has left its bucket."""
        self.forget_forward()
        if self._timeline.enabled:
            self._timeline.enter("step()", "")
            self._timeline.count_wrong_guesses(self.gathers.take_wrong_guesses(self._first_uses))
        self._first_uses, self._used = [], set()
        self.gathers.begin_step()
        guard.guard_again(self._lists, self)
        self._late = [(name, reference) for name, reference in self._late if reference() is not None]
        guard.check_frozen((name, param) for name, reference in self._late if (param := reference()) is not None)
        self._written.clear()
        for buffer in self.buffers:
            buffer.check_params()

    def forget_forward(self) -> None:
        """Forgets what was noted of forwards so far: units left open, and how often each was entered."""
        if self._timeline.enabled:
            self._timeline.reset()
        self._close_units()
        self._entries = [0] * len(self._entries)

    def adopt_layout(self, buffers: Sequence[FusedCommBuffer], reducer: Reducer) -> None:
        """Goes on with other buckets of the same parameters. Nothing is under way, and all hooks stay as they are."""
        ahead = self.gathers.ahead
        self.buffers, self.reducer = list(buffers), reducer
        self.learned_gather_order = None
        self._first_uses, self._used = [], set()
        self._find_places(ahead)

    def adopt_gather_order(self, order: list[int]) -> None:
        """Takes the order that rank 0 published."""
        self.gathers.order = order
        self.learned_gather_order = None

    def _close_units(self) -> None:
        self._active = [0] * len(self._active)
        self._active_total = 0
        self._parts.clear()
        if self._units is not None:
            self._units.forget_forward()

    def _learn_order(self) -> None:
        known = self.gathers.order
        order = [*self._first_uses, *(bucket for bucket in known if bucket not in self._used)]
        self.learned_gather_order = order if order != known else None

    # -- registration --------------------------------------------------------------------------------------------

    def _find_places(self, ahead: int | None) -> None:
        places = Places(self._unit_map, self.buffers)
        self._places, self._unit_buckets = places.of, places.unit_buckets
        self._unlooked, self._vectors_beside = places.unlooked, places.vectors_beside
        if self._kept is None:
            self._queued = QueuedGathers(self.buffers, ahead=ahead, timeline=self._timeline)
        else:
            rules = ResidencyRules(places.unit_buckets, places.captured, self._kept)
            self._units = UnitGathers(self.buffers, rules, ahead=ahead, timeline=self._timeline, before=self._units)
        self.gathers: Gathers = self._queued or self._units  # type: ignore[assignment]

    def _register(self, plan: UnitPlan, params: list[EagerParamBase]) -> None:
        model = plan.units[0].layer
        for index, layers in enumerate(plan.layers):
            if self._units is None:
                hooks.hook_unit(self, layers[0], index)
            else:
                hooks.watch_unit(self, layers, index)
        guard.guard_params(params, self)
        guard.guard_layers(model, self)
        self._sleeping = list(params)
        self._wake()
        backward.attach(self)

    def _wake(self) -> None:
        """Registers the gradient hooks of parameters that train now and did not before; Paddle refuses frozen ones."""
        if not self._sleeping:
            return
        for param in self._sleeping:
            if not param.stop_gradient:
                hooks.hook_gradient(self, param)
        self._sleeping = [param for param in self._sleeping if param.stop_gradient]
