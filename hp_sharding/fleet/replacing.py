"""``paddles_face_replaced``: a script that was written for ``paddle.distributed.fleet`` finds this face in its place.

What has no counterpart here raises a ``ConfigError`` that says so, instead of doing half of the work.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import paddle
import paddle.distributed.fleet as paddle_fleet
from paddle.distributed.fleet.utils import hybrid_parallel_util

from ..config import ShardingConfig
from ..errors import ConfigError
from .session import Session
from .strategy import DistributedStrategy

_FLEET = "paddle.distributed.fleet"
_OPTIMIZERS = f"{_FLEET}.meta_optimizers.dygraph_optimizer"
_USE = "wrap the model and the optimizer with fleet.distributed_model and fleet.distributed_optimizer instead"


class _Refused(NamedTuple):
    """Something of Paddle's that this face cannot stand in for: the class or function, and what to do."""

    module: str
    name: str
    instead: str


_SHARDED_STAGE = "choose the stage with --stage and " + _USE
_PIPELINE = "a pipeline has a schedule of its own, in which gathers and reductions of sharding have no place"
_REFUSED = [
    _Refused("paddle.distributed.parallel", "DataParallel", f"it would reduce the gradients a second time; {_USE}"),
    _Refused("paddle.distributed.sharding", "group_sharded_parallel", _SHARDED_STAGE),
    _Refused("paddle.distributed.sharding", "save_group_sharded_model", "save model.state_dict() instead"),
    _Refused("paddle.distributed.sharding.group_sharded", "group_sharded_parallel", _SHARDED_STAGE),
    _Refused(f"{_FLEET}.meta_parallel.sharding.group_sharded_optimizer_stage2", "GroupShardedOptimizerStage2", _USE),
    _Refused(f"{_FLEET}.meta_parallel.sharding.group_sharded_stage2", "GroupShardedStage2", _SHARDED_STAGE),
    _Refused(f"{_FLEET}.meta_parallel.sharding.group_sharded_stage3", "GroupShardedStage3", _SHARDED_STAGE),
    _Refused("paddle.distributed.fsdp.fully_shard", "fully_shard", _SHARDED_STAGE),
    _Refused("paddle.distributed.fsdp", "fully_shard", _SHARDED_STAGE),
    _Refused(f"{_FLEET}.meta_parallel", "PipelineLayer", _PIPELINE),
    _Refused(f"{_FLEET}.meta_parallel", "PipelineParallel", _PIPELINE),
    _Refused(f"{_FLEET}.meta_parallel", "DualPipeVParallel", _PIPELINE),
    _Refused(f"{_FLEET}.meta_parallel", "SegmentParallel", "leave sep_degree at 1"),
    _Refused(_OPTIMIZERS, "HybridParallelOptimizer", _USE),
    _Refused(_OPTIMIZERS, "HeterParallelOptimizer", _USE),
    _Refused(_OPTIMIZERS, "DygraphShardingOptimizer", _USE),
    _Refused(f"{_OPTIMIZERS}.dygraph_sharding_optimizer", "DygraphShardingOptimizerV2", _USE),
]  # fmt: skip


@contextlib.contextmanager
def paddles_face_replaced(session: Session, settings: Mapping[str, Any]) -> Iterator[None]:
    """Inside, ``paddle.distributed.fleet`` shards: its five functions and classes are those of ``hp_sharding.fleet``.

    Args:
        session: what the functions work on.
        settings: keys of ``hp_sharding_configs`` for strategies that do not set them, such as Paddle's own.

    Raises:
        ConfigError: ``settings`` has a key or value that cannot be.
    """
    ShardingConfig.from_dict(settings)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(session, "defaults", dict(settings)))
        for owner, name, ours in _replacements(session):
            stack.enter_context(_replaced(owner, name, ours))
        for refused in _REFUSED:
            stack.enter_context(_refuses(refused))
        yield


def _replacements(session: Session) -> Iterator[tuple[Any, str, Any]]:
    """Every place where Paddle keeps one of the names: the package, its ``Fleet`` object, and the modules behind."""
    fleet = importlib.import_module(_FLEET)
    places = {
        "init": [fleet, paddle_fleet.fleet],
        "distributed_model": [fleet, importlib.import_module(f"{_FLEET}.model")],
        "distributed_optimizer": [fleet, paddle_fleet.fleet, importlib.import_module(f"{_FLEET}.optimizer")],
        "distributed_scaler": [fleet, importlib.import_module(f"{_FLEET}.scaler")],
    }
    for name, owners in places.items():
        yield from ((owner, name, getattr(session, name)) for owner in owners)
    base = importlib.import_module(f"{_FLEET}.base.distributed_strategy")
    yield from ((owner, "DistributedStrategy", DistributedStrategy) for owner in (fleet, base))
    reduce = _reducing(session, hybrid_parallel_util.fused_allreduce_gradients)
    yield hybrid_parallel_util, "fused_allreduce_gradients", reduce


def _reducing(session: Session, paddles: Callable[..., Any]) -> Callable[..., Any]:
    def fused_allreduce_gradients(parameter_list: Any, hcg: Any) -> None:
        """Does nothing for parameters of a wrapped model: ``backward()`` and ``step()`` reduce their gradients."""
        params = list(parameter_list)
        if not session.owns(params):
            paddles(params, hcg)

    return fused_allreduce_gradients


@contextlib.contextmanager
def _replaced(owner: Any, name: str, ours: Any) -> Iterator[None]:
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def _refuses(refused: _Refused) -> Iterator[None]:
    """A function is replaced; a class stays, for ``isinstance``, and cannot be made."""
    module = importlib.import_module(refused.module)
    thing: Any = getattr(module, refused.name)
    if not isinstance(thing, type):
        with _replaced(module, refused.name, _refusal(refused, None)):
            yield
        return
    with _replaced(thing, "__init__", _refusal(refused, vars(thing)["__init__"])):
        yield


def _refusal(refused: _Refused, paddles: Callable[..., None] | None) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        if paddles is not None and paddle.distributed.get_world_size() == 1:
            paddles(*args, **kwargs)  # on its own it does no harm
            return
        raise ConfigError(
            f"{refused.name}: hp_sharding has no counterpart of it that could stand in its place: {refused.instead}. "
            "Or start the script without hp_sharding"
        )

    return refuse
