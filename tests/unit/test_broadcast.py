"""``broadcast_state`` against a communicator that delivers nothing before ``wait()``."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from hp_sharding.broadcast import broadcast_state
from hp_sharding.errors import ConfigError


class _LateWork:
    def __init__(self, target: paddle.Tensor, value: paddle.Tensor) -> None:
        self._target, self._value = target, value

    def wait(self) -> None:
        self._target[:] = self._value


class _FromAnotherModel:
    """Delivers, in the order of the calls, what the same call on the group's first rank would send."""

    def __init__(self, root: paddle.nn.Layer) -> None:
        state = [*root.named_parameters(), *root.named_buffers()]
        self._state = [(f"{name}{list(t.shape)}", t.detach().flatten()) for name, t in state if t.size]
        self.labels: list[str] = []

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "", after: Any = None) -> _LateWork:
        expected, value = self._state[len(self.labels)]
        assert (src, label, tensor.dtype, tensor.ndim) == (0, expected, value.dtype, 1)
        self.labels.append(label)
        return _LateWork(tensor, value)


class _Odd(paddle.nn.Layer):
    """Every kind of state: tied, frozen, 0-d, empty, 16-bit; running statistics, other dtypes, transposed, unsaved."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        paddle.seed(seed)
        self.embedding = paddle.nn.Embedding(5, 3)
        self.head = paddle.nn.Linear(3, 3)
        self.tied = self.head
        self.norm = paddle.nn.BatchNorm1D(3)
        self.norm._mean[:] = seed
        self.frozen = self._new(paddle.full([2, 2], seed))
        self.frozen.stop_gradient = True
        self.scalar = self._new(paddle.to_tensor(float(seed)))
        self.empty = self._new(paddle.zeros([0, 3]))
        self.half = self._new(paddle.full([3], seed).astype("bfloat16"))
        self.register_buffer("count", paddle.to_tensor(seed, dtype="int64"))
        self.register_buffer("mask", paddle.to_tensor([seed > 1, True, seed > 1]))
        self.register_buffer("unsaved", paddle.full([2], seed), persistable=False)
        self.register_buffer("transposed", (paddle.arange(6).reshape([2, 3]) * seed).t())
        self.register_buffer("nothing", None)

    def _new(self, value: paddle.Tensor) -> paddle.Tensor:
        initial = paddle.nn.initializer.Constant(0.0)
        parameter = self.create_parameter(value.shape, dtype=value.dtype, default_initializer=initial)
        if value.size:
            parameter.set_value(value)
        return parameter


def _values(model: paddle.nn.Layer) -> dict[str, np.ndarray[Any, Any]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.astype("float32").numpy() if t.dtype == paddle.bfloat16 else t.numpy() for name, t in named}


def test_every_tensor_becomes_the_first_ranks() -> None:
    root, model = _Odd(1), _Odd(2)
    expected, differed = _values(root), _values(model)
    assert sum(not np.array_equal(expected[name], differed[name]) for name in expected) >= 9, "else it proves nothing"
    broadcast_state(model, _FromAnotherModel(root))  # type: ignore[arg-type]
    found = _values(model)
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name, strict=True)


def test_shared_tensors_travel_once_and_empty_ones_not_at_all() -> None:
    root, model = _Odd(1), _Odd(2)
    communicator = _FromAnotherModel(root)
    broadcast_state(model, communicator)  # type: ignore[arg-type]
    assert len(communicator.labels) == len(set(communicator.labels))
    assert "head.weight[3, 3]" in communicator.labels
    assert not [label for label in communicator.labels if label.startswith(("tied", "empty", "nothing"))]


def test_storage_and_flags_stay() -> None:
    model = _Odd(2)
    before = [(p.data_ptr(), p.stop_gradient) for p in model.parameters() if p.size]
    broadcast_state(model, _FromAnotherModel(_Odd(1)))  # type: ignore[arg-type]
    assert [(p.data_ptr(), p.stop_gradient) for p in model.parameters() if p.size] == before
    loss = model.head(paddle.ones([1, 3])).sum()
    loss.backward()
    assert model.head.weight.grad is not None


def test_a_model_without_values_is_refused_before_anything_is_sent() -> None:
    with paddle.LazyGuard():
        lazy = paddle.nn.Linear(2, 2)
    model = paddle.nn.Sequential(paddle.nn.Linear(2, 2), lazy)
    communicator = _FromAnotherModel(model[0])
    with pytest.raises(ConfigError, match=r"1\.weight: has no value yet.*initialize"):
        broadcast_state(model, communicator)  # type: ignore[arg-type]
    assert communicator.labels == []
