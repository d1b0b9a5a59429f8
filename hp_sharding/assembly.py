"""What is made of one layout of buckets: when a model is wrapped, and once more whenever it is laid out anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import paddle
from paddle.base.framework import EagerParamBase

from .arena import GradientArena
from .buffer import FusedCommBuffer
from .comm import Communicator
from .config import ShardingConfig
from .layout import BucketLayout, BucketRules, ParamSpec, plan_buckets
from .reduction import ReduceLanes, Reducer, ReduceRules
from .timeline import Timeline
from .updates import InnerUpdates

CONTROL = ("control", "agree")
"""Over the ranks of a shard group, and over the replicas: what the hosts tell each other. On CPU the first is "gather",
which is idle when there is something to tell."""

LayOut = Callable[[Sequence[ParamSpec], Sequence[str], BucketRules], list[BucketLayout]]
"""Makes buckets of parameters, given the units' names, as ``layout.plan_buckets`` does."""


class Member(NamedTuple):
    """A parameter that lies in a bucket.

    Attributes:
        spec: what the layout needs to know of it.
        param: the parameter.
        tied: whether more than one layer holds it.
    """

    spec: ParamSpec
    param: EagerParamBase
    tied: bool


class Foundation(NamedTuple):
    """What stays when buckets change.

    Attributes:
        inner: the user's optimizer.
        members: all parameters in buckets, in the order in which the model holds them.
        unit_names: of all units.
        lanes: see ``sharding.build``.
        timeline: records what the parts do.
        lay_out: makes the buckets.
    """

    inner: paddle.optimizer.Optimizer
    members: list[Member]
    unit_names: list[str]
    lanes: Mapping[str, Communicator]
    timeline: Timeline
    lay_out: LayOut = plan_buckets

    @property
    def n_replicas(self) -> int:
        """Shard groups that hold the same."""
        replicate = self.lanes.get("replicate")
        return replicate.nranks if replicate is not None else 1

    def plan(self, config: ShardingConfig) -> list[BucketLayout]:
        """The buckets that ``config`` asks for."""
        nranks = self.lanes["gather"].nranks
        rules = BucketRules(nranks, config.comm_buffer_bytes, config.comm_fusion, merge_units=config.stage < 3)
        return self.lay_out([member.spec for member in self.members], self.unit_names, rules)

    def params_of(self, layout: BucketLayout) -> list[EagerParamBase]:
        """The parameters of a bucket, in slot order."""
        return [self.members[slot.param].param for slot in layout.slots]

    def names(self, layouts: Sequence[BucketLayout]) -> dict[str, int]:
        """Structured name of each parameter -> its bucket's number."""
        return {self.members[slot.param].spec.name: layout.number for layout in layouts for slot in layout.slots}


class Parts(NamedTuple):
    """What works on the buckets: reduces their gradients, keeps them, and updates from them."""

    arena: GradientArena
    reducer: Reducer
    updates: InnerUpdates


def control_lanes(lanes: Mapping[str, Communicator]) -> list[Communicator]:
    """Lanes that one after the other reach all data ranks, from the first one on, with tensors on the host."""
    shards = lanes.get(CONTROL[0], lanes["gather"])
    return [lanes[CONTROL[1]], shards] if CONTROL[1] in lanes else [shards]


def assemble(foundation: Foundation, config: ShardingConfig, buffers: Sequence[FusedCommBuffer]) -> Parts:
    """The parts of ``buffers``; they have learned nothing yet."""
    lanes, timeline, members = foundation.lanes, foundation.timeline, foundation.members
    layouts = [buffer.layout for buffer in buffers]
    n_replicas = foundation.n_replicas
    arena = GradientArena(layouts, config.gradient_divisor(lanes["gather"].nranks * n_replicas), n_replicas)
    tied = frozenset(layout.number for layout in layouts if any(members[slot.param].tied for slot in layout.slots))
    reducer = Reducer(
        buffers,
        arena,
        lanes=ReduceLanes(lanes["reduce"], control_lanes(lanes), lanes.get("replicate")),
        rules=ReduceRules(config.reduce_overlap, config.stage == 1, tied, config.replicate_buffer_bytes),
        timeline=timeline,
    )
    updates = InnerUpdates(
        foundation.inner, buffers, arena, comm=lanes["gather"], timeline=timeline, tensor=lanes.get("tensor")
    )
    return Parts(arena, reducer, updates)
