"""Runs tests again and again in one copy of the tree, each time in a child that need not import Paddle: a script.

It knows neither the package nor the tests, which a mutant changes: it imports what they all need and waits. A line of
JSON on its standard input is a job, and is answered by one on its standard output; see ``Job`` and ``Answer`` in
``tests/mutation/serving.py``. The job runs in a forked child. Whatever the child started has ended when the
answer comes, also processes that made sessions of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_TAIL_CHARS = 4000
_TOOK_TOO_LONG = -1


def main() -> int:
    """Serves until the input ends. Returns the exit code."""
    tree = Path.cwd()
    # The folder of this script is no place to import from.
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent)]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _import_what_tests_need()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    print(json.dumps({"ready": True}), file=answers, flush=True)  # noqa: T201
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), file=answers, flush=True)  # noqa: T201
    return 0


def _import_what_tests_need() -> None:
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401, ICN001
    import paddle  # noqa: F401
    import pytest  # noqa: F401


def _serve(job: dict[str, Any]) -> dict[str, Any]:
    log = Path(job["log"])
    begin_s = time.monotonic()
    child = os.fork()
    if child == 0:
        os._exit(_run_in_child(job, log))
    code = _wait(child, job["limit_s"])
    _end_all(child)
    took_s = time.monotonic() - begin_s
    return {"code": code, "took_s": took_s, "output": log.read_text(errors="replace")[-_TAIL_CHARS:]}


def _wait(child: int, limit_s: float) -> int:
    """Exit code of the child; ``_TOOK_TOO_LONG`` if there is none in time."""
    descriptor = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(1000 * limit_s):
            return _TOOK_TOO_LONG
    finally:
        os.close(descriptor)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


def _end_all(child: int) -> None:
    """Kills the child's process group, then what else it left behind: orphans become ours."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    while True:
        ours = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for pid in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _run_in_child(job: dict[str, Any], log: Path) -> int:
    try:
        os.setsid()
        with log.open("wb") as out, Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        # What is compiled of a mutant must not pass for the module; tests that are not changed may keep theirs.
        sys.dont_write_bytecode = not job["keeps_bytecode"]
        os.environ["PYTHONDONTWRITEBYTECODE"] = "" if job["keeps_bytecode"] else "1"
        code = _pytest(job)
    except BaseException:  # noqa: BLE001 - whatever it is, the child must not go on as a second server
        traceback.print_exc()
        code = 3
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return int(code)


def _pytest(job: dict[str, Any]) -> int:
    import pytest

    plugins: list[Any] = []
    if job["covering"]:
        from tests.mutation.covering import Covering

        plugins.append(Covering(Path.cwd(), Path(job["covering"])))
    return pytest.main([*job["options"], *job["tests"]], plugins)


if __name__ == "__main__":
    sys.exit(main())
