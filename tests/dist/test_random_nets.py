"""Nets drawn at random train on several ranks as plain Paddle does in one process, which runs every rank in turn.

Always the same examples, few enough for every change. To look for more::

    HP_SHARDING_EXAMPLES=300 pytest tests/dist/test_random_nets.py -k stage-3-1 -o faulthandler_timeout=3600

A failure prints the net, as a description from which ``tests.nets.build`` makes it; of examples that were looked for
it is the smallest one that fails.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from paddle import nn
from paddle.utils import unique_name

from tests import harness
from tests.fakes import wrap
from tests.models import SEED, make_optimizer
from tests.nets import (
    LEAVES,
    MODES,
    PLACES,
    STRUCTURES,
    Aside,
    Block,
    Call,
    Head,
    Net,
    Part,
    always_trains,
    build,
    loss_of,
)
from tests.reference import Values, assert_all_equal, assert_close, assert_equal
from tests.sides import Plain, Sharded, Side

EXAMPLES = int(os.environ.get("HP_SHARDING_EXAMPLES", "0"))
"""How many at random for each kind of sharding; 0: a few, always the same ones."""
BATCH = 3


class Training(NamedTuple):
    """How a net is trained, three steps long.

    Attributes:
        counts: backwards of each step.
        waits: whether all but the last backward of a step run under ``no_sync``.
        backward: "once"; of a loss of "two forwards"; "twice" through one graph.
        evaluates: whether a forward without gradients stands between the steps.
        by_rank: whether the ranks take different paths.
        reads: whether the parameters are compared after every step, which waits for the gathers under way.
    """

    optimizer: str = "Momentum"
    counts: tuple[int, ...] = (1, 1, 1)
    waits: bool = False
    backward: str = "once"
    evaluates: bool = False
    by_rank: bool = False
    reads: bool = False


KINDS: dict[str, dict[str, Any]] = {
    "stage-1": {"stage": 1},
    "stage-2": {"stage": 2},
    "reshard": {"stage": 2, "reshard_after_step": True},
    "replicas": {"n_replicas": 2},
    "stage-3": {"stage": 3},
    "stage-3-replicas": {"stage": 3, "n_replicas": 2},
}
"""Names of ways to shard, and what is given in each."""

RUNS = [
    *((kind, 1, 40) for kind in ("stage-1", "stage-2", "reshard")),
    ("stage-3", 1, 100),
    *((kind, nranks, 6) for nranks in (2, 4) for kind in ("stage-1", "stage-2", "reshard", "stage-3")),
    *((kind, 4, 6) for kind in ("replicas", "stage-3-replicas")),
]
"""Kind, ranks, and how many examples every change is tried on."""


# -- what is drawn ----------------------------------------------------------------------------------------------------

SIZES = st.integers(1, 5)
PLACED = st.sampled_from(PLACES)
LEAF_PARTS = st.tuples(st.sampled_from([*LEAVES, "same"]), SIZES, st.booleans(), st.booleans(), PLACED).map(
    lambda drawn: Part(*drawn)
)


def _groups(inner: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
    some_leaves = st.lists(LEAF_PARTS, min_size=1, max_size=3).map(tuple)
    some_parts = st.lists(inner, max_size=3).map(tuple)
    sequentials = st.tuples(PLACED, some_leaves).map(lambda drawn: Part("sequential", place=drawn[0], inner=drawn[1]))
    blocks = st.tuples(SIZES, st.booleans(), PLACED, some_parts).map(
        lambda drawn: Part("block", *drawn[:2], place=drawn[2], inner=drawn[3])
    )
    return sequentials | blocks


PARTS = st.recursive(LEAF_PARTS, _groups, max_leaves=4)


@st.composite
def nets(draw: st.DrawFn) -> Net:
    """Up to six parts, on one path or two."""
    parts = tuple(draw(st.lists(PARTS, min_size=2, max_size=6)))
    call = st.builds(Call, st.integers(0, len(parts) - 1), st.sampled_from(list(MODES)))
    paths = st.lists(st.lists(call, min_size=2, max_size=7).map(tuple), min_size=1, max_size=2).map(tuple)
    width = draw(st.sampled_from([3, 8, 5]))
    net = Net(
        width,
        parts,
        draw(paths),
        heads=tuple(draw(st.lists(st.builds(Head, st.integers(0, 7), st.booleans()), max_size=2))),
        gains=draw(st.sampled_from([0, 1, width])),
        structure=draw(st.sampled_from(list(STRUCTURES))),
        input_grad=draw(st.booleans()),
    )
    return net if always_trains(net) else net._replace(input_grad=True)


TRAININGS = st.builds(
    Training,
    st.sampled_from(["Momentum", "SGD", "AdamW"]),
    counts=st.sampled_from([(1, 1, 1), (3, 1, 2)]),
    waits=st.booleans(),
    backward=st.sampled_from(["once", "two forwards", "twice"]),
    evaluates=st.booleans(),
    by_rank=st.booleans(),
    reads=st.booleans(),
)


def _settings(given_ones: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Settings of ``ShardingConfig``, and the number of replicas."""
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "stage": st.sampled_from([2, 1]),
        "allgather_overlap": st.booleans(),
        "reduce_overlap": st.booleans(),
        "comm_fusion": st.sampled_from([True, True, False]),
        "comm_buffer_size_MB": st.sampled_from([25, 0.002, 0.0006, 1e-6]),
        "replicate_buffer_size_MB": st.sampled_from([25, 0.0006]),
        "reshard_after_step": st.sampled_from([None, None, True]),
        "prefetch_depth": st.sampled_from([None, 0, 2]),
        "units": st.sampled_from(["auto", "auto", [nn.Linear], [nn.Linear, Block, Aside]]),
    }
    if given_ones.get("stage") == 3:
        drawn["reshard_after_forward"] = st.sampled_from([True, True, False])
    return st.fixed_dictionaries(drawn).map(lambda found: {**found, **given_ones})


# -- what is done with it ---------------------------------------------------------------------------------------------


def _input(net: Net, number: int, rank: int) -> paddle.Tensor:
    generator = np.random.default_rng([SEED, number, rank])
    return paddle.to_tensor(generator.standard_normal([BATCH, net.width], dtype=np.float32))


def _train(side: Side, net: Net, training: Training) -> list[Values]:
    """The parameters after every step, or only the last."""
    number = 0
    found = []
    for step, count in enumerate(training.counts):
        for micro in range(count):
            if training.waits and micro < count - 1:
                with side.no_sync():
                    _backward(side, net, training, number)
            else:
                _backward(side, net, training, number)
            number += 1
        side.step()
        side.clear_grad(set_to_zero=bool(step % 2))
        if training.evaluates:
            with paddle.no_grad():
                loss_of(side.model, _input(net, 99, 0), 0)
        if training.reads:
            found.append(side.values())
    return [*found, side.values()]


def _backward(side: Side, net: Net, training: Training, number: int) -> None:
    def loss(rank: int) -> paddle.Tensor:
        path = (number + rank * training.by_rank) % len(net.paths)
        found = loss_of(side.model, _input(net, number, rank), path)
        if training.backward == "two forwards":
            found = found + loss_of(side.model, _input(net, 50 + number, rank), path)
        if training.backward == "twice":
            (found * 2).backward(retain_graph=True)
        return found

    side.backward(loss)


def _train_sharded(rank: int, nranks: int, net: Net, training: Training, chosen: dict[str, Any]) -> list[Values]:
    side = Sharded(
        lambda: build(net),
        lambda model: make_optimizer(training.optimizer, model),
        rank=rank,
        nranks=nranks,
        settings=chosen,
    )
    return _train(side, net, training)


class _Alone(Sharded):
    """Sharded over a group of one, whose lanes deliver only when somebody waits."""

    def __init__(self, model: nn.Layer, optimizer: Any, chosen: dict[str, Any]) -> None:
        self.rank = 0
        self.model, self.optimizer, *_ = wrap(model, optimizer, **chosen)
        self.sharded = True
        self.ranks = [0]


def _train_alone(net: Net, training: Training, chosen: dict[str, Any]) -> list[Values]:
    with unique_name.guard():
        paddle.seed(SEED)
        model = build(net)
        return _train(_Alone(model, make_optimizer(training.optimizer, model), chosen), net, training)


def _train_plain(nranks: int, net: Net, training: Training) -> list[Values]:
    with unique_name.guard():
        side = Plain(lambda: build(net), lambda model: make_optimizer(training.optimizer, model), nranks)
        return _train(side, net, training)


def _tolerance(training: Training, nranks: int) -> float:
    """0 for bitwise, where every sum has its terms in the order in which one process adds them.

    Not with SGD over several ranks: its kernel rounds in another way where what it updates has 8n elements.
    """
    several = max(training.counts) > 1 or training.backward == "twice"
    if several or nranks > 2 or (nranks == 2 and training.optimizer == "SGD"):
        return 1e-5 if training.optimizer == "AdamW" else 2e-6
    return 0.0


def _compare(nranks: int, net: Net, training: Training, chosen: dict[str, Any]) -> None:
    expected = _train_plain(nranks, net, training)
    if nranks == 1:
        everyone = [_train_alone(net, training, chosen)]
    else:
        everyone = harness.run(_train_sharded, nranks, net, training, chosen, timeout_s=40)
    tolerance = _tolerance(training, nranks)
    for place, value in enumerate(expected):
        found = [of_rank[place] for of_rank in everyone]
        assert_all_equal(found, f"snapshot {place},")
        if tolerance:
            assert_close(found[0], value, tolerance, f"snapshot {place},")
        else:
            assert_equal(found[0], value, f"snapshot {place},")


def _allowed(net: Net, training: Training, chosen: dict[str, Any]) -> Training:
    """In stage 3 all ranks take the same path. Paddle itself may crash where a graph with recompute runs twice."""
    if chosen["stage"] == 3:
        training = training._replace(by_rank=False)
    if any("recompute" in call.mode for path in net.paths for call in path) and training.backward == "twice":
        training = training._replace(backward="once")
    return training


FOUND: dict[str, tuple[Net, dict[str, Any]]] = {
    "a weight is frozen by another unit": (
        Net(3, (Part("scale"), Part("linear", frozen=True), Part("linear", tied=True)), ((Call(0), Call(2)),)),
        {},
    ),
    "the net itself uses what is frozen": (
        Net(3, (Part("scale"), Part("linear", frozen=True)), ((Call(0), Call(1, "functional")),), gains=1),
        {},
    ),
    "nothing before a frozen parameter needs a gradient but what is inside": (
        Net(3, (Part("block", inner=(Part("block", frozen=True, inner=(Part("linear"),)),)),), ((Call(0), Call(0)),)),
        {"units": [nn.Linear]},
    ),
    "what is frozen is used beside the input": (
        Net(3, (Part("linear"), Part("aside", frozen=True)), ((Call(0), Call(1)),)),
        {"units": [nn.Linear, Aside]},
    ),
    "a parameter is used under recompute and without": (
        Net(3, (Part("scale"),), ((Call(0), Call(0), Call(0, "recompute, reentrant")),)),
        {"units": [nn.Linear]},
    ),
}
"""Nets that were trained wrongly once, and settings that matter to them."""


@pytest.mark.parametrize("nranks", [1, 2])
@pytest.mark.parametrize("name", FOUND)
def test_nets_that_were_trained_wrongly_once(name: str, nranks: int) -> None:
    net, needed = FOUND[name]
    for overlap in (False, True):
        flags = {"allgather_overlap": overlap, "reduce_overlap": overlap, "comm_buffer_size_MB": 1e-6}
        _compare(nranks, net, Training(), {"stage": 3, **flags, **needed})


def _has_trained(net: Net) -> bool:
    with unique_name.guard():
        return any(not param.stop_gradient for param in build(net).parameters())


@pytest.mark.parametrize(("kind", "nranks", "few"), RUNS, ids=lambda value: str(value))
def test_random_nets(kind: str, nranks: int, few: int) -> None:
    @settings(
        max_examples=EXAMPLES or few,
        derandomize=not EXAMPLES,
        # Each failure costs the ranks their lives, and the next try new ones.
        phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(nets(), TRAININGS, _settings(KINDS[kind]))
    def run(net: Net, training: Training, chosen: dict[str, Any]) -> None:
        assume(_has_trained(net))
        _compare(nranks, net, _allowed(net, training, chosen), chosen)

    run()
