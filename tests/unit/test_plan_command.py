"""The command line of the plan: models of every form, the order of the choices, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click.testing
import paddle
import pytest

from hp_sharding.cli import main
from hp_sharding.plan.hardware import Hardware, Link
from hp_sharding.trace import chrome
from tests import timelines

LINKS = ("--bandwidth-gbit", "10", "--latency-us", "20")
COMPUTE = ("--tflops", "1", "--tokens", "512")
SMALL = "transformer:layers=2,width=64,heads=4,inner=128,vocabulary=100,context=64"
HERE = "tests.unit.test_plan_command"
MEASURED = (f"{HERE}:build", *LINKS, "--measure", "--batch", f"{HERE}:batch")


def build() -> paddle.nn.Layer:
    return paddle.nn.Sequential(*[paddle.nn.Linear(64, 64) for _ in range(4)])


def build_recorded() -> paddle.nn.Layer:
    return timelines.Net()


def batch() -> tuple[paddle.Tensor]:
    return (paddle.ones([8, 64]),)


def _call(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, ["plan", *arguments])


def _json(*arguments: str) -> Any:
    found = _call(*arguments, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_help_has_examples_and_exit_codes() -> None:
    found = _call("--help")
    assert found.exit_code == 0
    for wanted in ("my_models.gpt:build", "llama2-70b", "layers.json", "Exit code: 0 something fits"):
        assert wanted in found.output
    assert "plan" in click.testing.CliRunner().invoke(main, ["--help"]).output


def test_every_combination_once_the_fastest_first() -> None:
    model = "transformer:layers=4,width=256,heads=4,inner=512,vocabulary=1000,context=64"
    arguments = (
        model, *LINKS, *COMPUTE, "--ranks", "4", "--replicas", "1,2", "--stages", "2,3", "--buffer-mb", "0.5,4",
        "--prefetch-depth", "1,2",
    )  # fmt: skip
    found = _json(*arguments)
    choices = found["choices"]
    # Stage 2 looks at no depth: 2 x 2, and stage 3 2 x 2 x 2.
    assert len({choice["what"] for choice in choices}) == len(choices) == 12
    assert [choice["step_ms"] for choice in choices] == sorted(choice["step_ms"] for choice in choices)
    assert found["numel"] == 2 * 1000 * 256 + 256 + 4 * (4 * 256 * 256 + 2 * 256 + 3 * 256 * 512)
    assert found["hardware"]["shard"] == {"bandwidth_bytes_s": 1.25e9, "latency_s": 2e-5}
    assert {choice["shard_ranks"] * choice["replicas"] for choice in choices} == {4}
    # Where nothing fits, what is nearest to it comes first.
    sizes = [choice["memory_bytes"] for choice in choices]
    assert sizes != sorted(sizes)
    none = _call(*arguments, "--memory-gb", "0.0001", "--json")
    assert none.exit_code == 1
    assert [choice["memory_bytes"] for choice in json.loads(none.stdout)["choices"]] == sorted(sizes)


def test_what_does_not_fit_comes_last_and_is_marked() -> None:
    arguments = (f"{HERE}:build", *LINKS, *COMPUTE, "--ranks", "8", "--stages", "1,2,3", "--buffer-mb", "0.01")
    sizes = {choice["stage"]: choice["memory_bytes"] for choice in _json(*arguments)["choices"]}
    assert sizes[3] < sizes[2] < sizes[1]
    limit_gb = (sizes[2] + sizes[3]) / 2e9
    found = _json(*arguments, "--memory-gb", str(limit_gb))["choices"]
    assert [(choice["stage"], choice["fits"]) for choice in found] == [(3, True), (2, False), (1, False)]
    shown = _call(*arguments, "--memory-gb", str(limit_gb))
    assert shown.exit_code == 0
    assert shown.output.count("too large") == 2
    assert "1 of 3 fit" in shown.output
    assert _call(*arguments, "--memory-gb", str(sizes[3] / 2e9)).exit_code == 1


def test_a_list_of_parameters_and_hardware_from_files_and_a_trace_of_the_best(tmp_path: Path) -> None:
    model, machine, trace = (tmp_path / name for name in ("list.json", "report.json", "trace.json"))
    units = [{"name": f"l{n}", "params": [[f"l{n}.w", [512, 512]]], "forward_ms": 5} for n in range(3)]
    model.write_text(json.dumps({"name": "net", "units": units}))
    machine.write_text(json.dumps({"hardware": Hardware(Link(1e8, 1e-3)).to_dict()}))
    found = _json(str(model), "--hardware", str(machine), "--ranks", "2", "--trace", str(trace))
    read = chrome.read(trace)
    assert read.about["simulated"] is True
    assert read.steps[0].duration_ms == pytest.approx(found["choices"][0]["step_ms"], rel=1e-6)
    # Flags count before the file.
    faster = _json(str(model), "--hardware", str(machine), "--ranks", "2", "--bandwidth-gbit", "8")
    assert faster["hardware"]["shard"] == {"bandwidth_bytes_s": 1e9, "latency_s": 1e-3}
    assert faster["choices"][0]["step_ms"] < found["choices"][0]["step_ms"]


def test_compute_as_it_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    arguments = (f"{HERE}:build", *LINKS, "--ranks", "2", "--stages", "2")
    planned = _json(*arguments, "--tflops", "1", "--tokens", "512", "--trace", str(path))
    recorded = _json(*arguments, "--compute-from", str(path))
    for one, other in zip(planned["model"]["units"], recorded["model"]["units"], strict=True):
        for key in ("forward_ms", "backward_ms"):
            assert other[key] == pytest.approx(one[key], abs=1e-6)
    assert recorded["choices"][0]["step_ms"] == pytest.approx(planned["choices"][0]["step_ms"], rel=1e-3)
    found = _call("llama2-7b", *LINKS, "--tokens", "8", "--compute-from", str(path))
    assert found.exit_code == 2
    assert "no compute of any unit of llama2-7b" in found.output


def test_compute_of_real_training_and_not_of_half_of_it(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    trace = timelines.record(timelines.rig_of(stage=2))
    chrome.write(trace, path)
    arguments = (f"{HERE}:build_recorded", *LINKS, "--ranks", "2", "--compute-from", str(path))
    units = {unit["name"]: unit for unit in _json(*arguments)["model"]["units"]}
    assert set(units) == timelines.LAYERS
    assert all(unit["forward_ms"] > 0 and unit["backward_ms"] > 0 for name, unit in units.items() if name != "Net")
    chrome.write(dataclasses.replace(trace, spans=[span for span in trace.spans if span.layer != "blocks.2"]), path)
    found = _call(*arguments)
    assert found.exit_code == 2
    assert "no compute of 1 of 5 units of Net: blocks.2." in found.output


def test_links_inside_and_between_hosts() -> None:
    arguments = (f"{HERE}:build", *LINKS, *COMPUTE, "--ranks", "16", "--stages", "2", "--compute-slowdown", "1.5")
    hosts = ("--host-ranks", "8", "--host-bandwidth-gbit", "800", "--host-latency-us", "1")
    flat, grouped = _json(*arguments), _json(*arguments, *hosts)
    assert grouped["hardware"]["host"] == {"bandwidth_bytes_s": 1e11, "latency_s": 1e-6}
    assert grouped["hardware"]["compute_slowdown"] == dict.fromkeys(("gather", "reduce", "replicate"), 1.5)
    assert grouped["choices"][0]["step_ms"] < flat["choices"][0]["step_ms"]
    found = _call(*arguments, "--host-ranks", "8")
    assert found.exit_code == 2
    assert "--host-bandwidth-gbit" in found.output


def test_a_model_is_measured_here() -> None:
    found = _json(f"{HERE}:build", "--batch", f"{HERE}:batch", "--measure", *LINKS, "--ranks", "2", "--top", "1")
    assert len(found["choices"]) == 1
    assert all(unit["forward_ms"] > 0 for unit in found["model"]["units"][1:])
    assert found["hardware"]["update_bytes_s"] > 0


def test_16_bits_have_masters() -> None:
    arguments = (*LINKS, *COMPUTE, "--ranks", "2", "--stages", "2")
    for dtype, planned in (("bfloat16", "bfloat16"), ("float32", None)):
        (found,) = _json(f"{SMALL},dtype={dtype}", *arguments)["choices"]
        assert found["param_dtype"] == planned
    short = _json(SMALL, *arguments)
    # Of two ranks each has all in bfloat16, and half of it as masters and two moments.
    assert short["choices"][0]["state_bytes"] >= short["numel"] * (2 + 3 * 4 / 2)
    assert "in bfloat16; each rank keeps its shard of the parameters in float32" in _call(SMALL, *arguments).output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((f"{HERE}:build",), "--bandwidth-gbit"),
        ((f"{HERE}:build", *LINKS), "--tflops and --tokens"),
        ((f"{HERE}:build", *LINKS, "--measure"), "--batch"),
        ((f"{HERE}:nothing", *LINKS), "no callable 'nothing'"),
        (("nothing.json", *LINKS), "nothing.json"),
        (("llama2-7b", *LINKS), "--tokens"),
        (("transformer:layers=2", *LINKS, *COMPUTE), "expected numbers for"),
        ((f"{HERE}:build", *LINKS, *COMPUTE, "--replicas", "3"), "3 replicas"),
        ((f"{HERE}:build", *LINKS, *COMPUTE, "--stages", "4"), "stage=4"),
        ((f"{HERE}:build", *LINKS, *COMPUTE, "--stages", "2,x"), "'2,x' is not a list"),
        ((f"{HERE}:build", *LINKS, *COMPUTE, "--buffer-mb", "0"), "at least 0.001"),
        ((f"{HERE}:build", *LINKS, "--hardware", "/nowhere.json"), "does not exist"),
        ((f"{HERE}:build", *LINKS, *COMPUTE, "--host-bandwidth-gbit", "8"), "without --host-ranks"),
        ((f"{HERE}:build", *LINKS, *COMPUTE, "--host-latency-us", "0"), "without --host-ranks"),
        ((f"{HERE}:build", *LINKS, *COMPUTE, "--batch", f"{HERE}:batch"), "without --measure"),
        ((*MEASURED, "--tflops", "1"), "leave --tflops out"),
        ((*MEASURED, "--tokens", "8"), "leave --tokens out"),
        ((*MEASURED, "--param-dtype", "bfloat16"), "'0.weight' in float32"),
        ((f"{SMALL},dtype=int4", *LINKS, *COMPUTE), "known dtypes are float64"),
    ],
)
def test_wrong_use_ends_with_2(arguments: tuple[str, ...], said: str) -> None:
    found = _call(*arguments)
    assert found.exit_code == 2
    assert said in found.output
