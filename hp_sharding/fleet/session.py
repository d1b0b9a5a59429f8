"""``Session``: what has been initialized and wrapped so far, and in which order things may be called."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import paddle
import paddle.distributed.fleet as paddle_fleet
import paddle.distributed.fleet.base.topology as paddle_topology
from paddle.distributed.fleet import DistributedStrategy as PaddleStrategy
from paddle.distributed.fleet.base.role_maker import RoleMakerBase

from ..broadcast import check_state_exists
from ..comm import Communicator, collision_free_groups
from ..config import ShardingConfig
from ..errors import ConfigError
from ..optimizer import ShardedOptimizer
from ..plain import PlainOptimizer
from ..scaling import adopt_scaler
from ..sharding import Grid, open_lanes, shard_over
from . import main_grad
from .equal_inputs import share_inputs
from .paddle_view import show_as_paddles
from .strategy import Degrees, needs_equal_inputs, resolve_degrees, sharding_config, with_degrees

_LOGGER = logging.getLogger("hp_sharding")
paddle_init = paddle_fleet.init
"""Paddle's own, whatever stands in its place later."""


class _Settings(NamedTuple):
    """What the last ``init`` settled."""

    config: ShardingConfig
    degrees: Degrees
    world: int
    strategy: PaddleStrategy | None


class Session:
    """The state behind the functions of ``hp_sharding.fleet``; a process has one, a test may make its own.

    Models and optimizers are held weakly: wrapping keeps nothing alive.

    Attributes:
        defaults: keys of ``hp_sharding_configs`` for strategies that do not set them.
    """

    def __init__(self) -> None:
        self.defaults: dict[str, Any] = {}
        self._settings: _Settings | None = None
        self._models: list[weakref.ref[paddle.nn.Layer]] = []
        self._lanes: weakref.WeakKeyDictionary[paddle.nn.Layer, dict[str, Communicator]] = weakref.WeakKeyDictionary()
        self._optimizers: list[weakref.ref[Any]] = []

    def init(
        self,
        role_maker: Any = None,
        is_collective: bool = True,
        strategy: PaddleStrategy | None = None,
        log_level: int | str = "INFO",
    ) -> paddle_fleet.Fleet:
        """See ``hp_sharding.fleet.init``."""
        _check_collective(role_maker, is_collective)
        world = paddle.distributed.get_world_size()
        config = sharding_config(strategy, self.defaults)
        degrees = resolve_degrees(strategy, world)
        _check_backend(world)
        _init_paddle(role_maker, with_degrees(strategy, degrees), degrees, log_level)
        self._settings = _Settings(config, degrees, world, strategy)
        if paddle.distributed.get_rank() == 0:
            _LOGGER.info("%s", _summary(self._settings))
        return paddle_fleet.fleet

    def distributed_model(self, model: paddle.nn.Layer) -> paddle.nn.Layer:
        """See ``hp_sharding.fleet.distributed_model``."""
        settings = self._require_init("distributed_model")
        self._check_new_model(model)
        check_state_exists(model)
        lanes = open_lanes(model, _grid(settings), timeout_s=settings.config.timeout_s)
        if "tensor" in lanes and needs_equal_inputs(settings.strategy):
            share_inputs(model, lanes["tensor"])
        self._lanes[model] = lanes
        self._models.append(weakref.ref(model))
        return model

    def distributed_optimizer(
        self, optimizer: Any, strategy: PaddleStrategy | None = None
    ) -> ShardedOptimizer | PlainOptimizer:
        """See ``hp_sharding.fleet.distributed_optimizer``."""
        settings = self._require_init("distributed_optimizer")
        config = settings.config if strategy is None else _other_config(strategy, settings, self.defaults)
        inner = main_grad.inner_optimizer(optimizer)
        self._check_new_optimizer(optimizer, inner)
        model = self._model_of(inner, config)
        config = main_grad.settle(config, model, optimizer, strategy or settings.strategy)
        sharded = shard_over(model, inner, config, lanes=self._lanes[model])
        if strategy is not None:
            # Paddle's scaler and layers read it there, as they do after Paddle's own distributed_optimizer.
            paddle_fleet.fleet._user_defined_strategy = with_degrees(strategy, settings.degrees)
        if isinstance(sharded, ShardedOptimizer):
            groups, chosen = paddle_topology._HYBRID_PARALLEL_GROUP, paddle_fleet.fleet._user_defined_strategy
            show_as_paddles(sharded, optimizer, hcg=groups, strategy=chosen)
        self._optimizers += [weakref.ref(optimizer), weakref.ref(inner), weakref.ref(sharded)]
        return sharded

    def distributed_scaler(self, scaler: Any) -> Any:
        """See ``hp_sharding.fleet.distributed_scaler``."""
        self._require_init("distributed_scaler")
        return adopt_scaler(scaler)

    def owns(self, params: Iterable[paddle.Tensor]) -> bool:
        """Whether some of the parameters belong to a model that has been wrapped."""
        known = {id(param) for model in self._live_models() for param in model.parameters()}
        return any(id(param) in known for param in params)

    def _require_init(self, call: str) -> _Settings:
        if self._settings is None:
            raise ConfigError(f"fleet.{call} was called before fleet.init(is_collective=True, strategy=strategy)")
        return self._settings

    def _live_models(self) -> list[paddle.nn.Layer]:
        models = [ref() for ref in self._models]
        self._models = [ref for ref, model in zip(self._models, models, strict=True) if model is not None]
        return [model for model in models if model is not None]

    def _check_new_model(self, model: paddle.nn.Layer) -> None:
        if not isinstance(model, paddle.nn.Layer):
            raise ConfigError(f"fleet.distributed_model: expected a paddle.nn.Layer, got {type(model).__name__}")
        for layer in model.sublayers(include_self=True):
            if isinstance(layer, paddle.DataParallel):
                raise ConfigError(
                    "fleet.distributed_model: the model is or holds a paddle.DataParallel, which would reduce the "
                    "gradients a second time; hand in the layer inside it"
                )
        wrapped = self._live_models()
        if any(model is other for other in wrapped):
            raise ConfigError("fleet.distributed_model: this model has been wrapped before; call it once per model")
        trainable = {id(p): name for name, p in model.named_parameters() if not p.stop_gradient}
        for other in wrapped:
            shared = next((trainable[id(p)] for p in other.parameters() if id(p) in trainable), None)
            if shared is not None:
                raise ConfigError(
                    f"fleet.distributed_model: parameter {shared!r} also belongs to a {type(other).__name__} that has "
                    f"been wrapped before; wrap one layer that holds both"
                )

    def _check_new_optimizer(self, optimizer: Any, inner: Any) -> None:
        self._optimizers = [ref for ref in self._optimizers if ref() is not None]
        if any(ref() is known for ref in self._optimizers for known in (optimizer, inner)):
            raise ConfigError("fleet.distributed_optimizer: this optimizer has been wrapped before; call it once")
        if not isinstance(inner, paddle.optimizer.Optimizer):
            raise ConfigError(
                f"fleet.distributed_optimizer: expected a paddle.optimizer.Optimizer, got {type(optimizer).__name__}"
            )

    def _model_of(self, optimizer: paddle.optimizer.Optimizer, config: ShardingConfig) -> paddle.nn.Layer:
        """The wrapped model that owns the optimizer's parameters; whether it owns all of them is for ``shard``."""
        models = self._live_models()
        if not models:
            overlap = [key for key in ("allgather_overlap", "reduce_overlap") if getattr(config, key)]
            reason = f" ({' and '.join(overlap)} hook into its layers)" if overlap else ""
            raise ConfigError(
                f"fleet.distributed_optimizer needs the model{reason}: call model = fleet.distributed_model(model) "
                f"first, and keep the model"
            )
        wanted = {id(p) for p in _parameters(optimizer)}
        owners = [model for model in models if any(id(p) in wanted for p in model.parameters())]
        if len(owners) != 1:
            found = "none of its parameters" if not owners else f"parameters of {len(owners)} wrapped models"
            raise ConfigError(
                f"fleet.distributed_optimizer: the optimizer has {found}; it must have those of one model that was "
                f"passed to fleet.distributed_model, and each model needs an optimizer of its own"
            )
        return owners[0]


def _check_collective(role_maker: Any, is_collective: bool) -> None:
    if not paddle.in_dynamic_mode():
        raise ConfigError("fleet.init: only dynamic graphs are supported; call paddle.disable_static() first")
    if role_maker is not None and not isinstance(role_maker, RoleMakerBase):
        raise ConfigError(
            f"fleet.init: role_maker is a {type(role_maker).__name__}, expected one of Paddle's role makers or None; "
            f"strategy and is_collective are given by keyword"
        )
    if not (is_collective if role_maker is None else role_maker._is_collective):
        raise ConfigError(
            "fleet.init: parameter-server mode (is_collective=False) is not supported; use is_collective=True, or "
            "paddle.distributed.fleet itself"
        )


def _check_backend(world: int) -> None:
    """On CPU Paddle falls back to an older way of starting Gloo, whose groups nothing else here can use."""
    only_cpu = not (
        paddle.is_compiled_with_cuda() or paddle.is_compiled_with_xpu() or paddle.device.get_all_custom_device_type()
    )
    backend = os.environ.get("PADDLE_DISTRI_BACKEND", "auto")
    if world > 1 and only_cpu and backend != "gloo":
        raise ConfigError(
            f"fleet.init: PADDLE_DISTRI_BACKEND is {backend!r}, but on CPU it must be 'gloo'; start with "
            f"python -m paddle.distributed.launch --backend gloo, or set the variable before fleet.init"
        )


def _init_paddle(role_maker: Any, strategy: PaddleStrategy, degrees: Degrees, log_level: int | str) -> None:
    """Paddle's ``fleet.init``, in one process and a second time too, with groups that cannot collide."""
    groups = paddle_topology._HYBRID_PARALLEL_GROUP
    if groups is not None and _degrees_of(groups) != degrees:
        # Paddle keeps the first groups whatever is asked for later, and its samplers would then split the data by them.
        paddle_topology._HYBRID_PARALLEL_GROUP = None
    with collision_free_groups(), _without_single_process_warnings():
        paddle_init(role_maker=role_maker, is_collective=True, strategy=strategy, log_level=log_level)


def _grid(settings: _Settings) -> Grid:
    """Who is in this rank's groups: Paddle deals the ranks out, in an order that a strategy may change."""
    if settings.world == 1:
        return Grid([0], [0])
    groups = paddle_topology._HYBRID_PARALLEL_GROUP
    tensor = tuple(groups.get_model_parallel_group().ranks) if settings.degrees.mp > 1 else ()
    return Grid(list(groups.get_sharding_parallel_group().ranks), list(groups.get_data_parallel_group().ranks), tensor)


def _degrees_of(groups: Any) -> Degrees:
    return Degrees(
        dp=groups.get_data_parallel_world_size(),
        sharding=groups.get_sharding_parallel_world_size(),
        mp=groups.get_model_parallel_world_size(),
    )


@contextlib.contextmanager
def _without_single_process_warnings() -> Iterator[None]:
    """Plain training in one process is a normal case here; Paddle warns that it does nothing, and about its groups."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Currently not a parallel execution environment")
        warnings.filterwarnings("ignore", message="Current global rank .* is not in group")
        yield


def _other_config(strategy: PaddleStrategy, settings: _Settings, defaults: Mapping[str, Any]) -> ShardingConfig:
    config = sharding_config(strategy, defaults)
    degrees = resolve_degrees(strategy, settings.world)
    if degrees != settings.degrees:
        raise ConfigError(
            f"fleet.distributed_optimizer: its strategy asks for {degrees}, but fleet.init made {settings.degrees}"
        )
    if config.timeout_s != settings.config.timeout_s:
        raise ConfigError(
            f"fleet.distributed_optimizer: its strategy sets timeout_s={config.timeout_s:g}, but the model was "
            f"connected with {settings.config.timeout_s:g}; set it in the strategy that fleet.init gets"
        )
    return config


def _parameters(optimizer: paddle.optimizer.Optimizer) -> Iterator[paddle.Tensor]:
    for entry in optimizer._parameter_list or []:
        yield from entry["params"] if isinstance(entry, dict) else [entry]


def _summary(settings: _Settings) -> str:
    config, degrees = settings.config, settings.degrees
    flags = ", ".join(f"{key}={getattr(config, key)}" for key in ("stage", "allgather_overlap", "reduce_overlap"))
    split = f", layers split over {degrees.mp}" if degrees.mp > 1 else ""
    return f"{degrees.dp} x sharding over {degrees.sharding} of {settings.world} ranks{split}: {flags}"
