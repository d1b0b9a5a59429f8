"""What PyTorch's contenders need: an environment of their own, weights to start from, and links of a known speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import gpt, link_speed, links
from benchmarks.contenders import CONTENDERS
from benchmarks.peers import contenders, environment, weights
from benchmarks.shape import Shape, draw_codes
from tests.harness import REPO_ROOT

_TINY = {"layers": 1, "width": 16, "heads": 2, "context": 4, "vocabulary": 8, "batch": 2}


class Pip:
    """Stands in for pip: notes what it is asked for, and fails where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: tuple[str, ...] = ()) -> None:
        self.calls: list[list[str]] = []
        self._fails = fails
        monkeypatch.setattr("benchmarks.peers.environment.venv.create", self._create)
        monkeypatch.setattr("benchmarks.peers.environment.subprocess.run", self._run)

    def _create(self, folder: Path, **_: Any) -> None:
        python = environment.interpreter(folder)
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()

    def _run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        failed = any(word in command for word in self._fails)
        return subprocess.CompletedProcess(command, int(failed), "", "no such host" if failed else "")


def test_the_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch)
    python = environment.ensure(tmp_path)
    assert environment.ensure(tmp_path) == python == tmp_path / "bin" / "python"
    first, second = pip.calls
    assert first[first.index("--index-url") + 1].endswith("/whl/cpu")
    assert environment.TORCH in first
    assert environment.TORCH in second
    assert "--index-url" not in second


def test_another_release_is_installed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch)
    environment.ensure(tmp_path)
    monkeypatch.setattr(environment, "TORCH", "torch==0.0.1")
    assert not environment.is_made(tmp_path)
    environment.ensure(tmp_path)
    assert "torch==0.0.1" in pip.calls[-1]


def test_without_the_index_for_processors_the_same_release_comes_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip(monkeypatch, fails=("--index-url",))
    environment.ensure(tmp_path)
    assert environment.is_made(tmp_path)
    assert environment.TORCH in pip.calls[-1]


def test_where_pip_fails_its_own_words_are_passed_on_and_nothing_counts_as_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pip(monkeypatch, fails=(environment.TORCH,))
    with pytest.raises(environment.EnvironmentFailed, match="no such host"):
        environment.ensure(tmp_path)
    assert not environment.is_made(tmp_path)


def test_the_weights_that_are_written_are_those_that_paddle_starts_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights.npz"
    monkeypatch.setattr(sys, "argv", ["weights", str(file), "--shape", json.dumps(_TINY)])
    weights.main()
    expected = gpt.build_model(Shape(**_TINY)).state_dict()
    with np.load(file) as stored:
        assert sorted(stored.files) == sorted(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(stored[name], value.numpy())


_TORCH_LOSSES = """
import json, sys, torch
from pathlib import Path
from benchmarks.peers.torch_training import Settings, build
from benchmarks.peers.torch_model import Batches
from benchmarks.shape import Shape
shape = Shape(**json.loads(sys.argv[2]))
trainee, batches = build("alone", shape, Path(sys.argv[1]), Settings(25, 2)), Batches(shape, 1)
for _ in range(6):
    loss = trainee.forward(*batches.draw())
    loss.backward()
    trainee.optimizer.step()
    trainee.optimizer.clear_grad()
    print(loss.item())
"""


def _need_pytorch() -> None:
    if not environment.is_made():
        pytest.skip("no environment with PyTorch; python -m benchmarks.peers.environment makes it")


def _weights(shape: Shape, file: Path) -> None:
    np.savez(file, **{name: value.numpy() for name, value in gpt.build_model(shape).state_dict().items()})


_KEPT_AFTER_FORWARD = """
import json, os, sys
from pathlib import Path
from torch.distributed.tensor import DTensor
from benchmarks.peers.torch_model import Batches
from benchmarks.peers.torch_training import Settings, build
from benchmarks.shape import Shape
os.environ.update(PADDLE_MASTER=f"127.0.0.1:{sys.argv[3]}", PADDLE_TRAINER_ID="0", PADDLE_TRAINERS_NUM="1")
shape = Shape(**json.loads(sys.argv[2]))
model = build(sys.argv[4], shape, Path(sys.argv[1]), Settings(25, 2)).forward
model(*Batches(shape, 0).draw())
kept = {name: not isinstance(parameter, DTensor) for name, parameter in model.named_parameters()}
print(json.dumps([kept["tokens.weight"], kept["blocks.0.up.weight"]]))
"""


@pytest.mark.parametrize(("kind", "kept"), [("fsdp", [True, False]), ("fsdp_keep", [True, True])])
def test_fsdp2_reshards_blocks_and_keeps_the_root(tmp_path: Path, kind: str, kept: list[bool]) -> None:
    _need_pytorch()
    file = tmp_path / "weights.npz"
    _weights(Shape(**_TINY), file)
    arguments = [str(file), json.dumps(_TINY), str(links._free_port_range(1)), kind]
    command = [str(environment.interpreter()), "-W", "ignore", "-c", _KEPT_AFTER_FORWARD, *arguments]
    found = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(found.stdout.splitlines()[-1]) == kept


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("torch_ddp", {"bucket_mb": 13, "prefetched": 3}),
        ("torch_ddp_4mb", {"bucket_mb": 4, "prefetched": 3}),
        ("torch_fsdp_ahead4", {"bucket_mb": 13, "prefetched": 4}),
        ("torch_fsdp_keep_waits", {"bucket_mb": 13, "prefetched": 0, "waits": True}),
    ],
)
def test_variants_of_an_experiment_fix_their_settings_and_take_the_others_as_they_come(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]
) -> None:
    training = SimpleNamespace(Settings=dict, build=lambda kind, shape, weights, settings: (kind, settings))
    monkeypatch.setitem(sys.modules, "benchmarks.peers.torch_training", training)
    monkeypatch.setattr("benchmarks.peers.torch_training", training, raising=False)
    flags = {"weights": "weights.npz", "settings": {"bucket_mb": 13, "prefetched": 3}}
    assert name in contenders.COMPARED
    built: Any = CONTENDERS[name].build(Shape(**_TINY), flags)
    kind, found = built
    assert found == settings
    assert name.startswith(f"torch_{kind}")


def test_pytorch_comes_to_the_same_losses(tmp_path: Path) -> None:
    _need_pytorch()
    shape, file = Shape(**_TINY), tmp_path / "weights.npz"
    model, batches = gpt.build_model(shape), gpt.Batches(shape, 1)
    np.savez(file, **{name: value.numpy() for name, value in model.state_dict().items()})
    command = [str(environment.interpreter()), "-c", _TORCH_LOSSES, str(file), json.dumps(_TINY)]
    found = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=True, timeout=120)
    optimizer, losses = gpt.build_optimizer(model), []
    for _ in range(6):
        loss = model(*batches.draw())
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    np.testing.assert_allclose([float(line) for line in found.stdout.split()], losses, rtol=1e-5)


def test_batches_are_the_same_in_every_run_and_others_on_every_rank() -> None:
    shape = Shape(**_TINY)
    codes = draw_codes(shape, 0)
    assert codes.shape == (4, 2, 5)
    np.testing.assert_array_equal(codes, draw_codes(shape, 0))
    assert not (codes == draw_codes(shape, 1)).all()
    drawn = gpt.Batches(shape, 0).draw()
    np.testing.assert_array_equal(drawn[0].numpy(), codes[0, :, :-1])
    np.testing.assert_array_equal(drawn[1].numpy(), codes[0, :, 1:])


def test_the_speed_of_a_link_can_be_changed_and_is_what_it_was_set_to() -> None:
    reason = links.available()
    if reason:
        pytest.skip(reason)
    with links.shaped(2, rate_mbit=50) as hosts:
        slow = link_speed.measure(hosts, seconds=0.5)
        links.set_rate(hosts, 200)
        fast = link_speed.measure(hosts, seconds=0.5)
    # A burst passes at once, and what a socket holds was sent before; so a short measurement is above the rate.
    assert 35 < slow["one_way"] < 85
    assert 140 < fast["one_way"] < 300
    assert slow["both_ways"] < 100 < fast["both_ways"]
