"""The user's optimizer over slices: what is refused, and that slices of all ranks add up to what plain Paddle does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding.errors import ConfigError
from hp_sharding.updates import check_optimizer, optimizer_params
from tests.slices import MakeOptimizer, Rank, make_gradients, make_model, plain_steps, together

ELEMENTWISE: dict[str, MakeOptimizer] = {
    "SGD": lambda model: paddle.optimizer.SGD(0.1, parameters=model.parameters(), weight_decay=0.01),
    "Momentum": lambda model: paddle.optimizer.Momentum(0.1, parameters=model.parameters(), use_nesterov=True),
    "Adam": lambda model: paddle.optimizer.Adam(0.1, parameters=model.parameters(), weight_decay=0.01),
    "Adam, amsgrad": lambda model: paddle.optimizer.Adam(0.1, parameters=model.parameters(), amsgrad=True),
    "AdamW": lambda model: paddle.optimizer.AdamW(0.1, parameters=model.parameters(), weight_decay=0.1),
    "Adagrad": lambda model: paddle.optimizer.Adagrad(0.1, parameters=model.parameters()),
    "RMSProp": lambda model: paddle.optimizer.RMSProp(0.1, parameters=model.parameters(), centered=True, momentum=0.9),
    "Adamax": lambda model: paddle.optimizer.Adamax(0.1, parameters=model.parameters()),
    "Adadelta": lambda model: paddle.optimizer.Adadelta(0.1, parameters=model.parameters()),
    "NAdam": lambda model: paddle.optimizer.NAdam(0.1, parameters=model.parameters()),
    "RAdam": lambda model: paddle.optimizer.RAdam(0.1, parameters=model.parameters()),
    "Rprop": lambda model: paddle.optimizer.Rprop(0.1, parameters=model.parameters()),
    "ASGD": lambda model: paddle.optimizer.ASGD(0.1, batch_num=2, parameters=model.parameters()),
}


@pytest.mark.parametrize("nranks", [1, 2, 3])
@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_slices_of_all_ranks_are_updated_as_the_whole_is(name: str, nranks: int) -> None:
    ranks = [Rank(ELEMENTWISE[name], nranks, rank) for rank in range(nranks)]
    for step in range(4):
        for rank in ranks:
            rank.put(make_gradients(rank.model, step))
            rank.apply()
    found = together(ranks)
    for param in plain_steps(ELEMENTWISE[name], 4).parameters():
        np.testing.assert_array_equal(found[param.name], param.numpy().reshape(-1), err_msg=param.name)


# -- what belongs to a parameter or a group ----------------------------------------------------------------------------


def _two_groups(model: nn.Layer) -> Any:
    """Another learning rate, decay and clip for the second layer."""
    groups = [
        {"params": model[0].parameters()},
        {
            "params": model[1].parameters(),
            "learning_rate": 0.1,
            "weight_decay": 0.5,
            "grad_clip": nn.ClipGradByValue(0.3),
        },
    ]
    return paddle.optimizer.AdamW(0.1, parameters=groups, weight_decay=0.01)


def _no_decay_on_biases(model: nn.Layer) -> Any:
    def decays(name: str) -> bool:
        return name in ("p0", "p2")

    return paddle.optimizer.AdamW(0.1, parameters=model.parameters(), weight_decay=0.5, apply_decay_param_fun=decays)


def _with_own_factors(model: nn.Layer) -> Any:
    params = model.parameters()
    params[0].optimize_attr = {"learning_rate": 0.25}
    params[2].regularizer = paddle.regularizer.L1Decay(0.3)
    return paddle.optimizer.Momentum(0.1, parameters=params, weight_decay=paddle.regularizer.L2Decay(0.01))


def _clipped_by_value(model: nn.Layer) -> Any:
    return paddle.optimizer.SGD(0.1, parameters=model.parameters(), grad_clip=nn.ClipGradByValue(0.2))


@pytest.mark.parametrize("nranks", [1, 3])
@pytest.mark.parametrize("make", [_two_groups, _no_decay_on_biases, _with_own_factors, _clipped_by_value])
def test_what_the_user_set_for_a_parameter_holds_for_its_slices(make: MakeOptimizer, nranks: int) -> None:
    ranks = [Rank(make, nranks, rank) for rank in range(nranks)]
    for step in range(3):
        for rank in ranks:
            rank.put(make_gradients(rank.model, step))
            rank.apply()
    found = together(ranks)
    for param in plain_steps(make, 3).parameters():
        np.testing.assert_array_equal(found[param.name], param.numpy().reshape(-1), err_msg=param.name)


def test_parameters_that_the_optimizer_lacks_stay() -> None:
    rank = Rank(lambda model: paddle.optimizer.SGD(0.1, parameters=model[1].parameters()), 1, 0)
    assert [param.name for buffer in rank.buffers for param in buffer.params] == ["p2", "p3"]


def test_only_used_parameters_that_train_are_updated() -> None:
    rank = Rank(ELEMENTWISE["SGD"], 1, 0)
    before = together([rank])
    params = rank.model.parameters()
    params[2].stop_gradient = True
    rank.put(make_gradients(rank.model, 0))
    with paddle.no_grad():
        rank.updates.apply([0, 1], [[True, False], [True, True]])
    after = together([rank])
    assert [np.array_equal(before[name], after[name]) for name in ("p0", "p1", "p2", "p3")] == [
        False,
        True,
        True,
        False,
    ]


def test_a_bucket_is_due_where_a_parameter_that_trains_was_used() -> None:
    rank = Rank(ELEMENTWISE["SGD"], 1, 0)
    assert rank.updates.is_due(0, [[False, True], [False, False]])
    assert not rank.updates.is_due(1, [[False, True], [False, False]])
    rank.buffers[0].params[1].stop_gradient = True
    assert not rank.updates.is_due(0, [[False, True], [False, False]])


def test_what_was_frozen_when_wrapped_is_updated_after_it_thaws() -> None:
    model, plain = make_model(), make_model()
    for param in model[0].parameters():
        param.stop_gradient = True
    rank = Rank(ELEMENTWISE["AdamW"], 2, 0, model)
    other_model = make_model()
    for param in other_model[0].parameters():
        param.stop_gradient = True
    other = Rank(ELEMENTWISE["AdamW"], 2, 1, other_model)
    for side in (rank, other):
        for param in side.model[0].parameters():
            param.stop_gradient = False
        for step in range(2):
            side.put(make_gradients(side.model, step))
            side.apply()
    found = together([rank, other])
    for param in plain_steps(ELEMENTWISE["AdamW"], 2, plain).parameters():
        np.testing.assert_array_equal(found[param.name], param.numpy().reshape(-1), err_msg=param.name)


# -- clipping by norms -------------------------------------------------------------------------------------------------


def _clipped(clip: Any, need_clip: bool = True) -> MakeOptimizer:
    def make(model: nn.Layer) -> Any:
        model.parameters()[1].need_clip = need_clip
        return paddle.optimizer.SGD(0.1, parameters=model.parameters(), grad_clip=clip)

    return make


_CLIPS: dict[str, MakeOptimizer] = {
    "global norm, clips": _clipped(nn.ClipGradByGlobalNorm(1.0)),
    "global norm, does not": _clipped(nn.ClipGradByGlobalNorm(1e6)),
    "global norm, skips": _clipped(nn.ClipGradByGlobalNorm(1e6, auto_skip_clip=True)),
    "global norm, one apart": _clipped(nn.ClipGradByGlobalNorm(1.0), need_clip=False),
    "norm of each": _clipped(nn.ClipGradByNorm(3.0)),
    "norm of each, one apart": _clipped(nn.ClipGradByNorm(3.0), need_clip=False),
    "groups": lambda model: paddle.optimizer.SGD(
        0.1,
        parameters=[
            {"params": model[0].parameters(), "grad_clip": nn.ClipGradByGlobalNorm(1.0)},
            {"params": model[1].parameters(), "grad_clip": nn.ClipGradByNorm(0.5)},
        ],
    ),
    "groups, one without": lambda model: paddle.optimizer.SGD(
        0.1,
        parameters=[
            {"params": model[0].parameters(), "grad_clip": nn.ClipGradByGlobalNorm(1.0)},
            {"params": model[1].parameters(), "grad_clip": None},
        ],
    ),
}


@pytest.mark.parametrize("name", list(_CLIPS))
def test_clipping_equals_plain_paddle(name: str) -> None:
    rank = Rank(_CLIPS[name], 1, 0)
    for step in range(2):
        rank.put(make_gradients(rank.model, step))
        rank.updates.clip()
        rank.apply()
    found = together([rank])
    for param in plain_steps(_CLIPS[name], 2).parameters():
        np.testing.assert_allclose(found[param.name], param.numpy().reshape(-1), rtol=2e-6, atol=1e-7)
    assert rank.lane.labels("all_gather") == ["gradient norm"] * 2
    assert rank.lane.n_pending == 0


def test_a_norm_is_over_the_shards_of_all_ranks() -> None:
    """Every rank holds the same here, so the squared norm is ``nranks`` times this rank's."""
    rank = Rank(_clipped(nn.ClipGradByGlobalNorm(1.0)), 2, 0)
    rank.put(make_gradients(rank.model, 0))
    own = sum(float((rank.arena.slice(bucket) ** 2).sum()) for bucket in (0, 1))
    before = rank.arena.slice(0).numpy().copy()
    rank.updates.clip()
    np.testing.assert_allclose(rank.arena.slice(0).numpy(), before / np.sqrt(2 * own), rtol=1e-6)


def test_padding_does_not_count_and_stays_zero() -> None:
    rank = Rank(_clipped(nn.ClipGradByGlobalNorm(1.0)), 1, 0)
    rank.put(make_gradients(rank.model, 0))
    rank.updates.clip()
    for buffer in rank.buffers:
        for start, end in buffer.layout.gaps():
            assert (rank.arena.slice(buffer.layout.number)._slice(start, end).numpy() == 0).all()


def test_without_a_norm_nothing_is_sent() -> None:
    rank = Rank(_clipped_by_value, 1, 0)
    assert not rank.updates.clips_by_norm
    rank.updates.clip()
    assert rank.lane.log == []


def test_the_users_clip_is_in_place_again_after_an_update() -> None:
    rank = Rank(_CLIPS["global norm, clips"], 1, 0)
    clip = rank.inner._grad_clip
    rank.put(make_gradients(rank.model, 0))
    rank.apply()
    assert rank.inner._grad_clip is clip


@pytest.mark.parametrize("name", ["global norm, clips", "groups"])
def test_a_norm_is_not_clipped_by_twice(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The inner optimizer sees this rank's slices only, whose norm means nothing."""
    rank = Rank(_CLIPS[name], 1, 0)
    rank.put(make_gradients(rank.model, 0))
    for kind in (nn.ClipGradByGlobalNorm, nn.ClipGradByNorm):
        monkeypatch.setattr(kind, "__call__", None)
    rank.apply()


@pytest.mark.parametrize(("name", "expected"), [("SGD", 0), ("Momentum", 4), ("AdamW", 8), ("Adam, amsgrad", 12)])
def test_bytes_of_moments_an_element(name: str, expected: int) -> None:
    rank = Rank(ELEMENTWISE[name], 1, 0)
    assert rank.updates.moment_bytes() == 0
    rank.put(make_gradients(rank.model, 0))
    rank.apply()
    assert rank.updates.moment_bytes() == expected


# -- what is refused ---------------------------------------------------------------------------------------------------


class _OwnSgd(paddle.optimizer.SGD):
    pass


class _OwnOptimizer(paddle.optimizer.Optimizer):
    pass


class _OwnClip(nn.clip.ClipGradBase):
    pass


class _NamedClip(nn.ClipGradByGlobalNorm):
    pass


class _OtherNorm(nn.ClipGradByGlobalNorm):
    def _dygraph_clip(self, params_grads: Any) -> Any:
        return params_grads


def _weights() -> list[Any]:
    return nn.Linear(2, 2).parameters()


@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_elementwise_optimizers_are_accepted(name: str) -> None:
    check_optimizer(ELEMENTWISE[name](make_model()))


def test_subclasses_of_what_is_known_are_accepted() -> None:
    check_optimizer(_OwnSgd(0.1, parameters=_weights(), grad_clip=_NamedClip(1.0)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: paddle.optimizer.Lamb(0.1, parameters=_weights()), "Lamb cannot be sharded.*norms of the whole"),
        (lambda: paddle.optimizer.LBFGS(0.1, parameters=_weights()), "LBFGS cannot be sharded.*inner products"),
        (lambda: _OwnOptimizer(0.1, parameters=_weights()), "_OwnOptimizer is not known to update element by element"),
        (lambda: "adam", "expected a paddle.optimizer.Optimizer, got str"),
        (lambda: None, "got NoneType"),
        (
            lambda: paddle.optimizer.Adam(0.1, parameters=_weights(), use_multi_tensor=True),
            r"Adam\(use_multi_tensor=True\): not supported",
        ),
        (
            lambda: paddle.optimizer.SGD(0.1, parameters=_weights(), grad_clip=_OwnClip()),
            "grad_clip _OwnClip: only ClipGradByGlobalNorm, ClipGradByNorm and ClipGradByValue",
        ),
        (
            lambda: paddle.optimizer.SGD(0.1, parameters=[{"params": _weights(), "grad_clip": _OwnClip()}]),
            "grad_clip _OwnClip",
        ),
        (
            lambda: paddle.optimizer.SGD(0.1, parameters=_weights(), grad_clip=_OtherNorm(1.0)),
            "grad_clip _OtherNorm",
        ),
    ],
)
def test_what_cannot_be_sharded_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_optimizer(make())


def test_parameters_of_all_groups_in_order() -> None:
    model = make_model()
    assert [param.name for param in optimizer_params(_two_groups(model))] == ["p0", "p1", "p2", "p3"]
    plain = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    assert [param.name for param in optimizer_params(plain)] == ["p0", "p1", "p2", "p3"]
