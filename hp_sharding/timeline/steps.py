"""What one step comes to, by the definitions of ``trace.figures``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..trace.figures import Figures, Groups, over_steps, step_figures
from ..trace.spans import Span, Step


class _Times(NamedTuple):
    step_ms: float
    compute_ms: float
    gather_ms: float
    reduce_ms: float
    exposed_ms: float
    replicate_ms: float = 0.0


class StepTimes(_Times):
    """One step in milliseconds.

    Attributes:
        step_ms: from the end of one ``step()`` to the end of the next.
        compute_ms: what is left of it without the exposed waiting.
        gather_ms: how long the lane was busy.
        reduce_ms: likewise.
        exposed_ms: how long the main thread did nothing but wait for communication.
        replicate_ms: how long the lane was busy.
        figures: all that is known of it, see ``trace.figures.step_figures``.
    """

    _figures: Figures | None = None

    @property
    def figures(self) -> Figures:
        """All that is known of the step."""
        return self._figures if self._figures is not None else self._asdict()

    @classmethod
    def of(cls, figures: Figures) -> StepTimes:
        """The times among ``figures``."""
        times = cls(**{name: figures[name] for name in cls._fields})
        times._figures = figures
        return times


def times_of(spans: Sequence[Span], step: Step, groups: Groups) -> StepTimes:
    """What a step comes to, given the spans that end in it."""
    return StepTimes.of(step_figures(spans, step, groups))


EXTRA = ("wrong_guesses", "peak_bytes", "formula_bytes")
"""Figures of a step that its spans do not tell."""


def summary_of(steps: Sequence[StepTimes]) -> dict[str, Any]:
    """Over the run; the same keys whatever there is."""
    none = {**dict.fromkeys(("steps", *StepTimes._fields, *EXTRA), 0.0), **over_steps([])}
    return {**none, **over_steps([step.figures for step in steps]), "steps": float(len(steps))}
