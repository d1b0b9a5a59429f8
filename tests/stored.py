"""Small checkpoints on the disk, made without a model."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hp_sharding.checkpoint.folder import Save, new_save_id, open_checkpoint
from hp_sharding.checkpoint.source import STORAGE, TensorInfo
from hp_sharding.checkpoint.tensor_file import Bytes, Piece

Array = npt.NDArray[Any]
_BLOCK_NUMEL = 5
"""Elements in a block, so that small tensors come in several."""


def piece(name: str, values: Array, start: int = 0, stop: int | None = None, *, dtype: str = "") -> Piece:
    """Elements ``start`` to ``stop`` of an array as a piece; ``dtype`` where it is bfloat16, held as its bits."""
    info = TensorInfo(values.shape, dtype or values.dtype.name)
    stop = info.numel if stop is None else stop
    return Piece(name, info, start, stop, functools.partial(_blocks, values.reshape(-1)[start:stop]))


def _blocks(values: Array) -> Iterator[Bytes]:
    """In one buffer, overwritten for each block."""
    buffer = np.empty(_BLOCK_NUMEL, values.dtype)
    for start in range(0, values.size, _BLOCK_NUMEL):
        block = buffer[: min(_BLOCK_NUMEL, values.size - start)]
        block[:] = values[start : start + _BLOCK_NUMEL]
        yield block.view(np.uint8)


def save_parts(
    folder: Path, parts: Sequence[Sequence[Piece]], *, state: Any = None, aliases: Mapping[str, str] | None = None
) -> str:
    """One save, a part after the other; its id."""
    save_id = new_save_id()
    saves = [Save(folder, save_id, part, len(parts)) for part in range(len(parts))]
    for save, pieces in zip(saves, parts, strict=True):
        save.write(pieces)
    saves[0].commit({} if state is None else state, aliases or {})
    return save_id


def halves(tensors: Mapping[str, Array]) -> list[list[Piece]]:
    """The pieces of two parts, of which each has half of every tensor."""
    cut = [(name, values, values.size // 2) for name, values in tensors.items()]
    return [
        [piece(name, values, 0, at) for name, values, at in cut],
        [piece(name, values, at) for name, values, at in cut],
    ]


def random_tensors(seed: int) -> dict[str, Array]:
    """A weight, a bias and a moment, all of whose bytes depend on the seed."""
    generator = np.random.default_rng(seed)
    return {
        "model/net.weight": generator.standard_normal((3, 4)).astype(np.float32),
        "model/net.bias": generator.integers(0, 99, 5).astype(np.int8),
        "optimizer/net.weight/moment1": generator.standard_normal((3, 4)),
    }


def contents(folder: Path) -> dict[str, Array]:
    """All tensors of the checkpoint in a folder, opened, verified and read."""
    with open_checkpoint(folder) as checkpoint:
        checkpoint.verify()
        return {name: whole(checkpoint, name) for name in checkpoint.tensors}


def whole(source: Any, name: str) -> Array:
    """One tensor in its shape."""
    info = source.tensors[name]
    values = source.read(name, 0, info.numel)
    assert values.dtype == STORAGE[info.dtype]
    return values.reshape(info.shape)


def same(found: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
    """Whether names, shapes and all bits are equal."""
    return found.keys() == expected.keys() and all(
        found[name].shape == values.shape and found[name].tobytes() == values.tobytes()
        for name, values in expected.items()
    )


def names(folder: Path) -> list[str]:
    """What is in a folder, without what is different for each save."""
    found = (path.name for path in folder.iterdir())
    return sorted(name[len("20260101-000000-01234567-") :] if name[:8].isdigit() else name for name in found)
