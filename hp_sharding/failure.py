"""The report of a failure: what the buckets, the lanes and the other ranks were at, in the terms of the wrapped model.

It stands behind the first line of a ``CommError`` that is raised where a user waits. It is made once, when the first
such error is raised; all that come later carry the same.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from .buffer import FusedCommBuffer, Status
from .comm import Communicator, called
from .comm.history import History, Launch
from .comm.statements import Statement, Statements, answer_deadline_s
from .errors import CommError
from .reduction import Reducer
from .schedule import Schedule
from .timeline import Timeline
from .timeline.subject import is_bucket, layer_of

_SENT = 32
"""Launches of a lane that a rank tells the others."""
_SHOWN = 3
_MAX_NAMES = 10
_MAX_ROWS = 24
_MAX_RANKS = 8
_IN_MOTION = ("gather", "gradients", "reduction", "replicas")


class BucketState(NamedTuple):
    """Where one bucket is on this rank.

    Attributes:
        name: the bucket's.
        words: its state, and what has become of its gradient.
        lacking: structured names of its parameters that have no gradient yet, where a backward has brought some.
    """

    name: str
    words: str
    lacking: tuple[str, ...] = ()


class FailureReporter:
    """Makes the report of one wrapped model, which it does not keep alive.

    Args:
        schedule: of the model.
        timeline: knows which layers a bucket holds.
        history: what the lanes have launched.
        lanes: all of them; those that reach other processes carry what ranks say.
        names: structured name of each parameter in a bucket, by ``id``.
    """

    def __init__(
        self,
        schedule: Schedule,
        timeline: Timeline,
        history: History,
        *,
        lanes: Mapping[str, Communicator],
        names: Mapping[int, str],
    ) -> None:
        self._schedule = weakref.ref(schedule)
        self._timeline = timeline
        self._history = history
        self._lanes = dict(lanes)
        # So that the report and the errors mean the same: lanes have carried something before this model.
        self._first = {name: lane.next_number for name, lane in lanes.items()}
        self._names = names
        self._making = threading.Lock()
        self._body: list[str] | None = None
        found = (lane.statements for lane in lanes.values())
        self._channels = list({id(each): each for each in found if each is not None}.values())
        for channel in self._channels:
            channel.report_with(self)

    def statement(self) -> Statement:
        """Part of ``statements.Reporter``."""
        lanes = self._lanes.items()
        recent = {name: self._history.recent(name, _SENT) for name in self._lanes}
        return {"lanes": {name: _lane_statement(lane, recent[name], self._first[name]) for name, lane in lanes}}

    def report(self, error: CommError) -> str:
        """Part of ``statements.Reporter``."""
        schedule = self._schedule()
        if schedule is None:
            return ""
        layers = self._timeline.subject.layers
        with self._making:
            if self._body is None:
                # First: it may change while the others are waited for.
                states = states_of(schedule.buffers, schedule.reducer, self._names)
                me = schedule.reducer.rank
                self._body = [*_about_buckets(me, states), *self._about_ranks(me, error.peer)]
        return "\n".join([*about_label(error.label, schedule.buffers, layers), *self._body])

    def _about_ranks(self, me: int, at_fault: int | None) -> list[str]:
        deadline_s = answer_deadline_s()
        said: dict[int, Statement] = {}
        for channel in self._channels:
            # Before any of them is waited for.
            channel.speak()
        for channel in self._channels:
            said.update(channel.collect(deadline_s))
        return about_ranks(said, asked=_asked(self._channels), me=me, at_fault=at_fault)


def _asked(channels: Iterable[Statements]) -> dict[int, bool]:
    """Each rank that was asked, and whether its connection has ended."""
    return {rank: rank in lost for channel in channels for lost in [channel.lost()] for rank in channel.ranks}


def _lane_statement(lane: Communicator, recent: Sequence[Launch], first: int) -> dict[str, Any]:
    now_s = time.perf_counter()
    last = [each._replace(number=first + each.number) for each in recent]
    return {
        "ranks": list(lane.ranks),
        "launched": last[-1].number + 1 if last else first,
        "under_way": lane.n_under_way(),
        "last": [[each.number, each.op, each.label, each.nbytes, round(now_s - each.at_s, 2)] for each in last],
    }


# -- buckets -------------------------------------------------------------------------------------------------------


def states_of(buffers: Sequence[FusedCommBuffer], reducer: Reducer, names: Mapping[int, str]) -> list[BucketState]:
    """Where every bucket is now, on this rank."""
    begun = any(reducer._arrived) or any(reducer._launched)
    return [_state_of(buffer, reducer, names if begun else {}) for buffer in buffers]


def _state_of(buffer: FusedCommBuffer, reducer: Reducer, names: Mapping[int, str]) -> BucketState:
    bucket = buffer.layout.number
    words = [buffer.status.name, *_gather_words(buffer), _reduction_words(bucket, reducer)]
    waited_for = (
        param
        for param, has_come in zip(buffer.params, reducer._seen[bucket], strict=True)
        if not has_come and not param.stop_gradient
    )
    lacking = tuple(names[id(param)] for param in waited_for if id(param) in names)
    return BucketState(buffer.name, ", ".join(words), lacking)


def _gather_words(buffer: FusedCommBuffer) -> list[str]:
    work = buffer.gather_work
    if buffer.status is not Status.SYNCING or work is None:
        return []
    return ["gather over" if work.end_s is not None else "gather under way"]


def _reduction_words(bucket: int, reducer: Reducer) -> str:
    arrived, expected = reducer._arrived[bucket], reducer._expected[bucket]
    if reducer._launched[bucket]:
        work = reducer._works[bucket]
        if work is not None and work.end_s is None:
            return "reduction under way"
        replicator = reducer._replicator
        rest = replicator._works.get(bucket) if replicator is not None else None
        return "reduced" if rest is None or rest.end_s is not None else "sum over the replicas under way"
    if not arrived:
        return "no gradient"
    return f"gradients {arrived} of {expected}" if arrived < expected else "all gradients, reduction not launched"


def _about_buckets(rank: int, states: Sequence[BucketState]) -> list[str]:
    rows = [(words, [state.name for state in run]) for words, run in groupby(states, lambda state: state.words)]
    lines = [f"  buckets of rank {rank}:"]
    if len(rows) > _MAX_ROWS:
        rows = [row for row in rows if any(sign in row[0] for sign in _IN_MOTION)][:_MAX_ROWS]
    lines += [f"    {_run(names)}: {words}" for words, names in rows]
    left = len(states) - sum(len(names) for _, names in rows)
    lines += [f"    and {left} more"] if left else []
    lacking = [name for state in states for name in state.lacking]
    if lacking:
        rest = f" and {len(lacking) - _MAX_NAMES} more" if len(lacking) > _MAX_NAMES else ""
        lines.append(f"  without a gradient so far: {', '.join(lacking[:_MAX_NAMES])}{rest}")
    return lines


def _run(names: Sequence[str]) -> str:
    return f"'{names[0]}'" if len(names) == 1 else f"'{names[0]}' to '{names[-1]}' ({len(names)} buckets)"


def about_label(label: str, buffers: Sequence[FusedCommBuffer], layers: Mapping[str, str]) -> list[str]:
    """What a collective of that label carries."""
    if not is_bucket(label, layers):
        return []
    first, _, last = (label.rpartition(", backward ")[0] or label).partition(" to ")
    found = [number for number, buffer in enumerate(buffers) if buffer.name in (first, last)]
    carried = buffers[found[0] : found[-1] + 1] if found else []
    n_params, nbytes = sum(len(each.params) for each in carried), sum(each.layout.nbytes for each in carried)
    what = f"bucket '{first}'" if not last else f"buckets '{first}' to '{last}'"
    params = "1 parameter" if n_params == 1 else f"{n_params} parameters"
    return [f"  it carries {what}: layers {layer_of(label, layers)}, {params}, {_size(nbytes)}"]


# -- ranks ---------------------------------------------------------------------------------------------------------


def about_ranks(
    said: Mapping[int, Statement], *, asked: Mapping[int, bool], me: int, at_fault: int | None
) -> list[str]:
    """What the ranks have launched last, where they part, and where they stand.

    Args:
        said: the statements of those that have answered.
        asked: all ranks, and whether the connection to each has ended.
        me: this rank, whose place is the traceback.
        at_fault: the rank that has failed, where it is known.
    """
    first = [rank for rank in (me, at_fault) if rank is not None and rank in asked]
    ranks = list(dict.fromkeys([*first, *sorted(asked)]))
    lines = _partings(said, me)
    for rank in ranks[:_MAX_RANKS]:
        if rank in said:
            lines += _about_rank(rank, said[rank], stands=rank != me)
        elif rank != me:
            lines.append(f"  rank {rank} has not answered" + (": its connection has ended" if asked[rank] else ""))
    if len(ranks) > _MAX_RANKS:
        n_answers = sum(rank in said for rank in ranks[_MAX_RANKS:])
        lines.append(f"  and {len(ranks) - _MAX_RANKS} ranks more, of which {n_answers} have answered")
    return lines


def _about_rank(rank: int, said: Statement, *, stands: bool) -> list[str]:
    lines = [f"  rank {rank} has launched, when it heard of this:"]
    for name, lane in said.get("lanes", {}).items():
        if lane["last"]:
            lines += [f"    lane '{name}': {_counts(lane)}", *_latest(lane)]
    if len(lines) == 1:
        lines = [f"  rank {rank} has launched nothing"] if "lanes" in said else [f"  rank {rank} has no sharded model"]
    if stands and said.get("at"):
        lines += [f"    its main thread is at {said['at'][0]}", *(f"      {place}" for place in said["at"][1:])]
    return lines


def _counts(lane: Mapping[str, Any]) -> str:
    launched, under_way = lane["launched"], lane["under_way"]
    return f"{launched} launched, {f'{under_way} not over' if under_way else 'all over'}"


def _latest(lane: Mapping[str, Any]) -> list[str]:
    launches = [Launch(*each) for each in lane["last"]]
    oldest = lane["launched"] - max(lane["under_way"], 1)
    shown = [each for each in launches if each.number >= oldest]
    if len(shown) > _SHOWN:
        # What it waits for, and what it has come to.
        shown = [*shown[: _SHOWN - 1], shown[-1]]
    return [f"      number {each.number}, {_what(each)}, {each.at_s:.1f} s before" for each in shown]


def _what(launch: Launch) -> str:
    return f"{launch.op} of '{launch.label}' ({_size(launch.nbytes)})"


def _partings(said: Mapping[int, Statement], me: int) -> list[str]:
    """For each lane, the first launch that another rank has otherwise, or has not come to."""
    lines = []
    for name, mine in said.get(me, {}).get("lanes", {}).items():
        for peer, theirs in ((peer, said[peer].get("lanes", {}).get(name)) for peer in sorted(said) if peer != me):
            line = _parting(name, (me, mine), (peer, theirs)) if theirs and _alike(mine, theirs) else None
            if line is not None:
                lines.append(line)
                break
    return lines


def _alike(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether it is one lane over the same ranks, and not that of another replica."""
    return bool(mine["ranks"] == theirs["ranks"])


def _parting(lane: str, mine: tuple[int, Mapping[str, Any]], theirs: tuple[int, Mapping[str, Any]]) -> str | None:
    (me, my_lane), (peer, peer_lane) = mine, theirs
    ours, others = _by_number(my_lane), _by_number(peer_lane)
    for number in sorted(ours.keys() & others.keys()):
        if ours[number][1:4] != others[number][1:4]:
            return (
                f"  lane '{lane}' differs from number {number} on: rank {me} has {_called(ours[number])}, "
                f"rank {peer} has {_called(others[number])}"
            )
    n_mine, n_theirs = my_lane["launched"], peer_lane["launched"]
    ahead, behind, next_one = (me, peer, ours.get(n_theirs)) if n_mine > n_theirs else (peer, me, others.get(n_mine))
    if n_mine == n_theirs:
        return None
    what = f", {_called(next_one)}" if next_one is not None else ""
    return (
        f"  lane '{lane}': rank {behind} has not come to number {min(n_mine, n_theirs)}{what}; rank {ahead} has "
        f"launched {abs(n_mine - n_theirs)} more"
    )


def _by_number(lane: Mapping[str, Any]) -> dict[int, Launch]:
    return {launch.number: launch for launch in (Launch(*each) for each in lane["last"])}


def _called(launch: Launch) -> str:
    return called(launch.op, launch.nbytes, launch.label)


def _size(nbytes: int) -> str:
    if nbytes < 1 << 10:
        return f"{nbytes} bytes"
    return f"{nbytes / (1 << 10):.1f} KB" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):.1f} MB"
