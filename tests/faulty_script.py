"""A training script to which something happens: on one rank, in one phase. Run by ``tests/faults.py``.

faulty_script.py PLAN: the plan, a ``Plan`` as JSON, says what; each rank keeps a journal in the plan's folder. The same
script is used under Paddle's launcher and without it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

from hp_sharding import checkpoint, fleet
from hp_sharding.errors import CommError

STEPS = 6
STRUCK_IN_STEP = 2
WIDTH = 96
PHASES = ("wrapping", "forward", "backward", "before step", "step", "saving", "loading", "evaluating")
FAULTS = ("killed", "stopped", "raises", "exits", "late", "cut")


class Plan(NamedTuple):
    """What happens.

    Attributes:
        folder: for journals and checkpoints.
        fault: one of ``FAULTS``.
        phase: one of ``PHASES``: where.
        rank: to whom.
        stage: of sharding.
        n_replicas: among how many replicas the ranks are divided.
        timeout_s: the setting.
        late_s: how long a late rank sleeps.
    """

    folder: str
    fault: str
    phase: str
    rank: int
    stage: int
    n_replicas: int
    timeout_s: float
    late_s: float


class Journal:
    """What a rank writes down, each line at once: what happened, and when."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = Path(folder, f"journal-{rank}")

    def note(self, what: str, text: str = "") -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([what, time.time(), text]) + "\n")


class Fate:
    """Lets it happen, once."""

    def __init__(self, plan: Plan, rank: int, journal: Journal) -> None:
        self._plan = plan
        self._rank = rank
        self._journal = journal
        self.armed = plan.phase == "wrapping"

    def pass_by(self, phase: str) -> None:
        """Called in each phase, again and again."""
        if not self.armed or phase != self._plan.phase or self._rank != self._plan.rank:
            return
        self.armed = False
        self._journal.note("fault")
        getattr(self, f"_{self._plan.fault}")()

    def _killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stopped(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _raises(self) -> None:
        raise ArithmeticError("a mistake of the script")

    def _exits(self) -> None:
        sys.exit(3)

    def _late(self) -> None:
        time.sleep(self._plan.late_s)

    def _cut(self) -> None:
        """Goes on once its link is down."""
        while not Path(self._plan.folder, "is-cut").exists():
            time.sleep(0.01)


class Block(nn.Layer):
    """A layer in whose forward and backward it may happen."""

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._fate = fate

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self._fate.pass_by("forward" if self.training else "evaluating")
        out = paddle.tanh(self.linear(x))
        if not out.stop_gradient:
            out.register_hook(self._pass_on)
        return out

    def _pass_on(self, gradient: paddle.Tensor) -> None:
        self._fate.pass_by("backward")


class Optimizer(paddle.optimizer.SGD):
    """One in whose update it may happen."""

    def __init__(self, fate: Fate, parameters: list[Any]) -> None:
        super().__init__(0.05, parameters=parameters)
        self._fate = fate
        self._calls = 0

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> Any:
        self._calls += 1
        if self._calls % 2 == 0:  # not the first of a step: some gathers have started
            self._fate.pass_by("step")
        return super()._append_optimize_op(block, param_and_grad)


def _batches(fate: Fate, rank: int) -> Iterator[paddle.Tensor]:
    for step in range(STEPS):
        fate.armed = fate.armed or step == STRUCK_IN_STEP
        fate.pass_by("loading")
        yield paddle.to_tensor(np.random.default_rng([step, rank]).standard_normal([4, WIDTH], dtype=np.float32))


def _save_through(fate: Fate) -> None:
    """Half of a share is written when it happens."""
    write = checkpoint.folder.Save.write

    def write_and_pass(self: Any, pieces: Any) -> None:
        *first, middle, last = pieces
        write(self, [*first, middle._replace(blocks=lambda: pass_by_and_give(middle)), last])

    def pass_by_and_give(piece: Any) -> Any:
        fate.pass_by("saving")
        return piece.blocks()

    checkpoint.folder.Save.write = write_and_pass  # type: ignore[method-assign]


def _wrap(plan: Plan, fate: Fate) -> tuple[nn.Layer, Any]:
    strategy = fleet.DistributedStrategy()
    degree = paddle.distributed.get_world_size() // plan.n_replicas
    strategy.hybrid_configs = {"dp_degree": plan.n_replicas, "sharding_degree": degree}
    strategy.hp_sharding_configs = {
        "stage": plan.stage,
        "timeout_s": plan.timeout_s,
        "allgather_overlap": True,
        "reduce_overlap": True,
        "comm_buffer_size_MB": 0.04,
    }
    fleet.init(is_collective=True, strategy=strategy)
    model = nn.Sequential(*[Block(fate) for _ in range(4)])
    fate.pass_by("wrapping")
    model = fleet.distributed_model(model)
    return model, fleet.distributed_optimizer(Optimizer(fate, model.parameters()))


def train(plan: Plan, fate: Fate, rank: int) -> None:
    """Everything a script does, several times over."""
    model, optimizer = _wrap(plan, fate)
    for step, batch in enumerate(_batches(fate, rank)):
        model(batch).square().mean().backward()
        fate.pass_by("before step")
        optimizer.step()
        optimizer.clear_grad()
        if step % 2 == 0:
            checkpoint.save(f"{plan.folder}/step-{step}", model, optimizer)
        model.eval()
        with paddle.no_grad():
            model(batch)
        model.train()


def main() -> None:
    """One rank."""
    plan = Plan(**json.loads(sys.argv[1]))
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    journal = Journal(plan.folder, rank)
    journal.note("pid", str(os.getpid()))
    fate = Fate(plan, rank, journal)
    _save_through(fate)
    try:
        train(plan, fate, rank)
    except CommError as error:
        journal.note("error", str(error))
        raise
    journal.note("over")


if __name__ == "__main__":
    main()
