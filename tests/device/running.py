"""Runs a function on ranks that have the stand-in device. ``tests/harness.py`` says what such a function may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests import harness
from tests.device import standin


def on_device(
    fn: Callable[..., Any],
    nranks: int,
    *args: Any,
    pace: standin.Pace | None = None,
    timeout_s: float = 60.0,
    caching: bool = False,
) -> list[Any]:
    """Calls ``fn(rank, nranks, *args)`` in new processes and returns what each rank returned.

    Several ranks have ``init_parallel_env`` behind them, with the device as Paddle's current one; a single one calls
    ``paddle.set_device("npu")`` itself. ``pace`` and ``caching`` are those of ``standin.environment``.

    Raises:
        RankFailure: a rank raised, or its process ended otherwise; carries tracebacks and outputs.
    """
    outcomes = start(fn, nranks, *args, pace=pace, timeout_s=timeout_s, caching=caching)
    wrong = {
        outcome.rank: f"{outcome.error or 'no traceback'}\nended with {outcome.returncode}\n{outcome.output[-6000:]}"
        for outcome in outcomes
        if not outcome.reported or outcome.error or outcome.returncode
    }
    if wrong:
        raise harness.RankFailure(f"{fn.__qualname__} on {nranks} stand-in devices", wrong)
    return [outcome.result for outcome in outcomes]


def start(
    fn: Callable[..., Any],
    nranks: int,
    *args: Any,
    pace: standin.Pace | None = None,
    timeout_s: float = 60.0,
    caching: bool = False,
) -> list[harness.Outcome]:
    """The same, but returns what became of every rank: for functions that are to fail."""
    env = standin.environment(pace, timeout_s=timeout_s / 3, caching=caching)
    return harness.run(fn, nranks, *args, env=env, fresh=True, init=nranks > 1, timeout_s=timeout_s)
