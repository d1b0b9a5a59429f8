"""``GradientsInFlight``: storage goes from a reduction that is done to the next bucket, and not a moment earlier."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle.base.framework import EagerParamBase

from hp_sharding.gradient_storage import GradientStorage
from hp_sharding.in_flight import GradientsInFlight
from hp_sharding.layout import BucketRules, ParamSpec, plan_buckets
from hp_sharding.timeline import Timeline
from tests.fakes import PoisoningPool, WaitingLane


class Rig:
    """Buckets of one parameter each, and a lane that delivers late."""

    def __init__(self, *sizes: int) -> None:
        self.pool, self.lane = PoisoningPool(), WaitingLane("reduce")
        specs = [ParamSpec(f"p{number}", size, "float32", 4, number, False) for number, size in enumerate(sizes)]
        layouts = plan_buckets(specs, [f"u{number}" for number in range(len(sizes))], BucketRules(1, 1, True, False))
        params = [EagerParamBase(shape=[size], dtype="float32") for size in sizes]
        self.storages = [
            GradientStorage(layout, [param], self.pool) for layout, param in zip(layouts, params, strict=True)
        ]
        self.in_flight = GradientsInFlight(self.storages, Timeline(enabled=False))
        self.outputs = [paddle.zeros([layout.numel]) for layout in layouts]

    def fill(self, number: int, value: float) -> int:
        """Returns the address."""
        storage = self.storages[number]
        self.in_flight.alloc(storage, limited=True)
        storage.put(0, paddle.full(self.outputs[number].shape, value)[: storage._places[0][1] // 4])
        assert storage.full is not None
        return int(storage.full.data_ptr())

    def send(self, number: int) -> None:
        storage = self.storages[number]
        assert storage.full is not None
        self.in_flight.send(storage, self.lane.reduce_scatter(self.outputs[number], storage.full))
        assert storage.full is None


def test_what_is_reduced_is_filled_again_without_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(100, 100, 100)
    addresses = [rig.fill(0, 1.0)]
    rig.send(0)
    addresses.append(rig.fill(1, 2.0))
    rig.send(1)
    monkeypatch.setattr(rig.pool, "alloc", None)
    addresses.append(rig.fill(2, 3.0))
    assert addresses[0] != addresses[1], "it was under way"
    assert addresses[2] == addresses[0], "and then it was not"
    assert rig.outputs[0].numpy().sum() == 100
    rig.send(2)
    rig.lane.deliver(rig.in_flight._flights[-1].work)  # type: ignore[arg-type]
    assert [output.numpy().sum() for output in rig.outputs] == [100, 200, 300], "padding is zero, and so all sums hold"


def test_nobody_sees_what_was_there() -> None:
    rig = Rig(100, 100)
    rig.fill(0, 1.0)
    rig.send(0)
    rig.lane.deliver(rig.in_flight._flights[0].work)  # type: ignore[arg-type]
    rig.in_flight.alloc(rig.storages[1], limited=True)
    full = rig.storages[1].full
    assert full is not None
    assert full.isnan().numpy()[:100].all(), "what was there is poisoned"
    assert (full.numpy()[100:] == 0).all()


def test_a_bucket_of_another_size_takes_its_own() -> None:
    rig = Rig(100, 300)
    rig.fill(0, 1.0)
    rig.send(0)
    rig.lane.deliver(rig.in_flight._flights[0].work)  # type: ignore[arg-type]
    rig.fill(1, 2.0)
    assert rig.storages[1].full is not None
    assert rig.storages[1].full.shape == rig.outputs[1].shape
    rig.send(1)
    rig.lane.deliver(rig.in_flight._flights[0].work)  # type: ignore[arg-type]
    rig.fill(0, 1.0)
    assert rig.pool.allocated_bytes == 4 * rig.outputs[1].shape[0], "what did not fit was free when the pool was asked"


def test_what_a_failed_reduction_may_still_read_is_left_alone() -> None:
    rig = Rig(100, 100)
    first = rig.fill(0, 1.0)
    rig.lane.failing.add("reduce_scatter")
    rig.send(0)
    kept = rig.in_flight._flights[0].used
    rig.lane.deliver(rig.in_flight._flights[0].work)  # type: ignore[arg-type]
    assert rig.fill(1, 2.0) != first
    assert kept is not None
    assert (kept.tensor.numpy()[:100] == 1).all()


def test_forgotten_storage_goes_back_to_the_pool() -> None:
    rig = Rig(100)
    rig.fill(0, 1.0)
    rig.send(0)
    rig.lane.deliver(rig.in_flight._flights[0].work)  # type: ignore[arg-type]
    rig.in_flight.forget()
    rig.pool.trim()
    assert rig.pool.allocated_bytes == 0


# -- how much there may be ---------------------------------------------------------------------------------------------


class _Storage:
    """What ``GradientStorage`` is to the one who counts it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.n_allocated = 0

    def alloc(self, used: Any = None) -> None:
        self.n_allocated += 1

    def free(self) -> None:
        self.n_allocated -= 1

    def hand_over(self) -> None:
        self.n_allocated -= 1


class _Reduction:
    """A work that is over once somebody has waited for it. ``n_waits`` counts those who had to."""

    on_device = False

    def __init__(self) -> None:
        self.n_waits = 0
        self.is_over = False

    def wait(self) -> None:
        self.n_waits += not self.is_over
        self.is_over = True

    def done(self) -> bool:
        return self.is_over


def _sides(*sizes: int) -> tuple[GradientsInFlight, list[Any], list[Any]]:
    storages: list[Any] = [_Storage(nbytes) for nbytes in sizes]
    return GradientsInFlight(storages, Timeline(False)), storages, [_Reduction() for _ in sizes]


def _reduce_all(live: GradientsInFlight, storages: list[Any], works: list[Any]) -> None:
    for storage, work in zip(storages, works, strict=True):
        live.alloc(storage, limited=True)
        live.send(storage, work)


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
    live.alloc(more, limited=True)
    live.send(more, work)
    assert works[0].n_waits == 1, "one byte too many"
    assert works[1].n_waits == 0


def test_one_that_still_fills_up_counts() -> None:
    live, storages, works = _sides(100, 100, 50)
    live.alloc(storages[0], limited=True)
    live.alloc(storages[1], limited=True)
    live.send(storages[1], works[1])
    live.alloc(storages[2], limited=True)
    assert works[1].n_waits == 1
    live.free(storages[0])
    live.send(storages[2], works[2])
    live.alloc(storages[0], limited=True)
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
        live.alloc(storage, limited=False)
        live.send(storage, work)
    if forgets:
        live.forget()
    live.alloc(storages[0], limited=True)
    assert [work.n_waits for work in works] == ([0, 0, 0] if forgets else [1, 1, 0])
