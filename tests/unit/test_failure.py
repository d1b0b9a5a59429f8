"""The report of a failure, put together from buckets driven by hand and from what ranks are made to say."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from typing import Any

import pytest

from hp_sharding import failure
from hp_sharding.comm.history import History, Launch
from hp_sharding.comm.statements import Statement, Statements
from hp_sharding.config import ShardingConfig
from hp_sharding.errors import CommError
from hp_sharding.failure import FailureReporter, about_label, about_ranks, states_of
from hp_sharding.sharding import build
from tests.fakes import WaitingLane
from tests.models import make_model, make_optimizer
from tests.pipeline import Pipeline

LAYERS = {"0:b0": "embedding", "1:b1": "blocks.0..blocks.2", "2:b2": "blocks.3"}
ERROR = CommError("rank 0: it broke", op="all_gather", label="1:b1", lane="gather", rank=0, peer=2)

# -- buckets -----------------------------------------------------------------------------------------------------------


def _names(pipe: Pipeline) -> dict[int, str]:
    return {id(param): f"layer.{number}" for number, param in enumerate(pipe.params)}


def _words(pipe: Pipeline) -> list[str]:
    return [state.words for state in states_of(pipe.buffers, pipe.reducer, _names(pipe))]


def _lacking(pipe: Pipeline) -> list[str]:
    return [name for state in states_of(pipe.buffers, pipe.reducer, _names(pipe)) for name in state.lacking]


def test_what_has_become_of_the_gradients() -> None:
    pipe = Pipeline(3)
    pipe.reducer.arm()
    pipe.reducer.begin_backward()
    assert _words(pipe) == ["READY, no gradient"] * 3
    assert _lacking(pipe) == [], "none has come in anywhere: there is no backward to speak of"
    pipe.fill(2, 1.0)
    pipe.gradient(1, 0, 1.0)
    assert _words(pipe) == ["READY, no gradient", "READY, gradients 1 of 2", "READY, reduction under way"]
    assert _lacking(pipe) == ["layer.0", "layer.1", "layer.3"]
    pipe.fill(0, 1.0)
    assert _words(pipe)[0] == "READY, all gradients, reduction not launched"
    pipe.reducer.wait(2)
    assert _words(pipe)[2] == "READY, reduced"
    pipe.reducer.end_backward()
    assert _words(pipe) == ["READY, reduction under way", "READY, reduction under way", "READY, reduced"]
    assert _lacking(pipe) == ["layer.3"]


def test_frozen_parameters_lack_nothing() -> None:
    pipe = Pipeline(2)
    pipe.buffers[0].params[0].stop_gradient = True
    pipe.backward({1: 1.0})
    assert _lacking(pipe) == ["layer.1"]


def test_sums_over_the_replicas_come_after_the_reduction() -> None:
    pipe = Pipeline(1, n_replicas=2)
    pipe.backward({0: 1.0})
    assert _words(pipe) == ["READY, reduction under way"]
    works = [pipe.reducer._works[0]]
    assert works[0] is not None
    works[0].wait()
    assert _words(pipe) == ["READY, sum over the replicas under way"]
    pipe.reducer.wait(0)
    assert _words(pipe) == ["READY, reduced"]


def test_gathers_are_under_way_or_over() -> None:
    pipe = Pipeline(2)
    for buffer in pipe.buffers:
        buffer.mark_stale()
    work = pipe.buffers[0].start_gather()
    assert _words(pipe) == ["SYNCING, gather under way, no gradient", "SHARDED, no gradient"]
    work.wait()
    assert _words(pipe)[0] == "SYNCING, gather over, no gradient"


def _rows(words: Sequence[str], lacking: Sequence[str] = ()) -> list[str]:
    states = [failure.BucketState(f"{number}:b", each) for number, each in enumerate(words)]
    states[0] = states[0]._replace(lacking=tuple(lacking))
    return failure._about_buckets(7, states)


def test_neighbours_in_one_state_share_a_line() -> None:
    assert _rows(["READY"] * 40 + ["SYNCING"] + ["SHARDED"] * 2) == [
        "  buckets of rank 7:",
        "    '0:b' to '39:b' (40 buckets): READY",
        "    '40:b': SYNCING",
        "    '41:b' to '42:b' (2 buckets): SHARDED",
    ]


def test_where_there_are_too_many_lines_those_in_motion_are_shown() -> None:
    words = ["READY, reduced", "SHARDED, no gradient"] * 20
    words[21] = "READY, gradients 1 of 2"
    lines = _rows(words)
    assert "    '21:b': READY, gradients 1 of 2" in lines
    assert lines[-1] == "    and 39 more"
    assert len(lines) == 3


def test_only_some_of_many_names_are_shown() -> None:
    assert _rows(["READY"], ["a", "b"])[-1] == "  without a gradient so far: a, b"
    line = _rows(["READY"], [f"p{number}" for number in range(25)])[-1]
    assert line.endswith(", p8, p9 and 15 more")


@pytest.mark.parametrize(
    ("label", "line"),
    [
        ("1:b1", "  it carries bucket '1:b1': layers blocks.0..blocks.2, 2 parameters, 2.0 KB"),
        ("1:b1, backward 12", "  it carries bucket '1:b1': layers blocks.0..blocks.2, 2 parameters, 2.0 KB"),
        ("0:b0 to 2:b2", "  it carries buckets '0:b0' to '2:b2': layers embedding..blocks.3, 6 parameters, 6.0 KB"),
        ("agreement, backward 3", None),
    ],
)
def test_what_a_collective_carries(label: str, line: str | None) -> None:
    pipe = Pipeline(3)
    assert about_label(label, pipe.buffers, LAYERS) == ([line] if line else [])


# -- ranks -------------------------------------------------------------------------------------------------------------


def _lane(labels: str, *, first: int = 0, under_way: int = 0, ranks: Sequence[int] = (0, 1, 2)) -> dict[str, Any]:
    """A lane on which one gather for each letter was launched, each half a second after the one before it."""
    last = [
        [first + place, "all_gather", {"a": "0:b0", "b": "1:b1", "c": "2:b2"}.get(letter, letter), 2048, 0.5 * ahead]
        for place, (letter, ahead) in enumerate(zip(labels, range(len(labels), 0, -1), strict=True))
    ]
    return {"ranks": list(ranks), "launched": first + len(labels), "under_way": under_way, "last": last}


def _says(lane: dict[str, Any], **more: Any) -> Statement:
    return json.loads(json.dumps({"lanes": {"gather": lane}, **more}))


def _lines(said: dict[int, Statement], asked: dict[int, bool] | None = None) -> list[str]:
    return about_ranks(said, asked=asked or dict.fromkeys(said, False), me=0, at_fault=2)


def test_the_first_launch_that_differs_is_named_with_both_ranks_and_layers() -> None:
    lines = _lines({0: _says(_lane("ab")), 1: _says(_lane("ab")), 2: _says(_lane("ac"))})
    assert lines[0] == (
        "  lane 'gather' differs from number 1 on: rank 0 has all_gather of 2048 bytes labelled '1:b1', of layer 'b1', "
        "rank 2 has all_gather of 2048 bytes labelled '2:b2', of layer 'b2'"
    )


@pytest.mark.parametrize(("mine", "theirs", "behind", "ahead"), [("abc", "ab", 2, 0), ("ab", "abc", 0, 2)])
def test_who_is_behind_is_named_with_what_it_lacks(mine: str, theirs: str, behind: int, ahead: int) -> None:
    lines = _lines({0: _says(_lane(mine)), 2: _says(_lane(theirs))})
    assert lines[0] == (
        f"  lane 'gather': rank {behind} has not come to number 2, all_gather of 2048 bytes labelled '2:b2', of layer "
        f"'b2'; rank {ahead} has launched 1 more"
    )


def test_who_is_far_behind_is_named_without() -> None:
    lines = _lines({0: _says(_lane("abc", first=90)), 2: _says(_lane("abc"))})
    assert lines[0] == "  lane 'gather': rank 2 has not come to number 3; rank 0 has launched 90 more"


def test_a_lane_of_another_replica_is_not_compared_and_what_is_equal_not_mentioned() -> None:
    lines = _lines({0: _says(_lane("ab")), 1: _says(_lane("ab")), 2: _says(_lane("cc", ranks=(2, 3)))})
    assert not any("differs" in line or "has not come" in line for line in lines)


def test_what_is_not_over_is_shown_and_else_the_last() -> None:
    lines = _lines({0: _says(_lane("aabcab", under_way=5)), 2: _says(_lane("ab"))})
    # The first that is not over, which is what it waits for, the next one, and the last.
    assert lines[2:6] == [
        "    lane 'gather': 6 launched, 5 not over",
        "      number 1, all_gather of '0:b0' (2.0 KB), 2.5 s before",
        "      number 2, all_gather of '1:b1' (2.0 KB), 2.0 s before",
        "      number 5, all_gather of '1:b1' (2.0 KB), 0.5 s before",
    ]
    assert lines[7:9] == [
        "    lane 'gather': 2 launched, all over",
        "      number 1, all_gather of '1:b1' (2.0 KB), 0.5 s before",
    ]


def test_ranks_come_in_order_of_interest_with_where_they_stand() -> None:
    at = ["train.py:3 in main: loss.backward()", "and there in wait of tcp.py"]
    said = {0: _says(_lane("a"), at=at), 1: _says(_lane("a"), at=at), 4: {"at": at}}
    lines = _lines(said, {0: False, 1: False, 2: True, 3: False, 4: False})
    assert lines == [
        "  rank 0 has launched, when it heard of this:",
        "    lane 'gather': 1 launched, all over",
        "      number 0, all_gather of '0:b0' (2.0 KB), 0.5 s before",
        "  rank 2 has not answered: its connection has ended",
        "  rank 1 has launched, when it heard of this:",
        "    lane 'gather': 1 launched, all over",
        "      number 0, all_gather of '0:b0' (2.0 KB), 0.5 s before",
        "    its main thread is at train.py:3 in main: loss.backward()",
        "      and there in wait of tcp.py",
        "  rank 3 has not answered",
        "  rank 4 has no sharded model",
        "    its main thread is at train.py:3 in main: loss.backward()",
        "      and there in wait of tcp.py",
    ]


def test_of_many_ranks_some_are_shown() -> None:
    said = {rank: _says(_lane("")) for rank in range(100) if rank != 50}
    lines = _lines(said, dict.fromkeys(range(100), False))
    assert lines[:2] == ["  rank 0 has launched nothing", "  rank 2 has launched nothing"]
    assert lines[-1] == "  and 92 ranks more, of which 91 have answered"
    assert len(lines) == failure._MAX_RANKS + 1


# -- one model ---------------------------------------------------------------------------------------------------------


class _ReachingLane(WaitingLane):
    """A lane that has somebody to ask."""

    def __init__(self, lane: str, channel: Statements) -> None:
        super().__init__(lane)
        self.channel = channel

    @property
    def statements(self) -> Statements:
        return self.channel

    def n_under_way(self) -> int:
        return self.n_pending


def test_the_report_of_a_model_is_made_once_and_belongs_to_it() -> None:
    told: list[list[object]] = []
    channel = Statements((0,), 0, told.append)
    lanes = {name: _ReachingLane(name, channel) for name in ("gather", "reduce")}
    model = make_model("mlp")
    optimizer = make_optimizer("SGD", model)
    rig = build(model, optimizer, ShardingConfig(comm_buffer_size_MB=0.001), lanes=dict(lanes))
    schedule = rig._schedule
    history = History(lanes)
    history.lanes["gather"].append(Launch(0, "all_gather", schedule.buffers[1].name, 2048, 0.0))
    names = {id(param): name for name, param in model.named_parameters()}
    reporter = FailureReporter(schedule, rig.timeline, history, lanes=dict(lanes), names=names)
    first = channel.explained(CommError("it broke", label=schedule.buffers[1].name))
    second = channel.explained(CommError("it broke too", label="agreement, backward 0", rank=0))
    assert f"it carries bucket '{schedule.buffers[1].name}': layers layers.0" in first.report
    assert "  buckets of rank 0:" in first.report
    assert f"number 0, all_gather of '{schedule.buffers[1].name}'" in first.report
    assert second.report == first.report.partition("\n")[2]
    assert [message[0] for message in told] == ["state"]
    assert reporter.report(ERROR)
    del rig, schedule, optimizer, model
    gc.collect()
    assert reporter.report(ERROR) == ""
