"""``DistributedStrategy`` with the hp_sharding flag; what a strategy means: ``sharding_config``, ``resolve_degrees``.

Everything here is arithmetic on settings. Nothing starts a collective, so every ``ConfigError`` comes before any.
"""

from __future__ import annotations

import copy
import difflib
import numbers
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from paddle.distributed.fleet import DistributedStrategy as PaddleStrategy

from ..config import ShardingConfig
from ..errors import ConfigError

_FLAG = "hp_sharding_configs"
_PADDLE_TABLE = 'hybrid_configs["sharding_configs"]'

# Switches of a strategy that Paddle's own face acts on in dygraph, or that ask for another kind of sharding.
_REFUSED_SWITCHES = {
    "amp": "use paddle.amp in the script itself",
    "heter_ccl_mode": "leave it off",
    "sharding": "it is for static graphs: use strategy.hp_sharding_configs and hybrid_configs['sharding_degree']",
}

_REFUSED_AXES = {
    "pp": "a pipeline runs forwards and backwards of several micro-batches in a schedule of its own, which moves the "
    "gathers and reductions of sharding out of order",
    "sep": "gradients would have to be summed up over the ranks that share a sequence too",
    "cp": "gradients would have to be summed up over the ranks that share a context too",
    "ep": "experts that live on some ranks only have groups of their own",
    "moe_sharding": "experts that live on some ranks only have groups of their own",
    "cp_sharding": "gradients would have to be summed up over the ranks that share a context too",
}


class DistributedStrategy(PaddleStrategy):
    """Paddle's ``DistributedStrategy``, with one more setting and one refusal less.

    * ``hp_sharding_configs``: a dict of the keys of ``hp_sharding.ShardingConfig``.
    * ``hybrid_configs`` accepts ``sharding_configs`` as a dict, which Paddle refuses; setting its fields one by one, as
      Paddle wants it, works too.

    Example::

        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": 1, "sharding_degree": 2}
        strategy.hp_sharding_configs = {"stage": 2, "allgather_overlap": True, "reduce_overlap": True}

    ``save_to_prototxt`` writes Paddle's settings only; ``hp_sharding_configs`` is not among them.
    """

    _hp_sharding_configs: Mapping[str, Any] = MappingProxyType({})

    @property
    def hp_sharding_configs(self) -> Mapping[str, Any]:
        """The keys that were set, read-only; assign a whole new dict to change them.

        Unlike Paddle's own tables an assignment replaces the earlier one, so that what is read is what holds.

        Raises:
            ConfigError: on assignment, see ``ShardingConfig.from_dict``. The earlier value then stays.
        """
        return MappingProxyType(dict(self._hp_sharding_configs))

    @hp_sharding_configs.setter
    def hp_sharding_configs(self, configs: Mapping[str, Any]) -> None:
        ShardingConfig.from_dict(configs)
        self._hp_sharding_configs = dict(configs)

    @property
    def hybrid_configs(self) -> dict[str, Any]:
        """Degrees and more, as in Paddle; each key is merged into what was set before.

        Raises:
            ConfigError: on assignment, for an unknown key or a value of the wrong type. Nothing has then changed.
        """
        table: dict[str, Any] = PaddleStrategy.hybrid_configs.fget(self)
        return table

    @hybrid_configs.setter
    def hybrid_configs(self, configs: Mapping[str, Any]) -> None:
        if not isinstance(configs, Mapping):
            raise ConfigError(f"hybrid_configs: expected a dict, got {type(configs).__name__}")
        known = self.strategy.hybrid_configs.DESCRIPTOR.fields_by_name
        _check_keys("hybrid_configs", configs, [*known, "order"])
        for key, value in configs.items():
            if key.endswith("_degree") and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
                raise ConfigError(f"hybrid_configs: {key}={value!r} ({type(value).__name__}): expected an int")
        # Paddle's setter stops half-way at a bad key. It is tried on a copy first, not undone here, because undoing
        # would cut off those who hold a sub-message, as in sharding = strategy.hybrid_configs["sharding_configs"].
        try:
            copy.deepcopy(self)._assign_hybrid_configs(configs)
        except (TypeError, ValueError, AttributeError, AssertionError) as error:
            raise error if isinstance(error, ConfigError) else ConfigError(f"hybrid_configs: {error}") from error
        self._assign_hybrid_configs(configs)

    def _assign_hybrid_configs(self, configs: Mapping[str, Any]) -> None:
        # A copy, since Paddle's setter takes keys out of the dicts that it is given.
        rest = {key: copy.deepcopy(_as_python(value)) for key, value in configs.items() if key != "sharding_configs"}
        PaddleStrategy.hybrid_configs.fset(self, rest)
        if "sharding_configs" in configs:
            _assign_sharding_configs(self.strategy.hybrid_configs.sharding_configs, configs["sharding_configs"])


class Degrees(NamedTuple):
    """How the ranks are divided: ``dp`` replicas of ``sharding`` shards each, every layer split over ``mp`` ranks."""

    dp: int
    sharding: int
    mp: int = 1

    def __str__(self) -> str:
        axes = self._asdict() if self.mp > 1 else {"dp": self.dp, "sharding": self.sharding}
        return ", ".join(f"{axis}_degree={degree}" for axis, degree in axes.items())


class _Implied(NamedTuple):
    """What a field of Paddle's table asks of a key of ours. ``agreeing``: values of ours that satisfy it as well."""

    key: str
    value: Any
    field: str
    agreeing: tuple[Any, ...] = ()


def sharding_config(
    strategy: PaddleStrategy | None, defaults: Mapping[str, Any] = MappingProxyType({})
) -> ShardingConfig:
    """The configuration that ``strategy`` asks for: its ``hp_sharding_configs`` and Paddle's own fields together.

    Of ``hybrid_configs["sharding_configs"]`` only fields that were set count, never Paddle's defaults:

    * ``comm_overlap`` is ``reduce_overlap``; ``comm_buffer_size_MB`` is itself;
    * ``release_gradients`` or ``free_grads_in_comm`` True: stage 2. False, with neither True: stage 1;
    * ``split_param`` must be True and ``tensor_fusion`` True needs ``comm_fusion``: parameters are always split, and
      travel in buckets;
    * ``accumulate_steps`` is a hint and ``use_reduce_avg`` changes nothing: any value is right.

    Args:
        strategy: ours or Paddle's; None for all defaults.
        defaults: keys of ``hp_sharding_configs`` that hold where the strategy's own do not set them.

    Raises:
        ConfigError: two settings contradict each other (both are named), or one cannot be honoured.
    """
    if strategy is None:
        return ShardingConfig.from_dict(defaults)
    if not isinstance(strategy, PaddleStrategy):
        raise ConfigError(f"strategy: expected a fleet.DistributedStrategy, got {type(strategy).__name__}")
    for switch, instead in _REFUSED_SWITCHES.items():
        if getattr(strategy, switch):
            raise ConfigError(f"strategy.{switch}=True is not supported; {instead}")
    _check_tensor_parallel(strategy.strategy.hybrid_configs.mp_configs)
    settings = {**defaults, **getattr(strategy, _FLAG, {})}
    # Read the message itself: a dict from the hybrid_configs property cannot tell a default from a setting.
    for implied in _implied_settings(strategy.strategy.hybrid_configs.sharding_configs):
        if settings.setdefault(implied.key, implied.value) not in (implied.value, *implied.agreeing):
            raise ConfigError(
                f"{_FLAG}[{implied.key!r}]={settings[implied.key]!r} contradicts {_PADDLE_TABLE}.{implied.field}, "
                f"which asks for {implied.value!r}: remove one of the two"
            )
    return ShardingConfig.from_dict(settings)


def resolve_degrees(strategy: PaddleStrategy | None, world: int) -> Degrees:
    """The degrees for ``world`` ranks, with what the user left open filled in.

    ``mp_degree`` ranks together hold a layer and see the same data; what follows is about the groups of such ranks.
    Neither ``dp_degree`` nor ``sharding_degree`` set: one shard group over all. ``dp_degree`` left open or -1 with
    ``sharding_degree`` set: as many replicas as the ranks allow.

    Raises:
        ConfigError: the degrees do not multiply to ``world``, or ask for an axis that cannot be combined with sharding.
    """
    given = _given_degrees(strategy)
    for axis, reason in _REFUSED_AXES.items():
        degree = given.pop(axis, 1)
        if degree not in (0, 1):  # Paddle reads 0 as 1 for these
            raise ConfigError(
                f"{axis}_degree={degree} is not supported beside sharding: {reason}. {_advice(world)}, with mp_degree "
                f"if layers must be split, or train this model with paddle.distributed.fleet itself"
            )
    mp = given.pop("mp", 1) or 1
    if mp < 0:
        raise ConfigError(f"mp_degree={mp}: expected 1 or more; the job has {_count(world)}")
    if world % mp:
        raise ConfigError(f"mp_degree={mp} does not divide {_count(world)}; {_advice(world)}")
    dp, sharding = _data_degrees(given, world // mp, Degrees(1, world // mp, mp))
    return Degrees(dp, sharding, mp)


def _data_degrees(given: dict[str, int], n_data: int, whole: Degrees) -> tuple[int, int]:
    """``dp_degree`` and ``sharding_degree`` over ``n_data`` ranks that see different data. Raises ``ConfigError``."""
    world = n_data * whole.mp
    if not given:
        return 1, n_data
    sharding, dp = given.get("sharding", 1), given.get("dp", -1)
    if sharding < 1:
        raise ConfigError(f"sharding_degree={sharding}: expected 1 or more; the job has {_count(world)}")
    split = f" in groups of mp_degree={whole.mp}" if whole.mp > 1 else ""
    if n_data % sharding:
        raise ConfigError(f"sharding_degree={sharding} does not divide {_count(world)}{split}; {_advice(world, whole)}")
    dp = n_data // sharding if dp < 0 else max(dp, 1)
    if dp * sharding != n_data:
        times = f" times mp_degree={whole.mp}" if whole.mp > 1 else ""
        raise ConfigError(
            f"dp_degree={dp} times sharding_degree={sharding}{times} is {dp * sharding * whole.mp}, but the job has "
            f"{_count(world)}; {_advice(world, whole)}"
        )
    return dp, sharding


def _check_tensor_parallel(message: Any) -> None:
    """Refuses what was set, and not Paddle's defaults: ranks that compute alike need not tell each other anything."""
    for switch in ("sync_param", "sync_grad", "sync_moment"):
        if message.HasField(switch) and getattr(message, switch):
            raise ConfigError(
                f'hybrid_configs["mp_configs"].{switch}=True is not supported: what ranks that split layers hold in '
                "common is not sent again in a step. Leave it out"
            )


def needs_equal_inputs(strategy: PaddleStrategy | None) -> bool:
    """Whether ranks that split layers between them get their inputs from the first of them; by default they do."""
    return strategy is None or bool(strategy.strategy.hybrid_configs.mp_configs.need_broadcast_data)


def with_degrees(strategy: PaddleStrategy | None, degrees: Degrees) -> PaddleStrategy:
    """A copy of ``strategy`` for Paddle, which fills in open degrees by another rule than ``resolve_degrees``."""
    resolved = DistributedStrategy() if strategy is None else copy.deepcopy(strategy)
    resolved.strategy.hybrid_configs.dp_degree = degrees.dp
    resolved.strategy.hybrid_configs.sharding_degree = degrees.sharding
    resolved.strategy.hybrid_configs.mp_degree = degrees.mp
    return resolved


def _given_degrees(strategy: PaddleStrategy | None) -> dict[str, int]:
    if strategy is None:
        return {}
    message = strategy.strategy.hybrid_configs
    known = message.DESCRIPTOR.fields_by_name
    axes = [axis for axis in ("dp", "sharding", "mp", *_REFUSED_AXES) if f"{axis}_degree" in known]
    return {axis: getattr(message, f"{axis}_degree") for axis in axes if message.HasField(f"{axis}_degree")}


def _count(world: int) -> str:
    return f"{world} rank{'s' if world > 1 else ''}"


def _advice(world: int, degrees: Degrees | None = None) -> str:
    if world > 1:
        return f"use {degrees or Degrees(dp=1, sharding=world)}".replace(", sharding", " and sharding", 1)
    return (
        "start it with python -m paddle.distributed.launch --nproc_per_node N, or leave the degrees out, which shards "
        "over as many ranks as there are"
    )


def _implied_settings(message: Any) -> Iterable[_Implied]:
    """What the fields that are set in Paddle's ``sharding_configs`` ask for. Raises ``ConfigError`` as its caller."""
    given = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields if _is_set(message, field)}
    if given.pop("split_param", True) is False:
        raise _cannot_honour("split_param", False, "parameters are always split over the ranks; leave it out or True")
    if given.pop("accumulate_steps", 1) < 1:
        raise ConfigError(f"{_PADDLE_TABLE}.accumulate_steps={message.accumulate_steps}: expected 1 or more")
    given.pop("use_reduce_avg", None)
    if "comm_overlap" in given:
        yield _Implied("reduce_overlap", given.pop("comm_overlap"), "comm_overlap")
    if "comm_buffer_size_MB" in given:
        yield _Implied("comm_buffer_size_MB", given.pop("comm_buffer_size_MB"), "comm_buffer_size_MB")
    if given.pop("tensor_fusion", False):
        yield _Implied("comm_fusion", True, "tensor_fusion")
    freeing = {name: given.pop(name) for name in ("release_gradients", "free_grads_in_comm") if name in given}
    if freeing:
        frees = any(freeing.values())
        field = next(f"{name}={value}" for name, value in freeing.items() if value == frees)
        yield _Implied("stage", 2, field, agreeing=(3,)) if frees else _Implied("stage", 1, field)
    for name, value in given.items():
        if value != message.DESCRIPTOR.fields_by_name[name].default_value:
            raise _cannot_honour(name, value, "leave it out")


def _is_set(message: Any, field: Any) -> bool:
    return bool(message.HasField(field.name)) if field.has_presence else bool(getattr(message, field.name))


def _cannot_honour(field: str, value: object, instead: str) -> ConfigError:
    return ConfigError(f"{_PADDLE_TABLE}.{field}={value!r} cannot be honoured; {instead}")


def _assign_sharding_configs(message: Any, configs: object) -> None:
    if not isinstance(configs, Mapping):
        raise ConfigError(f"{_PADDLE_TABLE}: expected a dict, got {type(configs).__name__}")
    _check_keys(_PADDLE_TABLE, configs, message.DESCRIPTOR.fields_by_name)
    for key, value in configs.items():
        _assign_field(message, key, value)


def _assign_field(message: Any, key: str, value: object) -> None:
    try:
        setattr(message, key, _as_python(value))
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{_PADDLE_TABLE}[{key!r}]={value!r} ({type(value).__name__}): {error}") from error


def _check_keys(table: str, configs: Mapping[str, Any], known: Iterable[str]) -> None:
    names = list(known)
    for key in configs:
        if key not in names:
            nearest = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(names)}"
            raise ConfigError(f"{table}: unknown key {key!r}; {hint}")


def _as_python(value: Any) -> Any:
    """A numpy scalar as Python's own: protobuf takes some of them and refuses others."""
    return value.item() if isinstance(value, np.generic) else value
