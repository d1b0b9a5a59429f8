"""The wrapper around Paddle's ``run_backward``: begin, end and failure of the outermost backward, and nothing else."""

from __future__ import annotations

import gc
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle
import pytest
from paddle.base import core

from hp_sharding import backward


class _Listener:
    """Writes down what it is told, into a list that several may share."""

    def __init__(self, name: str = "a", told: list[str] | None = None) -> None:
        self.name = name
        self.told = told if told is not None else []
        self.inner: list[str] = []
        self.better: Exception | None = None
        self.on_begin: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None

    def begin_backward(self) -> None:
        self.told.append(f"{self.name} begin")
        self.on_begin()

    def end_backward(self) -> None:
        self.told.append(f"{self.name} end")
        self.on_end()

    def abort_backward(self) -> None:
        self.told.append(f"{self.name} abort")

    def end_nested(self, depth: int) -> None:
        self.inner.append(f"{self.name} nested {depth}")

    def begin_partial(self) -> None:
        self.inner.append(f"{self.name} partial begins")

    def end_partial(self, results: Sequence[Any]) -> None:
        self.inner.append(f"{self.name} partial ends, {len(results)} differentiable")

    def explain(self, error: Exception) -> Exception | None:
        return self.better


@pytest.fixture(autouse=True)
def original() -> Iterator[Any]:
    if core.eager.run_backward is backward._run_backward:
        gc.collect()  # models of earlier tests
    before = core.eager.run_backward
    assert before is not backward._run_backward, "an earlier test left it wrapped"
    yield before
    assert core.eager.run_backward is before, "the wrapper was left behind"
    assert not backward._listeners


@pytest.fixture
def listener() -> Iterator[_Listener]:
    told = _Listener()
    backward.attach(told)
    yield told
    backward.detach(told)


def _leaf() -> paddle.Tensor:
    leaf = paddle.ones([2])
    leaf.stop_gradient = False
    return leaf


def _loss(in_hook: Callable[[], None]) -> paddle.Tensor:
    """A loss whose backward calls ``in_hook``."""
    middle = _leaf() * 2

    def hook(gradient: paddle.Tensor) -> None:
        in_hook()

    middle.register_hook(hook)
    return middle.sum()


def _raise_kept(error: BaseException) -> Callable[[], None]:
    def raise_kept() -> None:
        backward.keep_error(error)
        raise error

    return raise_kept


def _raise_unkept() -> None:
    raise ValueError("not handed to keep_error")


_AS_PADDLE_RAISES = (OSError, SystemError)
"""What Paddle makes of an exception in a hook."""


def test_begin_and_end_enclose_the_gradients(listener: _Listener) -> None:
    _loss(lambda: listener.told.append("gradient")).backward()
    assert listener.told == ["a begin", "gradient", "a end"]


@pytest.mark.parametrize(
    "run",
    [
        lambda loss: loss.backward(),
        lambda loss: paddle.autograd.backward([loss]),
        lambda loss: loss.backward(retain_graph=True),
    ],
)
def test_every_way_of_starting_a_backward_is_seen(listener: _Listener, run: Callable[[paddle.Tensor], None]) -> None:
    run(_loss(lambda: None))
    assert listener.told == ["a begin", "a end"]


def test_gradients_asked_for_by_value_are_no_backward(listener: _Listener) -> None:
    leaf = _leaf()
    [gradient] = paddle.grad((leaf * 3).sum(), leaf)
    assert gradient.tolist() == [3, 3]
    assert listener.told == []


def test_inside_a_backward_and_only_there_in_backward_is_true(listener: _Listener) -> None:
    seen: list[bool] = []
    loss = _loss(lambda: seen.append(backward.in_backward()))
    assert not backward.in_backward()
    loss.backward()
    assert seen == [True]
    assert not backward.in_backward()


def test_only_the_outermost_of_nested_backwards_is_told(listener: _Listener) -> None:
    def innermost() -> None:
        listener.told.append("innermost")

    def inner() -> None:
        _loss(innermost).backward()
        assert backward.in_backward()
        listener.told.append("inner done")

    _loss(inner).backward()
    assert listener.told == ["a begin", "innermost", "inner done", "a end"]


def test_a_nested_failure_that_was_caught_aborts_nothing(listener: _Listener) -> None:
    def inner() -> None:
        with pytest.raises(_AS_PADDLE_RAISES):
            _loss(_raise_unkept).backward()
        assert backward.in_backward()

    _loss(inner).backward()
    assert listener.told == ["a begin", "a end"]


def test_two_listeners_are_told_in_the_order_of_wrapping() -> None:
    told: list[str] = []
    first, second = _Listener("a", told), _Listener("b", told)
    backward.attach(first)
    backward.attach(second)
    _loss(lambda: None).backward()
    assert told == ["a begin", "b begin", "a end", "b end"]
    backward.detach(first)
    _loss(lambda: None).backward()
    assert told[4:] == ["b begin", "b end"]
    backward.detach(second)


# -- failures ----------------------------------------------------------------------------------------------------------


class _Own(Exception):
    pass


@pytest.mark.parametrize("error", [_Own("mine"), ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_of_a_hook_comes_out_as_itself(listener: _Listener, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        _loss(_raise_kept(error)).backward()
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert listener.told == ["a begin", "a abort"]
    assert not backward.in_backward()


def test_the_first_kept_exception_counts(listener: _Listener) -> None:
    first = _Own("first")

    def both() -> None:
        backward.keep_error(first)
        _raise_kept(_Own("second"))()

    with pytest.raises(_Own, match="first"):
        _loss(both).backward()


def test_a_kept_exception_of_a_nested_backward_comes_out_of_the_outermost(listener: _Listener) -> None:
    error = _Own("deep")
    with pytest.raises(_Own) as caught:
        _loss(lambda: _loss(_raise_kept(error)).backward()).backward()
    assert caught.value is error
    assert listener.told == ["a begin", "a abort"]


def test_a_kept_exception_does_not_reach_the_next_backward(listener: _Listener) -> None:
    with pytest.raises(_Own):
        _loss(_raise_kept(_Own("old"))).backward()
    _loss(lambda: None).backward()
    with pytest.raises(_AS_PADDLE_RAISES):
        _loss(_raise_unkept).backward()
    assert listener.told == ["a begin", "a abort", "a begin", "a end", "a begin", "a abort"]


def test_an_exception_kept_outside_a_backward_is_forgotten(listener: _Listener) -> None:
    backward.keep_error(_Own("stray"))
    _loss(lambda: None).backward()
    with pytest.raises(_AS_PADDLE_RAISES):
        _loss(_raise_unkept).backward()


def test_an_exception_in_a_listener_aborts_all_of_them() -> None:
    told: list[str] = []
    first, second = _Listener("a", told), _Listener("b", told)
    backward.attach(first)
    backward.attach(second)

    def fail() -> None:
        raise _Own("listener")

    first.on_end = fail
    with pytest.raises(_Own, match="listener"):
        _loss(lambda: None).backward()
    assert told == ["a begin", "b begin", "a end", "a abort", "b abort"]
    first.on_end, first.on_begin = lambda: None, fail
    told.clear()
    with pytest.raises(_Own, match="listener"):
        _loss(lambda: told.append("gradient")).backward()
    assert told == ["a begin", "a abort", "b abort"]
    backward.detach(first)
    backward.detach(second)


def test_an_interruption_aborts_too(listener: _Listener) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    listener.on_end = interrupt
    with pytest.raises(KeyboardInterrupt):
        _loss(lambda: None).backward()
    assert listener.told == ["a begin", "a end", "a abort"]


def test_after_a_failure_gradients_are_switched_on_as_before(listener: _Listener) -> None:
    """Recompute runs its forward without them, and an exception there may leave them off."""

    def switch_off_and_raise() -> None:
        paddle.base.framework._dygraph_tracer()._has_grad = False
        _raise_kept(_Own("in a recomputed forward"))()

    with pytest.raises(_Own):
        _loss(switch_off_and_raise).backward()
    assert paddle.is_grad_enabled()


# -- attach and detach -----------------------------------------------------------------------------------------------


def test_the_wrapper_goes_with_the_last_listener(original: Any) -> None:
    first, second = _Listener(), _Listener()
    backward.attach(first)
    assert core.eager.run_backward is not original
    backward.attach(second)
    backward.detach(first)
    backward.detach(first)
    assert core.eager.run_backward is not original
    backward.detach(second)
    assert core.eager.run_backward is original


def test_a_listener_is_not_kept_alive(original: Any) -> None:
    told: list[str] = []
    listener = _Listener("a", told)
    backward.attach(listener)
    del listener
    gc.collect()
    assert core.eager.run_backward is original
    _loss(lambda: None).backward()
    assert told == []


def test_a_listener_may_go_during_a_backward(original: Any) -> None:
    told: list[str] = []
    listeners = [_Listener("a", told)]
    backward.attach(listeners[0])
    _loss(listeners.clear).backward()
    assert told == ["a begin", "a end"]
    backward.attach(again := _Listener("b", told))
    _loss(lambda: None).backward()
    assert told[2:] == ["b begin", "b end"]
    backward.detach(again)


def test_a_listener_may_come_while_the_last_one_is_forgotten(monkeypatch: pytest.MonkeyPatch, original: Any) -> None:
    old = _Listener()
    old.on_end = old.begin_backward  # a cycle: only the garbage collector finds it
    backward.attach(old)
    del old
    real_ref = weakref.ref

    def ref_after_collecting(*args: Any) -> Any:
        gc.collect()
        return real_ref(*args)

    monkeypatch.setattr(backward, "weakref", types.SimpleNamespace(ref=ref_after_collecting))
    new = _Listener()
    backward.attach(new)
    _loss(lambda: None).backward()
    assert new.told == ["a begin", "a end"]
    backward.detach(new)


def test_it_survives_somebody_who_wraps_over_it(original: Any) -> None:
    told: list[str] = []
    listener = _Listener("a", told)
    backward.attach(listener)
    ours = core.eager.run_backward

    def theirs(*args: Any, **kwargs: Any) -> Any:
        told.append("theirs")
        return ours(*args, **kwargs)

    core.eager.run_backward = theirs
    _loss(lambda: None).backward()
    assert told == ["theirs", "a begin", "a end"]
    backward.detach(listener)
    assert core.eager.run_backward is theirs
    told.clear()
    _loss(lambda: None).backward()
    assert told == ["theirs"]
    backward.attach(listener)
    told.clear()
    _loss(lambda: None).backward()
    assert told == ["theirs", "a begin", "a end"], "told twice, or not at all"
    core.eager.run_backward = ours
    backward.detach(listener)
    assert core.eager.run_backward is original


def test_a_wrapper_that_somebody_took_away_is_put_back_by_the_next_model(original: Any) -> None:
    told: list[str] = []
    first, second = _Listener("a", told), _Listener("b", told)
    backward.attach(first)
    core.eager.run_backward = original
    _loss(lambda: None).backward()
    assert told == []
    backward.attach(second)
    _loss(lambda: None).backward()
    assert told == ["a begin", "b begin", "a end", "b end"]
    backward.detach(first)
    backward.detach(second)


def test_a_backward_in_another_thread_is_one_of_its_own(listener: _Listener) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert leave.wait(20)

    other = threading.Thread(target=lambda: _loss(hold).backward())
    other.start()
    assert inside.wait(20)
    assert not backward.in_backward()
    _loss(lambda: None).backward()
    assert listener.told == ["a begin", "a begin", "a end"]
    leave.set()
    other.join()
    assert listener.told == ["a begin", "a begin", "a end", "a end"]
