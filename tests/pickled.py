"""Paddle's pickled files of arrays that are in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hp_sharding.checkpoint.pickled import PickleWriter, Streamed

Array = npt.NDArray[Any]
Items = Iterable[tuple[str, Any]] | Mapping[str, Any]


class NamedTensor(NamedTuple):
    """A tensor that ``paddle.load`` gives that name. uint16 are the bits of bfloat16."""

    name: str
    array: Array

    def streamed(self) -> Streamed:
        blocks = [np.asarray(self.array, order="C").reshape(-1)] if self.array.size else []
        return Streamed(self.name, self.array.shape, self.array.dtype, blocks)


def write_pickled(path: Path, items: Items, *, in_table: bool = False) -> None:
    """Writes a dict whose items come one by one; they may be iterators of items, or dicts, themselves."""
    writer = PickleWriter(path, in_table=in_table)
    try:
        put_all(writer, items)
        writer.close()
        writer.rename()
    finally:
        writer.discard()


def put_all(writer: PickleWriter, items: Items) -> None:
    """Puts items; one tensor at a time is held."""
    for key, value in items.items() if isinstance(items, Mapping) else items:
        if isinstance(value, (Mapping, Iterator)):
            writer.begin(key)
            put_all(writer, value)
            writer.end()
        else:
            writer.put(key, value.streamed() if isinstance(value, NamedTensor) else value)
        del value  # the next one is made now
