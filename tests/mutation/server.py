"""Runs tests again and again in one copy of the tree, each time in a child that has imported everything: a script.

Its arguments are files of tests. It collects them once, imports the whole package, and waits. A line of JSON on its
standard input is a job, and is answered by one on its standard output; ``tests/mutation/serving.py`` says what is in
them. A job is done by a forked child: it gives the functions of one module the code of a mutant, and runs tests. What
the child started has ended when the answer comes, also processes that made sessions of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import sys
import time
import traceback
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CANNOT, NO_SUCH_TEST, FAILED, PASSED, TOOK_TOO_LONG = 98, 4, 1, 0, -1
_PR_SET_CHILD_SUBREAPER = 36
_TAIL_CHARS = 4000
_Key = tuple[str, str, int]
"""Of a function: file, name and first line, which a mutant does not change."""


class _Culprits:
    """Writes into a file which test runs, and at the end of each which ones have failed: what was killed is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.failed: list[str] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._path.write_text("\n".join([*self.failed, nodeid]))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_logfinish(self) -> None:
        self._path.write_text("\n".join(self.failed))


class Loop:
    """What stands in for pytest's own loop over the tests it has collected."""

    def __init__(self, answers: Any) -> None:
        self._answers = answers
        self._functions: dict[_Key, list[types.FunctionType]] = defaultdict(list)
        self._items: dict[str, pytest.Item] = {}
        self._by_file: dict[str, list[pytest.Item]] = defaultdict(list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            for name in (item.nodeid, item.nodeid.partition("[")[0]):
                self._items.setdefault(name, item)
            self._by_file[item.nodeid.partition("::")[0]].append(item)
            self._by_file[item.nodeid.partition("[")[0]].append(item)
        self._find_functions()
        gc.collect()
        gc.freeze()
        self._answer({"ready": True})
        for line in sys.stdin:
            self._answer(self._serve(json.loads(line)))
        return True

    def _find_functions(self) -> None:
        package = importlib.import_module("hp_sharding")
        for module in pkgutil.walk_packages(package.__path__, "hp_sharding."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        for thing in gc.get_objects():
            if isinstance(thing, types.FunctionType) and "/hp_sharding/" in thing.__code__.co_filename:
                self._functions[_key(thing.__code__)].append(thing)

    def _answer(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)

    def _serve(self, job: dict[str, Any]) -> dict[str, Any]:
        culprits = Path(job["culprits"])
        culprits.write_text("")
        begin_s = time.monotonic()
        child = os.fork()
        if child == 0:
            os._exit(self._run_in_child(job))
        code = _wait(child, job["limit_s"])
        _end_all(child)
        output = Path(job["log"]).read_text(errors="replace")[-_TAIL_CHARS:]
        took_s = time.monotonic() - begin_s
        return {"code": code, "took_s": took_s, "output": output, "culprits": culprits.read_text().splitlines()}

    def _run_in_child(self, job: dict[str, Any]) -> int:
        try:
            os.setsid()
            _redirect(Path(job["log"]))
            # Processes that tests start read the mutant's file, and what is compiled of it must not be kept.
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            if job["broken"] and not self._put_in(Path(job["broken"])):
                return CANNOT
            return self._run_tests(job)
        except BaseException:  # noqa: BLE001 - whatever it is, the child must not go on as a second server
            traceback.print_exc()
            return FAILED
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def _put_in(self, path: Path) -> bool:
        """Gives functions the code of the file as it is now. False if that does not show: then it runs at import."""
        shown = False
        for code in _codes(compile(path.read_text(), str(path), "exec")):
            for function in self._functions.get(_key(code), ()):
                if function.__code__ != code:
                    try:
                        function.__code__ = code
                    except ValueError:  # of a closure that has lost one of its variables
                        return False
                    shown = True
        return shown

    def _run_tests(self, job: dict[str, Any]) -> int:
        items = list(dict.fromkeys(item for name in job["tests"] for item in self._named(name)))  # none runs twice
        if not items:
            return NO_SUCH_TEST
        plugins: list[Any] = [_Culprits(Path(job["culprits"]))]
        if job["covering"]:
            from tests.mutation.covering import Covering

            plugins.append(Covering(Path.cwd(), Path(job["covering"])))
            items = [item for item in items if item.get_closest_marker("slow") is None]
        config = items[0].config
        for plugin in plugins:
            config.pluginmanager.register(plugin)
        for item, following in zip(items, [*items[1:], None], strict=True):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if plugins[0].failed and not job["covering"]:
                return FAILED
        if job["covering"]:
            plugins[1].finish()
        return FAILED if plugins[0].failed else PASSED

    def _named(self, name: str) -> list[pytest.Item]:
        """One item, or all of a file, or all of a test that has parameters."""
        if "::" not in name or "[" not in name:
            return self._by_file.get(name, [])
        return [self._items[name]] if name in self._items else []


def _key(code: types.CodeType) -> _Key:
    return code.co_filename, code.co_name, code.co_firstlineno


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _redirect(log: Path) -> None:
    with log.open("wb") as out, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)


def _wait(child: int, limit_s: float) -> int:
    """Exit code of the child; ``TOOK_TOO_LONG`` if there is none in time."""
    descriptor = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(1000 * limit_s):
            return TOOK_TOO_LONG
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _end_all(child: int) -> None:
    """Kills the child's process group, then what else it left behind: orphans become ours."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    while True:
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main() -> int:
    """Serves until the input ends. Returns the exit code."""
    here = Path(__file__).resolve().parent
    # The folder of this script is no place to import from.
    sys.path[:] = [str(Path.cwd()), *(path for path in sys.path if Path(path).resolve() != here)]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return int(pytest.main(sys.argv[1:], plugins=[Loop(answers)]))


if __name__ == "__main__":
    sys.exit(main())
