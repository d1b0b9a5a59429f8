"""Trains many steps and measures what must not grow: memory, threads, descriptors, objects.

Steps come in cycles that hold all a training loop does: one backward and several, inside ``no_sync`` and outside,
evaluation, reading all parameters, a step that was given up after an exception. A sample is taken at each cycle's end,
always at the same point, and the last samples may not exceed the first ones.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import paddle
from paddle.base import core

from hp_sharding import full_parameters
from hp_sharding.pool import StoragePool
from tests.lanes import wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer

CYCLE_STEPS = 8
WARM_UP_CYCLES = 4
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Sample(NamedTuple):
    """What a process has at one point.

    Attributes:
        live_bytes: of tensors, by Paddle's own statistics, without the following.
        pool_bytes: of the pool that gradients and gathered parameters come from, its free blocks included.
        rss_bytes: of the whole process in memory.
        threads: of any kind.
        descriptors: open files and sockets.
        objects: that Python's garbage collection knows, after it has run, without the following.
        forgotten: small lists that Paddle itself leaks, with every tensor that is made of numbers or of an array, and
            so with every batch, and with every ``_slice``.
    """

    live_bytes: int
    pool_bytes: int
    rss_bytes: int
    threads: int
    descriptors: int
    objects: int
    forgotten: int


SLACK = {"live_bytes": 0, "pool_bytes": 64 << 10, "rss_bytes": 2 << 20, "threads": 0, "descriptors": 0, "objects": 10}
"""How much may be more at the end than at the beginning. Allocators and caches keep what they like; and the first time
that a reduction is still under way when the next gradient comes may be late: the pool then gets a block more."""
# What paddlepaddle 3.3 leaks in C++, also without hp_sharding: paddle.Tensor the list of its keywords, and _slice an
# empty list, which looks like any other and so is counted by the calls.
_KEYWORDS = ["value", "place", "persistable", "zero_copy", "name", "stop_gradient"]
_FORGOTTEN_BYTES = 128


class Course(NamedTuple):
    """What is trained.

    Attributes:
        model: a name of ``tests.models``.
        n_replicas: among how many replicas the ranks are divided.
        settings: those of ``ShardingConfig``.
        steps: at least so many are measured.
        leak: one of ``LEAKS``, which then leaks in every cycle, so that a test can see that it is found.
    """

    model: str
    n_replicas: int
    settings: dict[str, Any]
    steps: int
    leak: str = ""


def train_cycles(rank: int, nranks: int, course: Course) -> list[Sample]:
    """Rank function: a sample for each cycle after the warm-up."""
    model = make_model(course.model)
    model, optimizer, _ = wrap(
        model, make_optimizer("AdamW", model), nranks,
        n_replicas=course.n_replicas, delay_s=0.0, poison=False, **course.settings,
    )  # fmt: skip
    pool = optimizer.buffers[0].place.pool
    kept: list[Any] = []
    samples: list[Sample] = []
    with _counted_slices() as slices:
        for cycle in range(WARM_UP_CYCLES + -(-course.steps // CYCLE_STEPS)):
            for step in range(CYCLE_STEPS):
                _KINDS[step](_Loop(model, optimizer, course.model, rank, cycle * CYCLE_STEPS + step))
            if course.leak:
                kept.append(LEAKS[course.leak](pool))
            with full_parameters(model):
                pass  # gathers that the last step has started are over
            samples.append(_sample(pool, slices.number, len(samples)))
    for thing in kept:
        _give_back(thing)
    return samples[WARM_UP_CYCLES:]


@contextlib.contextmanager
def _counted_slices() -> Iterator[_Count]:
    """Counts the calls of ``Tensor._slice``."""
    original = paddle.Tensor._slice
    calls = _Count()

    def counting(self: paddle.Tensor, *args: int) -> paddle.Tensor:
        calls.number += 1
        return original(self, *args)

    paddle.Tensor._slice = counting
    try:
        yield calls
    finally:
        paddle.Tensor._slice = original


@dataclass
class _Count:
    number: int = 0


def _sample(pool: StoragePool, n_slices: int, n_samples: int) -> Sample:
    gc.collect()
    objects = gc.get_objects()
    forgotten = sum(map(_is_keywords, objects)) + n_slices
    return Sample(
        live_bytes=int(core.host_memory_stat_current_value("Allocated", 0)) - pool.allocated_bytes,
        pool_bytes=pool.allocated_bytes,
        rss_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES,
        threads=len(os.listdir("/proc/self/task")),
        descriptors=len(os.listdir("/proc/self/fd")),
        objects=len(objects) - forgotten - n_samples,
        forgotten=forgotten,
    )


def _is_keywords(thing: object) -> bool:
    # Elements of other lists may compare in ways of their own.
    return type(thing) is list and len(thing) == len(_KEYWORDS) and type(thing[0]) is str and thing == _KEYWORDS


def grown(samples: Sequence[Sample]) -> dict[str, str]:
    """What has grown by more than ``SLACK``, and from what to what.

    It compares the least of the first and of the last quarter: at a sample some collective may still be on its way.
    """
    quarter = max(1, len(samples) // 4)
    found = {}
    for field, slack in SLACK.items():
        if field == "rss_bytes":
            slack += _FORGOTTEN_BYTES * (samples[-1].forgotten - samples[0].forgotten)
        before = min(getattr(sample, field) for sample in samples[:quarter])
        after = min(getattr(sample, field) for sample in samples[-quarter:])
        if after > before + slack:
            found[field] = f"{before:,} in the first quarter, {after:,} in the last"
    return found


# -- what a training loop does ----------------------------------------------------------------------------------------


class _Loop(NamedTuple):
    """One step of the loop."""

    model: paddle.nn.Layer
    optimizer: Any
    name: str
    rank: int
    step: int

    def backward(self) -> None:
        loss_of(self.model, make_batch(self.name, self.step % 3, self.rank)).backward()

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.clear_grad()


class _GivenUpError(Exception):
    pass


def _plain(loop: _Loop) -> None:
    loop.backward()
    loop.end()


def _accumulates(loop: _Loop) -> None:
    with loop.optimizer.no_sync():
        loop.backward()
        loop.backward()
    _plain(loop)


def _replicates_last(loop: _Loop) -> None:
    with loop.optimizer.no_sync(replicate_only=True):
        loop.backward()
    _plain(loop)


def _adds_up(loop: _Loop) -> None:
    loop.backward()
    _plain(loop)


def _evaluates(loop: _Loop) -> None:
    _plain(loop)
    loop.model.eval()
    with paddle.no_grad():
        float(loss_of(loop.model, make_batch(loop.name, 0, loop.rank)))
    loop.model.train()


def _reads(loop: _Loop) -> None:
    _plain(loop)
    with full_parameters(loop.model):
        for param in loop.model.parameters():
            param.numpy()


def _gives_up(loop: _Loop) -> None:
    """Every rank raises after its forward, catches that and goes on."""
    with contextlib.suppress(_GivenUpError):
        loss = loss_of(loop.model, make_batch(loop.name, 0, loop.rank))
        raise _GivenUpError(float(loss))
    loop.optimizer.clear_grad()
    _plain(loop)


_KINDS: list[Callable[[_Loop], None]] = [
    _plain,
    _accumulates,
    _adds_up,
    _replicates_last,
    _evaluates,
    _gives_up,
    _reads,
    _plain,
]
assert len(_KINDS) == CYCLE_STEPS


# -- leaks made on purpose --------------------------------------------------------------------------------------------


def _open_thread(pool: StoragePool) -> Any:
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    return over


LEAKS: dict[str, Callable[[StoragePool], Any]] = {
    "live_bytes": lambda pool: paddle.ones([1]),
    "pool_bytes": lambda pool: pool.alloc(8 << 10, "float32"),
    "rss_bytes": lambda pool: bytearray(b"x" * (1 << 20)),
    "threads": _open_thread,
    "descriptors": lambda pool: os.open("/dev/null", os.O_RDONLY),
    "objects": lambda pool: [[] for _ in range(10)],
}
"""What leaks, by the field in which that must show."""


def _give_back(thing: Any) -> None:
    if isinstance(thing, int):
        os.close(thing)
    elif hasattr(thing, "set"):
        thing.set()
