"""16-bit elements that are received into the memory of the float32 ones that they become."""

from __future__ import annotations

from .memory import Bytes, ElementType, Span
from .rounding import Array, convert, convert_backwards


class Rounded:
    """Memory of a gather whose elements travel narrower than they are.

    What travels lies in the last part of each rank's chunk. From the chunk's first element to its last each of them can
    be widened then without another one being lost that still has to be, and no memory is needed for all of them.

    Args:
        data: memory of the tensor that is gathered into.
        chunks: ``chunks[r]`` is rank r's range of elements.
        element: of the tensor.
        wire: what travels.

    Attributes:
        data: as above.
        chunks: ``chunks[r]`` is the range of bytes in which what travels of rank r lies.
    """

    def __init__(self, data: Bytes, chunks: list[Span], element: ElementType, *, wire: ElementType) -> None:
        self.data = data
        self._element = element
        self._wire = wire
        self._wholes = [Span(chunk.start * element.item_bytes, chunk.stop * element.item_bytes) for chunk in chunks]
        self.chunks = [
            Span(chunk.stop - _numel(chunk, element) * wire.item_bytes, chunk.stop) for chunk in self._wholes
        ]

    def put(self, rank: int, source: Array, of: ElementType) -> None:
        """Rounds a rank's elements to where they travel from. They may be that rank's own chunk."""
        chunk = self.chunks[rank]
        convert_backwards(self._wire.array(self.data[chunk.start : chunk.stop]), self._wire, source, of)

    def settle(self, rank: int, piece: Span) -> None:
        """Widens a range of bytes of ``chunks[rank]``, those before it in its chunk being widened already."""
        whole, chunk = self._wholes[rank], self.chunks[rank]
        ratio = self._element.item_bytes // self._wire.item_bytes
        start, stop = ((offset - chunk.start) * ratio + whole.start for offset in piece)
        out = self._element.array(self.data[start:stop])
        convert(out, self._element, self._wire.array(self.data[piece.start : piece.stop]), self._wire)


def _numel(chunk: Span, element: ElementType) -> int:
    return chunk.numel // element.item_bytes
