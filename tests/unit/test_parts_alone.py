"""Checks and frees that a whole step does not show: each part by itself, in the state in which it matters."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base.framework import EagerParamBase

import hp_sharding
from hp_sharding import ShardingConfig
from hp_sharding.buffer import BufferPlace, FusedCommBuffer
from hp_sharding.errors import CommError, ConfigError, StateError
from hp_sharding.gradient_storage import drop_gradient
from hp_sharding.in_flight import GradientsInFlight
from hp_sharding.layout import BucketLayout, BucketRules, ParamSpec, plan_buckets
from hp_sharding.moments import _free_name
from hp_sharding.plain import PlainOptimizer
from hp_sharding.pool import StoragePool
from hp_sharding.precision import bucket_dtypes
from hp_sharding.replication import Replicator
from hp_sharding.running import RunningState
from hp_sharding.sent import SentGradients
from hp_sharding.sharding import _log_layout, _ranks, shard_over
from hp_sharding.updates import InnerUpdates
from tests import fakes
from tests.fakes import PoisoningPool, Rig, WaitingLane
from tests.pipeline import Pipeline


def _wrapped(**settings: Any) -> Rig:
    paddle.seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    return fakes.wrap(model, optimizer, **settings)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "settings", "said"),
    [
        (
            "bfloat16",
            {"gather_dtype": "float16"},
            "gather_dtype='float16': parameter 'w' is of bfloat16; what is gathe",
        ),
        (
            "float16",
            {"reduce_dtype": "bfloat16"},
            "reduce_dtype='bfloat16': parameter 'w' is of float16; use 'float16'",
        ),
        ("float64", {"param_dtype": "bfloat16"}, "param_dtype='bfloat16': parameter 'w' is of float64; cast the model"),
        ("float64", {"reduce_dtype": "float16"}, "reduce_dtype='float16': parameter 'w' is of float64; cast the model"),
    ],
)
def test_dtypes_that_a_parameter_cannot_have(dtype: str, settings: dict[str, Any], said: str) -> None:
    param = EagerParamBase.from_tensor(paddle.zeros([4], dtype), trainable=True)
    with pytest.raises(ConfigError) as raised:
        bucket_dtypes(param, "w", ShardingConfig(**settings), masters=True)
    assert said in str(raised.value)


def test_an_optimizer_without_its_inside_has_no_attributes() -> None:
    """As while it is copied."""
    with pytest.raises(AttributeError):
        PlainOptimizer.__new__(PlainOptimizer).param_groups  # noqa: B018


def test_a_package_below_that_does_not_fit_is_no_missing_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise AttributeError("numpy has no attribute 'x'")

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(ImportError, match=r"hp_sharding\.checkpoint cannot be imported: AttributeError: numpy has no"):
        hp_sharding._imported("checkpoint")


def _buffer(*, keeps_full: bool) -> FusedCommBuffer:
    params = [EagerParamBase.from_tensor(paddle.ones([30]), trainable=True)]
    specs = [ParamSpec("w", 30, "float32", 4, 0, False)]
    [layout] = plan_buckets(specs, ["root"], BucketRules(1, 10**9, True, True))
    return FusedCommBuffer(layout, params, BufferPlace(0, WaitingLane("gather"), PoisoningPool(), keeps_full))


def test_storage_that_stays_is_not_freed() -> None:
    with pytest.raises(StateError, match=r"free: its full tensor stays.*Set stage=3 or reshard_after_step=True"):
        _buffer(keeps_full=True).free()


def test_a_gradient_that_is_set_changes_nothing_and_so_is_refused() -> None:
    rig = _wrapped(stage=2)
    param = rig.model[0].weight
    with pytest.raises(StateError, match=r"setting its gradient changes nothing. Use optimizer\.set_full_grad"):
        param.grad = paddle.ones([8, 8])


def test_a_rank_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"shard_group: expected each of its ranks once"):
        _ranks("shard_group", [0, 0])


@pytest.mark.parametrize(
    ("settings", "said"), [({}, "the optimizer holds 2 of 2 parameters"), ({"units": [nn.GRU]}, "GRU")]
)
def test_lanes_that_are_given_do_not_save_the_checks(settings: dict[str, Any], said: str) -> None:
    model = nn.Linear(4, 4)
    owner = model if settings else nn.Linear(4, 4)
    optimizer = paddle.optimizer.SGD(0.1, parameters=owner.parameters())
    with pytest.raises(ConfigError, match=said):
        shard_over(model, optimizer, ShardingConfig(**settings), lanes={})


def _calls(rig: Rig) -> dict[str, Any]:
    optimizer = rig.optimizer
    return {
        "step": optimizer.step,
        "state_dict": optimizer.state_dict,
        "set_state_dict": lambda: optimizer.set_state_dict({}),
        "clear_grad": optimizer.clear_grad,
    }


@pytest.mark.parametrize("call", ["step", "state_dict", "set_state_dict", "clear_grad"])
@pytest.mark.parametrize("which", ["torn", "failure"])
def test_what_was_half_updated_or_half_moved_is_of_no_use(which: str, call: str) -> None:
    rig = _wrapped(stage=2)
    rig.model(paddle.ones([2, 8])).sum().backward()
    setattr(rig.optimizer, which, "it was broken off")
    with pytest.raises(StateError, match=r"^it was broken off$"):
        _calls(rig)[call]()


def test_what_was_half_moved_is_not_touched_by_clear_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = _wrapped(stage=2)
    touched: list[bool] = []
    monkeypatch.setattr(rig.optimizer._reducer, "clear", touched.append)
    rig.optimizer.failure = "half moved"
    with pytest.raises(StateError, match="half moved"):
        rig.optimizer.clear_grad()
    assert touched == []


# -- what is let go of -------------------------------------------------------------------------------------------------


def test_a_bucket_that_is_dissolved_holds_nothing() -> None:
    buffer = _buffer(keeps_full=False)
    buffer.dissolve()
    assert buffer.shard.size == 0
    assert (buffer.slices, buffer.full) == ([], None)


def test_updates_that_are_released_hold_nothing() -> None:
    updates = InnerUpdates.__new__(InnerUpdates)
    updates._parts, updates._fused, updates._clipper = {0: []}, {0: object()}, object()  # type: ignore[dict-item, assignment]
    updates.release()
    assert (updates._parts, updates._fused, updates._clipper) == ({}, {}, None)


def test_a_wide_gradient_goes_with_the_narrow_one() -> None:
    param = EagerParamBase.from_tensor(paddle.zeros([4], "bfloat16"), trainable=True)
    param.main_grad = paddle.ones([4])
    drop_gradient(param)
    assert param.main_grad is None


def test_blocks_that_are_back_are_not_lent_any_more() -> None:
    pool = StoragePool()
    tensors = [pool.alloc(10, "float32") for _ in range(3)]
    assert len(pool._lent) == 3
    del tensors
    assert len(pool._lent) == 0


def test_what_stands_for_a_vector_takes_no_more_than_the_vector() -> None:
    pool = StoragePool()
    pool.absent(100, "float32")
    assert len(pool._nans) == 400


def test_a_name_that_is_free_is_not_in_the_list_either() -> None:
    inner = SimpleNamespace(_opti_name_list=["w_moment1_0", "v_moment1_0"])
    _free_name(inner, SimpleNamespace(name="w_moment1_0"))
    assert inner._opti_name_list == ["v_moment1_0"]


class _Work:
    def __init__(self, error: CommError | None = None) -> None:
        self.n_waits, self._error = 0, error

    def wait(self) -> None:
        self.n_waits += 1
        if self._error is not None:
            raise self._error


def test_statistics_under_way_are_waited_for_and_forgotten() -> None:
    running, works = RunningState.__new__(RunningState), [_Work(), _Work()]
    running._under_way = [SimpleNamespace(work=work) for work in works]  # type: ignore[misc]
    running.drop()
    assert [work.n_waits for work in works] == [1, 1]
    assert len(running._under_way) == 0


def test_statistics_that_cannot_come_are_forgotten_at_once() -> None:
    running, works = RunningState.__new__(RunningState), [_Work(CommError("gone")), _Work()]
    running._under_way = [SimpleNamespace(work=work) for work in works]  # type: ignore[misc]
    with pytest.raises(CommError, match="gone"):
        running.drop()
    assert len(running._under_way) == 0
    running.drop()


def test_a_sum_over_replicas_that_failed_is_not_waited_for_again() -> None:
    replicator = Replicator.__new__(Replicator)
    replicator._run, replicator._works = [], {3: _Work()}  # type: ignore[dict-item]

    def fails(work: Any) -> None:
        raise CommError("gone")

    replicator._timeline = SimpleNamespace(wait=fails)  # type: ignore[assignment]
    with pytest.raises(CommError, match="gone"):
        replicator.wait(3)
    replicator.wait(3)
    assert not replicator.is_waited_for(3)


def _sent() -> tuple[SentGradients, Any]:
    param = EagerParamBase.from_tensor(paddle.zeros([4]), trainable=True)
    param._copy_gradient_from(paddle.ones([4]))
    sent = SentGradients()
    gradient: Any = SimpleNamespace(full=paddle.ones([4]))
    buffer: Any = SimpleNamespace(layout=SimpleNamespace(number=0), params=[param], gradient=gradient)
    sent.note(buffer)
    assert len(sent._sent) == 1
    return sent, buffer


def test_gradients_that_were_cleared_may_be_written_to() -> None:
    sent, buffer = _sent()
    sent.clear()
    EagerParamBase._grad_ivar(buffer.params[0]).zero_()
    sent.check(0)


def test_what_is_set_aside_counts_as_sent_no_more() -> None:
    sent, buffer = _sent()
    edited: Any = SimpleNamespace(is_edited=lambda number: True)
    assert sent.set_aside([buffer], edited, unsent=False) == {0}
    EagerParamBase._grad_ivar(buffer.params[0]).zero_()
    sent.check(0)


@pytest.mark.parametrize("how", ["give_back", "_wait_all"])
def test_storage_of_what_has_been_reduced_is_given_back(how: str) -> None:
    pipe = Pipeline(2)
    pipe.backward({0: 1.0, 1: 1.0})
    reducer = pipe.reducer
    reducer.settle()
    for bucket in range(2):
        reducer.wait(bucket)
    assert len(reducer._in_flight._flights) > 0
    getattr(reducer, how)()
    assert (len(reducer._in_flight._flights), reducer._in_flight._live_bytes) == (0, 0)


def test_gradients_that_nobody_counts_any_more() -> None:
    storage: Any = SimpleNamespace(nbytes=8, hand_over=lambda: None)
    flights = GradientsInFlight([storage], SimpleNamespace())  # type: ignore[arg-type]
    flights.send(storage, _Work())  # type: ignore[arg-type]
    flights.clear()
    assert (len(flights._flights), flights._live_bytes) == (0, 0)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_the_line_about_the_buckets_counts_mebibytes(caplog: pytest.LogCaptureFixture) -> None:
    layout: Any = SimpleNamespace(nbytes=3 << 19, name="b", dtype="float32", slots=[], numel=0)
    with caplog.at_level(logging.INFO, "hp_sharding"):
        _log_layout([layout, layout], WaitingLane("gather"), 1, ShardingConfig())
    assert "2 buckets, 3.0 MB," in caplog.text


def _groups(layouts: list[BucketLayout]) -> list[list[int]]:
    return [sorted(slot.param for slot in layout.slots) for layout in layouts]


def test_a_unit_that_is_too_large_shares_no_bucket_with_its_neighbours() -> None:
    numels, units = [1000] * 12, [0, *[1] * 10, 2]
    specs = [
        ParamSpec(f"p{i}", numel, "float32", 4, unit, False)
        for i, (numel, unit) in enumerate(zip(numels, units, strict=True))
    ]
    layouts = plan_buckets(specs, ["a", "b", "c"], BucketRules(1, 20_000, True, True))
    for group in _groups(layouts):
        assert len({units[index] for index in group}) == 1, _groups(layouts)
    assert sum(map(len, _groups(layouts))) == 12
    assert np.all([layout.nbytes <= 30_000 for layout in layouts])
