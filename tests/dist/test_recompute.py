"""Recompute in both its forms: forwards run again inside the backward, and gradients come in twice."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from tests import harness, reference
from tests.lanes import Call
from tests.models import SEED, loss_on, make_model, make_optimizer
from tests.reference import Values, assert_equal
from tests.sides import BOTH, FEW, SETTINGS, SMALL_MB, STAGES_1_2, Factory, compare
from tests.training import Case, RankRun, train_all

FORMS = [True, False]
SIZE = 16


def _cases(steps: int) -> list[Case]:
    settings = [{"stage": 1, **BOTH}, {"stage": 2, **BOTH}, {"stage": 2, **BOTH, "reshard_after_step": True}]
    settings += [{"stage": 3, **BOTH}]
    names = ["gpt", "gpt_recompute_reentrant", "gpt_recompute"]
    return [Case(name, "AdamW", chosen, steps=steps) for chosen in settings for name in names]


def test_recompute_changes_no_bit() -> None:
    """Three consecutive units are recomputed, one of which is used again outside."""
    cases = _cases(4)
    expected = reference.train("gpt", "AdamW", 2, 4)
    for rank, runs in enumerate(harness.run(train_all, 2, cases)):
        for case, run in zip(cases, runs, strict=True):
            assert run.losses == [losses[rank] for losses in expected.losses], str(case)
            assert_equal(run.params, expected.params, str(case))
        for case, plain, reentrant, other in zip(cases[::3], *[iter(runs)] * 3, strict=True):
            assert _sent(other) == _sent(plain), f"{case}: recompute sends more, or in another order"
            if case.settings["stage"] < 3:
                assert _sent(reentrant) == _sent(plain), str(case)
            else:  # a backward inside the backward for each of its blocks, so that one used twice is needed twice
                more = Counter(_sent(reentrant)) - Counter(_sent(plain))
                assert all(call.label.partition(":")[2].startswith("blocks.2") for call in more), str(case)


def _sent(run: RankRun) -> list[Call]:
    """What came of each step but the first ones, in which the orders are learned."""
    return [call for call in run.calls if "backward" not in call.label][20:]


class _Shared(nn.Layer):
    """One layer inside two recomputed blocks, and one parameter that both use besides."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.shared = nn.Linear(SIZE, SIZE)
        self.scale = self.create_parameter([SIZE], default_initializer=nn.initializer.Constant(1.0))
        self.blocks = nn.LayerList([nn.Linear(SIZE, SIZE) for _ in range(4)])
        self.reentrant = reentrant

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.blocks[0](x)
        for index in (1, 2, 3):
            x = x + self._run(self._block, x, index)
        return x

    def _block(self, x: paddle.Tensor, index: int) -> paddle.Tensor:
        x = F.gelu(self.blocks[index](x))
        return self.shared(x) * self.scale if index != 2 else x

    def _run(self, function: Any, *args: Any) -> paddle.Tensor:
        return function(*args) if self.reentrant is None else recompute(function, *args, use_reentrant=self.reentrant)


def _train_shared(new: Factory, form: bool) -> dict[str, Values]:
    side = new(lambda: _Shared(form), lambda model: make_optimizer("Momentum", model))
    for step in range(6):
        side.backward(lambda rank, step=step: side.model(_noise(step, rank)).square().mean())
        if step % 2:
            side.step()
            side.clear_grad()
    return {"end": side.values()}


def _noise(step: int, rank: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng([SEED, step, rank]).standard_normal([3, SIZE], dtype=np.float32))


@pytest.mark.parametrize("form", FORMS)
def test_a_parameter_in_two_recomputed_blocks(form: bool) -> None:
    """Its gradient comes in twice in one backward; where that is known too late, the sum is formed in two parts."""
    harness.run(compare, 2, _train_shared, SETTINGS, 1e-6, form)


class _Chain(nn.Layer):
    """One recomputed layer, as often as asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.shared = nn.Linear(SIZE, SIZE)

    def forward(self, x: paddle.Tensor, times: int) -> paddle.Tensor:
        x = self.first(x)
        for _ in range(times):
            x = recompute(self.shared, x, use_reentrant=True)
        return x.square().mean()


def _train_chain(new: Factory, on_ranks: list[int]) -> dict[str, Values]:
    """In the second of two backwards nobody waits for a layer's second gradient: it comes when the first is sent."""
    side = new(_Chain, lambda model: make_optimizer("SGD", model))
    repeats = False
    for step in range(6):
        losses = {
            rank: [side.model(_noise(2 * step + n, rank), 1 + (step > 2 and rank in on_ranks)) for n in (0, 1)]
            for rank in side.ranks
        }
        side.backward(lambda rank, losses=losses: losses[rank][0])
        side.backward(lambda rank, losses=losses: losses[rank][1])
        repeats = repeats or (side.sharded and any(side.optimizer._reducer._repeats))
        side.step()
        side.clear_grad()
    if side.sharded and side.optimizer.config.reduce_overlap and len(side.optimizer.buffers) > 1:
        assert repeats == (side.ranks[0] in on_ranks), "the test does not come to what it is for"
    return {"end": side.values()}


@pytest.mark.parametrize("on_ranks", [[0], [1], [0, 1]])
def test_a_second_gradient_after_the_first_was_sent(on_ranks: list[int]) -> None:
    harness.run(compare, 2, _train_chain, SETTINGS if len(on_ranks) == 2 else STAGES_1_2, 1e-6, on_ranks)


class _Nested(nn.Layer):
    """Recompute inside recompute (Paddle can that in one form only), dropout, a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(SIZE, SIZE) for _ in range(4)])

    def forward(self, x: paddle.Tensor, branch: int) -> paddle.Tensor:
        return recompute(self._outer, x, branch, use_reentrant=True)

    def _outer(self, x: paddle.Tensor, branch: int) -> paddle.Tensor:
        x = self.layers[0](x)
        x = recompute(self._inner, x, branch, use_reentrant=True)
        return self.layers[3](x)

    def _inner(self, x: paddle.Tensor, branch: int) -> paddle.Tensor:
        return F.dropout(F.gelu(self.layers[branch](x)), 0.25)


def _train_nested(new: Factory, alike: bool) -> dict[str, Values]:
    side = new(_Nested, lambda model: make_optimizer("Momentum", model))
    for step in range(5):

        def loss(rank: int, step: int = step) -> paddle.Tensor:
            paddle.seed(1000 * step + rank)
            x = _noise(step, rank)
            x.stop_gradient = False
            return side.model(x, 1 + (step if alike else rank + step) % 2).square().mean()

        side.backward(loss)
        side.step()
        side.clear_grad()
    return {"end": side.values()}


@pytest.mark.parametrize("alike", [True, False])
def test_recompute_inside_recompute(alike: bool) -> None:
    harness.run(compare, 2, _train_nested, SETTINGS if alike else STAGES_1_2, 1e-6, alike)


def _accumulating(new: Factory, name: str) -> dict[str, Values]:
    side = new(lambda: make_model(name), lambda model: make_optimizer("SGD", model))
    for step in range(2):
        for micro in range(3):
            with side.no_sync() if micro == 0 else contextlib.nullcontext():
                side.backward(loss_on(side.model, name, 3 * step + micro))
        side.step()
        side.clear_grad()
    return {"end": side.values()}


@pytest.mark.parametrize("name", ["gpt_recompute_reentrant", "gpt_recompute"])
def test_accumulation_with_recompute(name: str) -> None:
    harness.run(compare, 2, _accumulating, FEW, 1e-6, name)


def test_four_ranks() -> None:
    settings = {"stage": 2, "allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": 8 * SMALL_MB}
    cases = [Case(name, "SGD", settings, steps=3) for name in ("gpt", "gpt_recompute_reentrant", "gpt_recompute")]
    for runs in harness.run(train_all, 4, cases):
        for run in runs[1:]:
            assert run.losses == runs[0].losses
            assert_equal(run.params, runs[0].params)
