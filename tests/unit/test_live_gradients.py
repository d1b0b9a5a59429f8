"""Memory for full gradients: who waits, for what, and what small buckets may do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hp_sharding.live_gradients import LiveGradients
from hp_sharding.timeline import Timeline


class _Storage:
    """What ``GradientStorage`` is to the one who counts it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.n_allocated = 0

    def alloc(self) -> None:
        self.n_allocated += 1

    def free(self) -> None:
        self.n_allocated -= 1


class _Reduction:
    """A work that is over once somebody has waited for it."""

    on_device = False

    def __init__(self) -> None:
        self.n_waits = 0
        self.is_over = False

    def wait(self) -> None:
        self.n_waits += 1
        self.is_over = True

    def done(self) -> bool:
        return self.is_over


def _sides(*sizes: int) -> tuple[LiveGradients, list[Any], list[Any]]:
    storages: list[Any] = [_Storage(nbytes) for nbytes in sizes]
    buffers: list[Any] = [SimpleNamespace(gradient=storage) for storage in storages]
    return LiveGradients(buffers, Timeline(False)), storages, [_Reduction() for _ in sizes]


def _reduce_all(live: LiveGradients, storages: list[Any], works: list[Any]) -> None:
    for storage, work in zip(storages, works, strict=True):
        live.alloc(storage, waits=True)
        live.launch(storage, work)


def test_the_third_of_a_size_waits_for_the_first() -> None:
    live, storages, works = _sides(100, 100, 100, 100)
    _reduce_all(live, storages, works)
    assert [work.n_waits for work in works] == [1, 1, 0, 0]
    assert not any(storage.n_allocated for storage in storages), "a reduction keeps its memory, nobody else does"


def test_small_ones_share_the_memory_of_large_ones() -> None:
    """The last buckets of a backward: their reductions stand in line, and backward goes on."""
    live, storages, works = _sides(100, 60, 30, 10)
    _reduce_all(live, storages, works)
    assert [work.n_waits for work in works] == [0, 0, 0, 0]
    more: Any = _Storage(1)
    work: Any = _Reduction()
    live.alloc(more, waits=True)
    live.launch(more, work)
    assert works[0].n_waits == 1, "one byte too many"
    assert works[1].n_waits == 0


def test_one_that_still_fills_up_counts() -> None:
    live, storages, works = _sides(100, 100, 50)
    live.alloc(storages[0], waits=True)
    live.alloc(storages[1], waits=True)
    live.launch(storages[1], works[1])
    live.alloc(storages[2], waits=True)
    assert works[1].n_waits == 1
    live.free(storages[0])
    live.launch(storages[2], works[2])
    live.alloc(storages[0], waits=True)
    assert works[2].n_waits == 0, "what was let go of counts no more"


def test_what_is_over_is_not_waited_for() -> None:
    live, storages, works = _sides(100, 100, 100)
    works[0].is_over = True
    _reduce_all(live, storages, works)
    assert [work.n_waits for work in works] == [0, 0, 0]


@pytest.mark.parametrize("forgets", [False, True])
def test_without_waiting_and_after_all_were_waited_for(forgets: bool) -> None:
    live, storages, works = _sides(100, 100, 100)
    for storage, work in zip(storages, works, strict=True):
        live.alloc(storage, waits=False)
        live.launch(storage, work)
    if forgets:
        live.forget()
    live.alloc(storages[0], waits=True)
    assert [work.n_waits for work in works] == ([0, 0, 0] if forgets else [1, 1, 0])
