"""Gradients: each is scaled once in every layout, whoever adds up what and when; no old value is among them."""

from __future__ import annotations

import contextlib

import paddle
import pytest
from paddle import nn

from hp_sharding import full_parameters
from tests import harness
from tests.dist import test_accumulation, test_replicas
from tests.lanes import wrap
from tests.models import loss_of, loss_on, make_batch, make_model, make_optimizer
from tests.reference import Ranks, Values, assert_close, assert_equal, values
from tests.sides import BOTH, SETTINGS, Factory, Settings, compare

ALL: Settings = {**SETTINGS, **{f"{name}, 2 replicas": chosen for name, chosen in test_replicas.SETTINGS.items()}}
STAGES = ("stage 1", "stage 2", "stage 3")


# -- scale -------------------------------------------------------------------------------------------------------------


def _gradients(rank: int, nranks: int, settings: Settings) -> dict[str, Values]:
    """The gradient of one backward, and of four equal ones of which three are kept, or reduced at once."""
    found = {}
    for name, chosen in settings.items():
        model = make_model("mlp")
        model, optimizer, _ = wrap(model, make_optimizer("SGD", model), nranks, **chosen)
        for how, count, waits in (("one", 1, False), ("four", 4, False), ("four, kept", 4, True)):
            for micro in range(count):
                with optimizer.no_sync() if waits and micro < 3 else contextlib.nullcontext():
                    loss_of(model, make_batch("mlp", 0, rank)).backward()
            found[f"{name}: {how}"] = {key: optimizer.full_grad(p).numpy() for key, p in model.named_parameters()}
            optimizer.clear_grad()
    return found


@pytest.mark.parametrize(("nranks", "replicas"), [(2, ""), (2, ", 2 replicas"), (4, ", 2 replicas")])
def test_the_gradient_is_the_mean_once_and_four_times_it_is_four_times_the_mean(nranks: int, replicas: str) -> None:
    plain = make_model("mlp")
    Ranks(plain, nranks).backward(loss_on(plain, "mlp", 0))
    expected = {name: param.grad.numpy() for name, param in plain.named_parameters()}
    settings = {stage + replicas: ALL[stage + replicas] for stage in STAGES}
    for found in harness.run(_gradients, nranks, settings):
        for how, gradients in found.items():
            times = 1 if how.endswith("one") else 4
            assert_close(gradients, {name: times * value for name, value in expected.items()}, 1e-6, how)


def _nested(rank: int, nranks: int) -> None:
    """Among replicas there are two things to wait for; an inner block restores what the outer one had asked for."""
    model = make_model("mlp")
    model, optimizer, calls = wrap(model, make_optimizer("SGD", model), nranks, **test_replicas.SETTINGS["stage 2"])

    def sent() -> set[str]:
        before = len(calls)
        loss_of(model, make_batch("mlp", 0, rank)).backward()
        return {call.lane for call in calls[before:]} & {"reduce", "replicate"}

    both, inside, nothing = {"reduce", "replicate"}, {"reduce"}, set[str]()
    assert sent() == both
    with optimizer.no_sync(replicate_only=True):
        assert sent() == inside
        with optimizer.no_sync():
            assert sent() == nothing
        assert sent() == inside, "the inner block has ended the outer one, or stays"
        with contextlib.suppress(ZeroDivisionError), optimizer.no_sync():
            raise ZeroDivisionError
        assert sent() == inside, "the exception has switched something"
    with optimizer.no_sync():
        with optimizer.no_sync(replicate_only=True):
            assert sent() == nothing
        assert sent() == nothing
    assert sent() == both
    optimizer.clear_grad()


def test_no_sync_nests_among_replicas() -> None:
    harness.run(_nested, 4)


# -- what was there before ---------------------------------------------------------------------------------------------


class _Choosing(nn.Layer):
    """Runs the layers that it is told to run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(9, 9) for _ in range(4)])

    def forward(self, x: paddle.Tensor, chosen: list[int]) -> paddle.Tensor:
        for index in chosen:
            x = paddle.tanh(self.layers[index](x))
        return x.square().mean()


CHOSEN = ([0, 1, 2, 3], [0, 2], [0, 1, 3], [2, 3])


def _gradients_of_steps(rank: int, nranks: int, set_to_zero: bool, settings: Settings) -> dict[str, list[Values]]:
    """The gradients that each step has used, where another step has left some that this one has no new ones for."""
    found = {}
    for name, chosen in settings.items():
        paddle.seed(1)
        model = _Choosing()
        model, optimizer, _ = wrap(model, make_optimizer("Momentum", model), nranks, **chosen)
        steps = []
        for step, layers in enumerate(CHOSEN):
            model(make_batch("mlp", step, rank)[0], layers).backward()
            gradients = {key: optimizer.full_grad(p) for key, p in model.named_parameters()}
            steps.append({key: g.numpy() for key, g in gradients.items() if g is not None})
            optimizer.step()
            optimizer.clear_grad(set_to_zero)
        with full_parameters(model):
            steps.append(values(model))
        found[name] = steps
    return found


LEFT: Settings = {
    f"stage {stage}, {how}": {"stage": stage, "comm_buffer_size_MB": 1e-6, **flags}
    for stage in (1, 2, 3)
    for how, flags in (("plain", {}), ("overlap", {**BOTH, "comm_buffer_size_MB": 1e-6}))
}
REPLICAS: Settings = {name: {**chosen, "n_replicas": 2} for name, chosen in LEFT.items() if "1" not in name}


@pytest.mark.parametrize("set_to_zero", [True, False])
@pytest.mark.parametrize(("nranks", "settings"), [(2, LEFT), (4, REPLICAS)], ids=["2 ranks", "2 x 2"])
def test_nothing_of_an_earlier_step_is_in_a_gradient(nranks: int, settings: Settings, set_to_zero: bool) -> None:
    """Storage is used again for the next bucket and the next step; overlap and stage change no bit of a gradient."""
    for found in harness.run(_gradients_of_steps, nranks, set_to_zero, settings):
        first = next(iter(found))
        for name, steps in found.items():
            for step, gradients in enumerate(steps):
                assert_equal(gradients, found[first][step], f"{name} against {first}, step {step}:")
        for step, gradients in enumerate(found[first][:-1]):
            without = {f"layers.{index}.bias" for index in range(4) if index not in CHOSEN[step]}
            zero = {key for key, value in gradients.items() if not value.any()}
            assert without & {*gradients} <= zero, f"step {step}: an old gradient in a layer that has not run"
            assert not {f"layers.{index}.bias" for index in CHOSEN[step]} & zero


def _first_used_late(new: Factory, waits: bool) -> dict[str, Values]:
    """A layer that runs in the last of three backwards only, beside others that have added up two already."""
    side = new(_Choosing, lambda model: make_optimizer("SGD", model))
    for step in range(3):
        for micro in range(3):
            last = micro == 2
            with contextlib.nullcontext() if last or not waits else side.no_sync():
                side.backward(
                    lambda rank, n=3 * step + micro, last=last: side.model(
                        make_batch("mlp", n, rank)[0], [0, 1, 2] if last else [0, 1]
                    )
                )
        side.step()
        side.clear_grad(set_to_zero=False)
    return {"end": side.values()}


@pytest.mark.parametrize("waits", [True, False])
def test_a_layer_first_used_in_the_last_of_several_backwards(waits: bool) -> None:
    harness.run(compare, 2, _first_used_late, SETTINGS, test_accumulation.SUM_ORDER, waits)
    harness.run(compare, 4, _first_used_late, test_replicas.SETTINGS, test_replicas.ORDER, waits)
