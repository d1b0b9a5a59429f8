"""What a Paddle optimizer keeps of a parameter, or of a flat slice of one: read, made, and forgotten again.

Paddle calls these tensors accumulators and files them by the parameter's name, or by that of its float32 master. Some
belong to each element, such as ``moment1``; some to the parameter as a whole, such as a power of beta, which every
slice of a parameter has a copy of; and ASGD's ``y`` has the parameter's shape ``batch_num`` times over. Nothing else
of the twelve elementwise optimizers changes from step to step, but for the learning rate.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import defaultdict
from typing import Any, NamedTuple

import paddle
from paddle.base import framework, unique_name
from paddle.base.framework import EagerParamBase

from .errors import ConfigError
from .precision import dtype_name

_PROBE_SHAPE = [2, 3]
"""Of no tensor that an optimizer keeps of a parameter as a whole."""


class Moment(NamedTuple):
    """A tensor that the optimizer keeps of a parameter.

    Attributes:
        name: Paddle's, such as ``"moment1"``, without the optimizer's own ``name``.
        tensor: the optimizer's own tensor, in the dtype that it keeps; what is written to it counts.
        per_element: whether it has elements for those of the parameter: it is then of the parameter's shape, or has
            ``rows`` as one more axis before that. Else it is the same for every slice of the parameter.
        rows: the leading axis, 0 where there is none.
    """

    name: str
    tensor: paddle.Tensor
    per_element: bool
    rows: int

    @property
    def kind(self) -> Kind:
        """What it is, without the tensor."""
        return Kind(self.per_element, self.rows, dtype_name(self.tensor))


class Kind(NamedTuple):
    """What a moment is, as in ``Moment``; ``dtype`` is Paddle's name of the dtype in which it is kept."""

    per_element: bool
    rows: int
    dtype: str

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape for a whole parameter of that ``shape``."""
        if not self.per_element:
            return (1,)
        return (self.rows, *shape) if self.rows else shape


def moments_of(inner: paddle.optimizer.Optimizer, param: EagerParamBase) -> list[Moment]:
    """What ``inner`` keeps of ``param``, in the order in which it makes it; empty before the first update.

    A state that was loaded but not used yet, since no step has been made, counts as kept, and is.

    Args:
        inner: the optimizer that updates ``param``.
        param: a whole parameter, or the flat slice in its place; looked up by name.

    Raises:
        ConfigError: a tensor that belongs neither to elements nor, with one element, to the parameter.
    """
    if _has_loaded(inner, param):
        return make_moments(inner, param)
    found = _kept(inner, param)
    kinds = {name: _by_shape(tensor, param) for name, tensor in found.items()}
    probed = {} if all(kinds.values()) else _probe(inner, param)
    moments = []
    for name, tensor in found.items():
        kind = kinds[name] or probed.get(name) or _by_others(inner, name, tensor, param)
        moments.append(Moment(name, tensor, kind.per_element, kind.rows))
    return moments


def kinds_of(inner: paddle.optimizer.Optimizer, param: EagerParamBase) -> dict[str, Kind]:
    """What ``inner`` will keep of ``param``, by name, whether it does so by now or not; makes and changes nothing.

    What a subclass makes elsewhere than in ``_create_accumulators`` is there once it has been made.

    Raises:
        ConfigError: see ``moments_of``; or no group of the optimizer has the parameter.
    """
    kinds = _probe(inner, param)
    for name, tensor in _kept(inner, param).items():
        if name not in kinds:
            kinds[name] = _by_shape(tensor, param) or _by_others(inner, name, tensor, param)
    return kinds


def make_moments(inner: paddle.optimizer.Optimizer, param: EagerParamBase) -> list[Moment]:
    """``moments_of``, after making what is not there yet as the first step would: with initial or loaded values.

    A float32 master, where ``inner`` keeps one of ``param``, is made too, with the parameter's value.

    Raises:
        ConfigError: see ``moments_of``; or no group of the optimizer has the parameter.
    """
    loaded, inner._accumulators_holder = inner._accumulators_holder, {}
    try:
        before = {id(tensor) for tensor in _kept(inner, param).values()}
        with paddle.no_grad():
            inner._create_accumulators(_block(), _request(inner, param))
    finally:
        inner._accumulators_holder = loaded
    if loaded:
        for tensor in _kept(inner, param).values():
            if id(tensor) not in before:
                _take_loaded(tensor, loaded)
    if not _kept(inner, param):
        return []
    return moments_of(inner, param)


def drop_moments(inner: paddle.optimizer.Optimizer, param: EagerParamBase) -> None:
    """Forgets what ``inner`` keeps of ``param``, its master too, as if it had never been updated."""
    loaded = inner._accumulators_holder
    for key in _loaded_keys(inner, param):
        del loaded[key]
    target = _target(inner, param)
    for name in [name for name, by_param in inner._accumulators.items() if target in by_param]:
        _free_name(inner, inner._accumulators[name].pop(target))
        if not inner._accumulators[name]:
            del inner._accumulators[name]
    master = inner._master_weights.pop(param.name, None)
    if master is not None:
        _free_name(inner, master)
    inner._already_create_accumulator.discard(param.name)
    _forget_lists(inner)


def master_of(inner: paddle.optimizer.Optimizer, param: EagerParamBase) -> paddle.Tensor | None:
    """The float32 master that ``inner`` itself keeps of a 16-bit ``param``, of its shape; None where there is none."""
    return inner._master_weights.get(param.name)


@paddle.no_grad()
def set_master(inner: paddle.optimizer.Optimizer, param: EagerParamBase, value: paddle.Tensor) -> None:
    """Gives the master of ``param`` a value, of as many elements; makes it first where it is not there.

    The parameter itself stays as it is.

    Raises:
        ConfigError: ``inner`` keeps no master of ``param``: it is not of 16 bits, or ``multi_precision`` is off.
    """
    if param.name not in inner._master_weights:
        if not keeps_master(inner, param):
            raise ConfigError(
                f"parameter '{param.name}': {type(inner).__name__} keeps no float32 master of it. Make the optimizer "
                "with multi_precision=True, or load a state that was saved without masters"
            )
        inner._create_master_weight(param)
    master = inner._master_weights[param.name]
    master.copy_(value.astype(master.dtype).reshape(master.shape), False)


def keeps_master(inner: paddle.optimizer.Optimizer, param: EagerParamBase) -> bool:
    """Whether ``inner`` updates a float32 master of ``param`` in its place, from its first step on."""
    return bool(getattr(inner, "_multi_precision", False) and inner._is_dtype_fp16_or_bf16(param.dtype))


# -- what is kept, and what of it is of elements -----------------------------------------------------------------------


def _target(inner: paddle.optimizer.Optimizer, param: EagerParamBase) -> str:
    """Under which name accumulators are filed."""
    master = inner._master_weights.get(param.name)
    return param.name if master is None or not keeps_master(inner, param) else master.name


def _kept(inner: paddle.optimizer.Optimizer, param: EagerParamBase) -> dict[str, paddle.Tensor]:
    """By name without the optimizer's own."""
    target = _target(inner, param)
    prefix = "" if inner._name is None else f"{inner._name}_"
    return {
        name.removeprefix(prefix): by_param[target]
        for name, by_param in inner._accumulators.items()
        if target in by_param
    }


def _by_shape(tensor: paddle.Tensor, param: EagerParamBase) -> Kind | None:
    """What the shapes alone say; None where a single element may be either, or neither fits."""
    if param.size == 1:
        return None
    dtype = dtype_name(tensor)
    if tensor.shape == param.shape:
        return Kind(True, 0, dtype)
    if tensor.shape[1:] == param.shape and tensor.ndim == param.ndim + 1:
        return Kind(True, tensor.shape[0], dtype)
    return Kind(False, 0, dtype) if tensor.size == 1 else None


def _probe(inner: paddle.optimizer.Optimizer, param: EagerParamBase) -> dict[str, Kind]:
    """What becomes of a small parameter in a copy of the optimizer: shapes that cannot be mistaken."""
    double = copy.copy(inner)
    double._accumulators = defaultdict(dict)
    double._accumulators_holder, double._master_weights = {}, {}
    double._already_create_accumulator, double._opti_name_list = set(), []
    with paddle.no_grad(), unique_name.guard(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of 16 bits: the real parameter brings that up
        probe = EagerParamBase(shape=_PROBE_SHAPE, dtype=param.dtype, name=f"{param.name}.probe")
        paddle.zeros(_PROBE_SHAPE, param.dtype)._share_buffer_to(probe)
        double._create_accumulators(_block(), _request(inner, param, instead=probe))
    made = _kept(double, probe)
    kinds = {name: _by_shape(tensor, probe) for name, tensor in made.items()}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _by_others(inner: paddle.optimizer.Optimizer, name: str, tensor: paddle.Tensor, param: EagerParamBase) -> Kind:
    """Of an accumulator that a subclass makes where no probe sees it.

    A larger tensor of the same name shows that it is one of elements. Where all have one element it counts as one of
    the parameter's as a whole; ranks whose slices are larger then say otherwise, and saving fails.
    """
    if tensor.size != 1:
        raise ConfigError(
            f"{type(inner).__name__} keeps '{name}' of shape {list(tensor.shape)} of parameter '{param.name}' of shape "
            f"{list(param.shape)}: expected the parameter's shape, that with one more axis before it, or one element"
        )
    full = name if inner._name is None else f"{inner._name}_{name}"
    others = inner._accumulators[full].values()
    return Kind(any(other.size > 1 for other in others), 0, dtype_name(tensor))


def _block() -> Any:
    return framework.default_main_program().global_block()


def _request(
    inner: paddle.optimizer.Optimizer, param: EagerParamBase, instead: EagerParamBase | None = None
) -> list[EagerParamBase] | dict[str, Any]:
    """What a step asks to make accumulators for: a list of ``param``, or its group's settings with that in it."""
    params = [param if instead is None else instead]
    groups = inner._param_groups
    if not (groups and isinstance(groups[0], dict)):
        return params
    for group in groups:
        if any(held.name == param.name for held in group["params"]):
            return {**group, "params": params}
    raise ConfigError(f"no group of this {type(inner).__name__} has parameter '{param.name}'")


# -- loaded before the first step --------------------------------------------------------------------------------------


def _stem(name: str) -> str:
    """Without the number that makes a name unique in its process."""
    return re.sub(r"_\d+$", "", name)


def _has_loaded(inner: paddle.optimizer.Optimizer, param: EagerParamBase) -> bool:
    return bool(inner._accumulators_holder) and not _kept(inner, param) and bool(_loaded_keys(inner, param))


def _loaded_keys(inner: paddle.optimizer.Optimizer, param: EagerParamBase) -> list[str]:
    """Keys of a loaded state that belong to ``param``."""
    if not inner._accumulators_holder:
        return []
    prefix = "" if inner._name is None else f"{inner._name}_"
    stems = {f"{_target(inner, param)}_{prefix}{name}" for name in _probe(inner, param)}
    return [key for key in inner._accumulators_holder if _stem(key) in stems]


def _take_loaded(tensor: paddle.Tensor, loaded: dict[str, Any]) -> None:
    key = tensor.name
    if key not in loaded:
        # Another optimizer of this process has had the number that the saved one had.
        alike = [other for other in loaded if _stem(other) == _stem(tensor.name)]
        if len(alike) != 1:
            return
        key = alike[0]
    tensor.set_value(loaded.pop(key))


# -- forgetting --------------------------------------------------------------------------------------------------------


def _free_name(inner: paddle.optimizer.Optimizer, tensor: paddle.Tensor) -> None:
    """Lets a name be given again, so that what is made next has the name that another process will look for."""
    stem = _stem(tensor.name)
    ids = unique_name.generator.ids
    if tensor.name == f"{stem}_{ids.get(stem, 0) - 1}":
        ids[stem] -= 1
    if tensor.name in inner._opti_name_list:
        inner._opti_name_list.remove(tensor.name)


def _forget_lists(inner: paddle.optimizer.Optimizer) -> None:
    """With ``use_multi_tensor`` the optimizer holds lists of all tensors, which it makes where they are empty."""
    if not inner._use_multi_tensor:
        return
    for name, value in vars(inner).items():
        if isinstance(value, dict) and isinstance(value.get("FP16_DenseTensor"), list):
            fresh = inner._create_multi_tensor_dict()
            if value["FP32_DenseTensor"] is None:  # of masters
                fresh["FP32_DenseTensor"] = None
            setattr(inner, name, fresh)
