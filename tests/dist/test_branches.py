"""Ranks that take different branches, layers that nobody or somebody runs, and an order that changes all the time."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
import pytest
from paddle import nn

from tests import harness
from tests.models import SEED
from tests.reference import Values
from tests.sides import FEW, KEPT, SETTINGS, STAGES_1_2, Factory, compare

SIZE = 16
BRANCHES = 4


class _Branching(nn.Layer):
    """Layers of which each call names the ones to run, in which order; the last layer never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.branches = nn.LayerList([nn.Linear(SIZE, SIZE) for _ in range(BRANCHES)])
        self.never = nn.Linear(SIZE, SIZE)
        self.last = nn.Linear(SIZE, SIZE)

    def forward(self, x: paddle.Tensor, chosen: list[int]) -> paddle.Tensor:
        x = self.first(x)
        for index in chosen:
            x = F.gelu(self.branches[index](x))
        return self.last(x)


def _sgd(model: nn.Layer) -> Any:
    return paddle.optimizer.Momentum(0.05, parameters=model.parameters(), weight_decay=0.01)


def _batch(step: int, rank: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng([SEED, step, rank]).standard_normal([3, SIZE], dtype=np.float32))


CHOICES = {
    "parity of the rank": lambda step, rank: [rank % 2],
    "parity of rank and step": lambda step, rank: [(rank + step) % 2, 2],
    "nothing on rank 0": lambda step, rank: [0, 1, 2, 3] if rank else [],
    "nothing on rank 1": lambda step, rank: [] if rank else [3, 2, 1, 0],
    "one order and another": lambda step, rank: [0, 1, 2, 3] if step % 2 else [3, 1, 0, 2],
    "another order on each rank": lambda step, rank: [0, 1, 2, 3] if rank else [3, 1, 0, 2],
    "a layer twice on rank 0": lambda step, rank: [1, 2] if rank else [1, 2, 1],
    "a layer twice now and then": lambda step, rank: [1, 2, 1] if (step + rank) % 3 == 0 else [2, 0, 1],
    "at random": lambda step, rank: list(np.random.default_rng([step, rank]).permutation(4)[: (step + rank) % 5]),
}

FEW_OF_THEM = {name: settings for name, settings in FEW.items() if name in STAGES_1_2}


def _branches(new: Factory, choice: str, steps: int) -> dict[str, Values]:
    side = new(_Branching, _sgd)
    snapshots = {}
    for step in range(steps):
        side.backward(
            lambda rank, step=step: side.model(_batch(step, rank), CHOICES[choice](step, rank)).square().mean()
        )
        side.step()
        side.clear_grad(set_to_zero=bool(step % 2))
        if step in (2, steps - 1):
            snapshots[f"step {step}"] = side.values()
    return snapshots


@pytest.mark.parametrize("choice", CHOICES)
def test_ranks_go_different_ways(choice: str) -> None:
    """Bitwise: two ranks' gradients are added in one order only, and what a rank has none for is zero."""
    harness.run(compare, 2, _branches, STAGES_1_2, 0.0, choice, 8, timeout_s=60)


@pytest.mark.parametrize("choice", ["parity of the rank", "another order on each rank", "at random"])
def test_four_ranks_go_different_ways(choice: str) -> None:
    harness.run(compare, 4, _branches, FEW_OF_THEM, 1e-6, choice, 5, timeout_s=60)


def _unused_everywhere(new: Factory) -> dict[str, Values]:
    """What never had a gradient is never updated, not even by weight decay; what had one goes on by momentum."""
    side = new(_Branching, _sgd)
    start = side.values()
    snapshots = {}
    for step in range(6):
        chosen = [0] if step < 2 else [1]
        side.backward(lambda rank, step=step, chosen=chosen: side.model(_batch(step, rank), chosen).square().mean())
        side.step()
        side.clear_grad(set_to_zero=step < 3)
        snapshots[f"step {step}"] = found = side.values()
        for name in ("never.weight", "never.bias", "branches.2.weight", "branches.3.bias"):
            np.testing.assert_array_equal(found[name], start[name])
        assert np.array_equal(found["branches.1.weight"], start["branches.1.weight"]) == (step < 2)
    return snapshots


def test_what_nobody_used_is_left_alone() -> None:
    harness.run(compare, 2, _unused_everywhere, SETTINGS)


def _outside(new: Factory) -> dict[str, Values]:
    """On rank 1 every second loss has nothing to do with what the optimizer holds, though a forward has run."""
    outside = paddle.create_parameter([SIZE], "float32")
    side = new(_Branching, _sgd)
    for step in range(6):

        def loss(rank: int, step: int = step) -> paddle.Tensor:
            output = side.model(_batch(step, rank), [rank])
            return (outside * 2).sum() if rank == 1 and step % 2 else output.square().mean()

        side.backward(loss)
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def test_a_loss_without_any_parameter_on_one_rank() -> None:
    harness.run(compare, 2, _outside, STAGES_1_2, timeout_s=60)


def _talks_between(new: Factory, choice: str) -> dict[str, Values]:
    """The user's own collective stands between forward and backward, as where the loss is averaged for the log."""
    side = new(_Branching, _sgd)
    for step in range(4):

        def loss(rank: int, step: int = step) -> paddle.Tensor:
            output = side.model(_batch(step, rank), CHOICES[choice](step, rank))
            loss = output.square().mean()
            if side.sharded:
                dist.all_reduce(loss.detach().clone())
            return loss

        side.backward(loss)
        side.step()
        side.clear_grad()
    return {"end": side.values()}


@pytest.mark.parametrize("choice", ["nothing on rank 0", "nothing on rank 1", "at random"])
def test_a_collective_of_the_users_between_forward_and_backward(choice: str) -> None:
    """A rank that needs no parameters of a branch must not keep back its part of their gather."""
    harness.run(compare, 2, _talks_between, STAGES_1_2, 0.0, choice, timeout_s=60)


def _without_the_model(new: Factory) -> dict[str, Values]:
    """The layers are called one by one, never the model itself, and not the same ones on both ranks."""
    side = new(_Branching, _sgd)
    for step in range(5):

        def loss(rank: int, step: int = step) -> paddle.Tensor:
            x = side.model.first(_batch(step, rank))
            for index in [3, 0] if (rank + step) % 2 else []:
                x = side.model.branches[index](x)
            return side.model.last(x).square().mean()

        side.backward(loss)
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def test_layers_called_without_the_model_around_them() -> None:
    harness.run(compare, 2, _without_the_model, STAGES_1_2, timeout_s=60)


def _evaluates_unevenly(new: Factory) -> dict[str, Values]:
    """Where parameters are kept, ranks may evaluate as often as they like."""
    side = new(_Branching, _sgd)
    for step in range(5):
        side.backward(lambda rank, step=step: side.model(_batch(step, rank), [rank]).square().mean())
        side.step()
        side.clear_grad()
        with paddle.no_grad():
            for rank in side.ranks:
                for _ in range(2 * rank):
                    side.model(_batch(99, rank), [2, 3, rank])
    return {"end": side.values()}


def test_uneven_evaluation() -> None:
    harness.run(compare, 2, _evaluates_unevenly, KEPT, timeout_s=60)
