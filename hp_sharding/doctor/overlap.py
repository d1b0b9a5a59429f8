"""How much of the communication of a training step is hidden behind its compute.

The model is made for the link: a forward takes about as long as all gathers, and a backward longer than all
reductions, so that nearly all could be hidden, and what is not shows. Times are those of whole steps by the clock on
the wall, which is right on every device.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

from ..config import ShardingConfig
from ..sharding import shard
from .parity import groups
from .ranks import Team
from .report import MB, Request, Spread

_LAYERS = 12
COMPUTE_FACTOR = 1.5
"""How much longer compute takes than communication: a forward is a third of it, gathers are half of that."""
_TARGET_MS = {False: 100.0, True: 40.0}
"""Communication of a step, where ``--max-mb`` allows a model that large."""
_LEAST_MB = 8.0
_MOST_ROWS = 1 << 14
_PROBES = 3
_STEPS = 3
_ROUNDS = {False: 15, True: 5}
_BUDGET_S = {False: 15.0, True: 5.0}
_LEAST_ROUNDS = 3
_DISTURBED_SHARE = 0.9
_TOO_SHORT_SHARE = 0.05
"""Of the compute: where communication makes a step longer by no more than this, there is nothing to hide."""


class Row(NamedTuple):
    """One way of sharding. A step's times are medians over rounds of the slowest rank.

    Attributes:
        case: such as ``"stage 2, 2 replicas"``.
        compute_ms: the same step without any communication.
        serial_ms: with communication after compute.
        overlapped_ms: with communication behind compute.
        lanes_ms: how long each lane was busy in an overlapped step, and ``exposed``, how long compute waited for one.
    """

    case: str
    compute_ms: Spread
    serial_ms: Spread
    overlapped_ms: Spread
    lanes_ms: dict[str, float]

    @property
    def communication_ms(self) -> float:
        """By how much communication makes a step longer where nothing hides it."""
        return max(0.0, self.serial_ms.median - self.compute_ms.median)

    @property
    def is_disturbed(self) -> bool:
        """Whether an overlapped step took less than its own compute, which only other programs can bring about."""
        return self.overlapped_ms.median < _DISTURBED_SHARE * self.compute_ms.median

    @property
    def hidden_percent(self) -> float | None:
        """The part of that which overlapping takes away; None where that cannot be told."""
        if self.is_disturbed or self.communication_ms < _TOO_SHORT_SHARE * self.compute_ms.median:
            return None
        hidden = (self.serial_ms.median - self.overlapped_ms.median) / self.communication_ms
        return 100 * min(1.0, max(0.0, hidden))


class Overlap(NamedTuple):
    """All ways.

    Attributes:
        parameters_mb: of the model, in units of 2**20 bytes.
        batch_rows: of a rank, chosen so that compute takes ``COMPUTE_FACTOR`` times as long as communication.
        rounds: in which all ways took turns.
        on_cpu: whether transfers take the time of the processor that computes.
        rows: of each way.
    """

    parameters_mb: float
    batch_rows: int
    rounds: int
    on_cpu: bool
    rows: list[Row]

    @property
    def passed(self) -> bool:
        """Always: slow is not wrong."""
        return True

    @property
    def verdict(self) -> str:
        """In one or two sentences."""
        parts = [_said(row) for row in self.rows]
        note = " A transfer on CPU takes processor time itself, which nothing can hide." if self.on_cpu else ""
        return "; ".join(parts) + "." + note


def _said(row: Row) -> str:
    if row.is_disturbed:
        return f"{row.case}: cannot be told, since compute alone took longer than a whole step; measure it again"
    if row.hidden_percent is None:
        return f"{row.case}: too little communication to tell"
    return f"{row.case}: {row.hidden_percent:.0f} % of {row.communication_ms:.3g} ms of communication hidden"


# -- measuring ---------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Of the model: a square layer after the other, each a bucket of its own."""

    width: int
    batch_rows: int

    @property
    def layer_mb(self) -> float:
        """In units of 2**20 bytes."""
        return self.width * self.width * 4 / MB


def measure(team: Team, request: Request) -> dict[str, Any]:
    """Milliseconds a step of each way in each round on this rank, and of each lane."""
    width = _fitting_width(team, request)
    communication_ms = _communication_ms(team, width)
    shape = Shape(width, _fitting_rows(team, width, COMPUTE_FACTOR * communication_ms))
    replicas = [1, 2] if team.has_replicas else [1]
    trainees = {f"compute {number}": _Trainee(team, shape, number, None) for number in replicas}
    for number in replicas:
        trainees[f"serial {number}"] = _Trainee(team, shape, number, False)
        trainees[f"overlapped {number}"] = _Trainee(team, shape, number, True)
    rounds = _take_turns(team, trainees, request)
    trainees.clear()
    lanes = {str(number): _lanes(team, shape, number) for number in replicas}
    team.line_up()
    return {"width": width, "batch_rows": shape.batch_rows, "replicas": replicas, "rounds": rounds, "lanes": lanes}


def conclude(everyone: list[dict[str, Any]], *, on_cpu: bool) -> Overlap:
    """The slowest rank of each round."""
    first = everyone[0]

    def spread(name: str) -> Spread:
        return Spread.of([max(times) for times in zip(*(found["rounds"][name] for found in everyone), strict=True)])

    rows = [
        Row(
            case="stage 2" if number == 1 else f"stage 2, {number} replicas",
            compute_ms=spread(f"compute {number}"),
            serial_ms=spread(f"serial {number}"),
            overlapped_ms=spread(f"overlapped {number}"),
            lanes_ms=first["lanes"][str(number)],
        )
        for number in first["replicas"]
    ]
    parameters_mb = Shape(first["width"], 0).layer_mb * _LAYERS
    return Overlap(parameters_mb, first["batch_rows"], len(first["rounds"]["compute 1"]), on_cpu, rows)


class _Trainee:
    """A model that is trained in turns with others: ``overlap`` None without communication, else with or without it."""

    def __init__(
        self, team: Team, shape: Shape, n_replicas: int, overlap: bool | None, *, timeline: bool = False
    ) -> None:
        self._team = team
        self._net = _make_net(shape.width)
        self.use_batch(shape)
        params = self._net.parameters()
        if overlap is None:
            # As a rank of a sharded model: it updates its part, and drops the other gradients as they come.
            n_updated = math.ceil(len(params) / (team.n_ranks // n_replicas))
            params, others = params[:n_updated], params[n_updated:]
            for param in others:
                param._register_backward_hook(_dropping_gradient(param))
        self.optimizer: Any = paddle.optimizer.SGD(learning_rate=1e-6, parameters=params)
        if overlap is not None:
            config = ShardingConfig(
                stage=2,
                allgather_overlap=overlap,
                reduce_overlap=overlap,
                comm_buffer_size_MB=shape.layer_mb,
                replicate_buffer_size_MB=shape.layer_mb,
                timeline=timeline,
                timeout_s=team.timeout_s,
            )
            self.optimizer = shard(self._net, self.optimizer, config, **groups(team.me, team.n_ranks, n_replicas))

    def use_batch(self, shape: Shape) -> None:
        """Trains on a batch of that many rows from now on."""
        self._batch = paddle.ones([shape.batch_rows, shape.width], "float32")

    def take_turn(self, steps: int) -> float:
        """Milliseconds a step, after one that is not timed. Collective."""
        self._team.line_up()
        self._step()
        # Compute only: gathers of the step before are under way when one begins, and when the last one ends.
        self._team.settle()
        begin_s = time.perf_counter()
        for _ in range(steps):
            self._step()
        self._team.settle()
        return (time.perf_counter() - begin_s) * 1e3 / steps

    def _step(self) -> None:
        loss = self._net(self._batch).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad(set_to_zero=False)


def _dropping_gradient(param: paddle.Tensor) -> Callable[[], None]:
    # Weakly: the hook belongs to the parameter, which would otherwise never go.
    reference = weakref.ref(param)

    def drop() -> None:
        living = reference()
        if living is not None:
            living.clear_gradient(False)

    return drop


def _make_net(width: int) -> nn.Sequential:
    net = nn.Sequential(*[nn.Linear(width, width, bias_attr=False) for _ in range(_LAYERS)])
    random = np.random.default_rng(0)
    matrix = random.standard_normal((width, width), dtype=np.float32) / math.sqrt(width)
    for param in net.parameters():
        param.set_value(matrix)
    return net


def _take_turns(team: Team, trainees: dict[str, _Trainee], request: Request) -> dict[str, list[float]]:
    begin_s = time.perf_counter()
    for trainee in trainees.values():
        trainee.take_turn(1)
    # A round of two steps each; one that counts has one more than it times.
    round_s = team.agree((time.perf_counter() - begin_s) * (_STEPS + 1) / 2)
    affordable = int(_BUDGET_S[request.quick] / max(round_s, 1e-3))
    rounds = min(_ROUNDS[request.quick], max(_LEAST_ROUNDS, affordable))
    found: dict[str, list[float]] = {name: [] for name in trainees}
    for _, (name, trainee) in itertools.product(range(rounds), trainees.items()):
        found[name].append(trainee.take_turn(_STEPS))
    return found


def _lanes(team: Team, shape: Shape, n_replicas: int) -> dict[str, float]:
    """How long each lane is busy: apart from the rounds, since on a device looking costs time."""
    trainee = _Trainee(team, shape, n_replicas, True, timeline=True)
    trainee.take_turn(_STEPS)
    times = trainee.optimizer.timeline.summary()
    names = ["gather", "reduce", *(["replicate"] if n_replicas > 1 else []), "exposed"]
    return {name: float(times[f"{name}_ms"]) for name in names}


# -- the size of the model ---------------------------------------------------------------------------------------------


def _fitting_width(team: Team, request: Request) -> int:
    """So that communication takes ``_TARGET_MS``, within bounds."""
    least_mb = min(_LEAST_MB, request.max_mb)
    probe = _width_of(least_mb)
    rate_mb_ms = Shape(probe, 0).layer_mb * _LAYERS / _communication_ms(team, probe)
    return _width_of(min(max(rate_mb_ms * _TARGET_MS[request.quick], least_mb), request.max_mb))


def _width_of(parameters_mb: float) -> int:
    return max(16, round(math.sqrt(parameters_mb * MB / 4 / _LAYERS) / 16) * 16)


def _communication_ms(team: Team, width: int) -> float:
    """All gathers and reductions of a step, one after the other; rank 0's time. Collective."""
    gather, reduce = team.open("gather", "reduce")
    numel = width * width // team.n_ranks * team.n_ranks
    full, part = paddle.zeros([numel], "float32"), paddle.zeros([numel // team.n_ranks], "float32")

    def communicate() -> None:
        for _ in range(_LAYERS):
            reduce.reduce_scatter(part, full, label="doctor").wait()
            gather.all_gather(full, part, label="doctor").wait()

    team.time_ms(communicate)
    # The shortest of some: what other programs take now is not there to be hidden later.
    return team.agree(max(min(team.time_ms(communicate) for _ in range(_PROBES)), 1e-3))


def _fitting_rows(team: Team, width: int, wanted_ms: float) -> int:
    """The batch with which compute takes that long."""
    rows, before, before_ms = 8, 0, 0.0
    trainee = _Trainee(team, Shape(width, rows), 1, None)
    while True:
        trainee.use_batch(Shape(width, rows))
        took_ms = team.agree(min(trainee.take_turn(1) for _ in range(_PROBES)))
        if took_ms >= wanted_ms or rows >= _MOST_ROWS:
            break
        rows, before, before_ms = rows * 2, rows, took_ms
    if took_ms <= wanted_ms or not before:
        return rows
    return before + round((rows - before) * (wanted_ms - before_ms) / (took_ms - before_ms))
