"""Wrong arguments of every kind, and pairs of trainings of which only one is exposed to them.

A call with a wrong argument must end in a ``HpShardingError`` that says what was expected, and leave no trace: the
training that was exposed goes on bit for bit as its twin does.
"""

from __future__ import annotations

import decimal
import fractions
import functools
import numbers
import os
import pathlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from paddle import nn
from paddle.distributed.fleet import DistributedStrategy as PaddleStrategy

from hp_sharding import HpShardingError, ShardingConfig, full_parameters, shard
from tests.fakes import wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer

Values = list[np.ndarray[Any, Any]]


# -- values ------------------------------------------------------------------------------------------------------------


class Rude:
    """Nothing can be said of it: every question is an error."""

    def __repr__(self) -> str:
        raise ValueError("no")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no")

    __hash__ = object.__hash__


@functools.cache
def _things() -> list[Any]:
    layer = nn.Linear(3, 2)
    foreign = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    return [
        10**400, 10**5000, -(10**400), 1e308, 5e-324, 0, 1, -1, 2.0, 1.5, 1j, float("nan"), float("inf"), -float("inf"),
        "10", "auto", "2", "", "\0", "a\0b", "\ud800", b"", b"path", bytearray(b"x"), bytearray(b"\0"),
        memoryview(b"x"), decimal.Decimal("1.5"), fractions.Fraction(1, 3), fractions.Fraction(-1, 2),
        pathlib.PurePosixPath("a\0b"),
        np.float32("nan"), np.float64("inf"), np.float16(-1), np.int64(-2), np.int8(0), np.bool_(True), np.bool_(False),
        np.array([1.0, 2.0]), np.array(3), np.array([], "float32"), np.array([None]), np.zeros([2, 2], "int64"),
        paddle.zeros([2, 3]), paddle.zeros([0]), paddle.ones([2, 2], "int32"), paddle.to_tensor([True, False]),
        paddle.full([2], float("nan")), paddle.to_tensor([1j, 2.0]), paddle.zeros([2, 2]).to_sparse_coo(2),
        layer.weight, layer, layer.state_dict(), nn.Linear, foreign, paddle.optimizer.SGD, paddle.float32,
        ShardingConfig, object(), Rude(), lambda *_: None, int, Exception("x"), NotImplemented, ..., range(3), slice(1),
        [], (), {}, set(), frozenset([1]), [None], [1, 2], ["a"], {"a": 1}, {1: 2}, {None: None}, {"stage": 7}, [[]],
        [Rude()], {"stage": Rude()}, OrderedDict(),
    ]  # fmt: skip


def wrong_values() -> st.SearchStrategy[Any]:
    """Whatever a script may hand over by mistake."""
    drawn = [st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary(max_size=4)]
    return st.one_of(st.sampled_from(range(len(_things()))).map(lambda number: _things()[number]), *drawn)


# -- what is right -----------------------------------------------------------------------------------------------------


def nothing(value: Any) -> bool:
    """For what no wrong value can stand in for: the training's own model, optimizer, parameters."""
    return False


def only_none(value: Any) -> bool:
    return value is None


def flag(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def is_number(value: Any) -> bool:
    """One that a float holds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return float(value) is not None
    except OverflowError:
        return False


def whole(low: float, high: float = float("inf")) -> Callable[[Any], bool]:
    return lambda value: is_number(value) and isinstance(value, numbers.Integral) and low <= int(value) <= high


def count(value: Any) -> bool:
    """One or more, as many as anybody likes."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def positive(most: float, least: float = 0.0) -> Callable[[Any], bool]:
    return lambda value: is_number(value) and 0 < value <= most and value >= least


def path(value: Any) -> bool:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in os.fspath(value):
        return False
    return "\ud800" not in os.fspath(value)


def no_path(value: Any) -> bool:
    return value is None or path(value)


def alone(value: Any) -> bool:
    """A group of this process."""
    is_list = isinstance(value, (list, tuple, range)) and len(value) == 1
    return value is None or (is_list and type(value[0]) is int and value[0] == 0)


def a_layer(value: Any) -> bool:
    return isinstance(value, nn.Layer)


def strategy(value: Any) -> bool:
    return value is None or isinstance(value, PaddleStrategy)


def empty_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def either(*accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(each(value) for each in accepts)


def one_of(*values: Any) -> Callable[[Any], bool]:
    """One of these strings, or None where it is among them."""
    return lambda value: any(value is each or (isinstance(value, str) and value == each) for each in values)


def savable(value: Any) -> bool:
    """What a checkpoint keeps as ``extra``, or what nobody here knows of."""
    never = (decimal.Decimal, fractions.Fraction, range, nn.Layer, type, Rude, Exception, slice, memoryview)
    return not (isinstance(value, never) or callable(value) or type(value) is object)


_ADVICE = (
    "xpected", "known keys", "before ", "Call ", "call ", "Pass ", "pass ", "Use ", "use ", "Load ", "Give ", "Wrap ",
    "wrap ", "Make ", "Keep ", "Set ", "leave ",
)  # fmt: skip
"""Words of which every message has one."""


class Argument(NamedTuple):
    """An argument of a call.

    Attributes:
        right: gives a value that works in a training.
        accepts: whether a value works, too; such ones are not tried.
    """

    right: Callable[[Training], Any]
    accepts: Callable[[Any], bool]


Arguments = dict[str, Argument]


def refused(call: Callable[[], Any], *names: str) -> str:
    """Calls what must end in an error of ours; returns its message.

    It has one of the names, or says what was expected or what to do. ``DID NOT RAISE``: nonsense was accepted.
    """
    with pytest.raises(HpShardingError) as error:
        call()
    text = str(error.value)
    assert any(word in text for word in (*_ADVICE, *names)), text
    assert len(text) < 2500
    return text


def try_wrong(training: Training, call: Callable[..., Any], arguments: Arguments, *, examples: int = 8) -> None:
    """Calls with each of the arguments wrong in every way, the others right; then with one or two wrong at random."""

    def attempt(wrong: dict[str, Any]) -> None:
        others = {name: argument.right(training) for name, argument in arguments.items() if name not in wrong}
        refused(lambda: call(training, **others, **wrong), *wrong)

    for name, argument in arguments.items():
        for number, thing in enumerate([None, True, False, *_things()]):
            if not argument.accepts(thing):
                try:
                    attempt({name: thing})
                except BaseException as error:
                    raise AssertionError(
                        f"{name}: wrong value {number} of {len(_things()) + 3}, {type(thing)}"
                    ) from error

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def at_random(data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=2, unique=True))
        note(f"wrong: {', '.join(chosen)}")
        attempt({name: data.draw(wrong_values().filter(_refuses(arguments[name])), label=name) for name in chosen})

    at_random()


def _refuses(argument: Argument) -> Callable[[Any], bool]:
    return lambda value: not argument.accepts(value)


# -- trainings ---------------------------------------------------------------------------------------------------------


class Training:
    """A small model with momentum and a schedule of rates, wrapped as ``kind`` says.

    Attributes:
        model: the model.
        optimizer: the wrapped one.
        number: of the next batch.
        fresh: another model, which is not wrapped.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model = make_model("mlp")
        rate = paddle.optimizer.lr.StepDecay(0.05, 3)
        inner = make_optimizer("AdamW", self.model, learning_rate=rate)
        config = SETTINGS[kind]
        if kind in ("plain", "mixed"):
            self.optimizer: Any = shard(self.model, inner, ShardingConfig(**config))
        else:
            self.optimizer = wrap(self.model, inner, **config).optimizer
        self.number = 0
        self.fresh = self.model

    def forward(self) -> paddle.Tensor:
        return loss_of(self.model, make_batch("mlp", self.number, 0))

    def step(self) -> float:
        """A whole one; returns the loss."""
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.number += 1
        return float(loss)

    def values(self) -> Values:
        with full_parameters(self.model):
            return [param.numpy().copy() for param in self.model.parameters()]


_BOTH = {"allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": 0.0005}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"timeline": True},
    "mixed": {"main_grad": True, "timeline": True},
    "stage 1": {"stage": 1, **_BOTH},
    "stage 2": {"stage": 2, **_BOTH, "reshard_after_step": True},
    "stage 3": {"stage": 3, **_BOTH},
}
KINDS = list(SETTINGS)


class Pair:
    """Two trainings that are the same as long as what the first is exposed to leaves no trace."""

    def __init__(self, kind: str) -> None:
        self.exposed, self.twin = Training(kind), Training(kind)
        self.check()

    def check(self) -> None:
        """Another step of both: losses and parameters are the same bits."""
        assert self.exposed.step() == self.twin.step()
        for found, expected in zip(self.exposed.values(), self.twin.values(), strict=True):
            np.testing.assert_array_equal(found, expected)
