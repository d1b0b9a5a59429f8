"""Plays steps of a scale model through the real schedule, on a simulated clock, and reads off what they took."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import paddle

from ..assembly import CONTROL
from ..config import AUTO, ShardingConfig
from ..errors import ConfigError
from ..layout import model_state_bytes
from ..sharding import LANES, REPLICA_LANES, build
from ..trace.figures import Groups, step_figures
from ..trace.spans import Step, Trace
from .books import Books
from .clock import Clock
from .hardware import Hardware
from .lanes import Carried, SimulatedLane
from .profile import Profile
from .scaled import LedgerPool, ScaledUnit, Scaling, Use, build_model

LOG = logging.getLogger("hp_sharding")
MOMENT_BYTES = 8
"""Of an Adam's state for each element."""
BOUND_SHARE = 0.02
"""Of a step, which waits may take before communication counts as what bounds it."""
_LEAST_STEPS = 3
_MOST_STEPS = 6
_ALIKE = 1e-6
"""The first steps learn the orders; after that one is as the one before."""


class Ranks(NamedTuple):
    """How many ranks hold a replica together, and how many replicas there are."""

    shard: int
    replicas: int = 1

    @property
    def total(self) -> int:
        """All of them."""
        return self.shard * self.replicas


class Prediction(NamedTuple):
    """What a step will take, the first ones apart.

    Attributes:
        step_ms: from the end of one step to that of the next.
        compute_ms: what is left of it without waits; longer than compute alone where transfers disturb it.
        exposed_ms: how long compute waits for communication.
        overlap_percent: the part of the communication that is hidden.
        memory_bytes: the most that a rank holds: model state and activations.
        state_bytes: model state alone, by the formula of ``layout.model_state_bytes``.
        bound: what the time beyond compute alone is owed to: the lane that is waited for most, or ``"compute"`` where
            waits are below ``BOUND_SHARE`` of the step.
        figures: all figures of the step, as of ``trace.figures.step_figures``.
        trace: of the step.
    """

    step_ms: float
    compute_ms: float
    exposed_ms: float
    overlap_percent: float
    memory_bytes: int
    state_bytes: int
    bound: str
    figures: dict[str, Any]
    trace: Trace


class Training(NamedTuple):
    """What else is known of the training.

    Attributes:
        moment_bytes: of the optimizer's state for each element.
        clips: whether the gradients are clipped by their global norm, so that the first update waits for all of them.
        micro_batches: forwards and backwards of a step; all but the last one send nothing.
    """

    moment_bytes: int = MOMENT_BYTES
    clips: bool = False
    micro_batches: int = 1


def predict(
    profile: Profile, hardware: Hardware, ranks: Ranks, config: ShardingConfig, training: Training | None = None
) -> Prediction:
    """Memory and time of a step.

    It leaves the random state, the device and the names of parameters to come as they are.

    Args:
        profile: the model; every unit's time is known, see ``Profile.timed``.
        hardware: links, and what they cost the compute.
        ranks: of the training.
        config: the settings; ``units`` are the profile's, ``timeline`` counts for nothing.
        training: the rest.

    Raises:
        ConfigError: a unit's time is not known, less than two ranks, or a setting that is chosen by measurement.
    """
    untimed = [unit.name for unit in profile.units if unit.forward_s is None or unit.backward_s is None]
    if untimed:
        raise ConfigError(f"unit '{untimed[0]}' has no time; Profile.timed() gives it one")
    for name in ("comm_buffer_size_MB", "prefetch_depth"):
        if getattr(config, name) == AUTO:
            raise ConfigError(f"{name}='auto' is chosen while a model trains; a plan needs a number, so try several")
    if ranks.total < 2 or min(ranks) < 1:
        raise ConfigError(f"a plan is for two ranks or more, not {ranks.shard} x {ranks.replicas}")
    links = hardware.of_groups(ranks.shard, ranks.total)
    with _apart():
        return _Replay(profile, links, ranks, config, training or Training()).play()


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """On CPU, recording gradients, and nothing that comes later notices."""
    device = paddle.get_device()
    paddle.set_device("cpu")
    # What is laid out on small storage is not what a user wants to read.
    LOG.addFilter(_is_warning)
    try:
        with paddle.utils.unique_name.guard(), paddle.enable_grad():
            yield
    finally:
        LOG.removeFilter(_is_warning)
        paddle.set_device(device)


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


class _PacedAdamW(paddle.optimizer.AdamW):
    """Updates take time and change nothing."""

    pace: Callable[[Sequence[str]], None]

    def _apply_optimize(self, loss: Any, startup_program: Any, params_grads: Any, param_group_idx: int = 0) -> None:
        pairs = params_grads["params"] if isinstance(params_grads, dict) else params_grads
        self.pace([param.name for param, _ in pairs])


class _Replay:
    """One training: a ``scaled.Player``, and what its costs are in time and memory."""

    def __init__(
        self, profile: Profile, hardware: Hardware, ranks: Ranks, config: ShardingConfig, training: Training
    ) -> None:
        self._profile = profile
        self._hardware = hardware
        self._ranks = ranks
        self._training = training
        self._config = dataclasses.replace(config, units=(ScaledUnit,), timeline=False, check_nan_inf="off")
        self._clock = Clock(hardware)
        self._activation_bytes = 0.0
        self._peak_bytes = 0.0
        self._books: Books | None = None
        self._model = build_model(profile, self)
        self._scaling = Scaling(self._model.true_params, ranks.shard)
        self._pool = LedgerPool(self._scaling, self._look)
        clip = paddle.nn.ClipGradByGlobalNorm(1.0) if training.clips else None
        inner = _PacedAdamW(parameters=self._model.parameters(), grad_clip=clip)
        inner.pace = self._update
        self._optimizer = build(
            self._model, inner, self._config, lanes=self._lanes(), pool=self._pool, lay_out=self._scaling.lay_out
        )
        self._books = Books(
            profile,
            self._scaling,
            self._optimizer.buffers,
            self._optimizer._arena,
            keeps_full=not self._config.reshards_after_step,
            moment_bytes=training.moment_bytes,
        )

    def forward(self, use: Use, *, keeps: bool) -> None:
        """Part of ``scaled.Player``; what is before all that trains keeps nothing for a backward that never comes."""
        self._activation_bytes += use.activation_bytes if keeps else 0.0
        self._look(use.transient_bytes)
        self._clock.compute(use.forward_s, "forward", use.unit)

    def backward(self, use: Use) -> None:
        """Part of ``scaled.Player``; what comes of it is copied into a bucket then."""
        self._look(use.transient_bytes)
        rate = self._hardware.copy_bytes_s
        copied_s = self._books.gradient_bytes(use.names) / rate if rate and self._books else 0.0
        self._clock.compute(use.backward_s + copied_s, "backward", use.unit)
        self._activation_bytes -= use.activation_bytes

    def play(self) -> Prediction:
        """Steps until one takes as long as the one before, and that one's figures."""
        ends_s: list[float] = []
        while len(ends_s) < _MOST_STEPS:
            self._peak_bytes = 0.0
            self._clock.waited_s.clear()
            self._step()
            ends_s.append(self._clock.now_s)
            if len(ends_s) >= _LEAST_STEPS:
                last_s, before_s = ends_s[-1] - ends_s[-2], ends_s[-2] - ends_s[-3]
                if abs(last_s - before_s) <= _ALIKE * last_s:
                    break
        return self._predict(len(ends_s), ends_s[-2], ends_s[-1])

    def _step(self) -> None:
        self._activation_bytes = 0.0
        x = paddle.zeros([2, 2])
        for number in range(self._training.micro_batches):
            last = number == self._training.micro_batches - 1
            with contextlib.nullcontext() if last else self._optimizer.no_sync():
                self._model(x).sum().backward()
        self._optimizer.step()
        self._optimizer.clear_grad()

    def _update(self, names: Sequence[str]) -> None:
        """The optimizer passes through the slices of these parameters of the scale model."""
        rate = self._hardware.update_bytes_s
        if rate and names and self._books:
            seconds = sum(self._books.update_bytes[name] for name in names) / rate
            self._clock.compute(seconds, "update", self._books.layer_of(names))

    def _look(self, transient_bytes: float = 0.0) -> None:
        """Has the memory of this moment counted."""
        fixed_bytes = self._books.fixed_bytes if self._books else 0
        now_bytes = fixed_bytes + self._pool.allocated_bytes + self._activation_bytes + transient_bytes
        self._peak_bytes = max(self._peak_bytes, now_bytes)

    def _carried(self, op: str, tensor: paddle.Tensor, wire_dtype: str | None) -> Carried:
        assert self._books is not None
        return self._books.carried(op, tensor, wire_dtype)

    def _lanes(self) -> dict[str, Any]:
        shard, replicas = self._ranks
        lanes = {name: SimulatedLane(name, self._clock, shard, self._carried, splits=True) for name in LANES}
        if replicas > 1:
            names = (*REPLICA_LANES, CONTROL[1])
            lanes |= {name: SimulatedLane(name, self._clock, replicas, self._carried, splits=False) for name in names}
        return lanes

    # -- what comes of it ----------------------------------------------------------------------------------------

    def _predict(self, number: int, start_s: float, end_s: float) -> Prediction:
        peak_bytes, formula_bytes = round(self._peak_bytes), self._formula_bytes()
        step = Step(0, number, 0.0, end_s - start_s, {"peak_bytes": peak_bytes, "formula_bytes": formula_bytes})
        spans = [
            span._replace(start_s=span.start_s - start_s, end_s=span.end_s - start_s)
            for span in self._clock.spans
            if span.end_s > start_s
        ]
        found = step_figures(spans, step, Groups(self._ranks.shard, self._ranks.replicas))
        return Prediction(
            step_ms=found["step_ms"],
            compute_ms=found["compute_ms"],
            exposed_ms=found["exposed_ms"],
            overlap_percent=found["overlap_percent"],
            memory_bytes=peak_bytes,
            state_bytes=formula_bytes,
            bound=self._bound(found["step_ms"]),
            figures=found,
            trace=Trace(spans, [step], self._about()),
        )

    def _bound(self, step_ms: float) -> str:
        waited_s = self._clock.waited_s
        if sum(waited_s.values()) * 1e3 < BOUND_SHARE * step_ms:
            return "compute"
        return max(waited_s, key=lambda lane: waited_s[lane])

    def _formula_bytes(self) -> int:
        return model_state_bytes(
            [layout.true for layout in self._scaling.layouts],
            self._config.stage,
            keeps_full=not self._config.reshards_after_step,
            moment_bytes=self._training.moment_bytes,
            units_ahead=self._config.units_ahead or 0,
        ).total

    def _about(self) -> dict[str, Any]:
        assert self._books is not None
        layouts = self._scaling.layouts
        settings = dataclasses.asdict(self._config).items()
        return {
            "simulated": True,
            "model": self._profile.name,
            "nranks": self._ranks.total,
            "replicas": self._ranks.replicas,
            "config": {key: value for key, value in settings if isinstance(value, (int, float, str))},
            "buckets": [
                {"name": layout.name, "layer": self._books.layer([layout]), "nbytes": layout.nbytes}
                for layout in layouts
            ],
        }
