"""Parameters of every shape and kind: empty, 0-d, single, frozen, thawed, unused, of two dtypes, in lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from hp_sharding import full_parameters
from tests import harness
from tests.lanes import wrap
from tests.models import SEED, loss_of, loss_on, make_batch, make_model, make_optimizer
from tests.reference import Values, values
from tests.sides import BOTH, FEW, SETTINGS, Factory, compare


def _adamw(model: nn.Layer, **options: Any) -> Any:
    return make_optimizer("AdamW", model, **options)


def _noise(step: int, rank: int, shape: list[int], dtype: str = "float32") -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng([SEED, step, rank]).standard_normal(shape).astype(dtype))


class _Odd(nn.Layer):
    """A parameter for each of the shapes, all of which have a part in the output."""

    def __init__(self, shapes: list[list[int]]) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.add_parameter(f"p{index}", self.create_parameter(shape, default_initializer=nn.initializer.Normal()))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        total = x.sum()
        for param in list(self._parameters):
            total = total + (self._parameters[param] * x.mean()).sum().sin()
        return total


SHAPES: dict[str, list[list[int]]] = {
    "empty first": [[0], [3], [5, 2]],
    "empty in the middle": [[3], [0, 4], [5, 2]],
    "empty last": [[3], [5, 2], [2, 0]],
    "0-d": [[], [3], []],
    "empty, 0-d, single": [[0], [], [1]],
    "one single": [[1]],
    "one 0-d": [[]],
    "longer than a shard": [[700], [], [129], [128], [127]],
}


def _train_odd(new: Factory, shapes: str) -> dict[str, Values]:
    side = new(lambda: _Odd(SHAPES[shapes]), _adamw)
    for step in range(4):
        side.backward(lambda rank, step=step: side.model(_noise(step, rank, [3])))
        side.step()
        side.clear_grad()
    return {"end": side.values()}


@pytest.mark.parametrize("shapes", SHAPES)
def test_shapes_on_two_ranks(shapes: str) -> None:
    harness.run(compare, 2, _train_odd, FEW, 0.0, shapes)


@pytest.mark.parametrize("shapes", ["one single", "one 0-d", "empty, 0-d, single", "longer than a shard"])
def test_more_ranks_than_elements(shapes: str) -> None:
    harness.run(compare, 4, _train_odd, FEW, 1e-5, shapes, timeout_s=60)


def _freeze_and_thaw(new: Factory, name: str) -> dict[str, Values]:
    """Half of the model frozen for two steps, an evaluation, thawed for two, and so again."""
    side = new(lambda: make_model(name), _adamw)
    params = list(side.model.named_parameters())
    part = [(key, param) for key, param in params[len(params) // 2 :] if not param.stop_gradient]
    snapshots = {}
    for step in range(6):
        for _, param in part:
            param.stop_gradient = step % 4 < 2
        before = side.values()
        side.backward(loss_on(side.model, name, step))
        side.step()
        side.clear_grad(set_to_zero=bool(step % 2))
        after = side.values()
        for key, _ in part:
            assert np.array_equal(before[key], after[key]) == (step % 4 < 2), f"step {step}: {key}"
        side.model.eval()
        with paddle.no_grad():
            for rank in side.ranks:
                loss_of(side.model, make_batch(name, step, rank))
        side.model.train()
        snapshots[f"step {step}"] = after
    return snapshots


@pytest.mark.parametrize("name", ["mlp", "gpt", "gpt_recompute_reentrant"])
def test_freezing_and_thawing_while_training(name: str) -> None:
    harness.run(compare, 2, _freeze_and_thaw, SETTINGS if name == "mlp" else FEW, 0.0, name)


def _clipped_momentum(model: nn.Layer) -> Any:
    # Not AdamW: it magnifies the noise of gradients that are zero but for rounding, such as those of the keys' bias.
    return make_optimizer("Momentum", model, grad_clip=nn.ClipGradByGlobalNorm(0.05))


def _frozen_when_wrapped(new: Factory, name: str) -> dict[str, Values]:
    """As in fine-tuning: the first half is frozen from the start and thaws in the middle of the training."""

    def build() -> nn.Layer:
        model = make_model(name)
        params = [param for param in model.parameters() if not param.stop_gradient]
        for param in params[: len(params) // 2]:
            param.stop_gradient = True
        return model

    side = new(build, _clipped_momentum)
    frozen = [param for param in side.model.parameters() if param.stop_gradient and "batch_norm" not in param.name]
    snapshots = {}
    for step in range(7):
        for param in frozen:
            param.stop_gradient = step in (0, 1, 5)
        side.backward(loss_on(side.model, name, step))
        side.step()
        side.clear_grad()
        snapshots[f"step {step}"] = side.values()
    return snapshots


@pytest.mark.parametrize("name", ["mlp", "gpt", "conv"])
def test_frozen_when_wrapped_and_thawed_later(name: str) -> None:
    harness.run(compare, 2, _frozen_when_wrapped, FEW if name == "gpt" else SETTINGS, 1e-5, name)


def _all_frozen(new: Factory) -> dict[str, Values]:
    """Nothing but one parameter trains, on ranks of which most own no part of it."""

    def build() -> nn.Layer:
        model = make_model("mlp")
        for name, param in model.named_parameters():
            param.stop_gradient = name != "layers.1.bias"
        return model

    side = new(build, lambda model: make_optimizer("SGD", model))
    start = side.values()
    for step in range(3):
        side.backward(loss_on(side.model, "mlp", step))
        side.step()
        side.clear_grad()
    end = side.values()
    changed = [name for name in start if not np.array_equal(start[name], end[name])]
    assert changed == ["layers.1.bias"]
    return {"end": end}


def test_only_one_parameter_trains() -> None:
    harness.run(compare, 4, _all_frozen, FEW, 1e-6, timeout_s=60)


def _nothing_yet(new: Factory, clip: bool) -> dict[str, Values]:
    """``step()`` before any backward, and again after ``clear_grad``."""
    grad_clip = nn.ClipGradByGlobalNorm(1.0) if clip else None
    side = new(lambda: make_model("mlp"), lambda model: _adamw(model, grad_clip=grad_clip))
    start = side.values()
    for _ in range(2):
        side.step()
        side.clear_grad()
    snapshots = {"no backward": side.values()}
    for name, value in start.items():
        np.testing.assert_array_equal(snapshots["no backward"][name], value)
    side.backward(loss_on(side.model, "mlp", 0))
    side.clear_grad(set_to_zero=False)
    side.step()
    snapshots["cleared away"] = side.values()
    side.backward(loss_on(side.model, "mlp", 1))
    side.step()
    side.clear_grad(set_to_zero=True)
    side.step()  # zeros: momentum and decay go on
    snapshots["zeros"] = side.values()
    side.clear_grad(set_to_zero=False)
    side.step()
    snapshots["skipped"] = side.values()
    return snapshots


@pytest.mark.parametrize("clip", [False, True])
def test_a_step_without_a_backward(clip: bool) -> None:
    harness.run(compare, 2, _nothing_yet, SETTINGS, 1e-5 if clip else 0.0, clip)
    harness.run(compare, 4, _nothing_yet, FEW, 1e-5, clip)


class _Lists(nn.Layer):
    """Parameters in a ParameterList, read by index, by iteration and by a slice; layers in a LayerDict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        normal = nn.initializer.Normal(std=0.3)
        self.weights = nn.ParameterList([self.create_parameter([8, 8], default_initializer=normal) for _ in range(3)])
        self.biases = nn.ParameterList([self.create_parameter([8], default_initializer=normal) for _ in range(3)])
        self.named = nn.LayerDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.first(x)
        for index, weight in enumerate(self.weights):
            x = F.gelu(paddle.matmul(x, weight) + self.biases[index])
        for key in ("b", "a"):
            x = self.named[key](x)
        return x


class _Recurrent(nn.Layer):
    """An LSTM and a GRU, which hold their parameters a second time in a list and a flat buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6)
        self.gru = nn.GRU(6, 8)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x, _ = self.lstm(x.unsqueeze(0))
        x, _ = self.gru(x)
        return x


class _SelfCalls(nn.Layer):
    """The parameters are used in other methods than forward and by other layers than their own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 8)
        self.scale = self.create_parameter([8], default_initializer=nn.initializer.Constant(1.0))
        self.kept = [self.encoder.weight]

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self._encode(x)
        x = self.decoder(x) + F.linear(x, self.encoder.weight.T)
        for param in self.decoder.parameters():
            x = x * param.mean()
        return x * self.__dict__["_parameters"].get("scale")

    def _encode(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.linear(x, self.encoder.weight, self.encoder.bias)


class _Dicts(nn.Layer):
    """Parameters in a ParameterDict and in a layer without a forward, all of them taken at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        normal = nn.initializer.Normal(std=0.3)
        self.weights = nn.ParameterDict({n: self.create_parameter([8, 8], default_initializer=normal) for n in "abc"})
        self.holder = nn.Layer()
        self.holder.scale = self.holder.create_parameter([8], default_initializer=normal)
        self.holder.shift = self.holder.create_parameter([8], default_initializer=normal)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.first(x)
        for weight in self.weights.parameters():
            x = F.gelu(paddle.matmul(x, weight))
        scale, shift = self.holder.parameters()
        return paddle.add(paddle.multiply(x, scale), shift)


class _Penalty(nn.Layer):
    """A penalty on all parameters, those that no layer uses included, before and after the layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(8, 8) for _ in range(3)])
        self.never = nn.Linear(8, 8)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        total = paddle.add_n([paddle.norm(param) for param in self.parameters()])
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.mean() + 0.01 * total + 0.01 * paddle.add_n([paddle.sum(param**2) for param in self.parameters()])


MODULES = {"dicts": _Dicts, "penalty": _Penalty, "lists": _Lists, "recurrent": _Recurrent, "self calls": _SelfCalls}


def _train_module(new: Factory, name: str) -> dict[str, Values]:
    side = new(MODULES[name], lambda model: make_optimizer("Momentum", model))
    for step in range(6):
        side.backward(lambda rank, step=step: side.model(_noise(step, rank, [3, 8])).square().mean())
        side.step()
        side.clear_grad()
    return {"end": side.values()}


@pytest.mark.parametrize("name", MODULES)
def test_parameters_in_unusual_places(name: str) -> None:
    harness.run(compare, 2, _train_module, SETTINGS, 0.0, name)


def _train_doubles(new: Factory) -> dict[str, Values]:
    side = new(lambda: nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5)), _clipped_momentum)
    for step in range(4):
        side.backward(lambda rank, step=step: side.model(_noise(step, rank, [3, 6], "float64")).square().mean())
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def _compare_doubles(rank: int, nranks: int) -> None:
    paddle.set_default_dtype("float64")
    compare(rank, nranks, _train_doubles, SETTINGS, 1e-7)


def test_float64() -> None:
    """Paddle's optimizers take one dtype at a time, so there is no model of two to compare with."""
    harness.run(_compare_doubles, 2)


def _part_of_a_model(new: Factory) -> dict[str, Values]:
    """The optimizer holds half of the parameters; the others keep their values and their own gradients."""

    def half(model: nn.Layer) -> Any:
        return paddle.optimizer.AdamW(0.01, parameters=model.parameters()[::2])

    side = new(lambda: make_model("gpt"), half)
    start = side.values()
    for step in range(3):
        side.backward(loss_on(side.model, "gpt", step))
        side.step()
        side.clear_grad()
    end = side.values()
    for index, name in enumerate(start):
        assert np.array_equal(start[name], end[name]) == bool(index % 2), name
    return {"end": end}


def test_an_optimizer_over_half_the_model() -> None:
    harness.run(compare, 2, _part_of_a_model, FEW)


def _gradients_before(rank: int, nranks: int) -> Values:
    """A model that has gradients already when it is wrapped: they count, as in plain Paddle."""
    model = make_model("mlp")
    inner = make_optimizer("Momentum", model)
    loss_of(model, make_batch("mlp", 0, rank)).backward()
    model, optimizer, _ = wrap(model, inner, nranks, stage=2, **BOTH)
    loss_of(model, make_batch("mlp", 1, rank)).backward()
    optimizer.step()
    with full_parameters(model):
        return values(model)


def _gradients_after(rank: int, nranks: int) -> Values:
    model = make_model("mlp")
    model, optimizer, _ = wrap(model, make_optimizer("Momentum", model), nranks, stage=2, **BOTH)
    with optimizer.no_sync():
        loss_of(model, make_batch("mlp", 0, rank)).backward()
    loss_of(model, make_batch("mlp", 1, rank)).backward()
    optimizer.step()
    with full_parameters(model):
        return values(model)


def test_gradients_from_before_the_wrapping_count() -> None:
    before, after = harness.run(_gradients_before, 2), harness.run(_gradients_after, 2)
    for found, expected in zip(before, after, strict=True):
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)
