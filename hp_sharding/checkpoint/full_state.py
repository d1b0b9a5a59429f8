"""What goes into files of whole tensors, as far as it is known before there is any data, and what such files hold.

Tensors are fetched one by one, in the order of these lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .lazy import LazyTensor
from .source import MODEL, OPTIMIZER, STORAGE, TensorInfo

Array = npt.NDArray[Any]
Fetch = Callable[[str], Array]
"""Logical name -> its whole value, of ``STORAGE``; called once for each, and not needed any more at the next call."""

Wrote = Callable[[int], None]
"""Told of the bytes of values that were written since; see ``FullState.bytes_of`` for how many there will be."""

BLOCK_NUMEL = 1 << 18
"""Elements that are rounded, compared or checked at a time."""
_WRITE_NUMEL = 1 << 22
"""Elements that are written at a time."""


class FullParam(NamedTuple):
    """A parameter or buffer.

    Attributes:
        structured: its key in ``model.state_dict()``.
        param_name: ``parameter.name``, of which Paddle makes the keys of ``.pdopt``.
        info: what is fetched.
        file_dtype: what the file of weights gets. Where ``info`` says otherwise, it is rounded to that, and what was
            fetched is saved as the float32 master weight beside the optimizer's state.
    """

    structured: str
    param_name: str
    info: TensorInfo
    file_dtype: str

    @property
    def has_master(self) -> bool:
        """Whether a float32 master is saved apart."""
        return self.file_dtype != self.info.dtype


class FullMoment(NamedTuple):
    """What the optimizer keeps of a parameter: ``optimizer/<structured>/<moment>``."""

    structured: str
    moment: str
    info: TensorInfo


class FullState(NamedTuple):
    """All that is saved.

    Attributes:
        params: in the order of ``model.state_dict()``, tied ones once.
        aliases: structured names of tied parameters -> the one under which it is in ``params``.
        moments: empty where the optimizer keeps nothing.
        has_optimizer: whether there is an optimizer, and so a second file.
        optimizer_name: ``name`` that the user gave the optimizer, if any; Paddle puts it into the keys.
        state: what is not tensors, as ``TensorSource.state``. ``.pdopt`` has room for ``lr_scheduler`` only.
    """

    params: Sequence[FullParam]
    aliases: Mapping[str, str] = {}
    moments: Sequence[FullMoment] = ()
    has_optimizer: bool = False
    optimizer_name: str = ""
    state: Mapping[str, Any] = {}

    @property
    def has_masters(self) -> bool:
        """Whether any float32 master goes to the optimizer's file."""
        return self.has_optimizer and any(param.has_master for param in self.params)

    def bytes_of(self, param: FullParam) -> int:
        """How much is written of a parameter, with its master."""
        weight = TensorInfo(param.info.shape, param.file_dtype).nbytes
        return weight + (param.info.nbytes if param.has_master and self.has_optimizer else 0)

    def aliases_of(self, structured: str) -> list[str]:
        """The other names of a tied parameter."""
        return [alias for alias, first in self.aliases.items() if first == structured]


class Found(NamedTuple):
    """What is in the files of one prefix, by logical names as in ``source``."""

    tensors: dict[str, LazyTensor]
    aliases: dict[str, str]
    state: dict[str, Any]


class FileWriter(Protocol):
    """A file that appears under its name when it is complete."""

    def close(self) -> None:
        """All of it is on the disk."""

    def rename(self) -> None:
        """It takes its place."""

    def discard(self) -> None:
        """It goes. Safe after ``rename``."""


def put_in_place(weights: FileWriter, optimizer: FileWriter | None) -> None:
    """Both are on the disk before the first takes its place; the weights come last."""
    in_order = [weights] if optimizer is None else [optimizer, weights]
    for file in in_order:
        file.close()
    for file in in_order:
        file.rename()


def discard_both(weights: FileWriter, optimizer: FileWriter | None) -> None:
    """Nothing is left beside, and what was there stays."""
    weights.discard()
    if optimizer is not None:
        optimizer.discard()


class Target(Protocol):
    """Files that are written side by side, each value once and in order. Every method may raise CheckpointError."""

    def weight(self, param: FullParam, blocks: Iterable[Array]) -> None:
        """Writes it as ``file_dtype``; flat blocks."""

    def master(self, param: FullParam, blocks: Iterable[Array]) -> None:
        """Writes the float32 master of the weight that came before."""

    def moment(self, moment: FullMoment, blocks: Iterable[Array]) -> None:
        """Comes after all weights."""

    def commit(self) -> None:
        """Everything is on the disk, then the files take their places: the optimizer's first, then the weights."""

    def discard(self) -> None:
        """Leaves nothing behind. Safe after ``commit``."""


def write_to(target: Target, state: FullState, fetch: Fetch, *, wrote: Wrote | None = None) -> None:
    """Fetches everything, and writes it. One fetched tensor is held at a time.

    Raises:
        CheckpointError: it cannot be written. Unless the last rename of several failed, what was there before still is.
    """
    try:
        for param in state.params:
            array = _fetched(fetch, f"{MODEL}{param.structured}", param.info)
            target.weight(param, _telling(_as_stored(array, param), wrote))
            if param.has_master and state.has_optimizer:
                target.master(param, _telling(flat_blocks(array), wrote))
            del array
        for moment in state.moments:
            array = _fetched(fetch, f"{OPTIMIZER}{moment.structured}/{moment.moment}", moment.info)
            target.moment(moment, _telling(flat_blocks(array), wrote))
            del array
        target.commit()
    finally:
        target.discard()


def flat_blocks(array: Array) -> Iterator[Array]:
    """A contiguous array in parts, which share its memory."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, _WRITE_NUMEL):
        yield flat[start : start + _WRITE_NUMEL]


def _telling(blocks: Iterable[Array], wrote: Wrote | None) -> Iterator[Array]:
    """The blocks; whoever asks for the next one has written the one before."""
    for block in blocks:
        yield block
        if wrote is not None:
            wrote(block.nbytes)


def _fetched(fetch: Fetch, name: str, info: TensorInfo) -> Array:
    array = fetch(name)
    if array.dtype != STORAGE[info.dtype] or array.size != math.prod(info.shape):
        raise CheckpointError(
            f"{name} should be {info.dtype} of shape {list(info.shape)}, but is {array.dtype} of {list(array.shape)}",
            parameter=name,
        )
    return np.asarray(array, order="C")


def _as_stored(array: Array, param: FullParam) -> Iterator[Array]:
    if not param.has_master:
        yield from flat_blocks(array)
        return
    from .blocks import as_dtype  # imports Paddle, which the command line does not need otherwise

    flat = array.reshape(-1)
    for start in range(0, flat.size, BLOCK_NUMEL):
        yield as_dtype(flat[start : start + BLOCK_NUMEL], param.info.dtype, param.file_dtype)
