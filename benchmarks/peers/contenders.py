"""Who takes part in ``benchmarks.compare``: hp_sharding, what Paddle offers, what PyTorch offers, and both alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
        process_mb: memory that one of its processes keeps to itself with four hosts, about; 2**20 bytes.
        is_ours: hp_sharding.
        least_hosts: with fewer it does not take part.
        experiment: the one of ``EXPERIMENTS`` that it is for; without a name it takes part in every comparison.
    """

    title: str
    framework: str
    process_mb: int
    is_ours: bool = False
    least_hosts: int = 2
    experiment: str = ""


ALONE = {"paddle": "compute", "torch": "torch_alone"}
"""The contender of each framework that trains without communication."""


DDP_MB, PREFETCHED = 25, 2
"""PyTorch's settings where none are asked for: the size of DDP's buckets, and blocks that FSDP2 gathers ahead."""


def _torch(kind: str, **fixed: Any) -> Callable[[Shape, Flags], Trainee]:
    """PyTorch's, with these settings of ``torch_training.Settings``, the others as the command line has them."""

    def build(shape: Shape, flags: Flags) -> Trainee:
        from benchmarks.peers import torch_training

        settings = torch_training.Settings(**{**flags["settings"], **fixed})
        return torch_training.build(kind, shape, Path(flags["weights"]), settings)

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
    "compute": Compared("Paddle, compute alone", "paddle", process_mb=750),
    "stage2_all": Compared("hp_sharding stage 2", "paddle", is_ours=True, process_mb=620),
    "stage3_all": Compared("hp_sharding stage 3", "paddle", is_ours=True, process_mb=560),
    "stage2_overlap": Compared(
        "hp_sharding stage 2, replicas", "paddle", is_ours=True, least_hosts=HSDP_HOSTS, process_mb=690
    ),
    "data_parallel": Compared("Paddle DataParallel", "paddle", process_mb=960),
    "sharding_v1_all": Compared("Paddle sharding V1", "paddle", process_mb=700),
    "torch_alone": Compared("PyTorch, compute alone", "torch", process_mb=710),
    "torch_ddp": Compared("PyTorch DDP", "torch", process_mb=820),
    "torch_fsdp_keep": Compared("PyTorch FSDP2, no reshard", "torch", process_mb=770),
    "torch_fsdp": Compared("PyTorch FSDP2, reshard", "torch", process_mb=760),
    "torch_hsdp": Compared("PyTorch HSDP, no reshard", "torch", least_hosts=HSDP_HOSTS, process_mb=870),
}
"""By their names on the command line, in the order in which they take turns."""

EXPERIMENTS = {
    "ddp_buckets": "which size of PyTorch DDP's buckets is the fastest?",
    "fsdp_prefetch": "how many blocks should PyTorch FSDP2 gather ahead, and what if it waits for every gather?",
}
"""Questions about PyTorch's settings, by their names on the command line."""


def _add_variant(experiment: str, kind: str, suffix: str, title: str, **settings: Any) -> None:
    """A contender for an experiment: ``kind`` with these settings."""
    name = f"torch_{kind}_{suffix}"
    CONTENDERS[name] = Contender(f"PyTorch {title}", _torch(kind, **settings), loss_tolerance=_TORCH_LOSSES)
    process_mb = COMPARED[f"torch_{kind}"].process_mb
    COMPARED[name] = Compared(f"PyTorch {title}", "torch", process_mb, experiment=experiment)


for _mb in (1, 4, 8, 25):
    _add_variant("ddp_buckets", "ddp", f"{_mb}mb", f"DDP, {_mb} MB", bucket_mb=_mb)
for _kind, _title in (("fsdp_keep", "FSDP2, no reshard"), ("fsdp", "FSDP2, reshard")):
    for _ahead in (1, 2, 4):
        _add_variant("fsdp_prefetch", _kind, f"ahead{_ahead}", f"{_title}, {_ahead} ahead", prefetched=_ahead)
    _add_variant("fsdp_prefetch", _kind, "waits", f"{_title}, waits", prefetched=0, waits=True)


def taking_part(nhosts: int, asked_for: list[str] | None = None, experiment: str = "") -> list[str]:
    """Names of those that run on ``nhosts`` hosts, with the alone of their frameworks.

    Args:
        nhosts: those that need more are left out.
        asked_for: names; None for all of the experiment.
        experiment: one of ``EXPERIMENTS``; empty for the comparison itself.
    """
    standard = [name for name, compared in COMPARED.items() if compared.experiment == experiment]
    wanted = set(asked_for or standard)
    wanted |= {ALONE[COMPARED[name].framework] for name in wanted}
    return [name for name, compared in COMPARED.items() if name in wanted and compared.least_hosts <= nhosts]


def in_sets(names: list[str], nranks: int, available_mb: float) -> list[list[str]]:
    """Splits the contenders such that the processes of each set fit into memory together, if they do not all.

    A set holds peers of one framework, what that does alone, and all of hp_sharding; so each of these is compared with
    every peer, and with what ran beside it.
    """
    if _needed_mb(names, nranks) <= available_mb:
        return [names]
    always = [name for name in names if COMPARED[name].is_ours]
    sets: list[list[str]] = []
    for framework, alone in ALONE.items():
        others = [name for name in names if COMPARED[name].framework == framework and name not in (*always, alone)]
        if alone in names:
            sets += _split([*always, alone], others, nranks, available_mb)
    return [[name for name in names if name in part] for part in sets]


def _split(always: list[str], others: list[str], nranks: int, available_mb: float) -> list[list[str]]:
    """As few sets as memory allows, all of about the same size; each holds one of the others at least."""
    for n_sets in range(1, len(others) + 1):
        size = -(-len(others) // n_sets)
        sets = [[*always, *others[begin : begin + size]] for begin in range(0, len(others), size)]
        if size == 1 or all(_needed_mb(part, nranks) <= available_mb for part in sets):
            return sets
    return [always]


def _needed_mb(names: list[str], nranks: int) -> int:
    return nranks * sum(COMPARED[name].process_mb for name in names)
