"""Trains the same twice, without delays and with: nothing that is late may change a bit, or make anything grow.

What a step does is drawn by its number from the seed of the course: several backwards, inside ``no_sync`` and outside,
the order of layers, evaluation, norms, what is given up, saved, loaded and read. In stages 1 and 2 each rank has an
order of its own and evaluates as often as it likes. Each step leaves lines, such as its losses; where a line is another
one with delays, the error names seed, step and line.

Lanes are real ones between processes, or the fake ones of one process, see ``tests.slow_lanes``.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import math
import random
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import paddle

import hp_sharding
from hp_sharding import ShardedOptimizer, ShardingConfig, full_parameters
from hp_sharding.assembly import CONTROL
from hp_sharding.comm import Communicator
from hp_sharding.pool import StoragePool
from hp_sharding.sharding import LANES, REPLICA_LANES, broadcast_model, build
from tests import harness, logical
from tests.fakes import PoisoningPool, WaitingLane
from tests.lanes import Call, LateLane, real_lanes
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.mutation.breaks import Break
from tests.mutation.in_force import in_force
from tests.sides import BOTH
from tests.slow_lanes import Clock, DelayedLane, Delays, Turns
from tests.soak.growth import Sample, take_sample
from tests.soak.starts import Split
from tests.training import digest

COMPARED_EVERY = 50
"""Steps after which the runs are compared, and samples are taken of what may not grow."""
WARM_UP = 2
"""Samples at the beginning that say nothing: not every layer has been used and updated yet."""
FEWEST_SAMPLES = 4
"""After those; fewer do not tell growth from chance."""
REAL, FAKE = "real", "fake"
_FORWARDS = 16
"""At most so many batches a step."""
_FOUR_BLOCKS = (0, 0, 1, 1, 2, 2, 3, 3)

Settings = dict[str, Any]


class Course(NamedTuple):
    """What is trained.

    Attributes:
        model: a name of ``tests.models``.
        split: of the ranks; with fake lanes all shards are one, and two replicas hold the same.
        settings: of ``ShardingConfig``.
        steps: how many.
        seed: of all that is drawn.
        lanes: ``REAL`` or ``FAKE``.
        folder: for what is saved; "" saves nothing.
        compared_every: see ``COMPARED_EVERY``.
        broken: a break of the package that is in force in the run with delays, and must be found.
    """

    model: str
    split: Split
    settings: Settings
    steps: int
    seed: int
    lanes: str = REAL
    folder: str = ""
    compared_every: int = COMPARED_EVERY
    broken: Break | None = None

    def __str__(self) -> str:
        flags = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.model}, {self.split}, {flags}, {self.lanes} lanes, seed {self.seed}"


class DelayFault(Exception):
    """With delays something came out otherwise than without, or raised. Says in which step."""

    def __init__(self, course: Course, step: int, text: str) -> None:
        super().__init__(f"{course}: step {step}: {text}")


class Found(NamedTuple):
    """What one rank brings back: of the run with delays.

    Attributes:
        digests: of all parameters whenever they were compared; the same on all ranks.
        samples: taken at the same time.
        n_collectives: that were started.
    """

    digests: list[str]
    samples: list[Sample]
    n_collectives: int


_VARIANTS: dict[int, list[tuple[str, Settings]]] = {
    1: [
        ("gpt", {}),
        ("branching", {"allgather_overlap": False}),
        ("gpt_recompute", {"reshard_after_step": True, "prefetch_depth": 2}),
        ("shared", {"reduce_overlap": False, "replicate_buffer_size_MB": 0.001}),
    ],
    2: [
        ("gpt", {}),
        ("branching", {"reshard_after_step": True, "prefetch_depth": 3}),
        ("gpt", {"reshard_after_step": True, "reduce_dtype": "bfloat16", "replicate_buffer_size_MB": 0.004}),
        ("shared", {"gather_dtype": "bfloat16"}),
    ],
    3: [
        ("gpt", {}),
        ("branching_alike", {"prefetch_depth": 3}),
        ("gpt_recompute_reentrant", {"prefetch_depth": 2, "gather_dtype": "bfloat16"}),
        ("shared", {"reshard_after_forward": False, "replicate_buffer_size_MB": 0.001}),
    ],
}


def courses(stage: int, split: Split, count: int, *, seed: int = 0, lanes: str = REAL) -> list[Course]:
    """``count`` steps of a stage, divided among models and settings that differ in what may be late."""
    found = []
    for model, settings in _VARIANTS[stage]:
        chosen = {"stage": stage, **BOTH, **settings}
        found.append(Course(model, split, chosen, -(-count // len(_VARIANTS[stage])), seed, lanes))
    return found


def run(course: Course) -> list[Found]:
    """Runs a course; returns what each rank has found, which is one where lanes are fake.

    Raises:
        harness.RankFailure: with the DelayFault of a rank.
    """
    nranks = course.split.nranks if course.lanes == REAL else 1
    with tempfile.TemporaryDirectory(prefix="hp_sharding_delays_") as folder:
        # What ranks that do not exist would write is nowhere.
        saves = course.lanes == REAL or course.split.n_replicas == 1
        course = course._replace(folder=folder if saves else "")
        found = harness.run(train, nranks, course, timeout_s=120 + 10.0 * course.steps)
    for rank, each in enumerate(found):
        assert each.digests == found[0].digests, f"{course}: rank {rank} has other parameters than rank 0"
    return found


def train(rank: int, nranks: int, course: Course) -> Found:
    """Rank function: both runs.

    Raises:
        DelayFault: they differ.
    """
    calm = _Run(course, rank, _Lanes(course, None), tag="calm")
    expected = [calm.make_step(step) for step in range(course.steps)]
    del calm
    gc.collect()
    lanes = _Lanes(course, f"{course.seed} {rank}")
    with contextlib.ExitStack() as stack:
        stack.callback(lanes.end)
        if course.broken is not None:
            stack.enter_context(in_force(course.broken))
        try:
            late = _run_late(course, rank, lanes, expected)
        except DelayFault as fault:
            lanes.break_off(str(fault))
            raise
    return Found(late.digests, late.samples, lanes.n_collectives)


def _run_late(course: Course, rank: int, lanes: _Lanes, expected: list[str]) -> _Run:
    step, found = 0, dict[int, str]()
    try:
        run = _Run(course, rank, lanes, tag="late")
        for step in range(course.steps):
            found[step] = run.make_step(step)
            if run.compares_after(step):
                _compare(course, expected, found)
                found.clear()
    except DelayFault:
        raise
    except Exception as error:
        _compare(course, expected, found)  # which may say more
        raise DelayFault(course, step, f"with delays: {type(error).__name__}: {error}") from error
    return run


def _compare(course: Course, expected: list[str], found: dict[int, str]) -> None:
    """Raises DelayFault for the first line that differs."""
    for step, text in found.items():
        for line, late in itertools.zip_longest(expected[step].splitlines(), text.splitlines()):
            if line != late:
                raise DelayFault(course, step, f"without delays {line}, with delays {late}")


# -- what is trained ---------------------------------------------------------------------------------------------------


class _Lanes:
    """The lanes of one run.

    Attributes:
        delays: on them; None for none.
        n_collectives: that they have carried.
    """

    def __init__(self, course: Course, seed: str | None) -> None:
        self.delays: Delays | None = None
        self.n_collectives = 0
        self._noted: list[Any] = []
        self._is_real = course.lanes == REAL
        lanes = self._real(course) if self._is_real else self._fake(course)
        self._below = list(lanes.values())
        if seed is not None:
            self.delays = Clock(seed) if self._is_real else Turns(seed, self._below)
            lanes = {name: DelayedLane(self._poisoned(lane), self.delays) for name, lane in lanes.items()}
        self._lanes = lanes

    def wrap(self, course: Course, model: paddle.nn.Layer, inner: Any) -> ShardedOptimizer:
        """What ``hp_sharding.shard`` does. Collective."""
        if self._is_real:
            broadcast_model(model, self._lanes)
        if self.delays is not None:
            self.delays.pause_in_layers(model)
        pool = StoragePool() if self.delays is None else PoisoningPool()
        return build(model, inner, ShardingConfig(**course.settings), lanes=self._lanes, pool=pool)

    def end_step(self) -> None:
        """Forgets what was noted, which must not look as if something grew."""
        self.n_collectives += sum(isinstance(note, Call) or note.what == "start" for note in self._noted)
        self._noted.clear()

    def break_off(self, reason: str) -> None:
        """So that no other rank waits for this one."""
        if self._is_real:
            self._below[0].break_off(reason)

    def end(self) -> None:
        """Leaves the process as it was."""
        if isinstance(self.delays, Clock):
            self.delays.over()

    def _poisoned(self, lane: Any) -> Communicator:
        return LateLane(lane, self._noted, 0.0) if self._is_real else lane

    @staticmethod
    def _real(course: Course) -> dict[str, Any]:
        real = real_lanes(course.split.nranks, course.split.n_replicas)
        # Not those that others compare on: they would keep the ranks together.
        return {name: real[name] for name in (*LANES, *REPLICA_LANES, *CONTROL) if name in real}

    def _fake(self, course: Course) -> dict[str, Any]:
        n_replicas = course.split.n_replicas
        sizes = dict.fromkeys(LANES, 1)
        if n_replicas > 1:
            sizes |= dict.fromkeys((*REPLICA_LANES, CONTROL[1]), n_replicas)
        return {name: WaitingLane(name, nranks=nranks, log=self._noted) for name, nranks in sizes.items()}


class _GivenUpError(Exception):
    pass


class _Run:
    """One training, step by step.

    Attributes:
        digests: see ``Found``.
        samples: see ``Found``; none without delays.
    """

    def __init__(self, course: Course, rank: int, lanes: _Lanes, *, tag: str) -> None:
        self._course = course
        self._rank = rank
        self._lanes = lanes
        self._folder = f"{course.folder}/{tag}" if course.folder else ""
        self._alike = course.settings["stage"] == 3
        self._model = make_model(course.model)
        # It has every step wait for all sums, which then hide less.
        clip = paddle.nn.ClipGradByGlobalNorm(1.0) if course.model.startswith("branching") else None
        inner = make_optimizer("AdamW", self._model, grad_clip=clip)
        self._optimizer = lanes.wrap(course, self._model, inner)
        self._pending: Any = None
        self._saved: list[str] = []
        self._lines: list[str] = []
        self._batch = 0
        self.digests: list[str] = []
        self.samples: list[Sample] = []

    def compares_after(self, step: int) -> bool:
        """Whether all is looked at after this step."""
        return (step + 1) % self._course.compared_every == 0 or step + 1 == self._course.steps

    def make_step(self, step: int) -> str:
        """Returns what there is to be said of it, in lines."""
        self._lines, self._batch = [], step * _FORWARDS
        common = random.Random(f"{self._course.seed} {step}")
        own = random.Random(f"{self._course.seed} {step} {'' if self._alike else self._rank}")
        if self._lanes.delays is not None:
            self._lanes.delays.stir()
        self._forward_and_backward(common, own)
        if common.random() < 0.95:
            self._optimizer.step()
        self._optimizer.clear_grad(set_to_zero=common.random() < 0.7)
        self._between_steps(step, common, own)
        if self.compares_after(step):
            self._look_at_everything()
        self._lanes.end_step()
        return "\n".join(self._lines)

    def _forward_and_backward(self, common: random.Random, own: random.Random) -> None:
        if common.random() < 0.05:
            with contextlib.suppress(_GivenUpError):
                raise _GivenUpError(float(self._loss(own)))
            self._optimizer.clear_grad()
        n_backwards = common.choice([1, 1, 1, 2, 3])
        for number in range(n_backwards):
            is_last = number + 1 == n_backwards
            with self._syncing(common.random(), is_last=is_last):
                loss = self._loss(own)
                self._note("loss", float(loss))
                loss.backward()
            if own.random() < 0.1:
                self._evaluate(own)
        if common.random() < 0.1:
            self._note("norm", self._optimizer.grad_norm())
        if common.random() < 0.1:
            self._note("norm before clipping", float(self._optimizer.clip_grad_norm(0.5)))

    def _syncing(self, chance: float, *, is_last: bool) -> Any:
        """Mostly a last backward is reduced; ``step()`` reduces what is left."""
        if is_last and chance < 0.9:
            return contextlib.nullcontext()
        if chance < 0.4 or chance > 0.97:
            return self._optimizer.no_sync()
        return self._optimizer.no_sync(replicate_only=True) if chance < 0.7 else contextlib.nullcontext()

    def _loss(self, own: random.Random) -> paddle.Tensor:
        if hasattr(self._model, "order"):
            # Blocks in any order, left out or entered twice.
            self._model.order = tuple(own.sample(_FOUR_BLOCKS, own.choice([1, 3, 4, 4, 5])))
        self._batch += 1
        return loss_of(self._model, make_batch(self._course.model, self._batch, self._rank))

    def _evaluate(self, own: random.Random) -> None:
        self._model.eval()
        with paddle.no_grad():
            self._note("evaluation", float(self._loss(own)))
        self._model.train()

    def _between_steps(self, step: int, common: random.Random, own: random.Random) -> None:
        for _ in range(own.choice([0, 0, 0, 1, 2])):
            self._evaluate(own)
        chance = common.random()
        if chance < 0.06:
            self._note_parameters("parameters")
        elif chance < 0.12:
            self._note("state", _digest_of(self._optimizer.state_dict()))
        elif chance < 0.18 and self._folder:
            self._save(step, asynchronous=common.random() < 0.6)
        elif chance < 0.20 and self._saved:
            self._load()

    def _save(self, step: int, *, asynchronous: bool) -> None:
        path = f"{self._folder}/{step % 2}"
        self._pending = hp_sharding.save(
            path, self._model, self._optimizer, extra={"step": step}, asynchronous=asynchronous
        )
        self._saved.append(path)
        del self._saved[:-1]

    def _load(self) -> None:
        """Goes back to what was saved last; what is random is drawn anew all the same."""
        loaded = hp_sharding.load(self._saved[-1], self._model, self._optimizer)
        self._note("loaded", str(loaded.extra))
        self._note_parameters("loaded parameters")

    def _note_parameters(self, what: str) -> str:
        with full_parameters(self._model):
            found = digest(self._model)
        self._note(what, found)
        return found

    def _look_at_everything(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
        self.digests.append(self._note_parameters("parameters"))
        self._note("all that is held", logical.digest(logical.parts(self._model, self._optimizer)))
        if self._lanes.delays is not None:
            pool = self._optimizer.buffers[0].place.pool
            self.samples.append(take_sample(pool, _n_empty_lists(), len(self.samples)))

    def _note(self, what: str, value: float | str) -> None:
        if isinstance(value, float):
            assert math.isfinite(value), f"{what} is {value}"
            value = value.hex()
        self._lines.append(f"{what} {value}")


def _n_empty_lists() -> int:
    """Paddle forgets one with every ``_slice``, and with every moment that it makes, such as in ``load``."""
    gc.collect()
    return sum(type(thing) is list and not thing for thing in gc.get_objects())


def _digest_of(state: dict[str, Any]) -> str:
    """In no order: names are others in each run, and what is updated first depends on what is there first."""
    sums = sorted(hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in _tensors(state))
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def _tensors(state: dict[str, Any]) -> Iterator[paddle.Tensor]:
    for value in state.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, paddle.Tensor):
            yield value
