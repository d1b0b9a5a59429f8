"""Where random numbers go on: Python's, NumPy's and Paddle's generators, out and in."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

_TRACKER = "paddle.distributed.fleet.layers.mpu.random"
"""Fleet's tracker of generators for tensor parallel layers; there is one only where fleet has been imported."""


def rng_state() -> dict[str, Any]:
    """All that decides which random numbers come next in this process; ``values.encode`` takes it.

    Python's ``random``, NumPy's global generator, Paddle's on the CPU and on the current device, and those that fleet
    keeps for tensor parallel layers. Generators that a program made for itself are its own to save.
    """
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
        "paddle": {kind: _plain(paddle.get_rng_state(device)[index]) for kind, device, index in _generators()},
        "fleet": {name: _plain(states[_index()]) for name, states in _tracked().items()},
    }


def set_rng_state(state: Mapping[str, Any]) -> bool:
    """Lets random numbers go on from where they were when ``rng_state()`` gave ``state``.

    Returns:
        False, and nothing has changed, where the generators here are not those of the state: those of another kind of
        device, another one of NumPy's, or others that fleet keeps.
    """
    if not _fits(state):
        return False
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])
    for kind, device, index in _generators():
        found = paddle.get_rng_state(device)
        paddle.set_rng_state(_replaced(found, index, state["paddle"][kind]), device)
    tracked = _tracked()
    if tracked:
        new = {name: _replaced(found, _index(), state["fleet"][name]) for name, found in tracked.items()}
        sys.modules[_TRACKER].get_rng_state_tracker().set_states_tracker(new)
    return True


def _fits(state: Mapping[str, Any]) -> bool:
    return (
        state["python"]["version"] == random.getstate()[0]
        and state["numpy"]["bit_generator"] == np.random.get_state(legacy=False)["bit_generator"]
        and set(state["paddle"]) == {kind for kind, _, _ in _generators()}
        and set(state["fleet"]) == set(_tracked())
    )


def _index() -> int:
    """Which of the devices of its kind the current one is, and so which of the states that Paddle lists is its own."""
    return int(paddle.device.get_device().partition(":")[2] or 0)


def _generators() -> list[tuple[str, str, int]]:
    """The CPU and the current device: kind, Paddle's name, index among the states that Paddle lists."""
    device = paddle.device.get_device()
    kind = device.partition(":")[0]
    return [("cpu", "cpu", 0)] + ([(kind, device, _index())] if kind != "cpu" else [])


def _tracked() -> dict[str, list[Any]]:
    """Name -> states, as Paddle lists them, of the generators of fleet's tracker."""
    module = sys.modules.get(_TRACKER)
    tracker = module and module.get_rng_state_tracker()
    return tracker.get_states_tracker() if tracker and tracker.states_ else {}


def _plain(state: Any) -> dict[str, Any]:
    _, seed, offset, engine = state.__getstate__()
    return {"seed": seed, "offset": offset, "engine": bytes(engine)}


def _replaced(states: list[Any], index: int, plain: Mapping[str, Any]) -> list[Any]:
    """``states`` with another one at ``index``, which stays that of the device that it was of."""
    kind: Any = type(states[index])
    new = kind.__new__(kind)  # one that has a state already would keep it
    new.__setstate__((states[index].__getstate__()[0], plain["seed"], plain["offset"], list(plain["engine"])))
    return [*states[:index], new, *states[index + 1 :]]
