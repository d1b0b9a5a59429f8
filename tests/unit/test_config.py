"""``ShardingConfig``: defaults, what is refused and with which words, and the values derived from it."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import paddle
import pytest

import hp_sharding
from hp_sharding import config as config_module
from hp_sharding.config import ShardingConfig
from hp_sharding.errors import ConfigError, HpShardingError

MB = 1024 * 1024


class _LayerLike:
    def register_forward_pre_hook(self) -> None: ...


def test_defaults() -> None:
    expected = {
        "stage": 2,
        "allgather_overlap": False,
        "reduce_overlap": False,
        "comm_fusion": True,
        "comm_buffer_size_MB": 25,
        "replicate_buffer_size_MB": 25,
        "prefetch_depth": None,
        "tuning_budget_MB": None,
        "reshard_after_step": None,
        "reshard_after_forward": True,
        "units": "auto",
        "param_dtype": None,
        "gather_dtype": None,
        "reduce_dtype": None,
        "main_grad": False,
        "cast_forward_inputs": True,
        "broadcast_buffers": True,
        "check_nan_inf": "off",
        "gradient_scale": "mean",
        "timeout_s": 300,
        "timeline": False,
    }
    assert dataclasses.asdict(ShardingConfig()) == expected
    assert ShardingConfig.from_dict({}) == ShardingConfig()


def test_every_key_is_documented() -> None:
    documentation = ShardingConfig.__doc__ or ""
    missing = [f.name for f in dataclasses.fields(ShardingConfig) if f"        {f.name}: " not in documentation]
    assert not missing


def test_is_frozen_and_copies_whole() -> None:
    config = ShardingConfig(stage=1, units=[_LayerLike], gradient_scale=8)  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stage = 2  # type: ignore[misc]
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, stage=2).units == (_LayerLike,)


@pytest.mark.parametrize(
    ("key", "given", "kept"),
    [
        ("stage", np.int64(1), 1),
        ("comm_buffer_size_MB", np.float32(0.5), 0.5),
        ("comm_buffer_size_MB", 3, 3),
        ("replicate_buffer_size_MB", np.int32(7), 7),
        ("allgather_overlap", np.bool_(True), True),
        ("reshard_after_step", np.bool_(False), False),
        ("gradient_scale", np.float64(4), 4.0),
        ("gradient_scale", 4, 4.0),
        ("gradient_scale", "sum", "sum"),
        ("timeout_s", 5, 5.0),
        ("units", [_LayerLike], (_LayerLike,)),
    ],
)
def test_accepts_and_keeps_as_python_values(key: str, given: Any, kept: Any) -> None:
    found = getattr(ShardingConfig.from_dict({key: given}), key)
    assert found == kept
    assert type(found) is type(kept)


_NOT_A_NUMBER = [True, np.bool_(True), "1", None, [1], 1j]
_NOT_A_BOOL = [1, 0, "True", None, 1.0, np.int64(1)]
_NOT_A_DTYPE = ["bf16", "float64", "int32", "", 16, True, float, np.float32, ["bfloat16"]]
_BAD_SIZES = [*_NOT_A_NUMBER, 0, -1, float("nan"), float("inf"), np.float32("nan")]
_BAD = {
    "stage": [*_NOT_A_NUMBER, 0, 4, -1, 2.0, np.float64(2)],
    "allgather_overlap": _NOT_A_BOOL,
    "reduce_overlap": _NOT_A_BOOL,
    "comm_fusion": _NOT_A_BOOL,
    "timeline": _NOT_A_BOOL,
    "main_grad": _NOT_A_BOOL,
    "cast_forward_inputs": _NOT_A_BOOL,
    "broadcast_buffers": _NOT_A_BOOL,
    "param_dtype": _NOT_A_DTYPE,
    "gather_dtype": _NOT_A_DTYPE,
    "reduce_dtype": _NOT_A_DTYPE,
    "check_nan_inf": [True, None, "on", "Raise", 1],
    "reshard_after_step": [1, "no", 0.0],
    "reshard_after_forward": [1, "no", None, [_LayerLike], {1: True}, {"head": 1}, {_LayerLike: None}],
    "comm_buffer_size_MB": [*_BAD_SIZES, "Auto", "25"],
    "tuning_budget_MB": [value for value in _BAD_SIZES if value is not None] + ["auto"],
    "replicate_buffer_size_MB": _BAD_SIZES,
    "timeout_s": _BAD_SIZES,
    "prefetch_depth": [True, -1, 1.5, 1.0, "1", "all"],
    "units": ["layers", [], None, _LayerLike, [int], [_LayerLike()], ["Linear"], {_LayerLike}],
    "gradient_scale": [*_NOT_A_NUMBER, 0, -1.0, "max", float("nan"), float("inf"), np.array([1.0, 2.0])],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in _BAD.items() for value in values])
def test_refuses_wrong_types_and_ranges(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        ShardingConfig.from_dict({key: value})
    assert str(error.value).startswith(f"{key}="), "the message begins with the key"
    assert "expected" in str(error.value)
    assert isinstance(error.value, (ValueError, HpShardingError))


@pytest.mark.parametrize("key", ["param_dtype", "gather_dtype", "reduce_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", paddle.bfloat16, "paddle.bfloat16"])
def test_dtypes_by_name_or_as_paddle_has_them(key: str, value: Any) -> None:
    assert getattr(ShardingConfig.from_dict({key: value}), key) == "bfloat16"


@pytest.mark.parametrize("gather", ["float16", "float32"])
def test_16_bits_travel_as_they_are(gather: str) -> None:
    with pytest.raises(ConfigError, match="leave gather_dtype out"):
        ShardingConfig(param_dtype="bfloat16", gather_dtype=gather)
    assert ShardingConfig(param_dtype=gather, gather_dtype=gather).gather_dtype == gather


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("stag", "'stage'"),
        ("all_gather_overlap", "'allgather_overlap'"),
        ("comm_buffer_size_mb", "'comm_buffer_size_MB'"),
        ("Reduce_Overlap", "'reduce_overlap'"),
        ("TIMELINE", "'timeline'"),
        ("prefetch", "'prefetch_depth'"),
        ("comm_overlap", "'reduce_overlap' and 'allgather_overlap'"),
        ("sharding_degree", "hybrid_configs"),
        ("zzzz", "known keys: allgather_overlap, "),
        (7, "known keys: allgather_overlap, "),
    ],
)
def test_unknown_key_names_the_nearest(key: Any, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        ShardingConfig.from_dict({key: 1, "stage": 2})
    assert f"unknown key {key!r}" in str(error.value)
    assert hint in str(error.value)


@pytest.mark.parametrize("given", [None, [("stage", 2)], "stage", 2])
def test_refuses_what_is_no_mapping(given: Any) -> None:
    with pytest.raises(ConfigError, match="expected a dict"):
        ShardingConfig.from_dict(given)


def test_buffer_bytes() -> None:
    config = ShardingConfig(comm_buffer_size_MB=0.5, replicate_buffer_size_MB=2)
    assert config.comm_buffer_bytes == MB // 2
    assert config.replicate_buffer_bytes == 2 * MB
    assert ShardingConfig(comm_buffer_size_MB=1e-9).comm_buffer_bytes == 1


def test_units_ahead() -> None:
    """None is all at once; only a config that keeps memory low limits the gathers, and no overlap starts none."""
    assert ShardingConfig().units_ahead == 0
    assert ShardingConfig(reshard_after_step=True).units_ahead == 0
    assert ShardingConfig(allgather_overlap=True).units_ahead is None
    assert ShardingConfig(allgather_overlap=True, reshard_after_step=False).units_ahead is None
    assert ShardingConfig(allgather_overlap=True, reshard_after_step=True).units_ahead == 1
    assert ShardingConfig(allgather_overlap=True, reshard_after_step=True, prefetch_depth=0).units_ahead == 0
    assert ShardingConfig(allgather_overlap=True, reshard_after_step=True, prefetch_depth=3).units_ahead == 3


def test_stage_3_looks_one_unit_ahead_unless_told_otherwise() -> None:
    assert ShardingConfig(stage=3).units_ahead == 0
    assert ShardingConfig(stage=3, allgather_overlap=True).units_ahead == 1
    assert ShardingConfig(stage=3, allgather_overlap=True, prefetch_depth=2).units_ahead == 2
    assert ShardingConfig(stage=3).reshards_after_step


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stage": 3, "reshard_after_step": False}, "reshard_after_step=False contradicts stage=3"),
        ({"stage": 2, "reshard_after_forward": False}, "stage 3 only"),
        ({"stage": 1, "reshard_after_forward": {"head": False}}, "stage 3 only"),
        ({"comm_buffer_size_MB": "auto", "comm_fusion": False}, "contradicts comm_fusion=False"),
        ({"tuning_budget_MB": 50}, "nothing is tuned"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ShardingConfig.from_dict(settings)


def test_reshards_after_step_is_off_below_stage_3() -> None:
    assert not ShardingConfig(stage=1).reshards_after_step
    assert not ShardingConfig(stage=2).reshards_after_step
    assert ShardingConfig(stage=1, reshard_after_step=True).reshards_after_step


@pytest.mark.parametrize(("scale", "divisor"), [("mean", 4.0), ("sum", 1.0), (2.5, 2.5)])
def test_gradient_divisor(scale: Any, divisor: float) -> None:
    assert ShardingConfig(gradient_scale=scale).gradient_divisor(4) == divisor


def test_prefetch_depth_without_effect_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    config_module._warn_prefetch_depth_unused.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hp_sharding"):
        ShardingConfig(prefetch_depth=2, reshard_after_step=True)
        assert not caplog.records
        ShardingConfig(prefetch_depth=2)
        ShardingConfig(prefetch_depth=2, stage=1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "prefetch_depth has no effect" in caplog.text


def test_needs_no_paddle() -> None:
    """The package's own __init__ may import Paddle; this module alone must not."""
    code = (
        "import sys, types; package = sys.modules['hp_sharding'] = types.ModuleType('hp_sharding'); "
        f"package.__path__ = {list(hp_sharding.__path__)}; "
        "import hp_sharding.config; sys.exit('paddle' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_auto_begins_with_the_defaults() -> None:
    asked = ShardingConfig(stage=3, allgather_overlap=True, comm_buffer_size_MB="auto", prefetch_depth="auto")
    assert (asked.tunes, asked.units_ahead, asked.comm_buffer_bytes) == (True, 1, 25 * MB)
    begun = ShardingConfig(stage=3, allgather_overlap=True, comm_buffer_size_MB=25)
    assert asked.begun() == begun
    assert begun.begun() is begun
    assert not begun.tunes
    assert ShardingConfig(prefetch_depth="auto", tuning_budget_MB=7, reshard_after_step=True).begun() == ShardingConfig(
        reshard_after_step=True
    )


def test_an_automatic_prefetch_depth_without_effect_warns(caplog: pytest.LogCaptureFixture) -> None:
    config_module._warn_prefetch_depth_unused.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hp_sharding"):
        ShardingConfig(prefetch_depth="auto", allgather_overlap=True, reshard_after_step=True)
        assert not caplog.records
        ShardingConfig(prefetch_depth="auto", allgather_overlap=True)
    assert "prefetch_depth has no effect" in caplog.text
