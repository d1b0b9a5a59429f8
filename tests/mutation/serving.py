"""Servers that run tests in copies of the tree, one a copy: see ``server.py``."""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import py_compile
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness import machine_env
from tests.mutation.running import MutationError, copy_of_the_tree

_OPTIONS = ("-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:warnings")
PASSED, FAILED, NO_SUCH_TEST, NO_TEST = 0, 1, 4, 5
"""Exit codes of pytest."""
TOOK_TOO_LONG = -1


class Answer(NamedTuple):
    """What became of a job.

    Attributes:
        code: pytest's exit code, minus a signal's number, or ``TOOK_TOO_LONG``.
        took_s: seconds.
        output: the end of what the tests have printed.
    """

    code: int
    took_s: float
    output: str

    @property
    def caught(self) -> bool:
        """Whether a test failed, or did not come to an end."""
        return self.code not in (PASSED, NO_SUCH_TEST, NO_TEST)


class Server:
    """A process that runs tests in ``tree``. Not for several threads at a time.

    Args:
        tree: a copy of the tree.
    """

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self._log = tree / "output.log"
        env = {**os.environ, **machine_env(), "PYTHONPATH": str(tree)}
        self._process = subprocess.Popen(
            [sys.executable, "tests/mutation/server.py"],
            cwd=tree,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def run(self, tests: Sequence[str], *, limit_s: float, broken: tuple[Path, str] | None = None) -> Answer:
        """Runs tests until the first one fails.

        Args:
            tests: node ids.
            limit_s: seconds after which they are killed.
            broken: path of a module below the root, and its source for this time.
        """
        if broken is None:
            return self._send(tests, limit_s, ["-x"])
        path = self.tree / broken[0]
        source = path.read_text()
        path.write_text(broken[1])
        try:
            return self._send(tests, limit_s, ["-x"])
        finally:
            path.write_text(source)

    def cover(self, tests: Sequence[str], out: Path, *, limit_s: float) -> Answer:
        """Runs all of the tests and has ``covering.Covering`` write ``out``."""
        return self._send(tests, limit_s, ["-m", "not slow"], out)

    def close(self) -> None:
        """Ends the process, and what it runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _send(self, tests: Sequence[str], limit_s: float, options: list[str], covering: Path | None = None) -> Answer:
        job = {
            "tests": list(tests),
            "options": [*_OPTIONS, *options],
            "limit_s": limit_s,
            "log": str(self._log),
            "covering": str(covering or ""),
            "keeps_bytecode": covering is not None,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return Answer(answer["code"], answer["took_s"], answer["output"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MutationError(f"the process that runs the tests has ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """A server in a copy of the tree, both gone afterwards."""
    with copy_of_the_tree() as tree:
        # By content: a mutant of the same size, written in the same second, must not pass for the module.
        compileall.compile_dir(
            str(tree), quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH, workers=1
        )
        found = Server(tree)
        try:
            yield found
        finally:
            found.close()
