"""Names that are imported with their first use: what is there, what is said where Paddle is not or does not fit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hp_sharding
from tests.harness import REPO_ROOT

_BROKEN = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "paddle":
            raise AttributeError("module 'numpy' has no attribute 'bool'")
sys.meta_path.insert(0, Finder())
"""
_MISSING = "import sys; sys.modules['paddle'] = None\n"


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=REPO_ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("use", ["from hp_sharding import shard", "import hp_sharding; hp_sharding.fleet"])
def test_an_installation_that_does_not_fit_is_named(use: str) -> None:
    found = _run(_BROKEN + use)
    assert "ImportError: hp_sharding." in found.stderr.splitlines()[-1]
    assert "module 'numpy' has no attribute 'bool'" in found.stderr.splitlines()[-1]


def test_modules_are_there_with_their_first_use() -> None:
    code = "import hp_sharding; print(hp_sharding.errors.ConfigError.__name__, hp_sharding.trace.chrome.__name__)"
    assert _run(f"{_MISSING}import hp_sharding.trace.chrome\n{code}").stdout.split() == [
        "ConfigError", "hp_sharding.trace.chrome"
    ]  # fmt: skip
    assert _run("import hp_sharding; print(hp_sharding.checkpoint.__name__)").stdout == "hp_sharding.checkpoint\n"


@pytest.mark.parametrize("name", ["shrad", "_private", "a.b", ""])
def test_there_is_no_other_name(name: str) -> None:
    with pytest.raises(AttributeError, match="has no attribute"):
        getattr(hp_sharding, name)


def test_what_is_listed_is_public() -> None:
    listed = {name for name in dir(hp_sharding) if not name.startswith("__")}
    assert listed == set(hp_sharding.__all__)


def test_a_type_checker_knows_what_is_there(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "used.py").write_text("import hp_sharding\nhp_sharding.nonsense(1)\nfrom hp_sharding import shrad\n")
    # The names alone: to look at all of the modules takes half a minute.
    (tmp_path / "hp_sharding").mkdir()
    shutil.copy(REPO_ROOT / "hp_sharding" / "__init__.py", tmp_path / "hp_sharding")
    command = [sys.executable, "-m", "mypy", "--config-file", "", "--ignore-missing-imports", "used.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert 'Module has no attribute "nonsense"' in found.stdout, found.stdout + found.stderr
    assert 'has no attribute "shrad"' in found.stdout


def test_without_paddle_the_command_line_has_its_help() -> None:
    main = f"{_MISSING}from hp_sharding.cli import main; main("
    found = _run(f"{main}['--help'])")
    assert (found.returncode, found.stderr) == (0, "")
    for command in ("checkpoint", "doctor", "plan", "run", "trace"):
        assert f"\n  {command} " in found.stdout
    assert "PaddlePaddle is not installed" in found.stdout


@pytest.mark.parametrize("arguments", [["run", "train.py", "--epochs", "3"], ["doctor", "--quick"]])
def test_without_paddle_a_command_that_needs_it_says_so(arguments: list[str]) -> None:
    found = _run(f"{_MISSING}from hp_sharding.cli import main; main({arguments!r})")
    assert found.returncode == 1
    assert found.stderr.startswith("Error: ")
    assert "PaddlePaddle is not installed" in found.stderr
