"""What the package waits for and keeps alive on a device, wait by wait: for each one somebody must notice its absence.

``tests/mutation/streams.py`` takes them out one at a time and runs the tests here that it names, alone. So all that was
asked for is played in one start of the ranks, with collectives that are late and outputs that are NaN until then.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding import full_parameters
from hp_sharding.buffer import FusedCommBuffer, Status
from hp_sharding.comm import Communicator, Stall, close_all, create_communicators, stream_group
from hp_sharding.errors import CommError, HpShardingError
from tests.device import late_state, standin
from tests.device.gates import DeviceGate
from tests.device.running import on_device, start
from tests.dist import test_accumulation, test_branches, test_clip, test_params, test_replicas
from tests.lanes import Wrapped, wrap
from tests.models import loss_of, loss_on, make_batch, make_model, make_optimizer
from tests.reference import Values
from tests.sides import BOTH, SETTINGS, Factory, Settings, compare
from tests.unit.test_comm_contract import SEEN_S

pytestmark = pytest.mark.usefixtures("standin_device")

_LATE = standin.Pace(latency_ms=8.0, jitter_ms=2.0)
_ORDER = 2e-6
"""Sums of several backwards, and over replicas, are formed in another order than by one process."""
_REST_S = 0.1
_NUMEL = 1000
_LIMIT_S = 75.0


class Play(NamedTuple):
    """A rank function that asserts what it is about, and on how many ranks it is called with what arguments."""

    nranks: int
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


# ---- numbers of a training ----


def _trained(new: Factory, name: str) -> dict[str, Values]:
    side = new(lambda: make_model(name), lambda model: make_optimizer("SGD", model))
    for step in range(3):
        side.backward(loss_on(side.model, name, step))
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def _thrown_away(new: Factory) -> dict[str, Values]:
    """Gradients forgotten while they are on the way; then a step with none, and one with new ones."""
    side = new(lambda: make_model("mlp"), lambda model: make_optimizer("SGD", model))
    snapshots = {}
    for number in range(0, 4, 2):
        side.backward(loss_on(side.model, "mlp", number))
        side.clear_grad()
        side.step()
        side.backward(loss_on(side.model, "mlp", number + 1))
        side.step()
        side.clear_grad()
        snapshots[f"after {number}"] = side.values()
    return snapshots


def _stepped_twice(new: Factory) -> dict[str, Values]:
    """A step right behind another one, whose gathers are on the way."""
    side = new(lambda: make_model("mlp"), lambda model: make_optimizer("Momentum", model))
    for step in range(2):
        side.backward(loss_on(side.model, "mlp", step))
        side.step()
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def _wrong_guesses(new: Factory) -> dict[str, Values]:
    """Layers that stage 3 has gathered ahead and nobody uses then."""
    side = new(lambda: make_model("branching_alike"), lambda model: make_optimizer("SGD", model))
    for step in range(6):
        side.backward(loss_on(side.model, "branching_alike", step))
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def _replicated_at_the_step(new: Factory) -> dict[str, Values]:
    """Sums that the shard groups have formed go over the replicas in the step, as nothing else does."""
    side = new(lambda: make_model("mlp"), lambda model: make_optimizer("SGD", model))
    for step in range(2):
        with side.optimizer.no_sync(replicate_only=True) if side.sharded else contextlib.nullcontext():
            side.backward(loss_on(side.model, "mlp", step))
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def _like_plain(scenario: Callable[..., Any], settings: Settings, name: str, *args: Any, nranks: int = 2) -> Play:
    return Play(nranks, compare, (scenario, {name: settings[name]}, _ORDER, *args))


def _wrap(nranks: int, **settings: Any) -> Wrapped:
    model = make_model("mlp")
    return wrap(model, make_optimizer("SGD", model), nranks, **settings)


def _step(wrapped: Wrapped, rank: int, number: int = 0) -> None:
    loss_of(wrapped.model, make_batch("mlp", number, rank)).backward()
    wrapped.optimizer.step()
    wrapped.optimizer.clear_grad()


def _assert_there(params: Sequence[paddle.Tensor]) -> None:
    """By functions that no guard sees: they fail where storage is away, and find NaN where it is not written yet.

    ``params`` are from before: whoever looks them up waits for them.
    """
    for param in params:
        assert np.isfinite(float(paddle.sum(param))), param.name


def _full_parameters(rank: int, nranks: int, settings: dict[str, Any]) -> None:
    wrapped = _wrap(nranks, **settings)
    params = wrapped.model.parameters()
    _step(wrapped, rank)
    with full_parameters(wrapped.model):
        _assert_there(params)


def _without_overlap(rank: int, nranks: int) -> None:
    wrapped = _wrap(nranks, **SETTINGS["no overlap"])
    params = wrapped.model.parameters()
    _step(wrapped, rank)
    _assert_there(params)


class _Half(nn.Layer):
    """Uses one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(16, 16) for _ in range(2)])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.layers[0](x)


def _freed(rank: int, nranks: int) -> None:
    """What no forward has used is gathered in the step, since another rank may wait for that, and freed at once."""
    model = _Half()
    wrapped = wrap(model, make_optimizer("SGD", model), nranks, **{**SETTINGS["reshard"], "comm_fusion": False})
    for _ in range(2):
        model(paddle.ones([1, 16])).mean().backward()
        wrapped.optimizer.step()
        wrapped.optimizer.clear_grad()
    assert [buffer.name for buffer in wrapped.optimizer.buffers if buffer.full is not None] == []


class _Looking(nn.Layer):
    """Notes in its forward, before it looks anything up, what its buckets are like; one of them it never looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(16, 16), nn.Linear(16, 16)
        self.buffers_of_it: list[FusedCommBuffer] = []
        self.seen: list[list[Status]] = []

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.seen.append([buffer.status for buffer in self.buffers_of_it])
        return self.linear(x)


def _entered(rank: int, nranks: int) -> None:
    """Where gathers run only so far ahead, a unit is there as a whole when its forward begins, used or not."""
    model = nn.LayerList([_Looking() for _ in range(2)])
    settings = {**SETTINGS["reshard"], "comm_fusion": False}
    wrapped = wrap(nn.Sequential(*model), make_optimizer("SGD", model), nranks, **settings)
    for number, layer in enumerate(model):
        places = wrapped.optimizer.param2bucket.items()
        layer.buffers_of_it = [buffer for name, found in places if name.startswith(f"{number}.") for buffer in found]
    for _ in range(2):
        wrapped.model(paddle.ones([1, 16])).mean().backward()
        wrapped.optimizer.step()
        wrapped.optimizer.clear_grad()
    for layer in model:
        assert layer.seen[1] == [Status.READY] * 4


def _finished_alone(rank: int, nranks: int) -> None:
    """``finish_gather()`` of a bucket by itself, as its own documentation promises."""
    wrapped = _wrap(nranks, **SETTINGS["stage 2"])
    _step(wrapped, rank)
    for buffer in wrapped.optimizer.buffers:
        buffer.finish_gather()
        assert buffer.full is not None
        assert np.isfinite(buffer.full.numpy()).all(), buffer.name


def _timed(rank: int, nranks: int) -> None:
    """Every kind of wait that holds compute up is in the timeline."""
    model = make_model("mlp")
    inner = make_optimizer("SGD", model, grad_clip=nn.ClipGradByGlobalNorm(1.0))
    wrapped = wrap(model, inner, nranks, **{**SETTINGS["stage 2"], "timeline": True})
    for number in range(4):
        _step(wrapped, rank, number)
    waits = [span.label for span in wrapped.optimizer.timeline.spans if span.lane == "wait"]
    names = {buffer.name for buffer in wrapped.optimizer.buffers}
    assert "gradient norm" in waits
    assert names.intersection(waits), f"no wait for a gather: {waits}"
    assert any(", backward " in label for label in waits), f"no wait for a reduction: {waits}"
    with full_parameters(wrapped.model):
        _assert_there(wrapped.model.parameters())


def _step_inside(rank: int, nranks: int, settings: dict[str, Any]) -> None:
    wrapped = _wrap(nranks, **settings)
    params = wrapped.model.parameters()
    loss_of(wrapped.model, make_batch("mlp", 0, rank)).backward()
    with full_parameters(wrapped.model):
        wrapped.optimizer.step()
        _assert_there(params)


def _read_by_hand(rank: int, nranks: int) -> None:
    wrapped = _wrap(nranks, **SETTINGS["stage 2"])
    params = wrapped.model.parameters()
    _step(wrapped, rank)
    for param in reversed(params):
        found = param.numpy()
        assert found.size == param.size and np.isfinite(found).all(), f"{param.name}: {found}"


def _used_by_hand(rank: int, nranks: int) -> None:
    """A function of a weight that is looked up and of a bias that the script has had since before the step."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    wrapped = wrap(model, make_optimizer("SGD", model), nranks, **{**SETTINGS["stage 2"], "comm_fusion": False})
    biases = [layer.bias for layer in model]
    for _ in range(2):
        model(paddle.full([1, 16], rank + 1.0)).mean().backward()
        wrapped.optimizer.step()
        wrapped.optimizer.clear_grad()
        for layer, bias in zip(model, biases, strict=True):
            found = nn.functional.linear(paddle.zeros([1, 16]), layer.weight, bias).numpy()
            np.testing.assert_array_equal(found[0], bias.numpy())


_WIDTH, _LAYERS = 256, 6


def _two_gradients(rank: int, nranks: int) -> None:
    """In stage 2 a third full gradient is not taken before one of two is reduced, however slow the link."""
    device = standin.Device()
    model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH, bias_attr=False) for _ in range(_LAYERS)])
    inner = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    bucket_bytes = 4 * _WIDTH * _WIDTH
    settings = {"stage": 2, **BOTH, "comm_buffer_size_MB": bucket_bytes / 2**20}
    model, optimizer, _ = wrap(model, inner, nranks, **settings)
    assert len(optimizer.buffers) == _LAYERS
    device.set_pace(standin.Pace(latency_ms=50.0, slowed=("reduce_scatter",)))
    peaks = []
    for _ in range(2):
        loss = model(paddle.ones([1, _WIDTH])).mean()
        before = device.live_bytes()
        device.forget_peak()
        loss.backward()
        peaks.append((device.peak_bytes() - before) / bucket_bytes)
        optimizer.step()
        optimizer.clear_grad()
    # Two of ours, and one that autograd has made and not handed over yet.
    assert max(peaks) < 3.5, peaks


# ---- streams and memory of a lane ----


def _lanes(nranks: int) -> dict[str, Communicator]:
    stream_group._DESTRUCTORS_S = 1
    return create_communicators(range(nranks), ["one", "two"], timeout_s=20)


def _standing_still(rank: int, nranks: int) -> None:
    """Started on a stream that stands still, and let go of: the host waits for no event whose object goes."""
    device, lanes = standin.Device(), _lanes(nranks)
    data, held = paddle.full([_NUMEL], rank + 1.0), device.held_stream()
    before = device.host_waits().blocked
    with paddle.device.stream_guard(held.stream):
        lanes["one"].all_reduce(data)
        after = lanes["two"].all_reduce(paddle.ones([_NUMEL]), after=lanes["one"].all_reduce(paddle.ones([_NUMEL])))
    assert device.host_waits().blocked == before
    assert not after.done()
    held.open()
    after.wait()
    lanes["one"].all_reduce(paddle.ones([1])).wait()
    np.testing.assert_array_equal(data.numpy(), np.full(_NUMEL, 3.0))


def _stalls(rank: int, nranks: int) -> None:
    """A stall begins when its stream has come so far and ends when it can go on; the watcher alone sees both."""
    device, lanes, stalls = standin.Device(), _lanes(nranks), list[Stall]()
    held, data = device.held_stream(), paddle.ones([_NUMEL])
    device.set_pace(standin.Pace(latency_ms=4e3 * _REST_S))
    with paddle.device.stream_guard(held.stream):
        lanes["one"].all_reduce(data).timed_wait(stalls)
    time.sleep(_REST_S)
    assert (stalls[0].start_s, stalls[0].end_s) == (None, None)
    opened_s = time.perf_counter()
    held.open()
    while stalls[0].end_s is None and time.perf_counter() - opened_s < SEEN_S:
        time.sleep(0.001)
    assert stalls[0].start_s is not None and stalls[0].start_s >= opened_s
    assert stalls[0].end_s is not None and stalls[0].end_s - stalls[0].start_s > _REST_S


def _dropped(rank: int, nranks: int) -> None:
    """One rank lets go of a tensor and the others do not: where all do, what is sent looks like freed memory."""
    comm = _lanes(nranks)["one"]
    for op in (comm.all_reduce, functools.partial(comm.broadcast, src=1)):
        for dropping in range(nranks):
            data = paddle.full([_NUMEL], rank + 1.0)
            work, kept = op(data), None if rank == dropping else data
            del data
            work.wait()
            if kept is not None:
                np.testing.assert_array_equal(kept.numpy(), np.full(_NUMEL, 3.0 if op == comm.all_reduce else 2.0))


class _FailsMidway:
    """Paddle's group, whose reduce-scatter says that it has failed once it is queued."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def reduce_scatter_tensor_on_calc_stream(self, *args: Any) -> None:
        self._group.reduce_scatter_tensor_on_calc_stream(*args)
        raise RuntimeError("a part of it was queued")


def _raised_midway(rank: int, nranks: int) -> None:
    device, lanes = standin.Device(), _lanes(nranks)
    comm: Any = lanes["one"]
    group, comm._group = comm._group, _FailsMidway(comm._group)
    device.set_pace(standin.Pace(latency_ms=4e3 * _REST_S))
    with pytest.raises(CommError, match="a part of it was queued"):
        comm.reduce_scatter(paddle.zeros([_NUMEL]), paddle.ones([nranks * _NUMEL]))
    comm._group = group
    gc.collect()  # the traceback has the tensors
    assert not comm._last.done()
    comm.all_reduce(paddle.ones([4])).wait()
    assert device.writes_after_free() == 0


# ---- how they are played ----

PLAYS: dict[str, Play] = {
    **{name: _like_plain(_trained, SETTINGS, name, "mlp") for name in ("stage 2", "stage 3")},
    "normed": Play(2, late_state.late_statistics),
    "clips": _like_plain(test_clip._clipped, SETTINGS, "stage 2", "mlp", "SGD", "global norm", 2, ""),
    "full grad": _like_plain(test_accumulation._with_full_grad, SETTINGS, "stage 2"),
    "cleared by hand": _like_plain(test_accumulation._cleared_elsewhere, SETTINGS, "stage 2", "each"),
    "thrown away": _like_plain(_thrown_away, SETTINGS, "stage 2"),
    "stepped twice": _like_plain(_stepped_twice, SETTINGS, "stage 2"),
    "wrong guesses": _like_plain(_wrong_guesses, SETTINGS, "stage 3"),
    "branches": _like_plain(test_branches._branches, SETTINGS, "stage 2", "another order on each rank", 5),
    "replicas": _like_plain(_trained, test_replicas.SETTINGS, "stage 2", "mlp", nranks=4),
    "replicas add up": _like_plain(
        test_accumulation._varying_counts, test_replicas.SETTINGS, "stage 2", "mlp", "SGD", False, nranks=4
    ),
    "replicas at the step": _like_plain(_replicated_at_the_step, test_replicas.SETTINGS, "stage 2", nranks=4),
    "replicas branch": _like_plain(
        test_branches._branches, test_replicas.SETTINGS, "stage 2", "another order on each rank", 5, nranks=4
    ),
    "recurrent": _like_plain(test_params._train_module, SETTINGS, "stage 2", "recurrent"),
    "begun alike": Play(2, late_state.begun_alike),
    "full parameters": Play(2, _full_parameters, (SETTINGS["stage 2"],)),
    "full parameters, stage 3": Play(2, _full_parameters, (SETTINGS["stage 3"],)),
    "step inside": Play(2, _step_inside, (SETTINGS["stage 2"],)),
    "step inside, stage 3": Play(2, _step_inside, (SETTINGS["stage 3"],)),
    "read by hand": Play(2, _read_by_hand),
    "written at once": Play(2, late_state.written_at_once),
    "loaded at once": Play(2, late_state.loaded_at_once),
    "used by hand": Play(2, _used_by_hand),
    "without overlap": Play(2, _without_overlap),
    "freed": Play(2, _freed),
    "entered": Play(2, _entered),
    "finished alone": Play(2, _finished_alone),
    "timed": Play(2, _timed),
    "two gradients": Play(2, _two_gradients),
    "standing still": Play(2, _standing_still),
    "dropped": Play(2, _dropped),
    "stalls": Play(2, _stalls),
    "raised midway": Play(2, _raised_midway),
}


@pytest.fixture(scope="module")
def found(standin_device: None, request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """For each play that this run of the tests asks for, what was wrong with it, rank by rank."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asked = [item for item in items if item.originalname == _PLAYED and item.path == request.path]
    names = {str(item.callspec.params["name"]) for item in asked}
    wrong: dict[str, list[str]] = {name: [] for name in names}
    for nranks in sorted({PLAYS[name].nranks for name in names}):
        chosen = [name for name in PLAYS if name in names and PLAYS[name].nranks == nranks]
        for rank, of_rank in enumerate(on_device(_play, nranks, chosen, timeout_s=_LIMIT_S)):
            for name, why in of_rank.items():
                wrong[name].append(f"rank {rank}:\n{why}")
    return wrong


def _play(rank: int, nranks: int, names: list[str]) -> dict[str, str]:
    """Tracebacks of those that have raised."""
    device, wrong = standin.Device(), {}
    for name in names:
        device.set_pace(_LATE)
        try:
            PLAYS[name].function(rank, nranks, *PLAYS[name].args)
        except (AssertionError, HpShardingError):
            wrong[name] = traceback.format_exc()
        writes = device.writes_after_free()
        if writes:
            wrong.setdefault(name, f"{writes} freed blocks were written to")
    return wrong


@pytest.mark.parametrize("name", PLAYS)
def test_what_is_waited_for_and_kept(found: dict[str, list[str]], name: str) -> None:
    if found[name]:
        pytest.fail("\n".join(found[name]), pytrace=False)


_PLAYED = test_what_is_waited_for_and_kept.__name__


# ---- the end ----


def _close_all(rank: int, nranks: int) -> bool:
    comm = _lanes(nranks)["one"]
    # Longer than the watcher takes to end, which looks now and then.
    standin.Device().set_pace(standin.Pace(latency_ms=8e3 * _REST_S))
    work = comm.all_reduce(paddle.ones([_NUMEL]))
    close_all()
    # The lane is still there: where it goes its stream goes, and Paddle waits for what is on that.
    return work.done() and comm.nranks == nranks


def test_all_lanes_are_closed_when_what_is_under_way_on_them_has_ended() -> None:
    assert on_device(_close_all, 2, timeout_s=_LIMIT_S) == [True, True]


# ---- after a failure ----


def _fail_under_way(rank: int, nranks: int) -> tuple[int, int]:
    """A lane fails while another one holds a collective back, of which nobody has anything any more."""
    device, lanes, gate = standin.Device(), _lanes(nranks), DeviceGate()
    one: Any = lanes["one"]
    one.all_reduce(paddle.ones([_NUMEL]), after=gate)
    one.all_reduce(paddle.ones([_NUMEL]))  # a lane always has its last one
    lanes["two"].all_reduce(paddle.ones([4]), after=DeviceGate(CommError("it broke", op="all_gather", rank=5)))
    finished = device.collectives()["all_reduce"].finished
    one._works.look()  # as another thread may at that moment: it lets go of what has failed
    gc.collect()
    gate.open()
    deadline_s = time.monotonic() + SEEN_S
    while device.collectives()["all_reduce"].finished < finished + 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return device.collectives()["all_reduce"].finished - finished, device.writes_after_free()


def test_a_collective_that_has_failed_keeps_its_memory() -> None:
    """The device may be at it still."""
    for outcome in start(_fail_under_way, 2, timeout_s=_LIMIT_S):
        assert outcome.error is None, outcome.error
        assert outcome.result == (2, 0), outcome.output
