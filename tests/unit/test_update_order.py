"""In what order ``step()`` updates buckets and starts their gathers, and which it updates in one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from paddle import nn

from tests.fakes import Rig, WaitingWork, wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer

BOTH: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True}


def _shard(**settings: Any) -> Rig:
    """A bucket for each parameter."""
    model = make_model("mlp")
    return wrap(model, make_optimizer("SGD", model), comm_fusion=False, **BOTH, **settings)


def _backward(model: nn.Layer, number: int) -> None:
    loss_of(model, make_batch("mlp", number, 0)).backward()


def _calls_of(rig: Rig, note: Callable[[], object] = lambda: None) -> list[list[int]]:
    """The buckets of each update from now on; ``note`` is called before each."""
    calls: list[list[int]] = []
    apply = rig.optimizer._updates.apply

    def apply_and_note(buckets: Sequence[int], used: Any) -> None:
        note()
        calls.append(list(buckets))
        apply(buckets, used)

    rig.optimizer._updates.apply = apply_and_note  # type: ignore[method-assign]
    return calls


def test_buckets_whose_reduction_is_done_are_updated_while_others_are_waited_for() -> None:
    rig = _shard(stage=1)
    for number in range(2):  # until the orders are learned
        _backward(rig.model, number)
        rig.optimizer.step()
    _backward(rig.model, 2)
    order, gather_order = rig.optimizer._reducer.order, rig.optimizer._schedule.gathers.order
    n_done = 4
    assert gather_order[0] not in order[:n_done], "what is needed first comes last"
    for bucket in order[:n_done]:
        work = rig.optimizer._reducer._works[bucket]
        assert isinstance(work, WaitingWork)
        rig.reduce.deliver(work)
    calls = _calls_of(rig)
    before = len(rig.gather.labels("all_gather"))
    rig.optimizer.step()
    updated = [bucket for call in calls for bucket in call]
    assert updated[:n_done] == order[:n_done]
    assert updated[n_done:] == [bucket for bucket in gather_order if bucket not in order[:n_done]]
    gathers = [int(label.partition(":")[0]) for label in rig.gather.labels("all_gather")[before:]]
    assert gathers == gather_order, "the gathers keep the agreed order all the same"


def test_each_bucket_is_gathered_as_soon_as_it_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the whole update."""
    monkeypatch.setattr("hp_sharding.optimizer.TOGETHER_BYTES", 1)
    rig = _shard()
    _backward(rig.model, 0)
    started: list[int] = []
    _calls_of(rig, lambda: started.append(len(rig.gather.labels("all_gather"))))
    rig.optimizer.step()
    assert started == list(range(len(rig.optimizer.buffers)))


@pytest.mark.parametrize("limit", [1, 4096, 1 << 20])
def test_small_neighbours_are_updated_in_one_call(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """As many as are reduced and fit into the limit; a larger one is updated alone."""
    monkeypatch.setattr("hp_sharding.optimizer.TOGETHER_BYTES", limit)
    rig = _shard()
    _backward(rig.model, 0)
    rig.optimizer._reducer._wait_all()
    calls = _calls_of(rig)
    rig.optimizer.step()
    buffers = rig.optimizer.buffers
    nbytes = [buffer.layout.shard_numel * buffer.layout.itemsize for buffer in buffers]
    order = rig.optimizer._schedule.gathers.order
    assert [bucket for call in calls for bucket in call] == order
    assert all(len(call) == 1 or sum(nbytes[bucket] for bucket in call) <= limit for call in calls)
    for call, following in itertools.pairwise(calls):
        assert sum(nbytes[bucket] for bucket in [*call, following[0]]) > limit, "it would have fitted"
    assert rig.gather.labels("all_gather") == [buffers[bucket].name for bucket in order]


def test_what_has_not_been_reduced_keeps_no_small_neighbour_waiting() -> None:
    rig = _shard(stage=1)
    for number in range(2):  # until the orders are learned
        _backward(rig.model, number)
        rig.optimizer.step()
    _backward(rig.model, 2)
    order = rig.optimizer._reducer.order
    rig.optimizer._schedule.gathers.order = list(order)
    work = rig.optimizer._reducer._works[order[1]]
    assert isinstance(work, WaitingWork)
    rig.reduce.deliver(work)
    calls = _calls_of(rig)
    rig.optimizer.step()
    assert calls == [order[:2], *([bucket] for bucket in order[2:])]
