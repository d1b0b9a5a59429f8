"""A KeyboardInterrupt at any call within the package: the batch has counted, or not, or the error says neither.

Every so many calls of a step one is interrupted. All of them: ``HP_SHARDING_INTERRUPTS=1``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from paddle.utils import unique_name

import hp_sharding
from hp_sharding import full_parameters
from hp_sharding.errors import StateError
from tests.fakes import Rig, wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_equal, values

EVERY = int(os.environ.get("HP_SHARDING_INTERRUPTS", "0")) or 29
"""Of the calls that a step makes; a prime, so that it falls in with nothing."""
PACKAGE = str(Path(hp_sharding.__file__).parent)
LEFT_OUT = tuple(f"{PACKAGE}/{name}" for name in ("comm/", "pool.py", "ownership.py"))
"""What runs when objects die, where Python drops exceptions; and lanes, whose ranks no longer match then."""

BOTH: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True, "comm_fusion": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1, **BOTH},
    "stage 2": {"stage": 2, **BOTH},
    "no overlap": {"stage": 2},
    "reshard": {"stage": 2, **BOTH, "reshard_after_step": True},
    "stage 3": {"stage": 3, **BOTH},
}


class _Interrupt:
    """Interrupts one call: that number ``number``, from 0, of those within."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.where = ""

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or self.where or not name.startswith(PACKAGE) or name.startswith(LEFT_OUT):
            return
        if self._left:
            self._left -= 1
            return
        self.where = f"{name.removeprefix(PACKAGE)}: {frame.f_code.co_name}, line {frame.f_lineno}"
        raise KeyboardInterrupt


class _Twins:
    """A model that is interrupted, and one that is not, to which the same is done."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self._name = name
        self.rig, self.calm = (self._wrap(settings) for _ in range(2))

    def train(self, number: int) -> None:
        """The one that is interrupted."""
        self._train(self.rig, number)

    def follow(self, number: int) -> None:
        """The other one."""
        self._train(self.calm, number)

    def both(self, number: int) -> None:
        self.train(number)
        self.follow(number)

    def check(self, what: str) -> None:
        found, expected = (self._values(rig) for rig in (self.rig, self.calm))
        assert_equal(found, expected, what)

    def is_whole_after_clear(self) -> bool:
        try:
            self.rig.optimizer.clear_grad()
        except StateError as error:
            if "those of no step" not in str(error):
                raise
            return False
        return True

    def _wrap(self, settings: dict[str, Any]) -> Rig:
        with unique_name.guard():
            model = make_model(self._name)
            return wrap(model, make_optimizer("AdamW", model), **settings)

    def _train(self, rig: Rig, number: int) -> None:
        loss_of(rig.model, make_batch(self._name, number, 0)).backward()
        rig.optimizer.step()
        rig.optimizer.clear_grad()

    def _values(self, rig: Rig) -> Values:
        with full_parameters(rig.model):
            return values(rig.model)


def _begin(name: str, settings: dict[str, Any]) -> _Twins:
    twins = _Twins(name, settings)
    for number in range(2):
        twins.both(number)
    return twins


@pytest.mark.parametrize("model", ["mlp", "gpt_recompute_reentrant"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_an_interrupt_at_any_call(model: str, kind: str) -> None:
    every = EVERY if model == "mlp" or EVERY == 1 else 20 * EVERY
    twins = _begin(model, SETTINGS[kind])
    number, n_torn, n_counted = 0, 0, 0
    while True:
        interrupt = _Interrupt(number)
        steps = twins.rig.optimizer.steps
        with contextlib.suppress(KeyboardInterrupt, SystemError, OSError), interrupt.waiting():
            twins.train(1000 + number)
        if not interrupt.where:
            break
        if twins.is_whole_after_clear():
            if twins.rig.optimizer.steps > steps:
                n_counted += 1
                twins.follow(1000 + number)
            twins.both(number)
            twins.check(f"interrupted in {interrupt.where};")
        else:
            n_torn += 1
            assert "updates.py" in interrupt.where or "fusing.py" in interrupt.where
            twins = _begin(model, SETTINGS[kind])
        number += every
    assert number > every
    if model == "mlp":
        assert n_counted
