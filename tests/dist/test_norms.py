"""What all ranks decide alike: norms, whether gradients are finite, and the step that a loss scaler skips.

The same ranks as one shard group of four, as two groups of two and as four replicas: a norm counts every element once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from hp_sharding import StateError, full_parameters
from tests import harness
from tests.lanes import wrap
from tests.models import loss_of, loss_on, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_all_equal, values
from tests.scalers import make_scaler, scale
from tests.sides import BOTH, Factory, Settings, compare

ORDER = 2e-6
"""Sums over four ranks are formed in another order than by one process, and so are norms."""

SPLITS: Settings = {
    f"stage {stage}, {n_replicas} x {4 // n_replicas}": {"stage": stage, "n_replicas": n_replicas, **BOTH}
    for stage, n_replicas in ((2, 1), (1, 2), (3, 2), (2, 4))
}
FEW: Settings = {name: SPLITS[name] for name in ("stage 2, 1 x 4", "stage 1, 2 x 2")}
TWO: Settings = {f"stage {stage}": {"stage": stage, **BOTH} for stage in (1, 2, 3)}


class _Odd(nn.Layer):
    """Tied and frozen weights, two dtypes, vectors smaller than a shard, and what is not to be clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.precise = nn.Linear(8, 3).to(dtype="float64")
        self.gain = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.0))
        for param in self.frozen.parameters():
            param.stop_gradient = True
        self.tied.bias.need_clip = False

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.tied(paddle.tanh(self.frozen(F.gelu(self.first(x)))))
        return self.precise(x.astype("float64")).astype("float32") * self.gain


def _odd_loss(model: nn.Layer, step: int, rank: int) -> paddle.Tensor:
    x, target = make_batch("even_mlp", step, rank)
    return F.mse_loss(model(x), target[:, :3])


def _norm(side: Any) -> Values:
    if side.sharded:
        return {"norm": np.array(side.optimizer.grad_norm())}
    grads = [param.grad.astype("float64") for param in side.model.parameters() if param.grad is not None]
    return {"norm": np.array(float(sum((grad**2).sum() for grad in grads)) ** 0.5)}


def _clip(side: Any, norm: float, max_norm: float) -> float:
    """Paddle's ``clip_grad_norm_`` takes one dtype only, so plain gradients are clipped by its formula."""
    if side.sharded:
        return float(side.optimizer.clip_grad_norm(max_norm))
    for param in side.model.parameters():
        if param.grad is not None:
            with paddle.no_grad():
                param.grad.scale_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


def _by_hand(new: Factory) -> dict[str, Values]:
    side = new(_Odd, lambda model: make_optimizer("SGD", model))
    snapshots = {}
    for step in range(3):
        side.backward(lambda rank, step=step: _odd_loss(side.model, step, rank))
        snapshots[f"before step {step}"] = found = _norm(side)
        norm = float(found["norm"])
        assert _clip(side, norm, round(norm, 3) / 2) == pytest.approx(norm, rel=ORDER)
        snapshots[f"clipped in step {step}"] = _norm(side)
        side.step()
        side.clear_grad()
    return {**snapshots, "end": side.values()}


def test_a_norm_counts_every_element_once() -> None:
    harness.run(compare, 4, _by_hand, SPLITS, ORDER)
    harness.run(compare, 2, _by_hand, TWO, ORDER)


def _by_the_optimizer(new: Factory) -> dict[str, Values]:
    side = new(_Odd, lambda model: make_optimizer("SGD", model, grad_clip=nn.ClipGradByGlobalNorm(0.05)))
    for step in range(3):
        side.backward(lambda rank, step=step: _odd_loss(side.model, step, rank))
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def test_the_optimizers_own_clip_takes_the_same_norm() -> None:
    harness.run(compare, 4, _by_the_optimizer, FEW, ORDER)


def _by_groups(new: Factory) -> dict[str, Values]:
    """Two groups, one of which is clipped; a part is frozen on the way, also between backward and step."""

    def optimize(model: nn.Layer) -> Any:
        params = model.parameters()
        half = len(params) // 2
        groups = [
            {"params": params[:half], "grad_clip": nn.ClipGradByGlobalNorm(0.02)},
            {"params": params[half:], "learning_rate": 0.5, "weight_decay": 0.1},
        ]
        return make_optimizer("Momentum", model, parameters=groups)

    side = new(lambda: make_model("mlp"), optimize)
    late = side.model.layers[0].weight
    for step in range(4):
        side.backward(loss_on(side.model, "mlp", step))
        late.stop_gradient = step in (1, 2)  # in step 1 only after its gradient has come
        side.step()
        late.stop_gradient = step == 1
        side.clear_grad()
    return {"end": side.values()}


def test_groups_have_norms_of_their_own() -> None:
    harness.run(compare, 4, _by_groups, FEW, ORDER)
    harness.run(compare, 2, _by_groups, TWO, ORDER)


class _Norms(NamedTuple):
    norms: list[float]
    params: Values


def _exact(rank: int, nranks: int, n_replicas: int) -> _Norms:
    model = make_model("gpt")
    model, optimizer, _ = wrap(model, make_optimizer("AdamW", model), nranks, n_replicas=n_replicas, stage=2, **BOTH)
    norms = []
    for step in range(3):
        loss_of(model, make_batch("gpt", step, rank)).backward()
        norms += [optimizer.grad_norm(), float(optimizer.clip_grad_norm(0.1)), optimizer.grad_norm()]
        optimizer.step()
        optimizer.clear_grad()
    return _Norms(norms, values(model))


@pytest.mark.parametrize("n_replicas", [1, 2, 4])
def test_all_ranks_have_the_same_bits(n_replicas: int) -> None:
    found = harness.run(_exact, 4, n_replicas)
    assert all(result.norms == found[0].norms for result in found)
    assert_all_equal([result.params for result in found])


# -- edits -------------------------------------------------------------------------------------------------------------


def _edited(new: Factory) -> dict[str, Values]:
    """Single elements bounded in place, and one gradient set, by every rank alike."""
    side = new(lambda: make_model("mlp"), lambda model: make_optimizer("Momentum", model))
    weight = side.model.layers[1].weight
    for step in range(3):
        side.backward(loss_on(side.model, "mlp", 2 * step))
        if side.sharded:
            side.optimizer.set_full_grad(weight, paddle.full(weight.shape, 0.01 * step))
            for part in side.optimizer.local_grads():
                part.gradient.clip_(-0.02, 0.02)
        else:
            weight.grad = paddle.full(weight.shape, 0.01 * step)
            nn.utils.clip_grad_value_(side.model.parameters(), 0.02)
        if step == 1:
            side.backward(loss_on(side.model, "mlp", 2 * step + 1))
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def test_gradients_are_edited_between_backward_and_step() -> None:
    harness.run(compare, 4, _edited, FEW, ORDER)
    harness.run(compare, 2, _edited, TWO, ORDER)


def _parts(rank: int, nranks: int) -> list[tuple[str, int, Any]]:
    model = make_model("mlp")
    model, optimizer, _ = wrap(model, make_optimizer("SGD", model), nranks, stage=2, **BOTH)
    loss_of(model, make_batch("mlp", 0, rank)).backward()
    parts = [(part.name, part.start_numel, part.gradient.numpy().copy()) for part in optimizer.local_grads()]
    full = {name: optimizer.full_grad(param).numpy().reshape(-1) for name, param in model.named_parameters()}
    for name, start, gradient in parts:
        np.testing.assert_array_equal(gradient, full[name][start : start + gradient.size])
    return [(name, start, gradient.size) for name, start, gradient in parts]


def test_the_ranks_hold_each_element_once() -> None:
    found = [part for parts in harness.run(_parts, 4) for part in parts]
    for name, param in make_model("mlp").named_parameters():
        spans = sorted((start, start + numel) for part, start, numel in found if part == name)
        assert [0, *(end for _, end in spans)] == [*(start for start, _ in spans), param.size], name


# -- not finite --------------------------------------------------------------------------------------------------------


def _spoil(model: nn.Layer, value: float) -> Any:
    """Has one element of the gradient of one bias be ``value``."""
    spoil = paddle.to_tensor(np.array([value] + [0.0] * 22, "float32"))
    return model.layers[2].bias.register_hook(lambda grad: grad + spoil)


class _Skips(NamedTuple):
    scales: list[float]
    before: Values
    skipped: Values
    after: Values


def _overflow(rank: int, nranks: int, settings: dict[str, Any], bad: int) -> _Skips:
    """In step 1 one element of the gradient of one bias overflows, on one rank, and so in one shard."""
    model = make_model("mlp")
    model, optimizer, _ = wrap(model, make_optimizer("AdamW", model), nranks, **settings)
    scaler = make_scaler(init_loss_scaling=1024.0)
    snapshots, scales = [], []
    for step in range(3):
        hook = _spoil(model, np.inf) if (rank, step) == (bad, 1) else None
        scale(scaler, loss_of(model, make_batch("mlp", step, rank))).backward()
        if hook is not None:
            hook.remove()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        scales.append(float(scaler.state_dict()["scale"]))
        with full_parameters(model):
            snapshots.append(values(model))
    return _Skips(scales, *snapshots)


@pytest.mark.parametrize("name", [name for name in SPLITS if "4 x 1" not in name])
def test_all_ranks_skip_the_step_in_which_one_overflows(name: str) -> None:
    found = harness.run(_overflow, 4, SPLITS[name], 3)
    expected = harness.run(_without_overflow, 4, SPLITS[name])[0]
    for skips in found:
        assert skips.scales == [1024.0, 512.0, 512.0]
        assert_all_equal([skips.before, skips.skipped], "bit by bit")
        assert_all_equal([expected, skips.after], "as if the step had not been")
    assert_all_equal([skips.after for skips in found])


def _without_overflow(rank: int, nranks: int, settings: dict[str, Any]) -> Values:
    model = make_model("mlp")
    model, optimizer, _ = wrap(model, make_optimizer("AdamW", model), nranks, **settings)
    for step in (0, 2):
        loss_of(model, make_batch("mlp", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
    with full_parameters(model):
        return values(model)


class _Reported(NamedTuple):
    error: str
    warnings: list[str]
    unchanged: bool


def _not_finite(rank: int, nranks: int, settings: dict[str, Any], clips: bool) -> _Reported:
    """The gradient of one bias has one element that is not finite, on one rank."""
    options = {"grad_clip": nn.ClipGradByGlobalNorm(1.0)} if clips else {}
    reported = _Reported("", [], False)
    for mode in ("raise", "warn"):
        model = make_model("mlp")
        inner = make_optimizer("SGD", model, **options)
        model, optimizer, _ = wrap(model, inner, nranks, check_nan_inf=mode, **settings)
        if rank == 1:
            _spoil(model, np.nan)
        with full_parameters(model):
            before = values(model)
        loss_of(model, make_batch("mlp", 0, rank)).backward()
        with _warnings() as records:
            try:
                optimizer.step()
            except StateError as error:
                reported = reported._replace(error=str(error).partition(": ")[2])
                with full_parameters(model):
                    unchanged = all(map(np.array_equal, values(model).values(), before.values()))
                reported = reported._replace(unchanged=unchanged)
            optimizer.clear_grad()
        reported.warnings.extend(records)
    return reported


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hp_sharding").addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger("hp_sharding").removeHandler(handler)


@pytest.mark.parametrize("clips", [False, True])
def test_what_is_not_finite_is_named_alike_on_all_ranks(clips: bool) -> None:
    for name in ("stage 1, 2 x 2", "stage 2, 1 x 4", "stage 3, 2 x 2"):
        found = harness.run(_not_finite, 4, SPLITS[name], clips)
        for rank, reported in enumerate(found):
            assert "'layers.2.bias' (bucket " in reported.error
            assert "layers.1" not in reported.error
            assert reported.error == found[0].error
            assert reported.unchanged
            assert len(reported.warnings) == (rank == 0)
        assert "'layers.2.bias' (bucket " in found[0].warnings[0]
