"""Every public call with wrong arguments: an error of ours that says what was expected, and nothing has changed.

``CALLS`` has every public call and each of its arguments; a test fails where one is missing.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

import hp_sharding
from hp_sharding import ConfigError, ShardingConfig, fleet, timeline
from hp_sharding.checkpoint import PendingSave
from hp_sharding.fleet.session import Session
from hp_sharding.plain import PlainOptimizer
from tests.mistakes import (
    KINDS,
    Argument,
    Arguments,
    Pair,
    Training,
    a_layer,
    alone,
    count,
    either,
    empty_dict,
    flag,
    is_number,
    no_path,
    nothing,
    one_of,
    only_none,
    path,
    positive,
    refused,
    savable,
    strategy,
    try_wrong,
    whole,
)  # fmt: skip
from tests.models import make_model, make_optimizer

# -- what there is -----------------------------------------------------------------------------------------------------

_DRIVEN = "driven by the schedule and the optimizer, whose orders of calls are in test_call_orders.py"
_TOLD = "told by those who compute and send"
NOT_TRIED = {
    "CheckpointError": "an exception", "CommError": "an exception", "ConfigError": "an exception",
    "HpShardingError": "an exception", "LayoutError": "an exception", "StateError": "an exception",
    "Status": "an enumeration",
    "ShardedOptimizer": "made by shard() and fleet, which check what they are given",
    "FusedCommBuffer": "made by shard() and fleet, which check what they are given",
    "fleet": "a module", "timeline": "a module",
    "timeline.KEPT_STEPS": "a number", "timeline.MAX_STEPS": "a number",
    "timeline.Span": "a tuple that is read", "timeline.StepTimes": "a tuple that is read",
    "timeline.Timeline": "made by shard() and fleet", "timeline.Recording": "made by Timeline.record",
    "FusedCommBuffer.keep_writes": _DRIVEN,
    **{f"Timeline.{name}": _TOLD for name in (
        "watch", "wait", "enter", "switch", "until", "count_wrong_guesses", "end_step", "begin_recording"
    )},
    "Recording.take": _TOLD,
}  # fmt: skip
"""Public names without arguments of a user's, and why."""

CLASSES: dict[str, type] = {
    "optimizer": PlainOptimizer,
    "FusedCommBuffer": hp_sharding.FusedCommBuffer,
    "ShardingConfig": ShardingConfig,
    "DistributedStrategy": fleet.DistributedStrategy,
    "Timeline": timeline.Timeline,
    "Recording": timeline.Recording,
    "PendingSave": PendingSave,
}


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="hp_sharding_inputs_"))


def _param(training: Training) -> Any:
    return training.model.layers[1].weight


def _fresh(training: Training) -> Any:
    training.fresh = make_model("mlp")
    return training.fresh


def _optimizer_for_fleet(training: Training) -> Any:
    model = _fresh(training)
    return make_optimizer("SGD", fleet.distributed_model(model) if fleet._SESSION._settings else model)


def _is_log_level(value: Any) -> bool:
    names = ("CRITICAL", "FATAL", "ERROR", "WARN", "WARNING", "INFO", "DEBUG", "NOTSET")
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, str) and value.upper() in names
    )


_MODEL = Argument(lambda training: training.model, nothing)
_OPTIMIZER = Argument(lambda training: training.optimizer, only_none)
_STATE = Argument(lambda training: training.optimizer.state_dict(), nothing)
_STRATEGY = Argument(lambda _: None, strategy)
_SCALER = Argument(lambda _: None, only_none)
_STRICT = Argument(lambda _: True, flag)
_SAVED = Argument(lambda training: str(_folder() / training.kind), path)
_NEW = Argument(lambda _: str(_folder() / "refused"), path)
_CLEAR = {"set_to_zero": Argument(lambda _: True, flag)}

OPTIMIZER: dict[str, Arguments] = {
    "clear_grad": _CLEAR,
    "clear_gradients": _CLEAR,
    "minimize": {
        "loss": Argument(lambda training: training.forward(), lambda value: isinstance(value, paddle.Tensor)),
        "startup_program": Argument(lambda _: None, only_none),
        "parameters": Argument(lambda _: None, only_none),
        "no_grad_set": Argument(lambda _: None, only_none),
    },
    "no_sync": {"replicate_only": Argument(lambda _: False, flag)},
    "full_grad": {"param": Argument(_param, nothing)},
    "set_full_grad": {
        "param": Argument(_param, nothing),
        "value": Argument(lambda training: np.zeros(_param(training).shape, "float32"), nothing),
    },
    "clip_grad_norm": {
        "max_norm": Argument(lambda _: 1.0, lambda value: is_number(value) and value >= 0),
        "norm_type": Argument(lambda _: 2.0, lambda value: is_number(value) and value == 2),
        "error_if_nonfinite": Argument(lambda _: False, flag),
    },
    "set_state_dict": {"state_dict": _STATE},
    "load_state_dict": {"state_dict": _STATE},
    "sharded_state_dict": {
        "model_sharded_state_dict": Argument(lambda training: training.optimizer.model_sharded_state_dict(), nothing)
    },
}
"""Of both kinds of optimizers."""

CALLS: dict[str, Arguments] = {
    "shard": {
        "model": Argument(lambda training: _fresh(training), nothing),
        "optimizer": Argument(lambda training: make_optimizer("SGD", training.fresh), nothing),
        "config": Argument(lambda _: None, only_none),
        "shard_group": Argument(lambda _: None, alone),
        "replicate_group": Argument(lambda _: None, alone),
        "tensor_parallel_group": Argument(lambda _: None, alone),
    },
    "full_parameters": {"model": Argument(lambda training: training.model, a_layer)},
    "save": {
        "path": _NEW, "model": _MODEL, "optimizer": _OPTIMIZER, "scaler": _SCALER,
        "extra": Argument(lambda _: None, savable), "rank_extra": Argument(lambda _: None, savable),
        "asynchronous": Argument(lambda _: False, flag),
    },
    "load": {"path": _SAVED, "model": _MODEL, "optimizer": _OPTIMIZER, "scaler": _SCALER, "strict": _STRICT},
    "latest_checkpoint": {"folder": Argument(lambda _: str(_folder()), path)},
    "save_full": {
        "path": _NEW, "model": _MODEL, "optimizer": _OPTIMIZER,
        "format": Argument(lambda _: "paddle", one_of("paddle", "safetensors")),
    },
    "load_full": {
        "path": Argument(lambda training: f"{_folder()}/full {training.kind}", path),
        "model": _MODEL, "optimizer": _OPTIMIZER, "strict": _STRICT,
    },
    "fleet.init": {
        "role_maker": Argument(lambda _: None, only_none),
        "is_collective": Argument(lambda _: True, lambda value: flag(value) and bool(value)),
        "strategy": _STRATEGY,
        "log_level": Argument(lambda _: "WARNING", _is_log_level),
    },
    "fleet.distributed_model": {"model": Argument(lambda training: training.model, a_layer)},
    "fleet.distributed_optimizer": {"optimizer": Argument(_optimizer_for_fleet, nothing), "strategy": _STRATEGY},
    "fleet.distributed_scaler": {"scaler": Argument(lambda _: None, nothing)},
    "fleet.sharding_config": {"strategy": _STRATEGY, "defaults": Argument(lambda _: {}, empty_dict)},
    "timeline.json_lines": {"path": Argument(lambda _: "steps.jsonl", path)},
    "timeline.scalars": {
        "writer": Argument(lambda _: _Writer(), nothing),
        "every": Argument(lambda _: 1, count),
    },
    "Timeline.add_sink": {"sink": Argument(lambda _: print, callable)},
    "Timeline.record": {
        "steps": Argument(lambda _: None, either(only_none, count)),
        "path": Argument(lambda _: None, no_path),
    },
    "Timeline.write": {"path": Argument(lambda _: None, path)},
    "FusedCommBuffer.takes_as_master": {
        "index": Argument(lambda _: 0, whole(0, 20)),
    },
    "FusedCommBuffer.write_master": {
        "index": Argument(lambda _: 0, nothing),
        "value": Argument(lambda training: np.zeros(_param(training).shape, "float32"), nothing),
    },
    "ShardingConfig.from_dict": {"mapping": Argument(lambda _: {}, empty_dict)},
    "ShardingConfig.gradient_divisor": {"data_nranks": Argument(lambda _: 2, positive(1.8e308))},
}  # fmt: skip

_SIZE = positive(2.0**40)
_DTYPE = one_of(None, "float32", "bfloat16", "float16")
CONFIG: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("allgather_overlap", "reduce_overlap", "comm_fusion", "cast_forward_inputs"), flag),
    **dict.fromkeys(("main_grad", "broadcast_buffers", "timeline"), flag),
    **dict.fromkeys(("gather_dtype", "reduce_dtype", "param_dtype"), either(_DTYPE, lambda v: v is paddle.float32)),
    "stage": whole(1, 3),
    "comm_buffer_size_MB": either(_SIZE, one_of("auto")),
    "replicate_buffer_size_MB": _SIZE,
    "prefetch_depth": either(whole(0), one_of("auto", None)),
    "tuning_budget_MB": only_none,
    "reshard_after_step": either(flag, only_none),
    "reshard_after_forward": either(lambda value: flag(value) and bool(value), empty_dict),
    "units": lambda value: isinstance(value, str) and value == "auto",
    "check_nan_inf": one_of("off", "warn", "raise"),
    "gradient_scale": either(positive(2.0**127, 2.0**-126), one_of("mean", "sum")),
    "timeout_s": positive(1e6),
}
"""What each setting takes beside the defaults."""

_INT32 = whole(-(2**31), 2**31 - 1)
HYBRID: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("dp_degree", "mp_degree", "pp_degree", "sharding_degree", "sep_degree", "cp_degree"), _INT32),
    **dict.fromkeys(("mp_configs", "pp_configs", "sharding_configs"), empty_dict),
    "order": nothing,
}


class _Writer:
    def add_scalar(self, tag: str, value: float, step: int) -> None: ...


@functools.cache
def _pair(kind: str) -> Pair:
    pair = Pair(kind)
    hp_sharding.save(_folder() / kind, pair.twin.model, pair.twin.optimizer)
    hp_sharding.save_full(_folder() / f"full {kind}", pair.twin.model, pair.twin.optimizer)
    return pair


@pytest.fixture(scope="module", autouse=True)
def _forget_afterwards() -> Iterator[None]:
    yield
    shutil.rmtree(_folder())
    _pair.cache_clear()
    _folder.cache_clear()


# -- the table is whole ------------------------------------------------------------------------------------------------


def _public(home: Any, names: Iterator[str] | list[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in names:
        yield f"{prefix}{name}", getattr(home, name)


def _members() -> Iterator[tuple[str, Any]]:
    for name, kind in CLASSES.items():
        for member, thing in vars(kind).items():
            if not member.startswith("_"):
                yield f"{name}.{member}", thing
    for member, thing in vars(hp_sharding.ShardedOptimizer).items():
        if not member.startswith("_"):
            yield f"optimizer.{member}", thing


def _arguments(call: Any) -> set[str]:
    """Names of what a call takes, without ``self``; none of what is no call."""
    call = getattr(call, "__func__", call)
    if not callable(call):
        return set()
    try:
        params = inspect.signature(call).parameters.values()
    except ValueError:
        return set()
    return {param.name for param in params if param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD)} - {
        "self", "cls"
    }  # fmt: skip


def test_every_public_call_is_in_the_table() -> None:
    tried = {**CALLS, **{f"optimizer.{name}": arguments for name, arguments in OPTIMIZER.items()}}
    names = dict(_public(hp_sharding, hp_sharding.__all__))
    names |= dict(_public(fleet, fleet.__all__, "fleet.")) | dict(_public(timeline, timeline.__all__, "timeline."))
    settings = {"ShardingConfig", "fleet.DistributedStrategy"}
    for name, thing in [*names.items(), *_members()]:
        if name in NOT_TRIED or name in settings:
            continue
        wanted = _arguments(thing)
        if name == "FusedCommBuffer.takes_as_master":
            wanted -= {"value"}  # any value is a question that has an answer
        assert wanted <= set(tried.get(name, {})), f"{name}: try wrong values of {wanted - set(tried.get(name, {}))}"
    assert {field.name for field in dataclasses.fields(ShardingConfig)} == set(CONFIG)


def test_the_table_has_no_more_than_there_is() -> None:
    known = dict(_members()) | dict(_public(hp_sharding, hp_sharding.__all__))
    known |= dict(_public(fleet, fleet.__all__, "fleet.")) | dict(_public(timeline, timeline.__all__, "timeline."))
    for name, arguments in CALLS.items():
        assert set(arguments) <= _arguments(known[name]), name
    assert {f"optimizer.{name}" for name in OPTIMIZER} <= set(known)
    assert set(NOT_TRIED) <= set(known)


# -- wrong arguments ---------------------------------------------------------------------------------------------------


def _called(name: str) -> Callable[..., Any]:
    """The public call of that name, on a training."""
    home, _, method = name.rpartition(".")

    def call(training: Training, **arguments: Any) -> Any:
        things = {
            "": hp_sharding,
            "optimizer": training.optimizer,
            "Timeline": training.optimizer.timeline,
            "FusedCommBuffer": next(iter(getattr(training.optimizer, "buffers", ())), None),
            "fleet": fleet,
            "timeline": timeline,
            "ShardingConfig": ShardingConfig if method == "from_dict" else ShardingConfig(),
        }
        found = getattr(things[home], method)(**arguments)
        if hasattr(found, "__enter__") and method in ("no_sync", "full_parameters"):
            with found:
                pass
        return found

    return call


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZER)
def test_wrong_arguments_of_an_optimizer(name: str, kind: str) -> None:
    pair = _pair(kind)
    try_wrong(pair.exposed, _called(f"optimizer.{name}"), OPTIMIZER[name])
    pair.check()


@pytest.mark.parametrize("kind", ["plain", "stage 3"])
@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith(("fleet.", "FusedCommBuffer."))])
def test_wrong_arguments(name: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    pair = _pair(kind)
    try_wrong(pair.exposed, _called(name), CALLS[name])
    pair.check()
    assert not list(tmp_path.iterdir()), "something was written"
    assert not list(_folder().glob("refused*"))


@pytest.mark.parametrize("kind", ["mixed", "stage 2"])
@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("FusedCommBuffer.")])
def test_wrong_arguments_of_a_bucket(name: str, kind: str) -> None:
    pair = _pair(kind)
    call = _called(name)
    more = {"value": None} if name.endswith("takes_as_master") else {}
    try_wrong(pair.exposed, lambda training, **arguments: call(training, **arguments, **more), CALLS[name])
    pair.check()


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("fleet.")])
def test_wrong_arguments_of_fleet(name: str, started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_SESSION", Session())
    if started:
        fleet.init()
    pair = _pair("plain")
    try_wrong(pair.exposed, _called(name), CALLS[name])
    pair.check()


@pytest.mark.parametrize("key", CONFIG)
def test_wrong_settings(key: str) -> None:
    def call(_: Any, **given: Any) -> None:
        strategy = fleet.DistributedStrategy()
        with pytest.raises(ConfigError):
            strategy.hp_sharding_configs = given
        assert dict(strategy.hp_sharding_configs) == {}
        with pytest.raises(ConfigError):
            fleet.sharding_config(None, given)
        ShardingConfig(**given)

    try_wrong(_pair("plain").exposed, call, {key: Argument(lambda _: None, CONFIG[key])})


@pytest.mark.parametrize("key", HYBRID)
def test_wrong_degrees_and_tables(key: str) -> None:
    def call(_: Any, **given: Any) -> None:
        strategy = fleet.DistributedStrategy()
        before = str(strategy.strategy)
        try:
            strategy.hybrid_configs = given
        finally:
            assert str(strategy.strategy) == before

    try_wrong(_pair("plain").exposed, call, {key: Argument(lambda _: None, HYBRID[key])})


@pytest.mark.parametrize("table", ["hp_sharding_configs", "hybrid_configs"])
def test_wrong_tables(table: str) -> None:
    def call(_: Any, configs: Any) -> None:
        setattr(fleet.DistributedStrategy(), table, configs)

    try_wrong(_pair("plain").exposed, call, {"configs": Argument(lambda _: {}, empty_dict)})


def _value_of(state: dict[str, Any], key: str, training: Training) -> Any:
    return state[key]


@pytest.mark.parametrize("kind", ["plain", "mixed", "stage 2"])
def test_states_with_something_wrong_in_them(kind: str) -> None:
    pair = _pair(kind)
    state = pair.exposed.optimizer.state_dict()
    keys = {f"key {number}": key for number, key in enumerate(sorted(state))}

    def call(training: Training, **wrong: Any) -> None:
        training.optimizer.set_state_dict({**state, **{keys[name]: value for name, value in wrong.items()}})

    some = [name for name, key in keys.items() if key in ("LR_Scheduler", "hp_sharding_layout", "master_weights")]
    some += list(keys)[:: len(keys) // 2]
    arguments = {name: Argument(functools.partial(_value_of, state, keys[name]), nothing) for name in some}
    try_wrong(pair.exposed, call, arguments)
    for key in keys.values():
        less = {name: value for name, value in state.items() if name != key}
        refused(functools.partial(pair.exposed.optimizer.set_state_dict, less))
    refused(lambda: pair.exposed.optimizer.set_state_dict({**state, 7: np.zeros([1], "float32")}))
    pair.exposed.optimizer.set_state_dict(state)
    pair.check()


def test_an_unknown_argument_is_one_to_python() -> None:
    training = _pair("stage 2").exposed
    calls: list[Any] = [training.optimizer.clear_grad, training.optimizer.no_sync, hp_sharding.save, fleet.init]
    for call in calls:
        with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
            call(nonsense=1)
