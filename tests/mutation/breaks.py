"""A break made by hand: a line of the package taken out, and the tests that must miss it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.harness import REPO_ROOT
from tests.mutation.making import Mutant


def played(name: str) -> str:
    """The test that plays one of what ``tests/device/test_keep_alive.py`` has, by its name."""
    return f"tests/device/test_keep_alive.py::test_what_is_waited_for_and_kept[{name}]"


class Break(NamedTuple):
    """A wait or something kept, and its absence.

    Attributes:
        module: path below ``hp_sharding``.
        what: is broken then.
        text: occurs once in the module.
        instead: what stands there then.
        tests: node ids below the root of the repository; together they must fail.
        equivalent: why nobody can see it, where that is so; then there are no tests.
    """

    module: str
    what: str
    text: str
    instead: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    @property
    def path(self) -> Path:
        """Of the module, below the root of the repository."""
        return Path("hp_sharding") / self.module

    def mutant(self) -> Mutant:
        """The module as it is now, with this break.

        Raises:
            ValueError: the text is not there, or more than once: the list has to follow the sources.
        """
        source = (REPO_ROOT / self.path).read_text()
        if source.count(self.text) != 1:
            raise ValueError(f"{self.path}: {source.count(self.text)} times in it, expected once:\n{self.text}")
        line = source[: source.index(self.text)].count("\n") + 1
        before, after = (" ".join(text.split()) for text in (self.text, self.instead))
        return Mutant(
            line, f"{self.module}: {self.what}", before, after or "nothing", source.replace(self.text, self.instead)
        )
