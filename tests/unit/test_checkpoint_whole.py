"""``save_full`` in one process: what it refuses, what all ranks have to agree on, and what is on its way at a time."""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import pytest
from paddle import nn

from hp_sharding import CheckpointError, ConfigError, save_full
from hp_sharding.checkpoint import beside, held, whole
from hp_sharding.checkpoint.full_state import FullParam, FullState
from hp_sharding.checkpoint.held import Held
from hp_sharding.checkpoint.ranks import Ranks
from hp_sharding.checkpoint.source import TensorInfo
from hp_sharding.comm import Communicator, Work


@pytest.fixture
def model() -> nn.Layer:
    return nn.Linear(3, 3)


def _adamw(model: nn.Layer) -> Any:
    """After a step: it keeps moments."""
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    model(paddle.ones([1, 3])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
    return optimizer


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["folder/", "/", "."])
def test_a_folder_is_no_name_of_files(path: str, model: nn.Layer, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(f"path={path!r} (str): expected the path of files without their")):
        save_full(path, model)
    assert os.listdir(tmp_path) == []


class _Split(Ranks):
    """As where tensor parallelism splits layers over two ranks."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.tensor = (0, 2)


def test_split_layers_are_not_put_together(model: nn.Layer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "Ranks", _Split)
    monkeypatch.setattr(_Split, "sum_of", lambda self, values: values)
    with pytest.raises(ConfigError, match=r"split over tensor-parallel ranks.*Use hp_sharding\.save"):
        save_full(tmp_path / "ours", model)
    assert os.listdir(tmp_path) == []


# -- what all ranks agree on -------------------------------------------------------------------------------------------


class _Other(Ranks):
    """Its first rank has something else in one of the sums: that of the number ``at``."""

    at = 0

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._n_sums = itertools.count()

    def sum_of(self, values: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return values + (next(self._n_sums) == self.at)


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (0, r"the optimizer updates 2 parameters here, but 3 on the first rank\. Make it of the same parameters"),
        (1, r"of parameter 'weight' the optimizer keeps moment1, .* here, and not the same on the first rank"),
        (3, r"the 10 tensors to save are not those of the first rank: other names, shapes or dtypes"),
    ],
    ids=["parameters", "moments", "tensors"],
)
def test_ranks_that_differ_are_told_before_anything_is_sent(
    at: int, said: str, model: nn.Layer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "Ranks", _Other)
    monkeypatch.setattr(_Other, "at", at)
    with pytest.raises(CheckpointError, match=f"rank 0: {said}"):
        save_full(tmp_path / "ours", model, _adamw(model))
    assert os.listdir(tmp_path) == []


# -- what is on its way ------------------------------------------------------------------------------------------------


class _Late(Work):
    """Brings its values when it is waited for."""

    op, label, lane, nbytes = "broadcast", "", "", 0
    start_s = end_s = None

    def __init__(self, deliver: Callable[[], None]) -> None:
        self._deliver = deliver
        self.is_waited_for = False

    def wait(self) -> None:
        if not self.is_waited_for:
            self.is_waited_for = True
            self._deliver()

    def done(self) -> bool:
        return self.is_waited_for


class _Lane:
    """Of which every collective is late; another rank's values are twos."""

    def __init__(self) -> None:
        self.works: list[_Late] = []

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "") -> Work:
        self.works.append(_Late(lambda: tensor.fill_(2.0)))
        return self.works[-1]


@pytest.fixture
def lane() -> _Lane:
    return _Lane()


@pytest.fixture
def stream(model: nn.Layer, lane: _Lane, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two tensors of 40 elements that another rank has, in blocks of 64 bytes."""
    monkeypatch.setattr(whole, "_BLOCK_BYTES", 64)
    info = TensorInfo((40,), "float32")
    found: Any = whole._Stream(
        Held(model, None), [whole._Due(name, info, 0, [whole._Source(0, 40, 1, None)]) for name in ("a", "b")]
    )
    typed: Communicator = lane  # type: ignore[assignment]
    found._lane = typed
    found._spare = {"float32": [paddle.zeros([whole._block_numel("float32")]) for _ in range(2)]}
    return found


def test_blocks_are_of_a_size_in_bytes(stream: Any) -> None:
    assert [(sent.start, sent.nbytes) for sent in stream._begin()] == [(0, 64), (16, 64), (32, 32)]


def test_a_block_is_looked_at_when_it_is_there(stream: Any) -> None:
    np.testing.assert_array_equal(stream.fetch("a"), np.full(40, 2.0, np.float32))


def test_where_it_ends_early_nothing_is_on_its_way(stream: Any, lane: _Lane) -> None:
    blocks = stream._begin()
    next(blocks)
    stream._meetings.is_over = True
    assert list(blocks) == []
    assert [work.is_waited_for for work in lane.works] == [True, True]


def test_only_the_next_tensor_can_be_fetched(stream: Any) -> None:
    with pytest.raises(AssertionError, match="b was asked for, and a is next"):
        stream.fetch("b")


@pytest.fixture
def planned(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``save_full`` saves are the two tensors."""
    params = [FullParam(name, "", TensorInfo((40,), "float32"), "float32") for name in "ab"]
    stream._waiting = [due._replace(name=f"model/{due.name}") for due in stream._waiting]
    monkeypatch.setattr(whole, "_plan", lambda held: (FullState(params), stream))


@pytest.mark.usefixtures("planned")
def test_where_the_first_rank_fails_it_takes_part_in_what_is_left(
    lane: _Lane, model: nn.Layer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "_SMALL_BYTES", 0)
    monkeypatch.setattr(beside, "write_all", _fails)
    with pytest.raises(CheckpointError, match="cannot be written: Input/output error"):
        save_full(tmp_path / "ours", model)
    assert [work.is_waited_for for work in lane.works] == [True] * 6


def _fails(fd: int, data: memoryview) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.usefixtures("planned")
def test_a_rank_that_writes_nothing_sends_all_of_it(
    lane: _Lane, model: nn.Layer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "is_first", False)
    save_full(tmp_path / "ours", model)
    assert [work.is_waited_for for work in lane.works] == [True] * 6
    assert os.listdir(tmp_path) == []
