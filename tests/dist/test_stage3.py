"""Stage 3 on several ranks: who goes another way than the others is told so, and what is sent is what is needed."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding import CommError, ShardingConfig, full_parameters, shard
from tests import harness, reference
from tests.lanes import wrap
from tests.models import loss_of, loss_on, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_all_equal, assert_equal, values
from tests.sides import BOTH, Factory, compare

SIZE = 8
OVERLAP: dict[str, Any] = {"stage": 3, "allgather_overlap": True, "reduce_overlap": True}


class _Experts(nn.Layer):
    """Layers of which the batch chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.LayerList([nn.Linear(SIZE, SIZE) for _ in range(3)])
        self.head = nn.Linear(SIZE, 1)

    def forward(self, x: paddle.Tensor, chosen: int) -> paddle.Tensor:
        return self.head(self.experts[chosen](x))


def _x(step: int, rank: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng([step, rank]).standard_normal([4, SIZE], dtype=np.float32))


def _experts(new: Factory) -> dict[str, Values]:
    side = new(_Experts, lambda model: make_optimizer("SGD", model))
    for step in range(6):
        side.backward(lambda rank, step=step: side.model(_x(step, rank), step * step % 3).square().mean())
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def test_layers_chosen_by_data_alike_on_all_ranks() -> None:
    harness.run(compare, 2, _experts, {"stage 3": OVERLAP, "no overlap": {"stage": 3}})


def _differ(rank: int, nranks: int, settings: dict[str, Any]) -> str:
    model = _Experts()
    config = ShardingConfig(timeout_s=4, **settings)
    optimizer = shard(model, make_optimizer("SGD", model), config)
    model(_x(0, rank), 0).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
    try:
        for step in range(1, 3):
            model(_x(step, rank), rank).mean().backward()
            optimizer.step()
    except CommError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("settings", [OVERLAP, {"stage": 3}], ids=str)
def test_ranks_that_go_different_ways_are_told_where(settings: dict[str, Any]) -> None:
    """With overlap rank 0 has all it needs, and goes on to the reductions while rank 1 asks for another layer."""
    for outcome in harness.run(_differ, 2, settings, fresh=True, timeout_s=60):
        text = outcome.result or ""
        assert "experts.1" in text, outcome
        assert ("reduce_scatter" if settings is OVERLAP else "experts.0") in text, outcome
        assert "way" in text


def _raises_alone(rank: int, nranks: int, where: str) -> str:
    model = make_model("gpt")
    _, optimizer, _ = wrap(model, make_optimizer("SGD", model), nranks, poison=False, **OVERLAP)
    for step in range(2):
        loss_of(model, make_batch("gpt", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
    if rank == 1:
        _fail_in(model, where)
    began_s = time.monotonic()
    try:
        for step in range(2, 5):
            with contextlib.suppress(ValueError, OSError):
                loss_of(model, make_batch("gpt", step, rank)).backward()
            optimizer.clear_grad()
    except CommError as error:
        assert time.monotonic() - began_s < 15, "only after the timeout"
        return str(error)
    return "nothing was noticed"


def _fail_in(model: Any, where: str) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    if where == "forward":
        model.norm.register_forward_pre_hook(fail)
    else:
        model.blocks[3].out.weight.register_hook(fail)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_rank_that_raises_and_goes_on_is_an_error_everywhere(where: str) -> None:
    """Its peers wait for gathers that it will never start; what it does instead tells them so, and at once."""
    for outcome in harness.run(_raises_alone, 2, where, fresh=True, timeout_s=60):
        assert "all_gather" in (outcome.result or ""), outcome


def _counts(rank: int, nranks: int, name: str, settings: dict[str, Any]) -> dict[str, int]:
    model = make_model(name)
    _, optimizer, calls = wrap(model, make_optimizer("SGD", model), nranks, **settings)
    for step in range(4):
        before = len(calls)
        loss_of(model, make_batch(name, step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
    with full_parameters(model):
        pass
    return Counter(call.op for call in calls[before:])


@pytest.mark.parametrize("n_replicas", [1, 2])
def test_what_a_step_sends(n_replicas: int) -> None:
    """Units of one bucket each. The last units of the forward are the first of the backward, and stay."""
    nranks = 2 * n_replicas
    settings = {**OVERLAP, "n_replicas": n_replicas, "reshard_after_forward": True}
    found = harness.run(_counts, nranks, "mlp", settings)
    n_units = 5  # four layers and the model's own parameter
    for counts in found:
        assert counts["reduce_scatter"] == n_units
        # The model's own parameter and the last two stay; three are on their way when full_parameters asks for all.
        assert counts["all_gather"] == n_units + (n_units - 3) + (n_units - 3)
        # What the ranks agree on, once more over the replicas; and over these two sums of neighbours.
        assert counts["all_reduce"] == 1 + (1 + 2 if n_replicas > 1 else 0)


def _edits(new: Factory) -> dict[str, Values]:
    """Values written between steps count, on all ranks and in the optimizer's own copy."""
    side = new(lambda: make_model("mlp"), lambda model: make_optimizer("Momentum", model))
    for step in range(4):
        with full_parameters(side.model), paddle.no_grad():
            side.model.gain.scale_(0.5)
            side.model.layers[2].weight[0] = 0.125 * step
            pretrained = {name: 0.5 * value.numpy() + 0.01 for name, value in side.model.state_dict().items()}
            side.model.set_state_dict(pretrained)
        side.backward(loss_on(side.model, "mlp", step))
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def test_edits_in_full_parameters() -> None:
    harness.run(compare, 2, _edits, {"stage 3": {"stage": 3, **BOTH}, "plain": {"stage": 3}})


def _evaluates(rank: int, nranks: int, name: str) -> Values:
    """Evaluations of another length after each step, and a forward in training that nobody differentiates."""
    model = make_model(name)
    _, optimizer, _ = wrap(model, make_optimizer("AdamW", model), nranks, **OVERLAP)
    for step in range(5):
        model.train()
        loss_of(model, make_batch(name, step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
        model.eval()
        with paddle.no_grad():
            for batch in range(step % 3):
                loss_of(model, make_batch(name, 50 + batch, rank))
        if step == 3:
            loss_of(model, make_batch(name, 60, rank))
    with full_parameters(model):
        return values(model)


@pytest.mark.parametrize("name", ["gpt", "gpt_recompute_reentrant"])
def test_evaluations_in_between_change_nothing(name: str) -> None:
    expected = reference.train(name, "AdamW", 2, 5).params
    found = harness.run(_evaluates, 2, name)
    assert_all_equal(found)
    assert_equal(found[0], expected)


def _looks_alone(rank: int, nranks: int, where: str) -> Values:
    """Rank 0 alone evaluates inside ``full_parameters``, or reads a value in a forward without gradients."""
    model = make_model("gpt_recompute_reentrant")
    _, optimizer, _ = wrap(model, make_optimizer("AdamW", model), nranks, **OVERLAP)
    if where == "forward" and rank == 0:
        for block in model.blocks:
            block.norm2.register_forward_pre_hook(_read)
    for step in range(5):
        loss_of(model, make_batch("gpt", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
        with full_parameters(model), paddle.no_grad():
            if where == "full_parameters" and rank == 0:
                loss_of(model, make_batch("gpt", 50, rank))
                model.blocks[2](paddle.ones([1, 2, 12]))
    with full_parameters(model):
        return values(model)


def _read(layer: Any, inputs: Any) -> None:
    with paddle.no_grad():
        float(layer.weight.mean())


@pytest.mark.parametrize("where", ["full_parameters", "forward"])
def test_one_rank_may_look_alone(where: str) -> None:
    found = harness.run(_looks_alone, 2, where, timeout_s=60)
    assert_all_equal(found)
    assert_equal(found[0], reference.train("gpt", "AdamW", 2, 5).params)
