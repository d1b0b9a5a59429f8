"""Stage 3: whatever a unit returns, keeps or leaves somewhere, its backward finds its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from hp_sharding.errors import StateError
from tests.residents import (
    SETTINGS,
    SIZE,
    Block,
    Net,
    assert_alike,
    make_x,
    run_backward,
    train_once,
)

every_setting = pytest.mark.parametrize("settings", SETTINGS)


@dataclasses.dataclass
class Result:
    hidden: paddle.Tensor
    extra: Any = None


class _Returning(Net):
    """Each block returns something else."""

    class Odd(Block):
        way = "view"
        kept: ClassVar[list[paddle.Tensor]] = []

        def forward(self, x: paddle.Tensor, sink: Any = None) -> Any:
            y = super().forward(x)
            ways: dict[str, Callable[[], Any]] = {
                "view": lambda: y.reshape([2, 2, SIZE]),
                "slice": lambda: y[:, :],
                "tuple": lambda: (y, y * 2, "name", None),
                "nested": lambda: {"a": [{"b": (y,)}], "n": 3},
                "dataclass": lambda: Result(y, {"twice": y * 2}),
                "weight": lambda: (y, self.fc.weight),
                "transposed weight": lambda: (y, self.fc.weight.T),
                "input too": lambda: (y, x),
                "nothing": lambda: sink.append(y),
                "nothing but an entry": lambda: sink.update(a=y),
                "nothing to be seen": lambda: self.kept.append(y),
            }
            return ways[self.way]()

    block = Odd

    def run(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            self.Odd.kept.clear()
            if self.Odd.way == "nothing":
                sink: Any = []
                block(x, sink)
                x = sink.pop()
            elif self.Odd.way == "nothing but an entry":
                sink = {"x": x}
                block(x, sink=sink)
                x = sink["a"]
            else:
                x = self._use(block(x), x)
        return x

    def _use(self, y: Any, x: paddle.Tensor) -> paddle.Tensor:
        way = self.Odd.way
        if way == "view":
            return y.reshape([4, SIZE])
        if way == "slice":
            return y
        if way == "tuple":
            return y[0] + y[1]
        if way == "nested":
            return y["a"][0]["b"][0]
        if way == "dataclass":
            return y.hidden + y.extra["twice"]
        if way == "input too":
            return y[0] + y[1]
        if way == "nothing to be seen":
            return self.Odd.kept.pop()
        return F.linear(y[0], y[1])


_WAYS = [
    "view", "slice", "tuple", "nested", "dataclass", "weight", "transposed weight", "input too", "nothing",
    "nothing but an entry",
]  # fmt: skip


@every_setting
@pytest.mark.parametrize("way", _WAYS)
def test_whatever_a_unit_returns(monkeypatch: pytest.MonkeyPatch, way: str, settings: str) -> None:
    monkeypatch.setattr(_Returning.Odd, "way", way)
    assert_alike(_Returning, train_once, SETTINGS[settings])


def test_what_nobody_can_see_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that uses a parameter of the unit's own, and leaves the unit through a global."""
    monkeypatch.setattr(_Returning.Odd, "way", "nothing to be seen")
    with pytest.raises(StateError, match="neither returned nor kept"):
        assert_alike(_Returning, train_once, {})
    assert_alike(_Returning, train_once, {"reshard_after_forward": {Block: False}})


class _Keeping(Net):
    """Blocks that keep an auxiliary loss, of a layer or of a parameter of their own, somewhere."""

    class Keeper(Block):
        way = "attribute"
        elsewhere: ClassVar[list[paddle.Tensor]] = []

        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(SIZE, 3)
            self.register_buffer("buffer", None, persistable=False)
            self.losses: dict[str, paddle.Tensor] = {}

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            own = (x * self.gain).square().mean() + (self.gain**2).sum()
            routed = F.softmax(self.router(x)).square().mean()
            if self.way == "attribute":
                self.attribute = own + routed
            elif self.way == "buffer":
                self.buffer = own + routed
            elif self.way == "dict":
                self.losses["a"] = own + routed
            else:
                self.elsewhere.append(routed)
            return super().forward(x)

        def loss(self) -> paddle.Tensor:
            if self.way == "dict":
                return self.losses["a"]
            return getattr(self, self.way) if self.way != "elsewhere" else self.elsewhere.pop()

    block = Keeper


def _train_aux(model: Any, optimizer: Any, step: int) -> list[float]:
    output = model(make_x(step)).square().mean()
    aux = paddle.add_n([block.loss() for block in model.blocks])
    if step % 2:
        return [run_backward(aux * 0.1, retain_graph=True), run_backward(output)]
    return [run_backward(output + aux * 0.1)]


@every_setting
@pytest.mark.parametrize("way", ["attribute", "buffer", "dict", "elsewhere"])
def test_an_auxiliary_loss_that_no_unit_returns(monkeypatch: pytest.MonkeyPatch, way: str, settings: str) -> None:
    """The gradient of its parameters comes before, after or without that of the unit's output."""
    monkeypatch.setattr(_Keeping.Keeper, "way", way)
    assert_alike(_Keeping, _train_aux, SETTINGS[settings])
