"""The schedule: which gather starts when, who waits for it, and where the backward's events go.

The only place that registers hooks. ``step()`` queues the gathers of all buckets, in the agreed order of first use, on
one first-in-first-out lane; a unit's forward waits for its own. Where parameters are freed after ``step()``, gathers
start in that same order as the forward proceeds, ``prefetch`` buckets ahead. The order never depends on the branches
that this rank takes, so ranks always match; a wrong guess costs time, never correctness.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase

from . import backward, guard
from .buffer import FusedCommBuffer, Status
from .errors import StateError
from .reduction import Reducer
from .timeline import Timeline
from .units import UnitPlan

ROOT = 0
"""Index of the unit that is the model itself."""


class Place(NamedTuple):
    """Where a parameter lies: its bucket, its slot there, and its unit."""

    bucket: int
    slot: int
    unit: int


class Schedule:
    """Hooks and order of one wrapped model.

    Args:
        prefetch: buckets whose gather may be under way ahead of use, where gathers start in the forward.

    Attributes:
        model: the wrapped model.
        buffers: its buckets, by index.
        reducer: gets the backward's events.
        learned_gather_order: a better one, as this rank saw it; None where it is the same.
        gather_order: agreed order in which ``step()`` queues gathers.
    """

    def __init__(
        self,
        model: nn.Layer,
        plan: UnitPlan,
        *,
        buffers: Sequence[FusedCommBuffer],
        reducer: Reducer,
        prefetch: int,
        timeline: Timeline,
    ) -> None:
        self._model = weakref.ref(model)
        self.buffers = list(buffers)
        self.reducer = reducer
        self.gather_order = list(range(len(buffers)))
        self.learned_gather_order: list[int] | None = None
        self._prefetch = prefetch
        self._queues_all = self.buffers[0].place.keeps_full
        self._timeline = timeline
        self._places: dict[int, Place] = {}
        self._unit_buckets: list[list[int]] = [[] for _ in plan.units]
        self._unlooked: list[list[int]] = [[] for _ in plan.units]
        self._to_gather: deque[int] = deque()
        self._under_way = 0
        self._first_uses: list[int] = []
        self._used: set[int] = set()
        self._active = [0] * len(plan.units)
        self._active_total = 0
        self._trains = False
        self._entries = [0] * len(plan.units)
        self._sleeping: list[EagerParamBase] = []
        self._written: set[int] = set()
        self._lists = guard.layer_lists(model)
        self._vectors_beside: dict[int, list[int]] = {}
        self._late: list[tuple[str, EagerParamBase]] = []
        self._find_places(plan)
        self._register(plan, [param for buffer in self.buffers for param in buffer.params])

    @property
    def model(self) -> nn.Layer | None:
        """The wrapped model; None once it is gone."""
        return self._model()

    # -- forward -------------------------------------------------------------------------------------------------

    def enter_unit(self, unit: int) -> None:
        """Before a unit's forward: its gathers are under way, and the next ones start.

        Where all gathers are queued at once, a bucket is waited for when a layer looks its first parameter up, which
        is later and hides more. Parameters that a layer also holds in a list of its own need not be looked up: they are
        waited for here, and so is everything where gathers run only so far ahead.
        """
        if self._written:
            self._check_written()
        if unit == ROOT and not backward.in_backward():
            self._close_units()  # a forward that raised has left some open
        if not self._active_total:
            self._trains = False
        # Reentrant recompute switches gradients off inside: what the outer forward does counts.
        self._trains = self._trains or paddle.is_grad_enabled()
        self._active[unit] += 1
        self._active_total += 1
        if self._trains and not backward.in_backward():
            self.reducer.arm()
            self._count_entry(unit)
        for bucket in self._unit_buckets[unit]:
            self._start_up_to(bucket, prefetch=self._prefetch)
        if not self._queues_all:
            for bucket in self._unit_buckets[unit]:
                self.finish_gather(bucket)
        for bucket in self._unlooked[unit]:
            self._start_up_to(bucket, prefetch=0)
            self.finish_gather(bucket)

    def leave_unit(self, unit: int) -> None:
        """After a unit's forward."""
        if self._active[unit]:
            self._active[unit] -= 1
            self._active_total -= 1
        if unit == ROOT:
            # What this rank had no use for: another one may stand in its forward and wait for our part of it.
            self.start_gathers()

    def look_up(self, param: EagerParamBase) -> None:
        """A layer looked the parameter up. Part of ``guard.ValueKeeper``."""
        place = self._places.get(id(param))
        if place is None:
            return
        if self._active_total and not backward.in_backward():
            if self._trains:
                self._note_use(place.bucket)
            if not self._active[place.unit]:
                # Used by a layer that is not its own: it may get a gradient from several places.
                self.reducer.hold_back(place.bucket)
        if self.buffers[place.bucket].status is not Status.READY:
            if self._active_total:
                self._start_up_to(place.bucket, prefetch=0)
                self.finish_gather(place.bucket)
            else:
                self._finish_layer(place.bucket)

    def _count_entry(self, unit: int) -> None:
        self._entries[unit] += 1
        for bucket in self._unlooked[unit] if self._queues_all else self._unit_buckets[unit]:
            self._note_use(bucket)
        if self._entries[unit] > 1:
            for bucket in self._unit_buckets[unit]:
                self.reducer.hold_back(bucket)

    def _note_use(self, bucket: int) -> None:
        if bucket not in self._used:
            self._used.add(bucket)
            self._first_uses.append(bucket)

    # -- gathers -------------------------------------------------------------------------------------------------

    def queue_gathers(self, buckets: Iterable[int]) -> None:
        """Says which buckets are stale and must be gathered, in what order. Starts nothing."""
        self._to_gather.extend(buckets)

    def start_gathers(self) -> None:
        """Starts every queued gather."""
        while self._to_gather:
            self._start_next()

    def finish_gathers(self) -> None:
        """Starts what is queued and waits until every bucket under way is READY."""
        self.start_gathers()
        for buffer in self.buffers:
            if buffer.status is Status.SYNCING:
                self._finish(buffer)

    def finish_gather(self, bucket: int) -> None:
        """Waits for the bucket's gather if one is under way."""
        if self.buffers[bucket].status is Status.SYNCING:
            self._finish(self.buffers[bucket])

    def unshard(self) -> list[int]:
        """Gathers every bucket that is not READY. Returns those that were freed, for ``reshard``."""
        freed = [buffer.layout.number for buffer in self.buffers if buffer.full is None]
        self.finish_gathers()
        return freed

    def reshard(self, freed: Sequence[int]) -> None:
        """Keeps what was written to the parameters, and frees the buckets that ``unshard`` found freed."""
        self._check_written()
        for buffer in self.buffers:
            if buffer.status is Status.READY:
                buffer.store_full()
        for bucket in (bucket for bucket in self.gather_order if bucket in set(freed)):
            self.buffers[bucket].free()
            self.queue_gathers([bucket])

    def set_prefetch(self, prefetch: int) -> None:
        """Sets how many buckets are gathered ahead of use from now on."""
        self._prefetch = prefetch

    def free_all(self) -> None:
        """Frees every READY bucket and queues its gather for the next forward, in the agreed order."""
        self.finish_gathers()
        for buffer in self.buffers:
            if buffer.status is Status.READY:
                buffer.free()
        self.queue_gathers(self.gather_order)

    def _start_up_to(self, bucket: int, *, prefetch: int) -> None:
        buffer = self.buffers[bucket]
        if buffer.status is Status.READY:
            return
        while buffer.status is Status.SHARDED:
            # Everything that stands before it in the agreed order starts first, on every rank alike.
            assert self._to_gather, f"bucket '{buffer.name}' is SHARDED but not queued"
            self._start_next()
        while self._to_gather and self._under_way <= prefetch:
            self._start_next()

    def _start_next(self) -> None:
        buffer = self.buffers[self._to_gather.popleft()]
        if buffer.status is Status.SHARDED:
            self._timeline.watch(buffer.start_gather())
            self._under_way += 1

    def _finish(self, buffer: FusedCommBuffer) -> None:
        work = buffer.gather_work
        assert work is not None
        self._timeline.wait(work)
        buffer.finish_gather()
        self._under_way -= 1

    def _finish_layer(self, bucket: int) -> None:
        """Waits for the bucket, and for vectors of its layers, where nobody but the user knows what comes next.

        ``F.linear`` with a bias whose storage is away leaves it out, in silence; with such a weight it raises.
        """
        self.finish_gather(bucket)
        for other in self._vectors_beside.get(bucket, ()):
            self.finish_gather(other)

    # -- guard.ValueKeeper ---------------------------------------------------------------------------------------

    def make_readable(self, param: EagerParamBase) -> None:
        """Waits for the parameter's gather if one is under way; never starts one."""
        place = self._places.get(id(param))
        if place is None:
            return
        buffer = self.buffers[place.bucket]
        if buffer.status is Status.SYNCING:
            self._finish_layer(place.bucket)
        elif buffer.status is Status.SHARDED:
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

    def note_late(self, name: str, param: EagerParamBase) -> None:
        """A frozen parameter came after the model was wrapped. ``step()`` sees to it that it stays frozen."""
        self._late.append((name, param))

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
        self._start_unasked()  # a forward without the model around it, such as one of a sublayer, has not yet
        self._wake()
        self.reducer.begin_backward()

    def end_backward(self) -> None:
        """Part of ``backward.BackwardListener``."""
        self._start_unasked()
        self._entries = [0] * len(self._entries)
        self._learn_order()
        self.reducer.gather_order_changed = self.learned_gather_order is not None
        self.reducer.end_backward()

    def _start_unasked(self) -> None:
        """Gathers that no layer asked for on this rank: another one may stand in its forward and wait for them.

        Not in a backward that has nothing to do with this model: it may be this rank's alone.
        """
        if self.reducer.armed:
            self.start_gathers()

    def abort_backward(self) -> None:
        """Part of ``backward.BackwardListener``."""
        self.reducer.abort_backward()

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start of ``step()``: nothing is inside a forward any more, and no parameter has left its bucket."""
        self.forget_forward()
        self._first_uses, self._used = [], set()
        self.start_gathers()
        guard.guard_again(self._lists, self)
        guard.check_frozen(self._late)
        self._written.clear()
        for buffer in self.buffers:
            buffer.check_params()

    def forget_forward(self) -> None:
        """Forgets what was noted of forwards so far: units left open, and how often each was entered."""
        self._close_units()
        self._entries = [0] * len(self._entries)

    def _close_units(self) -> None:
        self._active = [0] * len(self._active)
        self._active_total = 0

    def adopt_gather_order(self, order: list[int]) -> None:
        """Takes the order that rank 0 published."""
        self.gather_order = order
        self.learned_gather_order = None

    def _learn_order(self) -> None:
        order = [*self._first_uses, *(bucket for bucket in self.gather_order if bucket not in self._used)]
        self.learned_gather_order = order if order != self.gather_order else None

    # -- registration --------------------------------------------------------------------------------------------

    def _find_places(self, plan: UnitPlan) -> None:
        units = {id(entry.param): entry.unit for entry in plan.params}
        for buffer in self.buffers:
            for index, param in enumerate(buffer.params):
                unit = units[id(param)]
                self._places[id(param)] = Place(buffer.layout.number, index, unit)
                if buffer.layout.number not in self._unit_buckets[unit]:
                    self._unit_buckets[unit].append(buffer.layout.number)

        self._find_vectors(plan)
        for unit, key in plan.captured:
            place = self._places.get(key)
            if place is not None and place.bucket not in self._unlooked[unit]:
                self._unlooked[unit].append(place.bucket)

    def _find_vectors(self, plan: UnitPlan) -> None:
        by_layer: dict[str, list[EagerParamBase]] = {}
        for entry in plan.params:
            if id(entry.param) in self._places:
                by_layer.setdefault(entry.name.rpartition(".")[0], []).append(entry.param)
        for params in by_layer.values():
            vectors = {self._places[id(param)].bucket for param in params if param.ndim == 1}
            for bucket in {self._places[id(param)].bucket for param in params}:
                beside = self._vectors_beside.setdefault(bucket, [])
                beside.extend(sorted(vectors - {bucket, *beside}))

    def _register(self, plan: UnitPlan, params: list[EagerParamBase]) -> None:
        model = plan.units[0].layer
        for index, unit in enumerate(plan.units):
            before = unit.layer.register_forward_pre_hook(_layer_hook(self, unit.layer, Schedule.enter_unit, index))
            # Before hooks that are there already: those of weight_norm and spectral_norm read parameters.
            unit.layer._forward_pre_hooks.move_to_end(before._hook_id, last=False)
            unit.layer.register_forward_post_hook(_layer_hook(self, unit.layer, Schedule.leave_unit, index))
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
                place = self._places[id(param)]
                param._register_backward_hook(_gradient_hook(self, place.bucket, place.slot))
        self._sleeping = [param for param in self._sleeping if param.stop_gradient]


def _layer_hook(
    schedule: Schedule, layer: nn.Layer, method: Callable[[Schedule, int], None], unit: int
) -> Callable[..., None]:
    """A hook that keeps neither schedule nor layer alive, changes no inputs or outputs, and is deaf in deep copies."""
    schedule_ref, layer_ref = weakref.ref(schedule), weakref.ref(layer)

    def hook(caller: nn.Layer, *_: Any) -> None:
        target = schedule_ref()
        if target is not None and caller is layer_ref():
            method(target, unit)

    return hook


def _gradient_hook(schedule: Schedule, bucket: int, index: int) -> Callable[[], None]:
    """A hook for after the gradient was accumulated. It cannot be removed, so it goes quiet with the schedule."""
    reference = weakref.ref(schedule)

    def hook() -> None:
        target = reference()
        if target is None:
            return
        try:
            if not backward.in_backward():
                raise StateError(
                    "a gradient came in, but nobody announced its backward, so it would never be reduced: something "
                    "put back paddle.base.core.eager.run_backward after the model was wrapped. Wrap the model after it"
                )
            target.reducer.take_gradient(bucket, index)
        except BaseException as error:
            backward.keep_error(error)
            raise

    return hook


def keep_schedule(model: nn.Layer, schedule: Schedule) -> None:
    """Has ``model`` own ``schedule``: a model outlives its optimizer, and gathers may still be under way then.

    So may a layer of it that is kept alone.
    """
    for layer in model.sublayers(include_self=True):
        layer.__dict__["_hp_sharding_schedule"] = _Kept(schedule)


def schedule_of(model: nn.Layer) -> Schedule | None:
    """The schedule of a wrapped model; None for others, and for deep copies of wrapped ones."""
    kept = model.__dict__.get("_hp_sharding_schedule")
    if kept is None or kept.schedule is None or kept.schedule.model is not model:
        return None
    schedule: Schedule = kept.schedule
    return schedule


class _Kept:
    """Holds the schedule in the model's attributes; copies and pickles of the model get an empty one."""

    def __init__(self, schedule: Schedule | None = None) -> None:
        self.schedule = schedule

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()
