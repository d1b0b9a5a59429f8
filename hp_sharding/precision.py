"""Mixed precision: which dtype each thing of a bucket has, and how the layers' inputs come to theirs.

The names are those of ``ShardingConfig``; the scheme, 16-bit parameters and gradients beside a float32 copy that the
optimizer updates, is that of Micikevicius et al., "Mixed Precision Training" (2018).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.amp.auto_cast import amp_global_state, need_keep_fp32
from paddle.base.framework import EagerParamBase

from .comm import cast_into, is_rounded
from .config import SHORT_DTYPES, ShardingConfig
from .errors import ConfigError
from .layout import Dtypes
from .units import UnitParam
from .views import dense, point_at


def dtype_name(tensor: Any) -> str:
    """Name of the dtype of a tensor or an array, such as ``"float32"``."""
    return str(tensor.dtype).split(".")[-1]


def has_masters(optimizer: paddle.optimizer.Optimizer, config: ShardingConfig) -> bool:
    """Whether 16-bit parameters have float32 shards: mixed precision was asked for, here or of the optimizer."""
    asked = (config.param_dtype, config.reduce_dtype, config.main_grad, getattr(optimizer, "_multi_precision", False))
    return any(asked)


def with_master_grad(model: nn.Layer, config: ShardingConfig) -> ShardingConfig:
    """``main_grad`` for a model that ``paddle.amp.decorate(master_grad=True)`` was asked for.

    At the end of each backward Paddle then puts float32 copies in the place of gradients; where there are none, as with
    ``main_grad``, it has nothing to do.
    """
    amp = amp_global_state()
    wanted = {id(param) for param in amp.model_parameters} if amp.use_master_grad else set()
    asked = any(id(param) in wanted for param in model.parameters())
    return dataclasses.replace(config, main_grad=True) if asked and not config.main_grad else config


def stays_float32(layer: nn.Layer, dtype: str) -> bool:
    """Whether ``paddle.amp.decorate`` would leave the layer in float32: BatchNorm, say, or one that was excluded."""
    return dtype in SHORT_DTYPES and bool(need_keep_fp32(layer, dtype))


def cast_unsharded(params: Sequence[UnitParam], sharded: Sequence[UnitParam], exempt: set[int], dtype: str) -> None:
    """``param_dtype`` for floating-point parameters that are in no bucket, since the optimizer does not hold them."""
    left_out = {id(entry.param) for entry in sharded} | exempt
    for entry in params:
        param = entry.param
        if id(param) not in left_out and dtype_name(param) in ("float32", *SHORT_DTYPES):
            cast = EagerParamBase.detach(param).astype(dtype)
            point_at([dense(cast)], [param])


def kept_as_they_are(model: nn.Layer, dtype: str | None) -> set[int]:
    """Parameters, by id, that ``param_dtype`` leaves alone: those that ``paddle.amp.decorate`` would leave in float32.

    They are BatchNorm's, with float16 also those of other norms, and of layers that are excluded from decorating
    (``layer._cast_to_low_precision = False``).
    """
    if dtype is None:
        return set()
    layers = [layer for layer in model.sublayers(include_self=True) if stays_float32(layer, dtype)]
    return {id(param) for layer in layers for param in layer._parameters.values() if param is not None}


def bucket_dtypes(param: EagerParamBase, name: str, config: ShardingConfig, *, masters: bool) -> Dtypes:
    """The dtypes of the bucket that ``param`` belongs in.

    Raises:
        ConfigError: a setting that this parameter's dtype cannot honour; names the parameter.
    """
    own = dtype_name(param)
    if own == "float64":
        _check_unmixed(name, config)
        return Dtypes.of_one(own)
    compute = config.param_dtype or own
    # A frozen one needs no master: what its layers see is all there is to keep.
    shard = "float32" if own == "float32" or (masters and not param.stop_gradient) or compute != own else own
    gather = config.gather_dtype or compute
    if compute in SHORT_DTYPES and gather != compute:
        raise _cannot("gather_dtype", gather, name, compute, "what is gathered has 16 bits already; leave it out")
    gradient = "float32" if config.main_grad or "float32" in (compute, config.reduce_dtype) else compute
    reduce = config.reduce_dtype or gradient
    if gradient in SHORT_DTYPES and reduce != gradient:
        raise _cannot("reduce_dtype", reduce, name, gradient, f"use {gradient!r} or 'float32'")
    return Dtypes(compute, shard, gather, gradient, reduce, "float32" if masters else shard)


def _check_unmixed(name: str, config: ShardingConfig) -> None:
    for key in ("param_dtype", "gather_dtype", "reduce_dtype"):
        if getattr(config, key) is not None:
            raise _cannot(key, getattr(config, key), name, "float64", "cast the model to float32 before it is wrapped")


def _cannot(key: str, value: str, name: str, dtype: str, advice: str) -> ConfigError:
    return ConfigError(f"{key}={value!r}: parameter '{name}' is of {dtype}; {advice}")


def keep_changes(shard: paddle.Tensor, value: paddle.Tensor, gather_dtype: str) -> None:
    """Gives a shard what was written to the parameters that come of it, and leaves the rest as exact as it is.

    Args:
        shard: flat, updated in place.
        value: as many elements, as the layers see them: the shard rounded to ``gather_dtype`` where nobody has written.
    """
    if value.place.is_cpu_place() and is_rounded(value, shard, gather_dtype):
        return  # a tenth of the time of what follows
    travelled = paddle.empty(shard.shape, gather_dtype)
    cast_into(travelled, shard)
    seen, now = travelled.astype("float32"), value.astype("float32")
    shard.copy_(paddle.where(seen == now, shard.astype("float32"), now).astype(shard.dtype), False)


def cast_inputs(values: Any, dtype: str) -> Any:
    """``values`` with each floating-point tensor in it, also in lists, tuples and dicts, cast to ``dtype``.

    Containers in which nothing changes are returned as they are; of the others the caller keeps what they have.
    """
    if isinstance(values, paddle.Tensor):
        return values.astype(dtype) if values.is_floating_point() and dtype_name(values) != dtype else values
    if not isinstance(values, (dict, list, tuple)):
        return values
    parts = list(values.values()) if isinstance(values, dict) else list(values)
    cast = [cast_inputs(part, dtype) for part in parts]
    if all(new is old for new, old in zip(cast, parts, strict=True)):
        return values
    if isinstance(values, tuple):
        return type(values)(*cast) if hasattr(values, "_fields") else type(values)(cast)
    changed = copy.copy(values)
    for key, part in zip(values if isinstance(values, dict) else range(len(cast)), cast, strict=True):
        changed[key] = part
    return changed
