"""Stage 3: any order of forwards and backwards trains as plain Paddle does, bit for bit."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from hp_sharding import full_parameters
from tests.residents import (
    SETTINGS,
    SIZE,
    Block,
    Net,
    Train,
    assert_alike,
    finish_step,
    make_x,
    run_backward,
    train_once,
    train_siamese,
    train_without_sync,
    wrap_stage_3,
)

every_setting = pytest.mark.parametrize("settings", SETTINGS)


def _one_after_the_other(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
    first, second = model(make_x(step)).square().mean(), model(make_x(step + 50)).abs().mean()
    with paddle.no_grad():
        seen = float(model(make_x(7)).sum())
    return [run_backward(second), run_backward(first), seen]


def _twice(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
    output = model(make_x(step))
    return [run_backward(output.mean(), retain_graph=True), run_backward(output.square().mean())]


def _alternating(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
    model.eval()
    with paddle.no_grad():
        seen = [float(model(make_x(n)).sum()) for n in range(step)]
    model.train()
    unused = float(model(make_x(9)).sum())  # a forward that nobody differentiates
    losses = [run_backward(model(make_x(step + n)).square().mean()) for n in range(1 + step % 3)]
    return [*seen, unused, *losses]


class _Smooth(Net):
    """Of operations that Paddle differentiates twice."""

    class Smooth(Block):
        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return x + paddle.tanh(self.fc(x)) * self.gain

    block = Smooth


def _penalty(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
    x = make_x(step)
    x.stop_gradient = False
    output = model(x).square().mean()
    [gradient] = paddle.grad(output, x, create_graph=True)
    return [run_backward(output + (gradient.square().sum() - 1).square()), float(gradient.sum())]


def _input_gradient(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
    x = make_x(step)
    x.stop_gradient = False
    [gradient] = paddle.grad(model(x).square().sum(), x)
    return [float(gradient.sum()), run_backward(model(x).mean()), float(x.grad.sum())]


def _in_place(model: Any, optimizer: Any, step: int) -> list[float]:
    x = make_x(step)
    for block in model.blocks:
        x = block(x)
        x.add_(paddle.ones([SIZE]))
        x.tanh_()
    return [run_backward(model.head(x).mean())]


def _sublayers_only(model: Any, optimizer: Any, step: int) -> list[float]:
    block = model.blocks[step % 2]
    return [run_backward(block.fc(block.norm(make_x(step))).square().mean())]


def _some_layers(model: Any, optimizer: Any, step: int) -> list[float]:
    x = make_x(step)
    for number in ([0, 1, 2], [2, 0], [1, 1, 1], [0])[step % 4]:
        x = model.blocks[number](x)
    return [run_backward(model.head(x).square().mean())]


_TRAININGS = [
    train_once, train_siamese, _one_after_the_other, _twice, _alternating, _penalty, _input_gradient, _in_place,
    _sublayers_only, _some_layers, train_without_sync,
]  # fmt: skip


@every_setting
@pytest.mark.parametrize("train", _TRAININGS)
def test_any_order_of_forwards_and_backwards(train: Train, settings: str) -> None:
    steps = 6 if train in (_some_layers, _alternating) else 4
    # AdamW's weight decay also moves what has never had a gradient here, so all have had one at the end only.
    assert_alike(_Smooth if train is _penalty else Net, train, SETTINGS[settings], steps)


def test_two_models_share_a_loss() -> None:
    """A generator's loss goes through the discriminator, whose own backward comes first."""

    def train(wraps: bool) -> list[Any]:
        paddle.seed(3)
        models = [Net(), Net()]
        generator, judge = models
        if wraps:
            optimizers = [wrap_stage_3(model, SETTINGS["both"]).optimizer for model in models]
        else:
            optimizers = [paddle.optimizer.AdamW(0.05, parameters=model.parameters()) for model in models]
        seen: list[Any] = []
        for step in range(4):
            fake = generator(make_x(step)).tile([1, SIZE // 2])
            loss = judge(make_x(step + 20)).mean() - judge(fake.detach()).mean()
            seen.append(run_backward(loss))
            finish_step(optimizers[1])
            seen.append(run_backward(judge(fake).square().mean()))
            finish_step(optimizers[0])
            optimizers[1].clear_grad()
        for model in models:
            with full_parameters(model):
                seen += [param.numpy().tobytes() for param in model.parameters()]
        return seen

    assert train(True) == train(False)


class _Itself(Net):
    """Self-conditioning: the model runs itself, without gradients, before it uses a bias with another weight."""

    def forward(self, x: paddle.Tensor, inner: bool = False) -> Any:
        if not inner:
            with paddle.no_grad():
                x = x + self(x, inner=True).mean()
        weight = paddle.tanh(x.t().matmul(x))[:, :2]
        return F.linear(self.run(x) + self.shift, weight, self.head.bias)


@every_setting
def test_a_model_that_calls_itself(settings: str) -> None:
    assert_alike(_Itself, train_once, SETTINGS[settings])


def test_a_forward_called_past_the_hooks_is_an_error() -> None:
    rig = wrap_stage_3(_Itself(), {})
    with pytest.raises(RuntimeError, match=r"memory_size|sharded"):
        rig.model.forward(make_x(0), True)


class _Dicts(Net):
    """Blocks that take a dict, take things out of it and put others in."""

    class Taking(Block):
        def forward(self, things: Any) -> None:
            x = things.pop("x")
            x = x + paddle.tanh(self.fc(self.norm(x)))
            things["x"] = x * self.gain

    block = Taking

    def run(self, x: paddle.Tensor) -> paddle.Tensor:
        things = {"x": x}
        del x
        for block in self.blocks:
            block(things)
        return things["x"]


@every_setting
def test_results_that_replace_what_was_given(settings: str) -> None:
    assert_alike(_Dicts, train_once, SETTINGS[settings])


class _Switching(Net):
    """Blocks that are called without gradients and switch them on inside."""

    class Block(Block):
        @paddle.enable_grad()
        def forward(self, x: paddle.Tensor) -> Any:
            return super().forward(x)

    block = Block

    def run(self, x: paddle.Tensor) -> paddle.Tensor:
        with paddle.no_grad():
            for block in self.blocks:
                x = block(x)
        return x


@every_setting
def test_gradients_that_are_switched_on_inside(settings: str) -> None:
    assert_alike(_Switching, train_once, SETTINGS[settings])
