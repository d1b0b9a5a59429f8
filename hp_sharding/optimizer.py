"""``ShardedOptimizer``: puts buckets, arena, schedule and the user's optimizer together."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import paddle

from .arena import GradientArena
from .buffer import FusedCommBuffer
from .comm import allocated_bytes
from .config import ShardingConfig
from .errors import ConfigError, StateError
from .facts import publish
from .gradients import LocalGrad, ReducedGradients
from .layout import model_state_bytes
from .nonfinite import NonFiniteCheck
from .reduction import Reducer
from .scaling import SCALER_GRADIENTS, SCALER_READS, is_scaler, plain_answer
from .schedule import Schedule
from .sharded_weights import model_weights, optimizer_weights, slices_of
from .states import RankState
from .timeline import Timeline
from .updates import InnerUpdates

if TYPE_CHECKING:
    from .comm import Fingerprint

TOGETHER_BYTES = 1 << 18
"""Shards of neighbours that one call of the inner optimizer updates: a call costs 20 us whatever there is to do. Until
it returns the gathers of all of them wait; with AdamW, for this much, 0.15 ms."""


class Tuning(Protocol):
    """Chooses settings by measurement; see ``tuning``."""

    def end_step(self) -> None:
        """A step has been made."""

    def end_clear(self, *, awaits_backward: bool) -> None:
        """Gradients have been cleared: buckets may change now, unless a forward has had no backward yet."""

    def paused(self) -> AbstractContextManager[None]:
        """Within, nothing changes."""

    def kept(self) -> dict[str, Any] | None:
        """What was chosen, for a checkpoint; None while nothing has been."""

    def adopt(self, kept: Mapping[str, Any]) -> None:
        """Takes what ``kept`` gave where it was asked for on as many ranks, and has not been chosen. Collective."""


class ShardedOptimizer:
    """The user's optimizer over sharded gradients and state.

    It has the methods of a ``paddle.optimizer.Optimizer``; what is not defined here is looked up on the inner one.

    Attributes:
        timeline: spans and their summary; see ``hp_sharding.timeline``.
        param2bucket: structured parameter name -> its buckets, in order.
        config: the settings in force, numbers also where ``"auto"`` was asked for.
        tuning: what has been measured for ``"auto"``, and what was chosen; None where nobody has asked for it.
        steps: how many ``step()`` have been made; a checkpoint keeps it.
        failure: why it cannot be used any more, where buckets were half moved to others; None while it can.
    """

    def __init__(
        self,
        inner: paddle.optimizer.Optimizer,
        schedule: Schedule,
        *,
        arena: GradientArena,
        updates: InnerUpdates,
        config: ShardingConfig,
        names: dict[str, int],
        timeline: Timeline,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        self._inner = inner
        self._schedule = schedule
        self.config = config
        self.timeline = timeline
        self.tuning: Tuning | None = None
        self._fingerprint = fingerprint
        self._take_parts(arena, updates, names)
        self._baseline_bytes = 0
        self._state = RankState(inner, schedule, tensor=updates.sums.tensor)
        self.steps = 0
        self.failure: str | None = None

    def __getattr__(self, name: str) -> Any:
        # Only called for what is not found here. '_inner' itself is missing while a copy is being made.
        if name == "_inner":
            raise AttributeError(name)
        if name in SCALER_READS and is_scaler(sys._getframe(1)):
            return self._gradients.for_scaler() if name in SCALER_GRADIENTS else plain_answer(name)
        return getattr(self._inner, name)

    def _take_parts(self, arena: GradientArena, updates: InnerUpdates, names: Mapping[str, int]) -> None:
        """What works on the buckets that the schedule has; ``names``: structured name -> number of its bucket."""
        self._arena = arena
        self._updates = updates
        self.param2bucket = {name: [self._schedule.buffers[bucket]] for name, bucket in names.items()}
        self._gradients = self._make_gradients(list(names.items()))

    def _make_gradients(self, places: list[tuple[str, int]]) -> ReducedGradients:
        reducer = self._reducer
        names = [[name for name, bucket in places if bucket == buffer.layout.number] for buffer in self.buffers]
        check = None
        if self.config.check_nan_inf != "off":
            check = NonFiniteCheck(
                self.buffers,
                self._arena,
                names=names,
                sums=self._updates.sums,
                raises=self.config.check_nan_inf == "raise",
                speaks=reducer.lanes.is_first,
            )
        return ReducedGradients(self.buffers, reducer, self._arena, updates=self._updates, names=names, check=check)

    @property
    def buffers(self) -> list[FusedCommBuffer]:
        """All buckets, in registration order."""
        return list(self._schedule.buffers)

    @property
    def _inner_opt(self) -> Any:
        """The optimizer inside, where callers of Paddle's wrappers look for it."""
        return self._inner

    @property
    def _reducer(self) -> Reducer:
        return self._schedule.reducer

    # -- the optimizer's face ------------------------------------------------------------------------------------

    @paddle.no_grad()
    def step(self) -> None:
        """Updates the parameters from the gradients reduced so far.

        Bucket by bucket, or several small ones at a time: waits for the reduction, updates this rank's shard, and
        starts the gather as soon as it is next in the agreed order. With ``allgather_overlap`` it returns while
        gathers are under way; the next forward waits for each where it needs it. Collective: every rank calls it.

        Raises:
            CommError: a collective failed.
            StateError: the backward failed on some rank; call ``clear_grad()`` everywhere.
                Or gradients are not finite, with ``check_nan_inf="raise"``.
            LayoutError: a parameter was cast or replaced after wrapping.
        """
        self.check_usable()
        self._schedule.begin_step()
        if self._gradients.settle():
            self._publish_orders()
        running = self._reducer.running
        if running is not None:
            running.start()
        stale = [bucket for bucket in self._schedule.gathers.order if self._updates.is_due(bucket, self._reducer.used)]
        self._arena.zero_unsummed()
        if self._gradients.skips_step(self._inner):
            stale = []
        else:
            self._gradients.clip_for_step()
        self._update(stale)
        self._gradients.end_step()
        self._finish_reductions()
        if running is not None:
            running.finish()
        self._schedule.gathers.end_step()
        if self._fingerprint is not None:
            self._fingerprint.check()
        self.steps += 1
        self.timeline.end_step(self.steps)
        if self.tuning is not None:
            self.tuning.end_step()

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Forgets the gradients, and brings a model whose forward or backward raised back to a clean state.

        After an exception every rank of the group calls it. While something is tuned (``"auto"``) every rank calls it
        after each step, since what is chosen is put in force here. ``set_to_zero`` has Paddle's meaning: True, a
        parameter that had a gradient is updated with zeros by a later ``step()``; False, it is skipped.

        Raises:
            CommError: a collective under way failed.
        """
        self.check_usable()
        awaits_backward = self._reducer.armed
        self._schedule.forget_forward()
        self._reducer.clear(set_to_zero)
        if self._reducer.running is not None:
            self._reducer.running.drop()
        self._gradients.end_step()
        if self.tuning is not None:
            self.tuning.end_clear(awaits_backward=awaits_backward)

    clear_gradients = clear_grad

    def minimize(self, loss: paddle.Tensor, *_: Any, **__: Any) -> tuple[None, list[Any]]:
        """``step()``, as ``Optimizer.minimize`` does in dygraph after ``loss.backward()``."""
        self.step()
        return None, []

    @contextlib.contextmanager
    def no_sync(self, *, replicate_only: bool = False) -> Iterator[None]:
        """Inside, backwards add up gradients locally and send nothing; the next backward outside reduces the sum.

        Holds full gradients meanwhile, in every stage. May be nested; restores the state found, also after an
        exception. Every rank must use it alike.

        Args:
            replicate_only: gradients are reduced over the shard group all the same, which needs less memory, and only
                the all-reduce over the replicas waits for the next backward outside. Changes nothing where there is
                one replica.
        """
        reducer = self._reducer
        before = reducer.sync, reducer.replicate
        if replicate_only:
            reducer.replicate = False
        else:
            reducer.sync = False
        try:
            yield
        finally:
            reducer.sync, reducer.replicate = before

    @paddle.no_grad()
    def full_grad(self, param: paddle.Tensor) -> paddle.Tensor | None:
        """The reduced, averaged gradient of ``param``, whole, on every rank; None where it has had none.

        A new tensor of the parameter's shape, in the dtype of the reduced gradient: float32 where precision is mixed,
        else the parameter's. Collective: every rank calls it, between ``backward()`` and ``clear_grad()``.

        Raises:
            ConfigError: the parameter is not one that this optimizer updates.
            StateError: the backward failed on some rank.
            CommError: a collective failed.
        """
        return self._gradients.full(param)

    @paddle.no_grad()
    def set_full_grad(self, param: paddle.Tensor, value: Any) -> None:
        """Puts ``value`` in the place of the reduced, averaged gradient of ``param``; ``step()`` reads it there.

        It is neither reduced nor divided; a later backward adds to it. Every rank calls it, between ``backward()`` and
        ``step()`` and with the same value. It waits for reductions and sends nothing itself. In stage 1 ``param.grad``
        stays this rank's own gradient.

        Args:
            param: one that this optimizer updates; it may have had no gradient.
            value: tensor or array of the parameter's shape, of any floating-point dtype.

        Raises:
            ConfigError: the parameter is not one that this optimizer updates, or the shapes differ.
            StateError: the backward failed on some rank.
            CommError: a collective failed.
        """
        self._gradients.set_full(param, value)

    @paddle.no_grad()
    def local_grads(self) -> list[LocalGrad]:
        """This rank's parts of the reduced, averaged gradients, to be read and edited in place before ``step()``.

        One for each parameter that has had a gradient and of which this rank holds a part; together the ranks of the
        shard group hold each element once. What is written to ``gradient``, flat and without a copy, counts in
        ``step()``, and a later backward adds to it. Replicas must write the same. Every rank calls it; it waits for
        reductions and sends nothing itself. The views belong to the time until ``step()`` or ``clear_grad()``.

        Raises:
            StateError: the backward failed on some rank.
            CommError: a collective failed.
        """
        return self._gradients.local()

    @paddle.no_grad()
    def grad_norm(self) -> float:
        """The global 2-norm of the reduced, averaged gradients of all parameters, whatever ``need_clip`` says.

        Each element counts once, and the value is the same on every rank. Parameters without a gradient count as zero.
        Collective: every rank calls it, after ``backward()``. The host waits for the value.

        Raises:
            StateError: the backward failed on some rank.
            CommError: a collective failed.
        """
        return float(self._gradients.norm())

    @paddle.no_grad()
    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> paddle.Tensor:
        """Scales all gradients so that their global norm is at most ``max_norm``, as ``clip_grad_norm_`` does.

        In place of ``paddle.nn.utils.clip_grad_norm_(model.parameters(), max_norm)``, with its formula: multiplies by
        ``max_norm / (norm + 1e-6)`` if that is below one, whatever ``need_clip`` says. ``step()`` neither reduces nor
        divides again. Collective: every rank calls it, between ``backward()`` and ``step()``.

        Args:
            max_norm: the bound.
            norm_type: 2.0 only.
            error_if_nonfinite: raise where the norm is NaN or infinite, for which the host waits for it.

        Returns:
            The norm before clipping, a tensor without axes on the computing device, the same on every rank.
            ``float()`` of it waits for the device; nothing else here does, unless ``check_nan_inf`` is on.

        Raises:
            ConfigError: another ``norm_type``.
            StateError: the norm is not finite, where that is an error; the backward failed on some rank; or
                ``check_nan_inf="raise"`` has found something. Nothing has been scaled.
            CommError: a collective failed.
        """
        return self._gradients.clip(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's optimizer state, and the layout it belongs to; to be saved by each rank in its own file.

        Keys are the inner optimizer's, which are made of parameter names; moments are one-dimensional, of the part of
        each parameter that this rank updates, in the dtypes that the inner optimizer keeps. Where precision is mixed,
        ``"master_weights"`` holds the float32 parts of the parameters by name, as Paddle's optimizers have it. The
        tensors are those in use: a later step changes them.
        """
        self.check_usable()
        return self._state.state_dict()

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what ``state_dict`` gave on the same rank of the same layout, whatever this optimizer has done since.

        Masters are taken as they are; the parameters' own values come with the model's state, before or after. A
        parameter that had not been updated yet when the state was saved begins anew. Gradients, of which zeros are some
        (see ``clear_grad``), and a learning rate that is a number stay as they are. Looks at this rank only.

        Raises:
            ConfigError: the state is that of another layout, another rank or a plain optimizer, its keys belong to no
                parameter of this process, or a tensor is missing, or is of another size or kind of dtype. Nothing has
                changed.
        """
        self.check_usable()
        self._state.set_state_dict(state_dict)

    load_state_dict = set_state_dict

    def sharded_state_dict(self, model_sharded_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """As of Paddle's sharding V2: this rank's moments and masters, as ``ShardedWeight``, under structured names.

        For ``paddle.distributed.flex_checkpoint``; see ``sharded_weights``. Empty before the first step, but for
        masters. The tensors are those in use, and what is loaded into them counts. Sends nothing, but every rank calls
        it, between ``step()`` and the next forward.

        Args:
            model_sharded_state_dict: what ``model.sharded_state_dict()`` gives, or ``model_sharded_state_dict()`` here.

        Raises:
            ConfigError: it lacks a parameter that this optimizer updates.
        """
        self._settle_gathers()
        return optimizer_weights(self._inner, slices_of(self.buffers), self._state.masters(), model_sharded_state_dict)

    def model_sharded_state_dict(self) -> dict[str, Any]:
        """The model's state for ``flex_checkpoint``, also where parameters are freed between steps, as in stage 3.

        Of those there is this rank's part, and nothing on ranks that have none; the rest is whole and the same on all
        ranks, as ``model.sharded_state_dict()`` has it. What is loaded into them counts; where precision is mixed a
        part is a copy, and the master that is loaded with it counts. Called as ``sharded_state_dict`` is.
        """
        self._settle_gathers()
        return model_weights(self._schedule.model, self.buffers)

    # -- what PaddleNLP-style trainers call ----------------------------------------------------------------------

    def _set_all_gather_overlap_forward(self, enabled: bool, layers: paddle.nn.Layer | None = None) -> None:
        """As on Paddle's sharding optimizer: gathers under the forward instead of inside ``step()``, from now on."""
        if layers is not None and layers is not self._schedule.model:
            raise ConfigError(
                "_set_all_gather_overlap_forward: expected the model that this optimizer was wrapped with"
            )
        self.config = dataclasses.replace(self.config, allgather_overlap=bool(enabled))
        self._schedule.gathers.set_ahead(self.config.units_ahead)

    # -- reports -------------------------------------------------------------------------------------------------

    def memory_report(self) -> dict[str, int]:
        """Model-state bytes of this rank, now, beside the formula of ``layout.model_state_bytes``.

        ``measured_bytes`` is what the process has allocated through Paddle beyond what it had when the model was
        wrapped, parameters of that moment not counted: model state, but also every tensor made since and still alive.
        The other keys are the formula's parts, ``parameters_bytes``, ``gradients_bytes``, ``gradient_shard_bytes``,
        ``shard_bytes`` and ``moments_bytes``, and ``formula_bytes``, their sum. Parameters count as gathered.
        """
        state = model_state_bytes(
            [buffer.layout for buffer in self.buffers],
            self.config.stage,
            keeps_full=not self.config.reshards_after_step,
            moment_bytes=self._updates.moment_bytes(),
            units_ahead=self.config.units_ahead or 0,
        )
        state = state._replace(gradient_shard=state.gradient_shard + self._arena.spare_bytes)
        return {
            "measured_bytes": allocated_bytes() - self._baseline_bytes,
            "formula_bytes": state.total,
            **{f"{name}_bytes": value for name, value in state._asdict().items()},
        }

    # -- parts ---------------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raises StateError where parameters and state were half moved to other buckets."""
        if self.failure is not None:
            raise StateError(self.failure)

    def _update(self, stale: Sequence[int]) -> None:
        """Updates the stale buckets, and has each gathered once all that stand before it are under way.

        While the first one's reduction is still on its way, later ones are updated: nothing waits that can work.
        """
        waiting = deque(stale)
        due = set(stale)
        others = deque(bucket for bucket in self._reducer.order if bucket in due)
        while waiting:
            head = waiting[0]
            if head in due and not self._reducer.is_reduced(head):
                while others and others[0] not in due:
                    others.popleft()
                if others and others[0] != head and self._reducer.is_reduced(others[0]):
                    self._update_buckets([others[0]])
                    due.discard(others.popleft())
                    continue
            if head in due:
                together = self._next_in_line(waiting, due)
                self._update_buckets(together)
                due.difference_update(together)
            waiting.popleft()
            self._schedule.gathers.take_update(head)

    def _next_in_line(self, waiting: Sequence[int], due: set[int]) -> list[int]:
        """The first of ``waiting``, and those behind it that are due, reduced and small: see ``TOGETHER_BYTES``."""
        together: list[int] = []
        nbytes = 0
        for bucket in (bucket for bucket in waiting if bucket in due):
            layout = self._schedule.buffers[bucket].layout
            nbytes += layout.shard_nbytes
            if together and (nbytes > TOGETHER_BYTES or not self._reducer.is_reduced(bucket)):
                break
            together.append(bucket)
        return together

    def _update_buckets(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            self._reducer.wait(bucket)
            # One that no forward has read since the last step may still be under way, into what is updated now.
            self._schedule.gathers.finish(bucket)
        if self.timeline.enabled:
            self.timeline.enter("update", self.timeline.subject.layers_of(buckets))
        self._arena.average(buckets)
        self._updates.apply(buckets, self._reducer.used)
        if self.timeline.enabled:
            self.timeline.leave()

    def _finish_reductions(self) -> None:
        for bucket in range(len(self.buffers)):
            self._reducer.wait(bucket)
        self._reducer.give_back()

    def _settle_gathers(self) -> None:
        """So that shards can be written: no gather reads them, and what was gathered ahead is gathered again."""
        self.check_usable()
        gathers = self._schedule.gathers
        if self.config.stage == 3:
            gathers.begin_step()
        gathers.finish_under_way()

    def _publish_orders(self) -> None:
        reducer, schedule = self._reducer, self._schedule
        mine = [reducer.learned_order or reducer.order, schedule.learned_gather_order or schedule.gathers.order]
        reduce_order, gather_order = publish(mine, reducer.lanes.agree)
        reducer.adopt_order(reduce_order)
        schedule.adopt_gather_order(gather_order)
