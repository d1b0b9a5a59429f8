"""hp_sharding: ZeRO sharding for PaddlePaddle dygraph whose communication hides behind compute.

``from hp_sharding import fleet`` takes the place of ``from paddle.distributed import fleet``; ``shard`` does the same
without fleet. Both give a ``ShardedOptimizer``, or plain training in one process. ``ShardingConfig`` has the settings,
``full_parameters`` makes whole values readable; ``save`` and ``load`` are for checkpoints, ``save_full`` and
``load_full`` for files of whole tensors; ``timeline`` says where the time of a step goes. A ``FusedCommBuffer``, which
has one ``Status`` at a time, is a bucket, as ``optimizer.buffers`` and ``optimizer.param2bucket`` show it. Every error
raised on purpose is an ``HpShardingError``. What is not in ``__all__`` is private.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .buffer import FusedCommBuffer, Status
from .checkpoint import latest_checkpoint, load, load_full, save, save_full
from .config import ShardingConfig
from .errors import CheckpointError, CommError, ConfigError, HpShardingError, LayoutError, StateError
from .optimizer import ShardedOptimizer
from .sharding import full_parameters, shard

if TYPE_CHECKING:
    from . import fleet, timeline

__all__ = [
    "CheckpointError",
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
    "latest_checkpoint",
    "load",
    "load_full",
    "save",
    "save_full",
    "shard",
    "timeline",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # fleet imports paddle.distributed.fleet, which those who do not use it need not wait for.
    if name in ("fleet", "timeline"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
