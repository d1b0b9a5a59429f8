"""``save_full`` and ``load_full``: ordinary files of whole tensors, for Paddle without hp_sharding and for others.

A parameter is put together on the first rank and written before the next one is fetched, so that it never holds more
than one. ``load_full`` has every rank read its own part from the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle
from paddle import nn

from ..errors import ConfigError
from ..moments import Kind, kinds_of, moments_of
from ..precision import dtype_name
from .blocks import copied, flat
from .full_state import FullMoment, FullParam, FullState
from .held import BucketPlace, Held, Part, Updated
from .loading import Loaded, load_from
from .saving import finish_pending, state_of
from .source import MODEL, OPTIMIZER, STORAGE, TensorInfo
from .whole_files import WholeFiles, write_paddle, write_safetensors

_WRITERS = {"paddle": write_paddle, "safetensors": write_safetensors}
_DTYPES = list(STORAGE)
_BLOCK_BYTES = 1 << 20
"""What is sent at a time. The first rank holds two of these beside the parameter that it puts together."""


def save_full(path: str | PathLike[str], model: nn.Layer, optimizer: Any = None, *, format: str = "paddle") -> None:
    """Saves whole tensors in files that need no hp_sharding to be read.

    Format ``"paddle"`` writes ``<path>.pdparams`` and, with an optimizer, ``<path>.pdopt``: a model and optimizer that
    are not wrapped load them with ``paddle.load`` and ``set_state_dict`` and go on from there. Format ``"safetensors"``
    writes ``<path>.safetensors`` with structured names, and ``<path>.optimizer.safetensors``.

    Of a model that was given in float32 the float32 values are saved, whatever it computes with. One that was given
    with 16 bits gets 16-bit parameters, with their masters beside the optimizer's state, as in plain Paddle.
    Collective: every rank calls it; the first one writes, and its host holds one parameter at a time.

    Args:
        path: without the ending. Folders are made; existing files are replaced once the new ones are complete.
        model: wrapped or not.
        optimizer: as for ``save``.
        format: ``"paddle"`` or ``"safetensors"``.

    Raises:
        CheckpointError: a file cannot be written; on every rank, and the files that were there still are.
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
        if held.ranks.is_first:
            try:
                _WRITERS[format](fspath(path), state, stream.fetch)
            finally:
                stream.drain()  # the others send to the end
        else:
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
    """A logical tensor to be put together."""

    name: str
    info: TensorInfo
    sources: list[_Source]


class _Stream:
    """Tensors one after the other, in an order that all ranks know; those that lie on other ranks are sent.

    Only the ranks of the first replica take part.
    """

    def __init__(self, held: Held, tensors: Sequence[_Due]) -> None:
        self._lane = held.buffers[0].place.gather if held.buffers else None
        self._waiting = list(tensors) if held.ranks.replicate[0] == 0 else []
        self._waiting.reverse()
        self._collects = held.ranks.is_first

    def fetch(self, name: str) -> npt.NDArray[Any]:
        """The next tensor, flat; it must be the one that is next."""
        due = self._waiting.pop()
        assert due.name == name, f"{name} was asked for, and {due.name} is next"
        found = np.empty(due.info.numel if self._collects else 0, STORAGE[due.info.dtype])
        for source in due.sources:
            self._collect(found, source, due)
        return found

    def drain(self) -> None:
        """Takes part in what is left."""
        while self._waiting:
            self.fetch(self._waiting[-1].name)

    def _collect(self, found: npt.NDArray[Any], source: _Source, due: _Due) -> None:
        step = max(1, _BLOCK_BYTES // STORAGE[due.info.dtype].itemsize)
        own = None if source.tensor is None else flat(source.tensor)
        for start in range(0, source.numel, step):
            numel = min(step, source.numel - start)
            block = paddle.empty([numel], due.info.dtype) if own is None else own._slice(start, start + numel)
            if source.owner != _EVERY_RANK and self._lane is not None and self._lane.nranks > 1:
                self._lane.broadcast(block, src=source.owner, label=due.name).wait()
            if self._collects:
                at = source.start + start
                found[at : at + numel] = copied(block).view(found.dtype)


def _plan(held: Held) -> tuple[FullState, _Stream]:
    """What is written, and in which order it is fetched. Collective."""
    names, short = held.param_names(), held.short_params()
    params, tensors = [], []
    for tensor in held.tensors():
        structured = tensor.name.removeprefix(MODEL)
        file_dtype = short.get(structured, tensor.info.dtype)
        params.append(FullParam(structured, names.get(structured, structured), tensor.info, file_dtype))
        tensors.append(_Due(tensor.name, tensor.info, _sources(tensor.place, tensor.parts)))
    moments = list(_moments(held))
    tensors += [due for _, due in moments]
    state = FullState(
        params=params,
        aliases={alias.removeprefix(MODEL): name.removeprefix(MODEL) for alias, name in held.aliases.items()},
        moments=[moment for moment, _ in moments],
        has_optimizer=held.inner is not None,
        optimizer_name=getattr(held.inner, "_name", None) or "",
        state=state_of(held, None, None),
    )
    return state, _Stream(held, tensors)


def _moments(held: Held) -> Iterator[tuple[FullMoment, _Due]]:
    """What the optimizer keeps of each parameter that has been updated."""
    if held.inner is None:
        return
    updated = held.updated()
    kinds = [kinds_of(held.inner, entry.param) for entry in updated]
    dtypes = iter(_moment_dtypes(held, updated, kinds))
    for entry, of_param in zip(updated, kinds, strict=True):
        for name, kind in of_param.items():
            dtype = next(dtypes)
            if dtype is not None:
                info = TensorInfo(kind.shape_of(entry.shape), dtype)
                due = _Due(f"{OPTIMIZER}{entry.name}/{name}", info, _moment_sources(held.inner, entry, name, kind))
                yield FullMoment(entry.name, name, info), due


def _moment_dtypes(held: Held, updated: Sequence[Updated], kinds: Sequence[dict[str, Kind]]) -> list[str | None]:
    """Of each moment of each parameter, or None where there is none, as the rank with its first element knows."""
    codes = []
    for entry, of_param in zip(updated, kinds, strict=True):
        first = next((part for part in entry.parts if part.start == 0), None)
        found = {} if first is None else {moment.name: moment for moment in moments_of(held.inner, first.tensor)}
        codes += [_DTYPES.index(dtype_name(found[name].tensor)) + 1 if name in found else 0 for name in of_param]
    own = np.array(codes, np.int32)
    if held.ranks.replicate[0] != 0:
        own[:] = 0
    return [_DTYPES[code - 1] if code else None for code in held.ranks.sum_of(own).tolist()]


def _moment_sources(inner: Any, updated: Updated, name: str, kind: Kind) -> list[_Source]:
    parts = []
    for part in updated.parts:
        tensors = {moment.name: moment.tensor for moment in moments_of(inner, part.tensor)}
        if name in tensors:
            parts.append(Part(part.start, tensors[name]))
    if not kind.per_element:
        return [source._replace(numel=1) for source in _sources(updated.place, parts) if source.start == 0]
    if not kind.rows:
        return _sources(updated.place, parts)
    numel = math.prod(updated.shape)
    found = []
    for row in range(kind.rows):
        own = [Part(start, tensor._slice(row, row + 1)) for start, tensor in parts]
        found += [source._replace(start=row * numel + source.start) for source in _sources(updated.place, own)]
    return found


def _sources(place: BucketPlace | None, parts: Sequence[Part]) -> list[_Source]:
    """Who has which elements, in order; those of this rank with their tensors."""
    own = {part.start: part.tensor for part in parts}
    if place is None:
        return [_Source(start, tensor.size, _EVERY_RANK, tensor) for start, tensor in own.items()]
    layout = place.buffer.layout
    pieces = [(owner, piece) for owner in range(layout.nranks) for piece in layout.pieces(owner)]
    return [
        _Source(piece.param_offset_numel, piece.numel, owner, own.get(piece.param_offset_numel))
        for owner, piece in pieces
        if piece.slot == place.slot
    ]
