"""What is known to make training slow or fragile, looked for in what the ranks have told of their machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .report import Advice, Machine

Seen = list[dict[str, Any]]
"""By rank, what ``machine.look`` returned there."""

PADDLE = "3.3."
"""The version that this release is tested with."""
_OFF = ("", "0", "false", "off", "no")
_SERIALIZING = ("CUDA_LAUNCH_BLOCKING", "ASCEND_LAUNCH_BLOCKING", "FLAGS_benchmark", "FLAGS_sync_nccl_allreduce")
_MAY_DIFFER = ("PADDLE_", "FLAGS_selected_", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_", "CUDA_VISIBLE")
_MAY_DIFFER_END = ("_VISIBLE_DEVICES", "_DEVICE_ID", "_RANK_ID")
FOREIGN_LIMIT = 0.1
"""Share of the processor that other programs may take while something is timed."""


def advise(machine: Machine, everyone: Seen) -> list[Advice]:
    """All that applies, in a fixed order."""
    return [advice for rule in _RULES for advice in rule(machine, everyone)]


def disturbed(foreign_share: dict[str, float]) -> list[Advice]:
    """What to say when other programs ran meanwhile; numbers do not mind."""
    shares = {name: share for name, share in foreign_share.items() if share > FOREIGN_LIMIT and name != "parity"}
    if not shares:
        return []
    named = ", ".join(f"{100 * share:.0f} % during {name}" for name, share in shares.items())
    return [Advice("disturbed", f"other programs took part of the processor: {named}", "measure again without them")]


def _mkl_on_amd(_: Machine, everyone: Seen) -> Iterator[Advice]:
    ranks = [
        rank
        for rank, seen in enumerate(everyone)
        if seen["is_amd"] and seen["uses_mkl"] and "MKL_DEBUG_CPU_TYPE" not in seen["environment"]
    ]
    if ranks:
        yield Advice(
            "mkl_on_amd",
            f"an AMD processor, and MKL_DEBUG_CPU_TYPE is not set ({_ranks(ranks)}): the MKL inside Paddle picks slow "
            "kernels there",
            "export MKL_DEBUG_CPU_TYPE=5 before Python starts, on every rank",
        )


def _interface(machine: Machine, everyone: Seen) -> Iterator[Advice]:
    unset = [rank for rank, seen in enumerate(everyone) if not seen["environment"].get("GLOO_SOCKET_IFNAME")]
    # On a device too: the hosts talk over TCP beside the devices' own links.
    if len(machine.hosts) > 1 and unset:
        yield Advice(
            "interface_unset",
            f"{len(machine.hosts)} hosts, and GLOO_SOCKET_IFNAME is not set ({_ranks(unset)}): a host's own name may "
            "lead to an address that others cannot reach, or to a slow link",
            "export GLOO_SOCKET_IFNAME=<interface of the fast network> on every host; ip -br address lists them",
        )


def _cores(machine: Machine, everyone: Seen) -> Iterator[Advice]:
    for host, ranks in machine.hosts.items():
        cores = len({core for rank in ranks for core in everyone[rank]["cores"]})
        if len(ranks) > cores:
            yield Advice(
                "ranks_share_cores",
                f"{len(ranks)} ranks on {host}, which has {cores} usable cores: they take turns",
                "start fewer ranks on it, or allow more cores (taskset, the container's limits)",
            )
            continue
        threads = sum(_threads(everyone[rank]) for rank in ranks)
        if threads > cores:
            yield Advice(
                "threads_exceed_cores",
                f"the ranks on {host} may run {threads} threads on {cores} usable cores",
                f"export OMP_NUM_THREADS={max(1, cores // len(ranks))}, and MKL_NUM_THREADS likewise",
            )


def _threads(seen: dict[str, Any]) -> int:
    named = [seen["environment"].get(name, "") for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS")]
    return max([int(value) for value in named if value.isdigit()], default=1)


def _serializing(_: Machine, everyone: Seen) -> Iterator[Advice]:
    for name in _SERIALIZING:
        ranks = [rank for rank, seen in enumerate(everyone) if _is_on(seen, name)]
        if ranks:
            yield Advice(
                "serializing_variable",
                f"{name} is set ({_ranks(ranks)}): operations wait for each other, and nothing can overlap",
                f"unset {name} outside of debugging",
            )


def _one_connection(machine: Machine, everyone: Seen) -> Iterator[Advice]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    ranks = [rank for rank, seen in enumerate(everyone) if seen["environment"].get(name) == "1"]
    if machine.kind == "gpu" and ranks:
        yield Advice(
            "one_connection",
            f"{name}=1 ({_ranks(ranks)}): all streams share one queue to the device, and a collective may wait behind "
            "compute that was launched before it",
            f"unset {name}, or compare the overlap below with and without it",
        )


def _one_communicator(_: Machine, everyone: Seen) -> Iterator[Advice]:
    name = "HCCL_OP_EXPANSION_MODE"
    ranks = [rank for rank, seen in enumerate(everyone) if "AIV" in seen["environment"].get(name, "").upper()]
    if ranks:
        yield Advice(
            "one_communicator",
            f"{name} asks for AIV ({_ranks(ranks)}), with which HCCL does not run several communicators at a time: "
            "every lane is one",
            f"unset {name}",
        )


def _debug(_: Machine, everyone: Seen) -> Iterator[Advice]:
    ranks = [rank for rank, seen in enumerate(everyone) if _is_on(seen, "HP_SHARDING_DEBUG")]
    if ranks:
        yield Advice(
            "debug_mode",
            f"HP_SHARDING_DEBUG is set ({_ranks(ranks)}): every step compares what all ranks have launched",
            "unset it once the fault is found",
        )


def _differences(_: Machine, everyone: Seen) -> Iterator[Advice]:
    names = sorted({name for seen in everyone for name in seen["environment"] if not _may_differ(name)})
    different = [name for name in names if len({seen["environment"].get(name) for seen in everyone}) > 1]
    if different:
        yield Advice(
            "environment_differs",
            f"not the same on all ranks: {', '.join(different)}",
            "set them alike on every rank, unless it is meant",
        )


def _paddle(machine: Machine, everyone: Seen) -> Iterator[Advice]:
    found = sorted({seen["paddle"] for seen in everyone})
    if len(found) > 1:
        yield Advice("paddle_differs", f"several versions of Paddle: {', '.join(found)}", "install one on all ranks")
    elif not found[0].startswith(PADDLE):
        yield Advice(
            "paddle_untested",
            f"Paddle {found[0]}; hp_sharding {machine.versions['hp_sharding']} is tested with {PADDLE}x",
            f"install paddlepaddle {PADDLE}x, or look at the parity below with care",
        )


def _is_on(seen: dict[str, Any], name: str) -> bool:
    return seen["environment"].get(name, "").lower() not in _OFF


def _may_differ(name: str) -> bool:
    return name.startswith(_MAY_DIFFER) or name.endswith(_MAY_DIFFER_END)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


_RULES: tuple[Callable[[Machine, Seen], Iterator[Advice]], ...] = (
    _mkl_on_amd, _interface, _cores, _serializing, _one_connection, _one_communicator, _debug, _differences, _paddle,
)  # fmt: skip
