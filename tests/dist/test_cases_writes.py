"""Writes that leave no trace reach every rank's own part of a parameter, wherever that part lies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding import full_parameters
from tests import harness
from tests.dist import test_replicas
from tests.models import loss_on, make_model, make_optimizer
from tests.reference import Values
from tests.sides import FREED, SETTINGS, Factory, Settings, compare

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "layers.0.weight": lambda param, value: param.data.copy_(paddle.to_tensor(value), False),
    "layers.1.weight": lambda param, value: nn.initializer.Assign(value)(param),
    "layers.2.weight": lambda param, value: np.from_dlpack(param.detach()).__setitem__(slice(None), value),
    "layers.3.weight": lambda param, value: param.set_value(value),
    "gain": lambda param, value: paddle.assign(value, output=param),
}
"""Another way for each parameter."""
MOMENTS = ("in full_parameters", "before its layer", "after backward")


def _value(param: Any) -> Any:
    return np.random.default_rng(param.size).standard_normal(param.shape).astype(np.float32) / 3


@paddle.no_grad()
def _write(model: nn.Layer, prefix: str) -> None:
    for name, write in WRITES.items():
        if name.startswith(prefix):
            owner = model
            for part in name.split(".")[:-1]:
                owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
            param = getattr(owner, name.rpartition(".")[2])
            write(param, _value(param))


@contextlib.contextmanager
def _hooked(model: nn.Layer) -> Iterator[None]:
    """Each layer's parameter is written by a hook of its own, before it runs."""
    handles = [
        layer.register_forward_pre_hook(lambda *_, number=number: _write(model, f"layers.{number}"))
        for number, layer in enumerate(model.layers)
    ]
    yield
    for handle in handles:
        handle.remove()


def _train(new: Factory, moment: str) -> dict[str, Values]:
    side = new(lambda: make_model("mlp"), lambda model: make_optimizer("Momentum", model))
    snapshots = {}
    for step in range(4):
        now = step == 1
        if now and moment == "in full_parameters":
            with full_parameters(side.model):
                _write(side.model, "")
        with _hooked(side.model) if now and moment == "before its layer" else contextlib.nullcontext():
            side.backward(loss_on(side.model, "mlp", step))
        if now and moment == "after backward":
            _write(side.model, "")
        side.step()
        side.clear_grad()
        snapshots[f"step {step}"] = side.values()
    return snapshots


READABLE: Settings = {name: chosen for name, chosen in SETTINGS.items() if chosen["stage"] < 3}
"""Those in which parameters can be written after backward, outside every forward."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_each_rank_keeps_its_part_of_what_is_written(moment: str) -> None:
    alike = moment == "after backward"
    harness.run(compare, 2, _train, READABLE if alike else FREED, 0.0, moment)
    replicas = {name: test_replicas.SETTINGS[name] for name in (("reshard",) if alike else ("reshard", "stage 3"))}
    harness.run(compare, 4, _train, replicas, test_replicas.ORDER, moment)
