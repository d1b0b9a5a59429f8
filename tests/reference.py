"""What the distributed runs must equal: plain Paddle in one process, which runs every rank's batch in turn.

The gradients of the ranks are added in rank order and divided by their number. Buffers, such as the running statistics
of BatchNorm, belong to each rank alone; ``step()`` of the sharded side gives the first rank's to all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

from tests.models import loss_of, loss_on, make_batch, make_model, make_optimizer

Array = np.ndarray[Any, Any]
Values = dict[str, Array]


class Run(NamedTuple):
    """A training run: losses of each step (one a rank), parameters at its end, and what each rank has of its own."""

    losses: list[list[float]]
    params: Values
    statistics: list[Values]


def train(name: str, optimizer_name: str, nranks: int, steps: int) -> Run:
    """``steps`` steps of the model ``name`` on the batches of ``nranks`` ranks."""
    model = make_model(name)
    optimizer = make_optimizer(optimizer_name, model)
    ranks = Ranks(model, nranks)
    losses = []
    for step in range(steps):
        losses.append(ranks.backward(loss_on(model, name, step)))
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
    return Run(losses, values(model), ranks.statistics)


def train_concatenated(name: str, optimizer_name: str, nranks: int, steps: int) -> Run:
    """The same on one batch a step that holds those of all ranks."""
    model = make_model(name)
    optimizer = make_optimizer(optimizer_name, model)
    losses = []
    for step in range(steps):
        parts = [make_batch(name, step, rank) for rank in range(nranks)]
        batch = (paddle.concat([x for x, _ in parts]), paddle.concat([target for _, target in parts]))
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append([float(loss)])
    return Run(losses, values(model), [])


class Ranks:
    """All ranks of a data-parallel run, in turn, on one model.

    Attributes:
        statistics: those of each rank.
    """

    def __init__(self, model: nn.Layer, nranks: int, *, divisor: float | None = None) -> None:
        self.statistics = [statistics(model) for _ in range(nranks)]
        self._model = model
        self._divisor = divisor or nranks

    def backward(self, loss: Callable[[int], paddle.Tensor | None]) -> list[float]:
        """Runs ``loss(rank)`` and its backward for each rank, and leaves the mean gradient in ``p.grad``.

        What was in ``p.grad`` is added to, as by every backward. A rank whose loss is None has no backward. Returns
        the losses.
        """
        params = [param for param in self._model.parameters() if not param.stop_gradient]
        before = [_take_grad(param) for param in params]
        totals: list[paddle.Tensor | None] = [None] * len(params)
        losses = []
        for rank in range(len(self.statistics)):
            losses.append(self._run_rank(rank, loss))
            for index, param in enumerate(params):
                totals[index] = _add(totals[index], _take_grad(param))
        for param, old, new in zip(params, before, totals, strict=True):
            mean = None if new is None else new / self._divisor
            total = _add(old, mean)
            if total is not None:
                param.grad = total
        return losses

    def _run_rank(self, rank: int, loss: Callable[[int], paddle.Tensor | None]) -> float:
        _set_statistics(self._model, self.statistics[rank])
        value = loss(rank)
        if value is not None:
            value.backward()
        self.statistics[rank] = statistics(self._model)
        return float("nan") if value is None else float(value)


def values(model: nn.Layer) -> Values:
    """Copies of all parameters that are not running statistics."""
    return {name: param.numpy().copy() for name, param in model.named_parameters() if not _is_statistic(name)}


def statistics(model: nn.Layer) -> Values:
    """Copies of what each rank has of its own: buffers and running statistics, which Paddle holds as parameters."""
    return {name: tensor.numpy().copy() for name, tensor in _statistics(model)}


def assert_equal(found: Values, expected: Values, what: str = "") -> None:
    """Bitwise, and of finite values: a training that has blown up says nothing."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert np.isfinite(value).all(), f"{what} {name} is expected not to be finite"
        np.testing.assert_array_equal(found[name], value, err_msg=f"{what} {name}", strict=True)


def assert_close(found: Values, expected: Values, tolerance: float, what: str = "") -> None:
    """Relative to the largest element of each parameter, which counts as a tenth at least: biases begin at zero."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].shape == value.shape
        if value.size:
            off = np.abs(found[name] - value).max() / max(float(np.abs(value).max()), 0.1)
            assert off <= tolerance, f"{what} {name}: off by {off:.2e}, more than {tolerance:.0e}"


def assert_all_equal(everyone: Sequence[Values], what: str = "") -> None:
    """All ranks hold bitwise the same."""
    for rank, found in enumerate(everyone):
        assert_equal(found, everyone[0], f"{what} rank {rank} against rank 0")


def _add(left: paddle.Tensor | None, right: paddle.Tensor | None) -> paddle.Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


def _take_grad(param: paddle.Tensor) -> paddle.Tensor | None:
    grad = None if param.grad is None else param.grad.clone().detach()
    param.clear_gradient(False)
    return grad


def _statistics(model: nn.Layer) -> list[tuple[str, paddle.Tensor]]:
    params = [(name, param) for name, param in model.named_parameters() if _is_statistic(name)]
    return [*params, *((name, buffer) for name, buffer in model.named_buffers() if buffer._is_initialized())]


def _is_statistic(name: str) -> bool:
    return name.endswith(("._mean", "._variance"))


def _set_statistics(model: nn.Layer, wanted: Values) -> None:
    for name, tensor in _statistics(model):
        tensor.set_value(wanted[name])
