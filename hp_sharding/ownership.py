"""Who keeps a wrapped model's schedule: the model itself, whatever becomes of its optimizer."""

from __future__ import annotations

from typing import Any

from paddle import nn


def keep_schedule(model: nn.Layer, schedule: Any) -> None:
    """Has ``model`` own its ``Schedule``: a model outlives its optimizer, and gathers may still be under way then.

    So may a layer of it that is kept alone.
    """
    for layer in model.sublayers(include_self=True):
        layer.__dict__["_hp_sharding_schedule"] = _Kept(schedule)


def schedule_of(model: nn.Layer) -> Any:
    """The ``Schedule`` of a wrapped model; None for others, and for deep copies of wrapped ones."""
    kept = model.__dict__.get("_hp_sharding_schedule")
    if kept is None or kept.schedule is None or kept.schedule.model is not model:
        return None
    return kept.schedule


class _Kept:
    """Holds the schedule in the model's attributes; copies and pickles of the model get an empty one."""

    def __init__(self, schedule: Any = None) -> None:
        self.schedule = schedule

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()
