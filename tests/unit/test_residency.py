"""Stage 3 on one process: parameters exist only while they are used, and every number is plain Paddle's, bit for bit.

Lanes deliver when they are waited for and leave NaN until then; freed memory is NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F

from hp_sharding import full_parameters
from hp_sharding.buffer import Status
from hp_sharding.errors import ConfigError, StateError
from tests.fakes import Rig, wrap
from tests.tasks import STAGE_3

SIZE = 6


@dataclasses.dataclass
class Result:
    hidden: paddle.Tensor
    extra: Any = None


class Block(nn.Layer):
    """Two layers and a parameter of its own, which is used last and so first in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.fc = nn.Linear(SIZE, SIZE)
        self.gain = self.create_parameter([SIZE], default_initializer=nn.initializer.Constant(0.7))

    def forward(self, x: paddle.Tensor) -> Any:
        return x + paddle.tanh(self.fc(self.norm(x))) * self.gain


class Net(nn.Layer):
    """A list of blocks, a parameter of the model's own, and a head."""

    block: type[nn.Layer] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.LayerList([self.block() for _ in range(3)])
        self.shift = self.create_parameter([SIZE], default_initializer=nn.initializer.Constant(0.3))
        self.head = nn.Linear(SIZE, 2)

    def run(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: paddle.Tensor) -> Any:
        return self.head(self.run(x) + self.shift)


def _x(step: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(step).standard_normal([4, SIZE], dtype=np.float32))


Train = Callable[[Any, Any, int], list[float]]


def _backward(loss: paddle.Tensor, **options: Any) -> float:
    loss.backward(**options)
    return float(loss)


def _alike(make: Callable[[], nn.Layer], train: Train, settings: dict[str, Any], steps: int = 4) -> Rig:
    """Trains plain and in stage 3; ``train(model, optimizer, step)`` returns what must be the same."""
    paddle.seed(1)
    plain = make()
    optimizer = paddle.optimizer.AdamW(0.05, parameters=plain.parameters())
    paddle.seed(1)
    rig = _wrap(make(), settings)
    for step in range(steps):
        expected = train(plain, optimizer, step)
        optimizer.step(), optimizer.clear_grad()
        assert train(rig.model, rig.optimizer, step) == expected, f"step {step}"
        assert _status(rig) == {Status.SHARDED}, "after the last backward of a step everything is freed"
        rig.optimizer.step(), rig.optimizer.clear_grad()
    with full_parameters(rig.model):
        for (name, found), value in zip(rig.model.named_parameters(), plain.parameters(), strict=True):
            np.testing.assert_array_equal(found.numpy(), value.numpy(), err_msg=name)
    assert rig.reduce.n_pending == 0
    return rig


def _wrap(model: nn.Layer, settings: dict[str, Any]) -> Rig:
    return wrap(model, paddle.optimizer.AdamW(0.05, parameters=model.parameters()), stage=3, **settings)


def _status(rig: Rig) -> set[Status]:
    return {buffer.status for buffer in rig.optimizer.buffers}


def _gathered(rig: Rig) -> list[str]:
    return [event.label.partition(":")[2] for event in rig.log if event.what == "start" and event.op == "all_gather"]


SETTINGS = {name: STAGE_3[name] for name in ("no overlap", "both", "both, no fusion", "two ahead", "kept")}
every_setting = pytest.mark.parametrize("settings", SETTINGS)


# -- what a unit returns -----------------------------------------------------------------------------------------------


class _Returning(Net):
    """Each block returns something else."""

    class Odd(Block):
        way = "view"
        kept: ClassVar[list[paddle.Tensor]] = []

        def forward(self, x: paddle.Tensor, sink: Any = None) -> Any:
            y = super().forward(x)
            ways: dict[str, Callable[[], Any]] = {
                "view": lambda: y.reshape([2, 2, SIZE]),
                "slice": lambda: y[:, :],
                "tuple": lambda: (y, y * 2, "name", None),
                "nested": lambda: {"a": [{"b": (y,)}], "n": 3},
                "dataclass": lambda: Result(y, {"twice": y * 2}),
                "weight": lambda: (y, self.fc.weight),
                "transposed weight": lambda: (y, self.fc.weight.T),
                "input too": lambda: (y, x),
                "nothing": lambda: sink.append(y),
                "nothing but an entry": lambda: sink.update(a=y),
                "nothing to be seen": lambda: self.kept.append(y),
            }
            return ways[self.way]()

    block = Odd

    def run(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            self.Odd.kept.clear()
            if self.Odd.way == "nothing":
                sink: Any = []
                block(x, sink)
                x = sink.pop()
            elif self.Odd.way == "nothing but an entry":
                sink = {"x": x}
                block(x, sink=sink)
                x = sink["a"]
            else:
                x = self._use(block(x), x)
        return x

    def _use(self, y: Any, x: paddle.Tensor) -> paddle.Tensor:
        way = self.Odd.way
        if way == "view":
            return y.reshape([4, SIZE])
        if way == "slice":
            return y
        if way == "tuple":
            return y[0] + y[1]
        if way == "nested":
            return y["a"][0]["b"][0]
        if way == "dataclass":
            return y.hidden + y.extra["twice"]
        if way == "input too":
            return y[0] + y[1]
        if way == "nothing to be seen":
            return self.Odd.kept.pop()
        return F.linear(y[0], y[1])


_WAYS = [
    "view", "slice", "tuple", "nested", "dataclass", "weight", "transposed weight", "input too", "nothing",
    "nothing but an entry",
]  # fmt: skip


def _train(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
    return [_backward(model(_x(step)).square().mean())]


@every_setting
@pytest.mark.parametrize("way", _WAYS)
def test_whatever_a_unit_returns(monkeypatch: pytest.MonkeyPatch, way: str, settings: str) -> None:
    monkeypatch.setattr(_Returning.Odd, "way", way)
    _alike(_Returning, _train, SETTINGS[settings])


def test_what_nobody_can_see_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that uses a parameter of the unit's own, and leaves the unit through a global."""
    monkeypatch.setattr(_Returning.Odd, "way", "nothing to be seen")
    with pytest.raises(StateError, match="neither returned nor kept"):
        _alike(_Returning, _train, {})
    _alike(_Returning, _train, {"reshard_after_forward": {Block: False}})


class _Keeping(Net):
    """Blocks that keep an auxiliary loss, of a layer or of a parameter of their own, somewhere."""

    class Keeper(Block):
        way = "attribute"
        elsewhere: ClassVar[list[paddle.Tensor]] = []

        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(SIZE, 3)
            self.register_buffer("buffer", None, persistable=False)
            self.losses: dict[str, paddle.Tensor] = {}

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            own = (x * self.gain).square().mean() + (self.gain**2).sum()
            routed = F.softmax(self.router(x)).square().mean()
            if self.way == "attribute":
                self.attribute = own + routed
            elif self.way == "buffer":
                self.buffer = own + routed
            elif self.way == "dict":
                self.losses["a"] = own + routed
            else:
                self.elsewhere.append(routed)
            return super().forward(x)

        def loss(self) -> paddle.Tensor:
            if self.way == "dict":
                return self.losses["a"]
            return getattr(self, self.way) if self.way != "elsewhere" else self.elsewhere.pop()

    block = Keeper


def _train_aux(model: Any, optimizer: Any, step: int) -> list[float]:
    output = model(_x(step)).square().mean()
    aux = paddle.add_n([block.loss() for block in model.blocks])
    if step % 2:
        return [_backward(aux * 0.1, retain_graph=True), _backward(output)]
    return [_backward(output + aux * 0.1)]


@every_setting
@pytest.mark.parametrize("way", ["attribute", "buffer", "dict", "elsewhere"])
def test_an_auxiliary_loss_that_no_unit_returns(monkeypatch: pytest.MonkeyPatch, way: str, settings: str) -> None:
    """The gradient of its parameters comes before, after or without that of the unit's output."""
    monkeypatch.setattr(_Keeping.Keeper, "way", way)
    _alike(_Keeping, _train_aux, SETTINGS[settings])


# -- several forwards and backwards ------------------------------------------------------------------------------------


def _siamese(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
    return [_backward((model(_x(step)) * model(_x(step + 50))).mean())]


def _one_after_the_other(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
    first, second = model(_x(step)).square().mean(), model(_x(step + 50)).abs().mean()
    with paddle.no_grad():
        seen = float(model(_x(7)).sum())
    return [_backward(second), _backward(first), seen]


def _twice(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
    output = model(_x(step))
    return [_backward(output.mean(), retain_graph=True), _backward(output.square().mean())]


def _alternating(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
    model.eval()
    with paddle.no_grad():
        seen = [float(model(_x(n)).sum()) for n in range(step)]
    model.train()
    unused = float(model(_x(9)).sum())  # a forward that nobody differentiates
    losses = [_backward(model(_x(step + n)).square().mean()) for n in range(1 + step % 3)]
    return [*seen, unused, *losses]


class _Smooth(Net):
    """Of operations that Paddle differentiates twice."""

    class Smooth(Block):
        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return x + paddle.tanh(self.fc(x)) * self.gain

    block = Smooth


def _penalty(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
    x = _x(step)
    x.stop_gradient = False
    output = model(x).square().mean()
    [gradient] = paddle.grad(output, x, create_graph=True)
    return [_backward(output + (gradient.square().sum() - 1).square()), float(gradient.sum())]


def _input_gradient(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
    x = _x(step)
    x.stop_gradient = False
    [gradient] = paddle.grad(model(x).square().sum(), x)
    return [float(gradient.sum()), _backward(model(x).mean()), float(x.grad.sum())]


def _in_place(model: Any, optimizer: Any, step: int) -> list[float]:
    x = _x(step)
    for block in model.blocks:
        x = block(x)
        x.add_(paddle.ones([SIZE]))
        x.tanh_()
    return [_backward(model.head(x).mean())]


def _sublayers_only(model: Any, optimizer: Any, step: int) -> list[float]:
    block = model.blocks[step % 2]
    return [_backward(block.fc(block.norm(_x(step))).square().mean())]


def _some_layers(model: Any, optimizer: Any, step: int) -> list[float]:
    x = _x(step)
    for number in ([0, 1, 2], [2, 0], [1, 1, 1], [0])[step % 4]:
        x = model.blocks[number](x)
    return [_backward(model.head(x).square().mean())]


def _no_sync(model: Any, optimizer: Any, step: int) -> list[float]:
    losses = []
    for micro in range(3):
        if micro < 2 and hasattr(optimizer, "no_sync"):
            with optimizer.no_sync():
                losses += _train(model, optimizer, 10 * step + micro)
        else:
            losses += _train(model, optimizer, 10 * step + micro)
    return losses


_TRAININGS = [
    _train, _siamese, _one_after_the_other, _twice, _alternating, _penalty, _input_gradient, _in_place,
    _sublayers_only, _some_layers, _no_sync,
]  # fmt: skip


@every_setting
@pytest.mark.parametrize("train", _TRAININGS)
def test_any_order_of_forwards_and_backwards(train: Train, settings: str) -> None:
    steps = 6 if train in (_some_layers, _alternating) else 4
    # AdamW's weight decay also moves what has never had a gradient here, so all have had one at the end only.
    _alike(_Smooth if train is _penalty else Net, train, SETTINGS[settings], steps)


class _Recomputing(Net):
    """Blocks that are recomputed: each alone, or all in one segment."""

    form = True
    whole = False

    def run(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.whole:
            y: paddle.Tensor = recompute(super().run, x, use_reentrant=self.form)
            return y
        for block in self.blocks:
            x = recompute(block, x, use_reentrant=self.form)
        return x

    def forward(self, x: paddle.Tensor) -> Any:
        return super().forward(self.blocks[1](x))  # outside the recomputed part as well


@every_setting
@pytest.mark.parametrize("form", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("train", [_train, _siamese, _no_sync])
def test_recompute(monkeypatch: pytest.MonkeyPatch, train: Train, whole: bool, form: bool, settings: str) -> None:
    monkeypatch.setattr(_Recomputing, "form", form)
    monkeypatch.setattr(_Recomputing, "whole", whole)
    _alike(_Recomputing, train, SETTINGS[settings], steps=3)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("form", [True, False])
def test_recompute_gathers_once_for_forward_and_once_for_backward(
    monkeypatch: pytest.MonkeyPatch, form: bool, whole: bool
) -> None:
    class Recomputing(_Recomputing):
        def forward(self, x: paddle.Tensor) -> Any:
            return Net.forward(self, x)

    monkeypatch.setattr(_Recomputing, "form", form)
    monkeypatch.setattr(_Recomputing, "whole", whole)
    rig = _wrap(Recomputing(), SETTINGS["both"])
    for step in range(3):
        rig.log.clear()
        x = _x(step)
        x.stop_gradient = False
        _backward(rig.model(x).mean())
        rig.optimizer.step(), rig.optimizer.clear_grad()
    found = {name: _gathered(rig).count(name) for name in ("blocks.0", "blocks.1", "blocks.2", "head")}
    # What the forward ends with is what the backward begins with, and stays.
    assert found == {"blocks.0": 2, "blocks.1": 2, "blocks.2": 2 if form and whole else 1, "head": 1}


def test_two_models_share_a_loss() -> None:
    """A generator's loss goes through the discriminator, whose own backward comes first."""

    def train(wraps: bool) -> list[Any]:
        paddle.seed(3)
        models = [Net(), Net()]
        generator, judge = models
        if wraps:
            optimizers = [_wrap(model, SETTINGS["both"]).optimizer for model in models]
        else:
            optimizers = [paddle.optimizer.AdamW(0.05, parameters=model.parameters()) for model in models]
        seen: list[Any] = []
        for step in range(4):
            fake = generator(_x(step)).tile([1, SIZE // 2])
            loss = judge(_x(step + 20)).mean() - judge(fake.detach()).mean()
            seen.append(_backward(loss))
            optimizers[1].step(), optimizers[1].clear_grad()
            seen.append(_backward(judge(fake).square().mean()))
            optimizers[0].step(), optimizers[0].clear_grad()
            optimizers[1].clear_grad()
        for model in models:
            with full_parameters(model):
                seen += [param.numpy().tobytes() for param in model.parameters()]
        return seen

    assert train(True) == train(False)


# -- frozen and unused parameters --------------------------------------------------------------------------------------


class _Lora(Net):
    """Frozen blocks with a small addition that trains; the last block is frozen altogether."""

    class Adapted(Block):
        def __init__(self) -> None:
            super().__init__()
            for param in self.parameters():
                param.stop_gradient = True
            self.down = nn.Linear(SIZE, 2)
            self.up = nn.Linear(2, SIZE)
            self.never = self.create_parameter([SIZE])

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return super().forward(x) + self.up(self.down(x))

    block = Adapted

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Block())
        for param in self.blocks[-1].parameters():
            param.stop_gradient = True


@every_setting
def test_frozen_parts(settings: str) -> None:
    rig = _alike(_Lora, _train, SETTINGS[settings])
    assert all(not buffer.layout.frozen or buffer.gradient.full is None for buffer in rig.optimizer.buffers)


@every_setting
def test_frozen_parameters_that_the_optimizer_does_not_hold(settings: str) -> None:
    paddle.seed(1)
    plain = _Lora()
    optimizer = paddle.optimizer.AdamW(0.05, parameters=[p for p in plain.parameters() if not p.stop_gradient])
    paddle.seed(1)
    model = _Lora()
    inner = paddle.optimizer.AdamW(0.05, parameters=[p for p in model.parameters() if not p.stop_gradient])
    rig = wrap(model, inner, stage=3, **SETTINGS[settings])
    assert sum(len(buffer.params) for buffer in rig.optimizer.buffers) == len(model.parameters()), "all are sharded"
    for step in range(4):
        assert _train(model, rig.optimizer, step) == _train(plain, optimizer, step)
        optimizer.step(), optimizer.clear_grad()
        rig.optimizer.step(), rig.optimizer.clear_grad()
        if step == 1:  # what thaws is nobody's to update, and nothing breaks
            for net in (model, plain):
                net.blocks[0].fc.weight.stop_gradient = False


def test_a_frozen_unit_is_freed_when_the_gradient_of_its_input_is_in() -> None:
    rig = _wrap(_Lora(), {})
    frozen = rig.optimizer.param2bucket["blocks.3.fc.weight"][0]
    seen = []
    hidden = rig.model.run(_x(0))
    for block in rig.model.blocks:
        block.register_forward_pre_hook(lambda *_: None)
    x = rig.model.blocks[2](_x(0))
    x.register_hook(lambda _: seen.append(frozen.status))
    y = rig.model.blocks[3](x)
    assert frozen.status is Status.SHARDED
    y.register_hook(lambda _: seen.append(frozen.status))
    before = rig.model.blocks[1](_x(1))
    before.register_hook(lambda _: seen.append(frozen.status))
    (y * 2 + 0 * before).sum().backward()
    assert Status.READY in seen
    assert frozen.status is Status.SHARDED
    del hidden


# -- what is there when ------------------------------------------------------------------------------------------------


def _resident(rig: Rig) -> list[str]:
    return [buffer.name.partition(":")[2] for buffer in rig.optimizer.buffers if buffer.full is not None]


def test_nothing_is_resident_after_wrapping_and_between_uses() -> None:
    rig = _wrap(Net(), {})
    assert _resident(rig) == []
    output = rig.model(_x(0))
    assert _resident(rig) == []
    output.mean().backward()
    assert _resident(rig) == []
    rig.optimizer.step()
    assert _resident(rig) == []


@pytest.mark.parametrize("ahead", [1, 2])
def test_at_most_so_many_units_are_resident(ahead: int) -> None:
    """The model's own, the one in use and those ahead; in backward also the one whose last gradients are coming in."""
    rig = _wrap(Net(), {**SETTINGS["both"], "prefetch_depth": ahead})
    most: list[int] = []
    for block in [*rig.model.blocks, rig.model.head]:
        block.register_forward_post_hook(lambda *_: most.append(len(_resident(rig))))
    for step in range(3):
        most.clear()
        _train(rig.model, rig.optimizer, step)
        assert max(most) <= 2 + ahead
        rig.optimizer.step(), rig.optimizer.clear_grad()
        assert len(_resident(rig)) == 1 + ahead, "what the next forward begins with is on its way"


def test_gathers_run_ahead_in_both_directions() -> None:
    rig = _wrap(Net(), SETTINGS["both"])
    for step in range(3):
        rig.log.clear()
        _train(rig.model, rig.optimizer, step)
        rig.optimizer.step(), rig.optimizer.clear_grad()
    events = [(e.what, e.label.partition(":")[2]) for e in rig.log if e.op == "all_gather"]
    for first, second in [("blocks.0", "blocks.1"), ("blocks.1", "blocks.2"), ("blocks.1", "blocks.0")]:
        delivered = [n for n, event in enumerate(events) if event == ("deliver", first)]
        started = [n for n, event in enumerate(events) if event == ("start", second)]
        assert any(s < d for s in started for d in delivered)
    assert rig.optimizer._schedule._units.foresight.wrong_guesses == 0
    starts = [label for what, label in events if what == "start"]
    # Forward and backward; but the last two of the forward are the first two of the backward, and stay.
    assert starts.count("blocks.0") == starts.count("blocks.1") == 2
    assert starts.count("blocks.2") == starts.count("head") == 1


def test_units_that_stay_from_forward_to_backward() -> None:
    rig = _wrap(Net(), {"reshard_after_forward": {"blocks.1": False, nn.Linear: False}})
    output = rig.model(_x(0))
    assert _resident(rig) == ["blocks.1", "head"]
    before = len(_gathered(rig))
    output.mean().backward()
    assert _gathered(rig)[before:] == ["shift", "blocks.2", "blocks.0"]
    assert _resident(rig) == []


def test_a_name_that_is_no_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'block.1' is no unit; they are Net, blocks.0"):
        _wrap(Net(), {"reshard_after_forward": {"block.1": False}})


def test_nested_units_by_class() -> None:
    settings = {**SETTINGS["both"], "units": [Block, nn.Linear]}
    rig = _alike(Net, _train, settings)
    assert [buffer.name.partition(":")[2] for buffer in rig.optimizer.buffers] == [
        "shift", *[name for n in range(3) for name in (f"blocks.{n}", f"blocks.{n}.fc")], "head",
    ]  # fmt: skip


# -- reads, writes, errors ---------------------------------------------------------------------------------------------


def test_a_freed_value_is_an_error_and_its_metadata_is_not() -> None:
    rig = _wrap(Net(), {})
    weight = rig.model.head.weight
    assert weight.shape == [SIZE, 2]
    for read in (lambda: weight.numpy(), lambda: weight + 1, lambda: weight.set_value(np.zeros([SIZE, 2], "float32"))):
        with pytest.raises(StateError, match="full_parameters"):
            read()


def test_edits_are_kept() -> None:
    rig = _wrap(Net(), {})
    with full_parameters(rig.model), paddle.no_grad():
        rig.model.head.weight.set_value(np.full([SIZE, 2], 3.0, "float32"))
        rig.model.shift.scale_(2.0)
        inside = rig.model(_x(0)).numpy()
    assert _resident(rig) == []
    with paddle.no_grad():
        assert np.array_equal(rig.model(_x(0)).numpy(), inside)
    with full_parameters(rig.model):
        assert (rig.model.head.weight.numpy() == 3).all()
        assert np.allclose(rig.model.shift.numpy(), 0.6)


@every_setting
def test_a_penalty_on_the_weights_inside_full_parameters(settings: str) -> None:
    def train(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
        with full_parameters(model):
            penalty = paddle.add_n([param.square().sum() for param in model.parameters()])
            return [_backward(model(_x(step)).mean() + 0.01 * penalty)]

    _alike(Net, train, SETTINGS[settings])


def test_a_step_inside_full_parameters_shows_the_new_values() -> None:
    rig = _wrap(Net(), SETTINGS["both"])
    with full_parameters(rig.model):
        before = rig.model.head.weight.numpy().copy()
        _train(rig.model, rig.optimizer, 0)
        rig.optimizer.step()
        after = rig.model.head.weight.numpy().copy()
        assert not np.array_equal(before, after)
    with full_parameters(rig.model):
        assert np.array_equal(rig.model.head.weight.numpy(), after)


def test_a_backward_that_needs_what_is_gone_says_so() -> None:
    rig = _wrap(Net(), {})
    with full_parameters(rig.model):
        loss = rig.model.head.weight.square().sum()
    with pytest.raises(StateError, match="sharded again"):
        loss.backward()
    rig.optimizer.clear_grad()
    _train(rig.model, rig.optimizer, 0)
    rig.optimizer.step()


def test_a_bias_beside_a_weight_that_is_not_sharded_is_never_left_out() -> None:
    model = Net()
    inner = paddle.optimizer.AdamW(parameters=[param for param in model.parameters() if param.ndim == 1])
    for param in model.parameters():
        param.stop_gradient = False  # not held, not frozen: stays whole
    wrap(model, inner, stage=3)
    found = F.linear(_x(0), model.head.weight, model.head.bias)
    assert np.isnan(found.numpy()).all()


@pytest.mark.parametrize("where", ["forward", "hook", "backward"])
def test_after_an_exception_clear_grad_brings_it_back(where: str) -> None:
    paddle.seed(1)
    plain = Net()
    optimizer = paddle.optimizer.AdamW(0.05, parameters=plain.parameters())
    paddle.seed(1)
    rig = _wrap(Net(), SETTINGS["both"])
    fails = [True]

    def fail(*_: Any) -> None:
        if fails[0]:
            raise ValueError("on purpose")

    def run(model: Any, step: int) -> float:
        x = model.blocks[0](_x(step))
        if where == "backward":
            x.register_hook(fail)
        return _backward(model.head(model.blocks[1](x)).mean())

    if where != "backward":
        layer = rig.model.blocks[1]
        layer.fc.register_forward_pre_hook(fail) if where == "forward" else layer.register_forward_post_hook(fail)
    for step in range(4):
        fails[0] = step == 2
        if fails[0]:
            with pytest.raises((ValueError, OSError), match="on purpose"):  # Paddle's own way in a tensor's hook
                run(rig.model, step)
            rig.optimizer.clear_grad()
            assert len(_resident(rig)) <= 2, "at most what is expected next"
            continue
        assert run(rig.model, step) == run(plain, step)
        optimizer.step(), optimizer.clear_grad()
        rig.optimizer.step(), rig.optimizer.clear_grad()


def test_hooks_of_the_user_fire_once_and_find_the_values() -> None:
    model = Net()
    seen: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(layer: nn.Layer, *_: Any) -> None:
            assert not np.isnan(layer.fc.weight.numpy()).any()
            seen.append(name)

        return hook

    block = model.blocks[1]
    block.register_forward_pre_hook(note("before, early"))
    block.register_forward_post_hook(note("after, early"))
    model.head.weight.register_hook(lambda gradient: seen.append("gradient, early"))
    rig = _wrap(model, SETTINGS["both"])
    block.register_forward_pre_hook(note("before, late"))
    block.register_forward_post_hook(note("after, late"))
    model.head.weight.register_hook(lambda gradient: seen.append("gradient, late"))
    for step in range(2):
        seen.clear()
        _train(model, rig.optimizer, step)
        rig.optimizer.step(), rig.optimizer.clear_grad()
        assert seen == [
            "before, early", "before, late", "after, early", "after, late", "gradient, early", "gradient, late",
        ]  # fmt: skip
    starts = _gathered(rig)
    assert starts.count("blocks.1") == 4, "a hook that reads costs no gather of its own"


def test_a_latent_that_is_trained_gathers_no_hooks() -> None:
    """A leaf is given to a frozen model again and again: hooks on it would stay for ever."""
    model = _Lora()
    rig = _wrap(model, {})
    latent = _x(0)
    latent.stop_gradient = False
    calls: list[int] = []
    original = type(latent).register_hook
    for _ in range(3):
        model(latent).mean().backward()
        rig.optimizer.clear_grad()
    assert original is type(latent).register_hook
    assert latent.grad is not None
    assert not calls
    assert _status(rig) == {Status.SHARDED}
