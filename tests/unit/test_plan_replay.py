"""The replay: the collectives of real training in their order, and times and bytes that can be told by hand."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from hp_sharding.config import ShardingConfig
from hp_sharding.errors import ConfigError
from hp_sharding.layout import BucketRules, ParamSpec, model_state_bytes, plan_buckets
from hp_sharding.plan.hardware import Hardware, Link
from hp_sharding.plan.measuring import measure
from hp_sharding.plan.profile import Param, Profile, Unit
from hp_sharding.plan.replay import Prediction, Ranks, Training, predict
from tests import fakes
from tests.models import Mlp

OVERLAP: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True}
FAST = Hardware(Link(1e15, 0.0))
MB = 1 << 20


class _Decoder(nn.Layer):
    """A table at both ends, blocks of unequal size between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 16)
        self.blocks = nn.LayerList([nn.Sequential(nn.LayerNorm(16), nn.Linear(16, n), nn.Linear(n, 16)) for n in SIZES])
        self.norm = nn.LayerNorm(16)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = x + block(x)
        return paddle.matmul(self.norm(x), self.table.weight, transpose_y=True)


SIZES = (40, 64, 24, 48)


def _decoder_loss(model: nn.Layer) -> paddle.Tensor:
    return F.cross_entropy(model(paddle.arange(6)), paddle.arange(6))


def _mlp_loss(model: nn.Layer) -> paddle.Tensor:
    return model(paddle.ones([4, 9])).mean()


def _real(model: nn.Layer, loss: Any, settings: dict[str, Any]) -> dict[str, list[str]]:
    """What each lane starts in the last of some steps, but for what ranks agree on."""
    rig = fakes.wrap(model, paddle.optimizer.AdamW(parameters=model.parameters()), **settings)
    for _ in range(5):
        rig.log.clear()
        loss(model).backward()
        rig.optimizer.step()
        rig.optimizer.clear_grad()
    started = [event for event in rig.log if event.what == "start" and not event.label.startswith("agree")]
    return {
        lane: [event.label.partition(",")[0] for event in started if event.lane == lane]
        for lane in ("gather", "reduce")
    }


def _planned(found: Prediction) -> dict[str, list[str]]:
    spans = sorted((span for span in found.trace.spans if span.nbytes), key=lambda span: span.start_s)
    return {
        lane: [s.label.partition(",")[0] for s in spans if s.lane == lane and not s.label.startswith("agree")]
        for lane in ("gather", "reduce")
    }


@pytest.mark.parametrize("make", [(_Decoder, _decoder_loss), (Mlp, _mlp_loss)], ids=["decoder", "mlp"])
@pytest.mark.parametrize(
    "settings",
    [
        {"stage": 2, "comm_buffer_size_MB": 0.004, **OVERLAP},
        {"stage": 2, "comm_buffer_size_MB": 25},
        {"stage": 1, "comm_fusion": False, **OVERLAP},
        {"stage": 2, "comm_buffer_size_MB": 0.004, "reshard_after_step": True, **OVERLAP},
        {"stage": 3, "comm_buffer_size_MB": 0.004, **OVERLAP},
        {"stage": 3, "comm_buffer_size_MB": 25, "prefetch_depth": 2, **OVERLAP},
        {"stage": 3},
        {"stage": 3, "reshard_after_forward": False, **OVERLAP},
    ],
    ids=str,
)
def test_it_starts_what_real_training_starts(make: Any, settings: dict[str, Any]) -> None:
    build, loss = make
    model = build()
    measured = measure(model, lambda: loss(model), ShardingConfig(), steps=1)
    planned = _planned(predict(measured.profile, Hardware(Link(1e9, 1e-4)), Ranks(2), ShardingConfig(**settings)))
    # One of several ranks has the same buckets as one alone, but for their padding.
    for lane, labels in _real(build(), loss, settings).items():
        # In stage 3 what is gathered first has started at the end of the step before.
        turns = range(len(labels) if settings["stage"] == 3 else 1)
        assert labels
        assert planned[lane] in [labels[turn:] + labels[:turn] for turn in turns]


# -- times -------------------------------------------------------------------------------------------------------------


def _profile(*numels: int, forward_s: float = 0.1, **more: Any) -> Profile:
    """Units of one matrix each."""
    units = [
        Unit(f"layer{number}", (Param(f"layer{number}.weight", (numel // 256, 256)),), forward_s, 2 * forward_s, **more)
        for number, numel in enumerate(numels)
    ]
    return Profile("net", (Unit("net", (), 0.0, 0.0), *units))


FOUR = _profile(*[MB // 4] * 4)
"""1 MB each; 1.2 s of compute."""


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [Ranks(2), Ranks(4, 2), Ranks(1, 2)])
def test_with_links_of_no_cost_a_step_is_its_compute(stage: int, ranks: Ranks) -> None:
    found = predict(FOUR, FAST, ranks, ShardingConfig(stage=stage, comm_buffer_size_MB=1, **OVERLAP))
    assert found.step_ms == pytest.approx(1200)
    assert found.exposed_ms == pytest.approx(0, abs=1e-3)
    assert found.bound == "compute"


@pytest.mark.parametrize(("stage", "gathers"), [(1, 1), (2, 1), (3, 2)])
def test_without_overlap_times_add_up(stage: int, gathers: int) -> None:
    slow = Hardware(Link(1.0 * MB, 0.01))
    found = predict(FOUR, slow, Ranks(4), ShardingConfig(stage=stage, comm_buffer_size_MB=1))
    # Four buckets, of which three quarters travel in three hops. What ranks agree on travels beside the reductions.
    messages_s = (4 * gathers + 4) * (0.75 + 3 * 0.01)
    assert found.step_ms == pytest.approx(1200 + messages_s * 1e3, rel=1e-3)
    assert found.exposed_ms == pytest.approx(messages_s * 1e3, rel=1e-3)


def test_overlap_hides_what_compute_is_long_enough_for() -> None:
    # Gathers take 0.08 s a unit beside forwards of 0.1 s, reductions the same beside backwards of 0.2 s.
    link = Hardware(Link(0.5 * MB / 0.08, 0.0))
    found = predict(FOUR, link, Ranks(2), ShardingConfig(stage=2, comm_buffer_size_MB=4, comm_fusion=False, **OVERLAP))
    # The first gather and the last reduction have nothing before or after them.
    assert found.step_ms == pytest.approx(1200 + 80 + 80, rel=1e-2)
    assert found.exposed_ms == pytest.approx(160, rel=1e-2)


def test_replicas_share_the_cable_or_have_their_own() -> None:
    config = ShardingConfig(stage=2, comm_fusion=False, replicate_buffer_size_MB=0.1)
    shared = predict(FOUR, Hardware(Link(1.0 * MB, 0.0)), Ranks(2, 2), config)
    apart = predict(FOUR, Hardware(Link(1.0 * MB, 0.0), shares_link=False), Ranks(2, 2), config)
    # Each rank sends half of every bucket twice over the shard group, and over the replicas all of a half: 2 MB each.
    assert shared.step_ms == pytest.approx(1200 + 6000, rel=1e-3)
    # Apart, what replicas add up is on its way while the next bucket is reduced; that of the last one is not.
    assert apart.step_ms == pytest.approx(1200 + 4500, rel=1e-3)
    assert shared.figures["replicate_bytes"] == 2 * MB


def test_updates_and_copies_take_time() -> None:
    machine = Hardware(Link(1e15, 0.0), update_bytes_s=36 * MB, copy_bytes_s=40 * MB)
    found = predict(FOUR, machine, Ranks(2), ShardingConfig(stage=2, **OVERLAP))
    # AdamW in float32 passes 36 bytes for each of half a million elements; gradients are 4 MB.
    assert found.step_ms == pytest.approx(1200 + 500 + 100, rel=1e-3)
    assert found.figures["phases_ms"]["update"] == pytest.approx(500, rel=1e-3)


def test_clipping_by_the_global_norm_waits_for_every_reduction() -> None:
    # Reduced last is what the step updates and gathers first; without clipping others are updated meanwhile.
    link = Hardware(Link(0.5 * MB / 0.08, 0.0), update_bytes_s=36 * MB)
    config = ShardingConfig(stage=2, comm_fusion=False, **OVERLAP)
    plain, clipped = (predict(FOUR, link, Ranks(2), config, Training(clips=clips)) for clips in (False, True))
    assert clipped.step_ms > plain.step_ms + 50


def test_micro_batches_send_nothing_but_the_last() -> None:
    link = Hardware(Link(1.0 * MB, 0.0))
    one, three = (predict(FOUR, link, Ranks(2), ShardingConfig(stage=2), Training(micro_batches=n)) for n in (1, 3))
    assert three.step_ms == pytest.approx(one.step_ms + 2400, rel=1e-3)
    assert three.figures["reduce_bytes"] == one.figures["reduce_bytes"]


def test_narrow_dtypes_halve_what_travels() -> None:
    config = ShardingConfig(stage=2, param_dtype="bfloat16", **OVERLAP)
    found = predict(FOUR, FAST, Ranks(2), config)
    assert found.figures["reduce_bytes"] == 2 * MB
    gathered = [span.nbytes for span in found.trace.spans if span.lane == "gather" and span.layer]
    assert sum(gathered) == 2 * MB


def test_a_unit_without_parameters_takes_its_time() -> None:
    between = Unit("softmax", (), 0.5, 0.25)
    found = predict(FOUR._replace(units=(*FOUR.units[:3], between, *FOUR.units[3:])), FAST, Ranks(2), ShardingConfig())
    assert found.step_ms == pytest.approx(1200 + 750)
    # Around units that train it has a backward wherever it begins.
    around = Unit("layer", (), 0.5, 0.25)
    units = [unit._replace(name=f"layer.{number}") for number, unit in enumerate(FOUR.units[1:])]
    found = predict(FOUR._replace(units=(FOUR.units[0], around, *units)), FAST, Ranks(2), ShardingConfig())
    assert found.step_ms == pytest.approx(1200 + 750)


@pytest.mark.parametrize("name", ["unit", "uses", "player", "places", "order", "last", "forward", "training.weight"])
def test_parameters_may_have_any_name(name: str) -> None:
    of_unit, own = Param(f"layer.{name}", (256, 256)), Param(name, (256, 256))
    profile = Profile("net", (Unit("net", (own,), 0.1, 0.2), Unit("layer", (of_unit,), 0.1, 0.2)))
    found = predict(profile, FAST, Ranks(2), ShardingConfig(stage=3, comm_fusion=False))
    assert found.figures["reduce_bytes"] == 2 * 256 * 256 * 4
    assert found.step_ms == pytest.approx(600)


# -- memory ------------------------------------------------------------------------------------------------------------


def _layouts(profile: Profile, nranks: int, config: ShardingConfig) -> Any:
    specs = [
        ParamSpec(param.name, param.numel, "float32", 4, number, frozen=False)
        for number, unit in enumerate(profile.units)
        for param in unit.params
    ]
    rules = BucketRules(nranks, config.comm_buffer_bytes, config.comm_fusion, merge_units=config.stage < 3)
    return plan_buckets(specs, [unit.name for unit in profile.units], rules)


@pytest.mark.parametrize(("stage", "size_mb", "depth"), list(itertools.product((1, 2, 3), (0.3, 2), (1, 2))))
def test_its_buckets_and_bytes_are_the_true_ones(stage: int, size_mb: float, depth: int) -> None:
    # Matrices of very unequal size, padded over three ranks: nothing is a multiple of anything.
    profile = _profile(*(256 * n for n in (37, 211, 5, 400, 399, 1, 640, 333, 64)), forward_s=0.01)
    config = ShardingConfig(stage=stage, comm_buffer_size_MB=size_mb, prefetch_depth=depth, **OVERLAP)
    found = predict(profile, FAST, Ranks(3), config)
    layouts = _layouts(profile, 3, config)
    assert [entry["nbytes"] for entry in found.trace.about["buckets"]] == [layout.nbytes for layout in layouts]
    ahead = depth if stage == 3 else 0
    formula = model_state_bytes(layouts, stage, keeps_full=stage < 3, moment_bytes=8, units_ahead=ahead).total
    assert found.state_bytes == formula


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_peak_of_a_regular_model_is_the_formula(stage: int) -> None:
    config = ShardingConfig(stage=stage, comm_fusion=False, **OVERLAP)
    # The link is so slow that a gradient is always under way while the next one fills up.
    found = predict(_profile(*[MB // 4] * 12), Hardware(Link(2.0 * MB, 0.0)), Ranks(4), config)
    assert found.memory_bytes == pytest.approx(found.state_bytes, rel=0.01)


def test_without_overlap_all_gradients_are_held_at_once() -> None:
    overlapped, serial = (
        predict(FOUR, FAST, Ranks(2), ShardingConfig(stage=2, comm_fusion=False, reduce_overlap=overlap))
        for overlap in (True, False)
    )
    # On such links each is gone before the next one comes.
    assert serial.memory_bytes - overlapped.memory_bytes == 3 * MB


def test_activations_come_and_go() -> None:
    profile = _profile(*[MB // 4] * 4, activation_bytes=3 * MB, transient_bytes=5 * MB)
    bare, whole = (predict(model, FAST, Ranks(2), ShardingConfig(stage=2, **OVERLAP)) for model in (FOUR, profile))
    # All four at the end of the forward, and what the last one needs besides.
    assert whole.memory_bytes - bare.memory_bytes == pytest.approx(17 * MB, rel=0.1)


def test_what_is_frozen_before_all_that_trains_keeps_nothing() -> None:
    def peak(*, frozen: bool, number: int) -> int:
        units = list(_profile(*[MB // 4] * 4).units)
        param = units[number].params[0]._replace(frozen=frozen)
        units[number] = units[number]._replace(params=(param,), activation_bytes=100 * MB)
        return predict(FOUR._replace(units=tuple(units)), FAST, Ranks(2), ShardingConfig(stage=2)).memory_bytes

    assert peak(frozen=True, number=1) < 100 * MB < peak(frozen=False, number=1) < 150 * MB
    # After a unit that trains it passes its gradient on.
    assert 100 * MB < peak(frozen=True, number=2) < 150 * MB


# -- the process it runs in --------------------------------------------------------------------------------------------


def test_nothing_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    def name() -> int:
        return int(nn.Layer().create_parameter([1]).name.partition(".")[0].rpartition("_")[2])

    number = name()
    paddle.seed(7)
    first = paddle.rand([3]).numpy()
    inner = Unit("block", (Param("block.inner.weight", (2, 2)),), 0.1, 0.2)
    with caplog.at_level(logging.INFO, "hp_sharding"):
        predict(FOUR._replace(units=(*FOUR.units, inner)), FAST, Ranks(2), ShardingConfig(stage=3, **OVERLAP))
    assert not caplog.records
    assert name() == number + 1
    paddle.seed(7)
    predict(FOUR, FAST, Ranks(2), ShardingConfig())
    assert np.array_equal(paddle.rand([3]).numpy(), first)
    loss = nn.Linear(2, 2)(paddle.ones([1, 2])).sum()
    loss.backward()  # nobody listens any more


def test_inside_a_step_too() -> None:
    outside = predict(FOUR, Hardware(Link(1.0 * MB, 0.0)), Ranks(2), ShardingConfig())
    with paddle.no_grad():
        inside = predict(FOUR, Hardware(Link(1.0 * MB, 0.0)), Ranks(2), ShardingConfig())
    assert inside.figures == outside.figures


def test_a_trace_of_the_step() -> None:
    found = predict(FOUR, Hardware(Link(10.0 * MB, 0.001)), Ranks(2, 2), ShardingConfig(stage=3, **OVERLAP))
    trace = found.trace
    assert trace.about["simulated"] is True
    assert (trace.about["nranks"], trace.about["replicas"]) == (4, 2)
    assert [step.end_s * 1e3 for step in trace.steps] == [pytest.approx(found.step_ms)]
    assert {span.lane for span in trace.spans} >= {"compute", "gather", "reduce", "replicate", "wait"}
    assert {span.layer for span in trace.spans if span.lane == "compute"} == {f"layer{number}" for number in range(4)}


@pytest.mark.parametrize(
    ("profile", "ranks", "text"),
    [
        (_profile(512)._replace(units=(Unit("net", ()),)), Ranks(2), "'net' has no time"),
        (FOUR, Ranks(1), "two ranks or more"),
        (FOUR, Ranks(0, 4), "two ranks or more"),
    ],
)
def test_what_cannot_be_planned_is_refused(profile: Profile, ranks: Ranks, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        predict(profile, FAST, ranks, ShardingConfig())


@pytest.mark.parametrize("name", ["comm_buffer_size_MB", "prefetch_depth"])
def test_what_measurements_choose_cannot_be_planned(name: str) -> None:
    settings: dict[str, Any] = {"stage": 3, **OVERLAP, name: "auto"}
    config = ShardingConfig(**settings)
    with pytest.raises(ConfigError, match=f"{name}='auto'"):
        predict(FOUR, FAST, Ranks(2), config)
