"""A load in one process: what it refuses before anything has changed, what it forgets, and what it waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding import CheckpointError, LayoutError, StateError, load, save
from hp_sharding.checkpoint import loading, opened
from hp_sharding.checkpoint.folder import is_complete, open_checkpoint, read_index
from hp_sharding.checkpoint.index import Place
from hp_sharding.checkpoint.ranks import Ranks
from hp_sharding.checkpoint.source import SPLIT_MARK
from hp_sharding.moments import moments_of
from tests.fakes import Rig, WaitingLane, values, wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.sides import BOTH
from tests.stored import halves, piece, random_tensors, save_parts


def _adamw(model: nn.Layer) -> Any:
    return paddle.optimizer.AdamW(0.1, parameters=model.parameters())


def _flip(folder: Path, name: str, at: int = 0) -> None:
    """A bit of a tensor, in the first file that has some of it."""
    place = _places(folder, name)[0]
    path = folder / read_index(folder).files[place.chunk.file].name
    data = bytearray(path.read_bytes())
    data[place.offset_bytes + at] ^= 4
    path.write_bytes(data)


def _places(folder: Path, name: str) -> list[Place]:
    return read_index(folder).tensors[name].places(name)


def _refused(folder: Path, model: nn.Layer, optimizer: Any = None) -> CheckpointError:
    """The error of a load that changes nothing."""
    before = values(model.parameters())
    with pytest.raises(CheckpointError) as caught:
        load(folder, model, optimizer)
    for found, expected in zip(values(model.parameters()), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    return caught.value


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_damage_is_found_before_anything_has_changed(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(3, 3))
    _flip(tmp_path, "model/weight", at=20)
    error = _refused(tmp_path, nn.Linear(3, 3))
    assert "a byte between" in str(error)
    assert error.parameter == "weight"


def test_damage_of_a_rank_s_own_state_is_called_so(tmp_path: Path) -> None:
    """It is decoded before all is verified, and would make no sense."""
    save(tmp_path, nn.Linear(3, 3), rank_extra=5)
    _flip(tmp_path, "rank/0/state")
    error = _refused(tmp_path, nn.Linear(3, 3))
    assert "in rank/0/state: a byte between" in str(error)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(3, 4))
    error = _refused(tmp_path, nn.Linear(3, 5))
    assert "does not fit this model: model/weight: expected shape [3, 5], found [3, 4], model/bias" in str(error)
    assert error.parameter == "weight"


def test_parts_of_split_layers_are_not_taken_for_whole_ones(tmp_path: Path) -> None:
    """Nor for what is merely not there, which a load that is not strict would pass over."""
    names = ("weight", f"weight{SPLIT_MARK}0of2", f"weight{SPLIT_MARK}1of2")
    save_parts(tmp_path, [[piece(f"model/{name}", np.zeros((3, 3), np.float32)) for name in names]])
    with pytest.raises(CheckpointError, match=r"split over 2 tensor-parallel ranks, and here they are over 1\. Load"):
        load(tmp_path, nn.Linear(3, 3, bias_attr=False), strict=False)


def test_one_that_was_replaced_by_half_a_checkpoint_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look at the index and one at the files."""
    save_parts(tmp_path, halves(random_tensors(1)))
    opens = [open_checkpoint(tmp_path)]
    save_parts(tmp_path, halves(random_tensors(2)))
    monkeypatch.setattr(opened, "open_checkpoint", lambda path: opens.pop() if opens else open_checkpoint(path))
    assert is_complete(tmp_path)
    opens.append(open_checkpoint(tmp_path))
    save_parts(tmp_path, halves(random_tensors(1)))
    next(tmp_path.glob("*-00001-of-*.safetensors")).unlink()
    assert not is_complete(tmp_path)


@pytest.mark.parametrize("last", [[], [[]]], ids=["tensors", "a header"])
@pytest.mark.parametrize("n_parts", [1, 2, 3, 5])
def test_every_part_of_every_file_is_verified_by_one_rank(tmp_path: Path, n_parts: int, last: Any) -> None:
    """Also the last bytes of all, be they a tensor's or a header's."""
    save_parts(tmp_path, [*halves(random_tensors(1)), *last])
    with open_checkpoint(tmp_path) as checkpoint:
        shares = [checkpoint.share(part, n_parts) for part in range(n_parts)]
        for number, places in enumerate(checkpoint.index.places()):
            assert sorted(place for share in shares for place in share[number]) == places
    for path in sorted(tmp_path.glob("*.safetensors")):
        data = path.read_bytes()
        path.write_bytes(data[:9] + b"!" + data[10:])
        n_failed = 0
        for part in range(n_parts):
            with open_checkpoint(tmp_path) as checkpoint:
                try:
                    checkpoint.verify(part, n_parts)
                except CheckpointError:
                    n_failed += 1
        assert n_failed >= 1, path.name
        path.write_bytes(data)


def test_ranks_that_open_different_ones_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After they have looked again: a save may just have replaced it."""
    looked: list[Path] = []

    def look(path: Path) -> Any:
        looked.append(path)
        return open_checkpoint(path)

    save(tmp_path, nn.Linear(3, 3))
    monkeypatch.setattr(loading, "_REOPEN_S", 0.0)
    monkeypatch.setattr(loading, "open_checkpoint", look)
    monkeypatch.setattr(Ranks, "text_of", lambda self, rank, text: "another elsewhere")
    error = _refused(tmp_path, nn.Linear(3, 3))
    assert "rank 0: expected the checkpoint that the first rank opened, at elsewhere, and found another" in str(error)
    assert len(looked) == loading._OPENINGS


def test_half_a_load_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was whole when it was verified cannot be read a moment later."""
    read = opened.Checkpoint.read

    def fails(self: opened.Checkpoint, name: str, start: int, stop: int) -> Any:
        if name == "model/bias":
            raise CheckpointError("it has gone", file="there", parameter="bias")
        return read(self, name, start, stop)

    save(tmp_path, nn.Linear(3, 3))
    monkeypatch.setattr(opened.Checkpoint, "read", fails)
    message = r"it has gone\. Model and optimizer are half loaded from '.*' now: load again"
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path, nn.Linear(3, 3))
    assert (caught.value.file, caught.value.parameter) == ("there", "bias")


# -- what is forgotten -------------------------------------------------------------------------------------------------


def test_gradients_of_other_values_are_forgotten(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = _adamw(model)
    save(tmp_path, model, optimizer)
    model(paddle.ones([1, 3])).sum().backward()
    load(tmp_path, model, optimizer)
    assert [param.grad for param in model.parameters()] == [None, None]


def test_moments_of_a_run_that_had_none_yet_begin_anew(tmp_path: Path) -> None:
    saved, model = nn.Linear(3, 3), nn.Linear(3, 3)
    fresh, optimizer = _adamw(saved), _adamw(model)
    save(tmp_path, saved, fresh)
    _step(model, optimizer)
    load(tmp_path, model, optimizer)
    assert [list(moments_of(optimizer, param)) for param in model.parameters()] == [[], []]
    for each, inner in ((saved, fresh), (model, optimizer)):
        _step(each, inner)
    for found, expected in zip(values(model.parameters()), values(saved.parameters()), strict=True):
        np.testing.assert_array_equal(found, expected)


def _step(model: nn.Layer, optimizer: Any) -> None:
    model(paddle.arange(3, dtype="float32")).sum().backward()
    optimizer.step()
    optimizer.clear_grad()


# -- what is sharded ---------------------------------------------------------------------------------------------------


def _rig(stage: int, **settings: Any) -> Rig:
    model = make_model("mlp")
    rig = wrap(model, make_optimizer("AdamW", model), stage=stage, **BOTH, **settings)
    _train(rig, 0)
    return rig


def _train(rig: Rig, step: int) -> None:
    loss_of(rig.model, make_batch("mlp", step, 0)).backward()
    rig.optimizer.step()
    rig.optimizer.clear_grad()


@pytest.mark.parametrize(
    "settings", [{"stage": 1}, {"stage": 2}, {"stage": 2, "reshard_after_step": True}, {"stage": 3}], ids=str
)
def test_shards_are_written_when_no_gather_reads_them(settings: dict[str, Any], tmp_path: Path) -> None:
    """Neither one of the step before nor, where storage was freed, one that the ranks begin before they load.

    What they agree on goes another way, as on a device: to wait for that is not to wait for gathers.
    """
    rig = _rig(**settings)
    reducer = rig.optimizer._reducer
    reducer.lanes = reducer.lanes._replace(agree=[WaitingLane("agree")])
    save(tmp_path, rig.model, rig.optimizer)
    expected = [buffer.shard.numpy().copy() for buffer in rig.optimizer.buffers]
    _train(rig, 1)
    load(tmp_path, rig.model, rig.optimizer)
    for buffer, values_then in zip(rig.optimizer.buffers, expected, strict=True):
        np.testing.assert_array_equal(buffer.shard.numpy(), values_then)


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_stay_are_there_when_a_load_returns(stage: int, tmp_path: Path) -> None:
    rig = _rig(stage)
    save(tmp_path, rig.model, rig.optimizer)
    _train(rig, 1)
    assert rig.gather.n_pending, "those of the step"
    load(tmp_path, rig.model, rig.optimizer)
    assert rig.gather.n_pending == 0


def test_what_has_left_its_bucket_is_not_saved_as_it_was(tmp_path: Path) -> None:
    rig = _rig(2)
    param = rig.model.parameters()[0]
    param.data = paddle.full(param.shape, 7.0)
    with pytest.raises(LayoutError, match="no longer shares the bucket's storage"):
        save(tmp_path, rig.model, rig.optimizer)


def test_half_moved_buckets_are_not_loaded_into(tmp_path: Path) -> None:
    rig = _rig(2)
    save(tmp_path, rig.model, rig.optimizer)
    rig.optimizer.failure = "buckets were half moved"
    with pytest.raises(StateError, match="half moved"):
        load(tmp_path, rig.model, rig.optimizer)
