"""The ring algorithms, over connections between threads: every size of ring, small pieces, uneven chunks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_sharding.comm import ring
from hp_sharding.comm.links import TcpLinks, Ways
from hp_sharding.comm.memory import ELEMENT_TYPES, Bytes, Span
from hp_sharding.comm.ring import Ring, even_chunks
from hp_sharding.comm.rounding import convert
from hp_sharding.comm.sums import Adder
from hp_sharding.comm.wire import Carried, plain
from tests.unit.test_comm_wire import rounded

Array = npt.NDArray[Any]
FLOAT32 = Adder(plain(ELEMENT_TYPES[paddle.float32]))


class Edge:
    """A connection from one rank to the next."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.source = socket.create_connection(server.getsockname())
            self.target, _ = server.accept()
        self.messages: list[int] = []


class _Links(TcpLinks):
    """Keeps the sizes of what it sends."""

    def __init__(self, name: str, to_next: Edge, from_before: Edge) -> None:
        self._sizes = to_next.messages
        super().__init__(name, Ways(to_next.source, from_before.target))

    def send(self, data: Bytes) -> None:
        self._sizes.append(len(data))
        super().send(data)


def _on_ring(nranks: int, act: Callable[[Ring], object], edges: list[Edge] | None = None) -> None:
    """Runs ``act`` as each rank, in threads."""
    edges = edges if edges is not None else [Edge() for _ in range(nranks)]
    links = [_Links(f"ring{rank}", edges[rank], edges[rank - 1]) for rank in range(nranks)]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            act(Ring(rank, nranks, links[rank]))
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(nranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "the ring is stuck"
    for link in links:
        link.stop()
    assert all(link.join(time.monotonic() + 10) for link in links)


def _tiny(piece_bytes: int) -> Any:
    """No collective counts as small, and pieces are of a few bytes, so that small tensors take every path."""
    sizes: Any = dict.fromkeys(
        ("MAX_PIECE_BYTES", "_SUM_PIECE_BYTES", "_HOP_PIECE_BYTES", "_MIN_PIECE_BYTES"), piece_bytes
    )
    return mock.patch.multiple(ring, SMALL_BYTES=-1, **sizes)


def _terms(nranks: int, numel: int) -> list[Array]:
    generator = np.random.default_rng(numel)
    # Whole numbers: their sums are exact in any order, also of what they are in 16 bits.
    return [generator.integers(-1000, 1000, numel).astype(np.float32) for _ in range(nranks)]


RINGS = st.tuples(st.integers(2, 6), st.integers(0, 60), st.sampled_from([4, 8, 12, 64]))


@given(RINGS)
@settings(max_examples=60, deadline=None)
def test_all_gather_in_pieces(case: tuple[int, int, int]) -> None:
    nranks, numel, piece_bytes = case
    chunks = even_chunks(numel, nranks)
    expected = np.arange(numel, dtype=np.uint8)

    def act(place: Ring) -> None:
        own = chunks[place.rank]
        data = np.full(numel, 255, np.uint8)
        data[own.start : own.stop] = expected[own.start : own.stop]
        place.all_gather(data, chunks)
        np.testing.assert_array_equal(data, expected)

    with _tiny(piece_bytes):
        _on_ring(nranks, act)


@given(RINGS, st.booleans())
@settings(max_examples=80, deadline=None)
def test_reduce_scatter_in_pieces(case: tuple[int, int, int], accumulate: bool) -> None:
    nranks, numel, piece_bytes = case
    chunks = even_chunks(numel, nranks)
    terms = _terms(nranks, numel)
    total: Array = np.stack(terms).sum(axis=0)

    def act(place: Ring) -> None:
        own = chunks[place.rank]
        data, output = terms[place.rank].copy(), np.full(own.numel, 7, np.float32)
        place.reduce_scatter(output, data, chunks, FLOAT32, accumulate=accumulate)
        np.testing.assert_array_equal(output, total[own.start : own.stop] + 7 * accumulate)
        np.testing.assert_array_equal(data, terms[place.rank])

    with _tiny(piece_bytes):
        _on_ring(nranks, act)


@given(RINGS)
@settings(max_examples=60, deadline=None)
def test_all_reduce_and_broadcast_in_pieces(case: tuple[int, int, int]) -> None:
    nranks, numel, piece_bytes = case
    terms = _terms(nranks, numel)
    total: Array = np.stack(terms).sum(axis=0)

    def act(place: Ring) -> None:
        data = terms[place.rank].copy()
        place.all_reduce(data, FLOAT32)
        np.testing.assert_array_equal(data, total)
        for src in range(nranks):
            copy = terms[place.rank].copy()
            place.broadcast(copy.view(np.uint8), src)
            np.testing.assert_array_equal(copy, terms[src])

    with _tiny(piece_bytes):
        _on_ring(nranks, act)


def _rounding(wire: str, result: str = "float32") -> Adder:
    types = {element.name: element for element in ELEMENT_TYPES.values()}
    return Adder(Carried(types["float32"], types[wire], types[result]))


def _stored(values: Array, adder: Adder) -> Array:
    """As elements of what its sums become."""
    out = np.zeros(len(values), adder.result.storage)
    convert(out, adder.result, values, adder.own)
    return out


@given(RINGS, st.sampled_from(["float16", "bfloat16"]), st.booleans(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_reduce_scatter_of_what_is_rounded_in_pieces(
    case: tuple[int, int, int], wire: str, widens: bool, accumulate: bool
) -> None:
    nranks, numel, piece_bytes = case
    chunks, terms = even_chunks(numel, nranks), _terms(nranks, numel)
    adder = _rounding(wire, "float32" if widens else wire)
    total = np.stack([rounded(term, wire) for term in terms]).sum(axis=0) + np.float32(7 * accumulate)

    def act(place: Ring) -> None:
        own = chunks[place.rank]
        data, output = terms[place.rank].copy(), _stored(np.full(own.numel, 7, np.float32), adder)
        place.reduce_scatter(output, data, chunks, adder, accumulate=accumulate)
        np.testing.assert_array_equal(output, _stored(total[own.start : own.stop], adder))
        np.testing.assert_array_equal(data, terms[place.rank])

    with _tiny(piece_bytes):
        _on_ring(nranks, act)


@given(RINGS, st.sampled_from(["float16", "bfloat16"]), st.booleans())
@settings(max_examples=80, deadline=None)
def test_gathers_and_sums_that_travel_rounded_in_pieces(case: tuple[int, int, int], wire: str, in_place: bool) -> None:
    nranks, numel, piece_bytes = case
    chunks, terms = even_chunks(numel, nranks), _terms(nranks, numel)
    adder = _rounding(wire)
    types = Carried(adder.own, adder.element, adder.own)
    total = rounded(np.stack([rounded(term, wire) for term in terms]).sum(axis=0), wire)

    def act(place: Ring) -> None:
        data, own = terms[0].copy(), chunks[place.rank]
        own_slice = slice(own.start, own.stop)
        mine = data[own_slice] if in_place else data[own_slice].copy()
        data[: own.start] = data[own.stop :] = np.nan
        place.all_gather_rounded(data.view(np.uint8), chunks, types, mine)
        np.testing.assert_array_equal(data, rounded(terms[0], wire))
        narrow = np.zeros(numel, types.wire.storage)
        place.all_gather_rounded(narrow.view(np.uint8), chunks, types._replace(result=types.wire), terms[0][own_slice])
        np.testing.assert_array_equal(narrow, _stored(terms[0], _rounding(wire, wire)))
        data = terms[place.rank].copy()
        place.all_reduce(data, adder)
        np.testing.assert_array_equal(data, total)

    with _tiny(piece_bytes):
        _on_ring(nranks, act)


@pytest.mark.parametrize("nranks", range(2, 9))
def test_small_collectives_use_no_threads_and_do_not_block(nranks: int) -> None:
    terms = _terms(nranks, 5 * nranks)
    total: Array = np.stack(terms).sum(axis=0)

    def act(place: Ring) -> None:
        with mock.patch.object(place.links, "start_send", side_effect=AssertionError("a thread was asked")):
            output = np.zeros(5, np.float32)
            chunks = even_chunks(5 * nranks, nranks)
            place.reduce_scatter(output, terms[place.rank].copy(), chunks, FLOAT32)
            np.testing.assert_array_equal(output, total[5 * place.rank : 5 * place.rank + 5])
            data = terms[place.rank].copy()
            place.all_reduce(data, FLOAT32)
            np.testing.assert_array_equal(data, total)

    _on_ring(nranks, act)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("small", [True, False])
def test_sixteen_bit_sums_are_rounded_once(dtype: str, small: bool) -> None:
    nranks = 5
    adder = Adder(plain(ELEMENT_TYPES[getattr(paddle, dtype)]))
    # One big term and small ones that each vanish beside it in 16 bits, but not together.
    values = [256.0 if rank == 2 else 0.0625 if dtype == "float16" else 0.5 for rank in range(nranks)]
    exact = paddle.full([40], sum(values)).cast(dtype).view("int16").numpy()

    def act(place: Ring) -> None:
        data = paddle.full([40], values[place.rank]).cast(dtype).view("int16").numpy().view(adder.element.storage)
        output = np.zeros(8, adder.element.storage)
        place.reduce_scatter(output, data, even_chunks(40, nranks), adder)
        np.testing.assert_array_equal(output.view(np.int16), exact[:8])
        place.all_reduce(data, adder)
        np.testing.assert_array_equal(data.view(np.int16), exact)

    if small:
        _on_ring(nranks, act)
    else:
        with _tiny(8):
            _on_ring(nranks, act)


def test_two_ranks_add_a_and_b_whatever_the_order() -> None:
    generator = np.random.default_rng(0)
    terms = [generator.standard_normal(5000).astype(np.float32) for _ in range(2)]
    found: dict[int, Array] = {}

    def act(place: Ring) -> None:
        found[place.rank] = terms[place.rank].copy()
        place.all_reduce(found[place.rank], FLOAT32)

    for piece_bytes in (4000, 400):
        with _tiny(piece_bytes):
            _on_ring(2, act)
        assert found[0].tobytes() == found[1].tobytes() == (terms[0] + terms[1]).tobytes()


def test_no_piece_is_larger_than_the_limit() -> None:
    edges = [Edge(), Edge()]
    numel = (18 << 20) // 4

    def act(place: Ring) -> None:
        data = np.zeros(numel, np.float32)
        chunks = even_chunks(numel, 2)
        place.reduce_scatter(np.zeros(numel // 2, np.float32), data, chunks, FLOAT32)
        place.all_gather(data.view(np.uint8), [Span(4 * chunk.start, 4 * chunk.stop) for chunk in chunks])
        place.broadcast(data.view(np.uint8), 0)

    _on_ring(2, act, edges)
    assert max(edges[0].messages) <= 8 << 20
    # The scratch of a sum is bounded however large the tensor is.
    assert sum(edges[0].messages) == (9 + 9 + 18) << 20


@pytest.mark.parametrize("end", ["close", "cut"])
def test_a_failed_transfer_fails_the_collective_and_all_later_ones(end: str) -> None:
    numel = 40_000
    edges = [Edge(), Edge()]
    links = TcpLinks("broken", Ways(edges[0].source, edges[1].target))
    ring = Ring(0, 2, links)
    timer = threading.Timer(0.2, edges[1].source.close if end == "close" else links.cut)
    timer.start()
    for _ in range(2):
        with pytest.raises(ConnectionError):
            ring.all_gather(np.zeros(numel, np.uint8), even_chunks(numel, 2))
    links.stop()
    assert links.join(time.monotonic() + 5)


def test_a_message_may_come_in_any_portions() -> None:
    """What is woken for too little, or waits for more than will come, loses or stalls."""
    sizes = [1, 70_000, 300_000, 65_536, 262_144, 1_000_001]
    edges = [Edge(), Edge()]
    links = TcpLinks("portions", Ways(edges[0].source, edges[1].target))
    content = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8)

    def trickle() -> None:
        for start in range(0, len(content), 33_333):
            edges[1].source.sendall(content[start : start + 33_333].data)
            time.sleep(0.002)

    sender = threading.Thread(target=trickle, daemon=True)
    sender.start()
    parts = [np.zeros(size, np.uint8) for size in sizes]
    transfers = [links.start_recv(part) for part in parts]
    sender.join(20)
    assert not sender.is_alive()
    for transfer in transfers:
        assert transfer._over.acquire(timeout=5), "it waits for more than there is"
    assert np.array_equal(np.concatenate(parts), content)
    links.stop()
    assert links.join(time.monotonic() + 5)


@pytest.mark.parametrize(("numel", "nranks"), [(0, 3), (1, 4), (7, 2), (8, 4), (10, 4), (3, 8)])
def test_even_chunks(numel: int, nranks: int) -> None:
    chunks = even_chunks(numel, nranks)
    assert len(chunks) == nranks
    assert [chunk.start for chunk in chunks[1:]] == [chunk.stop for chunk in chunks[:-1]]
    assert (chunks[0].start, chunks[-1].stop) == (0, numel)
    assert max(chunk.numel for chunk in chunks) == -(-numel // nranks)
