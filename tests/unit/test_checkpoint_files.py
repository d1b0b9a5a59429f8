"""What is written can be read: in any cut into parts, by this package and by the safetensors library."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from hp_sharding.checkpoint import durable, opened
from hp_sharding.checkpoint.folder import Checkpoint, open_checkpoint
from hp_sharding.checkpoint.source import STORAGE, TensorInfo
from hp_sharding.checkpoint.tensor_file import Piece, write_tensors
from hp_sharding.checkpoint.values import encode
from hp_sharding.errors import CheckpointError

from ..stored import Array, contents, halves, piece, random_tensors, same, save_parts, whole


class Cut(NamedTuple):
    """A tensor, where it is cut, and the part that each run of elements goes to."""

    values: Array
    dtype: str
    at: list[int]
    parts: list[int]

    def pieces(self, name: str, part: int) -> list[Piece]:
        edges = [0, *self.at, self.values.size]
        runs = zip(itertools.pairwise(edges), self.parts, strict=True)
        return [piece(name, self.values, start, stop, dtype=self.dtype) for (start, stop), own in runs if own == part]


@st.composite
def _cuts(draw: st.DrawFn, n_parts: int) -> Cut:
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    dtype = draw(st.sampled_from(sorted(STORAGE)))
    numel = math.prod(shape)
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = generator.integers(0, 2 if dtype == "bool" else 100, shape).astype(STORAGE[dtype])
    at = sorted(draw(st.sets(st.integers(1, numel - 1), max_size=5))) if numel > 1 else []
    parts = draw(st.lists(st.integers(0, n_parts - 1), min_size=len(at) + 1, max_size=len(at) + 1))
    return Cut(values, dtype, at, parts)


@st.composite
def _checkpoints(draw: st.DrawFn) -> tuple[int, dict[str, Cut]]:
    n_parts = draw(st.integers(1, 4))
    cuts = draw(st.lists(_cuts(n_parts), max_size=5))
    return n_parts, {f"model/p{number}.é": cut for number, cut in enumerate(cuts)}


def _written(folder: str, n_parts: int, cuts: dict[str, Cut]) -> Checkpoint:
    parts = [[own for name, cut in cuts.items() for own in cut.pieces(name, part)] for part in range(n_parts)]
    save_parts(Path(folder), parts)
    return open_checkpoint(folder)


@given(_checkpoints(), st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_range_of_tensors_cut_anyhow_is_read_back(found: tuple[int, dict[str, Cut]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder, _written(folder, *found) as checkpoint:
        checkpoint.verify()
        assert dict(checkpoint.tensors) == {
            name: TensorInfo(cut.values.shape, cut.dtype) for name, cut in found[1].items()
        }
        for name, cut in found[1].items():
            start = data.draw(st.integers(0, cut.values.size))
            stop = data.draw(st.integers(start, cut.values.size))
            values = checkpoint.read(name, start, stop)
            assert values.dtype == cut.values.dtype and values.shape == (stop - start,)
            np.testing.assert_array_equal(values, cut.values.reshape(-1)[start:stop])
            values[...] = 1  # memory of its own, which may be written to


@given(_checkpoints())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_safetensors_library_reads_the_files(found: tuple[int, dict[str, Cut]]) -> None:
    n_parts, cuts = found
    with tempfile.TemporaryDirectory() as folder, _written(folder, n_parts, cuts) as checkpoint:
        seen: dict[str, dict[str, Any]] = {}
        for file in checkpoint.index.files:
            seen.update(safetensors.deserialize((Path(folder) / file.name).read_bytes()))
    for name, cut in cuts.items():
        if len(set(cut.parts)) == len(cut.parts) == 1:
            assert seen[name]["shape"] == list(cut.values.shape)
        edges = [0, *cut.at, cut.values.size]
        keys = [name] if len(edges) == 2 else [f"{name}[{a}:{b}]" for a, b in itertools.pairwise(edges)]
        assert b"".join(bytes(seen.pop(key)["data"]) for key in keys) == cut.values.tobytes()
    assert not seen


@given(_checkpoints(), st.integers(1, 5))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_each_chunk_is_verified_by_exactly_one(found: tuple[int, dict[str, Cut]], n_parts: int) -> None:
    with tempfile.TemporaryDirectory() as folder, _written(folder, *found) as checkpoint:
        dealt = [checkpoint.share(part, n_parts) for part in range(n_parts)]
        for number, file in enumerate(checkpoint.index.files):
            at = file.header_nbytes
            for place in sorted(place for share in dealt for place in share[number]):
                assert place.offset_bytes == at
                at += place.nbytes
            assert at == file.nbytes == (Path(folder) / file.name).stat().st_size


def test_who_has_a_file_of_its_own_verifies_that(tmp_path: Path) -> None:
    values = np.arange(100, dtype=np.float32)
    numbers = [range(50), range(52), range(47), range(51)]
    save_parts(tmp_path, [[piece(f"model/{part}.{number}", values) for number in numbers[part]] for part in range(4)])
    with open_checkpoint(tmp_path) as checkpoint:
        for n_parts in (4, 2):
            for part in range(n_parts):
                files = [number for number, places in enumerate(checkpoint.share(part, n_parts)) if places]
                assert files == list(range(part * 4 // n_parts, (part + 1) * 4 // n_parts))


def test_uneven_files_are_shared_out_by_bytes(tmp_path: Path) -> None:
    many = {f"model/p{number}": np.full(500, number, np.float32) for number in range(40)}
    save_parts(tmp_path, [[piece(name, values) for name, values in many.items()], [piece("model/z", np.zeros(3))]])
    with open_checkpoint(tmp_path) as checkpoint:
        for n_parts in (2, 3, 4):
            shares = [
                sum(place.nbytes for places in checkpoint.share(part, n_parts) for place in places)
                for part in range(n_parts)
            ]
            assert max(shares) <= 1.2 * 80000 / n_parts


def test_large_elements_come_first_and_so_all_are_aligned(tmp_path: Path) -> None:
    dtypes = ["int8", "float64", "float16", "float32", "bool"]
    written = write_tensors(tmp_path / "f", [piece(f"model/{name}", np.ones(3, name)) for name in dtypes])
    offsets = {name: entry.chunks[0].offset_bytes for name, entry in written.tensors.items()}
    assert written.file.header_nbytes % 64 == 0
    assert all(offset % STORAGE[name.removeprefix("model/")].itemsize == 0 for name, offset in offsets.items())
    assert same(load_file(tmp_path / "f"), {f"model/{name}": np.ones(3, name) for name in dtypes})


def test_what_is_empty_is_kept_and_what_a_part_has_nothing_of_is_not(tmp_path: Path) -> None:
    empty, values = np.zeros((0, 3), np.float32), np.arange(4, dtype=np.int64)
    parts = [
        [piece("model/empty", empty), piece("model/w", values)],
        [piece("model/empty", empty), piece("model/w", values, 4)],
    ]
    save_parts(tmp_path, parts)
    assert same(contents(tmp_path), {"model/empty": empty, "model/w": values})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.index.files[1].nbytes == checkpoint.index.files[1].header_nbytes
        assert checkpoint.file_of("model/empty") == str(tmp_path / "index.json")


def test_state_comes_back_with_its_arrays_and_aliases(tmp_path: Path) -> None:
    state = {"steps": 7, "rate": math.inf, "n": 2**80, "order": (np.arange(3000), "é"), "deep": {1: [None, b"\0"]}}
    encoded = encode(state, where="extra")
    parts = [[piece(name, values) for name, values in encoded.arrays.items()] + [piece("model/w", np.ones(2))]]
    save_parts(tmp_path, parts, state=encoded.json, aliases={"model/tied": "model/w"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.aliases == {"model/tied": "model/w"}
        order = checkpoint.state["order"]
        assert isinstance(order, tuple) and order[1] == "é" and np.array_equal(order[0], np.arange(3000))
        assert {**checkpoint.state, "order": ()} == {**state, "order": ()}


def test_file_of_says_where_an_element_is(tmp_path: Path) -> None:
    save_id = save_parts(tmp_path, halves(random_tensors(1)))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.where == str(tmp_path)
        for element, part in ((0, 0), (5, 0), (6, 1), (11, 1)):
            file = f"{save_id}-{part:05d}-of-00002.safetensors"
            assert checkpoint.file_of("model/net.weight", element) == str(tmp_path / file)


def test_the_system_may_take_and_give_a_few_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:3]], at))
    save_parts(tmp_path, halves(random_tensors(1)))
    assert same(contents(tmp_path), random_tensors(1))


def test_beyond_a_number_files_are_opened_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(12, dtype=np.float32)
    save_parts(tmp_path, [[piece("model/w", values, part, part + 1)] for part in range(12)])
    monkeypatch.setattr(opened, "_MAX_OPEN", 3)
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = open_checkpoint(tmp_path)
    for _ in range(2):
        np.testing.assert_array_equal(whole(checkpoint, "model/w"), values)
        checkpoint.verify()
    assert len(os.listdir("/proc/self/fd")) == before + 3
    checkpoint.close()
    checkpoint.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_read_after_closing_does_not_stay_open(tmp_path: Path) -> None:
    save_parts(tmp_path, halves(random_tensors(1)))
    before = len(os.listdir("/proc/self/fd"))
    with open_checkpoint(tmp_path) as checkpoint:
        pass
    checkpoint.verify()
    assert len(os.listdir("/proc/self/fd")) == before


def _opened_files(patch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each file that is opened, or asked for by its name."""
    found: list[str] = []
    real = {call: getattr(os, call) for call in ("open", "stat")}
    for call in real:
        patch.setattr(os, call, functools.partial(_noting, found, real[call]))
    return found


def _noting(found: list[str], real: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    found.append(os.path.basename(path))
    return real(path, *args, **kwargs)


def test_each_rank_opens_only_the_files_that_it_verifies_or_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(600, dtype=np.float32)
    pieces = [[piece(f"model/p{part}", values)] for part in range(6)]
    save_id = save_parts(tmp_path, pieces)
    names = [f"{save_id}-{part:05d}-of-00006.safetensors" for part in range(6)]
    seen = _opened_files(monkeypatch)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors and not seen
        for part in range(3):
            checkpoint.verify(part, 3)
            assert seen == names[: 2 * part + 2]
        checkpoint.read("model/p0", 0, 9)
        checkpoint.check("model/p5")
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.read("model/p4", 0, 9)
    assert seen == [*names, names[4]]


@given(_checkpoints(), st.integers(1, 5))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_each_file_is_checked_by_some_part_even_if_nothing_lies_in_it(
    found: tuple[int, dict[str, Cut]], n_parts: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, _written(folder, *found) as checkpoint:
        with pytest.MonkeyPatch.context() as patch:
            seen = _opened_files(patch)
            for part in range(n_parts):
                checkpoint.verify(part, n_parts)
        assert sorted(seen) == [file.name for file in checkpoint.index.files]
        for file in checkpoint.index.files:
            path = Path(folder) / file.name
            path.rename(path.with_suffix(".aside"))
            with open_checkpoint(folder) as again:
                errors = [error for part in range(n_parts) if (error := _error_of(again, part, n_parts))]
            assert errors and all(error.file == str(path) for error in errors)
            path.with_suffix(".aside").rename(path)


def _error_of(checkpoint: Checkpoint, part: int, n_parts: int) -> CheckpointError | None:
    try:
        checkpoint.verify(part, n_parts)
    except CheckpointError as error:
        return error
    return None


def test_several_threads_may_read_what_was_not_read_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(40, dtype=np.float32)
    save_parts(tmp_path, [[piece("model/w", values, part, part + 1)] for part in range(40)])
    monkeypatch.setattr(opened, "_MAX_OPEN", 20)
    before = len(os.listdir("/proc/self/fd"))
    with open_checkpoint(tmp_path) as checkpoint, ThreadPoolExecutor(8) as executor:
        for found in executor.map(lambda _: whole(checkpoint, "model/w"), range(32)):
            np.testing.assert_array_equal(found, values)
        assert len(os.listdir("/proc/self/fd")) == before + 20
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_identity_is_that_of_the_save(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        save_parts(tmp_path, halves(random_tensors(1)))
        for _ in range(2):
            with open_checkpoint(tmp_path) as checkpoint:
                found.append(checkpoint.identity)
    assert found[0] == found[1] != found[2] == found[3]


def test_a_large_file_goes_to_the_disk_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_SYNC_BYTES", 100)
    asked: list[tuple[int, int]] = []

    def fadvise(fd: int, start: int, nbytes: int, advice: int) -> None:
        assert os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path / "f")
        assert advice == os.POSIX_FADV_DONTNEED
        asked.append((start, start + nbytes))

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    values = {f"model/{name}": np.arange(200, dtype=np.float32) for name in "ab"}
    write_tensors(tmp_path / "f", [piece(name, value) for name, value in values.items()])
    starts, ends = zip(*asked, strict=True)
    assert starts == (0, *ends[:-1]), "one after the other"
    assert all(end - start >= 100 for start, end in asked) and ends[-1] > 1600 - 100
    assert same(load_file(tmp_path / "f"), values)


def test_a_file_system_that_takes_no_advice_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fadvise(*_: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(durable, "_SYNC_BYTES", 100)
    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    write_tensors(tmp_path / "f", [piece("model/w", np.ones(200, np.float32))])
    assert same(load_file(tmp_path / "f"), {"model/w": np.ones(200, np.float32)})


@pytest.mark.parametrize(("n_blocks", "found"), [(1, "8"), (5, "at least 24")])
def test_blocks_of_another_size_than_announced_are_refused(tmp_path: Path, n_blocks: int, found: str) -> None:
    block = np.zeros(8, np.uint8)
    wrong = Piece("optimizer/a.b/moment1", TensorInfo((4,), "float32"), 0, 4, lambda: iter([block] * n_blocks))
    with pytest.raises(CheckpointError, match=rf"optimizer/a\.b/moment1 has 16 bytes, and {found} came") as caught:
        write_tensors(tmp_path / "f", [wrong])
    assert caught.value.parameter == "a.b" and not list(tmp_path.iterdir())


def test_two_pieces_of_one_name_are_refused(tmp_path: Path) -> None:
    pieces: Sequence[Piece] = [piece("model/w", np.ones(2)), piece("model/w", np.zeros(2))]
    with pytest.raises(CheckpointError, match="two tensors of the name model/w"):
        write_tensors(tmp_path / "f", pieces)
    with pytest.raises(CheckpointError, match="two tensors of the name __metadata__"):
        write_tensors(tmp_path / "f", [piece("__metadata__", np.ones(2))])


def test_what_gives_the_blocks_may_fail_and_then_there_is_no_file(tmp_path: Path) -> None:
    def blocks() -> Any:
        yield np.zeros(8, np.uint8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path / "f", [Piece("model/w", TensorInfo((4,), "float32"), 0, 4, blocks)])
    assert not list(tmp_path.iterdir())


def test_the_index_is_one_json_object_that_others_can_read(tmp_path: Path) -> None:
    save_parts(tmp_path, halves(random_tensors(1)), state={"steps": 3})
    found = json.loads((tmp_path / "index.json").read_text())
    assert found["format"] == "hp_sharding checkpoint" and found["version"] == 1
    assert found["content"]["tensors"]["model/net.weight"]["shape"] == [3, 4]
    assert found["content"]["state"] == {"steps": 3}
