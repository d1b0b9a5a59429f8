"""Ring algorithms over links to the next rank and from the one before.

Messages travel in pieces. While one is added up the next is on the wire in both directions, so the link never idles.
Every sum has one fixed order of terms, so a repeated run gives the same bits.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from .links import Links, Transfer
from .memory import Bytes, Span
from .rounding import Array, convert
from .sums import Adder
from .widening import Rounded
from .wire import Carried

# A piece is passed on, or added up, when all of it has come.
MAX_PIECE_BYTES = 8 << 20
# Every piece costs the wake-up of some threads, so there are no more than overlap needs. What is added up goes in two
# or more, small enough to keep a lane's scratch at 12 MB; between two ranks, where no later hop waits, at half the
# message, up to 24 MB. A broadcast goes in small pieces, as each hop waits for a whole one.
_SUM_PIECE_BYTES = 4 << 20
_HOP_PIECE_BYTES = 1 << 20
_MIN_PIECE_BYTES = 256 << 10
_ROUNDED_NPIECES = 4
# Up to here a collective takes no longer on the wire than it takes to wake a thread.
SMALL_BYTES = 32 << 10
# One being received, one being added up, one being sent.
_NSLOTS = 3
# Two blocks of this rank's own pieces: see ``_ReduceScatter``.
_NSENT_SLOTS = 2 * (_NSLOTS - 1)


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
        self.links = links
        self.scratch = Scratch()

    def all_gather(self, data: Bytes, chunks: list[Span], rounded: Rounded | None = None) -> None:
        """Fills in the other ranks' chunks.

        Args:
            data: where they lie.
            chunks: ``chunks[r]`` is rank r's range of bytes; this rank's own is in place.
            rounded: converts what travels: this rank's own before each piece of it is sent, and each rank's when a
                piece is there and has been sent on.
        """
        if sum(chunk.numel for chunk in chunks) <= SMALL_BYTES:
            self._all_gather_small(data, chunks, rounded)
            return
        cut = _gather_pieces if rounded is None else _rounded_pieces
        moves = arrived = [_Move(self.rank, piece, []) for piece in cut(chunks[self.rank])]
        for step in range(self.nranks - 1):
            sender = self.at(-step - 1)
            incoming = [
                _Move(sender, piece, [self.links.start_recv(data[piece.start : piece.stop])])
                for piece in cut(chunks[sender])
            ]
            # What came in the last step goes on as soon as it is there.
            for move in arrived:
                if rounded is not None and step == 0:
                    rounded.prepare(move.piece)
                after = move.transfers[0] if move.transfers else None
                move.transfers.append(self.links.start_send(data[move.piece.start : move.piece.stop], after))
            moves, arrived = moves + incoming, incoming
        for move in moves:
            _wait_all(move.transfers)
            if rounded is not None:
                rounded.settle(move.rank, move.piece)

    def _all_gather_small(self, data: Bytes, chunks: list[Span], rounded: Rounded | None) -> None:
        if rounded is not None:
            rounded.prepare(chunks[self.rank])
        for step in range(self.nranks - 1):
            outgoing, incoming = chunks[self.at(-step)], chunks[self.at(-step - 1)]
            self.swap(data[outgoing.start : outgoing.stop], data[incoming.start : incoming.stop])
        if rounded is not None:
            for rank, chunk in enumerate(chunks):
                rounded.settle(rank, chunk)

    def all_gather_rounded(self, data: Bytes, chunks: list[Span], types: Carried, own: Array) -> None:
        """Fills in all chunks of ``data`` with what every rank's ``own`` elements become when they have travelled.

        ``chunks[r]`` is rank r's range of elements; ``own`` may be this rank's, where they are of the same type.
        """
        rounded = Rounded(data, chunks, types, rank=self.rank, own=own)
        self.all_gather(data, rounded.chunks, rounded)

    def broadcast(self, data: Bytes, src: int) -> None:
        """Passes rank ``src``'s bytes along the ring."""
        distance = (self.rank - src) % self.nranks
        is_first, is_last = distance == 0, distance == self.nranks - 1
        if len(data) <= SMALL_BYTES:
            if not is_first:
                self.links.recv(data)
            if not is_last:
                self.links.send(data)
            return
        transfers: list[Transfer] = []
        piece_bytes = MAX_PIECE_BYTES if self.nranks == 2 else _HOP_PIECE_BYTES
        for piece in _pieces(Span(0, len(data)), piece_bytes):
            part = data[piece.start : piece.stop]
            arrived = None if is_first else self.links.start_recv(part)
            if arrived is not None:
                transfers.append(arrived)
            if not is_last:
                transfers.append(self.links.start_send(part, arrived))
        _wait_all(transfers)

    def reduce_scatter(
        self, output: Array, data: Array, chunks: list[Span], adder: Adder, *, accumulate: bool = False
    ) -> None:
        """Leaves in ``output`` the sum over ranks of this rank's chunk of ``data``.

        ``output`` may be that chunk itself; nothing else of ``data`` is written.

        Args:
            output: result elements, as many as ``chunks[rank]``.
            data: own elements.
            chunks: ``chunks[r]`` is the range of elements that rank r sums up.
            adder: sums of this element type.
            accumulate: add the sum to what ``output`` holds.
        """
        task = _ReduceScatter(self, output, data, chunks, adder)
        task.accumulate = accumulate
        task.run()

    def all_reduce(self, data: Array, adder: Adder) -> None:
        """Replaces own elements by their sum over ranks, the same bits on every rank."""
        if data.nbytes * self.nranks <= SMALL_BYTES:
            self._all_reduce_small(data, adder)
            return
        chunks = even_chunks(len(data), self.nranks)
        own = chunks[self.rank]
        self.reduce_scatter(data[own.start : own.stop], data, chunks, adder)
        if adder.rounds_own:
            types = Carried(adder.own, adder.element, adder.own)
            self.all_gather_rounded(data.view(np.uint8), chunks, types, data[own.start : own.stop])
            return
        item_bytes = data.itemsize
        self.all_gather(
            data.view(np.uint8), [Span(chunk.start * item_bytes, chunk.stop * item_bytes) for chunk in chunks]
        )

    def _all_reduce_small(self, data: Array, adder: Adder) -> None:
        """Half the steps of the ring: everybody gets everything and adds it up in the order of the ranks."""
        nbytes = len(data) * adder.element.item_bytes
        everything = self.scratch.take("small", nbytes * self.nranks)
        chunks = [Span(rank * nbytes, (rank + 1) * nbytes) for rank in range(self.nranks)]
        terms = adder.element.array(everything).reshape(self.nranks, -1)
        convert(terms[self.rank], adder.element, data, adder.own)
        self.all_gather(everything, chunks)
        travelled = adder.travelled
        partial = np.empty(len(data), adder.partial)
        travelled.add_first(partial, terms[0], terms[1])
        for term in terms[2:]:
            travelled.add_to_partial(partial, term)
        travelled.store(terms[0], partial, accumulate=False)
        convert(data, adder.own, terms[0], adder.element)

    def swap(self, outgoing: Bytes, incoming: Bytes) -> None:
        """Sends and receives in this thread. A send ends only when its partner receives, so neighbours take turns."""
        both = ((self.links.send, outgoing), (self.links.recv, incoming))
        for move, data in both if self.rank % 2 == 0 else both[::-1]:
            if len(data) > 0:
                move(data)

    def at(self, distance: int) -> int:
        """The index of the rank so many places further on."""
        return (self.rank + distance) % self.nranks


class _Move(NamedTuple):
    """A piece of rank ``rank``'s part of a gather, and what it takes part in."""

    rank: int
    piece: Span
    transfers: list[Transfer]


class _Item(NamedTuple):
    """A piece that comes in, in one step of a reduce-scatter; or, where ``step`` is -1, one of this rank's to send."""

    piece: Span
    step: int


class _ReduceScatter:
    """A reduce-scatter under way.

    In step s rank r sends chunk r - s - 1 and receives chunk r - s - 2, to which it adds its own part; the chunk that
    comes in the last step is its own. The first step carries the elements that travel, later ones partial sums.
    """

    def __init__(self, ring: Ring, output: Array, data: Array, chunks: list[Span], adder: Adder) -> None:
        self._ring = ring
        self._links = ring.links
        self._output = output
        self._data = data
        self._chunks = chunks
        self._adder = adder
        self._last_step = ring.nranks - 2
        self._piece_numel = 0
        self.accumulate = False

    def run(self) -> None:
        if self._data.nbytes <= SMALL_BYTES:
            self._run_small()
        else:
            self._run_in_pieces()

    def _run_in_pieces(self) -> None:
        program = self._program()
        incoming = [item for item in program if item.step >= 0]
        self._piece_numel = max((item.piece.numel for item in program), default=0)
        sends: list[Transfer] = []
        # A slot is free again when the sum in it has been sent on, or, in the last step, stored.
        freed: deque[Transfer | None] = deque([None] * _NSLOTS)
        receives: deque[Transfer] = deque()
        ntaken = nposted = 0
        own_sends: list[Transfer] = []
        for item in program:
            if item.step < 0:
                own_sends.append(self._send_own(item.piece, own_sends))
                continue
            while nposted < min(len(incoming), ntaken + _NSLOTS - 1):
                slot = self._slot(nposted, incoming[nposted])
                receives.append(self._links.start_recv(_bytes(slot), freed.popleft()))
                nposted += 1
            receives.popleft().wait()
            partial = self._take_in(ntaken, item)
            send = None if item.step == self._last_step else self._links.start_send(_bytes(partial))
            freed.append(send)
            if send is not None:
                sends.append(send)
            ntaken += 1
        _wait_all(own_sends + sends)

    def _send_own(self, piece: Span, earlier: list[Transfer]) -> Transfer:
        """Starts to send a piece of this rank's own terms, after ``earlier`` ones.

        Where it is rounded for that, its memory is that of the piece two blocks before, once that one is sent. Nobody
        waits for ever: all ranks have the same program, and in it that piece is received before this one is sent, so
        the rank that has come least far never waits for such a slot.
        """
        if not self._adder.rounds_own:
            return self._links.start_send(_bytes(self._part(piece)))
        if len(earlier) >= _NSENT_SLOTS:
            earlier[-_NSENT_SLOTS].wait()
        return self._links.start_send(_bytes(self._rounded(len(earlier) % _NSENT_SLOTS, piece)))

    def _rounded(self, slot: int, piece: Span) -> Array:
        """This rank's terms as they travel."""
        if not self._adder.rounds_own:
            return self._part(piece)
        out = self._take(f"sent{slot}", piece.numel, self._adder.element.storage)
        convert(out, self._adder.element, self._part(piece), self._adder.own)
        return out

    def _program(self) -> list[_Item]:
        """What this rank does, in order. All ranks' orders fit together.

        The chunks go round in blocks of a few pieces each, fewer than there are slots: with as many, every rank could
        wait for the next one to free a slot. A block's own pieces are sent off before the last step of the block
        before, in which nothing is sent on.
        """
        block_npieces = _NSLOTS - 1
        nblocks = -(-max(len(self._pieces_of(rank)) for rank in range(self._ring.nranks)) // block_npieces)
        program: list[_Item] = []
        for block in range(-1, nblocks):
            for step in range(self._last_step + 1):
                if step == self._last_step:
                    program += self._block(self._ring.at(-1), -1, (block + 1) * block_npieces)
                if block >= 0:
                    program += self._block(self._ring.at(-step - 2), step, block * block_npieces)
        return program

    def _block(self, chunk: int, step: int, start: int) -> list[_Item]:
        return [_Item(piece, step) for piece in self._pieces_of(chunk)[start : start + _NSLOTS - 1]]

    def _run_small(self) -> None:
        """Without threads: step by step in this one."""
        self._piece_numel = max(chunk.numel for chunk in self._chunks)
        outgoing = self._rounded(0, self._chunks[self._ring.at(-1)])
        for step in range(self._last_step + 1):
            item = _Item(self._chunks[self._ring.at(-step - 2)], step)
            # Every other slot: the one before is still being sent.
            received = self._slot(step % 2, item)
            self._ring.swap(_bytes(outgoing), _bytes(received))
            outgoing = self._take_in(step % 2, item)

    def _take_in(self, index: int, item: _Item) -> Array:
        """Adds this rank's part to a piece that came; stores the sum if it is this rank's own. Returns the sum."""
        received, own = self._slot(index, item), self._part(item.piece)
        start = item.piece.start - self._chunks[self._ring.rank].start
        is_last = item.step == self._last_step
        if is_last and not self._adder.widens and not self.accumulate:
            result = self._output[start : start + len(own)]
            self._adder.add_first(result, received, own)
            return result
        partial = received
        if item.step == 0:
            partial = self._take(f"partial{index % _NSLOTS}", item.piece.numel, self._adder.partial)
            self._adder.add_first(partial, received, own)
        else:
            self._adder.add_to_partial(partial, own)
        if is_last:
            self._adder.store(self._output[start : start + len(own)], partial, accumulate=self.accumulate)
        return partial

    def _pieces_of(self, chunk: int) -> list[Span]:
        item_bytes = self._adder.partial.itemsize
        half_bytes = self._chunks[chunk].numel * item_bytes // 2
        limit_bytes = MAX_PIECE_BYTES if self._ring.nranks == 2 else _SUM_PIECE_BYTES
        return _pieces(self._chunks[chunk], min(max(half_bytes, _MIN_PIECE_BYTES), limit_bytes) // item_bytes)

    def _part(self, piece: Span) -> Array:
        return self._data[piece.start : piece.stop]

    def _slot(self, index: int, item: _Item) -> Array:
        """Where a piece is received: as what travels in the first step, as partial sums later."""
        if item.step == 0 and self._adder.widens:
            return self._take(f"travelled{index % _NSLOTS}", item.piece.numel, self._adder.element.storage)
        return self._take(f"partial{index % _NSLOTS}", item.piece.numel, self._adder.partial)

    def _take(self, name: str, numel: int, dtype: np.dtype[Any]) -> Array:
        # The largest piece's worth each time: a slot must not move while a transfer uses it.
        memory = self._ring.scratch.take(name, self._piece_numel * dtype.itemsize)
        return memory.view(dtype)[:numel]


def even_chunks(numel: int, nranks: int) -> list[Span]:
    """Cuts ``numel`` elements into ``nranks`` neighbouring ranges of equal length; the last ones may be short."""
    length = -(-numel // nranks)
    bounds = [min(rank * length, numel) for rank in range(nranks + 1)]
    return [Span(start, stop) for start, stop in itertools.pairwise(bounds)]


def _gather_pieces(chunk: Span) -> list[Span]:
    """Pieces of a range of bytes. No 16-bit element is cut in two, which may have to be widened."""
    return _pieces(chunk, MAX_PIECE_BYTES, multiple=2)


def _rounded_pieces(chunk: Span) -> list[Span]:
    """More of them, since the first one is rounded before anything travels, and the last one widened after that."""
    limit_bytes = min(max(chunk.numel // _ROUNDED_NPIECES, _MIN_PIECE_BYTES), MAX_PIECE_BYTES)
    return _pieces(chunk, limit_bytes, multiple=2)


def _pieces(chunk: Span, max_numel: int, multiple: int = 1) -> list[Span]:
    """Cuts a chunk into as few pieces of about the same length as the limit allows, all but one a ``multiple``."""
    if chunk.numel == 0:
        return []
    npieces = -(-chunk.numel // max_numel)
    length = -(-chunk.numel // (npieces * multiple)) * multiple
    return [Span(start, min(start + length, chunk.stop)) for start in range(chunk.start, chunk.stop, length)]


def _bytes(array: Array) -> Bytes:
    return array.view(np.uint8)


def _wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
