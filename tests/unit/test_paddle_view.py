"""What stands behind the optimizer that fleet returns, without ranks: each call goes on, or says why it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hp_sharding.buffer import Status
from hp_sharding.errors import ConfigError, StateError
from hp_sharding.fleet.paddle_view import FleetOptimizer, ShardingV2, _Stored


def _stored(status: Status) -> tuple[_Stored, list[int]]:
    """A bucket, and the numbers of the buckets whose gathers were waited for, which makes them ready."""
    finished: list[int] = []
    buffer: Any = SimpleNamespace(status=status, full="all of it", name="3:blocks.1", layout=SimpleNamespace(number=3))

    def finish(number: int) -> None:
        finished.append(number)
        buffer.status = Status.READY

    arena: Any = None
    return _Stored(buffer, SimpleNamespace(finish=finish), arena), finished


def test_a_gather_under_way_is_waited_for() -> None:
    stored, finished = _stored(Status.SYNCING)
    assert stored.full_tensor() == "all of it"
    assert finished == [3]


def test_parameters_that_are_not_gathered_cannot_be_read() -> None:
    stored, _ = _stored(Status.SHARDED)
    with pytest.raises(StateError, match=r"bucket '3:blocks\.1' is SHARDED: its parameters are not gathered"):
        stored.full_tensor()


def _view() -> Any:
    return ShardingV2.__new__(ShardingV2)


@pytest.mark.parametrize("name", ["_inner_opt", "_sharded"])
def test_a_view_without_its_inside_has_no_attributes(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(_view(), name)


def test_clear_grad_goes_on_to_the_optimizer() -> None:
    view = _view()
    calls: list[bool] = []
    view._sharded = SimpleNamespace(clear_grad=calls.append)
    view.clear_grad(False)
    view.clear_grad()
    assert calls == [False, True]


def test_reduced_gradients_are_there_when_the_call_returns() -> None:
    optimizer: Any = FleetOptimizer.__new__(FleetOptimizer)
    called: list[str] = []
    gradients = SimpleNamespace(settle=lambda: called.append("settle"), finish=lambda: called.append("finish"))
    optimizer.__dict__["_gradients"] = gradients
    optimizer._complete_reductions()
    assert called == ["settle", "finish"]


@pytest.mark.parametrize(
    ("kind", "name", "owner"),
    [
        (ShardingV2, "register_reduce_overlap_hook", r"optimizer\._inner_opt"),
        (ShardingV2, "clear_param_storage", r"optimizer\._inner_opt"),
        (FleetOptimizer, "_set_broadcast_overlap", "optimizer"),
    ],
)
def test_what_paddles_optimizer_would_do_on_its_own_is_refused(kind: type, name: str, owner: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{owner}\.{name}: not supported"):
        getattr(kind, name)(None)
