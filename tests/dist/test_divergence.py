"""Ranks that launch different collectives are told so: by the lanes, which ask each other first, and at ``step()``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding import CommError, ShardingConfig, shard
from hp_sharding.comm import Communicator, Fingerprint, create_communicators
from hp_sharding.comm.local import LocalWork
from tests import harness
from tests.models import make_optimizer
from tests.reference import Values, values
from tests.sides import BOTH, Factory, compare

SIZE = 8
TIMEOUT_S = 60.0
AT_ONCE_S = 20.0
"""Much less than the time-out of the lanes, and much more than it takes."""
OVERLAP: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True}


# ---- the comparison at step() ----


def _groups(rank: int, nranks: int, n_replicas: int) -> dict[str, list[int]]:
    degree = nranks // n_replicas
    first = rank - rank % degree
    shards, replicas = list(range(first, first + degree)), list(range(rank % degree, nranks, degree))
    return {"shard_group": shards, "replicate_group": replicas} if n_replicas > 1 else {}


def _fingerprint(optimizer: Any) -> Fingerprint:
    found: Fingerprint = optimizer._reducer.lanes.fingerprint
    return found


def _train(rank: int, nranks: int, n_replicas: int, odd_one: int | None, op: str) -> tuple[int, str]:
    """How many steps went well, and the error of the next; in the second, rank ``odd_one`` launches one more."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    config = ShardingConfig(timeout_s=TIMEOUT_S, **OVERLAP)
    optimizer = shard(model, inner, config, **_groups(rank, nranks, n_replicas))
    for step in range(3):
        loss = model(paddle.full([2, 4], rank + step + 1.0)).sum()
        if step == 1 and rank == odd_one:
            # What a rank that is led astray would launch, but for the transfer: on CPU the lanes ask each other what
            # comes before it does, so that it would fail without a comparison too.
            lane = "gather" if op == "all_gather" else "reduce"
            _fingerprint(optimizer).lanes[lane]._note(LocalWork(op, "9:astray, backward 1", lane, 32))
        loss.backward()
        before = values(model)
        try:
            optimizer.step()
        except CommError as error:
            np.testing.assert_equal(values(model), before, err_msg="updated from sums that nobody can trust")
            model(paddle.ones([2, 4])).sum()
            with pytest.raises(CommError):
                optimizer.step()  # and nothing goes on
            return step, str(error)
        optimizer.clear_grad()
    return 3, ""


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("nranks", "n_replicas", "odd_one"), [(2, 1, 0), (2, 1, 1), (3, 1, 1), (4, 2, 1)])
def test_step_names_the_first_difference_on_every_rank(nranks: int, n_replicas: int, odd_one: int, op: str) -> None:
    for rank, (done, text) in enumerate(harness.run(_train, nranks, n_replicas, odd_one, op, timeout_s=60)):
        assert done == 1, text
        assert text.startswith(f"rank {rank}: the ranks have gone different ways: as collective "), text
        assert f"rank {odd_one} has {op} of 32 bytes labelled '9:astray, backward 1', of layer 'astray'" in text
        assert "start again from a checkpoint" in text


@pytest.mark.parametrize(("nranks", "n_replicas"), [(2, 1), (4, 2)])
def test_ranks_that_launch_the_same_are_left_alone(nranks: int, n_replicas: int) -> None:
    assert harness.run(_train, nranks, n_replicas, None, "", timeout_s=60) == [(3, "")] * nranks


# ---- stage 3: all ranks of a shard group run the same layers ----


class _Experts(nn.Layer):
    """Layers of one size of which each call names those to run, in which order, and what runs behind the head.

    A layer in brackets cuts the graph: what stands before it gets no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.LayerList([nn.Linear(SIZE, SIZE) for _ in range(5)])
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, x: paddle.Tensor, chosen: list[Any], behind: list[int]) -> paddle.Tensor:
        for each in chosen:
            x = self.experts[each[0]](x.detach()) if isinstance(each, list) else self.experts[each](x)
        x = self.head(x)
        for each in behind:
            x = self.experts[each](x)
        return x


USUAL: tuple[list[Any], list[int]] = ([0, 1, 2, 3], [])
WAYS: dict[str, tuple[list[Any], list[int]]] = {
    "another layer": ([0, 1, 2, 4], []),
    "a layer left out": ([0, 1, 3], []),
    "another order": ([1, 0, 2, 3], []),
    "one more at the end": ([0, 1, 2, 3], [4]),
    "backward ends sooner": ([0, 1, 2, [3]], []),
}


def _x(step: int, rank: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng([step, rank]).standard_normal([4, SIZE], dtype=np.float32))


def _go(rank: int, nranks: int, settings: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """For each of ``WAYS``, which the last rank takes from the third step on: the error, and seconds until it came."""
    found = {}
    for name, way in WAYS.items():
        paddle.seed(0)
        model = _Experts()
        config = ShardingConfig(stage=3, timeout_s=TIMEOUT_S, **settings)
        optimizer = shard(model, make_optimizer("SGD", model), config)
        begin_s, text = 0.0, "nothing was noticed"
        try:
            for step in range(5):
                if step == 2:
                    begin_s = time.monotonic()
                chosen, behind = way if step >= 2 and rank == nranks - 1 else USUAL
                model(_x(step, rank), chosen, behind).square().mean().backward()
                optimizer.step()
                optimizer.clear_grad()
        except CommError as error:
            text = str(error)
        found[name] = text, time.monotonic() - begin_s
    return found


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("settings", [OVERLAP, {}], ids=["overlap", "no overlap"])
def test_stage_3_names_the_layers_of_both_ranks_at_once(settings: dict[str, Any], nranks: int) -> None:
    for rank, outcome in enumerate(harness.run(_go, nranks, settings, fresh=True, timeout_s=110)):
        assert outcome.error is None, outcome.error
        for name, (text, after_s) in outcome.result.items():
            place = f"{name}, rank {rank}: {text}"
            assert "the ranks have gone different ways" in text, place
            assert text.count("of layer") + text.count("agreement") >= 2, place
            assert "of layer 'experts." in text, place
            assert f"rank {nranks - 1}" in text, place
            assert after_s < AT_ONCE_S, f"{place}: after {after_s:.1f} s"


# ---- lanes: two that wait for each other ----


def _wait_for_each_other(rank: int, nranks: int) -> tuple[str, float]:
    """Rank 0 launches on one lane and waits, all others on another one."""
    lanes = create_communicators(range(nranks), ["gather", "reduce"], timeout_s=TIMEOUT_S)
    begin_s = time.monotonic()
    lane, label = ("reduce", "3:blocks.3, backward 2") if rank == 0 else ("gather", "5:blocks.5")
    with pytest.raises(CommError) as caught:
        lanes[lane].all_reduce(paddle.ones([4]), label=label).wait()
    return str(caught.value), time.monotonic() - begin_s


@pytest.mark.parametrize("nranks", [2, 3])
def test_ranks_that_wait_for_each_other_are_told_at_once(nranks: int) -> None:
    for text, after_s in harness.run(_wait_for_each_other, nranks):
        assert "gone different ways and wait for each other" in text
        assert "rank 0 for rank" in text
        assert "labelled '3:blocks.3, backward 2', of layer 'blocks.3' on lane 'reduce'" in text
        assert "for rank 0 in all_reduce (float32) of 16 bytes labelled '5:blocks.5', of layer 'blocks.5'" in text
        assert after_s < AT_ONCE_S


def _come_late(rank: int, nranks: int) -> float:
    """Rank 1 is late, on a lane on which it has launched as much as rank 0, and then on the other one."""
    lanes = create_communicators(range(nranks), ["gather", "reduce"], timeout_s=TIMEOUT_S)
    tensor = paddle.ones([4])
    for lane in (lanes["gather"], lanes["reduce"]):
        if rank == 1:
            time.sleep(3.0)  # the others tell where they stand meanwhile
        lane.all_reduce(tensor, label="late").wait()
    follow: list[Communicator] = [lanes["reduce"], lanes["gather"]]
    if rank == 1:
        # Not in the order of the others, but nobody waits before all is launched.
        works = [lane.all_reduce(paddle.ones([4]), label=lane.lane) for lane in follow[::-1]]
        time.sleep(2.0)
    else:
        works = [lane.all_reduce(paddle.ones([4]), label=lane.lane) for lane in follow]
    for work in works:
        work.wait()
    return float(tensor[0])


def test_who_is_only_late_is_waited_for() -> None:
    assert harness.run(_come_late, 3) == [9.0] * 3


# ---- replicas ----


def _branches_by_replica(new: Factory) -> dict[str, Values]:
    """Ranks 0 and 1 are one replica, 2 and 3 the other one."""
    side = new(_Experts, lambda model: make_optimizer("Momentum", model))
    ways: Callable[[int, int], tuple[list[Any], list[int]]]
    ways = lambda step, rank: ([0, 1, 2], []) if (step + rank // 2) % 2 else ([2], [0])  # noqa: E731
    for step in range(5):
        side.backward(lambda rank, step=step: side.model(_x(step, rank), *ways(step, rank)).square().mean())
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def test_in_stage_3_a_replica_may_take_another_branch_than_the_next() -> None:
    settings = {"overlap": {"stage": 3, "n_replicas": 2, **BOTH}, "no overlap": {"stage": 3, "n_replicas": 2}}
    harness.run(compare, 4, _branches_by_replica, settings, 2e-6, timeout_s=60)
