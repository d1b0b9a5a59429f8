"""Norms, finite or not, and what a script does to gradients between ``backward()`` and ``step()``; on one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import paddle
import pytest
from paddle import nn

from hp_sharding import ShardingConfig, full_parameters, numerics, shard
from hp_sharding.comm import Communicator, Work
from hp_sharding.errors import ConfigError, StateError
from hp_sharding.numerics import GradientPart, RankSums, count_nonfinite, measure, sum_of_squares
from hp_sharding.timeline import Timeline
from tests.fakes import Rig, WaitingLane, values, wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer

SMALL_MB = 0.0005
BOTH: dict[str, Any] = {"allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": SMALL_MB}
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
ROUNDING = 1e-6
"""Norms are summed in another order than Paddle's."""

Array = np.ndarray[Any, Any]
Scenario = Callable[[nn.Layer, Any], None]


def _shard(optimizer: str = "SGD", *, options: dict[str, Any] | None = None, **settings: Any) -> Rig:
    model = make_model("mlp")
    return wrap(model, make_optimizer(optimizer, model, **(options or {})), **{**BOTH, **settings})


def _plain(optimizer: str = "SGD", **settings: Any) -> tuple[nn.Layer, Any]:
    model = make_model("mlp")
    return model, shard(model, make_optimizer(optimizer, model), config=ShardingConfig(**settings))


def _backward(model: nn.Layer, number: int, scale: float = 1.0) -> None:
    (loss_of(model, make_batch("mlp", number, 0)) * scale).backward()


def _final(model: nn.Layer) -> list[Array]:
    with full_parameters(model):
        return values(model.parameters())


def _assert_parity(scenario: Scenario, optimizer: str = "SGD", tolerance: float = ROUNDING, **settings: Any) -> Rig:
    """The scenario through the sharded optimizer, and through that of one process, which is plain Paddle's."""
    model, plain = _plain(optimizer)
    scenario(model, plain)
    rig = _shard(optimizer, **settings)
    scenario(rig.model, rig.optimizer)
    for found, expected in zip(_final(rig.model), _final(model), strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance / 10)
    return rig


# -- sums over one tensor ----------------------------------------------------------------------------------------------

DTYPES = pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])


@DTYPES
def test_squares_are_summed_with_enough_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of 16-bit gradients, over several blocks and one that is cut off."""
    monkeypatch.setattr(numerics, "BLOCK_NUMEL", 96)
    tensors = [paddle.randn([numel]).astype(dtype) for numel in (1, 96, 1000)]
    exact = sum(float((tensor.astype("float64") ** 2).sum()) for tensor in tensors)
    assert float(sum_of_squares(tensors, "float64")) == pytest.approx(exact, rel=1e-12 if dtype == "float64" else 2e-6)
    assert float(sum_of_squares([], "float32")) == 0.0


@DTYPES
def test_elements_that_are_not_finite_are_counted(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "BLOCK_NUMEL", 96)
    strange = np.ones(1000)
    strange[[0, 95, 96, 500, 999]] = [np.nan, np.inf, -np.inf, np.nan, np.inf]
    assert int(count_nonfinite(paddle.to_tensor(strange).astype(dtype))) == 5
    large = 1e4 if dtype == "float16" else 1e30
    assert int(count_nonfinite(paddle.full([500], large).astype(dtype))) == 0, "their squares overflow, they do not"


# -- sums over ranks ---------------------------------------------------------------------------------------------------


class _OtherRanks(Communicator):
    """A group whose other members give the vectors of ``others`` to every gather, each as long as ours or cut to it."""

    def __init__(self, lane: str, others: Sequence[Sequence[float]]) -> None:
        self.lane, self.rank = lane, 0
        self.ranks = tuple(range(1 + len(others)))
        self.labels: list[str] = []
        self._others = others
        self._inner = WaitingLane(lane)

    def all_gather(
        self,
        output: paddle.Tensor,
        input: paddle.Tensor,
        *,
        label: str = "",
        after: Work | None = None,
        wire_dtype: str | None = None,
    ) -> Work:
        self.labels.append(label)
        rows = [paddle.to_tensor(list(other), dtype=input.dtype)[-input.shape[0] :] for other in self._others]
        return self._inner.all_gather(output, paddle.concat([input, *rows]), label=label)

    def reduce_scatter(self, *_: Any, **__: Any) -> Work:
        raise NotImplementedError

    def all_reduce(self, *_: Any, **__: Any) -> Work:
        raise NotImplementedError

    def broadcast(self, *_: Any, **__: Any) -> Work:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to end."""


def _part(name: str, *elements: float, is_split: bool = False) -> GradientPart:
    return GradientPart(name, paddle.to_tensor(elements, dtype="float32"), True, is_split)


def test_a_norm_counts_what_is_split_over_tensor_ranks_there_too_and_the_rest_once() -> None:
    # The other rank of the shard group has 9 of what is not split and 16 of what is, the other tensor rank 75 of that.
    shards = _OtherRanks("gather", [[9.0, 16.0]])
    tensor = _OtherRanks("tensor", [[75.0]])
    domain = [_part("whole", 1.0, 2.0), _part("split", 2.0, is_split=True)]
    found = measure([domain], [], RankSums(shards, tensor, Timeline(False)), dtype="float32")
    assert float(found.norms[0]) == pytest.approx((5 + 9 + 4 + 16 + 75) ** 0.5)
    assert (shards.labels, tensor.labels) == (["gradient norm"], ["gradient norm"])


def test_without_tensor_ranks_the_flag_changes_nothing() -> None:
    shards = _OtherRanks("gather", [[9.0, 2.0]])
    domain = [_part("whole", 1.0, 2.0), _part("split", 2.0, is_split=True)]
    counted = [paddle.to_tensor([1.0, float("inf")])]
    found = measure([domain], counted, RankSums(shards, None, Timeline(False)), dtype="float32")
    assert float(found.norms[0]) == pytest.approx((5 + 4 + 9) ** 0.5)
    assert found.counts.tolist() == [3.0]


def test_several_domains_and_counts_travel_in_one_gather() -> None:
    shards = _OtherRanks("gather", [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    tensor = _OtherRanks("tensor", [[10.0, 20.0, 30.0, 40.0]])
    counted = [paddle.to_tensor([float("nan")]), paddle.to_tensor([0.0])]
    domains = [[_part("a", 2.0)], [_part("b", 3.0, is_split=True)]]
    found = measure(domains, counted, RankSums(shards, tensor, Timeline(False)), dtype="float64")
    assert (found.norms**2).tolist() == pytest.approx([4 + 1 + 3 + 10, 2 + 9 + 4 + 20])
    assert found.counts.tolist() == [1 + 5 + 30, 6 + 40]
    assert str(found.norms.dtype) == "paddle.float64"


# -- the optimizer's methods -------------------------------------------------------------------------------------------


@STAGES
def test_the_norm_is_that_of_all_gradients(stage: int) -> None:
    rig = _shard(stage=stage, options={"grad_clip": nn.ClipGradByGlobalNorm(1e-3)})
    model, plain = _plain()
    for param in list(rig.model.parameters())[::2]:
        param.need_clip = False
    for number in range(2):
        _backward(rig.model, number)
        _backward(model, number)
        expected = sum(float((param.grad.astype("float64") ** 2).sum()) for param in model.parameters()) ** 0.5
        found = rig.optimizer.grad_norm()
        assert isinstance(found, float)
        assert found == pytest.approx(expected, rel=ROUNDING)
        assert plain.grad_norm() == pytest.approx(expected, rel=ROUNDING)
        assert rig.optimizer.grad_norm() == found, "asking changes nothing"


@STAGES
def test_the_norm_of_nothing_is_zero(stage: int) -> None:
    rig = _shard(stage=stage)
    assert rig.optimizer.grad_norm() == 0.0
    _backward(rig.model, 0)
    rig.optimizer.clear_grad()
    assert rig.optimizer.grad_norm() == 0.0
    assert _plain()[1].grad_norm() == 0.0


@STAGES
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clipping_by_hand(stage: int, max_norm: float) -> None:
    """As with Paddle's own function: ``step()`` takes what was clipped as it is."""
    norms: list[float] = []

    def scenario(model: nn.Layer, optimizer: Any) -> None:
        for step in range(3):
            _backward(model, 2 * step)
            _backward(model, 2 * step + 1, scale=0.1)
            norms.append(float(optimizer.clip_grad_norm(max_norm)))
            after = optimizer.grad_norm()
            assert after == pytest.approx(min(norms[-1], max_norm), rel=3e-3), "the formula divides by norm + 1e-6"
            optimizer.step()
            optimizer.clear_grad()

    _assert_parity(scenario, "Momentum", stage=stage, gradient_scale=1.0)
    assert norms[3:] == pytest.approx(norms[:3], rel=ROUNDING)


@STAGES
def test_gradients_are_divided_once_whatever_is_asked_before_the_step(stage: int) -> None:
    def scenario(model: nn.Layer, optimizer: Any) -> None:
        for number in range(2):
            _backward(model, number, scale=4.0 if hasattr(optimizer, "buffers") else 1.0)
            optimizer.grad_norm()
            optimizer.clip_grad_norm(0.05)
            optimizer.full_grad(model.parameters()[0])
            optimizer.clip_grad_norm(0.04)
            optimizer.step()
            optimizer.clear_grad()

    _assert_parity(scenario, stage=stage, gradient_scale=4.0)


@STAGES
@pytest.mark.parametrize("waits", [False, True])
def test_a_backward_after_clipping_adds_to_what_was_clipped(stage: int, waits: bool) -> None:
    def scenario(model: nn.Layer, optimizer: Any) -> None:
        for step in range(2):
            _backward(model, 3 * step)
            optimizer.clip_grad_norm(1e-2)
            if waits:
                with optimizer.no_sync():
                    _backward(model, 3 * step + 1)
            _backward(model, 3 * step + 2)
            optimizer.step()
            optimizer.clear_grad()

    _assert_parity(scenario, stage=stage, tolerance=1e-5)


@STAGES
def test_a_backward_after_a_step_that_clipped_adds_to_what_was_clipped(stage: int) -> None:
    options = {"grad_clip": nn.ClipGradByGlobalNorm(1e-2)}

    def scenario(model: nn.Layer, optimizer: Any) -> None:
        for number in range(3):  # never cleared
            _backward(model, number)
            optimizer.step()

    model = make_model("mlp")
    scenario(model, make_optimizer("SGD", model, **options))
    rig = _shard(stage=stage, options=options)
    scenario(rig.model, rig.optimizer)
    for found, expected in zip(_final(rig.model), _final(model), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_norm_that_is_not_finite_is_an_error_where_asked_for() -> None:
    for model, optimizer in ((rig := _shard()).model, rig.optimizer), _plain():
        _backward(model, 0, scale=float("inf"))
        with pytest.raises(StateError, match="norm of the gradients is nan"):
            optimizer.clip_grad_norm(1.0, error_if_nonfinite=True)
        assert not np.isfinite(float(optimizer.clip_grad_norm(1.0)))


def test_other_norms_are_refused() -> None:
    for optimizer in (_shard().optimizer, _plain()[1]):
        with pytest.raises(ConfigError, match=r"norm_type=1 is not supported"):
            optimizer.clip_grad_norm(1.0, norm_type=1)


@STAGES
@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_paddles_own_functions_are_refused(stage: int, clip: Any) -> None:
    rig = _shard(stage=stage)
    _backward(rig.model, 0)
    with pytest.raises(StateError, match=rf"{clip.__name__} does not see the reduced gradients"):
        clip(rig.model.parameters(), 1.0)
    model, _ = _plain()
    _backward(model, 0)
    clip(model.parameters(), 1.0)


class _CastAtUse(nn.Layer):
    """What 16-bit parameters can be on CPU, where almost no kernel takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([40, 30])
        self.bias = self.create_parameter([30])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return (paddle.matmul(x, self.weight.astype("float32")) + self.bias.astype("float32")).square().mean()


@STAGES
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("reduced", ["16 bits", "float32"])
def test_norms_of_16_bit_parameters(stage: int, dtype: str, reduced: str) -> None:
    """Whether their reduced gradients have 16 bits as well or, with masters, 32."""
    paddle.seed(1)
    model = _CastAtUse()
    model.to(dtype=dtype)
    inner = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    masters = {"reduce_dtype": "float32"} if reduced == "float32" else {}
    rig = wrap(model, inner, **BOTH, stage=stage, check_nan_inf="raise", **masters)
    rig.model(paddle.randn([16, 40])).backward()
    gradients = [rig.optimizer.full_grad(param) for param in rig.model.parameters()]
    assert {str(gradient.dtype) for gradient in gradients} == {f"paddle.{dtype if reduced == '16 bits' else reduced}"}
    expected = sum(float((gradient.astype("float64") ** 2).sum()) for gradient in gradients) ** 0.5
    assert rig.optimizer.grad_norm() == pytest.approx(expected, rel=1e-5)
    assert float(rig.optimizer.clip_grad_norm(expected / 3)) == pytest.approx(expected, rel=1e-5)
    assert rig.optimizer.grad_norm() == pytest.approx(expected / 3, rel=1e-2 if reduced == "16 bits" else 1e-5)


# -- check_nan_inf -----------------------------------------------------------------------------------------------------

CHECKS = pytest.mark.parametrize("clips", [False, True])


def _spoilt(mode: Literal["off", "warn", "raise"], stage: int, *, clips: bool = False) -> Rig:
    options = {"grad_clip": nn.ClipGradByGlobalNorm(1.0)} if clips else {}
    rig = _shard("AdamW", options=options, stage=stage, check_nan_inf=mode)
    hook = rig.model.layers[2].bias.register_hook(lambda grad: grad * np.array([np.inf] + [1.0] * 22, "float32"))
    _backward(rig.model, 0)
    hook.remove()
    return rig


@STAGES
@CHECKS
def test_what_is_not_finite_ends_the_step_and_is_named(stage: int, clips: bool) -> None:
    rig = _spoilt("raise", stage, clips=clips)
    before = _final(rig.model)
    with pytest.raises(StateError, match=r"'layers\.2\.bias' \(bucket '6:layers\.2\.bias', 1\)") as error:
        rig.optimizer.step()
    assert "layers.1" not in str(error.value)
    assert all(map(np.array_equal, _final(rig.model), before))
    rig.optimizer.clear_grad()
    clean = _shard("AdamW", options={"grad_clip": nn.ClipGradByGlobalNorm(1.0)} if clips else {}, stage=stage)
    for model, optimizer in ((rig.model, rig.optimizer), (clean.model, clean.optimizer)):
        _backward(model, 1)
        optimizer.step()
    assert all(map(np.array_equal, _final(rig.model), _final(clean.model))), "the skipped batch leaves no trace"


@CHECKS
def test_a_warning_comes_once_a_step(clips: bool, caplog: pytest.LogCaptureFixture) -> None:
    rig = _spoilt("warn", 2, clips=clips)
    with caplog.at_level(logging.WARNING, "hp_sharding"):
        if clips:
            rig.optimizer.clip_grad_norm(1.0)  # afterwards nothing is finite any more
        rig.optimizer.step()
    assert len(caplog.messages) == 1
    assert "'layers.2.bias' (bucket" in caplog.messages[0]
    assert "layers.1" not in caplog.messages[0]


@pytest.mark.parametrize("mode", ["off", "warn", "raise"])
@CHECKS
def test_a_check_costs_no_gather_of_its_own_where_something_clips(
    mode: Literal["off", "warn", "raise"], clips: bool
) -> None:
    options = {"grad_clip": nn.ClipGradByGlobalNorm(1.0)} if clips else {}
    rig = _shard(options=options, check_nan_inf=mode)
    for number in range(2):
        _backward(rig.model, number)
        rig.optimizer.step()
        rig.optimizer.clear_grad()
    labels = [label for label in rig.gather.labels("all_gather") if label in ("gradient norm", "non-finite gradients")]
    expected = ["gradient norm"] if clips else ["non-finite gradients"] if mode != "off" else []
    assert labels == 2 * expected


def test_a_check_does_not_change_the_numbers() -> None:
    found = []
    for mode in ("off", "raise"):
        rig = _shard("AdamW", options={"grad_clip": nn.ClipGradByGlobalNorm(0.1)}, check_nan_inf=mode)
        for number in range(3):
            _backward(rig.model, number)
            rig.optimizer.step()
            rig.optimizer.clear_grad()
        found.append(_final(rig.model))
    assert all(map(np.array_equal, *found))


def _clip_and_step(optimizer: Any) -> None:
    optimizer.clip_grad_norm(1.0)
    optimizer.step()


def test_one_process_checks_as_well(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = _plain(check_nan_inf="raise")
    _backward(model, 0, scale=float("nan"))
    before = _final(model)
    for act in (optimizer.step, lambda: optimizer.minimize(None), lambda: _clip_and_step(optimizer)):
        with pytest.raises(StateError, match=r"'layers\.0\.weight' \(279\)"):
            act()
    assert all(map(np.array_equal, _final(model), before))
    model, optimizer = _plain(check_nan_inf="warn")
    _backward(model, 0, scale=float("nan"))
    with caplog.at_level(logging.WARNING, "hp_sharding"):
        optimizer.step()
    assert "and 4 other parameters" in caplog.messages[0]
