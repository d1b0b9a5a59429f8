"""What ``docs/troubleshooting.md`` quotes is what the sources say: users look for their message there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = REPO_ROOT / "docs" / "troubleshooting.md"
_BLOCK = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
_VARIABLE = "\0"
_QUOTED = re.compile(r"'[^']*'")
_USERS = re.compile(
    r"[\w/.-]+\.py:\d+ in .*|(?<=and there in )\w+ of \w+\.py|(?<=Error has ended: ).*|\b[\w.]+\.(?:weight|bias)\b"
)
"""Where a script stands, and what has ended it: the user's own files, lines and words; and names of parameters."""
_NAMES = re.compile(
    r"\b(?:all_gather|reduce_scatter|all_reduce|float32|hp_sharding|\w+Error|READY|SYNCING|SHARDED)\b|[\w/]+(?:\.\w+)+"
)
"""What is put in: collectives, dtypes, errors, states, and names with dots."""
_MIN_FRAGMENT = 4


def _texts(path: Path) -> Iterator[str]:
    """Texts in a module, with ``_VARIABLE`` in the place of what is put in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else _VARIABLE for part in node.values)
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def _fragments() -> list[str]:
    """What all messages are made of, the longest first."""
    texts = {text for path in (REPO_ROOT / "hp_sharding").rglob("*.py") for text in _texts(path)}
    quoted = (text.replace(f"'{_VARIABLE}'", _VARIABLE) for text in texts)
    parts = {part for text in quoted for part in _QUOTED.sub(_VARIABLE, text).split(_VARIABLE)}
    return sorted((part for part in parts if len(part.strip()) >= _MIN_FRAGMENT), key=len, reverse=True)


def _unknown_words(line: str) -> list[str]:
    """Words of a quoted line that no message of the package has; what stands on either side of "..." may be a part."""
    left = _QUOTED.sub(_VARIABLE, _USERS.sub(_VARIABLE, line))
    for fragment in (each.strip() for each in _fragments()):
        if fragment in left:
            start = r"(?<![\w.])" if fragment[0].isalnum() else ""
            end = r"(?!\w|\.\w)" if fragment[-1].isalnum() else ""
            left = re.sub(f"{start}{re.escape(fragment)}{end}", _VARIABLE, left)
    rest = (part.strip() for part in _NAMES.sub(_VARIABLE, left.replace("...", _VARIABLE)).split(_VARIABLE))
    return [
        word
        for part in rest
        if not ("..." in line and any(part in fragment for fragment in _fragments()))
        for word in re.findall(r"[A-Za-z]{4,}", part)
    ]


def _quoted() -> list[str]:
    return [line for block in _BLOCK.findall(DOCUMENT.read_text()) for line in block.splitlines() if line.strip()]


def test_messages_are_quoted() -> None:
    assert len(_quoted()) > 30


@pytest.mark.parametrize("line", dict.fromkeys(_quoted()))
def test_what_is_quoted_is_said(line: str) -> None:
    assert _unknown_words(line) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rank 3: all_gather of '2:blocks' on lane 'gather' failed: rank 1 gave up: rank 2 is gone: ...", []),
        ("rank 3: all_gather of '2:blocks' on lane 'gather' broke: rank 1 is gone", ["broke"]),
        ("  rank 1 has not responded", ["responded"]),
    ],
)
def test_other_words_are_found(line: str, words: list[str]) -> None:
    assert _unknown_words(line) == words
