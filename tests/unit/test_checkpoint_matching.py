"""What fits a checkpoint and what does not, in one process: ties, buffers, schedulers, moments, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding import (
    CheckpointError,
    ConfigError,
    LayoutError,
    ShardingConfig,
    load,
    load_full,
    save,
    save_full,
    shard,
)  # fmt: skip
from hp_sharding.checkpoint.folder import open_checkpoint

_LR = paddle.optimizer.lr


class _Tied(nn.Layer):
    """Two layers; ``tied``: with one weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.second(paddle.tanh(self.first(x)))


class _Caching(nn.Layer):
    """Its buffer gets its value from the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache: paddle.Tensor | None
        self.register_buffer("cache", None)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.cache is None:
            self.cache = x.mean(0)
        return self.linear(x + self.cache)


def _adamw(model: nn.Layer, **options: Any) -> Any:
    return paddle.optimizer.AdamW(0.1, parameters=model.parameters(), **options)


def _train(model: nn.Layer, optimizer: Any, steps: int = 2, seed: int = 0) -> None:
    for step in range(steps):
        inputs = np.random.default_rng(seed + step).standard_normal([3, 4], np.float32)
        model(paddle.to_tensor(inputs)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()


def _saved(path: Path, model: nn.Layer, optimizer: Any) -> Path:
    _train(model, optimizer)
    save(path, model, optimizer)
    return path


# -- ties --------------------------------------------------------------------------------------------------------------


def test_a_model_that_unties_finds_the_value_under_both_names(tmp_path: Path) -> None:
    model = _Tied(tied=True)
    path = _saved(tmp_path / "c", model, _adamw(model))
    other = _Tied(tied=False)
    found = load(path, other, _adamw(other), strict=False)
    for weight in (other.first.weight, other.second.weight):
        np.testing.assert_array_equal(weight.numpy(), model.first.weight.numpy())
    assert found.missing == [] and found.unexpected == []


def test_in_a_model_that_ties_more_the_first_name_counts(tmp_path: Path) -> None:
    model = _Tied(tied=False)
    path = _saved(tmp_path / "c", model, _adamw(model))
    other = _Tied(tied=True)
    load(path, other, _adamw(other))
    np.testing.assert_array_equal(other.second.weight.numpy(), model.first.weight.numpy())


def test_a_tied_weight_goes_on_by_either_name(tmp_path: Path) -> None:
    model = _Tied(tied=True)
    optimizer = _adamw(model)
    path = _saved(tmp_path / "c", model, optimizer)
    other = _Tied(tied=True)
    other.first, other.second = other.second, other.first
    other._sub_layers = dict(reversed(other._sub_layers.items()))  # its first name is now the other one
    continued = _adamw(other)
    load(path, other, continued)
    _train(model, optimizer, seed=9)
    other._sub_layers = dict(reversed(other._sub_layers.items()))
    _train(other, continued, seed=9)
    np.testing.assert_array_equal(other.first.weight.numpy(), model.first.weight.numpy())


# -- buffers -----------------------------------------------------------------------------------------------------------


def test_a_buffer_that_the_first_forward_makes_comes_back(tmp_path: Path) -> None:
    model = _Caching()
    path = _saved(tmp_path / "c", model, _adamw(model))
    other = _Caching()
    load(path, other, _adamw(other))
    assert other.cache is not None and model.cache is not None
    np.testing.assert_array_equal(other.cache.numpy(), model.cache.numpy())


def test_one_that_neither_side_has_is_no_fault(tmp_path: Path) -> None:
    model = _Caching()
    save(tmp_path / "c", model, _adamw(model))
    other = _Caching()
    load(tmp_path / "c", other, _adamw(other))
    assert other.cache is None


# -- schedulers --------------------------------------------------------------------------------------------------------

_SCHEDULERS: dict[str, Callable[[], Any]] = {
    "step": lambda: _LR.StepDecay(0.1, 2),
    "exponential": lambda: _LR.ExponentialDecay(0.1, 0.9),
    "plateau": lambda: _LR.ReduceOnPlateau(0.1),
    "warmup": lambda: _LR.LinearWarmup(0.1, 3, 0.0, 0.1),
    "warmup, then cosine": lambda: _LR.LinearWarmup(_LR.CosineAnnealingDecay(0.1, 5), 3, 0.0, 0.1),
}


def _scheduled(name: str) -> tuple[nn.Layer, Any]:
    model = nn.Linear(4, 4)
    return model, paddle.optimizer.AdamW(_SCHEDULERS[name](), parameters=model.parameters())


@pytest.mark.parametrize("here", _SCHEDULERS)
@pytest.mark.parametrize("there", _SCHEDULERS)
def test_strict_knows_one_kind_of_scheduler_from_another(there: str, here: str, tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", *_scheduled(there))
    model, optimizer = _scheduled(here)
    before = model.weight.numpy()
    if there == here:
        load(path, model, optimizer)
        return
    with pytest.raises(CheckpointError, match="state/lr_scheduler"):
        load(path, model, optimizer)
    np.testing.assert_array_equal(model.weight.numpy(), before)
    found = load(path, model, optimizer, strict=False)
    assert any("lr_scheduler" in name for name in [*found.missing, *found.unexpected])
    optimizer._learning_rate.step(*([1.0] if here == "plateau" else []))


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_parameters_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    model, head = nn.Linear(4, 4), nn.Linear(4, 2)
    optimizer = paddle.optimizer.Adam(0.1, parameters=[*model.parameters(), *head.parameters()])
    for call in (save, save_full, load):
        with pytest.raises(ConfigError, match="holds 2 parameters that the model does not have"):
            call(tmp_path / "c", model, optimizer)
    assert not list(tmp_path.iterdir())


def test_moments_that_are_missing_begin_anew(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    path = _saved(tmp_path / "c", model, _adamw(model))
    other = nn.Linear(4, 4)
    optimizer = _adamw(other, amsgrad=True)
    _train(other, optimizer, steps=3)
    found = load(path, other, optimizer, strict=False)
    assert [name for name in found.missing if name.endswith("weight/moment2_max")] == ["optimizer/weight/moment2_max"]
    kept = {name: by_param[other.weight.name] for name, by_param in optimizer._accumulators.items()}
    assert float(kept["moment2_max"].abs().sum()) == 0.0, "none of the run before"
    assert float(kept["moment2"].abs().sum()) > 0.0


@pytest.mark.parametrize("format", ["paddle", "safetensors"])
def test_an_optimizer_without_moments_is_one_all_the_same(format: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    _train(model, optimizer)
    save_full(tmp_path / "f", model, optimizer, format=format)
    other = nn.Linear(4, 4)
    load_full(tmp_path / "f", other, paddle.optimizer.SGD(0.1, parameters=other.parameters()))
    np.testing.assert_array_equal(other.weight.numpy(), model.weight.numpy())


def test_files_without_an_optimizer_do_not_do_for_one(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    save_full(tmp_path / "f", model)
    save(tmp_path / "c", model)
    for call, path in ((load_full, tmp_path / "f"), (load, tmp_path / "c")):
        with pytest.raises(CheckpointError, match=r"lacks optimizer/\*"):
            call(path, model, _adamw(model))
        call(path, model)


# -- what does not belong together ------------------------------------------------------------------------------------


class _Outer(nn.Layer):
    def __init__(self, inner: nn.Layer) -> None:
        super().__init__()
        self.inner = inner


def _sharded(model: nn.Layer, **options: Any) -> Any:
    """In one process, where only mixed precision is."""
    return shard(model, _adamw(model, **options), ShardingConfig(stage=3, gather_dtype="bfloat16"))


def test_layers_and_wrappers_of_a_sharded_model_are_named(tmp_path: Path) -> None:
    model = _Tied(tied=False)
    optimizer = _sharded(model)
    for other in (_Outer(model), model.first):
        for call in (save, load, save_full):
            with pytest.raises(ConfigError, match="belongs to a model that is sharded"):
                call(tmp_path / "c", other)
    for call in (save, load, save_full):
        with pytest.raises(ConfigError, match="pass the optimizer"):
            call(tmp_path / "c", model)
        with pytest.raises(ConfigError, match="another model"):
            call(tmp_path / "c", _Tied(tied=False), optimizer)
    assert not list(tmp_path.iterdir())


def test_a_layer_that_was_removed_is_named(tmp_path: Path) -> None:
    model = _Tied(tied=False)
    optimizer = _sharded(model)
    save(tmp_path / "c", model, optimizer)
    del model.second
    for call in (save, load, save_full):
        with pytest.raises(LayoutError, match="no longer in the model"):
            call(tmp_path / "c", model, optimizer)


def test_one_process_asks_for_the_same_as_several(tmp_path: Path) -> None:
    """``shard`` over one rank gives plain training, of another model too."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = shard(other, _adamw(other))
    for call in (save, load, save_full):
        with pytest.raises(ConfigError, match="parameters that the model does not have"):
            call(tmp_path / "c", model, optimizer)


@pytest.mark.parametrize("call", [save, load, save_full])
def test_optimizers_with_state_of_their_own_are_refused(call: Any, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="LBFGS keeps state"):
        call(tmp_path / "c", model, paddle.optimizer.LBFGS(parameters=model.parameters()))
    with pytest.raises(ConfigError, match=r"expected a paddle\.optimizer\.Optimizer, got Linear"):
        call(tmp_path / "c", model, model)


def test_arguments_that_are_something_else_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    save(tmp_path / "c", model)
    with pytest.raises(ConfigError, match="scaler: expected"):
        save(tmp_path / "c", model, scaler=3)
    with pytest.raises(ConfigError, match="scaler: expected"):
        load(tmp_path / "c", model, scaler=3)
    with pytest.raises(ConfigError, match="path: expected"):
        save("", model)
    with pytest.raises(ConfigError, match="format: expected"):
        save_full(tmp_path / "c", model, format="npz")


def test_a_scaler_that_was_off_is_as_none(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = _adamw(model)
    off = paddle.amp.GradScaler(enable=False)
    save(tmp_path / "off", model, optimizer, scaler=off)
    load(tmp_path / "off", model, optimizer)
    load(tmp_path / "off", model, optimizer, scaler=off)


def test_layers_frozen_here_keep_the_masters_that_they_had(tmp_path: Path) -> None:
    """Trained in the run that was saved, frozen where it is loaded, and trained again later."""
    runs = []
    for name in ("saved", "loaded"):
        paddle.seed(3)
        model = _Tied(tied=False)
        for param in model.second.parameters():
            param.stop_gradient = True
        model.to(dtype="bfloat16")
        optimizer = shard(model, _adamw(model, multi_precision=True), ShardingConfig(stage=2, main_grad=True))
        runs.append((name, model, optimizer))
    (_, saved, trained), (_, loaded, optimizer) = runs
    _update(saved, trained, saved.second)
    save(tmp_path / "c", saved, trained)
    load(tmp_path / "c", loaded, optimizer)
    save(tmp_path / "again", loaded, optimizer)
    with open_checkpoint(tmp_path / "c") as one, open_checkpoint(tmp_path / "again") as other:
        assert one.tensors == other.tensors
        assert one.tensors["model/second.weight"].dtype == "float32"
    for model, inner in ((saved, trained), (loaded, optimizer)):
        _update(model, inner, model.second)
    for one_part, other_part in zip(trained.buffers, optimizer.buffers, strict=True):
        np.testing.assert_array_equal(one_part.shard.numpy(), other_part.shard.numpy())


def _update(model: nn.Layer, optimizer: Any, thawed: nn.Layer) -> None:
    """A step, without the 16-bit products that CPUs do not have."""
    for param in thawed.parameters():
        param.stop_gradient = False
    sum((param.astype("float32") * 0.3).sum() for param in model.parameters()).backward()
    optimizer.step()
    optimizer.clear_grad()
