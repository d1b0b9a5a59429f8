"""One scenario, two sides: sharded over ranks, and plain Paddle that runs every rank in turn. Both must end alike.

A scenario is a function of a *factory*, with which it makes one or more models. It calls ``side.backward(loss)`` with
a function from a rank to that rank's loss, and returns named snapshots::

    def _scenario(new):
        side = new(lambda: nn.Linear(3, 2), lambda model: paddle.optimizer.SGD(0.1, parameters=model.parameters()))
        side.backward(lambda rank: side.model(batch(rank)).mean())
        side.step()
        return {"end": side.values()}

    def test_it():
        harness.run(compare, 2, _scenario, SETTINGS)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import paddle
from paddle import nn
from paddle.utils import unique_name

from hp_sharding import full_parameters
from tests.lanes import Call, wrap
from tests.models import SEED
from tests.reference import Ranks, Values, assert_close, assert_equal, values

Loss = Callable[[int], "paddle.Tensor | None"]
Settings = dict[str, dict[str, Any]]

SMALL_MB = 0.002
"""A bucket size near that of single parameters of the tests' models. Each collective costs about 1 ms of CPU."""

BOTH: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": SMALL_MB}
SETTINGS: Settings = {
    "no overlap": {"stage": 2, "comm_buffer_size_MB": SMALL_MB},
    "stage 1": {"stage": 1, **BOTH},
    "stage 2": {"stage": 2, **BOTH},
    "one bucket": {"stage": 2, "allgather_overlap": True, "reduce_overlap": True},
    "reshard": {"stage": 2, **BOTH, "reshard_after_step": True},
    "reshard, stage 1": {"stage": 1, **BOTH, "reshard_after_step": True, "prefetch_depth": 2, "comm_fusion": False},
    "stage 3": {"stage": 3, **BOTH},
    "stage 3, kept": {"stage": 3, "reshard_after_forward": False, "comm_fusion": False, "reduce_overlap": True},
}
FEW: Settings = {name: SETTINGS[name] for name in ("stage 1", "stage 2", "reshard", "stage 3")}
"""Enough for what does not depend on how buckets are formed."""
FREED: Settings = {name: settings for name, settings in SETTINGS.items() if "reshard" in name or settings["stage"] == 3}
"""Those in which nobody may read parameters after ``step()``."""
KEPT: Settings = {name: settings for name, settings in SETTINGS.items() if name not in FREED}
STAGES_1_2: Settings = {name: settings for name, settings in SETTINGS.items() if settings["stage"] < 3}
"""Those in which ranks may take different branches, and parameters are readable before the first step."""


class Side(Protocol):
    """What a scenario works with.

    Attributes:
        model: the model.
        sharded: False on the plain side.
        ranks: ranks that this process runs: its own one, or on the plain side all.
    """

    model: nn.Layer
    sharded: bool
    ranks: list[int]

    def backward(self, loss: Loss) -> list[float]:
        """The backward of this rank's loss, or of every rank's."""

    def step(self) -> None:
        """The optimizer's."""

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """The optimizer's."""

    def no_sync(self) -> Any:
        """The optimizer's; nothing on the plain side."""

    def values(self) -> Values:
        """Copies of all parameters."""


Factory = Callable[[Callable[[], nn.Layer], Callable[[nn.Layer], Any]], Any]
Scenario = Callable[..., dict[str, Values]]


class Plain:
    """The plain side."""

    def __init__(self, make_model: Callable[[], nn.Layer], make_optimizer: Callable[[nn.Layer], Any], nranks: int):
        paddle.seed(SEED)
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)
        self.sharded = False
        self.ranks = list(range(nranks))
        self._runs = Ranks(self.model, nranks)

    def backward(self, loss: Loss) -> list[float]:
        return self._runs.backward(loss)

    def step(self) -> None:
        self.optimizer.step()

    def clear_grad(self, set_to_zero: bool = True) -> None:
        self.optimizer.clear_grad(set_to_zero)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def values(self) -> Values:
        return values(self.model)


class Sharded:
    """The sharded side.

    Attributes:
        calls: the collectives started so far.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Layer],
        make_optimizer: Callable[[nn.Layer], Any],
        *,
        rank: int,
        nranks: int,
        settings: dict[str, Any],
    ):
        paddle.seed(SEED + rank)
        model = make_model()
        self.rank = rank
        self.model, self.optimizer, self.calls = wrap(model, make_optimizer(model), nranks, **settings)
        self.sharded = True
        self.ranks = [rank]

    def backward(self, loss: Loss) -> list[float]:
        value = loss(self.rank)
        if value is None:
            return [float("nan")]
        value.backward()
        return [float(value)]

    def step(self) -> None:
        self.optimizer.step()

    def clear_grad(self, set_to_zero: bool = True) -> None:
        self.optimizer.clear_grad(set_to_zero)

    def no_sync(self) -> Any:
        return self.optimizer.no_sync()

    def values(self) -> Values:
        with full_parameters(self.model):
            return values(self.model)


def compare(
    rank: int, nranks: int, scenario: Scenario, settings: Settings, tolerance: float = 0.0, *args: Any
) -> dict[str, list[Call]]:
    """Rank function: runs ``scenario(factory, *args)`` on the plain side, and sharded with each of ``settings``.

    Args:
        tolerance: 0 for bitwise, else relative to the largest element of a parameter.

    Returns:
        For each of ``settings``, the collectives of all models.
    """
    with unique_name.guard():
        expected = scenario(lambda model, optimizer: Plain(model, optimizer, nranks), *args)
    calls: dict[str, list[Call]] = {}
    for name, chosen in settings.items():
        found, calls[name] = play(rank, nranks, scenario, chosen, *args)
        assert list(found) == list(expected)
        for what, value in expected.items():
            place = f"{name}, rank {rank}, {what}:"
            if tolerance:
                assert_close(found[what], value, tolerance, place)
            else:
                assert_equal(found[what], value, place)
    return calls


def play(
    rank: int, nranks: int, scenario: Scenario, settings: dict[str, Any], *args: Any
) -> tuple[dict[str, Values], list[Call]]:
    """Runs ``scenario(factory, *args)`` sharded, on this rank: its snapshots, and the collectives of all models."""
    sides: list[Sharded] = []

    def new(model: Any, optimizer: Any) -> Sharded:
        sides.append(Sharded(model, optimizer, rank=rank, nranks=nranks, settings=settings))
        return sides[-1]

    with unique_name.guard():
        found = scenario(new, *args)
    return found, [call for side in sides for call in side.calls]
