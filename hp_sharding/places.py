"""Where every parameter of a wrapped model lies: found anew whenever its buckets are others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .buffer import FusedCommBuffer
from .gathers import Place
from .units import UnitPlan


class UnitMap:
    """What a schedule has to know of a ``UnitPlan`` for good. Parameters are named by their ``id``; it holds no layer.

    Attributes:
        n_units: how many units there are.
        unit_of: parameter -> its unit.
        by_layer: the parameters of each layer, with their number of axes.
        captured: (unit, parameter), as in ``UnitPlan``.
    """

    def __init__(self, plan: UnitPlan) -> None:
        self.n_units = len(plan.units)
        self.unit_of = {id(entry.param): entry.unit for entry in plan.params}
        self.captured = list(plan.captured)
        self.by_layer: dict[str, list[tuple[int, int]]] = {}
        for entry in plan.params:
            self.by_layer.setdefault(entry.name.rpartition(".")[0], []).append((id(entry.param), entry.param.ndim))


class Places:
    """Where parameters lie in ``buffers``.

    Attributes:
        of: ``id`` of a parameter -> its place.
        unit_buckets: buckets of each unit.
        unlooked: for each unit, buckets of the parameters that it may read without looking them up.
        captured: for a unit, the places of those parameters.
        vectors_beside: bucket -> others that hold vectors of the same layers.
    """

    def __init__(self, units: UnitMap, buffers: Sequence[FusedCommBuffer]) -> None:
        self.of: dict[int, Place] = {}
        self.unit_buckets: list[list[int]] = [[] for _ in range(units.n_units)]
        for buffer in buffers:
            for index, param in enumerate(buffer.params):
                unit = units.unit_of[id(param)]
                self.of[id(param)] = Place(buffer.layout.number, index, unit)
                if buffer.layout.number not in self.unit_buckets[unit]:
                    self.unit_buckets[unit].append(buffer.layout.number)
        self.vectors_beside = self._find_vectors(units)
        self.captured: Mapping[int, list[Place]] = self._find_captured(units)
        self.unlooked: list[list[int]] = [
            list(dict.fromkeys(place.bucket for place in self.captured.get(unit, ()))) for unit in range(units.n_units)
        ]

    def _find_vectors(self, units: UnitMap) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for params in units.by_layer.values():
            held = [(self.of[key].bucket, ndim) for key, ndim in params if key in self.of]
            vectors = {bucket for bucket, ndim in held if ndim == 1}
            for bucket in {bucket for bucket, _ in held}:
                beside = found.setdefault(bucket, [])
                beside.extend(sorted(vectors - {bucket, *beside}))
        return found

    def _find_captured(self, units: UnitMap) -> dict[int, list[Place]]:
        captured: dict[int, list[Place]] = {}
        for unit, key in units.captured:
            if key in self.of:
                captured.setdefault(unit, []).append(self.of[key])
        return captured
