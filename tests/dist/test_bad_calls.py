"""Wrong calls on two ranks: refused before anything is sent, by one rank or by all; whoever waits alone hears of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import hp_sharding
from hp_sharding import CommError, HpShardingError, ShardingConfig, fleet, full_parameters, shard
from hp_sharding.fleet.session import Session
from tests import harness
from tests.lanes import Wrapped, wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_equal, values
from tests.sides import BOTH

SETTINGS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1, **BOTH},
    "stage 2": {"stage": 2, **BOTH, "reshard_after_step": True},
    "stage 3": {"stage": 3, **BOTH},
}
STEPS = 3


def _other() -> tuple[nn.Layer, Any]:
    model = make_model("mlp")
    return model, make_optimizer("SGD", model)


def _no_sync(run: Wrapped) -> None:
    with run.optimizer.no_sync(replicate_only=1):  # type: ignore[arg-type]
        raise AssertionError("it was entered")


def _nobody() -> int:
    return paddle.distributed.get_world_size() + 5


MISTAKES: dict[str, Callable[[Wrapped], Any]] = {
    "clear_grad": lambda run: run.optimizer.clear_grad("yes"),  # type: ignore[arg-type]
    "minimize": lambda run: run.optimizer.minimize(None),
    "minimize some": lambda run: run.optimizer.minimize(paddle.ones([]), parameters=run.model.parameters()[:1]),
    "no_sync": _no_sync,
    "full_grad of nothing": lambda run: run.optimizer.full_grad(None),
    "full_grad of another's": lambda run: run.optimizer.full_grad(_other()[0].gain),
    "set_full_grad of another shape": lambda run: run.optimizer.set_full_grad(run.model.gain, np.zeros(4, "float32")),
    "set_full_grad of another dtype": lambda run: run.optimizer.set_full_grad(run.model.gain, [1, 2, 3, 4, 5]),
    "set_full_grad to nothing": lambda run: run.optimizer.set_full_grad(run.model.gain, object()),
    "clip to nothing": lambda run: run.optimizer.clip_grad_norm(None),
    "clip to less than nothing": lambda run: run.optimizer.clip_grad_norm(-1.0),
    "clip to NaN": lambda run: run.optimizer.clip_grad_norm(float("nan")),
    "clip by another norm": lambda run: run.optimizer.clip_grad_norm(1.0, 1.0),
    "no state": lambda run: run.optimizer.set_state_dict({}),
    "no weights": lambda run: run.optimizer.sharded_state_dict(None),  # type: ignore[arg-type]
    "part of the model": lambda run: full_parameters(run.model.layers[0]).__enter__(),
    "save to nowhere": lambda run: hp_sharding.save(None, run.model, run.optimizer),  # type: ignore[arg-type]
    "save behind whom": lambda run: hp_sharding.save("x", run.model, run.optimizer, asynchronous="yes"),  # type: ignore[arg-type]
    "save another's": lambda run: hp_sharding.save("x", _other()[0], run.optimizer),
    "load from nowhere": lambda run: hp_sharding.load("a\0b", run.model, run.optimizer),
    "load how": lambda run: hp_sharding.load("x", run.model, run.optimizer, strict=None),  # type: ignore[arg-type]
    "save_full as what": lambda run: hp_sharding.save_full("x", run.model, run.optimizer, format=[]),  # type: ignore[arg-type]
    "load_full from nowhere": lambda run: hp_sharding.load_full("", run.model, run.optimizer),
    "record nothing": lambda run: run.optimizer.timeline.record(steps=0),
    "sink": lambda run: run.optimizer.timeline.add_sink(None),  # type: ignore[arg-type]
    "wrap again": lambda run: shard(run.model, make_optimizer("SGD", run.model)),
    "wrap the wrapped": lambda run: shard(_other()[0], run.optimizer),
    "wrap with what": lambda run: shard(*_other(), {"stage": 2}),  # type: ignore[arg-type]
    "units that are not there": lambda run: shard(*_other(), ShardingConfig(units=(nn.Conv2D,))),
    "a unit that is not there": lambda run: shard(
        *_other(), ShardingConfig(stage=3, reshard_after_forward={"nobody": False})
    ),
    "ranks that are not there": lambda run: shard(*_other(), shard_group=[paddle.distributed.get_rank(), _nobody()]),
    "a rank twice": lambda run: shard(*_other(), shard_group=[0, 1, paddle.distributed.get_rank()]),
    "ranks of another kind": lambda run: shard(*_other(), shard_group=[0.0, True]),
    "fleet before its start": lambda run: Session().distributed_model(_other()[0]),
    "degrees": lambda run: Session().init(strategy=_degrees(sharding_degree=3)),
    "a backend's level": lambda run: Session().init(log_level="loud"),
}
"""Each raises on the rank that makes it, and on that alone, with nothing sent."""


def _degrees(**degrees: int) -> Any:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = degrees
    return strategy


def _make_all(run: Wrapped) -> None:
    for name, mistake in MISTAKES.items():
        before = len(run.calls)
        with pytest.raises(HpShardingError):
            mistake(run)
        assert len(run.calls) == before, f"{name}: something was sent"


def _train(rank: int, nranks: int, stage: str, makes: bool) -> tuple[list[float], Values, list[Any]]:
    """Mistakes between all parts of a step, by the ranks that make them."""
    model = make_model("mlp")
    run = wrap(model, make_optimizer("AdamW", model), nranks, **SETTINGS[stage])
    seen = _make_all if makes else lambda run: None
    losses = []
    for step in range(STEPS):
        seen(run)
        loss = loss_of(model, make_batch("mlp", step, rank))
        seen(run)
        loss.backward()
        seen(run)
        run.optimizer.step()
        seen(run)
        run.optimizer.clear_grad()
        losses.append(float(loss))
    with full_parameters(model):
        return losses, values(model), [call[:3] for call in run.calls]


def _mistaken(rank: int, nranks: int, stage: str, who: list[int]) -> None:
    losses, expected, calls = _train(rank, nranks, stage, False)
    found = _train(rank, nranks, stage, rank in who)
    assert found[0] == losses
    assert_equal(found[1], expected, stage)
    assert found[2] == calls


@pytest.mark.parametrize("stage", SETTINGS)
@pytest.mark.parametrize("who", [[0, 1], [0], [1]], ids=["both", "the first", "the second"])
def test_mistakes_are_refused_before_anything_is_sent(stage: str, who: list[int]) -> None:
    harness.run(_mistaken, 2, stage, who, timeout_s=100)


# -- a rank that gives up ----------------------------------------------------------------------------------------------

WAIT_S = 3.0
WRONG: dict[str, tuple[Callable[[Wrapped, Any], Any], Callable[[Wrapped, Any], Any]]] = {
    "full_grad": (
        lambda run, _: run.optimizer.full_grad(run.model.gain),
        lambda run, _: run.optimizer.full_grad(None),
    ),
    "save": (
        lambda run, folder: hp_sharding.save(f"{folder}/saved", run.model, run.optimizer),
        lambda run, folder: hp_sharding.save(None, run.model, run.optimizer),  # type: ignore[arg-type]
    ),
    "full_parameters": (
        lambda run, _: full_parameters(run.model).__enter__(),
        lambda run, _: full_parameters(run.model.layers[1]).__enter__(),
    ),
    "record": (
        lambda run, _: run.optimizer.timeline.record().__enter__(),
        lambda run, _: run.optimizer.timeline.record(steps=-1),
    ),
    "shard": (
        lambda run, _: shard(*_other(), ShardingConfig(timeout_s=WAIT_S)),
        lambda run, _: shard(*_other(), 7),  # type: ignore[arg-type]
    ),
}
"""A call of all ranks: as it should be, and as the second one makes it."""


def _gives_up(rank: int, nranks: int, folder: str) -> dict[str, tuple[str, float]]:
    """The second rank is refused, and does not try again; the first one waits for it."""
    return {name: outcome for name in WRONG for outcome in _one_gives_up(rank, name, folder)}


def _one_gives_up(rank: int, name: str, folder: str) -> Iterator[tuple[str, float]]:
    model = make_model("mlp")
    config = ShardingConfig(stage=3, timeout_s=WAIT_S)
    run = Wrapped(model, shard(model, make_optimizer("SGD", model), config), [])  # type: ignore[arg-type]
    loss_of(model, make_batch("mlp", 0, rank)).backward()
    begin_s = time.monotonic()
    with pytest.raises(HpShardingError) as error:
        WRONG[name][rank](run, folder)
    took_s = time.monotonic() - begin_s
    assert isinstance(error.value, CommError) == (rank == 0), error.value
    paddle.distributed.barrier()
    yield str(error.value), took_s


def test_a_rank_that_waits_for_one_that_was_refused_hears_who_it_is(tmp_path: Any) -> None:
    outcomes = harness.run(_gives_up, 2, str(tmp_path), fresh=True, timeout_s=100)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert outcome.returncode == 0, outcome.output
    for name, (text, took_s) in outcomes[0].result.items():
        assert took_s < WAIT_S + 10, name
        assert "rank 1" in text or "ranks [1]" in text, f"{name}: {text}"
    assert all(took_s < WAIT_S for _, took_s in outcomes[1].result.values())
    with contextlib.suppress(FileNotFoundError):
        assert not list((tmp_path / "saved").iterdir())
