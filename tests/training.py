"""Sharded training runs, as rank functions of the harness: many in one call, since each takes part of a second."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from paddle import nn

from hp_sharding import full_parameters
from tests.lanes import DELAY_S, Call, wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.reference import Values, statistics, values


class Case(NamedTuple):
    """One run: what is trained, with which settings of ``ShardingConfig``.

    Attributes:
        reads: whether the parameters are read after every step, which waits for the gathers under way.
    """

    model: str
    optimizer: str
    settings: dict[str, Any]
    steps: int = 20
    reads: bool = False
    delay_s: float = DELAY_S

    def __str__(self) -> str:
        flags = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.model}, {self.optimizer}, {flags}, reads={self.reads}"


class RankRun(NamedTuple):
    """What one rank saw of a run.

    Attributes:
        losses: of each step.
        digests: of all parameters, after every step where the case reads them.
        params: at the end.
        calls: all collectives, in the order in which each lane got them.
    """

    losses: list[float]
    digests: list[str]
    params: Values
    statistics: Values
    calls: list[Call]
    orders: list[list[int]]


def train_all(rank: int, nranks: int, cases: list[Case]) -> list[RankRun]:
    """Rank function: runs every case."""
    return [train(rank, nranks, case) for case in cases]


def train(rank: int, nranks: int, case: Case) -> RankRun:
    """Runs one case on this rank."""
    model = make_model(case.model)
    inner = make_optimizer(case.optimizer, model)
    model, optimizer, calls = wrap(model, inner, nranks, delay_s=case.delay_s, **case.settings)
    losses, digests = [], []
    for step in range(case.steps):
        loss = loss_of(model, make_batch(case.model, step, rank))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
        if case.reads:
            with full_parameters(model):
                digests.append(digest(model))
    with full_parameters(model):
        params = values(model)
    orders = [optimizer._reducer.order, optimizer._schedule.gathers.order]
    return RankRun(losses, digests, params, statistics(model), calls, orders)


def digest(model: nn.Layer) -> str:
    """A hash of the bits of all parameters."""
    found = hashlib.sha256()
    for value in values(model).values():
        found.update(value.tobytes())
    return found.hexdigest()
