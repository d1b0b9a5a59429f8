"""What a trace is of, in a line."""

from __future__ import annotations

from collections.abc import Sequence

from .figures import Groups
from .spans import Trace


def headline(trace: Trace, shown: Trace, ranks: Sequence[int]) -> list[str]:
    """What a reader of figures or a picture has to know: whose steps they are, and how they were run."""
    about = trace.about
    numbers = shown.numbers()
    found = ["no whole step" if not numbers else f"step {numbers[0]}"]
    if len(numbers) > 1:
        found = [f"median of steps {numbers[0]} to {numbers[-1]}"]
    if len(numbers) < len(trace.numbers()):
        found[0] += f" of {len(trace.numbers())} recorded"
    if len(ranks) < len(shown.ranks):
        which = f"ranks {' and '.join(map(str, ranks))}, the first and the one that computes longest"
        found.append(f"{which}, of {len(shown.ranks)}" if len(ranks) > 1 else f"rank {ranks[0]} of {len(shown.ranks)}")
    shard, replicas = Groups.of(trace)
    found.append(f"{shard * replicas} ranks" + (f", {replicas} replicas" if replicas != 1 else ""))
    config = about.get("config")
    stage = config.get("stage") if isinstance(config, dict) else None
    found += [f"stage {stage}"] if stage is not None else []
    found += [str(about[key]) for key in ("device", "date") if about.get(key)]
    clock = about.get("clock")
    uncertainty_s = clock.get("uncertainty_s") if isinstance(clock, dict) else None
    if isinstance(uncertainty_s, (int, float)) and uncertainty_s > 0:
        found.append(f"clocks agree within {uncertainty_s * 1e3:.3g} ms")
    return [*found, "simulated"] if about.get("simulated") else found
