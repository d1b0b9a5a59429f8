"""What reading and writing checkpoints lets go of: files are closed, what is of no use is removed, little is held."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding import load, save
from hp_sharding.checkpoint import blocks, loading, shares
from hp_sharding.checkpoint.beside import FileBeside
from hp_sharding.checkpoint.converting import _dealt_out
from hp_sharding.checkpoint.folder import open_checkpoint
from hp_sharding.checkpoint.full_state import FullMoment, FullParam, FullState
from hp_sharding.checkpoint.lazy import OpenFile
from hp_sharding.checkpoint.paddle_files import PaddleTarget
from hp_sharding.checkpoint.safetensors_files import SafetensorsTarget, TensorsFile
from hp_sharding.checkpoint.shares import Share
from hp_sharding.checkpoint.source import TensorInfo
from hp_sharding.checkpoint.unpickled import PickledFile
from hp_sharding.checkpoint.whole_files import WholeFiles, write_safetensors
from hp_sharding.errors import CheckpointError
from tests.pickled import NamedTensor, write_pickled

_W = NamedTensor("linear_0.w_0", np.ones((2, 2), np.float32))


def _open_below(folder: Path) -> list[str]:
    """Files in there that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        if os.path.lexists(path) and os.readlink(path).startswith(str(folder)):
            found.append(os.path.basename(os.readlink(path)))
    return found


# -- files that are read -----------------------------------------------------------------------------------------------


def test_a_file_is_closed_when_it_is_told_and_when_nobody_has_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told, forgotten = OpenFile(tmp_path / "file"), OpenFile(tmp_path / "file")
    assert _open_below(tmp_path) == ["file", "file"]
    told.close()
    assert _open_below(tmp_path) == ["file"]
    del forgotten
    assert _open_below(tmp_path) == []


def test_a_pickle_is_closed_at_the_end_of_its_block(tmp_path: Path) -> None:
    write_pickled(tmp_path / "file", {"w": _W})
    with PickledFile(tmp_path / "file") as file:
        assert _open_below(tmp_path) == ["file"]
    assert _open_below(tmp_path) == []
    assert list(file.content) == ["w"], "which is still known"


def _header(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("kind", "data"),
    [(PickledFile, b"\x80\x04"), (TensorsFile, b"\0"), (TensorsFile, _header([]))],
    ids=["a pickle", "no header", "a header that makes no sense"],
)
def test_what_cannot_be_read_is_closed(kind: Callable[[Path], Any], data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        kind(tmp_path / "file")
    assert caught.tb is not None, "which keeps what was being made"
    assert _open_below(tmp_path) == []


def test_of_two_files_that_do_not_go_together_none_stays_open(tmp_path: Path) -> None:
    write_pickled(tmp_path / "both.pdparams", {"w": _W})
    (tmp_path / "both.pdopt").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"both\.pdopt") as caught:
        WholeFiles(tmp_path / "both")
    assert caught.tb is not None, "which keeps what was being made"
    assert _open_below(tmp_path) == []


def test_a_load_closes_what_it_has_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "c", model)
    opened = []

    def keep(path: str) -> Any:
        opened.append(open_checkpoint(path))
        return opened[-1]

    monkeypatch.setattr(loading, "open_checkpoint", keep)
    load(tmp_path / "c", model)
    assert len(opened) == 1
    assert _open_below(tmp_path) == []


# -- files that are written --------------------------------------------------------------------------------------------


def test_what_is_closed_and_has_no_name_yet_can_be_discarded(tmp_path: Path) -> None:
    file = FileBeside(tmp_path / "file")
    file.write(b"data")
    file.close()
    assert os.listdir(tmp_path) == ["file.partial"]
    file.discard()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("target", "name"), [(PaddleTarget, "ours.pdopt"), (SafetensorsTarget, "ours.optimizer.safetensors")]
)
def test_where_the_second_file_cannot_be_begun_the_first_goes(tmp_path: Path, target: Any, name: str) -> None:
    info = TensorInfo((3,), "float32")
    state = FullState([FullParam("w", "w_0", info, "float32")], {}, [FullMoment("w", "moment1", info)], True)
    (tmp_path / f"{name}.partial").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written: Is a directory") as caught:
        target(str(tmp_path / "ours"), state)
    assert caught.tb is not None, "which keeps what was being made"
    assert os.listdir(tmp_path) == [f"{name}.partial"]


# -- how much at a time ------------------------------------------------------------------------------------------------


def test_a_tensor_is_filled_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    asked: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> Any:
        asked.append((start, stop))
        return np.arange(start, stop, dtype=np.float32)

    tensor = paddle.zeros([5, 8])
    blocks.fill(tensor, read, "float32")
    assert asked == [(0, 16), (16, 32), (32, 40)]
    np.testing.assert_array_equal(tensor.numpy().reshape(-1), np.arange(40, dtype=np.float32))


def test_a_tensor_is_given_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    given = list(blocks.host_blocks(paddle.arange(40, dtype="float32").reshape([5, 8])))
    assert [block.nbytes for block in given] == [64, 64, 32]
    np.testing.assert_array_equal(np.concatenate(given).view(np.float32), np.arange(40))


def test_what_several_ranks_hold_is_cut_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "PIECE_BYTES", 64)
    tensor = paddle.arange(40, dtype="float32").reshape([5, 8])
    cut = list(shares._cut(Share("w", TensorInfo((9, 8), "float32"), 20, 60, tensor)))
    assert [(share.start, share.stop) for share in cut] == [(20, 36), (36, 52), (52, 60)]
    np.testing.assert_array_equal(np.concatenate([share.tensor.numpy() for share in cut]), np.arange(40))


def test_files_have_as_many_small_tensors(tmp_path: Path) -> None:
    tensors = {name: TensorInfo((10,), "float32") for name in "abcd"}
    dealt = _dealt_out(tensors, 2)
    assert [[run.name for run in runs] for runs in dealt] == [["a", "b"], ["c", "d"]]


def test_parts_of_whole_files_are_of_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [TensorInfo((1000,), "float32"), TensorInfo((1000,), "float64")]
    params = [FullParam(f"p{number}", "", info, info.dtype) for number, info in enumerate(infos)]
    zeros = {f"model/p{number}": np.zeros(1000, info.dtype) for number, info in enumerate(infos)}
    write_safetensors(tmp_path / "ours", FullState(params), zeros.__getitem__)
    source = WholeFiles(tmp_path / "ours")
    read: list[int] = []
    monkeypatch.setattr(source, "read", lambda name, start, stop: read.append((stop - start) * zeros[name].itemsize))
    for part in range(4):
        source.verify(part, 4)
        assert sum(read) == 3000
        read.clear()
    source.close()
