"""``state_dict()`` and ``set_state_dict()``: what goes on from a state, and what is refused before anything changes."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.utils import unique_name

from hp_sharding import ShardingConfig, full_parameters
from hp_sharding.errors import ConfigError
from hp_sharding.plain import PlainOptimizer
from hp_sharding.states import RankState
from tests.fakes import WaitingLane, values, wrap

Array = np.ndarray[Any, Any]
State = dict[str, Any]
WIDTH = 6


class _Layer(nn.Layer):
    """A product in float32, whatever its parameters are of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([WIDTH, WIDTH])
        self.bias = self.create_parameter([WIDTH], is_bias=True)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return nn.functional.linear(x.astype("float32"), self.weight.astype("float32"), self.bias.astype("float32"))


class _Net(nn.Layer):
    """Two layers, and one more that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(5)
        self.first, self.second, self.rare = _Layer(), _Layer(), _Layer()
        self.gain = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: paddle.Tensor, step: int) -> paddle.Tensor:
        x = self.second(self.first(x)) * self.gain.astype("float32")
        return x + self.rare(x) if step >= 4 else x


Make = Callable[[nn.Layer], Any]


def _optimize(kind: str, **options: Any) -> Make:
    def make(model: nn.Layer) -> Any:
        rate = paddle.optimizer.lr.ExponentialDecay(0.05, gamma=0.5)
        return getattr(paddle.optimizer, kind)(rate, parameters=model.parameters(), **options)

    return make


class _Run:
    """A model and its optimizer, with names as a process of their own would give. ``settings`` None: plain."""

    def __init__(self, make: Make, settings: dict[str, Any] | None, *, frozen: bool = False) -> None:
        with unique_name.guard():
            self.model = _Net()
            if frozen:
                self.model.to(dtype="bfloat16")
                for param in self.model.rare.parameters():
                    param.stop_gradient = True
            self.inner = make(self.model)
            if settings is None:
                self.optimizer: Any = PlainOptimizer(self.inner, ShardingConfig(), 0)
            else:
                self.optimizer = wrap(self.model, self.inner, **settings).optimizer

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            paddle.seed(step)
            with unique_name.guard():  # names of moments are given in the first step of a parameter
                loss = self.model(paddle.randn([3, WIDTH]), step).square().mean()
                loss.backward()
                self.optimizer.step()
            self.optimizer.clear_grad(set_to_zero=False)
            if isinstance(self.inner._learning_rate, paddle.optimizer.lr.LRScheduler):
                self.inner._learning_rate.step()
            losses.append(float(loss))
        return losses

    def saved(self) -> tuple[io.BytesIO, io.BytesIO]:
        files = io.BytesIO(), io.BytesIO()
        with full_parameters(self.model):
            paddle.save(self.model.state_dict(), files[0])
        paddle.save(self.optimizer.state_dict(), files[1])
        return files

    def load(self, files: tuple[io.BytesIO, io.BytesIO], **options: Any) -> None:
        for file in files:
            file.seek(0)
        with full_parameters(self.model):
            self.model.set_state_dict(paddle.load(files[0]))
        with unique_name.guard():
            self.optimizer.set_state_dict(paddle.load(files[1], **options))

    def end(self) -> list[Array]:
        with full_parameters(self.model):
            return values([param.astype("float32") for param in self.model.parameters()])

    def snapshot(self) -> dict[str, Any]:
        """All that the optimizer keeps, as values."""
        found: dict[str, Any] = {}
        for key, value in self.optimizer.state_dict().items():
            for name, tensor in value.items() if isinstance(value, dict) else [("", value)]:
                found[f"{key} {name}"] = tensor.numpy().copy() if isinstance(tensor, paddle.Tensor) else tensor
        return found


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


MIXED = {"stage": 2, "param_dtype": "bfloat16"}
SETTINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "stage 2": {"stage": 2, "allgather_overlap": True},
    "stage 3": {"stage": 3},
    "mixed": MIXED,
    "mixed, stage 3": {**MIXED, "stage": 3},
}
KINDS: dict[str, Make] = {
    "AdamW": _optimize("AdamW", name="mine"),
    "ASGD": _optimize("ASGD", batch_num=2),
    "SGD": _optimize("SGD"),
    "Adadelta": _optimize("Adadelta"),
}


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("into", ["fresh", "trained", "itself"])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_a_saved_state_goes_on_bitwise(setting: str, kind: str, into: str) -> None:
    """Also into an optimizer that has since used a parameter which had no moments when the state was saved."""
    run = _Run(KINDS[kind], SETTINGS[setting])
    run.train(range(3))
    files = run.saved()
    losses = run.train(range(3, 6))
    other = run if into == "itself" else _Run(KINDS[kind], SETTINGS[setting])
    end, state = run.end(), run.snapshot()
    if into == "trained":
        other.train(range(10, 13))
    other.load(files)
    assert other.train(range(3, 6)) == losses
    assert all(map(np.array_equal, other.end(), end))
    _assert_same(other.snapshot(), state)


@pytest.mark.parametrize("into", ["fresh", "trained"])
@pytest.mark.parametrize("setting", ["plain", "stage 2", "mixed"])
def test_a_state_from_before_the_first_step(setting: str, into: str, caplog: pytest.LogCaptureFixture) -> None:
    run = _Run(KINDS["AdamW"], SETTINGS[setting])
    files = run.saved()
    losses = run.train(range(2))
    other = _Run(KINDS["AdamW"], SETTINGS[setting])
    if into == "trained":
        other.train(range(4, 6))
    other.load(files)
    assert caplog.messages == []
    assert other.train(range(2)) == losses
    _assert_same(other.snapshot(), run.snapshot())


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_arrays_do_as_well_as_tensors(setting: str) -> None:
    run, other = (_Run(KINDS["AdamW"], SETTINGS[setting]) for _ in range(2))
    run.train(range(2))
    other.load(run.saved(), return_numpy=True)
    _assert_same(other.snapshot(), run.snapshot())


@pytest.mark.filterwarnings("ignore:Accumulating with FP16/BF16")
def test_arrays_of_bits_are_bfloat16() -> None:
    run = _Run(_optimize("Momentum"), None)
    run.model.to(dtype="bfloat16")
    name = run.model.gain.name
    state = {f"{name}_velocity_0": np.array([0x3FC0], np.uint16), "LR_Scheduler": run.inner._learning_rate.state_dict()}
    run.optimizer.set_state_dict(state)
    kept = run.inner._accumulators["velocity"][name]
    assert kept.dtype == paddle.bfloat16
    assert kept.item() == 1.5


def test_the_other_name_of_the_method_looks_as_closely() -> None:
    for setting in ("plain", "stage 2"):
        run = _Run(KINDS["AdamW"], SETTINGS[setting])
        with pytest.raises(ConfigError, match="expected a dict"):
            run.optimizer.load_state_dict([])


def test_a_parameter_that_was_not_updated_yet_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    run = _Run(KINDS["AdamW"], SETTINGS["stage 2"])
    run.train(range(2))
    files = run.saved()
    with caplog.at_level(logging.WARNING, "hp_sharding"):
        run.load(files)
        assert caplog.messages == []
        run.train(range(4, 6))
        run.load(files)
    rare = [param.name for param in run.model.rare.parameters()]
    (message,) = caplog.messages
    assert message.startswith("rank 0: the optimizer state has nothing of 2 of 7 parameters, such as '")
    assert not any(key.startswith(name) for key in run.optimizer.state_dict() for name in rare)


def test_a_parameter_that_thaws_after_a_load_gets_moments() -> None:
    """Paddle asserts there, since what it has loaded lacks them."""
    for setting in ("plain", "stage 2"):
        run, other = (_Run(KINDS["AdamW"], SETTINGS[setting]) for _ in range(2))
        run.train(range(2))
        other.load(run.saved())
        other.train(range(4, 5))


def test_what_the_users_optimizer_had_loaded_before_is_forgotten() -> None:
    """With anything left of it Paddle asserts when the next parameter gets moments."""
    run, other = (_Run(KINDS["AdamW"], None) for _ in range(2))
    run.train(range(2))
    scheduler = run.inner._learning_rate.state_dict()
    other.inner.set_state_dict({"of_another_model_0": paddle.ones([1]), "LR_Scheduler": scheduler})
    other.load(run.saved())
    other.train(range(4, 5))


def test_a_state_from_before_a_thaw() -> None:
    make = _optimize("AdamW", multi_precision=True)
    run = _Run(make, {"stage": 2}, frozen=True)
    run.train(range(2))
    files, before = run.saved(), run.end()
    for param in run.model.rare.parameters():
        param.stop_gradient = False
    run.train(range(4, 6))
    run.load(files)
    assert all(map(np.array_equal, run.end(), before))


def _thawed(make: Make, settings: dict[str, Any]) -> _Run:
    run = _Run(make, settings, frozen=True)
    for param in run.model.rare.parameters():
        param.stop_gradient = False
    return run


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["AdamW", "Momentum"])
def test_a_state_from_after_a_thaw(kind: str, stage: int) -> None:
    """What was frozen when it was wrapped has a master in the state, so its moments are a float32 slice's here too."""
    make = _optimize(kind, multi_precision=True)
    run = _thawed(make, {"stage": stage})
    run.train(range(4, 6))
    files = run.saved()
    losses, end, state = run.train(range(6, 8)), run.end(), run.snapshot()
    other = _thawed(make, {"stage": stage})
    other.load(files)
    assert not [key for key in other.optimizer.state_dict() if "fp32_master" in key]
    assert other.train(range(6, 8)) == losses
    assert all(map(np.array_equal, other.end(), end))
    _assert_same(other.snapshot(), state)


def test_a_state_that_is_refused_thaws_nothing() -> None:
    make = _optimize("AdamW", multi_precision=True)
    run, other = (_thawed(make, {"stage": 2}) for _ in range(2))
    run.train(range(4, 6))
    state = run.optimizer.state_dict()
    name = run.model.rare.weight.name
    state["master_weights"][name] = paddle.zeros([2])
    masters = set(other.optimizer.state_dict()["master_weights"])
    with pytest.raises(ConfigError, match=f"'master_weights' of parameter '{name}'"):
        other.optimizer.set_state_dict(state)
    assert name not in masters
    assert set(other.optimizer.state_dict()["master_weights"]) == masters


def test_a_scheduler_that_nobody_uses_is_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    run = _Run(KINDS["AdamW"], SETTINGS["stage 2"])
    run.train(range(1))
    other = _Run(lambda model: paddle.optimizer.AdamW(0.1, parameters=model.parameters(), name="mine"), {"stage": 2})
    with caplog.at_level(logging.WARNING, "hp_sharding"):
        other.optimizer.set_state_dict(run.optimizer.state_dict())
    assert "a learning rate scheduler's, which is not used" in caplog.text


# -- what is refused ---------------------------------------------------------------------------------------------------


def _first(state: State, part: str = "moment1") -> str:
    """A key of a tensor that is as large as any of its kind."""
    return max((key for key in state if part in key), key=lambda key: int(state[key].size))


def _without_layout(state: State) -> State:
    return {key: value for key, value in state.items() if key != "hp_sharding_layout"}


def _replaced(part: str, value: Callable[[paddle.Tensor], Any]) -> Callable[[State], State]:
    return lambda state: {**state, _first(state, part): value(state[_first(state, part)])}


def _renamed(state: State) -> State:
    return {key.replace("_layer_", "_layer_9"): value for key, value in state.items()}


def _lacking(state: State) -> State:
    return {key: value for key, value in state.items() if key != _first(state, "moment2")}


def _of_layout(before: str, after: str) -> Callable[[State], State]:
    return lambda state: {**state, "hp_sharding_layout": state["hp_sharding_layout"].replace(before, after)}


def _masters(change: Callable[[dict[str, Any]], Any]) -> Callable[[State], State]:
    return lambda state: {**state, "master_weights": change(dict(state["master_weights"]))}


def _other_size(masters: dict[str, Any]) -> dict[str, Any]:
    return {name: paddle.zeros([2]) if number == 1 else value for number, (name, value) in enumerate(masters.items())}


def _dropped_first(masters: dict[str, Any]) -> dict[str, Any]:
    return dict(list(masters.items())[1:])


Refused = dict[str, tuple[Callable[[State], Any], str]]
OF_ALL: Refused = {
    "no dict": (
        lambda state: list(state),
        "the optimizer state: expected a dict, as state_dict.. gives it, found",
    ),
    "other names": (
        _renamed,
        r"16 of 20 tensors of this optimizer state belong to no parameter",
    ),
    "one name": (
        lambda state: {**state, "linear_7.w_0_mine_moment1_0": paddle.zeros([3])},
        r"1 of 21 tensors .* such as 'linear_7.w_0_mine_moment1_0'; expected such as '.*_mine_moment1_0'",
    ),
    "another optimizer's": (
        lambda state: {**state, f"{_first(state).split('_mine')[0]}_mine_velocity_0": state[_first(state)]},
        "such as '.*_mine_velocity_0'",
    ),
    "twice": (
        lambda state: {**state, f"{_first(state)[:-1]}1": state[_first(state)]},
        "'moment1' of '.*' is there more than once",
    ),
    "a moment too few": (_lacking, "lacks 'moment2' of parameter '.*', and has moment1, beta1_pow_acc, beta2_pow_acc"),
    "another size": (
        _replaced("moment1", lambda value: paddle.zeros([3])),
        r"_mine_moment1_0': expected \[.*\] elements of float32, found \[3\]",
    ),
    "one element for many": (
        _replaced("moment1", lambda value: paddle.zeros([1])),
        r"_mine_moment1_0': expected \[.*\] elements of float32, found \[1\]",
    ),
    "integers": (
        _replaced("moment2", lambda value: value.astype("int32")),
        r"_mine_moment2_0': expected \[.*\] elements of float32, found \[.*\] of int32",
    ),
    "no tensor": (_replaced("beta1", lambda value: 0.9), r"_mine_beta1_pow_acc_0': expected \[1\] .* found a float"),
    "no scheduler's": (
        lambda state: {key: value for key, value in state.items() if key != "LR_Scheduler"},
        "learning rate is a ExponentialDecay, but this state has no 'LR_Scheduler'",
    ),
    "a scheduler's of another type": (lambda state: {**state, "LR_Scheduler": 3}, "'LR_Scheduler': expected a dict"),
}
OF_RANKS: Refused = {
    "a plain optimizer's": (
        _without_layout,
        "names no layout. Expected rank 0 of 1, .* found None. hp_sharding.lo",
    ),
    "another rank's": (
        _of_layout("rank 0 of 1", "rank 1 of 2"),
        "another layout. Expected rank 0 of 1, .* found rank",
    ),
    "other buckets'": (
        _of_layout("buckets of ", "buckets of 128,"),
        "hp_sharding.load change from one layout to an",
    ),
}
OF_MASTERS: Refused = {
    "no masters": (
        lambda state: {key: value for key, value in state.items() if key != "master_weights"},
        r"rank 0: 'master_weights' of parameter '.*': expected \[.*\] elements of float32, found none",
    ),
    "masters in a list": (_masters(list), "'master_weights': expected a dict"),
    "a master too few": (_masters(_dropped_first), "'master_weights' of parameter '.*': .* found none"),
    "a master of another size": (_masters(_other_size), r"'master_weights' of parameter '.*': .* found \[2\]"),
    "a master too many": (
        _masters(lambda masters: {**masters, "stray": paddle.zeros([2])}),
        "'master_weights' has 1 of 8 names that no parameter with a float32 master has here, such as 'stray'",
    ),
}
CASES = [
    *(("plain", name, case) for name, case in OF_ALL.items()),
    *(("stage 2", name, case) for name, case in {**OF_ALL, **OF_RANKS}.items()),
    *(("mixed", name, case) for name, case in {**OF_ALL, **OF_RANKS, **OF_MASTERS}.items()),
]


@pytest.mark.parametrize(("setting", "name", "case"), CASES, ids=[f"{setting}, {name}" for setting, name, _ in CASES])
def test_what_does_not_fit_is_refused_before_anything_changes(
    setting: str, name: str, case: tuple[Callable[[State], Any], str]
) -> None:
    change, message = case
    run, other = (_Run(KINDS["AdamW"], SETTINGS[setting]) for _ in range(2))
    run.train(range(3))
    bad = change(run.optimizer.state_dict())
    other.train(range(5, 7))
    before, values_before = other.snapshot(), other.end()
    with pytest.raises(ConfigError, match=message):
        other.optimizer.set_state_dict(bad)
    _assert_same(other.snapshot(), before)
    assert all(map(np.array_equal, other.end(), values_before))
    if setting != "plain":
        with pytest.raises(ConfigError, match=r"^rank 0: "):
            other.optimizer.set_state_dict(bad)


def test_a_state_of_a_rank_is_refused_by_a_plain_optimizer() -> None:
    run, plain = _Run(KINDS["AdamW"], SETTINGS["stage 2"]), _Run(KINDS["AdamW"], None)
    run.train(range(1))
    with pytest.raises(ConfigError, match=r"one rank of a sharded optimizer \(rank 0 of 1, .*hp_sharding.load change"):
        plain.optimizer.set_state_dict(run.optimizer.state_dict())
    assert plain.inner._accumulators_holder == {}


def test_a_state_without_moments_is_for_an_optimizer_without() -> None:
    run, other = _Run(KINDS["AdamW"], SETTINGS["stage 2"]), _Run(KINDS["SGD"], SETTINGS["stage 2"])
    run.train(range(1))
    with pytest.raises(ConfigError, match="expected none, since this SGD keeps nothing of a parameter"):
        other.optimizer.set_state_dict(run.optimizer.state_dict())


def test_masters_of_a_plain_optimizer() -> None:
    """They are made in a parameter's first step, so a state may have them of some parameters only."""
    make = _optimize("AdamW", multi_precision=True)
    run = _Run(make, None)
    run.model.to(dtype="bfloat16")
    gain, bias = run.model.gain, run.model.first.bias
    shown = {f"{gain.name}_fp32_master_0_{part}_0": paddle.full([1], 0.25) for part in ("moment1", "moment2")}
    shown |= {f"{gain.name}_fp32_master_0_beta{number}_pow_acc_0": paddle.full([1], 0.5) for number in (1, 2)}
    state = {**shown, "LR_Scheduler": run.inner._learning_rate.state_dict()}
    with pytest.raises(ConfigError, match=f"'master_weights' of parameter '{gain.name}': expected .* found none"):
        run.optimizer.set_state_dict(state)
    with pytest.raises(ConfigError, match="has 1 of 1 names that no parameter"):
        run.optimizer.set_state_dict({**state, "master_weights": {"stray": paddle.ones([1])}})
    masters = {gain.name: paddle.full([1], 1.2345), bias.name: paddle.full([WIDTH], 0.1)}
    run.optimizer.set_state_dict({**state, "master_weights": masters})
    found = run.optimizer.state_dict()
    assert found["master_weights"][gain.name].item() == pytest.approx(1.2345, rel=1e-7)
    np.testing.assert_array_equal(found["master_weights"][bias.name].numpy(), masters[bias.name].numpy())
    moments = {key: value for key, value in found.items() if isinstance(value, paddle.Tensor)}
    assert sorted(value.item() for value in moments.values()) == [0.25, 0.25, 0.5, 0.5]


def test_the_parts_of_a_split_layer_are_told_apart() -> None:
    run = _Run(KINDS["AdamW"], SETTINGS["stage 2"])
    schedule = run.optimizer._schedule
    parts = [RankState(run.inner, schedule, tensor=WaitingLane("tensor", nranks=2, rank=rank)) for rank in range(2)]
    parts[0].set_state_dict(parts[0].state_dict())
    with pytest.raises(ConfigError, match=r"Expected rank 0 of 1 \(tensor-parallel part 1 of 2\), .* found .* part 0"):
        parts[1].set_state_dict(parts[0].state_dict())
