"""Finds the first collective in which ranks differ: a debugging aid, on with ``HP_SHARDING_DEBUG=1``.

Every collective that is launched leaves a line; at the end of each step the ranks compare a digest of their lines, and
where those differ the lines themselves. It costs a small collective of its own a step, and waits for the slowest rank.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import numpy as np
import paddle

from ..errors import CommError
from .communicator import Communicator, Mark, Work
from .device import host_tensor

LANE = "fingerprint"
"""The lane on which ranks compare: none of those that it looks at, which may be stuck where ranks differ."""


def is_wanted() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get("HP_SHARDING_DEBUG", "0") not in ("", "0")


class Fingerprint:
    """What this rank has launched since the last comparison, lane by lane.

    Args:
        comm: carries the comparison.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._lines: dict[str, list[str]] = {}
        self._n_checks = 0

    def watch(self, lanes: Mapping[str, Communicator]) -> dict[str, Communicator]:
        """The same lanes, whose collectives leave a line here from now on. Hand the lanes over in the same order."""
        return {name: WatchedLane(lane, self._lines.setdefault(name, [])) for name, lane in lanes.items()}

    def check(self) -> None:
        """Compares what was launched since the last check. Collective.

        Raises:
            CommError: the ranks differ; names the first difference and who has it.
        """
        self._n_checks += 1
        mine = host_tensor([_digest(lines) for lines in self._lines.values()], "int64")
        everyone = host_tensor(np.zeros(self._comm.nranks * mine.shape[0]), "int64")
        self._comm.all_gather(everyone, mine, label=f"fingerprint {self._n_checks}").wait()
        digests = everyone.numpy().reshape(self._comm.nranks, -1)
        differing = [lane for lane, column in zip(self._lines, digests.T, strict=True) if len(set(column)) > 1]
        if differing:
            raise self._difference(differing[0])
        for lines in self._lines.values():
            lines.clear()

    def _difference(self, lane: str) -> CommError:
        everyone = self._exchange("\n".join(self._lines[lane]))
        mine = everyone[self._comm.rank]
        other = next(index for index, lines in enumerate(everyone) if lines != mine)
        theirs = everyone[other]
        place = next(n for n in range(len(mine) + 1) if mine[n : n + 1] != theirs[n : n + 1])
        me, peer = self._comm.ranks[self._comm.rank], self._comm.ranks[other]
        return CommError(
            f"rank {me}: the ranks have launched different collectives before the end of step {self._n_checks}: as "
            f"number {place} on lane {lane!r} rank {me} has {_at(mine, place)}, rank {peer} has {_at(theirs, place)}. "
            "All ranks must run the same layers with the same settings",
            op="fingerprint",
            label=_at(mine, place),
            lane=lane,
            rank=me,
            peer=peer,
        )

    def _exchange(self, text: str) -> list[list[str]]:
        """Every rank's lines. Collective."""
        body = np.frombuffer(text.encode(), np.uint8)
        lengths = host_tensor(np.zeros(self._comm.nranks), "int64")
        self._comm.all_gather(lengths, host_tensor([len(body)], "int64"), label="lengths of lines").wait()
        longest = max(*lengths.tolist(), 1)
        padded = np.zeros(longest, np.uint8)
        padded[: len(body)] = body
        bodies = host_tensor(np.zeros(self._comm.nranks * longest), "uint8")
        self._comm.all_gather(bodies, host_tensor(padded, "uint8"), label="lines").wait()
        texts = bodies.numpy().reshape(self._comm.nranks, longest)
        return [
            row[:length].tobytes().decode().splitlines() for row, length in zip(texts, lengths.tolist(), strict=True)
        ]


class WatchedLane(Communicator):
    """A communicator that passes everything on, and leaves a line for each collective."""

    def __init__(self, lane: Communicator, lines: list[str]) -> None:
        self.lane = lane.lane
        self.ranks = lane.ranks
        self.rank = lane.rank
        self._inner = lane
        self._lines = lines

    def all_gather(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        wire_dtype: str | None = None,
    ) -> Work:
        """See ``Communicator``."""
        self._note("all_gather", output, label, _types(input, output, wire_dtype))
        return self._inner.all_gather(output, input, label=label, after=after, wire_dtype=wire_dtype)

    def reduce_scatter(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        accumulate: bool = False,
        wire_dtype: str | None = None,
    ) -> Work:
        """See ``Communicator``."""
        self._note("reduce_scatter", input, label, _types(input, output, wire_dtype))
        return self._inner.reduce_scatter(
            output, input, label=label, after=after, accumulate=accumulate, wire_dtype=wire_dtype
        )

    def all_reduce(
        self, tensor: paddle.Tensor, *, label: str = "", after: Work | None = None, wire_dtype: str | None = None
    ) -> Work:
        """See ``Communicator``."""
        self._note("all_reduce", tensor, label, _types(tensor, tensor, wire_dtype))
        return self._inner.all_reduce(tensor, label=label, after=after, wire_dtype=wire_dtype)

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "", after: Work | None = None) -> Work:
        """See ``Communicator``."""
        self._note(f"broadcast from {src}", tensor, label)
        return self._inner.broadcast(tensor, src=src, label=label, after=after)

    @property
    def is_broken(self) -> bool:
        """See ``Communicator``."""
        return self._inner.is_broken

    def break_off(self, reason: str) -> None:
        """See ``Communicator``."""
        self._inner.break_off(reason)

    def mark(self) -> Mark:
        """See ``Communicator``."""
        return self._inner.mark()

    def close(self) -> None:
        """See ``Communicator``."""
        self._inner.close()

    def _note(self, op: str, whole: paddle.Tensor, label: str, types: str | None = None) -> None:
        types = types or _types(whole, whole, None)
        self._lines.append(f"{op} of {whole.size} elements of {types} labelled {label!r}")


def _types(own: paddle.Tensor, result: paddle.Tensor, wire_dtype: str | None) -> str:
    dtype, result_dtype = (str(tensor.dtype).rpartition(".")[2] for tensor in (own, result))
    if dtype == result_dtype and wire_dtype in (None, dtype):
        return dtype
    return f"{dtype} as {wire_dtype} into {result_dtype}" if wire_dtype else f"{dtype} into {result_dtype}"


def _digest(lines: list[str]) -> int:
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _at(lines: list[str], place: int) -> str:
    return lines[place] if place < len(lines) else "nothing more"
