"""What a trace is: intervals on lanes, steps, and what is known about the run. Knows neither Paddle nor NumPy.

All times are seconds on one clock, which the ranks share; zero is where the first step of the trace begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

LANES = ("compute", "gather", "reduce", "replicate", "agree", "wait")
"""In the order in which pictures have them, from above."""

COLLECTIVES = ("gather", "reduce", "replicate")
"""Lanes whose busy time is to be hidden."""


class Span(NamedTuple):
    """One interval on one lane of one rank.

    Attributes:
        rank: global rank.
        lane: one of ``LANES``.
        label: on ``compute`` "forward", "backward", "update" or a part of ``step()``; on the lanes of collectives what
            was carried (bucket, backward); on ``wait`` what was waited for.
        start_s: see above.
        end_s: likewise; not before ``start_s``.
        nbytes: bytes of the whole message; 0 for compute and waits.
        layer: as the user knows it, "blocks.3"; the model itself by its class. For collectives and waits the layers
            of what was carried, "blocks.3..blocks.5".
    """

    rank: int
    lane: str
    label: str
    start_s: float
    end_s: float
    nbytes: int = 0
    layer: str = ""

    @property
    def duration_ms(self) -> float:
        """Length in milliseconds."""
        return (self.end_s - self.start_s) * 1e3


class Step(NamedTuple):
    """One step of one rank: from the end of one ``optimizer.step()`` to the end of the next.

    Attributes:
        rank: global rank.
        number: of the step, counted alike on all ranks.
        start_s: see above.
        end_s: likewise.
        figures: what spans do not tell: ``peak_bytes``, ``formula_bytes``, ``wrong_guesses``.
    """

    rank: int
    number: int
    start_s: float
    end_s: float
    figures: dict[str, float]

    @property
    def duration_ms(self) -> float:
        """Length in milliseconds."""
        return (self.end_s - self.start_s) * 1e3


@dataclass
class Trace:
    """One or several steps of one or several ranks.

    Attributes:
        spans: in any order.
        steps: likewise. Ranks may have different ones, where one began or ended later.
        about: the run, as JSON has it: ``versions``, ``device``, ``date``, ``nranks`` (all of them), ``replicas``,
            ``config``, ``clock`` (how the ranks' clocks were merged, and ``uncertainty_s``), ``buckets`` (a list of
            ``name``, ``layer``, ``nbytes``: as they were laid out at the end), ``model`` (its class), ``hosts`` (a name
            for each rank), ``simulated``.
            Any of them may be missing.
    """

    spans: list[Span] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """Global ranks that have a span or a step, ascending."""
        return sorted({*(span.rank for span in self.spans), *(step.rank for step in self.steps)})

    def numbers(self) -> list[int]:
        """Numbers of the steps, ascending, each once."""
        return sorted({step.number for step in self.steps})
