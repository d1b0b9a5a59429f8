"""Many short parts in one start of the ranks, which takes longer than all of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from hp_sharding.errors import HpShardingError
from tests.device import standin
from tests.device.running import on_device

Part = Callable[[int, int], Any]
"""Takes rank and number of ranks, at the top level of a module. It makes lanes of its own."""


class Found(NamedTuple):
    """What every rank found.

    Attributes:
        nranks: how many they were.
        by_rank: for each rank the result of each part by its name, or the ``Broken`` that it ended with.
    """

    nranks: int
    by_rank: list[dict[str, Any]]

    def of(self, part: Part) -> list[Any]:
        """What each rank found in one part; fails with its tracebacks where it has raised."""
        results = [found[part.__name__] for found in self.by_rank]
        broken = [f"rank {rank}:\n{each.why}" for rank, each in enumerate(results) if isinstance(each, Broken)]
        if broken:
            pytest.fail("\n".join(broken), pytrace=False)
        return results


class Broken(NamedTuple):
    """The traceback of what a part raised."""

    why: str


def find(nranks: int, parts: Sequence[Part]) -> Found:
    """Runs the parts one after the other on ``nranks`` stand-in devices, each at full pace to begin with."""
    return Found(nranks, on_device(_run, nranks, tuple(parts), timeout_s=90.0))


def _run(rank: int, nranks: int, parts: Sequence[Part]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        standin.Device().set_pace(standin.Pace())
        try:
            found[part.__name__] = part(rank, nranks)
        except (AssertionError, HpShardingError):
            found[part.__name__] = Broken(traceback.format_exc())
    return found
