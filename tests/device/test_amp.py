"""Paddle's own mixed precision, ``auto_cast``, ``decorate`` and ``GradScaler``, on the stand-in, plain and sharded.

On CPU all three have no effect. Every function whose name starts with an underscore and that takes a rank runs in a
process that has the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle
import pytest
from paddle import nn
from paddle.utils import unique_name

from hp_sharding import full_parameters
from tests.device import standin
from tests.device.running import on_device
from tests.dist import test_precision
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_close, assert_equal
from tests.sides import SETTINGS, Factory, Plain, play
from tests.training import digest

pytestmark = pytest.mark.usefixtures("standin_device")

STEPS = 20
_PACE = standin.Pace(latency_ms=0.5, jitter_ms=0.5)
_STAGES = {name: {**SETTINGS[name], "comm_buffer_size_MB": 0.01} for name in ("stage 1", "stage 2", "stage 3")}
_LIMIT_S = 150.0


class Mode(NamedTuple):
    """How a model is trained.

    Attributes:
        level: of ``auto_cast``; with "O2" model and optimizer are decorated, with master weights. "O0": without.
        dtype: of ``auto_cast``.
        optimizer: which.
    """

    level: str
    dtype: str
    optimizer: str = "AdamW"

    def decorate(self, model: nn.Layer, optimizer: Any) -> Any:
        """What the user does before wrapping: casts the model in place. Returns the optimizer."""
        if self.level == "O2":
            _, optimizer = paddle.amp.decorate(model, optimizer, level="O2", dtype=self.dtype, master_weight=True)
        return optimizer

    def make_optimizer(self, model: nn.Layer) -> Any:
        """A new one, decorated together with ``model``."""
        return self.decorate(model, make_optimizer(self.optimizer, model))

    def loss(self, model: nn.Layer, batch: Any) -> paddle.Tensor:
        """Of a forward under ``auto_cast``."""
        if self.level == "O0":
            return loss_of(model, batch)
        with paddle.amp.auto_cast(level=self.level, dtype=self.dtype):
            return loss_of(model, batch)


MODES = {
    f"{level}, {dtype}, {optimizer}": Mode(level, dtype, optimizer)
    for level, dtype, optimizer in [
        ("O1", "float16", "AdamW"),
        ("O1", "bfloat16", "AdamW"),
        ("O2", "float16", "AdamW"),
        ("O2", "bfloat16", "AdamW"),
        ("O2", "float16", "Momentum"),
        ("O2", "bfloat16", "Momentum"),
    ]
}
_SHARDED = [how for how in MODES if "AdamW" in how]
_CLOSE = {"float16": 0.01, "bfloat16": 0.04}
"""Of losses, relative: some times the distance of two neighbours."""


def make_scaler(**options: Any) -> Any:
    """A ``GradScaler`` that can say what it does: numpy 2.4 makes no number of a scale with an axis any more."""
    scaler = paddle.amp.GradScaler(**options)
    scaler._scale = scaler._scale.reshape([])
    return scaler


# ---- one process ----


class _Curve(NamedTuple):
    """A training run of one process without sharding.

    Attributes:
        losses: of each step.
        scales: that the scaler had in each step.
        skipped: the steps that changed no parameter.
        dtypes: of the parameters.
        masters: of the master weights.
    """

    losses: list[float]
    scales: list[float]
    skipped: list[int]
    dtypes: set[str]
    masters: set[str]


def _curve(name: str, mode: Mode, scaler: Any = None) -> _Curve:
    model = make_model(name)
    optimizer = mode.make_optimizer(model)
    losses, scales, skipped = [], [], []
    for step in range(STEPS):
        before = digest(model)
        loss = mode.loss(model, make_batch(name, step % 4, 0))
        losses.append(float(loss))
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scales.append(float(scaler._scale))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.clear_grad()
        skipped += [step] if digest(model) == before else []
    masters = optimizer.state_dict().get("master_weights", {}).values()
    return _Curve(losses, scales, skipped, _dtypes(model.parameters()), _dtypes(masters))


def _dtypes(tensors: Iterable[paddle.Tensor]) -> set[str]:
    return {str(tensor.dtype) for tensor in tensors}


def _curves(rank: int, nranks: int) -> dict[tuple[str, str], _Curve]:
    paddle.set_device("npu")
    found = {}
    for name in ("gpt", "mlp"):
        for how, mode in MODES.items():
            found[name, how] = _curve(name, mode)
            found[name, mode.optimizer] = _curve(name, Mode("O0", "float32", mode.optimizer))
        scaler = make_scaler(init_loss_scaling=2.0**30, decr_ratio=2.0**-8, incr_every_n_steps=3)
        found[name, "scaled"] = _curve(name, Mode("O2", "float16", "Momentum"), scaler)
    return found


@pytest.fixture(scope="module")
def curves(standin_device: None) -> dict[tuple[str, str], _Curve]:
    """Of plain Paddle in one process, by model and mode; in float32 by model and optimizer."""
    found: dict[tuple[str, str], _Curve] = on_device(_curves, 1, timeout_s=_LIMIT_S)[0]
    return found


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_one_process_trains_in_16_bits_as_in_float32(
    curves: dict[tuple[str, str], _Curve], name: str, how: str
) -> None:
    mode, found = MODES[how], curves[name, how]
    exact = curves[name, mode.optimizer].losses
    assert exact[-1] < 0.8 * exact[0]
    assert found.losses != exact, "nothing is computed in 16 bits"
    np.testing.assert_allclose(found.losses, exact, rtol=_CLOSE[mode.dtype])
    if mode.level == "O2":
        norms = {"paddle.float32"} if name == "gpt" and mode.dtype == "float16" else set()
        assert found.dtypes == {f"paddle.{mode.dtype}"} | norms
        assert found.masters == {"paddle.float32"}
    else:
        assert (found.dtypes, found.masters) == ({"paddle.float32"}, set())


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_a_scaler_s_scale_shrinks_and_grows_and_steps_are_skipped(
    curves: dict[tuple[str, str], _Curve], name: str
) -> None:
    found = curves[name, "scaled"]
    assert found.scales[0] == 2.0**30
    shrinks = [step for step in range(STEPS - 1) if found.scales[step + 1] < found.scales[step]]
    grows = [step for step in range(STEPS - 1) if found.scales[step + 1] > found.scales[step]]
    assert shrinks[0] == 0
    assert grows
    assert set(shrinks) <= set(found.skipped) <= {*shrinks, STEPS - 1}


# ---- two ranks ----


class _Run(NamedTuple):
    """A sharded run on one rank, or a plain one of all ranks in turn.

    Attributes:
        losses: of each step; a column for each rank that it is of.
        params: what the layers compute with at the end, in float32.
        masters: what the optimizer updates.
        dtypes: of the parameters.
    """

    losses: npt.NDArray[np.float64]
    params: Values
    masters: Values
    dtypes: set[str]


def _trained(new: Factory, name: str, mode: Mode) -> _Run:
    side = new(lambda: make_model(name), mode.make_optimizer)
    losses = []
    for step in range(STEPS):
        losses.append(side.backward(lambda rank, step=step: mode.loss(side.model, make_batch(name, step % 4, rank))))
        side.step()
        side.clear_grad()
    with full_parameters(side.model):
        params = {key: param.astype("float32").numpy() for key, param in side.model.named_parameters()}
    return _Run(np.array(losses), params, _masters(side), _dtypes(side.model.parameters()))


def _masters(side: Any) -> Values:
    if side.sharded:
        return test_precision._masters(side)
    masters = side.optimizer.state_dict().get("master_weights", {})
    return {name: masters.get(param.name, param).numpy() for name, param in side.model.named_parameters()}


def _on_ranks(rank: int, nranks: int, name: str) -> dict[str, dict[str, _Run]]:
    """For each mode the plain run, and the sharded ones by their settings."""
    found: dict[str, dict[str, Any]] = {}
    for how in _SHARDED:
        with unique_name.guard():
            plain = _trained(lambda model, optimizer: Plain(model, optimizer, nranks), name, MODES[how])
        sharded = {stage: play(rank, nranks, _trained, _STAGES[stage], name, MODES[how])[0] for stage in _STAGES}
        found[how] = {"plain": plain, **sharded}
    return found


@pytest.fixture(scope="module")
def runs(standin_device: None) -> list[dict[str, dict[str, _Run]]]:
    """Of each of two ranks, by mode and by stage, beside plain Paddle's of both."""
    return on_device(_on_ranks, 2, "gpt", pace=_PACE, timeout_s=_LIMIT_S)


@pytest.mark.parametrize("stage", _STAGES)
@pytest.mark.parametrize("how", [how for how in _SHARDED if "O1" in how])
def test_auto_cast_over_float32_parameters_gives_what_one_process_gives(
    runs: list[dict[str, dict[str, _Run]]], how: str, stage: str
) -> None:
    """Bit for bit: gradients are float32, and so is their sum."""
    for rank, run in enumerate(runs):
        found, plain = run[how][stage], run[how]["plain"]
        np.testing.assert_array_equal(found.losses, plain.losses[:, [rank]])
        assert_equal(found.params, plain.params, f"rank {rank}")


@pytest.mark.parametrize("stage", _STAGES)
@pytest.mark.parametrize("how", [how for how in _SHARDED if "O2" in how])
def test_a_decorated_model_trains_as_in_one_process(
    runs: list[dict[str, dict[str, _Run]]], how: str, stage: str
) -> None:
    """Sums of gradients are float32 here and have 16 bits there, so this is as near as 16 bits are."""
    mode, first = MODES[how], runs[0][how]["stage 1"]
    for rank, run in enumerate(runs):
        found, plain = run[how][stage], run[how]["plain"]
        assert plain.losses[-2:].mean() < 0.8 * plain.losses[:2].mean()
        np.testing.assert_allclose(found.losses, plain.losses[:, [rank]], rtol=_CLOSE[mode.dtype])
        assert found.dtypes == plain.dtypes
        assert_close(found.masters, plain.masters, 0.1, f"rank {rank}")
        assert_equal(found.masters, first.masters, f"masters, rank {rank}")
        assert_equal(found.params, first.params, f"parameters, rank {rank}")
        rounded = [name for name, master in found.masters.items() if (found.params[name] != master).any()]
        assert len(rounded) > 10, "there is nothing that only a master can hold"
        for name in rounded:
            np.testing.assert_array_equal(found.params[name], _rounded(found.masters[name], mode.dtype), err_msg=name)


def _rounded(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    return paddle.to_tensor(values).astype(dtype).astype("float32").numpy()
