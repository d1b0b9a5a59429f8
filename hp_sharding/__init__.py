"""hp_sharding: ZeRO sharding for PaddlePaddle dygraph whose communication hides behind compute.

``from hp_sharding import fleet`` takes the place of ``from paddle.distributed import fleet``; ``shard`` does the same
without fleet.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .buffer import FusedCommBuffer, Status
from .config import ShardingConfig
from .errors import CommError, ConfigError, HpShardingError, LayoutError, StateError
from .optimizer import ShardedOptimizer
from .sharding import full_parameters, shard

if TYPE_CHECKING:
    from . import fleet, timeline

__all__ = [
    "CommError",
    "ConfigError",
    "FusedCommBuffer",
    "HpShardingError",
    "LayoutError",
    "ShardedOptimizer",
    "ShardingConfig",
    "StateError",
    "Status",
    "fleet",
    "full_parameters",
    "shard",
    "timeline",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # fleet imports paddle.distributed.fleet, which those who do not use it need not wait for.
    if name in ("fleet", "timeline"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
