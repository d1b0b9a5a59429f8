"""A break in this process, for a while: no copy of the tree, no other process, and what ran before it is whole."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import types
from collections.abc import Iterator

from tests.mutation.breaks import Break


@contextlib.contextmanager
def in_force(each: Break) -> Iterator[None]:
    """Inside, functions and methods of the module do what those of the mutant do. Properties do not."""
    module = importlib.import_module(".".join(each.path.with_suffix("").parts))
    mutant = dict(_codes(compile(each.mutant().source, str(each.path), "exec")))
    functions = {name: function for name, function in _functions(module) if name in mutant}
    before = {name: function.__code__ for name, function in functions.items()}
    try:
        for name, function in functions.items():
            function.__code__ = mutant[name]
        yield
    finally:
        for name, function in functions.items():
            function.__code__ = before[name]


def _codes(code: types.CodeType, prefix: str = "") -> Iterator[tuple[str, types.CodeType]]:
    """Of functions, and of methods by ``Class.name``."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield prefix + constant.co_name, constant
            if not prefix:
                yield from _codes(constant, f"{constant.co_name}.")


def _functions(module: types.ModuleType) -> Iterator[tuple[str, types.FunctionType]]:
    """Those that are written in the module, without what decorates them."""
    for name, thing in vars(module).items():
        members = vars(thing) if isinstance(thing, type) and thing.__module__ == module.__name__ else {}
        named = [(name, thing), *((f"{name}.{member}", function) for member, function in members.items())]
        for path, function in named:
            written = inspect.unwrap(function) if callable(function) else function
            if isinstance(written, types.FunctionType) and written.__code__.co_filename == module.__file__:
                yield path, written
