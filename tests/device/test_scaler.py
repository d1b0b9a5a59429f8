"""Loss scaling on the stand-in: ``paddle.amp.GradScaler`` and ``fleet.distributed_scaler`` over sharded gradients.

Scales are powers of two, so that what was multiplied and divided by one must be the same bit for bit. The forward is in
float32 where nothing else is said: what 16 bits do is tested in ``test_amp``. Every function whose name starts with an
underscore and that takes a rank runs in a process that has the device.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.autograd import PyLayer
from paddle.nn import functional as F
from paddle.utils import unique_name

from hp_sharding import fleet, full_parameters
from tests.device import standin
from tests.device.running import on_device
from tests.device.test_amp import SCALED, make_scaler
from tests.lanes import wrap
from tests.models import make_model, make_optimizer
from tests.reference import Ranks, Values, assert_close, assert_equal, values
from tests.sides import Sharded
from tests.training import digest

pytestmark = pytest.mark.usefixtures("standin_device")

_PACE = standin.Pace(latency_ms=0.5, jitter_ms=0.5)
_LIMIT_S = 150.0
_BOTH = {"allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": 0.001}
STAGES = {f"stage {stage}": {"stage": stage, **_BOTH} for stage in (1, 2, 3)}
STEPS = 7
SPOILT = 2
"""The step in which the last rank's batch, and nobody else's, gives a gradient that is not finite."""
SCALES = [256.0, 256.0, 512.0, 256.0, 256.0, 512.0, 512.0]
"""In each step, of a scaler that grows after two good steps."""


class _Spoil(PyLayer):
    """Passes a weight on; the gradient of its first element is infinite."""

    @staticmethod
    def forward(ctx: Any, weight: paddle.Tensor) -> paddle.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        spoilt = np.zeros(grad.shape, np.float32)
        spoilt.flat[0] = np.inf
        return grad + paddle.to_tensor(spoilt)


class _Last(nn.Linear):
    """Its weight's gradient is spoilt while ``spoils`` is set."""

    spoils = False

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.linear(x, _Spoil.apply(self.weight) if self.spoils else self.weight, self.bias)


class _Net(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(8, 24), nn.Linear(24, 16), _Last(16, 4)])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for layer in self.layers:
            x = paddle.tanh(layer(x))
        return x


def _loss(model: nn.Layer, step: int, rank: int, *, spoils: bool = False) -> paddle.Tensor:
    model.layers[-1].spoils = spoils
    x = np.random.default_rng([step, rank]).standard_normal([4, 8], dtype=np.float32)
    with paddle.amp.auto_cast(enable=False, dtype="float16"):  # else Paddle's scaler says that it is not for float32
        return F.mse_loss(model(paddle.to_tensor(x)), paddle.to_tensor(np.sin(x[:, :4] + rank)))


# ---- ways to train with a scaler ----


def _steps(scaler: Any, optimizer: Any, scaled: paddle.Tensor) -> None:
    scaler.step(optimizer)
    scaler.update()


def _minimizes(scaler: Any, optimizer: Any, scaled: paddle.Tensor) -> None:
    scaler.minimize(optimizer, scaled)


def _unscales(scaler: Any, optimizer: Any, scaled: paddle.Tensor) -> None:
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    _steps(scaler, optimizer, scaled)


def _clips(scaler: Any, optimizer: Any, scaled: paddle.Tensor) -> None:
    scaler.unscale_(optimizer)
    optimizer.clip_grad_norm(MAX_NORM)
    _steps(scaler, optimizer, scaled)


class Way(NamedTuple):
    """How a script uses a scaler.

    Attributes:
        step: with scaler, optimizer and scaled loss, after the backward.
        n_micro: backwards in each step.
        optimizer: which.
        clips: None, "by hand" or "itself": whether gradients are clipped by their global norm, and who does so.
        by_fleet: whether the scaler is passed through ``fleet.distributed_scaler``.
        looks: whether the script looks at the reduced gradients before the scaler does.
    """

    step: Callable[[Any, Any, paddle.Tensor], None] = _steps
    n_micro: int = 1
    optimizer: str = "SGD"
    clips: str | None = None
    by_fleet: bool = False
    looks: bool = False


MAX_NORM = 0.02
WAYS = {
    "step": Way(),
    "step, AdamW": Way(optimizer="AdamW"),
    "minimize": Way(_minimizes),
    "unscale_": Way(_unscales, optimizer="AdamW"),
    "accumulating": Way(n_micro=3),
    "clipped by the optimizer": Way(clips="itself"),
    "clipped by hand": Way(_clips, clips="by hand"),
    "fleet": Way(by_fleet=True),
    "looked at": Way(looks=True),
}


class Run(NamedTuple):
    """What one rank saw.

    Attributes:
        params: after every step.
        scales: in every step.
        norms: of the reduced gradients, in every step, divided by the scale.
        finite: whether this rank's own shard of the reduced gradients was finite, in every step.
    """

    params: list[Values]
    scales: list[float]
    norms: list[float]
    finite: list[bool]


def _make_inner(way: Way, model: nn.Layer) -> Any:
    clip = nn.ClipGradByGlobalNorm(MAX_NORM) if way.clips == "itself" else None
    return make_optimizer(way.optimizer, model, grad_clip=clip)


def _scaled(rank: int, nranks: int, n_replicas: int, way: Way, settings: dict[str, Any]) -> Run:
    """Trains with a scaler on ranks."""
    paddle.seed(3)
    model = _Net()
    model, optimizer, _ = wrap(model, _make_inner(way, model), nranks, n_replicas=n_replicas, **settings)
    scaler = make_scaler(init_loss_scaling=SCALES[0], incr_every_n_steps=2)
    scaler = fleet.distributed_scaler(scaler) if way.by_fleet else scaler
    run = Run([], [], [], [])
    for step in range(STEPS):
        run.scales.append(float(scaler._scale))
        for micro in range(way.n_micro):
            spoils = step == SPOILT and rank == nranks - 1
            scaled = scaler.scale(_loss(model, way.n_micro * step + micro, rank, spoils=spoils))
            scaled.backward()
        if way.looks:
            run.norms.append(optimizer.grad_norm() / run.scales[-1])
            parts = [paddle.isfinite(part.gradient).all() for part in optimizer.local_grads()]
            run.finite.append(bool(paddle.stack(parts).all()))
        way.step(scaler, optimizer, scaled)
        optimizer.clear_grad()
        with full_parameters(model):
            run.params.append(values(model))
    return run


def _plain(nranks: int, way: Way) -> Run:
    """The same in one process without a scaler: every rank in turn, and no step where there should be none."""
    paddle.seed(3)
    model = _Net()
    optimizer, ranks = _make_inner(way, model), Ranks(model, nranks)
    run = Run([], SCALES, [], [])
    for step in range(STEPS):
        for micro in range(way.n_micro):
            ranks.backward(functools.partial(_loss, model, way.n_micro * step + micro))
        run.norms.append(sum(float(param.grad.square().sum()) for param in model.parameters()) ** 0.5)
        if way.clips == "by hand":
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if step != SPOILT:
            optimizer.step()
        optimizer.clear_grad()
        run.params.append(values(model))
    return run


@dataclasses.dataclass(repr=False)  # pytest would print all of it with each failure
class Found:
    """By way and settings.

    Attributes:
        plain: by way, of one process.
        runs: of each rank, by way and by settings.
        overflows: of each rank, by settings.
    """

    plain: dict[str, Run]
    runs: list[dict[tuple[str, str], Run]]
    overflows: list[dict[str, Overflow]]


def _every_way(rank: int, nranks: int, n_replicas: int) -> Any:
    if n_replicas > 1:
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": n_replicas, "sharding_degree": nranks // n_replicas}
        fleet.init(is_collective=True, strategy=strategy)
    else:
        fleet.init(is_collective=True)
    with unique_name.guard():
        plain = {name: _plain(nranks, way) for name, way in WAYS.items()}
    runs = {
        (name, stage): _scaled(rank, nranks, n_replicas, way, settings)
        for name, way in WAYS.items()
        for stage, settings in STAGES.items()
    }
    overflows = {stage: _overflows(rank, nranks, n_replicas, settings) for stage, settings in STAGES.items()}
    gc.collect()
    assert standin.Device().writes_after_free() == 0
    return plain, runs, overflows


class Overflow(NamedTuple):
    """A run of a decorated model in float16 whose scale is too large at first.

    Attributes:
        scales: in every step.
        losses: without the scale.
        same: for every step whether parameters and masters are as before, to the bit.
        params: at the end, in float32.
    """

    scales: list[float]
    losses: list[float]
    same: list[bool]
    params: Values


def _overflows(rank: int, nranks: int, n_replicas: int, settings: dict[str, Any]) -> Overflow:
    side = Sharded(
        lambda: make_model(SCALED.model),
        SCALED.make_optimizer,
        rank=rank,
        nranks=nranks,
        settings={**settings, "comm_buffer_size_MB": 0.01, "n_replicas": n_replicas},
    )
    scaler = make_scaler(init_loss_scaling=2.0**30, decr_ratio=2.0**-4)
    run = Overflow([], [], [], {})
    before = state = _bits(side)
    for step in range(STEPS + 3):
        run.scales.append(float(scaler._scale))
        loss = SCALED.loss(side.model, SCALED.batch(step % 2, rank))
        run.losses.append(float(loss))
        scaler.scale(loss).backward()
        _steps(scaler, side.optimizer, loss)
        side.clear_grad()
        before, state = state, _bits(side)
        run.same.append(state == before)
    with full_parameters(side.model):
        run.params.update({name: param.astype("float32").numpy() for name, param in side.model.named_parameters()})
    return run


def _bits(side: Sharded) -> tuple[str, list[bytes]]:
    with full_parameters(side.model):
        return digest(side.model), [buffer.shard.numpy().tobytes() for buffer in side.optimizer.buffers]


@pytest.fixture(scope="module", params=[(2, 1), (4, 2)], ids=["two ranks", "two by two"])
def found(request: pytest.FixtureRequest, standin_device: None) -> Found:
    nranks, n_replicas = request.param
    results = on_device(_every_way, nranks, n_replicas, pace=_PACE, timeout_s=_LIMIT_S)
    return Found(results[0][0], [runs for _, runs, _ in results], [overflows for _, _, overflows in results])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", WAYS)
def test_all_ranks_skip_the_step_in_which_one_batch_is_spoilt_and_train_on(found: Found, name: str, stage: str) -> None:
    """As one process does that knows which step to leave out: on two ranks bit for bit."""
    expected = found.plain[name]
    for rank, runs in enumerate(found.runs):
        run = runs[name, stage]
        assert run.scales == SCALES, f"rank {rank}"
        assert_equal(run.params[SPOILT], run.params[SPOILT - 1], f"rank {rank}, the step to skip:")
        for step, params in enumerate(run.params):
            assert_equal(params, found.runs[0][name, stage].params[step], f"rank {rank}, step {step}:")
            _assert_same(params, expected.params[step], _tolerance(found, WAYS[name]), f"rank {rank}, step {step}:")


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_not_finite_is_in_one_shard_only(found: Found, stage: str) -> None:
    """So the others can only know from those that hold it. Norms are those of what the scale was multiplied with."""
    runs = [runs["looked at", stage] for runs in found.runs]
    for step, norm in enumerate(found.plain["looked at"].norms):
        finite = [run.finite[step] for run in runs]
        if step == SPOILT:
            assert finite == [False, True] * (len(runs) // 2)
            assert not any(np.isfinite(run.norms[step]) for run in runs)
        else:
            assert all(finite)
            np.testing.assert_allclose([run.norms[step] for run in runs], norm, rtol=1e-5)


def test_clipping_bites(found: Found) -> None:
    assert min(found.plain["clipped by hand"].norms) > 2 * MAX_NORM


@pytest.mark.parametrize("stage", STAGES)
def test_a_scale_that_is_too_large_for_float16_shrinks_alike_on_all_ranks(found: Found, stage: str) -> None:
    """Nothing is spoilt by hand here: gradients overflow, of a decorated model with master weights."""
    first = found.overflows[0][stage]
    shrinks = [later < earlier for earlier, later in zip(first.scales, first.scales[1:], strict=False)]
    assert first.scales[0] == 2.0**30
    assert shrinks[0]
    assert not any(shrinks[-4:]), "there is no step to train in"
    for run in (overflows[stage] for overflows in found.overflows):
        assert run.scales == first.scales
        assert run.same[:-1] == shrinks
        assert_equal(run.params, first.params)
        assert run.losses[-1] < run.losses[1] and run.losses[-2] < run.losses[0]


def _tolerance(found: Found, way: Way) -> float:
    """0: bit for bit. Norms, and sums of four ranks or several backwards, are formed in another order elsewhere."""
    if len(found.runs) == 2 and way.clips is None and way.n_micro == 1:
        return 0.0
    return 1e-4 if way.optimizer == "AdamW" else 2e-6


def _assert_same(params: Values, expected: Values, tolerance: float, what: str) -> None:
    if tolerance:
        assert_close(params, expected, tolerance, what)
    else:
        assert_equal(params, expected, what)
