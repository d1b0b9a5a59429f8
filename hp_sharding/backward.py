"""When a backward begins, ends or fails: ``core.eager.run_backward``, wrapped once while any model is sharded.

Backwards nest: reentrant recompute runs one inside a hook of another. Only the outermost one is a backward of the
user's. Paddle's own end-of-backward callback fires for each nested one and after failures, so it cannot be used.

Paddle turns an exception raised in a hook into a SystemError or OSError. Hooks hand theirs to ``keep_error``, and the
wrapper raises it as itself.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from paddle.base import core, framework


class BackwardListener(Protocol):
    """What a wrapped model is told; all three only for the outermost backward, on the thread that runs it."""

    def begin_backward(self) -> None:
        """Before it starts."""

    def end_backward(self) -> None:
        """All gradients are in."""

    def abort_backward(self) -> None:
        """It raised, or what was told of it did."""


class _State(threading.local):
    depth: int = 0
    error: BaseException | None = None


# The one process-wide change: Paddle has a single entry for all backwards. Listeners are held weakly, in order of
# wrapping; the wrapper goes when the last of them does.
_state = _State()
_listeners: dict[int, weakref.ref[Any]] = {}
_original: Any = None


def attach(listener: BackwardListener) -> None:
    """Tells ``listener`` of every outermost backward from now on, for as long as it lives."""
    global _original
    # First of all it is on the list: the garbage collector may run at any moment, find that an earlier listener was
    # the last, and take the wrapper away.
    key = id(listener)
    _listeners[key] = weakref.ref(listener, lambda _: _detach(key))
    # Where somebody has put Paddle's own back, over our head, it is wrapped again.
    if _original is None or core.eager.run_backward is _original:
        _original = core.eager.run_backward
        core.eager.run_backward = _run_backward


def detach(listener: BackwardListener) -> None:
    """Ends ``attach``; may be called twice."""
    _detach(id(listener))


def _detach(key: int) -> None:
    global _original
    _listeners.pop(key, None)
    # Where somebody else has wrapped our wrapper meanwhile, it has to stay, and only passes calls on.
    ours = core.eager.run_backward is _run_backward
    if ours and not _listeners and not in_backward():
        core.eager.run_backward, _original = _original, None


def in_backward() -> bool:
    """True inside a backward on this thread, at any depth; a forward seen then is one that recompute runs again."""
    return _state.depth > 0


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
    listeners = [listener for reference in list(_listeners.values()) if (listener := reference()) is not None]
    _take_error()
    tracer = framework._dygraph_tracer()
    differentiates = tracer._has_grad
    try:
        for listener in listeners:
            listener.begin_backward()
        result = _nested(args, kwargs)
        for listener in listeners:
            listener.end_backward()
    except BaseException as error:
        # A hook that raises inside a recomputed forward can leave Paddle with gradients switched off, for good.
        tracer._has_grad = differentiates
        for listener in listeners:
            listener.abort_backward()
        kept = _take_error()
        if kept is not None and kept is not error:
            raise kept from None
        raise
    return result


def _nested(args: Any, kwargs: Any) -> Any:
    _state.depth += 1
    try:
        return _original(*args, **kwargs)
    finally:
        _state.depth -= 1
