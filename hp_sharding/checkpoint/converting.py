"""From one form of a checkpoint to another, on one machine, without the model and without ranks.

Memory is bounded: a block at a time into a sharded checkpoint, a tensor at a time into whole files. Values are copied
bit for bit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError, ConfigError
from . import values
from .folder import Checkpoint, Save, new_save_id
from .full_state import FullMoment, FullParam, FullState
from .source import MODEL, OPTIMIZER, SPLIT_MARK, STORAGE, TensorInfo, TensorSource
from .tensor_file import Piece, array_piece
from .unpickled import PickledFile
from .whole_files import FORMATS, write_paddle, write_safetensors

Form = Literal["sharded", "paddle", "safetensors"]
Progress = Callable[[int], object]
"""Is told of bytes that have been dealt with since it was called last."""

_BLOCK_BYTES = 8 << 20
_WHOLE_BYTES = 1 << 20
"""Tensors of at most this size are not divided between files, and those files differ by as much."""
_VERIFIED_PARTS = 100
"""In how many steps progress of a verification is told."""
_MAX_WORKERS = 8
"""More read no faster than a disk gives."""


def convert(
    source: TensorSource, to: Form, target: str | os.PathLike[str], *, n_files: int = 1, on_progress: Progress = int
) -> None:
    """Writes all that ``source`` holds in another form. What is at ``target`` is replaced when the new one is complete.

    Args:
        source: an open checkpoint, or whole files. Its checksums are checked first.
        to: ``"sharded"``, the folder that ``load`` reads; ``"paddle"``, ``<target>.pdparams`` and ``<target>.pdopt``;
            ``"safetensors"``, ``<target>.safetensors`` and ``<target>.optimizer.safetensors``.
        target: the folder, or what names of whole files begin with.
        n_files: data files of a sharded checkpoint, of about the same size.
        on_progress: is told how many bytes have been read or written since it was called last; of twice
            ``stored_bytes(source)`` in all. It may be called from several threads.

    Raises:
        ConfigError: whole files are to hold parameters that tensor parallelism has split.
        CheckpointError: the source is damaged or lacks what whole files need, or the target cannot be written. Nothing
            new is left behind.
    """
    if to != "sharded":
        _check_not_split(source)
    failures = verify(source, on_progress=on_progress)
    if failures:
        raise failures[0]
    if to == "sharded":
        _write_sharded(source, Path(target), n_files, on_progress)
    else:
        _write_whole(source, to, Path(target), on_progress)


def verify(source: TensorSource, *, on_progress: Progress = int) -> list[CheckpointError]:
    """Reads all stored bytes, in several threads, and compares their checksums.

    Returns:
        What is wrong: the first fault of each part of the bytes. Empty where all is well.
    """
    total = stored_bytes(source)
    workers = min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    found: dict[str, CheckpointError] = {}
    with ThreadPoolExecutor(workers) as executor:
        parts = {executor.submit(source.verify, part, _VERIFIED_PARTS): part for part in range(_VERIFIED_PARTS)}
        for future in as_completed(parts):
            part = parts[future]
            on_progress((part + 1) * total // _VERIFIED_PARTS - part * total // _VERIFIED_PARTS)
            try:
                future.result()
            except CheckpointError as error:
                found.setdefault(str(error), error)
    return list(found.values())


def stored_bytes(source: TensorSource) -> int:
    """Bytes of all tensors in it."""
    return sum(tensor.nbytes for tensor in source.tensors.values())


def outputs(target: Path, to: Form) -> list[Path]:
    """What ``convert`` writes: the folder, or the files, of which not all need be there."""
    return [target] if to == "sharded" else [Path(f"{target}{ending}") for ending in FORMATS[to]]


# -- into a folder -----------------------------------------------------------------------------------------------------


class _Described(NamedTuple):
    """What is not the source's tensors: state as JSON, and the arrays in it that are yet to be stored."""

    state: Any
    arrays: Mapping[str, npt.NDArray[Any]]


def _write_sharded(source: TensorSource, target: Path, n_files: int, on_progress: Progress) -> None:
    described = _described(source)
    pieces = [[_piece(source, run, on_progress) for run in runs] for runs in _dealt_out(source.tensors, n_files)]
    pieces[0] += [array_piece(name, array) for name, array in described.arrays.items()]
    save_id = new_save_id()
    saves = [Save(target, save_id, part, n_files) for part in range(n_files)]
    try:
        saves[0].clear_leftovers()
        for save, own in zip(saves, pieces, strict=True):
            save.write(own)
        saves[0].commit(described.state, source.aliases)
    except BaseException:
        for save in saves:
            save.discard()
        with contextlib.suppress(OSError):
            target.rmdir()  # unless there is something else in it
        raise


def _described(source: TensorSource) -> _Described:
    if isinstance(source, Checkpoint):
        return _Described(source.index.state, {})
    return _Described(*values.encode({**source.state, **_paddles_own(source)}, where=""))


def _paddles_own(source: TensorSource) -> dict[str, Any]:
    """What Paddle's files say of parameters besides values, as ``save`` notes it: names, and which have 16 bits.

    Without it there would be no way back to files from which plain Paddle goes on.
    """
    weights, optimizer = FORMATS["paddle"]
    if not any(source.file_of(name).endswith((weights, optimizer)) for name in source.tensors):
        return {}
    with contextlib.closing(PickledFile(source.where + weights)) as file:
        tensors = {key: tensor for key, tensor in file.content.items() if MODEL + key in source.tensors}
        short = {key: tensor.info.dtype for key, tensor in tensors.items()}
        return {
            "param_names": {key: tensor.name for key, tensor in tensors.items() if tensor.name},
            "short": {key: dtype for key, dtype in short.items() if dtype != source.tensors[MODEL + key].dtype},
        }


class _Run(NamedTuple):
    """Elements ``start`` to ``stop`` of a tensor."""

    name: str
    start: int
    stop: int


def _dealt_out(tensors: Mapping[str, TensorInfo], n_files: int) -> list[list[_Run]]:
    """For each file, what goes into it: all have about as many bytes, and neighbours stay together."""
    dealt: list[list[_Run]] = [[] for _ in range(n_files)]
    total = max(1, sum(info.nbytes for info in tensors.values()))
    at = 0
    for name, info in tensors.items():
        if info.nbytes <= _WHOLE_BYTES:
            dealt[min(n_files - 1, (at + info.nbytes // 2) * n_files // total)].append(_Run(name, 0, info.numel))
        else:
            for file, runs in enumerate(dealt):
                start, stop = (
                    min(info.numel, max(0, (total * edge // n_files - at) // STORAGE[info.dtype].itemsize))
                    for edge in (file, file + 1)
                )
                runs += [_Run(name, start, stop)] if start < stop else []
        at += info.nbytes
    return dealt


def _piece(source: TensorSource, run: _Run, on_progress: Progress) -> Piece:
    def blocks() -> Iterator[npt.NDArray[np.uint8]]:
        for block in _blocks(source, run, on_progress):
            yield block.view(np.uint8)

    return Piece(run.name, source.tensors[run.name], run.start, run.stop, blocks)


def _blocks(source: TensorSource, run: _Run, on_progress: Progress) -> Iterator[npt.NDArray[Any]]:
    step = _BLOCK_BYTES // STORAGE[source.tensors[run.name].dtype].itemsize
    for start in range(run.start, run.stop, step):
        block = source.read(run.name, start, min(start + step, run.stop))
        yield block
        on_progress(block.nbytes)


# -- into whole files --------------------------------------------------------------------------------------------------


def _check_not_split(source: TensorSource) -> None:
    for name in source.tensors:
        if SPLIT_MARK in name:
            raise ConfigError(
                f"{source.where} holds {name.removeprefix(MODEL)}, a part of a parameter that tensor parallelism has "
                "split. Whole files would need all of it; only --to sharded is possible"
            )


def _write_whole(source: TensorSource, to: Form, target: Path, on_progress: Progress) -> None:
    state = _full_state(source)
    moments = [f"{OPTIMIZER}{moment.structured}/{moment.moment}" for moment in state.moments]
    written = {*(MODEL + param.structured for param in state.params), *moments}
    on_progress(sum(info.nbytes for name, info in source.tensors.items() if name not in written))

    def fetch(name: str) -> npt.NDArray[Any]:
        info = source.tensors[name]
        array = source.read(name, 0, info.numel).reshape(info.shape)
        on_progress(array.nbytes)
        return array

    write = write_paddle if to == "paddle" else write_safetensors
    write(target, state, fetch)


def _full_state(source: TensorSource) -> FullState:
    """What whole files take. Parameters come in the order of the model, as far as it is known."""
    state = source.state
    short, names = state.get("short") or {}, state.get("param_names") or {}
    there = [name.removeprefix(MODEL) for name in source.tensors if name.startswith(MODEL)]
    known = {structured: number for number, structured in enumerate(names)}
    there.sort(key=lambda structured: known.get(structured, len(known)))
    params = []
    for structured in there:
        info = source.tensors[MODEL + structured]
        params.append(FullParam(structured, names.get(structured, structured), info, short.get(structured, info.dtype)))
    moments = []
    for name, info in source.tensors.items():
        if name.startswith(OPTIMIZER):
            structured, _, moment = name.removeprefix(OPTIMIZER).rpartition("/")
            moments.append(FullMoment(structured, moment, info))
    return FullState(
        params=params,
        aliases={alias.removeprefix(MODEL): name.removeprefix(MODEL) for alias, name in source.aliases.items()},
        moments=moments,
        has_optimizer=bool(moments) or state.get("optimizer") is not None or state.get("lr_scheduler") is not None,
        optimizer_name=state.get("optimizer_name") or "",
        state=state,
    )
