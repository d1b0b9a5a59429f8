"""Lanes on which everything is late, by chance and by other amounts on every rank.

A collective may be late three times: before it is handed over, before it begins on its lane, and before its end is
seen. So one lane gets ahead of another, one rank of the others, and ``done()`` says no where the result is there. How
late is a matter of ``Delays``: of time, for lanes between processes, or of turns, for the fake lanes of one process,
which see in a second what real ones see in an hour.

Everything follows from a seed, but for what the machine does besides.
"""

from __future__ import annotations

import random
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

import paddle
from paddle import nn

from hp_sharding.comm import Communicator, Work
from tests.fakes import WaitingLane
from tests.lanes import Delay

LONGEST_S = 0.2
_SHORTEST_S = 0.0002
_EXPONENT = -0.9
"""Delays are Pareto distributed: most are below a millisecond, one in 170 is 20 ms, one in 2,000 the longest."""
_AT_ONCE = 0.5
"""How many have no delay at all."""
_SWITCHES_S = (5e-3, 5e-4, 5e-5)
_CHANCES = (0.0, 0.1, 0.5, 0.9)
_MOST_LOOKS = 4


class Delays(ABC):
    """How late something is."""

    @abstractmethod
    def pause(self) -> None:
        """Some time passes: before a collective is handed over, and wherever else the script likes."""

    @abstractmethod
    def behind(self, after: Work | None) -> Work | None:
        """What a collective then follows, which is to follow ``after``."""

    @abstractmethod
    def seen_late(self, work: Work) -> Work:
        """The work, whose end is seen later than it is there."""

    @abstractmethod
    def stir(self) -> None:
        """The weather changes: now and then, such as at the beginning of a step."""

    def pause_in_layers(self, model: nn.Layer) -> None:
        """Some time passes after each layer's forward, too, from now on."""
        for layer in model.sublayers(include_self=True):
            layer.register_forward_post_hook(lambda *_: self.pause())


class SeenLate(Work):
    """Another work, whose end is noticed late."""

    def __init__(self, inner: Work) -> None:
        self.op, self.label, self.lane, self.nbytes = inner.op, inner.label, inner.lane, inner.nbytes
        self.start_s: float | None = None
        self.end_s: float | None = None
        self.on_device = inner.on_device
        self.inner = inner

    def wait(self) -> None:
        self.inner.wait()
        self._sit_out()
        self._take_times()

    def done(self) -> bool:
        if not self.inner.done() or not self._is_noticed():
            return False
        self._take_times()
        return True

    def _take_times(self) -> None:
        self.start_s, self.end_s = self.inner.start_s, self.inner.end_s

    @abstractmethod
    def _sit_out(self) -> None:
        """It has ended, and somebody waits to notice."""

    @abstractmethod
    def _is_noticed(self) -> bool:
        """It has ended; whether somebody who looks now notices."""


class DelayedLane(Communicator):
    """Another lane, with delays. ``after`` may be a work of such a lane."""

    def __init__(self, inner: Communicator, delays: Delays) -> None:
        self.lane, self.ranks, self.rank = inner.lane, inner.ranks, inner.rank
        self._inner = inner
        self._delays = delays

    def all_gather(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        wire_dtype: str | None = None,
    ) -> Work:
        return self._start("all_gather", output, input, label=label, after=after, wire_dtype=wire_dtype)

    def reduce_scatter(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        accumulate: bool = False,
        wire_dtype: str | None = None,
    ) -> Work:
        return self._start(
            "reduce_scatter", output, input, label=label, after=after, accumulate=accumulate, wire_dtype=wire_dtype
        )

    def all_reduce(
        self, tensor: paddle.Tensor, *, label: str = "", after: Work | None = None, wire_dtype: str | None = None
    ) -> Work:
        return self._start("all_reduce", tensor, label=label, after=after, wire_dtype=wire_dtype)

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "", after: Work | None = None) -> Work:
        return self._start("broadcast", tensor, src=src, label=label, after=after)

    def break_off(self, reason: str) -> None:
        self._inner.break_off(reason)

    @property
    def is_broken(self) -> bool:
        return self._inner.is_broken

    def close(self) -> None:
        """The lane below is shared with later tests."""

    def _start(self, op: str, *tensors: paddle.Tensor, after: Work | None, **options: Any) -> Work:
        self._delays.pause()
        first = after.inner if isinstance(after, SeenLate) else after
        work = getattr(self._inner, op)(*tensors, after=self._delays.behind(first), **options)
        return self._delays.seen_late(work)


# -- delays of time ---------------------------------------------------------------------------------------------------


class Clock(Delays):
    """Milliseconds, mostly; see ``_EXPONENT``. ``stir`` changes how often threads take turns, until ``over``."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._switch_s = sys.getswitchinterval()

    def draw_s(self) -> float:
        if self._random.random() < _AT_ONCE:
            return 0.0
        return min(LONGEST_S, _SHORTEST_S * (1.0 - self._random.random()) ** _EXPONENT)

    def pause(self) -> None:
        time.sleep(self.draw_s())  # where it is 0 another thread may go on

    def behind(self, after: Work | None) -> Work | None:
        delay_s = self.draw_s()
        return Delay(delay_s, after) if delay_s else after

    def seen_late(self, work: Work) -> Work:
        return _SeenAfterTime(work, self.draw_s())

    def stir(self) -> None:
        sys.setswitchinterval(self._random.choice(_SWITCHES_S))

    def over(self) -> None:
        """Threads take turns as before."""
        sys.setswitchinterval(self._switch_s)


class _SeenAfterTime(SeenLate):
    def __init__(self, inner: Work, delay_s: float) -> None:
        super().__init__(inner)
        self._delay_s = delay_s
        self._noticed_s: float | None = None

    def _sit_out(self) -> None:
        if not self._is_noticed():
            time.sleep(self._delay_s)

    def _is_noticed(self) -> bool:
        if self._noticed_s is None:
            self._noticed_s = time.monotonic() + self._delay_s
        return time.monotonic() >= self._noticed_s


# -- delays of turns --------------------------------------------------------------------------------------------------


class Turns(Delays):
    """For ``WaitingLane``: whenever somebody starts, asks or waits, each lane may deliver some of its works, or not.

    They are delivered in every order that is allowed: each lane keeps its own, and what follows a work of another lane
    comes after that. ``stir`` changes how fast each lane is.

    Args:
        lanes: all of them.
    """

    def __init__(self, seed: str, lanes: list[WaitingLane]) -> None:
        self._random = random.Random(seed)
        self._lanes = lanes
        self._chances = [0.5] * len(lanes)
        self.n_turns = 0

    def pause(self) -> None:
        self.n_turns += 1
        for index in self._random.sample(range(len(self._lanes)), len(self._lanes)):
            while self._random.random() < self._chances[index] and self._lanes[index].n_pending:
                self._lanes[index].deliver_next()

    def behind(self, after: Work | None) -> Work | None:
        return after

    def seen_late(self, work: Work) -> Work:
        return _SeenAfterLooks(work, self, self._random.randrange(_MOST_LOOKS))

    def stir(self) -> None:
        self._chances = [self._random.choice(_CHANCES) for _ in self._lanes]


class _SeenAfterLooks(SeenLate):
    """Of those who ask whether it is done, the first ones do not notice."""

    def __init__(self, inner: Work, turns: Turns, n_looks: int) -> None:
        super().__init__(inner)
        self._turns = turns
        self._n_looks = n_looks

    def wait(self) -> None:
        self._turns.pause()
        super().wait()

    def done(self) -> bool:
        self._turns.pause()
        return super().done()

    def _sit_out(self) -> None:
        self._n_looks = 0

    def _is_noticed(self) -> bool:
        self._n_looks -= 1
        return self._n_looks < 0
