"""Checkpoints that do not fit, are damaged or cannot be written: an error on every rank, and nothing has changed."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn

import hp_sharding
from hp_sharding import CheckpointError
from tests import harness, logical
from tests.resuming import Run, Settings
from tests.sides import BOTH

LISTED = 20
"""Of the names that do not fit, so many stand in the message."""
SETTINGS: Settings = {"stage": 2, **BOTH}
INDEX = "index.json"


# -- what does not fit -------------------------------------------------------------------------------------------------


class Misfit(NamedTuple):
    """A training that is saved and one that it is loaded into, and do not go together.

    Attributes:
        saved: the kind of the one.
        loaded: that of the other.
        missing: logical names that the checkpoint does not have.
        unexpected: those that only the checkpoint has.
        reason: what the message says, too.
    """

    saved: str
    loaded: str
    missing: list[str]
    unexpected: list[str]
    reason: str = ""


_MOMENTS = ("beta1_pow_acc", "beta2_pow_acc", "moment1", "moment2")
_USED = [
    *(f"hidden.{index}.{part}" for index in range(2) for part in ("weight", "bias")), "table",
    "sometimes.weight", "sometimes.bias", "single", "scalar", "three",
]  # fmt: skip
"""Parameters that have had a gradient after three steps."""

_SCHEDULER = ["state/lr_scheduler"]
MISFITS = {
    "missing": Misfit("odd", "wider", ["model/added.weight", "model/added.bias"], []),
    "unexpected": Misfit("wider", "odd", [], ["model/added.weight", "model/added.bias"]),
    "no moments": Misfit("odd, sgd", "odd", [f"optimizer/{name}/{m}" for name in _USED for m in _MOMENTS], []),
    "other moments": Misfit(
        "odd",
        "odd, momentum",
        [f"optimizer/{name}/velocity" for name in _USED],
        [*(f"optimizer/{name}/{moment}" for name in _USED for moment in _MOMENTS), *_SCHEDULER],
    ),
    "too many moments": Misfit("odd", "odd, sgd", [], [f"optimizer/{name}/{m}" for name in _USED for m in _MOMENTS]),
    "no scheduler": Misfit("odd, constant", "odd, sgd", _SCHEDULER, []),
    "no use for a scheduler": Misfit("odd, sgd", "odd, constant", [], _SCHEDULER),
    "shape": Misfit("odd", "longer", [], [], "three"),
    "dtype": Misfit("odd", "counting in halves", [], [], "calls"),
}


def _start(kind: str, rank: int, nranks: int, *, settings: Settings | str = SETTINGS, seed: int = 5) -> Run:
    changes = {"wider": _widen, "longer": _lengthen, "counting in halves": _count_in_halves}
    with _changed_model(changes.get(kind)):
        return Run("odd" if kind in changes else kind, rank, nranks, settings, seed=seed)


@contextmanager
def _changed_model(change: Callable[[Any], None] | None) -> Iterator[None]:
    from tests import resuming

    def make() -> nn.Layer:
        model = original.model()
        if change is not None:
            change(model)
        return model

    original = resuming.KINDS["odd"]
    with mock.patch.dict(resuming.KINDS, {"odd": original._replace(model=make)} if change is not None else {}):
        yield


def _widen(model: Any) -> None:
    model.added = nn.Linear(3, 2)


def _lengthen(model: Any) -> None:
    model.three = model.create_parameter([4])


def _count_in_halves(model: Any) -> None:
    model.calls = model.calls.astype("float32")


def _everything(run: Run) -> tuple[Any, ...]:
    """Of this rank: state, rates, generators."""
    generators = [str(state.__getstate__()) for state in paddle.get_rng_state()]
    return logical.digest(run.parts()), run.rates(), generators, random.getstate(), str(np.random.get_state())


@contextmanager
def _changes_nothing(rank: int, nranks: int, kind: str, settings: Settings | str = SETTINGS) -> Iterator[Run]:
    """Gives a training of three steps. What is done with it must leave no trace, then and in two further steps."""
    run, twin = (_start(kind, rank, nranks, settings=settings) for _ in range(2))
    losses = twin.train(range(5))
    run.seed(9)
    expected = run.train(range(3)), _everything(run)
    yield run
    assert _everything(run) == expected[1], "something has changed"
    assert [*expected[0], *run.train(range(3, 5))] == losses, "something has changed that shows later"


def _refuses(rank: int, nranks: int, folder: str, misfit: Misfit, strict: bool) -> str:
    saved = _start(misfit.saved, rank, nranks, seed=6)
    saved.train(range(3))
    hp_sharding.save(folder, saved.model, saved.optimizer)
    with _changes_nothing(rank, nranks, misfit.loaded) as run, pytest.raises(CheckpointError) as error:
        hp_sharding.load(folder, run.model, run.optimizer, strict=strict)
    return str(error.value)


def _not_strict(rank: int, nranks: int, folder: str, misfit: Misfit) -> tuple[list[str], list[str]]:
    saved, run = _start(misfit.saved, rank, nranks, seed=6), _start(misfit.loaded, rank, nranks)
    saved.train(range(3))
    hp_sharding.save(folder, saved.model, saved.optimizer)
    own = {part.name: part for part in run.parts()}
    loaded = hp_sharding.load(folder, run.model, run.optimizer, strict=False)
    theirs = logical.join([saved.parts()]) if nranks == 1 else None
    for part in run.parts():
        if part.name in misfit.missing and part.name in own:
            np.testing.assert_array_equal(part.values, own[part.name].values, err_msg=part.name)
        elif theirs is not None and part.name not in misfit.missing:
            logical.check([part], theirs)
    run.train(range(3, 5))
    return loaded.missing, loaded.unexpected


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_an_error_that_lists_it(name: str, tmp_path: Path) -> None:
    misfit = MISFITS[name]
    for text in harness.run(_refuses, 2, str(tmp_path / "checkpoint"), misfit, True):
        for names in (misfit.missing, misfit.unexpected):
            assert all(name in text for name in sorted(names)[:LISTED])
        assert misfit.reason in text


@pytest.mark.parametrize("name", ["shape", "dtype"])
def test_other_shapes_and_kinds_are_never_loaded(name: str, tmp_path: Path) -> None:
    for text in harness.run(_refuses, 2, str(tmp_path / "checkpoint"), MISFITS[name], False):
        assert MISFITS[name].reason in text


@pytest.mark.parametrize("nranks", [1, 2])
@pytest.mark.parametrize("name", [name for name in MISFITS if not MISFITS[name].reason])
def test_the_rest_is_loaded_if_asked_for(name: str, nranks: int, tmp_path: Path) -> None:
    misfit = MISFITS[name]
    for missing, unexpected in harness.run(_not_strict, nranks, str(tmp_path / "checkpoint"), misfit):
        assert _without_details(missing) == sorted(misfit.missing)
        assert _without_details(unexpected) == sorted(misfit.unexpected)


def _without_details(names: list[str]) -> list[str]:
    """What of a scheduler there is or is not is its own business."""
    return sorted({"state/lr_scheduler" if name.startswith("state/lr_scheduler") else name for name in names})


# -- what is damaged ---------------------------------------------------------------------------------------------------


def _flip(path: Path, *, at: float, bits: int = 16) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= bits
    path.write_bytes(data)


def _flip_everywhere(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        data = np.fromfile(path, np.uint8)
        data[-1:1000:-32] ^= 4  # not the header
        data.tofile(path)


def _data(folder: Path, number: int = 0) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def _make_newer(folder: Path) -> None:
    content = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**content, "version": 99}))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "last byte": (lambda folder: _flip(_data(folder), at=1.0), "-00000-of-00002"),
    "a byte in the middle": (lambda folder: _flip(_data(folder, 1), at=0.7, bits=1), "-00001-of-00002"),
    "bytes everywhere": (_flip_everywhere, "is damaged"),
    "header": (lambda folder: _flip(_data(folder), at=0.01), "-00000-of-00002"),
    "cut off": (lambda folder: os.truncate(_data(folder, 1), 1000), "-00001-of-00002"),
    "a file is missing": (lambda folder: _data(folder, 1).unlink(), "-00001-of-00002"),
    "index": (lambda folder: _flip(folder / INDEX, at=0.6, bits=1), INDEX),
    "no index": (lambda folder: (folder / INDEX).unlink(), ""),
    "newer": (_make_newer, "99"),
    "nothing": (lambda folder: shutil.rmtree(folder), ""),
}


def _damaged(rank: int, nranks: int, folder: str, damage: str, whose: int | None) -> str:
    """``whose``: the rank that has a damaged folder of its own; None, all have the same."""
    saved = _start("odd", rank, nranks, seed=6)
    saved.train(range(3))
    hp_sharding.save(folder, saved.model, saved.optimizer)
    path = Path(folder) if whose is None else Path(shutil.copytree(folder, f"{folder}-of-{rank}"))
    paddle.distributed.barrier()
    if rank == (whose or 0):
        DAMAGES[damage][0](path)
    paddle.distributed.barrier()
    with _changes_nothing(rank, nranks, "odd") as run, pytest.raises(CheckpointError) as error:
        hp_sharding.load(path, run.model, run.optimizer)
    return str(error.value)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_on_every_rank(damage: str, tmp_path: Path) -> None:
    for text in harness.run(_damaged, 2, str(tmp_path / "checkpoint"), damage, None):
        assert DAMAGES[damage][1] in text
        assert "checkpoint" in text


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize("damage", ["bytes everywhere", "index", "nothing"])
def test_damage_that_one_rank_sees_is_an_error_on_every_rank(damage: str, whose: int, tmp_path: Path) -> None:
    for text in harness.run(_damaged, 2, str(tmp_path / "checkpoint"), damage, whose):
        assert DAMAGES[damage][1] in text
        assert "checkpoint" in text


# -- what cannot be written --------------------------------------------------------------------------------------------


@contextmanager
def _files_of_at_most(nbytes: int) -> Iterator[None]:
    """The kernel refuses to write more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def _failing(name: str, number: int) -> Iterator[None]:
    """A function of ``os`` fails, whenever it is asked about a file of the checkpoint."""
    original = getattr(os, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with mock.patch.object(os, name, fail):
        yield
    assert getattr(os, name) is original


TROUBLES: dict[str, Callable[[], Any]] = {
    "file too large": lambda: _files_of_at_most(6000),
    "disk full": lambda: _failing("fsync", errno.ENOSPC),
    "input/output error": lambda: _failing("fsync", errno.EIO),
}


def _troubled(rank: int, nranks: int, folder: str, trouble: str, whose: int) -> str:
    run = _start("odd", rank, nranks)
    run.train(range(2))
    hp_sharding.save(folder, run.model, run.optimizer)
    before = sorted(path.name for path in Path(folder).iterdir())
    expected = logical.digest(run.parts())
    with _changes_nothing(rank, nranks, "odd") as other, pytest.raises(CheckpointError) as error:  # noqa: PT012
        if rank == whose:
            with TROUBLES[trouble]():
                hp_sharding.save(folder, other.model, other.optimizer)
        else:
            hp_sharding.save(folder, other.model, other.optimizer)
    paddle.distributed.barrier()
    assert sorted(path.name for path in Path(folder).iterdir()) == before
    run.train(range(2, 4))
    hp_sharding.load(folder, run.model, run.optimizer)
    assert logical.digest(run.parts()) == expected, "the checkpoint before is not what it was"
    hp_sharding.save(folder, run.model, run.optimizer)
    return str(error.value)


@pytest.mark.parametrize("whose", [0, 1, 2])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_rank_that_cannot_write(trouble: str, whose: int, tmp_path: Path) -> None:
    for text in harness.run(_troubled, 3, str(tmp_path / "checkpoint"), trouble, whose):
        assert str(tmp_path / "checkpoint") in text
        assert trouble != "disk full" or "space" in text


def _refused(rank: int, nranks: int, folder: str, case: str) -> str:
    extra, own = {
        "extra differs": ({"epoch": rank}, None),
        "extra cannot be held": ({"sampler": [1, object()]}, None),
        "extra of one rank cannot be held": (object() if rank == 1 else 1, None),
        "rank_extra of one rank cannot be held": (None, {"loader": object()} if rank == 1 else None),
    }[case]
    with _changes_nothing(rank, nranks, "odd") as run, pytest.raises(CheckpointError) as error:
        hp_sharding.save(folder, run.model, run.optimizer, extra=extra, rank_extra=own)
    assert not list(Path(folder).glob("*")), "something was left behind"
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("extra differs", "extra"),
        ("extra cannot be held", "extra['sampler'][1]"),
        ("extra of one rank cannot be held", "extra"),
        ("rank_extra of one rank cannot be held", "rank_extra['loader']"),
    ],
)
def test_extra_that_cannot_be_saved(case: str, words: str, tmp_path: Path) -> None:
    for text in harness.run(_refused, 2, str(tmp_path / "checkpoint"), case):
        assert words in text


def _nowhere(rank: int, nranks: int, folder: str) -> str:
    """A file stands where the folder should."""
    with _changes_nothing(rank, nranks, "odd") as run, pytest.raises(CheckpointError) as error:
        hp_sharding.save(f"{folder}/file", run.model, run.optimizer)
    return str(error.value)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for text in harness.run(_nowhere, 2, str(tmp_path)):
        assert str(tmp_path / "file") in text
    assert (tmp_path / "file").read_text() == "mine"


def _midway(rank: int, nranks: int, folder: str, settings: Settings) -> None:
    """With gradients under way: what is saved is the state before them, and they are not disturbed."""
    run, twin = (Run("odd", rank, nranks, settings) for _ in range(2))
    expected = {}
    for each in (run, twin):
        each.train(range(3))
        with each.optimizer.no_sync():
            each.kind.loss(each.model, 7, rank, nranks).backward()
            if each is run:
                expected["inside"] = logical.digest(run.parts())
                hp_sharding.save(f"{folder}/inside", run.model, run.optimizer)
        each.kind.loss(each.model, 8, rank, nranks).backward()
        if each is run:
            expected["before step"] = logical.digest(run.parts())
            hp_sharding.save(f"{folder}/before step", run.model, run.optimizer)
        each.optimizer.step()
        each.optimizer.clear_grad()
    assert logical.digest(run.parts()) == logical.digest(twin.parts()), "saving has disturbed the gradients"
    for place, digest in expected.items():
        hp_sharding.load(f"{folder}/{place}", twin.model, twin.optimizer)
        assert logical.digest(twin.parts()) == digest, place


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_saving_with_gradients_under_way(stage: int, tmp_path: Path) -> None:
    harness.run(_midway, 2, str(tmp_path / "checkpoint"), {"stage": stage, **BOTH})


def _forgotten(rank: int, nranks: int, folder: str, settings: Settings) -> None:
    """A load forgets gradients that belong to the values before."""
    run = Run("odd", rank, nranks, settings)
    run.train(range(3))
    hp_sharding.save(folder, run.model, run.optimizer)
    losses = run.train(range(3, 6))
    expected = logical.digest(run.parts())
    run.kind.loss(run.model, 8, rank, nranks).backward()
    hp_sharding.load(folder, run.model, run.optimizer)
    assert run.train(range(3, 6)) == losses
    assert logical.digest(run.parts()) == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_loading_with_gradients_under_way(stage: int, tmp_path: Path) -> None:
    harness.run(_forgotten, 2, str(tmp_path / "checkpoint"), {"stage": stage, **BOTH})
