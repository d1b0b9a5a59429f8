"""How a plan looks on a terminal. The only place of the plan that prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from .choices import Outcome
from .profile import Profile

_WIDTH = 110
"""Where there is no terminal."""
_GB = 1e9


def show(outcomes: Sequence[Outcome], profile: Profile, *, memory_bytes: float | None) -> None:
    """The table on stdout, the best choice first."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(f"{profile.name}: {profile.numel / 1e6:,.1f} million parameters in {len(profile.units) - 1} units")
    console.print(_table(outcomes))
    console.print("\n".join(_notes(outcomes, memory_bytes)))


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("shard x repl.", "stage", "buffer MB", "prefetch", "step ms", "exposed ms", "overlap %", "GB a rank"):
        table.add_column(name, justify="right")
    table.add_column("bound by", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*_row(outcome), style=None if outcome.fits else "red")
    return table


def _row(outcome: Outcome) -> list[str]:
    (ranks, config), found = outcome.choice, outcome.prediction
    return [
        f"{ranks.shard} x {ranks.replicas}",
        str(config.stage),
        f"{config.comm_buffer_size_MB:g}",
        str(config.units_ahead) if config.stage == 3 else "",
        f"{found.step_ms:,.1f}",
        f"{found.exposed_ms:,.1f}",
        f"{found.overlap_percent:.1f}",
        f"{found.memory_bytes / _GB:,.2f}",
        found.bound if outcome.fits else "too large",
    ]


def _notes(outcomes: Sequence[Outcome], memory_bytes: float | None) -> list[str]:
    notes = [
        "Simulated: every rank alike, no stragglers. Exposed: compute waits. MB: 2**20 bytes. GB: 10**9 bytes, the peak"
        " of a step."
    ]
    dtype = outcomes[0].choice.config.param_dtype
    if dtype is not None:
        notes.append(f"Layers compute in {dtype}; each rank keeps its shard of the parameters in float32.")
    if memory_bytes is not None:
        fitting = sum(outcome.fits for outcome in outcomes)
        notes.append(f"{fitting} of {len(outcomes)} fit into {memory_bytes / _GB:g} GB.")
    return notes
