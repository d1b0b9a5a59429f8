"""States as Paddle's ``flex_checkpoint`` takes them, in one process; over ranks see ``dist/test_state_dicts.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.load_state_dict import load_state_dict
from paddle.distributed.flex_checkpoint.dcp.save_state_dict import save_state_dict
from paddle.utils import unique_name

from hp_sharding import shard
from hp_sharding.buffer import Status
from tests.fakes import wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer


def _optimizer(kind: str, model: nn.Layer) -> Any:
    if kind == "ASGD":
        return paddle.optimizer.ASGD(0.1, batch_num=3, parameters=model.parameters(), name="mine")
    return make_optimizer(kind, model)


def _sharded(kind: str) -> tuple[nn.Layer, Any]:
    model = make_model("mlp")
    return model, wrap(model, _optimizer(kind, model), stage=3).optimizer


def _plain(kind: str) -> tuple[nn.Layer, Any]:
    model = make_model("mlp")
    return model, shard(model, _optimizer(kind, model), shard_group=[0])


def _train(model: nn.Layer, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss_of(model, make_batch("mlp", step, 0)).backward()
        optimizer.step()
        optimizer.clear_grad()


def _state(optimizer: Any) -> dict[str, Any]:
    model = optimizer.model_sharded_state_dict()
    return {**model, **optimizer.sharded_state_dict(model)}


@pytest.mark.parametrize("kind", ["AdamW", "ASGD"])
@pytest.mark.parametrize("make", [_plain, _sharded])
def test_what_is_saved_by_paddle_goes_on_bitwise(
    make: Callable[[str], tuple[nn.Layer, Any]], kind: str, tmp_path: Path
) -> None:
    model, optimizer = make(kind)
    _train(model, optimizer, range(2))
    save_state_dict(_state(optimizer), str(tmp_path))
    other, loaded = make(kind)
    _train(other, loaded, range(5, 7))
    load_state_dict(_state(loaded), str(tmp_path))
    losses = []
    for trained, trains in ((model, optimizer), (other, loaded)):
        _train(trained, trains, range(2, 4))
        losses.append(float(loss_of(trained, make_batch("mlp", 9, 0))))
    assert losses[0] == losses[1]
    for key, weight in _state(loaded).items():
        expected = _state(optimizer)[key]
        np.testing.assert_array_equal(weight.local_tensor.numpy(), expected.local_tensor.numpy(), err_msg=key)


def test_a_plain_optimizers_are_those_of_paddles_own() -> None:
    """Of the one of Paddle's optimizers that has the method."""
    model, optimizer = _plain("AdamW")
    _train(model, optimizer, range(2))
    own = {
        name: value for name, value in optimizer._inner.state_dict().items() if isinstance(value, paddle.Tensor)
    }  # Paddle knows names that end in _0 only
    with unique_name.guard():
        bare_model = make_model("mlp")
        bare = make_optimizer("AdamW", bare_model)
        _train(bare_model, bare, range(2))
        expected = bare.sharded_state_dict(bare_model.sharded_state_dict())
    found = optimizer.sharded_state_dict(model.sharded_state_dict())
    assert len(found) == len(own)
    assert set(found) == set(expected)
    for key, weight in expected.items():
        place = weight.key, weight.local_shape, weight.global_shape, weight.global_offset, weight.is_flattened
        ours = found[key]
        assert (ours.key, ours.local_shape, ours.global_shape, ours.global_offset, ours.is_flattened) == place
        np.testing.assert_array_equal(ours.local_tensor.numpy(), weight.local_tensor.numpy(), err_msg=key)


def test_before_the_first_step_there_are_masters_only() -> None:
    model, optimizer = _sharded("AdamW")
    assert optimizer.sharded_state_dict(model.sharded_state_dict()) == {}
    mixed = make_model("mlp")
    optimizer = wrap(mixed, make_optimizer("AdamW", mixed), param_dtype="bfloat16").optimizer
    found = optimizer.sharded_state_dict(mixed.sharded_state_dict())
    assert set(found) == {f"{name}.w_0" for name, _ in mixed.named_parameters()}
    assert all(weight.local_tensor.dtype == paddle.float32 for weight in found.values())


def test_a_part_of_a_16_bit_parameter_is_what_its_layer_sees() -> None:
    mixed = make_model("mlp")
    optimizer = wrap(mixed, make_optimizer("AdamW", mixed), param_dtype="bfloat16", stage=3).optimizer
    masters = optimizer.sharded_state_dict(mixed.sharded_state_dict())
    for key, weight in optimizer.model_sharded_state_dict().items():
        assert weight.local_tensor.dtype == paddle.bfloat16
        assert (weight.is_flattened, weight.flattened_range.start) == (True, 0)
        rounded = masters[f"{key}.w_0"].local_tensor.astype("bfloat16")
        assert bool((weight.local_tensor.astype("float32") == rounded.astype("float32")).all())


@pytest.mark.parametrize("settings", [{"stage": 2}, {"stage": 2, "gather_dtype": "bfloat16"}, {"stage": 3}])
@pytest.mark.parametrize("method", ["sharded_state_dict", "model_sharded_state_dict"])
def test_no_gather_reads_what_is_given_out(method: str, settings: dict[str, Any]) -> None:
    """It may be loaded into; and in stage 3 what was gathered before is not what the next forward sees."""
    model = make_model("mlp")
    rig = wrap(model, make_optimizer("AdamW", model), allgather_overlap=True, **settings)
    # Taken before: making it waits for parameters.
    arguments = [model.sharded_state_dict()] if method == "sharded_state_dict" else []
    _train(model, rig.optimizer, range(1))
    assert any(buffer.status is Status.SYNCING for buffer in rig.optimizer.buffers)
    getattr(rig.optimizer, method)(*arguments)
    expected = Status.SHARDED if settings["stage"] == 3 else Status.READY
    assert {buffer.status for buffer in rig.optimizer.buffers} == {expected}
    _train(model, rig.optimizer, range(1, 2))
