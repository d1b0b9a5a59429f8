"""The command line with wrong arguments: wrong use, said in a line or two with the option's name; no traceback."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import click.testing
import pytest

from hp_sharding.checkpoint.command import checkpoint
from hp_sharding.cli import main
from hp_sharding.config import ShardingConfig
from hp_sharding.run import run
from tests.unit.test_cli import COMMANDS

NUMBERS = ["x", "", "nan", "inf", "-inf", "-1", "1e400", "0x10", "9" * 5000, "1,5"]
OTHERS = {
    "show --steps": ["x", "", "5-3", "-1", "1,,2", "9" * 5000, "1-"],
    "plan --replicas": ["x", "", "0", "1,,2", "nan", "1.5"],
    "plan --stages": ["x", "", "0", "1.5"],
    "plan --buffer-mb": ["x", "", "0", "nan", "inf", "1,nan"],
    "plan --prefetch-depth": ["x", "", "-1", "1.5"],
}
"""Of options whose types are the package's own."""
GIVEN = {
    "show": ["missing.json"], "diff": ["missing.json", "missing.json"], "inspect": ["missing"], "verify": ["missing"],
    "convert": ["missing", "new", "--to", "paddle"], "plan": ["layers.json", "--bandwidth-gbit=1"], "doctor": [],
    "run": ["missing.py"],
}  # fmt: skip
"""Arguments of each command beside the wrong ones."""


def _command(path: tuple[str, ...]) -> click.Command:
    found: click.Command = main
    for name in path:
        assert isinstance(found, click.Group)
        command = found.get_command(click.Context(found), name)
        assert command is not None
        found = command
    return found


def _options(path: tuple[str, ...]) -> Iterator[click.Option]:
    yield from (param for param in _command(path).params if isinstance(param, click.Option) and not param.is_flag)


def _wrong(path: tuple[str, ...], option: click.Option, folder: Path) -> list[str]:
    kind = option.type
    if isinstance(kind, (click.IntRange, click.FloatRange)):
        too_low = [] if kind.min is None else [str(kind.min - 1)]
        return [*NUMBERS, *too_low]
    if isinstance(kind, click.Choice):
        return ["x", "", "None", "\0"]
    if isinstance(kind, click.Path):
        taken = [str(folder)] if not kind.dir_okay else []
        return [*taken, "missing"] if kind.exists else taken
    return OTHERS.get(f"{path[-1]} {option.opts[0]}", [])


def _invoke(*arguments: str) -> click.testing.Result:
    found = click.testing.CliRunner().invoke(main, arguments)
    assert isinstance(found.exception, SystemExit), f"{arguments}: {found.exception!r} {found.output}"
    assert found.exit_code in (1, 2), f"{arguments} ended with {found.exit_code}"
    assert "Traceback" not in found.output
    return found


LEAVES = [path for path in COMMANDS if path and not isinstance(_command(path), click.Group)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that the commands run in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_wrong_values_of_options_are_named(path: tuple[str, ...], here: Path) -> None:
    for option in _options(path):
        for value in _wrong(path, option, here):
            found = _invoke(*path, *GIVEN[path[-1]], f"{option.opts[0]}={value}")
            assert found.exit_code == 2, f"{option.opts[0]}={value}: {found.output}"
            assert option.opts[0] in found.output, f"{option.opts[0]}={value}: {found.output}"
    assert not list(here.iterdir())


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_what_is_missing_or_unknown_is_named(path: tuple[str, ...], here: Path) -> None:
    assert "No such option" in _invoke(*path, "--nonsense", *GIVEN[path[-1]]).output
    if GIVEN[path[-1]]:
        assert "Missing argument" in _invoke(*path).output
        said = _invoke(*path, *GIVEN[path[-1]]).output
        assert GIVEN[path[-1]][0] in said
    if path[-1] != "run":  # what follows is the script's
        assert "unexpected extra argument" in _invoke(*path, *GIVEN[path[-1]], "one", "more").output
    assert not list(here.iterdir())


@pytest.mark.parametrize("path", [(), ("trace",), ("checkpoint",)], ids=" ".join)
def test_an_unknown_command_is_named(path: tuple[str, ...]) -> None:
    assert "'nonsense'" in _invoke(*path, "nonsense").output


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(ShardingConfig) if field.name != "units"])
def test_settings_on_the_line_are_those_of_the_config(key: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "train.py").write_text("raise AssertionError('it was run')")
    option = next(param for param in run.params if param.name == key)
    if not option.secondary_opts:  # else it is a flag with a --no-...
        for value in ("nonsense", "NaN", "-1", "[]", "9" * 5000):
            assert key in _invoke("run", f"{option.opts[0]}={value}", "train.py").output
    for text in (f'{{"{key}": "nonsense"}}', f'{{"{key}": [1]}}', f'{{"{key}": NaN}}'):
        monkeypatch.setenv("HP_SHARDING_CONFIGS", text)
        assert key in _invoke("run", "train.py").output


@pytest.mark.parametrize("text", ["[", "7", '"stage"', '{"stage": 9}', '{"nonsense": 1}', "{1: 2}"])
def test_settings_in_the_environment_that_make_no_sense(text: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "train.py").write_text("raise AssertionError('it was run')")
    monkeypatch.setenv("HP_SHARDING_CONFIGS", text)
    assert _invoke("run", "train.py").exit_code == 2


MODELS = [
    "", ":", "a:", ":b", ".a:b", "a..b:c", "os:nothing", "os:path", "no_such_module:build", "builtins:print", "llama3",
    "transformer:layers=x", "transformer:", "\0",
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_models_that_make_no_sense(model: str, here: Path) -> None:
    assert _invoke("plan", "--ranks=2", "--bandwidth-gbit=1", model).exit_code == 2


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\x00\xff", b"null", b'{"traceEvents": 7}', b'{"units": [1]}'])
def test_files_that_hold_something_else(content: bytes, here: Path) -> None:
    (here / "file.json").write_bytes(content)
    (here / "layers.json").write_text('{"units": [{"name": "a", "params": [["w", [4], "float32"]]}]}')
    (here / "checkpoint").mkdir()
    (here / "checkpoint" / "index.json").write_bytes(content)
    for arguments in (
        ["trace", "show", "file.json"],
        ["trace", "diff", "file.json", "file.json"],
        ["plan", "file.json", "--bandwidth-gbit=1"],
        ["plan", "layers.json", "--hardware=file.json"],
        ["plan", "layers.json", "--bandwidth-gbit=1", "--compute-from=file.json"],
        ["checkpoint", "inspect", "file.json"],
        ["checkpoint", "verify", "checkpoint"],
        ["checkpoint", "convert", "checkpoint", "new", "--to", "paddle"],
    ):
        assert "file.json" in _invoke(*arguments).output or "checkpoint" in arguments


def test_every_command_is_tried() -> None:
    assert {path[-1] for path in LEAVES} == set(GIVEN)
    assert set(checkpoint.commands) <= set(GIVEN)


@pytest.mark.parametrize("name", ["no_such_module", "no_such.module", "alone.module", "", ".x", "a..b", "bare"])
def test_a_module_that_cannot_be_run_is_named(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["", *sys.path[1:]])
    monkeypatch.setattr("sys.argv", sys.argv)
    (here / "alone.py").touch()
    (here / "bare").mkdir()
    (here / "bare" / "__init__.py").touch()
    found = _invoke("run", "-m", name)
    assert found.exit_code == 2
    assert f"{name} is a package without __main__.py" in found.output or f"no module {name} in" in found.output


def test_what_a_module_itself_lacks_keeps_its_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["", *sys.path[1:]])
    monkeypatch.setattr("sys.argv", sys.argv)
    (here / "lacks").mkdir()
    (here / "lacks" / "__init__.py").write_text("import no_such_module_of_theirs")
    for name in ("lacks", "lacks.below"):
        found = click.testing.CliRunner().invoke(main, ["run", "-m", name])
        assert isinstance(found.exception, ModuleNotFoundError)
        assert found.exception.name == "no_such_module_of_theirs"
