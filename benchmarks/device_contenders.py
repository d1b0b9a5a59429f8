"""The ways of training that ``benchmarks.device_step`` compares: those of ``contenders`` and Paddle's sharding V2.

V2 is set up such that it computes what it should. Two things are needed for that, both in ``_V2``; without them it
trains something else, and a comparison of times would mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import CONTENDERS, SHARD_RANKS, Contender, Flags, Trainee

if TYPE_CHECKING:
    from benchmarks.gpt import Shape


def _sharding_v2(*, overlap: bool) -> Callable[[Shape, Flags], Trainee]:
    """Sharding V2 over groups of ``SHARD_RANKS``, with or without its two overlaps."""

    def build(shape: Shape, sizes: Flags) -> Trainee:
        from paddle.distributed import fleet

        from benchmarks.gpt import build_model, build_optimizer

        fleet.init(is_collective=True, strategy=_strategy(sizes["comm_buffer_size_MB"], overlap=overlap))
        model = fleet.distributed_model(build_model(shape))
        optimizer = fleet.distributed_optimizer(build_optimizer(model))
        if overlap:
            optimizer._set_all_gather_overlap_forward(True, model)
        return Trainee(model, _V2(optimizer))

    return build


def _strategy(buffer_mb: float, *, overlap: bool) -> Any:
    import paddle
    from paddle.distributed import fleet

    strategy = fleet.DistributedStrategy()
    replicas = paddle.distributed.get_world_size() // SHARD_RANKS
    strategy.hybrid_configs = {"dp_degree": replicas, "sharding_degree": SHARD_RANKS}
    sharding = strategy.hybrid_configs["sharding_configs"]
    sharding.split_param = True
    sharding.comm_overlap = overlap
    sharding.accumulate_steps = 1
    sharding.comm_buffer_size_MB = round(buffer_mb)
    return strategy


class _V2:
    """Paddle's optimizer, made to train as it should where gradients are no ``main_grad``.

    After its own ``clear_grad()`` the next backward puts new tensors in the place of the gradients, beside the buffers
    that are sent: with ``comm_overlap`` that backward raises, without it nothing but zeros is sent from then on. So
    the buffers are zeroed in place. And over replicas its first step leaves out the all-reduce, because the slices'
    gradients are looked for before they are assigned, and the replicas drift apart; so they are assigned beforehand.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._sharding = optimizer._inner_opt
        self._sharding._assign_slice_grad()

    def step(self) -> None:
        """Reduces what is left to reduce, updates, and starts or finishes the gathers."""
        self._optimizer.step()

    def clear_grad(self) -> None:
        """Zeroes the gradients of all parameters, in place."""
        for buffer in self._sharding._comm_buffer_list:
            buffer.grad_storage.zero_()


# The course of a run and the comparison of losses look for titles there.
CONTENDERS.update(
    sharding_v2=Contender("Paddle sharding V2, no overlap", _sharding_v2(overlap=False)),
    sharding_v2_overlap=Contender("Paddle sharding V2, overlap", _sharding_v2(overlap=True)),
)

ON_DEVICE = (
    "compute",
    "stage1_overlap",
    "stage2",
    "stage2_overlap",
    "stage3_overlap",
    "sharding_v2",
    "sharding_v2_overlap",
)
"""Those that take part, in the order in which they take turns."""
