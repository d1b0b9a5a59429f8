"""Profiles: of lists of parameters, of transformers by size, and of Layers, measured or not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.autograd import PyLayer

from hp_sharding.config import ShardingConfig
from hp_sharding.errors import ConfigError
from hp_sharding.plan.hardware import Hardware, Link
from hp_sharding.plan.layers import load, make_model, profile_of
from hp_sharding.plan.measuring import measure
from hp_sharding.plan.profile import KNOWN, Param, from_dict, read, to_dict, transformer
from tests.models import Shared

HARDWARE = Hardware(Link(1e9, 0.0), flops_s=1e12)
EXISTS = nn.Linear(2, 2)
ENTRY: dict[str, Any] = {"name": "a", "params": [["a.weight", [4, 8], "float32"], ["a.bias", [8]]]}


# -- lists -------------------------------------------------------------------------------------------------------------


def test_a_list_of_parameters_to_json_and_back(tmp_path: Path) -> None:
    params = [["a.weight", [4, 8], "float32"], ["a.bias", [8], "float32", True]]
    whole = {**ENTRY, "params": params, "forward_ms": 3, "backward_ms": 5, "backward_factor": 3, "flops": 7}
    whole |= {"activation_mb": 2, "transient_mb": 1}
    root = {"name": "net", "borrows": ["a.weight"], "forward_ms": 1}
    found = from_dict({"name": "net", "units": [whole, root]})
    assert [unit.name for unit in found.units] == ["net", "a"]
    assert found.units[1].params == (Param("a.weight", (4, 8)), Param("a.bias", (8,), frozen=True))
    assert (found.units[1].forward_s, found.units[1].backward_s) == (0.003, 0.005)
    assert found.units[1].activation_bytes == 2 << 20
    assert [param.frozen for param in found.units[1].params] == [False, True]
    assert found.units[1].backward_factor == 3
    path = tmp_path / "list.json"
    path.write_text(json.dumps(to_dict(found)))
    assert read(path) == found


def test_times_follow_from_operations_where_they_are_not_given() -> None:
    found = from_dict({"units": [ENTRY, {"name": "b", "params": [["b.weight", [2, 2]]], "forward_ms": 4}]})
    assert found.units[0].name == "model"
    timed = found.timed(HARDWARE, 1000)
    # Each element of the matrix is multiplied and added for each token; the vector's are not.
    assert timed.units[1].forward_s == pytest.approx(2 * 32 * 1000 / 1e12)
    assert timed.units[1].backward_s == pytest.approx(4 * 32 * 1000 / 1e12)
    assert (timed.units[2].forward_s, timed.units[2].backward_s) == (0.004, 0.008)
    for hardware, tokens in ((Hardware(Link(1e9, 0.0)), 1000), (HARDWARE, None)):
        with pytest.raises(ConfigError, match="'a': nothing says how long"):
            found.timed(hardware, tokens)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "'units'"),
        ({"units": []}, "at least one"),
        ({"units": [{"params": []}]}, "'name'"),
        ({"units": [{**ENTRY, "forward_s": 1}]}, "none but"),
        ({"units": [{**ENTRY, "forward_ms": -1}]}, "forward_ms is to be"),
        ({"units": [{**ENTRY, "flops": True}]}, "flops is to be"),
        ({"units": [{"name": "a", "params": [["w"]]}]}, "a parameter is"),
        ({"units": [{"name": "a", "params": 3}]}, "params is to be a list, not 3"),
        ({"units": [{**ENTRY, "borrows": "a.weight"}]}, "borrows is to be a list"),
        ({"units": [{"name": "a", "params": [["w", "512"]]}]}, "a parameter is"),
        ({"units": [{"name": "a", "params": [["w", [2.5]]]}]}, "a parameter is"),
        ({"units": [{"name": "a", "params": ["wide"]}]}, "a parameter is"),
        ({"units": [{"name": "a", "params": [["w", [1], "float32", 1]]}]}, "frozen is true or false"),
        ({"units": [{"name": "a", "params": [["w", [0]]]}]}, "'w' has shape"),
        ({"units": [{"name": "a", "params": [["w", [1], "int8"]]}]}, "known are float64"),
        ({"units": [ENTRY, ENTRY]}, "two units named 'a'"),
        ({"units": [ENTRY, {**ENTRY, "name": "b"}]}, "two parameters named 'a.weight'"),
        ({"units": [{**ENTRY, "borrows": ["c"]}]}, "'c' is borrowed"),
        ({"units": [{"name": "a"}]}, "no parameter at all"),
    ],
)
def test_lists_that_make_no_sense_are_refused(values: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=text) as caught:
        read(path)
    assert "list.json" in str(caught.value)


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "numel"), [("7b", 6_738_415_616), ("70b", 68_976_648_192)])
def test_known_models_have_the_parameters_that_they_are_known_for(name: str, numel: int) -> None:
    found = transformer(name, KNOWN[name], tokens=4096)
    assert found.numel == numel
    assert len(found.units) == KNOWN[name].layers + 4


def test_a_step_takes_six_operations_for_each_parameter_and_token() -> None:
    # Beside them attention over 4096 tokens; the table at the beginning takes none.
    sizes = KNOWN["7b"]._replace(recompute=False)
    found = transformer("7b", sizes, tokens=4096).timed(HARDWARE, 4096)
    total_s = sum((unit.forward_s or 0) + (unit.backward_s or 0) for unit in found.units)
    attention = 6 * sizes.layers * sizes.context * sizes.width
    expected = 6 * (found.numel - sizes.vocabulary * sizes.width - (2 * sizes.layers + 1) * sizes.width) + attention
    assert total_s == pytest.approx(expected * 4096 / 1e12)
    again = transformer("7b", KNOWN["7b"], tokens=4096)
    assert again.timed(HARDWARE, 4096).units[5].backward_s == pytest.approx(1.5 * (found.units[5].backward_s or 0))
    assert again.units[5].activation_bytes * 10 < found.units[5].activation_bytes


# -- Layers ------------------------------------------------------------------------------------------------------------


class _Net(nn.Layer):
    """A table at both ends, its own bias at the end, and units that run in another order than they are held in."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(20, width)
        self.blocks = nn.LayerList([nn.Linear(width, width) for _ in range(3)])
        self.bias = self.create_parameter([20], is_bias=True)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.table(x)
        for number in (2, 0, 1):
            x = F.gelu(self.blocks[number](x))
        return paddle.matmul(x, self.table.weight, transpose_y=True) + self.bias


def test_a_layer_needs_no_memory_to_be_looked_at() -> None:
    model = make_model(lambda: _Net(200_000))  # 160 GB a block
    found = profile_of(model, ShardingConfig())
    assert found.name == "_Net"
    assert [unit.name for unit in found.units] == ["_Net", "table", "blocks.0", "blocks.1", "blocks.2", "unused"]
    assert found.units[2].params[0] == Param("blocks.0.weight", (200_000, 200_000))
    assert found.units[2].flops == 2 * 200_000**2
    assert found.units[1].flops == 0


def test_a_table_is_no_product_and_counts_once() -> None:
    inner = nn.Sequential(nn.Embedding(1000, 64))
    block = nn.Sequential(inner, nn.LayerList([nn.Linear(64, 640)]))
    found = profile_of(nn.Sequential(_Around(block), nn.Linear(640, 4)), ShardingConfig())
    assert [unit.flops for unit in found.units] == [0, 2 * 64 * 640, 2 * 640 * 4]


class _Around(nn.Layer):
    def __init__(self, block: nn.Layer) -> None:
        super().__init__()
        self.block = block


def test_layers_that_need_their_values_are_built_with_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "hp_sharding"):
        make_model(lambda: nn.Linear(4, 6))
        assert not caplog.records
        model = make_model(lambda: nn.LSTM(4, 6))
    assert "built in memory" in caplog.text
    assert all(param._is_initialized() for param in model.parameters())
    with pytest.raises(ConfigError, match="not int"):
        make_model(lambda: 3)


def test_tied_parameters_are_borrowed() -> None:
    found = profile_of(Shared(), ShardingConfig())
    borrows = {unit.name: unit.borrows for unit in found.units}
    assert borrows["tied"] == ("twice.weight",)
    assert [name for name, names in borrows.items() if names] == ["tied"]


def test_measuring_finds_order_times_and_what_is_borrowed() -> None:
    model = _Net(64)
    kinds = {type(layer._parameters) for layer in model.sublayers(include_self=True)}
    found = measure(model, lambda: model(paddle.arange(20)), ShardingConfig(), steps=2)
    units = {unit.name: unit for unit in found.profile.units}
    assert list(units) == ["_Net", "table", "blocks.2", "blocks.0", "blocks.1", "unused"]
    assert units["_Net"].borrows == ("table.weight", "bias")
    assert all((unit.forward_s or 0) > 0 and (unit.backward_s or 0) > 0 for unit in found.profile.units[:5])
    assert units["unused"].forward_s == units["unused"].backward_s == 0
    # Each Linear's result stays for the backward, at the least.
    assert all(units[f"blocks.{number}"].activation_bytes >= 20 * 64 * 4 for number in range(3))
    assert found.update_bytes_s > 1e6
    assert found.copy_bytes_s > 1e6
    # The model is what it was: no hook, no guard, and gradients that stay.
    assert {type(layer._parameters) for layer in model.sublayers(include_self=True)} == kinds
    assert not any(layer._forward_pre_hooks or layer._forward_post_hooks for layer in model.sublayers())
    model(paddle.arange(20)).sum().backward()
    assert model.table.weight.grad is not None


class _Sleep(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, seconds: float) -> paddle.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        time.sleep(2 * ctx.seconds)
        return gradient.clone()


class _Slow(nn.Layer):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self._seconds = seconds

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return _Sleep.apply(self.linear(x), self._seconds)


def test_measuring_gives_each_unit_what_it_took() -> None:
    model = nn.Sequential(_Slow(0.03), nn.Linear(2, 2), _Slow(0.01))
    found = measure(model, lambda: model(paddle.ones([1, 2])), ShardingConfig(), steps=1).profile.units
    # A busy machine takes longer, and never less.
    for number, least_s in ((1, 0.03), (3, 0.01)):
        assert least_s <= (found[number].forward_s or 0) < least_s + 0.02
        assert 2 * least_s <= (found[number].backward_s or 0) < 2 * least_s + 0.02
    assert (found[2].forward_s or 0) < 0.01


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("tests.models", "is no callable"),
        ("tests.nowhere:build", "No module named 'tests.nowhere'"),
        ("tests.models:nothing", "has no callable 'nothing'"),
        ("tests.models:SEED", "has no callable 'SEED'"),
        ("tests.unit.test_plan_profile:load", "without arguments: missing a required argument: 'path'"),
        ("tests.unit.test_plan_profile:EXISTS", "is a Layer that exists already"),
    ],
)
def test_callables_that_are_not_there(path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(path)
