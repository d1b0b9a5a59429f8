"""``shard``: wraps a model and its optimizer. ``full_parameters``: the whole values, for a while."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase

from . import guard, hooks
from .assembly import CONTROL, Foundation, LayOut, Member, assemble
from .broadcast import broadcast_state, check_state_exists
from .buffer import BufferPlace, FusedCommBuffer, Status
from .comm import (
    Communicator,
    Fingerprint,
    allocated_bytes,
    create_communicators,
    current_device,
    fingerprint,
)  # fmt: skip
from .config import ShardingConfig
from .errors import ConfigError
from .layout import ITEM_BYTES, BucketLayout, ParamSpec, plan_buckets
from .optimizer import ShardedOptimizer
from .plain import PlainOptimizer
from .pool import DTYPES, DevicePool, StoragePool
from .precision import bucket_dtypes, cast_unsharded, dtype_name, has_masters, kept_as_they_are, with_master_grad
from .recorded import ShardedSubject
from .running import RunningState
from .schedule import Schedule, keep_schedule, schedule_of
from .timeline import Timeline
from .tuning import Tuner, begin
from .units import Unit, UnitParam, UnitPlan, find_units
from .updates import check_fresh, check_optimizer, optimizer_params

LOG = logging.getLogger("hp_sharding")
LANES = ("gather", "reduce")
"""Over the ranks of a shard group."""
REPLICA_LANES = ("replicate",)
"""Over the replicas of a shard, where there are several."""
TENSOR_LANES = ("tensor",)
"""Over the ranks among which tensor parallelism has split parameters, where there are several."""


class Grid(NamedTuple):
    """The ranks that share the data: those among which a replica is sharded, times the replicas.

    Attributes:
        shard: global ranks of this rank's shard group.
        replicate: global ranks that hold the same shard, one of each replica.
        tensor: global ranks that together hold the parameters that tensor parallelism has split (``is_distributed``),
            and see the same data; empty where there are none.
    """

    shard: list[int]
    replicate: list[int]
    tensor: tuple[int, ...] = ()

    @property
    def n_ranks(self) -> int:
        """All data ranks."""
        return len(self.shard) * len(self.replicate)


def shard(
    model: nn.Layer,
    optimizer: paddle.optimizer.Optimizer,
    config: ShardingConfig | None = None,
    *,
    shard_group: Any = None,
    replicate_group: Any = None,
    tensor_parallel_group: Any = None,
) -> ShardedOptimizer | PlainOptimizer:
    """Shards ``optimizer``, and the gradients and parameters of ``model`` as ``config`` says, over a group of ranks.

    The model stays the same object with the same ``state_dict`` keys; rank 0's parameters and buffers are copied to
    all. Every rank of the group calls it, with the same model and settings.

    Args:
        model: built alike on all ranks.
        optimizer: a Paddle optimizer over some or all of the model's parameters that updates element by element.
        config: settings; None for the defaults.
        shard_group: a Paddle group or global ranks among which a replica is sharded; None for all ranks, or for this
            rank alone where there is a replicate group.
        replicate_group: a Paddle group or global ranks that hold the same shard, one of each replica; None for one
            replica. It and the shard group have this rank in common, and no other.
        tensor_parallel_group: a Paddle group or global ranks that share this rank's data and hold the other parts of
            parameters that are split between layers' ranks (``param.is_distributed``); None where none is. The other
            parameters are the same on all of them.

    Returns:
        The optimizer to use instead of the one given. In a group of one it is plain training, unless ``config`` asks
        for mixed precision.

    Raises:
        ConfigError: wrapped before, an optimizer that cannot be sharded or has made a step, parameters that the model
            does not have or that have no value yet, or a layer that cannot be served. No collective has then started.
        CommError: a rank has not come within ``timeout_s``, or is gone.
    """
    grid = _grid(shard_group, replicate_group, tensor_parallel_group)
    config = config if config is not None else ShardingConfig()
    if not isinstance(config, ShardingConfig):
        raise ConfigError(
            f"config: expected a ShardingConfig, got {type(config).__name__}. ShardingConfig.from_dict() makes one of "
            "a dict"
        )
    check_wrap(model, optimizer)
    check_dtypes(model, optimizer, config)
    if grid.n_ranks > 1 or grid.tensor:
        check_split(optimizer, grid.tensor)
        check_fresh(optimizer)
        check_state_exists(model)
    return shard_over(model, optimizer, config, lanes=open_lanes(model, grid, timeout_s=config.timeout_s))


def open_lanes(model: nn.Layer, grid: Grid, *, timeout_s: float) -> dict[str, Communicator]:
    """Connects the ranks and gives all of them the first one's parameters and buffers. Nothing for one rank."""
    if grid.n_ranks == 1 and len(grid.tensor) < 2:
        return {}
    lanes = connect(grid, timeout_s=timeout_s)
    broadcast_model(model, lanes)
    return lanes


def connect(grid: Grid, *, timeout_s: float) -> dict[str, Communicator]:
    """The lanes that ``build`` needs. Collective."""
    debug = [fingerprint.LANE] if fingerprint.is_wanted() else []
    control = [CONTROL[0]] if current_device().has_streams else []
    lanes = create_communicators(grid.shard, LANES, host_lanes=[*control, *debug], timeout_s=timeout_s)
    if len(grid.replicate) > 1:
        host_lanes = [CONTROL[1]]
        lanes |= create_communicators(grid.replicate, REPLICA_LANES, host_lanes=host_lanes, timeout_s=timeout_s)
    if len(grid.tensor) > 1:
        lanes |= create_communicators(grid.tensor, TENSOR_LANES, timeout_s=timeout_s)
    return lanes


def broadcast_model(model: nn.Layer, lanes: Mapping[str, Communicator]) -> None:
    """Gives all ranks the first one's parameters and buffers."""
    broadcast_state(model, *_model_lanes(lanes), tensor=lanes.get("tensor"))


def _model_lanes(lanes: Mapping[str, Communicator]) -> list[Communicator]:
    """Lanes that one after the other reach all data ranks, from the first one on, with tensors of the model."""
    return [lanes[name] for name in ("replicate", "gather") if name in lanes]


def shard_over(
    model: nn.Layer,
    optimizer: paddle.optimizer.Optimizer,
    config: ShardingConfig,
    *,
    lanes: dict[str, Communicator],
) -> ShardedOptimizer | PlainOptimizer:
    """``shard`` over what ``open_lanes`` returned. Raises ConfigError before any collective starts."""
    check_wrap(model, optimizer)
    baseline_bytes = allocated_bytes() - _param_bytes(model)
    if not lanes and (config.is_mixed or config.gradient_divisor(1) != 1):
        me = paddle.distributed.get_rank()
        lanes = connect(Grid([me], [me]), timeout_s=config.timeout_s)
    if not lanes:
        names = {id(param): name for name, param in model.named_parameters()}
        if config.tunes:
            LOG.debug("one process sends nothing, so there is nothing to tune")
        return PlainOptimizer(optimizer, config, baseline_bytes, names=names, model=model)
    check_split(optimizer, lanes["tensor"].ranks if "tensor" in lanes else ())
    check_fresh(optimizer)
    sharded = build(model, optimizer, config, lanes=lanes)
    sharded._baseline_bytes = baseline_bytes
    return sharded


def check_split(optimizer: paddle.optimizer.Optimizer, tensor: Sequence[int]) -> None:
    """Raises ConfigError for parameters that are split over ranks which nobody has named: norms would be of parts."""
    split = [param for param in optimizer_params(optimizer) if getattr(param, "is_distributed", False)]
    if split and len(tensor) < 2:
        raise ConfigError(
            f"parameter '{split[0].name}' is split over several ranks (is_distributed), but nobody said over which, so "
            "norms would be those of its parts. With fleet set mp_degree, else pass tensor_parallel_group"
        )


def check_wrap(model: nn.Layer, optimizer: paddle.optimizer.Optimizer) -> None:
    """Raises ConfigError for what ``shard`` cannot wrap. Looks at this rank only, and changes nothing."""
    if not isinstance(model, nn.Layer):
        raise ConfigError(f"model: expected a paddle.nn.Layer, got {type(model).__name__}")
    if isinstance(optimizer, (ShardedOptimizer, PlainOptimizer)):
        raise ConfigError("this optimizer is already sharded; wrap it once")
    if schedule_of(model) is not None:
        raise ConfigError(f"this {type(model).__name__} is already sharded; wrap it once, with one optimizer")
    shared = guard.held_param(model)
    if shared is not None:
        raise ConfigError(
            f"parameter '{shared}' belongs to a model that is already sharded. Wrap the outermost model, once, with "
            "one optimizer"
        )
    check_optimizer(optimizer)
    names = {id(param): name for name, param in model.named_parameters()}
    params = optimizer_params(optimizer)
    foreign = [param.name for param in params if id(param) not in names]
    if foreign:
        raise ConfigError(
            f"the optimizer holds {len(foreign)} of {len(params)} parameters that the model does not have, such as "
            f"'{foreign[0]}'. Make the optimizer with parameters of the model that is wrapped"
        )
    device = current_device()
    elsewhere = [param for param in params if param._is_initialized() and param.size and not device.holds(param)]
    if elsewhere:
        raise ConfigError(
            f"parameter '{names[id(elsewhere[0])]}' lies on {elsewhere[0].place}, but this process computes on "
            f"{device.name}. Build the model after paddle.set_device, or after fleet.init, which sets the device"
        )
    strange = [param for param in params if not param.stop_gradient and dtype_name(param) not in DTYPES]
    if strange:
        raise ConfigError(
            f"parameter '{names[id(strange[0])]}' is of {dtype_name(strange[0])}; what trains must be one of "
            f"{', '.join(DTYPES)}"
        )
    if not any(param.size for param in params):
        raise ConfigError("the optimizer holds no parameter with elements: there is nothing to shard")
    sparse = guard.sparse_embedding(model)
    if sparse is not None:
        raise ConfigError(sparse)


def check_dtypes(model: nn.Layer, optimizer: paddle.optimizer.Optimizer, config: ShardingConfig) -> None:
    """Raises ConfigError for a dtype setting that some parameter cannot honour."""
    held = {id(param) for param in optimizer_params(optimizer)}
    masters = has_masters(optimizer, config)
    exempt = kept_as_they_are(model, config.param_dtype)
    for name, param in model.named_parameters():
        if _is_sharded(param, held, config):
            bucket_dtypes(param, name, _config_for(param, exempt, config), masters=masters)


def _config_for(param: EagerParamBase, exempt: set[int], config: ShardingConfig) -> ShardingConfig:
    """The settings for one parameter: those that must stay exact are, on their way too."""
    return dataclasses.replace(config, param_dtype=None, gather_dtype=None) if id(param) in exempt else config


def build(
    model: nn.Layer,
    optimizer: paddle.optimizer.Optimizer,
    config: ShardingConfig,
    *,
    lanes: dict[str, Communicator],
    pool: StoragePool | None = None,
    lay_out: LayOut = plan_buckets,
) -> ShardedOptimizer:
    """``shard`` over communicators that exist, also over a group of one: checks and broadcasts nothing.

    Args:
        model: see ``shard``.
        optimizer: see ``shard``.
        config: see ``shard``.
        lanes: a Communicator for each name in ``LANES``, in ``REPLICA_LANES`` where there are replicas, and in
            ``CONTROL`` where the host needs its own; one more compares what the ranks launch on these.
        pool: where freed storage goes; None for a pool of its own.
        lay_out: makes the buckets; a plan has others than real training.
    """
    config = with_master_grad(model, config)
    plan = find_units(model, config.units)
    kept = _kept_units(plan, config)
    held = {id(param) for param in optimizer_params(optimizer)}
    entries = [entry for entry in plan.params if _is_sharded(entry.param, held, config)]
    compared = Fingerprint(lanes[fingerprint.LANE]) if fingerprint.LANE in lanes else None
    if compared is not None:
        lanes = compared.watch({name: lane for name, lane in lanes.items() if name != fingerprint.LANE})
    gather = lanes["gather"]
    masters = has_masters(optimizer, config)
    exempt = kept_as_they_are(model, config.param_dtype)
    members = [
        Member(_spec(entry, _config_for(entry.param, exempt, config), masters=masters), entry.param, entry.tied)
        for entry in entries
    ]
    timeline = Timeline(config.timeline, on_device=current_device().has_streams, new_mark=gather.mark)
    foundation = Foundation(optimizer, members, [unit.name for unit in plan.units], lanes, timeline, lay_out)
    begun = begin(foundation, config) if config.tunes else config
    layouts = foundation.plan(begun)
    pool = pool or (DevicePool() if current_device().has_streams else StoragePool())
    status = Status.SHARDED if config.stage == 3 else Status.READY
    place = BufferPlace(gather.rank, gather, pool, not config.reshards_after_step, status)
    buffers = [FusedCommBuffer(layout, foundation.params_of(layout), place) for layout in layouts]
    arena, reducer, updates = assemble(foundation, begun, buffers)
    if config.broadcast_buffers:
        reducer.running = RunningState(model, _model_lanes(lanes), timeline)
    schedule = Schedule(
        model, plan, buffers=buffers, reducer=reducer, ahead=begun.units_ahead, kept=kept, timeline=timeline
    )
    sharded = ShardedOptimizer(
        optimizer,
        schedule,
        arena=arena,
        updates=updates,
        config=begun,
        names=foundation.names(layouts),
        timeline=timeline,
        fingerprint=compared,
    )
    timeline.subject = ShardedSubject(sharded, plan, lanes.get("tensor"))
    if config.tunes:
        sharded.tuning = Tuner(sharded, foundation, config)
    keep_schedule(model, schedule)
    if config.param_dtype is not None:
        cast_unsharded(plan.params, entries, exempt, config.param_dtype)
        if config.cast_forward_inputs:
            hooks.hook_inputs([unit.layer for unit in plan.units], config.param_dtype)
    _log_layout(layouts, gather, foundation.n_replicas, config)
    return sharded


@contextlib.contextmanager
def full_parameters(model: nn.Layer) -> Iterator[nn.Layer]:
    """Inside, every parameter of a wrapped model is readable and writable; what is written is kept.

    Collective: every rank enters and leaves it, and writes the same. Outside a wrapped model it does nothing.

    Raises:
        CommError: a gather failed.
    """
    schedule = schedule_of(model)
    if schedule is None:
        yield model
        return
    freed = schedule.unshard()
    try:
        yield model
    finally:
        schedule.reshard(freed)


def _grid(shard_group: Any, replicate_group: Any, tensor_group: Any) -> Grid:
    me = paddle.distributed.get_rank()
    everyone = list(range(paddle.distributed.get_world_size()))
    replicate = [me] if replicate_group is None else _ranks("replicate_group", replicate_group)
    shard = (everyone if replicate == [me] else [me]) if shard_group is None else _ranks("shard_group", shard_group)
    common = sorted(set(shard) & set(replicate))
    if common != [me]:
        raise ConfigError(
            f"shard_group {shard} and replicate_group {replicate}: expected rank {me} to be the only one in both, "
            f"found {common}. Ranks that hold the same shard form a replicate group"
        )
    tensor = () if tensor_group is None else tuple(_ranks("tensor_parallel_group", tensor_group))
    others = sorted((set(shard) | set(replicate)) & set(tensor) - {me})
    if others:
        raise ConfigError(
            f"tensor_parallel_group {list(tensor)}: ranks {others} are in the shard or replicate group too, but the "
            "same data cannot be another's"
        )
    return Grid(shard, replicate, tensor)


def _ranks(name: str, group: Any) -> list[int]:
    me = paddle.distributed.get_rank()
    try:
        ranks = [int(rank) for rank in getattr(group, "ranks", group)]
    except (TypeError, ValueError):
        ranks = []
    if me not in ranks:
        raise ConfigError(f"{name}: expected a Paddle group or ranks, this process's ({me}) among them, not {group!r}")
    return ranks


def _spec(entry: UnitParam, config: ShardingConfig, *, masters: bool) -> ParamSpec:
    dtypes = bucket_dtypes(entry.param, entry.name, config, masters=masters)
    return ParamSpec(
        name=entry.name,
        numel=int(entry.param.size),
        dtype=dtypes.param,
        itemsize=ITEM_BYTES[dtypes.param],
        unit=entry.unit,
        frozen=entry.param.stop_gradient,
        dtypes=dtypes,
    )


def _is_sharded(param: EagerParamBase, held: set[int], config: ShardingConfig) -> bool:
    """Whether it belongs in a bucket: not without elements, and not an integer, which never trains.

    Nor what the optimizer does not hold; but in stage 3 frozen parameters are sharded whoever holds them.
    """
    wanted = id(param) in held or (config.stage == 3 and param.stop_gradient)
    return wanted and param.size > 0 and dtype_name(param) in DTYPES


def _kept_units(plan: UnitPlan, config: ShardingConfig) -> frozenset[int] | None:
    """Stage 3: units that stay gathered from forward to backward.

    Raises:
        ConfigError: ``reshard_after_forward`` names what is no unit.
    """
    choice = config.reshard_after_forward
    if config.stage != 3:
        return None
    if isinstance(choice, bool):
        return frozenset() if choice else frozenset(range(len(plan.units)))
    kept: set[int] = set()
    for key, reshards in choice.items():
        named = [number for number, unit in enumerate(plan.units) if _is_named(unit, key)]
        if not named:
            raise ConfigError(
                f"reshard_after_forward: {key!r} is no unit; they are {', '.join(unit.name for unit in plan.units)}"
            )
        kept.update(() if reshards else named)
    return frozenset(kept)


def _is_named(unit: Unit, key: str | type) -> bool:
    return unit.name == key if isinstance(key, str) else isinstance(unit.layer, key)


def _log_layout(layouts: Sequence[BucketLayout], gather: Communicator, n_replicas: int, config: ShardingConfig) -> None:
    if gather.rank != 0:
        return
    total_mb = sum(layout.nbytes for layout in layouts) / 2**20
    LOG.info(
        "stage %d over %d ranks x %d replicas on %s: %d buckets, %.1f MB, all-gather overlap %s, reduce overlap %s",
        config.stage, gather.nranks, n_replicas, current_device().name, len(layouts), total_mb,
        config.allgather_overlap, config.reduce_overlap,
    )  # fmt: skip
    for layout in layouts:
        name, dtype = layout.name, layout.dtype
        LOG.debug("bucket %s: %d parameters, %d elements of %s", name, len(layout.slots), layout.numel, dtype)


def _param_bytes(model: nn.Layer) -> int:
    return sum(int(param.size) * param.element_size() for param in model.parameters())
