"""Checkpoints of models whose layers are split: other shard ranks and stages may load them, other splits may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paddle.utils import unique_name

from hp_sharding import CheckpointError, ConfigError, fleet, full_parameters, load, save, save_full
from hp_sharding.checkpoint.folder import open_checkpoint
from tests import harness
from tests.dist.test_tensor_parallel import OVERLAP, SPLIT_AXES, _adamw, _loss, _split_model, _strategy, _whole
from tests.reference import Values, assert_close, assert_equal, values

SPLIT_AND_SHARDED = {"mp_degree": 2, "sharding_degree": 2}
SPLIT_AND_REPLICATED = {"mp_degree": 2, "dp_degree": 2, "sharding_degree": 1}


class _Run:
    """A model wrapped through fleet."""

    def __init__(self, rank: int, strategy: Any, stage: int) -> None:
        self.rank = rank
        strategy.hp_sharding_configs = {"stage": stage, **OVERLAP}
        with unique_name.guard():
            model, self.data_rank = _split_model(rank)
            self.model = fleet.distributed_model(model)
            self.optimizer = fleet.distributed_optimizer(_adamw(model, 1.0), strategy=strategy)

    def train(self, steps: range) -> _Run:
        for step in steps:
            _loss(self.model, step, self.data_rank).backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
        return self

    def known(self) -> Any:
        """Which parameters have had a gradient, and in which order buckets go."""
        reducer, gathers = self.optimizer._reducer, self.optimizer._schedule.gathers
        return [list(used) for used in reducer.used], reducer.order, gathers.order

    def values(self) -> Values:
        with full_parameters(self.model):
            return values(self.model)


def _begin(rank: int, degrees: dict[str, int]) -> Any:
    strategy = _strategy(degrees)
    fleet.init(is_collective=True, strategy=strategy)
    return strategy


def _saved_and_resumed(rank: int, nranks: int, path: str) -> Values:
    """The values after four steps, which a run that goes on from the second one must have too, in any stage."""
    strategy = _begin(rank, SPLIT_AND_SHARDED)
    whole = _Run(rank, strategy, 2).train(range(2))
    save(path, whole.model, whole.optimizer, rank_extra=rank)
    known = whole.known()
    expected = whole.train(range(2, 4)).values()
    for stage in (1, 2, 3):
        resumed = _Run(rank, strategy, stage)
        loaded = load(path, resumed.model, resumed.optimizer)
        assert (loaded.rank_extra, loaded.steps) == (rank, 2)
        assert stage != 2 or resumed.known() == known, "of split parameters, too"
        assert_equal(resumed.train(range(2, 4)).values(), expected, f"rank {rank}, stage {stage}:")
    with pytest.raises(ConfigError, match="tensor-parallel"):
        save_full(f"{path}-whole", whole.model, whole.optimizer)
    return expected


def _resumed_elsewhere(rank: int, nranks: int, path: str) -> Values:
    strategy = _begin(rank, SPLIT_AND_REPLICATED)
    resumed = _Run(rank, strategy, 2)
    load(path, resumed.model, resumed.optimizer)
    return resumed.train(range(2, 4)).values()


def _refused(rank: int, nranks: int, path: str) -> None:
    strategy = _begin(rank, {"sharding_degree": 4})
    strategy.hp_sharding_configs = {"stage": 2}
    model = fleet.distributed_model(_whole())
    optimizer = fleet.distributed_optimizer(_adamw(model, 1.0), strategy=strategy)
    before = values(model)
    with pytest.raises(CheckpointError, match="split over 2 tensor-parallel ranks, and here they are over 1"):
        load(path, model, optimizer)
    assert_equal(values(model), before, "nothing has changed:")


def test_split_parameters_come_back_to_the_ranks_that_had_them(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    expected = harness.run(_saved_and_resumed, 4, path)
    _check_names(path)
    elsewhere = harness.run(_resumed_elsewhere, 4, path)
    by_split = {rank % 2: values for rank, values in enumerate(expected)}
    for found in elsewhere:
        alike = [of_rank for of_rank in by_split.values() if _are_close(found, of_rank)]
        assert len(alike) == 1, "one of the two halves, and not the other"
    harness.run(_refused, 4, path)


def _check_names(path: str) -> None:
    """What is not split is stored once, the rest once for each part."""
    with open_checkpoint(path) as checkpoint:
        names = [name.removeprefix("model/") for name in checkpoint.tensors if name.startswith("model/")]
    split = [name for name in names if "#tensor" in name]
    assert sorted(split) == sorted(f"{name}#tensor{part}of2" for name in SPLIT_AXES for part in (0, 1))
    assert not {name.partition("#")[0] for name in split} & set(names), "either split or whole"


def _are_close(found: Values, expected: Values) -> bool:
    try:
        assert_close(found, expected, 1e-6, "")
    except AssertionError:
        return False
    return True
