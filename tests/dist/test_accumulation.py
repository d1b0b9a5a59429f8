"""Gradients of several backwards add up, and each is divided once, whoever sends them and whenever."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import paddle
import pytest

from hp_sharding import StateError
from tests import harness
from tests.lanes import wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.reference import Values
from tests.sides import BOTH, FEW, SETTINGS, Factory, Side, compare

SUM_ORDER = 1e-6
"""Sums of several backwards are formed in another order where they are added up before they are sent."""


def _new(new: Factory, optimizer: str, name: str) -> Side:
    side: Side = new(lambda: make_model(name), lambda model: make_optimizer(optimizer, model))
    return side


def _micro(side: Side, number: int, name: str, scale: float = 1.0) -> None:
    side.backward(lambda rank: loss_of(side.model, make_batch(name, number, rank)) * scale)


def _varying_counts(new: Factory, name: str, optimizer: str, waits: bool) -> dict[str, Values]:
    """3, 1, 2 backwards a step, of very different scale; ``waits``: all but the last one under ``no_sync``."""
    side = _new(new, optimizer, name)
    number = 0
    snapshots = {}
    for step, count in enumerate((3, 1, 2, 1)):
        for micro in range(count):
            if waits and micro < count - 1:
                with side.no_sync():
                    _micro(side, number, name, scale=10.0**-micro)
            else:
                _micro(side, number, name, scale=10.0**-micro)
            number += 1
        side.step()
        side.clear_grad()
        snapshots[f"step {step}"] = side.values()
    return snapshots


@pytest.mark.parametrize("waits", [False, True])
def test_the_number_of_backwards_may_change_from_step_to_step(waits: bool) -> None:
    harness.run(compare, 2, _varying_counts, FEW, SUM_ORDER, "gpt", "SGD", waits)
    harness.run(compare, 2, _varying_counts, SETTINGS, SUM_ORDER, "mlp", "SGD", waits)


def test_four_ranks() -> None:
    harness.run(compare, 4, _varying_counts, FEW, SUM_ORDER, "mlp", "SGD", True)


def _without_end(new: Factory, order: str) -> dict[str, Values]:
    """Steps with nothing but backwards under ``no_sync``; ``order`` says where ``step`` and ``clear_grad`` stand."""
    side = _new(new, "Momentum", "mlp")
    snapshots = {}
    for step in range(4):
        with side.no_sync():
            _micro(side, 2 * step, "mlp")
            _micro(side, 2 * step + 1, "mlp")
            if order == "step inside":
                side.step()
                side.clear_grad()
        if order == "step outside":
            side.step()
            side.clear_grad()
        if order == "cleared before":
            side.clear_grad()
            _micro(side, 2 * step + 1, "mlp")
            side.step()
            side.clear_grad()
        snapshots[f"step {step}"] = side.values()
    return snapshots


@pytest.mark.parametrize("order", ["step inside", "step outside", "cleared before"])
def test_a_step_takes_what_only_no_sync_has_left(order: str) -> None:
    harness.run(compare, 2, _without_end, SETTINGS, SUM_ORDER, order)


def _kept_gradients(new: Factory) -> dict[str, Values]:
    """``step()`` without ``clear_grad()``: later backwards add to what was used already."""
    side = _new(new, "SGD", "mlp")
    snapshots = {}
    for step in range(5):
        _micro(side, step, "mlp")
        side.step()
        if step % 2:
            side.clear_grad()
        snapshots[f"step {step}"] = side.values()
    side.step()
    snapshots["a step without a backward"] = side.values()
    return snapshots


def test_gradients_stay_until_they_are_cleared() -> None:
    harness.run(compare, 2, _kept_gradients, SETTINGS, SUM_ORDER)


def _cleared_elsewhere(new: Factory, how: str) -> dict[str, Values]:
    """Gradients cleared through the model or its parameters, as many scripts do, after a step or before it."""
    side = _new(new, "Momentum", "mlp")
    for step in range(5):
        _micro(side, 2 * step, "mlp")
        if step % 2:
            CLEARS[how](side.model)
        if step % 2 and step != 3:
            _micro(side, 2 * step + 1, "mlp")
        side.step()
        CLEARS[how](side.model)
    return {"end": side.values()}


CLEARS: dict[str, Any] = {
    "model": lambda model: model.clear_gradients(),
    "each": lambda model: [param.clear_gradient(False) for param in model.parameters()],
    "some": lambda model: [param.clear_grad() for param in model.parameters()[::2]],
    "None": lambda model: _set_to_none(model),
}


def _set_to_none(model: paddle.nn.Layer) -> None:
    for param in model.parameters():
        param.grad = None


@pytest.mark.parametrize("how", CLEARS)
def test_gradients_may_be_cleared_through_the_model(how: str) -> None:
    harness.run(compare, 2, _cleared_elsewhere, FEW, SUM_ORDER, how)


def _set_gradient(rank: int, nranks: int) -> None:
    for settings in FEW.values():
        model = make_model("mlp")
        model, optimizer, _ = wrap(model, make_optimizer("SGD", model), nranks, **settings)
        loss_of(model, make_batch("mlp", 0, rank)).backward()
        with pytest.raises(StateError, match="setting its gradient changes nothing"):
            model.gain.grad = paddle.ones([5])
        optimizer.step()
        optimizer.clear_grad()


def test_a_gradient_cannot_be_set() -> None:
    harness.run(_set_gradient, 2)


def _equal_micro_batches(rank: int, nranks: int) -> None:
    for settings in ({"stage": 1, **BOTH}, {"stage": 2, **BOTH}, {"stage": 2}):
        for waits in (False, True):
            model = make_model("mlp")
            model, optimizer, _ = wrap(model, make_optimizer("SGD", model), nranks, **settings)
            once = _grads_of(model, optimizer, rank, 1, waits=False)
            four_times = _grads_of(model, optimizer, rank, 4, waits)
            for name, grad in once.items():
                np.testing.assert_array_equal(four_times[name], 4 * grad, err_msg=f"{settings} {waits} {name}")


def _grads_of(model: paddle.nn.Layer, optimizer: Any, rank: int, count: int, waits: bool) -> Values:
    for micro in range(count):
        if waits and micro < count - 1:
            with optimizer.no_sync():
                loss_of(model, make_batch("mlp", 0, rank)).backward()
        else:
            loss_of(model, make_batch("mlp", 0, rank)).backward()
    grads = {name: optimizer.full_grad(param).numpy() for name, param in model.named_parameters()}
    optimizer.clear_grad()
    return grads


def test_four_equal_backwards_are_four_times_one() -> None:
    harness.run(_equal_micro_batches, 2)


class _Stop(Exception):
    pass


def _nested(rank: int, nranks: int) -> None:
    model = make_model("mlp")
    model, optimizer, calls = wrap(model, make_optimizer("SGD", model), nranks, stage=2, **BOTH)

    def sent_by_backward() -> int:
        before = len(calls)
        loss_of(model, make_batch("mlp", 0, rank)).backward()
        return len(calls) - before

    usual = sent_by_backward()
    assert usual > len(optimizer.buffers)
    with optimizer.no_sync():
        assert sent_by_backward() == 0
        with optimizer.no_sync():
            assert sent_by_backward() == 0
        assert sent_by_backward() == 0, "the inner block has switched synchronisation on"
        with contextlib.suppress(_Stop), optimizer.no_sync():
            assert sent_by_backward() == 0
            raise _Stop
        assert sent_by_backward() == 0, "the exception has switched synchronisation on"
    assert sent_by_backward() == usual
    with pytest.raises(_Stop), optimizer.no_sync():
        raise _Stop
    assert sent_by_backward() == usual, "the exception has left synchronisation off"
    optimizer.step()
    optimizer.clear_grad()


def test_no_sync_nests_and_ends_with_an_exception() -> None:
    harness.run(_nested, 2)


def _with_full_grad(new: Factory) -> dict[str, Values]:
    """Gradients read between the backwards of one step, which reduces and averages them early."""
    side = _new(new, "SGD", "mlp")
    snapshots = {}
    for step in range(3):
        with side.no_sync():
            _micro(side, 3 * step, "mlp")
        snapshots[f"gradient 1 of step {step}"] = _gradients(side)
        _micro(side, 3 * step + 1, "mlp")
        snapshots[f"gradient 2 of step {step}"] = _gradients(side)
        _micro(side, 3 * step + 2, "mlp")
        side.step()
        snapshots[f"gradient 3 of step {step}"] = _gradients(side)
        side.clear_grad()
    return {**snapshots, "end": side.values()}


def _gradients(side: Any) -> Values:
    params = side.model.named_parameters()
    return {name: (side.optimizer.full_grad(p) if side.sharded else p.grad).numpy().copy() for name, p in params}


def test_gradients_may_be_read_at_any_time() -> None:
    harness.run(compare, 2, _with_full_grad, SETTINGS, SUM_ORDER)
