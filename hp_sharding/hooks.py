"""Hooks: the only place that registers any. They see what happens; the schedule decides what follows.

No hook keeps the schedule or a layer alive, none changes outputs or gradients, and all are deaf in deep copies of the
model; but the one that casts inputs for 16-bit parameters, which a copy has too. In stage 3 a backward needs parameters
that have been freed, and Paddle has no hook for "this layer's backward begins": so what a layer returns is watched, and
what it keeps as an attribute, such as an auxiliary loss. The hook on such a tensor fires when its gradient is complete,
before the operation that made it is differentiated.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase

from . import backward
from .errors import StateError
from .outputs import ATOMS, kept_tensors, tensors_in
from .precision import cast_inputs, stays_float32
from .residency import Call
from .timeline import Timeline
from .units import UnitPlan


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

    def leave_part(self, unit: int, *, stands: bool) -> None:
        """After it, also where it raised."""

    def has_frozen(self, unit: int) -> bool:
        """Whether some parameter of the unit takes no gradient."""

    def pass_on(self, values: Any) -> None:
        """What a unit has returned."""

    def enter_backward(self, call: Call) -> None:
        """A gradient of something that the call returned is in."""

    def arrive(self, awaited: tuple[int, int]) -> None:
        """A gradient is in that says when a call is over."""

    def take_gradient(self, param: int) -> None:
        """The gradient of the parameter with this ``id`` is in ``param.grad``."""


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
    layer.register_forward_post_hook(after, always_call=True)


def watch_unit(target: HookTarget, layers: Sequence[nn.Layer], unit: int) -> None:
    """Stage 3: tells of the forwards of a unit's layer, the first of ``layers``, and of what its backward will need.

    The other layers of the unit may be called without it, or return something that leaves the unit some other way.
    """
    watch = _UnitWatch(target, layers, unit)
    _watch_layer(watch, layers[0], is_part=False)
    for layer in layers[1:]:
        if layer._parameters:
            _watch_layer(watch, layer, is_part=True)


def watch_tensors(target: HookTarget, values: Any, call: Call) -> None:
    """Has the call's parameters gathered when the gradient of one of these tensors comes in."""
    hook = None
    for tensor in tensors_in(values):
        # A leaf would keep its hooks for ever, and nothing lies behind it.
        if not (tensor.stop_gradient or tensor.is_leaf):
            hook = hook or _tensor_hook(target, lambda living: living.enter_backward(call))
            tensor.register_hook(hook)


def hook_inputs(layers: Sequence[nn.Layer], dtype: str) -> None:
    """Has floating-point inputs of each layer's forward cast to ``dtype``, before any other hook sees them.

    Not those of layers whose parameters stay in float32.
    """

    def cast(_: nn.Layer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_inputs(args, dtype), cast_inputs(kwargs, dtype)

    for layer in layers:
        if not stays_float32(layer, dtype):
            layer.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)


def show_inputs(layer: nn.Layer, look: Callable[[Any], None]) -> None:
    """Calls ``look((args, kwargs))`` before each forward of the layer, and before all hooks that are there already."""
    layer_ref = weakref.ref(layer)

    def before(caller: nn.Layer, args: Any, kwargs: Any) -> None:
        if caller is layer_ref():
            look((args, kwargs))

    layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def mark_units(timeline: Timeline, plan: UnitPlan) -> list[Any]:
    """Has the timeline told of forwards and gradients of a model without a schedule. Returns what can be removed."""
    reference = weakref.ref(timeline)

    def hearing(caller: nn.Layer, layer_ref: weakref.ref[nn.Layer]) -> Timeline | None:
        # What a copy of the model does, now or when nothing is recorded any more, is nobody's business here.
        line = reference()
        return line if line is not None and line.enabled and caller is layer_ref() else None

    def before(caller: nn.Layer, *_: Any, name: str, layer_ref: weakref.ref[nn.Layer]) -> None:
        line = hearing(caller, layer_ref)
        if line is not None:
            line.enter("recompute" if backward.in_backward() else "forward", name)

    def after(caller: nn.Layer, *_: Any, layer_ref: weakref.ref[nn.Layer]) -> None:
        line = hearing(caller, layer_ref)
        if line is not None:
            line.leave()

    def arrived(_: paddle.Tensor, name: str) -> None:
        line = reference()
        if line is not None and line.enabled:
            line.until(name)

    handles = []
    for unit in plan.units:
        layer_ref = weakref.ref(unit.layer)
        first = functools.partial(before, name=unit.name, layer_ref=layer_ref)
        last = functools.partial(after, layer_ref=layer_ref)
        handles.append(unit.layer.register_forward_pre_hook(first, prepend=True))
        handles.append(unit.layer.register_forward_post_hook(last, always_call=True))
    trained = [entry for entry in plan.params if not entry.param.stop_gradient]
    named = [(entry.param, functools.partial(arrived, name=plan.units[entry.unit].name)) for entry in trained]
    return [*handles, *(param.register_hook(hook) for param, hook in named)]


def hook_gradient(target: HookTarget, param: EagerParamBase) -> None:
    """Tells when the parameter's gradient has been accumulated. Paddle cannot remove such a hook: it goes quiet."""
    reference, key = weakref.ref(target), id(param)

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
            living.take_gradient(key)
        except BaseException as error:
            backward.keep_error(error)
            raise

    param._register_backward_hook(hook)


class _Run:
    """One forward of a layer under way.

    ``stands``: it is the unit's own layer, or stands for it. ``given``: the tensors in containers among its inputs.
    """

    __slots__ = ("given", "layer", "stands")

    def __init__(self, layer: nn.Layer, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.layer = layer
        self.stands = False
        self.given: dict[int, weakref.ref[paddle.Tensor]] | None = None
        if _has_containers(inputs):
            self.given = {id(tensor): weakref.ref(tensor) for tensor in tensors_in(inputs)}

    def new_in(self, inputs: Any) -> list[paddle.Tensor]:
        """Results that the forward has left in a list or dict that it was given."""
        if self.given is None:
            return []
        return [tensor for tensor in tensors_in(inputs) if not self._was_given(tensor)]

    def _was_given(self, tensor: paddle.Tensor) -> bool:
        assert self.given is not None
        reference = self.given.get(id(tensor))  # an id alone may be that of one that has died
        return reference is not None and reference() is tensor


class _UnitWatch:
    """What the hooks on the layers of one unit have in common."""

    def __init__(self, target: HookTarget, layers: Sequence[nn.Layer], unit: int) -> None:
        self.unit = unit
        self._runs: list[_Run] = []
        self._target = weakref.ref(target)
        self._layers = [weakref.ref(layer) for layer in layers]
        self._seen: dict[tuple[int, str], weakref.ref[paddle.Tensor]] = {}
        self._n_awaited = 0

    @property
    def target(self) -> HookTarget | None:
        return self._target()

    def begin(self, target: HookTarget, layer: nn.Layer, inputs: Any, *, is_part: bool) -> None:
        run = _Run(layer, inputs)
        self._runs.append(run)
        if is_part:
            run.stands = target.enter_part(self.unit)
        else:
            run.stands = True
            target.enter_unit(self.unit)
        if run.stands:
            self._watch_inputs(target, inputs)

    def end(self, target: HookTarget, layer: nn.Layer, inputs: Any, *, is_part: bool, outputs: Any) -> None:
        if not any(run.layer is layer for run in self._runs):
            return  # a hook before ours has raised
        while (run := self._runs.pop()).layer is not layer:
            pass  # as above, further inside
        call = target.call
        if call is not None:
            watch_tensors(target, outputs, call)
            watch_tensors(target, run.new_in(inputs), call)
            if run.stands and paddle.is_grad_enabled():
                self._watch_kept(target, call)
        if is_part:
            target.leave_part(self.unit, stands=run.stands)
        else:
            target.leave_unit(self.unit)
        if run.stands:
            target.pass_on(outputs)

    def _watch_inputs(self, target: HookTarget, inputs: Any) -> None:
        """Frozen parameters have no gradient that says when the last operation has read them; the inputs' do."""
        call = target.call
        if call is None or not paddle.is_grad_enabled() or not target.has_frozen(self.unit):
            return
        for tensor in tensors_in(inputs):
            if not tensor.stop_gradient:
                self._n_awaited += 1
                awaited = (-2 - self.unit, self._n_awaited)
                call.awaited_inputs.add(awaited)
                if not tensor.is_leaf:  # else the call lasts until its backward has ended
                    tensor.register_hook(_tensor_hook(target, functools.partial(_tell_arrival, awaited=awaited)))

    def _watch_kept(self, target: HookTarget, call: Call) -> None:
        """Tensors that the forward has left in attributes."""
        for layer in (reference() for reference in self._layers):
            for name, tensor in kept_tensors(layer) if layer is not None else ():
                known = self._seen.get((id(layer), name))
                if known is None or known() is not tensor:
                    self._seen[id(layer), name] = weakref.ref(tensor)
                    watch_tensors(target, tensor, call)


def _watch_layer(watch: _UnitWatch, layer: nn.Layer, *, is_part: bool) -> None:
    """Hooks on one layer of a unit, its own or a part of it."""
    layer_ref = weakref.ref(layer)

    def before(caller: nn.Layer, args: Any, kwargs: Any) -> None:
        target = watch.target
        if target is None or caller is None or caller is not layer_ref():
            return
        hooks = caller.__dict__["_forward_post_hooks"]
        if last._hook_id != next(reversed(hooks), None):
            hooks.move_to_end(last._hook_id)  # those that the user has registered since may read parameters, too
        watch.begin(target, caller, (args, kwargs), is_part=is_part)

    def after(caller: nn.Layer, args: Any, kwargs: Any, outputs: Any) -> None:
        target = watch.target
        if target is not None and caller is not None and caller is layer_ref():
            watch.end(target, caller, (args, kwargs), is_part=is_part, outputs=outputs)

    layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    last = layer.register_forward_post_hook(after, with_kwargs=True, always_call=True)


def _has_containers(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    args, kwargs = inputs
    return any(not isinstance(value, (paddle.Tensor, *ATOMS)) for value in (*args, *kwargs.values()))


def _tell_arrival(target: HookTarget, *, awaited: tuple[int, int]) -> None:
    target.arrive(awaited)


def _tensor_hook(target: HookTarget, tell: Callable[[HookTarget], None]) -> Callable[[paddle.Tensor], None]:
    reference = weakref.ref(target)

    def hook(_: paddle.Tensor) -> None:
        living = reference()
        if living is None:
            return
        try:
            tell(living)
        except BaseException as error:
            backward.keep_error(error)
            raise

    return hook
