"""What Paddle's optimizers keep of a parameter: all that a resumed run needs, of whole parameters and of slices."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base.framework import EagerParamBase
from paddle.base.unique_name import generator
from paddle.utils import unique_name

from hp_sharding.errors import ConfigError
from hp_sharding.moments import (
    Kind,
    Moment,
    drop_moments,
    kinds_of,
    make_moments,
    master_of,
    moments_of,
    set_master,
)
from hp_sharding.views import slice_of
from tests.slices import MakeOptimizer, Rank, make_gradients, make_model, together
from tests.unit.test_options import GROUP_SETTINGS, OPTIONS

Array = np.ndarray[Any, Any]


def _groups(name: str) -> MakeOptimizer:
    """Groups of which one has settings of its own, in an optimizer that has a name."""

    def optimize(model: nn.Layer) -> Any:
        params = model.parameters()
        own = {"learning_rate": 0.3, **GROUP_SETTINGS[name]}
        groups = [{"params": params[:2]}, {"params": params[2:3], **own}, {"params": params[3]}]
        return getattr(paddle.optimizer, name)(0.1, parameters=groups, name="mine")

    return optimize


MAKERS: dict[str, MakeOptimizer] = {
    **OPTIONS,
    **{f"{name}, groups": _groups(name) for name in GROUP_SETTINGS},
    "Adam, tensors at once": lambda model: paddle.optimizer.Adam(
        0.1, parameters=model.parameters(), use_multi_tensor=True
    ),
    "Momentum, tensors at once": lambda model: paddle.optimizer.Momentum(
        0.1, parameters=model.parameters(), use_multi_tensor=True
    ),
}
KINDS: dict[str, dict[str, tuple[bool, int]]] = {
    "SGD": {},
    "Momentum": {"velocity": (True, 0)},
    "Adam, amsgrad": {
        "moment1": (True, 0),
        "moment2": (True, 0),
        "moment2_max": (True, 0),
        "beta1_pow_acc": (False, 0),
        "beta2_pow_acc": (False, 0),
    },
    "AdamW": {"moment1": (True, 0), "moment2": (True, 0), "beta1_pow_acc": (False, 0), "beta2_pow_acc": (False, 0)},
    "Adagrad": {"moment": (True, 0)},
    "RMSProp": {"momentum": (True, 0), "mean_square": (True, 0), "mean_grad": (True, 0)},
    "Adamax": {"moment": (True, 0), "inf_norm": (True, 0), "beta1_pow_acc": (False, 0)},
    "Adadelta": {"_avg_squared_grad": (True, 0), "_avg_squared_update": (True, 0)},
    "NAdam": dict.fromkeys(["momentum_decay_pow", "beta2_pow", "mu_product", "moment1", "moment2"], (True, 0)),
    "RAdam": dict.fromkeys(["beta1_pow", "beta2_pow", "rho", "moment1", "moment2"], (True, 0)),
    "Rprop": {"prevs": (True, 0), "learning_rates": (True, 0)},
    "ASGD": {"d": (True, 0), "y": (True, 3), "m": (False, 0)},
}
"""Of each of the twelve: ``per_element`` and ``rows`` of what it keeps. Powers of beta differ from one to the other."""


def _steps(model: nn.Layer, optimizer: Any, steps: range) -> None:
    for step in steps:
        for param, gradient in zip(model.parameters(), make_gradients(model, step), strict=True):
            param.grad = paddle.to_tensor(gradient)
        optimizer.step()
        optimizer.clear_grad()


def _shown(moments: list[Moment]) -> dict[str, Array]:
    return {moment.name: moment.tensor.numpy().copy() for moment in moments}


def _assert_same(found: list[Moment], expected: list[Moment], where: str) -> None:
    for own, other in zip(found, expected, strict=True):
        assert own.name == other.name
        assert own.kind == other.kind, where
        np.testing.assert_array_equal(own.tensor.numpy(), other.tensor.numpy(), err_msg=f"{where}: {own.name}")


@pytest.mark.parametrize("name", list(MAKERS))
def test_with_parameters_and_moments_a_run_goes_on_bitwise(name: str) -> None:
    """So nothing else that an optimizer keeps changes from step to step."""
    model, twin = make_model(), make_model()
    optimizer, resumed = MAKERS[name](model), MAKERS[name](twin)
    _steps(model, optimizer, range(3))
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.set_value(param.numpy())
        for own, theirs in zip(make_moments(resumed, other), moments_of(optimizer, param), strict=True):
            own.tensor.set_value(theirs.tensor.numpy())
    _steps(model, optimizer, range(3, 6))
    _steps(twin, resumed, range(3, 6))
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        np.testing.assert_array_equal(other.numpy(), param.numpy(), err_msg=param.name)
        _assert_same(moments_of(resumed, other), moments_of(optimizer, param), param.name)


@pytest.mark.parametrize("name", list(MAKERS))
def test_what_is_made_is_what_the_first_step_makes(name: str) -> None:
    model, twin = make_model(), make_model()
    optimizer, other = MAKERS[name](model), MAKERS[name](twin)
    for param in model.parameters():
        assert moments_of(optimizer, param) == []
        made = make_moments(optimizer, param)
        assert {moment.name: moment.kind for moment in made} == kinds_of(other, param)
        values = _shown(made)
        assert all(np.array_equal(again, values[key]) for key, again in _shown(make_moments(optimizer, param)).items())
    _steps(model, optimizer, range(2))
    _steps(twin, other, range(2))
    for param, alike in zip(model.parameters(), twin.parameters(), strict=True):
        np.testing.assert_array_equal(param.numpy(), alike.numpy())
        _assert_same(moments_of(optimizer, param), moments_of(other, alike), param.name)


@pytest.mark.parametrize("name", list(KINDS))
def test_a_slice_of_one_element_has_moments_of_elements(name: str) -> None:
    """All of its tensors have one element: only what larger parameters have tells which are the parameter's own."""
    model = make_model()
    optimizer = OPTIONS[name](model)
    param = model.parameters()[0]
    part = slice_of(param, paddle.ones([1]))
    assert moments_of(optimizer, part) == []
    optimizer._apply_optimize(None, None, [(part, paddle.full([1], 0.5))])
    moments = moments_of(optimizer, part)
    assert {moment.name: (moment.per_element, moment.rows) for moment in moments} == KINDS[name]
    assert {key: (kind.per_element, kind.rows) for key, kind in kinds_of(optimizer, param).items()} == KINDS[name]
    assert all(moment.tensor.size == max(moment.rows, 1) for moment in moments)


# -- another cut -------------------------------------------------------------------------------------------------------


def _put(rank: Rank, values: dict[str, Array], moments: dict[str, list[Moment]]) -> None:
    """Gives one rank its parts of whole parameters and moments."""
    for buffer in rank.buffers:
        for piece in buffer.slices:
            span = slice(piece.param_start_numel, piece.param_start_numel + piece.numel)
            name = buffer.params[piece.param].name
            piece.tensor.copy_(paddle.to_tensor(values[name].reshape(-1)[span]), False)
            for own, whole in zip(make_moments(rank.inner, piece.tensor), moments[name], strict=True):
                assert own.kind == whole.kind
                value = whole.tensor.numpy()
                if own.per_element:
                    rows = value.reshape(max(own.rows, 1), -1)[:, span]
                    value = rows.reshape(own.tensor.shape)
                own.tensor.set_value(value)


def _gather(ranks: list[Rank], name: str) -> dict[str, Array]:
    """Moments of one parameter, flat behind their rows, put together from every rank's slices."""
    parts: dict[str, list[Array]] = {}
    for rank in ranks:
        for piece in (piece for buffer in rank.buffers for piece in buffer.slices if piece.tensor.name == name):
            for moment in moments_of(rank.inner, piece.tensor):
                value = moment.tensor.numpy()
                parts.setdefault(moment.name, []).append(
                    value.reshape(max(moment.rows, 1), -1) if moment.per_element else value
                )
    return {key: np.concatenate(found, axis=1) if found[0].ndim == 2 else found[0] for key, found in parts.items()}


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_run_goes_on_over_slices_and_back(name: str, nranks: int) -> None:
    """Three steps of whole parameters, three of each rank's slices, and three of whole ones again: as nine of these."""
    model, expected = make_model(), make_model()
    optimizer, alone = OPTIONS[name](model), OPTIONS[name](expected)
    _steps(model, optimizer, range(3))
    ranks = [Rank(OPTIONS[name], nranks, rank) for rank in range(nranks)]
    values = {param.name: param.numpy() for param in model.parameters()}
    for rank in ranks:
        _put(rank, values, {param.name: moments_of(optimizer, param) for param in model.parameters()})
        for step in range(3, 6):
            rank.put(make_gradients(rank.model, step))
            rank.apply()
    last = make_model()
    again = OPTIONS[name](last)
    found = together(ranks)
    for param in last.parameters():
        param.set_value(found[param.name].reshape(param.shape))
        gathered = _gather(ranks, param.name)
        for moment in make_moments(again, param):
            moment.tensor.set_value(gathered[moment.name].reshape(moment.tensor.shape))
    _steps(last, again, range(6, 9))
    _steps(expected, alone, range(9))
    for param, other in zip(last.parameters(), expected.parameters(), strict=True):
        np.testing.assert_array_equal(param.numpy(), other.numpy(), err_msg=param.name)
        _assert_same(moments_of(again, param), moments_of(alone, other), param.name)


# -- loaded, forgotten -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counters", ["fresh", "used"])
@pytest.mark.parametrize("name", ["AdamW", "ASGD", "AdamW, groups", "Adamax, groups"])
def test_a_state_that_is_loaded_before_the_first_step_counts(name: str, counters: str) -> None:
    """Also where the numbers in its keys are taken, as by another optimizer before: Paddle asserts there."""
    with unique_name.guard():
        model = make_model()
        optimizer = MAKERS[name](model)
        _steps(model, optimizer, range(3))
        state = {key: value.clone() for key, value in optimizer.state_dict().items()}
    if counters == "used":
        state = {f"{key[:-1]}7": value for key, value in state.items()}
    with unique_name.guard():
        twin = make_model()
        loaded = MAKERS[name](twin)
        loaded.set_state_dict(state)
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            _assert_same(moments_of(loaded, other), moments_of(optimizer, param), param.name)
    assert loaded._accumulators_holder == {}


@pytest.mark.parametrize("name", ["SGD", "AdamW", "ASGD", "Rprop", "AdamW, groups", "Adam, tensors at once"])
def test_what_was_dropped_was_never_there(name: str) -> None:
    """The names too: a state that is saved from it must have those that the next process will make."""
    with unique_name.guard():
        model = make_model()
        optimizer = MAKERS[name](model)
        _steps(model, optimizer, range(3))
        for param in model.parameters():
            drop_moments(optimizer, param)
            assert moments_of(optimizer, param) == []
        assert optimizer.state_dict() == {}
        start = {param.name: param.numpy().copy() for param in model.parameters()}
        _steps(model, optimizer, range(2))
    with unique_name.guard():
        twin = make_model()
        fresh = MAKERS[name](twin)
        for param in twin.parameters():
            param.set_value(start[param.name])
        _steps(twin, fresh, range(2))
    found, expected = optimizer.state_dict(), fresh.state_dict()
    assert list(found) == list(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key].numpy(), value.numpy(), err_msg=key)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        np.testing.assert_array_equal(param.numpy(), other.numpy())


def test_dropping_one_leaves_the_others() -> None:
    model = make_model()
    optimizer = OPTIONS["AdamW"](model)
    _steps(model, optimizer, range(2))
    first, *rest = model.parameters()
    before = [_shown(moments_of(optimizer, param)) for param in rest]
    drop_moments(optimizer, first)
    assert moments_of(optimizer, first) == []
    for param, values in zip(rest, before, strict=True):
        assert all(np.array_equal(value, values[key]) for key, value in _shown(moments_of(optimizer, param)).items())


def test_a_loaded_state_is_dropped_before_it_is_used() -> None:
    with unique_name.guard():
        model = make_model()
        optimizer = OPTIONS["AdamW"](model)
        _steps(model, optimizer, range(1))
        state = optimizer.state_dict()
    with unique_name.guard():
        loaded = OPTIONS["AdamW"](model)
        loaded.set_state_dict(state)
        first, second = model.parameters()[:2]
        drop_moments(loaded, first)
        assert moments_of(loaded, first) == []
        assert len(moments_of(loaded, second)) == 4
        for param in model.parameters():
            drop_moments(loaded, param)
        loaded.set_state_dict(state)
        assert set(loaded.state_dict()) == set(state), "as of an optimizer that has made no step"


# -- masters -----------------------------------------------------------------------------------------------------------


def _half(numel: int = 4) -> EagerParamBase:
    param = EagerParamBase(shape=[numel], dtype="bfloat16", name="half")
    paddle.full([numel], 1.5, "bfloat16")._share_buffer_to(param)
    return param


@pytest.mark.parametrize("name", ["SGD", "Momentum", "AdamW", "ASGD", "Rprop"])
def test_masters_are_kept_beside_16_bit_parameters(name: str) -> None:
    param = _half()
    with unique_name.guard():
        optimizer = getattr(paddle.optimizer, name)(0.1, parameters=[param], multi_precision=True)
        kinds = kinds_of(optimizer, param)
        assert master_of(optimizer, param) is None
        assert {moment.name: moment.kind for moment in make_moments(optimizer, param)} == kinds
        master = master_of(optimizer, param)
        assert master is not None
        np.testing.assert_array_equal(master.numpy(), np.full(4, 1.5, np.float32))
        set_master(optimizer, param, paddle.full([4], 1.2345))
        assert optimizer._master_weights[param.name] is master
        np.testing.assert_array_equal(master.numpy(), np.full(4, 1.2345, np.float32))
        drop_moments(optimizer, param)
        assert param.name not in optimizer._master_weights
        set_master(optimizer, param, paddle.full([4], 0.1))
        assert moments_of(optimizer, param) == []
        assert {moment.name: moment.kind for moment in make_moments(optimizer, param)} == kinds
        again = optimizer._master_weights[param.name]
        assert again.name == "half_fp32_master_0"
        np.testing.assert_array_equal(again.numpy(), np.full(4, 0.1, np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_master_where_none_is_kept_is_refused(dtype: str) -> None:
    param = _half() if dtype == "bfloat16" else make_model().parameters()[0]
    optimizer = paddle.optimizer.AdamW(0.1, parameters=[param], multi_precision=dtype == "float32")
    with pytest.raises(ConfigError, match=f"parameter '{param.name}': AdamW keeps no float32 master of it"):
        set_master(optimizer, param, paddle.ones(param.shape))


# -- looking makes nothing; subclasses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "ASGD", "Adagrad, groups"])
def test_asking_what_will_be_kept_changes_nothing(name: str) -> None:
    model = make_model()
    optimizer = MAKERS[name](model)
    half = paddle.optimizer.AdamW(0.1, parameters=[_half()])
    optimizer.regularization = None
    before = {key: copy.copy(value) for key, value in vars(optimizer).items()}
    names = dict(generator.ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kinds_of(optimizer, model.parameters()[0])
        kinds_of(half, half._parameter_list[0])
    assert vars(optimizer) == before
    assert dict(generator.ids) == names


class _Late(paddle.optimizer.Momentum):
    """Keeps more of a parameter than ``_create_accumulators`` makes."""

    extra: tuple[int, ...] | None = None

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> Any:
        param = param_and_grad[0]
        self._add_accumulator("sum", param)
        self._add_accumulator("count", param, shape=[1])
        if self.extra is not None:
            self._add_accumulator("odd", param, shape=list(self.extra))
        return super()._append_optimize_op(block, param_and_grad)


def test_what_a_subclass_makes_late_is_known_by_its_shape() -> None:
    model = make_model()
    optimizer = _Late(0.1, parameters=model.parameters())
    _steps(model, optimizer, range(1))
    param, part = model.parameters()[0], slice_of(model.parameters()[1], paddle.ones([1]))
    kinds = {moment.name: moment.kind for moment in moments_of(optimizer, param)}
    assert kinds == {
        "velocity": Kind(True, 0, "float32"),
        "sum": Kind(True, 0, "float32"),
        "count": Kind(False, 0, "float32"),
    }
    assert kinds_of(optimizer, param) == kinds
    drop_moments(optimizer, model.parameters()[1])
    optimizer._apply_optimize(None, None, [(part, paddle.ones([1]))])
    assert {moment.name: moment.kind for moment in moments_of(optimizer, part)} == kinds, "as of the larger ones"


def test_what_fits_neither_elements_nor_the_whole_is_an_error() -> None:
    model = make_model()
    optimizer = _Late(0.1, parameters=model.parameters())
    optimizer.extra = (2, 3)
    _steps(model, optimizer, range(1))
    with pytest.raises(ConfigError, match=r"_Late keeps 'odd' of shape \[2, 3\] of parameter 'p0' of shape \[40, 17\]"):
        moments_of(optimizer, model.parameters()[0])


def test_a_parameter_of_no_group_is_an_error() -> None:
    optimizer = _groups("AdamW")(make_model())
    with pytest.raises(ConfigError, match="no group of this AdamW has parameter 'stray'"):
        make_moments(optimizer, EagerParamBase(shape=[2], dtype="float32", name="stray"))
