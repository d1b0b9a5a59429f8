"""Mixed precision on CPU, whose kernels know no 16-bit products: layers cast 16-bit parameters where they use them.

What it must equal is plain Paddle with float32 parameters that are rounded where they are used, and gradients that are
rounded where they come in: those are the masters, and the sums, bit for bit on two ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.amp.auto_cast import amp_global_state

from hp_sharding import ShardingConfig, full_parameters, shard
from hp_sharding.errors import ConfigError
from tests import harness
from tests.lanes import wrap
from tests.models import SEED
from tests.reference import Values, assert_all_equal, assert_equal, values
from tests.sides import BOTH, Factory, Plain, compare, play

STEPS = 6
WIDTHS = (33, 65, 47, 17)


class _Round(paddle.autograd.PyLayer):
    """Rounds what goes through, forwards or backwards."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, there: str, back: str) -> paddle.Tensor:
        ctx.back = back
        return x.astype(there).astype(x.dtype) if there != "float32" else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        return grad.astype(ctx.back).astype(grad.dtype)


class _Coarse(paddle.autograd.PyLayer):
    """Leaves seven bits of what goes forwards."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        return (x.clip(-1, 1) * 64).round() / 64

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        return grad


class _Linear(nn.Layer):
    """Computes in float32 with parameters of any dtype; ``rounds``: they, and their gradients, are rounded to these."""

    def __init__(self, n_in: int, n_out: int, grain: str) -> None:
        super().__init__()
        self.grain = grain
        self.weight = self.create_parameter([n_in, n_out])
        self.bias = self.create_parameter([n_out], is_bias=True, default_initializer=nn.initializer.Normal())
        self.rounds: tuple[str, str] | None = None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        # An input has few enough bits for every type; its gradient is given as few, as by whoever casts the input.
        x = _Round.apply(x.astype("float32"), self.grain, self.grain)
        weight, bias = self.weight, self.bias
        if self.rounds is not None:
            weight, bias = _Round.apply(weight, *self.rounds), _Round.apply(bias, *self.rounds)
        return _Coarse.apply(paddle.tanh(F.linear(x, weight.astype("float32"), bias.astype("float32"))))


class _Net(nn.Layer):
    """A row of layers; ``odd`` is the dtype that every other one has from the start."""

    def __init__(self, grain: str, odd: str | None = None) -> None:
        super().__init__()
        self.layers = nn.LayerList([_Linear(a, b, grain) for a, b in itertools.pairwise(WIDTHS)])
        self.odd = odd
        if odd is not None:
            for layer in self.layers[1::2]:
                layer.to(dtype=odd)

    def be_the_reference(self, rounds: tuple[str, str]) -> None:
        """Float32 parameters, rounded where the sharded model's have, or travel in, other dtypes."""
        for layer in self.layers if self.odd is None else self.layers[1::2]:
            layer.to(dtype="float32")
            layer.rounds = rounds

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _loss(model: nn.Layer, step: int, rank: int) -> paddle.Tensor:
    paddle.seed(1000 * step + rank)
    x = _Coarse.apply(paddle.randn([4, WIDTHS[0]]))
    return model(x).square().sum() * (1 + rank) / 4


def _seen(side: Any, dtype: str) -> Values:
    """What layers compute with, in float32."""
    if not side.sharded:
        rounded = [layer.rounds is not None for layer in side.model.layers for _ in range(2)]
        params = side.model.named_parameters()
        return {
            name: (param.astype(dtype).astype("float32") if flag else param).numpy()
            for (name, param), flag in zip(params, rounded, strict=True)
        }
    with full_parameters(side.model):
        return {name: param.astype("float32").numpy() for name, param in side.model.named_parameters()}


def _optimizer(name: str, model: nn.Layer) -> Any:
    rate = 0.05 if name == "AdamW" else 0.3
    return getattr(paddle.optimizer, name)(rate, parameters=model.parameters(), multi_precision=True)


def _masters(side: Any) -> Values:
    """The float32 values that the optimizer updates, of whole parameters."""
    if not side.sharded:
        return values(side.model)
    found: Values = {}
    by_id = {id(param): name for name, param in side.model.named_parameters()}
    for buffer in side.optimizer.buffers:
        full = paddle.empty([buffer.layout.numel], buffer.shard.dtype)
        buffer.place.gather.all_gather(full, buffer.shard, label="test").wait()
        for slot, param in zip(buffer.layout.slots, buffer.params, strict=True):
            assert buffer.shard.dtype == paddle.float32
            found[by_id[id(param)]] = full.numpy()[slot.offset_numel : slot.end_numel].reshape(param.shape)
    return {name: found[name] for name, _ in side.model.named_parameters()}


def _side(new: Factory, optimizer: Callable[[nn.Layer], Any], rounds: tuple[str, str], odd: str | None = None) -> Any:
    grain = "float16" if "float16" in rounds else "bfloat16"
    side = new(lambda: _Net(grain, odd), optimizer)
    if not side.sharded:
        side.model.be_the_reference(rounds)
    return side


def _train(new: Factory, optimizer: str, rounds: tuple[str, str], odd: str | None = None) -> dict[str, Values]:
    side = _side(new, lambda model: _optimizer(optimizer, model), rounds, odd)
    for step in range(STEPS):
        side.backward(lambda rank, step=step: _loss(side.model, step, rank))
        side.step()
        side.clear_grad()
    return {"masters": _masters(side), "seen": _seen(side, rounds[0])}


def _in(stages: tuple[int, ...], **settings: Any) -> dict[str, dict[str, Any]]:
    found = {f"stage {stage}": {"stage": stage, **BOTH, **settings} for stage in stages}
    found["no overlap"] = {"stage": 2, "comm_buffer_size_MB": 0.002, **settings}
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["Momentum", "AdamW"])
def test_layers_compute_in_16_bits_and_masters_are_float32(dtype: str, optimizer: str) -> None:
    """Parameters and gradients have 16 bits; gradients travel so, and are summed in float32."""
    settings = _in((1, 2, 3), param_dtype=dtype)
    settings["reshard"] = {"stage": 2, **BOTH, "param_dtype": dtype, "reshard_after_step": True}
    settings["inputs as they are"] = {"stage": 3, **BOTH, "param_dtype": dtype, "cast_forward_inputs": False}
    harness.run(compare, 2, _train, settings, 0.0, optimizer, (dtype, dtype))


def test_what_travels_in_the_gather_has_half_the_bytes() -> None:
    settings = _in((1, 2, 3), gather_dtype="bfloat16")
    settings["stage 3, kept"] = {"stage": 3, "reshard_after_forward": False, "gather_dtype": "bfloat16"}
    harness.run(compare, 2, _train, settings, 0.0, "AdamW", ("bfloat16", "float32"))


def test_what_travels_in_the_reduction_has_half_the_bytes() -> None:
    settings = _in((1, 2, 3), reduce_dtype="bfloat16")
    harness.run(compare, 2, _train, settings, 0.0, "Momentum", ("float32", "bfloat16"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_parameters_beside_float32_ones(dtype: str) -> None:
    """Those of a model that was cast in part, under an optimizer that keeps masters."""
    harness.run(compare, 2, _train, _in((1, 2, 3)), 0.0, "AdamW", (dtype, dtype), dtype)


def _accumulate(new: Factory, rounds: tuple[str, str]) -> dict[str, Values]:
    """Three micro-batches of very different scale, with and without ``no_sync``."""
    side = _side(new, lambda model: _optimizer("SGD", model), rounds)
    for step in range(4):
        for micro in range(3):
            with side.no_sync() if step % 2 and micro < 2 else contextlib.nullcontext():
                side.backward(lambda rank, at=3 * step + micro: _loss(side.model, at, rank) * 8.0 ** -(at % 3))
        side.step()
        side.clear_grad()
    return {"masters": _masters(side)}


def test_main_grad_accumulates_in_float32() -> None:
    settings = _in((1, 2, 3), param_dtype="bfloat16", main_grad=True)
    settings["fp32 reduction"] = {"stage": 2, **BOTH, "param_dtype": "bfloat16", "reduce_dtype": "float32"}
    # The order in which micro-batches and ranks are added differs from the reference's.
    harness.run(compare, 2, _accumulate, settings, 1e-6, ("bfloat16", "bfloat16"))


def test_without_it_micro_batches_add_up_in_16_bits() -> None:
    settings = {"bf16": {"stage": 2, **BOTH, "param_dtype": "bfloat16"}}
    with pytest.raises(AssertionError, match="off by"):
        harness.run(compare, 2, _accumulate, settings, 1e-6, ("bfloat16", "bfloat16"))
    harness.run(compare, 2, _accumulate, settings, 0.02, ("bfloat16", "bfloat16"))


def _freeze_and_thaw(new: Factory, dtype: str) -> dict[str, Values]:
    """Every other layer, in 16 bits, is frozen when wrapped, thaws, is frozen again and thaws again."""

    def optimizer(model: nn.Layer) -> Any:
        for param in model.layers[1].parameters():
            param.stop_gradient = True
        return _optimizer("AdamW", model)

    side = _side(new, optimizer, (dtype, dtype), dtype)
    frozen = side.model.layers[1].parameters()
    found = {}
    for step in range(8):
        for param in frozen:
            param.stop_gradient = step // 2 % 2 == 0
        side.backward(lambda rank, step=step: _loss(side.model, step, rank))
        side.step()
        side.clear_grad(set_to_zero=False)
        found[f"step {step}"] = _seen(side, dtype)
    return {**found, "masters": _masters(side)}


def test_16_bit_parameters_that_thaw_get_masters() -> None:
    harness.run(compare, 2, _freeze_and_thaw, _in((1, 2, 3)), 0.0, "bfloat16")


def _new_weights(new: Factory, step_after: bool) -> dict[str, Values]:
    """Weights alone are set, as by ``set_state_dict``; masters follow, moments stay."""
    side = _side(new, lambda model: _optimizer("AdamW", model), ("bfloat16", "bfloat16"))
    found = {}
    for step in range(4):
        side.backward(lambda rank, step=step: _loss(side.model, step, rank))
        side.step()
        side.clear_grad()
        if step == 1:
            with full_parameters(side.model):
                state = side.model.state_dict()
                state["layers.0.weight"] = (state["layers.0.weight"].astype("float32") + 1).astype("bfloat16")
                side.model.set_state_dict(state)
            found["set"] = _seen(side, "bfloat16")
            side.optimizer.set_lr(0.0 if step_after else 0.05)
    return {**found, "end": _seen(side, "bfloat16"), "masters": _masters(side)}


@pytest.mark.parametrize("rate_is_zero", [True, False])
def test_weights_that_are_set_reach_the_masters(rate_is_zero: bool) -> None:
    """The reference rounds what it sets; nothing else of a master changes."""
    settings = _in((1, 2, 3), param_dtype="bfloat16")
    for outcome in harness.run(_new_weights_alike, 2, settings, rate_is_zero):
        assert outcome is None


def _new_weights_alike(rank: int, nranks: int, settings: Any, rate_is_zero: bool) -> None:
    seen = []
    for chosen in settings.values():
        found, _ = play(rank, nranks, _new_weights, chosen, rate_is_zero)
        moved = found["end"]["layers.0.weight"] - found["set"]["layers.0.weight"]
        assert (np.abs(moved).max() == 0) == rate_is_zero
        assert np.abs(found["set"]["layers.0.weight"]).mean() > 0.8, "what was written is lost"
        untouched = found["masters"]["layers.1.weight"]
        assert (untouched != _rounded(untouched)).mean() > 0.9, "a master that nobody wrote to was rounded"
        seen.append(found)
    for found in seen:
        for what, value in seen[0].items():
            assert_equal(found[what], value, what)


def _rounded(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return paddle.to_tensor(value).astype("bfloat16").astype("float32").numpy()


def _hybrid(rank: int, nranks: int, settings: dict[str, Any]) -> tuple[list[float], Values, list[Any]]:
    paddle.seed(5)
    model = _Net("bfloat16")
    inner = paddle.optimizer.AdamW(0.003, parameters=model.parameters())
    model, optimizer, calls = wrap(model, inner, nranks, n_replicas=2, **settings)
    losses = []
    for step in range(20):
        loss = _loss(model, step % 2, rank)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    with full_parameters(model):
        return losses, {name: param.astype("float32").numpy() for name, param in model.named_parameters()}, calls


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_stay_equal_and_losses_follow_those_of_float32(stage: int) -> None:
    settings = {"stage": stage, **BOTH}
    exact = harness.run(_hybrid, 4, settings)
    short = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    for mixed in (short, {"gather_dtype": "bfloat16", "reduce_dtype": "bfloat16"}):
        found = harness.run(_hybrid, 4, {**settings, **mixed})
        assert_all_equal([params for _, params, _ in found], str(mixed))
        for (losses, _, calls), (expected, _, wide) in zip(found, exact, strict=True):
            assert expected[-2] < 0.6 * expected[0]
            np.testing.assert_allclose(losses, expected, rtol=0.1, atol=0.05 * expected[0])
            for lane in ("gather", "reduce", "replicate"):
                assert _bytes_on(calls, lane) < 0.6 * _bytes_on(wide, lane), lane


def _bytes_on(calls: list[Any], lane: str) -> int:
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    return sum(
        call.nbytes for call in calls if call.lane == lane and call.op in kinds and "agreement" not in call.label
    )


def _dtypes_now(rank: int, nranks: int, settings: dict[str, Any]) -> list[str]:
    paddle.seed(5)
    model = _Net("bfloat16", "bfloat16")
    model, optimizer, _ = wrap(model, _optimizer("AdamW", model), nranks, **settings)
    found = [str(param.dtype) for param in model.parameters()]
    loss = _loss(model, 0, rank)
    with optimizer.no_sync():
        loss.backward()
        found += [str(None if param.grad is None else param.grad.dtype) for param in model.parameters()]
        found += [str(getattr(param, "main_grad", None) is not None) for param in model.parameters()]
    optimizer.full_grad(model.parameters()[2])
    optimizer.step()
    optimizer.clear_grad()
    assert all(getattr(param, "main_grad", None) is None for param in model.parameters())
    moments = [value for name, value in optimizer.state_dict().items() if "moment" in name]
    assert moments and all(moment.dtype == paddle.float32 for moment in moments)
    return found


def test_what_has_which_dtype() -> None:
    plain, short = "paddle.float32", "paddle.bfloat16"
    by_layer = [plain, plain, short, short, plain, plain]
    nothing = ["None"] * 6
    first = {"stage": 1, **BOTH}
    assert harness.run(_dtypes_now, 2, first)[0] == [*by_layer, *by_layer, *["False"] * 6]
    assert harness.run(_dtypes_now, 2, {"stage": 2, **BOTH})[0] == [*by_layer, *nothing, *["False"] * 6]
    cast = {**first, "param_dtype": "bfloat16"}
    assert harness.run(_dtypes_now, 2, cast)[0] == [*[short] * 6, *[short] * 6, *["False"] * 6]
    main = {**cast, "main_grad": True}
    assert harness.run(_dtypes_now, 2, main)[0] == [*[short] * 6, *nothing, *["True"] * 6]
    assert harness.run(_dtypes_now, 2, {**main, "stage": 3})[0][:6] == [short] * 6


def _refused(rank: int, nranks: int, dtype: str, settings: dict[str, Any]) -> str:
    model = nn.Linear(4, 3)
    model.to(dtype=dtype)
    with pytest.raises(ConfigError) as error:
        shard(model, paddle.optimizer.SGD(parameters=model.parameters()), ShardingConfig(**settings))
    assert model.weight.dtype == getattr(paddle, dtype)
    return str(error.value)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        ("float64", {"param_dtype": "bfloat16"}),
        ("float64", {"gather_dtype": "float32"}),
        ("float64", {"reduce_dtype": "float32"}),
        ("bfloat16", {"gather_dtype": "float32"}),
        ("bfloat16", {"gather_dtype": "float16"}),
        ("float16", {"reduce_dtype": "bfloat16"}),
    ],
)
def test_what_a_parameter_cannot_honour_is_an_error_that_names_it(dtype: str, settings: dict[str, Any]) -> None:
    key, value = next(iter(settings.items()))
    for text in harness.run(_refused, 2, dtype, settings):
        assert f"{key}='{value}': parameter 'weight' is of {dtype}" in text


def _load_wide(rank: int, nranks: int, settings: dict[str, Any]) -> Values:
    paddle.seed(5)
    model = _Net("bfloat16")
    exact = {name: paddle.to_tensor(param.numpy() * 1.001) for name, param in model.named_parameters()}
    model, optimizer, _ = wrap(model, paddle.optimizer.SGD(0.0, parameters=model.parameters()), nranks, **settings)
    for step in range(2):
        with full_parameters(model):
            model.set_state_dict(exact if step else {name: value.numpy() * 2 for name, value in exact.items()})
        _loss(model, step, rank).backward()
        optimizer.step()
        optimizer.clear_grad()
    with full_parameters(model):
        for name, param in model.named_parameters():
            assert param.dtype == paddle.bfloat16
            np.testing.assert_array_equal(param.astype("float32").numpy(), _rounded(exact[name].numpy()))
    found = _masters(SimpleNamespace(sharded=True, model=model, optimizer=optimizer))
    for name, value in exact.items():
        np.testing.assert_array_equal(found[name], value.numpy(), err_msg=name)
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_float32_state_reaches_masters_with_all_its_bits(stage: int) -> None:
    harness.run(_load_wide, 2, {"stage": stage, **BOTH, "param_dtype": "bfloat16"})


def _master_grad(new: Factory) -> dict[str, Values]:
    """What ``paddle.amp.decorate(master_grad=True)`` sets, which on CPU it leaves to us."""
    amp = amp_global_state()

    def optimizer(model: nn.Layer) -> Any:
        amp.model_parameters = list(model.parameters())
        amp.use_master_grad = True
        return _optimizer("SGD", model)

    try:
        side = _side(new, optimizer, ("bfloat16", "bfloat16"))
        for step in range(4):
            for micro in range(3):
                with paddle.amp.auto_cast(level="O2", dtype="bfloat16"):
                    side.backward(lambda rank, at=3 * step + micro: _loss(side.model, at, rank) * 8.0 ** -(at % 3))
            side.step()
            side.clear_grad()
        return {"masters": _masters(side)}
    finally:
        amp.use_master_grad, amp.model_parameters = False, []


def test_decorating_for_float32_gradients_is_heard() -> None:
    harness.run(compare, 2, _master_grad, _in((1, 2, 3), param_dtype="bfloat16"), 1e-6)


def _alone(rank: int, nranks: int, settings: dict[str, Any]) -> Values:
    paddle.seed(SEED)
    model = _Net("bfloat16")
    optimizer = shard(model, _optimizer("AdamW", model), ShardingConfig(**settings))
    for step in range(STEPS):
        _loss(model, step, 0).backward()
        optimizer.step()
        optimizer.clear_grad()
    return _masters(SimpleNamespace(sharded=True, model=model, optimizer=optimizer))


@pytest.mark.parametrize("stage", [1, 3])
def test_one_process_heeds_the_dtypes_too(stage: int) -> None:
    (found,) = harness.run(_alone, 1, {"stage": stage, **BOTH, "param_dtype": "bfloat16"})
    (expected,) = harness.run(_reference_alone, 1)
    assert_equal(found, expected)


def _reference_alone(rank: int, nranks: int) -> Values:
    side = _side(
        lambda model, optimizer: Plain(model, optimizer, 1), lambda m: _optimizer("AdamW", m), ("bfloat16", "bfloat16")
    )
    for step in range(STEPS):
        side.backward(lambda rank, step=step: _loss(side.model, step, rank))
        side.step()
        side.clear_grad()
    return _masters(side)
