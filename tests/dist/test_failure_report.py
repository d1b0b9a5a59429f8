"""What a user reads when a rank dies, does not come or goes another way: the report of every rank that is left."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import paddle
import pytest
from paddle import nn
from paddle.autograd import PyLayer

import hp_sharding
from hp_sharding import CommError, ShardingConfig, full_parameters
from hp_sharding.sharding import shard
from tests import harness
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.sides import BOTH

TIMEOUT_S = 3.0
NOTICE_S = 10.0
"""Beyond ``timeout_s``, for a rank to say what is wrong: two seconds of it to ask who is alive, two for statements."""


class Seen(NamedTuple):
    """A CommError as a user has it, and when it came."""

    message: str
    report: str
    text: str
    after_s: float


def _wrapped(timeout_s: float, name: str = "mlp", **settings: Any) -> tuple[nn.Layer, Any]:
    model = make_model(name)
    config = ShardingConfig(**{**BOTH, "timeout_s": timeout_s, **settings})
    return model, shard(model, make_optimizer("SGD", model), config)


def _train(model: nn.Layer, optimizer: Any, rank: int, step: int = 0) -> None:
    loss_of(model, make_batch("mlp", step, rank)).backward()
    optimizer.step()
    optimizer.clear_grad()


def _seen(action: Callable[[], Any]) -> Seen:
    begin_s = time.monotonic()
    with pytest.raises(CommError) as caught:
        action()
    error = caught.value
    return Seen(error.message, error.report, str(error), time.monotonic() - begin_s)


def _seen_by(outcomes: list[harness.Outcome], rank: int) -> Seen:
    outcome = outcomes[rank]
    assert outcome.error is None, outcome.error
    assert outcome.reported, outcome.output
    assert isinstance(outcome.result, Seen)
    assert outcome.result.text == f"{outcome.result.message}\n{outcome.result.report}"
    assert "\n" not in outcome.result.message
    return outcome.result


# -- a rank that dies --------------------------------------------------------------------------------------------------


class _Kills(PyLayer):
    """The identity, whose backward ends the process."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return grad * 1.0


def _one_is_killed(rank: int, nranks: int) -> Seen:
    model, optimizer = _wrapped(60.0, stage=2)
    _train(model, optimizer, rank)
    if rank == 1:
        model.layers[2].register_forward_post_hook(lambda layer, inputs, output: _Kills.apply(output))
    return _seen(lambda: _train(model, optimizer, rank, 1))


def test_a_rank_that_is_killed_in_backward() -> None:
    outcomes = harness.run(_one_is_killed, 3, fresh=True, timeout_s=90)
    assert outcomes[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        seen = _seen_by(outcomes, rank)
        assert "rank 1 is gone: its connection ended without a goodbye" in seen.message
        assert "  rank 1 has not answered: its connection has ended" in seen.report
        for other in (0, 2):
            assert f"  rank {other} has launched, when it heard of this:" in seen.report
        assert "lane 'reduce': " in seen.report
        assert f"  buckets of rank {rank}:" in seen.report
        assert "reduction under way" in seen.report
        # The other survivor stands somewhere in its training.
        assert "its main thread is at" in seen.report
        assert "in _train: " in seen.report


# -- a rank that does not come -----------------------------------------------------------------------------------------


def _one_sleeps(rank: int, nranks: int) -> Seen:
    model, optimizer = _wrapped(TIMEOUT_S, stage=3)
    _train(model, optimizer, rank)
    if rank == 1:
        time.sleep(TIMEOUT_S + 3.0)
    return _seen(lambda: _train(model, optimizer, rank, 1))


def test_a_rank_that_is_late_in_stage_3() -> None:
    outcomes = harness.run(_one_sleeps, 2, fresh=True, timeout_s=60)
    seen = _seen_by(outcomes, 0)
    assert "rank 1 did not reach this collective (all_gather" in seen.message
    assert "within 3 s: busy, much slower, or on another path through the model" in seen.message
    assert seen.after_s < TIMEOUT_S + NOTICE_S
    assert "  it carries bucket '" in seen.report
    assert ": layers layers." in seen.report
    assert "SYNCING, gather under way" in seen.report
    assert "  lane 'gather': rank 1 has not come to number " in seen.report
    assert "rank 0 has launched" in seen.report
    assert "in _one_sleeps: time.sleep(TIMEOUT_S + 3.0)" in seen.report
    late = _seen_by(outcomes, 1)
    assert "rank 0 gave up: " in late.message
    assert "within 3 s" in late.message
    assert "  rank 0 has launched, when it heard of this:" in late.report


# -- a rank that goes another way --------------------------------------------------------------------------------------


class _Branches(nn.Layer):
    """Leaves a layer out where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.LayerList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: paddle.Tensor, left_out: int | None) -> paddle.Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number == left_out else block(x)
        return x.square().mean()


def _one_branches(rank: int, nranks: int) -> Seen:
    model = _Branches()
    config = ShardingConfig(**{**BOTH, "stage": 3, "timeout_s": TIMEOUT_S, "prefetch_depth": 0})
    optimizer = shard(model, make_optimizer("SGD", model), config)
    x = paddle.ones([2, 8])
    for left_out in (None, None):
        model(x, left_out).backward()
        optimizer.step()
        optimizer.clear_grad()
    return _seen(lambda: model(x, 2 if rank == 1 else None).backward())


def test_a_rank_that_takes_another_branch_in_stage_3() -> None:
    outcomes = harness.run(_one_branches, 2, fresh=True, timeout_s=60)
    for rank in (0, 1):
        seen = _seen_by(outcomes, rank)
        assert "gone different ways" in seen.message
        difference = next(line for line in seen.report.splitlines() if "differs from number" in line)
        assert "rank 0 has all_gather" in difference
        assert "layer 'blocks.2'" in difference
        assert "rank 1 has all_gather" in difference
        assert "layer 'blocks.3'" in difference
        assert seen.after_s < TIMEOUT_S, "nobody waits for that"


# -- every wait --------------------------------------------------------------------------------------------------------


def _backward(model: nn.Layer, optimizer: Any) -> None:
    loss_of(model, make_batch("mlp", 1, 0)).backward()


def _wait_in_step(model: nn.Layer, optimizer: Any, folder: str) -> None:
    _backward(model, optimizer)
    optimizer.step()


def _wait_in_clear(model: nn.Layer, optimizer: Any, folder: str) -> None:
    _backward(model, optimizer)
    optimizer.clear_grad()


def _wait_in_norm(model: nn.Layer, optimizer: Any, folder: str) -> None:
    _backward(model, optimizer)
    optimizer.grad_norm()


def _wait_in_scope(model: nn.Layer, optimizer: Any, folder: str) -> None:
    with full_parameters(model):
        pass


def _wait_in_save(model: nn.Layer, optimizer: Any, folder: str) -> None:
    hp_sharding.save(f"{folder}/alone", model, optimizer)


def _wait_in_load(model: nn.Layer, optimizer: Any, folder: str) -> None:
    hp_sharding.load(f"{folder}/all", model, optimizer)


def _wait_in_trace(model: nn.Layer, optimizer: Any, folder: str) -> None:
    optimizer.timeline.trace()


def _wait_in_evaluation(model: nn.Layer, optimizer: Any, folder: str) -> None:
    model.eval()
    with paddle.no_grad():
        model(make_batch("mlp", 1, 0)[0])


WAITS: dict[str, tuple[int, Callable[..., None]]] = {
    "forward": (3, lambda model, optimizer, folder: _backward(model, optimizer)),
    "evaluation": (3, _wait_in_evaluation),
    "step": (2, _wait_in_step),
    "clear_grad": (1, _wait_in_clear),
    "grad_norm": (2, _wait_in_norm),
    "full_parameters": (3, _wait_in_scope),
    "save": (2, _wait_in_save),
    "load": (3, _wait_in_load),
    "trace": (2, _wait_in_trace),
}
"""Stage, and what rank 0 does alone."""


def _waits_alone(rank: int, nranks: int, folder: str) -> dict[str, Seen]:
    """Each with a model and lanes of its own, which the failure ends."""
    found = {}
    for name, (stage, action) in WAITS.items():
        paddle.distributed.barrier()
        model, optimizer = _wrapped(TIMEOUT_S, stage=stage, timeline=name == "trace")
        _train(model, optimizer, rank)
        if name == "load":
            hp_sharding.save(f"{folder}/all", model, optimizer)
        if rank == 0:
            found[name] = _seen(functools.partial(action, model, optimizer, folder))
        else:
            _until_broken(optimizer)
    return found


def _until_broken(optimizer: Any) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S + NOTICE_S
    while not any(lane.is_broken for lane in optimizer._reducer.lanes.agree):
        assert time.monotonic() < deadline_s, "the other one has not given up"
        time.sleep(0.05)


def test_every_wait_ends_in_time_and_names_who_is_missing(tmp_path: Path) -> None:
    outcomes = harness.run(_waits_alone, 2, str(tmp_path), fresh=True, timeout_s=150)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
    found = outcomes[0].result
    assert found.keys() == WAITS.keys()
    for name, seen in found.items():
        assert "rank 1 did not reach this collective" in seen.message, name
        assert "within 3 s" in seen.message, name
        assert TIMEOUT_S * 0.9 < seen.after_s < TIMEOUT_S + NOTICE_S, name
        assert "in _until_broken: time.sleep(0.05)" in seen.report, name


def _wraps_alone(rank: int, nranks: int) -> Seen | None:
    if rank == 1:
        time.sleep(1.0)
        return None
    return _seen(lambda: _wrapped(1.5))


def test_a_rank_that_does_not_wrap_is_named() -> None:
    outcomes = harness.run(_wraps_alone, 2, fresh=True, timeout_s=60)
    assert outcomes[0].error is None, outcomes[0].error
    assert "waited 1.5 s for ranks [1]" in outcomes[0].result.message
    assert outcomes[0].result.report == ""


# -- once --------------------------------------------------------------------------------------------------------------


def _fails_again(rank: int, nranks: int) -> list[Seen]:
    model, optimizer = _wrapped(TIMEOUT_S, stage=2)
    _train(model, optimizer, rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [_seen(functools.partial(_train, model, optimizer, rank, step)) for step in (1, 2)]


def test_later_errors_carry_the_same_report_at_once() -> None:
    first, second = harness.run(_fails_again, 2, fresh=True, timeout_s=60)[0].result
    assert "rank 1 is gone" in first.message
    assert "  buckets of rank 0:" in first.report
    # But for the line on what the collective carries, which is that of the error.
    assert second.report[second.report.index("  buckets of") :] == first.report[first.report.index("  buckets of") :]
    assert second.after_s < 1.0
