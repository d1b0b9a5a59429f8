"""Paddle's own mixed precision, ``auto_cast``, ``decorate`` and ``GradScaler``, on the stand-in, plain and sharded.

On CPU all three have no effect. Every function whose name starts with an underscore and that takes a rank runs in a
process that has the device.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

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
from tests.sides import SETTINGS, Factory, Plain, Sharded, play
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
        model: which.
        optimizer: which.
    """

    level: str
    dtype: str
    model: str
    optimizer: str

    @property
    def in_float32(self) -> Mode:
        """The same without mixed precision."""
        return self._replace(level="O0", dtype="float32")

    def batch(self, step: int, rank: int) -> Any:
        """Four of them, in turn: few enough to be learnt."""
        return make_batch(self.model, step % 4, rank)

    def make_optimizer(self, model: nn.Layer) -> Any:
        """A new one; with "O2" it and ``model`` are decorated, as the user does before wrapping."""
        optimizer = make_optimizer(self.optimizer, model)
        if self.level == "O2":
            _, optimizer = paddle.amp.decorate(model, optimizer, level="O2", dtype=self.dtype, master_weight=True)
        return optimizer

    def loss(self, model: nn.Layer, batch: Any) -> paddle.Tensor:
        """Of a forward under ``auto_cast``."""
        if self.level == "O0":
            return loss_of(model, batch)
        with paddle.amp.auto_cast(level=self.level, dtype=self.dtype):
            return loss_of(model, batch)


MODES = {
    f"{mode.level}, {mode.dtype}, {mode.optimizer}": mode
    for mode in (
        Mode("O1", "float16", "gpt", "AdamW"),
        Mode("O1", "bfloat16", "gpt_recompute_reentrant", "AdamW"),
        Mode("O2", "float16", "gpt", "AdamW"),
        Mode("O2", "bfloat16", "gpt", "AdamW"),
        Mode("O2", "float16", "mlp", "Momentum"),
        Mode("O2", "bfloat16", "mlp", "Momentum"),
    )
}
_OWN: dict[str, dict[str, Any]] = {
    "param_dtype, bfloat16": {"param_dtype": "bfloat16"},
    "param_dtype, float16": {"param_dtype": "float16"},
    "main_grad": {"param_dtype": "bfloat16", "main_grad": True},
    "gather_dtype": {"gather_dtype": "bfloat16"},
    "reduce_dtype": {"reduce_dtype": "bfloat16"},
}
"""Settings of ours for a model of float32 parameters."""
SCALED = MODES["O2, float16, AdamW"]
_FLOATS = Mode("O0", "float32", "mlp", "AdamW")
_DECORATED = Mode("O2", "bfloat16", "mlp", "AdamW")
_SHARDED = ["O1, bfloat16, AdamW", "O2, float16, AdamW", "O2, bfloat16, AdamW"]
_CLOSE = {"float16": 0.01, "bfloat16": 0.04}
"""Of losses, relative, to those of float32: some times the distance of two neighbours."""
_CLOSER = {"float16": 0.004, "bfloat16": 0.012}
"""The same for two runs that are rounded alike but where gradients are added up."""


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


def _curve(mode: Mode, scaler: Any = None) -> _Curve:
    model = make_model(mode.model)
    optimizer = mode.make_optimizer(model)
    losses, scales, skipped = [], [], []
    for step in range(STEPS):
        before = digest(model)
        loss = mode.loss(model, mode.batch(step, 0))
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


def _curves(rank: int, nranks: int) -> dict[Mode | str, _Curve]:
    paddle.set_device("npu")
    scaler = make_scaler(init_loss_scaling=2.0**30, decr_ratio=2.0**-8, incr_every_n_steps=3)
    modes = {*MODES.values(), *(mode.in_float32 for mode in MODES.values())}
    return {"scaled": _curve(SCALED, scaler), **{mode: _curve(mode) for mode in modes}}


@pytest.fixture(scope="module")
def curves(standin_device: None) -> dict[Mode | str, _Curve]:
    """Of plain Paddle in one process."""
    found: dict[Mode | str, _Curve] = on_device(_curves, 1, timeout_s=_LIMIT_S)[0]
    return found


@pytest.mark.parametrize("how", MODES)
def test_one_process_trains_in_16_bits_as_in_float32(curves: dict[Mode | str, _Curve], how: str) -> None:
    mode = MODES[how]
    found, exact = curves[mode], curves[mode.in_float32].losses
    assert exact[-1] < 0.8 * exact[0]
    assert found.losses != exact, "nothing is computed in 16 bits"
    np.testing.assert_allclose(found.losses, exact, rtol=_CLOSE[mode.dtype])
    if mode.level == "O2":
        norms = {"paddle.float32"} if mode.model == "gpt" and mode.dtype == "float16" else set()
        assert found.dtypes == {f"paddle.{mode.dtype}"} | norms
        assert found.masters == {"paddle.float32"}
    else:
        assert (found.dtypes, found.masters) == ({"paddle.float32"}, set())


def test_a_scaler_s_scale_shrinks_and_grows_and_steps_are_skipped(curves: dict[Mode | str, _Curve]) -> None:
    found = curves["scaled"]
    assert found.scales[0] == 2.0**30
    shrinks = [step for step in range(STEPS - 1) if found.scales[step + 1] < found.scales[step]]
    grows = [step for step in range(STEPS - 1) if found.scales[step + 1] > found.scales[step]]
    assert shrinks[0] == 0 and grows
    assert found.losses[-1] < 0.8 * found.losses[0]
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


@dataclasses.dataclass(repr=False)  # pytest would print all of it with each failure
class _Runs:
    """Plain Paddle's run of both ranks by mode, and each rank's sharded ones by mode and stage.

    Attributes:
        followed: each rank's losses and waits by settings of ours, or mode, and stage.
    """

    plain: dict[str, _Run]
    ranks: list[dict[tuple[str, str], _Run]]
    followed: list[dict[tuple[str, str], tuple[list[float], int]]]


def _trained(new: Factory, mode: Mode) -> Any:
    side = new(lambda: make_model(mode.model), mode.make_optimizer)
    losses = []
    for step in range(STEPS):
        losses.append(side.backward(lambda rank, step=step: mode.loss(side.model, mode.batch(step, rank))))
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


def _followed(rank: int, nranks: int, mode: Mode, settings: dict[str, Any]) -> tuple[list[float], int]:
    """Losses of each step, and how often a real device's host could have stood still in the second half of them."""
    with unique_name.guard():
        side = Sharded(lambda: make_model(mode.model), mode.make_optimizer, rank=rank, nranks=nranks, settings=settings)
    losses, waits, batches = [], [], [mode.batch(step, rank) for step in range(STEPS)]
    for batch in batches:
        waits.append(_waits())
        losses.append(mode.loss(side.model, batch))
        losses[-1].backward()
        side.step()
        side.clear_grad()
    waited = _waits() - waits[STEPS // 2]
    return [float(loss) for loss in losses], waited


def _waits() -> int:
    """``test_blocking`` says which of them."""
    found = standin.Device().host_waits()
    return found.stream.calls + found.device.calls + found.event.blocked


def _on_ranks(rank: int, nranks: int) -> Any:
    found = _Runs({}, [{}], [{}])
    modes = {how: MODES[how] for how in _SHARDED}
    for how, mode in {**modes, "float32": _FLOATS}.items() if rank == 0 else []:
        with unique_name.guard():
            found.plain[how] = _trained(lambda model, optimizer: Plain(model, optimizer, nranks), mode)
    for stage, settings in _STAGES.items():
        for how, mode in modes.items():
            found.ranks[0][how, stage] = cast(_Run, play(rank, nranks, _trained, settings, mode)[0])
        for how in _OWN:
            found.followed[0][how, stage] = _followed(rank, nranks, _FLOATS, settings | _OWN[how])
        found.followed[0]["decorated", stage] = _followed(rank, nranks, _DECORATED, settings)
    gc.collect()
    assert standin.Device().writes_after_free() == 0
    return found.plain, found.ranks[0], found.followed[0]


@pytest.fixture(scope="module")
def runs(standin_device: None) -> _Runs:
    found = on_device(_on_ranks, 2, pace=_PACE, timeout_s=_LIMIT_S)
    return _Runs(found[0][0], [ranks for _, ranks, _ in found], [followed for _, _, followed in found])


@pytest.mark.parametrize("stage", _STAGES)
@pytest.mark.parametrize("how", _OWN)
def test_settings_of_ours_train_in_16_bits_as_one_process_in_float32(runs: _Runs, how: str, stage: str) -> None:
    plain = runs.plain["float32"].losses
    for rank, (losses, _) in enumerate(followed[how, stage] for followed in runs.followed):
        assert losses != plain[:, rank].tolist(), "nothing has 16 bits"
        np.testing.assert_allclose(losses, plain[:, rank], rtol=_CLOSE["bfloat16"], err_msg=f"rank {rank}")


@pytest.mark.parametrize("stage", _STAGES)
def test_no_step_in_mixed_precision_waits_for_the_device(runs: _Runs, stage: str) -> None:
    for followed in runs.followed:
        waits = {how: found[1] for (how, where), found in followed.items() if where == stage}
        assert waits == dict.fromkeys([*_OWN, "decorated"], 0)


@pytest.mark.parametrize("stage", _STAGES)
@pytest.mark.parametrize("how", [how for how in _SHARDED if "O1" in how])
def test_auto_cast_over_float32_parameters_gives_what_one_process_gives(runs: _Runs, how: str, stage: str) -> None:
    """Bit for bit: gradients are float32, and so is their sum."""
    plain = runs.plain[how]
    for rank, found in enumerate(run[how, stage] for run in runs.ranks):
        np.testing.assert_array_equal(found.losses, plain.losses[:, [rank]])
        assert_equal(found.params, plain.params, f"rank {rank}")


@pytest.mark.parametrize("stage", _STAGES)
@pytest.mark.parametrize("how", [how for how in _SHARDED if "O2" in how])
def test_a_decorated_model_trains_as_in_one_process(runs: _Runs, how: str, stage: str) -> None:
    """Sums of gradients are float32 here and have 16 bits there, so this is as near as 16 bits are."""
    mode, plain, first = MODES[how], runs.plain[how], runs.ranks[0][how, "stage 1"]
    assert plain.losses[-2:].mean() < 0.8 * plain.losses[:2].mean()
    for rank, found in enumerate(run[how, stage] for run in runs.ranks):
        np.testing.assert_allclose(found.losses, plain.losses[:, [rank]], rtol=_CLOSER[mode.dtype])
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
