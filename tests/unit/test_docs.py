"""What is public is explained, what the documents point to is there, and the README's table of keys is the code's."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hp_sharding
from hp_sharding import ShardingConfig, fleet
from hp_sharding.plain import PlainOptimizer

REPO_ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    REPO_ROOT / "README.md",
    REPO_ROOT / "README_cn.md",
    REPO_ROOT / "CONTRIBUTING.md",
    REPO_ROOT / "benchmarks" / "README.md",
    *sorted((REPO_ROOT / "docs").glob("*.md")),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def _is_ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("hp_sharding")


def _named(module: ModuleType) -> list[str]:
    """Names that a module shows: those of ``__all__``, else what it defines itself without an underscore."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [name for name, thing in vars(module).items() if not name.startswith("_") and _defined_in(module, thing)]


def _defined_in(module: ModuleType, thing: Any) -> bool:
    return getattr(thing, "__module__", None) == module.__name__


def _members(name: str, cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class, those that it has from classes of ours too, but not from others."""
    for owner in (owner for owner in cls.__mro__ if _is_ours(owner)):
        for member, thing in vars(owner).items():
            explained = inspect.isfunction(thing) or isinstance(thing, (property, classmethod, staticmethod))
            if explained and not member.startswith("_"):
                yield f"{name}.{member}", thing


def _public() -> dict[str, Any]:
    """Everything that a user may call or read, by its dotted name. What ``shard`` returns is part of it."""
    found: dict[str, Any] = {"hp_sharding": hp_sharding, "hp_sharding.plain.PlainOptimizer": PlainOptimizer}
    for name in hp_sharding.__all__:
        thing = getattr(hp_sharding, name)
        found[f"hp_sharding.{name}"] = thing
        if inspect.ismodule(thing):
            found.update({f"hp_sharding.{name}.{inner}": getattr(thing, inner) for inner in _named(thing)})
    for name, thing in list(found.items()):
        if inspect.isclass(thing):
            found.update(_members(name, thing))
    return found


PUBLIC = _public()
CLASSES = {name: thing for name, thing in PUBLIC.items() if inspect.isclass(thing)}


def _own_doc(thing: Any) -> str:
    """The docstring somebody wrote: what Python makes up for tuples and dataclasses does not count."""
    doc = thing.__doc__ or ""
    made_up = inspect.isclass(thing) and doc.startswith(f"{thing.__name__}(")
    return "" if made_up else doc


def _attributes(cls: type) -> set[str]:
    """What a user can read from an object: fields, names of an enumeration, and what ``__init__`` sets in public."""
    if dataclasses.is_dataclass(cls):
        return {field.name for field in dataclasses.fields(cls)}
    if issubclass(cls, Enum):
        return set(cls.__members__)
    source = inspect.getsource(cls.__init__) if "__init__" in vars(cls) else ""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                found.add(target.attr)
    return {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_explained(name: str) -> None:
    thing = PUBLIC[name]
    if isinstance(thing, (int, float, str)):
        return  # a constant, which stands beside its explanation
    assert len(_own_doc(thing).split()) >= 3 or _is_alias(name), name


def _is_alias(name: str) -> bool:
    """A second name of a method, such as ``clear_gradients``, shares the docstring."""
    return inspect.isfunction(PUBLIC[name]) and PUBLIC[name].__name__ != name.rpartition(".")[2]


@pytest.mark.parametrize("name", CLASSES)
def test_every_attribute_is_explained(name: str) -> None:
    doc = _own_doc(CLASSES[name])
    attributes = {attribute for attribute in _attributes(CLASSES[name]) if f"{name}.{attribute}" not in PUBLIC}
    missing = {attribute for attribute in attributes if not re.search(rf"(``{attribute}``|\b{attribute}:)", doc)}
    assert missing == set(), f"{name}: {missing}"


def test_what_is_looked_at_is_all_there_is() -> None:
    """The tests above are about names that they find; these must be among them."""
    wanted = {
        "hp_sharding.ShardedOptimizer.step",
        "hp_sharding.FusedCommBuffer.full",
        "hp_sharding.ShardingConfig.from_dict",
        "hp_sharding.fleet.DistributedStrategy.hybrid_configs",
        "hp_sharding.fleet.init",
        "hp_sharding.plain.PlainOptimizer.no_sync",
        "hp_sharding.timeline.Timeline.summary",
    }
    assert wanted <= set(PUBLIC)
    assert _attributes(ShardingConfig) >= {"stage", "timeline"}
    assert _attributes(hp_sharding.CommError) == {"op", "label", "lane", "rank", "peer"}
    assert _attributes(hp_sharding.Status) == {"SHARDED", "SYNCING", "READY"}


def test_every_setting_is_an_attribute_in_the_order_of_the_fields() -> None:
    doc = inspect.getdoc(ShardingConfig) or ""
    section = doc.partition("Attributes:")[2].partition("Raises:")[0]
    documented = re.findall(r"^    (\w+):", section, re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(ShardingConfig)]


def _links(text: str) -> list[str]:
    """Targets of links outside code, without those that leave the repository."""
    targets = LINK.findall(CODE_BLOCK.sub("", text))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(REPO_ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    for target in _links(text):
        path, _, anchor = target.partition("#")
        found = document.parent / path if path else document
        assert found.exists(), target
        assert found.resolve().is_relative_to(REPO_ROOT), target
        if anchor:
            assert anchor in _anchors(found.read_text()), target


def _anchors(text: str) -> set[str]:
    """What headings of a document can be called by, as code hosts make it of them."""
    headings = re.findall(r"^#+ (.+)$", CODE_BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_are_found() -> None:
    text = "see [a](a.md#x), [web](https://b.org)\n```\n[c](c.md)\n```\n[d](#d-e)\n## D: `e`\n"
    assert _links(text) == ["a.md#x", "#d-e"]
    assert _anchors(text) == {"d-e"}


def _table_of_keys(text: str) -> dict[str, Any]:
    """Key -> default, from the first two columns of the README's table; one row may have several of both."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \|", text, re.MULTILINE)
    table: dict[str, Any] = {}
    for keys, defaults in rows:
        values = [ast.literal_eval(value) for value in defaults.split(", ")]
        table.update(zip(re.findall(r"\w+", keys), values, strict=True))
    return table


def test_the_readme_lists_the_settings_with_their_defaults() -> None:
    section = (REPO_ROOT / "README.md").read_text().partition("## The flag")[2].partition("\n## ")[0]
    fields = {field.name: field.default for field in dataclasses.fields(ShardingConfig)}
    assert list(_table_of_keys(section).items()) == list(fields.items())


def test_fleet_shows_what_it_adds() -> None:
    ours = {name for name, thing in vars(fleet).items() if not name.startswith("_") and _defined_in(fleet, thing)}
    assert ours <= set(fleet.__all__)
