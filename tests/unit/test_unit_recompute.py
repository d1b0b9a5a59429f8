"""Stage 3: forwards that run again inside the backward, each with or without a backward of its own."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F

from tests.residents import (
    SETTINGS,
    Block,
    Net,
    Train,
    assert_alike,
    finish_step,
    gathered,
    make_x,
    resident,
    run_backward,
    train_once,
    train_siamese,
    train_without_sync,
    wrap_stage_3,
)

every_setting = pytest.mark.parametrize("settings", SETTINGS)


class _Recomputing(Net):
    """Blocks that are recomputed: each alone, or all in one segment."""

    form = True
    whole = False

    def run(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.whole:
            y: paddle.Tensor = recompute(super().run, x, use_reentrant=self.form)
            return y
        for block in self.blocks:
            x = recompute(block, x, use_reentrant=self.form)
        return x

    def forward(self, x: paddle.Tensor) -> Any:
        return super().forward(self.blocks[1](x))  # outside the recomputed part as well


@every_setting
@pytest.mark.parametrize("form", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("train", [train_once, train_siamese, train_without_sync])
def test_recompute(monkeypatch: pytest.MonkeyPatch, train: Train, whole: bool, form: bool, settings: str) -> None:
    monkeypatch.setattr(_Recomputing, "form", form)
    monkeypatch.setattr(_Recomputing, "whole", whole)
    assert_alike(_Recomputing, train, SETTINGS[settings], steps=3)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("form", [True, False])
def test_recompute_gathers_once_for_forward_and_once_for_backward(
    monkeypatch: pytest.MonkeyPatch, form: bool, whole: bool
) -> None:
    class Recomputing(_Recomputing):
        def forward(self, x: paddle.Tensor) -> Any:
            return Net.forward(self, x)

    monkeypatch.setattr(_Recomputing, "form", form)
    monkeypatch.setattr(_Recomputing, "whole", whole)
    rig = wrap_stage_3(Recomputing(), SETTINGS["both"])
    for step in range(3):
        rig.log.clear()
        x = make_x(step)
        x.stop_gradient = False
        run_backward(rig.model(x).mean())
        finish_step(rig.optimizer)
    found = {name: gathered(rig).count(name) for name in ("blocks.0", "blocks.1", "blocks.2", "head")}
    # What the forward ends with is what the backward begins with, and stays.
    assert found == {"blocks.0": 2, "blocks.1": 2, "blocks.2": 2 if form and whole else 1, "head": 1}


class _Inside(Net):
    """Blocks that recompute their own inside, in which they use a parameter of theirs, or all there is."""

    class Inner(Block):
        form = True
        own = True

        def forward(self, x: paddle.Tensor) -> Any:
            y: Any = recompute(self._body, x, use_reentrant=self.form)
            return y * self.gain if self.own else y

        def _body(self, x: paddle.Tensor) -> Any:
            y = paddle.tanh(self.fc(self.norm(x)))
            return x + F.linear(y, y.t().matmul(y), self.fc.bias) * self.gain if self.own else x + y

    block = Inner

    def forward(self, x: paddle.Tensor) -> Any:
        return super().forward(x + self.shift)


@every_setting
@pytest.mark.parametrize("form", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_recompute_inside_a_unit(monkeypatch: pytest.MonkeyPatch, own: bool, form: bool, settings: str) -> None:
    monkeypatch.setattr(_Inside.Inner, "form", form)
    monkeypatch.setattr(_Inside.Inner, "own", own)
    rig = assert_alike(_Inside, train_once, SETTINGS[settings])
    seen: list[list[str]] = []
    start = make_x(0)
    start.stop_gradient = False
    x = rig.model.blocks[0](start)
    x.register_hook(lambda _: seen.append(resident(rig)))
    rig.model.blocks[2](x).mean().backward()
    if not own:
        assert all("blocks.2" not in names for names in seen), "it is over, and freed"


class _ByHand(Net):
    """The model recomputes a function that uses its own parameter and a layer's, and uses both before it or after."""

    form = True
    before = True

    def forward(self, x: paddle.Tensor) -> Any:
        x = self.blocks[0](x)
        if self.before:
            x = x + (self.head(x * self.shift) + self.head.bias).mean()
        x = recompute(self._function, x, use_reentrant=self.form)
        return x if self.before else self.head(x * self.shift) + self.head.bias

    def _function(self, x: paddle.Tensor) -> paddle.Tensor:
        weight = paddle.tanh(self.head.weight).matmul(self.head.weight.t())
        return self.blocks[1](F.linear(x, weight, self.shift))


@every_setting
@pytest.mark.parametrize("form", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_recompute_of_a_function_that_uses_parameters(
    monkeypatch: pytest.MonkeyPatch, before: bool, form: bool, settings: str
) -> None:
    monkeypatch.setattr(_ByHand, "form", form)
    monkeypatch.setattr(_ByHand, "before", before)
    assert_alike(_ByHand, train_once, SETTINGS[settings])
