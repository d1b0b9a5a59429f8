"""Which buckets a unit's forward waits for at its beginning, and which when a layer looks their parameters up."""

from __future__ import annotations

from collections.abc import Callable

import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from hp_sharding.buffer import Status
from hp_sharding.gathers import Place
from hp_sharding.lookups import Lookups
from tests.residents import SETTINGS, SIZE, Net, assert_alike, finish_step, train_once, wrap_stage_3

every_setting = pytest.mark.parametrize("settings", SETTINGS)

_ONE_LAYER_A_BUCKET = {"comm_buffer_size_MB": 4 * SIZE * (SIZE + 1) / 2**20}


def _lookups() -> Lookups:
    """Unit 0 has buckets 0 of two parameters, and 1 of one; unit 1 has bucket 2, a captured parameter in it."""
    return Lookups([[0, 1], [2]], [2, 1, 1], {1: [Place(2, 0, 1)]})


def test_a_bucket_is_waited_for_at_once_until_all_that_it_holds_was_looked_up() -> None:
    lookups = _lookups()
    assert list(lookups.at_once(0)) == [0, 1]
    lookups.learn(0, {(0, 0), (1, 0)})
    assert list(lookups.at_once(0)) == [0], "half of bucket 0 was not looked up"
    lookups.learn(0, {(0, 1)})
    assert list(lookups.at_once(0)) == [0], "nor by this forward"
    lookups.learn(0, {(0, 0), (0, 1), (1, 0), (2, 0)})
    assert list(lookups.at_once(0)) == []


def test_what_a_unit_may_hold_on_to_is_always_waited_for_at_once() -> None:
    lookups = _lookups()
    lookups.learn(1, {(2, 0)})
    assert list(lookups.at_once(1)) == [2]


class _Pair(nn.Layer):
    """Two layers, and between them what the test wants to see."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.second = nn.Linear(SIZE, SIZE)
        self.look: Callable[[], None] = lambda: None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.first(x)
        self.look()
        return self.use_second(x)

    def use_second(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.second(x)


class _Holding(_Pair):
    """A function holds the second layer's parameters, where nobody sees them: they are never looked up."""

    def __init__(self) -> None:
        super().__init__()
        weight, bias = self.second.weight, self.second.bias
        self.function = lambda x: F.linear(x, weight, bias)

    def use_second(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.function(x)


class _Model(Net):
    block = _Pair


class _HoldingModel(Net):
    block = _Holding


def test_a_later_bucket_of_a_unit_is_waited_for_when_its_layer_comes() -> None:
    rig = wrap_stage_3(_Model(), _ONE_LAYER_A_BUCKET)
    bucket = rig.optimizer.param2bucket["blocks.1.second.weight"][0]
    assert bucket is not rig.optimizer.param2bucket["blocks.1.first.weight"][0]
    seen: list[Status] = []
    rig.model.blocks[1].look = lambda: seen.append(bucket.status)
    for step in range(3):
        train_once(rig.model, rig.optimizer, step)
        finish_step(rig.optimizer)
    assert seen == [Status.READY, Status.SYNCING, Status.SYNCING]


@every_setting
@pytest.mark.parametrize("model", [_Model, _HoldingModel])
def test_numbers_are_the_same_with_several_buckets_a_unit(model: type[Net], settings: str) -> None:
    assert_alike(model, train_once, {**SETTINGS[settings], **_ONE_LAYER_A_BUCKET})


def test_a_bucket_whose_gather_nobody_awaited_is_freed_with_its_unit() -> None:
    rig = wrap_stage_3(_Model(), _ONE_LAYER_A_BUCKET)
    block = rig.model.blocks[1]
    for step in range(2):
        train_once(rig.model, rig.optimizer, step)
        finish_step(rig.optimizer)
    block.use_second = lambda x: x
    train_once(rig.model, rig.optimizer, 2)
    assert rig.optimizer.param2bucket["blocks.1.second.weight"][0].status is Status.SHARDED
    finish_step(rig.optimizer)
    del block.use_second
    train_once(rig.model, rig.optimizer, 3)
