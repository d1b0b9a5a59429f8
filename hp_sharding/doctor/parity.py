"""Whether the ranks come to the same numbers as one process that runs all of their batches."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

from ..config import ShardingConfig
from ..sharding import full_parameters, shard
from .ranks import Team
from .report import Request

STEPS = 20
OPTIMIZERS = ("SGD", "AdamW")
TOLERANCES = {"SGD": 1e-6, "AdamW": 1e-5}
"""Beyond two ranks, where sums have another order; AdamW magnifies that. On two ranks every bit must be the same."""
_BATCH = 8
_FEATURES = 24
_CLASSES = 10
_BUCKET_MB = 0.01
"""So small that there are several buckets, and that they overlap."""
_SMALLEST_SCALE = 0.1
"""What differences are relative to where a parameter is smaller: biases begin at zero."""

Values = dict[str, np.ndarray[Any, Any]]


class Split(NamedTuple):
    """How the ranks are used: which stage, and how many replicas."""

    stage: int
    n_replicas: int

    def __str__(self) -> str:
        return f"stage {self.stage}" + (f", {self.n_replicas} replicas" if self.n_replicas > 1 else "")


class Row(NamedTuple):
    """One training run beside its reference.

    Attributes:
        case: stage and replicas.
        optimizer: its class.
        bitwise: whether losses and parameters are the same, bit for bit, on every rank.
        difference: the largest, relative to the largest element of the parameter that has it.
        tolerance: the largest that is right; 0: bit for bit.
        ranks_agree: whether all ranks hold bitwise the same parameters.
    """

    case: str
    optimizer: str
    bitwise: bool
    difference: float
    tolerance: float
    ranks_agree: bool

    @property
    def passed(self) -> bool:
        """Whether the numbers are right."""
        return self.ranks_agree and (self.bitwise or self.difference <= self.tolerance)


class Parity(NamedTuple):
    """All runs.

    Attributes:
        steps: of each run.
        reference_repeats: whether the reference, run twice, gives the same bits; where the device's own kernels do not,
            nobody can ask for the same bits of us.
        rows: of each run.
    """

    steps: int
    reference_repeats: bool
    rows: list[Row]

    @property
    def passed(self) -> bool:
        """Whether all numbers are right."""
        return all(row.passed for row in self.rows)

    @property
    def verdict(self) -> str:
        """In one sentence."""
        wrong = [f"{row.case} with {row.optimizer}" for row in self.rows if not row.passed]
        if wrong:
            return f"WRONG NUMBERS: {'; '.join(wrong)}. Do not train with this; report it"
        if all(row.bitwise for row in self.rows):
            return "the same numbers as one process, bit for bit"
        return "the same numbers as one process, within the rounding of sums in another order"


def measure(team: Team, _: Request) -> dict[str, Any]:
    """Trains one process's way, and sharded in every way that these ranks allow; says what differs on this rank."""
    references = {name: _train_reference(team, name) for name in OPTIMIZERS}
    repeats = all(_is_same(_train_reference(team, name), references[name]) for name in OPTIMIZERS)
    rows = []
    for split in splits(team.n_ranks):
        for name in OPTIMIZERS:
            found, expected = _train_sharded(team, split, name), references[name]
            rows.append(
                {
                    "case": str(split),
                    "optimizer": name,
                    "bitwise": _is_same(found, expected),
                    "difference": _difference(found, expected),
                    "digest": _digest(found),
                }
            )
    return {"reference_repeats": repeats, "rows": rows}


def conclude(everyone: list[dict[str, Any]]) -> Parity:
    """What the ranks' findings say together."""
    repeats = all(found["reference_repeats"] for found in everyone)
    is_exact = len(everyone) <= 2 and repeats
    rows = []
    for of_ranks in zip(*(found["rows"] for found in everyone), strict=True):
        name = of_ranks[0]["optimizer"]
        rows.append(
            Row(
                case=of_ranks[0]["case"],
                optimizer=name,
                bitwise=all(row["bitwise"] for row in of_ranks),
                # Not max(), which passes over what is not a number.
                difference=float(np.max([row["difference"] for row in of_ranks])),
                tolerance=0.0 if is_exact else TOLERANCES[name],
                ranks_agree=len({row["digest"] for row in of_ranks}) == 1,
            )
        )
    return Parity(STEPS, repeats, rows)


def splits(n_ranks: int) -> list[Split]:
    """Every stage over all ranks, and with two replicas where each has at least two ranks."""
    found = [Split(stage, 1) for stage in (1, 2, 3)]
    return found + ([Split(stage, 2) for stage in (2, 3)] if n_ranks >= 4 and n_ranks % 2 == 0 else [])


def groups(me: int, n_ranks: int, n_replicas: int) -> dict[str, list[int]]:
    """The ``shard_group`` and ``replicate_group`` of a rank; neighbours are of one replica."""
    size = n_ranks // n_replicas
    first = me - me % size
    return {
        "shard_group": list(range(first, first + size)),
        "replicate_group": list(range(me % size, n_ranks, size)),
    }


# -- training ----------------------------------------------------------------------------------------------------------


def _train_reference(team: Team, optimizer_name: str) -> Values:
    """One process that runs every rank's batch in turn and adds up the gradients, in the order of ranks."""
    net = _make_net()
    params = net.parameters()
    optimizer = _make_optimizer(optimizer_name, params)
    losses = []
    for step in range(STEPS):
        totals: list[paddle.Tensor] = []
        for rank in team.ranks:
            loss = _loss(net, step, rank)
            loss.backward()
            grads = [param.grad.clone().detach() for param in params]
            totals = [total + grad for total, grad in zip(totals, grads, strict=True)] if totals else grads
            net.clear_gradients()
            if rank == team.me:
                losses.append(float(loss))
        for param, total in zip(params, totals, strict=True):
            param.grad = total / team.n_ranks
        optimizer.step()
        net.clear_gradients()
    return _values(net, losses)


def _train_sharded(team: Team, split: Split, optimizer_name: str) -> Values:
    net = _make_net()
    config = ShardingConfig(
        stage=split.stage,
        allgather_overlap=True,
        reduce_overlap=True,
        comm_buffer_size_MB=_BUCKET_MB,
        replicate_buffer_size_MB=_BUCKET_MB,
        timeout_s=team.timeout_s,
    )
    optimizer = shard(
        net,
        _make_optimizer(optimizer_name, net.parameters()),
        config,
        **groups(team.me, team.n_ranks, split.n_replicas),
    )
    losses = []
    for step in range(STEPS):
        loss = _loss(net, step, team.me)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    with full_parameters(net):
        return _values(net, losses)


def _make_net() -> nn.Sequential:
    net = nn.Sequential(
        nn.Linear(_FEATURES, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, _CLASSES)
    )
    random = np.random.default_rng(0)
    for param in net.parameters():
        drawn = random.standard_normal(param.shape, dtype=np.float32)
        # Matrices begin at random, differently on every rank, and vectors do not.
        param.set_value(0.2 * drawn if len(param.shape) > 1 else param.numpy() + 0.05 * drawn)
    return net


def _make_optimizer(name: str, params: list[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    rate = {"SGD": 0.1, "AdamW": 0.01}[name]
    return getattr(paddle.optimizer, name)(learning_rate=rate, parameters=params)


def _loss(net: nn.Layer, step: int, rank: int) -> paddle.Tensor:
    random = np.random.default_rng([step, rank])
    x = paddle.to_tensor(random.standard_normal((_BATCH, _FEATURES), dtype=np.float32))
    labels = paddle.to_tensor(random.integers(0, _CLASSES, _BATCH))
    return nn.functional.cross_entropy(net(x), labels)


# -- comparing ---------------------------------------------------------------------------------------------------------


def _values(net: nn.Layer, losses: list[float]) -> Values:
    found = {name: param.numpy().copy() for name, param in net.named_parameters()}
    return {**found, "loss": np.array(losses, np.float32)}


def _is_same(found: Values, expected: Values) -> bool:
    return all(found[name].tobytes() == value.tobytes() for name, value in expected.items())


def _difference(found: Values, expected: Values) -> float:
    return float(
        np.max(
            [
                np.abs(found[name] - value).max() / max(float(np.abs(value).max()), _SMALLEST_SCALE)
                for name, value in expected.items()
            ]
        )
    )


def _digest(found: Values) -> str:
    digest = hashlib.sha256()
    for name, value in found.items():
        if name != "loss":
            digest.update(value.tobytes())
    return digest.hexdigest()
