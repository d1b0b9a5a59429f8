"""Starts a job again and again, as a script does: fleet.init with its groups, wrapping, three steps, the end.

Groups that are made at about the same time are what may collide, so every start is new processes that all begin at
once. A start has failed if a rank raises, hangs, ends with anything but 0 or complains, or if it trains to other bits
than the first start.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hp_sharding import fleet, full_parameters
from tests import harness
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.training import digest

STEPS = 3
TIMEOUT_S = 90.0
COMPLAINTS = ("Traceback", "terminate called", "Fatal", "Aborted")


class Split(NamedTuple):
    """How the ranks are divided. Its text is as in ``2x2``: two replicas of two."""

    n_replicas: int
    n_shards: int

    @property
    def nranks(self) -> int:
        return self.n_replicas * self.n_shards

    def __str__(self) -> str:
        return f"{self.n_replicas}x{self.n_shards}"

    @classmethod
    def parse(cls, text: str) -> Split:
        """Reads such a text. Raises ValueError for any other."""
        n_replicas, n_shards = map(int, text.split("x"))
        if min(n_replicas, n_shards) < 1:
            raise ValueError(text)
        return cls(n_replicas, n_shards)


class Came(NamedTuple):
    """What one rank reports: seconds, and a hash of the parameters after the last step."""

    init_s: float
    wrap_s: float
    steps_s: float
    digest: str


class Start(NamedTuple):
    """One start. Seconds are those of the slowest rank; NaN where none got that far.

    Attributes:
        faults: what went wrong, nothing if it is empty.
        init_s: in ``fleet.init``, which makes Paddle's groups.
        wrap_s: in wrapping model and optimizer, which makes ours.
        steps_s: in the three steps.
        exit_s: from the end of the script to the end of the process.
        total_s: all of it, with the start of Python and the import of Paddle.
    """

    faults: list[str]
    init_s: float
    wrap_s: float
    steps_s: float
    exit_s: float
    total_s: float


def start_many(
    count: int, split: Split, stage: int, *, tell: Callable[[int, Start], None] | None = None
) -> list[Start]:
    """Starts ``count`` jobs one after the other; ``tell`` hears of each as it ends."""
    starts: list[Start] = []
    expected: str | None = None
    for number in range(count):
        begin_s = time.monotonic()
        outcomes = harness.run(_script, split.nranks, split, stage, fresh=True, init=False, timeout_s=TIMEOUT_S)
        came = [outcome.result for outcome in outcomes if outcome.result is not None]
        expected = expected or next((each.digest for each in came), None)
        faults = [fault for outcome in outcomes for fault in _faults(outcome, expected)]
        starts.append(_summed_up(faults, came, outcomes, time.monotonic() - begin_s))
        if tell is not None:
            tell(number, starts[-1])
    return starts


def _script(rank: int, nranks: int, split: Split, stage: int) -> Came:
    times_s = [time.monotonic()]
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": split.n_replicas, "sharding_degree": split.n_shards}
    strategy.hp_sharding_configs = {"stage": stage, "allgather_overlap": True, "reduce_overlap": True}
    fleet.init(is_collective=True, strategy=strategy)
    times_s.append(time.monotonic())
    model = fleet.distributed_model(make_model("mlp"))
    optimizer = fleet.distributed_optimizer(make_optimizer("AdamW", model))
    times_s.append(time.monotonic())
    for step in range(STEPS):
        loss_of(model, make_batch("mlp", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
    times_s.append(time.monotonic())
    with full_parameters(model):
        found = digest(model)
    # The gathers of a last step may still be under way at the end of a script.
    loss_of(model, make_batch("mlp", STEPS, rank)).backward()
    optimizer.step()
    init_s, wrap_s, steps_s = (after - before for before, after in itertools.pairwise(times_s))
    return Came(init_s, wrap_s, steps_s, found)


def _faults(outcome: harness.Outcome, expected: str | None) -> list[str]:
    """What is wrong with one rank, as text that names it."""
    found = []
    if outcome.timed_out:
        found.append(f"hung, killed after {TIMEOUT_S:g} s\n{outcome.output[-4000:]}")
    elif outcome.error is not None:
        found.append(outcome.error)
    elif outcome.returncode != 0 or not outcome.reported:
        found.append(f"ended with {outcome.returncode}\n{outcome.output[-4000:]}")
    elif any(word in outcome.output for word in COMPLAINTS):
        found.append(f"complained\n{outcome.output[-4000:]}")
    elif outcome.result.digest != expected:
        found.append("trained to other parameters than the first rank of the first start")
    return [f"rank {outcome.rank} {text}" for text in found]


def _summed_up(faults: list[str], came: Sequence[Came], outcomes: Sequence[harness.Outcome], total_s: float) -> Start:
    return Start(
        faults,
        init_s=max((each.init_s for each in came), default=math.nan),
        wrap_s=max((each.wrap_s for each in came), default=math.nan),
        steps_s=max((each.steps_s for each in came), default=math.nan),
        exit_s=max(outcome.exit_s for outcome in outcomes),
        total_s=total_s,
    )


def table(starts: Sequence[Start]) -> str:
    """How many failed, and the times of those that did not: smallest, median and largest."""
    good = [start for start in starts if not start.faults]
    lines = [f"{len(starts) - len(good)} of {len(starts)} starts failed"]
    if good:
        lines.append(f"  {'seconds':<36}{'min':>8}{'median':>8}{'max':>8}")
    for field, what in _ROWS.items():
        values = [getattr(start, field) for start in good]
        if values:
            lines.append(f"  {what:<36}{min(values):8.2f}{statistics.median(values):8.2f}{max(values):8.2f}")
    return "\n".join(lines)


_ROWS = {
    "init_s": "fleet.init",
    "wrap_s": "wrapping",
    "steps_s": f"{STEPS} steps",
    "exit_s": "from the script's end to the process's",
    "total_s": "all, with Paddle's import",
}
