"""How each of PyTorch's contenders is set up, each with the settings with which it was fastest here.

Only processes of PyTorch's own environment import this. A rank finds the others by the variables that
``links.rank_environments`` sets for Paddle.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders import SHARD_RANKS, Trainee
from benchmarks.peers.torch_model import GPT, build_model
from benchmarks.shape import Shape

_PREFETCHED_BLOCKS = 2


def build(kind: str, shape: Shape, weights: Path) -> Trainee:
    """The trainee of one rank; all ranks call it together.

    Args:
        kind: "alone", "ddp", "fsdp_keep", "fsdp" or "hsdp".
        shape: of the model.
        weights: the initial ones, as ``benchmarks.peers.weights`` writes them.
    """
    torch.set_num_threads(1)
    model = build_model(shape, weights)
    if kind != "alone":
        _meet()
    forward: nn.Module = model
    if kind == "ddp":
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    elif kind != "alone":
        _shard(model, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
    return Trainee(forward, _Optimizer(optimizer), memory=None)


def _meet() -> None:
    host, _, port = os.environ["PADDLE_MASTER"].rpartition(":")
    rank, nranks = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=nranks)


def _shard(model: GPT, kind: str) -> None:
    """FSDP2: each block and the rest of the model are gathered together; the next blocks while one computes."""
    nranks = dist.get_world_size()
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (nranks // SHARD_RANKS, SHARD_RANKS), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (nranks,))
    blocks: list[Any] = list(model.blocks)
    for layer in (*blocks, model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=kind == "fsdp")
    root: Any = model
    # Without it a gather on the CPU is over before the layer's forward goes on, and nothing overlaps.
    root._set_unshard_async_op(True)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + _PREFETCHED_BLOCKS])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - _PREFETCHED_BLOCKS) : index][::-1])
    root.set_modules_to_forward_prefetch(blocks[:_PREFETCHED_BLOCKS])
    root.set_modules_to_backward_prefetch(blocks[-_PREFETCHED_BLOCKS:][::-1])


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
