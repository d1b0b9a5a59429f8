"""``ShardingConfig``: every knob of hp_sharding in one frozen, validated place.

With fleet the keys go into the strategy, without it into the constructor; names and meanings are the same::

    strategy.hp_sharding_configs = {"stage": 2, "allgather_overlap": True}

    config = ShardingConfig(stage=2, allgather_overlap=True)

A value that cannot work raises ``ConfigError`` here, at once and on every rank alike, so that no collective has
started. No setting is ever silently ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from .errors import ConfigError

_LOGGER = logging.getLogger("hp_sharding")
_BYTES_PER_MB = 1024 * 1024
_FLAGS = (
    "allgather_overlap", "reduce_overlap", "comm_fusion", "cast_forward_inputs", "main_grad", "broadcast_buffers",
    "timeline",
)  # fmt: skip
AUTO = "auto"
START_MB = 25
SHORT_DTYPES = ("bfloat16", "float16")
"""Those whose sums are formed in float32."""

# Where a user who knows another table of settings is likely to have meant something else than the nearest spelling.
_KEYS_OF_OTHER_TABLES = {
    "comm_overlap": "here it is two flags, 'reduce_overlap' and 'allgather_overlap'",
    **{
        f"{axis}_degree": "degrees belong in strategy.hybrid_configs"
        for axis in ("dp", "mp", "pp", "sep", "cp", "sharding")
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How a model is sharded and how its communication is hidden.

    numpy integers, floats and bools are accepted and kept as Python's own; a bool is never taken for a number.

    Attributes:
        stage: what is sharded: 1 the optimizer state, 2 the gradients too, 3 the parameters too.
        allgather_overlap: gather parameters bucket by bucket under the next forward instead of inside ``step()``.
        reduce_overlap: reduce gradients as buckets fill during backward instead of after it.
        comm_fusion: one gather and one reduce-scatter per bucket; False: one per parameter, each a bucket of its own.
        comm_buffer_size_MB: bucket size in units of 1024 * 1024 bytes, fractions allowed. A larger unit is split into
            buckets of about this size, small units are merged up to it; buckets at both ends of the forward are
            smaller. ``"auto"`` begins with 25 and chooses by measurement in the first steps, see ``docs/tuning.md``.
        replicate_buffer_size_MB: adjacent reduced buckets that share one replicate all-reduce, in the same units. It
            has no effect while there is one replica.
        prefetch_depth: units gathered ahead of use where memory must be kept low, that is with ``allgather_overlap`` in
            stage 3 or with ``reshard_after_step``; None = 1, 0 = none, ``"auto"`` = 1, 2 or 3 by measurement. Otherwise
            it has no effect: every gather is queued at once (a warning says so), or happens at first use.
        tuning_budget_MB: with ``"auto"``: what gradients in flight, and in stage 3 the gathered parameters, may take on
            a rank, in units of 1024 * 1024 bytes by the formula of ``memory_report()``; in stage 1, where gradients
            stay whole, it bounds nothing. None = what the settings that tuning begins with take, and a tenth of the
            rank's model state more.
        reshard_after_step: free the gathered parameters at the end of ``step()``; None = only in stage 3, which does
            always. The gather then happens in the next forward: ahead of use with ``allgather_overlap``, at first use
            without.
        reshard_after_forward: in stage 3, whether a unit's parameters are freed after its forward and gathered again
            for its backward; False keeps them until then. A dict turns it off for some units only: keys are units'
            names, as in ``model.named_sublayers()``, or Layer classes, values bools; what it does not name is freed.
        units: layers that are gathered together: ``"auto"`` = each item of a LayerList/Sequential of parameterised
            layers, or a list of Layer classes.
        param_dtype: dtype the layers compute with, ``"float32"``, ``"bfloat16"`` or ``"float16"`` (Paddle's own dtypes
            are taken too); None, as they are. The parameters change to it, floating-point inputs of each unit's forward
            are cast to it, and float32 shards ("masters") are what the optimizer updates. Layers that
            ``paddle.amp.decorate`` leaves in float32, BatchNorm and those with ``_cast_to_low_precision`` False, stay.
        cast_forward_inputs: False leaves the inputs of units as they are; without ``param_dtype`` it has no effect.
        gather_dtype: dtype that travels in the gather; None, that of the parameters. A 16-bit one under float32
            parameters halves the bytes: layers compute in float32 with values that were rounded to 16 bits, the
            optimizer updates float32 masters that were not.
        reduce_dtype: dtype that travels in the reduction; None, that in which the gradient is accumulated. Sums of what
            travels are formed in float32. Implies float32 masters.
        main_grad: accumulate gradients in float32 whatever the parameters are; stage 1 then shows those of 16-bit
            parameters as ``param.main_grad``. Implies float32 masters.
        check_nan_inf: ``"off"``; or count non-finite gradients in each ``step()`` and name bucket and layer: ``"warn"``
            in the log, ``"raise"`` as a StateError on every rank before a parameter has changed.
        broadcast_buffers: give the first rank's persistable buffers and running statistics, such as BatchNorm's, to all
            in ``step()``; those above 256 KB only where a write has left a sign (not one of ``set_value``). False
            leaves each rank its own.
        gradient_scale: ``"mean"`` over all data ranks, ``"sum"``, or a positive divisor of the sum. Each sum is divided
            once, before clipping and the update.
        timeout_s: seconds that a collective waits for a late rank, and that its transfer may take; beyond them it fails
            with a report, never a silent hang.
        timeline: record spans of communication and waiting; read them from ``optimizer.timeline``.

    Raises:
        ConfigError: a value has the wrong type, is out of range, or contradicts another.
    """

    stage: int = 2
    allgather_overlap: bool = False
    reduce_overlap: bool = False
    comm_fusion: bool = True
    comm_buffer_size_MB: float | Literal["auto"] = 25
    replicate_buffer_size_MB: float = 25
    prefetch_depth: int | Literal["auto"] | None = None
    tuning_budget_MB: float | None = None
    reshard_after_step: bool | None = None
    reshard_after_forward: bool | Mapping[str | type, bool] = True
    units: Literal["auto"] | tuple[type, ...] = "auto"
    param_dtype: Any = None
    cast_forward_inputs: bool = True
    gather_dtype: Any = None
    reduce_dtype: Any = None
    main_grad: bool = False
    check_nan_inf: Literal["off", "warn", "raise"] = "off"
    broadcast_buffers: bool = True
    gradient_scale: Literal["mean", "sum"] | float = "mean"
    timeout_s: float = 300.0
    timeline: bool = False

    def __post_init__(self) -> None:
        for key in _FLAGS:
            self._keep(key, _as_bool(key, getattr(self, key)))
        if self.reshard_after_step is not None:
            self._keep("reshard_after_step", _as_bool("reshard_after_step", self.reshard_after_step, "or None"))
        self._keep("reshard_after_forward", _as_choice_by_unit("reshard_after_forward", self.reshard_after_forward))
        self._keep("comm_buffer_size_MB", _as_size_or_auto("comm_buffer_size_MB", self.comm_buffer_size_MB))
        self._keep("replicate_buffer_size_MB", _as_size_mb("replicate_buffer_size_MB", self.replicate_buffer_size_MB))
        if self.tuning_budget_MB is not None:
            self._keep("tuning_budget_MB", _as_size_mb("tuning_budget_MB", self.tuning_budget_MB))
        self._keep("stage", _as_stage(self.stage))
        self._keep("prefetch_depth", _as_prefetch_depth(self.prefetch_depth))
        self._keep("units", _as_units(self.units))
        self._keep("gradient_scale", _as_gradient_scale(self.gradient_scale))
        self._keep("timeout_s", float(_as_positive("timeout_s", self.timeout_s, "a positive number of seconds")))
        for key in ("param_dtype", "gather_dtype", "reduce_dtype"):
            self._keep(key, _as_dtype(key, getattr(self, key)))
        self._keep("check_nan_inf", _as_choice("check_nan_inf", self.check_nan_inf, ("off", "warn", "raise")))
        self._check_reshards()
        self._check_gather_dtype()
        self._check_auto()
        if self.prefetch_depth is not None and not self.reshards_after_step:
            _warn_prefetch_depth_unused()

    def _keep(self, key: str, value: Any) -> None:
        object.__setattr__(self, key, value)

    def _check_reshards(self) -> None:
        if self.stage == 3 and self.reshard_after_step is False:
            raise ConfigError(
                "reshard_after_step=False contradicts stage=3, where parameters exist only while they are used; use "
                "stage=2 to keep them, or reshard_after_forward=False to keep them from forward to backward"
            )
        if self.stage != 3 and self.reshard_after_forward is not True:
            raise ConfigError(
                f"reshard_after_forward={self.reshard_after_forward!r}: parameters are freed after a forward in stage "
                f"3 only, and stage={self.stage}; leave it out"
            )

    def _check_gather_dtype(self) -> None:
        if self.param_dtype in SHORT_DTYPES and self.gather_dtype not in (None, self.param_dtype):
            raise ConfigError(
                f"gather_dtype={self.gather_dtype!r} with param_dtype={self.param_dtype!r}: layers that compute with "
                "16 bits need no more and no other bits; leave gather_dtype out"
            )

    def _check_auto(self) -> None:
        if self.comm_buffer_size_MB == AUTO and not self.comm_fusion:
            raise ConfigError(
                "comm_buffer_size_MB='auto' contradicts comm_fusion=False, where each parameter is a bucket of its own "
                "and there is no size to choose; leave one of the two out"
            )
        if self.tuning_budget_MB is not None and not self.tunes:
            raise ConfigError(
                f"tuning_budget_MB={self.tuning_budget_MB!r}: nothing is tuned, so there is nothing to bound; set "
                "comm_buffer_size_MB='auto' or prefetch_depth='auto', or leave it out"
            )

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> ShardingConfig:
        """The configuration that ``mapping`` describes; keys that it lacks have their defaults.

        Raises:
            ConfigError: not a mapping, an unknown key (the message names the nearest known one), or a bad value.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f"hp_sharding_configs: expected a dict such as {{'stage': 2}}, got {type(mapping).__name__}"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        for key in mapping:
            if key not in known:
                raise ConfigError(_unknown_key_message(key, known))
        return cls(**mapping)

    @property
    def comm_buffer_bytes(self) -> int:
        """Bucket size in bytes, at least 1; with ``"auto"`` that to begin with."""
        size_mb = START_MB if isinstance(self.comm_buffer_size_MB, str) else self.comm_buffer_size_MB
        return max(1, int(size_mb * _BYTES_PER_MB))

    @property
    def tunes(self) -> bool:
        """True if something is to be chosen by measurement."""
        return AUTO in (self.comm_buffer_size_MB, self.prefetch_depth)

    def begun(self) -> ShardingConfig:
        """The settings in force before anything has been measured: numbers in the place of ``"auto"``."""
        size_mb = START_MB if self.comm_buffer_size_MB == AUTO else self.comm_buffer_size_MB
        depth = None if self.prefetch_depth == AUTO else self.prefetch_depth
        if not self.tunes:
            return self
        return dataclasses.replace(self, comm_buffer_size_MB=size_mb, prefetch_depth=depth, tuning_budget_MB=None)

    @property
    def replicate_buffer_bytes(self) -> int:
        """Size of one fused replicate all-reduce in bytes, at least 1."""
        return max(1, int(self.replicate_buffer_size_MB * _BYTES_PER_MB))

    @property
    def is_mixed(self) -> bool:
        """True if it asks for other dtypes than the model has, which is more than plain training in one process too."""
        return self.main_grad or any((self.param_dtype, self.gather_dtype, self.reduce_dtype))

    @property
    def reshards_after_step(self) -> bool:
        """True if ``step()`` ends with the gathered parameters freed."""
        return self.stage == 3 if self.reshard_after_step is None else self.reshard_after_step

    @property
    def units_ahead(self) -> int | None:
        """Units whose gather may be under way ahead of use; None where all are queued at once."""
        if not self.allgather_overlap:
            return 0
        if not self.reshards_after_step:
            return None
        return self.prefetch_depth if isinstance(self.prefetch_depth, int) else 1

    def gradient_divisor(self, data_nranks: int) -> float:
        """What the sum of the gradients over ``data_nranks`` ranks (shard times replicate) is divided by, once."""
        if self.gradient_scale == "mean":
            return float(data_nranks)
        return 1.0 if self.gradient_scale == "sum" else float(self.gradient_scale)


def _unknown_key_message(key: object, known: set[str]) -> str:
    message = f"hp_sharding_configs: unknown key {key!r}"
    if isinstance(key, str):
        if key in _KEYS_OF_OTHER_TABLES:
            return f"{message}; {_KEYS_OF_OTHER_TABLES[key]}"
        # Settings are often typed in another case (comm_buffer_size_mb), which difflib counts as another letter.
        by_lower = {name.lower(): name for name in sorted(known)}
        nearest = difflib.get_close_matches(key.lower(), list(by_lower), n=1, cutoff=0.5)
        if nearest:
            return f"{message}; did you mean {by_lower[nearest[0]]!r}?"
    return f"{message}; known keys: {', '.join(sorted(known))}"


def _bad_value(key: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{key}={value!r} ({type(value).__name__}): expected {expected}")


def _as_bool(key: str, value: object, alternative: str = "") -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise _bad_value(key, value, f"True or False {alternative}".strip())
    return bool(value)


def _as_number(key: str, value: object, expected: str) -> int | float:
    """``value`` as a Python number; np.bool_ is no numbers.Real, and bool, which is one, must not pass for 0 or 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _bad_value(key, value, expected)
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _as_positive(key: str, value: object, expected: str) -> int | float:
    number = _as_number(key, value, expected)
    if not (math.isfinite(number) and number > 0):
        raise _bad_value(key, value, expected)
    return number


def _as_size_mb(key: str, value: object) -> int | float:
    return _as_positive(key, value, "a positive size in MB")


def _as_size_or_auto(key: str, value: object) -> int | float | Literal["auto"]:
    expected = "a positive size in MB or 'auto'"
    if isinstance(value, str) and value == AUTO:
        return "auto"
    return _as_positive(key, value, expected)


def _as_stage(value: object) -> int:
    expected = "1, 2 or 3"
    if _as_number("stage", value, expected) not in (1, 2, 3) or not isinstance(value, numbers.Integral):
        raise _bad_value("stage", value, expected)
    return int(value)


def _as_choice_by_unit(key: str, value: object) -> bool | dict[str | type, bool]:
    expected = "True, False, or a dict of units' names or Layer classes, such as {'head': False}"
    if not isinstance(value, Mapping):
        if not isinstance(value, (bool, np.bool_)):
            raise _bad_value(key, value, expected)
        return bool(value)
    for unit, choice in value.items():
        if not isinstance(unit, (str, type)):
            raise _bad_value(key, value, f"{expected}; {unit!r} is neither")
        if not isinstance(choice, (bool, np.bool_)):
            raise _bad_value(key, value, f"{expected}; {choice!r} is neither True nor False")
    return {unit: bool(choice) for unit, choice in value.items()}


def _as_dtype(key: str, value: object) -> str | None:
    if value is None:
        return None
    # Paddle's dtypes print as paddle.bfloat16; this module stays free of Paddle.
    name = value if isinstance(value, str) else str(value)
    name = name.removeprefix("paddle.")
    if name not in ("float32", *SHORT_DTYPES):
        raise _bad_value(key, value, "'float32', 'bfloat16', 'float16' or None")
    return name


def _as_choice(key: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise _bad_value(key, value, " or ".join(map(repr, choices)))
    return value


def _as_prefetch_depth(value: object) -> int | Literal["auto"] | None:
    if value is None:
        return None
    if isinstance(value, str) and value == AUTO:
        return "auto"
    expected = "a number of units, 0 or more, 'auto' or None"
    if not isinstance(value, numbers.Integral) or _as_number("prefetch_depth", value, expected) < 0:
        raise _bad_value("prefetch_depth", value, expected)
    return int(value)


def _as_units(value: object) -> Literal["auto"] | tuple[type, ...]:
    expected = "'auto' or a list of Layer classes"
    if isinstance(value, str):
        if value != "auto":
            raise _bad_value("units", value, expected)
        return "auto"
    if not isinstance(value, (list, tuple)) or not value:
        raise _bad_value("units", value, expected)
    for item in value:
        # A duck-typed check, so that this module stays free of Paddle: only Layer classes have this method.
        if not (isinstance(item, type) and hasattr(item, "register_forward_pre_hook")):
            raise _bad_value("units", value, f"{expected}; {item!r} is not a Layer class")
    return tuple(value)


def _as_gradient_scale(value: object) -> Literal["mean", "sum"] | float:
    if isinstance(value, str) and value in ("mean", "sum"):
        return "mean" if value == "mean" else "sum"
    return float(_as_positive("gradient_scale", value, "'mean', 'sum' or a positive divisor"))


@functools.cache
def _warn_prefetch_depth_unused() -> None:
    _LOGGER.warning(
        "prefetch_depth has no effect without reshard_after_step: stages 1 and 2 queue every gather at once"
    )
