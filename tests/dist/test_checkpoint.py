"""Resuming where it was saved: the training that goes on from a checkpoint is bitwise the one that went on without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest

import hp_sharding
from hp_sharding import CheckpointError, fleet, full_parameters
from tests import harness, logical
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.reference import assert_all_equal, values
from tests.resuming import Run, Settings, shift_names
from tests.sides import BOTH, SMALL_MB

OTHER_SEED = 77


class Case(NamedTuple):
    """A training that is saved after three of six steps.

    Attributes:
        kind: of ``tests.resuming``.
        nranks: of the training.
        settings: for ``Run``.
        in_place: loaded into the training that has gone on, not into a new one.
    """

    kind: str
    nranks: int
    settings: Settings | str
    in_place: bool = False


SHORT: Settings = {"param_dtype": "bfloat16"}
CASES = {
    "stage 1": Case("odd", 2, {"stage": 1, **BOTH}),
    "stage 1, no fusion, four ranks": Case("odd", 4, {"stage": 1, "comm_fusion": False}, True),
    "stage 2": Case("odd, dropout", 2, {"stage": 2, **BOTH}),
    "stage 2, reshard, three ranks": Case("odd, momentum", 3, {"stage": 2, **BOTH, "reshard_after_step": True}),
    "stage 3": Case("odd, dropout", 2, {"stage": 3, **BOTH}, True),
    "stage 3, four ranks": Case("odd", 4, {"stage": 3, **BOTH}),
    "two by two": Case("odd, dropout", 4, {"n_replicas": 2, "stage": 2, **BOTH}),
    "two by two, stage 3": Case("odd", 4, {"n_replicas": 2, "stage": 3, **BOTH}),
    "three replicas": Case("odd, dropout", 3, {"n_replicas": 3, "stage": 2, **BOTH}, True),
    "bfloat16 by policy": Case("odd", 2, {"stage": 2, **BOTH, **SHORT}),
    "bfloat16 by policy, stage 3": Case("odd, dropout", 2, {"stage": 3, **BOTH, **SHORT, "main_grad": True}, True),
    "bfloat16 gathers": Case("odd, momentum", 2, {"stage": 1, **BOTH, "gather_dtype": "bfloat16"}, True),
    "bfloat16 model": Case("odd, bfloat16", 3, {"stage": 2, **BOTH}),
    "bfloat16 on one rank": Case("odd", 1, {"stage": 2, **SHORT}),
    "float64 model": Case("odd, float64", 2, {"stage": 3, **BOTH}),
    "tied": Case("gpt", 2, {"stage": 3, **BOTH}),
    "running statistics": Case("conv", 2, {"stage": 2, **BOTH}),
    "running statistics, stage 3": Case("conv", 2, {"stage": 3, "comm_buffer_size_MB": SMALL_MB}, True),
    "scaler": Case("mlp, scaler", 2, {"stage": 2, **BOTH}),
    "one process": Case("odd, dropout", 1, "plain"),
    "one process, in place": Case("odd, momentum", 1, "plain", True),
    "unwrapped": Case("odd", 1, "bare"),
    "unwrapped, running statistics": Case("conv", 1, "bare"),
}


class Course(NamedTuple):
    """What came of a training: losses of the last three steps, state and rates at the end, the next numbers drawn."""

    losses: list[float]
    parts: list[logical.Part]
    rates: dict[str, Any]
    drawn: list[float]


def _finish(run: Run) -> Course:
    losses = run.train(range(3, 6))
    drawn = [random.random(), float(np.random.rand()), float(paddle.rand([1]))]
    return Course(losses, run.parts(), run.rates(), drawn)


def _resumed(rank: int, nranks: int, case: Case, folder: str) -> Any:
    def start(**options: Any) -> Run:
        return Run(case.kind, rank, nranks, case.settings, **options)

    undisturbed = start()
    undisturbed.train(range(3))
    expected = _finish(undisturbed)

    saved = start()
    saved.train(range(3))
    steps, orders = saved.rates()["steps"], saved.orders()
    hp_sharding.save(
        folder, saved.model, saved.optimizer, scaler=saved.scaler, extra={"epoch": 1}, rank_extra=["at", rank]
    )
    _assert_same(_finish(saved), expected, "the training that was saved")

    shift_names()
    resumed = saved if case.in_place else start(seed=OTHER_SEED)
    if not case.in_place:
        names = [[param.name for param in run.model.parameters()] for run in (saved, resumed)]
        assert not set(names[0]) & set(names[1]), "the names do not differ"
    loaded = hp_sharding.load(folder, resumed.model, resumed.optimizer, scaler=resumed.scaler)
    assert (loaded.missing, loaded.unexpected, loaded.steps) == ([], [], steps)
    assert (loaded.extra, loaded.rank_extra) == ({"epoch": 1}, ["at", rank])
    assert loaded.rng_restored
    assert resumed.orders() == orders
    _assert_same(_finish(resumed), expected, "the training that went on from the checkpoint")
    return resumed.values()


def _assert_same(found: Course, expected: Course, what: str) -> None:
    assert found.losses == expected.losses, what
    assert [part.name for part in found.parts] == [part.name for part in expected.parts], what
    for mine, other in zip(found.parts, expected.parts, strict=True):
        assert (mine.start, mine.shape) == (other.start, other.shape), what
        np.testing.assert_array_equal(mine.values, other.values, err_msg=f"{what}: {mine.name}", strict=True)
    assert found.rates == expected.rates, what
    assert found.drawn == expected.drawn, what


@pytest.mark.parametrize("name", CASES)
def test_resuming_is_going_on(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    found = harness.run(_resumed, case.nranks, case, str(tmp_path / "checkpoint"))
    if "bfloat16" not in name:
        assert_all_equal(found)


def _rate_of_its_own(rank: int, nranks: int, folder: str, settings: Settings | str) -> None:
    """A rate that no scheduler gives is that of the checkpoint, too."""
    saved = Run("odd, constant", rank, nranks, settings)
    saved.optimizer.set_lr(0.037)
    saved.train(range(2))
    hp_sharding.save(folder, saved.model, saved.optimizer)
    resumed = Run("odd, constant", rank, nranks, settings, seed=OTHER_SEED)
    loaded = hp_sharding.load(folder, resumed.model, resumed.optimizer)
    assert resumed.optimizer.get_lr() == saved.optimizer.get_lr()
    assert loaded.extra is None and loaded.rank_extra is None
    assert saved.train(range(2, 4)) == resumed.train(range(2, 4))


@pytest.mark.parametrize(("nranks", "settings"), [(2, {"stage": 2, **BOTH}), (1, "plain"), (1, "bare")])
def test_a_constant_rate_is_restored(nranks: int, settings: Settings | str, tmp_path: Path) -> None:
    harness.run(_rate_of_its_own, nranks, str(tmp_path / "checkpoint"), settings)


def _before_the_first_step(rank: int, nranks: int, folder: str, settings: Settings) -> None:
    """There are no moments yet, nor gradients; a training that has some gives them up."""
    fresh = Run("odd", rank, nranks, settings)
    expected = fresh.parts()
    hp_sharding.save(folder, fresh.model, fresh.optimizer)
    losses = fresh.train(range(3))
    begun = Run("odd", rank, nranks, settings, seed=OTHER_SEED)
    hp_sharding.load(folder, begun.model, begun.optimizer)
    assert logical.digest(begun.parts()) == logical.digest(expected)
    assert begun.train(range(3)) == losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_training_that_has_not_begun(stage: int, tmp_path: Path) -> None:
    harness.run(_before_the_first_step, 2, str(tmp_path / "checkpoint"), {"stage": stage, **BOTH})


def _again_and_again(rank: int, nranks: int, folder: str) -> None:
    """Saved over itself at every step; each time what is there is the last one, and alone there."""
    run = Run("odd", rank, nranks, {"stage": 2, **BOTH})
    other = Run("odd", rank, nranks, {"stage": 2, **BOTH}, seed=OTHER_SEED)
    for step in range(4):
        run.train(range(step, step + 1))
        extra = {"step": step, "table": np.arange(1000.0) + step}
        own = {"order": np.arange(700) * rank, "at": step}
        hp_sharding.save(folder, run.model, run.optimizer, extra=extra, rank_extra=own)
        files = sorted(path.name for path in Path(folder).iterdir())
        assert len(files) == nranks + 1, files
        loaded = hp_sharding.load(folder, other.model, other.optimizer)
        for found, expected in ((loaded.extra, extra), (loaded.rank_extra, own)):
            assert {key: repr(value) for key, value in found.items()} == {k: repr(v) for k, v in expected.items()}
            np.testing.assert_equal(found, expected)
        assert logical.digest(other.parts()) == logical.digest(run.parts())


def test_a_checkpoint_is_saved_over_the_one_before(tmp_path: Path) -> None:
    harness.run(_again_and_again, 2, str(tmp_path / "checkpoint"))


def _frozen_then_thawed(rank: int, nranks: int, folder: str, kind: str, settings: Settings) -> None:
    """Frozen when wrapped, and so without a master; thawed before it is saved, and before it is loaded."""
    thawed = _thaw(Run(kind, rank, nranks, settings))
    thawed.train(range(3))
    hp_sharding.save(folder, thawed.model, thawed.optimizer)
    losses = thawed.train(range(3, 6))
    resumed = _thaw(Run(kind, rank, nranks, settings, seed=OTHER_SEED))
    hp_sharding.load(folder, resumed.model, resumed.optimizer)
    assert resumed.train(range(3, 6)) == losses
    assert logical.digest(resumed.parts()) == logical.digest(thawed.parts())


def _thaw(run: Run) -> Run:
    for param in run.model.frozen.parameters():
        param.stop_gradient = False
    return run


@pytest.mark.parametrize("kind", ["odd", "odd, bfloat16"])
@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_that_thawed_after_wrapping(stage: int, kind: str, tmp_path: Path) -> None:
    harness.run(_frozen_then_thawed, 2, str(tmp_path / "checkpoint"), kind, {"stage": stage, **BOTH})


def _written(rank: int, nranks: int, folder: str, settings: Settings) -> None:
    """What the user wrote into parameters since the last step is what is saved, and what is loaded is what is read."""
    run = Run("odd", rank, nranks, settings)
    run.train(range(2))
    with full_parameters(run.model), paddle.no_grad():
        run.model.three.set_value(paddle.to_tensor([1.0, 2.0, 3.0]))
        run.model.hidden[0].weight[0] = 4.0
    hp_sharding.save(folder, run.model, run.optimizer)
    expected = run.values()
    run.train(range(2, 4))
    hp_sharding.load(folder, run.model, run.optimizer)
    assert_all_equal([run.values(), expected])
    assert expected["three"].tolist() == [1.0, 2.0, 3.0]
    assert expected["hidden.0.weight"][0].tolist() == [4.0] * 23


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_was_written_into_parameters(stage: int, tmp_path: Path) -> None:
    harness.run(_written, 2, str(tmp_path / "checkpoint"), {"stage": stage, **BOTH})


def _written_past_guards(rank: int, nranks: int, path: str, whole: bool) -> None:
    """A function of Paddle's wrote what layers see; the masters do not know of it yet."""
    run = Run("odd", rank, nranks, {"stage": 2, **BOTH, **SHORT})
    run.train(range(2))
    run.values()
    paddle.assign(paddle.to_tensor([1.0, 2.0, 3.0]).astype("bfloat16"), output=run.model.three)
    other = Run("odd", rank, nranks, {"stage": 2, **BOTH}, seed=OTHER_SEED)
    if whole:
        hp_sharding.save_full(path, run.model, run.optimizer)
        hp_sharding.load_full(path, other.model, other.optimizer)
    else:
        hp_sharding.save(path, run.model, run.optimizer)
        hp_sharding.load(path, other.model, other.optimizer)
    assert other.values()["three"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("whole", [False, True])
def test_what_was_written_past_the_guards(whole: bool, tmp_path: Path) -> None:
    harness.run(_written_past_guards, 2, str(tmp_path / "checkpoint"), whole)


def _model_alone(rank: int, nranks: int, folder: str) -> None:
    """Without an optimizer: values go where they belong, from a checkpoint with moments and from one without."""
    run = Run("odd", rank, nranks, "bare")
    run.train(range(3))
    hp_sharding.save(f"{folder}/all", run.model, run.optimizer)
    hp_sharding.save(f"{folder}/model", run.model)
    for place in ("all", "model"):
        model = Run("odd", rank, nranks, "bare", seed=OTHER_SEED).model
        hp_sharding.load(f"{folder}/{place}", model)
        assert_all_equal([values(model), values(run.model)])
    resumed = Run("odd", rank, nranks, "bare", seed=OTHER_SEED)
    with pytest.raises(CheckpointError, match="optimizer"):
        hp_sharding.load(f"{folder}/model", resumed.model, resumed.optimizer)
    hp_sharding.load(f"{folder}/model", resumed.model, resumed.optimizer, strict=False)
    assert_all_equal([values(resumed.model), values(run.model)])


def test_the_model_alone(tmp_path: Path) -> None:
    harness.run(_model_alone, 1, str(tmp_path))


def _through_fleet(rank: int, nranks: int, folder: str, loads: bool) -> list[float]:
    """As a script does it: saved in one process, loaded in another."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "sharding_degree": nranks}
    strategy.hp_sharding_configs = {"stage": 2, **BOTH}
    fleet.init(is_collective=True, strategy=strategy)
    if loads:
        shift_names()
    model = fleet.distributed_model(make_model("gpt"))
    optimizer = fleet.distributed_optimizer(make_optimizer("AdamW", model))
    if loads:
        assert hp_sharding.load(folder, model, optimizer).steps == 3
    losses = []
    for step in range(3 if loads else 0, 6):
        if step == 3 and not loads:
            hp_sharding.save(folder, model, optimizer)
        loss = loss_of(model, make_batch("gpt", step, rank))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses[-3:]


def test_through_fleet(tmp_path: Path) -> None:
    saved, loaded = (harness.run(_through_fleet, 2, str(tmp_path), loads) for loads in (False, True))
    assert loaded == saved
