"""Hooks: the only place that registers any. They see what happens; the schedule decides what follows.

No hook keeps the schedule or a layer alive, none changes inputs, outputs or gradients, and all are deaf in deep copies
of the model. In stage 3 a backward needs parameters that have been freed, and Paddle has no hook for "this layer's
backward begins": so what a layer returns is watched, and what it keeps as an attribute, such as an auxiliary loss. The
hook on such a tensor fires when its gradient is complete, before the operation that made it is differentiated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase

from . import backward
from .errors import StateError
from .gathers import Place
from .outputs import ATOMS, kept_tensors, tensors_in
from .residency import Call


class HookTarget(Protocol):
    """What hooks tell; the schedule of one wrapped model."""

    @property
    def call(self) -> Call | None:
        """The innermost run of a unit's forward."""

    def enter_unit(self, unit: int) -> None:
        """Before a unit's forward."""

    def leave_unit(self, unit: int) -> None:
        """After a unit's forward, also where it raised."""

    def enter_part(self, unit: int) -> bool:
        """Before the forward of a layer of the unit; whether it stands for the unit, which is then entered."""

    def has_frozen(self, unit: int) -> bool:
        """Whether some parameter of the unit takes no gradient."""

    def pass_on(self, values: Any) -> None:
        """What a unit has returned."""

    def enter_backward(self, call: Call) -> None:
        """A gradient of something that the call returned is in."""

    def arrive(self, awaited: tuple[int, int]) -> None:
        """A gradient is in that says when a call is over."""

    def take_gradient(self, place: Place) -> None:
        """A parameter's gradient is in ``param.grad``."""


def hook_unit(target: HookTarget, layer: nn.Layer, unit: int) -> None:
    """Stages 1 and 2: tells of the forwards of a unit's layer."""
    reference, layer_ref = weakref.ref(target), weakref.ref(layer)

    def before(caller: nn.Layer, *_: Any) -> None:
        living = reference()
        if living is not None and caller is layer_ref():
            living.enter_unit(unit)

    def after(caller: nn.Layer, *_: Any) -> None:
        living = reference()
        if living is not None and caller is layer_ref():
            living.leave_unit(unit)

    # Before hooks that are there already: those of weight_norm and spectral_norm read parameters.
    layer.register_forward_pre_hook(before, prepend=True)
    layer.register_forward_post_hook(after)


def watch_unit(target: HookTarget, layers: Sequence[nn.Layer], unit: int) -> None:
    """Stage 3: tells of the forwards of a unit's layer, the first of ``layers``, and of what its backward will need.

    The other layers of the unit may be called without it, or return something that leaves the unit some other way.
    """
    watch = _UnitWatch(target, layers, unit)
    _watch_layer(watch, layers[0], stands=True)
    for layer in layers[1:]:
        if layer._parameters:
            _watch_layer(watch, layer, stands=False)


def watch_tensors(target: HookTarget, values: Any, call: Call) -> None:
    """Has the call's parameters gathered when the gradient of one of these tensors comes in."""
    hook = None
    for tensor in tensors_in(values):
        # A leaf would keep its hooks for ever, and nothing lies behind it.
        if not (tensor.stop_gradient or tensor.is_leaf):
            hook = hook or _call_hook(target, call)
            tensor.register_hook(hook)


def hook_gradient(target: HookTarget, param: EagerParamBase, place: Place) -> None:
    """Tells when the parameter's gradient has been accumulated. Paddle cannot remove such a hook: it goes quiet."""
    reference = weakref.ref(target)

    def hook() -> None:
        living = reference()
        if living is None:
            return
        try:
            if not backward.in_backward():
                raise StateError(
                    "a gradient came in, but nobody announced its backward, so it would never be reduced: something "
                    "put back paddle.base.core.eager.run_backward after the model was wrapped. Wrap the model after it"
                )
            living.take_gradient(place)
        except BaseException as error:
            backward.keep_error(error)
            raise

    param._register_backward_hook(hook)


class _UnitWatch:
    """What the hooks on the layers of one unit have in common."""

    def __init__(self, target: HookTarget, layers: Sequence[nn.Layer], unit: int) -> None:
        self.unit = unit
        self.standing: list[bool] = []
        """For each forward of a part under way, whether it stands for the unit."""
        self._given: list[set[int] | None] = []
        self._target = weakref.ref(target)
        self._layers = [weakref.ref(layer) for layer in layers]
        self._seen: dict[tuple[int, str], weakref.ref[paddle.Tensor]] = {}

    @property
    def target(self) -> HookTarget | None:
        return self._target()

    def watch_inputs(self, target: HookTarget, inputs: Any) -> None:
        """Frozen parameters have no gradient that says when the last operation has read them; the inputs' do."""
        call = target.call
        if call is None or not paddle.is_grad_enabled() or not target.has_frozen(self.unit):
            return
        for number, tensor in enumerate(tensors_in(inputs)):
            if not tensor.stop_gradient:
                awaited = (-2 - id(call), number)
                call.awaited_inputs.add(awaited)
                if not tensor.is_leaf:  # else the call lasts until its backward has ended
                    tensor.register_hook(_arrival_hook(target, awaited))

    def note_inputs(self, inputs: Any) -> None:
        """A forward may leave results in a list or dict that it was given."""
        self._given.append({id(tensor) for tensor in tensors_in(inputs)} if _has_containers(inputs) else None)

    def watch_given(self, target: HookTarget, inputs: Any) -> None:
        known = self._given.pop()
        call = target.call
        if known is not None and call is not None and paddle.is_grad_enabled():
            watch_tensors(target, [tensor for tensor in tensors_in(inputs) if id(tensor) not in known], call)

    def watch_outputs(self, target: HookTarget, outputs: Any) -> None:
        call = target.call
        if call is not None and paddle.is_grad_enabled():
            watch_tensors(target, outputs, call)

    def watch_kept(self, target: HookTarget) -> None:
        """Tensors that the forward has left in attributes."""
        call = target.call
        if call is None or not paddle.is_grad_enabled():
            return
        for layer in (reference() for reference in self._layers):
            for name, tensor in kept_tensors(layer) if layer is not None else ():
                known = self._seen.get((id(layer), name))
                if known is None or known() is not tensor:
                    self._seen[id(layer), name] = weakref.ref(tensor)
                    watch_tensors(target, tensor, call)


def _watch_layer(watch: _UnitWatch, layer: nn.Layer, *, stands: bool) -> None:
    """Hooks on one layer; ``stands`` for the unit's own."""
    layer_ref = weakref.ref(layer)

    def before(caller: nn.Layer, inputs: Any, kwargs: Any) -> None:
        target = watch.target
        if target is None or caller is None or caller is not layer_ref():
            return
        hooks = caller.__dict__["_forward_post_hooks"]
        if last._hook_id != next(reversed(hooks), None):
            hooks.move_to_end(last._hook_id)  # those that the user has registered since may read parameters, too
        if stands:
            watch.standing.append(True)
            target.enter_unit(watch.unit)
        else:
            watch.standing.append(False)
            watch.standing[-1] = target.enter_part(watch.unit)
        watch.note_inputs((inputs, kwargs))
        if watch.standing[-1]:
            watch.watch_inputs(target, (inputs, kwargs))

    def after(caller: nn.Layer, inputs: Any, kwargs: Any, outputs: Any) -> None:
        target = watch.target
        if target is None or caller is not layer_ref() or not watch.standing:
            return
        watch.watch_outputs(target, outputs)
        watch.watch_given(target, (inputs, kwargs))
        if watch.standing.pop():
            watch.watch_kept(target)
            target.leave_unit(watch.unit)
            target.pass_on(outputs)

    layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    last = layer.register_forward_post_hook(after, with_kwargs=True, always_call=True)


def _has_containers(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    args, kwargs = inputs
    return any(not isinstance(value, (paddle.Tensor, *ATOMS)) for value in (*args, *kwargs.values()))


def _call_hook(target: HookTarget, call: Call) -> Callable[[paddle.Tensor], None]:
    reference = weakref.ref(target)

    def hook(_: paddle.Tensor) -> None:
        living = reference()
        if living is not None:
            _keep_error(living.enter_backward, call)

    return hook


def _arrival_hook(target: HookTarget, awaited: tuple[int, int]) -> Callable[[paddle.Tensor], None]:
    reference = weakref.ref(target)

    def hook(_: paddle.Tensor) -> None:
        living = reference()
        if living is not None:
            _keep_error(living.arrive, awaited)

    return hook


def _keep_error(method: Callable[[Any], None], argument: Any) -> None:
    try:
        method(argument)
    except BaseException as error:
        backward.keep_error(error)
        raise
