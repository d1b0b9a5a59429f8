"""Checkpoints on the stand-in: what lies on a device goes to files and comes back, also to the CPU and from it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle.utils import unique_name

from hp_sharding import full_parameters, load, load_full, save, save_full
from tests import harness
from tests.device import standin
from tests.device.running import on_device
from tests.lanes import wrap
from tests.models import loss_of, make_batch, make_model, make_optimizer
from tests.reference import Values, assert_equal, values

pytestmark = pytest.mark.usefixtures("standin_device")

_PACE = standin.Pace(latency_ms=0.5, jitter_ms=0.5)
_LIMIT_S = 150.0
_SETTINGS: dict[str, dict[str, Any]] = {
    f"stage {stage}": {"stage": stage, "allgather_overlap": True, "reduce_overlap": True, "comm_buffer_size_MB": 0.002}
    for stage in (2, 3)
}


class _Run:
    """A sharded model and what it has been trained for."""

    def __init__(self, rank: int, nranks: int, settings: dict[str, Any]) -> None:
        self._rank = rank
        with unique_name.guard():
            model = make_model("gpt")
            self.model, self.optimizer, _ = wrap(model, make_optimizer("AdamW", model), nranks, **settings)

    def train(self, steps: range) -> _Run:
        for step in steps:
            loss_of(self.model, make_batch("gpt", step, self._rank)).backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
        return self

    def values(self) -> Values:
        with full_parameters(self.model):
            return values(self.model)


def _save(rank: int, nranks: int, folder: str) -> dict[str, Values]:
    """Saves after two steps, while the third and fourth go on; the values at the end."""
    found = {}
    for name, settings in _SETTINGS.items():
        run = _Run(rank, nranks, settings).train(range(2))
        save_full(f"{folder}/{name} whole", run.model, run.optimizer)
        pending = save(
            f"{folder}/{name}", run.model, run.optimizer, extra={"name": paddle.ones([3])}, asynchronous=True
        )
        found[name] = run.train(range(2, 4)).values()
        pending.wait()
    return found


def _resume(rank: int, nranks: int, folder: str) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for name, settings in _SETTINGS.items():
        for opener in (
            functools.partial(load, f"{folder}/{name}"),
            functools.partial(load_full, f"{folder}/{name} whole"),
        ):
            run = _Run(rank, nranks, settings).train(range(1))  # what it has learned by then is overwritten
            loaded = opener(run.model, run.optimizer)
            assert loaded.extra is None or float(loaded.extra["name"].sum()) == 3.0
            values_now = run.train(range(2, 4)).values()
            if name in found:
                assert_equal(values_now, found[name], f"rank {rank}, {name}, from whole files:")
            found[name] = values_now
    return found


def test_runs_go_on_from_either_kind_of_device(tmp_path: Path) -> None:
    expected = on_device(_save, 2, str(tmp_path), pace=_PACE, timeout_s=_LIMIT_S)
    here = on_device(_resume, 2, str(tmp_path), pace=_PACE, timeout_s=_LIMIT_S)
    on_cpu = harness.run(_resume, 2, str(tmp_path), timeout_s=_LIMIT_S)
    for name in _SETTINGS:
        for rank in range(2):
            assert_equal(here[rank][name], expected[rank][name], f"rank {rank}, {name}, on the device:")
            assert_equal(on_cpu[rank][name], expected[rank][name], f"rank {rank}, {name}, on the CPU:")
