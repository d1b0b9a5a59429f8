"""Writes the initial weights of ``benchmarks.gpt`` for others to start from.

    python -m benchmarks.peers.weights FILE --shape '{"layers": 2}'

One array, float32, for each parameter, under its structured name, as Paddle has it: a ``Linear`` multiplies by its
weight of shape [inputs, outputs].
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description="Initial weights of the model that the benchmarks train.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON: sizes that differ from the defaults")
    options = parser.parse_args()
    from benchmarks.gpt import Shape, build_model

    model = build_model(Shape(**options.shape))
    np.savez(options.file, **{name: value.numpy() for name, value in model.state_dict().items()})


if __name__ == "__main__":
    main()
