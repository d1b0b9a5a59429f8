"""Collectives. ``create_communicators`` picks the implementation for the ranks and the device at hand."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import paddle

from ..errors import ConfigError
from .communicator import Communicator, Mark, Stall, Work
from .convert import add_into, cast_into, is_rounded
from .device import Device, allocated_bytes, current_device, host_tensor
from .fingerprint import Fingerprint
from .rendezvous import collision_free_groups

__all__ = [
    "Communicator",
    "Device",
    "Fingerprint",
    "Mark",
    "Stall",
    "Work",
    "add_into",
    "allocated_bytes",
    "cast_into",
    "close_all",
    "collision_free_groups",
    "create_communicators",
    "current_device",
    "host_tensor",
    "is_rounded",
]


def create_communicators(
    ranks: Sequence[int],
    lanes: Iterable[str],
    *,
    host_lanes: Iterable[str] = (),
    timeout_s: float = 300.0,
) -> dict[str, Communicator]:
    """Makes one communicator for each lane.

    Collective over ``ranks``: all of them call it with the same arguments.

    Args:
        ranks: global ranks in group order; this process's own among them.
        lanes: names of lanes, such as ``["gather", "reduce"]``, for tensors on the current device; each runs its own
            collectives in order, beside the others.
        host_lanes: names of lanes for tensors on CPU, wherever the others are: what only the host reads need not wait
            for a device.
        timeout_s: how long making them may take, and how long a collective waits for a late rank.

    Raises:
        ConfigError: wrong ranks or lanes, no parallel environment, or a device without support.
        CommError: a rank has not come in time.
    """
    members, names, host_names = tuple(ranks), list(lanes), list(host_lanes)
    me = paddle.distributed.get_rank()
    _check(members, [*names, *host_names], me, timeout_s)
    if len(members) == 1:
        from .local import LocalCommunicator

        return {name: LocalCommunicator(name, members) for name in [*names, *host_names]}
    # Not for one rank: what these modules need of Paddle is missing where it was built without distributed support.
    from .group import TcpGroup

    device = current_device()
    if not device.has_streams or not names:
        return dict(TcpGroup(members, me, [*names, *host_names], timeout_s=timeout_s).communicators)
    from .stream_group import StreamGroup

    control = TcpGroup(members, me, host_names or ["control"], timeout_s=timeout_s)
    streams = StreamGroup(members, me, names, device=device, control=control, timeout_s=timeout_s)
    on_host = control.communicators if host_names else {}
    return {**streams.communicators, **on_host}


def close_all() -> None:
    """Closes every communicator that this process still has, as the end of the process does.

    What has not started is dropped and what is in flight is finished. Not a collective, but it ends the lanes of the
    other ranks as well.
    """
    for name in ("stream_group", "group"):
        group = sys.modules.get(f"{__name__}.{name}")
        if group is not None:
            group.close_all()


def _check(ranks: tuple[int, ...], lanes: list[str], me: int, timeout_s: float) -> None:
    if not ranks or len(set(ranks)) < len(ranks) or me not in ranks:
        raise ConfigError(f"communicators need distinct ranks, this process's ({me}) among them, not {list(ranks)}")
    if not lanes or len(set(lanes)) < len(lanes):
        raise ConfigError(f"communicators need distinct names of lanes, not {lanes}")
    if timeout_s <= 0:
        raise ConfigError(f"timeout_s must be above zero, not {timeout_s}")
