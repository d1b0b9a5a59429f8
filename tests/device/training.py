"""What is trained on the stand-in device: scenarios of ``tests/dist``, each under few of its settings.

Neighbouring scenarios get other settings, so that every setting meets many of them; a ``Scene`` is one such meeting.
What a scenario shows is not asked here: only whether a device, and delays on it, change a bit of it.
"""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn
from paddle.utils import unique_name

from hp_sharding import full_parameters
from hp_sharding.comm import current_device, fingerprint
from tests import sides
from tests.device import standin
from tests.dist import (
    test_accumulation,
    test_aliases,
    test_branches,
    test_clip,
    test_lifetime,
    test_optimizers,
    test_params,
    test_precision,
    test_reads,
    test_recompute,
    test_recovery,
    test_replicas,
    test_stage3,
)
from tests.models import SEED, loss_on, make_model, make_optimizer
from tests.reference import Values
from tests.sides import BOTH, Factory, Scenario, Settings, play

Snapshots = dict[str, Values]

SETTINGS: Settings = {
    **sides.SETTINGS,
    "timeline": {"stage": 2, **BOTH, "timeline": True},
    "stage 3, timeline": {"stage": 3, **BOTH, "timeline": True, "prefetch_depth": 2},
}
STAGES_1_2: Settings = {name: settings for name, settings in SETTINGS.items() if settings["stage"] < 3}
STAGE_3: Settings = {name: settings for name, settings in SETTINGS.items() if settings["stage"] == 3}
REPLICAS: Settings = {
    **test_replicas.SETTINGS,
    "timeline": {**test_replicas.SETTINGS["stage 2"], "timeline": True},
    "four replicas": {**test_replicas.SETTINGS["stage 2"], "n_replicas": 4},
}


class Part(NamedTuple):
    """A scenario, what it is called with, and the settings that it holds for."""

    scenario: Scenario
    args: tuple[Any, ...]
    settings: Settings


class Scene(NamedTuple):
    """A scenario under one of its settings, which is called ``name``."""

    scenario: Scenario
    args: tuple[Any, ...]
    name: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        module = self.scenario.__module__.rpartition(".")[2]
        return f"{module}.{self.scenario.__name__}{self.args} under {self.name!r}"


# ---- scenarios that the others lack ----


class _Single(nn.Layer):
    """Parameters of one element: the bias of a layer with one output, the slope of a PReLU, a scale without a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(8, 8), nn.PReLU(), nn.Linear(8, 1)])
        self.scale = self.create_parameter([], default_initializer=nn.initializer.Constant(1.5))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def _single_elements(new: Factory) -> Snapshots:
    side = new(_Single, lambda model: make_optimizer("AdamW", model))
    for step in range(4):
        side.backward(lambda rank, step=step: side.model(_noise(step, rank)).square().mean())
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def _noise(step: int, rank: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng([SEED, step, rank]).standard_normal([3, 8], dtype=np.float32))


def _edited(new: Factory) -> Snapshots:
    """Values written where all of them are there, by every way that a state comes in, and trained on."""
    side = new(lambda: make_model("mlp"), lambda model: make_optimizer("Momentum", model))
    for step in range(3):
        with full_parameters(side.model), paddle.no_grad():
            side.model.gain.scale_(0.75)
            side.model.layers[2].weight[0] = 0.125 * step
            side.model.set_state_dict({name: value.numpy() * 0.9 for name, value in side.model.state_dict().items()})
        side.backward(loss_on(side.model, "mlp", step))
        side.step()
        side.clear_grad()
    return {"end": side.values()}


def _trained(new: Factory, name: str, optimizer: str, steps: int) -> Snapshots:
    side = new(lambda: make_model(name), lambda model: make_optimizer(optimizer, model))
    losses = []
    for step in range(steps):
        losses.append(side.backward(loss_on(side.model, name, step)))
        side.step()
        side.clear_grad()
    return {"losses": {"all": np.array(losses)}, "end": side.values()}


# ---- which of them, and under what ----


def _parts() -> list[Part]:
    """For two ranks, in one shard group."""
    any_way, few = SETTINGS, {name: SETTINGS[name] for name in ("stage 1", "stage 2", "reshard", "stage 3")}
    freed = {name: SETTINGS[name] for name in ("stage 3", "reshard", "stage 3, timeline")}
    return [
        *(Part(_trained, ("gpt", name, 4), any_way) for name in ("SGD", "AdamW")),
        Part(_trained, ("conv", "Momentum", 4), any_way),
        Part(_trained, ("shared", "AdamW", 4), any_way),
        Part(_trained, ("branching", "AdamW", 5), STAGES_1_2),
        Part(_single_elements, (), any_way),
        *(Part(test_accumulation._varying_counts, ("mlp", "SGD", waits), any_way) for waits in (False, True)),
        Part(test_accumulation._without_end, ("step inside",), any_way),
        Part(test_accumulation._kept_gradients, (), any_way),
        Part(test_accumulation._cleared_elsewhere, ("None",), few),
        Part(test_accumulation._with_full_grad, (), any_way),
        *(
            Part(test_branches._branches, (choice, 6), STAGES_1_2)
            for choice in ("parity of rank and step", "another order on each rank", "a layer twice now and then")
        ),
        Part(test_branches._unused_everywhere, (), any_way),
        Part(test_branches._outside, (), STAGES_1_2),
        Part(test_branches._talks_between, ("at random",), STAGES_1_2),
        Part(test_branches._without_the_model, (), STAGES_1_2),
        *(Part(test_clip._clipped, ("mlp", "SGD", clip, 2, ""), any_way) for clip in ("global norm", "norm", "value")),
        Part(test_clip._clipped, ("mlp", "SGD", "global norm, not reached", 2, ""), few),
        Part(test_clip._clipped, ("conv", "Momentum", "global norm", 2, "norm"), any_way),
        Part(test_clip._unused_and_repeated, (), STAGES_1_2),
        Part(test_params._freeze_and_thaw, ("mlp",), any_way),
        Part(test_params._frozen_when_wrapped, ("conv",), any_way),
        Part(test_params._nothing_yet, (True,), any_way),
        *(Part(test_params._train_module, (name,), any_way) for name in ("lists", "recurrent", "self calls")),
        Part(test_params._part_of_a_model, (), few),
        Part(test_reads._reads, (), {name: SETTINGS[name] for name in ("stage 1", "stage 2", "timeline")}),
        *(Part(test_reads._written, (write,), sides.KEPT) for write in ("set_value", "__setitem__", "zero_, add_")),
        Part(test_reads._written_early, (), STAGES_1_2),
        Part(test_reads._loaded, (), sides.KEPT),
        Part(_edited, (), STAGE_3),
        *(Part(test_recompute._train_shared, (form,), any_way) for form in (True, False)),
        Part(test_recompute._train_chain, ([1],), STAGES_1_2),
        Part(test_recompute._train_nested, (True,), any_way),
        Part(test_recompute._accumulating, ("gpt_recompute_reentrant",), any_way),
        Part(test_recompute._accumulating, ("gpt_recompute",), any_way),
        *(Part(test_recovery._recovers, ("mlp", place, True), few) for place in test_recovery.PLACES[1:-1:2]),
        Part(test_optimizers._grouped, ("AdamW", True), any_way),
        Part(test_optimizers._weights_only, (), sides.KEPT),
        Part(test_stage3._experts, (), STAGE_3),
        *(Part(test_aliases._train, (kind,), freed) for kind in ("w.T", "w[:4]", "w[::2]", "einsum", "weight_norm")),
        Part(test_aliases._second_order, (), freed),
        Part(test_aliases._several_graphs, ("one loss of two forwards",), freed),
        Part(test_lifetime._gan, ("cleared at once",), any_way),
        *_parts_of_mixed_precision(BOTH),
    ]


def _parts_of_mixed_precision(settings: dict[str, Any]) -> list[Part]:
    """All of it in each stage; what is checked is that lanes convert like the host."""
    short, by_train = ("bfloat16", "bfloat16"), functools.partial(Part, test_precision._train)
    params, main = {"param_dtype": "bfloat16"}, {"param_dtype": "float16", "main_grad": True}
    return [
        by_train(("AdamW", short), _mixed(settings, params)),
        by_train(("AdamW", short, "bfloat16"), _mixed(settings, {})),
        by_train(("AdamW", ("bfloat16", "float32")), _mixed(settings, {"gather_dtype": "bfloat16"})),
        by_train(("Momentum", ("float32", "bfloat16")), _mixed(settings, {"reduce_dtype": "bfloat16"})),
        Part(test_precision._accumulate, (("float16", "float16"),), _mixed(settings, main)),
        Part(test_precision._accumulate, (short,), _mixed(settings, params)),
        Part(test_precision._freeze_and_thaw, ("bfloat16",), _mixed(settings, {})),
    ]


def _mixed(settings: dict[str, Any], dtypes: dict[str, Any]) -> Settings:
    return {f"mixed, stage {stage}": {**settings, "stage": stage, **dtypes} for stage in (1, 2, 3)}


def _parts_of_four() -> list[Part]:
    """For four ranks, in one shard group. SGD and Momentum: AdamW magnifies the order of a sum."""
    few = {name: SETTINGS[name] for name in ("stage 1", "stage 2", "reshard", "stage 3")}
    stages_1_2 = {name: settings for name, settings in few.items() if settings["stage"] < 3}
    return [
        Part(_trained, ("gpt", "SGD", 3), few),
        Part(_trained, ("shared", "Momentum", 3), few),
        Part(test_accumulation._varying_counts, ("mlp", "SGD", True), few),
        Part(test_branches._branches, ("at random", 4), stages_1_2),
        Part(test_clip._clipped, ("mlp", "SGD", "global norm", 4, ""), few),
        Part(test_recompute._accumulating, ("gpt_recompute",), few),
        Part(test_recovery._recovers, ("mlp", "backward, first layer", True), few),
        Part(test_stage3._experts, (), STAGE_3),
    ]


def _parts_of_replicas() -> list[Part]:
    """For four ranks, two by two."""
    stages_1_2 = {name: settings for name, settings in REPLICAS.items() if settings["stage"] < 3}
    return [
        Part(_trained, ("gpt", "AdamW", 3), REPLICAS),
        Part(_trained, ("mlp", "Momentum", 4), REPLICAS),
        *(Part(test_accumulation._varying_counts, ("mlp", "SGD", waits), REPLICAS) for waits in (False, True)),
        *(
            Part(test_replicas._replicates_last, (), {name: REPLICAS[name]})
            for name in ("stage 1", "stage 2", "stage 3")
        ),
        Part(test_branches._branches, ("at random", 4), stages_1_2),
        *(Part(test_clip._clipped, ("mlp", "SGD", clip, 4, "norm"), REPLICAS) for clip in ("global norm", "norm")),
        Part(test_recompute._accumulating, ("gpt_recompute_reentrant",), REPLICAS),
        Part(test_recompute._train_chain, ([1],), {"stage 2": REPLICAS["stage 2"]}),
        *(
            Part(test_recovery._recovers, ("mlp", place, True), REPLICAS)
            for place in ("forward, last layer", "backward, first layer", "hook after a gradient")
        ),
        Part(_single_elements, (), REPLICAS),
        *_parts_of_mixed_precision({**BOTH, "n_replicas": 2}),
    ]


def _spread(parts: Iterable[Part], each: int) -> list[Scene]:
    """Every part under ``each`` of its settings: those that have had the fewest parts so far."""
    used: Counter[str] = Counter()
    scenes = []
    for part in parts:
        for name in sorted(part.settings, key=lambda name: used[name])[:each]:
            used[name] += 1
            scenes.append(Scene(part.scenario, part.args, name, part.settings[name]))
    return scenes


class Group(NamedTuple):
    """Scenes for so many ranks."""

    nranks: int
    scenes: list[Scene]


GROUPS: dict[str, Group] = {
    "two ranks": Group(2, _spread(_parts(), 1)),
    "four ranks": Group(4, _spread(_parts_of_four(), 1)),
    "two by two": Group(4, _spread(_parts_of_replicas(), 1)),
}


class Check(NamedTuple):
    """A rank function of another test, with its arguments; it asserts what it is about, or returns it."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.function.__module__}.{self.function.__name__}{self.args}"


CHECKS: list[Check] = [
    *(Check(test_recovery._one_raises, ("backward, first layer", SETTINGS[name])) for name in ("stage 1", "reshard")),
    Check(test_recovery._fails_after_a_repeat),
    Check(test_reads._held),
    Check(test_reads._freed),
    *(Check(test_reads._inside, (reshards,)) for reshards in (False, True)),
    Check(test_reads._replaced, (True,)),
    Check(test_params._gradients_before),
    Check(test_accumulation._nested),
    Check(test_accumulation._equal_micro_batches),
    Check(test_accumulation._set_gradient),
    Check(test_clip._every_rank),
    Check(test_optimizers._resumes, ("AdamW",)),
    Check(test_stage3._evaluates, ("gpt_recompute_reentrant",)),
    *(Check(test_stage3._looks_alone, (where,)) for where in ("full_parameters", "forward")),
    Check(test_lifetime._copies),
    Check(test_lifetime._twice),
]
"""For two ranks."""


# ---- on ranks ----


def play_all(rank: int, nranks: int, scenes: list[Scene], paces: list[standin.Pace]) -> list[list[Snapshots]]:
    """Rank function: all scenes at each pace in turn; on CPU, where there is none, once."""
    assert fingerprint.is_wanted(), "the ranks are to compare what they launch"
    if not current_device().has_streams:
        return [[_played(rank, nranks, scene) for scene in scenes]]
    device = standin.Device()
    found = []
    for pace in paces:
        device.set_pace(pace)
        found.append([_watched(device, functools.partial(_played, rank, nranks, scene), scene) for scene in scenes])
    return found


def check_all(rank: int, nranks: int, checks: list[Check]) -> list[Any]:
    """Rank function: calls all of them and returns what they return."""
    device = standin.Device() if current_device().has_streams else None
    found = []
    for check in checks:
        with unique_name.guard():  # each is to be alone in its process, as far as it can see
            found.append(_watched(device, functools.partial(check.function, rank, nranks, *check.args), check))
    return found


def _played(rank: int, nranks: int, scene: Scene) -> Snapshots:
    return play(rank, nranks, scene.scenario, scene.settings, *scene.args)[0]


def _watched(device: standin.Device | None, run: Callable[[], Any], what: Any) -> Any:
    """``run()``; errors are raised again with a name, and so are writes to memory that was freed before."""
    try:
        found = run()
    except Exception as error:
        raise AssertionError(f"in {what}") from error
    gc.collect()
    writes = device.writes_after_free() if device is not None else 0
    assert writes == 0, f"{what}: {writes} freed blocks were written to"
    return found
