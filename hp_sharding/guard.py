"""Guards on parameters: whoever reads or writes a value right after ``step()`` sees the newest one, or an error.

The forward's hooks are the schedule; these are what keeps everyone else right. A parameter's class becomes
``GuardedParameter``, whose value-reading methods first make the value valid, and a layer's ``_parameters`` becomes
``GuardedParameters``, which does the same when a forward looks a parameter up. DeepSpeed guards the mapping likewise.
Neither ever starts a collective on its own outside a forward: a value that is freed there raises.

Both mappings of a layer, ``_parameters`` and ``_sub_layers``, also refuse what comes too late to be trained.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from paddle import Tensor, nn
from paddle.base.framework import EagerParamBase, _current_expected_place_

from .errors import LayoutError, StateError


class ValueKeeper(Protocol):
    """Makes parameters valid; the schedule of one wrapped model."""

    def make_readable(self, param: EagerParamBase) -> None:
        """Returns once the value is valid. Raises StateError where it is freed."""

    def note_write(self, param: EagerParamBase) -> None:
        """Told after a write to the value."""

    def write_master(self, param: EagerParamBase, value: Any) -> bool:
        """Writes a value that is wider than the parameter, if a master takes it. Returns whether it does."""

    def look_up(self, param: EagerParamBase) -> None:
        """Told that a layer looked the parameter up; makes it valid inside a forward."""

    def note_late(self, name: str, param: EagerParamBase) -> None:
        """Told of a frozen parameter that was not there when the model was wrapped."""

    def note_clear(self, param: EagerParamBase, *, set_to_zero: bool) -> None:
        """Told before the user clears the gradient of this parameter alone."""


class _Guard:
    """Weak link from a parameter to its keeper. A deep copy of the parameter gets a link that leads nowhere.

    Attributes:
        keeper: gives the keeper, or None once it is gone.
        held: whether the keeper's optimizer updates the parameter; else it was merely there when the model was wrapped.
    """

    def __init__(self, keeper: ValueKeeper | None, *, held: bool = False) -> None:
        self.keeper: Callable[[], ValueKeeper | None] = weakref.ref(keeper) if keeper is not None else lambda: None
        self.held = held

    def __deepcopy__(self, memo: dict[int, Any]) -> _Guard:
        return _Guard(None)

    def __reduce__(self) -> tuple[type[_Guard], tuple[None]]:
        return _Guard, (None,)


class GuardedParameter(EagerParamBase):
    """A parameter whose value methods wait for a gather under way. Metadata never waits and never raises.

    Its methods are those of ``paddle.Tensor``; most are filled in below. Clearing the gradient, as
    ``Layer.clear_gradients`` does, also clears what has been reduced of it.
    """

    def clear_gradient(self, set_to_zero: bool = True) -> None:
        """Clears the gradient of this parameter, on this rank; all ranks do the same."""
        keeper = _keeper_of(self)
        if keeper is not None:
            keeper.note_clear(self, set_to_zero=set_to_zero)
        EagerParamBase.clear_gradient(self, set_to_zero)

    def clear_grad(self) -> None:
        """``clear_gradient()``."""
        self.clear_gradient()

    def _grad_ivar(self) -> Any:
        """Where Paddle's optimizers look: ``grad``, but an error for one that updates whole parameters."""
        if _keeper_of(self) is not None and _caller(2).startswith(_WHOLE_OPTIMIZERS):
            raise StateError(
                f"parameter '{self.name}': a sharded optimizer updates it, but another one ({_caller(2)}) looks for "
                "its whole gradient, of which there is none, or only this rank's. Call step() of the one that "
                "fleet.distributed_optimizer or hp_sharding.shard returned, without a LookAhead or ModelAverage around "
                "or beside it; average parameters inside 'with hp_sharding.full_parameters(model):'"
            )
        return EagerParamBase._grad_ivar(self)

    def set_value(self, value: Any) -> None:
        """Writes the value; a float32 one for a 16-bit parameter reaches its float32 master with all its bits."""
        keeper = _keeper_of(self)
        if keeper is None or not keeper.write_master(self, value):
            _set_value(self, value)

    @property
    def place(self) -> Any:
        """Where the value is, or where it will be once it is gathered."""
        return EagerParamBase.place.__get__(self) if self._is_initialized() else _current_expected_place_()

    @property
    def grad(self) -> Any:
        """In stage 1 this rank's own gradient; setting it to None clears it, setting anything else is an error.

        Paddle's functions that clip the gradients of a list of parameters are refused, since they would see this rank's
        own ones in stage 1, and none in the others.
        """
        gradient = EagerParamBase.grad.__get__(self)
        if _keeper_of(self) is not None:
            caller = _caller(2)
            if caller in _CLIPPERS:
                raise StateError(f"parameter '{self.name}': {_CLIPPERS[caller]}")
            if gradient is not None:
                _count_writes(gradient)
        return gradient

    @grad.setter
    def grad(self, value: Any) -> None:
        keeper = _keeper_of(self)
        if keeper is None:
            EagerParamBase.grad.__set__(self, value)
        elif value is None:
            self.clear_gradient(False)
        else:
            raise StateError(
                f"parameter '{self.name}': it is reduced during backward, so setting its gradient changes nothing. "
                "Use optimizer.set_full_grad(param, value) on every rank, or edit optimizer.local_grads() in place"
            )

    grad_ = grad


_CLIPPERS = {
    "paddle.nn.utils.clip_grad_norm_": "paddle.nn.utils.clip_grad_norm_ does not see the reduced gradients, and would "
    "clip nothing or too little. Call optimizer.clip_grad_norm(max_norm), on every rank, or give the optimizer a "
    "paddle.nn.ClipGradByGlobalNorm",
    "paddle.nn.utils.clip_grad_value_": "paddle.nn.utils.clip_grad_value_ does not see the reduced gradients, and "
    "would clip nothing or this rank's own. Give the optimizer a paddle.nn.ClipGradByValue, or clip what "
    "optimizer.local_grads() returns in place",
}
"""Modules of functions that clip the gradients of parameters, and what to say to their callers."""


def _count_writes(gradient: Any) -> None:
    """Has the writes that Paddle does not count raise ``inplace_version`` as all others do."""
    reference = weakref.ref(gradient)
    for name in ("set_value", "copy_"):
        setattr(gradient, name, functools.partial(_counted_write, reference, name))


def _counted_write(reference: Callable[[], Any], name: str, *args: Any, **kwargs: Any) -> Any:
    gradient = reference()
    result = getattr(Tensor, name)(gradient, *args, **kwargs)
    gradient._bump_inplace_version()
    return result


_WHOLE_OPTIMIZERS = ("paddle.optimizer.", "paddle.incubate.optimizer.")


def _caller(depth: int) -> str:
    """Name of the module whose function, so many calls up, called the method that asks."""
    return str(sys._getframe(depth).f_globals.get("__name__", ""))


def _keeper_of(param: EagerParamBase) -> ValueKeeper | None:
    guard = param.__dict__.get("_hp_guard")
    return guard.keeper() if guard is not None else None


_WRITES = frozenset(("set_value", "copy_", "zero_", "fill_", "__setitem__", "_clear", "get_tensor", "value"))
_RESHAPES = frozenset(("t_", "transpose_", "reshape_", "resize_", "flatten_", "squeeze_", "unsqueeze_", "cast_"))
_PRIVATE_VALUES = ("_to", "_copy_to", "_md5sum")
"""What ``Layer.astype`` and debug prints call."""
_METADATA = (
    "clear_grad", "clear_gradient", "dim", "element_size", "gradient", "is_dense", "is_dist",
    "is_floating_point", "is_integer", "is_complex", "is_leaf", "is_same_shape", "is_selected_rows",
    "is_sparse", "is_sparse_coo", "is_sparse_csr", "is_tensor", "is_contiguous", "ndimension", "nelement",
    "rank", "register_hook", "retain_grads", "size", "get_strides", "strides", "stride", "get_shape",
    "data_ptr", "offset", "requires_grad_", "backward", "apply_", "num_shard", "get_map_tensor",
    "get_selected_rows",
)  # fmt: skip
_VALUE_OPERATORS = (
    "array", "dlpack", "getitem", "setitem", "iter", "float", "int", "long", "index", "bool", "nonzero",
    "complex", "deepcopy", "reduce", "reduce_ex", "str", "repr", "format", "contains", "add", "radd", "iadd",
    "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv", "div", "rdiv", "floordiv",
    "rfloordiv", "mod", "rmod", "pow", "rpow", "matmul", "rmatmul", "neg", "abs", "eq", "ne", "lt", "le", "gt",
    "ge", "and", "or", "xor", "invert", "rand", "ror", "rxor", "lshift", "rshift", "pos",
)  # fmt: skip


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    writes = name in _WRITES or (name.endswith("_") and not name.startswith("_")) or name.startswith("__i")

    @functools.wraps(method)
    def guarded(self: EagerParamBase, *args: Any, **kwargs: Any) -> Any:
        keeper = _keeper_of(self)
        if keeper is None:
            return method(self, *args, **kwargs)
        if name in _RESHAPES:
            raise LayoutError(
                f"parameter '{self.name}': {name}() would change its shape or dtype {list(self.shape)}, but it has a "
                "fixed place in its bucket, from which the next gather would undo that. Change it before the model is "
                f"wrapped, or work on a new tensor: param.{name[:-1]}()"
            )
        keeper.make_readable(self)
        result = method(self, *args, **kwargs)
        if writes:
            keeper.note_write(self)
        return result

    return guarded


_set_value = _guarded("set_value", EagerParamBase.set_value)


def _fill_in() -> None:
    for name in dir(EagerParamBase):
        if name in vars(GuardedParameter):
            continue
        method = getattr(EagerParamBase, name, None)
        public = (not name.startswith("_") and name not in _METADATA) or name in _PRIVATE_VALUES
        operator = name.startswith("__") and name.strip("_") in _VALUE_OPERATORS
        if callable(method) and not isinstance(method, type) and (public or operator):
            setattr(GuardedParameter, name, _guarded(name, method))
    for name in ("T", "mT", "data"):
        view = getattr(EagerParamBase, name)
        setattr(GuardedParameter, name, property(_guarded(name, view.__get__), _guarded(name, view.__set__)))
    GuardedParameter.__hash__ = EagerParamBase.__hash__  # type: ignore[method-assign]  # __eq__ would take it away


_fill_in()


class GuardedParameters(OrderedDict[str, Any]):
    """A layer's ``_parameters`` that tells the keeper of every look-up. Copies and pickles are plain OrderedDicts."""

    def __init__(self, entries: OrderedDict[str, Any], keeper: ValueKeeper) -> None:
        self._keeper: Callable[[], ValueKeeper | None] = lambda: None
        super().__init__(entries)
        self._keeper = weakref.ref(keeper)

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        keeper = self._keeper()
        if keeper is not None and param is not None:
            keeper.look_up(param)
        return param

    def __setitem__(self, name: str, param: Any) -> None:
        keeper = self._keeper()
        if keeper is not None and param is not None:
            _admit_param(name, param, keeper)
        super().__setitem__(name, param)

    # What ``model.parameters()`` and loops over a ParameterList go through. OrderedDict's own would pass us by.
    def items(self) -> list[tuple[str, Any]]:  # type: ignore[override]
        return [(name, self[name]) for name in self]

    def values(self) -> list[Any]:  # type: ignore[override]
        return [self[name] for name in self]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - that would be this method again

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(super().items()),)

    def copy(self) -> OrderedDict[str, Any]:  # type: ignore[override]
        return OrderedDict(super().items())


class GuardedSublayers(OrderedDict[str, Any]):
    """A layer's ``_sub_layers`` that guards or refuses layers that come later. Copies and pickles are plain."""

    def __init__(self, entries: OrderedDict[str, Any], keeper: ValueKeeper) -> None:
        self._keeper: Callable[[], ValueKeeper | None] = lambda: None
        super().__init__(entries)
        self._keeper = weakref.ref(keeper)

    def __setitem__(self, name: str, layer: Any) -> None:
        keeper = self._keeper()
        if keeper is not None and isinstance(layer, nn.Layer):
            _admit_layer(name, layer, keeper)
        super().__setitem__(name, layer)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)

    def copy(self) -> OrderedDict[str, Any]:  # type: ignore[override]
        return OrderedDict(self.items())


def _admit_param(name: str, param: EagerParamBase, keeper: ValueKeeper) -> None:
    """Raises LayoutError for one that trains and was not there when the model was wrapped."""
    if _keeper_of(param) is not keeper:
        check_frozen([(name, param)])
        keeper.note_late(name, param)


def check_frozen(late: Iterable[tuple[str, EagerParamBase]]) -> None:
    """Raises LayoutError for one that trains. ``late`` holds what came after the model was wrapped, with its name."""
    for name, param in late:
        if param.stop_gradient:
            continue
        raise LayoutError(
            f"parameter '{name}' ({param.name}, of shape {list(param.shape)}) comes after the model was wrapped, so "
            "nobody would train it or make it the same on all ranks. Add and replace parameters before the model is "
            "wrapped, or freeze them (stop_gradient = True); write new values with set_value or set_state_dict"
        )


def _admit_layer(name: str, layer: nn.Layer, keeper: ValueKeeper) -> None:
    """Guards a layer that comes late. Raises LayoutError for parameters that train and for sparse embeddings."""
    for prefix, part in layer.named_sublayers(prefix=name, include_self=True):
        for key, param in OrderedDict.items(part._parameters):
            if param is not None:
                _admit_param(f"{prefix}.{key}", param, keeper)
    sparse = sparse_embedding(layer, name)
    if sparse is not None:
        raise LayoutError(sparse)
    guard_layers(layer, keeper)


def sparse_embedding(model: nn.Layer, prefix: str = "") -> str | None:
    """Why a model with ``nn.Embedding(sparse=True)`` in it is refused, naming the layer; None without one."""
    for name, layer in model.named_sublayers(prefix=prefix, include_self=True):
        if isinstance(layer, nn.Embedding) and getattr(layer, "_sparse", False):
            return (
                f"layer '{name}': nn.Embedding(sparse=True) is not supported; use sparse=False. A sparse gradient "
                "holds the rows that this rank has used, which are others on each rank, so no bucket has room for it"
            )
    return None


def guard_params(params: list[EagerParamBase], keeper: ValueKeeper) -> None:
    """Turns each of ``params`` into a GuardedParameter; the objects stay the same. Own subclasses stay unguarded."""
    for param in params:
        if type(param) is EagerParamBase:
            param.__class__ = GuardedParameter
        param.__dict__["_hp_guard"] = _Guard(keeper, held=True)


def guard_layers(model: nn.Layer, keeper: ValueKeeper) -> None:
    """Guards ``_parameters`` and ``_sub_layers`` of every layer of ``model``; what they hold now may stay there."""
    for layer in model.sublayers(include_self=True):
        for param in OrderedDict.values(layer._parameters):
            if param is not None and _keeper_of(param) is None:
                param.__dict__["_hp_guard"] = _Guard(keeper)
        if not _is_guarded(layer, keeper):
            layer.__dict__["_parameters"] = GuardedParameters(layer._parameters, keeper)
            layer.__dict__["_sub_layers"] = GuardedSublayers(layer._sub_layers, keeper)


def _is_guarded(layer: nn.Layer, keeper: ValueKeeper) -> bool:
    mappings = (layer._parameters, layer._sub_layers)
    return all(isinstance(mapping, _GUARDED) and mapping._keeper() is keeper for mapping in mappings)


_GUARDED = (GuardedParameters, GuardedSublayers)


def layer_lists(model: nn.Layer) -> list[weakref.ref[nn.Layer]]:
    """The lists of layers in ``model``, for ``guard_again``."""
    return [weakref.ref(layer) for layer in model.sublayers(include_self=True) if isinstance(layer, nn.LayerList)]


def guard_again(lists: list[weakref.ref[nn.Layer]], keeper: ValueKeeper) -> None:
    """Looks at what has come into lists of layers whose mapping is a new one, as after ``del layers[0]``.

    Raises:
        LayoutError: a layer with parameters that train has come in.
    """
    for reference in lists:
        layer = reference()
        if layer is not None and type(layer._sub_layers) is not GuardedSublayers:
            for name, child in layer._sub_layers.items():
                _admit_layer(name, child, keeper)
            layer.__dict__["_sub_layers"] = GuardedSublayers(layer._sub_layers, keeper)


def held_param(model: nn.Layer) -> str | None:
    """Name of the first parameter of ``model`` that the optimizer of a wrapped model updates; None without one."""
    for name, param in model.named_parameters():
        guard = param.__dict__.get("_hp_guard")
        if guard is not None and guard.held and guard.keeper() is not None:
            return str(name)
    return None
