"""``save_full`` and ``load_full``: ordinary files of whole tensors, for Paddle without hp_sharding and for others.

A parameter is put together on the first rank and written before the next one is fetched, so that it never holds more
than one. All ranks know what comes when, and meet after every so many bytes: none waits longer than one portion
takes, and all stop where the first cannot go on. ``load_full`` has every rank read its own part from the files.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle
from paddle import nn

from ..buffer import FusedCommBuffer
from ..comm import Communicator, Work
from ..errors import CheckpointError, ConfigError
from ..layout import Piece
from ..moments import Kind, kinds_of, moments_of
from ..precision import dtype_name
from .blocks import flat, host_blocks
from .full_state import FullMoment, FullParam, FullState
from .held import BucketPlace, Held, HeldTensor, Part, Updated
from .loading import Loaded, load_from
from .ranks import Ranks
from .saving import finish_pending, state_of
from .source import MODEL, OPTIMIZER, STORAGE, TensorInfo
from .whole_files import WholeFiles, write_paddle, write_safetensors

_WRITERS = {"paddle": write_paddle, "safetensors": write_safetensors}
_DTYPES = list(STORAGE)
_BLOCK_BYTES = 1 << 20
"""What is sent at a time. Ranks that receive hold two of these beside the parameter that the first puts together."""
_PORTION_BYTES = 1 << 28
"""After how much that was sent or written all ranks meet."""


def save_full(path: str | PathLike[str], model: nn.Layer, optimizer: Any = None, *, format: str = "paddle") -> None:
    """Saves whole tensors in files that need no hp_sharding to be read.

    Format ``"paddle"`` writes ``<path>.pdparams`` and, with an optimizer, ``<path>.pdopt``: a model and optimizer that
    are not wrapped load them with ``paddle.load`` and ``set_state_dict`` and go on from there. Format ``"safetensors"``
    writes ``<path>.safetensors`` with structured names, and ``<path>.optimizer.safetensors``.

    Of a model that was given in float32 the float32 values are saved, whatever it computes with. One that was given
    with 16 bits gets 16-bit parameters, with their masters beside the optimizer's state, as in plain Paddle.
    Collective: every rank calls it; the first one writes, and its host holds one parameter at a time.

    Args:
        path: without the ending. Folders are made; existing files are replaced once the new ones are complete, one by
            one: first the optimizer's, then the weights.
        model: wrapped or not.
        optimizer: as for ``save``.
        format: ``"paddle"`` or ``"safetensors"``.

    Raises:
        CheckpointError: a file cannot be written; on every rank. The files that were there still are, unless it was
            only the last step that failed: then, as after a kill between the two, the optimizer's file is the new one
            and the weights are the old ones.
        ConfigError: model and optimizer do not belong together, an unknown format, or layers that are split over
            tensor-parallel ranks.
        CommError: a rank is gone or late.
    """
    if format not in _WRITERS:
        raise ConfigError(f"format: expected one of {', '.join(map(repr, _WRITERS))}, got {format!r}")
    held = Held(model, optimizer)
    if held.ranks.tensor[1] > 1:
        raise ConfigError(
            "save_full: layers are split over tensor-parallel ranks, so that no rank can put whole tensors together. "
            "Use hp_sharding.save"
        )
    finish_pending(model)
    with held.ranks.together():
        held.keep_writes()
    state, stream = _plan(held)
    with held.ranks.together():
        try:
            if held.ranks.is_first:
                _WRITERS[format](fspath(path), state, stream.fetch, wrote=stream.wrote)
        except BaseException:
            stream.drain(failed=True)  # the others send until they know
            raise
        stream.drain()


def load_full(path: str | PathLike[str], model: nn.Layer, optimizer: Any = None, *, strict: bool = True) -> Loaded:
    """Loads what ``save_full`` wrote, or ``paddle.save`` of ``state_dict()``: on any number of ranks, wrapped or not.

    ``<path>.pdparams`` and ``<path>.pdopt``, or ``<path>.safetensors`` and ``<path>.optimizer.safetensors``. Parameters
    are matched by structured names, optimizer state by the names that Paddle gave the parameters when it was saved, so
    other name counters in this process do not matter. Collective: every rank calls it and reads only what it needs.

    Args:
        path: without the ending, or one of the files.
        model: wrapped or not.
        optimizer: None loads the model alone.
        strict: as for ``load``.

    Raises:
        CheckpointError: files are missing, damaged, or do not fit; on every rank, and nothing has changed. There are
            no checksums in such files: a value that changed on the disk goes unnoticed.
        ConfigError: model and optimizer do not belong together.
        CommError: a rank is gone or late.
    """
    return load_from(lambda: WholeFiles(path), Held(model, optimizer), scaler=None, strict=strict)


_EVERY_RANK = -1


class _Source(NamedTuple):
    """Elements of a tensor from ``start`` on, and the rank of the shard group that has them."""

    start: int
    numel: int
    owner: int
    tensor: paddle.Tensor | None


class _Due(NamedTuple):
    """A logical tensor to be put together; ``write_bytes`` of it are written then."""

    name: str
    info: TensorInfo
    write_bytes: int
    sources: list[_Source]


class _Sent(NamedTuple):
    """Elements of a tensor from ``start`` on; ``tensor`` has them once ``work`` is done, None where it never will."""

    start: int
    nbytes: int
    tensor: paddle.Tensor | None
    work: Work | None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


class _Meetings:
    """All ranks tell each other after every portion of what they send and write whether they can go on."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._nbytes = 0
        self.has_failed = False
        self.is_over = False

    def passed(self, nbytes: int) -> None:
        """So much more was sent or written, on every rank at the same place between collectives."""
        self._nbytes += nbytes
        while self._nbytes >= _PORTION_BYTES and not self.is_over:
            self._nbytes -= _PORTION_BYTES
            self.is_over = bool(self._ranks.sum_of(np.array([self.has_failed], np.int32)).any())


class _Stream:
    """Tensors one after the other, in an order that all ranks know; those that lie on other ranks are sent.

    Which collectives there are does not depend on what becomes of the values: wherever the first rank fails, ``drain``
    goes on there. Ranks of the first replica send; all meet.
    """

    def __init__(self, held: Held, tensors: Sequence[_Due]) -> None:
        self._waiting = list(reversed(tensors))
        self._collects = held.ranks.is_first
        self._meetings = _Meetings(held.ranks)
        self._under_way: Iterator[_Sent] = iter(())
        self._unwritten_bytes = 0
        self._lane: Communicator | None = None
        if held.buffers and held.ranks.replicate[0] == 0 and held.ranks.shard[1] > 1:
            self._lane = held.buffers[0].place.gather
        # All that is received goes through these: later there may be no memory, and every rank has to take part.
        received = {due.info.dtype for due in tensors if self._lane and any(map(_is_sent, due.sources))}
        self._spare = {dtype: [paddle.empty([_block_numel(dtype)], dtype) for _ in range(2)] for dtype in received}

    def fetch(self, name: str) -> npt.NDArray[Any]:
        """The next tensor, flat; it must be the one that is next. What was fetched before has been written."""
        self._end()
        due = self._waiting[-1]
        assert due.name == name, f"{name} was asked for, and {due.name} is next"
        found = np.empty(due.info.numel, STORAGE[due.info.dtype])
        memory = found.view(np.uint8)
        for sent in self._begin():
            assert sent.tensor is not None, f"nobody has element {sent.start} of {name}"
            at = sent.start * found.itemsize
            for block in host_blocks(sent.tensor):
                memory[at : at + block.size] = block
                at += block.size
        return found

    def wrote(self, nbytes: int) -> None:
        """So much of what was fetched last has been written."""
        nbytes = min(nbytes, self._unwritten_bytes)
        self._unwritten_bytes -= nbytes
        self._meetings.passed(nbytes)

    def drain(self, *, failed: bool = False) -> None:
        """Takes part in what is left, until a rank is known to have ``failed``; nothing is kept."""
        self._meetings.has_failed = failed
        self._end()
        while self._waiting and not self._meetings.is_over:
            self._begin()
            self._end()

    def _begin(self) -> Iterator[_Sent]:
        due = self._waiting.pop()
        self._unwritten_bytes = due.write_bytes
        self._under_way = self._send(due)
        return self._under_way

    def _end(self) -> None:
        """Leaves nothing of the tensor that was begun."""
        for _ in self._under_way:
            pass
        self.wrote(self._unwritten_bytes)

    def _send(self, due: _Due) -> Iterator[_Sent]:
        """Blocks of a tensor, in order. The next one is on its way while one is looked at."""
        started = self._start(due)
        coming = next(started, None)
        while coming is not None and not self._meetings.is_over:
            sent, coming = coming, next(started, None)
            sent.wait()
            yield sent
            self._meetings.passed(sent.nbytes)
        if coming is not None:
            coming.wait()

    def _start(self, due: _Due) -> Iterator[_Sent]:
        step, item_bytes = _block_numel(due.info.dtype), STORAGE[due.info.dtype].itemsize
        for source in due.sources:
            own = flat(source.tensor) if source.tensor is not None and (self._collects or _is_sent(source)) else None
            for start in range(0, source.numel, step):
                stop = min(start + step, source.numel)
                block = None if own is None else own._slice(start, stop)
                work = None
                if self._lane is not None and _is_sent(source):
                    block = self._next_spare(due.info.dtype)._slice(0, stop - start) if block is None else block
                    work = self._lane.broadcast(block, src=source.owner, label=due.name)
                yield _Sent(source.start + start, (stop - start) * item_bytes, block, work)

    def _next_spare(self, dtype: str) -> paddle.Tensor:
        """The one that was not filled last: of two blocks in a row that are received, the first is still looked at."""
        self._spare[dtype].reverse()
        return self._spare[dtype][0]


def _is_sent(source: _Source) -> bool:
    return source.owner != _EVERY_RANK


def _block_numel(dtype: str) -> int:
    return max(1, _BLOCK_BYTES // STORAGE[dtype].itemsize)


# -- what there is -----------------------------------------------------------------------------------------------------


def _plan(held: Held) -> tuple[FullState, _Stream]:
    """What is written, and in which order it is fetched. Collective; fails on all ranks where it does on one."""
    with held.ranks.together():
        owners, tensors = _Owners(), held.tensors()
        params, kept = _params(held, tensors), _kept(held)
    _check_alike(held.ranks, kept)
    with held.ranks.together():
        codes = _codes(held, kept)
    dtypes = held.ranks.sum_of(np.array(codes, np.int32)).tolist()
    with held.ranks.together():
        moments = list(_moments(kept, dtypes, owners))
        state = FullState(
            params=params,
            aliases={alias.removeprefix(MODEL): name.removeprefix(MODEL) for alias, name in held.aliases.items()},
            moments=[moment for moment, _ in moments],
            has_optimizer=held.inner is not None,
            optimizer_name=getattr(held.inner, "_name", None) or "",
            state=state_of(held, None, None),
        )
        due = [
            _Due(tensor.name, tensor.info, state.bytes_of(param), owners.sources(tensor.place, tensor.parts))
            for tensor, param in zip(tensors, params, strict=True)
        ]
        due += [due for _, due in moments]
        stream = _Stream(held, due)
    _check_same_order(held.ranks, due)
    return state, stream


def _params(held: Held, tensors: Sequence[HeldTensor]) -> list[FullParam]:
    names, short = held.param_names(), held.short_params()
    found = []
    for tensor in tensors:
        structured = tensor.name.removeprefix(MODEL)
        file_dtype = short.get(structured, tensor.info.dtype)
        found.append(FullParam(structured, names.get(structured, structured), tensor.info, file_dtype))
    return found


class _Kept(NamedTuple):
    """What an optimizer keeps of a parameter: its kinds, and of each part that this rank has the moments by name."""

    updated: Updated
    kinds: dict[str, Kind]
    parts: list[tuple[int, dict[str, paddle.Tensor]]]


def _kept(held: Held) -> list[_Kept]:
    found = []
    for updated in held.updated():
        # Of a slice, if there is one: what a subclass of an optimizer makes by itself is of its shape.
        known = updated.parts[0].tensor if updated.parts else updated.param
        parts = [
            (part.start, {m.name: m.tensor for m in moments_of(held.inner, part.tensor)}) for part in updated.parts
        ]
        found.append(_Kept(updated, kinds_of(held.inner, known), parts))
    return found


def _check_alike(ranks: Ranks, kept: Sequence[_Kept]) -> None:
    """Raises CheckpointError where ranks do not agree on what there is of a parameter. Collective."""
    count = np.array([len(kept) if ranks.is_first else 0], np.int32)
    (n_first,) = ranks.sum_of(count).tolist()
    with ranks.together():
        if len(kept) != n_first:
            raise CheckpointError(
                f"rank {ranks.rank}: the optimizer updates {len(kept)} parameters here, but {n_first} on the first "
                "rank. Make it of the same parameters on every rank"
            )
    digests = [_digest(entry.kinds) for entry in kept]
    firsts = ranks.sum_of(np.array(digests if ranks.is_first else [0] * n_first, np.int32)).tolist()
    with ranks.together():
        for entry, digest, first in zip(kept, digests, firsts, strict=True):
            if digest != first:
                raise CheckpointError(
                    f"rank {ranks.rank}: of parameter '{entry.updated.name}' the optimizer keeps "
                    f"{', '.join(entry.kinds) or 'nothing'} here, and not the same on the first rank. Whole files need "
                    "every rank to know it, with a slice of the parameter or without: make it in _create_accumulators, "
                    "or use hp_sharding.save",
                    parameter=entry.updated.name,
                )


def _check_same_order(ranks: Ranks, due: Sequence[_Due]) -> None:
    """Raises CheckpointError where ranks would not send the same. Collective."""
    told = [(*entry[:3], [source[:3] for source in entry.sources]) for entry in due]
    digest = zlib.crc32(repr(told).encode()) & 0x7FFFFFFF
    (first,) = ranks.sum_of(np.array([digest if ranks.is_first else 0], np.int32)).tolist()
    with ranks.together():
        if digest != first:
            raise CheckpointError(
                f"rank {ranks.rank}: the {len(due)} tensors to save are not those of the first rank: other names, "
                "shapes or dtypes. Buffers that a forward makes have to be there on every rank, or on none"
            )


def _digest(kinds: dict[str, Kind]) -> int:
    """Without dtypes, which depend on whether there is a slice; positive, and of 31 bits."""
    text = repr([(name, kind.per_element, kind.rows) for name, kind in kinds.items()])
    return zlib.crc32(text.encode()) & 0x7FFFFFFF


def _codes(held: Held, kept: Sequence[_Kept]) -> list[int]:
    """Of each moment of each parameter a number for its dtype, on the rank with its first element; 0 elsewhere."""
    codes = []
    for updated, kinds, parts in kept:
        speaks = held.ranks.is_first if updated.place is None else held.ranks.replicate[0] == 0
        first = next((moments for start, moments in parts if start == 0), {}) if speaks else {}
        codes += [_DTYPES.index(dtype_name(first[name])) + 1 if name in first else 0 for name in kinds]
    return codes


def _moments(kept: Sequence[_Kept], dtypes: Sequence[int], owners: _Owners) -> Iterator[tuple[FullMoment, _Due]]:
    """What the optimizer keeps of each parameter that has been updated; ``dtypes`` as ``_codes`` has them, of all."""
    codes = iter(dtypes)
    for entry in kept:
        for name, kind in entry.kinds.items():
            code = next(codes)
            if code:
                info = TensorInfo(kind.shape_of(entry.updated.shape), _DTYPES[code - 1])
                sources = _moment_sources(entry, name, owners)
                moment = FullMoment(entry.updated.name, name, info)
                yield moment, _Due(f"{OPTIMIZER}{entry.updated.name}/{name}", info, info.nbytes, sources)


def _moment_sources(entry: _Kept, name: str, owners: _Owners) -> list[_Source]:
    place, kind = entry.updated.place, entry.kinds[name]
    parts = [Part(start, moments[name]) for start, moments in entry.parts if name in moments]
    if not kind.per_element:
        return [source._replace(numel=1) for source in owners.sources(place, parts) if source.start == 0]
    if not kind.rows:
        return owners.sources(place, parts)
    numel = math.prod(entry.updated.shape)
    found = []
    for row in range(kind.rows):
        own = [Part(start, tensor._slice(row, row + 1)) for start, tensor in parts]
        found += [source._replace(start=row * numel + source.start) for source in owners.sources(place, own)]
    return found


class _Owners:
    """Which rank of a shard group has which elements. Every layout is looked through once."""

    def __init__(self) -> None:
        self._of_bucket: dict[int, dict[int, list[tuple[int, Piece]]]] = {}

    def sources(self, place: BucketPlace | None, parts: Sequence[Part]) -> list[_Source]:
        """Who has which elements of a parameter, in order; those of this rank with their tensors."""
        own = {part.start: part.tensor for part in parts}
        if place is None:
            return [_Source(start, tensor.size, _EVERY_RANK, tensor) for start, tensor in own.items()]
        return [
            _Source(piece.param_offset_numel, piece.numel, owner, own.get(piece.param_offset_numel))
            for owner, piece in self._pieces(place.buffer).get(place.slot, [])
        ]

    def _pieces(self, buffer: FusedCommBuffer) -> dict[int, list[tuple[int, Piece]]]:
        """Slot -> owner and piece."""
        if id(buffer) not in self._of_bucket:
            found = self._of_bucket.setdefault(id(buffer), {})
            for owner in range(buffer.layout.nranks):
                for piece in buffer.layout.pieces(owner):
                    found.setdefault(piece.slot, []).append((owner, piece))
        return self._of_bucket[id(buffer)]
