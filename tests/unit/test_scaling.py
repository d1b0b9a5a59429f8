"""``paddle.amp.GradScaler`` on sharded optimizers, beside plain Paddle with the same scaler; on one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding import full_parameters
from hp_sharding.errors import ConfigError, StateError
from hp_sharding.scaling import adopt_scaler, plain_answer
from tests.fakes import Rig, values, wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.scalers import make_scaler, scale

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
SETTINGS: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": 0.0005}
DOUBTS: dict[str, Any] = {"init_loss_scaling": 1024.0, "incr_every_n_steps": 2, "decr_every_n_nan_or_inf": 1}

Array = np.ndarray[Any, Any]
Scenario = Callable[[nn.Layer, Any, paddle.amp.GradScaler], None]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*amp.*|.*float16.*")
        yield


def _shard(optimizer: str, *, options: dict[str, Any] | None = None, **settings: Any) -> Rig:
    model = make_model("mlp")
    return wrap(model, make_optimizer(optimizer, model, **(options or {})), **{**SETTINGS, **settings})


def _backward(model: nn.Layer, scaler: paddle.amp.GradScaler, number: int, factor: float = 1.0) -> None:
    scale(scaler, loss_of(model, make_batch("mlp", number, 0)) * factor).backward()


def _final(model: nn.Layer) -> list[Array]:
    with full_parameters(model):
        return values(model.parameters())


def _assert_parity(
    scenario: Scenario,
    optimizer: str = "AdamW",
    *,
    options: Callable[[], dict[str, Any]] = dict,
    tolerance: float = 0.0,
    **settings: Any,
) -> Rig:
    """Parameters and scales of both sides end alike."""
    model = make_model("mlp")
    expected, found = make_scaler(**DOUBTS), make_scaler(**DOUBTS)
    scenario(model, make_optimizer(optimizer, model, **options()), expected)
    rig = _shard(optimizer, options=options(), **settings)
    scenario(rig.model, rig.optimizer, found)
    for ours, theirs in zip(_final(rig.model), _final(model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance / 10)
    states = [{**scaler.state_dict(), "scale": float(scaler.state_dict()["scale"])} for scaler in (found, expected)]
    assert states[0] == states[1]
    return rig


@STAGES
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_steps_that_are_skipped_and_steps_that_are_not(stage: int, optimizer: str) -> None:
    """The powers of two of a scale leave every bit as it is."""

    def scenario(model: nn.Layer, inner: Any, scaler: paddle.amp.GradScaler) -> None:
        for step in range(6):
            before = _final(model)
            _backward(model, scaler, step, factor=np.inf if step in (1, 4) else 1.0)
            scaler.step(inner)
            scaler.update()
            inner.clear_grad()
            assert all(map(np.array_equal, before, _final(model))) == (step in (1, 4))

    _assert_parity(scenario, optimizer, stage=stage)


@STAGES
def test_one_element_of_one_bucket_ends_the_step(stage: int) -> None:
    rig, scaler = _shard("AdamW", stage=stage), make_scaler(**DOUBTS)
    hook = rig.model.layers[1].weight.register_hook(lambda grad: grad + np.eye(31, 17, dtype="float32") / 0.0)
    before = _final(rig.model)
    with np.errstate(all="ignore"):
        _backward(rig.model, scaler, 0)
    hook.remove()
    gathers = len(rig.gather.labels("all_gather"))
    scaler.step(rig.optimizer)
    scaler.update()
    assert all(map(np.array_equal, before, _final(rig.model)))
    assert float(scaler.state_dict()["scale"]) == 512.0
    if stage < 3:
        assert rig.gather.labels("all_gather")[gathers:] == ["found inf"], "what has not changed is not gathered"


@STAGES
def test_minimize_after_several_backwards(stage: int) -> None:
    def scenario(model: nn.Layer, inner: Any, scaler: paddle.amp.GradScaler) -> None:
        for step in range(3):
            for micro in range(1 + step):
                loss = scale(scaler, loss_of(model, make_batch("mlp", 5 * step + micro, 0)))
                loss.backward()
            scaler.minimize(inner, loss)
            inner.clear_grad()

    _assert_parity(scenario, stage=stage)


@STAGES
def test_parameter_groups(stage: int) -> None:
    """For which a scaler goes another way through the optimizer."""
    ends = []
    for sharded in (False, True):
        model, scaler = make_model("mlp"), make_scaler(**DOUBTS)
        params = model.parameters()
        groups = [{"params": params[:3]}, {"params": params[3:], "learning_rate": 0.5}]
        inner = make_optimizer("SGD", model, parameters=groups)
        optimizer = wrap(model, inner, **SETTINGS, stage=stage).optimizer if sharded else inner
        for step in range(3):
            _backward(model, scaler, step, factor=np.inf if step == 1 else 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
        ends.append(_final(model))
    assert all(map(np.array_equal, *ends))


@STAGES
def test_clipping_after_unscale(stage: int) -> None:
    """By the optimizer's own clip, and by hand: both see true gradients, and nothing is divided again."""

    def own(model: nn.Layer, inner: Any, scaler: paddle.amp.GradScaler) -> None:
        for step in range(3):
            _backward(model, scaler, step)
            scaler.unscale_(inner)
            scaler.step(inner)
            scaler.update()
            inner.clear_grad()

    clip = {"grad_clip": nn.ClipGradByGlobalNorm(0.05)}
    _assert_parity(own, "SGD", options=lambda: clip, tolerance=1e-6, stage=stage)

    def by_hand(model: nn.Layer, inner: Any, scaler: paddle.amp.GradScaler) -> None:
        for step in range(3):
            _backward(model, scaler, step)
            scaler.unscale_(inner)
            if hasattr(inner, "clip_grad_norm"):
                inner.clip_grad_norm(0.05)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(inner)
            scaler.update()
            inner.clear_grad()

    _assert_parity(by_hand, "SGD", tolerance=1e-6, stage=stage)


def test_a_scaler_says_itself_that_it_was_used_in_the_wrong_order() -> None:
    rig, scaler = _shard("SGD"), make_scaler(**DOUBTS)
    _backward(rig.model, scaler, 0)
    scaler.unscale_(rig.optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(rig.optimizer)


@STAGES
def test_gradients_are_averaged_once(stage: int) -> None:
    """Over a divisor, as over several ranks."""
    found = []
    for divisor in (1.0, 4.0):
        rig, scaler = _shard("SGD", stage=stage, gradient_scale=divisor), make_scaler(**DOUBTS)
        _backward(rig.model, scaler, 0, factor=divisor)
        scaler.unscale_(rig.optimizer)
        rig.optimizer.grad_norm()
        scaler.step(rig.optimizer)
        found.append(_final(rig.model))
    assert all(map(np.array_equal, *found))


def test_one_scaler_for_two_optimizers() -> None:
    """A scaler has one answer for all that it divides, the last; the first optimizer's own gradients count as well."""
    scaler = make_scaler(**DOUBTS)
    rigs = [_shard("SGD"), _shard("SGD")]
    before = _final(rigs[0].model)
    for rig, factor in zip(rigs, (np.inf, 1.0), strict=True):
        _backward(rig.model, scaler, 0, factor)
    for rig in rigs:
        scaler.unscale_(rig.optimizer)
    for rig in rigs:
        scaler.step(rig.optimizer)
    assert all(map(np.array_equal, _final(rigs[0].model), before))
    assert not any(map(np.array_equal, _final(rigs[1].model), before))
    for rig in rigs:
        rig.optimizer.clear_grad()
        _backward(rig.model, scaler, 1)
        rig.optimizer.step()
    assert not any(map(np.array_equal, _final(rigs[0].model), before)), "what was found is forgotten"


class _Own(paddle.amp.GradScaler):
    """As trainers have them: reads the gradients one by one."""

    @paddle.no_grad()
    def _unscale(self, optimizer: Any) -> None:
        grads = [param.grad for param in optimizer._parameter_list if param.grad is not None]
        self._found_inf = paddle.stack([paddle.logical_not(paddle.isfinite(grad)).any() for grad in grads]).any()
        for grad in grads:
            grad.multiply_(1.0 / self._scale)
        self._optimizer_states[id(optimizer)]["state"] = paddle.amp.grad_scaler.OptimizerState.UNSCALED


def test_a_scaler_of_the_users_own_is_given_the_gradients_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle.amp, "GradScaler", _Own)

    def scenario(model: nn.Layer, inner: Any, scaler: paddle.amp.GradScaler) -> None:
        assert type(scaler) is _Own
        for step in range(3):
            _backward(model, scaler, step, factor=np.inf if step == 1 else 1.0)
            scaler.step(inner)
            scaler.update()
            inner.clear_grad()

    _assert_parity(scenario, "SGD")


def test_everybody_else_sees_the_optimizers_parameters() -> None:
    rig = _shard("SGD")
    seen = rig.optimizer._parameter_list
    assert all(param is other for param, other in zip(seen, rig.model.parameters(), strict=True))
    assert rig.started("all_gather", "reduce_scatter", "all_reduce") == []


def _unscale_as_fleet(self: paddle.amp.GradScaler, optimizer: Any) -> None:
    """Goes the way of the method that Paddle's ``fleet.distributed_scaler`` puts in, with overlap in stage 1."""
    assert not optimizer._param_groups
    assert hasattr(optimizer, "_comm_buffers")
    assert not optimizer._sharding_enable
    for buffer in optimizer._comm_buffers:
        buffer.scale_grads()
    grads = [param.main_grad for param in optimizer._local_parameter_list if param.main_grad is not None]
    found_inf = paddle.to_tensor(np.array([False]))
    paddle._legacy_C_ops.check_finite_and_unscale(grads, self._scale, grads, found_inf)
    self._found_inf = found_inf


def test_the_way_that_a_scaler_of_fleets_goes() -> None:
    ends = []
    for changed in (False, True):
        rig, scaler = _shard("SGD", stage=1), make_scaler(**DOUBTS)
        if changed:
            scaler._unscale = MethodType(_unscale_as_fleet, scaler)
        for step in range(3):
            _backward(rig.model, scaler, step, factor=np.inf if step == 1 else 1.0)
            scaler.step(rig.optimizer)
            scaler.update()
            rig.optimizer.clear_grad()
        ends.append(_final(rig.model))
    assert all(map(np.array_equal, *ends))


def test_the_answers_that_lead_there_are_copies() -> None:
    plain_answer("_param_groups").append(1)
    assert plain_answer("_param_groups") == []


def test_what_a_scaler_finds_is_no_matter_for_the_check() -> None:
    rig, scaler = _shard("SGD", check_nan_inf="raise"), make_scaler(**DOUBTS)
    _backward(rig.model, scaler, 0, factor=np.inf)
    scaler.step(rig.optimizer)  # skipped
    rig.optimizer.clear_grad()
    _backward(rig.model, scaler, 0, factor=np.inf)
    with pytest.raises(StateError, match="NaN or infinite"):
        rig.optimizer.step()


def test_only_scalers_of_paddles_are_adopted() -> None:
    scaler = make_scaler(**DOUBTS)
    assert adopt_scaler(scaler) is scaler
    with pytest.raises(ConfigError, match=r"expected a paddle\.amp\.GradScaler, got int"):
        adopt_scaler(3)
