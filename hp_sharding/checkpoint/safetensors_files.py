"""Whole tensors in safetensors files: weights as the wider ecosystem reads them, and the optimizer's state beside them.

``<prefix>.safetensors`` has structured names as keys. A tied parameter is in it once, under its first name, as is usual
there; the metadata list the others. ``<prefix>.optimizer.safetensors`` has ``<structured name>/<moment>``, float32
masters as ``<structured name>/fp32_master``, and what is not tensors as JSON in the metadata, see ``values``.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from . import values
from .beside import FileBeside
from .full_state import Found, FullMoment, FullParam, FullState, discard_both, flat_blocks, put_in_place
from .lazy import ByteRun, FileReader, LazyTensor, Payload
from .source import MODEL, OPTIMIZER, SAFETENSORS, STORAGE, TensorInfo

WEIGHTS = ".safetensors"
OPTIMIZER_STATE = ".optimizer.safetensors"

_MASTER = "fp32_master"
_FORMAT = {"format": "pd"}
_TIED = "hp_sharding.tied"
_STATE = "hp_sharding.state"
_STATE_TENSORS = "state/"
_DTYPES = {code: dtype for dtype, code in SAFETENSORS.items()}
_ALIGNMENT = 8
_MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""

Array = npt.NDArray[Any]


class TensorsFile(FileReader):
    """A safetensors file, open for reading.

    Attributes:
        tensors: by key.
        metadata: texts.

    Raises:
        CheckpointError: it cannot be read, is cut off, or its header is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        try:
            header, data_at = self._header()
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.tensors = {key: self._tensor(key, entry, data_at) for key, entry in header.items()}
            self._check_covered(data_at)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.close()
            raise self._damaged(f"its header is damaged: {error}") from error
        except BaseException:
            self.close()
            raise

    def _header(self) -> tuple[dict[str, Any], int]:
        if self._file.nbytes < 8:
            raise self._damaged("is cut off: it has no header")
        (nbytes,) = struct.unpack("<Q", self._file.read(0, 8))
        if nbytes > min(self._file.nbytes - 8, _MAX_HEADER_BYTES):
            raise self._damaged(f"is cut off, or no safetensors file: a header of {nbytes} bytes")
        header = json.loads(self._file.read(8, nbytes))
        if not isinstance(header, dict):
            raise TypeError("it is no object")
        return header, 8 + nbytes

    def _tensor(self, key: str, entry: Mapping[str, Any], data_at: int) -> LazyTensor:
        code, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if code not in _DTYPES:
            raise CheckpointError(
                f"{self.path}: {key} is of {code}, which is none of {', '.join(_DTYPES)}", file=self.path, parameter=key
            )
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)) or start > stop:
            raise ValueError(f"shape or place of {key}")
        if data_at + stop > self._file.nbytes:
            raise self._damaged(f"is cut off: {key} ends at byte {data_at + stop} of {self._file.nbytes}", key)
        run = ByteRun(Payload(data_at + start, stop - start), stop - start)
        return LazyTensor(self._file, key, STORAGE[_DTYPES[code]], tuple(shape), (run,))

    def _check_covered(self, data_at: int) -> None:
        """Tensors that follow each other without gaps: no bit of an offset or a length can be wrong unseen."""
        end = data_at
        contents = [part.content for tensor in self.tensors.values() for part in tensor.parts]
        for payload in sorted(content for content in contents if isinstance(content, Payload)):
            if payload.offset != end:
                raise ValueError(f"nothing begins at byte {end}")
            end += payload.nbytes
        if end != self._file.nbytes:
            raise ValueError(f"{self._file.nbytes - end} bytes belong to no tensor")

    def _damaged(self, what: str, key: str = "") -> CheckpointError:
        return CheckpointError(f"{self.path} {what}; use a copy", file=self.path, parameter=key)


def found_in_safetensors(weights: TensorsFile, optimizer: TensorsFile | None) -> Found:
    """What the two files hold.

    Raises:
        CheckpointError: they do not belong together, or what is not tensors makes no sense.
    """
    tied = _json_in(weights, _TIED, {})
    found = Found(
        {f"{MODEL}{key}": tensor for key, tensor in weights.tensors.items()},
        {f"{MODEL}{alias}": f"{MODEL}{first}" for alias, first in tied.items()},
        {},
    )
    strangers = [first for first in tied.values() if first not in weights.tensors]
    if strangers:
        raise CheckpointError(
            f"{weights.path}: its metadata name {strangers[0]}, which is not in it: the file is damaged",
            file=weights.path,
            parameter=strangers[0],
        )
    if optimizer is not None:
        _add_optimizer(found, weights, optimizer)
    return found


def _add_optimizer(found: Found, weights: TensorsFile, file: TensorsFile) -> None:
    state = _json_in(file, _STATE, {})
    arrays = set(values.tensor_names(state))
    found.state.update(
        values.decode(state, {name: file.tensors[name].array() for name in arrays if name in file.tensors})
    )
    for key, tensor in file.tensors.items():
        structured, _, moment = key.rpartition("/")
        if key in arrays:
            continue
        if structured not in weights.tensors:
            raise CheckpointError(
                f"{file.path}: {key} belongs to no parameter in {weights.path}; take both files from the same save",
                file=file.path,
                parameter=structured or key,
            )
        found.tensors[f"{MODEL}{structured}" if moment == _MASTER else f"{OPTIMIZER}{key}"] = tensor


def _json_in(file: TensorsFile, key: str, default: Any) -> Any:
    try:
        return json.loads(file.metadata[key]) if key in file.metadata else default
    except ValueError as error:
        raise CheckpointError(f"{file.path}: its metadata are damaged: {error}", file=file.path) from error


class TensorsWriter:
    """Writes a safetensors file, one tensor after the other, under its name only once all are there.

    Args:
        path: of the file.
        tensors: key and what it will be, in the order in which they are put.
        metadata: texts.

    Raises:
        CheckpointError: from every method; nothing is left.
    """

    def __init__(
        self, path: str, tensors: Sequence[tuple[str, TensorInfo]], metadata: Mapping[str, str] = _FORMAT
    ) -> None:
        self._file = FileBeside(path)
        self._to_come = [(key, info.nbytes) for key, info in reversed(tensors)]
        self._file.write(_header_of(tensors, metadata))

    def put(self, key: str, blocks: Iterable[Array]) -> None:
        """The values of the next tensor, as flat arrays."""
        expected, nbytes = self._to_come.pop()
        assert key == expected, f"{key} before {expected}"
        for block in blocks:
            self._file.write(block.view(np.uint8), parameter=key)
            nbytes -= block.nbytes
        assert nbytes == 0, f"the blocks of {key} are {-nbytes} bytes more than its shape says"

    def close(self) -> None:
        """Everything is on the disk, but not yet under its name."""
        assert not self._to_come, f"{self._to_come[-1][0]} was never written"
        self._file.close()

    def rename(self) -> None:
        """The file takes its place; ``close`` comes first."""
        self._file.rename()

    def discard(self) -> None:
        """Leaves everything as it was. Safe to call twice, and after ``rename``."""
        self._file.discard()


def _header_of(tensors: Sequence[tuple[str, TensorInfo]], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for key, info in tensors:
        header[key] = {"dtype": SAFETENSORS[info.dtype], "shape": info.shape, "data_offsets": [end, end + info.nbytes]}
        end += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


class SafetensorsTarget:
    """Writes both files; see ``full_state.Target``."""

    def __init__(self, prefix: str, state: FullState) -> None:
        weights = [(param.structured, TensorInfo(param.info.shape, param.file_dtype)) for param in state.params]
        tied = {_TIED: json.dumps(dict(state.aliases))} if state.aliases else {}
        self._arrays: dict[str, Array] = {}
        self._weights = TensorsWriter(prefix + WEIGHTS, weights, _FORMAT | tied)
        self._optimizer: TensorsWriter | None = None
        if state.has_optimizer:
            try:
                self._optimizer = self._optimizer_of(prefix, state)
            except BaseException:
                self.discard()
                raise

    def _optimizer_of(self, prefix: str, state: FullState) -> TensorsWriter:
        encoded = values.encode(dict(state.state), where="state", prefix=_STATE_TENSORS)
        self._arrays = encoded.arrays
        tensors = [(f"{param.structured}/{_MASTER}", param.info) for param in state.params if param.has_master]
        tensors += [(f"{moment.structured}/{moment.moment}", moment.info) for moment in state.moments]
        tensors += [(name, values.info(array)) for name, array in encoded.arrays.items()]
        return TensorsWriter(prefix + OPTIMIZER_STATE, tensors, {**_FORMAT, _STATE: json.dumps(encoded.json)})

    def weight(self, param: FullParam, blocks: Iterable[Array]) -> None:
        self._weights.put(param.structured, blocks)

    def master(self, param: FullParam, blocks: Iterable[Array]) -> None:
        assert self._optimizer is not None
        self._optimizer.put(f"{param.structured}/{_MASTER}", blocks)

    def moment(self, moment: FullMoment, blocks: Iterable[Array]) -> None:
        assert self._optimizer is not None
        self._optimizer.put(f"{moment.structured}/{moment.moment}", blocks)

    def commit(self) -> None:
        if self._optimizer is not None:
            for name, array in self._arrays.items():
                self._optimizer.put(name, flat_blocks(array))
        put_in_place(self._weights, self._optimizer)

    def discard(self) -> None:
        discard_both(self._weights, self._optimizer)
