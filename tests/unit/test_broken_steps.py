"""A ``step()`` that is broken off: before, between or within the updates of its buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.regularizer import L2Decay

import hp_sharding
from hp_sharding.errors import ConfigError, StateError
from tests.fakes import Rig, values, wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer

BOTH: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True, "comm_fusion": False}


class _Strange(L2Decay):
    """A regularizer that nobody knows."""

    def __call__(self, *_: Any) -> Any:
        raise NotImplementedError


class _Full(Exception):
    pass


@pytest.fixture(autouse=True)
def _one_bucket_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hp_sharding.step_update.TOGETHER_BYTES", 1)


def _rig(**settings: Any) -> Rig:
    model = make_model("mlp")
    rig = wrap(model, make_optimizer("Momentum", model), **{**BOTH, "stage": 2, **settings})
    _backward(rig, 0)
    rig.optimizer.step()
    rig.optimizer.clear_grad()
    return rig


def _backward(rig: Rig, number: int) -> None:
    loss_of(rig.model, make_batch("mlp", number, 0)).backward()


def _values(rig: Rig) -> list[Any]:
    with hp_sharding.full_parameters(rig.model):
        return values(rig.model.parameters())


def _fail_after(rig: Rig, n_updates: int) -> None:
    """The inner optimizer raises in the update after so many."""
    apply = rig.optimizer._inner._apply_optimize
    left = [n_updates]

    def apply_or_fail(*args: Any, **kwargs: Any) -> Any:
        if not left[0]:
            rig.optimizer._inner._apply_optimize = apply
            raise _Full("no memory")
        left[0] -= 1
        return apply(*args, **kwargs)

    rig.optimizer._inner._apply_optimize = apply_or_fail


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_refused_before_the_first_update_changes_nothing(stage: int) -> None:
    rig = _rig(stage=stage)
    before = _values(rig)
    first = rig.optimizer.buffers[rig.optimizer._schedule.gathers.order[0]].params[0]
    _backward(rig, 1)
    rig.optimizer._reducer._wait_all()  # so that buckets are updated in order
    first.regularizer = _Strange()
    with pytest.raises(ConfigError, match="regularizer"):
        rig.optimizer.step()
    rig.optimizer.clear_grad()
    np.testing.assert_equal(_values(rig), before)
    first.regularizer = None
    _backward(rig, 1)
    rig.optimizer.step()
    assert rig.optimizer.steps == 2


def test_what_is_refused_at_a_later_bucket_leaves_a_step_that_is_none() -> None:
    rig = _rig()
    third = rig.optimizer.buffers[rig.optimizer._schedule.gathers.order[2]]
    _backward(rig, 1)
    rig.optimizer._reducer._wait_all()
    third.params[0].regularizer = _Strange()
    with pytest.raises(ConfigError, match="regularizer"):
        rig.optimizer.step()
    with pytest.raises(StateError, match=r"2 of \d+ buckets had been updated"):
        rig.optimizer.clear_grad()
    third.params[0].regularizer = None
    with pytest.raises(StateError, match="those of no step"):
        rig.optimizer.step()


@pytest.mark.parametrize("how", ["clear_grad", "step"])
def test_what_is_refused_once_is_done_later(how: str) -> None:
    """Where the reason has gone meanwhile, ``clear_grad()`` or ``step()`` ends the step, once."""
    rig, other = _rig(), _rig()
    third = rig.optimizer.buffers[rig.optimizer._schedule.gathers.order[2]]
    for each in (rig, other):
        _backward(each, 1)
        each.optimizer._reducer._wait_all()
    third.params[0].regularizer = _Strange()
    with pytest.raises(ConfigError, match="regularizer"):
        rig.optimizer.step()
    third.params[0].regularizer = None
    getattr(rig.optimizer, how)()
    other.optimizer.step()
    assert rig.optimizer.steps == 2
    np.testing.assert_equal(_values(rig), _values(other))


@pytest.mark.parametrize("n_updates", [0, 3])
def test_a_step_that_is_given_up_has_everything_gathered(n_updates: int) -> None:
    """Also what nobody has read since the step before, which is still under way. Others wait for it."""
    rig = _rig()
    _backward(rig, 1)
    rig.optimizer.step()
    _fail_after(rig, n_updates)
    before = len(rig.gather.labels("all_gather"))
    with pytest.raises(_Full):
        rig.optimizer.step()
    order = [rig.optimizer.buffers[bucket].name for bucket in rig.optimizer._schedule.gathers.order]
    assert rig.gather.labels("all_gather")[before:] == order


@pytest.mark.parametrize("settings", [{}, {"stage": 1}, {"stage": 3}, {"reshard_after_step": True}], ids=str)
def test_a_checkpoint_makes_a_broken_step_whole(settings: dict[str, Any], tmp_path: Path) -> None:
    rig = _rig(**settings)
    hp_sharding.save(tmp_path / "good", rig.model, rig.optimizer)
    before = _values(rig)
    _backward(rig, 1)
    _fail_after(rig, 2)
    with pytest.raises(_Full):
        rig.optimizer.step()
    with pytest.raises(StateError, match=r"step\(\) was broken off while it updated bucket '.*' \(_Full: no memory\)"):
        rig.optimizer.clear_grad()
    with pytest.raises(StateError, match=r"hp_sharding\.load"):
        hp_sharding.save(tmp_path / "bad", rig.model, rig.optimizer)
    hp_sharding.load(tmp_path / "good", rig.model, rig.optimizer)
    np.testing.assert_equal(_values(rig), before)
    _backward(rig, 1)
    rig.optimizer.step()
    assert rig.optimizer.steps == 2
    assert paddle.isfinite(loss_of(rig.model, make_batch("mlp", 2, 0)))
