"""The command line as a whole: every command has a help with examples, and the examples work."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import click.testing
import pytest

from hp_sharding.cli import main
from hp_sharding.trace import chrome
from tests.checkpoints import some_tensors, write_checkpoint
from tests.harness import REPO_ROOT
from tests.traces import Run, make

NOT_RUN = {
    "--nproc": "starts ranks, in tests/dist/test_doctor.py",
    "--measure": "trains a model, in tests/unit/test_plan_command.py",
    "--compute-from": "takes a trace of the same model",
    "llama2-70b": "takes longer than all the others together",
    "...": "is an example of a model, and goes on",
    "paddle.distributed.launch": "is the launcher's",
    "hp_sharding.run": "trains, in tests/dist/test_run.py",
}
"""Parts of examples that are not run here, and why."""

MODEL = """
from paddle import nn

def build():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
"""
LAYERS = {
    "units": [
        {"name": f"blocks.{number}", "forward_ms": 3, "backward_ms": 6,
         "params": [[f"blocks.{number}.weight", [512, 512], "float32"]]}
        for number in range(2)
    ]
}  # fmt: skip


def _commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name)


COMMANDS = list(_commands(main))


def _help(path: tuple[str, ...]) -> str:
    found = click.testing.CliRunner().invoke(main, [*path, "--help"], terminal_width=200)
    assert found.exit_code == 0, found.output
    return found.output


def _examples(text: str) -> list[str]:
    """Without what stands beside them, and what they are piped to."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = re.findall(r"^\s*((?:python -m |hp-sharding |HP_).*)$", joined, re.MULTILINE)
    return [re.split(r"\s{2,}| \| | && ", line.strip())[0] for line in lines]


EXAMPLES = sorted({example for path in COMMANDS for example in _examples(_help(path))})


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_a_help_with_examples(path: tuple[str, ...]) -> None:
    text = _help(path)
    assert "Examples:" in text
    assert _examples(text)
    lines = [line for line in text.splitlines() if re.match(r"^ +-{1,2}[a-z]", line)]
    assert all(len(line.split(None, 1)) == 2 for line in lines), "an option without an explanation"


def test_the_ways_not_to_run_an_example_are_still_needed() -> None:
    for part in NOT_RUN:
        assert any(part in example for example in EXAMPLES), part


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that examples speak of."""
    made = tmp_path_factory.mktemp("examples")
    for name in ("trace.json", "before.json", "after.json"):
        chrome.write(make(Run(n_layers=2, n_steps=8)), made / name)
    write_checkpoint(made / "runs" / "step_1000", some_tensors())
    (made / "my_models").mkdir()
    (made / "my_models" / "gpt.py").write_text(MODEL)
    (made / "layers.json").write_text(json.dumps(LAYERS))
    return made


def _is_run(example: str) -> bool:
    return not any(part in example for part in NOT_RUN)


@pytest.mark.parametrize("example", [example for example in EXAMPLES if _is_run(example)])
def test_examples_work(example: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    shutil.rmtree("exported", ignore_errors=True)
    if " exported/" in example and "convert runs" not in example:
        _run("checkpoint", "convert", "runs/step_1000", "exported/model", "--to", "paddle")
    words = shlex.split(example)
    assert _run(*(words[3:] if words[0] == "python" else words[1:]))


def _run(*arguments: str) -> str:
    found = click.testing.CliRunner().invoke(main, arguments)
    assert found.exit_code == 0, found.output
    return found.output


def test_both_names_of_the_program_are_one() -> None:
    script = Path(sys.executable).parent / "hp-sharding"
    said = [
        subprocess.run([*command, "--version"], cwd=REPO_ROOT, capture_output=True, text=True, check=True).stdout
        for command in ([str(script)], [sys.executable, "-m", "hp_sharding"])
    ]
    assert said[0] == said[1]
    assert said[0].startswith("hp_sharding, version ")
