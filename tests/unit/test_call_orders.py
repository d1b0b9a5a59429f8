"""Public calls in every order: what is allowed has plain Paddle's numbers, the rest is an error and leaves no trace."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import hp_sharding
from hp_sharding import CheckpointError, ConfigError, ShardingConfig, StateError, fleet, full_parameters, shard
from hp_sharding.fleet.session import Session
from tests.fakes import wrap
from tests.mistakes import KINDS, Training, refused
from tests.models import loss_of, make_batch, make_model, make_optimizer

SHARDED = [kind for kind in KINDS if kind != "plain"]
kinds = pytest.mark.parametrize("kind", KINDS)
sharded_kinds = pytest.mark.parametrize("kind", SHARDED)


class Plain:
    """The same training in plain Paddle, whose numbers count; what it lacks is done as a script would."""

    def __init__(self) -> None:
        self.kind = "Paddle"
        self.model = make_model("mlp")
        self.optimizer = make_optimizer("AdamW", self.model, learning_rate=paddle.optimizer.lr.StepDecay(0.05, 3))
        self.number = 0


Side = Any
Scenario = Callable[[Side], None]


def _backward(side: Side, **options: Any) -> paddle.Tensor:
    loss = loss_of(side.model, make_batch("mlp", side.number, 0))
    loss.backward(**options)
    side.number += 1
    return loss


def _step(side: Side) -> None:
    _backward(side)
    side.optimizer.step()
    side.optimizer.clear_grad()


def _on_sharded(side: Side, act: Callable[[Any], Any]) -> None:
    """What plain Paddle has no counterpart of, and what must not show in the numbers."""
    if not isinstance(side, Plain):
        act(side)


def _same_as_paddle(scenario: Scenario, kind: str) -> Training:
    """Runs the scenario on both, and two whole steps more; all values end alike, bit for bit."""
    plain, training = Plain(), Training(kind)
    for side in (plain, training):
        _step(side)
        scenario(side)
        _step(side)
        _step(side)
    for found, param in zip(training.values(), plain.model.parameters(), strict=True):
        np.testing.assert_array_equal(found, param.numpy())
    return training


# -- step, clear_grad, gradients ---------------------------------------------------------------------------------------


@kinds
def test_steps_and_clears_more_often_than_backwards(kind: str) -> None:
    def scenario(side: Side) -> None:
        side.optimizer.step()  # after a clear: with zeros
        side.optimizer.clear_grad()
        side.optimizer.clear_grad()
        _backward(side)
        side.optimizer.step()
        side.optimizer.step()
        side.optimizer.clear_grad(set_to_zero=False)
        side.optimizer.clear_grad()
        side.optimizer.step()
        _backward(side)
        side.optimizer.clear_gradients()

    _same_as_paddle(scenario, kind)


@pytest.mark.parametrize("kind", ["plain", "mixed", "stage 1", "stage 2", "stage 3"])
def test_a_step_before_anything_else(kind: str) -> None:
    training, other = Training(kind), Training(kind)
    assert training.optimizer.full_grad(training.model.gain) is None
    assert training.optimizer.local_grads() == []
    training.optimizer.step()
    training.optimizer.clear_grad()
    assert training.step() == other.step()


@kinds
def test_gradients_that_are_asked_for_and_set_at_any_time(kind: str) -> None:
    def scenario(side: Side) -> None:
        param = side.model.layers[2].weight
        _on_sharded(side, lambda side: side.optimizer.full_grad(param))
        _backward(side)
        side.optimizer.step()
        value = paddle.full(param.shape, 0.25)
        if isinstance(side, Plain):
            param.grad = value
        else:
            side.optimizer.set_full_grad(param, value)  # after the step: it counts in the next one
            np.testing.assert_array_equal(side.optimizer.full_grad(param).numpy(), value.numpy())
        side.optimizer.step()
        side.optimizer.clear_grad()

    _same_as_paddle(scenario, kind)


@kinds
def test_a_second_backward_of_a_graph_whose_parameters_were_updated(kind: str) -> None:
    """Paddle computes it with the values of now, or refuses it; with freed ones it is an error, and no hang."""
    training = Training(kind)
    training.step()
    loss = training.forward()
    loss.backward(retain_graph=True)
    training.optimizer.step()
    with contextlib.suppress(StateError):
        loss.backward()
    training.optimizer.clear_grad(set_to_zero=False)
    training.number += 1
    for _ in range(2):
        assert np.isfinite(training.step())
    assert all(np.isfinite(value).all() for value in training.values())


# -- no_sync -----------------------------------------------------------------------------------------------------------


@sharded_kinds
@pytest.mark.parametrize("flags", [(False, False), (True, True), (False, True), (True, False)])
def test_no_sync_is_left_in_another_order_than_it_was_entered(kind: str, flags: tuple[bool, bool]) -> None:
    def scenario(side: Side) -> None:
        if isinstance(side, Plain):
            for _ in range(3):
                _backward(side)
        else:
            first, second = (side.optimizer.no_sync(replicate_only=flag) for flag in flags)
            first.__enter__()
            second.__enter__()
            _backward(side)
            first.__exit__(None, None, None)
            _backward(side)
            second.__exit__(None, None, None)
            assert (side.optimizer._reducer.sync, side.optimizer._reducer.replicate) == (True, True)
            _backward(side)
            assert not side.optimizer._reducer._unreduced
        side.optimizer.step()
        side.optimizer.clear_grad()

    _same_as_paddle(scenario, kind)


@sharded_kinds
def test_no_sync_goes_on_until_the_last_block_ends(kind: str) -> None:
    training = Training(kind)
    outer, inner = training.optimizer.no_sync(), training.optimizer.no_sync()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    _backward(training)
    assert training.optimizer._reducer._unreduced, "the inner block is still open"
    inner.__exit__(None, None, None)
    assert training.optimizer._reducer.sync


@kinds
def test_a_wrong_no_sync_changes_nothing(kind: str) -> None:
    def scenario(side: Side) -> None:
        if not isinstance(side, Plain):
            with pytest.raises(ConfigError), side.optimizer.no_sync(replicate_only="yes"):
                raise AssertionError("it was entered")
        _step(side)

    _same_as_paddle(scenario, kind)


# -- full_parameters ---------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("ends", ["nested", "by an exception", "in another thread"])
def test_full_parameters_end_in_every_way(kind: str, ends: str) -> None:
    def write(model: nn.Layer, value: float) -> None:
        with paddle.no_grad():
            model.layers[0].weight.set_value(model.layers[0].weight * value)

    def scenario(side: Side) -> None:
        if isinstance(side, Plain):
            write(side.model, 0.5)
        elif ends == "nested":
            with full_parameters(side.model), full_parameters(side.model):
                write(side.model, 0.5)
        elif ends == "by an exception":
            with contextlib.suppress(ZeroDivisionError), full_parameters(side.model), full_parameters(side.model):
                write(side.model, 0.5)
                raise ZeroDivisionError
        else:
            whole = full_parameters(side.model)
            _elsewhere(whole.__enter__)
            write(side.model, 0.5)
            _elsewhere(lambda: whole.__exit__(None, None, None))

    _same_as_paddle(scenario, kind)


def _elsewhere(act: Callable[[], Any]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


@sharded_kinds
def test_full_parameters_of_a_part_or_of_what_holds_the_model_are_refused(kind: str) -> None:
    training = Training(kind)
    for other in (training.model.layers[0], nn.Sequential(training.model)):
        text = refused(full_parameters(other).__enter__)
        assert "Pass the very model that was wrapped" in text
    training.step()


# -- save and load -----------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("where", ["inside full_parameters", "inside no_sync", "before step", "twice"])
def test_a_save_anywhere_is_of_that_moment_and_shows_nowhere(kind: str, where: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    def save(side: Side) -> None:
        def act(side: Side) -> None:
            hp_sharding.save(tmp_path / "saved", side.model, side.optimizer)
            seen[:] = side.values()

        _on_sharded(side, act)

    def scenario(side: Side) -> None:
        blocks = {"inside full_parameters": lambda: full_parameters(side.model)} if not isinstance(side, Plain) else {}
        if where == "inside no_sync" and not isinstance(side, Plain):
            with side.optimizer.no_sync():
                _backward(side)
                save(side)
        elif where != "twice":
            _backward(side)
            with blocks.get(where, contextlib.nullcontext)():
                save(side)
        else:
            save(side)
            save(side)
        side.optimizer.step()
        side.optimizer.clear_grad()

    training = _same_as_paddle(scenario, kind)
    hp_sharding.load(tmp_path / "saved", training.model, training.optimizer)
    for found, expected in zip(training.values(), seen, strict=True):
        np.testing.assert_array_equal(found, expected)


@kinds
def test_a_load_between_forward_and_backward_forgets_the_step_under_way(kind: str, tmp_path: Path) -> None:
    """What the backward then computes is of no use; after a clear everything is as it was saved."""
    training, twin = Training(kind), Training(kind)
    for one in (training, twin):
        one.step()
    hp_sharding.save(tmp_path / "saved", twin.model, twin.optimizer)
    training.step()
    loss = training.forward()
    hp_sharding.load(tmp_path / "saved", training.model, training.optimizer)
    with contextlib.suppress(StateError):
        loss.backward()
    training.optimizer.clear_grad(set_to_zero=False)
    training.number = twin.number
    for _ in range(2):
        assert training.step() == twin.step()
    for found, expected in zip(training.values(), twin.values(), strict=True):
        np.testing.assert_array_equal(found, expected)


LONG = "x" * 300
PLACES = [
    ("save", "file"), ("save", "file/inside"), ("save", LONG), ("load", "file"), ("load", "missing"), ("load", LONG),
    ("save_full", "file/inside"), ("save_full", LONG), ("load_full", "file"), ("load_full", "missing"),
    ("load_full", LONG), ("latest_checkpoint", "file"), ("latest_checkpoint", LONG),
]  # fmt: skip
"""Calls, and what they cannot read or write."""


@pytest.mark.parametrize("kind", ["plain", "stage 3"])
def test_places_that_cannot_be_written_or_read(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "file.pdparams").write_text("no checkpoint")
    training, twin = Training(kind), Training(kind)
    for call, path in PLACES:
        more = () if call == "latest_checkpoint" else (training.model, training.optimizer)
        with pytest.raises(CheckpointError, match=re.escape(path.split("/")[0])):
            getattr(hp_sharding, call)(tmp_path / path, *more)
    assert hp_sharding.latest_checkpoint(tmp_path / "missing") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "file.pdparams"]
    assert training.step() == twin.step()


# -- wrapping ----------------------------------------------------------------------------------------------------------


@sharded_kinds
def test_a_model_is_wrapped_once_and_with_its_own_optimizer(kind: str, tmp_path: Path) -> None:
    training, twin = Training(kind), Training(kind)
    other = make_model("mlp")
    mixed = ShardingConfig(main_grad=True)
    refused(lambda: shard(training.model, make_optimizer("SGD", training.model), mixed))
    refused(lambda: shard(training.model, training.optimizer, mixed))
    refused(lambda: shard(other, training.optimizer, mixed))
    refused(lambda: shard(other, make_optimizer("SGD", training.model), mixed))
    refused(lambda: hp_sharding.save(tmp_path / "unused", other, training.optimizer))
    refused(lambda: training.optimizer.full_grad(other.gain))
    stepped = make_optimizer("Momentum", other)
    loss_of(other, make_batch("mlp", 0, 0)).backward()
    stepped.step()
    assert "already has state" in refused(lambda: shard(other, stepped, mixed))
    for _ in range(2):
        assert training.step() == twin.step()


@kinds
def test_what_is_left_when_the_other_is_gone(kind: str, tmp_path: Path) -> None:
    training, twin = Training(kind), Training(kind)
    assert training.step() == twin.step()
    del training.optimizer
    gc.collect()
    assert float(training.forward()) == float(twin.forward())
    with full_parameters(training.model):
        for param, expected in zip(training.model.parameters(), twin.values(), strict=True):
            np.testing.assert_array_equal(param.numpy(), expected)
    optimizer = twin.optimizer
    del twin
    gc.collect()
    for call in (
        optimizer.model_sharded_state_dict,
        lambda: hp_sharding.save(tmp_path / "unused", nn.Linear(2, 2), optimizer),
    ):
        refused(call)
    optimizer.step()
    optimizer.clear_grad()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"units": [nn.Conv2D]}, "has none of them"),
        ({"stage": 3, "reshard_after_forward": {"layers.7": False}}, "'layers.7' is no unit"),
        ({"stage": 3, "reshard_after_forward": {nn.Conv2D: False}}, "is no unit"),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_settings_that_name_nothing_are_refused_before_anybody_is_asked(
    settings: dict[str, Any], message: str, world: int
) -> None:
    model = make_model("mlp")
    config = ShardingConfig(**settings)
    with pytest.raises(ConfigError, match=message):  # and not that there is no parallel environment
        shard(model, make_optimizer("SGD", model), config, shard_group=list(range(world)))


def test_settings_are_what_they_were_when_the_model_was_wrapped() -> None:
    kept: dict[str, Any] = {"layers.0": False}
    classes: list[Any] = [nn.Linear]
    given: dict[str, Any] = {"stage": 3, "reshard_after_forward": kept, "units": classes}
    strategy = fleet.DistributedStrategy()
    strategy.hp_sharding_configs = given
    config = ShardingConfig.from_dict(given)
    model = make_model("mlp")
    rig = wrap(model, make_optimizer("SGD", model), **given)
    kept["layers.1"], given["stage"] = 7, 9
    classes.append(int)
    for found in (config, rig.optimizer.config, fleet.sharding_config(strategy)):
        assert (found.stage, found.reshard_after_forward, found.units) == (3, {"layers.0": False}, (nn.Linear,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        rig.optimizer.config.stage = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        strategy.hp_sharding_configs["stage"] = 1


# -- steps inside a backward -------------------------------------------------------------------------------------------


@sharded_kinds
def test_a_step_inside_a_backward_is_refused(kind: str) -> None:
    training, twin = Training(kind), Training(kind)
    assert training.step() == twin.step()
    hook = training.model.layers[2].register_forward_post_hook(
        lambda layer, inputs, output: output.register_hook(lambda grad: training.optimizer.step()) and None
    )
    with pytest.raises(StateError, match="inside a backward"):
        training.forward().backward()
    hook.remove()
    training.optimizer.clear_grad()
    for _ in range(2):
        assert training.step() == twin.step()


# -- timeline ----------------------------------------------------------------------------------------------------------


@kinds
def test_a_recording_inside_another_is_refused_and_the_first_goes_on(kind: str) -> None:
    training, twin = Training(kind), Training(kind)
    line = training.optimizer.timeline
    recording = line.record()
    refused(lambda: recording.__exit__(None, None, None))
    with recording:
        assert training.step() == twin.step()
        refused(lambda: line.record().__enter__())
        refused(recording.__enter__)
        assert training.step() == twin.step()
    assert recording.n_steps == 2
    assert recording.trace is not None
    refused(recording.__enter__)
    with pytest.raises(StateError, match="the block ended after 0 steps"), line.record(steps=1):
        pass
    assert training.step() == twin.step()


# -- fleet -------------------------------------------------------------------------------------------------------------


def test_a_start_that_is_refused_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    monkeypatch.setattr(fleet, "_SESSION", session)
    model = make_model("mlp")
    for call in (fleet.distributed_model, fleet.distributed_optimizer, fleet.distributed_scaler):
        assert "before fleet.init" in refused(functools.partial(call, model))
    strategy = fleet.DistributedStrategy()
    strategy.hp_sharding_configs = {"stage": 1, "main_grad": True}
    fleet.init(strategy=strategy)
    for degrees in ({"sharding_degree": 3}, {"dp_degree": -5}, {"mp_degree": -1}, {"pp_degree": 2}):
        other = fleet.DistributedStrategy()
        other.hybrid_configs = degrees
        refused(functools.partial(fleet.init, strategy=other))
    assert fleet.distributed_model(model) is model
    refused(lambda: fleet.distributed_model(model))
    inner = make_optimizer("SGD", model)
    refused(lambda: fleet.distributed_optimizer(make_optimizer("SGD", make_model("mlp"))), "it must have")
    optimizer = fleet.distributed_optimizer(inner)
    refused(lambda: fleet.distributed_optimizer(inner))
    refused(lambda: fleet.distributed_optimizer(optimizer))
    assert (optimizer.config.stage, optimizer.config.main_grad) == (1, True)
    refused(lambda: fleet.distributed_model(Training("stage 3").model))
