"""A profile of a Paddle Layer: its units as real training would find them, and the shapes of their parameters."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn

from ..config import ShardingConfig
from ..errors import ConfigError
from ..layout import ITEM_BYTES
from ..precision import dtype_name
from ..units import UnitPlan, find_units
from .profile import Param, Profile, Unit, matrix_flops

LOG = logging.getLogger("hp_sharding")
_EXAMPLE = "such as my_models.gpt:build"


def load(path: str) -> Callable[..., Any]:
    """What ``package.module:name`` says. Raises ConfigError where there is no callable that needs no arguments."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"'{path}' is no callable; expected package.module:name, {_EXAMPLE}")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"'{path}': {error}. Is its folder in PYTHONPATH?") from error
    for part in name.split("."):
        found = getattr(found, part, None)  # type: ignore[assignment]
    if not callable(found):
        raise ConfigError(f"'{path}': module '{module}' has no callable '{name}'")
    if isinstance(found, nn.Layer):
        raise ConfigError(f"'{path}' is a Layer that exists already; expected a callable that returns one, {_EXAMPLE}")
    missing = _argument_missing(found)
    if missing:
        raise ConfigError(f"'{path}' cannot be called without arguments: {missing}. Write a function that needs none")
    return found


def _argument_missing(call: Callable[..., Any]) -> str:
    try:
        inspect.signature(call).bind()
    except TypeError as error:
        return str(error)
    except ValueError:  # written in C, says nothing of its arguments
        pass
    return ""


def make_model(build: Callable[[], Any], *, lazy: bool = True) -> nn.Layer:
    """What ``build()`` returns; ``lazy`` gives its parameters no memory, or warns where the model cannot do without.

    Raises:
        ConfigError: it is no Layer.
    """
    model = _make_lazily(build) if lazy else None
    if model is None:
        model = build()
        if lazy:
            LOG.warning("the model reads its parameters while it is built, so it was built in memory, with all of them")
    if not isinstance(model, nn.Layer):
        raise ConfigError(f"the model is to be a paddle.nn.Layer, not {type(model).__name__}")
    return model


def _make_lazily(build: Callable[[], Any]) -> Any:
    """None where the model needs the values of its parameters while it is built, as recurrent layers do."""
    try:
        with paddle.LazyGuard():
            return build()
    except (ValueError, RuntimeError, TypeError, AttributeError):
        return None


def profile_of(model: nn.Layer, config: ShardingConfig) -> Profile:
    """Units in the order in which the model holds them; nothing is known of their times. Integers do not train.

    Tied parameters belong to their first layer and are borrowed by the units of the others. A parameter that another
    layer uses without holding it shows only where the model runs, see ``measuring``.
    """
    plan = find_units(model, config.units)
    units = [
        Unit(
            unit.name,
            tuple(
                Param(entry.name, tuple(entry.param.shape), dtype_name(entry.param), bool(entry.param.stop_gradient))
                for entry in plan.params
                if entry.unit == number and entry.param.size and dtype_name(entry.param) in ITEM_BYTES
            ),
        )
        for number, unit in enumerate(plan.units)
    ]
    return Profile(plan.units[0].name, tuple(map(_with_work, units, plan.layers, _borrowed(plan))))


def _with_work(unit: Unit, layers: list[nn.Layer], borrows: tuple[Param, ...]) -> Unit:
    """A look-up in a table multiplies nothing."""
    tables = {id(layer.weight): int(layer.weight.size) for layer in layers if isinstance(layer, nn.Embedding)}
    flops = matrix_flops(unit.params) + matrix_flops(borrows) - 2 * sum(tables.values())
    return unit._replace(flops=max(flops, 0.0), borrows=tuple(param.name for param in borrows))


def _borrowed(plan: UnitPlan) -> list[tuple[Param, ...]]:
    """Of each unit, the parameters that a layer of it holds as well as one of another unit."""
    first = {id(entry.param): entry for entry in plan.params}
    found = []
    for number, layers in enumerate(plan.layers):
        held = [param for layer in layers for param in layer._parameters.values() if param is not None]
        others = {id(param): first[id(param)] for param in held if id(param) in first}
        borrowed = [entry for entry in others.values() if entry.unit != number]
        found.append(tuple(Param(entry.name, tuple(entry.param.shape), dtype_name(entry.param)) for entry in borrowed))
    return found
