"""Parameters: membership, rates and decay survive; frozen and scarce ones among replicas; one order on every rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding import full_parameters
from tests import harness
from tests.dist import test_aliases, test_optimizers, test_params, test_replicas
from tests.lanes import Call, wrap
from tests.models import loss_on, make_model, make_optimizer
from tests.reference import Values
from tests.sides import BOTH, FEW, Factory, Settings, compare

REPLICAS: Settings = {name: test_replicas.SETTINGS[name] for name in ("stage 1", "reshard", "stage 3")}
ADAM_ORDER = 1e-5
"""It magnifies the order of a sum."""


# -- what one group does, among replicas -------------------------------------------------------------------------------


def test_freezing_and_thawing() -> None:
    harness.run(compare, 4, test_params._freeze_and_thaw, REPLICAS, ADAM_ORDER, "mlp")


def test_one_parameter_trains() -> None:
    harness.run(compare, 4, test_params._all_frozen, REPLICAS, test_replicas.ORDER, timeout_s=60)


@pytest.mark.parametrize("clip", [False, True])
def test_a_step_without_a_backward(clip: bool) -> None:
    harness.run(compare, 4, test_params._nothing_yet, REPLICAS, ADAM_ORDER, clip)


@pytest.mark.parametrize("pattern", ["two forwards, two backwards", "retain_graph", "one loss of two forwards"])
def test_several_graphs(pattern: str) -> None:
    harness.run(compare, 4, test_aliases._several_graphs, REPLICAS, test_replicas.ORDER, pattern)


def test_parameter_groups() -> None:
    harness.run(compare, 4, test_optimizers._grouped, REPLICAS, ADAM_ORDER, "AdamW", True)


# -- membership, rates, decay ------------------------------------------------------------------------------------------


def _groups_over_half(new: Factory) -> dict[str, Values]:
    """Two groups, each with its rate, decay and clip or none, over half of the layers; biases do not decay."""

    def optimizer(model: nn.Layer) -> Any:
        decays = {param.name for name, param in model.named_parameters() if not name.endswith("bias")}
        return paddle.optimizer.AdamW(
            0.01,
            parameters=[
                {"params": model.layers[0].parameters(), "learning_rate": 0.5, "grad_clip": nn.ClipGradByNorm(0.05)},
                {"params": [*model.layers[2].parameters(), model.gain], "learning_rate": 2.0, "weight_decay": 0.9},
            ],
            weight_decay=0.3,
            apply_decay_param_fun=lambda name: name in decays,
        )

    side = new(lambda: make_model("mlp"), optimizer)
    start, rest = side.values(), ("layers.1.", "layers.3.")
    snapshots = {}
    for step in range(4):
        side.backward(loss_on(side.model, "mlp", step))
        side.step()
        side.clear_grad()
        found = snapshots[f"step {step}"] = side.values()
        for name, value in found.items():
            assert np.array_equal(value, start[name]) == name.startswith(rest), name
    return snapshots


def test_groups_over_half_of_the_model() -> None:
    harness.run(compare, 2, _groups_over_half, FEW, ADAM_ORDER)
    harness.run(compare, 4, _groups_over_half, REPLICAS, ADAM_ORDER)


# -- one order ---------------------------------------------------------------------------------------------------------

RUNS = 20


class _Uneven(nn.Layer):
    """Buckets of several sizes, and two ways through them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.ways = nn.LayerList([nn.Sequential(nn.Linear(16, size), nn.Linear(size, 16)) for size in (70, 140)])
        self.last = nn.Linear(16, 8)

    def forward(self, x: paddle.Tensor, way: int) -> paddle.Tensor:
        return self.last(self.ways[way](self.first(x))).square().mean()


def _with_noise(rank: int, nranks: int, settings: Settings) -> tuple[int, list[dict[str, list[Call]]]]:
    """Many short runs, on ranks whose objects lie at other addresses and who take other ways where they may."""
    generator, runs = random.Random(rank), []
    kept: list[Any] = []
    for run in range(RUNS):
        kept.append([object() for _ in range(generator.randrange(500))])
        kept[generator.randrange(len(kept))] = []
        chosen = list(settings.values())[run % len(settings)]
        model = _Uneven()
        model, optimizer, calls = wrap(model, make_optimizer("SGD", model), nranks, delay_s=0.0, **chosen)
        for step in range(3):
            model(paddle.rand([2, 8]), (step if chosen["stage"] == 3 else rank + step) % 2).backward()
            kept.append([paddle.empty([generator.randrange(1, 5000)]) for _ in range(3)])
            optimizer.step()
            optimizer.clear_grad()
        with full_parameters(model):
            pass
        runs.append({lane: [call for call in calls if call.lane == lane] for lane in sorted({c.lane for c in calls})})
    return hash("bucket"), runs


UNEQUAL: Settings = {
    "each apart": {"stage": 2, **BOTH, "comm_fusion": False},
    "stage 3": {"stage": 3, **BOTH},
    "small": {"stage": 1, **BOTH, "comm_buffer_size_MB": 1e-6},
    "replicas": {"stage": 2, **BOTH, "n_replicas": 2, "replicate_buffer_size_MB": 0.001},
}


def test_the_order_of_collectives_depends_on_nothing_that_differs_between_ranks() -> None:
    """Neither on hashes, nor on where objects lie, nor on the branch that a rank takes."""
    found = harness.run(_with_noise, 4, UNEQUAL, timeout_s=90)
    assert len({hashed for hashed, _ in found}) == 4, "the ranks hash alike, so that this shows nothing"
    for run in range(RUNS):
        first = found[0][1][run]
        assert len({call.nbytes for call in first["reduce"]}) > 2, "the buckets are of one size"
        for rank, (_, runs) in enumerate(found):
            assert runs[run] == first, f"run {run}, rank {rank} against rank 0"
