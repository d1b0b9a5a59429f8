"""Parameters used elsewhere than in their own layer's forward, while their gathers are under way into poison.

Each case has a bucket for each parameter, so that a weight that is there says nothing about its bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from hp_sharding import full_parameters
from hp_sharding.buffer import Status
from tests.fakes import wrap

SETTINGS: dict[str, dict[str, Any]] = {
    "no overlap": {"comm_fusion": False},
    "overlap": {"allgather_overlap": True, "reduce_overlap": True, "comm_fusion": False},
    "stage 1": {"stage": 1, "allgather_overlap": True, "reduce_overlap": True, "comm_fusion": False},
    "one bucket": {"allgather_overlap": True, "reduce_overlap": True},
    "reshard": {"reshard_after_step": True, "reduce_overlap": True, "comm_fusion": False},
    "reshard, ahead": {"reshard_after_step": True, "prefetch_depth": 3, "comm_fusion": False},
    "stage 3": {"stage": 3, "allgather_overlap": True, "reduce_overlap": True, "comm_fusion": False},
    "stage 3, kept": {"stage": 3, "reshard_after_forward": False},
}
KEPT = [name for name in SETTINGS if "reshard" not in name and "stage 3" not in name]
FREED = [name for name in SETTINGS if name not in KEPT]
X = paddle.to_tensor(np.arange(12, dtype="float32").reshape(3, 4) / 5 - 1)
IDS = paddle.to_tensor([1, 5, 1])


class _Borrower(nn.Layer):
    """Uses weight and bias of a layer that is not below it."""

    def __init__(self, owner: nn.Layer) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.__dict__["owner"] = owner

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.linear(self.own(x), self.owner.weight, self.owner.bias)


class _Net(nn.Layer):
    """Layers whose parameters are used by ``way``, in forward or in a method of another name."""

    def __init__(self, way: str) -> None:
        super().__init__()
        paddle.seed(5)
        self.table = nn.Embedding(8, 4)
        self.blocks = nn.LayerList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.borrower = _Borrower(self.blocks[1])
        self.norm = nn.LayerNorm(4)
        self.gain = self.create_parameter([4], default_initializer=nn.initializer.Constant(1.5))
        self.shift = self.create_parameter([8], default_initializer=nn.initializer.Constant(0.5))
        # Biases that begin at zero would not be missed.
        for param in self.parameters():
            if param.ndim == 1:
                param.set_value(param.numpy() + np.linspace(-1, 1, param.size, dtype="float32"))
        self.way = way

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return getattr(self, self.way)(x)

    def borrows(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.borrower(self.blocks[0](x))

    def borrows_first(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.blocks[1](self.borrower(x))

    def at_root(self, x: paddle.Tensor) -> paddle.Tensor:
        x = F.linear(x, self.blocks[1].weight, self.blocks[0].bias) * self.gain
        return F.layer_norm(x, [4], self.norm.weight, self.norm.bias)

    def bias_alone(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.blocks[0](x) + self.blocks[1].bias

    def bias_of_another(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.linear(self.blocks[0](x), self.blocks[0].weight, bias=self.blocks[1].bias)

    def tied(self, x: paddle.Tensor) -> paddle.Tensor:
        hidden = self.blocks[0](self.table(IDS)) + x
        return F.linear(hidden, self.table.weight.T, self.shift)

    def by_parameters(self, x: paddle.Tensor) -> paddle.Tensor:
        weight, bias = self.blocks[1].parameters()
        return F.linear(x, weight, bias) + dict(self.named_parameters())["norm.bias"]

    def in_a_closure(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.blocks[0].apply(lambda layer: None)(x) * self.norm._parameters["weight"] + self.norm.bias


WAYS = [
    "borrows", "borrows_first", "at_root", "bias_alone", "bias_of_another", "tied", "by_parameters", "in_a_closure",
]  # fmt: skip


def _momentum(model: nn.Layer) -> Any:
    return paddle.optimizer.Momentum(0.1, parameters=model.parameters())


def _step(net: nn.Layer, optimizer: Any, use: Callable[[nn.Layer], paddle.Tensor]) -> float:
    loss = use(net).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return float(loss)


def _assert_alike(model: nn.Layer, plain: nn.Layer) -> None:
    with full_parameters(model):
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            np.testing.assert_array_equal(found.numpy(), expected.numpy(), err_msg=name)


@pytest.mark.parametrize("settings", list(SETTINGS))
@pytest.mark.parametrize("way", WAYS)
def test_used_in_forward(way: str, settings: str) -> None:
    model, plain = _Net(way), _Net(way)
    rig, optimizer = wrap(model, _momentum(model), **SETTINGS[settings]), _momentum(plain)
    for _ in range(4):
        assert _step(model, rig.optimizer, lambda net: net(X)) == _step(plain, optimizer, lambda net: net(X))
        with paddle.no_grad():
            model.eval(), plain.eval()
            assert np.array_equal(model(X).numpy(), plain(X).numpy())
            model.train(), plain.train()
    _assert_alike(model, plain)


@pytest.mark.parametrize("settings", KEPT)
@pytest.mark.parametrize("way", WAYS)
def test_used_by_a_method_that_is_not_forward(way: str, settings: str) -> None:
    """Nobody calls the model, so no hook says that it runs."""
    model, plain = _Net(way), _Net(way)
    rig, optimizer = wrap(model, _momentum(model), **SETTINGS[settings]), _momentum(plain)

    def use(net: nn.Layer) -> paddle.Tensor:
        used: paddle.Tensor = getattr(net, way)(X)
        return used

    for _ in range(4):
        assert _step(model, rig.optimizer, use) == _step(plain, optimizer, use)
        if settings == "overlap":
            assert Status.SYNCING in {buffer.status for buffer in rig.optimizer.buffers}
        with paddle.no_grad():
            assert np.array_equal(use(model).numpy(), use(plain).numpy())
    _assert_alike(model, plain)


@pytest.mark.parametrize("settings", FREED)
def test_a_method_that_calls_layers_finds_their_freed_values(settings: str) -> None:
    model, plain = _Net("borrows"), _Net("borrows")
    rig, optimizer = wrap(model, _momentum(model), **SETTINGS[settings]), _momentum(plain)

    def use(net: nn.Layer) -> paddle.Tensor:
        return net.norm(net.borrower(net.blocks[0](net.table(IDS))))

    for _ in range(4):
        assert _step(model, rig.optimizer, use) == _step(plain, optimizer, use)
    _assert_alike(model, plain)


@pytest.mark.parametrize("settings", ["reshard", "stage 3, kept"])
@pytest.mark.parametrize("way", ["at_root", "by_parameters", "in_a_closure"])
def test_a_method_that_reads_freed_values_itself_fails(way: str, settings: str) -> None:
    """It does not start a collective that the other ranks do not; all enter ``full_parameters`` together instead."""
    model = _Net(way)
    rig = wrap(model, _momentum(model), **SETTINGS[settings])
    _step(model, rig.optimizer, lambda net: net(X))
    with pytest.raises(RuntimeError):
        getattr(model, way)(X)
    with full_parameters(model), paddle.no_grad():
        found = getattr(model, way)(X).numpy()
    with paddle.no_grad():
        assert np.array_equal(found, model(X).numpy())


@pytest.mark.parametrize("settings", ["overlap", "one bucket"])
@pytest.mark.parametrize("read", [lambda layer, w: w.numpy(), lambda layer, w: layer.weight, lambda layer, w: w + 1])
def test_a_bias_that_is_away_is_never_left_out(read: Callable[[nn.Layer, Any], Any], settings: str) -> None:
    """Paddle's ``F.linear`` takes a bias without storage for none. Both are held here since before the step."""
    model = _Net("borrows")
    rig = wrap(model, _momentum(model), **SETTINGS[settings])
    weight, bias = model.blocks[0].weight, model.blocks[0].bias
    for _ in range(2):
        _step(model, rig.optimizer, lambda net: net(X))
        with pytest.raises(RuntimeError, match="holder_ should not be null"):
            F.linear(X, weight, bias)
        read(model.blocks[0], weight)
        found = F.linear(X, weight, bias).numpy()
        with full_parameters(model):
            assert np.array_equal(found, F.linear(X, weight, bias).numpy())
            assert not np.array_equal(found, F.linear(X, weight).numpy())


def test_waiting_for_a_bias_costs_a_forward_nothing() -> None:
    """Inside one the layer itself looks up what it needs, and what it does not need yet goes on coming."""

    class Late(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = self.create_parameter([4, 4]), self.create_parameter([4], is_bias=True)
            self.seen: list[Status] = []

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            x = paddle.matmul(x, self.weight)
            self.seen.append(buffers[1].status)
            return x + self.bias

    model = Late()
    buffers: list[Any] = []
    rig = wrap(model, _momentum(model), **SETTINGS["overlap"])
    buffers += rig.optimizer.buffers
    for _ in range(2):
        _step(model, rig.optimizer, lambda net: net(X))
    assert model.seen == [Status.READY, Status.SYNCING]
