"""Replicas of shard groups: two by two, and replicas of unsharded models. What adds up over them, and what is sent."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import paddle
import pytest

from hp_sharding import ConfigError, ShardingConfig, fleet, shard
from tests import harness, reference
from tests.dist import test_accumulation, test_branches, test_clip, test_params, test_recompute, test_recovery
from tests.lanes import wrap
from tests.models import loss_of, loss_on, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_all_equal, assert_close, assert_equal, values
from tests.sides import BOTH, SMALL_MB, Factory, Settings, compare
from tests.training import Case, RankRun, train_all

ORDER = 2e-6
"""Over two replicas of two ranks sums are formed in another order than by one process."""

FUSED = {"replicate_buffer_size_MB": 4 * SMALL_MB}
SETTINGS: Settings = {
    "no overlap": {"stage": 2, "n_replicas": 2},
    "stage 1": {"stage": 1, "n_replicas": 2, **BOTH, "replicate_buffer_size_MB": SMALL_MB / 8},
    "stage 2": {"stage": 2, "n_replicas": 2, **BOTH, **FUSED},
    "reshard": {"stage": 2, "n_replicas": 2, **BOTH, "reshard_after_step": True, "comm_fusion": False},
    "stage 3": {"stage": 3, "n_replicas": 2, **BOTH, **FUSED},
}
STAGES_1_2: Settings = {name: settings for name, settings in SETTINGS.items() if settings["stage"] < 3}
FEW: Settings = {"stage 2": SETTINGS["stage 2"]}
SPLITS = pytest.mark.parametrize("nranks", [2, 4])


@SPLITS
@pytest.mark.parametrize("waits", [False, True])
def test_the_number_of_backwards_may_change_from_step_to_step(waits: bool, nranks: int) -> None:
    harness.run(compare, nranks, test_accumulation._varying_counts, SETTINGS, ORDER, "mlp", "SGD", waits)


def _replicates_last(new: Factory) -> dict[str, Values]:
    """3, 1, 2 backwards a step; all but the last one stay inside the replica. Gradients of two steps add up."""
    side = new(lambda: make_model("mlp"), lambda model: make_optimizer("SGD", model))
    number = 0
    snapshots = {}
    for step, count in enumerate((3, 1, 2, 2)):
        for micro in range(count):
            inside = side.sharded and micro < count - 1
            with side.optimizer.no_sync(replicate_only=True) if inside else contextlib.nullcontext():
                side.backward(loss_on(side.model, "mlp", number))
            number += 1
        side.step()
        if step != 1:
            side.clear_grad()
        snapshots[f"step {step}"] = side.values()
    return snapshots


@SPLITS
def test_the_replicas_may_be_left_for_the_last_backward(nranks: int) -> None:
    found = harness.run(compare, nranks, _replicates_last, SETTINGS, ORDER)
    for calls in found:
        fused = [call for call in calls["no overlap"] if call.lane == "replicate"]
        reduced = [call for call in calls["no overlap"] if call.op == "reduce_scatter"]
        assert (len(fused), len(reduced)) == (4, 8), "one bucket, 4 steps, 8 backwards"


@pytest.mark.parametrize("choice", ["parity of the rank", "a layer twice on rank 0", "at random"])
def test_ranks_go_different_ways(choice: str) -> None:
    harness.run(compare, 4, test_branches._branches, STAGES_1_2, ORDER, choice, 5, timeout_s=60)


@pytest.mark.parametrize("clip", ["global norm", "norm", "value"])
def test_clips(clip: str) -> None:
    norm_order = test_clip.NORM_ORDER
    harness.run(compare, 4, test_clip._clipped, SETTINGS, norm_order, "mlp", "SGD", clip, 4, "norm")


@pytest.mark.parametrize("name", ["gpt_recompute_reentrant", "gpt_recompute"])
def test_recompute_and_accumulation(name: str) -> None:
    harness.run(compare, 4, test_recompute._accumulating, SETTINGS, ORDER, name)


def test_a_second_gradient_after_the_first_was_sent() -> None:
    harness.run(compare, 2, test_recompute._train_chain, FEW, ORDER, [1])


@pytest.mark.parametrize("place", ["forward, last layer", "backward, first layer", "hook after a gradient"])
def test_all_ranks_raise(place: str) -> None:
    harness.run(compare, 4, test_recovery._recovers, SETTINGS, ORDER, "mlp", place, True, timeout_s=60)


def test_one_rank_raises_in_its_backward() -> None:
    settings = SETTINGS["stage 2"]
    results = harness.run(test_recovery._one_raises, 4, "backward, first layer", settings, timeout_s=60)
    expected = harness.run(test_recovery._without_failure, 4, settings)
    assert_all_equal([result["end"] for result in results])
    assert_equal(results[0]["end"], expected[0])


@pytest.mark.parametrize("shapes", list(test_params.SHAPES))
def test_more_ranks_than_elements(shapes: str) -> None:
    harness.run(compare, 4, test_params._train_odd, SETTINGS, 1e-5, shapes)


# -- every split gives the same ---------------------------------------------------------------------------------------


def _cases(n_replicas: int) -> list[Case]:
    settings = {"allgather_overlap": True, "reduce_overlap": True, "n_replicas": n_replicas, **FUSED}
    return [
        Case("mlp", "SGD", {**settings, "stage": 2, "comm_buffer_size_MB": SMALL_MB}, steps=20, reads=True),
        Case("gpt", "AdamW", {**settings, "stage": 1, "comm_buffer_size_MB": 8 * SMALL_MB}, steps=5, reads=True),
        Case("conv", "Momentum", {**settings, "stage": 2}, steps=5, reads=True),
        Case("gpt", "AdamW", {**settings, "stage": 3, "comm_buffer_size_MB": 8 * SMALL_MB}, steps=5, reads=True),
    ]


@pytest.mark.parametrize("n_replicas", [1, 2, 4])
def test_every_split_trains_as_one_process_does(n_replicas: int) -> None:
    cases = _cases(n_replicas)
    runs_of_ranks: list[list[RankRun]] = harness.run(train_all, 4, cases, timeout_s=110)
    for case, *runs in zip(cases, *runs_of_ranks, strict=True):
        expected = reference.train(case.model, case.optimizer, 4, case.steps)
        assert all(run.digests == runs[0].digests for run in runs), f"{case}: ranks differ after some step"
        assert_close(runs[0].params, expected.params, 1e-5 if case.optimizer == "AdamW" else ORDER, str(case))


def _full_gradient(rank: int, nranks: int, n_replicas: int) -> Values:
    model = make_model("mlp")
    _, optimizer, _ = wrap(model, make_optimizer("SGD", model), nranks, n_replicas=n_replicas, **BOTH)
    loss_of(model, make_batch("mlp", 0, rank)).backward()
    found = {name: optimizer.full_grad(param) for name, param in model.named_parameters()}
    return {name: gradient.numpy() for name, gradient in found.items() if gradient is not None}


def test_the_mean_gradient_is_that_of_the_whole_batch() -> None:
    model = make_model("mlp")
    batches = [make_batch("mlp", 0, rank) for rank in range(4)]
    whole = paddle.concat([x for x, _ in batches]), paddle.concat([target for _, target in batches])
    loss_of(model, whole).backward()
    expected = {name: param.grad.numpy() for name, param in model.named_parameters() if param.grad is not None}
    for n_replicas in (1, 2, 4):
        for found in harness.run(_full_gradient, 4, n_replicas):
            assert_close(found, expected, ORDER, f"{n_replicas} replicas:")


# -- what is sent, and when -------------------------------------------------------------------------------------------


def _launches(rank: int, nranks: int, replicate_mb: float) -> list[tuple[str, str, str]]:
    model = make_model("mlp")
    settings = {**BOTH, "replicate_buffer_size_MB": replicate_mb, "n_replicas": 2}
    _, optimizer, calls = wrap(model, make_optimizer("SGD", model), nranks, **settings)
    for step in range(3):
        before = len(calls)
        loss_of(model, make_batch("mlp", step, rank)).backward()
        seen = calls[before:]
        optimizer.step()
        optimizer.clear_grad()
    assert all(call.nbytes for call in seen)
    return [(call.lane, call.op, call.label) for call in seen]


def test_an_all_reduce_follows_each_reduction_or_several_share_one() -> None:
    for found in harness.run(_launches, 4, 1e-6):
        kinds = [(lane, op) for lane, op, _ in found if (lane, op) != ("gather", "all_gather")]
        n = (len(kinds) - 2) // 2
        assert n > 3
        assert kinds == [("reduce", "reduce_scatter"), ("replicate", "all_reduce")] * n + [
            ("agree", "all_reduce"),
            ("gather", "all_reduce"),
        ]
    for found in harness.run(_launches, 4, 25):
        fused = [label for lane, _, label in found if lane == "replicate"]
        reduced = [label for lane, op, label in found if op == "reduce_scatter"]
        assert len(reduced) > 3
        # The parameter of the model itself gets its gradient first, and lies last.
        assert fused[0] == "0:gain"
        assert len(fused) == 2
        assert fused[1].split(" to ") == [reduced[1].split(",")[0], reduced[-1].split(",")[0]]


# -- the faces --------------------------------------------------------------------------------------------------------


def _fleet(rank: int, nranks: int, degrees: dict[str, int]) -> tuple[Values, Values, tuple[int, int]]:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = degrees
    strategy.hp_sharding_configs = {"stage": 2, "allgather_overlap": True, "reduce_overlap": True, "timeline": True}
    fleet.init(is_collective=True, strategy=strategy)
    paddle.seed(rank)  # rank 0's values are everybody's, whatever others begin with
    model = make_model("mlp") if rank == 0 else _other_values(make_model("mlp"))
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(make_optimizer("SGD", model))
    begin = values(model)
    for step in range(3):
        loss_of(model, make_batch("mlp", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
    assert optimizer.timeline.summary()["replicate_ms"] > 0
    lanes: Any = optimizer._reducer.lanes
    return begin, values(model), (lanes.reduce.nranks, lanes.replicate.nranks)


def _other_values(model: paddle.nn.Layer) -> paddle.nn.Layer:
    for param in model.parameters():
        param.set_value(param + 1)
    return model


@pytest.mark.parametrize(
    ("degrees", "shape"),
    [
        ({"dp_degree": 2, "sharding_degree": 2}, (2, 2)),
        ({"sharding_degree": 2}, (2, 2)),
        ({"dp_degree": 4, "sharding_degree": 1}, (1, 4)),
    ],
)
def test_fleet(degrees: dict[str, int], shape: tuple[int, int]) -> None:
    expected = reference.train("mlp", "SGD", 4, 3).params
    found = harness.run(_fleet, 4, degrees, timeout_s=60)
    for begin, end, grid in found:
        assert grid == shape
        assert_equal(begin, values(make_model("mlp")), "rank 0's values:")
        assert_close(end, expected, ORDER, str(degrees))
    assert_all_equal([end for _, end, _ in found])


def _without_fleet(rank: int, nranks: int) -> tuple[Values, list[str]]:
    texts = []
    model = make_model("mlp")
    pair, column = [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]
    for groups in ((pair, pair), (list(range(4)), column), (pair, [r for r in column if r != rank])):
        with pytest.raises(ConfigError) as error:
            shard(model, make_optimizer("SGD", model), shard_group=groups[0], replicate_group=groups[1])
        texts.append(str(error.value))
    optimizer: Any = shard(
        model, make_optimizer("SGD", model), ShardingConfig(), shard_group=pair, replicate_group=column
    )
    for step in range(3):
        loss_of(model, make_batch("mlp", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
    return values(model), texts


def test_without_fleet() -> None:
    expected = reference.train("mlp", "SGD", 4, 3).params
    for rank, (found, texts) in enumerate(harness.run(_without_fleet, 4, timeout_s=60)):
        assert_close(found, expected, ORDER)
        assert f"expected rank {rank} to be the only one in both" in texts[0]
        assert f"expected rank {rank} to be the only one in both" in texts[1]
        assert f"this process's ({rank}) among them" in texts[2]


def _memory(rank: int, nranks: int, accumulate: bool) -> dict[str, int]:
    model = make_model("mlp")
    _, optimizer, _ = wrap(model, make_optimizer("SGD", model), nranks, n_replicas=2, **BOTH)
    for step in range(2):
        for _ in range(2 if accumulate else 1):
            loss_of(model, make_batch("mlp", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
    report: dict[str, int] = optimizer.memory_report()
    return report


def test_the_second_gradient_shard_is_counted_where_it_is_used() -> None:
    plain, accumulated = harness.run(_memory, 4, False)[0], harness.run(_memory, 4, True)[0]
    assert plain["gradient_shard_bytes"] > 0
    assert accumulated["gradient_shard_bytes"] == 2 * plain["gradient_shard_bytes"]
    assert accumulated["formula_bytes"] - plain["formula_bytes"] == plain["gradient_shard_bytes"]
    assert np.isfinite(accumulated["measured_bytes"])


# -- eight ranks -----------------------------------------------------------------------------------------------------


def _train_tiny_layers(rank: int, nranks: int, comm_fusion: bool) -> tuple[list[float], Values]:
    """32 layers of 8 x 8 over two replicas of four."""
    paddle.seed(7)
    model = paddle.nn.Sequential(*[paddle.nn.Linear(8, 8) for _ in range(32)])
    settings = {**BOTH, "comm_fusion": comm_fusion, "n_replicas": 2, "delay_s": 0.0, "poison": False}
    _, optimizer, _ = wrap(model, make_optimizer("SGD", model), nranks, **settings)
    losses = []
    for step in range(4):
        x = paddle.to_tensor(np.random.default_rng([step, rank]).normal(size=[4, 8]).astype("float32"))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses, values(model)


@pytest.mark.slow
def test_eight_ranks_with_and_without_fusion() -> None:
    """Not bitwise: over four ranks the order of a sum depends on whose shard an element lies in."""
    fused = harness.run(_train_tiny_layers, 8, True, timeout_s=110)
    apart = harness.run(_train_tiny_layers, 8, False, timeout_s=110)
    for (losses, end), (other_losses, other_end) in zip(fused, apart, strict=True):
        assert losses == pytest.approx(other_losses, rel=1e-5)
        assert_close(end, other_end, 1e-5)
    for runs in (fused, apart):
        assert_all_equal([end for _, end in runs])
