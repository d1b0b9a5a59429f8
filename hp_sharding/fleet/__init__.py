"""``paddle.distributed.fleet`` with sharding: change the import and set a flag.

::

    import paddle
    from hp_sharding import fleet                      # was: from paddle.distributed import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "sharding_degree": 2}
    strategy.hp_sharding_configs = {"stage": 2, "allgather_overlap": True, "reduce_overlap": True}
    fleet.init(is_collective=True, strategy=strategy)

    model = fleet.distributed_model(Net())             # the same Layer object, the same state_dict keys
    optimizer = fleet.distributed_optimizer(paddle.optimizer.AdamW(parameters=model.parameters()))
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()

``python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo train.py`` starts it. The keys of the flag are
the fields of ``hp_sharding.ShardingConfig``. Everything else of ``paddle.distributed.fleet`` is here as an attribute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle.distributed.fleet as _paddle_fleet

from .session import Session
from .strategy import DistributedStrategy, sharding_config

if TYPE_CHECKING:
    import paddle
    from paddle.distributed.fleet import DistributedStrategy as PaddleStrategy

    from ..optimizer import ShardedOptimizer
    from ..plain import PlainOptimizer

__all__ = [
    "DistributedStrategy",
    "distributed_model",
    "distributed_optimizer",
    "distributed_scaler",
    "init",
    "sharding_config",
]

_SESSION = Session()


def init(
    role_maker: Any = None,
    is_collective: bool = True,
    strategy: PaddleStrategy | None = None,
    log_level: int | str = "INFO",
) -> _paddle_fleet.Fleet:
    """Starts the parallel environment and settles how what is wrapped afterwards is sharded.

    In one process it is plain training. A second call takes the new strategy. Where ``hybrid_configs`` sets no degree,
    all ranks form one shard group (Paddle would replicate); the data is split in the same way, with the same result.

    Args:
        role_maker: as in Paddle.
        is_collective: must be True, which is the default here.
        strategy: ours, or Paddle's own; None for the defaults of ``ShardingConfig``.
        log_level: as in Paddle, of Paddle's own messages.

    Returns:
        Paddle's ``Fleet``, as ``paddle.distributed.fleet.init`` does.

    Raises:
        ConfigError: settings that are unknown, contradict each other, or do not fit the number of ranks. No collective
            has then started.
    """
    return _SESSION.init(role_maker, is_collective, strategy, log_level)


def distributed_model(model: paddle.nn.Layer) -> paddle.nn.Layer:
    """Remembers ``model`` and gives all ranks rank 0's parameters and buffers.

    With ``mp_degree`` above 1 each rank keeps its own parts of the parameters that are split (``is_distributed``), and
    every forward takes the tensors that the first rank of the group passes to it. A group calls the model together.

    Args:
        model: any Layer; it may still be changed until ``distributed_optimizer`` is called.

    Returns:
        The same object.

    Raises:
        ConfigError: before ``init``, the second time for a model, for one that shares trainable parameters with a
            wrapped one, or that has parameters without a value.
        CommError: a rank has not come within ``timeout_s``, is gone, or its model is of other shapes.
    """
    return _SESSION.distributed_model(model)


def distributed_optimizer(
    optimizer: paddle.optimizer.Optimizer, strategy: PaddleStrategy | None = None
) -> ShardedOptimizer | PlainOptimizer:
    """Shards ``optimizer`` and the wrapped model that owns its parameters; of several models it finds the right one.

    Args:
        optimizer: made with parameters of one model that was passed to ``distributed_model``. A
            ``MixPrecisionOptimizer`` of Paddle's around it, or a ``MixPrecisionLayer``, means ``main_grad``.
        strategy: settings for this optimizer instead of those given to ``init``; its degrees and its ``timeout_s`` must
            be the same.

    Returns:
        The optimizer to use instead of the one given; on several ranks also what scripts take Paddle's own for, see
        docs/fleet.md. In one process it is plain training.

    Raises:
        ConfigError: before ``init`` or ``distributed_model``, the second time for an optimizer, for one whose
            parameters do not belong to one wrapped model, or that cannot be sharded (see ``hp_sharding.shard``). No
            collective has then started.
    """
    return _SESSION.distributed_optimizer(optimizer, strategy)


def distributed_scaler(scaler: Any) -> Any:
    """Returns ``scaler``, a ``paddle.amp.GradScaler``, which works on a sharded optimizer as it is.

    It divides the reduced gradients where they lie, and all ranks skip the step in which any of them has found one that
    is not finite.

    Raises:
        ConfigError: before ``init``, or for what is not made of Paddle's scaler.
    """
    return _SESSION.distributed_scaler(scaler)


def __getattr__(name: str) -> Any:
    try:
        return getattr(_paddle_fleet, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} and Paddle's have no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_paddle_fleet)})
