"""Measures steps, agrees on them with all ranks, and puts one candidate after the other in force between two steps."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..assembly import Foundation, control_lanes
from ..comm import Communicator, current_device
from ..config import AUTO, START_MB, ShardingConfig
from ..facts import largest
from ..layout import model_state_bytes
from ..optimizer import ShardedOptimizer
from ..relayout import can_relayout, relayout
from ..timeline.meeting import Way
from .search import Measured, Search

LOG = logging.getLogger("hp_sharding")

FIRST_STEPS = 3
"""Steps that are not counted at first: storage is taken, and the order of the layers is learned."""
SKIPPED_STEPS = 1
"""Steps that are not counted after a change."""
COUNTED_STEPS = 3
"""Steps that are counted each time that a candidate is measured."""
MAX_PUT_OFF = 20
"""How often in a row nothing may be changed before somebody is told."""
TUNED = ("comm_buffer_size_MB", "prefetch_depth")
"""What can be ``"auto"``, in the order in which it is chosen."""
DEPTHS = (1, 2, 3)
FACTORS = tuple(2.0**power for power in range(-5, 4))
"""Candidates for the size of buckets, as multiples of the one that tuning begins with."""
MB = 1 << 20


class Choice(NamedTuple):
    """What was measured of one setting.

    Attributes:
        key: of ``ShardingConfig``.
        value: what it was set to.
        step_ms: median step, in milliseconds, of the rank that took longest.
        exposed_ms: median of what of it was spent waiting for communication.
        n_steps: how many were counted.
    """

    key: str
    value: float
    step_ms: float
    exposed_ms: float
    n_steps: int


class _Knob(NamedTuple):
    """A setting to be chosen: its candidates in order, and which of them is in force."""

    key: str
    values: Sequence[float]
    start: int


class _Times(NamedTuple):
    """One step on this rank, in milliseconds."""

    step_ms: float
    exposed_ms: float


def begin(foundation: Foundation, asked: ShardingConfig) -> ShardingConfig:
    """The settings to begin with: numbers in the place of ``"auto"``, within the budget."""
    begun = asked.begun()
    budget_bytes = _budget_bytes(foundation, asked)
    if asked.comm_buffer_size_MB == AUTO:
        start_mb = float(begun.comm_buffer_size_MB)
        fitting = _fitting(foundation, begun, budget_bytes) or [START_MB * min(FACTORS)]
        size_mb = max((mb for mb in fitting if mb <= start_mb), default=fitting[0])
        begun = dataclasses.replace(begun, comm_buffer_size_MB=size_mb)
    (taken_bytes,) = _taken_bytes(foundation, [begun])
    if taken_bytes > budget_bytes and _is_first(foundation.lanes):
        LOG.warning(
            "tuning_budget_MB=%g: nothing that can be chosen takes so little. What takes the least, "
            "comm_buffer_size_MB=%g, is in force, and takes %.2f MB",
            budget_bytes / MB, begun.comm_buffer_size_MB, taken_bytes / MB,
        )  # fmt: skip
    return begun


class Tuner:
    """Chooses what a ``ShardingConfig`` leaves open.

    Attributes:
        asked: the settings that were given, ``"auto"`` among them.
        is_over: whether all has been chosen; ``optimizer.config`` has it.
        measured: what was measured of what has been chosen.

    Args:
        optimizer: held weakly; its parts are those of a new layout after each change.
        foundation: what its buckets are made of.
        asked: see above.
    """

    def __init__(self, optimizer: ShardedOptimizer, foundation: Foundation, asked: ShardingConfig) -> None:
        self.asked = asked
        self.is_over = False
        self.measured: list[Choice] = []
        self._optimizer = weakref.ref(optimizer)
        self._foundation = foundation
        self._budget_bytes = _budget_bytes(foundation, asked)
        self._open = [key for key in TUNED if getattr(asked, key) == AUTO]
        self._knob: _Knob | None = None
        self._search = Search(1, 0)
        self._current = 0
        self._times: list[_Times] = []
        self._n_steps = 0
        self._n_put_off = 0
        self._is_paused = False
        self._hears_of_clears = False
        self._rests = False
        self._due = FIRST_STEPS + COUNTED_STEPS
        self._last_s = time.perf_counter()
        foundation.timeline.enabled = True

    # -- told by the optimizer -----------------------------------------------------------------------------------

    def end_step(self) -> None:
        """A step has been made."""
        if self.is_over or self._rests:
            return
        now_s = time.perf_counter()
        recorded = self._foundation.timeline.steps
        self._times.append(_Times((now_s - self._last_s) * 1e3, recorded[-1].exposed_ms if recorded else 0.0))
        del self._times[:-COUNTED_STEPS]
        self._last_s = now_s
        self._n_steps += 1
        if not self._hears_of_clears and self._n_steps == self._due + MAX_PUT_OFF:
            self._rest()

    def end_clear(self, *, awaits_backward: bool) -> None:
        """Gradients have been cleared. Collective once enough steps have been made.

        What a forward has kept for its backward may be of parameters as they lie now; so they stay for as long.
        """
        if self.is_over or self._is_paused:
            return
        self._hears_of_clears = True
        if self._rests:
            self._wake()
        if self._n_steps < self._due:
            return
        steps = self._agree(can_change=not awaits_backward and can_relayout(self._wrapped))
        if steps is None:
            self._put_off()
        else:
            self._n_put_off = 0
            self._go_on(steps)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing changes: somebody else works on the buckets."""
        self._is_paused, before = True, self._is_paused
        try:
            yield
        finally:
            self._is_paused = before

    def kept(self) -> dict[str, Any] | None:
        """What was chosen, and for how many ranks; None while it has not been."""
        config = self._wrapped.config
        chosen = {key: getattr(config, key) for key in TUNED if getattr(self.asked, key) == AUTO}
        return {**chosen, **self._ranks()} if self.is_over else None

    def adopt(self, kept: Mapping[str, Any]) -> None:
        """Puts in force what ``kept`` gave, here or in another run, and measures nothing more.

        Not where it was chosen for another number of ranks or another stage, where something is missing, or where
        something was chosen here already, nor where it takes more than the budget. Collective, between
        ``clear_grad()`` and the next forward.
        """
        asked = [key for key in TUNED if getattr(self.asked, key) == AUTO]
        fits = all(kept.get(key) == value for key, value in self._ranks().items())
        if self.is_over or not fits or any(key not in kept for key in asked):
            return
        # None is what was left alone, where nothing is gathered ahead of use.
        chosen = {key: kept[key] for key in asked if kept[key] is not None}
        config = dataclasses.replace(self._wrapped.config, **chosen)
        taken_bytes, *_ = _taken_bytes(self._foundation, [config])
        if taken_bytes > self._budget_bytes:
            if self._speaks:
                LOG.warning(
                    "what a checkpoint has of tuning, %s, takes %.1f MB, more than tuning_budget_MB=%g: it is chosen "
                    "afresh", chosen, taken_bytes / MB, self._budget_bytes / MB,
                )  # fmt: skip
            return
        if "comm_buffer_size_MB" in chosen:
            self._put_size(float(chosen["comm_buffer_size_MB"]))
        if "prefetch_depth" in chosen:
            self._put_depth(int(chosen["prefetch_depth"]))
        self._open, self._knob = [], None
        self._finish()

    # -- parts ---------------------------------------------------------------------------------------------------

    def _ranks(self) -> dict[str, int]:
        lanes = self._foundation.lanes
        return {
            "stage": self.asked.stage,
            "shard_ranks": lanes["gather"].nranks,
            "replicas": self._foundation.n_replicas,
            "tensor_ranks": lanes["tensor"].nranks if "tensor" in lanes else 1,
        }

    @property
    def _wrapped(self) -> ShardedOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _put_off(self) -> None:
        self._due = self._n_steps + 1
        self._n_put_off += 1
        if self._n_put_off == MAX_PUT_OFF and self._speaks:
            LOG.warning(
                "nothing can be tuned: whenever gradients are cleared a forward is still without its backward, or "
                "whole parameters are asked for, on some rank. Call optimizer.clear_grad() right after "
                "optimizer.step()"
            )

    def _rest(self) -> None:
        """Nobody clears gradients where that is heard of: steps cost no more than others until somebody does."""
        self._rests = True
        self._stop_timeline()
        if self._speaks:
            LOG.warning(
                "nothing can be tuned: optimizer.clear_grad() has not been called for %d steps. Buckets change in it, "
                "so call it right after optimizer.step(), on every rank, in place of model.clear_gradients()",
                self._n_steps,
            )

    def _wake(self) -> None:
        self._rests = False
        self._foundation.timeline.enabled = True
        self._n_steps, self._due = 0, FIRST_STEPS + COUNTED_STEPS
        self._last_s = time.perf_counter()

    @property
    def _speaks(self) -> bool:
        """Whether this is the rank that logs."""
        return _is_first(self._foundation.lanes)

    def _agree(self, *, can_change: bool) -> Measured | None:
        """The last steps, each as the slowest rank saw it; None while on some rank nothing can be changed."""
        numbers = [float(not can_change)]
        numbers += [number for times in zip(*self._times, strict=True) for number in times]
        lanes = self._foundation.lanes
        ways = [*map(Way, control_lanes(lanes)), *_tensor_ways(lanes)]
        busy, *agreed = largest(numbers, ways, label=f"measured steps, {self._n_steps} after the last change")
        return None if busy else Measured(agreed[:COUNTED_STEPS], agreed[COUNTED_STEPS:])

    def _go_on(self, steps: Measured) -> None:
        """Takes steps of what is in force, and puts the next candidate, or what has been chosen, in force."""
        if self._knob is None:
            self._knob = self._next_knob()
            if self._knob is None:
                self._finish()
                return
            self._search, self._current = Search(len(self._knob.values), self._knob.start), self._knob.start
        self._search.take(self._current, steps)
        candidate = self._search.next()
        if candidate is not None:
            self._put(self._knob, candidate)
            return
        self._settle(self._knob)
        self._go_on(self._search.measured[self._search.best])

    def _settle(self, knob: _Knob) -> None:
        best = self._search.best
        self._put(knob, best, is_last=True)
        self.measured += [
            Choice(knob.key, knob.values[number], found.step, found.exposed, len(found.step_ms))
            for number, found in sorted(self._search.measured.items())
        ]
        self._log(knob, best)
        self._knob = None

    def _put(self, knob: _Knob, candidate: int, *, is_last: bool = False) -> None:
        if candidate != self._current or is_last:
            value = knob.values[candidate]
            self._put_size(value) if knob.key == "comm_buffer_size_MB" else self._put_depth(int(value))
            self._current = candidate
        self._n_steps, self._due = 0, SKIPPED_STEPS + COUNTED_STEPS

    def _put_size(self, size_mb: float) -> None:
        optimizer = self._wrapped
        if size_mb != optimizer.config.comm_buffer_size_MB:
            relayout(optimizer, self._foundation, dataclasses.replace(optimizer.config, comm_buffer_size_MB=size_mb))

    def _put_depth(self, depth: int) -> None:
        optimizer = self._wrapped
        optimizer.config = dataclasses.replace(optimizer.config, prefetch_depth=depth)
        optimizer._schedule.gathers.set_ahead(optimizer.config.units_ahead)

    def _finish(self) -> None:
        self.is_over = True
        self._stop_timeline()

    def _stop_timeline(self) -> None:
        if not self.asked.timeline:
            self._foundation.timeline.stop()

    def _log(self, knob: _Knob, best: int) -> None:
        if not self._speaks:
            return
        figures = ", ".join(
            f"{knob.values[number]:g}: {found.step:.1f} ({found.exposed:.1f})"
            for number, found in sorted(self._search.measured.items())
        )
        LOG.info(
            "%s=%g chosen. Median ms of a step of the slowest rank, and what of it was waiting: %s",
            knob.key, knob.values[best], figures,
        )  # fmt: skip

    def _next_knob(self) -> _Knob | None:
        """The next setting to be chosen, with its candidates; None once all are."""
        config = self._wrapped.config
        while self._open:
            key = self._open.pop(0)
            if key == "comm_buffer_size_MB":
                sizes = _sizes(self._foundation, config, self._budget_bytes)
                return _Knob(key, sizes, sizes.index(float(config.comm_buffer_size_MB)))
            if config.units_ahead:
                taken = _taken_bytes(
                    self._foundation, [dataclasses.replace(config, prefetch_depth=depth) for depth in DEPTHS]
                )
                depths = [
                    depth
                    for depth, taken_bytes in zip(DEPTHS, taken, strict=True)
                    if depth == DEPTHS[0] or taken_bytes <= self._budget_bytes
                ]
                return _Knob(key, depths, 0)
            LOG.debug("%s: nothing is gathered ahead of use, so there is nothing to choose", key)
        return None


# -- candidates --------------------------------------------------------------------------------------------------------


def _sizes(foundation: Foundation, config: ShardingConfig, budget_bytes: float) -> list[float]:
    """Sizes in MB that give different buckets, within the budget. Always the one of ``config``, which is in force."""
    return sorted({*_fitting(foundation, config, budget_bytes), float(config.comm_buffer_size_MB)})


def _fitting(foundation: Foundation, config: ShardingConfig, budget_bytes: float) -> list[float]:
    """Sizes in MB that give different buckets, within the budget; of sizes that are alike the one of ``config``."""
    found: dict[Any, float] = {}
    own_mb = float(config.comm_buffer_size_MB)
    sizes = [START_MB * factor for factor in FACTORS]
    sizes = sorted({*sizes, own_mb}, key=lambda size_mb: (size_mb != own_mb, size_mb))
    changed = [dataclasses.replace(config, comm_buffer_size_MB=size_mb) for size_mb in sizes]
    for size_mb, of_size, taken_bytes in zip(sizes, changed, _taken_bytes(foundation, changed), strict=True):
        # Ranks that hold other parts of split parameters may find others alike.
        slots = tuple(layout.slots for layout in foundation.plan(of_size))
        key = size_mb if "tensor" in foundation.lanes else slots
        if taken_bytes <= budget_bytes:
            found.setdefault(key, size_mb)
    return sorted(found.values())


def _budget_bytes(foundation: Foundation, asked: ShardingConfig) -> float:
    if asked.tuning_budget_MB is not None:
        return asked.tuning_budget_MB * MB
    begun = asked.begun()
    whole = model_state_bytes(
        foundation.plan(begun), begun.stage, keeps_full=not begun.reshards_after_step, moment_bytes=0
    )
    (budget_bytes,) = _over_tensor(foundation, [_own_taken_bytes(foundation, begun) + whole.total // 10])
    return budget_bytes


def _taken_bytes(foundation: Foundation, configs: Sequence[ShardingConfig]) -> list[float]:
    """What each of ``configs`` takes of what is chosen, on the rank that it takes most on."""
    return _over_tensor(foundation, [_own_taken_bytes(foundation, config) for config in configs])


def _own_taken_bytes(foundation: Foundation, config: ShardingConfig) -> int:
    """What settings decide of this rank's memory: gradients in flight, and gathered parameters where units are freed.

    Full gradients, as in stage 1, and parameters that are all gathered at a time are there whatever is chosen.
    """
    state = model_state_bytes(
        foundation.plan(config),
        config.stage,
        keeps_full=not config.reshards_after_step,
        moment_bytes=0,
        units_ahead=config.units_ahead or 0,
    )
    return (state.gradients if config.stage > 1 else 0) + (state.parameters if config.stage == 3 else 0)


# -- ranks -------------------------------------------------------------------------------------------------------------


def _over_tensor(foundation: Foundation, numbers: Sequence[float]) -> list[float]:
    """The largest of each over the ranks among which parameters are split, which hold other parts. Collective."""
    ways = _tensor_ways(foundation.lanes)
    return largest(numbers, ways, label="bytes of settings") if ways else list(numbers)


def _tensor_ways(lanes: Mapping[str, Communicator]) -> list[Way]:
    return [Way(lanes["tensor"], on_host=not current_device().has_streams)] if "tensor" in lanes else []


def _is_first(lanes: Mapping[str, Communicator]) -> bool:
    return all(lane.rank == 0 for lane in lanes.values())
