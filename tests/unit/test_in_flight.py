"""``GradientsInFlight``: storage goes from a reduction that is done to the next bucket, and not a moment earlier."""

from __future__ import annotations

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
        self.in_flight = GradientsInFlight(Timeline(enabled=False))
        specs = [ParamSpec(f"p{number}", size, "float32", 4, number, False) for number, size in enumerate(sizes)]
        layouts = plan_buckets(specs, [f"u{number}" for number in range(len(sizes))], BucketRules(1, 1, True, False))
        params = [EagerParamBase(shape=[size], dtype="float32") for size in sizes]
        self.storages = [
            GradientStorage(layout, [param], self.pool) for layout, param in zip(layouts, params, strict=True)
        ]
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
