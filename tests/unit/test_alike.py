"""What ranks that wrap a model must have in common, and how the first difference is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.optimizer import lr

from hp_sharding import ShardingConfig
from hp_sharding.alike import About, about_model, about_training, check_alike
from hp_sharding.errors import ConfigError
from tests.seats import Seats, meet


class _Usual:
    """What a rank wraps; a test changes some of it."""

    def __init__(self) -> None:
        self.model: nn.Layer = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.BatchNorm1D(6), nn.Linear(6, 2))
        self.config: dict[str, Any] = {"stage": 2}
        self.kind: Any = paddle.optimizer.AdamW
        self.arguments: dict[str, Any] = {"learning_rate": 0.01, "weight_decay": 0.1}
        self.params: Callable[[nn.Layer], Any] = lambda model: model.parameters()

    def set(self, **changes: Any) -> _Usual:
        for name, value in changes.items():
            if isinstance(value, dict):
                value = {**getattr(self, name), **value}
            setattr(self, name, value)
        return self

    def about(self) -> About:
        optimizer = self.kind(parameters=self.params(self.model), **self.arguments)
        return about_training(self.model, optimizer, ShardingConfig(**self.config))


def _compare(*abouts: About, n_replicas: int = 1) -> list[Any]:
    return meet(lambda rank, seats: check_alike(abouts[rank], seats), len(abouts), n_replicas)


def _frozen() -> nn.Layer:
    model = _Usual().model
    model[3].bias.stop_gradient = True
    return model


def _with_buffer(numel: int) -> nn.Layer:
    model = _Usual().model
    model.register_buffer("table", paddle.zeros([numel]))
    return model


def _changed(change: Callable[[Any], None]) -> nn.Layer:
    model = _Usual().model
    change(model[0].weight)
    return model


def _groups(model: nn.Layer) -> list[dict[str, Any]]:
    params = model.parameters()
    return [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]


class _MyDecay(lr.LRScheduler):
    """Has something of its own, which is nobody's business."""

    def __init__(self, note: int, rate: float = 0.01) -> None:
        self.note = note
        super().__init__(rate)

    def get_lr(self) -> float:
        return float(self.base_lr)


ADVICE = "Build the same model, with the same optimizer and the same settings, on every rank"
DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "depth": (
        {"model": nn.Sequential(*_Usual().model, nn.Linear(2, 2))},
        "parameter 8 is not there on rank 0, '4.weight' of shape [2, 2], float32 on rank 1",
    ),
    "width": (
        {"model": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1D(8), nn.Linear(8, 2))},
        "parameter 0 is '0.weight' of shape [4, 6], float32 on rank 0, '0.weight' of shape [4, 8], float32 on rank 1",
    ),
    "order": (
        {"params": lambda model: model.parameters()[::-1]},
        "parameter 0 of the optimizer is '0.weight' on rank 0, '3.bias' on rank 1",
    ),
    "fewer": (
        {"params": lambda model: model.parameters()[:-1]},
        "parameter 7 of the optimizer is '3.bias' on rank 0, not there on rank 1",
    ),
    "dtype": ({"model": _Usual().model.to(dtype="bfloat16")}, "of shape [4, 6], bfloat16 on rank 1"),
    "frozen": (
        {"model": _frozen()},
        "parameter 7 is '3.bias' of shape [2], float32 on rank 0, '3.bias' of shape [2], float32, frozen (stop_grad",
    ),
    "class": ({"model": nn.Sequential(_Usual().model)}, "parameter 0 is '0.weight'"),
    "buffers": ({"model": _with_buffer(3)}, "buffer 0 is not there on rank 0, 'table' of shape [3], float32 on rank 1"),
    "rate of a parameter": (
        {"model": _changed(lambda param: param.optimize_attr.update(learning_rate=2.0))},
        "parameter 0 is '0.weight' of shape [4, 6], float32 on rank 0, '0.weight' of shape [4, 6], float32, learning",
    ),
    "clipping of a parameter": (
        {"model": _changed(lambda param: setattr(param, "need_clip", False))}, "not clipped (need_clip) on rank 1"
    ),
    "stage": ({"config": {"stage": 3}}, "stage is 2 on rank 0, 3 on rank 1"),
    "overlap": ({"config": {"reduce_overlap": True}}, "reduce_overlap is False on rank 0, True on rank 1"),
    "bucket size": ({"config": {"comm_buffer_size_MB": 5}}, "comm_buffer_size_MB is 25 on rank 0, 5 on rank 1"),
    "units": ({"config": {"units": [nn.Linear]}}, "units is 'auto' on rank 0, [Linear] on rank 1"),
    "optimizer": (
        {"kind": paddle.optimizer.Adam}, "the optimizer is AdamW on rank 0, Adam on rank 1"
    ),
    "rate": (
        {"arguments": {"learning_rate": 0.02}}, "learning_rate of the optimizer is 0.01 on rank 0, 0.02 on rank 1"
    ),
    "decay": ({"arguments": {"weight_decay": 0.2}}, "weight_decay of the optimizer is 0.1 on rank 0, 0.2 on rank 1"),
    "beta": ({"arguments": {"beta2": 0.95}}, "beta2 of the optimizer is 0.999 on rank 0, 0.95 on rank 1"),
    "clip": (
        {"arguments": {"grad_clip": nn.ClipGradByGlobalNorm(1.0)}},
        "grad_clip of the optimizer is None on rank 0, ClipGradByGlobalNorm(auto_skip_clip=False, clip_norm=1.0",
    ),
    "decay by name": (
        {"arguments": {"apply_decay_param_fun": lambda name: True}},
        "apply_decay_param_fun of the optimizer is None on rank 0, a function on rank 1",
    ),
    "scheduler": (
        {"arguments": {"learning_rate": lr.StepDecay(0.01, 3)}},
        "learning_rate of the optimizer is 0.01 on rank 0, StepDecay(base_lr=0.01",
    ),
    "groups": ({"params": _groups}, "parameter group 0 is not there on rank 0, 2 parameters with"),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_is_named_with_both_ranks(what: str) -> None:
    changes, text = DIFFERENT[what]
    first, second = _compare(_Usual().about(), _Usual().set(**changes).about())
    assert isinstance(first, ConfigError), first
    assert f"rank 0: the ranks do not wrap the same: {text}" in str(first) or text in str(first)
    assert isinstance(second, ConfigError)
    assert str(second).startswith("rank 1: the ranks do not wrap the same: ")
    assert str(second).endswith(
        "on rank 0. Build the same model, with the same optimizer and the same settings, on every rank"
    )


SCHEDULERS: dict[str, tuple[Any, Any, str]] = {
    "gamma": (lr.StepDecay(0.01, 3, 0.5), lr.StepDecay(0.01, 3, 0.4), "gamma=0.4"),
    "warm-up": (
        lr.LinearWarmup(lr.CosineAnnealingDecay(0.1, 10), 3, 0.0, 0.1),
        lr.LinearWarmup(lr.CosineAnnealingDecay(0.1, 11), 3, 0.0, 0.1),
        "T_max=11",
    ),
    "the user's own": (_MyDecay(1), _MyDecay(1, 0.02), "_MyDecay(base_lr=0.02, last_epoch=0, last_lr=0.02)"),
}


@pytest.mark.parametrize("what", SCHEDULERS)
def test_schedules_are_compared(what: str) -> None:
    one, other, text = SCHEDULERS[what]
    abouts = [_Usual().set(arguments={"learning_rate": rate}).about() for rate in (one, other)]
    assert text in str(_compare(*abouts)[0])


SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "momentum": ("Momentum", {"momentum": 0.8}, "momentum of the optimizer is 0.9 on rank 0, 0.8 on rank 1"),
    "nesterov": ("Momentum", {"use_nesterov": True}, "use_nesterov of the optimizer is False on rank 0, True on"),
    "L1": ("SGD", {"weight_decay": paddle.regularizer.L1Decay(0.1)}, "is None on rank 0, L1Decay(coeff=0.1) on rank 1"),
    "masters": ("SGD", {"multi_precision": True}, "multi_precision of the optimizer is False on rank 0, True on rank"),
    "rho": ("RMSProp", {"rho": 0.8}, "rho of the optimizer is 0.95 on rank 0, 0.8 on rank 1"),
    "batches": ("ASGD", {"batch_num": 3}, "batch_num of the optimizer is 1 on rank 0, 3 on rank 1"),
    "etas": ("Rprop", {"etas": (0.4, 1.2)}, "etas of the optimizer is [[0.5, 1.2]] on rank 0, [[0.4, 1.2]] on rank 1"),
    "start": ("Adagrad", {"initial_accumulator_value": 0.1}, "initial_accumulator_value of the optimizer is 0.0 on ra"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_of_optimizers_are_compared(what: str) -> None:
    name, change, text = SETTINGS[what]
    usual: dict[str, Any] = {"kind": getattr(paddle.optimizer, name)}

    def about(**arguments: Any) -> About:
        rank = _Usual().set(**usual)
        rank.arguments = {"learning_rate": 0.01, **arguments}
        return rank.about()

    first, _ = _compare(about(), about(**change))
    assert text in str(first)


def test_what_is_a_rank_s_own_affair_may_differ() -> None:
    own = _Usual().set(config={"timeline": True, "timeout_s": 60}, arguments={"name": "mine"})
    for about, scheduler in ((_Usual(), _MyDecay(1)), (own, _MyDecay(2))):
        about.set(arguments={"learning_rate": scheduler})
    assert _compare(_Usual().set(arguments={"learning_rate": _MyDecay(1)}).about(), own.about()) == [None, None]
    quiet, loud = (lr.StepDecay(0.01, 3, verbose=verbose) for verbose in (False, True))
    assert _compare(*(_Usual().set(arguments={"learning_rate": rate}).about() for rate in (quiet, loud))) == [None] * 2


@pytest.mark.parametrize(("nranks", "n_replicas"), [(1, 1), (3, 1), (4, 2)])
def test_all_alike(nranks: int, n_replicas: int) -> None:
    assert _compare(*(_Usual().about() for _ in range(nranks)), n_replicas=n_replicas) == [None] * nranks


@pytest.mark.parametrize("odd_one", range(4))
def test_every_rank_of_all_replicas_is_told(odd_one: int) -> None:
    abouts = [_Usual().set(config={"stage": 3 if rank == odd_one else 2}).about() for rank in range(4)]
    for rank, error in enumerate(_compare(*abouts, n_replicas=2)):
        peer = odd_one if rank != odd_one else (0 if odd_one else 1)
        mine, theirs = (3, 2) if rank == odd_one else (2, 3)
        assert f"stage is {mine} on rank {rank}, {theirs} on rank {peer}" in str(error)


def test_before_there_is_an_optimizer() -> None:
    abouts = [about_model(model, ShardingConfig()) for model in (_Usual().model, _frozen())]
    assert "'3.bias' of shape [2], float32, frozen" in str(_compare(*abouts)[0])


def _close(rank: int, seats: Seats) -> list[list[str]]:
    with pytest.raises(ConfigError):
        check_alike(_Usual().set(config={"stage": 2 + rank}).about(), seats)
    return [seat.ended for seat in seats.values()]


def test_lanes_are_closed_where_ranks_differ() -> None:
    assert meet(_close, 2) == [[["closed"]]] * 2
