"""A reducer and its buckets, driven by hand: what stands in for autograd, on lanes that deliver when waited for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle

from hp_sharding.arena import GradientArena
from hp_sharding.buffer import BufferPlace, FusedCommBuffer
from hp_sharding.layout import BucketRules, ParamSpec, plan_buckets
from hp_sharding.reduction import ReduceLanes, Reducer, ReduceRules
from hp_sharding.timeline import Timeline
from tests.fakes import Event, PoisoningPool, WaitingLane

NUMEL = 200
"""Elements of every parameter: no multiple of the alignment."""


class Pipeline:
    """Buckets ``b0``, ``b1`` ... of two parameters each, their reducer, and what stands in for autograd."""

    def __init__(
        self,
        n_buckets: int = 3,
        *,
        stage: int = 2,
        overlap: bool = True,
        tied: Sequence[int] = (),
        nranks: int = 1,
        rank: int = 0,
        n_replicas: int = 1,
        replicate_bytes: int = 1,
    ) -> None:
        self.log: list[Event] = []
        self.pool = PoisoningPool()
        self.reduce = WaitingLane("reduce", nranks=nranks, rank=rank, log=self.log)
        self.agree = WaitingLane("gather", nranks=nranks, rank=rank, log=self.log)
        self.params = [paddle.create_parameter([NUMEL], "float32") for _ in range(2 * n_buckets)]
        self.stage = stage
        self.buffers = self._buffers(n_buckets, nranks, rank)
        self.arena = GradientArena([buffer.layout for buffer in self.buffers], nranks * n_replicas, n_replicas)
        self.replicate = WaitingLane("replicate", nranks=n_replicas, log=self.log)
        self.reducer = Reducer(
            self.buffers,
            self.arena,
            lanes=ReduceLanes(self.reduce, [self.agree], self.replicate if n_replicas > 1 else None),
            rules=ReduceRules(overlap, stage == 1, frozenset(tied), replicate_bytes),
            timeline=Timeline(False),
        )

    def _buffers(self, n_buckets: int, nranks: int, rank: int) -> list[FusedCommBuffer]:
        specs = [ParamSpec(f"p{i}", NUMEL, "float32", 4, i // 2, False) for i in range(len(self.params))]
        names = [f"b{i}" for i in range(n_buckets)]
        place = BufferPlace(rank, self.agree, self.pool, True)
        return [
            FusedCommBuffer(layout, [self.params[slot.param] for slot in layout.slots], place)
            for layout in plan_buckets(specs, names, BucketRules(nranks, 10**9, True, False))
        ]

    def gradient(self, bucket: int, index: int, value: float) -> None:
        """Autograd's part: a new gradient, or one added in place to what is there; then the hook."""
        param = self.buffers[bucket].params[index]
        if param.grad is None:
            param.grad = paddle.full([NUMEL], value)
        else:
            param.grad.add_(paddle.full([NUMEL], value))
        self.reducer.take_gradient(bucket, index)

    def fill(self, bucket: int, value: float) -> None:
        """Both gradients of a bucket."""
        self.gradient(bucket, 1, value)
        self.gradient(bucket, 0, value)

    def backward(self, values: dict[int, float]) -> None:
        """A whole backward in which buckets fill up in the order of ``values``."""
        self.reducer.arm()
        self.reducer.begin_backward()
        for bucket, value in values.items():
            self.fill(bucket, value)
        self.reducer.end_backward()

    def reduced(self) -> list[str]:
        """Labels of the reductions so far, such as ``"2, backward 0"``."""
        return [
            label.partition(":")[0] + "," + label.partition(",")[2] for label in self.reduce.labels("reduce_scatter")
        ]

    def order(self) -> list[int]:
        """Numbers of the buckets reduced so far."""
        return [int(label.partition(",")[0]) for label in self.reduced()]

    def sums(self, bucket: int) -> list[float]:
        """After a step's waits: the one value that each parameter of the bucket has all over in the arena."""
        if self.reducer.settle():
            pass  # an order to publish: step() does that
        self.reducer.wait(bucket)
        found = []
        for slot in self.buffers[bucket].layout.slots:
            part = self.arena.slice(bucket)._slice(slot.offset_numel, slot.end_numel).numpy()
            assert np.unique(part).size == 1 or np.isnan(part).all()
            found.append(float(part[0]))
        for start, end in self.buffers[bucket].layout.gaps():
            assert (self.arena.slice(bucket)._slice(start, end).numpy() == 0).all(), "padding is not zero"
        return found

    def peers_say(self, *, repeats: Sequence[int] = (), used: Sequence[int] = (), failed: bool = False) -> None:
        """Adds another rank's facts to the agreement under way; ``used`` counts parameters over all buckets."""
        agreement = self.reducer._agreements[-1]
        agreement.work.wait()
        n_buckets = len(self.buffers)
        theirs = np.zeros(2 + n_buckets + len(self.params), "int32")
        theirs[1] = failed
        theirs[[2 + bucket for bucket in repeats]] = 1
        theirs[[2 + n_buckets + index for index in used]] = 1
        agreement._counts.add_(paddle.to_tensor(theirs))

    def abort(self, filled: Sequence[int]) -> None:
        """A backward that fails after these buckets were filled."""
        self.reducer.arm()
        self.reducer.begin_backward()
        for bucket in filled:
            self.fill(bucket, 7.0)
        self.reducer.abort_backward()
