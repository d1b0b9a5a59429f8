"""On a device no lane asks the others what comes: ranks that go different ways are found where ``step()`` compares."""

from __future__ import annotations

import pytest

from hp_sharding import CommError, ShardingConfig, shard
from hp_sharding.comm import stream_group
from tests.device.running import start
from tests.dist.test_divergence import USUAL, WAYS, _Experts, _x
from tests.models import make_optimizer

pytestmark = pytest.mark.usefixtures("standin_device")

_LIMIT_S = 90.0
_AS_LONG = ("another layer", "another order")
"""Ways with as many gathers as the usual one, and as large: nothing hangs, and all of them give wrong numbers."""


def _go(rank: int, nranks: int, way: str | None) -> tuple[int, str]:
    """How many steps went well, and the error of the next one."""
    stream_group._DESTRUCTORS_S = 1
    model = _Experts()
    optimizer = shard(model, make_optimizer("SGD", model), ShardingConfig(stage=3, timeout_s=20))
    for step in range(4):
        chosen, behind = WAYS[way] if way is not None and step == 2 and rank == nranks - 1 else USUAL
        model(_x(step, rank), chosen, behind).square().mean().backward()
        try:
            optimizer.step()
        except CommError as error:
            with pytest.raises(CommError):
                model(_x(step, rank), *USUAL)
            return step, str(error)
        optimizer.clear_grad()
    return 4, ""


@pytest.mark.parametrize("way", _AS_LONG)
def test_step_names_layers_that_were_taken_for_each_other(way: str) -> None:
    for outcome in start(_go, 2, way, timeout_s=_LIMIT_S):
        assert outcome.error is None, outcome.error
        done, text = outcome.result
        assert done == 2, text
        assert "the ranks have gone different ways: as collective" in text
        assert "of lane 'gather'" in text
        theirs = {"another layer": ("experts.3", "experts.4"), "another order": ("experts.0", "experts.1")}[way]
        for rank, layer in enumerate(theirs):
            assert f"rank {rank} has all_gather of" in text
            assert f"of layer {layer!r}" in text
        assert outcome.exit_s < 20, outcome.output


def test_the_usual_way_is_left_alone() -> None:
    for outcome in start(_go, 2, None, timeout_s=_LIMIT_S):
        assert outcome.error is None, outcome.error
        assert outcome.result == (4, "")
        assert outcome.returncode == 0
