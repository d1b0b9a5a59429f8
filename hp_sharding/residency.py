"""Residency, stage 3: which units hold their parameters, and for how long.

A unit's parameters are gathered when its forward begins and freed when it ends, gathered once more when the gradients
of its outputs come in, and freed when its own are done. What is expected next is gathered ahead. All of it follows
from what the model does, which is the same on all ranks, and from nothing that one rank sees alone, such as whether
a gather happens to be over; so all ranks start the same gathers in the same order, and the communicator notices where
they do not.

A unit is needed by *calls*. Each run of its forward is one, and notes the parameters it looks up, its own and others'.
In backward a call is *open* from when the gradient of something that it returned comes in until all parameters that
it used have theirs: then every operation that has read them is over. Where frozen parameters took part, the gradients
of its inputs must be in as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import paddle

from . import backward
from .buffer import FusedCommBuffer, Status
from .foresight import Foresight, Phase
from .gathers import Gathers, Place
from .lookups import Lookups
from .timeline import Timeline

_ROOT = 0
_NEVER = (-1, -1)
"""Is awaited where nobody says when a call is over, so that it lasts until its backward ends."""


class Call:
    """One run of a unit's forward, kept by the hooks on what it returned.

    Attributes:
        unit: whose.
        units: those whose parameters it used, its own first; a dict for its order.
        places: (bucket, slot) of the parameters that it looked up.
        recorded: those of them that it looked up while gradients were on.
        unrecorded: the others: as in a function that recompute will run again, and whose gradients then come in a
            backward of its own.
        inner: what the calls inside it looked up.
        differentiable: whether gradients were switched on when it began.
        awaited_inputs: stand-ins for inputs whose gradients have to be in before it is over.
        lasts: it is not over before its backward is, whatever gradients are in.
        backward: number of the backward that has opened it last.
        made: number of the backward before which its forward ran.
    """

    __slots__ = (
        "awaited_inputs", "backward", "differentiable", "inner", "lasts", "made", "places", "recorded", "unit", "units",
        "unrecorded",
    )  # fmt: skip

    def __init__(self, unit: int, made: int) -> None:
        self.unit = unit
        self.units: dict[int, None] = {unit: None}
        self.places: set[tuple[int, int]] = set()
        self.inner: set[tuple[int, int]] = set()
        self.unrecorded: set[tuple[int, int]] = set()
        self.recorded: set[tuple[int, int]] = set()
        self.differentiable = paddle.is_grad_enabled()
        self.awaited_inputs: set[tuple[int, int]] = set()
        self.lasts = False
        self.backward = -1
        self.made = made

    def lose_places(self) -> None:
        """The buckets are others by now, so that nobody can tell when it is over: it lasts."""
        for places in (self.places, self.recorded, self.unrecorded, self.inner):
            places.clear()
        self.lasts = True


class _Open(NamedTuple):
    """A call whose backward is under way.

    ``level`` is the depth of the backward that runs its graph: reentrant recompute runs one inside another. ``hooked``
    is False for a forward that recompute has just run again, of which no gradient has been seen.
    """

    call: Call
    level: int
    awaited: set[tuple[int, int]]
    hooked: bool


class ResidencyRules(NamedTuple):
    """What ``UnitGathers`` knows of the model.

    Attributes:
        unit_buckets: buckets of each unit; each belongs to one.
        captured: for a unit, parameters that its layers hold in attributes of their own and may not look up.
        kept: units that stay gathered from forward to backward.
    """

    unit_buckets: Sequence[Sequence[int]]
    captured: Mapping[int, Sequence[Place]]
    kept: frozenset[int]


class UnitGathers(Gathers):
    """Gathers and frees units as they are used.

    Args:
        ahead: units gathered before they are needed.
        before: what served the same units while their buckets were others; nothing of it is under way.
    """

    def __init__(
        self,
        buffers: Sequence[FusedCommBuffer],
        rules: ResidencyRules,
        *,
        ahead: int | None,
        timeline: Timeline,
        before: UnitGathers | None = None,
    ) -> None:
        super().__init__(buffers, ahead=ahead, timeline=timeline)
        self.foresight: Foresight = Foresight() if before is None else before.foresight
        self._rules = rules
        self._lookups = Lookups(rules.unit_buckets, [len(buffer.params) for buffer in buffers], rules.captured)
        self._uncounted = _small_units(buffers, rules) | {_ROOT}
        self._calls: list[Call] = []
        self._open: list[_Open] = []
        self._resident: dict[int, None] = {}
        self._expected: list[int] = []
        self._kept: set[int] = set()
        self._deferred = False
        self._ahead_of_use: dict[int, None] = {}
        self._wrong_guesses = 0
        self._backward: int = 0 if before is None else before._backward + 1
        self._first_backward = self._backward
        self._opened: dict[int, None] = {}
        """Units opened in the backward under way; none: it has nothing to do with this model."""

    # -- forward -------------------------------------------------------------------------------------------------

    @property
    def call(self) -> Call | None:
        """The innermost call under way."""
        return self._calls[-1] if self._calls else None

    def enter(self, unit: int, *, trains: bool) -> None:
        """A unit's forward begins; returns once those of its parameters are there that it may not look up."""
        if not self._calls and not self._pins and not backward.in_backward():
            self.foresight.begin_forward()
        call = Call(unit, self._backward)
        for place in self._rules.captured.get(unit, ()):
            call.places.add((place.bucket, place.slot))
            call.units[place.unit] = None
        self._calls.append(call)
        if backward.in_backward():
            self._expect_graph(call)
        self._use(call.units, self._phase(trains))

    def leave(self, unit: int) -> None:
        """A unit's forward has ended, or raised."""
        while self._calls:
            call = self._calls.pop()
            if self._calls:
                self._calls[-1].inner |= call.places | call.inner
            if call.unit == unit:
                self._lookups.learn(unit, call.places)
                break
        self._release()

    def need(self, place: Place, *, trains: bool) -> None:
        """A parameter is looked up inside a forward; returns once it is there."""
        call = self._calls[-1]
        self._note(call, (place.bucket, place.slot))
        if place.unit not in call.units:
            call.units[place.unit] = None
            self._use([place.unit], self._phase(trains))
        if self.buffers[place.bucket].status is Status.SYNCING:
            self.finish(place.bucket)

    def note_use_by_function(self) -> None:
        """A parameter was looked up, and not by a layer that belongs to its unit.

        If this is the first run of a function that recompute will run again, no hook will tell when it does.
        """
        call = self._calls[-1]
        if call.differentiable and not paddle.is_grad_enabled() and backward.in_custom_forward():
            call.lasts = True

    def forget_forward(self) -> None:
        """A forward or backward may have raised: nothing is under way any more."""
        if self._calls or self._open:
            self._calls.clear()
            self._end()

    # -- backward ------------------------------------------------------------------------------------------------

    def enter_backward(self, call: Call) -> None:
        """The gradient of something that the call returned has come in; returns once its parameters are there."""
        if call.backward == self._backward:
            return
        call.backward = self._backward
        if call.made < self._first_backward:
            call.lose_places()
        level = backward.depth()
        # The call's graph is run here. What was run again of the same unit only gave the values back that it lacked.
        self._open = [
            entry
            for entry in self._open
            if entry.call is not call and (entry.hooked or entry.level <= level or entry.call.unit != call.unit)
        ]
        self._open.append(_Open(call, level, self._awaited(call), True))
        self._opened.update(call.units)
        self._use(call.units, Phase.BACKWARD)

    def arrive(self, place: tuple[int, int]) -> None:
        """The gradient of a parameter, as (bucket, slot), or of an awaited input is in."""
        level = backward.depth()
        over = False
        for entry in self._open:
            counts = entry.level == level or (entry.level < level and place in entry.call.unrecorded)
            if counts and place in entry.awaited:
                entry.awaited.discard(place)
                over = over or not entry.awaited
        if over:
            self._close([entry for entry in self._open if not entry.awaited])
        if self._deferred and (over or not self._open or place in self._open[-1].call.places):
            self._start_expected()

    def begin_backward(self) -> None:
        """An outermost backward begins."""
        self._backward += 1
        self._opened.clear()

    def end_nested(self, level: int) -> None:
        """A backward inside another one has ended, at this depth."""
        self._close([entry for entry in self._open if entry.level >= level])

    def end_backward(self) -> None:
        """An outermost backward has ended, or failed."""
        if self._opened or self._open:
            self._end()
        self._backward += 1

    def end_partial(self) -> Call | None:
        """``paddle.grad`` has ended. Returns a call that needs all it opened, for a backward through its results."""
        call = None
        if self._opened:
            call = Call(next(iter(self._opened)), self._backward)
            call.units.update(self._opened)
        self.end_backward()
        return call

    # -- Gathers -------------------------------------------------------------------------------------------------

    def unshard(self) -> list[int]:
        """Part of ``Gathers``."""
        for unit in range(len(self._rules.unit_buckets)):
            self._start_unit(unit)
        self.finish_under_way()
        self._pins += 1
        return []

    def reshard(self, freed: Sequence[int]) -> None:
        """Part of ``Gathers``."""
        try:
            self._keep_writes()
        finally:
            self._pins -= 1
        self._release()
        if not self._pins:
            # All parameters at once are more than any step needs.
            self.buffers[0].place.pool.trim()

    def take_wrong_guesses(self, uses: Sequence[int]) -> int:
        """Part of ``Gathers``: units that were needed and not under way, or were let go without having been needed."""
        count, self._wrong_guesses = self._wrong_guesses, 0
        self._started.clear()
        return count

    def begin_step(self) -> None:
        """Part of ``Gathers``."""
        if self._pins:
            self._keep_writes()
        self._calls.clear()
        self._kept.clear()
        self._expected = []
        self.foresight.begin()
        self._end()

    def take_update(self, bucket: int) -> None:
        """Part of ``Gathers``: gathers at once what the next forward begins with."""
        buffer = self.buffers[bucket]
        if self._pins:
            buffer.mark_stale()
            self._start(buffer)
            return
        for unit in self._next_units():
            if bucket in self._rules.unit_buckets[unit]:
                self._resident[unit] = None
                self._start(buffer)

    def end_step(self) -> None:
        """Part of ``Gathers``."""
        if self._pins:
            self.finish_under_way()
            return
        self._expected = self._next_units()
        if self._timeline.enabled:
            self._ahead_of_use = dict.fromkeys(self._expected)
        for unit in self._expected:
            self._start_unit(unit)

    def begin_anew(self) -> None:
        """Part of ``Gathers``."""
        self.end_step()

    # -- parts ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _note(call: Call, key: tuple[int, int]) -> None:
        if paddle.is_grad_enabled() or not call.differentiable:
            call.places.add(key)
            call.recorded.add(key)
            call.unrecorded.discard(key)
        elif backward.in_custom_forward():
            call.places.add(key)
            if key not in call.recorded:
                call.unrecorded.add(key)
        # Else it is only read: no gradient comes of it, and it may be this rank alone that looks.

    def _phase(self, trains: bool) -> Phase:
        if backward.in_backward():
            return Phase.BACKWARD
        return Phase.FORWARD if trains else Phase.EVALUATE

    def _keep_writes(self) -> None:
        for buffer in self.buffers:
            if buffer.status is Status.READY:
                buffer.keep_writes()

    def _next_units(self) -> list[int]:
        return self.foresight.ahead(self._ahead + 1, self._uncounted) if self._ahead else []

    def _use(self, units: Iterable[int], phase: Phase) -> None:
        """Makes units valid, starts those that are expected next, and lets go of all that is not needed.

        Where everything is there, as inside ``full_parameters``, a rank may run the model alone: that changes nothing.
        """
        if self._pins:
            return
        units = [unit for unit in units if self._rules.unit_buckets[unit]]
        for unit in units:
            self.foresight.note(phase, unit)
        if units and self._ahead:
            self._expect(units, self._ahead)
        if phase is not Phase.BACKWARD:
            self._kept.update(self._rules.kept.intersection(units))
        self._release()
        if self._timeline.enabled and self._ahead:
            self._judge(units)
        for unit in units:
            self._start_unit(unit)
        self._deferred = phase is Phase.BACKWARD and self._others_end()
        if not self._deferred:
            self._start_expected()
        whole = phase is Phase.BACKWARD
        for unit in units:
            for bucket in self._rules.unit_buckets[unit] if whole else self._lookups.at_once(unit):
                self.finish(bucket)

    def _expect(self, units: list[int], ahead: int) -> None:
        """Looks ahead from a use of ``units``. The model's own, which enclose all others, and small ones come free."""
        in_use = self._needed_by_calls().union(units, self._uncounted)
        n_units = ahead + (units == [_ROOT])
        near = self.foresight.ahead(n_units, in_use)
        # What was in sight, also a unit in use now, is not let go where it is needed again soon after: the last units
        # of a forward begin the backward, and one that lies around others comes between.
        far = self.foresight.ahead(n_units + 1, in_use)
        self._expected = near + [unit for unit in self._expected if unit in far and unit not in near]

    def _judge(self, units: Sequence[int]) -> None:
        """Whether these were foreseen; what is expected next is gathered ahead from here on."""
        self._wrong_guesses += sum(unit not in self._resident for unit in units)
        for unit in units:
            self._ahead_of_use.pop(unit, None)
        self._ahead_of_use.update((unit, None) for unit in self._expected if unit not in self._resident)

    def _start_expected(self) -> None:
        self._deferred = False
        for unit in self._expected:
            self._start_unit(unit)

    def _others_end(self) -> bool:
        """In backward, whether the call before this one only waits for its last gradients to be put down.

        They come next, and with them its memory. Where they do not, the first gradient of this call says so.
        """
        if not self._open:
            return False
        *others, this = self._open
        trains = any(self._trains(place) for place in this.call.places)
        return trains and any(not this.call.units.keys() >= entry.call.units.keys() - {_ROOT} for entry in others)

    def _expect_graph(self, call: Call) -> None:
        """Recompute runs a forward again. Where another backward will run its graph, it stays until that has ended."""
        level = backward.depth()
        known = any(entry.hooked and entry.level == level and entry.call.unit == call.unit for entry in self._open)
        if paddle.is_grad_enabled() and not known:
            self._open.append(_Open(call, level + 1, {_NEVER}, False))
            self._opened.update(call.units)

    def _close(self, entries: Sequence[_Open]) -> None:
        if not entries:
            return
        for entry in entries:
            self._open.remove(entry)
            self._kept.difference_update(entry.call.units)
        self._release()

    def _end(self) -> None:
        if self._pins:
            self._open.clear()
            self._opened.clear()
            return
        self._kept.difference_update(self._opened)
        self._open.clear()
        self._opened.clear()
        self._expected = []
        self._deferred = False
        self.foresight.begin()
        self._release()

    def _needed_by_calls(self) -> set[int]:
        needed: set[int] = set()
        for call in self._calls:
            needed.update(call.units)
        for entry in self._open:
            needed.update(entry.call.units)
        return needed

    def _release(self) -> None:
        if self._pins:
            return
        needed = self._needed_by_calls().union(self._expected, self._kept)
        for unit in [unit for unit in self._resident if unit not in needed]:
            del self._resident[unit]
            if self._timeline.enabled:
                self._wrong_guesses += self._ahead_of_use.pop(unit, unit) is None
            for bucket in self._rules.unit_buckets[unit]:
                self.finish(bucket)
                if self.buffers[bucket].status is Status.READY:
                    self.buffers[bucket].keep_writes()
                    self.buffers[bucket].free()

    def _start_unit(self, unit: int) -> None:
        self._resident[unit] = None
        for bucket in self._rules.unit_buckets[unit]:
            if self.buffers[bucket].status is Status.SHARDED:
                self._start(self.buffers[bucket])

    def _awaited(self, call: Call) -> set[tuple[int, int]]:
        trained = {place for place in call.places if self._trains(place)}
        awaited = trained | call.awaited_inputs
        if len(trained) < len(call.places):
            # Frozen ones may stand behind what the units inside return, where that has nothing to do with the inputs.
            awaited |= {place for place in call.inner if self._trains(place)}
        # A frozen parameter of another unit: nobody has hooked what it is multiplied with.
        unannounced = len(trained) < len(call.places) and not call.awaited_inputs
        return awaited | {_NEVER} if call.lasts or unannounced or not awaited else awaited

    def _trains(self, place: tuple[int, int]) -> bool:
        return not self.buffers[place[0]].params[place[1]].stop_gradient


SMALL = 8
"""A unit that is this many times smaller than the median one, such as a last LayerNorm, takes no place ahead."""


def _small_units(buffers: Sequence[FusedCommBuffer], rules: ResidencyRules) -> set[int]:
    sizes = {
        unit: sum(buffers[bucket].layout.nbytes for bucket in buckets)
        for unit, buckets in enumerate(rules.unit_buckets)
        if buckets
    }
    return {unit for unit, nbytes in sizes.items() if nbytes * SMALL < statistics.median(sizes.values())}
