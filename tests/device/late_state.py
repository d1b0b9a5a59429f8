"""State beside gradients that is on its way while somebody goes on: plays of ``test_keep_alive``."""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn

from hp_sharding import full_parameters
from hp_sharding.optimizer import ShardedOptimizer
from tests.device import standin
from tests.lanes import wrap
from tests.models import loss_on, make_model, make_optimizer
from tests.reference import Values, statistics
from tests.sides import BOTH, SETTINGS, Factory, compare

_ORDER = 2e-6
"""Of the largest element: one process adds in another order."""


def _normed(new: Factory) -> dict[str, Values]:
    """Running statistics are those of the first rank."""
    side = new(lambda: make_model("conv"), lambda model: make_optimizer("SGD", model))
    for step in range(2):
        side.backward(loss_on(side.model, "conv", step))
        side.step()
        side.clear_grad()
    return {"statistics": statistics(side.model) if side.sharded else side._runs.statistics[0]}


def late_statistics(rank: int, nranks: int) -> None:
    """They are on their way for longer than the whole step takes."""
    standin.Device().set_pace(standin.Pace(latency_ms=100.0, slowed=("broadcast",)))
    compare(rank, nranks, _normed, {"stage 2": SETTINGS["stage 2"]}, _ORDER)


def written_at_once(rank: int, nranks: int) -> None:
    """A value as wide as the master, while the gather is on its way that would overwrite it."""
    settings = {"stage": 2, **BOTH, "gather_dtype": "bfloat16", "param_dtype": "bfloat16", "cast_forward_inputs": False}
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model, optimizer, _ = wrap(model, paddle.optimizer.SGD(0.1, parameters=model.parameters()), nranks, **settings)
    params = model.parameters()  # asked for later, they would be waited for
    _step_of_squares(params, optimizer)
    for number, param in enumerate(params):
        param.set_value(paddle.full(param.shape, 1.5 + number))
    for number, param in enumerate(params):
        np.testing.assert_array_equal(param.astype("float32").numpy(), np.full(param.shape, 1.5 + number, np.float32))


def begun_alike(rank: int, nranks: int) -> None:
    """All ranks have the values of the first one as soon as they are wrapped."""
    paddle.seed(0)
    expected = nn.Linear(16, 16).weight.numpy().copy()
    paddle.seed(rank)
    model = nn.Linear(16, 16)
    wrapped = wrap(model, make_optimizer("SGD", model), nranks, **SETTINGS["stage 2"])
    with full_parameters(wrapped.model):
        np.testing.assert_array_equal(model.weight.numpy(), expected)


# ---- what a step leaves behind ----


def loaded_at_once(rank: int, nranks: int) -> None:
    """A state is loaded while gathers read what it goes into: the optimizer's first, then the model's."""
    settings = {"stage": 2, **BOTH, "param_dtype": "bfloat16", "cast_forward_inputs": False}
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model, optimizer, _ = wrap(model, paddle.optimizer.SGD(0.1, parameters=model.parameters()), nranks, **settings)
    params = model.parameters()
    _step_of_squares(params, optimizer)
    saved = [buffer.shard.numpy().copy() for buffer in optimizer.buffers]
    weights = [param.clone() for param in params]
    masters = {name: part.clone() for name, part in optimizer.state_dict()["master_weights"].items()}
    state = {**optimizer.state_dict(), "master_weights": masters}
    _step_of_squares(params, optimizer)
    optimizer.set_state_dict(state)
    for param, weight in zip(params, weights, strict=True):
        param.set_value(weight)
    for buffer, expected in zip(optimizer.buffers, saved, strict=True):
        np.testing.assert_array_equal(buffer.shard.numpy(), expected)


def _step_of_squares(params: list[paddle.Tensor], optimizer: ShardedOptimizer) -> None:
    sum((param.astype("float32") ** 2).sum() for param in params).backward()
    optimizer.step()
    optimizer.clear_grad()
