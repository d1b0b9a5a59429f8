"""From one form of a checkpoint to another: every bit, little memory, and nothing left behind where it fails."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_sharding.checkpoint import converting, whole_files
from hp_sharding.checkpoint.converting import Form, convert, outputs, stored_bytes, verify
from hp_sharding.checkpoint.folder import open_checkpoint
from hp_sharding.checkpoint.source import TensorInfo
from hp_sharding.checkpoint.whole_files import WholeFiles
from hp_sharding.errors import CheckpointError
from tests.checkpoints import STATE, some_tensors, write_checkpoint
from tests.stored import Array, contents, same

FORMS: list[Form] = ["sharded", "paddle", "safetensors"]


class _Source:
    """Tensors of zeros that take no memory until they are read; ``fails_at`` is one that cannot be read."""

    where = "nowhere"
    identity = "zeros"
    aliases: Mapping[str, str] = {}
    state: Mapping[str, Any] = {"steps": 1}

    def __init__(self, tensors: Mapping[str, TensorInfo], fails_at: str = "") -> None:
        self.tensors = tensors
        self._fails_at = fails_at

    def read(self, name: str, start: int, stop: int) -> Array:
        if name == self._fails_at:
            raise CheckpointError("the disk failed", file=self.where, parameter=name)
        return np.zeros(stop - start, np.float32)

    def file_of(self, name: str, element: int = 0) -> str:
        return self.where

    def verify(self, part: int = 0, n_parts: int = 1) -> None:
        pass

    def check(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass


def _zeros(**numels: int) -> dict[str, TensorInfo]:
    return {f"model/{name}": TensorInfo((numel,), "float32") for name, numel in numels.items()}


# -- into a folder -----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([0, 1, 3, 1000, 1 << 18, (1 << 18) + 1, 1_000_003, 5_000_000]), max_size=12),
    st.integers(1, 9),
    st.sampled_from(["float32", "int8", "float64"]),
)
@settings(max_examples=200, deadline=None)
def test_files_have_every_element_once_and_are_of_a_size(numels: list[int], n_files: int, dtype: str) -> None:
    tensors = {f"t{number}": TensorInfo((numel,), dtype) for number, numel in enumerate(numels)}
    dealt = converting._dealt_out(tensors, n_files)
    runs = [run for file in dealt for run in file]
    for name, info in tensors.items():
        own = [(run.start, run.stop) for run in runs if run.name == name]
        assert own[0][0] == 0
        assert own[-1][1] == info.numel
        assert [stop for _, stop in own[:-1]] == [start for start, _ in own[1:]]
        assert len(own) == 1 or info.nbytes > converting._WHOLE_BYTES
        assert all(start < stop for start, stop in own) or own == [(0, 0)]
    item_bytes = np.dtype(dtype).itemsize
    sizes = [sum(run.stop - run.start for run in file) * item_bytes for file in dealt]
    assert len(sizes) == n_files
    assert max(sizes) - min(sizes) <= 2 * converting._WHOLE_BYTES


def test_a_folder_takes_blocks_and_whole_files_take_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held at once: two blocks, one being written and one being read; or one tensor."""
    monkeypatch.setattr(converting, "_BLOCK_BYTES", 1 << 20)
    tensors, largest_bytes = _zeros(a=4 << 20, b=3 << 20), 16 << 20
    for to in FORMS:
        tracemalloc.start()
        try:
            convert(_Source(tensors), to, tmp_path / to, n_files=2 if to == "sharded" else 1)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        expected = 2 * converting._BLOCK_BYTES if to == "sharded" else largest_bytes
        assert expected <= peak_bytes <= expected + (3 << 20), f"{to}: {peak_bytes >> 20} MB"


@pytest.mark.parametrize("to", FORMS)
def test_progress_is_told_of_every_byte_twice(tmp_path: Path, to: Form) -> None:
    told: list[int] = []
    with open_checkpoint(write_checkpoint(tmp_path / "saved", some_tensors(), n_files=2)) as source:
        total = stored_bytes(source)
        convert(source, to, tmp_path / "out", on_progress=told.append)
        assert sum(told) == 2 * total
        told.clear()
        assert verify(source, on_progress=told.append) == []
        assert sum(told) == total


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("to", FORMS)
def test_where_it_fails_nothing_changes(tmp_path: Path, to: Form, there: bool) -> None:
    target = tmp_path / "out"
    if there:
        with open_checkpoint(write_checkpoint(tmp_path / "saved", some_tensors())) as source:
            convert(source, to, target)
    before = _bytes_below(tmp_path)
    with pytest.raises(CheckpointError, match="the disk failed") as caught:
        convert(_Source(_zeros(a=1000, b=1000), fails_at="model/b"), to, target, n_files=2)
    assert caught.value.parameter == "model/b"
    assert _bytes_below(tmp_path) == before
    assert target.exists() == (there and to == "sharded")


def _bytes_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_a_kill_left_at_the_target_goes(tmp_path: Path) -> None:
    """And goes first: there may be no room for both."""
    target = write_checkpoint(tmp_path / "out", some_tensors(), n_files=2)
    (target / "index.json").unlink()
    with pytest.raises(CheckpointError, match="the disk failed"):
        convert(_Source(_zeros(a=1000), fails_at="model/a"), "sharded", target)
    assert not target.exists()


# -- into whole files --------------------------------------------------------------------------------------------------


def test_other_libraries_read_what_comes_out(tmp_path: Path) -> None:
    tensors = {name: array for name, array in some_tensors().items() if array.dtype != np.uint16}
    saved = write_checkpoint(tmp_path / "saved", tensors)
    with open_checkpoint(saved) as source:
        for to in ("paddle", "safetensors"):
            convert(source, "paddle" if to == "paddle" else "safetensors", tmp_path / "out")
    wanted = {name.removeprefix("model/"): array for name, array in tensors.items() if name.startswith("model/")}
    assert same(safetensors.numpy.load_file(tmp_path / "out.safetensors"), wanted)
    weights = paddle.load(str(tmp_path / "out.pdparams"))
    assert same({name: tensor.numpy() for name, tensor in weights.items() if name != "tied"}, wanted)
    assert np.array_equal(weights["tied"].numpy(), wanted["layers.2.weight"])
    assert [weights[f"layers.{layer}.weight"].name for layer in (2, 10)] == ["linear_2.w_0", "linear_10.w_0"]
    moments = paddle.load(str(tmp_path / "out.pdopt"))
    assert moments["LR_Scheduler"] == STATE["lr_scheduler"]
    moment = moments["linear_10.w_0_moment1_0"].numpy()
    assert np.array_equal(moment, tensors["optimizer/layers.10.weight/moment1"])


def test_short_parameters_are_rounded_and_their_masters_kept(tmp_path: Path) -> None:
    """As plain Paddle has them whose model has 16 bits and whose optimizer has the rest."""
    state = {**STATE, "short": {"layers.2.weight": "bfloat16"}}
    saved = write_checkpoint(tmp_path / "saved", some_tensors(), state=state)
    with open_checkpoint(saved) as source:
        convert(source, "paddle", tmp_path / "out")
    weight = paddle.load(str(tmp_path / "out.pdparams"))["layers.2.weight"]
    master = some_tensors()["model/layers.2.weight"]
    assert weight.dtype == paddle.bfloat16
    assert np.array_equal(
        weight.astype("float32").numpy(), paddle.to_tensor(master).astype("bfloat16").astype("float32")
    )
    optimizer = paddle.load(str(tmp_path / "out.pdopt"))
    assert np.array_equal(optimizer["master_weights"]["linear_2.w_0"].numpy(), master)
    assert set(optimizer["master_weights"]) == {"linear_2.w_0"}


def test_a_model_without_optimizer_gives_one_file(tmp_path: Path) -> None:
    with open_checkpoint(write_checkpoint(tmp_path / "saved", _weights(), state={})) as source:
        for to in ("paddle", "safetensors"):
            convert(source, "paddle" if to == "paddle" else "safetensors", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.pdparams", "out.safetensors"]
    assert outputs(tmp_path / "out", "paddle") == [tmp_path / "out.pdparams", tmp_path / "out.pdopt"]


def _weights() -> dict[str, Array]:
    return {name: array for name, array in some_tensors().items() if name.startswith("model/")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_paddles_files_go_through_a_folder_unchanged(tmp_path: Path, dtype: str) -> None:
    """Plain Paddle's, into the sharded form and back: plain Paddle then loads what it had saved."""
    paddle.seed(1)
    weights = paddle.nn.Linear(4, 3).state_dict()
    name = weights["weight"].name
    scheduler = {"LR_Scheduler": {"last_epoch": 1, "last_lr": 0.1}}
    master = {name: weights["weight"].clone()}
    master[name].name = f"{name}_fp32_master_0"
    optimizer: dict[str, Any] = {**scheduler, **({} if dtype == "float32" else {"master_weights": master})}
    moment = f"{name}_moment1_0" if dtype == "float32" else f"{name}_fp32_master_0_moment1_0"
    optimizer[moment] = paddle.randn([4, 3])
    optimizer[moment].name = moment
    paddle.save({key: _cast(tensor, dtype) for key, tensor in weights.items()}, str(tmp_path / "plain.pdparams"))
    paddle.save(optimizer, str(tmp_path / "plain.pdopt"))
    with contextlib.closing(WholeFiles(tmp_path / "plain")) as plain:
        convert(plain, "sharded", tmp_path / "folder", n_files=3)
    with open_checkpoint(tmp_path / "folder") as source:
        convert(source, "paddle", tmp_path / "back")
    for ending in ("pdparams", "pdopt"):
        before, after = (paddle.load(str(tmp_path / f"{name}.{ending}")) for name in ("plain", "back"))
        assert _told(before) == _told(after)


def _cast(tensor: paddle.Tensor, dtype: str) -> paddle.Tensor:
    found = tensor.astype(dtype)
    found.name = tensor.name
    return found


def _told(value: Any) -> Any:
    """With tensors as name, dtype and values."""
    if isinstance(value, dict):
        return {key: _told(item) for key, item in value.items()}
    return (value.name, value.dtype, value.tolist()) if isinstance(value, paddle.Tensor) else value


@pytest.mark.parametrize("to", ["paddle", "safetensors"])
def test_whole_files_are_told_apart_by_what_is_in_them(tmp_path: Path, to: Form) -> None:
    found: dict[str, str] = {}
    for name, numels in (
        ("one", {"a": 6, "b": 5}),
        ("same", {"a": 6, "b": 5}),
        ("shape", {"a": 5, "b": 6}),
        ("name", {"a": 6, "c": 5}),
    ):
        convert(_Source(_zeros(**numels)), to, tmp_path / name)
        for _ in range(2):
            with contextlib.closing(WholeFiles(tmp_path / name)) as files:
                found.setdefault(name, files.identity)
                assert files.identity == found[name]
    assert found["one"] == found["same"]
    assert len({found[name] for name in ("one", "shape", "name")}) == 3


@pytest.mark.parametrize("to", ["paddle", "safetensors"])
def test_whole_files_are_told_apart_by_format_and_size(tmp_path: Path, to: Form) -> None:
    with open_checkpoint(write_checkpoint(tmp_path / "saved", some_tensors())) as source:
        convert(source, to, tmp_path / "out")
    with contextlib.closing(WholeFiles(tmp_path / "out")) as files:
        before = files.identity
    _, optimizer = outputs(tmp_path / "out", to)
    optimizer.unlink()
    with contextlib.closing(WholeFiles(tmp_path / "out")) as files:
        assert files.identity != before


@pytest.mark.parametrize("to", ["paddle", "safetensors"])
def test_a_check_reads_one_tensor_of_whole_files(tmp_path: Path, to: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(_Source(_zeros(a=30, b=20, c=10)), to, tmp_path / "out")
    monkeypatch.setattr(whole_files, "BLOCK_NUMEL", 8)
    found: list[tuple[str, int, int]] = []
    monkeypatch.setattr(WholeFiles, "read", lambda self, *args: found.append(args))
    with contextlib.closing(WholeFiles(tmp_path / "out")) as files:
        files.check("model/b")
    assert found == [("model/b", 0, 8), ("model/b", 8, 16), ("model/b", 16, 20)]


def test_what_was_converted_loads(tmp_path: Path) -> None:
    tensors = some_tensors()
    saved = write_checkpoint(tmp_path / "saved", tensors, n_files=2)
    with open_checkpoint(saved) as source:
        convert(source, "sharded", tmp_path / "out", n_files=4)
    found = contents(tmp_path / "out")
    assert same({name: array for name, array in found.items() if not name.startswith("state/")}, tensors)
