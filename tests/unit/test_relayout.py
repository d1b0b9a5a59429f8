"""Buckets that are laid out anew in one process: state that nothing trains by yet, and moves that fail half-way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.utils import unique_name

import hp_sharding
from hp_sharding import StateError, full_parameters, relayout
from hp_sharding.moments import make_moments, moments_of
from tests.fakes import Rig, wrap
from tests.models import make_optimizer
from tests.tasks import BOTH, SMALL_MB, TASKS, final_values, shard_task

AUTO: dict[str, Any] = {**BOTH, "comm_buffer_size_MB": "auto"}
WIDTH = 20


def _move(rig: Rig, size_mb: float) -> None:
    foundation = rig.optimizer.tuning._foundation  # type: ignore[union-attr]
    config = dataclasses.replace(rig.optimizer.config, comm_buffer_size_MB=size_mb)
    relayout.relayout(rig.optimizer, foundation, config)


# -- what was frozen when it was wrapped -------------------------------------------------------------------------------


class _Layer(nn.Linear):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x @ self.weight.cast("float32") + self.bias.cast("float32")


def _wrapped(dtype: str, settings: dict[str, Any]) -> Rig:
    """Of four layers, two are frozen."""
    paddle.seed(3)
    with unique_name.guard():
        model = nn.Sequential(*[_Layer(WIDTH, WIDTH) for _ in range(4)])
        model.to(dtype=dtype)
        _thaw(model, still=True)
        inner = paddle.optimizer.AdamW(0.01, parameters=model.parameters(), multi_precision=dtype == "bfloat16")
        return wrap(model, inner, **AUTO, **settings)


def _thaw(model: nn.Layer, *, still: bool = False) -> None:
    for layer in (model[1], model[2]):
        for param in layer.parameters():
            param.stop_gradient = still


def _steps(rig: Rig, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = paddle.to_tensor(np.random.default_rng(step).standard_normal([4, WIDTH], dtype=np.float32))
        loss = rig.model(x).square().mean()
        loss.backward()
        rig.optimizer.step()
        rig.optimizer.clear_grad()
        losses.append(float(loss))
    return losses


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    masters = {name: value.clone() for name, value in state.get("master_weights", {}).items()}
    moments = {key: value.clone() for key, value in state.items() if isinstance(value, paddle.Tensor)}
    return {**state, **moments, **({"master_weights": masters} if masters else {})}


def _by_rank(trained: Rig, folder: Path) -> Callable[[Rig], None]:
    state, params = _copied(trained.optimizer.state_dict()), final_values(trained.model)

    def load(rig: Rig) -> None:
        with full_parameters(rig.model):
            for param, value in zip(rig.model.parameters(), params, strict=True):
                param.set_value(value)
        rig.optimizer.set_state_dict(state)

    return load


def _by_checkpoint(trained: Rig, folder: Path) -> Callable[[Rig], None]:
    hp_sharding.save(folder / "a", trained.model, trained.optimizer)
    return lambda rig: hp_sharding.load(folder / "a", rig.model, rig.optimizer) and None


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2, "reshard_after_step": True}, {"stage": 3}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keep", [_by_rank, _by_checkpoint])
def test_what_was_loaded_for_layers_that_are_frozen_again_is_not_lost(
    tmp_path: Path, settings: dict[str, Any], dtype: str, keep: Callable[[Rig, Path], Callable[[Rig], None]]
) -> None:
    """Moments and masters of a run in which they had thawed; here they thaw after the buckets have changed."""
    trained = _wrapped(dtype, settings)
    _thaw(trained.model)
    _steps(trained, range(2))
    load = keep(trained, tmp_path)
    found = []
    for sizes_mb in ((), (SMALL_MB, 25)):
        rig = _wrapped(dtype, settings)
        rig.optimizer.tuning.is_over = True  # type: ignore[union-attr]
        load(rig)
        for size_mb in sizes_mb:
            _move(rig, size_mb)
        losses = _steps(rig, range(2, 3))
        _thaw(rig.model)
        found.append((losses + _steps(rig, range(3, 6)), final_values(rig.model)))
    (losses, params), (moved_losses, moved_params) = found
    assert moved_losses == losses
    for moved, still in zip(moved_params, params, strict=True):
        np.testing.assert_array_equal(moved, still)


# -- moments of several kinds ------------------------------------------------------------------------------------------


class _Traced(paddle.optimizer.Momentum):
    """Also keeps a trace of each parameter: in float64 of some, in two rows of others, and so in one bucket."""

    def _create_accumulators(self, block: Any, parameters: Any) -> None:
        fresh = [param for param in parameters if param.name not in self._already_create_accumulator]
        super()._create_accumulators(block, parameters)
        for param in fresh:
            kind = int(param.name.partition("_")[2].partition(".")[0]) % 3  # "linear_4.w_0", or its probe
            shape = [2, *param.shape] if kind == 2 else param.shape
            self._add_accumulator("trace", param, dtype=("float32", "float64", "float32")[kind], shape=shape)


def test_a_moment_may_be_of_another_kind_for_each_parameter() -> None:
    with unique_name.guard():
        model = nn.Sequential(*[nn.Linear(6, 6, bias_attr=False) for _ in range(6)])
        rig = wrap(model, _Traced(0.1, parameters=model.parameters()), **AUTO, stage=2)
    inner, expected = rig.optimizer._inner, {}
    for piece in (piece for buffer in rig.optimizer.buffers for piece in buffer.slices):
        for number, moment in enumerate(make_moments(inner, piece.tensor)):
            value = np.random.default_rng(number).standard_normal(moment.tensor.shape)
            moment.tensor.set_value(value.astype(moment.kind.dtype))
            expected[piece.tensor.name, moment.name] = moment.tensor.numpy()
    assert {value.shape for value in expected.values()} == {(36,), (2, 36)}
    assert {str(value.dtype) for value in expected.values()} == {"float32", "float64"}
    for size_mb in (1e-6, 25):
        _move(rig, size_mb)
        parts = [piece.tensor for buffer in rig.optimizer.buffers for piece in buffer.slices]
        found = {(part.name, moment.name): moment for part in parts for moment in moments_of(inner, part)}
        assert found.keys() == expected.keys()
        for key, moment in found.items():
            np.testing.assert_array_equal(moment.tensor.numpy(), expected[key], strict=True, err_msg=str(key))


# -- moves that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_nobody_goes_on_with_what_is_half_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[BaseException]
) -> None:
    rig = shard_task(TASKS["mlp"].make(), **AUTO)
    TASKS["mlp"].run(0, rig.model, rig.optimizer)

    def fail(*_: Any, **__: Any) -> None:
        raise error("no more")

    monkeypatch.setattr(relayout, "_fill_buckets", fail)
    # An interrupt is not caught by scripts that catch errors.
    with pytest.raises(StateError if issubclass(error, Exception) else error, match="no more"):
        _move(rig, SMALL_MB / 2)
    optimizer, model = rig.optimizer, rig.model
    uses: list[Callable[[], Any]] = [
        optimizer.step,
        optimizer.clear_grad,
        optimizer.state_dict,
        lambda: optimizer.set_state_dict({}),
        lambda: optimizer.sharded_state_dict({}),
        lambda: hp_sharding.save(tmp_path / "a", model, optimizer),
        lambda: hp_sharding.save_full(tmp_path / "b", model, optimizer),
    ]
    for use in uses:
        with pytest.raises(StateError, match=rf"^rank 0: .*{error.__name__}: no more.*half moved.*checkpoint"):
            use()
    assert not list(tmp_path.iterdir())


def test_an_interrupt_before_anything_has_moved_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = shard_task(TASKS["mlp"].make(), **AUTO)
    TASKS["mlp"].run(0, rig.model, rig.optimizer)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(relayout, "_agree_on_moments", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _move(rig, SMALL_MB / 2)
    plain = TASKS["mlp"].make()
    inner = make_optimizer("AdamW", plain)
    TASKS["mlp"].run(0, plain, inner)
    assert TASKS["mlp"].run(1, rig.model, rig.optimizer) == TASKS["mlp"].run(1, plain, inner)
