"""A training script that knows Paddle's fleet and nothing else; ``python -m hp_sharding.run`` shards it.

paddle_script.py FOLDER: each rank leaves its losses, its parameters and what it found there as ``rank<N>.pickle``.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet import DistributedStrategy
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

STEPS = 3


def make_model() -> paddle.nn.Layer:
    paddle.seed(11)
    return paddle.nn.Sequential(paddle.nn.Linear(6, 40), paddle.nn.GELU(), paddle.nn.Linear(40, 3))


def make_optimizer(model: paddle.nn.Layer) -> Any:
    clip = paddle.nn.ClipGradByGlobalNorm(0.05)
    return paddle.optimizer.Momentum(0.1, parameters=model.parameters(), grad_clip=clip)


def loss_of(model: paddle.nn.Layer, step: int, rank: int) -> paddle.Tensor:
    generator = np.random.default_rng([step, rank])
    x = paddle.to_tensor(generator.standard_normal([4, 6], dtype=np.float32))
    return (model(x) ** 2).mean()


def main(folder: str) -> None:
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 2}
    strategy.hybrid_configs["sharding_configs"].comm_overlap = True
    fleet.init(is_collective=True, strategy=strategy)
    rank = fleet.worker_index()
    model = make_model()
    optimizer = make_optimizer(model)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, rank)
        loss.backward()
        fused_allreduce_gradients(list(model.parameters()), None)
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    found = {
        "losses": losses,
        "params": {name: value.numpy() for name, value in model.state_dict().items()},
        "config": getattr(optimizer, "config", None),
        "arguments": sys.argv,
    }
    Path(folder, f"rank{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
