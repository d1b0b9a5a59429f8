"""What PyTorch's FSDP2 costs the processor where ``benchmarks.overhead`` asks the same of hp_sharding.

    build/torch_env/bin/python -m benchmarks.peers.torch_overhead      # one line of JSON

The same layers, batch and learning rate, each layer a unit, ``reshard_after_forward`` off (as in stage 2) and on, and
plain PyTorch beside them. They are alone in a group of one, and there FSDP2 leaves its collectives out. Only a process
of PyTorch's own environment runs this.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.overhead import BATCH, LAYERS, RATE, WIDTH


class _Trainee:
    """A model that is trained in turns with others; ``reshard`` None for plain PyTorch."""

    def __init__(self, reshard: bool | None) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self._batch = torch.randn(BATCH, WIDTH)
        if reshard is not None:
            for layer in self._model:
                fully_shard(layer, reshard_after_forward=reshard)
            fully_shard(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=RATE)

    def take_turn(self, steps: int) -> list[list[float]]:
        """Milliseconds of forward, backward and update of each step, after one that warms up."""
        self._step()
        return [self._step() for _ in range(steps)]

    def _step(self) -> list[float]:
        times_s = [time.perf_counter()]
        loss = self._model(self._batch).mean()
        times_s.append(time.perf_counter())
        loss.backward()
        times_s.append(time.perf_counter())
        self._optimizer.step()
        self._optimizer.zero_grad()
        times_s.append(time.perf_counter())
        return [(end - begin) * 1e3 for begin, end in itertools.pairwise(times_s)]


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description="Processor time of PyTorch FSDP2's hooks.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder, 'store')}", rank=0, world_size=1)
        kinds: dict[str, Any] = {"torch_plain": None, "torch_fsdp_keep": False, "torch_fsdp": True}
        trainees = {name: _Trainee(reshard) for name, reshard in kinds.items()}
        for trainee in trainees.values():
            trainee.take_turn(options.steps)
        rounds = [{name: one.take_turn(options.steps) for name, one in trainees.items()} for _ in range(options.rounds)]
        print(json.dumps({name: [found[name] for found in rounds] for name in trainees}))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
