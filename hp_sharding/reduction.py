"""The backward pipeline: gradients into buckets, buckets into reduce-scatters, in one order on every rank.

A *round* is one outermost backward that synchronises. In it each live bucket is reduced exactly once, in the agreed
order, whatever branches this rank took: early, as soon as all its gradients are in, where that is safe, and the rest,
with zeros for what is missing, at the end. So ranks match without asking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import paddle
from paddle.base.framework import EagerParamBase

from .arena import GradientArena
from .buffer import FusedCommBuffer
from .comm import Communicator, Work
from .errors import StateError
from .facts import Agreement, Facts
from .in_flight import GradientsInFlight
from .replication import Replicator
from .running import RunningState
from .sent import SentGradients
from .timeline import Timeline

PUBLISH_ALWAYS_ROUNDS = 8
PUBLISH_EVERY_ROUNDS = 32
"""Rank 0 publishes a newly learned order after each of the first rounds and then now and then, so that a model whose
order changes all the time does not pay a broadcast for it in every step."""


class ReduceLanes(NamedTuple):
    """Where reductions and agreements travel.

    Attributes:
        reduce: over the shard group; carries the reduce-scatters.
        agree: lanes that one after the other reach all data ranks, the replicas first; idle during backward, so that
            what is agreed on does not queue behind gradients.
        replicate: over the replicas of this rank's shard; None where there is one.
    """

    reduce: Communicator
    agree: Sequence[Communicator]
    replicate: Communicator | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all data ranks."""
        return all(lane.rank == 0 for lane in self.agree)


class ReduceRules(NamedTuple):
    """How reductions are scheduled.

    Attributes:
        overlap: launch during backward.
        keeps_gradient: stage 1, full gradients stay in ``param.grad``.
        tied: buckets with parameters of more than one layer; they always wait for the end of backward.
        replicate_bytes: reduced neighbours up to this size share an all-reduce over the replicas.
    """

    overlap: bool
    keeps_gradient: bool
    tied: frozenset[int]
    replicate_bytes: int = 1


class Reducer:
    """Reduces the gradients of all buckets of one wrapped model.

    Attributes:
        sync: False inside ``no_sync()``: gradients add up locally.
        replicate: False inside ``no_sync(replicate_only=True)``: sums stay those of this shard group.
        lanes: where everything travels.
        round: how many outermost backwards have been reduced.
        order: agreed order in which buckets are reduced.
        learned_order: a better order than ``order``, as this rank saw it; None where it is the same.
        gather_order_changed: set by the schedule where rank 0 should publish an order of gathers.
        running: running state that is kept equal on all ranks; None where it is not.
        used: for each parameter (``used[bucket][index]``), whether it has had a gradient, as far as this rank knows.
    """

    def __init__(
        self,
        buffers: Sequence[FusedCommBuffer],
        arena: GradientArena,
        *,
        lanes: ReduceLanes,
        rules: ReduceRules,
        timeline: Timeline,
    ) -> None:
        self.sync = True
        self.replicate = True
        self.lanes = lanes
        self.running: RunningState | None = None
        backward = [buffer.layout.number for buffer in reversed(buffers)]
        self.order = sorted(backward, key=lambda bucket: bucket in rules.tied)
        self.used = [[False] * len(buffer.params) for buffer in buffers]
        self._buffers = list(buffers)
        self._arena = arena
        self._rules = rules
        self._replicator = _make_replicator(buffers, arena, lanes=lanes, rules=rules, timeline=timeline)
        self._timeline = timeline
        self._works: list[Work | None] = [None] * len(buffers)
        self._in_flight = GradientsInFlight([buffer.gradient for buffer in buffers], timeline)
        self._agreements: deque[Agreement] = deque()
        self.round = 0
        self._unreduced = False
        self._order_due = False
        self._armed = False
        self._broken = False
        self._incomplete = False
        self.learned_order: list[int] | None = None
        self.gather_order_changed = False
        self._sent = SentGradients()
        self._always_last = rules.tied
        self._held_back: set[int] = set(rules.tied)
        self._reset_backward()

    def _reset_backward(self) -> None:
        n = len(self._buffers)
        self._arrived = [0] * n
        self._expected = [0] * n
        self._seen = [[False] * len(buffer.params) for buffer in self._buffers]
        self._launched = [False] * n
        self._repeats = [False] * n
        self._completed: list[int] = []
        self._position = 0

    @property
    def armed(self) -> bool:
        """Whether the outermost backward under way, or else the next one, concerns this model."""
        return self._armed

    @property
    def rank(self) -> int:
        """Global rank, for errors."""
        return self.lanes.reduce.ranks[self.lanes.reduce.rank]

    # -- told by the schedule ------------------------------------------------------------------------------------

    def arm(self) -> None:
        """A forward that will be differentiated has begun: the next outermost backward is a round."""
        self._armed = True
        self._held_back |= self._always_last

    def hold_back(self, bucket: int) -> None:
        """Has the bucket wait for the end of the next backward, since its gradients may come in more than once."""
        self._held_back.add(bucket)

    def begin_backward(self) -> None:
        """Start of an outermost backward."""
        self._begin_round()
        if self._rules.keeps_gradient:
            # This backward accumulates in place into storage that an earlier reduction may still be reading.
            self._wait_all()
            self._held_back |= self._sent.set_aside(self._buffers, self._arena, unsent=self._unreduced)

    def take_gradient(self, bucket: int, index: int) -> None:
        """Parameter ``index`` of ``bucket`` has its gradient in ``param.grad``; it moves into the bucket's storage."""
        self._armed = True
        self._store(bucket, index)
        self.used[bucket][index] = True
        if self._seen[bucket][index]:
            # Nested backwards give it one part each: from now on it always waits for the end.
            self._always_last = self._always_last | {bucket}
            self._held_back.add(bucket)
        else:
            self._seen[bucket][index] = True
            self._arrived[bucket] += 1
        if self._launched[bucket]:
            self._repeats[bucket] = True
        elif self._arrived[bucket] == self._expected[bucket]:
            self._completed.append(bucket)
            if self.sync and self._rules.overlap:
                self._launch_ready()

    def end_backward(self) -> None:
        """End of an outermost backward: launches what is left, in order."""
        if not self._armed:
            return
        self._armed = False
        if self.running is not None:
            self.running.look()
        if not self.sync:
            self._unreduced = True
            return
        self.finish_round()

    def abort_backward(self) -> None:
        """The backward failed; ``clear`` completes the round, so that the ranks stay in step."""
        self._broken = self._broken or (self.sync and (self._armed or any(self._launched)))
        self._armed = False

    # -- told by the optimizer -----------------------------------------------------------------------------------

    def reduce_leftovers(self) -> None:
        """One round for what has not been reduced, or not over the replicas. Same on every rank.

        Only ``no_sync`` leaves such gradients; and a backward that has failed on this rank leaves its part of a round,
        which the others wait for.
        """
        if self._broken:
            self.finish_round()
            self._broken = False
        elif self._unreduced:
            self._begin_round()
            self.finish_round()
        else:
            self._sent.check(self.rank)
            if self._replicator is not None:
                self._replicate_rest(self._replicator)

    def finish_round(self) -> None:
        """Launches the buckets of this round that are left, then the agreement."""
        if self._broken:
            # First of all: in stage 3 others may wait for gathers of the rest of this backward, and this tells them.
            self._agree()
        for bucket in self.order:
            if not self._launched[bucket] and self._is_live(bucket):
                self._launch(bucket)
        if self._replicator is not None:
            self._replicator.flush()
        if not self._broken:
            self._agree()
        self.round += 1
        self._unreduced = False

    def _agree(self) -> None:
        self._learn_order()
        facts = Facts(
            new_order=self._wants_to_publish(),
            failed=self._broken,
            repeats=self._repeats,
            used=[used for bucket in self.used for used in bucket],
            written=self.running.written() if self.running is not None else (),
        )
        self._agreements.append(Agreement(facts, self.lanes.agree, label=f"agreement, backward {self.round}"))
        self._timeline.watch(self._agreements[-1].work)

    def settle(self, *, discard: bool = False) -> bool:
        """Reads what the ranks agreed on since the last call; launches reductions that some rank needs once more.

        Returns True while rank 0 has an order to publish. ``discard`` says that the sums are about to be forgotten.

        Raises:
            StateError: the backward failed on some rank, so that its part of the sums is missing.
        """
        while self._agreements:
            agreement = self._agreements.popleft()
            self._timeline.wait(agreement.work)
            facts = agreement.result()
            self._merge_used(facts.used)
            if self.running is not None:
                self.running.take_agreed(facts.written)
            if facts.failed:
                # Nothing more is sent for this round, whether a rank discards it or raises below.
                self._incomplete = True
                continue
            self._order_due = self._order_due or facts.new_order
            for bucket in (bucket for bucket in self.order if facts.repeats[bucket]):
                self._launch(bucket)
        if self._replicator is not None:
            self._replicator.flush()
        if self._incomplete and not discard:
            raise StateError(
                f"rank {self.rank}: the backward failed on some rank of this group, so the reduced gradients are "
                "incomplete. Call optimizer.clear_grad() on every rank and skip this batch"
            )
        return self._order_due

    def is_reduced(self, bucket: int) -> bool:
        """Whether ``wait`` would return at once."""
        work = self._works[bucket]
        replicated = self._replicator is None or self._replicator.is_done(bucket)
        return replicated and (work is None or work.done())

    def wait(self, bucket: int) -> None:
        """Returns once the bucket's slice of the arena holds the sum of all rounds so far."""
        work, self._works[bucket] = self._works[bucket], None
        if work is not None:
            self._timeline.wait(work)
        if self._replicator is not None:
            self._replicator.wait(bucket)

    def give_back(self) -> None:
        """Lets the pool have the storage of what has been reduced. All sums are final."""
        self._in_flight.forget()

    def clear(self, set_to_zero: bool) -> None:
        """Forgets all gradients. Brings a model whose backward failed back into step with its peers.

        ``set_to_zero`` False also forgets which parameters have had a gradient, as plain Paddle's None does.
        """
        if self._broken:
            self.reduce_leftovers()
        self.settle(discard=True)
        self._incomplete = False
        self._wait_all()
        self._arena.clear()
        self._sent.clear()
        self._unreduced = False
        self._armed = False
        for index, buffer in enumerate(self._buffers):
            self._clear_bucket(buffer)
            if not set_to_zero:
                self.used[index] = [False] * len(buffer.params)
        self._reset_backward()

    def forget(self, bucket: int, index: int, *, set_to_zero: bool) -> None:
        """Forgets the gradient of one parameter, of which the caller then clears ``param.grad``. Same on every rank."""
        buffer = self._buffers[bucket]
        self.settle()
        self.wait(bucket)
        self._sent.forget(bucket, index)
        for piece in buffer.slices:
            if piece.param == index:
                self._arena.zero_part(bucket, piece.start_numel, piece.numel)
        if not set_to_zero:
            self.used[bucket][index] = False
        if not (self._rules.keeps_gradient and set_to_zero):
            # Otherwise ``param.grad`` is a view of the storage and becomes zero where it lies.
            buffer.gradient.filled[index] = False
        main = getattr(buffer.params[index], "main_grad", None)
        if main is not None:
            main.zero_() if set_to_zero else setattr(buffer.params[index], "main_grad", None)

    def adopt_order(self, order: list[int]) -> None:
        """Takes the order that rank 0 published."""
        self.order = order
        self.learned_order = None
        self._order_due = False

    # -- parts ---------------------------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        self._reset_backward()
        for index, buffer in enumerate(self._buffers):
            self._expected[index] = [param.stop_gradient for param in buffer.params].count(False)

    def _replicate_rest(self, replicator: Replicator) -> None:
        """Launches the all-reduces of partial sums for which none has been launched."""
        partial = set(self._arena.partial())
        for bucket in self.order:
            if bucket in partial and not replicator.is_waited_for(bucket):
                replicator.add(bucket, self._works[bucket])
        replicator.flush()

    def _store(self, bucket: int, index: int) -> None:
        buffer = self._buffers[bucket]
        storage, param = buffer.gradient, buffer.params[index]
        gradient = _gradient_of(param)
        if self._rules.keeps_gradient and storage.holds(index, gradient):
            return  # a later backward: autograd has added in place
        if gradient.is_selected_rows():
            raise StateError(
                f"parameter '{param.name}' of bucket '{buffer.name}': its gradient is sparse: it holds only the rows "
                "that this rank has used, so it cannot be reduced. Use F.embedding and nn.Embedding with sparse=False"
            )
        if storage.full is None:
            self._in_flight.alloc(storage, limited=self.sync)
        storage.put(index, gradient)
        _drop_gradient(param)
        if self._rules.keeps_gradient:
            _show_gradient(param, storage.view(index))

    def _is_live(self, bucket: int) -> bool:
        # Not whether it holds gradients: that is this rank's alone. Those of a parameter that was frozen since stay.
        return self._expected[bucket] > 0

    def _launch_ready(self) -> None:
        while self._position < len(self.order):
            bucket = self.order[self._position]
            if self._is_live(bucket):
                complete = self._arrived[bucket] == self._expected[bucket]
                if not complete or bucket in self._held_back or self._launched[bucket]:
                    return
                self._launch(bucket)
            self._position += 1

    def _launch(self, bucket: int) -> None:
        buffer = self._buffers[bucket]
        storage = buffer.gradient
        if storage.full is None:
            self._in_flight.alloc(storage, limited=self.sync)
        storage.fill_missing()
        assert storage.full is not None
        if self._replicator is not None and self._replicator.is_waited_for(bucket):
            # Of an earlier backward: its all-reduce writes where this sum may go.
            self.wait(bucket)
        if self._rules.keeps_gradient and not self._arena.is_edited(bucket):
            # The full gradient itself holds the sum of all micro-batches, so the shard is overwritten.
            self._arena.forget(bucket)
        target = self._arena.expect_sum(bucket)
        work = self.lanes.reduce.reduce_scatter(
            target.slice,
            storage.full,
            label=f"{buffer.name}, backward {self.round}",
            accumulate=target.accumulate,
            wire_dtype=storage.wire_dtype,
        )
        self._works[bucket] = self._timeline.watch(work)
        if self._replicator is not None and self.replicate:
            self._replicator.add(bucket, work)
        self._launched[bucket] = True
        if self._rules.keeps_gradient:
            self._sent.note(buffer)
        else:
            self._in_flight.send(storage, work)

    def _learn_order(self) -> None:
        """The order in which this round's buckets filled up, then those that did not, then those held back."""
        last = [bucket for bucket in self.order if bucket in self._held_back]
        filled = [bucket for bucket in self._completed if bucket not in self._held_back]
        known = {*last, *filled}
        order = [*filled, *(bucket for bucket in self.order if bucket not in known), *last]
        self._held_back = set()
        self.learned_order = order if order != self.order else None

    def _wants_to_publish(self) -> bool:
        learned = self.learned_order is not None or self.gather_order_changed
        due = self.round < PUBLISH_ALWAYS_ROUNDS or self.round % PUBLISH_EVERY_ROUNDS == 0
        return learned and due and self.lanes.is_first

    def _merge_used(self, agreed: list[bool]) -> None:
        position = 0
        for used in self.used:
            if not all(used):
                theirs = agreed[position : position + len(used)]
                used[:] = [mine or other for mine, other in zip(used, theirs, strict=True)]
            position += len(used)

    def _wait_all(self) -> None:
        for bucket in range(len(self._buffers)):
            self.wait(bucket)
        self._in_flight.forget()

    def _clear_bucket(self, buffer: FusedCommBuffer) -> None:
        for param in buffer.params:
            # Stage 1: the parameter's own gradient object goes, the storage behind it stays with the bucket. Stage 2:
            # there is one only where a user's hook has raised before ours could take it.
            _drop_gradient(param)
        if self._rules.keeps_gradient:
            buffer.gradient.reset()
        elif buffer.gradient.full is not None:
            self._in_flight.free(buffer.gradient)


def _make_replicator(
    buffers: Sequence[FusedCommBuffer],
    arena: GradientArena,
    *,
    lanes: ReduceLanes,
    rules: ReduceRules,
    timeline: Timeline,
) -> Replicator | None:
    if lanes.replicate is None:
        return None
    layouts = [buffer.layout for buffer in buffers]
    return Replicator(layouts, arena, lane=lanes.replicate, limit_bytes=rules.replicate_bytes, timeline=timeline)


def _gradient_of(param: EagerParamBase) -> paddle.Tensor:
    """``param.grad``, unseen by the guard; or ``main_grad``, where a hook of Paddle's has moved it there."""
    gradient = EagerParamBase._grad_ivar(param)
    return param.main_grad if gradient is None else gradient


def _show_gradient(param: EagerParamBase, view: paddle.Tensor) -> None:
    """Stage 1: the local gradient is the parameter's; as ``main_grad`` where autograd's has fewer bits, or none has."""
    if view.dtype == param.dtype and not hasattr(param, "main_grad"):
        param._copy_gradient_from(view)
    else:
        param.main_grad = view


def _drop_gradient(param: EagerParamBase) -> None:
    """Sets ``param.grad`` to None, unseen by the guard, and ``main_grad`` where there is one."""
    EagerParamBase.clear_gradient(param, False)
    if hasattr(param, "main_grad"):
        param.main_grad = None
