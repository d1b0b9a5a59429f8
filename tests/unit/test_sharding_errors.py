"""What ``shard`` refuses: each mistake by name, before any collective and without a trace left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.base import core
from paddle.base.framework import EagerParamBase

from hp_sharding import ConfigError, ShardingConfig, backward, full_parameters, shard
from hp_sharding.plain import PlainOptimizer
from hp_sharding.sharding import LANES, check_wrap, shard_over
from tests.fakes import WaitingLane, wrap


@pytest.fixture(autouse=True)
def _forget_earlier_models() -> None:
    if core.eager.run_backward is backward._run_backward:
        gc.collect()


def _sgd(model: nn.Layer, **options: Any) -> Any:
    return paddle.optimizer.SGD(0.1, parameters=model.parameters(), **options)


def _refused(model: Any, optimizer: Any, message: str) -> None:
    before = core.eager.run_backward
    kinds = [type(param) for param in model.parameters()] if isinstance(model, nn.Layer) else []
    with pytest.raises(ConfigError, match=message) as caught:
        check_wrap(model, optimizer)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(ConfigError, match=message):
        shard(model, optimizer)
    assert core.eager.run_backward is before
    if isinstance(model, nn.Layer):
        assert [type(param) for param in model.parameters()] == kinds


# -- wrapping twice ----------------------------------------------------------------------------------------------------


def test_a_model_is_wrapped_once() -> None:
    model = nn.Linear(2, 2)
    rig = wrap(model, _sgd(model))
    _refused(model, _sgd(model), "this Linear is already sharded; wrap it once")
    assert rig.log == []


def test_an_optimizer_is_wrapped_once() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    rig = wrap(model, _sgd(model))
    _refused(other, rig.optimizer, "this optimizer is already sharded; wrap it once")
    alone = shard(other, _sgd(other))
    assert isinstance(alone, PlainOptimizer)
    _refused(other, alone, "this optimizer is already sharded; wrap it once")


def test_what_is_refused_can_be_wrapped_once_it_is_right() -> None:
    model = nn.Linear(2, 2)
    _refused(model, paddle.optimizer.Lamb(0.1, parameters=model.parameters()), "Lamb cannot be sharded")
    rig = wrap(model, _sgd(model))
    model(paddle.ones([1, 2])).sum().backward()
    rig.optimizer.step()
    assert rig.reduce.labels("reduce_scatter")


# -- the wrong thing ---------------------------------------------------------------------------------------------------


def test_a_model_must_be_a_layer() -> None:
    layer = nn.Linear(2, 2)
    _refused([layer], _sgd(layer), "model: expected a paddle.nn.Layer, got list")
    _refused(None, _sgd(layer), "got NoneType")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: None, "expected a paddle.optimizer.Optimizer, got NoneType"),
        (lambda model: model, "expected a paddle.optimizer.Optimizer, got Linear"),
        (lambda model: paddle.optimizer.Lamb(0.1, parameters=model.parameters()), "Lamb cannot be sharded by element"),
        (lambda model: paddle.optimizer.LBFGS(0.1, parameters=model.parameters()), "LBFGS cannot be sharded"),
        (
            lambda model: paddle.optimizer.Adam(parameters=model.parameters(), use_multi_tensor=True),
            "use_multi_tensor=True",
        ),
    ],
)
def test_an_optimizer_must_update_element_by_element(make: Callable[[nn.Layer], Any], message: str) -> None:
    model = nn.Linear(2, 2)
    _refused(model, make(model), message)


def test_a_clip_of_the_users_own_is_refused() -> None:
    class Own(nn.clip.ClipGradBase):
        pass

    model = nn.Linear(2, 2)
    _refused(model, _sgd(model, grad_clip=Own()), "grad_clip Own: only ClipGradByGlobalNorm")


def test_an_optimizer_that_has_made_a_step_is_refused_where_its_state_must_be_split() -> None:
    model = nn.Linear(2, 2)
    optimizer = paddle.optimizer.Adam(parameters=model.parameters())
    model(paddle.ones([1, 2])).sum().backward()
    optimizer.step()
    lanes: dict[str, Any] = {name: WaitingLane(name) for name in LANES}
    with pytest.raises(ConfigError, match="Adam already has state of whole parameters"):
        shard_over(model, optimizer, ShardingConfig(), lanes=lanes)
    with pytest.raises(ConfigError, match="Adam already has state of whole parameters"):
        shard(model, optimizer, shard_group=[0, 1])
    assert not any(lane.log for lane in lanes.values())
    assert isinstance(shard(model, optimizer), PlainOptimizer)  # one process goes on from it


def test_a_model_is_not_wrapped_inside_another() -> None:
    model, around = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    wrap(model, _sgd(model))
    around.append(model)
    _refused(model[0], _sgd(model[0]), "parameter 'weight' belongs to a model that is already sharded")
    _refused(around, _sgd(around), "parameter '1.0.weight' belongs to a model that is already sharded")


def test_parameters_must_be_the_models() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    name = other.parameters()[0].name
    _refused(model, _sgd(other), f"holds 2 of 2 parameters that the model does not have, such as '{name}'")
    both = paddle.optimizer.SGD(0.1, parameters=[{"params": model.parameters()}, {"params": other.parameters()}])
    _refused(model, both, "holds 2 of 4 parameters")


def test_part_of_the_model_may_be_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_wrap(model, _sgd(model[1]))


def test_there_must_be_something_to_shard() -> None:
    model = nn.Layer()
    model.empty = model.create_parameter([0, 3])
    _refused(model, _sgd(model), "no parameter with elements")


def test_sparse_embeddings_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Embedding(3, 2, sparse=True)))
    _refused(model, _sgd(model), r"layer '1\.0': nn.Embedding\(sparse=True\) is not supported; use sparse=False")


def _with_extra(dtype: str, trains: bool) -> nn.Layer:
    model = nn.Linear(2, 2)
    model.extra = EagerParamBase.from_tensor(paddle.ones([3]).astype(dtype), trainable=trains)
    return model


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_what_trains_must_be_of_a_floating_dtype(dtype: str) -> None:
    model = _with_extra(dtype, trains=True)
    _refused(model, _sgd(model), f"parameter 'extra' is of {dtype}; what trains must be one of float32, float16")


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64"])
@pytest.mark.parametrize("settings", [{}, {"reshard_after_step": True}])
def test_frozen_parameters_of_other_dtypes_are_left_alone(dtype: str, settings: dict[str, Any]) -> None:
    model = _with_extra(dtype, trains=False)
    rig = wrap(model, _sgd(model), **settings)
    assert list(rig.optimizer.param2bucket) == ["weight", "bias"]
    for _ in range(2):
        model(paddle.ones([1, 2])).sum().backward()
        rig.optimizer.step()
        rig.optimizer.clear_grad()
    assert model.extra.astype("float32").tolist() == [1, 1, 1]


# -- groups and settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [[], [1], [1, 2], "ranks", 5, [None]])
def test_a_group_must_hold_this_process(group: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"shard_group: expected a Paddle group or ranks, this process's \(0\)"):
        shard(model, _sgd(model), shard_group=group)


def test_a_group_of_several_needs_a_parallel_environment() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"init_parallel_env\(\) first"):
        shard(model, _sgd(model), shard_group=[0, 1])


def test_groups_have_this_rank_in_common_and_no_other() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"shard_group \[0, 1\] and replicate_group \[0, 1\]: expected rank 0 to be"):
        shard(model, _sgd(model), shard_group=[0, 1], replicate_group=[0, 1])
    with pytest.raises(ConfigError, match=r"replicate_group: expected a Paddle group or ranks, this process's \(0\)"):
        shard(model, _sgd(model), replicate_group=[1])
    assert isinstance(shard(model, _sgd(model), replicate_group=[0]), PlainOptimizer)


def test_ranks_that_split_layers_see_the_same_data() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_group \[0, 1\]: ranks \[1\] are in the shard"):
        shard(model, _sgd(model), shard_group=[0, 1], tensor_parallel_group=[0, 1])
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_group: expected a Paddle group or ranks, this process's \(0\)"
    ):
        shard(model, _sgd(model), shard_group=[0], tensor_parallel_group=[1])


def test_split_parameters_need_to_be_split_over_somebody() -> None:
    model = nn.Linear(2, 2)
    model.weight.is_distributed = True
    with pytest.raises(
        ConfigError, match=rf"'{model.weight.name}' is split over several ranks .* pass tensor_parallel_group"
    ):
        shard(model, _sgd(model), shard_group=[0, 1])
    with pytest.raises(ConfigError, match=rf"'{model.weight.name}' is split over several ranks .* set mp_degree"):
        shard_over(model, _sgd(model), ShardingConfig(), lanes={name: WaitingLane(name) for name in LANES})


def test_settings_must_be_settings() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"config: expected a ShardingConfig, got dict\. ShardingConfig\.from_dict"):
        shard(model, _sgd(model), {"stage": 2})  # type: ignore[arg-type]
    assert isinstance(shard(model, _sgd(model), ShardingConfig.from_dict({"stage": 2})), PlainOptimizer)


def test_full_parameters_of_a_plain_model_are_its_own() -> None:
    model = nn.Linear(2, 2)
    with full_parameters(model) as inside:
        assert inside is model
        assert model.weight.numpy().shape == (2, 2)
