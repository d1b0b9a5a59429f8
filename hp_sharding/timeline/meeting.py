"""What the ranks tell each other about their records: over lanes that exist, in collectives that all of them enter."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle

from ..comm import Communicator, current_device, host_tensor


class Way(NamedTuple):
    """A lane, and whether it carries tensors on the host or on the device that computes."""

    lane: Communicator
    on_host: bool = True

    def tensor(self, values: npt.NDArray[Any]) -> paddle.Tensor:
        """``values`` where the lane takes them from."""
        if self.on_host:
            return host_tensor(values, values.dtype.name)
        return paddle.to_tensor(values, place=current_device().place)


class Round(NamedTuple):
    """A collective of all ranks, by this rank's clock: when it entered, and when it knew that all have."""

    enter_s: float
    exit_s: float


class Meeting:
    """All ranks of a run.

    Args:
        ways: one after the other they reach all ranks, from the first one on; none where there is one rank.
    """

    def __init__(self, ways: Sequence[Way] = ()) -> None:
        self._ways = [way for way in ways if way.lane.nranks > 1]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that has the result."""
        return all(way.lane.rank == 0 for way in self._ways)

    def rounds(self, count: int) -> list[Round]:
        """Several times all ranks meet; nobody leaves before the last one has come. Collective."""
        found = []
        for _ in range(count if self._ways else 0):
            enter_s = time.perf_counter()
            for way in self._ways:
                self._gather(way, np.zeros(1, np.int32), "timeline: clocks")
            found.append(Round(enter_s, time.perf_counter()))
        return found

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank has handed in, on every rank; in no particular order. Collective."""
        held = [data]
        for way in self._ways:
            packed = _pack(held)
            rows = self._gather(way, _padded(packed, self._largest(len(packed))), "timeline: spans")
            held = [part for row in rows for part in _unpack(row.tobytes())]
        return held

    def share_text(self, text: str) -> str:
        """The first rank's ``text``, on every rank. Collective."""
        texts = self.gather(text.encode() if self.is_first else b"")
        return next((found.decode() for found in texts if found), "")

    def _largest(self, number: int) -> int:
        """Over all ranks: what one lane carries is of one size on all ranks, as training's own collectives are."""
        for way in self._ways:
            number = int(self._gather(way, np.array([number], np.int32), "timeline: sizes").max())
        return number

    @staticmethod
    def _gather(way: Way, mine: npt.NDArray[Any], label: str) -> npt.NDArray[Any]:
        """A row for each rank of the lane."""
        everyone = np.zeros(way.lane.nranks * mine.size, mine.dtype)
        own, output = way.tensor(mine), way.tensor(everyone)
        way.lane.all_gather(output, own, label=label).wait()
        # Reading it is what the host waits for where the lane is on a device.
        rows: npt.NDArray[Any] = output.numpy().reshape(way.lane.nranks, -1)
        return rows


def _pack(parts: Sequence[bytes]) -> bytes:
    sizes = np.array([len(parts), *map(len, parts)], np.int64)
    return zlib.compress(sizes.tobytes() + b"".join(parts))


def _padded(packed: bytes, size: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(packed.ljust(size, b"\0"), np.uint8)


def _unpack(packed: bytes) -> list[bytes]:
    """What ``_pack`` was given; what stands behind it does not matter."""
    data = zlib.decompressobj().decompress(packed)
    count = int(np.frombuffer(data[:8], np.int64)[0])
    at = 8 * (count + 1)
    parts = []
    for size in np.frombuffer(data[8:at], np.int64).tolist():
        parts.append(data[at : at + size])
        at += size
    return parts
