"""States of ranks: each saves its own and goes on from it, and from no other's; ``sharded_state_dict`` is all of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.load_state_dict import load_state_dict
from paddle.distributed.flex_checkpoint.dcp.save_state_dict import save_state_dict
from paddle.utils import unique_name

from hp_sharding import full_parameters
from hp_sharding.errors import ConfigError
from tests import harness
from tests.lanes import wrap
from tests.reference import Values, assert_equal, values
from tests.sides import BOTH

WIDTH = 7


class _Layer(nn.Layer):
    """A product in float32, whatever its parameters are of."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([n_in, n_out])
        self.bias = self.create_parameter([n_out], is_bias=True)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return nn.functional.linear(x.astype("float32"), self.weight.astype("float32"), self.bias.astype("float32"))


class _Net(nn.Layer):
    """A weight that both ranks have a part of, one of which is a single element; running statistics; a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(3)
        self.first, self.norm, self.second = _Layer(WIDTH, WIDTH), nn.BatchNorm1D(WIDTH), _Layer(WIDTH, 1)
        self.cut = self.create_parameter([257])
        self.tied = nn.LayerList([nn.Layer()])
        self.tied[0].add_parameter("weight", self.cut)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.second(self.norm(self.first(x))) * self.cut.astype("float32").square().sum()


class _Run(NamedTuple):
    """A wrapped model on this rank, as a process of its own would have it."""

    model: nn.Layer
    optimizer: Any
    rank: int

    def train(self, steps: range) -> None:
        for step in steps:
            paddle.seed(10 * step + self.rank)
            with unique_name.guard():
                self.model(paddle.randn([4, WIDTH])).square().mean().backward()
                self.optimizer.step()
            self.optimizer.clear_grad()

    def end(self) -> Values:
        with full_parameters(self.model):
            return {name: value.astype(np.float32) for name, value in values(self.model).items()}


OPTIONS: dict[str, dict[str, Any]] = {"AdamW": {}, "ASGD": {"batch_num": 2}}


def _make(rank: int, nranks: int, kind: str, settings: dict[str, Any]) -> _Run:
    with unique_name.guard():
        model = _Net()
        inner = getattr(paddle.optimizer, kind)(0.05, parameters=model.parameters(), **OPTIONS[kind])
        model, optimizer, _ = wrap(model, inner, nranks, **settings)
    return _Run(model, optimizer, rank)


# -- each rank its own -------------------------------------------------------------------------------------------------


def _resumes(rank: int, nranks: int, kind: str, settings: dict[str, Any], folder: Path) -> list[str]:
    """Rolls back and goes on, in this optimizer and in a new one; returns what is said of the other rank's state."""
    run = _make(rank, nranks, kind, settings)
    run.train(range(3))
    with full_parameters(run.model):
        paddle.save(run.model.state_dict(), str(folder / f"{rank}.pdparams"))
    paddle.save(run.optimizer.state_dict(), str(folder / f"{rank}.pdopt"))
    run.train(range(3, 6))
    expected = run.end()
    messages = []
    for other in (run, _make(rank, nranks, kind, settings)):
        with pytest.raises(ConfigError) as error:
            other.optimizer.set_state_dict(paddle.load(str(folder / f"{(rank + 1) % nranks}.pdopt")))
        messages.append(str(error.value))
        with full_parameters(other.model):
            other.model.set_state_dict(paddle.load(str(folder / f"{rank}.pdparams")))
        with unique_name.guard():
            other.optimizer.set_state_dict(paddle.load(str(folder / f"{rank}.pdopt")))
        other.train(range(3, 6))
        assert_equal(other.end(), expected)
    return messages


SETTINGS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1, **BOTH},
    "stage 3": {"stage": 3, **BOTH},
    "resharded": {"stage": 2, "reshard_after_step": True, **BOTH},
    "mixed": {"stage": 2, "param_dtype": "bfloat16", **BOTH},
    "mixed, stage 3": {"stage": 3, "param_dtype": "bfloat16", **BOTH},
}


@pytest.mark.parametrize(("kind", "setting"), [("AdamW", "stage 1"), ("ASGD", "stage 3"), ("AdamW", "mixed")])
def test_each_rank_goes_on_from_its_own_state_only(kind: str, setting: str, tmp_path: Path) -> None:
    for rank, messages in enumerate(harness.run(_resumes, 2, kind, SETTINGS[setting], tmp_path)):
        for message in messages:
            assert message.startswith(
                f"rank {rank}: this optimizer state is of another layout. Expected rank {rank} of 2"
            )
            assert f"found rank {1 - rank} of 2" in message


# -- Paddle's own checkpoints ------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """What a rank reads from Paddle's checkpoint: key -> shape of the whole, and elements by where they begin."""

    shapes: dict[str, tuple[int, ...]]
    spans: dict[str, list[tuple[int, int]]]


def _state_of(run: _Run) -> dict[str, Any]:
    model = run.optimizer.model_sharded_state_dict()
    return {**model, **run.optimizer.sharded_state_dict(run.model.sharded_state_dict())}


def _through_paddle(rank: int, nranks: int, case: _Case, folder: str) -> _Found:
    """Saves with ``flex_checkpoint``, loads into a model that was trained otherwise, and goes on."""

    def place(run: _Run) -> Any:
        return full_parameters(run.model) if case.whole else contextlib.nullcontext()

    run = _make(rank, nranks, case.kind, SETTINGS[case.setting])
    run.train(range(3))
    with place(run):
        save_state_dict(_state_of(run), folder, save_replicas=True)
    run.train(range(3, 5))
    other = _make(rank, nranks, case.kind, SETTINGS[case.setting])
    other.train(range(10, 12))
    with place(other):
        load_state_dict(_state_of(other), folder)
    other.train(range(3, 5))
    assert_equal(other.end(), run.end())
    metadata = paddle.load(f"{folder}/0.metadata").state_dict_metadata
    shapes, spans = {}, {}
    for key, entries in metadata.items():
        shapes[key] = tuple(entries[0].global_shape)
        whole = int(np.prod(shapes[key]))
        for entry in entries:
            assert entry.local_shape == entry.global_shape == shapes[key]
            assert entry.is_flattened == (entry.flattened_range is not None)
        spans[key] = sorted(entry.flattened_range or (0, whole) for entry in entries)
    return _Found(shapes, spans)


MOMENTS = {
    "AdamW": (["moment1_0", "moment2_0"], ["beta1_pow_acc_0", "beta2_pow_acc_0"]),
    "ASGD": (["d_0", "y_0.0", "y_0.1"], ["m_0"]),
}


class _Case(NamedTuple):
    """What is trained; ``whole``: saved and loaded inside ``full_parameters``."""

    kind: str
    setting: str
    whole: bool = False


CASES = [
    _Case("AdamW", "stage 1"),
    _Case("AdamW", "resharded"),
    _Case("ASGD", "stage 3"),
    _Case("AdamW", "stage 3", whole=True),
    _Case("AdamW", "mixed"),
    _Case("AdamW", "mixed, stage 3"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_paddles_checkpoints_take_all_of_the_state_and_give_it_back(case: _Case, tmp_path: Path) -> None:
    """On a CPU they load what has the same layout; that is enough to see that the tensors are those in use."""
    found = harness.run(_through_paddle, 2, case, str(tmp_path))[0]
    model = _Net()
    params = {name: tuple(param.shape) for name, param in model.named_parameters()}
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    of_elements, of_parameters = MOMENTS[case.kind]
    trained = [name for name in params if "_mean" not in name and "_variance" not in name]
    expected = state | {f"{name}.{moment}": params[name] for name in trained for moment in of_elements}
    expected |= {f"{name}.{moment}": (1,) for name in trained for moment in of_parameters}
    if "mixed" in case.setting:  # which leaves norms in float32
        expected |= {f"{name}.w_0": params[name] for name in trained if "norm" not in name}
    assert found.shapes == expected
    for key, spans in found.spans.items():
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])], key
        assert spans[-1][1] == int(np.prod(expected[key])), key
    assert found.spans[f"cut.{of_elements[0]}"] == [(0, 256), (256, 257)]
    freed = case.setting not in ("stage 1", "mixed") and not case.whole
    assert found.spans["cut"] == found.spans["tied.0.weight"] == ([(0, 256), (256, 257)] if freed else [(0, 257)])


def _foreign(rank: int, nranks: int) -> None:
    run = _make(rank, nranks, "AdamW", SETTINGS["stage 1"])
    run.train(range(1))
    with pytest.raises(ConfigError, match=r"the model's has no parameter '.*', which this optimizer updates"):
        run.optimizer.sharded_state_dict(nn.Linear(2, 2).sharded_state_dict())


def test_the_state_of_another_model_is_refused() -> None:
    harness.run(_foreign, 2)
