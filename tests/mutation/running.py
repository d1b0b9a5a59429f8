"""Runs tests on mutants, each in a copy of the tree, and says which mutants no test has noticed."""

from __future__ import annotations

import concurrent.futures
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.harness import REPO_ROOT, machine_env
from tests.mutation.making import Mutant

_COPIED = ("hp_sharding", "tests", "examples", "setup.cfg", "pyproject.toml")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*")
_START_S = 30.0
"""Added to the time that a mutant's tests may take: Paddle's import on a busy machine."""


class Verdict(NamedTuple):
    """What became of a mutant.

    Attributes:
        caught: whether a test failed, or did not come to an end.
        took_s: seconds.
    """

    mutant: Mutant
    caught: bool
    took_s: float


class Trial(NamedTuple):
    """A mutant of a module, by its path below the root of the repository, and the tests of which one must fail."""

    module: Path
    mutant: Mutant
    tests: Sequence[str]


class MutationError(Exception):
    """The tests say nothing about the mutants: there are none, or they fail, or look elsewhere, without any mutant."""


def find_tests(module: Path) -> list[str]:
    """Unit tests that are named after a module or import from it, as paths below the root of the repository.

    Args:
        module: path below the root, such as ``hp_sharding/comm/ring.py``.
    """
    dotted = ".".join(module.with_suffix("").parts)
    name = "_".join(module.with_suffix("").parts[1:])
    imports = re.compile(rf"^from {re.escape(dotted)} import", re.MULTILINE)
    paths = sorted((REPO_ROOT / "tests" / "unit").glob("test_*.py"))
    found = [path for path in paths if path.stem == f"test_{name}" or imports.search(path.read_text())]
    found.sort(key=lambda path: path.stem != f"test_{name}")
    return [path.relative_to(REPO_ROOT).as_posix() for path in found]


def judge(
    module: Path,
    chosen: Sequence[Mutant],
    tests: Sequence[str],
    *,
    jobs: int = 1,
    tell: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Runs ``tests`` on each of the mutants of ``module``.

    Args:
        module: path below the root of the repository.
        chosen: mutants of it.
        tests: paths below the root.
        jobs: mutants tried at a time, each in a copy of the tree of its own.
        tell: called with each verdict as it comes.

    Raises:
        MutationError: the tests fail without any mutant.
    """
    return judge_each([Trial(module, mutant, tests) for mutant in chosen], tests, jobs=jobs, tell=tell)


def judge_each(
    trials: Sequence[Trial],
    tests: Sequence[str],
    *,
    jobs: int = 1,
    tell: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Runs each mutant's own tests on it.

    Args:
        tests: all that the trials name. They are run once without a mutant, and must pass.
        jobs: see ``judge``.
        tell: see ``judge``.

    Raises:
        MutationError: the tests fail without any mutant.
    """
    with ExitStack() as stack:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        copies = [stack.enter_context(_copy_of_the_tree()) for _ in range(jobs)]
        limit_s = _START_S + 4 * _time_unbroken(copies[0], tests)
        for tree in copies:
            trees.put(tree)

        def judge_one(trial: Trial) -> Verdict:
            tree = trees.get()
            try:
                verdict = _try(tree, trial, limit_s)
            finally:
                trees.put(tree)
            tell(verdict)
            return verdict

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(judge_one, trials))


@contextmanager
def _copy_of_the_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hp_sharding_mutants_") as directory:
        tree = Path(directory)
        for name in _COPIED:
            source = REPO_ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=_LEFT_OUT)
            else:
                shutil.copy(source, tree / name)
        yield tree


def _time_unbroken(tree: Path, tests: Sequence[str]) -> float:
    """Seconds that the tests take. They must pass, and on the copy, whatever is installed."""
    if not tests:
        raise MutationError("no unit test is named after this module or imports from it: name some with --tests")
    look = "import importlib.util; print(importlib.util.find_spec('hp_sharding').origin)"
    origin = Path(_run(tree, ["-c", look], _START_S).stdout.strip())
    if not origin.is_relative_to(tree):
        raise MutationError(f"the tests of the copy in {tree} import {origin}")
    begin_s = time.monotonic()
    found = _pytest(tree, tests, timeout_s=600)
    if found.returncode != 0:
        raise MutationError(f"the tests fail without any mutant:\n{found.stdout[-3000:]}{found.stderr[-1000:]}")
    return time.monotonic() - begin_s


def _try(tree: Path, trial: Trial, limit_s: float) -> Verdict:
    path = tree / trial.module
    source = path.read_text()
    path.write_text(trial.mutant.source)
    begin_s = time.monotonic()
    try:
        caught = _pytest(tree, trial.tests, timeout_s=limit_s).returncode != 0
    except subprocess.TimeoutExpired:
        caught = True
    finally:
        path.write_text(source)
    return Verdict(trial.mutant, caught, time.monotonic() - begin_s)


def _pytest(tree: Path, tests: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
    return _run(tree, ["-m", "pytest", *options, *tests], timeout_s)


def _run(tree: Path, arguments: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Python in the copy. No compiled files: one of the mutant before could pass for that of the next."""
    env = {**os.environ, **machine_env(), "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
