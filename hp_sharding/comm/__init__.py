"""Collectives. ``create_communicators`` picks the implementation for the ranks and the device at hand."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import paddle

from ..errors import ConfigError
from .communicator import Communicator, Work
from .fingerprint import Fingerprint
from .rendezvous import collision_free_groups

__all__ = ["Communicator", "Fingerprint", "Work", "close_all", "collision_free_groups", "create_communicators"]


def create_communicators(
    ranks: Sequence[int], lanes: Iterable[str], *, timeout_s: float = 300.0
) -> dict[str, Communicator]:
    """Makes one communicator for each lane. Collective over ``ranks``: all of them call it with the same arguments.

    Args:
        ranks: global ranks in group order; this process's own among them.
        lanes: names of lanes, such as ``["gather", "reduce"]``; each runs its own collectives in order, beside the
            others.
        timeout_s: how long making them may take, and how long a collective waits for a late rank.

    Raises:
        ConfigError: wrong ranks or lanes, no parallel environment, or a device without support.
        CommError: a rank has not come in time.
    """
    members, names = tuple(ranks), list(lanes)
    me = paddle.distributed.get_rank()
    _check(members, names, me, timeout_s)
    if len(members) == 1:
        from .local import LocalCommunicator

        return {name: LocalCommunicator(name, members) for name in names}
    device = paddle.get_device()
    if device != "cpu":
        raise ConfigError(f"communicators for {device} are not there yet: only CPU is; set_device('cpu')")
    # Not for one rank: what these modules need of Paddle is missing where it was built without distributed support.
    from .group import TcpGroup

    return dict(TcpGroup(members, me, names, timeout_s=timeout_s).communicators)


def close_all() -> None:
    """Closes every communicator that this process still has, as the end of the process does.

    What has not started is dropped and what is in flight is finished. Not a collective, but it ends the lanes of the
    other ranks as well.
    """
    group = sys.modules.get(f"{__name__}.group")
    if group is not None:
        group.close_all()


def _check(ranks: tuple[int, ...], lanes: list[str], me: int, timeout_s: float) -> None:
    if not ranks or len(set(ranks)) < len(ranks) or me not in ranks:
        raise ConfigError(f"communicators need distinct ranks, this process's ({me}) among them, not {list(ranks)}")
    if not lanes or len(set(lanes)) < len(lanes):
        raise ConfigError(f"communicators need distinct names of lanes, not {lanes}")
    if timeout_s <= 0:
        raise ConfigError(f"timeout_s must be above zero, not {timeout_s}")
