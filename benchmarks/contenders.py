"""The ways of training that ``benchmarks.step`` compares, each set up as its users would set it up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

# Paddle is imported by those who train only: whoever just wants the names should not wait for it.
if TYPE_CHECKING:
    import paddle

    from benchmarks.gpt import Shape


SHARD_RANKS = 2
"""Ranks among which a replica is sharded."""


class PaddleMemory:
    """What is allocated through Paddle on the host, in units of 2**20 bytes."""

    def reset_peak(self) -> None:
        """From now on only what is allocated then counts in ``peak_mb()``."""
        self._stat("reset_peak")

    def live_mb(self) -> float:
        """What is allocated now."""
        return self._stat("current") / 2**20

    def peak_mb(self) -> float:
        """The most that was allocated at one time."""
        return self._stat("peak") / 2**20

    def _stat(self, which: str) -> int:
        from paddle.base import core

        return getattr(core, f"host_memory_stat_{which}_value")("Allocated", 0) or 0


@dataclass
class Trainee:
    """A model that is ready to be trained on one rank.

    Attributes:
        forward: takes a batch's codes and targets, returns the loss.
        optimizer: what has ``step`` and ``clear_grad``.
        drain: returns when no communication of this rank is under way.
        timeline: hp_sharding's record of the steps; None for the others.
        memory: what the framework has allocated; None where it keeps no record.
        probe: looks into each step, see ``benchmarks.probe``; None where nobody asked for it.
    """

    forward: Callable[..., paddle.Tensor]
    optimizer: Any
    drain: Callable[[], None] = field(default=lambda: None)
    timeline: Any = None
    memory: PaddleMemory | None = field(default_factory=PaddleMemory)
    probe: Any = None


Flags = dict[str, Any]
"""Keys for ``hp_sharding_configs``."""


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        title: for people.
        build: makes the trainee; all ranks call it together. Takes the sizes, and more flags for ours.
        trains_alone: its ranks do not talk, so that their losses are their own.
        loss_tolerance: by how much its losses may differ from those of the others, relative.
    """

    title: str
    build: Callable[[Shape, Flags], Trainee]
    trains_alone: bool = False
    loss_tolerance: float = 1e-5


def _degrees(world: int, shard_ranks: int | None) -> dict[str, int]:
    shard_ranks = shard_ranks or world
    return {"dp_degree": world // shard_ranks, "sharding_degree": shard_ranks}


def _compute_alone(shape: Shape, _: Flags) -> Trainee:
    from benchmarks.gpt import build_model, build_optimizer

    model = build_model(shape)
    return Trainee(model, build_optimizer(model))


def ours(*, shard_ranks: int | None = SHARD_RANKS, **flags: Any) -> Callable[[Shape, Flags], Trainee]:
    """hp_sharding with these ``hp_sharding_configs``, each replica sharded over ``shard_ranks``; None: over all."""

    def build(shape: Shape, more: Flags) -> Trainee:
        import paddle

        from benchmarks.gpt import build_model, build_optimizer
        from hp_sharding import fleet

        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = _degrees(paddle.distributed.get_world_size(), shard_ranks)
        strategy.hp_sharding_configs = {**flags, **more}
        fleet.init(is_collective=True, strategy=strategy)
        model = fleet.distributed_model(build_model(shape))
        optimizer = fleet.distributed_optimizer(build_optimizer(model))

        def drain() -> None:
            # step() leaves nothing else under way.
            for buffer in optimizer.buffers:
                if buffer.gather_work is not None:
                    buffer.gather_work.wait()

        return Trainee(model, optimizer, drain, optimizer.timeline)

    return build


def _data_parallel(shape: Shape, _: Flags) -> Trainee:
    import paddle

    from benchmarks.gpt import build_model, build_optimizer
    from hp_sharding.comm import collision_free_groups

    with collision_free_groups():
        paddle.distributed.init_parallel_env()
    model = paddle.DataParallel(build_model(shape))
    return Trainee(model, build_optimizer(model))


def sharding_v1(*, shard_ranks: int | None = SHARD_RANKS) -> Callable[[Shape, Flags], Trainee]:
    """Paddle's own ``DygraphShardingOptimizer``, each replica sharded over ``shard_ranks``; None: over all."""

    def build(shape: Shape, _: Flags) -> Trainee:
        import paddle
        from paddle.distributed import fleet

        from benchmarks.gpt import build_model, build_optimizer
        from hp_sharding.comm import collision_free_groups

        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = _degrees(paddle.distributed.get_world_size(), shard_ranks)
        with collision_free_groups():
            fleet.init(is_collective=True, strategy=strategy)
        model = fleet.distributed_model(build_model(shape))
        return Trainee(model, fleet.distributed_optimizer(build_optimizer(model)))

    return build


_SHORT_TOLERANCE = 0.01
"""bfloat16 keeps eight bits: each rounding is off by up to 0.4 %."""
OVERLAP: Flags = {"allgather_overlap": True, "reduce_overlap": True}
"""What hides the communication."""

CONTENDERS = {
    "compute": Contender("compute alone", _compute_alone, trains_alone=True),
    "stage2": Contender("hp_sharding stage 2, no overlap", ours(stage=2)),
    "stage2_overlap": Contender("hp_sharding stage 2, overlap", ours(stage=2, **OVERLAP)),
    "gather_bf16": Contender(
        "hp_sharding stage 2, 16-bit gathers",
        ours(stage=2, gather_dtype="bfloat16", **OVERLAP),
        loss_tolerance=_SHORT_TOLERANCE,
    ),
    "both_bf16": Contender(
        "hp_sharding stage 2, 16-bit both",
        ours(stage=2, gather_dtype="bfloat16", reduce_dtype="bfloat16", **OVERLAP),
        loss_tolerance=_SHORT_TOLERANCE,
    ),
    "per_parameter": Contender("the same, per parameter", ours(stage=2, comm_fusion=False, **OVERLAP)),
    "stage1_overlap": Contender("hp_sharding stage 1, overlap", ours(stage=1, **OVERLAP)),
    "stage3": Contender("hp_sharding stage 3, no overlap", ours(stage=3)),
    "stage3_overlap": Contender("hp_sharding stage 3, overlap", ours(stage=3, **OVERLAP)),
    "stage3_bf16": Contender(
        "hp_sharding stage 3, 16-bit gathers",
        ours(stage=3, gather_dtype="bfloat16", **OVERLAP),
        loss_tolerance=_SHORT_TOLERANCE,
    ),
    "data_parallel": Contender("Paddle DataParallel", _data_parallel),
    "sharding_v1": Contender("Paddle sharding V1", sharding_v1()),
}
"""By their names on the command line, in the order in which they take turns."""

STANDARD = tuple(name for name in CONTENDERS if name not in ("per_parameter", "both_bf16", "stage3_bf16"))
"""Those that take part unless others are asked for."""

STANDARD_OF_REPLICAS = ("compute", "stage2", "stage2_overlap", "stage3_overlap", "sharding_v1")
"""The same where there are several replicas; all of them would need 30 GB of memory."""
