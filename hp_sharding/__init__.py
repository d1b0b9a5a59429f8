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
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import fleet, timeline
    from .buffer import FusedCommBuffer, Status
    from .checkpoint import latest_checkpoint, load, load_full, save, save_full
    from .config import ShardingConfig
    from .errors import CheckpointError, CommError, ConfigError, HpShardingError, LayoutError, StateError
    from .optimizer import ShardedOptimizer
    from .sharding import full_parameters, shard

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

_MODULES = ("fleet", "timeline")
_HOMES = {
    "buffer": ("FusedCommBuffer", "Status"),
    "checkpoint": ("latest_checkpoint", "load", "load_full", "save", "save_full"),
    "config": ("ShardingConfig",),
    "errors": ("CheckpointError", "CommError", "ConfigError", "HpShardingError", "LayoutError", "StateError"),
    "optimizer": ("ShardedOptimizer",),
    "sharding": ("full_parameters", "shard"),
}
"""By module, what is public of it."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # to a type checker every name would be one

    def __getattr__(name: str) -> Any:
        # With the first use: most of it imports Paddle, which takes seconds, and a trace can be looked at without.
        if name in _HOME_OF:
            found = getattr(_imported(_HOME_OF[name]), name)
            globals()[name] = found
            return found
        if name in _MODULES or _is_module(name):
            return _imported(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(f"{__name__}.{module}")
    except AttributeError as error:
        # From here it would mean that there is no such name; it is some package below that does not fit another one.
        raise ImportError(f"{__name__}.{module} cannot be imported: AttributeError: {error}") from error


def _is_module(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
