"""The architecture, held by a test: who may import whom, who may touch Paddle's fleet, and how large a file may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
PACKAGE = REPO_ROOT / "hp_sharding"

ORDER = [
    "errors",
    "config",
    "layout",
    "trace",
    "progress",
    "comm",
    "timeline",
    "broadcast",
    "pool",
    "views",
    "units",
    "precision",
    "gradient_storage",
    "buffer",
    "arena",
    "guard",
    "backward",
    "outputs",
    "foresight",
    "gathers",
    "lookups",
    "residency",
    "places",
    "hooks",
    "running",
    "facts",
    "replication",
    "sent",
    "in_flight",
    "reduction",
    "ownership",
    "schedule",
    "numerics",
    "nonfinite",
    "fusing",
    "updates",
    "assembly",
    "scaling",
    "gradients",
    "moments",
    "states",
    "sharded_weights",
    "optimizer",
    "recorded",
    "relayout",
    "tuning",
    "plain",
    "sharding",
    "plan",
    "checkpoint",
    "fleet",
    "run",
    "doctor",
    "cli",
    "__main__",
]
"""Every module and package of hp_sharding. Each may import those above it, and none below."""

WITHOUT_PADDLE = {"errors", "config", "layout", "trace", "foresight"}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "tools"}
MAX_LINES = 500


def _files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (REPO_ROOT / folder).rglob("*.py"))


def _name(path: Path) -> str:
    return ".".join(path.relative_to(REPO_ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Full dotted names of all that a file imports, also inside functions and under TYPE_CHECKING.

    ``from a import b`` gives ``a.b``: the b may be a module.
    """
    package = _name(path).split(".")[: None if path.name == "__init__.py" else -1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parts = [*base, *(node.module or "").split(".")]
            yield from (".".join([*filter(None, parts), alias.name]) for alias in node.names)


def _imports_of(path: Path) -> list[str]:
    return list(_imports(ast.parse(path.read_text()), path))


def _layer(name: str) -> str | None:
    """The entry of ORDER that a dotted name belongs to; None for other packages and for hp_sharding itself."""
    parts = name.split(".")
    return parts[1] if parts[0] == "hp_sharding" and len(parts) > 1 else None


def _imports_down(path: Path, imported: list[str]) -> list[str]:
    own = _layer(_name(path))
    if own is None:  # hp_sharding/__init__.py shows what is public, from anywhere
        return []
    layers = [layer for layer in map(_layer, imported) if layer is not None and layer != own]
    return [layer for layer in layers if layer in ORDER and ORDER.index(layer) > ORDER.index(own)]


@pytest.mark.parametrize("path", _files("hp_sharding"), ids=_name)
def test_imports_point_up_the_list(path: Path) -> None:
    layer = _layer(_name(path))
    assert layer is None or layer in ORDER, f"give {layer} its place in ORDER"
    assert _imports_down(path, _imports_of(path)) == []


@pytest.mark.parametrize("path", _files("hp_sharding"), ids=_name)
def test_only_fleet_imports_paddles_fleet(path: Path) -> None:
    found = [name for name in _imports_of(path) if name.startswith("paddle.distributed.fleet")]
    assert not found or _layer(_name(path)) == "fleet"


@pytest.mark.parametrize("path", _files("hp_sharding"), ids=_name)
def test_arithmetic_knows_no_paddle(path: Path) -> None:
    found = [name for name in _imports_of(path) if name.split(".")[0] == "paddle"]
    assert not found or _layer(_name(path)) not in WITHOUT_PADDLE


@pytest.mark.parametrize("path", _files("hp_sharding", "tests", "examples", "benchmarks"), ids=_name)
def test_files_have_a_purpose_and_a_readable_size(path: Path) -> None:
    assert path.stem not in VAGUE_NAMES
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from hp_sharding.optimizer import shard", ["optimizer"]),
        ("from hp_sharding import optimizer, errors", ["optimizer"]),
        ("import hp_sharding.fleet.strategy", ["fleet"]),
        ("from .optimizer import shard", ["optimizer"]),
        ("from . import optimizer", ["optimizer"]),
        ("def f():\n    from .optimizer import shard", ["optimizer"]),
        ("from .errors import CommError\nimport paddle\nfrom hp_sharding.comm import Work", []),
    ],
)
def test_the_test_sees_every_form_of_import(source: str, found: list[str]) -> None:
    path = PACKAGE / "buffer.py"
    assert _imports_down(path, list(_imports(ast.parse(source), path))) == found


def test_the_test_follows_relative_imports_inside_packages() -> None:
    for path in (PACKAGE / "comm" / "tcp.py", PACKAGE / "comm" / "__init__.py"):
        imported = list(_imports(ast.parse("from ..optimizer import shard\nfrom .peers import Peers"), path))
        assert imported == ["hp_sharding.optimizer.shard", "hp_sharding.comm.peers.Peers"]
        assert _imports_down(path, imported) == ["optimizer"]


def test_pytest_looks_into_the_distributed_tests(pytestconfig: pytest.Config) -> None:
    """Pytest's own list of folders to pass by has "dist" on it."""
    assert "dist" not in pytestconfig.getini("norecursedirs")
    assert list((REPO_ROOT / "tests" / "dist").glob("test_*.py"))
