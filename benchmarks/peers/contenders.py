"""Who takes part in ``benchmarks.compare``: hp_sharding, what Paddle offers, what PyTorch offers, and both alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.contenders import CONTENDERS, OVERLAP, Contender, Flags, Trainee, ours, sharding_v1

if TYPE_CHECKING:
    from benchmarks.shape import Shape

HSDP_HOSTS = 4
"""From this number of hosts on there are replicas of shard groups."""
_TORCH_LOSSES = 1e-4
"""Other kernels add up in another order, relative; Adam magnifies that step by step."""


class Compared(NamedTuple):
    """One row of the tables.

    Attributes:
        title: for people.
        framework: "paddle" or "torch": whose interpreter runs it, and whose compute alone it is held to.
        is_ours: hp_sharding.
        least_hosts: with fewer it does not take part.
        process_mb: memory that one of its processes keeps to itself, about; 2**20 bytes.
    """

    title: str
    framework: str
    is_ours: bool = False
    least_hosts: int = 2
    process_mb: int = 800


ALONE = {"paddle": "compute", "torch": "torch_alone"}
"""The contender of each framework that trains without communication."""


def _torch(kind: str) -> Callable[[Shape, Flags], Trainee]:
    def build(shape: Shape, flags: Flags) -> Trainee:
        from benchmarks.peers import torch_training

        return torch_training.build(kind, shape, Path(flags["weights"]))

    return build


# The course of a run and the comparison of losses look for titles and tolerances there.
CONTENDERS.update(
    stage2_all=Contender("hp_sharding stage 2", ours(shard_ranks=None, stage=2, **OVERLAP)),
    stage3_all=Contender("hp_sharding stage 3", ours(shard_ranks=None, stage=3, **OVERLAP)),
    sharding_v1_all=Contender("Paddle sharding V1", sharding_v1(shard_ranks=None)),
    torch_alone=Contender("PyTorch alone", _torch("alone"), trains_alone=True),
    torch_ddp=Contender("PyTorch DDP", _torch("ddp"), loss_tolerance=_TORCH_LOSSES),
    torch_fsdp_keep=Contender("PyTorch FSDP2, kept", _torch("fsdp_keep"), loss_tolerance=_TORCH_LOSSES),
    torch_fsdp=Contender("PyTorch FSDP2", _torch("fsdp"), loss_tolerance=_TORCH_LOSSES),
    torch_hsdp=Contender("PyTorch HSDP", _torch("hsdp"), loss_tolerance=_TORCH_LOSSES),
)

COMPARED = {
    "compute": Compared("Paddle, compute alone", "paddle"),
    "stage2_all": Compared("hp_sharding stage 2", "paddle", is_ours=True),
    "stage3_all": Compared("hp_sharding stage 3", "paddle", is_ours=True),
    "stage2_overlap": Compared("hp_sharding stage 2, replicas", "paddle", is_ours=True, least_hosts=HSDP_HOSTS),
    "data_parallel": Compared("Paddle DataParallel", "paddle"),
    "sharding_v1_all": Compared("Paddle sharding V1", "paddle"),
    "torch_alone": Compared("PyTorch, compute alone", "torch"),
    "torch_ddp": Compared("PyTorch DDP", "torch"),
    "torch_fsdp_keep": Compared("PyTorch FSDP2, no reshard", "torch"),
    "torch_fsdp": Compared("PyTorch FSDP2, reshard", "torch"),
    "torch_hsdp": Compared("PyTorch HSDP, no reshard", "torch", least_hosts=HSDP_HOSTS),
}
"""By their names on the command line, in the order in which they take turns."""


def taking_part(nhosts: int, asked_for: list[str] | None = None) -> list[str]:
    """Names of those that run on ``nhosts`` hosts, of those that were asked for, with the alone of their frameworks."""
    wanted = set(asked_for or COMPARED)
    wanted |= {ALONE[COMPARED[name].framework] for name in wanted}
    return [name for name, compared in COMPARED.items() if name in wanted and compared.least_hosts <= nhosts]


def in_sets(names: list[str], nranks: int, available_mb: float) -> list[list[str]]:
    """Splits the contenders such that the processes of each set fit into memory together.

    Peers are spread over the sets; hp_sharding and what its frameworks do alone are in each of them, so that every
    peer is compared with what ran beside it.
    """
    always = [name for name in names if COMPARED[name].is_ours or name in ALONE.values()]
    peers = [name for name in names if name not in always]
    n_sets = 1
    while n_sets < len(peers) and _largest_mb(always, peers, n_sets) * nranks > available_mb:
        n_sets += 1
    return [[name for name in names if name in (*always, *part)] for part in _parts(peers, n_sets)]


def _parts(peers: list[str], n_sets: int) -> list[list[str]]:
    size = -(-len(peers) // n_sets) if peers else 0
    return [peers[begin : begin + size] for begin in range(0, len(peers), size)] if peers else [[]]


def _largest_mb(always: list[str], peers: list[str], n_sets: int) -> int:
    return max(sum(COMPARED[name].process_mb for name in (*always, *part)) for part in _parts(peers, n_sets))
