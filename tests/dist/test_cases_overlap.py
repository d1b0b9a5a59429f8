"""Overlap: no layer, evaluation or save meets an old value; gathering all is reversible; recompute gathers no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base import core

from hp_sharding import CommError, ShardingConfig, StateError, Status, full_parameters, shard
from tests import harness
from tests.dist import test_branches, test_reads, test_replicas
from tests.lanes import wrap
from tests.models import loss_of, loss_on, make_batch, make_model, make_optimizer
from tests.reference import Ranks, Values, assert_close, values
from tests.sides import BOTH, SETTINGS, Factory, Settings, compare

ALTERNATING = "one order and another"
"""Of the layers A, B, C, D in every second step D, B, A, C; the same on all ranks."""


def test_an_order_of_layers_that_alternates() -> None:
    """Each layer waits for its own parameters, whatever came before it the last time."""
    harness.run(compare, 2, test_branches._branches, SETTINGS, 0.0, ALTERNATING, 8, timeout_s=60)
    replicas = test_replicas.SETTINGS
    harness.run(compare, 4, test_branches._branches, replicas, test_replicas.ORDER, ALTERNATING, 6, timeout_s=60)


def test_reads_right_after_step_among_replicas() -> None:
    kept = {"stage 2": {**test_replicas.SETTINGS["stage 2"], "delay_s": 0.003}}
    harness.run(compare, 4, test_reads._reads, kept, test_replicas.ORDER)


# -- all parameters, and back ------------------------------------------------------------------------------------------


def _whole_and_back(new: Factory) -> dict[str, Values]:
    """The whole state is taken between steps, on every rank, to be saved; memory is what it was before."""
    side = new(lambda: make_model("gpt"), lambda model: make_optimizer("AdamW", model))
    snapshots = {}
    for step in range(3):
        side.backward(loss_on(side.model, "gpt", step))
        side.step()
        side.clear_grad()
        with full_parameters(side.model):
            pass  # what was under way for the next forward is there now
        before = _held(side)
        with full_parameters(side.model):
            snapshots[f"state {step}"] = {name: value.numpy().copy() for name, value in side.model.state_dict().items()}
        assert _held(side) == before, f"step {step}"
    return {**snapshots, "end": side.values()}


def _held(side: Any) -> tuple[list[str], int]:
    """Buckets whose full tensor this rank has between steps, and bytes of all its tensors."""
    if not side.sharded or not side.optimizer.config.reshards_after_step:
        return [], 0
    buffers = side.optimizer.buffers
    whole = [buffer.name for buffer in buffers if buffer.full is not None]
    assert [buffer.name for buffer in buffers if buffer.status is Status.READY] == whole
    assert all(buffer.shard.size * buffer.place.gather.nranks == buffer.layout.numel for buffer in buffers)
    if side.optimizer.config.stage == 2 or not side.optimizer.config.units_ahead:
        assert whole == []
    assert len(whole) < len(buffers) / 2, "more than the next forward begins with"
    return whole, core.host_memory_stat_current_value("Allocated", 0)


FREED: Settings = {
    "reshard": SETTINGS["reshard"],
    "stage 3": SETTINGS["stage 3"],
    "stage 3, nothing ahead": {**SETTINGS["stage 3"], "prefetch_depth": 0},
    "stage 3, kept": SETTINGS["stage 3, kept"],
}


def test_the_whole_state_between_steps_and_all_is_freed_again() -> None:
    harness.run(compare, 2, _whole_and_back, FREED)
    replicas = {name: test_replicas.SETTINGS[name] for name in ("reshard", "stage 3")}
    harness.run(compare, 4, _whole_and_back, replicas, 1e-5)


def _steps_inside(new: Factory) -> dict[str, Values]:
    """Whole steps inside ``full_parameters``: there the new values can be read at once, also by functions."""
    side = new(lambda: make_model("mlp"), lambda model: make_optimizer("Momentum", model))
    snapshots = {}
    for step in range(4):
        with full_parameters(side.model):
            for inner in range(2):
                side.backward(loss_on(side.model, "mlp", 2 * step + inner))
                side.step()
                side.clear_grad()
                found = {name: paddle.add(param, param).numpy() for name, param in side.model.named_parameters()}
                snapshots[f"step {step}, {inner}"] = found
            side.model.gain.set_value(side.model.gain.numpy() / 2)
        _held(side)
    return {**snapshots, "end": side.values()}


def test_whole_steps_inside_full_parameters() -> None:
    harness.run(compare, 2, _steps_inside, SETTINGS)
    harness.run(compare, 4, _steps_inside, test_replicas.SETTINGS, test_replicas.ORDER)


# -- recompute ---------------------------------------------------------------------------------------------------------


def _recomputes(rank: int, nranks: int, name: str) -> list[list[str]]:
    """Stage 3, three blocks recomputed. Returns what each step has gathered."""
    model = make_model(name)
    settings = {**BOTH, "comm_buffer_size_MB": 25, "n_replicas": nranks // 2}
    model, optimizer, calls = wrap(model, make_optimizer("SGD", model), nranks, stage=3, **settings)
    gathered = []
    for step in range(6):
        before = len(calls)
        loss_of(model, make_batch(name, step, rank)).backward()
        assert {buffer.status for buffer in optimizer.buffers} == {Status.SHARDED}, "not freed after backward"
        optimizer.step()
        optimizer.clear_grad()
        gathered.append([call.label for call in calls[before:] if call.op == "all_gather"])
    with full_parameters(model):
        pass
    return gathered


@pytest.mark.parametrize("name", ["gpt_recompute_reentrant", "gpt_recompute"])
@pytest.mark.parametrize("nranks", [2, 4])
def test_after_a_backward_with_recompute_all_is_freed_and_each_step_gathers_the_same(name: str, nranks: int) -> None:
    for gathered in harness.run(_recomputes, nranks, name):
        assert gathered[3:] == [gathered[3]] * 3, "once the order is learned, all steps are alike"
        counts = {label.partition(":")[2]: gathered[3].count(label) for label in gathered[3]}
        # Once for forward and once for backward; a block that runs twice, once more where each run has a backward.
        assert counts.pop("blocks.2") == (3 if name.endswith("reentrant") else 2)
        assert all(count <= 2 for count in counts.values()), counts


# -- ranks that part ---------------------------------------------------------------------------------------------------


def _evaluates_more(rank: int, nranks: int, stage: int, what: str) -> str:
    """Rank 1 has one batch more to evaluate, or rank 0 alone wants the whole state, and all train on."""
    model = make_model("mlp")
    optimizer = shard(model, make_optimizer("SGD", model), ShardingConfig(stage=stage, timeout_s=4, **OVERLAP))
    losses = []
    for step in range(3):
        loss = loss_of(model, make_batch("mlp", step, rank))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
        try:
            _look(model, rank, what)
            if stage == 3:
                loss_of(model, make_batch("mlp", 50, rank)).backward()
                optimizer.step()
        except CommError as error:
            return str(error)
    return f"trained: {np.isfinite(losses).all()}"


OVERLAP: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True}


def _look(model: nn.Layer, rank: int, what: str) -> None:
    if what == "evaluates":
        with paddle.no_grad():
            for batch in range(3 + rank):
                loss_of(model, make_batch("mlp", 70 + batch, rank))
    elif rank == 0:
        with full_parameters(model):
            model.state_dict()["gain"].numpy()


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_look_unevenly_train_on_where_parameters_are_kept(stage: int) -> None:
    for what in ("evaluates", "takes the whole state"):
        assert harness.run(_evaluates_more, 2, stage, what, timeout_s=60) == ["trained: True"] * 2


@pytest.mark.parametrize("what", ["evaluates", "takes the whole state"])
def test_ranks_that_look_unevenly_are_told_in_time_where_parameters_are_freed(what: str) -> None:
    for outcome in harness.run(_evaluates_more, 2, 3, what, fresh=True, timeout_s=40):
        assert "all_gather" in (outcome.result or ""), outcome


def _reads_alone(rank: int, nranks: int) -> str:
    """Rank 0 alone asks for the state of freed parameters, outside ``full_parameters``: an error, and nothing else."""
    model, plain = make_model("mlp"), make_model("mlp")
    model, optimizer, calls = wrap(model, make_optimizer("SGD", model), nranks, stage=3, **BOTH)
    inner, ranks = make_optimizer("SGD", plain), Ranks(plain, nranks)
    for step in range(3):
        ranks.backward(loss_on(plain, "mlp", step))
        inner.step()
        inner.clear_grad()
        loss_of(model, make_batch("mlp", step, rank)).backward()
        optimizer.step()
        optimizer.clear_grad()
        before = len(calls)
        if rank == 0:
            with pytest.raises(StateError, match="full_parameters"):
                [value.numpy() for value in model.state_dict().values()]
        assert len(calls) == before
    with full_parameters(model):
        assert_close(values(model), values(plain), 1e-6)
    return "done"


def test_one_rank_that_reads_what_is_freed_holds_nobody_up() -> None:
    assert harness.run(_reads_alone, 2) == ["done"] * 2
