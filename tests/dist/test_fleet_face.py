"""Scripts that were written for Paddle's own sharding find what they look for behind the optimizer."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import HybridParallelOptimizer
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer
from paddle.utils import unique_name

from hp_sharding import ConfigError, StateError, fleet, full_parameters
from tests import harness
from tests.reference import Ranks, Values, assert_close, assert_equal, values

STEPS, MICRO_BATCHES = 3, 2
SEED = 7
STAGES = [{"stage": stage, "reduce_overlap": True, "comm_buffer_size_MB": 0.002} for stage in (1, 2, 3)]


class _Cast(nn.Layer):
    """A layer whose weight may have 16 bits, for which Paddle has no product on CPU."""

    def __init__(self, n_in: int, n_out: int, dtype: str) -> None:
        super().__init__()
        self.weight = self.create_parameter([n_in, n_out])
        self.bias = self.create_parameter([n_out], is_bias=True)
        if dtype != "float32":
            self.to(dtype=dtype)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.nn.functional.linear(x, self.weight.astype("float32"), self.bias.astype("float32"))


def _net(dtype: str = "float32") -> nn.Layer:
    paddle.seed(SEED)
    return nn.Sequential(_Cast(9, 33, dtype), nn.Tanh(), _Cast(33, 5, dtype), _Cast(5, 1, dtype))


def _batch(step: int, micro: int, rank: int) -> paddle.Tensor:
    generator = np.random.default_rng([step, micro, rank])
    return paddle.to_tensor(generator.standard_normal([6, 9], dtype=np.float32))


def _loss(model: nn.Layer, step: int, micro: int, rank: int) -> paddle.Tensor:
    return (model(_batch(step, micro, rank)) ** 2).mean()


def _init(nranks: int, **settings: Any) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "sharding_degree": nranks}
    strategy.hp_sharding_configs = settings
    fleet.init(is_collective=True, strategy=strategy)
    return strategy


def _adamw(model: nn.Layer) -> Any:
    return paddle.optimizer.AdamW(1e-2, parameters=model.parameters())


def _whole(nranks: int) -> Values:
    model = _net()
    optimizer, ranks = _adamw(model), Ranks(model, nranks)
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            ranks.backward(functools.partial(_loss, model, step, micro))
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
    return values(model)


def _train(model: nn.Layer, optimizer: Any, rank: int, *, wrapped: bool) -> Values:
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            _loss(model, step, micro, rank).backward()
            if wrapped:
                assert all(param.grad is None for param in model.parameters()), "it would stop Paddle's hook"
                shown = [param.main_grad for param in model.parameters()]
                assert all((grad is not None) == (optimizer.config.stage == 1) for grad in shown)
        optimizer.step()
        optimizer.clear_grad()
    with full_parameters(model):
        found = {name: param.astype("float32").numpy() for name, param in model.named_parameters()}
    return {name.removeprefix("_layers."): value for name, value in found.items()}


def _main_grad(rank: int, nranks: int, settings: dict[str, Any]) -> dict[str, Values]:
    strategy = _init(nranks)
    found = {}
    for dtype in ("float32", "bfloat16"):
        for way in ("layer and optimizer", "hooks of the layer alone", "none"):
            strategy.hp_sharding_configs = {**settings, "main_grad": True} if way == "none" else settings
            with unique_name.guard():
                model = _net(dtype)
                inner = _adamw(model)
                if way != "none":
                    # What trainers do: they throw the layer away.
                    layer = MixPrecisionLayer(model, dtype="bfloat16")
                    model = layer if way == "layer and optimizer" else model
                    inner = MixPrecisionOptimizer(inner)
                model = fleet.distributed_model(model)
                optimizer = fleet.distributed_optimizer(inner, strategy=strategy)
                assert optimizer.config.main_grad
                found[f"{dtype}, {way}"] = _train(model, optimizer, rank, wrapped=way != "none")
    return found


@pytest.mark.parametrize("settings", STAGES, ids=lambda settings: f"stage {settings['stage']}")
def test_paddles_wrappers_for_main_grad_work(settings: dict[str, Any]) -> None:
    """Float32 gradients add up in ``main_grad``, over two micro-batches, and come out as without the wrappers."""
    for found in harness.run(_main_grad, 2, settings):
        for name, values_found in found.items():
            assert_equal(values_found, found[name.partition(",")[0] + ", none"], f"{name}:")
        assert_close(found["float32, none"], _whole(2), 1e-5)


def _alone(rank: int, nranks: int) -> Values:
    _init(nranks)
    model = MixPrecisionLayer(_net())
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(MixPrecisionOptimizer(_adamw(model._layers)))
    assert _unwrapped(optimizer, paddle.optimizer.AdamW).get_lr() == 1e-2
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            _loss(model, step, micro, rank).backward()
        optimizer.step()
        optimizer.clear_grad()
    return values(model._layers)


def test_paddles_wrappers_for_main_grad_work_in_one_process() -> None:
    assert_equal(harness.run(_alone, 1)[0], _whole(1))


def _unwrapped(optimizer: Any, kind: type) -> Any:
    """As trainers look for an optimizer of some kind."""
    while hasattr(optimizer, "_inner_opt") and not isinstance(optimizer, kind):
        optimizer = optimizer._inner_opt
    return optimizer if isinstance(optimizer, kind) else None


def _wrapped(rank: int, nranks: int, dtype: str = "float32", **settings: Any) -> tuple[nn.Layer, Any, Any]:
    _init(nranks, **settings)
    model = fleet.distributed_model(_net(dtype))
    inner = _adamw(model)
    return model, fleet.distributed_optimizer(inner), inner


def _look_behind(rank: int, nranks: int, settings: dict[str, Any]) -> dict[str, tuple[int, int, int, int]]:
    """Checks what there is before the first step; returns the part of each parameter that this rank says it has."""
    model, optimizer, inner = _wrapped(rank, nranks, **settings)
    behind = _unwrapped(optimizer, DygraphShardingOptimizerV2)
    assert isinstance(optimizer, HybridParallelOptimizer)
    assert optimizer._comm_buffer_list is behind._comm_buffer_list
    assert optimizer._inner_opt is behind and behind._inner_opt is inner and not behind._multi_precision
    params = model.parameters()
    assert [id(param) for param in behind._parameter_list] == [id(param) for param in params]
    assert sorted(p.name for bucket in behind._comm_buffer_list for p in bucket.params) == sorted(
        p.name for p in params
    )
    assert all(
        list(bucket._sharding_param_grad_view) == [p.name for p in bucket._params]
        for bucket in behind._comm_buffer_list
    )
    parts = behind.filter_parameters(reversed(params), behind._hcg)
    with full_parameters(model):
        own = {param.name: param.numpy().reshape(-1) for param in params}
        found = {}
        for name, [bucket] in behind.param2bucket.items():
            view = bucket._sharding_param_grad_view[name]
            lies = bucket.param_storage.numpy()[view._index : view._index + own[name].size]
            np.testing.assert_array_equal(lies, own[name])
            assert bucket.param_storage is view._param_buffer and bucket.param_storage.dtype == view._param.dtype
            assert view.has_effective_slice_param == (view._slice_grad is not None)
            found[name] = (bucket._id, bucket.param_storage.size, view._param_begin, view._param_end)
            begin, end = view._param_begin - view._index, min(view._param_end - view._index, own[name].size)
            part = next((part for part in parts if part.name == name), None)
            assert (part is not None) == (begin < end)
            if part is not None:
                np.testing.assert_array_equal(part.numpy(), own[name][begin:end])
    names = [param.name for param in reversed(params)]
    assert [names.index(part.name) for part in parts] == sorted(names.index(part.name) for part in parts)
    if settings["stage"] == 3:
        with pytest.raises(StateError, match="full_parameters"):
            _ = behind._comm_buffer_list[0].param_storage
    return found


@pytest.mark.parametrize("settings", STAGES, ids=lambda settings: f"stage {settings['stage']}")
def test_what_stands_behind_says_where_parameters_lie(settings: dict[str, Any]) -> None:
    ranks = harness.run(_look_behind, 2, settings)
    parts: dict[int, list[tuple[int, int]]] = {}
    sizes = {}
    for found in ranks:
        for bucket, numel, begin, end in found.values():
            sizes[bucket] = numel
            parts.setdefault(bucket, []).extend([(begin, end)] if begin < end else [])
    for bucket, spans in parts.items():
        spans.sort()
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])], "each element belongs to one rank"
        assert spans[-1][1] == sizes[bucket]


def _look_at_gradients(optimizer: Any) -> None:
    """What each bucket shows as this rank's part of a gradient is that part of the whole one."""
    for bucket in optimizer._comm_buffer_list:
        for view in bucket._sharding_param_grad_view.values():
            whole = optimizer.full_grad(view._param).numpy().reshape(-1)
            begin, end = view._param_begin - view._index, min(view._param_end - view._index, whole.size)
            if begin < end:
                np.testing.assert_array_equal(view._slice_grad.numpy()[: end - begin], whole[begin:end])


def _as_trainers_do(rank: int, nranks: int, settings: dict[str, Any]) -> list[Values]:
    """Steps by the calls of trainers that take the parts apart, and the same steps by ``step()``."""
    strategy, found = _init(nranks), []
    for by_parts in (True, False):
        strategy.hp_sharding_configs = settings
        with unique_name.guard():
            model = fleet.distributed_model(_net())
            optimizer = fleet.distributed_optimizer(_adamw(model), strategy=strategy)
        optimizer._set_all_gather_overlap_forward(by_parts, model)
        assert optimizer.config.allgather_overlap == by_parts
        for step in range(STEPS):
            for micro in range(MICRO_BATCHES):
                _loss(model, step, micro, rank).backward()
            if not by_parts:
                optimizer.step()
                optimizer.clear_grad()
                continue
            params = list(optimizer._inner_opt._parameter_list)
            assert optimizer._sharding_enable and not optimizer._dp_enable and not optimizer._sep_enable
            optimizer._inner_opt.reduce_gradients(params, optimizer._hcg)
            assert all(map(optimizer._reducer.is_reduced, range(len(optimizer.buffers))))
            _look_at_gradients(optimizer)
            optimizer._step(params)
            optimizer._inner_opt.clear_grad(set_to_zero=step > 0)
        with full_parameters(model):
            found.append(values(model))
    return found


@pytest.mark.parametrize("settings", STAGES, ids=lambda settings: f"stage {settings['stage']}")
def test_steps_may_be_taken_part_by_part(settings: dict[str, Any]) -> None:
    for by_parts, whole in harness.run(_as_trainers_do, 2, settings):
        assert_equal(by_parts, whole)


def _refused(rank: int, nranks: int) -> None:
    model, optimizer, _ = _wrapped(rank, nranks, stage=2)
    behind = optimizer._inner_opt
    for method, arguments in {
        "rebuild": (),
        "register_reduce_overlap_hook": (True,),
        "clear_param_storage": (-1,),
        "_sharding_sync_parameters": (),
        "minimize": (None,),
    }.items():
        with pytest.raises(ConfigError, match=f"optimizer._inner_opt.{method}: not supported"):
            getattr(behind, method)(*arguments)
    with pytest.raises(ConfigError, match=r"optimizer\._set_broadcast_overlap: not supported"):
        optimizer._set_broadcast_overlap(True, model)
    ours = {name for kind in type(behind).__mro__ if kind.__module__.startswith("hp_sharding") for name in vars(kind)}
    left = {name for name, value in vars(DygraphShardingOptimizerV2).items() if callable(value)} - ours
    assert left == {"_increase_comm_buffers_acc_steps", "_reset_comm_buffers_acc_steps"}
    assert behind._create_master_weight(behind._local_parameter_list[0]) is behind._local_parameter_list[0]


def test_what_paddles_optimizer_would_do_on_its_own_is_refused() -> None:
    harness.run(_refused, 2)


def _state(rank: int, nranks: int, dtype: str) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """After a step: the part of each moment or master that this rank has, as Paddle's checkpoints ask for it."""
    model, optimizer, _ = _wrapped(rank, nranks, dtype, stage=2, main_grad=dtype != "float32")
    _loss(model, 0, 0, rank).backward()
    optimizer.step()
    behind = optimizer._inner_opt
    behind.set_state_dict(behind.state_dict())
    found = {}
    for name, weight in optimizer.sharded_state_dict(model.sharded_state_dict()).items():
        if weight.local_tensor.size > 1:
            found[name] = (weight.flattened_range.start, weight.flattened_range.stop)
            assert weight.local_tensor.size == weight.flattened_range.stop - weight.flattened_range.start
            assert list(weight.global_shape) == dict(model.named_parameters())[name.rpartition(".")[0]].shape
    return found, {name: param.size for name, param in model.named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_paddles_checkpoints_find_every_element_of_the_state_once(dtype: str) -> None:
    results = harness.run(_state, 2, dtype)
    kinds = {"moment1_0", "moment2_0"} | ({"w_0"} if dtype != "float32" else set())
    names = {name for found, _ in results for name in found}
    sizes = results[0][1]
    assert {f"{name}.{kind}" for name, size in sizes.items() if size > 1 for kind in kinds} <= names
    for name in names:
        spans = sorted(found[name] for found, _ in results if name in found)
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
        assert spans[-1][1] == sizes[name.rpartition(".")[0]]


def _masters(rank: int, nranks: int) -> dict[str, tuple[str, int]]:
    model, optimizer, inner = _wrapped(rank, nranks, "bfloat16", stage=2, main_grad=True)
    behind = optimizer._inner_opt
    assert list(optimizer._master_weights) == list(behind._master_weights)
    for param in model.parameters():
        part = behind._master_weights.get(param.name)
        if part is not None:
            assert behind._create_master_weight(param) is part, "what it has is not made a second time"
    assert inner._master_weights == {}, "the optimizer inside sees nothing but float32"
    return {name: (str(part.dtype), part.size) for name, part in behind._master_weights.items()}


def test_masters_are_found_by_name() -> None:
    found = harness.run(_masters, 2)
    sizes = {param.name: 0 for param in _net().parameters()}
    assert len(sizes) == len({*found[0], *found[1]})
    for masters in found:
        assert {dtype for dtype, _ in masters.values()} == {"paddle.float32"}
    assert sum(size for masters in found for _, size in masters.values()) == sum(p.size for p in _net().parameters())


def _forget(rank: int, nranks: int) -> None:
    model, optimizer, _ = _wrapped(rank, nranks, stage=2)
    _loss(model, 0, 0, rank).backward()
    optimizer._inner_opt.step()
    behind = optimizer._inner_opt
    living = weakref.ref(optimizer)
    gc.disable()  # a cycle would have to wait for it
    try:
        del optimizer
        assert living() is not None, "who has what stands behind has the optimizer"
        behind.clear_grad()
        del behind
        assert living() is None
    finally:
        gc.enable()


def test_what_stands_behind_keeps_nothing_alive() -> None:
    harness.run(_forget, 2)


def _rates(rank: int, nranks: int) -> None:
    model, optimizer, inner = _wrapped(rank, nranks, stage=2)
    for face in (optimizer, optimizer._inner_opt):
        face.set_lr(0.25)
        assert face.get_lr() == inner.get_lr() == 0.25
    model = fleet.distributed_model(_net())
    scheduler = paddle.optimizer.lr.StepDecay(0.5, step_size=1, gamma=0.1)
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(scheduler, parameters=model.parameters()))
    for face in (optimizer, optimizer._inner_opt):
        with pytest.raises(RuntimeError, match="can't be LRScheduler"):
            face.set_lr(0.25)
    rates = []
    for step in range(2):
        with full_parameters(model):
            before = values(model)["3.bias"]
        _loss(model, step, 0, rank).backward()
        gradient = optimizer.full_grad(dict(model.named_parameters())["3.bias"])
        assert gradient is not None
        optimizer.step()
        optimizer.clear_grad()
        with full_parameters(model):
            rates.append(float(((before - values(model)["3.bias"]) / gradient.numpy())[0]))
        assert optimizer.get_lr() == optimizer._inner_opt.get_lr() == pytest.approx(0.5 * 0.1**step)
        scheduler.step()
    assert rates == pytest.approx([0.5, 0.05], rel=1e-4)


def test_rates_are_set_through_either_face() -> None:
    harness.run(_rates, 2)
