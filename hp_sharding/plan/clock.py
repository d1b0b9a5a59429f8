"""A simulated clock: compute and transfers that go on side by side, at speeds that depend on what else is under way.

Time passes in ``compute`` and in ``wait`` only, always up to the next moment at which some speed changes. Lanes carry
their transfers one after the other; those of different lanes share a cable evenly, and each slows the compute by so
much of its factor as it has of its link. All ranks are taken to be alike: each collective begins on all of them at
once, so one rank stands for all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..trace.spans import Span
from .hardware import Hardware

_LEAST_SPEED = 0.05
"""Of compute that is disturbed from all sides."""
_ALMOST = 1e-12
"""Of what there was to do: less than that is nothing."""


class Duty(NamedTuple):
    """What a transfer has to do.

    Attributes:
        nbytes: of the whole message.
        sent_bytes: that this rank sends, and receives at the same time.
        hops: of a latency each.
    """

    nbytes: int
    sent_bytes: float
    hops: int


class Transfer:
    """One collective on its lane.

    Attributes:
        lane: its name, once it is queued.
        label: what it carries.
        layer: the layers whose parameters these are.
        duty: what it has to do.
        start_s: when it began; None before that.
        end_s: when its result was there; None before that.
        after: what must be done before it may begin.
        held: what it keeps alive until it is done.
    """

    def __init__(self, label: str, layer: str, duty: Duty, after: Transfer | None, held: object) -> None:
        self.lane = ""
        self.label = label
        self.layer = layer
        self.duty = duty
        self.after = after
        self.held = held
        self.start_s: float | None = None
        self.end_s: float | None = None
        self.hops_left_s = 0.0
        self.bytes_left = duty.sent_bytes


class Lane:
    """Transfers that follow each other on one link. Made by ``Clock.lane``."""

    def __init__(self, name: str, hardware: Hardware, cable: str) -> None:
        self.name = name
        self.cable = cable
        self.link = hardware.link(name)
        compute, wire = hardware.compute_slowdown.get(name, 1.0), hardware.wire_slowdown.get(name, 1.0)
        self.taken_share = 1.0 - 1.0 / compute
        self.wire_slowdown = wire
        self.queue: deque[Transfer] = deque()

    def begin(self, now_s: float) -> Transfer | None:
        """The transfer under way, which begins if it may."""
        head = self.queue[0] if self.queue else None
        if head is None or (head.after is not None and head.after.end_s is None):
            return None
        if head.start_s is None:
            head.start_s = now_s
            head.hops_left_s = head.duty.hops * self.link.latency_s
            head.after = None
        return head


class Clock:
    """The time of one rank, and the spans of what it did.

    Attributes:
        now_s: seconds since the beginning.
        spans: of compute, transfers that are over, and waits.
        waited_s: for each lane, how long compute has waited for it.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.now_s = 0.0
        self.spans: list[Span] = []
        self.waited_s: dict[str, float] = {}
        self._hardware = hardware
        self._lanes: list[Lane] = []

    def lane(self, name: str) -> Lane:
        """A new lane. Whatever is not one of the replicas' goes over the shard group's link."""
        apart = name == "replicate" and not self._hardware.shares_link
        self._lanes.append(Lane(name, self._hardware, "replicate" if apart else "shard"))
        return self._lanes[-1]

    def start(self, lane: Lane, transfer: Transfer) -> None:
        """Queues a transfer; it takes the training thread ``launch_s``."""
        transfer.lane = lane.name
        lane.queue.append(transfer)
        self._pass(0.0, lambda: True)
        if self._hardware.launch_s:
            self._pass(self._hardware.launch_s, lambda: False)

    def compute(self, seconds: float, label: str, layer: str) -> None:
        """So much compute, which takes longer where transfers disturb it."""
        start_s = self.now_s
        self._pass(seconds, lambda: False)
        if self.now_s > start_s:
            self.spans.append(Span(0, "compute", label, start_s, self.now_s, layer=layer))

    def wait(self, transfer: Transfer) -> None:
        """Until it is done; compute stands still."""
        if transfer.end_s is not None:
            return
        start_s = self.now_s
        self._pass(None, lambda: transfer.end_s is not None)
        if self.now_s > start_s:
            self.spans.append(Span(0, "wait", transfer.label, start_s, self.now_s, layer=transfer.layer))
            self.waited_s[transfer.lane] = self.waited_s.get(transfer.lane, 0.0) + self.now_s - start_s

    def _pass(self, compute_s: float | None, is_over: Callable[[], bool]) -> None:
        """Passes time until ``compute_s`` of compute are done (None: there is none), or ``is_over``."""
        left_s = compute_s
        while True:
            active = [(lane, transfer) for lane in self._lanes if (transfer := lane.begin(self.now_s)) is not None]
            if self._end_finished(active):
                continue
            if is_over() or (left_s is not None and left_s <= _ALMOST * (compute_s or 1.0)):
                return
            rates, speed = self._speeds(active, computing=left_s is not None)
            step_s = min(
                [
                    transfer.hops_left_s or transfer.bytes_left / rates[lane.name]
                    for lane, transfer in active
                ]
                + ([left_s / speed] if left_s is not None else []),
                default=math.inf,
            )  # fmt: skip
            assert math.isfinite(step_s), "everybody waits for a collective that nobody has started"
            self.now_s += step_s
            left_s = left_s - step_s * speed if left_s is not None else None
            for lane, transfer in active:
                _carry(transfer, step_s, rates.get(lane.name, 0.0))

    def _end_finished(self, active: list[tuple[Lane, Transfer]]) -> bool:
        ended = False
        for lane, transfer in active:
            if transfer.hops_left_s or transfer.bytes_left > _ALMOST * transfer.duty.sent_bytes:
                continue
            assert transfer.start_s is not None
            transfer.end_s, transfer.held = self.now_s, None
            lane.queue.popleft()
            span = Span(
                0, lane.name, transfer.label, transfer.start_s, self.now_s, transfer.duty.nbytes, transfer.layer
            )
            self.spans.append(span)
            ended = True
        return ended

    def _speeds(self, active: list[tuple[Lane, Transfer]], *, computing: bool) -> tuple[dict[str, float], float]:
        """Bytes a second of each lane that is past its hops, and of compute the part of its full speed."""
        moving = [lane for lane, transfer in active if not transfer.hops_left_s]
        rates, speed = {}, 1.0
        for lane in moving:
            share = 1.0 / sum(other.cable == lane.cable for other in moving)
            rates[lane.name] = share * lane.link.bandwidth_bytes_s / (lane.wire_slowdown if computing else 1.0)
            speed -= share * lane.taken_share
        return rates, max(speed, _LEAST_SPEED)


def _carry(transfer: Transfer, step_s: float, rate: float) -> None:
    """What a transfer does in so much time; below a trillionth of a part it is done with that part."""
    if transfer.hops_left_s:
        left_s = transfer.hops_left_s - step_s
        transfer.hops_left_s = left_s if left_s > _ALMOST * transfer.hops_left_s else 0.0
    else:
        transfer.bytes_left -= rate * step_s
