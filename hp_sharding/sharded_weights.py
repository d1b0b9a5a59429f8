"""What Paddle's ``flex_checkpoint`` wants of a state: each tensor as a ``ShardedWeight``, under a structured name.

It says of which part of which whole tensor the values are. A slice is a range of its flattened parameter; which ranks
hold the same, ``flex_checkpoint`` sees for itself. Keys are those of Paddle's sharding V2:

* ``<structured name>``: a parameter or buffer of the model;
* ``<structured name>.<moment>_0``, such as ``linear.weight.moment1_0``;
* ``<structured name>.<moment>_0.<row>``: of moments that have the parameter's shape several times over (``y`` of ASGD),
  of which a slice's are no range;
* ``<structured name>.w_0``: a float32 master.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase

from .buffer import FusedCommBuffer, ShardSlice
from .errors import ConfigError
from .moments import Moment, moments_of
from .views import dense, point_at


class UpdatedPart(NamedTuple):
    """What an optimizer updates of one parameter.

    Attributes:
        tensor: the parameter itself, or the one-dimensional slice in its place.
        start: where the slice begins in the flattened parameter, in elements; None of a whole parameter.
    """

    tensor: EagerParamBase
    start: int | None


def slices_of(buffers: Iterable[FusedCommBuffer]) -> dict[str, UpdatedPart]:
    """Parameter name -> the part that this rank updates; nothing where it has none."""
    pieces = (piece for buffer in buffers for piece in buffer.slices)
    return {piece.tensor.name: UpdatedPart(piece.tensor, piece.param_start_numel) for piece in pieces}


def optimizer_weights(
    inner: paddle.optimizer.Optimizer,
    parts: Mapping[str, UpdatedPart],
    masters: Mapping[str, paddle.Tensor],
    model: Mapping[str, Any],
) -> dict[str, Any]:
    """Moments and masters as ``ShardedWeight``; they share the memory of what the optimizer keeps.

    Args:
        inner: Paddle's optimizer.
        parts: parameter name -> what ``inner`` updates of it here.
        masters: parameter name -> its master, of the shape of its part.
        model: structured name -> ``ShardedWeight`` of the parameters. Only names and shapes are read.

    Raises:
        ConfigError: a parameter that has moments or a master is not in ``model``.
    """
    structured: dict[str, str] = {}
    for key in sorted(model):  # of tied ones the first counts, as in Paddle
        structured.setdefault(model[key].local_tensor.name, key)
    found: dict[str, Any] = {}
    for name, part in parts.items():
        moments = moments_of(inner, part.tensor)
        if not moments and name not in masters:
            continue
        if name not in structured:
            raise ConfigError(
                f"sharded_state_dict: the model's has no parameter '{name}', which this optimizer updates. Pass "
                "sharded_state_dict() of the model that the optimizer was wrapped with"
            )
        key = structured[name]
        for moment in moments:
            found |= _moment_weights(f"{key}.{moment.name}_0", moment, model[key], part)
        if name in masters:
            found[f"{key}.w_0"] = _weight(f"{key}.w_0", masters[name], model[key], part.start)
    return found


def model_weights(model: nn.Layer, buffers: Iterable[FusedCommBuffer]) -> dict[str, Any]:
    """``model.sharded_state_dict()``, with this rank's part in the place of each parameter that is freed.

    Where precision is mixed a part is a copy, in the parameter's dtype.
    """
    freed = {
        id(param): (buffer, [piece for piece in buffer.slices if piece.param == index])
        for buffer in buffers
        if buffer.full is None
        for index, param in enumerate(buffer.params)
    }
    found: dict[str, Any] = {}
    for key, weight in model.sharded_state_dict().items():
        if id(weight.local_tensor) not in freed:
            found[key] = weight
            continue
        buffer, pieces = freed[id(weight.local_tensor)]
        for piece in pieces:
            found[key] = _weight(key, _as_seen(buffer, piece), weight, piece.param_start_numel)
    return found


def _moment_weights(key: str, moment: Moment, like: Any, part: UpdatedPart) -> dict[str, Any]:
    if not moment.per_element:
        return {key: _whole(key, moment.tensor)}
    if not moment.rows:
        return {key: _weight(key, moment.tensor, like, part.start)}
    rows = {f"{key}.{row}": _row(moment.tensor, row) for row in range(moment.rows)}
    return {name: _weight(name, row, like, part.start) for name, row in rows.items()}


def _row(tensor: paddle.Tensor, row: int) -> paddle.Tensor:
    """A view: what is loaded into it counts."""
    view = dense(tensor)._slice(row, row + 1)
    view._set_dims(tensor.shape[1:])
    out = paddle.empty([0], tensor.dtype)
    point_at([view], [out])
    return out


def _as_seen(buffer: FusedCommBuffer, piece: ShardSlice) -> paddle.Tensor:
    """A part of a parameter as its layer sees it once it is gathered."""
    dtypes = buffer.layout.dtypes
    if dtypes.shard_is_slice:
        return piece.tensor
    seen = EagerParamBase.detach(piece.tensor).astype(dtypes.gather).astype(dtypes.param)
    seen.name = piece.tensor.name
    return seen


def _weight(key: str, tensor: paddle.Tensor, like: Any, start: int | None) -> Any:
    """``tensor`` as the weight ``like``, or as the range of its elements that begins at ``start``."""
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    place = like.local_shape, like.global_shape, like.global_offset
    if start is None:
        return ShardedWeight(key, tensor, *place)
    return ShardedWeight(key, tensor, *place, is_flattened=True, flattened_range=slice(start, start + tensor.size))


def _whole(key: str, tensor: paddle.Tensor) -> Any:
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import make_replicated_sharded_weight

    return make_replicated_sharded_weight(key, tensor)
