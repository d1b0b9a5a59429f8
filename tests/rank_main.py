"""A rank of the test harness: imports Paddle, says that it is ready, then does what it is sent. See ``harness.py``."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.harness import Job, Report

_PR_SET_PDEATHSIG = 1
_LISTEN = "0A"


def main(argv: list[str]) -> int:
    """Serves one job, or with ``--reuse`` every job until the pipe closes. Returns the exit code."""
    pipe: connection.Connection[Any, Any] = connection.Connection(int(argv[0]))
    os.dup(int(argv[0]))  # never closed, so that the end of file means the end of the process, exit handlers and all
    # A rank must not outlive pytest, however that ends; inside a collective it would not notice the closed pipe.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    rank, nranks = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    ready = _attempt(lambda: _prepare(rank, nranks, init="--init" in argv))
    pipe.send(ready)
    while ready.error is None:
        try:
            job: Job = pipe.recv()
        except EOFError:
            break
        report = _serve(rank, nranks, job)
        pipe.send(report)
        if "--reuse" not in argv:
            return 0 if report.error is None else 1
    return 0


def _attempt(action: Any) -> Report:
    from tests.harness import Report

    try:
        return Report(pickle.dumps(action()), None)
    except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt are failures of the test as well
        return Report(None, "".join(traceback.format_exception(error)))


def _prepare(rank: int, nranks: int, *, init: bool) -> None:
    import paddle

    faulthandler.enable()
    if init and nranks > 1:
        if rank > 0:
            store = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
            _await_listener(int(store.rsplit(":", 1)[1]))
        paddle.distributed.init_parallel_env()
    _keep_groups()
    gc.collect()
    gc.freeze()  # what Paddle's import made need not be looked at again by the collection after every job


def _await_listener(port: int) -> None:
    """Waits until rank 0's store listens. A rank that tries earlier tries again only three seconds later."""
    wanted = f":{port:04X}"
    deadline = time.monotonic() + 20.0
    tables = [table for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.exists()]
    while tables and time.monotonic() < deadline:
        rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
        if any(row[1].endswith(wanted) and row[3] == _LISTEN for row in rows):
            return
        time.sleep(0.01)


def _keep_groups() -> None:
    """Makes Paddle build the groups of one set of degrees once per process: its ``fleet.init`` takes 0.55 s for it."""
    from paddle.distributed.fleet.fleet import Fleet

    create = Fleet._create_hcg
    kept: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def create_once(self: Any, names: list[str], dims: list[int]) -> Any:
        import paddle.distributed.fleet.base.topology as topology

        key = (*names, *dims)
        if key not in kept:
            hcg = create(self, names, dims)
            kept[key] = (hcg, self._topology)
        hcg, self._topology = kept[key]
        topology._HYBRID_PARALLEL_GROUP = hcg
        return hcg

    Fleet._create_hcg = create_once


def _serve(rank: int, nranks: int, job: Job) -> Report:
    def call() -> Any:
        fn, args = pickle.loads(job.call)
        with _clean_slate(), _environment(job.env):
            return fn(rank, nranks, *args)

    report = _attempt(call)
    gc.collect()  # a model of one test, its threads and its memory must not live on in the next
    sys.stdout.flush()
    sys.stderr.flush()
    return report


@contextlib.contextmanager
def _clean_slate() -> Iterator[None]:
    import numpy as np
    import paddle
    import paddle.distributed.fleet.base.topology as topology
    from paddle.utils import unique_name

    topology._HYBRID_PARALLEL_GROUP = None
    ours = sys.modules.get("hp_sharding.fleet")
    if ours is not None:
        ours._SESSION = ours.Session()  # type: ignore[attr-defined]
    paddle.seed(0)
    np.random.seed(0)
    random.seed(0)
    dtype = paddle.get_default_dtype()
    try:
        with unique_name.guard():
            yield
    finally:
        paddle.set_default_dtype(dtype)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
