"""Mutants of a module: its source with one expression or statement changed in a way that a person might get wrong."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_OF_NO_INTEREST = ("_LOGGER.", "warnings.")
"""Beginnings of statements that only tell something."""


class Mutant(NamedTuple):
    """One way to break a module.

    Attributes:
        line: number of the first line that differs, from 1.
        what: the kind of change.
        before: the text that was there, on one line.
        after: what stands there now.
        source: of the whole module.
    """

    line: int
    what: str
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.what}: {self.before}  ->  {self.after}"


class _Change(NamedTuple):
    """A node of the module, and what to put in its place."""

    node: ast.expr | ast.stmt
    what: str
    text: str


def mutants(source: str) -> list[Mutant]:
    """All mutants of a module, from its first line to its last. Each one parses, and none equals ``source``."""
    found = []
    for change in _changes(ast.parse(source)):
        changed = _replace(source, change)
        if _parses(changed):
            before = ast.get_source_segment(source, change.node) or ""
            found.append(Mutant(change.node.lineno, change.what, _one_line(before), change.text, changed))
    return sorted(found, key=lambda mutant: mutant.line)


def _changes(tree: ast.Module) -> Iterator[_Change]:
    for node in _walk(tree):
        for what, make in _KINDS.items():
            yield from (_Change(node, what, text) for text in make(node))
        # Comparisons have an opposite of their own, and a "not" is dropped.
        if isinstance(node, (ast.If, ast.While, ast.IfExp)) and not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
            yield _Change(node.test, "the opposite", f"(not ({ast.unparse(node.test)}))")


def _walk(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """What may be changed: nothing inside annotations, assertions, messages, docstrings and what was left out."""
    if isinstance(node, (ast.Assert, ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        if isinstance(node, ast.Raise):
            yield node
        return
    if _is_dull(node):
        return
    if isinstance(node, (ast.expr, ast.stmt)):
        yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walk(child)


def _is_dull(node: ast.AST) -> bool:
    """Docstrings, messages, and what a constructor only keeps: without it everything fails at once."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or ast.unparse(node).startswith(_OF_NO_INTEREST)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and isinstance(node.targets[0], ast.Attribute):
        return node.targets[0].attr.lstrip("_") == node.value.id
    return False


# -- kinds of change: from a node to the texts that may stand in its place ---------------------------------------------


def _swapped(node: ast.AST) -> Iterator[str]:
    for field in ("op", "ops"):
        operators = getattr(node, field, [])
        for index, operator in enumerate(operators if field == "ops" else [operators]):
            if type(operator) in _SWAPS and not _joins_text(node):
                other = copy.deepcopy(node)
                swapped = _SWAPS[type(operator)]()
                setattr(
                    other, field, [*operators[:index], swapped, *operators[index + 1 :]] if field == "ops" else swapped
                )
                text = ast.unparse(other)
                yield f"({text})" if isinstance(node, ast.expr) else text


def _joins_text(node: ast.AST) -> bool:
    """Strings do not subtract: the mutant would only fail wherever it is reached."""
    parts = (getattr(node, "left", None), getattr(node, "right", None), getattr(node, "value", None))
    return any(isinstance(part, ast.JoinedStr) or _is_text(part) for part in parts)


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _negated(node: ast.AST) -> Iterator[str]:
    """A condition without its not. What has none is wrapped in one by ``_changes``, where it decides something."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"


def _off_by_one(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield str(node.value + 1)


def _flipped(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield str(not node.value)


def _dropped(node: ast.AST) -> Iterator[str]:
    """A call whose result nobody takes, a change of state, an early end."""
    changes_state = isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple))
    calls = isinstance(node, ast.Expr) and not isinstance(node.value, (ast.Yield, ast.YieldFrom))
    returns = isinstance(node, ast.Return) and node.value is None
    others = (ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break)
    if changes_state or calls or returns or isinstance(node, others):
        yield "pass"


def _without_keyword(node: ast.AST) -> Iterator[str]:
    """A call without one of the arguments that it names."""
    if isinstance(node, ast.Call):
        for index, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, "label", "key"):
                other = copy.deepcopy(node)
                del other.keywords[index]
                yield ast.unparse(other)


_KINDS: dict[str, Callable[[ast.AST], Iterator[str]]] = {
    "another operator": _swapped,
    "the opposite": _negated,
    "off by one": _off_by_one,
    "flipped": _flipped,
    "left out": _dropped,
    "without an argument": _without_keyword,
}


# -- text -------------------------------------------------------------------------------------------------------------


def _replace(source: str, change: _Change) -> str:
    """The source with the text of a node exchanged. Columns of ``ast`` count bytes."""
    lines = source.encode().splitlines(keepends=True)
    node = change.node
    assert node.end_lineno is not None and node.end_col_offset is not None
    head = lines[node.lineno - 1][: node.col_offset]
    tail = lines[node.end_lineno - 1][node.end_col_offset :]
    indented = change.text.replace("\n", "\n" + " " * node.col_offset)
    middle = head + indented.encode() + tail
    return b"".join([*lines[: node.lineno - 1], middle, *lines[node.end_lineno :]]).decode()


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _one_line(text: str) -> str:
    short = " ".join(text.split())
    return short if len(short) <= 100 else f"{short[:97]}..."
