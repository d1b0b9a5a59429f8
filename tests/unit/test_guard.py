"""Whoever reads a parameter right after ``step()`` sees the newest value or an error; whoever writes one is heeded."""

from __future__ import annotations

import copy
import gc
import io
import operator
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base.framework import EagerParamBase
from paddle.nn import functional as F

from hp_sharding import full_parameters
from hp_sharding.buffer import Status
from hp_sharding.errors import LayoutError, StateError
from hp_sharding.guard import GuardedParameter, guard_layers, guard_params
from tests.fakes import Rig, wrap


class _Net(nn.Layer):
    """``a``: 3 x 3. ``one``: 0-d, for those who read a number."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(5)
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 2)
        self.one = self.create_parameter([], default_initializer=nn.initializer.Constant(2.0))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.b(self.a(x)) * self.one


def _after_step(**settings: Any) -> Rig:
    """A model whose every bucket is being gathered: all values are NaN, or away, until somebody waits."""
    model = _Net()
    sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    rig = wrap(model, sgd, allgather_overlap=True, comm_fusion=False, **settings)
    model(paddle.ones([2, 3])).sum().backward()
    rig.optimizer.step()
    return rig


def _plain() -> _Net:
    """The same model after the same step, without sharding."""
    model = _Net()
    model(paddle.ones([2, 3])).sum().backward()
    paddle.optimizer.SGD(0.1, parameters=model.parameters()).step()
    return model


def _a_status(rig: Rig) -> Status:
    return rig.optimizer.param2bucket["a.weight"][0].status


def _weight(rig: Rig) -> EagerParamBase:
    """``a.weight``, as somebody has it who took it from the model before the step."""
    [weight] = rig.optimizer.param2bucket["a.weight"][0].params
    return weight


X = paddle.to_tensor(np.arange(9, dtype="float32").reshape(3, 3) + 1)
_Reader = Callable[[Any, Any], Any]

_READS: dict[str, _Reader] = {
    "numpy": lambda net, w: w.numpy(),
    "tolist": lambda net, w: w.tolist(),
    "item of an element": lambda net, w: w[1, 1].item(),
    "clone": lambda net, w: w.clone(),
    "cpu": lambda net, w: w.cpu(),
    "detach": lambda net, w: w.detach(),
    "data": lambda net, w: w.data,
    "value": lambda net, w: np.array(w.value()),
    "get_tensor": lambda net, w: np.array(w.get_tensor()),
    "to_tensor": lambda net, w: paddle.to_tensor(w),
    "astype": lambda net, w: w.astype("float64"),
    "to": lambda net, w: w.to("float64"),
    "np.array": lambda net, w: np.array(w),
    "np.asarray": lambda net, w: np.asarray(w),
    "np.from_dlpack": lambda net, w: np.from_dlpack(w.detach()),
    "from_dlpack": lambda net, w: paddle.from_dlpack(w.detach()),
    "to_dlpack": lambda net, w: paddle.utils.dlpack.from_dlpack(paddle.utils.dlpack.to_dlpack(w)),
    "row": lambda net, w: w[0],
    "slice": lambda net, w: w[:, 1:],
    "rows": lambda net, w: [row.tolist() for row in w],
    "w + 1": lambda net, w: w + 1,
    "1 + w": lambda net, w: 1 + w,
    "w - 1": lambda net, w: w - 1,
    "1 - w": lambda net, w: 1 - w,
    "w * 2": lambda net, w: w * 2,
    "2 * w": lambda net, w: 2 * w,
    "w / 2": lambda net, w: w / 2,
    "2 / w": lambda net, w: 2 / w,
    "w ** 2": lambda net, w: w**2,
    "2 ** w": lambda net, w: 2**w,
    "w // 2": lambda net, w: w // 2,
    "w % 2": lambda net, w: w % 2,
    "w @ x": lambda net, w: w @ X,
    "x @ w": lambda net, w: X @ w,
    "x + w": lambda net, w: X + w,
    "x - w": lambda net, w: X - w,
    "x * w": lambda net, w: X * w,
    "x / w": lambda net, w: X / w,
    "array + w": lambda net, w: np.ones([3, 3], "float32") + w,
    "-w": lambda net, w: -w,
    "abs": lambda net, w: abs(w),
    "w < x": lambda net, w: w < X / 20,
    "x < w": lambda net, w: operator.lt(X / 20, w),
    "w == w": lambda net, w: w == w.numpy(),
    "T": lambda net, w: w.T,
    "mT": lambda net, w: w.mT,
    "str": lambda net, w: str(w).split("[[")[1],
    "repr": lambda net, w: repr(w).split("[[")[1],
    "format": lambda net, w: f"{w}".split("[[")[1],
    "sum": lambda net, w: w.sum(),
    "norm": lambda net, w: w.norm(),
    "reshape": lambda net, w: w.reshape([-1]),
    "deepcopy": lambda net, w: copy.deepcopy(w),
    "copy": lambda net, w: copy.copy(w),
    "pickle": lambda net, w: pickle.loads(pickle.dumps(w)),
    "deepcopy of the model": lambda net, w: copy.deepcopy(net).a.weight,
    "md5": lambda net, w: w._md5sum(),
    "moving average": lambda net, w: paddle.zeros([3, 3]).add_(net.a.weight),
    "all at once": lambda net, w: nn.utils.parameters_to_vector(net.parameters()),
    "state_dict": lambda net, w: net.state_dict()["a.weight"].numpy(),
    "paddle.save": lambda net, w: _saved(net)["a.weight"],
    "its layer": lambda net, w: net.a(X),
    "its layer's attribute": lambda net, w: F.linear(X, net.a.weight),
    "the model in eval": lambda net, w: _evaluated(net),
    "float": lambda net, w: float(net.one),
    "int": lambda net, w: int(net.one),
    "bool": lambda net, w: bool(net.one > 1) and bool(net.one),
    "item": lambda net, w: net.one.item(),
}


def _saved(net: nn.Layer) -> Any:
    file = io.BytesIO()
    paddle.save(net.state_dict(), file)
    file.seek(0)
    return paddle.load(file)


def _evaluated(net: nn.Layer) -> paddle.Tensor:
    net.eval()
    with paddle.no_grad():
        return net(X)


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(value.numpy() if isinstance(value, paddle.Tensor) else value)


@pytest.mark.parametrize("read", list(_READS))
def test_a_read_waits_and_sees_the_new_value(read: str) -> None:
    plain, rig = _plain(), _after_step()
    weight = _weight(rig)
    assert _a_status(rig) is Status.SYNCING
    found = _as_array(_READS[read](rig.model, weight))
    assert np.array_equal(found, _as_array(_READS[read](plain, plain.a.weight)))


_STRAIGHT = ("its layer's attribute", "moving average", "all at once")
"""Reads that pass the parameter straight to a function, past every guard."""
_OUTSIDE_ONLY = ("its layer", "the model in eval", "w == w")


@pytest.mark.parametrize("read", [read for read in _READS if read not in _OUTSIDE_ONLY])
def test_a_read_of_a_freed_value_is_an_error(read: str) -> None:
    """Nothing is gathered for it: that would be a collective that one rank starts alone."""
    rig = _after_step(reshard_after_step=True)
    before = len(rig.log)
    by_layer = read in _STRAIGHT  # Paddle's error then
    with pytest.raises(RuntimeError if by_layer else StateError, match="memory|holder_" if by_layer else "full_param"):
        _READS[read](rig.model, _weight(rig))
    assert len(rig.log) == before
    with full_parameters(rig.model):
        found = _as_array(_READS[read](rig.model, _weight(rig)))
    plain = _plain()
    assert np.array_equal(found, _as_array(_READS[read](plain, plain.a.weight)))


@pytest.mark.parametrize("function", [paddle.sum, paddle.norm, paddle.mean, lambda w: paddle.concat([w, w])])
def test_a_function_that_passes_every_guard_fails_rather_than_read_a_stale_value(
    function: Callable[[paddle.Tensor], paddle.Tensor],
) -> None:
    rig = _after_step()
    with pytest.raises(RuntimeError, match="holder_ should not be null"):
        function(_weight(rig))


_WRITES: dict[str, Callable[[Any], Any]] = {
    "set_value": lambda w: w.set_value(np.full([3, 3], 7, "float32")),
    "copy_": lambda w: w.copy_(paddle.full([3, 3], 7.0), False),
    "fill_": lambda w: w.fill_(7.0),
    "item": lambda w: w.__setitem__((slice(None), slice(None)), 7.0),
    "row": lambda w: [w.__setitem__(row, paddle.full([3], 7.0)) for row in range(3)],
    "zero_, add_": lambda w: w.zero_().add_(paddle.full([3, 3], 7.0)),
    "scale_": lambda w: (w.fill_(3.5), w.scale_(2.0)),
    "get_tensor": lambda w: w.get_tensor().set(np.full([3, 3], 7, "float32"), paddle.CPUPlace()),
}


@pytest.mark.parametrize("write", list(_WRITES))
def test_a_write_while_a_gather_is_under_way_is_kept(write: str) -> None:
    rig = _after_step()
    with paddle.no_grad():
        _WRITES[write](_weight(rig))
    assert (rig.model.a.weight.numpy() == 7).all()
    assert (rig.optimizer.param2bucket["a.weight"][0].slices[0].tensor.numpy() == 7).all()


@pytest.mark.parametrize("write", list(_WRITES))
def test_a_write_reaches_a_shard_with_storage_of_its_own(write: str) -> None:
    rig = _after_step(reshard_after_step=True)
    with pytest.raises(StateError, match="full_parameters"), paddle.no_grad():
        _WRITES[write](_weight(rig))
    with full_parameters(rig.model), paddle.no_grad():
        _WRITES[write](_weight(rig))
    assert (rig.optimizer.param2bucket["a.weight"][0].slices[0].tensor.numpy() == 7).all()
    with full_parameters(rig.model):
        assert (rig.model.a.weight.numpy() == 7).all()


def test_a_write_between_forward_and_step_reaches_the_shard_too() -> None:
    rig = _after_step(reshard_after_step=True)
    rig.model(X)
    assert _a_status(rig) is Status.READY
    _weight(rig).set_value(np.full([3, 3], 7, "float32"))
    assert (rig.optimizer.param2bucket["a.weight"][0].slices[0].tensor.numpy() == 7).all()


@pytest.mark.parametrize("reshard", [False, True])
def test_a_write_that_passes_every_guard_is_not_lost_in_silence(reshard: bool) -> None:
    rig = _after_step(reshard_after_step=reshard)
    paddle.assign(paddle.full([3, 3], 7.0), _weight(rig))
    with pytest.raises(StateError, match=r"'linear_[0-9]+\.w_0' was written by a function that cannot be guarded"):
        rig.model(X)


def test_other_storage_given_to_a_parameter_is_found_at_the_next_step() -> None:
    rig = _after_step()
    _weight(rig).data = paddle.full([3, 3], 7.0)
    rig.model(X).sum().backward()
    with pytest.raises(LayoutError, match="no longer shares the bucket's storage"):
        rig.optimizer.step()


def test_a_loaded_state_dict_is_trained_on() -> None:
    rig, plain = _after_step(), _plain()
    for model in (rig.model, plain):
        model.set_state_dict({name: np.asarray(value.numpy() + 1) for name, value in plain.state_dict().items()})
    optimizers = [rig.optimizer, paddle.optimizer.SGD(0.1, parameters=plain.parameters())]
    for model, optimizer in zip((rig.model, plain), optimizers, strict=True):
        optimizer.clear_grad()
        model(X).sum().backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        assert np.array_equal(rig.model.state_dict()[name].numpy(), value.numpy()), name


_METADATA: dict[str, Callable[[Any], Any]] = {
    "shape": lambda w: w.shape,
    "place": lambda w: str(w.place),
    "device": lambda w: w.device,
    "strides": lambda w: w.strides,
    "itemsize": lambda w: w.itemsize,
    "is_contiguous": lambda w: w.is_contiguous(),
    "dtype": lambda w: w.dtype,
    "stop_gradient": lambda w: w.stop_gradient,
    "trainable": lambda w: w.trainable,
    "ndim": lambda w: w.ndim,
    "dim": lambda w: w.dim(),
    "size": lambda w: w.size,
    "len": len,
    "element_size": lambda w: w.element_size(),
    "is_leaf": lambda w: w.is_leaf,
    "is_floating_point": lambda w: w.is_floating_point(),
    "is_dense": lambda w: w.is_dense(),
    "grad": lambda w: w.grad,
    "hash": lambda w: hash(w) == id(w),
    "isinstance": lambda w: isinstance(w, EagerParamBase),
    "optimize_attr": lambda w: w.optimize_attr,
    "persistable": lambda w: w.persistable,
}


@pytest.mark.parametrize("read", list(_METADATA))
@pytest.mark.parametrize("reshard", [False, True])
def test_metadata_never_waits_and_never_raises(read: str, reshard: bool) -> None:
    rig = _after_step(reshard_after_step=reshard)
    before, status = len(rig.log), _a_status(rig)
    assert status is (Status.SHARDED if reshard else Status.SYNCING)
    assert _METADATA[read](_weight(rig)) == _METADATA[read](_Net().a.weight)
    assert (len(rig.log), _a_status(rig)) == (before, status)


# -- the guards by themselves --------------------------------------------------------------------------------------


class _Keeper:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def make_readable(self, param: EagerParamBase) -> None:
        self.told.append("read")

    def note_write(self, param: EagerParamBase) -> None:
        self.told.append("written")

    def write_master(self, param: EagerParamBase, value: object) -> bool:
        return False

    def look_up(self, param: EagerParamBase) -> None:
        self.told.append("looked up")

    def note_late(self, name: str, param: EagerParamBase) -> None:
        self.told.append(f"late: {name}")

    def note_clear(self, param: EagerParamBase, *, set_to_zero: bool) -> None:
        self.told.append(f"cleared, zeros {set_to_zero}")


def _guarded() -> tuple[nn.Linear, _Keeper]:
    layer, keeper = nn.Linear(2, 2), _Keeper()
    guard_params(layer.parameters(), keeper)
    guard_layers(layer, keeper)
    return layer, keeper


def test_a_guarded_parameter_is_the_same_object() -> None:
    layer = nn.Linear(2, 2)
    weight, name = layer.weight, layer.weight.name
    keeper = _Keeper()
    guard_params(layer.parameters(), keeper)
    assert layer.weight is weight
    assert type(weight) is GuardedParameter
    assert weight.name == name
    assert isinstance(weight, EagerParamBase)


def test_reads_and_writes_are_told_apart() -> None:
    layer, keeper = _guarded()
    weight = layer.weight
    keeper.told.clear()
    weight.numpy()
    assert set(keeper.told) == {"read"}
    weight.set_value(np.zeros([2, 2], "float32"))
    assert keeper.told[-1] == "written"


def test_the_keeper_is_told_before_the_read_happens() -> None:
    layer, keeper = _guarded()
    weight = layer.parameters()[0]
    keeper.make_readable = lambda param: EagerParamBase.fill_(param, 3.0)  # type: ignore[method-assign]
    with paddle.no_grad():
        assert (weight.numpy() == 3).all()


@pytest.mark.parametrize(
    "look",
    [
        lambda layer: layer.weight,
        lambda layer: layer._parameters["weight"],
        lambda layer: layer._parameters.get("weight"),
        lambda layer: layer.parameters()[0],
        lambda layer: next(iter(layer._parameters.values())),
        lambda layer: dict(layer.named_parameters())["weight"],
    ],
)
def test_however_a_layer_looks_a_parameter_up_it_is_told(look: Callable[[nn.Layer], Any]) -> None:
    layer, keeper = _guarded()
    weight = OrderedDict.__getitem__(layer._parameters, "weight")
    assert list(layer._parameters) == ["weight", "bias"]
    assert layer._parameters.get("absent") is None
    assert keeper.told == []
    assert look(layer) is weight
    assert set(keeper.told) == {"looked up"}


def test_loops_over_a_parameter_list_are_told() -> None:
    listed, keeper = nn.ParameterList([paddle.create_parameter([2], "float32") for _ in range(3)]), _Keeper()
    guard_layers(listed, keeper)
    assert len(list(listed)) == 3
    assert len(keeper.told) >= 3


def test_a_parameter_that_is_none_is_not_told() -> None:
    layer, keeper = nn.Linear(2, 2, bias_attr=False), _Keeper()
    guard_layers(layer, keeper)
    assert layer.bias is None
    assert keeper.told == []


def test_copies_and_pickles_are_free_of_the_guard() -> None:
    layer, keeper = _guarded()
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    expected = layer.weight.numpy()
    keeper.told.clear()
    for other in copies:
        assert np.array_equal(other.weight.numpy(), expected)
        other(paddle.ones([1, 2])).sum().backward()
        other.weight.set_value(np.zeros([2, 2], "float32"))
    assert keeper.told == []
    plain = layer._parameters.copy()
    assert type(plain) is OrderedDict
    assert list(plain) == ["weight", "bias"]


def test_a_guard_outlives_its_keeper_and_does_not_keep_it() -> None:
    layer, keeper = _guarded()
    reference = weakref.ref(keeper)
    del keeper
    gc.collect()
    assert reference() is None
    assert layer(paddle.ones([1, 2])).shape == [1, 2]
    assert layer.weight.numpy().shape == (2, 2)


def test_a_parameter_class_of_the_users_own_stays() -> None:
    class Own(EagerParamBase):
        pass

    param = Own(shape=[2], dtype="float32")
    guard_params([param], _Keeper())
    assert type(param) is Own


def test_clearing_a_gradient_is_told_before_it_happens() -> None:
    layer, keeper = _guarded()
    param = layer._parameters.copy()["weight"]
    keeper.told.clear()
    param.clear_gradient(False)
    param.clear_grad()
    param.grad = None
    assert keeper.told == ["cleared, zeros False", "cleared, zeros True", "cleared, zeros False"]
