"""A gather of what is rounded when it is sent, and widened again where it has come, piece by piece beside the wire."""

from __future__ import annotations

import numpy as np

from .memory import Bytes, Span
from .rounding import Array, convert, convert_backwards
from .wire import Carried


class Rounded:
    """Memory of a gather in which something else travels than what is gathered.

    Where that is narrower than what it becomes, it lies in the last part of each rank's chunk. From the chunk's first
    element to its last each of them can be widened then without another one being lost that still has to be, and no
    memory is needed for all of them.

    Args:
        data: memory of the tensor that is gathered into.
        chunks: ``chunks[r]`` is rank r's range of elements.
        types: of this rank's own elements, of what travels, and of the tensor.
        rank: this rank.
        own: its elements, which may lie in its chunk where they are of the tensor's type.

    Attributes:
        data: as above.
        chunks: ``chunks[r]`` is the range of bytes in which what travels of rank r lies.
    """

    def __init__(self, data: Bytes, chunks: list[Span], types: Carried, *, rank: int, own: Array) -> None:
        self.data = data
        self._types = types
        self._wholes = [_bytes_of(chunk, types.result.item_bytes) for chunk in chunks]
        self.chunks = [
            Span(whole.stop - chunk.numel * types.wire.item_bytes, whole.stop)
            for chunk, whole in zip(chunks, self._wholes, strict=True)
        ]
        self._rank = rank
        self._own = own
        self._is_ready = False

    def prepare(self, piece: Span) -> None:
        """Rounds this rank's elements to a range of bytes of its chunk, from which they travel."""
        if self._is_ready:
            return
        chunk = self.chunks[self._rank]
        if np.may_share_memory(self._own, self.data):
            # In its own chunk. What is rounded lies where others still are: all of them, from the last to the first.
            convert_backwards(self._wire_at(chunk), self._types.wire, self._own, self._types.own)
            self._is_ready = True
            return
        start, stop = ((offset - chunk.start) // self._types.wire.item_bytes for offset in piece)
        convert(self._wire_at(piece), self._types.wire, self._own[start:stop], self._types.own)

    def settle(self, rank: int, piece: Span) -> None:
        """Widens a range of bytes of ``chunks[rank]``, those before it in its chunk being widened already."""
        _, wire, result = self._types
        if wire is result:
            return
        whole, chunk, ratio = self._wholes[rank], self.chunks[rank], result.item_bytes // wire.item_bytes
        start, stop = ((offset - chunk.start) * ratio + whole.start for offset in piece)
        convert(result.array(self.data[start:stop]), result, self._wire_at(piece), wire)

    def _wire_at(self, piece: Span) -> Array:
        return self._types.wire.array(self.data[piece.start : piece.stop])


def _bytes_of(chunk: Span, item_bytes: int) -> Span:
    return Span(chunk.start * item_bytes, chunk.stop * item_bytes)
