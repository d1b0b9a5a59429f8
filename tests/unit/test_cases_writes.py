"""A user's write to a parameter, however and whenever it is made, is trained on as in plain Paddle, or is an error."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from hp_sharding import full_parameters
from hp_sharding.errors import HpShardingError, LayoutError, StateError
from tests.fakes import wrap

BOTH: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1, **BOTH, "comm_fusion": False},
    "stage 2": {"stage": 2, **BOTH},
    "reshard": {"stage": 2, **BOTH, "reshard_after_step": True, "comm_fusion": False},
    "stage 3": {"stage": 3, **BOTH},
    "stage 3, kept": {"stage": 3, **BOTH, "reshard_after_forward": False},
}
VALUE = np.arange(9, dtype=np.float32).reshape(3, 3) / 10 - 0.3


class _Net(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        paddle.seed(5)
        self.first = nn.Linear(3, 3)
        self.layers = nn.LayerList([nn.Linear(3, 3) for _ in range(3)])
        self.gain = self.create_parameter([3], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = F.gelu(self.first(x))
        for layer in self.layers:
            x = x + layer(x)
        return x * self.gain


def _tensor() -> paddle.Tensor:
    return paddle.to_tensor(VALUE)


def _state() -> dict[str, Any]:
    return {name: value.numpy() + 0.125 for name, value in _Net().state_dict().items()}


def _vector(model: nn.Layer) -> paddle.Tensor:
    return paddle.linspace(-0.5, 0.5, sum(param.size for param in model.parameters()))


_Write = Callable[[nn.Layer, Any], Any]
WRITES: dict[str, _Write] = {
    "set_value": lambda net, w: w.set_value(VALUE),
    "Tensor.set_value": lambda net, w: paddle.Tensor.set_value(w, VALUE),
    "copy_": lambda net, w: w.copy_(_tensor(), False),
    "add_": lambda net, w: w.add_(_tensor()),
    "item": lambda net, w: w.__setitem__((1, 2), 0.75),
    "mask": lambda net, w: w.__setitem__(_tensor() > 0, 0.75),
    "assign": lambda net, w: paddle.assign(_tensor(), w),
    "assign an array": lambda net, w: paddle.assign(VALUE, output=w),
    "data =": lambda net, w: setattr(w, "data", _tensor()),
    "data.copy_": lambda net, w: w.data.copy_(_tensor(), False),
    "data[:] =": lambda net, w: w.data.__setitem__(slice(None), _tensor()),
    "detach().copy_": lambda net, w: w.detach().copy_(_tensor(), False),
    "a view": lambda net, w: w.reshape([-1])[2:5].fill_(0.25),
    "an array over its memory": lambda net, w: np.from_dlpack(w.detach()).__setitem__(slice(None), VALUE),
    "get_tensor().set": lambda net, w: w.get_tensor().set(VALUE, paddle.CPUPlace()),
    "Constant": lambda net, w: nn.initializer.Constant(0.25)(w),
    "XavierUniform": lambda net, w: (paddle.seed(3), nn.initializer.XavierUniform()(w)),
    "a function in place": lambda net, w: paddle.tanh_(w),
    "other memory": lambda net, w: _tensor()._share_buffer_to(w),
    "set_state_dict": lambda net, w: net.set_state_dict(_state()),
    "a layer's set_state_dict": lambda net, w: net.first.set_state_dict({"weight": VALUE, "bias": VALUE[0]}),
    "vector_to_parameters": lambda net, w: nn.utils.vector_to_parameters(_vector(net), net.parameters()),
    "apply": lambda net, w: net.apply(_initialize),
    "to the same dtype": lambda net, w: net.to(dtype="float32"),
}


def _initialize(layer: nn.Layer) -> None:
    for param in layer.parameters(include_sublayers=False):
        nn.initializer.Constant(0.2)(param)


KINDS = (
    "set_value", "add_", "item", "set_state_dict",  # seen by the guards
    "assign", "data[:] =", "a view",  # counted by Paddle alone
    "data.copy_", "an array over its memory", "Constant",  # without a trace
    "data =", "XavierUniform",  # other memory
)  # fmt: skip
"""One or more of each kind."""
MOMENTS = (
    "before the first step", "after step", "in full_parameters", "before the layer", "after the layer",
    "in an evaluation", "after an evaluation", "after forward", "after backward", "before clear_grad",
)  # fmt: skip
SHARED_WITH_AUTOGRAD = ("after the layer", "after forward")
"""Where backward refuses in plain Paddle what was written in a way that it counts."""


def _x(step: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(step).standard_normal([4, 3], dtype=np.float32))


class _Course:
    """Five steps, of which the third has the write in it."""

    def __init__(self, model: nn.Layer, optimizer: Any, write: _Write, moment: str) -> None:
        self.model, self.optimizer, self._write, self._moment = model, optimizer, write, moment

    def run(self) -> dict[str, Any]:
        for step in range(5):
            self._now(step, "before the first step", at=0)
            self._now(step, "after step")
            if step == 2:
                self._evaluate()
            with full_parameters(self.model):
                self._now(step, "in full_parameters")
            self._now(step, "after an evaluation")
            loss = self._forward(step).square().mean()
            self._now(step, "after forward")
            loss.backward()
            self._now(step, "after backward")
            self.optimizer.step()
            self._now(step, "before clear_grad")
            self.optimizer.clear_grad()
        with full_parameters(self.model):
            return {name: param.numpy().copy() for name, param in self.model.named_parameters()}

    def _now(self, step: int, moment: str, at: int = 2) -> None:
        if step == at and moment == self._moment:
            with paddle.no_grad():
                # Taken past the layer, as by somebody who has held it for long.
                self._write(self.model, OrderedDict.__getitem__(self.model.first._parameters, "weight"))

    def _evaluate(self) -> None:
        if "evaluation" in self._moment:
            self.model.eval()
            with paddle.no_grad(), self._hooked("in an evaluation", before=True):
                self.model(_x(9))
            self.model.train()

    def _forward(self, step: int) -> paddle.Tensor:
        if step != 2:
            return self.model(_x(step))
        with self._hooked("before the layer", before=True), self._hooked("after the layer", before=False):
            return self.model(_x(step))

    @contextlib.contextmanager
    def _hooked(self, moment: str, *, before: bool) -> Any:
        layer = self.model.first
        register = layer.register_forward_pre_hook if before else layer.register_forward_post_hook
        handle = register(lambda *_: self._now(2, moment))
        yield
        handle.remove()


def _outcome(write: str, moment: str, settings: dict[str, Any] | None) -> dict[str, Any] | Exception:
    """The parameters at the end, of plain Paddle where there are no settings; or what was raised."""
    model = _Net()
    optimizer: Any = paddle.optimizer.Momentum(0.02, parameters=model.parameters())
    if settings is not None:
        optimizer = wrap(model, optimizer, **settings).optimizer
    try:
        return _Course(model, optimizer, WRITES[write], moment).run()
    except (RuntimeError, ValueError, TypeError) as error:
        return error.with_traceback(None)  # which would keep the model alive


@functools.cache
def _plain(write: str, moment: str) -> dict[str, Any] | Exception:
    return _outcome(write, moment, None)


NO_STORAGE = ("holder_ should not be null", "memory_size()", "no memory")
"""What Paddle says where a parameter that is away goes straight into one of its functions."""
ORDINARY = {"set_value", "copy_", "add_", "item", "set_state_dict"}
"""Where the value can be had, at once or after a wait, these are kept and not refused."""


@pytest.mark.parametrize("settings", list(SETTINGS))
@pytest.mark.parametrize("moment", MOMENTS)
def test_no_write_is_lost(moment: str, settings: str) -> None:
    refused = set()
    for write in WRITES if moment in ("after step", "in full_parameters") else KINDS:
        expected, found = _plain(write, moment), _outcome(write, moment, SETTINGS[settings])
        if isinstance(expected, Exception):
            assert moment in SHARED_WITH_AUTOGRAD, f"{write}: plain Paddle cannot do that"
        elif isinstance(found, Exception):
            ours = isinstance(found, HpShardingError)
            assert ours or any(text in str(found) for text in NO_STORAGE), f"{write}: {found!r}"
            refused.add(write)
        else:
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value, err_msg=f"{write}: {name}", strict=True)
    if moment == "in full_parameters" or settings in ("stage 1", "stage 2"):
        assert not refused & ORDINARY


def test_every_write_changes_what_is_trained() -> None:
    """Else it would show nothing. One into the same dtype changes nothing, and must not."""
    untouched = _plain("to the same dtype", "after step")
    assert isinstance(untouched, dict)
    for write in WRITES:
        found = _plain(write, "after step")
        assert isinstance(found, dict), f"{write}: {found!r}"
        changed = any(not np.array_equal(found[name], value) for name, value in untouched.items())
        assert changed == (write != "to the same dtype"), write
        assert all(np.isfinite(value).all() for value in found.values()), write


RESHAPES: dict[str, Callable[[Any], Any]] = {
    "t_": lambda w: w.t_(),
    "transpose_": lambda w: w.transpose_([1, 0]),
    "reshape_": lambda w: w.reshape_([9]),
    "flatten_": lambda w: w.flatten_(),
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "resize_": lambda w: w.resize_([1, 9]),
    "cast_": lambda w: w.cast_("float64"),
}


@pytest.mark.parametrize("settings", list(SETTINGS))
def test_another_shape_in_place_is_refused_and_leaves_no_trace(settings: str) -> None:
    """The next gather would put the old one back, in silence where the matrix is square."""
    model = _Net()
    rig = wrap(model, paddle.optimizer.SGD(0.1, parameters=model.parameters()), **SETTINGS[settings])
    for name, change in RESHAPES.items():
        with full_parameters(model):
            with (
                paddle.no_grad(),
                pytest.raises(LayoutError, match=rf"{name}\(\) would change its shape or dtype \[3, 3\]"),
            ):
                change(model.first.weight)
            assert model.first.weight.shape == [3, 3]
            assert model.first.weight.strides == [3, 1]
        model(_x(0)).mean().backward()
        rig.optimizer.step()
        rig.optimizer.clear_grad()


OTHERS: dict[str, Callable[[nn.Layer, Any], Any]] = {
    "LookAhead": lambda model, optimizer: paddle.incubate.LookAhead(optimizer, k=2),
    "ModelAverage": lambda model, optimizer: paddle.incubate.ModelAverage(0.5, parameters=model.parameters()),
    "another optimizer": lambda model, optimizer: paddle.optimizer.AdamW(0.1, parameters=model.parameters()),
}


@pytest.mark.parametrize("settings", list(SETTINGS))
@pytest.mark.parametrize("other", list(OTHERS))
def test_another_optimizer_over_the_same_parameters_is_refused(other: str, settings: str) -> None:
    """It would find no gradients and do nothing, or this rank's own, by which the ranks would part."""
    model = _Net()
    rig = wrap(model, paddle.optimizer.SGD(0.1, parameters=model.parameters()), **SETTINGS[settings])
    model(_x(0)).square().mean().backward()
    with pytest.raises(StateError, match=r"another one \(paddle\..*looks for its whole gradient.*full_parameters"):
        OTHERS[other](model, rig.optimizer).step()
