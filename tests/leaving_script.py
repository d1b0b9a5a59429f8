"""A training script that ends in one of several ways, right after a ``step()`` whose gathers are under way.

leaving_script.py LEAVE: a ``Leave`` as JSON. What is written to stderr after the line ``MARK`` belongs to the end, and
the folder gets a file ``ready-<rank>`` when it comes, and ``threads-<rank>`` with the threads that the very last exit
handler found.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

MARK = "==== leaving"
HOWS = ("returns", "raises", "exit 0", "exit 3", "interrupt", "terminate")
WIDTH = 900
_AT_MOST_S = 60.0
_DISK_S = 1.0


class Leave(NamedTuple):
    """How it ends.

    Attributes:
        folder: for the files.
        how: one of ``HOWS``; the last two wait for a signal, and train on meanwhile.
        inside: "", or in the middle of what: "full_parameters", "no_sync", "save", "timeline".
        stage: of sharding; 0 for plain Paddle in one process.
        n_replicas: among how many replicas the ranks are divided.
    """

    folder: str
    how: str
    inside: str
    stage: int
    n_replicas: int


def _tell_threads(folder: str, rank: str) -> None:
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    Path(folder, f"threads-{rank}").write_text("\n".join(names))


def _wrap(leave: Leave, model: Any, inner: Any) -> tuple[Any, Any]:
    if not leave.stage:
        return model, inner
    import paddle

    from hp_sharding import fleet

    strategy = fleet.DistributedStrategy()
    degree = paddle.distributed.get_world_size() // leave.n_replicas
    strategy.hybrid_configs = {"dp_degree": leave.n_replicas, "sharding_degree": degree}
    strategy.hp_sharding_configs = {
        "stage": leave.stage,
        "allgather_overlap": True,
        "reduce_overlap": True,
        "timeline": leave.inside == "timeline",
    }
    fleet.init(is_collective=True, strategy=strategy)
    return fleet.distributed_model(model), fleet.distributed_optimizer(inner)


def _enter(leave: Leave, model: Any, optimizer: Any) -> Any:
    """In the middle of something; the caller holds it."""
    import hp_sharding

    if leave.inside == "full_parameters":
        context = hp_sharding.full_parameters(model)
        context.__enter__()
        return context
    if leave.inside == "no_sync":
        context = optimizer.no_sync()
        context.__enter__()
        return context
    if leave.inside == "save":
        write = hp_sharding.checkpoint.folder.Save.write

        def write_slowly(self: Any, pieces: Any) -> None:
            time.sleep(_DISK_S)
            write(self, pieces)

        hp_sharding.checkpoint.folder.Save.write = write_slowly  # type: ignore[method-assign]
        return hp_sharding.save(f"{leave.folder}/checkpoint", model, optimizer, asynchronous=True)
    return None


def main() -> None:
    """One rank."""
    leave, rank = Leave(**json.loads(sys.argv[1])), os.environ.get("PADDLE_TRAINER_ID", "0")
    # Whoever starts this in the background may have had it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The first to be registered is the last to be called.
    atexit.register(_tell_threads, leave.folder, rank)
    import paddle

    model = paddle.nn.Sequential(*[paddle.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    model, optimizer = _wrap(leave, model, paddle.optimizer.SGD(0.01, parameters=model.parameters()))

    def train() -> None:
        model(paddle.rand([2, WIDTH])).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()

    train()
    train()
    held = _enter(leave, model, optimizer) if leave.stage else None
    sys.stderr.write(f"{MARK}\n")
    sys.stderr.flush()
    Path(leave.folder, f"ready-{rank}").touch()
    begin_s = time.monotonic()
    while leave.how in ("interrupt", "terminate") and time.monotonic() - begin_s < _AT_MOST_S:
        train()
    if leave.how == "raises":
        raise ArithmeticError("a mistake of the script")
    if leave.how.startswith("exit"):
        sys.exit(int(leave.how[-1]))
    del held


if __name__ == "__main__":
    main()
