"""What is over leaves nothing behind: after a step, after ``clear_grad()``, after a forward that never came to its end.

Most of it would only cost memory, or show much later, so these look where it would lie.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base.framework import EagerParamBase
from paddle.utils import unique_name

from hp_sharding import ConfigError, StateError, full_parameters
from hp_sharding.buffer import Status
from hp_sharding.hooks import _UnitWatch
from hp_sharding.residency import Call, UnitGathers, _Open
from hp_sharding.running import RunningState
from tests.fakes import Rig, WaitingLane, wrap
from tests.tasks import BOTH, SMALL_MB

WIDTH = 8


def _rig(**settings: Any) -> Rig:
    paddle.seed(1)
    with unique_name.guard():
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        inner = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        return wrap(model, inner, **{"comm_buffer_size_MB": SMALL_MB, **settings})


def _backward(rig: Rig) -> None:
    x = paddle.to_tensor(np.random.default_rng(0).standard_normal([2, WIDTH], dtype=np.float32))
    rig.model(x).square().mean().backward()


def _units(rig: Rig) -> UnitGathers:
    units = rig.optimizer._schedule._units
    assert units is not None
    return units


def _clear(rig: Rig) -> None:
    rig.optimizer.clear_grad()


def _step(rig: Rig) -> None:
    rig.optimizer.step()


Act = Callable[[Rig], None]


# ---- gradients ----


@pytest.mark.parametrize("end", [_step, _clear])
def test_no_full_gradient_stays(end: Act) -> None:
    rig = _rig(stage=2)
    _backward(rig)
    in_flight = rig.optimizer._reducer._in_flight
    assert in_flight._flights
    end(rig)
    assert not in_flight._flights
    assert in_flight._live_bytes == 0


def test_what_an_interrupt_has_left_uncounted_counts_no_more() -> None:
    rig = _rig(stage=2)
    _backward(rig)
    in_flight = rig.optimizer._reducer._in_flight
    in_flight._live_bytes += 64
    rig.optimizer.clear_grad()
    assert in_flight._live_bytes == 0


def test_a_write_that_came_too_late_is_forgotten_with_the_gradients() -> None:
    rig = _rig(stage=1)
    rig.reduce.checks_inputs = False  # it is still under way, which is why the write cannot count
    _backward(rig)
    gradient = next(iter(rig.model.parameters())).grad
    with paddle.no_grad():
        gradient.scale_(2.0)
    with pytest.raises(StateError, match="changed in place after backward had sent it"):
        rig.optimizer.step()
    rig.optimizer.clear_grad()
    rig.optimizer.step()


@pytest.mark.parametrize("set_to_zero", [True, False])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_parameter_clears_what_paddle_holds_of_its_gradient(set_to_zero: bool, is_wrapped: bool) -> None:
    """Also where its model is wrapped no more."""
    rig = _rig(stage=1)
    rig.reduce.checks_inputs = False
    param = next(iter(rig.model.parameters()))
    model, pool = rig.model, rig.pool
    if not is_wrapped:
        del rig
        gc.collect()
    model(paddle.ones([2, WIDTH])).sum().backward()
    assert float(EagerParamBase._grad_ivar(param).abs().sum()) > 0
    param.clear_gradient(set_to_zero)
    left = EagerParamBase._grad_ivar(param)
    assert left is None or not left._is_initialized() or float(left.abs().sum()) == 0
    assert pool is not None


@pytest.mark.parametrize("end", [_step, _clear])
def test_what_a_scaler_has_found_counts_for_one_step(end: Act) -> None:
    rig = _rig(stage=2)
    _backward(rig)
    rig.optimizer._gradients._verdict = paddle.to_tensor(False)
    end(rig)
    assert rig.optimizer._gradients._verdict is None


# ---- running state ----


def _running(model: nn.Layer) -> RunningState:
    running = RunningState(model, [WaitingLane("agree")], _rig().optimizer.timeline)
    running.take_agreed([True] * len(running.written()))
    return running


def test_statistics_that_a_broken_step_has_sent_are_dropped_by_the_next() -> None:
    norm = nn.BatchNorm1D(4)
    running = _running(norm)
    running.start()
    n_sent = len(running._under_way)
    assert n_sent > 0
    running.start()
    assert len(running._under_way) == n_sent


def test_statistics_that_a_broken_step_has_sent_are_dropped_with_the_gradients() -> None:
    rig, norm = _rig(stage=2), nn.BatchNorm1D(4)
    running = rig.optimizer._reducer.running = _running(norm)
    running.start()
    rig.optimizer.clear_grad()
    assert not running._under_way


def test_a_step_ends_with_the_first_ranks_statistics_in_place() -> None:
    rig, norm = _rig(stage=2), nn.BatchNorm1D(4)
    running = rig.optimizer._reducer.running = _running(norm)
    _backward(rig)
    rig.optimizer.step()
    [lane] = running._lanes
    assert isinstance(lane, WaitingLane)
    assert lane.labels("broadcast")
    assert not running._under_way


# ---- gathers ----


@pytest.mark.parametrize("settings", [{"stage": 2}, {"stage": 3}], ids=str)
def test_a_step_inside_full_parameters_ends_with_all_of_them_there(settings: dict[str, Any]) -> None:
    rig = _rig(**settings, **BOTH)
    _backward(rig)
    with full_parameters(rig.model):
        rig.optimizer.step()
        assert _statuses(rig) == {Status.READY}


class _Skips(nn.Layer):
    """Does not use its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.first(x)


def test_a_step_frees_what_was_gathered_and_not_used() -> None:
    with unique_name.guard():
        model = _Skips()
        inner = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        settings: dict[str, Any] = {"comm_buffer_size_MB": SMALL_MB, "reshard_after_step": True, **BOTH}
        rig = wrap(model, inner, stage=2, **settings)
    for _ in range(3):
        _backward(rig)
        rig.optimizer.step()
        assert _statuses(rig) == {Status.SHARDED}


def test_nothing_is_loaded_into_shards_that_are_gathered() -> None:
    rig = _rig(stage=2, **BOTH)
    state = rig.optimizer.state_dict()
    _backward(rig)
    rig.optimizer.step()
    assert rig.gather.n_pending > 0
    rig.optimizer.set_state_dict(state)
    assert rig.gather.n_pending == 0


# ---- forwards ----


@pytest.mark.parametrize("end", [_step, _clear])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_forward_that_was_interrupted_past_all_hooks_is_over(stage: int, end: Act) -> None:
    rig = _rig(stage=stage)
    schedule = rig.optimizer._schedule
    _backward(rig)
    schedule.enter_part(1)
    assert (schedule.is_idle, schedule._parts) == (False, [1])
    end(rig)
    assert (schedule.is_idle, schedule._parts) == (True, [])
    if stage == 3:
        assert schedule.call is None
    rig.optimizer.clear_grad()


def test_hooks_forget_the_runs_of_such_a_forward() -> None:
    class Target:
        call = None

        def enter_unit(self, unit: int) -> None:
            """Takes note."""

    layer, target = nn.Linear(2, 2), Target()
    given: Any = target
    watch = _UnitWatch(given, [layer], 0)
    for _ in range(2):
        watch.begin(given, layer, ((), {}), is_part=False)
    assert len(watch._runs) == 1


def test_a_step_inside_a_backward_is_refused() -> None:
    rig = _rig(stage=2)
    x = paddle.ones([2, WIDTH])
    x.stop_gradient = False
    x.register_hook(lambda _: rig.optimizer._schedule.begin_step())
    with pytest.raises(StateError, match=r"step\(\) or load\(\)"):
        rig.model(x).sum().backward()
    rig.optimizer.clear_grad()


def test_what_was_written_is_checked_once() -> None:
    rig = _rig(stage=2)
    schedule, param = rig.optimizer._schedule, next(iter(rig.model.parameters()))
    for end in (_backward, _step):
        param.set_value(param.numpy())
        assert schedule._written
        end(rig)
        assert not schedule._written


def test_an_order_that_was_published_is_not_learned_any_more() -> None:
    rig = _rig(stage=2)
    schedule = rig.optimizer._schedule
    schedule.learned_gather_order = list(reversed(schedule.gathers.order))
    schedule.adopt_gather_order(schedule.learned_gather_order)
    assert schedule.learned_gather_order is None


# ---- storage ----


def _statuses(rig: Rig) -> set[Status]:
    return {buffer.status for buffer in rig.optimizer.buffers}


def _trims(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    trims: list[None] = []
    monkeypatch.setattr(rig.pool, "trim", lambda: trims.append(None))
    return trims


@pytest.mark.parametrize("steps", [False, True])
def test_what_was_gathered_for_full_parameters_is_freed_again(steps: bool) -> None:
    rig = _rig(stage=2, reshard_after_step=True)
    for _ in range(2):
        _backward(rig)
        rig.optimizer.step()
        rig.optimizer.clear_grad()
    if steps:
        _backward(rig)
    with full_parameters(rig.model):
        assert _statuses(rig) == {Status.READY}
        if steps:
            rig.optimizer.step()
    assert _statuses(rig) == {Status.SHARDED}


def test_what_a_step_frees_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = _rig(stage=2, reshard_after_step=True)
    _backward(rig)
    trims = _trims(rig, monkeypatch)
    rig.optimizer.step()
    assert trims


def test_what_full_parameters_needed_goes_back_to_the_system_in_stage_3(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = _rig(stage=3)
    trims = _trims(rig, monkeypatch)
    with full_parameters(rig.model):
        pass
    assert trims


def test_a_master_is_written_only_where_its_parameter_is_there() -> None:
    with unique_name.guard():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        model.to(dtype="bfloat16")
        inner = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), multi_precision=True)
        rig = wrap(model, inner, stage=3)
    [buffer] = [buffer for buffer in rig.optimizer.buffers if buffer.params]
    value = paddle.zeros(buffer.params[0].shape)
    with pytest.raises(StateError, match="write_master"):
        buffer.write_master(0, value)


def test_a_state_that_is_none_is_refused_before_gathers_are_waited_for() -> None:
    rig = _rig(stage=2, **BOTH)
    _backward(rig)
    rig.optimizer.step()
    n_pending = rig.gather.n_pending
    assert n_pending > 0
    wrong: Any = {"0.weight": 1}
    with pytest.raises(ConfigError, match="model_sharded_state_dict: expected a dict of names and ShardedWeights"):
        rig.optimizer.sharded_state_dict(wrong)
    assert rig.gather.n_pending == n_pending


# ---- units, stage 3 ----


def _call(units: UnitGathers, unit: int) -> Call:
    return Call(unit, units._backward)


def _opened(units: UnitGathers, unit: int, level: int) -> None:
    """A call whose backward is under way at this depth, with its parameters there."""
    call = _call(units, unit)
    units._start_unit(unit)
    units._open.append(_Open(call, level, {(99, 0)}, True))
    units._opened.update(call.units)


def test_a_nested_backward_that_has_ended_holds_nothing() -> None:
    rig = _rig(stage=3)
    units = _units(rig)
    _opened(units, 1, level=2)
    assert 1 in units._resident
    units.end_nested(2)
    assert units._open == []
    assert 1 not in units._resident
    assert _statuses(rig) == {Status.SHARDED}


@pytest.mark.parametrize("pinned", [False, True])
def test_a_backward_that_has_ended_holds_nothing(pinned: bool) -> None:
    rig = _rig(stage=3)
    units = _units(rig)
    _opened(units, 1, level=1)
    units._pins += pinned
    units.end_backward()
    units._pins -= pinned
    assert units._open == []
    assert not units._opened


def test_a_backward_begins_without_what_an_earlier_one_has_left() -> None:
    units = _units(_rig(stage=3))
    units._opened[1] = None
    units.begin_backward()
    assert not units._opened


def test_a_step_begins_without_calls_and_kept_units() -> None:
    units = _units(_rig(stage=3))
    units._calls.append(_call(units, 1))
    units._kept.add(1)
    units.begin_step()
    assert units._calls == []
    assert units._kept == set()


def test_what_was_recorded_after_all_is_not_missed() -> None:
    units = _units(_rig(stage=3))
    call = _call(units, 1)
    call.unrecorded.add((1, 0))
    units._note(call, (1, 0))
    assert call.unrecorded == set()


def test_gathers_are_judged_once() -> None:
    units = _units(_rig(stage=3))
    units._started.append(1)
    units.take_wrong_guesses([])
    assert units._started == []


def test_a_unit_is_let_go_before_another_takes_its_place() -> None:
    rig = _rig(stage=3)
    units = _units(rig)
    units._start_unit(3)
    units._expected = []
    with paddle.no_grad():
        units.enter(1, trains=False)
    assert 3 not in units._resident
    units.leave(1)
