"""Whoever reads or writes a parameter right after ``step()`` meets the newest value, though its gather is under way."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from hp_sharding import LayoutError, ShardingConfig, StateError, Status, full_parameters
from tests import harness
from tests.lanes import Wrapped, wrap
from tests.models import loss_of, loss_on, make_batch, make_model, make_optimizer
from tests.reference import Ranks, Values, assert_equal, values
from tests.sides import BOTH, KEPT, STAGES_1_2, Factory, compare

SLOW_S = 0.01


def _read_p_numpy(model: nn.Layer, rank: int) -> Any:
    return {name: param.numpy() for name, param in model.named_parameters()}


def _read_state_dict(model: nn.Layer, rank: int) -> Any:
    return {name: np.array(value) for name, value in model.state_dict().items()}


def _read_saved(model: nn.Layer, rank: int) -> Any:
    file = io.BytesIO()
    paddle.save(model.state_dict(), file)
    file.seek(0)
    return {name: value.numpy() for name, value in paddle.load(file).items()}


def _read_in_eval(model: nn.Layer, rank: int) -> Any:
    model.eval()
    with paddle.no_grad():
        found = model(make_batch("gpt", 5, rank)[0]).numpy()
    model.train()
    return {"output": found}


def _read_functional(model: nn.Layer, rank: int) -> Any:
    x = paddle.ones([2, model.norm.weight.shape[0]])
    layer = model.blocks[3].mlp[0]
    return {"output": F.linear(x, layer.weight, layer.bias).numpy()}


def _read_root(model: nn.Layer, rank: int) -> Any:
    return {"positions": paddle.add(model.positions, model.positions).numpy()}


def _read_copy(model: nn.Layer, rank: int) -> Any:
    twin = copy.deepcopy(model)
    output = twin(make_batch("gpt", 5, rank)[0])
    output.mean().backward()
    grads = {f"{name}, gradient": param.grad.numpy() for name, param in twin.named_parameters()}
    return {**_read_p_numpy(twin, rank), **grads, "output": output.numpy()}


def _read_slices(model: nn.Layer, rank: int) -> Any:
    return {name: param[-1:].numpy() * 2 for name, param in model.named_parameters()}


def _read_operators(model: nn.Layer, rank: int) -> Any:
    found = {}
    for name, param in model.named_parameters():
        zero = paddle.zeros(param.shape)
        found[name] = (zero + param - 2 * param + (param * zero) + -param / 1.0).numpy()
    return found


def _read_statistics(model: nn.Layer, rank: int) -> Any:
    return {name: np.array([float(p.mean()), float(p.max()), float(p.norm())]) for name, p in model.named_parameters()}


def _read_to_static_list(model: nn.Layer, rank: int) -> Any:
    return {name: np.array(param.tolist(), dtype=np.float32) for name, param in model.named_parameters()}


def _read_moving_average(model: nn.Layer, rank: int) -> Any:
    average = {name: paddle.zeros(param.shape) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        average[name].scale_(0.9).add_(param * 0.1)
        average[name].set_value(average[name] * 0.9 + param * 0.1)
    return {name: value.numpy() for name, value in average.items()}


def _read_vector(model: nn.Layer, rank: int) -> Any:
    return {"all": paddle.nn.utils.parameters_to_vector(model.parameters()).numpy()}


READS: dict[str, Callable[[nn.Layer, int], Any]] = {
    name.removeprefix("_read_"): function for name, function in list(globals().items()) if name.startswith("_read_")
}


def _reads(new: Factory) -> dict[str, Values]:
    """Steps, each followed at once by another read, before or after ``clear_grad``."""
    side = new(lambda: make_model("gpt"), lambda model: make_optimizer("Momentum", model))
    snapshots = {}
    for step, (name, read) in enumerate(READS.items()):
        side.backward(loss_on(side.model, "gpt", step))
        side.step()
        if step % 2:
            side.clear_grad()
        found = read(side.model, 0)
        snapshots[name] = {key: np.asarray(value).copy() for key, value in found.items()}
        side.clear_grad()
    return snapshots


def test_reads_right_after_step() -> None:
    settings = {name: {**chosen, "delay_s": SLOW_S} for name, chosen in KEPT.items() if name.startswith("stage")}
    harness.run(compare, 2, _reads, settings)


HELD: dict[str, Callable[[paddle.Tensor, paddle.Tensor], Any]] = {
    "matmul": lambda x, w: paddle.matmul(x, w),
    "linear": lambda x, w: F.linear(x, w),
    "add": lambda x, w: paddle.add(x, w),
    "sum": lambda x, w: paddle.sum(w),
    "set_value": lambda x, w: (x.set_value(w), x)[1],
    "assign": lambda x, w: paddle.assign(w),
    "stack": lambda x, w: paddle.stack([x, w]),
    "where": lambda x, w: paddle.where(x > 0, w, x),
    "in place": lambda x, w: x.add_(w),
    "operator": lambda x, w: x * w,
    "method": lambda x, w: w.matmul(x),
    "numpy": lambda x, w: paddle.to_tensor(np.asarray(w)),
}


def _held(rank: int, nranks: int) -> dict[str, str]:
    """References to parameters that were taken before the step and go straight into a kernel."""
    model, optimizer, _ = _slow_linear(nranks)
    weight, outcomes = model.weight, {}
    for name, operation in HELD.items():
        model(paddle.full([3, 24], rank + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        assert optimizer.buffers[-1].status is Status.SYNCING
        x = paddle.ones([24, 24])
        with paddle.no_grad():
            try:
                found = operation(x.clone(), weight)
            except RuntimeError as error:
                outcomes[name] = f"raised {type(error).__name__}"
                continue
            for buffer in optimizer.buffers:
                optimizer._schedule.gathers.finish(buffer.layout.number)
            expected = operation(x.clone(), weight)
        np.testing.assert_array_equal(found.numpy(), expected.numpy(), err_msg=name)
        outcomes[name] = "newest"
    return outcomes


def _slow_linear(nranks: int) -> Wrapped:
    model = nn.Linear(24, 24)
    inner = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    return wrap(model, inner, nranks, stage=2, delay_s=5 * SLOW_S, **BOTH)


def test_a_reference_held_since_before_is_never_read_stale() -> None:
    """What goes straight into a kernel cannot wait for the gather. Then it must be an error, not the old value."""
    for outcomes in harness.run(_held, 2):
        for name in ("operator", "method", "numpy"):
            assert outcomes[name] == "newest"


WRITES: dict[str, Callable[[paddle.Tensor, Any], Any]] = {
    "set_value": lambda param, new: param.set_value(new),
    "copy_": lambda param, new: param.copy_(paddle.to_tensor(new), True),
    "__setitem__": lambda param, new: param.__setitem__(slice(None), paddle.to_tensor(new)),
    "zero_, add_": lambda param, new: param.zero_().add_(paddle.to_tensor(new)),
    "scale_": lambda param, new: param.scale_(0.0, float(new.reshape([-1])[0])),
    "fill_": lambda param, new: param.fill_(float(new.reshape([-1])[0])),
    "initializer": lambda param, new: nn.initializer.Constant(float(new.reshape([-1])[0]))(param),
}


def _written(new: Factory, write: str) -> dict[str, Values]:
    """Every second parameter is written right after a step; training goes on from what was written."""
    side = new(lambda: make_model("mlp"), lambda model: make_optimizer("Momentum", model))
    for step in range(4):
        side.backward(loss_on(side.model, "mlp", step))
        side.step()
        side.clear_grad()
        if step in (1, 2):
            generator = np.random.default_rng(step)
            with paddle.no_grad():
                for index, param in enumerate(side.model.parameters()):
                    value = generator.standard_normal(param.shape).astype(np.float32)
                    if index % 2:
                        WRITES[write](param, value)
    return {"end": side.values()}


@pytest.mark.parametrize("write", WRITES)
def test_writes_right_after_step(write: str) -> None:
    harness.run(compare, 2, _written, {name: {**chosen, "delay_s": 0.002} for name, chosen in KEPT.items()}, 0.0, write)


def _written_early(new: Factory) -> dict[str, Values]:
    """Values written between wrapping and the first step, and between a forward and its step, count everywhere."""
    side = new(lambda: make_model("mlp"), lambda model: make_optimizer("Momentum", model))
    pretrained = {name: value.numpy() + 0.25 for name, value in side.model.state_dict().items()}
    side.model.set_state_dict(pretrained)
    for step in range(3):
        side.backward(loss_on(side.model, "mlp", step))
        with paddle.no_grad():
            side.model.gain.scale_(0.5)
            side.model.layers[2].weight[0] = 0.125
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def test_writes_before_a_step() -> None:
    harness.run(compare, 2, _written_early, STAGES_1_2)


def _replaced(rank: int, nranks: int, overlap: bool) -> None:
    """What takes the parameter's memory away from its bucket is told so by the next step."""
    model = nn.Linear(24, 24)
    inner = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    settings = {**BOTH, "allgather_overlap": overlap}
    model, optimizer, _ = wrap(model, inner, nranks, stage=2, delay_s=SLOW_S, **settings)
    for replace in (_set_data, _cast):
        model(paddle.ones([3, 24])).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        old = model.weight.data
        replace(model)
        with pytest.raises(LayoutError, match="no longer shares the bucket's storage"):
            optimizer.step()
        model.weight.data = old


def _set_data(model: nn.Layer) -> None:
    model.weight.data = paddle.ones([24, 24])


def _cast(model: nn.Layer) -> None:
    model.to(dtype="float64")
    model.to(dtype="float32")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_that_left_its_bucket_is_an_error(overlap: bool) -> None:
    harness.run(_replaced, 2, overlap)


def _loaded(new: Factory) -> dict[str, Values]:
    """``set_state_dict`` right after a step, from a state that was taken by reference two steps before."""
    side = new(lambda: make_model("gpt"), lambda model: make_optimizer("AdamW", model))
    state = {name: value.numpy().copy() for name, value in side.model.state_dict().items()}
    for step in range(4):
        side.backward(loss_on(side.model, "gpt", step))
        side.step()
        side.clear_grad()
        if step == 1:
            side.model.set_state_dict(state)
    return {"end": side.values()}


def test_set_state_dict_right_after_step() -> None:
    harness.run(compare, 2, _loaded, KEPT)


def _freed(rank: int, nranks: int) -> None:
    """Where parameters are freed, their values are an error, and what is about them is not."""
    model = make_model("mlp")
    settings = {"stage": 2, **BOTH, "reshard_after_step": True}
    model, optimizer, calls = wrap(model, make_optimizer("SGD", model), nranks, **settings)
    shapes = [(param.shape, param.dtype, param.name, param.size) for param in model.parameters()]
    loss_of(model, make_batch("mlp", 0, rank)).backward()
    optimizer.step()
    optimizer.clear_grad()
    before = len(calls)
    weight = model.layers[1].weight
    for action in (
        lambda: weight.numpy(),
        lambda: weight + 1,
        lambda: weight[0],
        lambda: float(weight.mean()),
        lambda: weight.set_value(np.zeros(weight.shape, np.float32)),
        lambda: np.asarray(weight),
        lambda: paddle.save(model.state_dict(), io.BytesIO()),
        lambda: copy.deepcopy(model),
    ):
        with pytest.raises(StateError, match="full_parameters"):
            action()
    for action in (lambda: F.linear(paddle.ones([1, 31]), weight), lambda: paddle.sum(weight)):
        with pytest.raises(RuntimeError):
            action()
    assert [(param.shape, param.dtype, param.name, param.size) for param in model.parameters()] == shapes
    assert repr(weight.stop_gradient) == "False"
    assert len(calls) == before, "a read has started a collective on its own"


def test_values_of_freed_parameters_are_an_error() -> None:
    harness.run(_freed, 2)


def _inside(rank: int, nranks: int, reshards: bool) -> None:
    """``full_parameters`` once and nested: readable, writable, and what was written is trained on."""
    model, plain = make_model("mlp"), make_model("mlp")
    settings = {"stage": 2, **BOTH, "reshard_after_step": reshards}
    model, optimizer, _ = wrap(model, make_optimizer("Momentum", model), nranks, **settings)
    inner, ranks = make_optimizer("Momentum", plain), Ranks(plain, nranks)
    for step in range(4):
        ranks.backward(loss_on(plain, "mlp", step))
        inner.step()
        inner.clear_grad()
        loss_of(model, make_batch("mlp", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
        with full_parameters(model) as whole:
            assert whole is model
            assert_equal(values(model), values(plain))
            with full_parameters(model):
                _double(model.layers[2].weight)
            _double(model.layers[0].weight)
            paddle.assign(model.layers[1].weight.numpy() * 2, output=model.layers[1].weight)  # no method of its own
            assert all(buffer.status is Status.READY for buffer in optimizer.buffers)
        for layer in plain.layers[:3]:
            _double(layer.weight)
        assert (optimizer.buffers[0].status is Status.SHARDED) == reshards
    with pytest.raises(ZeroDivisionError), full_parameters(model):
        raise ZeroDivisionError
    with full_parameters(model):
        assert_equal(values(model), values(plain))


def _double(param: paddle.Tensor) -> None:
    param.set_value(param.numpy() * 2)


@pytest.mark.parametrize("reshards", [False, True])
def test_full_parameters(reshards: bool) -> None:
    harness.run(_inside, 2, reshards)


def _switched(new: Factory) -> dict[str, Values]:
    """The overlap of gathers is switched on, off and on again as PaddleNLP's trainer does it."""
    side = new(lambda: make_model("gpt"), lambda model: make_optimizer("Momentum", model))
    for step in range(6):
        if side.sharded:
            side.optimizer._set_all_gather_overlap_forward(step % 3 != 1, side.model)
        side.backward(loss_on(side.model, "gpt", step))
        side.step()
        if side.sharded and step % 3 == 1 and isinstance(side.optimizer.config, ShardingConfig):
            assert all(buffer.status is not Status.SYNCING for buffer in side.optimizer.buffers)
        side.clear_grad()
    return {"end": side.values()}


def test_the_overlap_may_be_switched() -> None:
    harness.run(compare, 2, _switched, KEPT)
