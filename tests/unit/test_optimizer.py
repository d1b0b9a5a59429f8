"""``ShardedOptimizer`` as its user sees it, on one process over lanes that deliver only when waited for."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding import ShardingConfig, full_parameters, shard
from hp_sharding.buffer import FusedCommBuffer, Status
from hp_sharding.errors import ConfigError, StateError
from hp_sharding.plain import PlainOptimizer
from tests.fakes import Rig, values, wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer

SMALL_MB = 0.0005
BOTH: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True}


_Options = Callable[[], dict[str, Any]]


def _shard(optimizer: str = "AdamW", *, options: _Options = dict, **settings: Any) -> Rig:
    model = make_model("mlp")
    inner = make_optimizer(optimizer, model, **options())
    return wrap(model, inner, **{"comm_buffer_size_MB": SMALL_MB, **settings})


def _backward(model: nn.Layer, number: int, scale: float = 1.0) -> None:
    (loss_of(model, make_batch("mlp", number, 0)) * scale).backward()


def _final(model: nn.Layer) -> list[np.ndarray[Any, Any]]:
    with full_parameters(model):
        return values(model.parameters())


_Scenario = Callable[[nn.Layer, Any], None]


def _assert_parity(scenario: _Scenario, optimizer: str = "AdamW", tolerance: float = 0.0, **settings: Any) -> Rig:
    """Runs ``scenario`` on plain Paddle and sharded; both models must end alike."""
    plain = make_model("mlp")
    rig = _shard(optimizer, **settings)
    scenario(plain, make_optimizer(optimizer, plain, **settings.get("options", dict)()))
    scenario(rig.model, rig.optimizer)
    for found, expected in zip(_final(rig.model), _final(plain), strict=True):
        if tolerance:
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance / 10)
        else:
            np.testing.assert_array_equal(found, expected)
    return rig


def _no_sync(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    return optimizer.no_sync() if hasattr(optimizer, "no_sync") else contextlib.nullcontext()


# -- step and clear_grad -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("sync", ["no_sync", "plain script"])
def test_any_number_of_micro_batches(stage: int, sync: str) -> None:
    def scenario(model: nn.Layer, optimizer: Any) -> None:
        for step, count in enumerate((3, 1, 2)):
            for micro in range(count):
                last = micro == count - 1 or sync != "no_sync"
                with contextlib.nullcontext() if last else _no_sync(optimizer):
                    _backward(model, 10 * step + micro, scale=10.0**-micro)
            optimizer.step()
            optimizer.clear_grad()

    rig = _assert_parity(scenario, "SGD", stage=stage, **BOTH)
    rounds = 3 if sync == "no_sync" else 6
    assert len(rig.reduce.labels("reduce_scatter")) == rounds * len(rig.optimizer.buffers)


@pytest.mark.parametrize("stage", [1, 2])
def test_micro_batches_without_sync_only(stage: int) -> None:
    def scenario(model: nn.Layer, optimizer: Any) -> None:
        for _ in range(2):
            with _no_sync(optimizer):
                _backward(model, 0)
                _backward(model, 1)
            optimizer.step()
            optimizer.clear_grad()

    _assert_parity(scenario, stage=stage, **BOTH)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("set_to_zero", [True, False])
def test_steps_without_a_backward_and_backwards_without_a_clear(stage: int, set_to_zero: bool) -> None:
    """Momentum moves on with a gradient of zero, and stays where there is none."""

    def scenario(model: nn.Layer, optimizer: Any) -> None:
        optimizer.step()
        _backward(model, 0)
        optimizer.step()
        optimizer.step()
        _backward(model, 1)
        optimizer.step()
        optimizer.clear_grad(set_to_zero)
        optimizer.step()
        optimizer.clear_grad(set_to_zero)
        _backward(model, 2)
        optimizer.step()

    _assert_parity(scenario, "Momentum", stage=stage, **BOTH)


def test_a_step_before_any_backward_changes_nothing() -> None:
    rig = _shard()
    before = _final(rig.model)
    rig.optimizer.step()
    assert all(map(np.array_equal, _final(rig.model), before))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("norm", [0.5, 1e6])
def test_clipping_by_global_norm_and_a_scheduler(stage: int, norm: float) -> None:
    def scenario(model: nn.Layer, optimizer: Any) -> None:
        scheduler = paddle.optimizer.lr.CosineAnnealingDecay(0.2, 6)
        optimizer.set_lr_scheduler(scheduler)
        for number in range(6):
            _backward(model, number, scale=5.0)
            optimizer.step()
            optimizer.clear_grad()
            scheduler.step()

    def options() -> dict[str, Any]:
        return {"grad_clip": nn.ClipGradByGlobalNorm(norm)}

    _assert_parity(scenario, "SGD", tolerance=1e-6, options=options, stage=stage, **BOTH)


def test_a_scheduler_given_to_the_inner_optimizer_is_followed() -> None:
    rates = []

    def options() -> dict[str, Any]:
        return {"learning_rate": paddle.optimizer.lr.StepDecay(0.2, 2)}

    def scenario(model: nn.Layer, optimizer: Any) -> None:
        for number in range(4):
            _backward(model, number)
            optimizer.step()
            optimizer.clear_grad()
            optimizer._learning_rate.step()
            rates.append(optimizer.get_lr())

    _assert_parity(scenario, "SGD", options=options, **BOTH)
    assert rates == pytest.approx([0.2, 0.02, 0.02, 0.002] * 2)


@pytest.mark.parametrize(("scale", "divisor"), [("mean", 1), ("sum", 1), (4.0, 4)])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_gradients_are_divided_as_asked(clip: float | None, scale: Any, divisor: int) -> None:
    def options() -> dict[str, Any]:
        return {"grad_clip": None if clip is None else nn.ClipGradByGlobalNorm(clip)}

    plain = make_model("mlp")
    optimizer = make_optimizer("SGD", plain, **options())
    rig = _shard("SGD", options=options, gradient_scale=scale)
    for number in range(2):
        _backward(plain, number, 1 / divisor)
        _backward(rig.model, number)
        for one in (optimizer, rig.optimizer):
            one.step()
            one.clear_grad()
    for found, expected in zip(_final(rig.model), _final(plain), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6 if clip else 0, atol=1e-7 if clip else 0)


def test_minimize_is_step() -> None:
    def scenario(model: nn.Layer, optimizer: Any) -> None:
        loss = loss_of(model, make_batch("mlp", 0, 0))
        loss.backward()
        optimizer.minimize(loss)
        optimizer.clear_gradients()

    _assert_parity(scenario)


# -- no_sync -----------------------------------------------------------------------------------------------------------


def test_no_sync_restores_what_it_found() -> None:
    rig = _shard()
    with rig.optimizer.no_sync():
        with rig.optimizer.no_sync():
            _backward(rig.model, 0)
        _backward(rig.model, 1)
        with pytest.raises(StateError), rig.optimizer.no_sync():
            raise StateError("inside")
        _backward(rig.model, 2)
        assert rig.log == []
    _backward(rig.model, 3)
    assert len(rig.reduce.labels("reduce_scatter")) == len(rig.optimizer.buffers)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("divisor", [1.0, 4.0])
def test_the_full_gradient_can_be_asked_for(divisor: float, stage: int) -> None:
    plain, rig = make_model("mlp"), _shard(stage=stage, gradient_scale=divisor, **BOTH)
    assert rig.optimizer.full_grad(rig.model.gain) is None
    with rig.optimizer.no_sync():
        _backward(rig.model, 0)
    _backward(plain, 0, 1 / divisor)
    _check_gradients(rig, plain)
    _backward(rig.model, 1)
    _backward(plain, 1, 1 / divisor)
    _check_gradients(rig, plain)
    rig.optimizer.clear_grad(set_to_zero=True)
    plain.clear_gradients()
    _check_gradients(rig, plain)
    rig.optimizer.clear_grad(set_to_zero=False)
    assert rig.optimizer.full_grad(rig.model.gain) is None


def _check_gradients(rig: Rig, plain: nn.Layer) -> None:
    for found, expected in zip(rig.model.parameters(), plain.parameters(), strict=True):
        gradient = rig.optimizer.full_grad(found)
        assert gradient is not None
        assert gradient.shape == expected.shape
        np.testing.assert_array_equal(gradient.numpy(), expected.grad.numpy())


def test_asking_for_gradients_does_not_change_the_step() -> None:
    def scenario(model: nn.Layer, optimizer: Any) -> None:
        for number in range(3):
            _backward(model, number)
            if hasattr(optimizer, "full_grad"):
                for param in model.parameters():
                    optimizer.full_grad(param)
            optimizer.step()
            optimizer.clear_grad()

    _assert_parity(scenario, gradient_scale=1.0, **BOTH)


def test_a_gradient_of_a_parameter_of_others_is_refused() -> None:
    rig = _shard()
    with pytest.raises(ConfigError, match="is not one that this optimizer updates"):
        rig.optimizer.full_grad(nn.Linear(2, 2).weight)


@pytest.mark.parametrize("stage", [1, 2])
def test_what_p_grad_is_after_a_backward(stage: int) -> None:
    plain, rig = make_model("mlp"), _shard(stage=stage)
    for number in range(2):
        _backward(plain, number)
        _backward(rig.model, number)
    for found, expected in zip(rig.model.parameters(), plain.parameters(), strict=True):
        if stage == 1:
            np.testing.assert_array_equal(found.grad.numpy(), expected.grad.numpy())
        else:
            assert found.grad is None
    rig.optimizer.clear_grad()
    assert all(param.grad is None for param in rig.model.parameters())


# -- state -------------------------------------------------------------------------------------------------------------


def test_a_state_saved_and_loaded_resumes_bitwise() -> None:
    first, second = _shard(**BOTH), _shard(**BOTH)
    for number in range(2):
        _backward(first.model, number)
        first.optimizer.step()
        first.optimizer.clear_grad()
    second.model.set_state_dict({name: np.asarray(value.numpy()) for name, value in first.model.state_dict().items()})
    renamed = _renamed(first.optimizer.state_dict(), first.model, second.model)
    second.optimizer.set_state_dict(renamed)
    for rig in (first, second):
        for number in range(2, 4):
            _backward(rig.model, number)
            rig.optimizer.step()
            rig.optimizer.clear_grad()
    assert all(map(np.array_equal, _final(second.model), _final(first.model)))


def _renamed(state: dict[str, Any], old: nn.Layer, new: nn.Layer) -> dict[str, Any]:
    """A copy, for the other model: Paddle names parameters by a counter that a resumed process would begin anew."""
    names = list(zip([p.name for p in old.parameters()], [p.name for p in new.parameters()], strict=True))
    result = {}
    for key, value in state.items():
        for before, after in names:
            if key.startswith(before + "_"):
                key = after + key[len(before) :]
                break
        result[key] = value.clone() if isinstance(value, paddle.Tensor) else value
    return result


def test_a_state_of_another_layout_is_refused() -> None:
    rig, other = _shard(), _shard(comm_buffer_size_MB=25)
    with pytest.raises(ConfigError, match=r"rank 0: this optimizer state is of another layout. Expected rank 0 of 1"):
        other.optimizer.set_state_dict(rig.optimizer.state_dict())
    with pytest.raises(ConfigError, match="found None"):
        rig.optimizer.set_state_dict(make_optimizer("AdamW", make_model("mlp")).state_dict())


# -- attributes --------------------------------------------------------------------------------------------------------


def test_every_parameter_has_its_bucket() -> None:
    rig = _shard()
    assert list(rig.optimizer.param2bucket) == [name for name, _ in rig.model.named_parameters()]
    for name, param in rig.model.named_parameters():
        buckets = rig.optimizer.param2bucket[name]
        assert isinstance(buckets, list)
        [bucket] = buckets
        assert isinstance(bucket, FusedCommBuffer)
        assert any(candidate is param for candidate in bucket.params)
    assert [bucket.layout.number for bucket in rig.optimizer.buffers] == list(range(len(rig.optimizer.buffers)))


def test_what_is_not_ours_is_the_inner_optimizers() -> None:
    rig = _shard("SGD")
    assert rig.optimizer.get_lr() == pytest.approx(0.1)
    rig.optimizer.set_lr(0.5)
    assert rig.optimizer._inner.get_lr() == pytest.approx(0.5)
    with pytest.raises(AttributeError):
        _ = rig.optimizer.no_such_thing
    assert copy.copy(rig.optimizer)._inner_opt is rig.optimizer._inner_opt


def test_overlap_can_be_switched_by_the_call_of_paddlenlp() -> None:
    rig = _shard(reduce_overlap=True)

    def step(number: int) -> set[Status]:
        _backward(rig.model, number)
        rig.optimizer.step()
        rig.optimizer.clear_grad()
        return {buffer.status for buffer in rig.optimizer.buffers}

    assert step(0) == {Status.READY}
    rig.optimizer._set_all_gather_overlap_forward(True, rig.model)
    assert step(1) == {Status.SYNCING}
    rig.optimizer._set_all_gather_overlap_forward(False)
    assert step(2) == {Status.READY}
    assert rig.optimizer._schedule.model is rig.model
    with pytest.raises(ConfigError, match="the model that this optimizer was wrapped with"):
        rig.optimizer._set_all_gather_overlap_forward(True, nn.Linear(2, 2))


def test_with_reshard_that_call_switches_gathers_ahead_on() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4, bias_attr=False) for _ in range(3)])
    rig = wrap(model, make_optimizer("SGD", model), reshard_after_step=True, comm_fusion=False)
    pending: list[int] = []
    model[0].register_forward_pre_hook(lambda *_: pending.append(rig.gather.n_pending))
    for _ in range(3):
        model(paddle.ones([1, 4])).sum().backward()
        rig.optimizer.step()
        rig.optimizer._set_all_gather_overlap_forward(len(pending) > 1, model)
    assert pending == [0, 0, 1]


def test_small_units_share_a_bucket() -> None:
    assert len(_shard(comm_buffer_size_MB=25).optimizer.buffers) == 1


@pytest.mark.parametrize("stage", [1, 2])
def test_an_optimizer_over_part_of_the_model_leaves_the_rest_alone(stage: int) -> None:
    plain, sharded = make_model("mlp"), make_model("mlp")
    inner = [make_optimizer("AdamW", model, parameters=model.layers[1].parameters()) for model in (plain, sharded)]
    rig = wrap(sharded, inner[1], stage=stage, **BOTH)
    assert list(rig.optimizer.param2bucket) == ["layers.1.weight", "layers.1.bias"]
    for number in range(2):
        for model, optimizer in ((plain, inner[0]), (sharded, rig.optimizer)):
            _backward(model, number)
            optimizer.step()
            optimizer.clear_grad()
    assert all(map(np.array_equal, _final(sharded), _final(plain)))
    assert np.array_equal(sharded.gain.grad.numpy(), plain.gain.grad.numpy())


def test_a_memory_report_adds_up() -> None:
    rig = _shard("AdamW", stage=1)
    _backward(rig.model, 0)
    rig.optimizer.step()
    report = rig.optimizer.memory_report()
    padded = sum(buffer.layout.nbytes for buffer in rig.optimizer.buffers)
    assert report["parameters_bytes"] == report["gradients_bytes"] == report["gradient_shard_bytes"] == padded
    assert (report["shard_bytes"], report["moments_bytes"]) == (0, 2 * padded)
    assert report["formula_bytes"] == 5 * padded


# -- a group of one ----------------------------------------------------------------------------------------------------


@pytest.fixture
def plain_pair() -> tuple[nn.Layer, PlainOptimizer]:
    model = make_model("mlp")
    optimizer = shard(model, make_optimizer("AdamW", model), ShardingConfig(stage=2, timeline=True, **BOTH))
    assert isinstance(optimizer, PlainOptimizer)
    return model, optimizer


def test_one_process_trains_plainly(plain_pair: tuple[nn.Layer, PlainOptimizer]) -> None:
    model, optimizer = plain_pair
    plain = make_model("mlp")
    inner = make_optimizer("AdamW", plain)
    for number in range(3):
        with optimizer.no_sync():
            _backward(model, number)
        _backward(plain, number)
        gradient = optimizer.full_grad(model.gain)
        assert gradient is not None
        assert gradient is not model.gain.grad
        assert np.array_equal(gradient.numpy(), plain.gain.grad.numpy())
        if number == 2:
            optimizer.minimize(plain.gain.sum())
        else:
            optimizer.step()
        inner.step()
        optimizer.clear_grad()
        inner.clear_grad()
    assert all(map(np.array_equal, _final(model), _final(plain)))
    assert type(model.gain) is type(plain.gain)


def test_one_process_has_the_same_methods(plain_pair: tuple[nn.Layer, PlainOptimizer]) -> None:
    model, optimizer = plain_pair
    optimizer._set_all_gather_overlap_forward(True, model)
    assert optimizer.full_grad(model.gain) is None
    for number in range(2):
        _backward(model, number)
        optimizer.step()
        optimizer.clear_gradients()
    assert optimizer.param2bucket == {}
    assert optimizer.get_lr() == pytest.approx(0.01)
    assert optimizer.timeline.summary()["steps"] == 1
    assert optimizer.timeline.summary()["exposed_ms"] == 0
    report = optimizer.memory_report()
    params_bytes = 4 * sum(param.size for param in model.parameters())
    assert report["parameters_bytes"] == report["gradients_bytes"] == params_bytes
    assert 2 * params_bytes <= report["moments_bytes"] <= 2 * params_bytes + 100
    assert set(optimizer.state_dict()) == set(optimizer._inner.state_dict())
