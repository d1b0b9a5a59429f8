"""What scripts find that look behind the optimizer: names and types of Paddle's own sharding, with ours underneath.

Trainers and tests that were written for ``DygraphShardingOptimizerV2`` ask ``optimizer._inner_opt`` for it, read where
parameters lie in ``_comm_buffer_list``, and call some of its methods. Here is an object of that class for them. What it
cannot do raises a ``ConfigError``; it never falls back to Paddle's own buffers, which do not exist.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import paddle
from paddle.base.framework import EagerParamBase
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import HybridParallelOptimizer

from ..arena import GradientArena
from ..buffer import FusedCommBuffer, Status
from ..errors import ConfigError, StateError
from ..optimizer import ShardedOptimizer


class _Stored(NamedTuple):
    """A bucket, what gathers it and its reduced gradient: the views below hold no more, and so no optimizer."""

    buffer: FusedCommBuffer
    gathers: Any
    arena: GradientArena

    def full_tensor(self) -> paddle.Tensor:
        """See ``BucketView.param_storage``."""
        buffer = self.buffer
        if buffer.status is Status.SYNCING:
            self.gathers.finish(buffer.layout.number)
        if buffer.status is not Status.READY or buffer.full is None:
            raise StateError(
                f"bucket '{buffer.name}' is {buffer.status.name}: its parameters are not gathered, so there is no flat "
                "tensor of them to read. Read it inside hp_sharding.full_parameters(model)"
            )
        return buffer.full


class SlotView:
    """Where one parameter lies, under the names of Paddle's ``ShardingGradView``. All in elements of the bucket.

    Attributes:
        _param: the whole parameter.
        _index: its first element in the bucket.
        _padded_size: elements up to the next parameter, or to the end of the bucket.
        _param_begin, _param_end: the part in this rank's shard, padding behind the parameter included; empty where the
            end is not beyond the begin.
    """

    def __init__(self, stored: _Stored, slot: int) -> None:
        buffer = stored.buffer
        layout = buffer.layout
        ends = [*(place.offset_numel for place in layout.slots[1:]), layout.numel]
        begin = buffer.place.rank * layout.shard_numel
        self._stored = stored
        self._param = buffer.params[slot]
        self._index = layout.slots[slot].offset_numel
        self._padded_size = ends[slot] - self._index
        self._sharding_degree = layout.nranks
        self._rank = buffer.place.rank
        self._rank_begin = begin
        self._param_begin = max(self._index, begin)
        self._param_end = min(self._index + self._padded_size, begin + layout.shard_numel)

    @property
    def has_effective_slice_param(self) -> bool:
        """Whether this rank's shard holds anything of it."""
        return self._param_begin < self._param_end

    @property
    def _slice_grad(self) -> paddle.Tensor | None:
        """This rank's part of the gradient, once ``reduce_gradients`` has returned; None where it updates nothing."""
        layout = self._stored.buffer.layout
        if not self.has_effective_slice_param or self._param.stop_gradient:
            return None
        reduced = self._stored.arena.slice(layout.number)
        return reduced._slice(self._param_begin - self._rank_begin, self._param_end - self._rank_begin)

    @property
    def _param_buffer(self) -> paddle.Tensor:
        return self._stored.full_tensor()


class BucketView:
    """One bucket under the names of Paddle's own ``FusedCommBuffer``; a look at ours, which owns everything.

    Attributes:
        _params, params: its parameters, in the order in which they lie.
        _sharding_param_grad_view: parameter name -> ``SlotView``.
        _id: the bucket's number. ``_dst`` is -1: no rank has it as a whole.
        _acc_steps: a hint that nothing depends on.
    """

    _dst = -1

    def __init__(self, sharded: FleetOptimizer, buffer: FusedCommBuffer) -> None:
        self._stored = _Stored(buffer, sharded._schedule.gathers, sharded._arena)
        self._buffer = buffer
        self._id = buffer.layout.number
        self._comm_group = sharded._hcg.get_sharding_parallel_group()
        self._params: list[EagerParamBase] = list(buffer.params)
        self._acc_steps = 1
        self.use_main_grad = buffer.layout.dtypes.gradient != buffer.layout.dtypes.param
        slots = [SlotView(self._stored, slot) for slot in range(len(buffer.params))]
        self._sharding_param_grad_view = {view._param.name: view for view in slots}

    @property
    def params(self) -> list[EagerParamBase]:
        return self._params

    @property
    def status(self) -> Status:
        """``Status`` of the bucket; its names are Paddle's."""
        return self._buffer.status

    @property
    def param_storage(self) -> paddle.Tensor:
        """The flat tensor that the parameters are views of; waits for a gather under way.

        Raises:
            StateError: the parameters are freed, or not gathered yet.
        """
        return self._stored.full_tensor()

    @property
    def grad_storage(self) -> paddle.Tensor | None:
        """The flat gradient of this rank's backward, while there is one."""
        return self._buffer.gradient.full


class ShardingV2(DygraphShardingOptimizerV2):
    """A ``DygraphShardingOptimizerV2`` for those who ask for one; every call goes to the sharded optimizer.

    Attributes:
        _inner_opt: the optimizer that the script has made, as ``fleet.distributed_optimizer`` got it.
        _parameter_list: its whole parameters, or its groups of them.
        param2bucket: parameter name (``param.name``) -> its buckets.
    """

    comm_overlap = pp_overlap = tensor_fusion = sd_release_grads = enable_fuse_optimizer_states = False
    _use_pipeline_parallel = _enable_timer = False
    use_reduce_avg = True

    def __init__(self, sharded: FleetOptimizer) -> None:
        # Not Paddle's own __init__, which would move the parameters into buffers of its own.
        self._sharded = sharded
        self._inner_opt = sharded._given
        self._hcg = sharded._hcg
        self._sharding_world_size = self._hcg.get_sharding_parallel_world_size()
        self._sharding_rank = self._hcg.get_sharding_parallel_rank()
        self._parameter_list = sharded._inner._parameter_list
        self._views: list[BucketView] = []
        self.clear_color: set[Any] = set()

    def __getattr__(self, item: str) -> Any:
        if item in ("_inner_opt", "_sharded"):  # while a copy is being made
            raise AttributeError(item)
        return getattr(self._inner_opt, item)

    @property
    def _comm_buffer_list(self) -> list[BucketView]:
        if not self._views or self._views[0]._stored.arena is not self._sharded._arena:  # other buckets since
            self._views = [BucketView(self._sharded, buffer) for buffer in self._sharded.buffers]
        return self._views

    @property
    def _color_to_comm_buffer_list(self) -> dict[int, list[BucketView]]:
        return {-1: self._comm_buffer_list}

    @property
    def param2bucket(self) -> dict[str, list[BucketView]]:
        return {param.name: [view] for view in self._comm_buffer_list for param in view.params}

    @property
    def _slice_params(self) -> dict[str, EagerParamBase]:
        """Parameter name -> the part that this rank updates, one-dimensional; none where it has none."""
        slices = (piece for buffer in self._sharded.buffers for piece in buffer.slices)
        return {piece.tensor.name: piece.tensor for piece in slices}

    @property
    def _local_parameter_list(self) -> list[EagerParamBase]:
        return list(self._slice_params.values())

    @property
    def _master_weights(self) -> dict[str, paddle.Tensor]:
        """Parameter name -> float32 part that this rank updates, where the parameter itself has fewer bits."""
        return self._sharded._state.masters()

    @property
    def _all_gather_overlap_forward(self) -> bool:
        return self._sharded.config.allgather_overlap

    def _create_master_weight(self, param: EagerParamBase) -> paddle.Tensor:
        """The float32 part of it that this rank updates: what has fewer bits has one from the start."""
        part = self._slice_params.get(param.name)
        if part is not None and part.dtype == paddle.float32:
            return part
        return self._inner_opt._create_master_weight(param)

    def filter_parameters(self, parameter_list: Iterable[EagerParamBase], hcg: Any) -> list[EagerParamBase]:
        """The parts that this rank updates of the parameters given, in their order."""
        slices = self._slice_params
        return [slices[param.name] for param in parameter_list if param.name in slices]

    def reduce_gradients(self, parameter_list: Iterable[EagerParamBase], hcg: Any) -> None:
        """Returns once all gradients are reduced. Not needed: backward starts that, and ``step()`` waits for it."""
        self._sharded._complete_reductions()

    def step(self) -> None:
        self._sharded.step()

    def clear_grad(self, set_to_zero: bool = True) -> None:
        self._sharded.clear_grad(set_to_zero)

    def state_dict(self) -> dict[str, Any]:
        return self._sharded.state_dict()

    def sharded_state_dict(self, model_sharded_state_dict: Any) -> Any:
        """As Paddle's: structured names of this rank's state -> ``ShardedWeight``, given the model's."""
        return self._sharded.sharded_state_dict(model_sharded_state_dict)

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sharded.set_state_dict(state_dict)

    load_state_dict = set_state_dict

    def _set_all_gather_overlap_forward(self, all_gather_overlap_forward: bool, layers: Any) -> None:
        self._sharded._set_all_gather_overlap_forward(all_gather_overlap_forward, layers)


def _behind(name: str) -> property:
    """An attribute of ``_inner_opt`` that scripts read on the optimizer itself, where Paddle's passes them on."""
    return property(lambda optimizer: getattr(optimizer._inner_opt, name), doc=f"``_inner_opt.{name}``.")


class FleetOptimizer(ShardedOptimizer, HybridParallelOptimizer):
    """The sharded optimizer as ``fleet.distributed_optimizer`` returns it: also what scripts take Paddle's for.

    Attributes:
        _hcg: Paddle's groups of ranks.
        _strategy: the strategy in force.
        _sharding_enable: True. ``_dp_enable`` and ``_sep_enable`` are False: nothing is left for a script to reduce.
    """

    _sharding_enable = True
    _dp_enable = _sep_enable = _use_dp_mode = _need_dp = _enable_timer = False
    _timers = None
    processed_steps = 0
    _given: Any
    _hcg: Any
    _strategy: Any
    _face: weakref.ref[ShardingV2] | None = None

    @property
    def _inner_opt(self) -> ShardingV2:
        face = None if self._face is None else self._face()
        if face is None:
            # Held weakly, since it holds this optimizer.
            face = ShardingV2(self)
            self._face = weakref.ref(face)
        return face

    _comm_buffer_list = _behind("_comm_buffer_list")
    _slice_params = _behind("_slice_params")
    _master_weights = _behind("_master_weights")
    _create_master_weight = _behind("_create_master_weight")
    filter_parameters = _behind("filter_parameters")
    reduce_gradients = _behind("reduce_gradients")

    def _step(self, parameters_list: Any) -> None:
        """``step()``, for trainers that call this after ``_inner_opt.reduce_gradients``."""
        self.step()

    def _hybrid_sync_grad(self, parameter_list: Any) -> None:
        self._complete_reductions()

    def _complete_reductions(self) -> None:
        """Returns with all gradients reduced and divided; ``step()`` then finds nothing left to do. Collective."""
        if self._gradients.settle():
            self._publish_orders()
        self._gradients.finish()


def show_as_paddles(sharded: ShardedOptimizer, given: Any, *, hcg: Any, strategy: Any) -> FleetOptimizer:
    """Gives a sharded optimizer the face of Paddle's.

    Args:
        sharded: a plain ``ShardedOptimizer``; it becomes a ``FleetOptimizer``.
        given: what the script has passed to ``fleet.distributed_optimizer``.
        hcg: Paddle's groups of ranks.
        strategy: the strategy in force.

    Returns:
        The same object.
    """
    sharded.__class__ = FleetOptimizer
    assert isinstance(sharded, FleetOptimizer)
    sharded._given, sharded._hcg, sharded._strategy = given, hcg, strategy
    return sharded


def _refusal(owner: str, name: str) -> Callable[..., Any]:
    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"{owner}.{name}: not supported. hp_sharding alone keeps, fills and sends its buckets, and Paddle's method "
            "would work on others of its own; leave the call out"
        )

    refuse.__name__ = name
    return refuse


def _refuse_the_rest(cls: type, base: type, *, owner: str, kept: Sequence[str] = ()) -> None:
    """Has every method of Paddle's class that ours does not replace raise, also those that a later Paddle adds."""
    own = {name for ours in cls.__mro__ if ours.__module__.startswith("hp_sharding") for name in vars(ours)}
    for name, value in vars(base).items():
        if inspect.isfunction(value) and name not in own and name not in kept:
            setattr(cls, name, _refusal(owner, name))


# They only change the hint.
_KEPT = ("_increase_comm_buffers_acc_steps", "_reset_comm_buffers_acc_steps")
_refuse_the_rest(ShardingV2, DygraphShardingOptimizerV2, owner="optimizer._inner_opt", kept=_KEPT)
_refuse_the_rest(FleetOptimizer, HybridParallelOptimizer, owner="optimizer")
