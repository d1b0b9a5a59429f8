"""Guards on parameters: whoever reads or writes a value right after ``step()`` sees the newest one, or an error.

The forward's hooks are the schedule; these are what keeps everyone else right. A parameter's class becomes
``GuardedParameter``, whose value-reading methods first make the value valid, and a layer's ``_parameters`` becomes
``GuardedParameters``, which does the same when a forward looks a parameter up. DeepSpeed guards the mapping likewise.
Neither ever starts a collective on its own outside a forward: a value that is freed there raises.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

from paddle import nn
from paddle.base.framework import EagerParamBase

from .errors import StateError


class ValueKeeper(Protocol):
    """Makes parameters valid; the schedule of one wrapped model."""

    def make_readable(self, param: EagerParamBase) -> None:
        """Returns once the value is valid. Raises StateError where it is freed."""

    def note_write(self, param: EagerParamBase) -> None:
        """Told after a write to the value."""

    def look_up(self, param: EagerParamBase) -> None:
        """Told that a layer looked the parameter up; makes it valid inside a forward."""

    def note_clear(self, param: EagerParamBase, *, set_to_zero: bool) -> None:
        """Told before the user clears the gradient of this parameter alone."""


class _Guard:
    """Weak link from a parameter to its keeper. A deep copy of the parameter gets a link that leads nowhere."""

    def __init__(self, keeper: ValueKeeper | None) -> None:
        self.keeper: Callable[[], ValueKeeper | None] = weakref.ref(keeper) if keeper is not None else lambda: None

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

    @property
    def grad(self) -> Any:
        """In stage 1 this rank's own gradient; setting it to None clears it, setting anything else is an error."""
        return EagerParamBase.grad.__get__(self)

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
                "Scale the loss, give the optimizer a grad_clip, or register a hook on the parameter instead"
            )


def _keeper_of(param: EagerParamBase) -> ValueKeeper | None:
    guard = param.__dict__.get("_hp_guard")
    return guard.keeper() if guard is not None else None


_WRITES = frozenset(("set_value", "copy_", "zero_", "fill_", "__setitem__", "_clear", "get_tensor", "value"))
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
        keeper.make_readable(self)
        result = method(self, *args, **kwargs)
        if writes:
            keeper.note_write(self)
        return result

    return guarded


def _fill_in() -> None:
    for name in dir(EagerParamBase):
        method = getattr(EagerParamBase, name, None)
        public = not name.startswith("_") and name not in _METADATA
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
        super().__init__(entries)
        self._keeper = weakref.ref(keeper)

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        keeper = self._keeper()
        if keeper is not None and param is not None:
            keeper.look_up(param)
        return param

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


def guard_params(params: list[EagerParamBase], keeper: ValueKeeper) -> None:
    """Turns each of ``params`` into a GuardedParameter; the objects stay the same. Own subclasses stay unguarded."""
    for param in params:
        if type(param) is EagerParamBase:
            param.__class__ = GuardedParameter
        param.__dict__["_hp_guard"] = _Guard(keeper)


def guard_layers(model: nn.Layer, keeper: ValueKeeper) -> None:
    """Guards ``_parameters`` of every layer of ``model``."""
    for layer in model.sublayers(include_self=True):
        if layer._parameters:
            layer.__dict__["_parameters"] = GuardedParameters(layer._parameters, keeper)
