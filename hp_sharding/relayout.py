"""Other buckets for a model that is being trained: the same parameters, moments and all that was learned, bit for bit.

Everything is moved one old bucket at a time, so that beside the state itself there are a few buckets more. Where a
rank's new parts lay on other ranks they are gathered: moments always, values where shards have storage of their own.
Hooks and guards stay where they are; the schedule, which they look at, gets the new buckets.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase

from .assembly import Foundation, assemble, control_lanes
from .buffer import FusedCommBuffer, Status
from .comm import Communicator, host_tensor
from .config import ShardingConfig
from .errors import StateError
from .layout import BucketLayout, Piece, sorted_by_first
from .moments import Kind, drop_moments, kinds_of, make_moments, moments_of
from .optimizer import ShardedOptimizer
from .reduction import Reducer
from .views import slice_of


class _Goal(NamedTuple):
    """Where this rank's new part of a parameter lies: its new bucket, and which part of the parameter it is."""

    layout: BucketLayout
    piece: Piece


def can_relayout(optimizer: ShardedOptimizer) -> bool:
    """Whether no gradient is held or awaited on this rank, and nobody has asked for whole parameters."""
    schedule = optimizer._schedule
    reducer = schedule.reducer
    held = any(buffer.gradient.full is not None and any(buffer.gradient.filled) for buffer in optimizer.buffers)
    free = reducer.sync and reducer.replicate and not reducer.armed and not held
    return free and schedule.is_idle and not optimizer._arena.holds_any


@paddle.no_grad()
def relayout(optimizer: ShardedOptimizer, foundation: Foundation, config: ShardingConfig) -> None:
    """Lays the parameters out in the buckets that ``config`` asks for. Collective, right after ``clear_grad()``.

    ``config`` differs from ``optimizer.config`` in the size of buckets only, and is in force afterwards.

    Raises:
        StateError: gradients are held, or a forward or ``full_parameters`` is under way, or the ranks keep different
            moments: nothing has changed. Or moving failed half-way: parameters and moments are lost, the message says
            so, and the optimizer is of no more use. The other ranks get a CommError, here or from their next step.
        LayoutError: a parameter was cast or replaced after wrapping. Nothing has changed.
        CommError: a gather that was under way has failed.
    """
    gather = foundation.lanes["gather"]
    where = f"rank {gather.ranks[gather.rank]}: "
    if not can_relayout(optimizer):
        raise StateError(f"{where}buckets can be laid out anew only right after clear_grad(), outside of a forward")
    _thaw_as_others(optimizer, foundation)
    foundation = _as_trained(foundation, optimizer)
    kept = _agree_on_moments(optimizer, foundation, where)
    optimizer._schedule.begin_step()
    optimizer._schedule.gathers.finish_under_way()
    try:
        _move(optimizer, foundation, foundation.plan(config), config=config, kept=kept)
    except BaseException as error:
        text = (
            f"{where}buckets could not be laid out anew ({type(error).__name__}: {error}), and parameters and "
            "optimizer state are half moved: neither can be used any more. Start again from a checkpoint, with a "
            "number for comm_buffer_size_MB"
        )
        _give_up(optimizer, foundation, text)
        if isinstance(error, Exception):
            raise StateError(text) from error
        raise


def _give_up(optimizer: ShardedOptimizer, foundation: Foundation, text: str) -> None:
    """Nobody goes on with what is half moved: not this rank, nor others, which would wait for it."""
    optimizer.failure = text
    for lane in foundation.lanes.values():
        lane.break_off(text)


def _thaw_as_others(optimizer: ShardedOptimizer, foundation: Foundation) -> None:
    """Ranks that were given nothing of a bucket's state, since they hold no part of it, give it masters too."""
    if all(member.spec.all_dtypes.shard == member.spec.all_dtypes.sum for member in foundation.members):
        return
    lane = control_lanes(foundation.lanes)[-1]
    thawed = [buffer.layout.dtypes.shard == buffer.layout.dtypes.sum for buffer in optimizer.buffers]
    everyone = _gather(lane, host_tensor(thawed, "int32"), label="masters").numpy().reshape([lane.nranks, -1])
    for buffer, anywhere in zip(optimizer.buffers, everyone.any(axis=0).tolist(), strict=True):
        if anywhere:
            buffer.thaw()


def _as_trained(foundation: Foundation, optimizer: ShardedOptimizer) -> Foundation:
    """What was frozen when the model was wrapped and trains since, or has masters that were loaded, still does."""
    owners = {id(param): buffer.layout for buffer in optimizer.buffers for param in buffer.params}
    members = []
    for member in foundation.members:
        layout = owners[id(member.param)]
        frozen = member.spec.frozen and not optimizer._updates.trains(layout.number)
        members.append(member._replace(spec=member.spec._replace(frozen=frozen, dtypes=layout.dtypes)))
    return foundation._replace(members=members)


def _move(
    optimizer: ShardedOptimizer,
    foundation: Foundation,
    layouts: list[BucketLayout],
    *,
    config: ShardingConfig,
    kept: Mapping[int, _Kept],
) -> None:
    schedule, old = optimizer._schedule, optimizer.buffers
    reducer, gather_order = schedule.reducer, schedule.gathers.order
    learned_last = reducer._always_last - reducer._rules.tied
    goals = _goals(foundation, layouts, old[0].place.rank)
    optimizer._updates.release()
    optimizer._arena.release()
    for buffer in old:
        if buffer.gradient.full is not None:
            buffer.gradient.free()
        _move_moments(optimizer, buffer, goals, kept=kept)
    shards = _move_shards(old, layouts, goals)
    buffers = _fill_buckets(old, foundation, layouts, shards=shards)
    parts = assemble(foundation, config, buffers)
    _carry_over(reducer, parts.reducer, old=old, new=buffers)
    schedule.adopt_layout(buffers, parts.reducer)
    optimizer.config = config
    optimizer._take_parts(parts.arena, parts.updates, foundation.names(layouts))
    _carry_orders(optimizer, reducer.order, gather_order, last=_params_in(old, learned_last), old=old)
    schedule.gathers.begin_anew()
    buffers[0].place.pool.trim()


def _goals(foundation: Foundation, layouts: Sequence[BucketLayout], rank: int) -> dict[int, _Goal]:
    """By ``id`` of the parameter; nothing for those of which this rank will have no part."""
    return {
        id(foundation.members[layout.slots[piece.slot].param].param): _Goal(layout, piece)
        for layout in layouts
        for piece in layout.pieces(rank)
    }


# -- moments -----------------------------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """What the ranks keep of a parameter.

    Attributes:
        kinds: moment -> what it is; the same on all ranks.
        scalars: moments of the parameter as a whole -> value.
    """

    kinds: dict[str, Kind]
    scalars: dict[str, float]


def _agree_on_moments(optimizer: ShardedOptimizer, foundation: Foundation, where: str) -> dict[int, _Kept]:
    """By ``id``, of each parameter that some rank keeps moments of. Collective.

    Raises:
        StateError: the ranks would keep different ones.
    """
    inner, lane = foundation.inner, control_lanes(foundation.lanes)[-1]
    pieces = {piece.tensor.name: piece.tensor for buffer in optimizer.buffers for piece in buffer.slices}
    held = [
        (param, buffer) for buffer in optimizer.buffers for param in buffer.params if optimizer._updates.holds(param)
    ]
    stand_ins = [pieces[param.name] if param.name in pieces else _stand_in(param, buffer, 1) for param, buffer in held]
    kinds = [kinds_of(inner, part) for part in stand_ins]
    rows: list[float] = [zlib.crc32(repr(kinds).encode())]
    for part, of_part in zip(stand_ins, kinds, strict=True):
        found = {moment.name: moment.tensor for moment in moments_of(inner, part)} if part.name in pieces else {}
        rows.append(bool(found))
        scalars = [name for name, kind in of_part.items() if not kind.per_element]
        rows += [float(found[name].astype("float64")) if name in found else 0.0 for name in scalars]
    everyone = _gather(lane, host_tensor(rows, "float64"), label="moments").numpy().reshape([lane.nranks, -1])
    if len(set(everyone[:, 0])) > 1:
        raise StateError(
            f"{where}{type(inner).__name__} keeps other things of its parameters on other ranks, so nobody can say "
            "what belongs in new buckets. Give comm_buffer_size_MB a number"
        )
    return _read_rows(everyone[:, 1:], [param for param, _ in held], kinds)


def _read_rows(
    table: np.ndarray, params: Sequence[EagerParamBase], kinds: Sequence[dict[str, Kind]]
) -> dict[int, _Kept]:
    """Of each parameter the first rank that keeps something; ranks that hold no part of it keep nothing."""
    kept, column = {}, 0
    for param, of_param in zip(params, kinds, strict=True):
        names = [name for name, kind in of_param.items() if not kind.per_element]
        keepers = np.flatnonzero(table[:, column])
        if len(keepers):
            values = table[keepers[0], column + 1 : column + 1 + len(names)]
            kept[id(param)] = _Kept(of_param, dict(zip(names, values.tolist(), strict=True)))
        column += 1 + len(names)
    return kept


def _move_moments(
    optimizer: ShardedOptimizer, buffer: FusedCommBuffer, goals: Mapping[int, _Goal], *, kept: Mapping[int, _Kept]
) -> None:
    inner, layout = optimizer._inner, buffer.layout
    moved: dict[int, dict[str, list[paddle.Tensor]]] = {}
    rows = dict.fromkeys(
        (name, row, kind.dtype)
        for param in buffer.params
        for name, kind in (kept[id(param)].kinds if id(param) in kept else {}).items()
        for row in range(kind.rows or 1)
        if kind.per_element
    )
    for name, row, dtype in rows:
        whole = _gather(buffer.place.gather, _packed(inner, buffer, name, row, dtype), label=f"{buffer.name}, {name}")
        for slot, param in enumerate(buffer.params):
            goal = goals.get(id(param))
            if goal is not None and _has_row(kept.get(id(param)), name, row, dtype):
                part = _part(whole, layout, slot, goal.piece).clone()
                moved.setdefault(slot, {}).setdefault(name, []).append(part)
    for piece in buffer.slices:
        drop_moments(inner, piece.tensor)
    for slot, param in enumerate(buffer.params):
        goal = goals.get(id(param))
        if goal is not None and id(param) in kept:
            _put_moments(inner, _stand_in(param, buffer, goal.piece.numel), moved.get(slot, {}), kept[id(param)])


def _has_row(kept: _Kept | None, name: str, row: int, dtype: str) -> bool:
    kind = kept.kinds.get(name) if kept is not None else None
    return kind is not None and kind.per_element and kind.dtype == dtype and row < (kind.rows or 1)


def _packed(
    inner: paddle.optimizer.Optimizer, buffer: FusedCommBuffer, name: str, row: int, dtype: str
) -> paddle.Tensor:
    """One moment of all of this rank's parts of the bucket, each where its part lies in the shard."""
    packed = paddle.zeros([buffer.layout.shard_numel], dtype)
    for piece in buffer.slices:
        for moment in moments_of(inner, piece.tensor):
            if moment.name == name and moment.kind.dtype == dtype and row < (moment.rows or 1):
                values = moment.tensor.flatten()._slice(row * piece.numel, (row + 1) * piece.numel)
                packed._slice(piece.start_numel, piece.start_numel + piece.numel).copy_(values, False)
    return packed


def _put_moments(
    inner: paddle.optimizer.Optimizer,
    part: EagerParamBase,
    rows: Mapping[str, Sequence[paddle.Tensor]],
    kept: _Kept,
) -> None:
    """Makes the moments of a part as a first step would, and gives them their values. Filed by the part's name."""
    for moment in make_moments(inner, part):
        if moment.name in rows:
            for row, values in enumerate(rows[moment.name]):
                target = moment.tensor.detach().reshape([-1])._slice(row * values.size, (row + 1) * values.size)
                target.copy_(values, False)
        else:
            moment.tensor.fill_(kept.scalars[moment.name])


def _stand_in(param: EagerParamBase, buffer: FusedCommBuffer, numel: int) -> EagerParamBase:
    """What an optimizer takes for a part of the parameter, of so many elements."""
    return slice_of(param, paddle.zeros([numel], buffer.layout.dtypes.shard))


# -- values ------------------------------------------------------------------------------------------------------------


def _gather(lane: Communicator, shard: paddle.Tensor, *, label: str) -> paddle.Tensor:
    whole = paddle.concat([shard] * lane.nranks)  # where the shard lies: on the host what goes over a host's lane
    lane.all_gather(whole, shard, label=label).wait()
    return whole


def _part(whole: paddle.Tensor, layout: BucketLayout, slot: int, piece: Piece) -> paddle.Tensor:
    """The elements of ``piece`` in the flat tensor of the bucket that has held the parameter in ``slot``."""
    start = layout.slots[slot].offset_numel + piece.param_offset_numel
    return whole._slice(start, start + piece.numel)


def _move_shards(
    old: Sequence[FusedCommBuffer], layouts: Sequence[BucketLayout], goals: Mapping[int, _Goal]
) -> dict[int, paddle.Tensor]:
    """The new shards that have storage of their own, by number of the bucket; old ones are let go."""
    keeps_full = old[0].place.keeps_full
    shards = {
        layout.number: paddle.zeros([layout.shard_numel], layout.dtypes.shard)
        for layout in layouts
        if not (keeps_full and layout.dtypes.shard_is_slice)
    }
    for buffer in old:
        if not buffer.owns_shard:
            continue
        whole = _gather(buffer.place.gather, buffer.shard, label=f"{buffer.name}, shards")
        for slot, param in enumerate(buffer.params):
            goal = goals.get(id(param))
            if goal is not None:
                start = goal.piece.shard_offset_numel
                target = shards[goal.layout.number]._slice(start, start + goal.piece.numel)
                target.copy_(_part(whole, buffer.layout, slot, goal.piece), False)
        buffer.drop_shard()
    return shards


def _fill_buckets(
    old: Sequence[FusedCommBuffer],
    foundation: Foundation,
    layouts: Sequence[BucketLayout],
    *,
    shards: dict[int, paddle.Tensor],
) -> list[FusedCommBuffer]:
    """New buckets, which take the parameters over; each old one goes as soon as it has none left."""
    place = old[0].place
    place = place._replace(status=Status.READY if place.keeps_full else Status.SHARDED)
    owners = {id(param): buffer for buffer in old for param in buffer.params}
    left = {buffer.layout.number: len(buffer.params) for buffer in old}
    buffers = []
    for layout in layouts:
        params = foundation.params_of(layout)
        buffers.append(FusedCommBuffer(layout, params, place, shard=shards.pop(layout.number, None)))
        for param in params:
            owner = owners[id(param)]
            left[owner.layout.number] -= 1
            if not left[owner.layout.number]:
                owner.dissolve()
    return buffers


# -- what was learned --------------------------------------------------------------------------------------------------


def _carry_over(
    before: Reducer, after: Reducer, *, old: Sequence[FusedCommBuffer], new: Sequence[FusedCommBuffer]
) -> None:
    used = {
        id(param): flag
        for buffer, flags in zip(old, before.used, strict=True)
        for param, flag in zip(buffer.params, flags, strict=True)
    }
    for buffer, flags in zip(new, after.used, strict=True):
        flags[:] = [used[id(param)] for param in buffer.params]
    after.running = before.running


def _params_in(buffers: Sequence[FusedCommBuffer], numbers: Sequence[int] | frozenset[int]) -> list[int]:
    """The parameters of these buckets, by ``id``, in order."""
    return [id(param) for number in numbers for param in buffers[number].params]


def _carry_orders(
    optimizer: ShardedOptimizer,
    reduce_order: Sequence[int],
    gather_order: Sequence[int],
    *,
    last: Sequence[int],
    old: Sequence[FusedCommBuffer],
) -> None:
    """The orders that were learned, as far as they can be said of other buckets. The same on every rank."""
    schedule, reducer = optimizer._schedule, optimizer._reducer
    of_buckets = [[id(param) for param in buffer.params] for buffer in optimizer.buffers]
    order = sorted_by_first(of_buckets, _params_in(old, reduce_order), reducer.order)
    # What waits for the end of backward would hold up all that stands behind it.
    reducer.adopt_order(sorted(order, key=lambda bucket: bucket in reducer._rules.tied))
    schedule.adopt_gather_order(sorted_by_first(of_buckets, _params_in(old, gather_order), schedule.gathers.order))
    held_back = {bucket for bucket, params in enumerate(of_buckets) if set(last).intersection(params)}
    reducer._always_last = reducer._always_last | held_back
