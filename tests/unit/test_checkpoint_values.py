"""Values of a checkpoint that are not its tensors: they come back as they went, types and all, without pickles."""

from __future__ import annotations

import base64
import json
import math
import pathlib
import random
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_sharding.checkpoint.schedulers import scheduler_state, set_scheduler_state
from hp_sharding.checkpoint.values import Encoded, decode, digest, encode, info, tensor_names
from hp_sharding.errors import CheckpointError
from tests.scalers import make_scaler

_NUMPY_DTYPES = [*"?bBhHiIlLefdgFD", ">f4", ">i8"]
_PADDLE_DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128"),
]


def _written(encoded: Encoded) -> Encoded:
    """As a file gives it back: standard JSON, and arrays that are flat."""
    text = json.dumps(encoded.json, allow_nan=False)
    return Encoded(json.loads(text), {name: array.reshape(-1) for name, array in encoded.arrays.items()})


def _back(value: Any) -> Any:
    return decode(*_written(encode(value, where="extra")))


def _same(a: Any, b: Any) -> bool:
    """Equal to the last bit, and of the same types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, paddle.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, (np.ndarray, np.generic)):
        equal = np.array_equal(a, b) if a.dtype == np.longdouble else a.tobytes() == b.tobytes()
        return a.dtype == b.dtype and a.shape == b.shape and equal
    if isinstance(a, float):
        return a.hex() == b.hex()
    if isinstance(a, complex):
        return _same([a.real, a.imag], [b.real, b.imag])
    if isinstance(a, dict):
        return _same(list(a), list(b)) and all(_same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.text(st.characters(codec=None)),  # lone surrogates too
    st.binary(max_size=2000),
)
_KEYS = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.binary(max_size=5), st.just("$"))
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(_KEYS, max_size=4),
        st.frozensets(_KEYS, max_size=4),
        st.dictionaries(_KEYS, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$", "tensor", "items", "base64"]), inner, max_size=4),
    ),
    max_leaves=20,
)


@given(_VALUES)
@settings(max_examples=300, deadline=None)
def test_plain_values_come_back_as_they_went(value: Any) -> None:
    assert _same(_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        math.nan,
        math.inf,
        -math.inf,
        2**63 - 1,
        2**63,
        -(2**63) - 1,
        10**5000,
        b"",
        bytearray(range(256)),
        bytes(5000),
        {1: "a", (2, (3, b"x")): "b", "1": "c", 1.5: "d", None: "e", 7: "f"},
        {"$": "array", "dtype": "float32", "tensor": "state/0"},
        {"$": {"$": "tuple", "items": [{"$": "dict"}]}},
        [{"tensor": "state/0"}, ()],
        {np.int64(3): 1},
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, int) else f"int{value.bit_length()}",
)
def test_what_json_cannot_say_comes_back_too(value: Any) -> None:
    assert _same(_back(value), value)


@pytest.mark.parametrize("n", [0, 3, 1000])
@pytest.mark.parametrize("code", _NUMPY_DTYPES)
def test_numpy_arrays_of_every_dtype_come_back(code: str, n: int) -> None:
    array = np.random.default_rng(1).integers(0, 2, 2 * n).astype(code).reshape(2, n)
    assert _same(_back(array), array)
    assert _same(_back(array.T)[:], np.ascontiguousarray(array.T))
    assert _same(_back([{"x": array[:1, :1].sum()}]), [{"x": array[:1, :1].sum()}])


@pytest.mark.parametrize(
    "value",
    [
        np.float64(math.nan),
        np.str_("x"),
        np.array(["a", "bcd"]),
        np.array([b"a", b"bcd"] * 1000),
        np.datetime64("2024-02-29T12:00"),
        np.array(5.0),
        np.zeros((0, 3)),
    ],
    ids=repr,
)
def test_numpy_values_of_other_kinds_come_back(value: Any) -> None:
    assert _same(_back(value), value)


@pytest.mark.parametrize("shape", [[], [0, 2], [3], [50, 20]], ids=str)
@pytest.mark.parametrize("dtype", _PADDLE_DTYPES)
def test_tensors_come_back(dtype: str, shape: list[int]) -> None:
    tensor = paddle.randn(shape).astype(dtype)
    assert _same(_back({"ema": [tensor]}), {"ema": [tensor]})


def test_large_arrays_become_tensors_and_small_ones_stay() -> None:
    value = {"a": paddle.ones([600]).astype("bfloat16"), "b": [np.zeros(3), np.zeros((20, 10), np.int16).T[:]]}
    value["c"] = {"x": np.arange(2000, dtype=np.uint32), "y": bytes(3000)}
    encoded = encode(value, where="extra", prefix="rank/3/state/")
    names = [f"rank/3/state/{number}" for number in range(3)]
    assert [*encoded.arrays] == tensor_names(encoded.json) == names
    assert [info(array) for array in encoded.arrays.values()] == [
        ((600,), "bfloat16"),
        ((8000,), "uint8"),
        ((3000,), "uint8"),
    ]
    assert info(encode(np.zeros((20, 50), np.int16), where="x").arrays["state/0"]) == ((20, 50), "int16")
    assert encode({"$": 1, "tensor": "x", "y": {"tensor": "z"}}, where="x").arrays == {}
    assert tensor_names(encode({"tensor": "x"}, where="x").json) == []


def test_it_is_a_copy() -> None:
    array, tensor, inner = np.zeros(1000), paddle.zeros([1000]), [1]
    encoded = encode([array, tensor, inner], where="extra")
    array += 1
    tensor.add_(paddle.ones([1000]))
    inner.append(2)
    found = decode(*encoded)
    assert not found[0].any()
    assert not found[1].numpy().any()
    assert found[2] == [1]
    found[0] += 1
    assert not decode(*encoded)[0].any()


def test_other_dicts_come_back_as_dict() -> None:
    assert _same(_back(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})
    assert _same(_back(defaultdict(list, {1: [2]})), {1: [2]})
    parameter = paddle.nn.Linear(2, 2).weight
    assert _back(parameter).numpy().tolist() == parameter.numpy().tolist()


# -- what training has of its own --------------------------------------------------------------------------------------

_LR = paddle.optimizer.lr
_SCHEDULERS: dict[str, Callable[[], Any]] = {
    "CosineAnnealingDecay": lambda: _LR.CosineAnnealingDecay(0.1, 10),
    "CosineAnnealingWarmRestarts": lambda: _LR.CosineAnnealingWarmRestarts(0.1, 3, 2),
    "CyclicLR": lambda: _LR.CyclicLR(0.1, 0.5, 4),
    "ExponentialDecay": lambda: _LR.ExponentialDecay(0.1, 0.9),
    "InverseTimeDecay": lambda: _LR.InverseTimeDecay(0.1, 0.9),
    "LambdaDecay": lambda: _LR.LambdaDecay(0.1, lambda step: 0.9**step),
    "LinearLR": lambda: _LR.LinearLR(0.1, 10),
    "LinearWarmup": lambda: _LR.LinearWarmup(_LR.CosineAnnealingDecay(0.1, 10), 2, 0.0, 0.1),
    "MultiStepDecay": lambda: _LR.MultiStepDecay(0.1, [2, 4]),
    "MultiplicativeDecay": lambda: _LR.MultiplicativeDecay(0.1, lambda step: 0.9),
    "NaturalExpDecay": lambda: _LR.NaturalExpDecay(0.1, 0.9),
    "NoamDecay": lambda: _LR.NoamDecay(8, 4),
    "OneCycleLR": lambda: _LR.OneCycleLR(0.1, 10),
    "PiecewiseDecay": lambda: _LR.PiecewiseDecay([2, 4], [0.1, 0.2, 0.3]),
    "PolynomialDecay": lambda: _LR.PolynomialDecay(0.1, 10),
    "ReduceOnPlateau": lambda: _LR.ReduceOnPlateau(0.1, patience=1),
    "StepDecay": lambda: _LR.StepDecay(0.1, 2),
}


def test_no_scheduler_is_forgotten() -> None:
    assert set(_SCHEDULERS) == set(_LR.__all__) - {"LRScheduler"}


def _rates(scheduler: Any, n: int) -> Iterator[float]:
    for _ in range(n):
        scheduler.step(*([2.0] if isinstance(scheduler, _LR.ReduceOnPlateau) else []))
        yield float(scheduler())


@pytest.mark.parametrize("n_steps", [1, 4, 7])
@pytest.mark.parametrize("name", _SCHEDULERS)
def test_every_scheduler_goes_on(name: str, n_steps: int) -> None:
    scheduler, other = _SCHEDULERS[name](), _SCHEDULERS[name]()
    list(_rates(scheduler, n_steps))
    state = scheduler_state(scheduler)
    assert _same(_back(state), state)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There are some unused values in state_dict")  # LinearWarmup's own
        set_scheduler_state(other, _back(state))
    assert other() == scheduler()
    assert list(_rates(other, 3)) == list(_rates(scheduler, 3))


def test_a_scheduler_inside_another_one_goes_on() -> None:
    """What Paddle leaves out of its state is left out there as well."""

    def make() -> Any:
        return _LR.LinearWarmup(_LR.CosineAnnealingWarmRestarts(0.5, T_0=3, T_mult=2), 2, 0.0, 0.5)

    scheduler, other = make(), make()
    list(_rates(scheduler, 7))
    set_scheduler_state(other, _back(scheduler_state(scheduler)))
    assert list(_rates(other, 8)) == list(_rates(scheduler, 8))


def test_a_scheduler_takes_a_state_of_paddles_own() -> None:
    scheduler, other = _SCHEDULERS["ReduceOnPlateau"](), _SCHEDULERS["ReduceOnPlateau"]()
    for metric in (paddle.to_tensor([3.0]), np.float32(2.0), 2.0):
        scheduler.step(metric)
    set_scheduler_state(other, _back(scheduler.state_dict()))
    assert list(_rates(other, 3)) == list(_rates(scheduler, 3))


def test_the_state_of_a_scaler_comes_back() -> None:
    state = make_scaler(init_loss_scaling=4096.0).state_dict()
    assert float(np.asarray(state["scale"]).reshape(())) == 4096.0
    assert _same(_back(state), state)


# -- what is refused ---------------------------------------------------------------------------------------------------


class _Sampler:
    pass


class _Position(NamedTuple):
    epoch: int


def _in_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"sampler": _Sampler()}, ["extra['sampler'] is a", "_Sampler", "no pickles", "Save what it is made of"]),
        ({"a": [0, (1, {2: _Sampler()})]}, ["extra['a'][1][1][2] is a"]),
        ({_Position(1): 2}, ["the key _Position(epoch=1) of extra is a", "Save tuple(...) of it"]),
        (pathlib.Path("x"), ["extra is a pathlib.", "str(...) of it"]),
        (deque([1]), ["collections.deque", "list(...) of it"]),
        (types.SimpleNamespace(), ["SimpleNamespace"]),
        (random.Random, ["extra is a builtins.type"]),
        (paddle.nn.Linear(1, 1), ["Linear", "Save its state_dict()"]),
        ([np.array([None])], ["extra[0] is an array of |O"]),
        (np.zeros(2, [("a", "i4")]), ["extra is an array of |V4"]),
        (np.ma.masked_array([1]), ["MaskedArray", "numpy.asarray(...) of it"]),
        (paddle.zeros([2]).astype("float8_e4m3fn"), ["extra is an array of float8_e4m3fn"]),
        (_in_itself(), ["does it contain itself?"]),
    ],
    ids=lambda value: None if isinstance(value, list) else type(value).__name__,
)
def test_anything_else_is_refused_by_its_place_and_type(value: Any, said: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        encode(value, where="extra")
    for part in said:
        assert part in str(caught.value)


def test_at_the_top_a_place_is_its_key() -> None:
    with pytest.raises(CheckpointError, match=r"^extra\['sampler'\] is a"):
        encode({"steps": 3, "extra": {"sampler": _Sampler()}}, where="")


def test_a_freed_parameter_is_refused() -> None:
    tensor = paddle.zeros([3])
    tensor._clear_data()
    with pytest.raises(CheckpointError, match=r"extra\['p'\] is a tensor of shape \[3\] whose value is not here"):
        encode({"p": tensor}, where="extra")


@pytest.mark.parametrize(
    ("encoded", "said"),
    [
        ({"$": "quaternion"}, "'quaternion', which this version"),
        ({"$": "array", "dtype": "float32", "shape": [3], "tensor": "state/7"}, "refers to state/7"),
        ({"$": "array", "dtype": "O", "shape": [1], "base64": base64.b64encode(bytes(8)).decode()}, "array of O"),
    ],
)
def test_what_cannot_be_decoded_is_an_error(encoded: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        decode([encoded], {})


# -- digests -----------------------------------------------------------------------------------------------------------


def _digest(value: Any, prefix: str = "state/") -> int:
    return digest(encode(value, where="extra", prefix=prefix))


def test_equal_values_have_equal_digests_in_whatever_order() -> None:
    large, larger = np.arange(1000), np.arange(2000)
    value = {"a": large, "b": {1: larger, "x": {"p", "q", 3}}, "c": [1, 2.0]}
    again = {"c": [1, 2.0], "b": {"x": {3, "q", "p"}, 1: larger.copy()}, "a": large.copy()}
    assert _digest(value) == _digest(again) == _digest(value, "rank/1/state/")


def test_other_values_have_other_digests() -> None:
    large = np.zeros(1000, np.float32)
    other = large.copy()
    other[-1] = 1e-45
    values: list[Any] = [1, 1.0, True, "1", [1], (1,), {"a": 1}, {"a": 2}, {"b": 1}, {1: 2}, {2: 1}, np.int64(1)]
    values += [np.int32(1), np.array(1), large, other, large.view(np.int32), large.reshape(10, 100), [1, 2], [2, 1]]
    values += [paddle.to_tensor(large), {"tensor": "a"}, {"tensor": "b"}, 0.0, -0.0, math.nan]
    found = [_digest(value) for value in values]
    assert len(set(found)) == len(values)
