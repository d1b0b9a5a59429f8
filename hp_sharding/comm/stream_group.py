"""All lanes over one set of ranks on a device: how their communicators are made, and how they end."""

from __future__ import annotations

import atexit
import logging
import signal
import threading
from collections.abc import Sequence
from typing import Any

import paddle

from ..errors import CommError, ConfigError
from .device import Device
from .group import TcpGroup
from .rendezvous import default_store, exchange
from .stream import RUNTIME_ERRORS, StreamCommunicator
from .watch import Watcher

_log = logging.getLogger("hp_sharding")
_FIRST_ID = 1 << 20
"""Of our groups. Paddle counts its own from 0, and a communicator is found by its group's number alone."""
_COUNTER = "hp_sharding/stream_groups"
_DESTRUCTORS_S = 10
_groups: list[StreamGroup] = []
_abandoned: list[StreamGroup] = []
"""Closed with collectives under way that never end. Kept: who destroys a stream waits for what is on it."""


class StreamGroup:
    """The lanes of one call of ``create_communicators``; they fail together.

    Args:
        ranks: global ranks in order.
        me: this process's global rank.
        lanes: names of the lanes.
        device: what they run on.
        control: connections between the hosts of the same ranks: it hears at once when one is gone.
        timeout_s: for making them, and for every collective.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        me: int,
        lanes: Sequence[str],
        *,
        device: Device,
        control: TcpGroup,
        timeout_s: float,
    ) -> None:
        self._ranks = ranks
        self._me = me
        self._closing = threading.Lock()
        self._closed = False
        first_id = self._agree_on_ids(len(lanes), timeout_s)
        self._watcher = Watcher(
            f"rank {me}, lanes {', '.join(lanes)} over ranks {list(ranks)}",
            timeout_s=timeout_s,
            control=control,
            prepare=lambda: paddle.set_device(device.name),
        )
        self.communicators = {
            lane: StreamCommunicator(
                lane,
                ranks,
                me,
                group=self._connect(device, first_id + number),
                device=device,
                watcher=self._watcher,
            )
            for number, lane in enumerate(lanes)
        }
        self._warm_up()
        _remember(self)

    def close(self) -> None:
        """Waits for what is in flight, and ends all lanes. Not a collective. May be called again."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        for comm in self.communicators.values():
            comm.close()
        if self._watcher.failure is not None:
            _log.warning("rank %d: lanes over ranks %s end with a failure", self._me, list(self._ranks))
            _abandoned.append(self)
        self._watcher.stop()

    def _agree_on_ids(self, n_lanes: int, timeout_s: float) -> int:
        """Numbers that no other group of this job has; the same on all ranks."""
        mine: dict[str, Any] = {}
        if self._me == self._ranks[0]:
            mine["first_id"] = _FIRST_ID + default_store().add(_COUNTER, n_lanes) - n_lanes
        return int(exchange(mine, ranks=self._ranks, me=self._me, timeout_s=timeout_s)[self._ranks[0]]["first_id"])

    def _connect(self, device: Device, number: int) -> Any:
        make = paddle.distributed.collective._new_process_group_impl
        rank = self._ranks.index(self._me)
        try:
            return make(device.backend, default_store(), rank, len(self._ranks), f"hp_{number}", None, group_id=number)
        except (*RUNTIME_ERRORS, AttributeError) as error:
            raise ConfigError(
                f"rank {self._me}: no {device.backend} group on {device.name}: {error}. This build of Paddle must have "
                f"distributed support for {device.kind}"
            ) from error

    def _warm_up(self) -> None:
        """Runs one collective of each kind: a library connects in the first of a kind, and the host waits for that.

        Not in the first step, then, where ranks may go different ways.
        """
        for comm in self.communicators.values():
            found = _first_collectives(comm)
            expected = len(self._ranks)
            wrong = {what: value for what, value in found.items() if value != expected}
            if wrong:
                raise CommError(
                    f"rank {self._me}: the first collectives on lane {comm.lane!r} over ranks {list(self._ranks)} give "
                    f"{wrong}, expected {expected}: the communication library of this device does not work as it "
                    "should. Run python -m hp_sharding doctor",
                    op="create_communicators",
                    lane=comm.lane,
                    rank=self._me,
                )


def _first_collectives(comm: StreamCommunicator) -> dict[str, float]:
    """One of each kind that a lane may carry; every value is the number of ranks where it works."""
    ones = paddle.ones([comm.nranks], "float32")
    total, gathered = ones.clone(), paddle.zeros([comm.nranks], "float32")
    part = paddle.zeros([1], "float32")
    sent = paddle.full([1], float(comm.nranks if comm.rank == 0 else 0), "float32")
    works = {
        "all_reduce": (comm.all_reduce(total, label="first all_reduce"), total),
        "all_gather": (comm.all_gather(gathered, ones[:1], label="first all_gather"), gathered),
        "reduce_scatter": (comm.reduce_scatter(part, ones, label="first reduce_scatter"), part),
        "broadcast": (comm.broadcast(sent, src=0, label="first broadcast"), sent),
    }
    found = {}
    for what, (work, tensor) in works.items():
        work.wait()
        values = tensor.numpy()
        found[what] = float(values.sum() if what == "all_gather" else values[0])
    return found


def close_all() -> None:
    """Closes every group that this process still has."""
    while _groups:
        group = _groups.pop()
        try:
            group.close()
        except CommError:
            _log.warning("lanes could not be closed in order", exc_info=True)


def _end() -> None:
    """At the end of the process. Where a collective never ends, the runtime's destructors wait for it for ever."""
    close_all()
    if _abandoned:
        # What else has to be done at the end may be done; then the signal ends the process, and its exit code says so.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_DESTRUCTORS_S)


def _remember(group: StreamGroup) -> None:
    atexit.unregister(_end)
    atexit.register(_end)
    _groups.append(group)
