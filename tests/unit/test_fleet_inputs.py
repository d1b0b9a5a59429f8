"""The same inputs on all ranks that split layers between them, against a lane that says what the first rank sends."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import paddle
from paddle import nn

from hp_sharding.fleet.equal_inputs import share_inputs


class _Sent:
    """A broadcast that is over only when it was waited for."""

    def __init__(self, target: paddle.Tensor, value: Any) -> None:
        self._target, self._value = target, value

    def wait(self) -> None:
        self._target.set_value(paddle.to_tensor(self._value))


class _Lane:
    """The lane of a rank that is not the first one; ``sends`` is what the first one passes to its forward."""

    def __init__(self, sends: list[Any], rank: int = 1) -> None:
        self.rank = rank
        self.labels: list[str] = []
        self._sends = list(sends)

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str = "") -> _Sent:
        assert src == 0
        self.labels.append(label)
        value = tensor.numpy() if self.rank == 0 else np.asarray(self._sends.pop(0)).reshape(-1)
        return _Sent(tensor, value)


class _Adds(nn.Layer):
    def forward(self, x: paddle.Tensor, others: dict[str, Any], *, weight: paddle.Tensor) -> paddle.Tensor:
        return (x + others["y"][0]) * weight


def _inputs() -> tuple[list[paddle.Tensor], dict[str, Any]]:
    x = paddle.ones([2, 2])
    return [x], {"y": (paddle.zeros([2], "float32"), "no tensor")}


def test_every_tensor_becomes_the_first_ranks() -> None:
    lane = _Lane([np.full([2, 2], 5.0, "float32"), np.full([2], 1.0, "float32"), np.full([], 2.0, "float32")])
    model = _Adds()
    share_inputs(model, lane)  # type: ignore[arg-type]
    [x], others = _inputs()
    result = model(x, others, weight=paddle.to_tensor(0.0))
    np.testing.assert_array_equal(result.numpy(), np.full([2, 2], 12.0))
    assert lane.labels == ["input 0 [2, 2]", "input 1 [2]", "input 2 []"]


def test_what_an_input_is_a_view_of_stays_the_scripts() -> None:
    lane = _Lane([np.full([2, 2], 5.0, "float32")])
    model = nn.ReLU()
    share_inputs(model, lane)  # type: ignore[arg-type]
    data = paddle.ones([4, 2])
    np.testing.assert_array_equal(model(data._slice(0, 2)).numpy(), np.full([2, 2], 5.0))
    np.testing.assert_array_equal(data.numpy(), np.ones([4, 2]))


def test_the_first_rank_computes_with_its_own() -> None:
    lane = _Lane([], rank=0)
    model = nn.ReLU()
    share_inputs(model, lane)  # type: ignore[arg-type]
    x = paddle.ones([3])
    address = x.data_ptr()
    np.testing.assert_array_equal(model(x).numpy(), np.ones([3]))
    assert x.data_ptr() == address and lane.labels == ["input 0 [3]"]


def test_the_same_tensor_is_sent_once_and_a_copy_of_the_model_sends_nothing() -> None:
    lane = _Lane([np.full([2], 3.0, "float32")])
    model = nn.Bilinear(2, 2, 1)
    share_inputs(model, lane)  # type: ignore[arg-type]
    x = paddle.ones([1, 2])
    model(x, x)
    np.testing.assert_array_equal(x.numpy(), np.full([1, 2], 3.0))
    twin = copy.deepcopy(model)
    twin(x, x)
    assert len(lane.labels) == 1
