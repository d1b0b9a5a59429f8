"""Mixed precision: a user's write to a 16-bit parameter reaches its float32 master; the other masters keep all bits."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from hp_sharding import full_parameters
from hp_sharding.errors import HpShardingError
from tests.fakes import Rig, wrap
from tests.unit.test_cases_writes import MOMENTS, NO_STORAGE, SETTINGS, SHARED_WITH_AUTOGRAD

VALUE = np.arange(9, dtype=np.float32).reshape(3, 3) / 8 - 0.25
"""In steps that bfloat16 can hold."""
MIXED: dict[str, dict[str, Any]] = {
    "stage 1": {**SETTINGS["stage 1"], "param_dtype": "bfloat16", "main_grad": True},
    **{name: {**SETTINGS[name], "param_dtype": "bfloat16"} for name in ("stage 2", "reshard", "stage 3")},
    "gathered in 16 bits": {**SETTINGS["stage 2"], "gather_dtype": "bfloat16"},
    "gathered in 16 bits, stage 3": {**SETTINGS["stage 3"], "gather_dtype": "bfloat16"},
}


ALIKE = ("after the layer", "before clear_grad")
"""Other moments stand for these."""


class _Linear(nn.Layer):
    """Casts its parameters where it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([3, 3])
        self.bias = self.create_parameter([3], is_bias=True)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + F.linear(x.astype("float32"), self.weight.astype("float32"), self.bias.astype("float32"))


def _value(param: Any) -> paddle.Tensor:
    return paddle.to_tensor(VALUE).astype(param.dtype)


_Write = Callable[[nn.Layer, Any], Any]
WRITES: dict[str, _Write] = {
    "set_value": lambda net, w: w.set_value(_value(w)),
    "copy_": lambda net, w: w.copy_(_value(w), False),
    "assign": lambda net, w: paddle.assign(_value(w), w),
    "data.copy_": lambda net, w: w.data.copy_(_value(w), False),
    "detach().copy_": lambda net, w: w.detach().copy_(_value(w), False),
    "data =": lambda net, w: setattr(w, "data", _value(w)),
    "set_state_dict": lambda net, w: net[1].set_state_dict({"weight": _value(w), "bias": _value(w)[0] * 0}),
    "set_state_dict in float32": lambda net, w: net[1].set_state_dict(
        {"weight": paddle.to_tensor(VALUE), "bias": paddle.zeros([3])}
    ),
}


class _Course:
    """Four steps at rate 0, which move nothing; the third has the write in it."""

    def __init__(self, settings: dict[str, Any], write: _Write, moment: str) -> None:
        paddle.seed(5)
        model = nn.Sequential(*[_Linear() for _ in range(3)])
        self.before = _masters_of(model)
        self.rig = wrap(model, paddle.optimizer.Momentum(0.0, parameters=model.parameters()), **settings)
        self._write, self._moment, self._written = write, moment, False

    def run(self) -> None:
        model, optimizer = self.rig.model, self.rig.optimizer
        for step in range(4):
            self._now(step, "before the first step", at=0)
            self._now(step, "after step")
            if step == 2 and "evaluation" in self._moment:
                with paddle.no_grad(), self._hooked("in an evaluation", before=True):
                    model(_x(9))
            with full_parameters(model):
                self._now(step, "in full_parameters")
            self._now(step, "after an evaluation")
            with self._hooked("before the layer", before=True), self._hooked("after the layer", before=False):
                loss = model(_x(step)).square().mean()
            self._now(step, "after forward")
            loss.backward()
            self._now(step, "after backward")
            optimizer.step()
            self._now(step, "before clear_grad")
            optimizer.clear_grad()
        assert self._written

    def _now(self, step: int, moment: str, at: int = 2) -> None:
        self._step = step
        if step == at and moment == self._moment:
            with paddle.no_grad():
                self._write(self.rig.model, OrderedDict.__getitem__(self.rig.model[1]._parameters, "weight"))
            self._written = True

    @contextlib.contextmanager
    def _hooked(self, moment: str, *, before: bool) -> Any:
        layer = self.rig.model[1]
        register = layer.register_forward_pre_hook if before else layer.register_forward_post_hook
        handle = register(lambda *_: self._now(self._step, moment))
        yield
        handle.remove()


def _x(step: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(step).standard_normal([4, 3], dtype=np.float32))


def _masters_of(model: nn.Layer) -> dict[str, np.ndarray[Any, Any]]:
    return {name: param.numpy().copy() for name, param in model.named_parameters()}


def _masters(rig: Rig) -> dict[str, np.ndarray[Any, Any]]:
    """The float32 shards, which on one rank are all there is."""
    found = {}
    names = {id(param): name for name, param in rig.model.named_parameters()}
    for buffer in rig.optimizer.buffers:
        assert buffer.shard.dtype == paddle.float32
        for piece in buffer.slices:
            param = buffer.params[piece.param]
            found[names[id(param)]] = piece.tensor.numpy().reshape(param.shape)
    return found


def _seen(rig: Rig) -> np.ndarray[Any, Any]:
    with full_parameters(rig.model):
        return np.asarray(rig.model[1].weight.astype("float32").numpy())


def _refused(course: _Course, moment: str) -> str:
    """What was raised in the course, by us, by a function that found no storage, or by autograd; "" where nothing."""
    try:
        course.run()
    except HpShardingError as error:
        return str(error)
    except (RuntimeError, ValueError) as error:
        expected = [*NO_STORAGE, *(["modified by an inplace operation"] if moment in SHARED_WITH_AUTOGRAD else [])]
        if not any(text in str(error) for text in expected):
            raise
        return str(error)
    return ""


@pytest.mark.parametrize("settings", list(MIXED))
@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment not in ALIKE])
def test_a_write_reaches_its_master_and_no_other(moment: str, settings: str) -> None:
    kept = set()
    for name, write in WRITES.items():
        course = _Course(MIXED[settings], write, moment)
        if _refused(course, moment):
            continue
        kept.add(name)
        np.testing.assert_array_equal(_seen(course.rig), VALUE, err_msg=f"{name}: what layers see", strict=True)
        expected = {**course.before, "1.weight": VALUE}
        for key, value in _masters(course.rig).items():
            np.testing.assert_array_equal(value, expected[key], err_msg=f"{name}: master of {key}", strict=True)
    readable = MIXED[settings]["stage"] < 3 and settings != "reshard" and moment not in SHARED_WITH_AUTOGRAD
    if readable or moment == "in full_parameters":
        assert kept >= {"set_value", "copy_", "set_state_dict", "set_state_dict in float32"}
