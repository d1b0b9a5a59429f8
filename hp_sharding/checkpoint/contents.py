"""What a checkpoint on disk holds, for somebody who looks at it: names, sizes and state; values are not read."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from . import values
from .folder import INDEX_NAME, Checkpoint, read_index
from .index import VERSION, Index
from .opened import OURS, open_complete
from .source import TensorSource

_RANK_STATE = re.compile(r"rank/(\d+)/state")
_SHOWN_ELEMENTS = 8
"""Of an array in the state; of a larger one only what it is."""


class StoredTensor(NamedTuple):
    """One tensor as a checkpoint has it.

    Attributes:
        name: logical name.
        shape: of the whole tensor.
        dtype: Paddle's name of it.
        nbytes: of all its elements.
        files: names of those that hold some of it.
        n_chunks: in how many pieces it lies there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    files: list[str]
    n_chunks: int


class Contents(NamedTuple):
    """What is in a checkpoint.

    Attributes:
        path: where it is.
        version: of the format of a sharded one, 0 where its index cannot be read; None of whole files.
        saved_at: in seconds since 1970; None where that is not known.
        files: name -> bytes.
        tensors: sorted by name, numbers in names by their value.
        aliases: other names of tied parameters -> the name under which they are stored.
        state: what is not tensors, made readable and writable as JSON.
        leftovers: files that saves to the same folder have left which did not finish, or are still running -> bytes.
        damage: why it cannot be loaded; empty where nothing was noticed. Values were not looked at.
    """

    path: str
    version: int | None = None
    saved_at: float | None = None
    files: Mapping[str, int] = {}
    tensors: list[StoredTensor] = []  # noqa: RUF012
    aliases: Mapping[str, str] = {}
    state: Mapping[str, Any] = {}
    leftovers: Mapping[str, int] = {}
    damage: str = ""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def lr(self) -> float | None:
        """The learning rate of the next step, if that was saved."""
        scheduler = self.state.get("lr_scheduler") or {}
        found: float | None = self.state.get("lr", None)
        return scheduler.get("last_lr") if found is None else found


def contents_of_folder(path: str | os.PathLike[str]) -> Contents:
    """What is in a folder that ``save`` wrote to, as far as it can be made out: damage is described, not raised.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    folder = Path(path)
    try:
        index = read_index(folder)
    except CheckpointError as error:
        return Contents(str(folder), version=0, leftovers=_leftovers(folder, ""), damage=str(error))
    found = Contents(
        str(folder),
        version=VERSION,
        saved_at=index.saved_at,
        files={file.name: file.nbytes for file in index.files},
        tensors=_tensors_of(index),
        aliases=dict(index.aliases),
        state=readable(index.state),
        leftovers=_leftovers(folder, index.save_id),
    )
    try:
        with open_complete(folder) as checkpoint:
            return found._replace(state={**found.state, **_rank_states(checkpoint)})
    except CheckpointError as error:
        return found._replace(damage=str(error))


def contents_of_files(source: TensorSource) -> Contents:
    """What is in whole files."""
    tensors = [
        StoredTensor(name, info.shape, info.dtype, info.nbytes, [Path(source.file_of(name)).name], 1)
        for name, info in source.tensors.items()
    ]
    paths = {source.file_of(name) for name in source.tensors}
    return Contents(
        source.where,
        files={Path(path).name: os.path.getsize(path) for path in sorted(paths)},
        tensors=sorted(tensors, key=_natural),
        aliases=dict(source.aliases),
        state=readable(values.encode(dict(source.state), where="").json),
    )


def is_ours(folder: Path) -> bool:
    """Whether there is a checkpoint in a folder, or some of one."""
    return any(name == INDEX_NAME or OURS.fullmatch(name) for name in os.listdir(folder))


def readable(encoded: Any) -> Any:
    """What ``values.encode`` made JSON of, as a reader wants to see it. It is JSON too, but there is no way back.

    Arrays are described, unless they have only a few elements.
    """
    if isinstance(encoded, list):
        return [readable(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    kind = encoded.get("$")
    if kind is None:
        return {key: readable(item) for key, item in encoded.items()}
    if kind == "array":
        return _readable_array(encoded)
    if kind == "dict":
        return {str(readable(key)): readable(item) for key, item in encoded["items"]}
    if "items" in encoded:
        return [readable(item) for item in encoded["items"]]
    if kind in ("bytes", "bytearray"):
        return repr(values.decode(encoded, {})) if "base64" in encoded else f"{kind}, in {encoded['tensor']}"
    return str(values.decode(encoded, {}))


def _readable_array(encoded: Mapping[str, Any]) -> Any:
    numel = 1
    for size in encoded["shape"]:
        numel *= size
    if numel > _SHOWN_ELEMENTS or "base64" not in encoded or encoded["dtype"] == "bfloat16":
        return f"{'tensor' if encoded.get('paddle') else 'array'} of {encoded['dtype']} {encoded['shape']}"
    # Not as a tensor, for which Paddle would have to be there.
    found = values.decode({key: item for key, item in encoded.items() if key != "paddle"}, {}).tolist()
    return readable(values.encode(found, where="").json)


def _tensors_of(index: Index) -> list[StoredTensor]:
    found = []
    for name, entry in index.tensors.items():
        files = sorted({chunk.file for chunk in entry.chunks})
        names = [index.files[file].name for file in files]
        found.append(StoredTensor(name, entry.shape, entry.dtype, entry.info.nbytes, names, len(entry.chunks)))
    return sorted(found, key=_natural)


def _natural(tensor: StoredTensor) -> list[tuple[int, str]]:
    """Orders layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", tensor.name)]


def _leftovers(folder: Path, save_id: str) -> dict[str, int]:
    """Files of other saves."""
    found = {}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name) if folder.is_dir() else []:
        match = OURS.fullmatch(entry.name)
        if match and match[1] != save_id:
            with contextlib.suppress(FileNotFoundError):  # of a save that is under way
                found[entry.name] = entry.stat().st_size
    return found


def _rank_states(checkpoint: Checkpoint) -> dict[str, Any]:
    """What each rank has of its own, under ``ranks`` and its number.

    Raises:
        CheckpointError: it is damaged.
    """
    found = {}
    for name in checkpoint.tensors:
        if match := _RANK_STATE.fullmatch(name):
            found[match[1]] = _rank_state(checkpoint, name)
    return {"ranks": {rank: found[rank] for rank in sorted(found, key=int)}} if found else {}


def _rank_state(checkpoint: Checkpoint, name: str) -> Any:
    checkpoint.check(name)
    try:
        return readable(json.loads(checkpoint.read(name, 0, checkpoint.tensors[name].numel).tobytes()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        file = checkpoint.file_of(name)
        why = f"{name} makes no sense ({type(error).__name__}: {error})"
        raise CheckpointError(f"{file} is damaged: {why}", file=file, parameter=name) from error
