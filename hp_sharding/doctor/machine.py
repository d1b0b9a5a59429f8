"""What the doctor sees of the machines: versions, processor, device, and the environment variables that matter."""

from __future__ import annotations

import os
import platform
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from .. import __version__
from ..comm import Device
from .ranks import Team
from .report import Machine

_PREFIXES = (
    "PADDLE_", "FLAGS_", "GLOO_", "NCCL_", "HCCL_", "BKCL_", "ASCEND_", "OMP_", "MKL_", "OPENBLAS_", "HP_SHARDING_",
)  # fmt: skip
_PLUGINS = ("paddle-custom-npu",)
_NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "CUSTOM_DEVICE_ROOT")


def look(team: Team) -> dict[str, Any]:
    """What this rank alone can see, as JSON can say it."""
    return {
        "host": socket.gethostname(),
        "environment": environment(),
        "cores": usable_cores(),
        "is_amd": "AuthenticAMD" in _cpuinfo(),
        "uses_mkl": paddle.version.mkl() == "ON",
        "paddle": str(paddle.version.full_version),
        "device": team.device.name,
    }


def conclude(everyone: list[dict[str, Any]], device: Device) -> Machine:
    """What all ranks saw; details are rank 0's, which is where this is read."""
    hosts: dict[str, list[int]] = {}
    for rank, seen in enumerate(everyone):
        hosts.setdefault(seen["host"], []).append(rank)
    first = everyone[0]
    return Machine(
        versions=versions(),
        system=platform.platform(),
        processor=_processor(),
        n_cores=os.cpu_count() or 1,
        usable_cores=len(first["cores"]),
        device=first["device"],
        kind=device.kind,
        backend=device.backend,
        alignment_bytes=device.alignment_bytes,
        has_streams=device.has_streams,
        n_devices=_count_devices(device),
        n_ranks=len(everyone),
        hosts=hosts,
        environment=first["environment"],
    )


def environment() -> dict[str, str]:
    """Variables of Paddle, of communication libraries and of thread pools, sorted."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES) or name in _NAMES}


def usable_cores() -> list[int]:
    """Numbers of the processor cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def versions() -> dict[str, str]:
    """By package, Python included."""
    plugins = {name: version for name in _PLUGINS if (version := _version(name))}
    return {
        "hp_sharding": __version__,
        "paddle": f"{paddle.version.full_version} ({str(paddle.version.commit)[:10]})",
        "python": platform.python_version(),
        "numpy": np.__version__,
        **plugins,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _count_devices(device: Device) -> int:
    if not device.has_streams:
        return 0
    names = {*paddle.device.get_available_device(), *paddle.device.get_available_custom_device()}
    return sum(name.partition(":")[0] == device.kind for name in names)


def _processor() -> str:
    named = [line.partition(":")[2].strip() for line in _cpuinfo().splitlines() if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""
