"""README_cn.md says what README.md says: the same headings, code, tables, names, links and figures, section by section.

A failure names the section and what is missing on which side. Wording is for people to compare.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
_ENGLISH, _CHINESE = REPO_ROOT / "README.md", REPO_ROOT / "README_cn.md"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# A comment to the end of the line. What is quoted in these documents has no "#" in it.
_COMMENT = re.compile(r"(^|\s+)#.*$", re.MULTILINE)
# One digit may be a word in the other language.
_FIGURE = re.compile(r"\d+(?:[.,]\d+)+|\d{2,}")


class Section(NamedTuple):
    """From one heading to the next.

    Attributes:
        level: of the heading, 1 for the title.
        title: without the marks.
        text: with code, without the heading.
    """

    level: int
    title: str
    text: str

    @property
    def prose(self) -> str:
        """Without blocks of code."""
        return _FENCE.sub("", self.text)

    def code(self) -> list[tuple[str, list[str]]]:
        """Language and lines of each block, without comments, which are translated."""
        blocks = _FENCE.findall(self.text)
        return [(language, [line for line in _COMMENT.sub("", code).split("\n") if line]) for language, code in blocks]

    def names(self) -> set[str]:
        """What stands as code in the text."""
        return {" ".join(name.split()) for name in _INLINE_CODE.findall(self.prose)}

    def links(self) -> set[str]:
        """Where links lead; those to the other language say the same."""
        return {target.replace(_CHINESE.name, _ENGLISH.name) for target in _LINK.findall(self.prose)} - {_ENGLISH.name}

    def figures(self) -> set[str]:
        """Numbers of more than one digit."""
        return set(_FIGURE.findall(_INLINE_CODE.sub("", _LINK.sub("", self.prose))))

    def tables(self) -> list[list[list[str]]]:
        """Each as rows of cells, the head first, without the line below it."""
        found = re.findall(r"(?:^\|.*\|$\n?)+", self.prose, re.MULTILINE)
        return [[_cells(line) for line in table.strip().split("\n") if not set(line) <= set("|-: ")] for table in found]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _sections(text: str) -> list[Section]:
    """All sections of a document; "#" inside code is no heading."""
    masked = _FENCE.sub(lambda found: re.sub(r"[^\n]", "x", found.group()), text)
    heads = list(re.finditer(r"^(#+) (.+)$", masked, re.MULTILINE))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return [
        Section(len(head.group(1)), head.group(2), text[head.end() : end])
        for head, end in zip(heads, ends, strict=True)
    ]


_PAIRS = list(zip(_sections(_ENGLISH.read_text()), _sections(_CHINESE.read_text()), strict=False))
_EACH_SECTION = pytest.mark.parametrize("pair", _PAIRS, ids=[english.title for english, _ in _PAIRS])
Pair = tuple[Section, Section]


def _assert_same(pair: Pair, what: str, english: set[str], chinese: set[str]) -> None:
    missing, extra = sorted(english - chinese), sorted(chinese - english)
    where = f"section {pair[0].title!r} / {pair[1].title!r}: {what}"
    assert not missing, f"{where} only in {_ENGLISH.name}: {missing}"
    assert not extra, f"{where} only in {_CHINESE.name}: {extra}"


def test_headings_are_of_the_same_levels_in_the_same_order() -> None:
    english, chinese = (_sections(path.read_text()) for path in (_ENGLISH, _CHINESE))
    listed = [[f"{'#' * section.level} {section.title}" for section in document] for document in (english, chinese)]
    levels = [[section.level for section in document] for document in (english, chinese)]
    assert levels[0] == levels[1], f"{_ENGLISH.name}: {listed[0]}\n{_CHINESE.name}: {listed[1]}"


@_EACH_SECTION
def test_code_is_the_same_but_for_comments(pair: Pair) -> None:
    english, chinese = (section.code() for section in pair)
    assert chinese == english, f"blocks of code of section {pair[0].title!r} / {pair[1].title!r}"


@_EACH_SECTION
def test_names_commands_and_values_are_the_same(pair: Pair) -> None:
    _assert_same(pair, "code in the text", *(section.names() for section in pair))


@_EACH_SECTION
def test_links_lead_to_the_same_places(pair: Pair) -> None:
    _assert_same(pair, "links", *(section.links() for section in pair))


@_EACH_SECTION
def test_figures_are_the_same(pair: Pair) -> None:
    _assert_same(pair, "figures", *(section.figures() for section in pair))


@_EACH_SECTION
def test_tables_have_the_same_rows(pair: Pair) -> None:
    where = f"section {pair[0].title!r} / {pair[1].title!r}"
    english, chinese = (section.tables() for section in pair)
    assert len(chinese) == len(english), f"{where}: number of tables"
    for number, (theirs, ours) in enumerate(zip(english, chinese, strict=True), 1):
        assert [_key(row) for row in ours] == [_key(row) for row in theirs], f"{where}: keys of table {number}"


def _key(row: list[str]) -> tuple[int, list[str], list[str]]:
    """What a row is recognised by: how many cells it has, the code in the first, and cells that are a Python value."""
    values = [cell for cell in row[1:] if re.fullmatch(r"True|False|None|\d+|\"\w+\"", cell)]
    return len(row), _INLINE_CODE.findall(row[0]), values


def test_each_names_the_other_at_its_top() -> None:
    for document, other in ((_ENGLISH, _CHINESE), (_CHINESE, _ENGLISH)):
        top = document.read_text().split("\n")[:5]
        assert any(f"({other.name})" in line for line in top), f"{document.name} has no link to {other.name} at its top"


# -- what is compared above --------------------------------------------------------------------------------------------

_TEXT = """# Title
## Part of `it`
See [here](a.md) and `x = 1`, 1.5 of 20, `--flag
word`.
```bash
# not a heading
run --fast  # quickly
```
| key | default |
|---|---|
| `a`, `b` | None |
| text | 25 |
"""


def test_sections_are_taken_apart() -> None:
    title, part = _sections(_TEXT)
    assert (title.level, title.title, part.level, part.title) == (1, "Title", 2, "Part of `it`")
    assert part.code() == [("bash", ["run --fast"])]
    assert part.names() == {"x = 1", "--flag word", "a", "b"}
    assert part.links() == {"a.md"}
    assert part.figures() == {"1.5", "20", "25"}
    assert part.tables() == [[["key", "default"], ["`a`, `b`", "None"], ["text", "25"]]]
    assert [_key(row) for row in part.tables()[0]] == [(2, [], []), (2, ["a", "b"], ["None"]), (2, [], ["25"])]
