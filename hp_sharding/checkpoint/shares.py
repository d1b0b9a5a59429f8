"""Which bytes of the state this rank writes: each byte of it once, and every rank about as many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import paddle

from ..moments import moments_of
from ..precision import dtype_name
from .held import Held, Part
from .ranks import Ranks, share_out
from .source import OPTIMIZER, SPLIT_MARK, TensorInfo

PIECE_BYTES = 1 << 26
"""What several ranks hold is cut into pieces of at most this size before it is shared out between them."""


class Share(NamedTuple):
    """Elements ``start`` to ``stop`` of a logical tensor: those of ``tensor``, which is flat or of their shape."""

    name: str
    info: TensorInfo
    start: int
    stop: int
    tensor: paddle.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return (self.stop - self.start) * self.tensor.element_size()


class _Group(NamedTuple):
    """Ranks that hold the same bytes: how many they are, and which of them this one is."""

    n_ranks: int
    rank: int


def own_shares(held: Held) -> list[Share]:
    """What this rank writes of what ``held`` holds: parameters, buffers, and what the optimizer keeps of them."""
    by_group: dict[_Group, list[Share]] = {}
    own = []
    for tensor in held.tensors():
        if tensor.is_running and held.ranks.is_first:
            own += [_share(tensor.name, tensor.info, part.start, part.tensor) for part in tensor.parts]
    for is_shared, share in _all_shares(held):
        group = _group(held.ranks, is_shared=is_shared, is_split=SPLIT_MARK in share.name)
        by_group.setdefault(group, []).extend(_cut(share) if group.n_ranks > 1 else [share])
    for group, shares in by_group.items():
        owners = share_out([share.nbytes for share in shares], group.n_ranks)
        own += [share for share, owner in zip(shares, owners, strict=True) if owner == group.rank]
    return own


def _group(ranks: Ranks, *, is_shared: bool, is_split: bool) -> _Group:
    """``is_shared``: every data rank holds it whole. ``is_split``: each tensor-parallel rank has another one."""
    n_ranks, rank = ranks.replicate[1], ranks.replicate[0]
    if is_shared:
        n_ranks, rank = n_ranks * ranks.shard[1], rank * ranks.shard[1] + ranks.shard[0]
    if not is_split:
        n_ranks, rank = n_ranks * ranks.tensor[1], ranks.tensor[0] * n_ranks + rank
    return _Group(n_ranks, rank)


def _all_shares(held: Held) -> Iterator[tuple[bool, Share]]:
    """Everything but what is the first rank's, and whether every data rank has it whole."""
    for tensor in held.tensors():
        for part in tensor.parts if not tensor.is_running else ():
            yield tensor.place is None, _share(tensor.name, tensor.info, part.start, part.tensor)
    for updated in held.updated():
        for part in updated.parts:
            for share in _moment_shares(held, f"{OPTIMIZER}{updated.name}/", updated.shape, part):
                yield updated.place is None, share


def _moment_shares(held: Held, prefix: str, shape: tuple[int, ...], part: Part) -> Iterator[Share]:
    for moment in moments_of(held.inner, part.tensor):
        tensor = moment.tensor
        whole = TensorInfo(moment.kind.shape_of(shape), dtype_name(tensor))
        name = prefix + moment.name
        if not moment.per_element:
            if part.start == 0:  # every slice has the same
                yield _share(name, whole, 0, tensor)
        elif not moment.rows:
            yield _share(name, whole, part.start, tensor)
        else:
            numel = whole.numel // moment.rows
            for row in range(moment.rows):
                yield _share(name, whole, row * numel + part.start, tensor._slice(row, row + 1))


def _share(name: str, info: TensorInfo, start: int, tensor: paddle.Tensor) -> Share:
    return Share(name, info, start, start + tensor.size, tensor)


def _cut(share: Share) -> Iterator[Share]:
    step = PIECE_BYTES // share.tensor.element_size()
    if share.stop - share.start <= step:
        yield share
        return
    flat = share.tensor.detach().reshape([-1])
    for start in range(0, flat.size, step):
        piece = flat._slice(start, min(start + step, flat.size))
        yield _share(share.name, share.info, share.start + start, piece)
