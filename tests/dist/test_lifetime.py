"""Several models in a process, models that outlive their optimizer, nothing that piles up, nothing that stays."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base import core

from hp_sharding import ConfigError, full_parameters
from tests import harness
from tests.lanes import wrap
from tests.models import SEED, loss_of, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_all_equal, assert_equal, values
from tests.sides import BOTH, KEPT, SETTINGS, Factory, compare

SIZE = 8


def _noise(step: int, rank: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng([SEED, step, rank]).standard_normal([5, SIZE], dtype=np.float32))


def _half(out: int) -> nn.Layer:
    return nn.Sequential(nn.Linear(SIZE, 11), nn.GELU(), nn.Linear(11, 11), nn.Tanh(), nn.Linear(11, out))


def _gan(new: Factory, order: str) -> dict[str, Values]:
    """Two models with an optimizer each; the gradients of one pass through the other."""
    generator = new(lambda: _half(SIZE), lambda model: make_optimizer("AdamW", model))
    critic = new(lambda: _half(1), lambda model: make_optimizer("Momentum", model))
    for step in range(5):
        fake = {rank: generator.model(_noise(step, rank)) for rank in critic.ranks}
        critic.backward(
            lambda rank, step=step, fake=fake: (
                critic.model(fake[rank].detach()).mean() - critic.model(_noise(100 + step, rank)).mean()
            )
        )
        critic.step()
        if order == "cleared at once":
            critic.clear_grad()
        # The critic's own gradients of this backward are of no use to anybody: they are cleared before its next step.
        _backward_of_both(generator, critic, lambda rank, fake=fake: -critic.model(fake[rank]).mean())
        generator.step()
        generator.clear_grad()
        critic.clear_grad()
    return {"generator": generator.values(), "critic": critic.values()}


def _backward_of_both(first: Any, second: Any, loss: Any) -> None:
    """On the plain side the second model's gradients of this are thrown away with those of ``clear_grad``."""
    first.backward(loss)
    if not first.sharded:
        second.clear_grad()


@pytest.mark.parametrize("order", ["cleared at once", "cleared late"])
def test_two_models_and_two_optimizers(order: str) -> None:
    harness.run(compare, 2, _gan, SETTINGS, 0.0, order)


def _outlives(rank: int, nranks: int) -> None:
    """The optimizer is gone right after its last step, with gathers under way; the model goes on."""
    for settings in KEPT.values():
        expected = _two_steps(rank, nranks, settings)
        found = _two_steps(rank, nranks, settings, deletes=True)
        assert_equal(found, expected)


def _two_steps(rank: int, nranks: int, settings: dict[str, Any], deletes: bool = False) -> Values:
    model = make_model("gpt")
    model, optimizer, _ = wrap(model, make_optimizer("SGD", model), nranks, delay_s=0.005, **settings)
    for step in range(2):
        loss_of(model, make_batch("gpt", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
    if deletes:
        del optimizer
        gc.collect()
    model.eval()
    with paddle.no_grad():
        output = model(make_batch("gpt", 0, 0)[0])
    return {"output": output.numpy(), **values(model)}


def test_a_model_outlives_its_optimizer() -> None:
    harness.run(_outlives, 2)


def _copies(rank: int, nranks: int) -> None:
    """A deep copy is a plain model: its own values, no hooks of ours, no collectives, and it can be wrapped."""
    model = make_model("gpt")
    model, optimizer, calls = wrap(model, make_optimizer("SGD", model), nranks, stage=2, **BOTH)
    for step in range(2):
        loss_of(model, make_batch("gpt", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
    twin = copy.deepcopy(model)
    before, sent = values(twin), len(calls)
    loss_of(twin, make_batch("gpt", 7, rank)).backward()
    assert all(param.grad is not None for param in twin.parameters())
    assert len(calls) == sent, "the copy has started collectives"
    inner = make_optimizer("SGD", twin)
    inner.step()
    inner.clear_grad()
    assert not np.array_equal(values(twin)["norm.weight"], before["norm.weight"])
    loss_of(model, make_batch("gpt", 2, rank)).backward()
    optimizer.step()
    assert len(calls) > sent
    twin.set_state_dict(before)
    twin, again, _ = wrap(twin, make_optimizer("SGD", twin), nranks, stage=2, **BOTH)
    loss_of(twin, make_batch("gpt", 2, rank)).backward()
    again.step()
    with full_parameters(model), full_parameters(twin):
        assert_equal(values(twin), values(model))


def test_a_deep_copy_is_a_plain_model() -> None:
    harness.run(_copies, 2)


def _hooks(model: nn.Layer) -> int:
    layers = model.sublayers(include_self=True)
    return sum(len(layer._forward_pre_hooks) + len(layer._forward_post_hooks) for layer in layers)


def _counts(model: nn.Layer) -> tuple[int, int, int]:
    gc.collect()
    tensors = sum(isinstance(thing, paddle.Tensor) for thing in gc.get_objects())
    return _hooks(model), tensors, core.host_memory_stat_current_value("Allocated", 0)


def _plateau(rank: int, nranks: int, name: str, settings: dict[str, Any]) -> None:
    model = make_model(name)
    model, optimizer, _ = wrap(model, make_optimizer("AdamW", model), nranks, delay_s=0.0, **settings)
    seen = []
    for step in range(50):
        loss_of(model, make_batch(name, step % 3, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
        if step in (14, 49):
            for buffer in optimizer.buffers:
                optimizer._schedule.gathers.finish(buffer.layout.number)
            seen.append((*_counts(model), optimizer.buffers[0].place.pool.allocated_bytes))
    assert seen[0] == seen[1], "hooks, tensors, bytes, bytes of the pool"


@pytest.mark.parametrize(
    ("name", "settings"),
    [("mlp", "stage 1"), ("gpt_recompute_reentrant", "stage 2"), ("conv", "reshard"), ("gpt_recompute", "stage 3")],
)
def test_nothing_piles_up(name: str, settings: str) -> None:
    harness.run(_plateau, 2, name, SETTINGS[settings])


def _dies(rank: int, nranks: int) -> None:
    """Model, optimizer, schedule and buckets are gone with the last reference, and all memory of theirs."""
    original = core.eager.run_backward
    for settings in SETTINGS.values():
        gc.collect()
        gc.disable()
        try:
            model = make_model("gpt")
            model, optimizer, calls = wrap(model, make_optimizer("AdamW", model), nranks, **settings)
            assert core.eager.run_backward is not original
            for step in range(2):
                loss = loss_of(model, make_batch("gpt", step, rank))
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
            del loss
            for buffer in optimizer.buffers:
                optimizer._schedule.gathers.finish(buffer.layout.number)
            watched = [weakref.ref(thing) for thing in (model, optimizer, optimizer._schedule, optimizer.buffers[0])]
            watched += [weakref.ref(param) for param in model.parameters()]
            del buffer, optimizer, calls, model
        finally:
            gc.enable()
        gc.collect()
        assert [reference() for reference in watched if reference() is not None] == []
        assert core.eager.run_backward is original


def test_a_model_dies_with_its_last_reference() -> None:
    harness.run(_dies, 2)


def _twice(rank: int, nranks: int) -> Values:
    model = make_model("mlp")
    inner = make_optimizer("SGD", model)
    model, optimizer, calls = wrap(model, inner, nranks, stage=2, **BOTH)
    import hp_sharding

    before, hooks = len(calls), _hooks(model)
    for again in (inner, optimizer, make_optimizer("SGD", model)):
        with pytest.raises(ConfigError, match="wrap it once"):
            hp_sharding.shard(model, again)
    with pytest.raises(ConfigError, match="wrap it once"):
        hp_sharding.shard(make_model("mlp"), optimizer)
    assert (len(calls), _hooks(model)) == (before, hooks)
    loss_of(model, make_batch("mlp", 0, rank)).backward()
    optimizer.step()
    with full_parameters(model):
        return values(model)


def test_wrapping_twice_is_an_error_that_changes_nothing() -> None:
    assert_all_equal(harness.run(_twice, 2))


def _seeded_by_rank(rank: int, nranks: int) -> dict[str, Any]:
    """The real ``shard``: every rank begins with another model, and with other running statistics."""
    import hp_sharding

    paddle.seed(1000 + rank)
    model = nn.Sequential(nn.Linear(SIZE, 5), nn.BatchNorm1D(5), nn.Linear(5, 3))
    model[1]._mean.set_value(paddle.full([5], float(rank)))
    model.register_buffer("table", paddle.full([2], rank, dtype="int64"))
    start = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    inner = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    config = hp_sharding.ShardingConfig(stage=2, **BOTH)
    optimizer = hp_sharding.shard(model, inner, config)
    wrapped = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    for step in range(3):
        model(_noise(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return {"start": start, "wrapped": wrapped, "end": values(model)}


def test_rank_0_gives_everybody_its_model() -> None:
    results = harness.run(_seeded_by_rank, 2)
    assert not np.array_equal(results[0]["start"]["0.weight"], results[1]["start"]["0.weight"])
    for result in results:
        assert_equal(result["wrapped"], results[0]["start"])
    assert_all_equal([result["end"] for result in results])
