"""What hp_sharding's hooks and states cost the processor, where there is nothing to compute and nothing to send.

    python -m benchmarks.overhead            # about a minute; no root needed
    python -m benchmarks.overhead --json

100 layers ``Linear(16, 16)``, each a unit and a bucket of its own, batch 4, on a group of one: every gather and every
reduction is there, as a copy of a kilobyte inside this process. So what a step takes longer than the same step of plain
Paddle is the cost of the hooks, the states and the calls, for each layer. Steps are whole: forward, backward,
``step()``, ``clear_grad()``. Plain and sharded models take turns in one process; every figure is a median over turns.
Where ``benchmarks.peers.environment`` has made an environment with PyTorch, its FSDP2 is asked the same afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import operator
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.circumstances import machine
from benchmarks.peers import environment
from benchmarks.quiet import Meter, await_quiet
from benchmarks.turns import ROOT

if TYPE_CHECKING:
    import paddle

LAYERS = 100
WIDTH = 16
BATCH = 4
BUCKET_BYTES = 1536
"""Holds the weight and the bias of one layer, and not those of two."""
RATE = 1e-5
"""Learning rate: so small that a hundred layers in a row stay finite, however many steps are asked for."""
TARGET_US = 60.0
"""Of stage 2 with both overlaps and SGD, for each layer and step over plain Paddle."""
FOREIGN_LIMIT = 0.03
"""Share of the processor that other programs may take; beyond it a round is repeated while patience lasts."""

_OVERLAPS = {"allgather_overlap": True, "reduce_overlap": True}


class Row(NamedTuple):
    """One way of training.

    Attributes:
        title: for the table.
        optimizer: Paddle's class.
        flags: for ``ShardingConfig``; None for plain Paddle.
        recorded: steps of it have been recorded before, and the timeline is off again.
    """

    title: str
    optimizer: str
    flags: dict[str, Any] | None
    recorded: bool = False


ROWS = {
    "plain_sgd": Row("plain Paddle, SGD", "SGD", None),
    "stage2_overlap": Row("stage 2, overlap", "SGD", {"stage": 2, **_OVERLAPS}),
    "stage2_recorded": Row("stage 2, overlap, timeline off again", "SGD", {"stage": 2, **_OVERLAPS}, recorded=True),
    "stage2_timeline": Row("stage 2, overlap, timeline on", "SGD", {"stage": 2, **_OVERLAPS, "timeline": True}),
    "stage2": Row("stage 2, no overlap", "SGD", {"stage": 2}),
    "reshard": Row("stage 2, overlap, reshard_after_step", "SGD", {**_OVERLAPS, "reshard_after_step": True}),
    "stage3_overlap": Row("stage 3, overlap", "SGD", {"stage": 3, **_OVERLAPS}),
    "stage3_recorded": Row("stage 3, overlap, timeline off again", "SGD", {"stage": 3, **_OVERLAPS}, recorded=True),
    "stage3_timeline": Row("stage 3, overlap, timeline on", "SGD", {"stage": 3, **_OVERLAPS, "timeline": True}),
    "stage1_overlap": Row("stage 1, overlap", "SGD", {"stage": 1, **_OVERLAPS}),
    "plain_adamw": Row("plain Paddle, AdamW", "AdamW", None),
    "adamw_stage2_overlap": Row("stage 2, overlap, AdamW", "AdamW", {"stage": 2, **_OVERLAPS}),
}
"""By their names on the command line, in the order in which they take turns; each after the plain one it is held to."""


PEER_ROWS = {
    "torch_plain": "plain PyTorch, SGD",
    "torch_fsdp_keep": "PyTorch FSDP2, no reshard",
    "torch_fsdp": "PyTorch FSDP2, reshard",
}
"""What ``benchmarks.peers.torch_overhead`` measures, the plain one first."""


def main() -> None:
    """Runs the benchmark."""
    options = _options()
    # Before Paddle is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    course = _run(options)
    result = {
        **_circumstances(options),
        "foreign_cpu_share": statistics.fmean(course.shares),
        "rounds_repeated": course.repeated,
        "rows": {name: _row(turns, course.turns[_plain_of(name)]) for name, turns in course.turns.items()},
        "peer_rows": _peer_rows(options),
        "same_numbers": course.same_numbers,
    }
    ours = result["rows"].get("stage2_overlap")
    result["target_us"] = TARGET_US
    result["target_met"] = ours["over_plain_us"] <= TARGET_US if ours else None
    _print(result)
    if options.json:
        print(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Processor time of hp_sharding's hooks and states, a layer and step.")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each row in each round")
    parser.add_argument("--patience-s", type=float, default=60, help="seconds for waiting and for repeated rounds")
    parser.add_argument("--no-peers", action="store_true", help="leaves PyTorch out, even where it is there")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    needed = {_plain_of(name) for name in options.rows}
    options.rows = [name for name in ROWS if name in needed or name in options.rows]
    return options


def _plain_of(name: str) -> str:
    return f"plain_{ROWS[name].optimizer.lower()}"


# -- training ----------------------------------------------------------------------------------------------------------


class Phases(NamedTuple):
    """Milliseconds of one step; ``update`` is ``step()`` and ``clear_grad()``."""

    forward: float
    backward: float
    update: float


class Trainee:
    """A model that is trained in turns with others.

    Attributes:
        parameters: of the model.
    """

    def __init__(self, row: Row) -> None:
        import paddle

        paddle.seed(0)
        self._model = paddle.nn.Sequential(*[paddle.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.parameters = self._model.parameters()
        self._batch = paddle.randn([BATCH, WIDTH])
        self._optimizer = getattr(paddle.optimizer, row.optimizer)(learning_rate=RATE, parameters=self.parameters)
        self._schedule: Any = None
        if row.flags is not None:
            self._shard(row.flags)
        self._records = row.recorded

    def _shard(self, flags: dict[str, Any]) -> None:
        from hp_sharding import ShardingConfig, backward, sharding
        from hp_sharding.comm import Communicator
        from hp_sharding.comm.local import LocalCommunicator

        config = ShardingConfig(comm_buffer_size_MB=BUCKET_BYTES / 2**20, **flags)
        # ``shard()`` would see that there is one rank and leave everything to plain Paddle.
        lanes: dict[str, Communicator] = {name: LocalCommunicator(name, (0,)) for name in sharding.LANES}
        self._optimizer = sharding.build(self._model, self._optimizer, config, lanes=lanes, lay_out=_plan_unmerged)
        assert len(self._optimizer.buffers) == LAYERS
        self._schedule = self._optimizer._schedule
        backward.detach(self._schedule)

    def take_turn(self, steps: int) -> list[Phases]:
        """Times of ``steps`` steps, after one that warms up."""
        from hp_sharding import backward

        if self._schedule is not None:
            # Every wrapped model is told of every backward of the process; those of others would count here too.
            backward.attach(self._schedule)
        try:
            with self._optimizer.timeline.record(steps=1) if self._records else contextlib.nullcontext():
                self._step()
            return [self._step() for _ in range(steps)]
        finally:
            if self._schedule is not None:
                backward.detach(self._schedule)

    def _step(self) -> Phases:
        times_s = [time.perf_counter()]
        loss: paddle.Tensor = self._model(self._batch).mean()
        times_s.append(time.perf_counter())
        loss.backward()
        times_s.append(time.perf_counter())
        self._optimizer.step()
        self._optimizer.clear_grad()
        times_s.append(time.perf_counter())
        return Phases(*((end - begin) * 1e3 for begin, end in itertools.pairwise(times_s)))


def _plan_unmerged(specs: Any, names: Any, rules: Any) -> Any:
    """Each layer keeps a bucket to itself: stages 1 and 2 would otherwise also cut up the first and the last."""
    from hp_sharding.layout import plan_buckets

    return plan_buckets(specs, names, rules._replace(merge_units=False))


class Course(NamedTuple):
    """A run.

    Attributes:
        turns: of each row, by round, the times of each step.
        shares: of the processor, that other programs took during the rounds that count.
        repeated: rounds that do not count, because other programs took too much.
        same_numbers: whether every sharded model ends with the parameters of the plain one, bit for bit.
    """

    turns: dict[str, list[list[Phases]]]
    shares: list[float]
    repeated: int
    same_numbers: bool


def _run(options: argparse.Namespace) -> Course:
    import paddle

    paddle.set_device("cpu")
    trainees = {name: Trainee(ROWS[name]) for name in options.rows}
    _round(trainees, options.steps)
    turns: dict[str, list[list[Phases]]] = {name: [] for name in trainees}
    shares: list[float] = []
    repeated, patience_s = 0, options.patience_s
    while len(shares) < options.rounds:
        begin_s = time.monotonic()
        found, share = _round(trainees, options.steps)
        if share > FOREIGN_LIMIT and patience_s > 0:
            await_quiet(FOREIGN_LIMIT, patience_s)
            patience_s -= time.monotonic() - begin_s
            repeated += 1
            continue
        shares.append(share)
        for name, turn in found.items():
            turns[name].append(turn)
    same = all(_equal(trainee, trainees[_plain_of(name)]) for name, trainee in trainees.items())
    return Course(turns, shares, repeated, same)


def _round(trainees: dict[str, Trainee], steps: int) -> tuple[dict[str, list[Phases]], float]:
    """One turn of each, and the share of the processor that other programs took meanwhile."""
    with Meter() as meter:
        begin_s = time.process_time()
        found = {name: trainee.take_turn(steps) for name, trainee in trainees.items()}
        meter.own_s = time.process_time() - begin_s
    return found, meter.foreign_share()


def _equal(trainee: Trainee, plain: Trainee) -> bool:
    from hp_sharding import full_parameters

    with full_parameters(trainee._model):
        pairs = zip(trainee.parameters, plain.parameters, strict=True)
        return all((mine.numpy() == other.numpy()).all() for mine, other in pairs)


# -- what came of it ---------------------------------------------------------------------------------------------------


def _circumstances(options: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "benchmark": "overhead",
        "command": f"python -m benchmarks.overhead {' '.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "paddle": version("paddlepaddle"),
        "layers": LAYERS,
        "rounds": options.rounds,
        "steps": options.steps,
    }


def _peer_rows(options: argparse.Namespace) -> dict[str, Any]:
    """The same of PyTorch; nothing where there is no environment with it, or not asked for."""
    python = environment.interpreter()
    if not environment.is_made() or options.no_peers:
        return {}
    command = [str(python), "-W", "ignore", "-m", "benchmarks.peers.torch_overhead"]
    command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    kept = json.loads(found.stdout.splitlines()[-1])
    turns = {name: [[Phases(*step) for step in turn] for turn in kept[name]] for name in PEER_ROWS}
    plain = next(iter(turns.values()))
    return {name: _row(mine, plain) for name, mine in turns.items()}


def _row(mine: list[list[Phases]], plain: list[list[Phases]]) -> dict[str, Any]:
    """The whole step in milliseconds, and microseconds for each layer over the plain one in the same round."""
    medians = _medians(mine, sum)
    over_us = _over_us(mine, plain, sum)
    quartiles = statistics.quantiles(over_us, n=4)
    return {
        "step_ms": statistics.median(medians),
        "min_ms": min(medians),
        "max_ms": max(medians),
        "over_plain_us": statistics.median(over_us),
        "over_plain_quartiles_us": [quartiles[0], quartiles[2]],
        **{
            f"{phase}_over_plain_us": statistics.median(_over_us(mine, plain, operator.attrgetter(phase)))
            for phase in Phases._fields
        },
    }


def _medians(turns: list[list[Phases]], part: Callable[[Phases], float]) -> list[float]:
    """Milliseconds of that part of a step in each turn."""
    return [statistics.median(map(part, turn)) for turn in turns]


def _over_us(mine: list[list[Phases]], plain: list[list[Phases]], part: Callable[[Phases], float]) -> list[float]:
    """By how much that part is longer in each round, for each layer."""
    pairs = zip(_medians(mine, part), _medians(plain, part), strict=True)
    return [(ours - theirs) * 1e3 / LAYERS for ours, theirs in pairs]


def _print(result: dict[str, Any]) -> None:
    print(f"{result['machine']}; Paddle {result['paddle']}; {result['date']}; {LAYERS} layers, group of one")
    phases = "".join(f"{phase:>10}" for phase in Phases._fields)
    print(f"{'':<38}{'step, ms':>10}{'(min-max)':>15}{'over plain, us a layer':>25}{'(quartiles)':>15}{phases}")
    for name, row in result["rows"].items():
        _print_row(ROWS[name].title, row, is_plain=ROWS[name].flags is None)
    for name, row in result["peer_rows"].items():
        _print_row(PEER_ROWS[name], row, is_plain=name == "torch_plain")
    if not result["same_numbers"]:
        print("WARNING: a sharded model came to other parameters than the plain one")
    if result["target_met"] is not None:
        print(f"stage 2 with overlap: at most {TARGET_US:g} us: {'met' if result['target_met'] else 'missed'}")
    if result["foreign_cpu_share"] > FOREIGN_LIMIT:
        share = f"{100 * result['foreign_cpu_share']:.0f} %"
        print(f"WARNING: other programs took {share} of the processor meanwhile; measure again on a quiet machine")


def _print_row(title: str, row: dict[str, Any], *, is_plain: bool) -> None:
    line = f"{title:<38}{row['step_ms']:>10.2f}{row['min_ms']:>8.2f}-{row['max_ms']:<6.2f}"
    if not is_plain:
        low, high = row["over_plain_quartiles_us"]
        line += f"{row['over_plain_us']:>25.1f}{low:>9.1f}-{high:<5.1f}"
        line += "".join(f"{row[f'{phase}_over_plain_us']:>10.1f}" for phase in Phases._fields)
    print(line)


if __name__ == "__main__":
    main()
