"""The stand-in's kernels for 16-bit floats give what those for float32 give, rounded once, and come in their turn.

Every function whose name starts with an underscore and that takes a rank runs in a process that has the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from tests.device import standin
from tests.device.running import on_device

pytestmark = pytest.mark.usefixtures("standin_device")

Array = npt.NDArray[Any]
HALVES = ("float16", "bfloat16")
OPTIMIZERS = ("SGD", "Momentum", "Adam", "AdamW")
_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Between 1 and the next larger value."""


class _Operation(NamedTuple):
    """What is computed from tensors of these shapes.

    Attributes:
        exact: whether its gradient does not read its rounded result, and so is that of float32, rounded.
        chained: whether it is several operations, of which each rounds.
        widens: the dtypes of which its result is float32.
    """

    run: Callable[..., paddle.Tensor]
    shapes: tuple[list[int], ...]
    exact: bool = True
    chained: bool = False
    widens: tuple[str, ...] = ()


_PAIR = ([3, 4, 5], [5])
_ONE = ([3, 4, 5],)
_LABELS = [[0, 4, 2, 1], [3, 3, 0, 2], [1, 1, 4, 0]]
OPERATIONS = {
    "matmul": _Operation(lambda x, y: x.matmul(y, transpose_y=True), ([3, 4, 5], [6, 5])),
    "add": _Operation(lambda x, y: x + y, _PAIR),
    "subtract": _Operation(lambda x, y: x - y, _PAIR),
    "multiply": _Operation(lambda x, y: x * y, _PAIR),
    "divide": _Operation(lambda x, y: x / (y.square() + 1.0), _PAIR, exact=False, chained=True),
    "scale": _Operation(lambda x: x * 1.7 + 0.3, _ONE, exact=False, chained=True),
    "mean": _Operation(lambda x: x.mean(), _ONE),
    "mean of an axis": _Operation(lambda x: x.mean(axis=1), _ONE),
    "sum": _Operation(lambda x: x.sum(axis=0), _ONE),
    "layer_norm": _Operation(lambda x, w, b: F.layer_norm(x, [5], w, b), ([3, 4, 5], [5], [5])),
    "softmax": _Operation(F.softmax, _ONE, exact=False),
    "cross_entropy": _Operation(
        lambda x: F.cross_entropy(x, paddle.to_tensor(_LABELS), reduction="none"),
        _ONE,
        exact=False,
        widens=("bfloat16",),
    ),
    "gelu": _Operation(F.gelu, _ONE),
    "relu": _Operation(F.relu, _ONE),
    "silu": _Operation(F.silu, _ONE),
    "sigmoid": _Operation(F.sigmoid, _ONE, exact=False),
    "tanh": _Operation(paddle.tanh, _ONE, exact=False),
    "exp": _Operation(paddle.exp, _ONE, exact=False),
    "sqrt": _Operation(lambda x: (x.square() + 1.0).sqrt(), _ONE, exact=False, chained=True),
    "square": _Operation(paddle.square, _ONE),
    "pow": _Operation(lambda x: x.pow(3.0), _ONE),
    "clip": _Operation(lambda x: x.clip(-0.5, 0.5), _ONE),
    "used twice": _Operation(lambda x: paddle.concat([x, x]), _ONE),
    "embedding": _Operation(lambda x: F.embedding(paddle.to_tensor([1, 0, 1]), x), ([3, 4],)),
    "reshape, transpose": _Operation(lambda x: x.reshape([4, 15]).transpose([1, 0]), _ONE),
    "concat, split": _Operation(lambda x, y: paddle.concat([*x.split(2, 1), y]), ([2, 4], [3, 2])),
}


class _Values(NamedTuple):
    """A result and the gradients of what it was made of, and their dtypes."""

    values: list[Array]
    dtypes: list[str]


def _compute(operation: _Operation, dtype: str, rounded_to: str) -> _Values:
    """In ``dtype``, of random values that ``rounded_to`` can hold."""
    rng = np.random.default_rng(5)
    inputs = [_to_half(rng.standard_normal(shape), rounded_to).astype(dtype) for shape in operation.shapes]
    for one in inputs:
        one.stop_gradient = False
    result = operation.run(*inputs)
    result.backward(_to_half(rng.standard_normal(result.shape), rounded_to).astype(result.dtype))
    tensors = [result, *(one.grad for one in inputs)]
    return _Values([_floats(one) for one in tensors], [str(one.dtype).split(".")[-1] for one in tensors])


def _to_half(values: Any, dtype: str) -> paddle.Tensor:
    return paddle.to_tensor(np.asarray(values, np.float32)).astype(dtype)


def _floats(tensor: paddle.Tensor) -> Array:
    return tensor.astype("float32").numpy()


def _rounded(values: Array, dtype: str) -> Array:
    return _floats(_to_half(values, dtype))


# ---- on a device ----


def _operations() -> Any:
    return {
        (name, dtype): (_compute(operation, dtype, dtype), _compute(operation, "float32", dtype))
        for name, operation in OPERATIONS.items()
        for dtype in HALVES
    }


def _optimizers() -> Any:
    return {(kind, dtype): _updated(kind, dtype) for kind in OPTIMIZERS for dtype in HALVES}


def _updated(kind: str, dtype: str) -> tuple[Array, Array, Array]:
    """After some steps: a parameter of ``dtype``, its master weight, and one of float32 with the same gradients."""
    half, optimizer = _optimized(kind, dtype, dtype, multi_precision=True)
    (master,) = optimizer.state_dict()["master_weights"].values()
    return _floats(half), master.numpy(), _optimized(kind, "float32", dtype)[0].numpy()


def _optimized(kind: str, dtype: str, rounded_to: str, **options: Any) -> tuple[paddle.Tensor, Any]:
    param = paddle.create_parameter([9], dtype, default_initializer=nn.initializer.Constant(0.0))
    param.set_value(_to_half(np.linspace(-2, 2, 9), rounded_to).astype(dtype))
    optimizer = getattr(paddle.optimizer, kind)(0.1, parameters=[param], **options)
    for step in range(3):
        gradient = np.random.default_rng(step).standard_normal(9)
        param.grad = _to_half(gradient, rounded_to).astype(dtype)
        optimizer.step()
    return param, optimizer


def _unscaled() -> Any:
    """Gradients of which the last is finite or not, as a scaler has them divided, and whether one is not."""
    return {dtype: {last: _checked(dtype, last) for last in (1.0, float("inf"))} for dtype in HALVES}


def _checked(dtype: str, last: float) -> Any:
    gradients, found_infinite = [_to_half(one, dtype) for one in ([4.0, -2.5], [8.0, last])], paddle.to_tensor([False])
    check = paddle._legacy_C_ops.check_finite_and_unscale
    check(gradients, paddle.to_tensor([4.0]), gradients, found_infinite)
    infinite = bool(found_infinite)
    return None if infinite else [_floats(one).tolist() for one in gradients], infinite


def _others() -> Any:
    found = {}
    for dtype in HALVES:
        values = _to_half([[3.0, -1.5], [0.25, 2.0]], dtype)
        tensors = {
            "add_": values.clone().add_(values),
            "isfinite": paddle.isfinite(_to_half([1.0, float("inf"), float("nan")], dtype)),
            "squared_l2_norm": paddle._C_ops.squared_l2_norm(values),
            "tril": values.tril(),
            "triu": values.triu(),
            "full": paddle.full([2], 0.5, dtype),
        }
        found[dtype] = {name: _floats(one).reshape(-1).tolist() for name, one in tensors.items()}
    return found


def _scaled_by_a_constant() -> Any:
    """The gradient of ``x`` in ``x * constant``, for which Paddle keeps no value of ``x`` on a device."""
    found = {}
    for dtype in ("float32", "float64", *HALVES):
        x = paddle.full([3], 5.0, dtype)
        x.stop_gradient = False
        (x * paddle.full([3], 4.0, dtype)).backward(paddle.ones([3], dtype))
        found[dtype] = _floats(x.grad).tolist()
    return found


def _taken_memory() -> Any:
    device = standin.Device()
    x = _to_half(np.ones([64, 64]), "bfloat16")
    before = device.live_bytes()
    device.forget_peak()
    y = x + x
    return device.peak_bytes() - before, device.live_bytes() - before, y.size * y.element_size()


def _in_turn() -> Any:
    """On a stream that is held: a sum that is put off, and a product that must wait."""
    device = standin.Device()
    term, total, held = _to_half([1.0, 2.0], "bfloat16"), _to_half([0.0, 0.0], "bfloat16"), device.held_stream()
    with paddle.device.stream_guard(held.stream):
        total.add_(term)
    early = _floats(total).tolist()
    term.copy_(_to_half([8.0, 16.0], "bfloat16"), False)
    held.open()
    held.stream.synchronize()
    late = _floats(total).tolist()
    row, column = total.reshape([1, 2]), total.reshape([2, 1])
    before = device.host_waits()
    with paddle.device.stream_guard(held.stream):
        product = row.matmul(column)
    held.stream.synchronize()
    after = device.host_waits()
    return early, late, _floats(product).item(), after.kernel.calls - before.kernel.calls


# ---- what was found ----

_PARTS = [_operations, _optimizers, _unscaled, _others, _scaled_by_a_constant, _taken_memory, _in_turn]


def _run_parts(rank: int, nranks: int) -> dict[str, Any]:
    paddle.set_device("npu")
    return {part.__name__: part() for part in _PARTS}


@pytest.fixture(scope="module")
def found(standin_device: None) -> dict[str, Any]:
    """What each of ``_PARTS`` found."""
    results: dict[str, Any] = on_device(_run_parts, 1)[0]
    return results


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_float32_gives_rounded(found: dict[str, Any], name: str, dtype: str) -> None:
    operation = OPERATIONS[name]
    halves, floats = found["_operations"][name, dtype]
    assert halves.dtypes == ["float32" if dtype in operation.widens else dtype] + [dtype] * len(operation.shapes)
    for number, (half, value) in enumerate(zip(halves.values, floats.values, strict=True)):
        expected = value if halves.dtypes[number] == "float32" else _rounded(value, dtype)
        if operation.exact or (number == 0 and not operation.chained):
            np.testing.assert_array_equal(half, expected, err_msg=f"number {number}")
        else:
            np.testing.assert_allclose(half, expected, rtol=0, atol=4 * _EPSILON[dtype] * np.abs(expected).max())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_updates_the_master_weight_as_one_of_float32(found: dict[str, Any], kind: str, dtype: str) -> None:
    param, master, expected = found["_optimizers"][kind, dtype]
    np.testing.assert_array_equal(master, expected)
    np.testing.assert_array_equal(param, _rounded(expected, dtype))
    assert (param != master).any()


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_are_divided_and_infinite_ones_are_found(found: dict[str, Any], dtype: str) -> None:
    assert found["_unscaled"][dtype] == {1.0: ([[1.0, -0.625], [2.0, 0.25]], False), np.inf: (None, True)}


@pytest.mark.parametrize("dtype", HALVES)
def test_what_has_no_gradient_or_writes_in_place(found: dict[str, Any], dtype: str) -> None:
    assert found["_others"][dtype] == {
        "add_": [6.0, -3.0, 0.5, 4.0],
        "isfinite": [1.0, 0.0, 0.0],
        "squared_l2_norm": [15.3125],
        "tril": [3.0, 0.0, 0.25, 2.0],
        "triu": [3.0, -1.5, 0.0, 2.0],
        "full": [0.5, 0.5],
    }


@pytest.mark.parametrize("dtype", ["float32", "float64", *HALVES])
def test_the_gradient_of_a_product_with_a_constant_needs_no_value(found: dict[str, Any], dtype: str) -> None:
    assert found["_scaled_by_a_constant"][dtype] == [4.0] * 3


def test_conversions_take_none_of_the_device_s_memory(found: dict[str, Any]) -> None:
    peak_bytes, live_bytes, result_bytes = found["_taken_memory"]
    assert peak_bytes == live_bytes == result_bytes


def test_a_kernel_comes_in_its_turn(found: dict[str, Any]) -> None:
    early, late, product, waits = found["_in_turn"]
    assert early == [0.0, 0.0]
    assert late == [8.0, 16.0]
    assert product == 320.0
    assert waits == 1
