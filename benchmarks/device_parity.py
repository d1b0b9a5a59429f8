"""Paddle's sharding V2 and hp_sharding beside one process, on two stand-in devices: how far parameters are apart.

::

    python -m benchmarks.device_parity

Each rank trains on batches of its own and compares with a run of all ranks' batches in plain Paddle. V2 is tried with
``clear_grad()``, as scripts call it, and with gradients zeroed where they lie. The last line is one JSON object.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import paddle

STEPS = 3
_ROWS = 8


def _model() -> paddle.nn.Layer:
    import paddle
    from paddle import nn

    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    drawn = np.random.default_rng(0)
    for param in model.parameters():
        param.set_value(paddle.to_tensor(0.2 * drawn.standard_normal(param.shape, dtype=np.float32)))
    return model


def _optimizer(kind: str, model: paddle.nn.Layer) -> paddle.optimizer.Optimizer:
    import paddle

    rate = {"SGD": 0.1, "AdamW": 0.01}[kind]
    return getattr(paddle.optimizer, kind)(learning_rate=rate, parameters=model.parameters())


def _loss(model: paddle.nn.Layer, step: int, rank: int) -> paddle.Tensor:
    import paddle

    drawn = np.random.default_rng([step, rank])
    inputs, targets = (paddle.to_tensor(drawn.standard_normal((_ROWS, n), dtype=np.float32)) for n in (16, 4))
    return ((model(inputs) - targets) ** 2).mean()


def _values(model: paddle.nn.Layer) -> list[np.ndarray[Any, Any]]:
    return [param.numpy() for param in model.parameters()]


def _plain(kind: str, nranks: int) -> list[list[np.ndarray[Any, Any]]]:
    model = _model()
    optimizer = _optimizer(kind, model)
    found = []
    for step in range(STEPS):
        for rank in range(nranks):
            _loss(model, step, rank).backward()
        for param in model.parameters():
            param.grad.detach().scale_(1.0 / nranks)
        optimizer.step()
        optimizer.clear_grad()
        found.append(_values(model))
    return found


def _apart(one: list[np.ndarray[Any, Any]], other: list[np.ndarray[Any, Any]]) -> float:
    return max(float(np.abs(mine - theirs).max()) for mine, theirs in zip(one, other, strict=True))


def _v2(kind: str, *, replicas: int, degree: int, overlap: bool) -> tuple[paddle.nn.Layer, Any]:
    from paddle.distributed import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": replicas, "sharding_degree": degree}
    settings = strategy.hybrid_configs["sharding_configs"]
    settings.split_param, settings.comm_overlap, settings.accumulate_steps = True, overlap, 1
    fleet.init(is_collective=True, strategy=strategy)
    model = _model()
    optimizer = fleet.distributed_optimizer(_optimizer(kind, model))
    return fleet.distributed_model(model), optimizer


def replicas_of_v2(rank: int, nranks: int) -> list[np.ndarray[Any, Any]]:
    """Parameters after the first step of two replicas of two ranks: rank 0 and rank 2 should have the same."""
    model, optimizer = _v2("AdamW", replicas=2, degree=2, overlap=False)
    _loss(model, 0, rank).backward()
    optimizer.step()
    return _values(model)


def with_v2(rank: int, nranks: int, kind: str, overlap: bool, in_place: bool) -> list[float]:
    """Paddle's sharding V2: the largest difference of any parameter after each step."""
    import paddle

    expected = _plain(kind, nranks)
    model, optimizer = _v2(kind, replicas=1, degree=nranks, overlap=overlap)
    differences = []
    for step in range(STEPS):
        _loss(model, step, rank).backward()
        optimizer.step()
        if in_place:
            with paddle.no_grad():
                for param in model.parameters():
                    param.grad.zero_()
        else:
            optimizer.clear_grad()
        differences.append(_apart(_values(model), expected[step]))
    return differences


def with_ours(rank: int, nranks: int, kind: str, stage: int) -> list[float]:
    """The same of hp_sharding, with ``clear_grad()``."""
    import hp_sharding

    expected = _plain(kind, nranks)
    model = _model()
    config = hp_sharding.ShardingConfig(stage=stage, allgather_overlap=True, reduce_overlap=True)
    optimizer = hp_sharding.shard(model, _optimizer(kind, model), config)
    differences = []
    for step in range(STEPS):
        _loss(model, step, rank).backward()
        optimizer.step()
        optimizer.clear_grad()
        with hp_sharding.full_parameters(model):
            differences.append(_apart(_values(model), expected[step]))
    return differences


def main() -> None:
    """Prints one row a way of training, then all of them as JSON."""
    from benchmarks import device_parity as here  # as a module of its own name: ranks import what they are to run
    from tests.device.running import on_device
    from tests.harness import RankFailure

    found: dict[str, list[float] | str] = {}
    for kind in ("AdamW", "SGD"):
        for overlap in (False, True):
            for in_place in (False, True):
                row = f"V2, {kind}, {'zeroed in place' if in_place else 'clear_grad()'}{', overlap' if overlap else ''}"
                try:
                    found[row] = on_device(here.with_v2, 2, kind, overlap, in_place)[0]
                except RankFailure as failure:
                    lines = [line for line in str(failure).splitlines() if "Error: " in line]
                    found[row] = lines[0][:110] if lines else "failed"
        for stage in (1, 2, 3):
            found[f"hp_sharding, stage {stage}, {kind}"] = on_device(here.with_ours, 2, kind, stage)[0]
    values = on_device(here.replicas_of_v2, 4)
    found["V2, AdamW, two replicas, one beside the other"] = [_apart(values[0], values[2])]
    for row, differences in found.items():
        text = differences if isinstance(differences, str) else "  ".join(f"{each:8.1e}" for each in differences)
        print(f"{row:46} {text}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
