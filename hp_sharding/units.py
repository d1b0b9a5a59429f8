"""Units: the layers that are gathered together, found in a model, and the parameters of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paddle import nn
from paddle.base.framework import EagerParamBase
from paddle.nn.layer.norm import _BatchNormBase

_STATISTICS = (
    (_BatchNormBase, ("_mean", "_variance")),
    (nn.BatchNorm, ("_mean", "_variance")),
    (nn.SpectralNorm, ("weight_u", "weight_v")),
)
"""What Paddle holds as parameters but a forward writes: none is sharded; ``running`` keeps them equal on all ranks."""

_NEVER_CALLED = (nn.LayerList, nn.LayerDict, nn.ParameterList)
"""Containers without a forward of their own: a hook on them never fires, so they cannot be units."""


class Unit(NamedTuple):
    """A layer whose forward needs its parameters as a group.

    Attributes:
        name: the layer's structured name, or the model's class name for the root.
        layer: hooks go on it.
    """

    name: str
    layer: nn.Layer


class UnitParam(NamedTuple):
    """One parameter of the model, at the first place where the model holds it.

    Attributes:
        name: structured name, as in ``state_dict``.
        param: the parameter.
        unit: index of its unit.
        tied: True where more than one layer holds it.
    """

    name: str
    param: EagerParamBase
    unit: int
    tied: bool


class UnitPlan(NamedTuple):
    """The units of a model in registration order, and its parameters, each once, without running statistics.

    Attributes:
        units: the root first.
        params: in the order in which the model holds them.
        layers: of each unit, its own first, then those in it that belong to no other; each layer once.
        captured: (unit, id of a parameter) for what a layer of the unit also holds in an attribute of its own, such as
            the list of weights that recurrent layers keep: its forward may read them without looking them up.
    """

    units: list[Unit]
    params: list[UnitParam]
    layers: list[list[nn.Layer]]
    captured: list[tuple[int, int]]


def find_units(model: nn.Layer, choice: str | Sequence[type]) -> UnitPlan:
    """Units of ``model`` and the parameters that belong to each.

    ``choice`` is ``"auto"`` or layer classes. With "auto", each item of an outermost LayerList or Sequential of
    parameterised layers is a unit, and so is each other child on the way there; with classes, each layer of one of
    them. A parameter belongs to the innermost unit around it, else to the root, which is always a unit.
    """
    layers = {id(model)}
    chosen = _auto(model) if isinstance(choice, str) else _of_class(model, tuple(choice))
    layers.update(id(layer) for layer in chosen)
    units: list[Unit] = []
    places: list[tuple[str, EagerParamBase, int]] = []
    captured: list[tuple[int, int]] = []
    members: dict[int, tuple[int, nn.Layer]] = {}
    _collect(model, "", None, _Found(layers, units, places, members, captured))
    holders: dict[int, int] = {}
    for _, param, _ in places:
        holders[id(param)] = holders.get(id(param), 0) + 1
    first = {id(param): (name, param, unit) for name, param, unit in reversed(places)}
    ordered = [first[key] for key in holders]
    params = [UnitParam(name, param, unit, holders[id(param)] > 1) for name, param, unit in ordered]
    of_units = [[layer for unit, layer in members.values() if unit == index] for index in range(len(units))]
    return UnitPlan(units, params, of_units, captured)


class _Found(NamedTuple):
    layers: set[int]
    units: list[Unit]
    places: list[tuple[str, EagerParamBase, int]]
    members: dict[int, tuple[int, nn.Layer]]
    captured: list[tuple[int, int]]


def _collect(layer: nn.Layer, prefix: str, unit: int | None, found: _Found) -> None:
    if id(layer) in found.layers:
        unit = len(found.units)
        found.units.append(Unit(prefix or type(layer).__name__, layer))
        found.layers.discard(id(layer))  # a layer held twice is one unit, at its first place
    assert unit is not None
    found.members.setdefault(id(layer), (unit, layer))
    for name, param in layer._parameters.items():
        if param is not None and not is_statistic(layer, name):
            found.places.append((f"{prefix}.{name}" if prefix else name, param, unit))
    attributes = [value for name, value in vars(layer).items() if name not in ("_parameters", "_buffers")]
    found.captured.extend((unit, id(param)) for param in _params_within(attributes, depth=3))
    for name, child in layer.named_children():
        _collect(child, f"{prefix}.{name}" if prefix else name, unit, found)


def _params_within(value: object, *, depth: int) -> Iterator[EagerParamBase]:
    if isinstance(value, EagerParamBase):
        yield value
    elif depth and isinstance(value, (list, tuple, set, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _params_within(part, depth=depth - 1)


def is_statistic(layer: nn.Layer, name: str) -> bool:
    """Whether what the layer holds as a parameter of this name is written by its forward: state and no weight."""
    return any(isinstance(layer, kind) and name in names for kind, names in _STATISTICS)


def _auto(layer: nn.Layer) -> Iterator[nn.Layer]:
    in_list = isinstance(layer, (nn.LayerList, nn.Sequential, nn.LayerDict))
    for child in layer.children():
        if not child.parameters():
            continue
        if isinstance(child, _NEVER_CALLED) or (not in_list and _holds_list(child)):
            if not isinstance(child, _NEVER_CALLED):
                yield child
            yield from _auto(child)
        else:
            yield child


def _holds_list(layer: nn.Layer) -> bool:
    """Whether some LayerList or Sequential of parameterised layers lies in ``layer`` (or is it)."""
    return any(
        isinstance(part, (nn.LayerList, nn.Sequential)) and any(child.parameters() for child in part.children())
        for part in layer.sublayers(include_self=True)
    )


def _of_class(model: nn.Layer, classes: tuple[type, ...]) -> Iterator[nn.Layer]:
    return (layer for layer in model.sublayers() if isinstance(layer, classes))
