"""A checkpoint with something of everything in it, for those who look at checkpoints: written without ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hp_sharding.checkpoint import values
from hp_sharding.checkpoint.tensor_file import Piece
from tests.stored import Array, piece, save_parts

ALIASES = {"model/tied": "model/layers.2.weight"}
STATE: dict[str, Any] = {
    "steps": 7,
    "optimizer": "AdamW",
    "lr": None,
    "lr_scheduler": {"last_epoch": 7, "last_lr": 0.25},
    "scaler": None,
    "extra": {
        "epoch": 3,
        "nothing": float("nan"),
        "sizes": (1, [2, 3]),
        "large": np.arange(1000),
        "row": np.arange(9),
        "small": np.array([1.5, 2.0]),
        "key": b"\0\1",
        "by number": {5: "five"},
    },
    "many": list(range(100)),
    "n_ranks": 2,
    "param_names": {"layers.10.weight": "linear_10.w_0", "layers.2.weight": "linear_2.w_0", "tied": "linear_2.w_0"},
}


def some_tensors() -> dict[str, Array]:
    """Parameters, a buffer in 16 bits (uint16 are the bits of bfloat16), moments, and what two ranks have each."""
    random = np.random.default_rng(1)
    found: dict[str, Array] = {}
    for layer in (2, 10):
        name = f"layers.{layer}.weight"
        found[f"model/{name}"] = random.standard_normal((30, 20)).astype(np.float32)
        found[f"optimizer/{name}/moment1"] = random.standard_normal((30, 20)).astype(np.float32)
        found[f"optimizer/{name}/beta1_pow_acc"] = np.full(1, 0.9, np.float32)
    found["model/short"] = np.arange(0x3F80, 0x3F85, dtype=np.uint16)
    found["model/count"] = np.array(12, np.int64)
    found["model/empty"] = np.zeros((0, 3), np.float32)
    for rank in range(2):
        text = json.dumps({"rank_extra": {"position": 10 + rank}})
        found[f"rank/{rank}/state"] = np.frombuffer(text.encode(), np.uint8)
    return found


def write_checkpoint(
    path: Path, tensors: Mapping[str, Array], *, n_files: int = 1, state: Mapping[str, Any] = STATE
) -> Path:
    """Writes all tensors, an equal part of each in every file, and returns ``path``. ``ALIASES`` as far as they fit."""
    encoded = values.encode(dict(state), where="")
    parts = [
        [_part(name, array, part, n_files) for name, array in {**tensors, **encoded.arrays}.items()]
        for part in range(n_files)
    ]
    aliases = {alias: name for alias, name in ALIASES.items() if name in tensors}
    save_parts(path, parts, state=encoded.json, aliases=aliases)
    return path


def flip(path: Path, at: int) -> None:
    """Changes a bit of the byte there."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _part(name: str, array: Array, part: int, n_parts: int) -> Piece:
    start, stop = (array.size * edge // n_parts for edge in (part, part + 1))
    return piece(name, array, start, stop, dtype=values.info(array).dtype)
