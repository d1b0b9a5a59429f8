"""Fused updates: parameters of a bucket that are updated as one get the bits that each of them would have got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base.framework import EagerParamBase
from paddle.regularizer import L1Decay, L2Decay

from hp_sharding.fusing import FUSABLE
from hp_sharding.layout import ALIGNMENT_BYTES
from tests.slices import MakeOptimizer, Rank, make_gradients, plain_steps, together

Optimize = Callable[[list[EagerParamBase]], Any]

OPTIMIZERS: dict[str, Optimize] = {
    "SGD": lambda params: paddle.optimizer.SGD(0.1, parameters=params),
    "SGD, L2": lambda params: paddle.optimizer.SGD(0.1, parameters=params, weight_decay=L2Decay(0.01)),
    "SGD, L1": lambda params: paddle.optimizer.SGD(0.1, parameters=params, weight_decay=L1Decay(0.01)),
    "SGD, clip": lambda params: paddle.optimizer.SGD(0.1, parameters=params, grad_clip=nn.ClipGradByValue(0.5)),
}
SIZES = [[16, 16], [256, 16], [16, 128, 256, 48], [656, 48, 112], [1024, 4000]]


def _fill(sizes: list[int], *, align: int, seed: int) -> tuple[np.ndarray[Any, Any], list[slice]]:
    """Values at aligned places with zeros between, and the places."""
    generator, places, start = np.random.default_rng(seed), [], 0
    for size in sizes:
        places.append(slice(start, start + size))
        start += -(-size // align) * align
    flat = np.zeros(places[-1].stop)
    for place in places:
        flat[place] = generator.standard_normal(place.stop - place.start)
    return flat, places


def _param(flat: paddle.Tensor, place: slice, name: str) -> EagerParamBase:
    param = EagerParamBase(shape=[place.stop - place.start], dtype=flat.dtype, name=name)
    flat._slice(place.start, place.stop)._share_buffer_to(param)
    param.stop_gradient = False
    return param


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_one_update_over_padding_gives_the_bits_of_one_for_each(sizes: list[int], name: str, dtype: str) -> None:
    values, places = _fill(sizes, align=ALIGNMENT_BYTES // np.dtype(dtype).itemsize, seed=len(sizes))
    apart, together = paddle.to_tensor(values, dtype), paddle.to_tensor(values, dtype)
    whole = slice(0, len(values))
    params = [_param(apart, place, f"{name}_{dtype}_{place.start}") for place in places]
    ones = [_param(together, whole, f"{name}_{dtype}_whole")]
    optimizers = OPTIMIZERS[name](params), OPTIMIZERS[name](ones)
    assert type(optimizers[0]) in FUSABLE
    for step in range(3):
        gradient = paddle.to_tensor(
            _fill(sizes, align=ALIGNMENT_BYTES // np.dtype(dtype).itemsize, seed=50 + step)[0], dtype
        )
        pieces = [gradient._slice(place.start, place.stop) for place in places]
        with paddle.no_grad():
            optimizers[0]._apply_optimize(None, None, list(zip(params, pieces, strict=True)), param_group_idx=0)
            optimizers[1]._apply_optimize(None, None, [(ones[0], gradient)], param_group_idx=0)
    assert apart.numpy().tobytes() == together.numpy().tobytes(), "padding is zero in both"


# -- which are ---------------------------------------------------------------------------------------------------------


def _counted(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each call of the inner optimizer from now on updates."""
    counts: list[int] = []
    original = rank.inner._apply_optimize

    def counted(loss: Any, program: Any, request: Any, **kwargs: Any) -> Any:
        counts.append(len(request["params"] if isinstance(request, dict) else request))
        return original(loss, program, request, **kwargs)

    monkeypatch.setattr(rank.inner, "_apply_optimize", counted, raising=False)
    return counts


def _model() -> nn.Layer:
    """Parameters of whole vectors, two to a bucket."""
    paddle.seed(3)
    model = nn.Sequential(nn.Linear(16, 48), nn.Linear(48, 32))
    for number, param in enumerate(model.parameters()):
        param.name = f"p{number}"
    return model


def _sgd(model: nn.Layer) -> Any:
    return paddle.optimizer.SGD(0.1, parameters=model.parameters())


def _step(rank: Rank, step: int) -> None:
    rank.put(make_gradients(rank.model, step))
    rank.apply()


def test_the_parameters_of_a_bucket_are_updated_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(_sgd, 1, 0, _model())
    counts = _counted(rank, monkeypatch)
    _step(rank, 0)
    assert counts == [1, 1]


class _OwnSGD(paddle.optimizer.SGD):
    """It may override anything."""


def _two_groups(model: nn.Layer) -> Any:
    first, second = model[0].parameters()
    groups = [{"params": [first], "learning_rate": 0.1}, {"params": [second, *model[1].parameters()]}]
    return paddle.optimizer.SGD(0.1, parameters=groups)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda model: paddle.optimizer.RMSProp(0.1, parameters=model.parameters()), [2, 2]),
        (lambda model: _OwnSGD(0.1, parameters=model.parameters()), [2, 2]),
        (_two_groups, [1, 1, 1]),
    ],
)
def test_what_might_differ_is_updated_one_by_one(
    make: MakeOptimizer, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(make, 1, 0, _model())
    counts = _counted(rank, monkeypatch)
    _step(rank, 0)
    assert counts == expected


def test_what_does_not_consist_of_whole_vectors_is_updated_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(_sgd, 1, 0)
    assert all(any(piece.numel % 16 for piece in buffer.slices) for buffer in rank.buffers)
    counts = _counted(rank, monkeypatch)
    _step(rank, 0)
    assert counts == [2, 2]


def _slower(model: nn.Layer) -> None:
    model[0].bias.optimize_attr = {"learning_rate": 0.5}


def _slower_in_place(model: nn.Layer) -> None:
    model[0].bias.optimize_attr["learning_rate"] = 0.5


def _frozen(model: nn.Layer) -> None:
    model[0].bias.stop_gradient = True


def _decaying(model: nn.Layer) -> None:
    model[0].bias.regularizer = L2Decay(0.3)


def _unclipped(model: nn.Layer) -> None:
    model[0].bias.need_clip = False


CHANGES = {
    "rate": _slower,
    "rate in place": _slower_in_place,
    "frozen": _frozen,
    "decay": _decaying,
    "clip": _unclipped,
}


def _clipped_sgd(model: nn.Layer) -> Any:
    return paddle.optimizer.SGD(0.1, parameters=model.parameters(), grad_clip=nn.ClipGradByValue(0.2))


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_setting_of_one_parts_them_until_all_have_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(_clipped_sgd, 1, 0, _model())
    counts = _counted(rank, monkeypatch)
    before = {key: (getattr(rank.model[0].weight, key)) for key in ("regularizer", "need_clip", "optimize_attr")}
    _step(rank, 0)
    CHANGES[name](rank.model)
    _step(rank, 1)
    for key, value in before.items():
        setattr(rank.model[0].bias, key, value)
    rank.model[0].bias.stop_gradient = False
    _step(rank, 2)
    assert counts == [1, 1, 1 if name == "frozen" else 2, 1, 1, 1]

    def change(model: nn.Layer, _: Any, step: int) -> None:
        bias = model[0].bias
        if step == 0:
            CHANGES[name](model)
        elif step == 1:
            bias.regularizer, bias.need_clip, bias.stop_gradient = None, True, False
            bias.optimize_attr = {"learning_rate": 1.0}

    plain = plain_steps(_clipped_sgd, 3, _model(), change=change)
    found = together([rank])
    for param in plain.parameters():
        np.testing.assert_array_equal(found[param.name], param.numpy().reshape(-1), err_msg=param.name)


def test_one_that_had_no_gradient_stays_as_it_is() -> None:
    rank = Rank(_sgd, 1, 0, _model())
    rank.put(make_gradients(rank.model, 0))
    before = rank.model[0].bias.numpy().copy()
    number = rank.buffers[0].layout.number
    flags = [param is not rank.model[0].bias for param in rank.buffers[0].params]
    with paddle.no_grad():
        rank.updates.apply([number], {number: flags})  # type: ignore[arg-type]
    assert (rank.model[0].bias.numpy() == before).all()
    assert not (rank.model[0].weight.numpy() == _model()[0].weight.numpy()).all()
