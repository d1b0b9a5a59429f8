"""Paddle's own way to float32 gradients, ``MixPrecisionLayer`` and ``MixPrecisionOptimizer``, beside sharding.

Paddle's layer hooks each gradient into ``param.main_grad`` and leaves nothing in ``param.grad``; its optimizer reads it
there. Sharded, the gradient is taken from ``main_grad`` into the bucket instead, which is kept in float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import paddle
from paddle.distributed.fleet import DistributedStrategy as PaddleStrategy
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionOptimizer

from ..config import ShardingConfig
from ..errors import ConfigError


def inner_optimizer(optimizer: Any) -> Any:
    """What a ``MixPrecisionOptimizer`` holds; anything else as it is."""
    return optimizer._inner_opt if isinstance(optimizer, MixPrecisionOptimizer) else optimizer


def settle(
    config: ShardingConfig, model: paddle.nn.Layer, optimizer: Any, strategy: PaddleStrategy | None
) -> ShardingConfig:
    """``config`` with ``main_grad``, where the model or the optimizer has been wrapped for it in Paddle's way.

    Raises:
        ConfigError: the strategy says ``main_grad`` False.
    """
    asked = [
        *(["MixPrecisionOptimizer"] if isinstance(optimizer, MixPrecisionOptimizer) else []),
        *(["MixPrecisionLayer"] if any(hasattr(param, "main_grad") for param in model.parameters()) else []),
    ]
    if not asked or config.main_grad:
        return config
    if "main_grad" in getattr(strategy, "hp_sharding_configs", {}):
        raise ConfigError(
            f"hp_sharding_configs['main_grad']=False contradicts {' and '.join(asked)}, which is for float32 "
            "gradients: remove one of the two"
        )
    return dataclasses.replace(config, main_grad=True)
