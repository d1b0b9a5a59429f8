"""What a training holds, read out past the package's checkpoints and without regard to how it lies on ranks.

``parts`` is one rank's share, ``join`` puts those of all ranks together: the same names and values whatever the stage,
the buckets and the number of ranks. Names are those of checkpoints, ``model/<structured name>`` and
``optimizer/<structured name>/<moment>``; bfloat16 is there as its bits.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

from hp_sharding import ShardedOptimizer
from hp_sharding.buffer import FusedCommBuffer
from tests.reference import Array, Values

_WHOLE = "pow_acc"
"""In the names of moments that a parameter has one of, whatever its size."""


class Part(NamedTuple):
    """Some elements of one logical tensor.

    Attributes:
        name: of the tensor.
        start: where they begin in the flattened tensor.
        values: the elements, one-dimensional.
        shape: of the whole tensor.
    """

    name: str
    start: int
    values: Array
    shape: tuple[int, ...]


def parts(model: nn.Layer, optimizer: Any) -> list[Part]:
    """What this rank holds: its shards, as float32 masters where there are some, and all that is not sharded.

    A parameter without elements has no moments here: whether an optimizer makes any is its own business.

    Args:
        model: wrapped or not.
        optimizer: sharded, plain, or Paddle's own.
    """
    inner = getattr(optimizer, "_inner_opt", optimizer)
    names = {id(param): name for name, param in model.named_parameters()}
    found: list[Part] = []
    sharded: set[int] = set()
    buffers = optimizer.buffers if isinstance(optimizer, ShardedOptimizer) else []
    for buffer in buffers:
        sharded.update(map(id, buffer.params))
        found += _bucket_parts(buffer, inner, names)
    for name, param in model.named_parameters():
        if id(param) not in sharded:
            shape = tuple(param.shape)
            found.append(Part(f"model/{name}", 0, param.numpy().reshape([-1]).copy(), shape))
            found += [_moment(name, moment, value, 0, shape) for moment, value in _moments(inner, param) if param.size]
    for name, value in model.named_buffers():
        if name.rpartition(".")[2] not in _layer_of(model, name)._non_persistable_buffer_names_set:
            found.append(Part(f"model/{name}", 0, value.numpy().reshape([-1]).copy(), tuple(value.shape)))
    return found


def join(parts_of_ranks: Iterable[Sequence[Part]]) -> Values:
    """Whole tensors from the parts of all ranks. What several ranks hold must be the same bit for bit."""
    by_name: dict[str, list[Part]] = defaultdict(list)
    for part in (part for parts in parts_of_ranks for part in parts):
        by_name[part.name].append(part)
    return {name: _put_together(name, by_name[name]) for name in sorted(by_name)}


def check(found: Sequence[Part], expected: Values, what: str = "") -> None:
    """Each part holds, bit for bit, its elements of ``expected``, and there is no other."""
    for part in found:
        assert part.name in expected, f"{what} {part.name} is there, but was not"
        wanted = expected[part.name]
        assert part.shape == wanted.shape, f"{what} {part.name}"
        piece = wanted.reshape([-1])[part.start : part.start + part.values.size]
        np.testing.assert_array_equal(part.values, piece, err_msg=f"{what} {part.name}", strict=True)


def digest(found: Sequence[Part]) -> str:
    """A hash of names and bits."""
    sums = hashlib.sha256()
    for part in found:
        sums.update(f"{part.name} {part.start} {part.shape} {part.values.dtype}".encode() + part.values.tobytes())
    return sums.hexdigest()


def put(model: nn.Layer, optimizer: Any, values: Values, scheduler: dict[str, Any] | None = None) -> None:
    """Gives a plain model and a new optimizer of Paddle's these values, and its scheduler that state."""
    state: dict[str, Any] = {} if scheduler is None else {"LR_Scheduler": scheduler}
    updated = []
    for name, param in model.named_parameters():
        param.set_value(values[f"model/{name}"].reshape(param.shape))
        prefix = f"optimizer/{name}/"
        keys = [key for key in values if key.startswith(prefix)]
        updated += [param] * bool(keys)
        for key in keys:
            state[f"{param.name}_{key.removeprefix(prefix)}_0"] = paddle.to_tensor(values[key])
    for name, buffer in model.named_buffers():
        if f"model/{name}" in values:
            buffer.set_value(values[f"model/{name}"])
    optimizer.set_state_dict(state)
    optimizer._create_accumulators(paddle.static.default_main_program().global_block(), updated)
    for param in updated:  # as clear_grad() leaves them: a step without a new gradient updates them all the same
        param.grad = paddle.zeros_like(param)
    # While something waits there, Paddle refuses to make moments for a parameter that was not updated before.
    optimizer._accumulators_holder.clear()


def _bucket_parts(buffer: FusedCommBuffer, inner: Any, names: dict[int, str]) -> Iterator[Part]:
    for piece in buffer.slices:
        param = buffer.params[piece.param]
        name, shape = names[id(param)], tuple(param.shape)
        yield Part(f"model/{name}", piece.param_start_numel, piece.tensor.numpy().copy(), shape)
        for moment, value in _moments(inner, piece.tensor):
            yield _moment(name, moment, value, piece.param_start_numel, shape)


def _moment(name: str, moment: str, value: paddle.Tensor, start: int, shape: tuple[int, ...]) -> Part:
    values = value.numpy().reshape([-1]).copy()
    where = (0, (1,)) if _WHOLE in moment else (start, shape)
    return Part(f"optimizer/{name}/{moment}", where[0], values, where[1])


def _moments(inner: Any, param: paddle.Tensor) -> Iterator[tuple[str, paddle.Tensor]]:
    """By their names: those in use, and those that were loaded and wait for the first update."""
    seen = set()
    for moment, by_param in inner._accumulators.items():
        if param.name in by_param:
            seen.add(moment)
            yield moment, by_param[param.name]
    for key, value in inner._accumulators_holder.items():
        moment = key.removeprefix(f"{param.name}_").removesuffix("_0")
        if key == f"{param.name}_{moment}_0" and moment not in seen:
            yield moment, value


def _layer_of(model: nn.Layer, name: str) -> Any:
    layers = dict(model.named_sublayers(include_self=True))
    return layers[name.rpartition(".")[0]]


def _put_together(name: str, found: Sequence[Part]) -> Array:
    whole = np.zeros(int(np.prod(found[0].shape)), found[0].values.dtype)
    there = np.zeros(whole.size, bool)
    for part in found:
        assert part.shape == found[0].shape, name
        place = slice(part.start, part.start + part.values.size)
        known = there[place]
        np.testing.assert_array_equal(part.values[known], whole[place][known], err_msg=f"{name}: ranks differ")
        whole[place] = part.values
        there[place] = True
    assert there.all(), f"{name}: nobody holds elements {np.flatnonzero(~there)[:5]}"
    return whole.reshape(found[0].shape)
