"""Every option of every elementwise optimizer, and what belongs to one parameter or group: the same over slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import ParamAttr, nn
from paddle.regularizer import L1Decay, L2Decay

from hp_sharding.errors import ConfigError, LayoutError
from hp_sharding.updates import check_fresh, check_optimizer
from tests.fakes import wrap
from tests.slices import Change, MakeOptimizer, Rank, assert_as_plain, make_gradients, make_model


def _kind(name: str, learning_rate: float = 0.1, **options: Any) -> MakeOptimizer:
    return lambda model: getattr(paddle.optimizer, name)(learning_rate, parameters=model.parameters(), **options)


OPTIONS: dict[str, MakeOptimizer] = {
    "SGD": _kind("SGD", multi_precision=True),
    "Momentum": _kind("Momentum", momentum=0.5),
    "Momentum, Nesterov": _kind("Momentum", use_nesterov=True, weight_decay=0.1),
    "Momentum, rescaled": _kind("Momentum", rescale_grad=0.25, multi_precision=True),
    "Adam": _kind("Adam", beta1=0.7, beta2=0.8, epsilon=1e-3),
    "Adam, lazy": _kind("Adam", lazy_mode=True, multi_precision=True),
    "Adam, amsgrad": _kind("Adam", amsgrad=True, weight_decay=0.1),
    "Adam, tensors": lambda model: paddle.optimizer.Adam(
        0.1, beta1=paddle.to_tensor(0.9), beta2=paddle.to_tensor(0.999), parameters=model.parameters()
    ),
    "AdamW": _kind("AdamW", beta1=0.7, beta2=0.8, epsilon=1e-3, weight_decay=0.5),
    "AdamW, lazy": _kind("AdamW", lazy_mode=True, use_lowprecision_moment=True),
    "AdamW, amsgrad": _kind("AdamW", amsgrad=True),
    "Adagrad": _kind("Adagrad", epsilon=1e-3, initial_accumulator_value=0.5),
    "RMSProp": _kind("RMSProp"),
    "RMSProp, momentum": _kind("RMSProp", rho=0.5, epsilon=1e-3, momentum=0.9, weight_decay=0.1),
    "RMSProp, centered": _kind("RMSProp", centered=True),
    "Adamax": _kind("Adamax", beta1=0.7, beta2=0.8, epsilon=1e-3),
    "Adadelta": _kind("Adadelta", epsilon=1e-3, rho=0.5),
    "NAdam": _kind("NAdam", beta1=0.7, momentum_decay=0.1, weight_decay=0.1),
    "RAdam": _kind("RAdam", beta1=0.7, beta2=0.8, epsilon=1e-3),
    "Rprop": _kind("Rprop", learning_rate_range=(0.01, 0.2), etas=(0.3, 1.7), multi_precision=True),
    "ASGD": _kind("ASGD", batch_num=3, weight_decay=0.1, multi_precision=True),
}


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_options(name: str, nranks: int) -> None:
    assert_as_plain(OPTIONS[name], nranks)


WITH_DECAY = ("SGD", "Momentum", "Adam", "Adagrad", "RMSProp", "Adamax", "Adadelta", "NAdam", "RAdam", "ASGD")


@pytest.mark.parametrize("decay", [L1Decay(0.1), L2Decay(0.1), 0.1])
@pytest.mark.parametrize("name", WITH_DECAY)
def test_a_regularizer_of_the_optimizer(name: str, decay: Any) -> None:
    assert_as_plain(_kind(name, weight_decay=decay), 2)


GROUP_SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "Momentum": {"momentum": 0.5, "use_nesterov": True},
    "Adam": {"beta1": 0.5, "beta2": 0.7, "epsilon": 1e-3},
    "AdamW": {"beta1": 0.5, "beta2": 0.7, "epsilon": 1e-3},
    "Adagrad": {"epsilon": 1e-2},
    "RMSProp": {"rho": 0.5, "epsilon": 1e-3, "momentum": 0.5, "centered": True},
    "Adamax": {"beta1": 0.5, "beta2": 0.7, "epsilon": 1e-3},
    "Adadelta": {"epsilon": 1e-3, "rho": 0.5},
    "NAdam": {"beta1": 0.5, "beta2": 0.7, "epsilon": 1e-3, "momentum_decay": 0.1},
    "RAdam": {"beta1": 0.5, "beta2": 0.7, "epsilon": 1e-3},
    "Rprop": {},
    "ASGD": {},
}


@pytest.mark.parametrize("nranks", [1, 3])
@pytest.mark.parametrize("name", list(GROUP_SETTINGS))
def test_groups_with_settings_of_their_own(name: str, nranks: int) -> None:
    """The second group, and a third of one parameter that is not in a list."""

    def optimize(model: nn.Layer) -> Any:
        params = model.parameters()
        own = {"learning_rate": 0.3, "grad_clip": nn.ClipGradByValue(0.5), **GROUP_SETTINGS[name]}
        if name != "Rprop":
            own["weight_decay"] = 0.2
        groups = [{"params": params[:2]}, {"params": params[2:3], **own}, {"params": params[3]}]
        return getattr(paddle.optimizer, name)(0.1, parameters=groups)

    assert_as_plain(optimize, nranks)


def test_which_parameters_of_groups_decay_is_asked_by_name() -> None:
    def optimize(model: nn.Layer) -> Any:
        params = model.parameters()
        groups = [{"params": params[:2], "weight_decay": 0.5}, {"params": params[2:], "learning_rate": 0.5}]
        return paddle.optimizer.AdamW(0.1, parameters=groups, apply_decay_param_fun=lambda name: name in ("p0", "p3"))

    assert_as_plain(optimize, 2)


class _Attributed(nn.Layer):
    """Parameters whose rate, decay, clipping and training are set where they are made."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(3)
        slow = ParamAttr(learning_rate=0.1, regularizer=L1Decay(0.1))
        steady = ParamAttr(need_clip=False, regularizer=L2Decay(0.2))
        self.a = nn.Linear(40, 17, weight_attr=slow, bias_attr=steady)
        self.b = nn.Linear(17, 5, weight_attr=ParamAttr(need_clip=False), bias_attr=ParamAttr(trainable=False))
        for number, param in enumerate(self.parameters()):
            param.name = f"p{number}"


CLIPS: dict[str, Any] = {
    "none": None,
    "value": nn.ClipGradByValue(0.5),
    "norm": nn.ClipGradByNorm(0.5),
    "global norm": nn.ClipGradByGlobalNorm(0.5),
}
NORM_ORDER = 2e-6
"""The norm is summed in another order than Paddle's."""


@pytest.mark.parametrize("clip", list(CLIPS))
@pytest.mark.parametrize("name", ["Momentum", "Adam"])
def test_attributes_of_parameters(name: str, clip: str) -> None:
    def optimize(model: nn.Layer) -> Any:
        return getattr(paddle.optimizer, name)(0.1, parameters=model.parameters(), grad_clip=CLIPS[clip])

    by_norm = "norm" in clip
    assert_as_plain(optimize, 1 if by_norm else 3, tolerance=NORM_ORDER if by_norm else 0.0, make=_Attributed)


# -- changed on the way ------------------------------------------------------------------------------------------------


def _decay_later(model: nn.Layer, optimizer: Any, step: int) -> None:
    model.parameters()[step % 4].regularizer = L2Decay(0.5) if step != 1 else L1Decay(0.5)


def _need_clip_later(model: nn.Layer, optimizer: Any, step: int) -> None:
    model.parameters()[0].need_clip = bool(step % 3)


def _frozen_later(model: nn.Layer, optimizer: Any, step: int) -> None:
    model.parameters()[0].stop_gradient = step == 0
    model.parameters()[3].trainable = step != 1


@pytest.mark.parametrize("change", [_decay_later, _need_clip_later, _frozen_later])
def test_what_is_set_on_a_parameter_after_wrapping_counts(change: Change) -> None:
    assert_as_plain(_kind("Momentum", grad_clip=nn.ClipGradByValue(0.5)), 3, change=change)


def _other_clip(model: nn.Layer, optimizer: Any, step: int) -> None:
    clips = [nn.ClipGradByNorm(0.2), None, nn.ClipGradByGlobalNorm(0.1), nn.ClipGradByValue(0.1)]
    optimizer._grad_clip = clips[step % 4]


def _other_bound(model: nn.Layer, optimizer: Any, step: int) -> None:
    optimizer._grad_clip.clip_norm = 0.1 * (step + 1)


@pytest.mark.parametrize("kind", [nn.ClipGradByNorm, nn.ClipGradByGlobalNorm])
@pytest.mark.parametrize("change", [_decay_later, _need_clip_later, _other_clip, _other_bound])
def test_clipping_that_is_changed_after_wrapping_counts(change: Change, kind: type) -> None:
    def optimize(model: nn.Layer) -> Any:
        return paddle.optimizer.Momentum(0.1, parameters=model.parameters(), grad_clip=kind(0.5))

    assert_as_plain(optimize, 1, change=change, tolerance=NORM_ORDER)


def _settings_of_groups(model: nn.Layer, optimizer: Any, step: int) -> None:
    first, second = optimizer._param_groups
    first["weight_decay"] = 0.1 * step
    first["beta1"] = 0.5
    second["grad_clip"] = nn.ClipGradByNorm(0.1) if step == 1 else None


def test_settings_of_a_group_that_are_changed_after_wrapping_count() -> None:
    def optimize(model: nn.Layer) -> Any:
        params = model.parameters()
        return paddle.optimizer.AdamW(0.1, parameters=[{"params": params[:1]}, {"params": params[1:]}])

    assert_as_plain(optimize, 1, change=_settings_of_groups, tolerance=NORM_ORDER)


# -- what is refused ---------------------------------------------------------------------------------------------------


class _OfTheWhole(paddle.regularizer.WeightDecayRegularizer):
    """Divides by the norm of the whole parameter."""

    def __call__(self, param: Any, grad: Any, block: Any) -> Any:
        return param / param.norm()


class _NamedDecay(L2Decay):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda model: paddle.optimizer.SGD(0.1, parameters=model.parameters(), weight_decay=_OfTheWhole()),
        lambda model: paddle.optimizer.SGD(0.1, [{"params": model.parameters(), "weight_decay": _OfTheWhole()}]),
    ],
)
def test_a_regularizer_of_the_users_own_is_refused(make: Callable[[nn.Layer], Any]) -> None:
    with pytest.raises(ConfigError, match="_OfTheWhole: only L1Decay and L2Decay are known to work element by element"):
        check_optimizer(make(make_model()))


def test_a_regularizer_of_the_users_own_on_one_parameter_is_refused_by_name() -> None:
    model = nn.Linear(2, 2, weight_attr=ParamAttr(regularizer=_OfTheWhole()))
    model.weight.name = "mine"
    with pytest.raises(ConfigError, match="parameter 'mine', regularizer _OfTheWhole"):
        check_optimizer(paddle.optimizer.SGD(0.1, parameters=model.parameters()))
    check_optimizer(paddle.optimizer.SGD(0.1, parameters=make_model().parameters(), weight_decay=_NamedDecay(0.1)))


def test_what_is_given_later_is_looked_at_too() -> None:
    rank = Rank(_kind("SGD"), 1, 0)
    rank.put(make_gradients(rank.model, 0))
    rank.model.parameters()[0].regularizer = _OfTheWhole()
    with pytest.raises(ConfigError, match="parameter 'p0', regularizer _OfTheWhole"):
        rank.apply()

    class Own(nn.clip.ClipGradBase):
        pass

    rank.inner._grad_clip = Own()
    with pytest.raises(ConfigError, match="grad_clip Own: only ClipGradByGlobalNorm"):
        rank.updates.clips_by_norm  # noqa: B018


def test_an_optimizer_with_state_of_whole_parameters_is_refused() -> None:
    model = make_model()
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    check_fresh(optimizer)
    for param in model.parameters():
        param.grad = paddle.ones(param.shape)
    optimizer.step()
    with pytest.raises(ConfigError, match="Momentum already has state of whole parameters"):
        check_fresh(optimizer)
    loaded = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    loaded.set_state_dict(optimizer.state_dict())
    with pytest.raises(ConfigError, match="Momentum already has state of whole parameters"):
        check_fresh(loaded)


def test_a_parameter_that_is_held_twice_is_refused() -> None:
    """Paddle updates it twice in each step, a sharded optimizer would once."""
    params = make_model().parameters()
    with pytest.raises(ConfigError, match="SGD holds parameter 'p1' more than once"):
        check_optimizer(paddle.optimizer.SGD(0.1, parameters=[*params, params[1]]))


def test_a_step_of_the_users_own_optimizer_is_refused() -> None:
    """It would find no gradients, or train on those of this rank alone."""
    model = make_model()
    inner = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    rig = wrap(model, inner)
    loss = model(paddle.ones([2, 40])).sum()
    loss.backward()
    for step in (inner.step, lambda: inner.minimize(loss)):
        with pytest.raises(ConfigError, match=r"Call step\(\) of the one that fleet\.distributed_optimizer"):
            step()
    rig.optimizer.minimize(loss)


@pytest.mark.parametrize("through", ["the wrapped optimizer", "the user's"])
def test_a_group_cannot_be_added_to_a_sharded_optimizer(through: str) -> None:
    model, other = make_model(), nn.Linear(2, 2)
    inner = paddle.optimizer.AdamW(0.1, parameters=[{"params": model.parameters()}])
    rig = wrap(model, inner)
    optimizer = rig.optimizer if through == "the wrapped optimizer" else inner
    with pytest.raises(LayoutError, match="parameter group was added to an optimizer that is sharded"):
        optimizer._add_param_group({"params": other.parameters()})
