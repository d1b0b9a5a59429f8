"""The state of a learning rate scheduler, with what Paddle's own ``state_dict`` leaves out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddle.optimizer.lr import LRScheduler

_LEFT_OUT = ("T_cur", "T_i")
"""Where CosineAnnealingWarmRestarts is in its period; without them it begins a new one after each load."""
_WRAPPED = "LinearWarmup_LR"
"""Where LinearWarmup keeps the state of the scheduler that takes over from it."""


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """``scheduler.state_dict()``, and what else of it decides the rates to come."""
    state = {**scheduler.state_dict(), **{name: vars(scheduler)[name] for name in _LEFT_OUT if name in vars(scheduler)}}
    if _WRAPPED in state:
        state[_WRAPPED] = scheduler_state(scheduler.learning_rate)
    return state


def needed_keys(scheduler: LRScheduler) -> list[str]:
    """Of ``scheduler_state``, those without which a state is not one of such a scheduler; Paddle's own has them."""
    return list(scheduler.state_dict())


def set_scheduler_state(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Lets ``scheduler`` go on from ``scheduler_state`` of one of its class, or from a ``state_dict`` of Paddle's.

    Raises:
        RuntimeError: from Paddle, where ``state`` is not that of such a scheduler.
    """
    found = {name: value for name, value in state.items() if name in _LEFT_OUT and name in vars(scheduler)}
    theirs = {name: value for name, value in state.items() if name not in found}
    wrapped = theirs.get(_WRAPPED)
    if wrapped is not None:
        set_scheduler_state(scheduler.learning_rate, wrapped)
        theirs[_WRAPPED] = scheduler.learning_rate.state_dict()
    scheduler.set_state_dict(theirs)
    vars(scheduler).update(found)
