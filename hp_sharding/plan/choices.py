"""Which settings are tried, and in what order they come out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..config import ShardingConfig
from ..errors import ConfigError
from .hardware import Hardware
from .profile import Profile
from .replay import Prediction, Ranks, Training, predict


class Choice(NamedTuple):
    """One way to train: ranks and settings."""

    ranks: Ranks
    config: ShardingConfig


class Outcome(NamedTuple):
    """What a choice comes to; ``fits`` says whether a rank has the memory for it."""

    choice: Choice
    prediction: Prediction
    fits: bool


class Wanted(NamedTuple):
    """All choices, as combinations.

    Attributes:
        nranks: all data ranks.
        replicas: numbers of replicas; each divides ``nranks``.
        stages: see ``ShardingConfig``.
        buffer_mb: ``comm_buffer_size_MB``.
        prefetch_depth: tried in stage 3 only, elsewhere it changes nothing.
        settings: all others.
    """

    nranks: int
    replicas: Sequence[int]
    stages: Sequence[int]
    buffer_mb: Sequence[float]
    prefetch_depth: Sequence[int]
    settings: dict[str, Any]

    def choices(self) -> list[Choice]:
        """Raises ConfigError for what cannot be."""
        odd = [number for number in self.replicas if self.nranks % number]
        if odd:
            raise ConfigError(f"{self.nranks} ranks are not {odd[0]} replicas of whole ranks; choose a divisor")
        found = []
        for replicas, stage, buffer_mb in itertools.product(self.replicas, self.stages, self.buffer_mb):
            ranks = Ranks(self.nranks // replicas, replicas)
            for depth in self.prefetch_depth if stage == 3 else (None,):
                config = ShardingConfig(
                    stage=stage, comm_buffer_size_MB=buffer_mb, prefetch_depth=depth, **self.settings
                )
                found.append(Choice(ranks, config))
        return found


def rank(
    profile: Profile,
    hardware: Hardware,
    choices: Iterable[Choice],
    training: Training,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """Predicts all: first what fits, the fastest first, then what does not, the smallest first.

    Args:
        profile: see ``predict``.
        hardware: see ``predict``; ``memory_bytes`` of it is the limit, None for none.
        choices: to be tried.
        training: see ``predict``.
        say: called with what is being tried.
    """
    outcomes = []
    for choice in choices:
        say(describe(choice))
        prediction = predict(profile, hardware, choice.ranks, choice.config, training)
        fits = hardware.memory_bytes is None or prediction.memory_bytes <= hardware.memory_bytes
        outcomes.append(Outcome(choice, prediction, fits))
    return sorted(outcomes, key=_place)


def _place(outcome: Outcome) -> tuple[bool, float, float]:
    prediction = outcome.prediction
    # To a microsecond: what differs by less is the same, and the smaller one is the better one.
    step_ms = round(prediction.step_ms, 3)
    if outcome.fits:
        return (False, step_ms, prediction.memory_bytes)
    return (True, prediction.memory_bytes, step_ms)


def describe(choice: Choice) -> str:
    """Such as ``"64 x 2 ranks, stage 3, 25 MB, prefetch 1"``."""
    depth = choice.config.units_ahead if choice.config.stage == 3 else None
    ahead = "" if depth is None else f", prefetch {depth}"
    ranks, config = choice.ranks, choice.config
    return f"{ranks.shard} x {ranks.replicas} ranks, stage {config.stage}, {config.comm_buffer_size_MB:g} MB{ahead}"
