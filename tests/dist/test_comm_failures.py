"""Ranks that come late, go different ways, raise, die or leave."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import paddle
import pytest

from hp_sharding.comm import Communicator, Work, close_all, create_communicators
from hp_sharding.errors import CommError, ConfigError
from tests import harness
from tests.unit.test_comm_contract import Gate

NOTICE_S = 5.0
"""How long a rank may take to notice that another one is dead; it takes 0.1 s where the machine is idle."""


class Seen(NamedTuple):
    """A CommError, and how long after ``begin_s`` it came."""

    text: str
    op: str
    label: str
    lane: str
    rank: int
    peer: int | None
    after_s: float


def _seen(action: Callable[[], Any], begin_s: float) -> Seen:
    with pytest.raises(CommError) as caught:
        action()
    error = caught.value
    return Seen(str(error), error.op, error.label, error.lane, error.rank, error.peer, time.monotonic() - begin_s)


def _lanes(nranks: int, timeout_s: float = 60.0) -> dict[str, Communicator]:
    return create_communicators(range(nranks), ["gather", "reduce"], timeout_s=timeout_s)


def _one_is_killed(rank: int, nranks: int, in_transfer: bool) -> list[Seen]:
    lanes = _lanes(nranks)
    lanes["gather"].all_reduce(paddle.ones([10])).wait()
    shard, full = paddle.zeros([2_000_000]), paddle.zeros([2_000_000 * nranks])
    if rank == 1:
        if in_transfer:
            for _ in range(50):
                lanes["reduce"].reduce_scatter(shard, full, label="blocks.3")
        # The others shall have started theirs, which is to fail in ``wait``.
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    works = [lanes["reduce"].reduce_scatter(shard, full, label="blocks.3") for _ in range(50 if in_transfer else 1)]
    works.append(lanes["gather"].all_gather(full, shard, label="blocks.0"))
    begin_s = time.monotonic()
    seen = [_seen(lambda work=work: work.wait(), begin_s) for work in works[-2:] * 2]  # type: ignore[misc]
    seen.append(_seen(lambda: lanes["gather"].all_reduce(paddle.ones([1]), label="norm"), begin_s))
    return seen


@pytest.mark.parametrize("in_transfer", [False, True])
@pytest.mark.parametrize("nranks", [2, 3])
def test_a_killed_rank_is_noticed_and_named(nranks: int, in_transfer: bool) -> None:
    outcomes = harness.run(_one_is_killed, nranks, in_transfer, fresh=True, timeout_s=40)
    for outcome in outcomes:
        if outcome.rank == 1:
            continue
        assert outcome.error is None, outcome.error
        assert outcome.returncode == 0, outcome.output
        for seen in outcome.result:
            assert "rank 1 is gone" in seen.text
            assert (seen.rank, seen.peer) == (outcome.rank, 1)
            assert seen.after_s < NOTICE_S
        named = [(seen.op, seen.label, seen.lane) for seen in outcome.result]
        waited = [("reduce_scatter", "blocks.3", "reduce"), ("all_gather", "blocks.0", "gather")]
        assert named == [*waited, *waited, ("all_reduce", "norm", "gather")]
        for op, label, lane in named:
            assert any(f"{op} of {label!r} on lane {lane!r}" in seen.text for seen in outcome.result)
        assert outcome.exit_s < NOTICE_S


def _one_is_late(rank: int, nranks: int, late_s: float, timeout_s: float) -> float:
    lanes = _lanes(nranks, timeout_s)
    begin_s = time.monotonic()
    if rank == nranks - 1:
        time.sleep(late_s)
    tensor = paddle.full([300_000], 1.0)
    work = lanes["reduce"].all_reduce(tensor, label="blocks.2")
    work.wait()
    waited_s = time.monotonic() - begin_s
    assert float(tensor.sum()) == 300_000.0 * nranks
    assert work.start_s is not None
    assert work.end_s is not None
    assert work.end_s - work.start_s < late_s, "waiting for a peer is not part of the transfer"
    for comm in lanes.values():
        comm.close()
    return waited_s


@pytest.mark.slow
def test_a_peer_later_than_the_limit_of_gloo_is_waited_for() -> None:
    # A little later than what every rank must see: they begin a few milliseconds apart.
    outcomes = harness.run(_one_is_late, 3, 35.5, 120.0, fresh=True, timeout_s=80)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert outcome.result >= 35.0
        assert outcome.returncode == 0


def test_a_peer_later_than_the_timeout_is_named() -> None:
    outcomes = harness.run(_one_is_late, 3, 6.0, 2.0, fresh=True, timeout_s=40)
    for outcome in outcomes[:2]:
        assert "CommError" in (outcome.error or "")
        assert "rank 2 did not reach this collective (all_reduce" in (outcome.error or "")
        assert "within 2 s: busy" in (outcome.error or "")
        assert "all_reduce of 'blocks.2' on lane 'reduce'" in (outcome.error or "")
        assert outcome.report_s is not None
        assert outcome.report_s < 6.0, "the others did not wait for the late one"
    assert "CommError" in (outcomes[2].error or ""), "the late one hears that the others gave up"
    assert all(outcome.returncode == 1 for outcome in outcomes)


def _go_different_ways(rank: int, nranks: int, which: str) -> Seen:
    lanes = _lanes(nranks)
    comm = lanes["reduce"]
    comm.all_reduce(paddle.ones([4])).wait()
    other = rank == 1
    numel = 16 if which == "bytes" and other else 8
    label = "head" if which == "label" and other else "blocks.0"
    dtype = "int32" if which == "dtype" and other else "float32"
    tensor = paddle.zeros([numel * nranks], dtype)
    if which == "kind" and other:
        work = comm.reduce_scatter(tensor._slice(0, numel), tensor, label=label)
    else:
        work = comm.all_reduce(tensor, label=label)
    return _seen(work.wait, time.monotonic())


@pytest.mark.parametrize(
    ("which", "parts"),
    [
        ("bytes", ["64 bytes", "128 bytes"]),
        ("label", ["'blocks.0'", "'head'"]),
        ("dtype", ["float32", "int32"]),
        ("kind", ["all_reduce", "reduce_scatter"]),
    ],
)
def test_ranks_that_go_different_ways_are_both_named(which: str, parts: list[str]) -> None:
    for seen in harness.run(_go_different_ways, 2, which):
        for part in [*parts, "rank 0 has", "rank 1 has", "collective 1 of lane 'reduce'"]:
            # The second to look may hear of the first's complaint before it sees for itself: that names both too.
            if part in ("rank 0 has", "rank 1 has"):
                part = part.removesuffix(" has")
            assert part in seen.text
        assert seen.after_s < NOTICE_S


def _one_raises(rank: int, nranks: int) -> None:
    lanes = _lanes(nranks)
    shard, full = paddle.zeros([500_000]), paddle.zeros([500_000 * nranks])
    for step in range(20):
        gather = lanes["gather"].all_gather(full, shard, label=f"step {step}")
        if rank == 0 and step == 5:
            raise ZeroDivisionError("a mistake in the training script")
        lanes["reduce"].reduce_scatter(shard, full, label=f"step {step}", after=gather).wait()


def test_an_exception_on_one_rank_ends_all() -> None:
    outcomes = harness.run(_one_raises, 3, fresh=True, timeout_s=40)
    assert "a mistake in the training script" in (outcomes[0].error or "")
    for outcome in outcomes[1:]:
        assert "CommError" in (outcome.error or "")
        assert "rank 0 has left" in (outcome.error or "")
    for outcome in outcomes:
        assert outcome.returncode == 1, outcome.output
        assert "terminate called" not in outcome.output
        assert outcome.exit_s < NOTICE_S


def _leave_with_work_queued(rank: int, nranks: int, ncollectives: int, numel: int) -> None:
    lanes = _lanes(nranks)
    full = paddle.zeros([numel * nranks])
    for index in range(ncollectives):
        shard = full._slice(rank * numel, (rank + 1) * numel)
        reduced = lanes["reduce"].reduce_scatter(paddle.zeros([numel]), full, label=str(index))
        lanes["gather"].all_gather(full, shard, label=str(index), after=reduced if index % 2 else None)


@pytest.mark.parametrize(("nranks", "ncollectives", "numel"), [(2, 40, 4_000_000), (3, 3, 10), (2, 200, 1000)])
def test_leaving_with_work_queued_ends_well(nranks: int, ncollectives: int, numel: int) -> None:
    outcomes = harness.run(_leave_with_work_queued, nranks, ncollectives, numel, fresh=True, timeout_s=40)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert outcome.returncode == 0, outcome.output
        assert "terminate called" not in outcome.output
        assert outcome.exit_s < NOTICE_S


def _one_leaves_early(rank: int, nranks: int) -> Seen | None:
    lanes = _lanes(nranks)
    tensor = paddle.ones([600_000])
    work = lanes["reduce"].all_reduce(tensor, label="last")
    if rank == 0:
        return None
    work.wait()
    assert float(tensor[0]) == float(nranks)
    time.sleep(1.0)
    return _seen(lambda: lanes["reduce"].all_reduce(tensor, label="one too many").wait(), time.monotonic())


def test_who_leaves_early_finishes_what_the_others_wait_for() -> None:
    outcomes = harness.run(_one_leaves_early, 3, fresh=True, timeout_s=40)
    for outcome in outcomes[1:]:
        if "has left" in (outcome.error or ""):
            continue  # rank 0 was gone before this one had entered: also told by name
        assert outcome.error is None, outcome.error
        assert "rank 0 has left" in outcome.result.text
        assert (outcome.result.label, outcome.result.peer) == ("one too many", 0)
    assert outcomes[0].returncode == 0


def _leave_with_a_chain_queued(rank: int, nranks: int) -> list[str]:
    lanes = create_communicators(range(nranks), ["gather", "reduce", "replicate"], timeout_s=60)
    full, shard = paddle.ones([nranks * 16_000_000]), paddle.zeros([16_000_000])
    small = paddle.ones([nranks])
    gate = Gate()
    in_flight = lanes["reduce"].reduce_scatter(shard, full, label="in flight")
    never_reached = lanes["replicate"].all_reduce(small, label="not reached", after=gate if rank == 0 else None)
    follows = lanes["gather"].all_gather(small.clone(), small[:1], label="follows", after=never_reached)
    if rank == 0:
        threading.Timer(1.0, gate.open).start()
        while in_flight.start_s is None:
            time.sleep(0.001)
        close_all()
        return []
    texts = [_seen(work.wait, 0.0).text for work in (never_reached, follows)]
    in_flight.wait()
    assert float(shard[-1]) == nranks
    return texts


def test_leaving_drops_a_chain_over_lanes_and_nothing_else() -> None:
    for outcome in harness.run(_leave_with_a_chain_queued, 3, fresh=True, timeout_s=40)[1:]:
        assert outcome.error is None, outcome.error
        assert [text.partition("failed: ")[2].partition(":")[0] for text in outcome.result] == ["rank 0 has left"] * 2


def _one_stops_in_a_transfer(rank: int, nranks: int) -> Seen:
    lanes = _lanes(nranks, timeout_s=3.0)
    pids = paddle.zeros([nranks], "int64")
    lanes["gather"].all_gather(pids, paddle.to_tensor([os.getpid()])).wait()
    shard, full = paddle.zeros([4_000_000]), paddle.zeros([4_000_000 * nranks])
    works = [lanes["reduce"].reduce_scatter(shard, full, label="blocks.3") for _ in range(200)]
    begin_s = time.monotonic()
    # Where the other one has started all of them too: it is to stop in one, and not between two.
    lanes["gather"].all_reduce(paddle.ones([1])).wait()
    if rank == 0:
        works[1].wait()
        os.kill(int(pids[1]), signal.SIGSTOP)
    try:
        return _seen(works[-1].wait, begin_s)
    finally:
        if rank == 0:
            os.kill(int(pids[1]), signal.SIGCONT)


def test_a_rank_that_stops_in_a_transfer_is_given_up_and_ends_in_order_when_it_goes_on() -> None:
    outcomes = harness.run(_one_stops_in_a_transfer, 2, fresh=True, timeout_s=40)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert outcome.returncode == 0, outcome.output
        assert outcome.result.after_s < 3.0 + NOTICE_S
        assert outcome.exit_s < NOTICE_S
    assert "3 s" in outcomes[0].result.text


class _OutOfMemory(Work):
    """A work of some other kind, with an error of some other kind."""

    op = label = lane = "elsewhere"
    nbytes = 0
    start_s = end_s = None

    def wait(self) -> None:
        raise MemoryError("no memory")

    def done(self) -> bool:
        return False


def _follows_an_odd_error(rank: int, nranks: int) -> Seen:
    lanes = _lanes(nranks, timeout_s=10.0)
    after = _OutOfMemory() if rank == 0 else None

    def reduce() -> None:
        # Where the other rank has failed already, starting it raises.
        lanes["reduce"].all_reduce(paddle.ones([3]), label="blocks.1", after=after).wait()

    return _seen(reduce, time.monotonic())


def test_whatever_goes_wrong_with_what_it_follows_ends_a_work() -> None:
    outcomes = harness.run(_follows_an_odd_error, 2, fresh=True, timeout_s=40)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert "no memory" in outcome.result.text
        assert outcome.result.after_s < NOTICE_S


def _close_and_create_again(rank: int, nranks: int) -> list[int]:
    found = []
    for repeat in range(6):
        lanes = _lanes(nranks)
        tensor = paddle.full([70_000], float(repeat))
        lanes["gather"].all_reduce(tensor).wait()
        assert float(tensor[7]) == repeat * nranks
        for comm in lanes.values():
            comm.close()
        with pytest.raises(CommError, match="closed"):
            lanes["gather"].all_reduce(tensor)
        found.append(len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd")))
    return found


def test_closing_leaks_nothing() -> None:
    for found in harness.run(_close_and_create_again, 2):
        assert found[-1] <= found[1] + 2, found


def _create_different_lanes(rank: int, nranks: int) -> str:
    with pytest.raises(ConfigError) as caught:
        create_communicators(range(nranks), ["gather", f"lane {rank}"], timeout_s=20)
    return str(caught.value)


def test_creating_different_lanes_is_refused_everywhere() -> None:
    for rank, text in enumerate(harness.run(_create_different_lanes, 2)):
        assert f"rank {rank} creates" in text
        assert f"rank {1 - rank} creates" in text


def _create_alone(rank: int, nranks: int) -> Seen | None:
    if rank == 1:
        return None
    return _seen(lambda: create_communicators(range(nranks), ["gather"], timeout_s=1.5), time.monotonic())


def test_creating_alone_is_an_error_that_names_the_missing() -> None:
    seen = harness.run(_create_alone, 2, fresh=True, timeout_s=30)[0].result
    assert "waited 1.5 s for ranks [1]" in seen.text
    assert (seen.op, seen.peer) == ("create_communicators", 1)
    assert 1.0 < seen.after_s < 6.0


def _fork_and_die(rank: int, nranks: int) -> Seen | None:
    lanes = _lanes(nranks)
    lanes["gather"].all_reduce(paddle.ones([1])).wait()
    if rank == 1:
        if os.fork() == 0:  # like a data loader's worker, which outlives its parent
            time.sleep(NOTICE_S + 2)
            os._exit(0)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return _seen(lanes["gather"].all_reduce(paddle.ones([1]), label="x").wait, time.monotonic())


def test_a_forked_child_does_not_hide_its_parents_death() -> None:
    seen = harness.run(_fork_and_die, 2, fresh=True, timeout_s=12)[0].result
    assert "rank 1 is gone" in seen.text
    assert seen.after_s < NOTICE_S


def _forked_child_ends(rank: int, nranks: int) -> float:
    lanes = _lanes(nranks)
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()  # they must leave the parent's lanes alone
        os._exit(0)
    begin_s = time.monotonic()
    os.waitpid(child, 0)
    assert time.monotonic() - begin_s < NOTICE_S, "the child waited for answers that are not for it"
    tensor = paddle.ones([5])
    lanes["gather"].all_reduce(tensor).wait()
    return float(tensor[0])


def test_a_forked_child_that_ends_leaves_the_lanes_alone() -> None:
    for outcome in harness.run(_forked_child_ends, 2, fresh=True, timeout_s=30):
        assert outcome.result == 2.0, outcome.output


def _wait_from_two_threads(rank: int, nranks: int) -> int:
    comm = _lanes(nranks)["gather"]
    tensor = paddle.ones([400_000])
    work = comm.all_reduce(tensor)
    done: list[int] = []
    threads = [threading.Thread(target=lambda: done.append(work.wait() is None)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    comm.close()
    return sum(done)


def test_any_thread_may_wait() -> None:
    assert harness.run(_wait_from_two_threads, 2) == [4, 4]
