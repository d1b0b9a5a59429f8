"""When a backward begins, ends or fails: Paddle's two entries to autograd, wrapped once while any model is sharded.

``core.eager.run_backward`` fills ``param.grad``. Backwards nest: reentrant recompute runs one inside a hook of another.
Only the outermost one is a backward of the user's. Paddle's own end-of-backward callback fires for each nested one and
after failures, so it cannot be used. ``core.eager.run_partial_grad`` is ``paddle.grad``: it returns gradients and fills
nothing, but needs parameters all the same.

Paddle turns an exception raised in a hook into a SystemError or OSError. Hooks hand theirs to ``keep_error``, and the
wrapper raises it as itself.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from paddle.autograd.py_layer import PyLayerContext
from paddle.base import core, framework


class BackwardListener(Protocol):
    """What a wrapped model is told, on the thread that runs the backward."""

    def begin_backward(self) -> None:
        """Before the outermost one starts."""

    def end_backward(self) -> None:
        """All gradients of the outermost one are in."""

    def abort_backward(self) -> None:
        """The outermost one raised, or what was told of it did."""

    def end_nested(self, depth: int) -> None:
        """One inside another, at this depth, has ended or raised."""

    def begin_partial(self) -> None:
        """Before ``paddle.grad``."""

    def end_partial(self, results: Sequence[Any]) -> None:
        """``paddle.grad`` has ended; without ``results`` where it raised, or where they cannot be differentiated."""

    def explain(self, error: Exception) -> Exception | None:
        """A better error to raise instead of one that Paddle raised in a backward; None where there is none."""


class _State(threading.local):
    depth: int = 0
    partial: int = 0
    error: BaseException | None = None


# The one process-wide change: Paddle has one entry for all backwards, and one for gradients asked for by value.
# Listeners are held weakly, in order of wrapping; the wrappers go when the last of them does.
_state = _State()
_listeners: dict[int, weakref.ref[Any]] = {}
_original: Any = None
_original_partial: Any = None


def attach(listener: BackwardListener) -> None:
    """Tells ``listener`` of every outermost backward from now on, for as long as it lives."""
    global _original, _original_partial
    # First of all it is on the list: the garbage collector may run at any moment, find that an earlier listener was
    # the last, and take the wrapper away.
    key = id(listener)
    _listeners[key] = weakref.ref(listener, lambda _: _detach(key))
    # Where somebody has put Paddle's own back, over our head, it is wrapped again.
    if _original is None or core.eager.run_backward is _original:
        _original = core.eager.run_backward
        core.eager.run_backward = _run_backward
    if _original_partial is None or core.eager.run_partial_grad is _original_partial:
        _original_partial = core.eager.run_partial_grad
        core.eager.run_partial_grad = _run_partial_grad


def detach(listener: BackwardListener) -> None:
    """Ends ``attach``; may be called twice."""
    _detach(id(listener))


def _detach(key: int) -> None:
    global _original, _original_partial
    _listeners.pop(key, None)
    if _listeners or in_backward():
        return
    # Where somebody else has wrapped our wrapper meanwhile, it has to stay, and only passes calls on.
    if core.eager.run_backward is _run_backward:
        core.eager.run_backward, _original = _original, None
    if core.eager.run_partial_grad is _run_partial_grad:
        core.eager.run_partial_grad, _original_partial = _original_partial, None


def in_backward() -> bool:
    """True inside a backward on this thread, at any depth; a forward seen then is one that recompute runs again."""
    return _state.depth + _state.partial > 0


def depth() -> int:
    """How many backwards, ``paddle.grad`` among them, are under way on this thread, one inside another."""
    return _state.depth + _state.partial


def in_custom_forward() -> bool:
    """True inside the forward of a PyLayer, such as the one by which reentrant recompute runs a function at first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and isinstance(frame.f_locals.get(code.co_varnames[0]), PyLayerContext):
            return True
        frame = frame.f_back
    return False


def keep_error(error: BaseException) -> None:
    """Keeps the first exception of a hook, to be raised by the backward that runs the hook."""
    if _state.error is None:
        _state.error = error


def _take_error() -> BaseException | None:
    error, _state.error = _state.error, None
    return error


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    if _state.depth > 0:
        return _nested(args, kwargs)
    listeners = _living()
    _take_error()
    tracer = framework._dygraph_tracer()
    differentiates = tracer._has_grad
    try:
        for listener in listeners:
            listener.begin_backward()
        result = _counted(args, kwargs)
        for listener in listeners:
            listener.end_backward()
    except BaseException as error:
        # A hook that raises inside a recomputed forward can leave Paddle with gradients switched off, for good.
        tracer._has_grad = differentiates
        for listener in listeners:
            listener.abort_backward()
        _raise_better(error, listeners)
        raise
    return result


def _nested(args: Any, kwargs: Any) -> Any:
    try:
        return _counted(args, kwargs)
    finally:
        for listener in _living():
            listener.end_nested(depth() + 1)


def _counted(args: Any, kwargs: Any) -> Any:
    _state.depth += 1
    try:
        return _original(*args, **kwargs)
    finally:
        _state.depth -= 1


def _run_partial_grad(*args: Any, **kwargs: Any) -> Any:
    """``paddle.grad``: arguments as ``core.eager.run_partial_grad`` takes them, the fifth is ``create_graph``."""
    listeners = _living()
    outermost = not in_backward()
    if outermost:
        _take_error()
    for listener in listeners:
        listener.begin_partial()
    results: Sequence[Any] = ()
    _state.partial += 1
    try:
        results = _original_partial(*args, **kwargs)
    except BaseException as error:
        if outermost:
            _raise_better(error, listeners)
        raise
    finally:
        _state.partial -= 1
        differentiable = results if len(args) > 4 and args[4] else ()
        for listener in listeners:
            listener.end_partial(differentiable)
    return results


def _living() -> list[Any]:
    return [listener for reference in list(_listeners.values()) if (listener := reference()) is not None]


def _raise_better(error: BaseException, listeners: Sequence[Any]) -> None:
    """Raises what a hook has kept, or what a listener makes of the error; returns where there is nothing better."""
    kept = _take_error()
    if kept is not None and kept is not error:
        raise kept from None
    if isinstance(error, Exception) and kept is None:
        for listener in listeners:
            better = listener.explain(error)
            if better is not None:
                raise better from error
