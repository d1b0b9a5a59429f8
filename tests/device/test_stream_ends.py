"""How collectives on streams fail, how lanes end, and that groups do not mix."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest

from hp_sharding.comm import Communicator, Work, create_communicators, stream_group, watch
from hp_sharding.errors import CommError
from tests import harness
from tests.device import standin
from tests.device.gates import DeviceGate
from tests.device.running import on_device, start

pytestmark = pytest.mark.usefixtures("standin_device")

_TIMEOUT_S = 1.5
_NOTICE_S = 5.0
"""How long a rank may take to see what is wrong; the stand-in itself gives up after a third of this."""
_LIMIT_S = 60.0


class Seen(NamedTuple):
    """An error as a rank sees it."""

    text: str
    op: str | None
    label: str | None
    lane: str | None


def _seen(action: Callable[[], Any]) -> Seen:
    with pytest.raises(CommError) as caught:
        action()
    error = caught.value
    return Seen(str(error), error.op, error.label, error.lane)


def _lanes(nranks: int, timeout_s: float = 20.0) -> dict[str, Communicator]:
    stream_group._DESTRUCTORS_S = 1
    return create_communicators(range(nranks), ["one", "two"], timeout_s=timeout_s)


def _until_done(work: Work) -> float:
    """Seconds until it is done or has failed."""
    begin_s = time.monotonic()
    while not work.done() and time.monotonic() - begin_s < _NOTICE_S:
        time.sleep(0.01)
    return time.monotonic() - begin_s


def _assert_ends_itself(outcome: harness.Outcome) -> None:
    """Although a collective is on a stream for ever, and Paddle waits for streams and events that it lets go of."""
    assert outcome.exit_s < _NOTICE_S, outcome.output
    assert outcome.returncode in (0, -signal.SIGALRM), outcome.output


# ---- failures ----


def _follow_a_failure(rank: int, nranks: int) -> list[Seen]:
    lanes, gate, data = _lanes(nranks), DeviceGate(), paddle.ones([4])
    under_way = lanes["two"].all_reduce(data, label="norm", after=gate)
    broken = DeviceGate(CommError("it broke", op="all_gather", rank=5))
    follower = lanes["one"].all_reduce(data, label="bucket 1", after=broken)
    late = [lambda comm=comm: comm.broadcast(data, src=0, label="late") for comm in lanes.values()]
    seen = [_seen(action) for action in (follower.wait, under_way.wait, *late)]
    gate.open()
    return seen


def test_a_failure_ends_all_lanes_over_the_same_ranks() -> None:
    for outcome in start(_follow_a_failure, 2, timeout_s=_LIMIT_S):
        assert outcome.error is None, outcome.error
        assert all("it broke" in each.text for each in outcome.result)
        named = [(each.op, each.label, each.lane) for each in outcome.result]
        late = [("broadcast", "late", lane) for lane in ("one", "two")]
        assert named == [("all_reduce", "bucket 1", "one"), ("all_reduce", "norm", "two"), *late]
        _assert_ends_itself(outcome)


def _wait_for_one_who_does_not_come(rank: int, nranks: int) -> Any:
    lanes = _lanes(nranks, _TIMEOUT_S)
    if rank == 1:
        time.sleep(_TIMEOUT_S + _NOTICE_S / 2)
        return None
    works = [lanes[lane].all_reduce(paddle.ones([4]), label="blocks.3") for lane in ("one", "two")]
    after_s = _until_done(works[0])
    seen = [_seen(work.wait) for work in (*works, *works)]
    return after_s, [*seen, _seen(lambda: lanes["two"].all_reduce(paddle.ones([4]), label="norm"))]


def test_a_collective_that_a_peer_does_not_start_fails_in_time_and_its_process_ends() -> None:
    outcomes = start(_wait_for_one_who_does_not_come, 2, timeout_s=_LIMIT_S)
    assert outcomes[0].error is None, outcomes[0].error
    after_s, seen = outcomes[0].result
    assert _TIMEOUT_S * 0.9 < after_s < _NOTICE_S
    named = [("all_reduce", "blocks.3", "one"), ("all_reduce", "blocks.3", "two")]
    assert [(each.op, each.label, each.lane) for each in seen] == [*named, *named, ("all_reduce", "norm", "two")]
    for each in seen:
        assert f"{each.op} of '{each.label}' on lane '{each.lane}' failed" in each.text
        assert "all_reduce of 'blocks.3' on lane 'one' cannot end: it was started 1.5 s ago" in each.text
    for outcome in outcomes:
        _assert_ends_itself(outcome)


def _ask_nobody(rank: int, nranks: int) -> None:
    watch.GRACE_S = 1.0
    lanes = _lanes(nranks, _TIMEOUT_S)
    if rank == 0:
        lanes["one"].all_gather(paddle.ones([8]), paddle.ones([4]), label="blocks.3")
    time.sleep(_TIMEOUT_S + watch.GRACE_S + _NOTICE_S)


def test_a_process_that_nobody_can_reach_ends_itself_and_says_where_it_stood() -> None:
    stuck = start(_ask_nobody, 2, timeout_s=_LIMIT_S)[0]
    assert (stuck.reported, stuck.returncode) == (False, 1)
    assert stuck.exit_s < _TIMEOUT_S + 1.0 + _NOTICE_S
    for part in (
        "rank 0, lanes one, two over ranks [0, 1]: all_gather of 'blocks.3' on lane 'one' cannot end",
        "The process ends, since its main thread stands still",
        "in _ask_nobody",
    ):
        assert part in stuck.output


def _one_dies(rank: int, nranks: int) -> Any:
    lanes = _lanes(nranks)
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    work = lanes["one"].all_reduce(paddle.ones([4]), label="blocks.3")
    return _until_done(work), _seen(work.wait)


def test_a_peer_that_dies_is_noticed_and_named() -> None:
    outcome = start(_one_dies, 2, timeout_s=_LIMIT_S)[0]
    assert outcome.error is None, outcome.error
    after_s, seen = outcome.result
    assert after_s < _NOTICE_S
    assert "rank 1 is gone" in seen.text
    assert (seen.op, seen.label, seen.lane) == ("all_reduce", "blocks.3", "one")
    _assert_ends_itself(outcome)


# ---- the end ----


def _leave_with_work_under_way(rank: int, nranks: int) -> float:
    lanes = _lanes(nranks)
    standin.Device().set_pace(standin.Pace(latency_ms=100.0))
    shard, whole = paddle.zeros([70_000]), paddle.ones([nranks * 70_000])
    for index in range(4):
        reduced = lanes["one"].reduce_scatter(shard, whole, label=str(index), accumulate=True)
        lanes["two"].all_reduce(shard.clone(), label=str(index), after=reduced if index % 2 else None)
    if rank == 0:
        time.sleep(0.2)
    return 0.3 if rank else 0.1


def _assert_leaves_well() -> None:
    for outcome in start(_leave_with_work_under_way, 2, timeout_s=_LIMIT_S):
        assert outcome.error is None, outcome.error
        assert outcome.returncode == 0, outcome.output
        assert outcome.exit_s > outcome.result, "what was under way was not finished"
        assert outcome.exit_s < _NOTICE_S, outcome.output


def test_leaving_with_work_under_way_ends_well() -> None:
    _assert_leaves_well()


@pytest.mark.slow
def test_leaving_with_work_under_way_ends_well_every_time() -> None:
    for _ in range(5):
        _assert_leaves_well()


# ---- groups ----


def _close(lanes: dict[str, Communicator]) -> None:
    for _ in range(2):
        for comm in lanes.values():
            comm.close()


def _close_and_start(rank: int, nranks: int) -> Any:
    standin.Device().set_pace(standin.Pace(latency_ms=50.0))
    first, second, data = _lanes(nranks), _lanes(nranks), paddle.ones([4])
    work = first["one"].all_reduce(data, label="last")
    _close(first)
    ended, seen = work.done(), _seen(lambda: first["one"].all_reduce(data, label="late"))
    second["one"].all_reduce(data).wait()
    return ended, seen, data.numpy()


def _numbered(create: Callable[[], Any]) -> list[int]:
    """Numbers of the process groups that Paddle makes meanwhile, in order."""
    made: list[int] = []
    real = paddle.distributed.collective._new_process_group_impl

    def note(*args: Any, group_id: int, **settings: Any) -> Any:
        made.append(group_id)
        return real(*args, group_id=group_id, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paddle.distributed.collective, "_new_process_group_impl", note)
        create()
    return made


def _make_groups(rank: int, nranks: int) -> Any:
    """Two replicas of two shards, twice: every rank has two groups in common with one, and no group with another."""
    groups = [[0, 1], [2, 3], [0, 2], [1, 3]]
    groups = [ranks for ranks in (groups[::-1] if rank == 2 else groups) * 2 if rank in ranks]
    lanes: list[Communicator] = []
    numbers = _numbered(lambda: lanes.extend(comm for ranks in groups for comm in _two_lanes(ranks)))
    standin.Device().set_pace(standin.Pace(latency_ms=2.0, jitter_ms=5.0))
    data = [paddle.full([4], 10.0**rank) for _ in lanes]
    # In another order on each rank: what belongs to different groups or lanes has none.
    works = [comm.all_reduce(tensor) for comm, tensor in list(zip(lanes, data, strict=True))[:: 1 if rank % 2 else -1]]
    for work in works:
        work.wait()
    made = [(number, comm.lane, comm.ranks) for number, comm in zip(numbers, lanes, strict=True)]
    sums = [(comm.ranks, float(tensor[3])) for comm, tensor in zip(lanes, data, strict=True)]
    return made, sums, _close_and_start(rank, nranks)


def _two_lanes(ranks: list[int]) -> list[Communicator]:
    return list(create_communicators(ranks, ["one", "two"], timeout_s=20).values())


def test_groups_and_lanes_do_not_mix() -> None:
    results = on_device(_make_groups, 4, timeout_s=_LIMIT_S)
    numbers: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
    for made, sums, _ in results:
        for number, lane, ranks in made:
            numbers.setdefault(number, set()).add((lane, ranks))
        assert sums == [(ranks, sum(10.0**each for each in ranks)) for ranks, _ in sums]
        assert len(sums) == 8
    assert len(numbers) == 4 * 2 * 2, "each lane of each group has a number of its own"
    assert all(len(known) == 1 for known in numbers.values())
    for _, _, (ended, seen, data) in results:
        assert ended, "close() finishes what is under way"
        assert "closed the lane" in seen.text
        np.testing.assert_array_equal(data, np.full(4, 16.0))


# ---- half-way ----


class _FailsToGather:
    """A process group whose gathers raise."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_gather_into_tensor_on_calc_stream(self, *_: Any) -> None:
        raise RuntimeError("no memory is left")


def _raise_half_way(rank: int, nranks: int) -> tuple[int, str]:
    device = standin.Device()
    comm = create_communicators(range(nranks), ["one"], timeout_s=_LIMIT_S)["one"]
    group = comm._group  # type: ignore[attr-defined]
    comm._group = _FailsToGather(group)  # type: ignore[attr-defined]
    device.set_pace(standin.Pace(latency_ms=100.0))
    with pytest.raises(CommError) as caught:
        comm.all_reduce(paddle.ones([3000], "bfloat16"), label="blocks.3")
    text = str(caught.value)
    del caught
    comm._group = group  # type: ignore[attr-defined]
    time.sleep(0.05)
    comm.all_reduce(paddle.ones([4])).wait()
    return device.writes_after_free(), text


def test_what_was_queued_before_an_error_keeps_its_memory() -> None:
    for n_writes, text in on_device(_raise_half_way, 3):
        assert n_writes == 0
        assert "all_reduce of 'blocks.3' on lane 'one' failed" in text
        assert "no memory is left" in text
