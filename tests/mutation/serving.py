"""Servers that run tests in copies of the tree, one a copy: see ``server.py``."""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import py_compile
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness import machine_env
from tests.mutation.running import MutationError, copy_of_the_tree

_OPTIONS = ("-q", "-s", "--tb=short", "--no-header", "-p", "no:cacheprovider", "--assert=plain")
"""What assertions say is not asked for here, and files that were compiled once will do."""
PASSED, FAILED, NO_SUCH_TEST = 0, 1, 4
"""Exit codes of pytest."""
TOOK_TOO_LONG = -1
_TAIL_CHARS = 4000
_IMPORTS_S = 30.0
_CANNOT = 98


class Answer(NamedTuple):
    """What became of a job.

    Attributes:
        code: pytest's exit code, minus a signal's number, or ``TOOK_TOO_LONG``.
        took_s: seconds.
        output: the end of what the tests have printed.
        culprits: node ids of what has failed, or was running when it was killed; files that could not be imported.
    """

    code: int
    took_s: float
    output: str
    culprits: tuple[str, ...]

    @property
    def caught(self) -> bool:
        """Whether a test failed, or did not come to an end."""
        return self.code not in (PASSED, NO_SUCH_TEST)


class Server:
    """A process that runs tests in ``tree``. Not for several threads at a time.

    Args:
        tree: a copy of the tree.
        files: of tests, below the root; others cannot be run.
    """

    def __init__(self, tree: Path, files: Sequence[str]) -> None:
        self.tree = tree
        env = {**os.environ, **machine_env(), "PYTHONPATH": str(tree)}
        self._log = (tree / "server.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "tests/mutation/server.py", *_OPTIONS, f"--basetemp={tree / 'tmp'}", *files],
            cwd=tree,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def run(self, tests: Sequence[str], *, limit_s: float, broken: tuple[Path, str] | None = None) -> Answer:
        """Runs tests until the first one fails.

        Args:
            tests: node ids; without parameters, those with all; files.
            limit_s: seconds after which they are killed.
            broken: path of a module below the root, and its source for this time.
        """
        if broken is None:
            return self._send(tests, limit_s)
        path = self.tree / broken[0]
        source = path.read_text()
        path.write_text(broken[1])
        try:
            answer = self._send(tests, limit_s, broken=path)
            return self._run_anew(tests, limit_s) if answer.code == _CANNOT else answer
        finally:
            path.write_text(source)

    def cover(self, tests: Sequence[str], out: Path, *, limit_s: float) -> Answer:
        """Runs all of the tests and has ``covering.Covering`` write ``out``."""
        return self._send(tests, limit_s, covering=out)

    def close(self) -> None:
        """Ends the process, and what it runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def _run_anew(self, tests: Sequence[str], limit_s: float) -> Answer:
        """In a process that imports everything: what a module does as it is imported shows only there."""
        env = {**os.environ, **machine_env(), "PYTHONPATH": str(self.tree), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", *_OPTIONS, *tests]
        begin_s = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=self.tree,
                env=env,
                capture_output=True,
                text=True,
                timeout=_IMPORTS_S + limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer(TOOK_TOO_LONG, time.monotonic() - begin_s, "", ())
        failed = tuple(re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", done.stdout, re.MULTILINE))
        # A module that cannot be imported any more: pytest then says that it knows no such test.
        code = FAILED if "ERROR collecting" in done.stdout else done.returncode
        return Answer(code, time.monotonic() - begin_s, done.stdout[-_TAIL_CHARS:], failed)

    def _send(
        self, tests: Sequence[str], limit_s: float, *, broken: Path | None = None, covering: Path | None = None
    ) -> Answer:
        job = {
            "tests": list(tests),
            "limit_s": limit_s,
            "log": str(self.tree / "output.log"),
            "culprits": str(self.tree / "culprits"),
            "broken": str(broken or ""),
            "covering": str(covering or ""),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return Answer(answer["code"], answer["took_s"], answer["output"], tuple(dict.fromkeys(answer["culprits"])))

    def wait_until_ready(self) -> None:
        """Returns once it has collected the tests.

        Raises:
            MutationError: it could not.
        """
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            said = (self.tree / "server.log").read_text(errors="replace")[-_TAIL_CHARS:]
            raise MutationError(f"the process that runs the tests has ended with {code}:\n{said}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def server(files: Sequence[str]) -> Iterator[Server]:
    """A server in a copy of the tree, both gone afterwards. It may not be ready yet."""
    with copy_of_the_tree() as tree:
        # By content: a mutant of the same size, written in the same second, must not pass for the module.
        compileall.compile_dir(
            str(tree), quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH, workers=1
        )
        found = Server(tree, files)
        try:
            yield found
        finally:
            found.close()
