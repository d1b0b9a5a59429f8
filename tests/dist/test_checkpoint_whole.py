"""Ordinary files: those that plain Paddle loads and goes on from, and those that it has written."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import safetensors
from paddle import nn
from paddle.base import core

import hp_sharding
from tests import harness, logical
from tests.lanes import wrap
from tests.models import loss_on
from tests.reference import Array, Ranks, Values, assert_close, assert_equal, values
from tests.resuming import Run, Settings, shift_names
from tests.sides import BOTH

TOLERANCE = 1e-6
MB = 2**20
PLACES: dict[str, tuple[int, Settings]] = {
    "stage 1": (2, {"stage": 1, **BOTH}),
    "stage 2": (2, {"stage": 2, **BOTH}),
    "stage 3": (2, {"stage": 3, **BOTH}),
    "stage 3, three ranks": (3, {"stage": 3, **BOTH}),
    "two by two": (4, {"n_replicas": 2, "stage": 2, **BOTH}),
}


def _train_plain(run: Run, steps: range, nranks: int) -> None:
    """On the batches of all ranks, in turn."""
    ranks = Ranks(run.model, nranks)
    for step in steps:
        ranks.backward(loss_on(run.model, "gpt", step))
        run.optimizer.step()
        run.optimizer.clear_grad()
        run.scheduler.step()  # type: ignore[union-attr]


def _to_plain(rank: int, nranks: int, path: str, settings: Settings) -> list[logical.Part]:
    """Saved by all ranks, loaded by unwrapped Paddle alone, which goes on to where the ranks come."""
    run = Run("gpt", rank, nranks, settings)
    run.train(range(3))
    state = run.parts()
    hp_sharding.save_full(path, run.model, run.optimizer)
    expected = run.values()
    shift_names()
    plain = Run("gpt", rank, 1, "bare", seed=7)
    plain.model.set_state_dict(paddle.load(f"{path}.pdparams"))
    plain.optimizer.set_state_dict(_renamed(paddle.load(f"{path}.pdopt"), run.model, plain.model))
    assert_equal(values(plain.model), expected)
    assert plain.rates() == {**run.rates(), "steps": 0}
    run.train(range(3, 6))
    _train_plain(plain, range(3, 6), nranks)
    assert_close(run.values(), values(plain.model), TOLERANCE)
    return state


def _renamed(state: dict[str, Any], old: nn.Layer, new: nn.Layer) -> dict[str, Any]:
    """Optimizer state is by parameter names, which in a process of its own would be the same ones."""
    names = {mine.name: other.name for mine, other in zip(old.parameters(), new.parameters(), strict=True)}

    def rename(key: str) -> str:
        known = [name for name in names if key.startswith(f"{name}_")]
        return names[known[0]] + key.removeprefix(known[0]) if known else key

    return {rename(key): value for key, value in state.items()}


@pytest.mark.parametrize("place", PLACES)
def test_plain_paddle_goes_on(place: str, tmp_path: Path) -> None:
    nranks, settings = PLACES[place]
    path = tmp_path / "folder" / "model"
    state = logical.join(harness.run(_to_plain, nranks, str(path), settings))
    assert sorted(file.name for file in path.parent.iterdir()) == ["model.pdopt", "model.pdparams"]
    found = {f"model/{key}": value for key, value in paddle.load(f"{path}.pdparams", return_numpy=True).items()}
    for name, value in ((name, value) for name, value in state.items() if name.startswith("model/")):
        np.testing.assert_array_equal(found[name], value, err_msg=name, strict=True)
    moments = sum(name.startswith("optimizer/") for name in state)
    assert len(paddle.load(f"{path}.pdopt")) == moments + 1, "all moments, and the scheduler"


def _from_plain(rank: int, nranks: int, path: str, settings: Settings) -> None:
    """Saved by unwrapped Paddle, loaded by all ranks."""
    plain = Run("gpt", rank, 1, "bare")
    _train_plain(plain, range(3), nranks)
    if rank == 0:
        paddle.save(plain.model.state_dict(), f"{path}.pdparams")
        paddle.save(plain.optimizer.state_dict(), f"{path}.pdopt")
    expected = logical.join([plain.parts()])
    paddle.distributed.barrier()
    run = Run("gpt", rank, nranks, settings, seed=7)
    by_name = not {param.name for param in run.model.parameters()} & {param.name for param in plain.model.parameters()}
    assert by_name, "the names are the same, so that nothing is shown"
    loaded = hp_sharding.load_full(path, run.model, run.optimizer)
    assert (loaded.missing, loaded.unexpected) == ([], [])
    logical.check(run.parts(), expected)
    assert {**run.rates(), "steps": 0} == plain.rates()
    run.train(range(3, 6))
    _train_plain(plain, range(3, 6), nranks)
    assert_close(run.values(), values(plain.model), TOLERANCE)


@pytest.mark.parametrize("place", PLACES)
def test_what_plain_paddle_has_saved_is_loaded(place: str, tmp_path: Path) -> None:
    nranks, settings = PLACES[place]
    harness.run(_from_plain, nranks, str(tmp_path / "model"), settings)


def _there_and_back(
    rank: int, nranks: int, path: str, kind: str, settings: Settings, suffix: str
) -> list[logical.Part]:
    """Of a model with everything odd."""
    run = Run(kind, rank, nranks, settings)
    run.train(range(3))
    hp_sharding.save_full(path, run.model, run.optimizer, format=FORMATS[suffix])
    other = Run(kind, rank, nranks, settings, seed=7)
    loaded = hp_sharding.load_full(path, other.model, other.optimizer)
    assert (loaded.missing, loaded.unexpected) == ([], [])
    state = run.parts()
    assert logical.digest(other.parts()) == logical.digest(state)
    assert {**other.rates(), "steps": 0} == {**run.rates(), "steps": 0}
    if suffix == "pdparams":  # which does not say which parameters have had a gradient
        run.optimizer.clear_grad(set_to_zero=False)
    assert other.train(range(3, 6)) == run.train(range(3, 6))
    return state


FORMATS = {"pdparams": "paddle", "safetensors": "safetensors"}
DTYPES: dict[str, tuple[str, Settings]] = {
    "float32": ("odd", {}),
    "bfloat16 by policy": ("odd", {"param_dtype": "bfloat16"}),
    "bfloat16 model": ("odd, bfloat16", {}),
}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["stage 2", "stage 3, three ranks"])
def test_odd_models_there_and_back(place: str, dtype: str, suffix: str, tmp_path: Path) -> None:
    nranks, settings = PLACES[place]
    kind, policy = DTYPES[dtype]
    path = tmp_path / "model"
    state = logical.join(harness.run(_there_and_back, nranks, str(path), kind, {**settings, **policy}, suffix))
    found = _read(path, suffix)
    for name, value in ((name.removeprefix("model/"), value) for name, value in state.items() if "model/" in name):
        short = dtype == "bfloat16 model" and value.dtype == np.float32
        np.testing.assert_array_equal(found[name], _rounded(value) if short else value, err_msg=name, strict=True)
        if short and suffix == "pdparams":
            masters = paddle.load(f"{path}.pdopt")["master_weights"]
            assert any(np.array_equal(master.numpy(), value) for master in masters.values()), name


def _read(path: Path, suffix: str) -> Values:
    """By structured names; bfloat16 as its bits."""
    if suffix == "pdparams":
        return dict(paddle.load(f"{path}.pdparams", return_numpy=True))
    dtypes = {"F32": np.float32, "BF16": np.uint16, "I64": np.int64}
    entries = safetensors.deserialize(Path(f"{path}.safetensors").read_bytes())
    return {key: np.frombuffer(entry["data"], dtypes[entry["dtype"]]).reshape(entry["shape"]) for key, entry in entries}


def _rounded(value: Array) -> Array:
    return paddle.to_tensor(value).astype("bfloat16").numpy()


# -- memory ------------------------------------------------------------------------------------------------------------

WIDTH = 1500
LAYERS = 4
PARAMETER_BYTES = WIDTH * WIDTH * 4
ON_THE_WAY_BYTES = 4 * MB


class Peak:
    """The most that was allocated while it was entered, above what was there: by Paddle, and by NumPy and Python."""

    paddle_bytes = 0
    python_bytes = 0

    def __enter__(self) -> Peak:
        self._before = int(core.host_memory_stat_current_value("Allocated", 0))
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.python_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.paddle_bytes = int(core.host_memory_stat_peak_value("Allocated", 0)) - self._before


def _peaks(rank: int, nranks: int, path: str, settings: Settings, file_format: str) -> dict[str, int]:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias_attr=False) for _ in range(LAYERS)])
    model, optimizer, _ = wrap(model, paddle.optimizer.AdamW(0.01, parameters=model.parameters()), nranks, **settings)
    for _ in range(2):
        model(paddle.ones([1, WIDTH])).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    with hp_sharding.full_parameters(model):
        pass
    with Peak() as saved:
        hp_sharding.save_full(path, model, optimizer, format=file_format)
    with Peak() as loaded:
        hp_sharding.load_full(path, model, optimizer)
    return {what: peak.paddle_bytes + peak.python_bytes for what, peak in (("save", saved), ("load", loaded))}


@pytest.mark.parametrize("file_format", ["paddle", "safetensors"])
@pytest.mark.parametrize("stage", [2, 3])
def test_no_rank_holds_more_than_a_parameter(stage: int, file_format: str, tmp_path: Path) -> None:
    """The files are twelve times as large as one. What is on its way between ranks is small beside it."""
    settings = {"stage": stage, "allgather_overlap": True, "comm_buffer_size_MB": PARAMETER_BYTES / MB}
    for rank, found in enumerate(harness.run(_peaks, 2, str(tmp_path / "model"), settings, file_format)):
        for what, nbytes in found.items():
            above = nbytes - PARAMETER_BYTES
            assert above < ON_THE_WAY_BYTES, f"rank {rank}, {what}: one parameter and {above / MB:.1f} MB"
