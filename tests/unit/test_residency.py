"""Stage 3 on one process: parameters exist only while they are used, and every number is plain Paddle's, bit for bit.

Lanes deliver when they are waited for and leave NaN until then; freed memory is NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from hp_sharding import full_parameters
from hp_sharding.buffer import Status
from hp_sharding.errors import ConfigError, StateError
from tests.fakes import wrap
from tests.residents import (
    SETTINGS,
    SIZE,
    Block,
    Net,
    assert_alike,
    finish_step,
    gathered,
    make_x,
    resident,
    run_backward,
    statuses,
    train_once,
    wrap_stage_3,
)

every_setting = pytest.mark.parametrize("settings", SETTINGS)


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
    rig = assert_alike(_Lora, train_once, SETTINGS[settings])
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
        assert train_once(model, rig.optimizer, step) == train_once(plain, optimizer, step)
        finish_step(optimizer)
        finish_step(rig.optimizer)
        if step == 1:  # what thaws is nobody's to update, and nothing breaks
            for net in (model, plain):
                net.blocks[0].fc.weight.stop_gradient = False


class _Borrowing(Net):
    """A frozen weight of another unit, and one that trains after it."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.stop_gradient = True

    def forward(self, x: paddle.Tensor) -> Any:
        x = self.blocks[0](x).matmul(self.head.weight) + self.head.bias
        return self.blocks[1](x.tile([1, SIZE // 2])) + self.shift


@every_setting
def test_a_frozen_parameter_of_another_unit(settings: str) -> None:
    assert_alike(_Borrowing, train_once, SETTINGS[settings])


def test_a_frozen_unit_is_freed_when_the_gradient_of_its_input_is_in() -> None:
    rig = wrap_stage_3(_Lora(), {})
    frozen = rig.optimizer.param2bucket["blocks.3.fc.weight"][0]
    seen = []
    hidden = rig.model.run(make_x(0))
    for block in rig.model.blocks:
        block.register_forward_pre_hook(lambda *_: None)
    x = rig.model.blocks[2](make_x(0))
    x.register_hook(lambda _: seen.append(frozen.status))
    y = rig.model.blocks[3](x)
    assert frozen.status is Status.SHARDED
    y.register_hook(lambda _: seen.append(frozen.status))
    before = rig.model.blocks[1](make_x(1))
    before.register_hook(lambda _: seen.append(frozen.status))
    (y * 2 + 0 * before).sum().backward()
    assert Status.READY in seen
    assert frozen.status is Status.SHARDED
    del hidden


# -- what is there when ------------------------------------------------------------------------------------------------


def test_nothing_is_resident_after_wrapping_and_between_uses() -> None:
    rig = wrap_stage_3(Net(), {})
    assert resident(rig) == []
    output = rig.model(make_x(0))
    assert resident(rig) == []
    output.mean().backward()
    assert resident(rig) == []
    rig.optimizer.step()
    assert resident(rig) == []


@pytest.mark.parametrize("ahead", [1, 2])
def test_at_most_so_many_units_are_resident(ahead: int) -> None:
    """The model's own, the one in use and those ahead; in backward also the one whose last gradients are coming in."""
    rig = wrap_stage_3(Net(), {**SETTINGS["both"], "prefetch_depth": ahead})
    most: list[int] = []
    for block in [*rig.model.blocks, rig.model.head]:
        block.register_forward_post_hook(lambda *_: most.append(len(resident(rig))))
    for step in range(3):
        most.clear()
        train_once(rig.model, rig.optimizer, step)
        assert max(most) <= 2 + ahead
        finish_step(rig.optimizer)
        assert len(resident(rig)) == 2 + ahead, "what the next forward begins with is on its way"


def test_gathers_run_ahead_in_both_directions() -> None:
    rig = wrap_stage_3(Net(), SETTINGS["both"])
    for step in range(3):
        rig.log.clear()
        train_once(rig.model, rig.optimizer, step)
        finish_step(rig.optimizer)
    events = [(e.what, e.label.partition(":")[2]) for e in rig.log if e.op == "all_gather"]
    for first, second in [("blocks.0", "blocks.1"), ("blocks.1", "blocks.2"), ("blocks.1", "blocks.0")]:
        delivered = [n for n, event in enumerate(events) if event == ("deliver", first)]
        started = [n for n, event in enumerate(events) if event == ("start", second)]
        assert any(s < d for s in started for d in delivered)
    units: Any = rig.optimizer._schedule.gathers
    assert units.foresight.wrong_guesses == 0
    starts = [label for what, label in events if what == "start"]
    # Forward and backward; but the last two of the forward are the first two of the backward, and stay.
    assert starts.count("blocks.0") == starts.count("blocks.1") == 2
    assert starts.count("blocks.2") == starts.count("head") == 1


def test_units_that_stay_from_forward_to_backward() -> None:
    rig = wrap_stage_3(Net(), {"reshard_after_forward": {"blocks.1": False, nn.Linear: False}})
    output = rig.model(make_x(0))
    assert resident(rig) == ["blocks.1", "head"]
    before = len(gathered(rig))
    output.mean().backward()
    assert gathered(rig)[before:] == ["shift", "blocks.2", "blocks.0"]
    assert resident(rig) == []


def test_a_name_that_is_no_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'block.1' is no unit; they are Net, blocks.0"):
        wrap_stage_3(Net(), {"reshard_after_forward": {"block.1": False}})


def test_nested_units_by_class() -> None:
    settings = {**SETTINGS["both"], "units": [Block, nn.Linear]}
    rig = assert_alike(Net, train_once, settings)
    assert [buffer.name.partition(":")[2] for buffer in rig.optimizer.buffers] == [
        "shift", *[name for n in range(3) for name in (f"blocks.{n}", f"blocks.{n}.fc")], "head",
    ]  # fmt: skip


# -- reads, writes, errors ---------------------------------------------------------------------------------------------


def test_a_freed_value_is_an_error_and_its_metadata_is_not() -> None:
    rig = wrap_stage_3(Net(), {})
    weight = rig.model.head.weight
    assert weight.shape == [SIZE, 2]
    for read in (lambda: weight.numpy(), lambda: weight + 1, lambda: weight.set_value(np.zeros([SIZE, 2], "float32"))):
        with pytest.raises(StateError, match="full_parameters"):
            read()


def test_edits_are_kept() -> None:
    rig = wrap_stage_3(Net(), {})
    with full_parameters(rig.model), paddle.no_grad():
        rig.model.head.weight.set_value(np.full([SIZE, 2], 3.0, "float32"))
        rig.model.shift.scale_(2.0)
        inside = rig.model(make_x(0)).numpy()
    assert resident(rig) == []
    with paddle.no_grad():
        assert np.array_equal(rig.model(make_x(0)).numpy(), inside)
    with full_parameters(rig.model):
        assert (rig.model.head.weight.numpy() == 3).all()
        assert np.allclose(rig.model.shift.numpy(), 0.6)


@every_setting
def test_a_penalty_on_the_weights_inside_full_parameters(settings: str) -> None:
    def train(model: nn.Layer, optimizer: Any, step: int) -> list[float]:
        with full_parameters(model):
            penalty = paddle.add_n([param.square().sum() for param in model.parameters()])
            return [run_backward(model(make_x(step)).mean() + 0.01 * penalty)]

    assert_alike(Net, train, SETTINGS[settings])


class _Writing(Net):
    """Blocks that write to a parameter of theirs in the forward, past the guards, after they have used it."""

    class Writer(Block):
        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            x = super().forward(x)
            with paddle.no_grad():
                paddle.assign(self.fc.bias * 0.5 + 0.1, self.fc.bias)
            return x

    block = Writer


@every_setting
def test_writes_past_the_guards_in_a_forward_are_kept(settings: str) -> None:
    assert_alike(_Writing, train_once, SETTINGS[settings])


def test_what_was_given_other_storage_is_kept() -> None:
    layer = nn.Linear(SIZE, 3)
    rig = wrap(layer, paddle.optimizer.SGD(parameters=layer.parameters()), stage=3)
    buffer = rig.optimizer.buffers[0]
    with full_parameters(layer):
        paddle.full([SIZE, 3], 0.5)._share_buffer_to(layer.weight)
    assert buffer.full is None
    with full_parameters(layer):
        assert (layer.weight.numpy() == 0.5).all()


def test_a_forward_inside_full_parameters_changes_nothing_for_later() -> None:
    """A rank may evaluate alone there, since nothing is sent; so it must expect the same as the others afterwards."""

    def sent(evaluates: bool) -> list[str]:
        rig = wrap_stage_3(Net(), SETTINGS["both"])
        for step in range(4):
            train_once(rig.model, rig.optimizer, step)
            finish_step(rig.optimizer)
            with full_parameters(rig.model), paddle.no_grad():
                for _ in range(3 if evaluates else 0):
                    rig.model(make_x(step))
                    rig.model.blocks[1](make_x(step))
        return gathered(rig)

    assert sent(True) == sent(False)


def test_a_value_read_in_a_forward_holds_nothing() -> None:
    class Reading(Net):
        class Reader(Block):
            def forward(self, x: paddle.Tensor) -> paddle.Tensor:
                with paddle.no_grad():
                    self.seen = float(self.gain.mean())
                return super().forward(x)

        block = Reader

    rig = wrap_stage_3(Reading(), {})
    start = make_x(0)
    start.stop_gradient = False
    seen: list[list[str]] = []
    x = rig.model.blocks[0](start)
    x.register_hook(lambda _: seen.append(resident(rig)))
    rig.model.blocks[2](x).mean().backward()
    assert all("blocks.2" not in names for names in seen)


def test_a_step_inside_full_parameters_shows_the_new_values() -> None:
    rig = wrap_stage_3(Net(), SETTINGS["both"])
    with full_parameters(rig.model):
        before = rig.model.head.weight.numpy().copy()
        train_once(rig.model, rig.optimizer, 0)
        rig.optimizer.step()
        after = rig.model.head.weight.numpy().copy()
        assert not np.array_equal(before, after)
    with full_parameters(rig.model):
        assert np.array_equal(rig.model.head.weight.numpy(), after)


def test_a_backward_that_needs_what_is_gone_says_so() -> None:
    rig = wrap_stage_3(Net(), {})
    with full_parameters(rig.model):
        loss = rig.model.head.weight.square().sum()
    with pytest.raises(StateError, match="sharded again"):
        loss.backward()
    rig.optimizer.clear_grad()
    train_once(rig.model, rig.optimizer, 0)
    rig.optimizer.step()


@pytest.mark.parametrize("out", [1, 2])
def test_a_freed_bias_is_never_left_out(out: int) -> None:
    """Paddle's ``F.linear`` takes a bias without storage for none, beside a weight that is there."""
    rig = wrap_stage_3(Net(), {})
    bias = rig.model.head.bias if out == 2 else nn.Linear(SIZE, 1).bias
    if out == 1:
        layer = nn.Linear(SIZE, 1)
        rig = wrap(layer, paddle.optimizer.SGD(parameters=layer.parameters()), stage=3)
        bias = layer.bias
    weight = paddle.ones([SIZE, out])
    if out == 1:  # one element cannot be too few
        assert np.isnan(F.linear(make_x(0), weight, bias).numpy()).all()
    else:
        with pytest.raises(RuntimeError, match=r"memory_size\(\)"):
            F.linear(make_x(0), weight, bias)
    with full_parameters(rig.model):
        assert np.isfinite(F.linear(make_x(0), weight, bias).numpy()).all()


def test_what_stands_for_freed_vectors_is_nowhere_a_number() -> None:
    """Of other shapes too; views of them read NaN, and never what lies in memory by chance."""

    class Odd(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            shapes: list[list[int]] = [[], [1], [SIZE], [1, SIZE], [1, 1, SIZE], [SIZE, 1]]
            self.all = nn.ParameterList([self.create_parameter(shape) for shape in shapes])

    layer = Odd()
    wrap(layer, paddle.optimizer.SGD(parameters=layer.parameters()), stage=3)
    for param in layer.parameters():
        with contextlib.suppress(RuntimeError):  # storage too small
            assert np.isnan(F.linear(_x_of(SIZE), paddle.ones([SIZE, SIZE]), param).numpy()).all()
    vector = layer.parameters()[2]
    assert np.isnan((paddle.slice(vector, [0], [2], [4]) + 1).numpy()).all()
    assert np.isnan((paddle.unbind(vector)[4] * 2).numpy()).all()


def _x_of(width: int) -> paddle.Tensor:
    return paddle.ones([width, width])


def test_a_write_past_the_guards_to_what_is_freed_is_noticed() -> None:
    for width in (1, 2):
        layer = nn.Linear(SIZE, width)
        rig = wrap(layer, paddle.optimizer.SGD(parameters=layer.parameters()), stage=3)
        paddle.assign(paddle.ones([width]), layer.bias)
        with pytest.raises(StateError, match="what was written is lost"):
            layer(make_x(0))
        rig.optimizer.clear_grad()
        assert np.isfinite(layer(make_x(0)).numpy()).all()


def test_a_write_past_the_guards_before_a_step_inside_full_parameters_is_kept() -> None:
    rig = wrap_stage_3(Net(), SETTINGS["both"])
    plain = Net()
    optimizer = paddle.optimizer.AdamW(0.05, parameters=plain.parameters())
    with full_parameters(rig.model):
        plain.set_state_dict({name: value.numpy() for name, value in rig.model.state_dict().items()})
        for model, of_model in ((rig.model, rig.optimizer), (plain, optimizer)):
            nn.initializer.Constant(0.25)(model.head.weight)
            train_once(model, of_model, 0)
            finish_step(of_model)
        assert np.array_equal(rig.model.head.weight.numpy(), plain.head.weight.numpy())


@pytest.mark.parametrize("where", ["forward", "hook", "backward"])
def test_after_an_exception_clear_grad_brings_it_back(where: str) -> None:
    paddle.seed(1)
    plain = Net()
    optimizer = paddle.optimizer.AdamW(0.05, parameters=plain.parameters())
    paddle.seed(1)
    rig = wrap_stage_3(Net(), SETTINGS["both"])
    fails = [True]

    def fail(*_: Any) -> None:
        if fails[0]:
            raise ValueError("on purpose")

    def run(model: Any, step: int) -> float:
        x = model.blocks[0](make_x(step))
        if where == "backward":
            x.register_hook(fail)
        return run_backward(model.head(model.blocks[1](x)).mean())

    if where != "backward":
        layer = rig.model.blocks[1]
        layer.fc.register_forward_pre_hook(fail) if where == "forward" else layer.register_forward_post_hook(fail)
    for step in range(4):
        fails[0] = step == 2
        if fails[0]:
            with pytest.raises((ValueError, OSError), match="on purpose"):  # Paddle's own way in a tensor's hook
                run(rig.model, step)
            rig.optimizer.clear_grad()
            assert len(resident(rig)) <= 2, "at most what is expected next"
            continue
        assert run(rig.model, step) == run(plain, step)
        finish_step(optimizer)
        finish_step(rig.optimizer)


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
    rig = wrap_stage_3(model, SETTINGS["both"])
    block.register_forward_pre_hook(note("before, late"))
    block.register_forward_post_hook(note("after, late"))
    model.head.weight.register_hook(lambda gradient: seen.append("gradient, late"))
    for step in range(2):
        seen.clear()
        train_once(model, rig.optimizer, step)
        finish_step(rig.optimizer)
        assert seen == [
            "before, early", "before, late", "after, early", "after, late", "gradient, early", "gradient, late",
        ]  # fmt: skip
    starts = gathered(rig)
    # For two forwards, two backwards, and ahead of a third: a hook that reads costs no gather of its own.
    assert starts.count("blocks.1") == 5


def test_a_latent_that_is_trained_gathers_no_hooks() -> None:
    """A leaf is given to a frozen model again and again: hooks on it would stay for ever."""
    model = _Lora()
    rig = wrap_stage_3(model, {})
    latent = make_x(0)
    latent.stop_gradient = False
    calls: list[int] = []
    original = type(latent).register_hook
    for _ in range(3):
        model(latent).mean().backward()
        rig.optimizer.clear_grad()
    assert original is type(latent).register_hook
    assert latent.grad is not None
    assert not calls
    assert statuses(rig) == {Status.SHARDED}
