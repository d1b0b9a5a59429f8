"""``hp-sharding checkpoint`` on small checkpoints: what it shows, what it finds, and how it ends."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest

from hp_sharding.checkpoint.folder import open_checkpoint
from hp_sharding.checkpoint.source import SPLIT_MARK
from hp_sharding.cli import main
from tests.checkpoints import ALIASES, STATE, flip, some_tensors, write_checkpoint


def _call(*arguments: Any) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, ["checkpoint", *map(str, arguments)], terminal_width=120)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two files, with every tensor of more than one element in both."""
    return write_checkpoint(tmp_path / "step_7", some_tensors(), n_files=2)


def _data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# -- inspect -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_help_has_examples_and_exit_codes(command: str) -> None:
    found = _call(command, "--help")
    assert found.exit_code == 0
    assert f"python -m hp_sharding checkpoint {command} runs/step_1000" in found.output
    assert "Exit code: 0 all is well" in found.output
    assert command in _call("--help").output


def test_inspect_shows_what_is_in_it(saved: Path) -> None:
    found = _call("inspect", saved)
    assert found.exit_code == 0, found.output
    lines = [line.split() for line in found.output.splitlines()]
    assert ["format", "sharded,", "version", "1"] in lines
    assert ["step", "7"] in lines
    assert ["ranks", "2"] in lines
    assert ["optimizer", "AdamW,", "learning", "rate", "0.25"] in lines
    size = sum(path.stat().st_size for path in _data_files(saved))
    assert ["files", "2,", f"{size / 1024:.3g}", "KB"] in lines
    assert ["model/layers.2.weight", "[30,", "20]", "float32", "2.34", "KB", "2", "2"] in lines
    assert ["model/short", "[5]", "bfloat16", "10", "bytes", "2", "2"] in lines
    assert ["model/tied", "=", "model/layers.2.weight"] in lines
    names = [line[0] for line in lines if line and line[0].startswith("model/layers")]
    assert names == ["model/layers.2.weight", "model/layers.10.weight"], "numbers by their value"
    assert "extra" not in found.output


def test_inspect_shows_some_tensors(saved: Path) -> None:
    output = _call("inspect", saved, "--filter", "layers.10.").output
    assert "model/layers.10.weight" in output
    assert "optimizer/layers.10.weight/moment1" in output
    assert "model/layers.2.weight" not in output
    assert f"3 of {len(some_tensors()) + 1} tensors" in output


def test_inspect_shows_the_state(saved: Path) -> None:
    output = _call("inspect", saved, "--state").output
    shown = json.loads(output[output.index("\n{") :])
    assert shown["extra"]["epoch"] == 3
    assert shown["extra"]["nothing"] == "nan"
    assert shown["extra"]["sizes"] == [1, [2, 3]]
    assert shown["extra"]["large"] == "array of int64 [1000]"
    assert shown["extra"]["row"] == "array of int64 [9]"
    assert shown["extra"]["small"] == [1.5, 2.0]
    assert shown["extra"]["key"] == "b'\\x00\\x01'"
    assert shown["extra"]["by number"] == {"5": "five"}
    assert shown["many"] == [*range(20), "... 80 more"]
    assert shown["ranks"] == {"0": {"rank_extra": {"position": 10}}, "1": {"rank_extra": {"position": 11}}}


def test_inspect_gives_json(saved: Path) -> None:
    found = json.loads(_call("inspect", saved, "--json").stdout)
    assert found["complete"]
    assert found["damage"] == ""
    assert found["version"] == 1
    assert (found["steps"], found["optimizer"], found["lr"], found["n_ranks"]) == (7, "AdamW", 0.25, 2)
    assert found["files"] == {path.name: path.stat().st_size for path in _data_files(saved)}
    assert found["aliases"] == ALIASES
    assert "state" not in found
    tensors = {tensor.pop("name"): tensor for tensor in found["tensors"]}
    assert tensors["model/short"] == {
        "shape": [5],
        "dtype": "bfloat16",
        "nbytes": 10,
        "files": [path.name for path in _data_files(saved)],
        "n_chunks": 2,
    }
    assert found["tensor_bytes"] == sum(tensor["nbytes"] for tensor in tensors.values())
    some = json.loads(_call("inspect", saved, "--json", "--filter", "short").stdout)["tensors"]
    assert [tensor["name"] for tensor in some] == ["model/short"]
    assert json.loads(_call("inspect", saved, "--json", "--state").stdout)["state"]["many"] == [*range(100)]


def test_an_unfinished_save_is_recognised(saved: Path) -> None:
    (saved / "index.json").unlink()
    found = _call("inspect", saved)
    assert found.exit_code == 1
    assert "did not finish" in found.output
    assert "also here: 2 files," in found.output
    assert "version" not in found.output
    assert _call("verify", saved).exit_code == 1
    shown = json.loads(_call("inspect", saved, "--json").stdout)
    assert not shown["complete"]
    assert set(shown["leftovers"]) == {path.name for path in _data_files(saved)}


def test_an_unfinished_save_beside_a_complete_one_is_told_of(saved: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", some_tensors())
    for path in _data_files(other):
        path.rename(saved / path.name)
    found = _call("inspect", saved)
    assert found.exit_code == 0
    assert "also here: 1 file," in found.output


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_inspect_shows_what_it_can_of_a_damaged_one(saved: Path, damage: str) -> None:
    victim = _data_files(saved)[1]
    if damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-1])
    found = _call("inspect", saved)
    assert found.exit_code == 1
    assert "cannot be loaded" in found.output
    assert victim.name in found.output
    assert "model/layers.2.weight" in found.output
    assert not json.loads(_call("inspect", saved, "--json").stdout)["complete"]


def test_inspect_tells_of_every_flipped_byte_of_what_it_reads(saved: Path) -> None:
    with open_checkpoint(saved) as checkpoint:
        places = checkpoint.index.tensors["rank/1/state"].places("rank/1/state")
    for place in places:
        victim = _data_files(saved)[place.chunk.file]
        for at in range(place.offset_bytes, place.offset_bytes + place.nbytes):
            flip(victim, at)
            found = _call("inspect", saved, "--json")
            assert found.exit_code == 1, found.exception
            assert str(victim) in json.loads(found.stdout)["damage"]
            flip(victim, at)


@pytest.mark.parametrize("text", [b"\xff", b"{", b'{"$": "array"}', b'{"$": "what"}', b"[" * 5000])
def test_inspect_tells_of_a_rank_whose_state_makes_no_sense(tmp_path: Path, text: bytes) -> None:
    saved = write_checkpoint(tmp_path / "saved", {"rank/0/state": np.frombuffer(text, np.uint8)})
    found = _call("inspect", saved)
    assert found.exit_code == 1, found.exception
    assert "cannot be loaded" in found.output and "rank/0/state" in found.output


def test_inspect_beside_a_save_that_removes_its_files(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write_checkpoint(saved.parent / "other", some_tensors())
    victim = saved / _data_files(other)[0].name
    _data_files(other)[0].rename(victim)
    scandir = os.scandir

    def vanishing(path: Path) -> list[os.DirEntry[str]]:
        found = list(scandir(path))
        victim.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(os, "scandir", vanishing)
    found = _call("inspect", saved)
    assert found.exit_code == 0, found.exception


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere", "there is no folder"),
        ("nowhere.pdparams", "nowhere.pdparams"),
        ("empty", "is no checkpoint: it has no index.json"),
        (".", "but it holds checkpoints: step_7"),
    ],
)
def test_wrong_paths_end_with_2(saved: Path, command: str, path: str, said: str) -> None:
    (saved.parent / "empty").mkdir()
    found = _call(command, saved.parent / path)
    assert found.exit_code == 2
    assert said in found.output


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_reads_every_byte(saved: Path) -> None:
    found = _call("verify", saved)
    assert found.exit_code == 0
    assert f"{saved} is undamaged" in found.output
    shown = json.loads(_call("verify", saved, "--json").stdout)
    with open_checkpoint(saved) as checkpoint:
        assert shown["bytes"] == sum(info.nbytes for info in checkpoint.tensors.values())
    assert shown["ok"]
    assert shown["damaged"] == []


def test_verify_names_file_and_parameter(saved: Path) -> None:
    with open_checkpoint(saved) as checkpoint:
        chunks = [checkpoint.index.tensors[f"model/layers.{layer}.weight"].chunks[1] for layer in (2, 10)]
    victim = _data_files(saved)[1]
    for chunk in chunks:
        flip(victim, chunk.offset_bytes + 3)
    found = _call("verify", saved)
    assert found.exit_code == 1
    for name in ("layers.2.weight", "layers.10.weight"):
        assert any(str(victim) in line and name in line for line in found.stderr.splitlines())
    shown = json.loads(_call("verify", saved, "--json").stdout)
    assert not shown["ok"]
    assert {(item["file"], item["parameter"]) for item in shown["damaged"]} == {
        (str(victim), "layers.2.weight"),
        (str(victim), "layers.10.weight"),
    }


def test_progress_is_shown_on_a_terminal_only(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = saved.parent / "new"
    assert _call("verify", saved).stderr == _call("convert", saved, target, "--to", "sharded").stderr == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "verifying" in _call("verify", saved).stderr
    found = _call("convert", saved, target, "--to", "sharded", "--force")
    assert "converting" in found.stderr
    assert found.stdout == f"wrote {target}\n"


@pytest.mark.parametrize("name", ["index.json", "data"])
def test_verify_finds_what_shows_when_it_is_opened(saved: Path, name: str) -> None:
    victim = saved / name if name == "index.json" else _data_files(saved)[0]
    flip(victim, 60)
    found = _call("verify", saved)
    assert found.exit_code == 1
    assert f"error: {victim}" in found.stderr


# -- convert -----------------------------------------------------------------------------------------------------------


def _values(folder: Path) -> dict[str, Any]:
    with open_checkpoint(folder) as found:
        return {name: found.read(name, 0, info.numel).tobytes() for name, info in found.tensors.items()}


def test_convert_to_another_number_of_files(saved: Path) -> None:
    target = saved.parent / "new" / "three"
    found = _call("convert", saved, target, "--to", "sharded", "--files", 3)
    assert found.exit_code == 0, found.output
    assert f"wrote {target}" in found.output
    assert len(_data_files(target)) == 3
    assert _values(target) == _values(saved)
    with open_checkpoint(target) as new, open_checkpoint(saved) as old:
        assert new.tensors == old.tensors
        assert new.aliases == old.aliases
        assert new.index.state == old.index.state
        assert math.isnan(new.state["extra"]["nothing"])
    assert _call("verify", target).exit_code == 0
    assert sorted(path.suffix for path in target.iterdir()) == [".json", *[".safetensors"] * 3], "nothing is left over"


def test_convert_in_place(saved: Path) -> None:
    before = _values(saved)
    assert _call("convert", saved, saved, "--to", "sharded").exit_code == 2
    assert _call("convert", saved, saved, "--to", "sharded", "--force").exit_code == 0
    assert len(_data_files(saved)) == 1
    assert _values(saved) == before


@pytest.mark.parametrize("to", ["sharded", "paddle", "safetensors"])
def test_convert_replaces_only_when_told_to(saved: Path, to: str) -> None:
    target = saved.parent / "out"
    assert _call("convert", saved, target, "--to", to).exit_code == 0
    again = _call("convert", saved, target, "--to", to)
    assert again.exit_code == 2
    assert "exists; --force replaces it" in again.output
    assert _call("convert", saved, target, "--to", to, "--force").exit_code == 0
    assert _call("verify", target if to == "sharded" else f"{target}.{_WEIGHTS[to]}").exit_code == 0


_WEIGHTS = {"paddle": "pdparams", "safetensors": "safetensors"}


@pytest.mark.parametrize("to", ["paddle", "safetensors"])
def test_convert_to_whole_files_and_back(saved: Path, to: str) -> None:
    whole, back = saved.parent / f"whole.{_WEIGHTS[to]}", saved.parent / "back"
    assert _call("convert", saved, whole, "--to", to).exit_code == 0, "the ending may be there"
    assert whole.is_file()
    assert _call("convert", saved.parent / "whole", back, "--to", "sharded").exit_code == 0
    before, after = _values(saved), _values(back)
    wanted = {name for name in before if name.startswith(("model/", "optimizer/"))}
    assert {name: after[name] for name in wanted} == {name: before[name] for name in wanted}
    with open_checkpoint(back) as found:
        assert found.aliases == ALIASES
        assert found.state["lr_scheduler"] == STATE["lr_scheduler"]
    inspected = _call("inspect", whole)
    assert inspected.exit_code == 0
    assert "whole files" in inspected.output
    assert "model/layers.10.weight" in inspected.output
    verified = _call("verify", whole)
    assert "complete, as far as can be seen without checksums" in verified.output


@pytest.mark.parametrize("to", ["sharded", "paddle", "safetensors"])
def test_a_damaged_source_gives_nothing(saved: Path, to: str) -> None:
    """Else the new checksums would be those of wrong bytes."""
    flip(_data_files(saved)[0], _data_files(saved)[0].stat().st_size - 1)
    found = _call("convert", saved, saved.parent / "out", "--to", to)
    assert found.exit_code == 1
    assert found.stderr.startswith("error: ")
    assert _data_files(saved)[0].name in found.stderr
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("to", ["paddle", "safetensors"])
def test_parts_of_tensor_parallel_ranks_stay_sharded(tmp_path: Path, to: str) -> None:
    halves = {f"model/wide{SPLIT_MARK}{rank}of2": np.zeros((2, 3), np.float32) for rank in range(2)}
    saved = write_checkpoint(tmp_path / "saved", halves)
    found = _call("convert", saved, tmp_path / "out", "--to", to)
    assert found.exit_code == 2
    assert "tensor parallelism" in " ".join(found.output.split())
    assert _call("convert", saved, tmp_path / "out", "--to", "sharded").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "paddle", "--files", "2"], "--files is for --to sharded"),
        (["--to", "pickle"], "'pickle' is not one of"),
        ([], "--to"),
        (["--to", "sharded", "--files", "0"], "x>=1"),
    ],
)
def test_wrong_use_ends_with_2(saved: Path, arguments: list[str], said: str) -> None:
    found = _call("convert", saved, saved.parent / "out", *arguments)
    assert found.exit_code == 2
    assert said in found.output
    assert list(saved.parent.iterdir()) == [saved]


def test_a_file_is_not_replaced_by_a_folder(saved: Path) -> None:
    target = saved.parent / "file"
    target.write_text("mine")
    found = _call("convert", saved, target, "--to", "sharded", "--force")
    assert found.exit_code == 2
    assert target.read_text() == "mine"
