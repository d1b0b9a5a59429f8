"""Every wait, division, state check and free of the package, each a place that can be taken out.

What belongs to a kind is decided by names and syntax alone, so that a new line is found without anybody's help:

* *wait*: a call of one of ``_WAITS`` whose value nobody takes, or that has a time limit, which then is zero. A pause of
  a loop that asks again (``time.sleep``) is none.
* *division*: ``/`` and ``//``, but no joining of paths, and ``scale_``.
* *check*: a ``raise`` that does more than raise on, an ``assert`` that does more than tell a type, and a call of
  one of ``_CHECKS`` for its exception alone.
* *free*: a call of one of ``_FREES`` whose value nobody takes, a ``del``, and an attribute that lets go of what it held
  (``self._full = None``), where no object is being made.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.harness import REPO_ROOT
from tests.mutation.making import Mutant, one_line, replaced

PACKAGE = Path("hp_sharding")
KINDS = ("wait", "division", "check", "free")
_WAITS = re.compile(
    r"_?(wait|wait_\w+|timed_wait|wait_all|finish|finish_\w+|settle|settle_\w+|join|result|synchronize|await_\w+"
    r"|drain|follow|poll|select)"
)
_CHECKS = re.compile(r"_?(check|require|refuse|verify|validate|ensure)(_\w+)?")
_FREES = re.compile(
    r"_?(free|free_\w+|release|release_\w+|drop|drop_\w+|close|close_\w+|clear|clear_\w+|forget|forget_\w+|discard"
    r"|discard_\w+|remove|remove_\w+|removeFilter|trim|give_back|unlink|rmtree|shutdown|shut_down|stop|stop_\w+|kill"
    r"|terminate|unregister|detach|delattr|dissolve)"
)
_PATHS = re.compile(r"(.*_)?(path|folder|directory|parent|partial|place|root|home|tree|name)")
_SHORTEST = 100
"""Characters of a text that tell sites apart."""


class Site(NamedTuple):
    """A place in a module, by what is there and not by its line.

    Attributes:
        module: path below ``hp_sharding``.
        function: qualified name of what it is in, ``<module>`` at the top.
        kind: one of ``KINDS``.
        text: what is there, on one line, short.
        ordinal: among sites of the same function, kind and text, from 1.
    """

    module: str
    function: str
    kind: str
    text: str
    ordinal: int = 1

    @property
    def path(self) -> Path:
        """Of the module, below the root of the repository."""
        return PACKAGE / self.module

    def __str__(self) -> str:
        again = f" (number {self.ordinal})" if self.ordinal > 1 else ""
        return f"{self.module}, {self.function}, {self.kind}: {self.text}{again}"


class Place(NamedTuple):
    """Where a site is at present, and what stands there once it is taken out.

    Attributes:
        lines: of the statement that it is in, as far as it.
        mutant: the module without it.
    """

    site: Site
    lines: range
    mutant: Mutant


class _Hit(NamedTuple):
    kind: str
    node: ast.expr | ast.stmt
    instead: str


class _In(NamedTuple):
    """What is around a node: qualified name, statement, parent."""

    function: str = ""
    statement: ast.stmt | None = None
    parent: ast.AST | None = None


def modules() -> list[Path]:
    """Of the package, as paths below the root of the repository."""
    return sorted(path.relative_to(REPO_ROOT) for path in (REPO_ROOT / PACKAGE).rglob("*.py"))


def all_places() -> list[Place]:
    """All of the package, by module and line."""
    return [place for module in modules() for place in places(module, (REPO_ROOT / module).read_text())]


def places(module: Path, source: str) -> list[Place]:
    """Those of one module, by line."""
    hits = sorted(_hits(ast.parse(source)), key=lambda hit: (hit[2].node.lineno, hit[2].node.col_offset))
    seen: Counter[Site] = Counter()
    found = []
    for function, first_line, hit in hits:
        text = one_line(ast.get_source_segment(source, hit.node) or "", _SHORTEST)
        site = Site(module.relative_to(PACKAGE).as_posix(), function, hit.kind, text)
        seen[site] += 1
        changed = replaced(source, hit.node, _as_long(hit))
        mutant = Mutant(hit.node.lineno, f"{hit.kind} left out", text, hit.instead, changed)
        lines = range(first_line, (hit.node.end_lineno or hit.node.lineno) + 1)
        found.append(Place(site._replace(ordinal=seen[site]), lines, mutant))
    return found


def _as_long(hit: _Hit) -> str:
    """What stands there instead, over as many lines: functions are known by theirs, see ``server.py``."""
    more = "\n" * ((hit.node.end_lineno or hit.node.lineno) - hit.node.lineno)
    return f"({hit.instead}{more})" if isinstance(hit.node, ast.expr) else hit.instead + more


def _hits(node: ast.AST, around: _In = _In()) -> Iterator[tuple[str, int, _Hit]]:  # noqa: B008 - a tuple
    """With the qualified name of what each is in, and the first line of its statement."""
    statement = node if isinstance(node, ast.stmt) else around.statement
    found = _hit(node, around)
    if found is not None:
        yield around.function or "<module>", (statement or found.node).lineno, found
    function = around.function
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        function = f"{function}.{node.name}" if function else node.name
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                # The message of an exception says something; a division in it decides nothing.
                if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                    yield from _hits(child, _In(function, statement, node))


def _hit(node: ast.AST, around: _In) -> _Hit | None:
    if isinstance(node, ast.Raise):
        return _Hit("check", node, "pass") if _is_check(node) else None
    if isinstance(node, ast.Assert):
        return None if _only_narrows(node.test) else _Hit("check", node, "pass")
    if isinstance(node, ast.Delete):
        return _Hit("free", node, "pass")
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return _Hit("free", node, "pass") if _lets_go(node, around.function) else None
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return _division(node)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        kind = _kind_of(node.value)
        return None if kind is None else _Hit(kind, node, "pass")
    if isinstance(node, ast.Call) and not isinstance(around.parent, ast.Expr):
        return _wait_in_passing(node, around.parent)
    return None


def _is_check(node: ast.Raise) -> bool:
    """Not ``raise``, nor ``raise error``; what an abstract method raises checks nothing."""
    return isinstance(node.exc, ast.Call) and _name_of(node.exc) != "NotImplementedError"


def _only_narrows(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return all(_only_narrows(value) for value in test.values)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.IsNot):
        return isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None
    return isinstance(test, ast.Call) and _name_of(test) == "isinstance"


def _lets_go(node: ast.Assign | ast.AnnAssign, function: str) -> bool:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    nothing = isinstance(node.value, ast.Constant) and node.value.value is None
    return isinstance(target, ast.Attribute) and nothing and not function.endswith("__init__")


def _division(node: ast.BinOp | ast.AugAssign) -> _Hit | None:
    if not isinstance(node.op, (ast.Div, ast.FloorDiv)):
        return None
    if isinstance(node, ast.AugAssign):
        return _Hit("division", node, "pass")
    if isinstance(node.op, ast.Div) and (_is_path(node.left) or _is_path(node.right)):
        return None
    return _Hit("division", node, f"({ast.unparse(node.left)})")


def _is_path(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _is_path(node.left) or _is_path(node.right)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _PATHS.fullmatch((node.id if isinstance(node, ast.Name) else node.attr).lower()) is not None
    if isinstance(node, ast.Call):
        return _name_of(node) in ("Path", "mkdtemp", "cwd")
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _kind_of(call: ast.Call) -> str | None:
    """Of a call whose value nobody takes."""
    name = _name_of(call)
    if _CHECKS.fullmatch(name):
        return "check"
    if _WAITS.fullmatch(name):
        return "wait"
    if name == "scale_":
        return "division"
    return "free" if _FREES.fullmatch(name) else None


def _wait_in_passing(call: ast.Call, parent: ast.AST | None) -> _Hit | None:
    """A wait in an expression: one that ends a lambda, or with a time limit that becomes zero."""
    if not _WAITS.fullmatch(_name_of(call)) or not isinstance(call.func, ast.Attribute):
        return None
    if isinstance(parent, (ast.Lambda, ast.IfExp)):
        receiver = call.func.value
        return _Hit("wait", call, ast.unparse(receiver) if isinstance(receiver, ast.Call) else "None")
    if _name_of(call) in ("wait", "wait_for", "result", "poll", "await_quiet") and (call.args or call.keywords):
        return _Hit("wait", call, _without_time(call))
    return None


def _without_time(call: ast.Call) -> str:
    """The call with a limit of zero: the last argument, and those that say that they are seconds."""
    args = [ast.unparse(value) for value in call.args]
    if not any((keyword.arg or "").endswith("_s") for keyword in call.keywords) and args:
        args[-1] = "0"
    keywords = [
        f"{keyword.arg}={'0' if (keyword.arg or '').endswith('_s') else ast.unparse(keyword.value)}"
        for keyword in call.keywords
    ]
    return f"{ast.unparse(call.func)}({', '.join([*args, *keywords])})"


def _name_of(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""
