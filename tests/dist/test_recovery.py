"""After an exception, ``clear_grad()`` brings model and optimizer back, as if the step had never begun."""

from __future__ import annotations

import contextlib
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.autograd import PyLayer
from paddle.distributed.fleet.utils import recompute

from hp_sharding import StateError, full_parameters
from tests import harness
from tests.lanes import wrap
from tests.models import loss_of, loss_on, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_all_equal, assert_equal, values
from tests.sides import BOTH, FEW, SETTINGS, STAGES_1_2, Factory, Side, compare

PLACES = [
    "forward, first layer",
    "forward, last layer",
    "backward, first layer",
    "backward, last layer",
    "hook of an output",
    "hook of a parameter",
    "hook of a parameter, from before the wrapping",
    "hook after a gradient",
    "hook after a gradient, from before the wrapping",
    "interrupt",
    "between",
    "no_sync",
    "second of two backwards",
]


class _Planned(Exception):
    pass


class _Bomb:
    """Raises where it was put, once it is armed."""

    def __init__(self) -> None:
        self.armed = False
        self.kind: type[BaseException] = _Planned

    def __call__(self, *_: Any) -> None:
        if self.armed:
            raise self.kind("planned")


class _Trap(PyLayer):
    """The identity, whose backward calls ``bomb``."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, bomb: _Bomb) -> paddle.Tensor:
        ctx.bomb = bomb
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        ctx.bomb()
        return grad * 1.0


def _mined(name: str, place: str, bomb: _Bomb) -> nn.Layer:
    """The model ``name`` with the bomb where hooks can be put before it is wrapped."""
    model = make_model(name)
    param = model.layers[1].weight if name == "mlp" else model.blocks[1].qkv.weight
    if place == "hook of a parameter, from before the wrapping":
        param.register_hook(bomb)
    if place == "hook after a gradient, from before the wrapping":
        param._register_backward_hook(bomb)
    return model


def _mine(model: nn.Layer, name: str, place: str, bomb: _Bomb) -> None:
    layers = model.layers if name == "mlp" else model.blocks
    layer = layers[0] if "first" in place else layers[3] if "last" in place else layers[1]
    if place.startswith("forward"):
        layer.register_forward_post_hook(bomb)
    elif place.startswith("backward") or place in ("no_sync", "second of two backwards", "interrupt"):
        layer.register_forward_post_hook(lambda layer, inputs, output: _Trap.apply(output, bomb))
    elif place == "hook of an output":
        layer.register_forward_post_hook(lambda layer, inputs, output: output.register_hook(bomb) and None)
    elif place == "hook of a parameter":
        layer.parameters()[0].register_hook(bomb)
    elif place == "hook after a gradient":
        layer.parameters()[0]._register_backward_hook(bomb)


def _failing_step(side: Side, name: str, place: str, bomb: _Bomb) -> None:
    """A whole step that ends in the exception. The sharded side goes through it alone."""
    bomb.armed = True
    bomb.kind = KeyboardInterrupt if place == "interrupt" else _Planned

    def loss(rank: int) -> paddle.Tensor:
        value = loss_of(side.model, make_batch(name, 77, rank))
        if place == "between":
            bomb()
        return value

    with contextlib.suppress(_Planned, SystemError, OSError, KeyboardInterrupt, RuntimeError):
        with side.no_sync() if place == "no_sync" else contextlib.nullcontext():
            if place == "second of two backwards":
                bomb.armed = False
                side.backward(loss)
                bomb.armed = True
            side.backward(loss)
        raise AssertionError("nothing was raised")
    bomb.armed = False


def _recovers(new: Factory, name: str, place: str, set_to_zero: bool) -> dict[str, Values]:
    bomb = _Bomb()
    side = new(lambda: _mined(name, place, bomb), lambda model: make_optimizer("Momentum", model))
    _mine(side.model, name, place, bomb)
    snapshots = {}
    for step in range(4):
        if side.sharded and step in (1, 2):
            _failing_step(side, name, place, bomb)
            side.clear_grad(set_to_zero)
        side.backward(loss_on(side.model, name, step))
        side.step()
        side.clear_grad(set_to_zero)
        snapshots[f"step {step}"] = side.values()
    return snapshots


@pytest.mark.parametrize("place", PLACES)
def test_all_ranks_raise(place: str) -> None:
    """Two failing steps in the middle, after which the run is bitwise that without them."""
    settings = SETTINGS if place.endswith("first layer") else FEW
    harness.run(compare, 2, _recovers, settings, 0.0, "mlp", place, place < "g", timeout_s=60)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("gpt_recompute_reentrant", "backward, first layer"),
        ("gpt_recompute", "forward, last layer"),
        ("gpt_recompute", "hook after a gradient"),
    ],
)
def test_all_ranks_raise_in_a_model_with_recompute(name: str, place: str) -> None:
    harness.run(compare, 2, _recovers, FEW, 1e-6, name, place, True, timeout_s=60)


def _one_raises(rank: int, nranks: int, place: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 alone fails in its backward. Every rank must hear of it before anything wrong is stepped."""
    bomb = _Bomb()
    model = _mined("mlp", place, bomb)
    model, optimizer, _ = wrap(model, make_optimizer("Momentum", model), nranks, **settings)
    _mine(model, "mlp", place, bomb)
    errors, losses = [], []
    for step in range(5):
        bomb.armed = rank == 1 and step in (2, 3)
        before = _snapshot(model)
        try:
            loss = loss_of(model, make_batch("mlp", step, rank))
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        except (_Planned, SystemError, OSError, RuntimeError) as error:
            errors.append(error)
            bomb.armed = False
            optimizer.clear_grad()
            assert_equal(_snapshot(model), before, f"a failed step {step} has changed")
        else:
            assert step not in (2, 3), "nothing was raised"
            optimizer.clear_grad()
    return {"kinds": [type(error) for error in errors], "end": _snapshot(model), "losses": losses}


def _snapshot(model: nn.Layer) -> Values:
    with full_parameters(model):
        return values(model)


def _without_failure(rank: int, nranks: int, settings: dict[str, Any]) -> Values:
    model = make_model("mlp")
    model, optimizer, _ = wrap(model, make_optimizer("Momentum", model), nranks, **settings)
    for step in (0, 1, 4):
        loss_of(model, make_batch("mlp", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
    return _snapshot(model)


@pytest.mark.parametrize(
    ("place", "nranks"),
    [
        ("backward, first layer", 2),
        ("backward, last layer", 2),
        ("hook after a gradient", 2),
        ("backward, last layer", 4),
    ],
)
def test_one_rank_raises_in_its_backward(place: str, nranks: int) -> None:
    for settings in (FEW[name] for name in FEW if name in STAGES_1_2):
        results = harness.run(_one_raises, nranks, place, settings, timeout_s=60)
        expected = harness.run(_without_failure, nranks, settings)
        assert_all_equal([result["end"] for result in results])
        assert_equal(results[0]["end"], expected[0])
        for rank, result in enumerate(results):
            assert len(result["kinds"]) == 2
            assert rank == 1 or result["kinds"] == [StateError] * 2


class _Repeats(nn.Layer):
    """One layer, recomputed, and where ``twice`` once more: then its gradient comes in twice in one backward."""

    def __init__(self, bomb: _Bomb) -> None:
        super().__init__()
        self.first = nn.Linear(9, 9)
        self.shared = nn.Linear(9, 9)
        self.bomb = bomb

    def forward(self, x: paddle.Tensor, twice: bool) -> paddle.Tensor:
        x = recompute(self.shared, _Trap.apply(self.first(x), self.bomb))
        return (recompute(self.shared, x) if twice else x).square().mean()


def _fails_after_a_repeat(rank: int, nranks: int) -> Values:
    """The second of two backwards, in which nobody waits for repeats, fails on rank 1 when some have come in."""
    bomb = _Bomb()
    model = _Repeats(bomb)
    model, optimizer, _ = wrap(model, make_optimizer("SGD", model), nranks, stage=2, **BOTH)
    for step in range(6):
        batches = [make_batch("mlp", 2 * step + number, rank)[0] for number in (0, 1)]
        losses = [model(batch, twice=step == 3) for batch in batches]
        losses[0].backward()
        bomb.armed = rank == 1 and step == 3
        try:
            losses[1].backward()
            assert any(optimizer._reducer._repeats) == (step == 3)
            optimizer.step()
            assert step != 3
        except (_Planned, SystemError, OSError, StateError):
            bomb.armed = False
        optimizer.clear_grad()
    return _snapshot(model)


def test_one_rank_raises_after_a_repeated_gradient() -> None:
    assert_all_equal(harness.run(_fails_after_a_repeat, 2, timeout_s=60))


def _gives_up(rank: int, nranks: int) -> str:
    """Rank 1 leaves the round for good; the others must not wait for ever, nor go on with wrong numbers."""
    bomb = _Bomb()
    model = make_model("mlp")
    model, optimizer, _ = wrap(model, make_optimizer("SGD", model), nranks, stage=2, **BOTH)
    _mine(model, "mlp", "backward, first layer", bomb)
    bomb.armed = rank == 1
    try:
        loss_of(model, make_batch("mlp", 0, rank)).backward()
        if rank == 1:
            raise AssertionError("nothing was raised")
        optimizer.step()
    except (_Planned, SystemError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_rank_that_ends_after_its_exception() -> None:
    outcomes = harness.run(_gives_up, 2, fresh=True, timeout_s=60)
    assert "planned" in outcomes[1].result
    assert outcomes[0].result is not None, outcomes[0].output
    assert "CommError" in outcomes[0].result
    assert "rank 1" in outcomes[0].result
