"""The debug mode compares what the ranks launch, over the real wrapper."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

from hp_sharding import ShardingConfig, shard
from hp_sharding.errors import CommError
from tests import harness


def _train(rank: int, nranks: int, odd_one: int | None) -> tuple[bool, str]:
    """Whether ranks are compared, and the error of the second step, in which rank ``odd_one`` gathers once more."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = ShardingConfig(allgather_overlap=True, reduce_overlap=True, timeout_s=20)
    optimizer = shard(model, paddle.optimizer.SGD(0.1, parameters=model.parameters()), config)
    text = ""
    for step in range(2):
        model(paddle.full([2, 4], rank + step + 1.0)).sum().backward()
        if step == 1 and rank == odd_one:
            # What a rank that is led astray would launch, but for the transfer: that would fail even without a
            # comparison, as the lanes ask each other what comes before it does.
            gather: Any = optimizer.buffers[0].place.gather
            gather._note("all_gather", paddle.zeros([8]), "astray")
        try:
            optimizer.step()
        except CommError as error:
            text = str(error)
        optimizer.clear_grad()
    return optimizer._fingerprint is not None, text


@pytest.mark.parametrize("odd_one", [None, 0, 1])
def test_ranks_that_differ_are_named(odd_one: int | None) -> None:
    for rank, (compares, text) in enumerate(harness.run(_train, 2, odd_one, timeout_s=60)):
        assert compares
        assert ("as number" in text) == (odd_one is not None), text
        if odd_one is not None:
            assert "the end of step 2" in text
            assert f"rank {odd_one} has all_gather of 8 elements of float32 labelled 'astray'" in text
            assert f"rank {rank}:" in text


def test_without_the_debug_mode_nothing_is_compared() -> None:
    found = harness.run(_train, 2, None, env={"HP_SHARDING_DEBUG": "0"}, timeout_s=60)
    assert found == [(False, "")] * 2
