"""What the doctor measures, on lanes and a device whose times are made up here: none of it may be off by a wait."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from hp_sharding.comm import Communicator
from hp_sharding.doctor import asynchrony, bandwidth, foreign, overlap, parity, ranks
from hp_sharding.doctor.examination import Check, Examination
from hp_sharding.doctor.parity import Split
from hp_sharding.doctor.ranks import Team
from hp_sharding.doctor.report import Request
from hp_sharding.errors import CommError, ConfigError

MB = 1 << 20


class _World:
    """A host, a stream that computes what the host gives it, and lanes; times in seconds.

    The host goes on at once, whatever it starts. A wait for a collective holds up the stream, as on a device.
    """

    def __init__(self) -> None:
        self.now_s = self.stream_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds

    def compute(self, ms: float) -> None:
        self.stream_s = max(self.stream_s, self.now_s) + ms / 1e3

    def settle(self) -> None:
        self.now_s = max(self.now_s, self.stream_s)


class _Sent:
    def __init__(self, world: _World, end_s: float) -> None:
        self._world, self.end_s = world, end_s

    def wait(self) -> None:
        self._world.stream_s = max(self._world.stream_s, self.end_s)

    def done(self) -> bool:
        return self._world.now_s >= self.end_s


class _Lane:
    """Carries one message after the other, each in a time that its elements say; the first takes a second more."""

    def __init__(self, world: _World, nranks: int, rank: int, ms_of: Callable[[int], float]) -> None:
        self.nranks, self.rank = nranks, rank
        self.numels: list[tuple[int, int]] = []
        self._world, self._ms_of, self._free_s = world, ms_of, 0.0
        self._first_s = 1.0

    def all_gather(self, full: paddle.Tensor, own: paddle.Tensor, *, label: str) -> _Sent:
        return self._send(full, own)

    def reduce_scatter(self, part: paddle.Tensor, full: paddle.Tensor, *, label: str) -> _Sent:
        return self._send(full, part)

    def all_reduce(self, full: paddle.Tensor, *, label: str) -> _Sent:
        return self._send(full, full)

    def _send(self, full: paddle.Tensor, part: paddle.Tensor) -> _Sent:
        self.numels.append((full.size, part.size))
        begin_s = max(self._world.now_s, self._world.stream_s, self._free_s) + self._first_s
        self._first_s = 0.0
        self._free_s = begin_s + self._ms_of(full.size) / 1e3
        return _Sent(self._world, self._free_s)


class _Team(Team):
    """Rank 1 of four, in that world."""

    def __init__(self, world: _World, ms_of: dict[str, Callable[[int], float]] | None = None) -> None:
        super().__init__(timeout_s=10.0)
        self.me, self.ranks = 1, (0, 1, 2, 3)
        self.world = world
        self.lanes: dict[str, _Lane] = {}
        self._ms_of = ms_of or {}

    def open(self, *lanes: str, ranks: Sequence[int] | None = None) -> list[Communicator]:
        """See ``Team``."""
        members = ranks or self.ranks
        for lane in lanes:
            self.lanes[lane] = _Lane(self.world, len(members), list(members).index(self.me), self._ms_of[lane])
        return [self.lanes[lane] for lane in lanes]  # type: ignore[misc]

    def line_up(self) -> None:
        """See ``Team``; it does not wait for lanes."""
        self.world.settle()

    def settle(self) -> None:
        """See ``Team``."""
        self.world.settle()

    def agree(self, value: float) -> float:
        """See ``Team``."""
        return value


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> _World:
    made = _World()
    monkeypatch.setattr(time, "perf_counter", made.perf_counter)
    monkeypatch.setattr(time, "sleep", made.pass_s)
    return made


def _request(max_mb: float) -> Request:
    return Request(True, (), max_mb, 10.0, False, None, None)


# -- collectives beside compute ----------------------------------------------------------------------------------------


def _asynchrony(world: _World, monkeypatch: pytest.MonkeyPatch) -> tuple[_Team, list[dict[str, Any]]]:
    """Of messages of 40 ms a MB, but all reduce to 100, 130 and 160 ms; and of products of 30 ms."""
    ms_of: dict[str, Callable[[int], float]] = {
        "gather": lambda numel: numel * 4 / MB * 40,
        "reduce": lambda _: 130.0,
        "replicate": lambda _: 160.0,
    }
    monkeypatch.setattr(paddle, "matmul", lambda *_: world.compute(30.0))
    team = _Team(world, ms_of)
    return team, asynchrony.measure(team, _request(8.0))


def test_a_message_is_as_large_as_takes_a_tenth_of_a_second(world: _World, monkeypatch: pytest.MonkeyPatch) -> None:
    team, rows = _asynchrony(world, monkeypatch)
    probe, whole = MB // 4, 5 * MB // 8  # elements of 1 and of 2.5 MB
    assert team.lanes["gather"].numels[:2] == [(probe, probe // 4)] * 2
    (found,) = set(team.lanes["gather"].numels[2:])
    assert found[0] == 4 * found[1] == pytest.approx(whole, abs=4)
    assert set(team.lanes["reduce"].numels) == {found}
    assert [row["mb"] for row in rows] == pytest.approx([2.5] * 3, abs=1e-4)


def test_times_of_collectives_beside_compute(world: _World, monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = _asynchrony(world, monkeypatch)
    assert [row["op"] for row in rows] == ["all_gather", "reduce_scatter", "all_reduce"]
    for row, sent_ms, compute_ms in zip(rows, (100, 130, 160), (90, 120, 150), strict=True):
        expected = {
            "launch_ms": 0, "done_ms": sent_ms, "compute_ms": compute_ms, "beside_ms": compute_ms, "both_ms": sent_ms,
            "under_load_ms": compute_ms, "transfer_ms": sent_ms, "transfer_beside_ms": sent_ms,
        }  # fmt: skip
        for name, ms in expected.items():
            assert row[name] == pytest.approx([ms] * 3, abs=0.5), (row["op"], name)
        n_products = compute_ms / 30
        assert row["flops_s"] == pytest.approx(2 * 256 * 512 * 512 * n_products / compute_ms * 1e3)


def test_a_collective_that_failed_beside_compute_is_no_figure(world: _World) -> None:
    class Failed(_Sent):
        def wait(self) -> None:
            raise CommError("rank 3 is gone")

    with pytest.raises(CommError, match="rank 3 is gone"):
        asynchrony._beside_compute(_Team(world), lambda: Failed(world, 0.0), lambda *_: None)  # type: ignore[arg-type, return-value]


# -- bandwidth ---------------------------------------------------------------------------------------------------------


def test_times_of_messages_of_all_sizes(world: _World) -> None:
    def ms_of(numel: int) -> float:
        return 10 + numel * 4 / MB * 20

    team = _Team(world, {"gather": ms_of, "replicate": ms_of})
    rows = bandwidth.measure(team, _request(1.0))
    sizes = [4096, 32768, 262144, MB]
    assert [(row["op"], row["nbytes"]) for row in rows] == [
        *((op, nbytes) for nbytes in sizes for op in bandwidth.OPS),
        *(("all_reduce", nbytes) for nbytes in sizes),
    ]
    for row in rows:
        once_ms = ms_of(row["nbytes"] // 4)
        # As many as a budget of 100 ms allows, three at least.
        assert row["ms"] == pytest.approx([once_ms] * max(3, int(100 / once_ms + 1e-6)))
    assert {part * 4 for full, part in team.lanes["gather"].numels if part != full} == {n // 4 for n in sizes}


# -- a step ------------------------------------------------------------------------------------------------------------


def test_a_step_is_timed_alone(world: _World, monkeypatch: pytest.MonkeyPatch) -> None:
    trainee = overlap._Trainee(_Team(world), overlap.Shape(16, 2), 1, None)
    monkeypatch.setattr(trainee, "_step", lambda: world.compute(10.0))
    assert trainee.take_turn(3) == pytest.approx(10.0)


@pytest.mark.parametrize(("n_replicas", "n_updated"), [(1, 3), (2, 6)])
def test_without_communication_a_rank_updates_its_part_and_keeps_no_gradient(n_replicas: int, n_updated: int) -> None:
    trainee = overlap._Trainee(_Team(_World()), overlap.Shape(16, 2), n_replicas, None)
    params = trainee._net.parameters()
    assert [param.name for param in trainee.optimizer._parameter_list] == [p.name for p in params[:n_updated]]
    seen: list[int] = []
    step = trainee.optimizer.step

    def look() -> None:
        seen.append(sum(param.grad is not None for param in params))
        step()

    trainee.optimizer.step = look
    trainee._step()
    assert seen == [n_updated], "the others are dropped as they come"
    assert [param.grad for param in params] == [None] * 12


def test_what_a_layer_puts_out_is_as_large_as_what_comes_in() -> None:
    first, *_ = overlap._make_net(64).parameters()
    assert np.std(first.numpy()) * 8 == pytest.approx(1, abs=0.05)


class _Timed:
    """A trainee whose steps take as long as it is told."""

    def __init__(self, world: _World, step_s: float) -> None:
        self._world, self._step_s = world, step_s

    def take_turn(self, steps: int) -> float:
        self._world.pass_s((steps + 1) * self._step_s)
        return self._step_s * 1e3


def test_as_many_rounds_as_there_is_time_for(world: _World) -> None:
    trainees = {"compute 1": _Timed(world, 0.1), "serial 1": _Timed(world, 0.2)}
    # A round of four steps each takes 1.2 s, of the five that there are.
    found = overlap._take_turns(_Team(world), trainees, _request(8.0))  # type: ignore[arg-type]
    assert found == {"compute 1": [100.0] * 4, "serial 1": [200.0] * 4}


def test_the_model_is_as_large_as_the_link_carries_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert overlap._width_of(48.0) == 1024, "12 layers of 4 MB"
    probed: list[int] = []

    def communication_ms(_: Team, width: int) -> float:
        probed.append(width)
        return 10.0

    monkeypatch.setattr(overlap, "_communication_ms", communication_ms)
    # 8 MB in 10 ms are 32 MB in the 40 ms that are wanted: twice the width.
    assert overlap._fitting_width(_Team(_World()), _request(64.0)) == 2 * probed[0] == 832


def test_communication_of_a_step_is_all_its_collectives_in_a_row(world: _World) -> None:
    team = _Team(world, {"gather": lambda _: 3.0, "reduce": lambda _: 2.0})
    assert overlap._communication_ms(team, 10) == pytest.approx(12 * (3.0 + 2.0))
    assert set(team.lanes["gather"].numels) == set(team.lanes["reduce"].numels) == {(100, 25)}


def test_the_batch_is_between_those_that_were_too_short_and_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    class Paced:
        def __init__(self, *_: Any) -> None:
            self.rows = 0

        def use_batch(self, shape: overlap.Shape) -> None:
            self.rows = shape.batch_rows

        def take_turn(self, _: int) -> float:
            return float(self.rows)

    monkeypatch.setattr(overlap, "_Trainee", Paced)
    assert overlap._fitting_rows(_Team(_World()), 16, 100.0) == 100


def test_models_are_gone_before_lanes_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Counted:
        def __init__(self, *_: Any) -> None:
            alive.add(self)

        def take_turn(self, _: int) -> float:
            return 1.0

    found: list[int] = []
    monkeypatch.setattr(overlap, "_Trainee", Counted)
    monkeypatch.setattr(overlap, "_fitting_width", lambda *_: 16)
    monkeypatch.setattr(overlap, "_communication_ms", lambda *_: 1.0)
    monkeypatch.setattr(overlap, "_fitting_rows", lambda *_: 8)
    monkeypatch.setattr(overlap, "_lanes", lambda *_: found.append(len(alive)))
    overlap.measure(_Team(_World()), _request(8.0))
    assert found == [0, 0]


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_the_reference_is_one_process_with_the_batches_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "STEPS", 3)
    team = _Team(_World())
    found = parity._train_reference(team, "SGD")
    net = parity._make_net()
    optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    losses = []
    for step in range(3):
        of_ranks = [parity._loss(net, step, rank) for rank in range(4)]
        losses.append(float(of_ranks[1]))
        (sum(of_ranks) / 4).backward()
        optimizer.step()
        optimizer.clear_grad()
    expected = parity._values(net, losses)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6)


def test_one_rank_trains_as_the_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "STEPS", 3)
    team = Team(timeout_s=10.0)
    found, expected = parity._train_sharded(team, Split(2, 1), "SGD"), parity._train_reference(team, "SGD")
    assert parity._is_same(found, expected)


def test_a_difference_is_relative_to_the_largest_value_of_a_parameter() -> None:
    found = {"w": np.array([4.0, -7.0]), "b": np.array([0.02])}
    expected = {"w": np.array([4.0, -8.0]), "b": np.array([0.01])}
    assert parity._difference(found, expected) == pytest.approx(1 / 8)


# -- together ----------------------------------------------------------------------------------------------------------


class _Device:
    """Notes what is waited for; an all reduce or a broadcast is there once it has been waited for."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def synchronize(self) -> None:
        self.waited.append("stream")

    def all_reduce(self, tensor: paddle.Tensor, *, label: str) -> Any:
        return SimpleNamespace(wait=lambda: self.waited.append(label))

    def broadcast(self, tensor: paddle.Tensor, *, src: int, label: str) -> Any:
        return SimpleNamespace(wait=lambda: tensor.set_value(np.array([7.0], np.float32)))


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> tuple[Team, _Device]:
    team, device = Team(timeout_s=10.0), _Device()
    team.device = team.device._replace(kind="npu")
    monkeypatch.setattr(team, "_host", lambda: device)
    monkeypatch.setattr(paddle.device, "current_stream", lambda: device)
    monkeypatch.setattr(paddle.device, "synchronize", lambda: device.waited.append("device"))
    return team, device


def test_ranks_begin_together_with_nothing_left_to_compute(on_device: tuple[Team, _Device]) -> None:
    team, device = on_device
    team.line_up()
    assert device.waited == ["device", "line up"]


def test_a_time_has_what_the_device_took(on_device: tuple[Team, _Device]) -> None:
    team, device = on_device
    team.time_ms(lambda: device.waited.append("action"))
    assert device.waited == ["device", "line up", "action", "stream"]


def test_rank_0_decides(on_device: tuple[Team, _Device]) -> None:
    team, _ = on_device
    assert team.agree(3.0) == 7.0


def test_what_is_closed_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(ranks, "close_all", lambda: closed.append(True))
    team = Team(timeout_s=10.0)
    lane = team._host()
    assert team._host() is lane
    team.close()
    assert closed == [True]
    assert team._host() is not lane


def test_a_job_that_cannot_be_joined_says_what_paddle_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("the address is in use")

    monkeypatch.setenv("PADDLE_DISTRI_BACKEND", "gloo")
    monkeypatch.setattr(paddle.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(paddle.distributed, "init_parallel_env", fail)
    with pytest.raises(ConfigError, match="rank 0: Paddle's parallel environment: the address is in use"):
        ranks.join_job()


@pytest.mark.parametrize("fails", [False, True])
def test_lanes_are_closed_before_the_others_are_heard(fails: bool) -> None:
    """So that nobody waits for a rank that failed, and no check has the lanes of the one before."""
    called: list[str] = []

    class Noting(Team):
        def close(self) -> None:
            called.append("close")

        def tell_all(self, mine: Any, *, timeout_s: float | None = None) -> list[Any]:
            called.append("tell all")
            return []

    def measure(*_: Any) -> None:
        called.append("measure")
        if fails:
            raise CommError("rank 1 is gone")

    check = Check("a check", measure, lambda *_: None)
    Examination(_request(8.0), Noting(timeout_s=10.0), lambda *_: None)._run_check("parity", check)
    assert called == ["measure", "close", "tell all"]


# -- other programs ----------------------------------------------------------------------------------------------------


def test_the_processors_time_is_in_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 200 300 9000 900 90 9 500 7 7\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    monkeypatch.setattr(foreign, "_STAT", stat)
    monkeypatch.setattr("os.sysconf", {"SC_CLK_TCK": 100}.__getitem__)
    assert foreign._busy_s() == 11.0
