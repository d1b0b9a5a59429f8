"""Runs the example and writes down every loss and the final parameters, bit for bit, since it prints three digits only.

python -m paddle.distributed.launch ... tests/record_example.py FOLDER [options of the example]
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import paddle

from hp_sharding import full_parameters
from tests.training import digest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"


class Record(NamedTuple):
    """What came of a run on one rank: the bits of each loss, held-out ones too, and a hash of the final parameters."""

    losses: list[str]
    digest: str


def run_example(options: list[str]) -> Record:
    """Runs the example's ``main`` in this process, with ``options`` as its command line."""
    example = _load()
    losses: list[str] = []
    digests: list[str] = []
    loss_of, train = example.loss_of, example.train

    def noting_loss(*args: Any) -> paddle.Tensor:
        loss = loss_of(*args)
        losses.append(float(loss).hex())
        return loss

    def noting_train(training: Any, *args: Any) -> None:
        train(training, *args)
        with full_parameters(training.model):
            digests.append(digest(training.model))

    vars(example).update(loss_of=noting_loss, train=noting_train)
    before, sys.argv = sys.argv, [str(EXAMPLE), *options]
    try:
        example.main()
    finally:
        sys.argv = before
    return Record(losses, digests[0])


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_records(folder: Path) -> list[Record]:
    """What all ranks have written to ``folder``, in rank order."""
    paths = sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem.removeprefix("rank")))
    return [Record(*json.loads(path.read_text())) for path in paths]


def main() -> None:
    """Runs the example, then writes this rank's record."""
    folder, *options = sys.argv[1:]
    record = run_example(options)
    Path(folder, f"rank{paddle.distributed.get_rank()}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
