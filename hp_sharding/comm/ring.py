"""Ring algorithms over links to the next rank and from the one before.

Messages travel in pieces. While one is added up the next is on the wire in both directions, so the link never idles.
Every sum has one fixed order of terms, so a repeated run gives the same bits.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from .links import Links, Transfer
from .memory import Bytes
from .sums import Adder, Array

# Gloo gives up on a message after 30 s: a piece must get through in that time on a slow link, several hops behind.
MAX_PIECE_BYTES = 4 << 20
_MIN_PIECE_BYTES = 256 << 10
_PIECES_PER_CHUNK = 4
# Up to here a collective takes no longer on the wire than it takes to wake a thread.
SMALL_BYTES = 32 << 10
# One being received, one being added up, one being sent, one to spare.
_NSLOTS = 4


class Span(NamedTuple):
    """A range of elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Scratch:
    """Memory of a lane, kept from one collective to the next: fresh memory costs more than the sum itself."""

    def __init__(self) -> None:
        self._memory: dict[str, Bytes] = {}

    def take(self, name: str, nbytes: int) -> Bytes:
        """``nbytes`` bytes, holding anything; the same memory every time for the same name."""
        memory = self._memory.get(name)
        if memory is None or len(memory) < nbytes:
            memory = self._memory[name] = np.empty(nbytes, np.uint8)
        return memory[:nbytes]


class Ring:
    """One rank's place in a ring.

    Args:
        rank: index of this rank.
        nranks: number of ranks, at least two.
        links: the ways to rank + 1 and from rank - 1.
    """

    def __init__(self, rank: int, nranks: int, links: Links) -> None:
        assert nranks > 1
        self.rank = rank
        self.nranks = nranks
        self._links = links
        self._scratch = Scratch()

    def all_gather(self, data: Bytes, chunks: list[Span]) -> None:
        """Fills in the other ranks' chunks. ``chunks[r]`` is rank r's range of bytes; this rank's own is in place."""
        if sum(chunk.numel for chunk in chunks) <= SMALL_BYTES:
            for step in range(self.nranks - 1):
                self._swap(data, chunks[self._at(-step)], chunks[self._at(-step - 1)])
            return
        transfers: list[Transfer] = []
        arrived: list[Transfer | None] = [None] * len(_pieces(chunks[self.rank], 1))
        for step in range(self.nranks - 1):
            # What came in the last step goes on as soon as it is there.
            for piece, after in zip(_pieces(chunks[self._at(-step)], 1), arrived, strict=True):
                transfers.append(self._links.start_send(data[piece.start : piece.stop], after))
            incoming = _pieces(chunks[self._at(-step - 1)], 1)
            receives = [self._links.start_recv(data[piece.start : piece.stop]) for piece in incoming]
            transfers += receives
            arrived = list(receives)
        _wait_all(transfers)

    def broadcast(self, data: Bytes, src: int) -> None:
        """Passes rank ``src``'s bytes along the ring."""
        distance = (self.rank - src) % self.nranks
        is_first, is_last = distance == 0, distance == self.nranks - 1
        if len(data) <= SMALL_BYTES:
            if not is_first:
                self._links.recv(data)
            if not is_last:
                self._links.send(data)
            return
        transfers: list[Transfer] = []
        for piece in _pieces(Span(0, len(data)), 1):
            part = data[piece.start : piece.stop]
            arrived = None if is_first else self._links.start_recv(part)
            if arrived is not None:
                transfers.append(arrived)
            if not is_last:
                transfers.append(self._links.start_send(part, arrived))
        _wait_all(transfers)

    def reduce_scatter(
        self, output: Array, data: Array, chunks: list[Span], adder: Adder, *, accumulate: bool = False
    ) -> None:
        """Leaves in ``output`` the sum over ranks of this rank's chunk of ``data``.

        ``output`` may be that chunk itself; nothing else of ``data`` is written.

        Args:
            output: stored elements, as many as ``chunks[rank]``.
            data: stored elements.
            chunks: ``chunks[r]`` is the range of elements that rank r sums up.
            adder: sums of this element type.
            accumulate: add the sum to what ``output`` holds.
        """
        _ReduceScatter(self, output, data, chunks, adder, accumulate).run()

    def all_reduce(self, data: Array, adder: Adder) -> None:
        """Replaces stored elements by their sum over ranks, the same bits on every rank."""
        if data.nbytes * self.nranks <= SMALL_BYTES:
            self._all_reduce_small(data, adder)
            return
        chunks = even_chunks(len(data), self.nranks)
        own = chunks[self.rank]
        self.reduce_scatter(data[own.start : own.stop], data, chunks, adder)
        item_bytes = data.itemsize
        self.all_gather(
            data.view(np.uint8), [Span(chunk.start * item_bytes, chunk.stop * item_bytes) for chunk in chunks]
        )

    def _all_reduce_small(self, data: Array, adder: Adder) -> None:
        """Half the steps of the ring: everybody gets everything and adds it up in the order of the ranks."""
        nbytes = data.nbytes
        everything = self._scratch.take("small", nbytes * self.nranks)
        everything[self.rank * nbytes : (self.rank + 1) * nbytes] = data.view(np.uint8)
        self.all_gather(everything, [Span(rank * nbytes, (rank + 1) * nbytes) for rank in range(self.nranks)])
        terms = adder.stored(everything).reshape(self.nranks, -1)
        partial = np.empty(len(data), adder.partial)
        adder.add_stored(partial, terms[0], terms[1])
        for term in terms[2:]:
            adder.add_to_partial(partial, term)
        adder.store(data, partial, accumulate=False)

    def _swap(self, data: Bytes, outgoing: Span, incoming: Span) -> None:
        """Sends and receives in this thread. A send ends only when its partner receives, so neighbours take turns."""
        if self.rank % 2 == 0:
            self._send_part(data, outgoing)
            self._recv_part(data, incoming)
        else:
            self._recv_part(data, incoming)
            self._send_part(data, outgoing)

    def _send_part(self, data: Bytes, part: Span) -> None:
        if part.numel > 0:
            self._links.send(data[part.start : part.stop])

    def _recv_part(self, data: Bytes, part: Span) -> None:
        if part.numel > 0:
            self._links.recv(data[part.start : part.stop])

    def _at(self, distance: int) -> int:
        return (self.rank + distance) % self.nranks


class _Step(NamedTuple):
    """One piece of one step of a reduce-scatter."""

    piece: Span
    is_first: bool
    is_last: bool


class _ReduceScatter:
    """A reduce-scatter under way.

    In step s rank r sends chunk r - s - 1 and receives chunk r - s - 2, to which it adds its own part; the chunk that
    comes in the last step is its own. The first step carries stored elements, later ones partial sums.
    """

    def __init__(
        self, ring: Ring, output: Array, data: Array, chunks: list[Span], adder: Adder, accumulate: bool
    ) -> None:
        self._ring = ring
        self._links = ring._links
        self._output = output
        self._data = data
        self._chunks = chunks
        self._adder = adder
        self._accumulate = accumulate
        self._piece_numel = 0

    def run(self) -> None:
        if self._data.nbytes <= SMALL_BYTES:
            self._run_small()
        else:
            self._run_in_pieces()

    def _run_in_pieces(self) -> None:
        steps = self._incoming()
        self._piece_numel = max((step.piece.numel for step in steps), default=0)
        sends = [self._links.start_send(_bytes(self._part(piece))) for piece in self._pieces_of(-1)]
        # The slot of a piece is free again when its send is over (or, in the last step, when it has been added).
        freed: deque[Transfer | None] = deque([None] * _NSLOTS)
        receives: deque[Transfer] = deque()
        nposted = 0
        for index, step in enumerate(steps):
            while nposted < len(steps) and nposted < index + _NSLOTS - 1:
                slot = self._slot(nposted, steps[nposted])
                receives.append(self._links.start_recv(_bytes(slot), freed.popleft()))
                nposted += 1
            receives.popleft().wait()
            freed.append(self._take_in(self._slot(index, step), index, step))
            if freed[-1] is not None:
                sends.append(freed[-1])
        _wait_all(sends)

    def _take_in(self, received: Array, index: int, step: _Step) -> Transfer | None:
        """Adds this rank's part to a piece that came; sends it on, or stores it if it is this rank's own."""
        partial = received
        own = self._part(step.piece)
        if step.is_last and not self._adder.widens and not self._accumulate:
            start = step.piece.start - self._chunks[self._ring.rank].start
            np.add(received, own, out=self._output[start : start + len(received)])
            return None
        if step.is_first:
            partial = self._partial(index, step)
            self._adder.add_stored(partial, received, own)
        else:
            self._adder.add_to_partial(partial, own)
        if not step.is_last:
            return self._links.start_send(_bytes(partial))
        start = step.piece.start - self._chunks[self._ring.rank].start
        self._adder.store(self._output[start : start + len(partial)], partial, accumulate=self._accumulate)
        return None

    def _run_small(self) -> None:
        """Without threads: step by step in this one."""
        self._piece_numel = max(chunk.numel for chunk in self._chunks)
        outgoing: Array = self._part(self._chunks[self._ring._at(-1)])
        for number in range(self._ring.nranks - 1):
            step = self._step(self._chunks[self._ring._at(-number - 2)], number)
            received = self._slot(2 * number, step)
            self._swap(outgoing, received)
            outgoing = self._take_in_small(received, 2 * number, step)

    def _take_in_small(self, received: Array, index: int, step: _Step) -> Array:
        own = self._part(step.piece)
        partial = received
        if step.is_first:
            partial = self._partial(index, step)
            self._adder.add_stored(partial, received, own)
        else:
            self._adder.add_to_partial(partial, own)
        if step.is_last:
            self._adder.store(self._output, partial, accumulate=self._accumulate)
        return partial

    def _swap(self, outgoing: Array, incoming: Array) -> None:
        both = ((self._links.send, outgoing), (self._links.recv, incoming))
        for move, part in both if self._ring.rank % 2 == 0 else both[::-1]:
            if len(part) > 0:
                move(_bytes(part))

    def _incoming(self) -> list[_Step]:
        return [
            self._step(piece, number)
            for number in range(self._ring.nranks - 1)
            for piece in self._pieces_of(-number - 2)
        ]

    def _step(self, piece: Span, number: int) -> _Step:
        return _Step(piece, is_first=number == 0, is_last=number == self._ring.nranks - 2)

    def _pieces_of(self, distance: int) -> list[Span]:
        return _pieces(self._chunks[self._ring._at(distance)], self._adder.partial.itemsize)

    def _part(self, piece: Span) -> Array:
        return self._data[piece.start : piece.stop]

    def _slot(self, index: int, step: _Step) -> Array:
        """Where a piece is received: as partial sums, or as stored elements in the first step."""
        dtype = self._adder.element.storage if step.is_first else self._adder.partial
        name = f"stored{index % _NSLOTS}" if step.is_first and self._adder.widens else f"partial{index % _NSLOTS}"
        return self._take(name, step.piece.numel, dtype.itemsize).view(dtype)

    def _partial(self, index: int, step: _Step) -> Array:
        """Where the sum of the first step goes: over what was received, unless that is of another type."""
        name = f"partial{index % _NSLOTS}"
        return self._take(name, step.piece.numel, self._adder.partial.itemsize).view(self._adder.partial)

    def _take(self, name: str, numel: int, item_bytes: int) -> Bytes:
        # Take the largest piece's worth each time: a slot must not move while a transfer uses it.
        return self._ring._scratch.take(name, self._piece_numel * item_bytes)[: numel * item_bytes]


def even_chunks(numel: int, nranks: int) -> list[Span]:
    """Cuts ``numel`` elements into ``nranks`` neighbouring ranges of equal length; the last ones may be short."""
    length = -(-numel // nranks)
    bounds = [min(rank * length, numel) for rank in range(nranks + 1)]
    return [Span(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


def _pieces(chunk: Span, item_bytes: int) -> list[Span]:
    """Cuts a chunk into pieces: a few, to overlap adding with sending, but neither tiny nor above the limit."""
    nbytes = chunk.numel * item_bytes
    if nbytes == 0:
        return []
    wanted_bytes = min(max(nbytes // _PIECES_PER_CHUNK, _MIN_PIECE_BYTES), MAX_PIECE_BYTES)
    npieces = -(-nbytes // wanted_bytes)
    length = -(-chunk.numel // npieces)
    return [Span(start, min(start + length, chunk.stop)) for start in range(chunk.start, chunk.stop, length)]


def _bytes(array: Array) -> Bytes:
    return array.view(np.uint8)


def _wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
