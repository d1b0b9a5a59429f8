"""A model that changes after it was wrapped trains rightly or refuses at once; nothing goes untrained in silence."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from hp_sharding import full_parameters
from hp_sharding.errors import LayoutError, StateError
from hp_sharding.guard import GuardedSublayers
from hp_sharding.sharding import check_wrap
from tests.fakes import Rig, wrap

SETTINGS: dict[str, dict[str, Any]] = {
    "no overlap": {},
    "overlap": {"allgather_overlap": True, "reduce_overlap": True, "comm_fusion": False},
    "stage 1": {"stage": 1, "allgather_overlap": True},
    "reshard": {"reshard_after_step": True, "comm_fusion": False},
}
X = paddle.to_tensor(np.arange(6, dtype="float32").reshape(2, 3) / 3 - 1)


class _Net(nn.Layer):
    """Layers by name and in a list, a parameter of the model's own, and a layer without parameters."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(5)
        self.a = nn.Linear(3, 3)
        self.act = nn.GELU()
        self.blocks = nn.LayerList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.gain = self.create_parameter([3], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.act(self.a(x))
        for block in self.blocks:
            x = block(x)
        return x * self.gain


def _momentum(model: nn.Layer) -> Any:
    return paddle.optimizer.Momentum(0.1, parameters=model.parameters())


def _step(model: nn.Layer, optimizer: Any) -> float:
    loss = model(X).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return float(loss)


def _wrapped(settings: str) -> Rig:
    """A model after its first step, with gathers under way or values freed as ``settings`` say."""
    model = _Net()
    rig = wrap(model, _momentum(model), **SETTINGS[settings])
    _step(model, rig.optimizer)
    return rig


def _values(model: nn.Layer) -> dict[str, np.ndarray[Any, Any]]:
    with full_parameters(model):
        return {name: param.numpy().copy() for name, param in model.named_parameters()}


# -- what would go untrained -------------------------------------------------------------------------------------------

_ADDED: dict[str, tuple[Callable[[nn.Layer], Any], str]] = {
    "a parameter": (lambda net: setattr(net.a, "scale", net.a.create_parameter([3])), "scale"),
    "a parameter, add_parameter": (lambda net: net.add_parameter("scale", net.create_parameter([3])), "scale"),
    "a parameter where none was": (lambda net: setattr(net.act, "slope", net.create_parameter([1])), "slope"),
    "a parameter in another's place": (lambda net: setattr(net.a, "weight", net.a.create_parameter([3, 3])), "weight"),
    "a parameter past the layer": (lambda net: net.a._parameters.update(bias=net.create_parameter([3])), "bias"),
    "a layer": (lambda net: setattr(net, "head", nn.Linear(3, 2)), "head.weight"),
    "a layer, add_sublayer": (lambda net: net.act.add_sublayer("inner", nn.Linear(3, 2)), "inner.weight"),
    "a layer, append": (lambda net: net.blocks.append(nn.Linear(3, 3)), "2.weight"),
    "a layer, insert": (lambda net: net.blocks.insert(0, nn.Linear(3, 3)), "0.weight"),
    "a layer in another's place": (lambda net: setattr(net, "a", nn.Linear(3, 3)), "a.weight"),
    "a layer in a list": (lambda net: net.blocks.__setitem__(1, nn.Linear(3, 3)), "1.weight"),
    "a layer deep inside": (lambda net: setattr(net, "a", nn.Sequential(net.a, nn.Linear(3, 3))), r"a\.1\.weight"),
}


@pytest.mark.parametrize("settings", ["no overlap", "overlap", "reshard"])
@pytest.mark.parametrize("what", list(_ADDED))
def test_what_is_added_to_train_is_refused_at_once(what: str, settings: str) -> None:
    rig = _wrapped(settings)
    before = len(rig.log)
    add, name = _ADDED[what]
    with pytest.raises(LayoutError, match=rf"parameter '{name}' \(.*, of shape .*comes after the model was wrapped"):
        add(rig.model)
    assert len(rig.log) == before


@pytest.mark.parametrize("what", [what for what in _ADDED if what != "a layer, insert"])
def test_what_was_refused_leaves_no_trace(what: str) -> None:
    rig, plain = _wrapped("overlap"), _Net()
    optimizer = _momentum(plain)
    _step(plain, optimizer)
    with pytest.raises(LayoutError):
        _ADDED[what][0](rig.model)
    assert _step(rig.model, rig.optimizer) == _step(plain, optimizer)
    found, expected = _values(rig.model), _values(plain)
    assert list(found) == list(expected)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_frozen_parameter_that_came_late_is_refused_when_it_thaws() -> None:
    rig = _wrapped("overlap")
    rig.model.blocks.append(_frozen())
    _step(rig.model, rig.optimizer)
    rig.model.blocks[2].weight.stop_gradient = False
    with pytest.raises(LayoutError, match=r"parameter '2\.weight' .*comes after the model was wrapped"):
        _step(rig.model, rig.optimizer)


def test_weight_norm_comes_before_wrapping() -> None:
    rig = _wrapped("overlap")
    with pytest.raises(LayoutError, match=r"parameter 'weight_v' .*comes after the model was wrapped"):
        nn.utils.weight_norm(rig.model.a)


def test_a_parameter_made_by_the_first_forward_is_refused_there() -> None:
    class Lazy(_Net):
        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            if not hasattr(self, "late"):
                self.late = nn.Linear(3, 3)
            return self.late(super().forward(x))

    model = Lazy()
    rig = wrap(model, _momentum(model))
    with pytest.raises(LayoutError, match=r"parameter 'late\.weight'"):
        _step(model, rig.optimizer)


def test_what_comes_after_a_deletion_from_a_list_is_refused_by_the_next_step() -> None:
    """``del`` gives a LayerList a new mapping, which nobody guards until then."""
    rig = _wrapped("overlap")
    del rig.model.blocks[0]
    rig.model.blocks.append(nn.Linear(3, 3))
    with pytest.raises(LayoutError, match=r"parameter '1\.weight' .*comes after the model was wrapped"):
        rig.optimizer.step()


@pytest.mark.parametrize("settings", list(SETTINGS))
def test_the_rest_of_a_list_trains_on_after_a_deletion(settings: str) -> None:
    rig, plain = _wrapped(settings), _Net()
    optimizer = _momentum(plain)
    _step(plain, optimizer)
    for model in (rig.model, plain):
        del model.blocks[0]
    for _ in range(2):
        assert _step(rig.model, rig.optimizer) == _step(plain, optimizer)
    with pytest.raises(LayoutError, match="comes after the model was wrapped"):
        rig.model.blocks.append(nn.Linear(3, 3))


# -- what goes on rightly ----------------------------------------------------------------------------------------------


def _frozen() -> nn.Layer:
    layer = nn.Linear(3, 3)
    for param in layer.parameters():
        param.set_value(np.full(param.shape, 0.25, "float32"))
        param.stop_gradient = True
    return layer


def _tie(net: nn.Layer) -> None:
    net.blocks[1].weight = net.a.weight
    net.blocks[1].bias = net.a.bias


_RIGHT: dict[str, Callable[[nn.Layer], Any]] = {
    "a frozen layer": lambda net: net.blocks.append(_frozen()),
    "a frozen layer in another's place": lambda net: setattr(net, "a", _frozen()),
    "a frozen parameter in another's place": lambda net: setattr(net.a, "weight", _frozen().weight),
    "a layer without parameters": lambda net: setattr(net, "act", nn.Tanh()),
    "a buffer": lambda net: net.register_buffer("seen", paddle.ones([3])),
    "no bias any more": lambda net: setattr(net.a, "bias", None),
    "weights shared from now on": _tie,
    "one layer at two places": lambda net: net.blocks.__setitem__(1, net.a),
    "layers in a new container": lambda net: setattr(net, "a", nn.Sequential(net.a, nn.Tanh(), net.blocks[0])),
    "layers in another order": lambda net: net.blocks.insert(0, net.blocks[1]),
    "the same again": lambda net: setattr(net.a, "weight", net.a.weight),
    "frozen": lambda net: setattr(net.gain, "stop_gradient", True),
    "cast to what it is": lambda net: net.to(dtype="float32"),
    "moved to where it is": lambda net: net.to(device="cpu"),
}


@pytest.mark.parametrize("settings", list(SETTINGS))
@pytest.mark.parametrize("what", list(_RIGHT))
def test_changes_that_are_trained_rightly(what: str, settings: str) -> None:
    rig, plain = _wrapped(settings), _Net()
    optimizer = _momentum(plain)
    _step(plain, optimizer)
    for model in (rig.model, plain):
        with full_parameters(model):
            _RIGHT[what](model)
    for _ in range(3):
        assert _step(rig.model, rig.optimizer) == _step(plain, optimizer)
    found, expected = _values(rig.model), _values(plain)
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_late_layer_is_guarded_too() -> None:
    rig = _wrapped("overlap")
    rig.model.blocks.append(nn.Sequential(_frozen(), nn.Sequential(nn.GELU())))
    with pytest.raises(LayoutError, match="comes after the model was wrapped"):
        rig.model.blocks[2][1].append(nn.Linear(3, 3))


def test_copies_and_pickles_of_the_mapping_are_plain() -> None:
    rig = _wrapped("overlap")
    assert type(rig.model._sub_layers) is GuardedSublayers
    other = copy.deepcopy(rig.model)
    assert type(other._sub_layers) is OrderedDict
    other.late = nn.Linear(3, 3)
    other.late.extra = other.late.create_parameter([3])
    assert type(pickle.loads(pickle.dumps(rig.model.act._sub_layers))) is OrderedDict
    assert type(rig.model._sub_layers.copy()) is OrderedDict


# -- casts -------------------------------------------------------------------------------------------------------------


def _cast_to_bfloat16(net: nn.Layer) -> nn.Layer:
    """``Layer.bfloat16``, also on a CPU without AVX-512, where Paddle warns and leaves the dtypes as they are."""
    with mock.patch.object(paddle.amp, "is_bfloat16_supported", return_value=True):
        return net.bfloat16()


_CASTS: dict[str, Callable[[nn.Layer], Any]] = {
    "all": lambda net: net.to(dtype="float64"),
    "a part": lambda net: net.blocks[1].to(dtype="float64"),
    "float64": lambda net: net.double(),
    "there and back": lambda net: (net.to(dtype="float64"), net.to(dtype="float32")),
    "bfloat16": _cast_to_bfloat16,
}


@pytest.mark.parametrize("settings", ["no overlap", "overlap", "stage 1"])
@pytest.mark.parametrize("cast", list(_CASTS))
def test_a_cast_is_refused_by_the_next_forward(cast: str, settings: str) -> None:
    rig = _wrapped(settings)
    _CASTS[cast](rig.model)
    for _ in range(2):
        with pytest.raises(LayoutError, match=r"no longer shares the bucket's storage: it was cast.*Layer\.to"):
            rig.model(X)
    with pytest.raises(LayoutError, match="no longer shares"):
        rig.optimizer.step()


@pytest.mark.parametrize("cast", list(_CASTS))
def test_a_cast_of_freed_values_is_refused_at_once(cast: str) -> None:
    rig = _wrapped("reshard")
    with pytest.raises(StateError, match="full_parameters"):
        _CASTS[cast](rig.model)
    with pytest.raises(LayoutError, match="no longer shares"), full_parameters(rig.model):
        _CASTS[cast](rig.model)


# -- sparse gradients --------------------------------------------------------------------------------------------------


class _Words(nn.Layer):
    """A table of words that is read by a function, sparsely where ``sparse`` says so."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(5)
        self.words = nn.Embedding(10, 3)
        self.head = nn.Linear(3, 2)
        self.sparse = False

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        return self.head(F.embedding(ids, self.words.weight, sparse=self.sparse)).square().mean()


@pytest.mark.parametrize("settings", list(SETTINGS))
def test_a_sparse_gradient_is_refused_in_backward(settings: str) -> None:
    model, plain = _Words(), _Words()
    rig, optimizer = wrap(model, _momentum(model), **SETTINGS[settings]), _momentum(plain)
    ids = paddle.to_tensor([1, 7, 1])
    model.sparse = True
    with pytest.raises(StateError, match=r"parameter 'embedding_.*its gradient is sparse.*sparse=False"):
        model(ids).backward()
    model.sparse = False
    rig.optimizer.clear_grad()
    for net, used in ((model, rig.optimizer), (plain, optimizer)):
        net(ids).backward()
        used.step()
    assert all(np.array_equal(_values(model)[name], value) for name, value in _values(plain).items())


def test_a_sparse_embedding_that_comes_later_is_refused() -> None:
    rig = _wrapped("overlap")
    table = nn.Embedding(10, 3, sparse=True)
    table.weight.stop_gradient = True  # else it is refused as a parameter that comes too late
    with pytest.raises(LayoutError, match=r"layer 'table': nn\.Embedding\(sparse=True\) .*the rows that this rank"):
        rig.model.table = table
    with pytest.raises(LayoutError, match=r"layer '2\.0': nn\.Embedding\(sparse=True\)"):
        rig.model.blocks.append(nn.Sequential(table))


# -- parts of models ---------------------------------------------------------------------------------------------------


class _TwoTasks(nn.Layer):
    """A trunk that the optimizer holds in part, a head that it does not hold, a frozen one, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(5)
        self.trunk = nn.LayerList([nn.Linear(3, 3) for _ in range(3)])
        self.norm = nn.BatchNorm1D(3)
        self.other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.frozen = nn.Linear(3, 3)
        for param in self.frozen.parameters():
            param.stop_gradient = True

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for layer in self.trunk:
            x = F.gelu(layer(x))
        return self.other(self.norm(x)) + self.frozen(x)


_HELD: dict[str, Callable[[nn.Layer], list[Any]]] = {
    "biases": lambda net: [param for name, param in net.named_parameters() if "bias" in name],
    "weights": lambda net: [layer.weight for layer in net.trunk],
    "one layer": lambda net: net.trunk[1].parameters(),
    "without the head": lambda net: [*net.trunk.parameters(), *net.norm.parameters(), *net.frozen.parameters()],
    "one parameter": lambda net: [net.other[0].bias],
}


@pytest.mark.parametrize("settings", list(SETTINGS))
@pytest.mark.parametrize("held", list(_HELD))
def test_an_optimizer_over_part_of_the_model(held: str, settings: str) -> None:
    """What it does not hold stays as it is, with gradients as plain Paddle leaves them."""
    model, plain = _TwoTasks(), _TwoTasks()
    start = _values(plain)
    inner, optimizer = (
        paddle.optimizer.AdamW(0.05, parameters=_HELD[held](net), grad_clip=nn.ClipGradByValue(0.1))
        for net in (model, plain)
    )
    rig = wrap(model, inner, **SETTINGS[settings])
    for _ in range(3):
        assert _step(model, rig.optimizer) == _step(plain, optimizer)
    end, expected = _values(model), _values(plain)
    for name, value in expected.items():
        np.testing.assert_array_equal(end[name], value, err_msg=name)
    ours = {id(param) for param in _HELD[held](model)}
    gradients = {name: param.grad for name, param in plain.named_parameters()}
    for name, param in model.named_parameters():
        if id(param) not in ours and not param.stop_gradient:
            assert np.array_equal(end[name], start[name]), name
            np.testing.assert_array_equal(param.grad.numpy(), gradients[name].numpy(), err_msg=name)


@pytest.mark.parametrize("settings", list(SETTINGS))
def test_what_one_optimizer_leaves_another_may_take(settings: str) -> None:
    """Of a model and a layer in it, each with an optimizer of its own, wrapped from the outside in."""
    model, plain = _TwoTasks(), _TwoTasks()
    outer, inner = wrap(model, _momentum(model.trunk), **SETTINGS[settings]), _momentum(model.other)
    check_wrap(model.other, inner)
    optimizers = [outer.optimizer, wrap(model.other, inner, **SETTINGS[settings]).optimizer]
    of_plain = [_momentum(plain.trunk), _momentum(plain.other)]
    for _ in range(3):
        losses = []
        for net, used in ((model, optimizers), (plain, of_plain)):
            loss = net(X).square().mean()
            loss.backward()
            for optimizer in used:
                optimizer.step()
                optimizer.clear_grad()
            losses.append(float(loss))
        assert losses[0] == losses[1]
    with full_parameters(model.other):
        found = _values(model)
    for name, value in _values(plain).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
