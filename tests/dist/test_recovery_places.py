"""Whatever raises on all ranks: after ``clear_grad()`` a run is, bit for bit, the one that never tried the batch.

Each run is compared with one of the same settings in which nothing raises, so that it may be of any precision.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import paddle
import pytest
from paddle import nn
from paddle.utils import unique_name

import hp_sharding
from hp_sharding import CheckpointError, StateError, full_parameters
from hp_sharding.optimizer import ShardedOptimizer
from tests import harness
from tests.bombs import Bomb, Planned, left, mine, mine_before
from tests.lanes import wrap
from tests.models import SEED, Mlp, loss_of, make_batch, make_optimizer
from tests.reference import Values, assert_equal, values
from tests.scalers import make_scaler, scale
from tests.sides import BOTH, SETTINGS

STEPS = 4
SHORT: dict[str, Any] = {"gather_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
FEW = {name: SETTINGS[name] for name in ("stage 1", "stage 2", "stage 3")}
MORE: dict[str, dict[str, Any]] = {
    **{name: settings for name, settings in SETTINGS.items() if name not in FEW},
    "not merged": {"stage": 2, **BOTH, "comm_fusion": False},
    "16 bits travel": {"stage": 2, **BOTH, **SHORT},
    "16 bits travel, stage 3": {"stage": 3, **BOTH, **SHORT},
    "scaled": {"stage": 2, **BOTH, "scaled": True},
    "scaled, stage 3": {"stage": 3, **BOTH, "scaled": True},
}

FORWARDS = [
    *(f"{when} {what}" for what in ("layers.0", "layers.3", "model") for when in ("first before", "before")),
    *(f"{when} {what}" for what in ("layers.0", "layers.3", "model") for when in ("first after", "after")),
    "layers.1",
]
BACKWARDS = [
    *(f"{where} {name}" for where in ("backward of", "gradient of") for name in ("layers.0", "layers.2", "layers.3")),
    *(
        f"{early}hook {where} layers.{number}"
        for early in ("", "early ")
        for where in ("of a parameter of", "after a gradient of")
        for number in (0, 3)
    ),
]
OUTSIDE = ["data", "loss", "after backward", "the norm to clip by"]
PLACES = [*FORWARDS, *BACKWARDS, *OUTSIDE]
SOME = ["after layers.0", "first after model", "backward of layers.2", "hook after a gradient of layers.3", "loss"]
SOME_ONLY = [*SOME, "layers.1", "the norm to clip by"]


class _Mined(Mlp):
    """A bomb within the forward of the model itself, between two layers."""

    bomb: Bomb

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for number, layer in enumerate(self.layers):
            self.bomb(f"layers.{number}")
            x = paddle.tanh(layer(x))
        return x * self.gain


class _Clip(nn.ClipGradByGlobalNorm):
    """Asks the bomb when its bound is read, as ``step()`` does before it updates anything."""

    bomb: Bomb | None = None

    @property
    def clip_norm(self) -> float:
        if self.bomb is not None:
            self.bomb("the norm to clip by")
        return self._norm

    @clip_norm.setter
    def clip_norm(self, norm: float) -> None:
        self._norm = norm


class _Run(NamedTuple):
    """A wrapped model with a bomb at every place."""

    rank: int
    model: nn.Layer
    optimizer: ShardedOptimizer
    scaler: Any
    bomb: Bomb

    def batch(self, number: int, *, count: int = 1, waits: bool = False) -> None:
        """A step over ``count`` micro-batches; all but the last under ``no_sync`` if it ``waits``."""
        for micro in range(count):
            last = micro == count - 1
            with self.optimizer.no_sync() if waits and not last else contextlib.nullcontext():
                self.bomb("data")
                loss = loss_of(self.model, make_batch("mlp", 10 * number + micro, self.rank))
                self.bomb("loss")
                (scale(self.scaler, loss) if self.scaler else loss).backward()
                self.bomb("after backward")
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.clear_grad()

    def values(self) -> Values:
        with full_parameters(self.model):
            return values(self.model)


def _start(rank: int, nranks: int, *, scaled: bool = False, **settings: Any) -> _Run:
    bomb = Bomb()
    paddle.seed(SEED)
    model = _Mined()
    model.bomb = bomb
    layers = {f"layers.{number}": layer for number, layer in enumerate(model.layers)}
    mine_before(layers, bomb)
    clip = _Clip(1.0)
    clip.bomb = bomb
    inner = make_optimizer("AdamW", model, grad_clip=clip)
    model, optimizer, _ = wrap(model, inner, nranks, **settings)
    mine(model, layers, bomb)
    return _Run(rank, model, optimizer, make_scaler(init_loss_scaling=256.0) if scaled else None, bomb)


def _without(rank: int, nranks: int, settings: dict[str, Any], *, steps: int = STEPS, count: int = 1) -> list[Values]:
    """The parameters after each step of a run in which nothing raises."""
    with unique_name.guard():
        run = _start(rank, nranks, **settings)
        found = []
        for step in range(steps):
            run.batch(step, count=count)
            found.append(run.values())
        return found


def _survive(
    rank: int,
    nranks: int,
    settings: dict[str, Any],
    places: list[str],
    *,
    count: int = 1,
    after: int = 0,
    waits: bool = False,
) -> None:
    """Rank function: before each step two batches fail at the next of the places, one with an interrupt."""
    expected = _without(rank, nranks, settings, steps=len(places), count=count)
    with unique_name.guard():
        run = _start(rank, nranks, **settings)
        for step, place in enumerate(places):
            for attempt, kind in enumerate((Planned, KeyboardInterrupt)):
                before = left(run.model, run.optimizer)
                with run.bomb.armed(place, after=after, kind=kind):
                    run.batch(77, count=count, waits=waits)
                run.optimizer.clear_grad(set_to_zero=bool(step % 2))
                assert run.optimizer.steps == step
                now = left(run.model, run.optimizer)
                if attempt and not place.startswith("backward of"):
                    # By then the first failure has made what is kept for the next one. What a PyLayer was given whose
                    # backward raises Paddle itself never lets go of.
                    assert now.nbytes <= before.nbytes, f"{place}: {now.nbytes - before.nbytes} bytes more"
                assert now[1:] == before[1:], place
            run.batch(step, count=count)
            assert_equal(run.values(), expected[step], f"{place}, rank {rank}, step {step}:")


def _survive_each(rank: int, nranks: int, settings: dict[str, dict[str, Any]], places: list[str]) -> None:
    for chosen in settings.values():
        _survive(rank, nranks, chosen, places)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("places", [FORWARDS, BACKWARDS, OUTSIDE], ids=["forward", "backward", "outside"])
def test_a_failed_batch_leaves_nothing(name: str, places: list[str]) -> None:
    harness.run(_survive, 2, FEW[name], places, timeout_s=240)


def test_a_failed_batch_leaves_nothing_with_other_settings() -> None:
    harness.run(_survive_each, 2, MORE, SOME, timeout_s=240)


def test_a_failed_batch_leaves_nothing_with_replicas() -> None:
    settings = {name: {**FEW[name], "n_replicas": 2} for name in ("stage 2", "stage 3")}
    harness.run(_survive_each, 4, settings, SOME_ONLY, timeout_s=240)


def _survive_accumulating(rank: int, nranks: int, settings: dict[str, Any]) -> None:
    for after in (0, 1):
        for waits in (False, True):
            _survive(rank, nranks, settings, SOME[:4], count=2, after=after, waits=waits)


@pytest.mark.parametrize("name", FEW)
def test_a_failed_micro_batch_leaves_nothing(name: str) -> None:
    """In the first of two or in the second, with ``no_sync`` and without."""
    harness.run(_survive_accumulating, 2, FEW[name], timeout_s=240)


# -- calls of the optimizer and of the package ------------------------------------------------------------------------


def _nan_in_step(run: _Run, _: Path) -> None:
    loss = loss_of(run.model, make_batch("mlp", 77, run.rank)) * float("nan")
    loss.backward()
    with pytest.raises(StateError, match="NaN or infinite"):
        run.optimizer.step()


def _norm_not_finite(run: _Run, _: Path) -> None:
    (loss_of(run.model, make_batch("mlp", 77, run.rank)) * float("inf")).backward()
    with pytest.raises(StateError, match="NaN or infinite"):
        run.optimizer.clip_grad_norm(1.0, error_if_nonfinite=True)


def _bad_gradient(run: _Run, _: Path) -> None:
    loss_of(run.model, make_batch("mlp", 77, run.rank)).backward()
    with pytest.raises(ValueError, match="shape"):
        run.optimizer.set_full_grad(run.model.layers[0].weight, paddle.zeros([3]))


def _among_full_parameters(run: _Run, _: Path) -> None:
    with run.bomb.armed("data"), full_parameters(run.model):
        run.model.layers[0].weight.numpy()
        run.bomb("data")


def _forward_among_full_parameters(run: _Run, _: Path) -> None:
    with run.bomb.armed("after layers.2"), full_parameters(run.model):
        loss_of(run.model, make_batch("mlp", 77, run.rank))


def _step_among_full_parameters(run: _Run, _: Path) -> None:
    with run.bomb.armed("the norm to clip by"), full_parameters(run.model):
        loss_of(run.model, make_batch("mlp", 77, run.rank)).backward()
        run.optimizer.step()


def _save_to_no_folder(run: _Run, path: Path) -> None:
    with pytest.raises(CheckpointError):
        hp_sharding.save(path / "a file" / "below it", run.model, run.optimizer)


def _load_what_is_not_there(run: _Run, path: Path) -> None:
    with pytest.raises(CheckpointError):
        hp_sharding.load(path / "nothing", run.model, run.optimizer)


def _evaluation(run: _Run, _: Path) -> None:
    run.model.eval()
    with run.bomb.armed("after layers.1"), paddle.no_grad():
        run.model(make_batch("mlp", 77, run.rank)[0])
    run.model.train()


def _gradient_by_value(run: _Run, _: Path) -> None:
    with run.bomb.armed("gradient of layers.1"):
        x = make_batch("mlp", 77, run.rank)[0]
        x.stop_gradient = False
        paddle.grad(run.model(x).sum(), x)


CALLS = {
    "nan": _nan_in_step,
    "norm": _norm_not_finite,
    "set_full_grad": _bad_gradient,
    "full_parameters": _among_full_parameters,
    "forward in full_parameters": _forward_among_full_parameters,
    "step in full_parameters": _step_among_full_parameters,
    "save": _save_to_no_folder,
    "load": _load_what_is_not_there,
    "evaluation": _evaluation,
    "paddle.grad": _gradient_by_value,
}


def _survive_calls(rank: int, nranks: int, settings: dict[str, Any], folder: str) -> None:
    settings = {**settings, "check_nan_inf": "raise"}
    expected = _without(rank, nranks, settings)
    for name, call in CALLS.items():
        with unique_name.guard():
            run = _start(rank, nranks, **settings)
            for step in range(STEPS):
                if step in (1, 2):
                    call(run, Path(folder))
                    run.optimizer.clear_grad()
                run.batch(step)
                assert_equal(run.values(), expected[step], f"{name}, rank {rank}, step {step}:")


@pytest.mark.parametrize("name", [*FEW, "reshard"])
def test_a_call_that_raises_leaves_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    harness.run(_survive_calls, 2, SETTINGS[name], str(tmp_path), timeout_s=240)


# -- within step() ----------------------------------------------------------------------------------------------------


def _broken_update(rank: int, nranks: int, settings: dict[str, Any], n_calls: int, folder: str) -> list[str]:
    """The inner optimizer raises in a call of its update; from a checkpoint everything goes on as without it."""
    expected = _without(rank, nranks, settings)
    run = _start(rank, nranks, **settings)
    for step in range(2):
        run.batch(step)
    hp_sharding.save(f"{folder}/good", run.model, run.optimizer)
    updates, left_calls = run.optimizer._updates, [n_calls]
    apply = updates.apply

    def apply_or_fail(*args: Any) -> None:
        if not left_calls[0]:
            updates.touched = True  # this rank may have no part of the bucket, and the inner optimizer is not asked
            raise Planned("no more of this")
        left_calls[0] -= 1
        apply(*args)

    updates.apply = apply_or_fail  # type: ignore[method-assign, assignment]
    with mock.patch("hp_sharding.step_update.TOGETHER_BYTES", 1), pytest.raises(Planned):
        run.batch(77)
    updates.apply = apply  # type: ignore[method-assign]
    said = []
    for attempt in (
        run.optimizer.clear_grad,
        run.optimizer.step,
        run.optimizer.state_dict,
        lambda: hp_sharding.save(f"{folder}/bad", run.model, run.optimizer),
        run.optimizer.clear_grad,
    ):
        with pytest.raises(StateError) as caught:
            attempt()
        said.append(str(caught.value))
    with pytest.raises(CheckpointError):
        hp_sharding.load(f"{folder}/bad", run.model, run.optimizer)
    with pytest.raises(StateError):
        run.optimizer.step()
    hp_sharding.load(f"{folder}/good", run.model, run.optimizer)
    assert run.optimizer.steps == 2
    for step in range(2, STEPS):
        run.batch(step)
        assert_equal(run.values(), expected[step], f"rank {rank}, step {step}:")
    return said


@pytest.mark.parametrize("n_calls", [0, 1, 3])
@pytest.mark.parametrize("name", ["stage 1", "stage 2", "reshard", "stage 3", "no overlap"])
def test_an_update_that_raises_says_so_until_a_checkpoint_is_loaded(name: str, n_calls: int, tmp_path: Path) -> None:
    settings = {**SETTINGS[name], "comm_fusion": False}
    for said in harness.run(_broken_update, 2, settings, n_calls, str(tmp_path), timeout_s=120):
        assert len(set(said)) == 1
        assert "(Planned: no more of this)" in said[0]
        assert "those of no step. Load a checkpoint on every rank with hp_sharding.load" in said[0]


def _interrupted_between_updates(rank: int, nranks: int, settings: dict[str, Any], n_calls: int) -> None:
    """A KeyboardInterrupt between two updates: ``clear_grad()`` ends the step, which then counts."""
    with unique_name.guard():
        expected = _start(rank, nranks, **settings)
        for step in (0, 77, 1):
            expected.batch(step)
    run = _start(rank, nranks, **settings)
    run.batch(0)
    take, left_calls = run.optimizer._schedule.gathers.take_update, [n_calls]

    def take_or_fail(bucket: int) -> None:
        if not left_calls[0]:
            run.optimizer._schedule.gathers.take_update = take  # type: ignore[method-assign]
            raise KeyboardInterrupt
        left_calls[0] -= 1
        take(bucket)

    run.optimizer._schedule.gathers.take_update = take_or_fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.batch(77)
    assert run.optimizer.steps == 1
    run.optimizer.clear_grad()
    assert run.optimizer.steps == 2
    run.batch(1)
    assert_equal(run.values(), expected.values(), f"rank {rank}:")


@pytest.mark.parametrize("name", ["stage 1", "stage 2", "reshard", "stage 3", "no overlap"])
def test_a_step_that_is_interrupted_between_updates_is_ended_by_clear_grad(name: str) -> None:
    for n_calls in (0, 2):
        harness.run(_interrupted_between_updates, 2, SETTINGS[name], n_calls, timeout_s=60)
