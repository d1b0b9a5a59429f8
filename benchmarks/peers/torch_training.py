"""How each of PyTorch's contenders is set up. ``benchmarks.compare --experiment`` shows which settings suit it.

Only processes of PyTorch's own environment import this. A rank finds the others by the variables that
``links.rank_environments`` sets for Paddle.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders import SHARD_RANKS, Trainee
from benchmarks.peers.torch_model import GPT, build_model
from benchmarks.shape import Shape

_DEFAULT_BUCKET_MB = 25


class Settings(NamedTuple):
    """What its users may set.

    Attributes:
        bucket_mb: size of DDP's buckets, in units of 2**20 bytes. 25 is its default, whose first bucket has 1.
        prefetched: blocks that FSDP2 gathers ahead, forward and backward.
        waits: FSDP2 waits for each gather where it starts it, as it does on a CPU unless told otherwise.
    """

    bucket_mb: int
    prefetched: int
    waits: bool = False


def build(kind: str, shape: Shape, weights: Path, settings: Settings) -> Trainee:
    """The trainee of one rank; all ranks call it together.

    Args:
        kind: "alone", "ddp", "fsdp_keep", "fsdp" or "hsdp".
        shape: of the model.
        weights: the initial ones, as ``benchmarks.peers.weights`` writes them.
        settings: of DDP and FSDP2.
    """
    torch.set_num_threads(1)
    model = build_model(shape, weights)
    if kind != "alone":
        _meet()
    forward: nn.Module = model
    if kind == "ddp":
        forward = DistributedDataParallel(
            model,
            # Named, 25 would be the size of the first bucket too.
            bucket_cap_mb=None if settings.bucket_mb == _DEFAULT_BUCKET_MB else settings.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=True,
        )
    elif kind != "alone":
        _shard(model, kind, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
    return Trainee(forward, _Optimizer(optimizer), memory=None)


def _meet() -> None:
    host, _, port = os.environ["PADDLE_MASTER"].rpartition(":")
    rank, nranks = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=nranks)


def _shard(model: GPT, kind: str, settings: Settings) -> None:
    """FSDP2: each block and the rest of the model are gathered together; the next blocks while one computes."""
    nranks = dist.get_world_size()
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (nranks // SHARD_RANKS, SHARD_RANKS), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (nranks,))
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=kind == "fsdp")
    # By default the root keeps its parameters: its backward follows at once.
    fully_shard(model, mesh=mesh, reshard_after_forward=None if kind == "fsdp" else False)
    root: Any = model
    # Without it a gather on the CPU is over before the layer's forward goes on, and nothing overlaps.
    root._set_unshard_async_op(not settings.waits)
    if settings.prefetched:
        _prefetch(root, blocks, settings.prefetched)


def _prefetch(root: Any, blocks: list[Any], ahead: int) -> None:
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - ahead) : index][::-1])
    root.set_modules_to_forward_prefetch(blocks[:ahead])
    root.set_modules_to_backward_prefetch(blocks[-ahead:][::-1])


class _Optimizer:
    """PyTorch's, with the method names of Paddle's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        """Updates the parameters."""
        self._optimizer.step()

    def clear_grad(self) -> None:
        """Drops the gradients."""
        self._optimizer.zero_grad()
