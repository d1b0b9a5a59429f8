"""Reduced gradients that a script edits before ``step()``, and local ones that it edits too late; on one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from hp_sharding import ShardingConfig, full_parameters, shard
from hp_sharding.errors import ConfigError, StateError
from tests.fakes import Rig, values, wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer

SETTINGS: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": 0.0005}
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])

Array = np.ndarray[Any, Any]
Scenario = Callable[[nn.Layer, Any], None]


def _shard(optimizer: str = "SGD", **settings: Any) -> Rig:
    model = make_model("mlp")
    return wrap(model, make_optimizer(optimizer, model), **{**SETTINGS, **settings})


def _backward(model: nn.Layer, number: int, scale: float = 1.0) -> None:
    (loss_of(model, make_batch("mlp", number, 0)) * scale).backward()


def _final(model: nn.Layer) -> list[Array]:
    with full_parameters(model):
        return values(model.parameters())


def _assert_parity(scenario: Scenario, optimizer: str = "SGD", tolerance: float = 0.0, **settings: Any) -> Rig:
    """Through the sharded optimizer, and through that of one process, whose gradients are plain Paddle's."""
    model = make_model("mlp")
    scenario(model, shard(model, make_optimizer(optimizer, model), config=ShardingConfig()))
    rig = _shard(optimizer, **settings)
    scenario(rig.model, rig.optimizer)
    for found, expected in zip(_final(rig.model), _final(model), strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance / 10)
    return rig


# -- set_full_grad -----------------------------------------------------------------------------------------------------


@STAGES
def test_a_gradient_that_is_set_is_the_one_that_counts(stage: int) -> None:
    """It is not divided, and later backwards add to it; also where there was none."""

    def scenario(model: nn.Layer, optimizer: Any) -> None:
        scale = 4.0 if hasattr(optimizer, "buffers") else 1.0
        params = model.parameters()
        optimizer.set_full_grad(params[0], np.full(params[0].shape, 0.5, "float32"))
        optimizer.step()
        optimizer.clear_grad()
        optimizer.step()  # with zeros
        optimizer.clear_grad(set_to_zero=False)
        for step in range(2):
            _backward(model, 2 * step, scale)
            for param in params[1:4]:
                optimizer.set_full_grad(param, paddle.tanh(optimizer.full_grad(param)))
            if step:
                _backward(model, 2 * step + 1, scale)
            optimizer.step()
            optimizer.clear_grad()

    _assert_parity(scenario, "Momentum", tolerance=1e-6, stage=stage, gradient_scale=4.0)


@STAGES
def test_what_is_set_can_be_asked_for_and_sends_nothing(stage: int) -> None:
    rig = _shard(stage=stage)
    param = rig.model.layers[1].weight
    _backward(rig.model, 0)
    rig.optimizer.grad_norm()
    sent = len(rig.started("all_gather", "reduce_scatter", "all_reduce"))
    rig.optimizer.set_full_grad(param, paddle.full(param.shape, 3.0, "float64"))
    assert len(rig.started("all_gather", "reduce_scatter", "all_reduce")) == sent
    found = rig.optimizer.full_grad(param)
    assert (found.shape, str(found.dtype)) == (param.shape, "paddle.float32")
    assert (found.numpy() == 3.0).all()


def test_what_cannot_be_a_gradient_is_refused() -> None:
    model = make_model("mlp")
    plain = shard(model, make_optimizer("SGD", model), config=ShardingConfig())
    rig = _shard()
    for owner, optimizer in ((rig.model, rig.optimizer), (model, plain)):
        bias = owner.layers[0].bias
        for value in (np.zeros(30, "float32"), np.zeros(31, "int64")):
            with pytest.raises(
                ConfigError, match=re.escape(f"parameter '{bias.name}' needs a floating-point gradient")
            ):
                optimizer.set_full_grad(bias, value)
    with pytest.raises(ConfigError, match="not one that this optimizer updates"):
        rig.optimizer.set_full_grad(nn.Linear(2, 2).bias, np.zeros(2, "float32"))


# -- local_grads -------------------------------------------------------------------------------------------------------


@STAGES
def test_local_parts_are_edited_in_place(stage: int) -> None:
    def scenario(model: nn.Layer, optimizer: Any) -> None:
        scale = 4.0 if hasattr(optimizer, "buffers") else 1.0
        for step in range(3):
            _backward(model, 2 * step, scale)
            for part in optimizer.local_grads():
                part.gradient.clip_(-0.01, 0.01)
            if step == 1:
                _backward(model, 2 * step + 1, scale)
            optimizer.step()
            optimizer.clear_grad()

    _assert_parity(scenario, "Momentum", tolerance=1e-6, stage=stage, gradient_scale=4.0)


@STAGES
def test_local_parts_say_what_they_are(stage: int) -> None:
    rig = _shard(stage=stage)
    assert rig.optimizer.local_grads() == []
    _backward(rig.model, 0)
    rig.optimizer.grad_norm()
    sent = len(rig.started("all_gather", "reduce_scatter", "all_reduce"))
    parts = rig.optimizer.local_grads()
    assert len(rig.started("all_gather", "reduce_scatter", "all_reduce")) == sent
    named = dict(rig.model.named_parameters())
    assert {part.name for part in parts} == set(named)
    for part in parts:
        assert part.param is named[part.name]
        assert (part.start_numel, part.gradient.shape) == (0, [part.param.size])
        full = rig.optimizer.full_grad(part.param)
        np.testing.assert_array_equal(part.gradient.numpy(), full.numpy().reshape(-1))


def test_only_what_has_had_a_gradient_has_a_part() -> None:
    rig = _shard()
    with rig.optimizer.no_sync():
        rig.model.layers[0](paddle.ones([1, 9])).mean().backward()
    assert {part.name for part in rig.optimizer.local_grads()} == {"layers.0.weight", "layers.0.bias"}


# -- local gradients in stage 1 ----------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[paddle.Tensor], Any]] = {
    "scale_": lambda grad: grad.scale_(0.5),
    "an index": lambda grad: grad.__setitem__(0, 0.0),
    "zero_": lambda grad: grad.zero_(),
    "set_value": lambda grad: grad.set_value(grad.numpy() * 0.5),
    "copy_": lambda grad: grad.copy_(paddle.zeros(grad.shape), False),
    "a view": lambda grad: grad.reshape([-1])[:2].zero_(),
    "assign": lambda grad: paddle.assign(paddle.zeros(grad.shape), grad),
}

USES: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: optimizer.step(),
    "clip_grad_norm": lambda optimizer: optimizer.clip_grad_norm(1.0),
    "grad_norm": lambda optimizer: optimizer.grad_norm(),
    "local_grads": lambda optimizer: optimizer.local_grads(),
}


@pytest.mark.parametrize("write", list(WRITES))
def test_a_write_to_a_gradient_that_was_sent_is_an_error(write: str) -> None:
    """Before anything is sent; afterwards the model trains on."""
    rig = _shard(stage=1)
    rig.reduce.checks_inputs = False  # it is still under way, which is why the write cannot count
    before = _final(rig.model)
    _backward(rig.model, 0)
    with paddle.no_grad():
        WRITES[write](rig.model.layers[1].weight.grad)
    sent = len(rig.log)
    with pytest.raises(StateError, match=re.escape(f"parameter '{rig.model.layers[1].weight.name}' was changed")):
        rig.optimizer.step()
    assert len([event for event in rig.log[sent:] if event.what == "start"]) == 0
    assert all(map(np.array_equal, _final(rig.model), before))
    rig.optimizer.clear_grad(set_to_zero=False)
    rig.optimizer.step()
    assert all(map(np.array_equal, _final(rig.model), before)), "all is forgotten"
    _backward(rig.model, 1)
    rig.optimizer.step()
    clean = _shard(stage=1)
    _backward(clean.model, 1)
    clean.optimizer.step()
    assert all(map(np.array_equal, _final(rig.model), _final(clean.model)))


@pytest.mark.parametrize("use", list(USES))
def test_whatever_uses_the_gradients_notices(use: str) -> None:
    rig = _shard(stage=1)
    _backward(rig.model, 0)
    grad = rig.model.gain.grad
    USES[use](rig.optimizer)  # reading is no write
    with paddle.no_grad():
        grad.scale_(2.0)
    with pytest.raises(StateError, match="was changed in place after backward"):
        USES[use](rig.optimizer)


def test_reads_are_no_writes() -> None:
    def scenario(model: nn.Layer, optimizer: Any) -> None:
        for step in range(3):
            _backward(model, step)
            for param in model.parameters():
                assert float((param.grad * 2).abs().sum()) > 0
                np.asarray(param.grad.numpy())
            optimizer.step()
            optimizer.clear_grad(set_to_zero=bool(step % 2))

    _assert_parity(scenario, stage=1)


def test_under_no_sync_a_write_counts() -> None:
    def scenario(model: nn.Layer, optimizer: Any) -> None:
        for step in range(3):
            with optimizer.no_sync():
                _backward(model, 2 * step)
            with paddle.no_grad():
                model.gain.grad.scale_(0.25)
            if step % 2:
                _backward(model, 2 * step + 1)
            optimizer.step()
            optimizer.clear_grad()

    _assert_parity(scenario, stage=1)


def test_a_write_between_two_backwards_counts() -> None:
    """In stage 1 the second one sends the sum of both, as it is by then."""

    def scenario(model: nn.Layer, optimizer: Any) -> None:
        for step in range(2):
            _backward(model, 2 * step)
            optimizer.full_grad(model.gain)  # the first reduction is over
            with paddle.no_grad():
                model.gain.grad.scale_(0.25)
            _backward(model, 2 * step + 1)
            optimizer.step()
            optimizer.clear_grad()

    _assert_parity(scenario, stage=1)


def test_clearing_one_gradient_is_no_write_that_comes_too_late() -> None:
    def scenario(model: nn.Layer, optimizer: Any) -> None:
        for step in range(2):
            _backward(model, step)
            optimizer.full_grad(model.gain)
            with paddle.no_grad():
                model.gain.grad.scale_(2.0)
            model.gain.clear_gradient()
            model.layers[0].bias.clear_gradient(False)
            optimizer.step()
            optimizer.clear_grad()

    _assert_parity(scenario, "Momentum", stage=1)


class _Chain(nn.Layer):
    """One recomputed layer, as often as asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)

    def forward(self, x: paddle.Tensor, times: int) -> paddle.Tensor:
        x = self.first(x)
        for _ in range(times):
            x = recompute(self.shared, x, use_reentrant=True)
        return x.square().mean()


@STAGES
def test_what_was_edited_is_added_to_once_though_a_gradient_comes_in_twice(stage: int) -> None:
    """The second gradient comes when the first may have been sent."""
    ends = []
    for sharded in (False, True):
        paddle.seed(1)
        model = _Chain()
        inner = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        if sharded:
            optimizer: Any = wrap(model, inner, **SETTINGS, stage=stage).optimizer
        else:
            optimizer = shard(model, inner, config=ShardingConfig())
        for _ in range(2):
            losses = [model(paddle.arange(8.0).reshape([2, 4]) * 0.1, times) for times in (1, 2)]
            losses[0].backward()
            optimizer.clip_grad_norm(0.01)
            losses[1].backward()
            optimizer.step()
            optimizer.clear_grad()
        ends.append(_final(model))
    for found, expected in zip(*ends, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@STAGES
def test_a_hook_that_returns_no_gradient_of_its_parameter_is_refused(stage: int) -> None:
    """And after ``clear_grad()`` all goes on as if it had never been there."""
    ends = []
    for wrong in (False, True):
        model = make_model("mlp")
        rig = wrap(model, make_optimizer("SGD", model), **SETTINGS, stage=stage)
        if wrong:
            name, param = next(iter(model.named_parameters()))
            hook = param.register_hook(lambda gradient: gradient[:1])
            loss = loss_of(model, make_batch("mlp", 0, 0))
            with pytest.raises(StateError, match=rf"'{param.name}' of bucket '.*{name}'.*hook"):
                loss.backward()
            hook.remove()
            rig.optimizer.clear_grad()
        loss_of(model, make_batch("mlp", 1, 0)).backward()
        rig.optimizer.step()
        with full_parameters(model):
            ends.append(values(model.parameters()))
    assert all(map(np.array_equal, *ends))
