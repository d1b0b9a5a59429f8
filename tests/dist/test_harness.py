"""The harness itself, broken on purpose in every way that a rank can break."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import paddle
import pytest

from tests import harness


def _sum_ranks(rank: int, nranks: int, start: float) -> tuple[int, Any]:
    x = paddle.full([4], rank + start)
    if nranks > 1:
        paddle.distributed.all_reduce(x)
    return os.getpid(), x.numpy()


@pytest.mark.parametrize(("nranks", "total"), [(1, 10.0), (2, 21.0), (3, 33.0)])
def test_results_come_in_rank_order_from_reused_processes(nranks: int, total: float) -> None:
    first = harness.run(_sum_ranks, nranks, 10.0)
    again = harness.run(_sum_ranks, nranks, 10.0)
    assert [pid for pid, _ in first] == [pid for pid, _ in again]
    assert len({pid for pid, _ in first}) == nranks
    for _, found in first + again:
        np.testing.assert_array_equal(found, np.full(4, total, dtype=np.float32))


def _return_rank(rank: int, nranks: int) -> int:
    return rank


def _raise_on_one(rank: int, nranks: int) -> None:
    if rank == 1:
        raise ValueError("broken on purpose")


def test_one_rank_raises() -> None:
    pid = harness.run(_sum_ranks, 2, 0.0)[0][0]
    with pytest.raises(harness.RankFailure, match="ValueError: broken on purpose") as caught:
        harness.run(_raise_on_one, 2)
    assert list(caught.value.reasons) == [1]
    assert "in _raise_on_one" in str(caught.value)
    assert harness.run(_return_rank, 2) == [0, 1]
    assert harness.run(_sum_ranks, 2, 0.0)[0][0] != pid, "ranks that failed must not be used again"


def _raise_everywhere(rank: int, nranks: int) -> None:
    raise ValueError(f"from rank {rank}")


def test_every_traceback_is_shown() -> None:
    with pytest.raises(harness.RankFailure) as caught:
        harness.run(_raise_everywhere, 2)
    assert all(f"ValueError: from rank {rank}" in caught.value.reasons[rank] for rank in range(2))


def _exit_on_one(rank: int, nranks: int, code: int) -> None:
    if rank == 1:
        print("last words", flush=True)
        os._exit(code)


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_reports_nothing_fails(code: int) -> None:
    with pytest.raises(harness.RankFailure, match=rf"reported nothing; its process ended with {code}") as caught:
        harness.run(_exit_on_one, 2, code)
    assert "last words" in caught.value.reasons[1]


def _system_exit(rank: int, nranks: int) -> None:
    raise SystemExit(0)


def test_sys_exit_is_a_failure() -> None:
    with pytest.raises(harness.RankFailure, match="SystemExit"):
        harness.run(_system_exit, 1)


def _hang_in_collective(rank: int, nranks: int) -> None:
    if rank == 0:
        paddle.distributed.all_reduce(paddle.ones([4]))
    else:
        threading.Event().wait()


def test_a_hang_is_killed_with_stacks() -> None:
    harness.run(_return_rank, 2)
    begin = time.monotonic()
    with pytest.raises(harness.RankFailure) as caught:
        harness.run(_hang_in_collective, 2, timeout_s=1.0)
    assert time.monotonic() - begin < 10.0
    assert "all_reduce" in caught.value.reasons[0]
    assert "in _hang_in_collective" in caught.value.reasons[1]


def _raise_while_peer_waits(rank: int, nranks: int) -> None:
    if rank == 1:
        raise ValueError("left the collective")
    paddle.distributed.all_reduce(paddle.ones([4]))


def test_peers_of_a_failed_rank_do_not_cost_the_whole_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "GRACE_S", 1.0)
    begin = time.monotonic()
    with pytest.raises(harness.RankFailure, match="left the collective") as caught:
        harness.run(_raise_while_peer_waits, 2)
    assert time.monotonic() - begin < 15.0
    assert "all_reduce" in caught.value.reasons[0]


def _return_unpicklable(rank: int, nranks: int) -> Any:
    return threading.Lock()


def test_a_result_that_cannot_travel_is_a_failure() -> None:
    with pytest.raises(harness.RankFailure, match="pickle"):
        harness.run(_return_unpicklable, 1)


def test_only_functions_with_a_name_are_sent() -> None:
    with pytest.raises(TypeError, match="move it to the top"):
        harness.run(lambda rank, nranks: None, 1)


def _names_and_draws(rank: int, nranks: int) -> tuple[str, float, float, str | None]:
    layer = paddle.nn.Linear(2, 2)
    paddle.set_default_dtype("float64")
    os.environ["LEFT_BEHIND"] = "1"
    return layer.weight.name, paddle.rand([1]).item(), float(np.random.rand()), os.environ.get("GIVEN")


def test_every_call_starts_from_the_same_state() -> None:
    first = harness.run(_names_and_draws, 2, env={"GIVEN": "yes"})
    again = harness.run(_names_and_draws, 2)
    assert [found[:3] for found in first] == [found[:3] for found in again]
    assert first[0] == first[1]
    assert (first[0][3], again[0][3]) == ("yes", None)
    assert harness.run(_left_behind, 2) == [("float32", None)] * 2


def _left_behind(rank: int, nranks: int) -> tuple[str, str | None]:
    return paddle.get_default_dtype(), os.environ.get("LEFT_BEHIND")


def _fleet_degrees(rank: int, nranks: int, sharding: int) -> tuple[int, int, int]:
    from paddle.distributed import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": nranks // sharding, "sharding_degree": sharding}
    fleet.init(is_collective=True, strategy=strategy)
    hcg = fleet.get_hybrid_communicate_group()
    return hcg.get_sharding_parallel_group().nranks, hcg.get_data_parallel_group().nranks, id(hcg)


def test_fleet_init_works_in_every_call_with_other_degrees() -> None:
    first = harness.run(_fleet_degrees, 2, 2)
    assert [degrees[:2] for degrees in first] == [(2, 1)] * 2
    assert [degrees[:2] for degrees in harness.run(_fleet_degrees, 2, 1)] == [(1, 2)] * 2
    assert harness.run(_fleet_degrees, 2, 2) == first, "the groups of the first call were not used again"


def _die_and_survive(rank: int, nranks: int) -> str:
    atexit.register(print, "atexit ran", flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        raise ValueError("broken on purpose")
    time.sleep(0.2)
    return os.environ["GIVEN"]


def test_fresh_outcomes() -> None:
    survivor, killed, raised = harness.run(_die_and_survive, 3, fresh=True, env={"GIVEN": "yes"})
    assert (survivor.result, survivor.returncode, survivor.reported) == ("yes", 0, True)
    assert survivor.report_s is not None and 0.2 <= survivor.report_s < 5.0
    assert "atexit ran" in survivor.output
    assert (killed.result, killed.returncode, killed.reported) == (None, -signal.SIGKILL, False)
    assert not killed.timed_out
    assert raised.returncode == 1 and raised.error is not None and "broken on purpose" in raised.error


def _hang_at_exit(rank: int, nranks: int) -> bool:
    if rank == 1:
        atexit.register(threading.Event().wait)
    return paddle.distributed.is_initialized()


def test_fresh_hang_at_exit_is_killed_with_stacks() -> None:
    quick, stuck = harness.run(_hang_at_exit, 2, fresh=True, init=False, timeout_s=3.0)
    assert (quick.result, quick.returncode, quick.timed_out) == (False, 0, False)
    assert (stuck.result, stuck.returncode, stuck.timed_out) == (False, -signal.SIGKILL, True)
    assert stuck.reported and stuck.exit_s > 1.0
    assert "threading.py" in stuck.output
