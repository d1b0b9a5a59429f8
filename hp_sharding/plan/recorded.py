"""Compute of a model as a trace of real training has it."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from ..errors import ConfigError
from ..trace.figures import spans_by_step
from ..trace.spans import Trace
from .profile import Profile, Unit

_OUTSIDE = "script"
"""Label of what lies outside forward, backward and ``step()``, such as the loss: the model's own forward here."""

_MOST_NAMED = 10


def with_recorded(profile: Profile, trace: Trace) -> Profile:
    """The same with the times of forwards and backwards that the trace has: medians over steps, of the slowest rank.

    Transfers that ran beside them have made them longer; what a trace without overlap has is nearer to compute alone.

    Raises:
        ConfigError: it has no compute of some units, which are named.
    """
    taken = _taken_s(trace)
    root, *others = profile.units
    # A simulated unit that only looks a table up takes no time at all, so there is no span of it.
    simulated = trace.about.get("simulated", False)
    wanted = [unit.name for unit in others or [root] if unit.params and (unit.flops or not simulated)]
    missing = [name for name in wanted if (name, "forward") not in taken]
    if missing:
        how_many = "any unit" if len(missing) == len(wanted) else f"{len(missing)} of {len(wanted)} units"
        named = ", ".join(missing[:_MOST_NAMED]) + (", ..." if len(missing) > _MOST_NAMED else "")
        raise ConfigError(
            f"the trace has no compute of {how_many} of {profile.name}: {named}. Record it with the same model and "
            "units, and plan no layers that never run"
        )
    outside_s = taken.get(("", _OUTSIDE), 0.0) + taken.get((root.name, _OUTSIDE), 0.0)
    root = _timed(root, taken)
    root = root._replace(forward_s=(root.forward_s or 0.0) + outside_s)
    return profile._replace(units=(root, *(_timed(unit, taken) for unit in others)))


def _timed(unit: Unit, taken: dict[tuple[str, str], float]) -> Unit:
    forward_s, backward_s = (taken.get((unit.name, label), 0.0) for label in ("forward", "backward"))
    return unit._replace(forward_s=forward_s, backward_s=backward_s)


def _taken_s(trace: Trace) -> dict[tuple[str, str], float]:
    """By layer and label, seconds a step."""
    by_rank: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (rank, _), spans in spans_by_step(trace).items():
        total: dict[tuple[str, str], float] = defaultdict(float)
        for span in spans:
            if span.lane == "compute":
                total[span.layer, span.label] += span.end_s - span.start_s
        for key, seconds in total.items():
            by_rank[key][rank].append(seconds)
    return {key: max(median(steps) for steps in ranks.values()) for key, ranks in by_rank.items()}
