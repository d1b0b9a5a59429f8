"""What is measured of a model that runs here: what counts, and to whom it is dealt out."""

from __future__ import annotations

import time

import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from hp_sharding.config import ShardingConfig
from hp_sharding.plan.hardware import Hardware, Link
from hp_sharding.plan.measuring import measure
from hp_sharding.plan.profile import Unit
from hp_sharding.plan.replay import Ranks, predict

ROWS, WIDTH, INNER = 512, 32, 1024
HIDDEN_BYTES, INNER_BYTES = ROWS * WIDTH * 4, ROWS * INNER * 4
FAST = Hardware(Link(1e12, 0.0))


class _Block(nn.Layer):
    """Its forward sleeps; its backward does not, unless it runs the forward again."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self._seconds = seconds

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        time.sleep(self._seconds)
        return self.down(F.gelu(self.up(x)))


class _Decoder(nn.Layer):
    """Holds nothing but a list, and takes time of its own."""

    def __init__(self, *, seconds: float, recomputes: bool) -> None:
        super().__init__()
        self.blocks = nn.LayerList([_Block(seconds) for _ in range(2)])
        self._recomputes = recomputes

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            x = recompute(block, x) if self._recomputes else block(x)
        return x


class _Net(nn.Layer):
    def __init__(self, decoder: nn.Layer) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.decoder(x))


def _batch() -> tuple[paddle.Tensor]:
    return (paddle.ones([ROWS, WIDTH]),)


def _units(model: nn.Layer) -> dict[str, Unit]:
    profile = measure(model, model, ShardingConfig(), draw=_trained_batch, steps=1).profile
    return {unit.name: unit for unit in profile.units}


def _trained_batch() -> tuple[paddle.Tensor]:
    (x,) = _batch()
    x.stop_gradient = False
    return (x,)


def test_a_batch_is_drawn_before_the_time_counts() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))

    def draw() -> tuple[paddle.Tensor]:
        time.sleep(0.2)
        return _batch()

    units = measure(model, model, ShardingConfig(), draw=draw, steps=1).profile.units
    assert sum((unit.forward_s or 0) + (unit.backward_s or 0) for unit in units) < 0.2


def test_a_forward_that_runs_again_is_part_of_the_backward() -> None:
    plain, again = (_units(_Decoder(seconds=0.15, recomputes=recomputes)) for recomputes in (False, True))
    for name in ("blocks.0", "blocks.1"):
        for found in (plain[name], again[name]):
            assert 0.15 <= (found.forward_s or 0) < 0.3
        assert (plain[name].backward_s or 0) < 0.15 <= (again[name].backward_s or 0) < 0.3
        # What is inside a block stays for the backward, or comes to be in it.
        assert plain[name].activation_bytes >= 2 * INNER_BYTES + HIDDEN_BYTES
        assert HIDDEN_BYTES <= again[name].activation_bytes < INNER_BYTES
        # Two that what runs again leaves, and the gradient of one.
        assert again[name].transient_bytes >= 3 * INNER_BYTES


class _Pausing(_Decoder):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        time.sleep(0.1)
        return super().forward(x)


def test_what_a_unit_without_parameters_takes_is_planned_as_well() -> None:
    model = _Net(_Pausing(seconds=0.0, recomputes=False))
    profile = measure(model, model, ShardingConfig(), draw=_batch, steps=1).profile
    assert [unit.name for unit in profile.units if not unit.params] == ["_Net", "decoder"]
    taken_s = sum((unit.forward_s or 0) + (unit.backward_s or 0) for unit in profile.units)
    assert taken_s >= 0.1
    assert predict(profile, FAST, Ranks(2), ShardingConfig()).step_ms == pytest.approx(taken_s * 1e3, rel=0.01)
