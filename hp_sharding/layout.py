"""Where every parameter lies: parameters -> units -> buckets -> padded shards. Arithmetic only, no Paddle.

A bucket is one flat run of elements of one dtype. Inside it every parameter starts at a 512-byte-aligned offset, and
only the *end* is padded, to a multiple of ``nranks * 512`` bytes, so that it splits into ``nranks`` equal, aligned
shards. A parameter is never split between buckets; it may well be split between shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

ALIGNMENT_BYTES = 512
"""Start of every parameter in its bucket and of every bucket's shard in the arena (as cuBLAS and HCCL like it)."""

TAPER = 4
"""Towards both ends of the forward's order buckets get smaller, down to 1/4 of the buffer size. What hides the gather
and the reduction of the first ones is their shortness alone; and where the link is the slower side, the compute of the
last one begins when all gathers are over."""


ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Of the dtypes that can train."""


class Dtypes(NamedTuple):
    """What one bucket is made of, by name such as ``"float32"``; all the same unless precision is mixed.

    Attributes:
        param: of the full tensor, and so of the parameters: what the layers compute with.
        shard: of this rank's persistent shard, which the optimizer updates.
        gather: what travels in the all-gather.
        gradient: of the full local gradient, in which micro-batches add up.
        reduce: what travels in the reduction.
        sum: of the reduced gradient of the shard; that of the shard, or what the shard becomes when it thaws.
    """

    param: str
    shard: str
    gather: str
    gradient: str
    reduce: str
    sum: str

    @classmethod
    def of_one(cls, dtype: str) -> Dtypes:
        """All of one dtype."""
        return cls(*[dtype] * len(cls._fields))

    @property
    def shard_is_slice(self) -> bool:
        """Whether the shard can be the full tensor's own slice, which then holds what the shard must hold."""
        return self.param == self.shard == self.gather


class ParamSpec(NamedTuple):
    """What the layout needs to know of one parameter.

    Attributes:
        name: structured name, as in ``model.state_dict()``.
        numel: elements, at least 1.
        dtype: name of the dtype that it has while gathered, such as ``"float32"``.
        itemsize: bytes of one element.
        unit: index of its unit, in the order in which the model holds the units.
        frozen: True where it takes no gradient when wrapped; such parameters get buckets of their own.
        dtypes: where precision is mixed; ``dtypes.param`` is ``dtype``.
    """

    name: str
    numel: int
    dtype: str
    itemsize: int
    unit: int
    frozen: bool
    dtypes: Dtypes | None = None

    @property
    def all_dtypes(self) -> Dtypes:
        """``dtypes``, or ``dtype`` everywhere."""
        return self.dtypes or Dtypes.of_one(self.dtype)


class Slot(NamedTuple):
    """One parameter's place in its bucket: ``param`` indexes the list given to ``plan_buckets``."""

    param: int
    offset_numel: int
    numel: int

    @property
    def end_numel(self) -> int:
        """The first element behind it."""
        return self.offset_numel + self.numel


class Piece(NamedTuple):
    """The part of one slot that lies in one rank's shard, in elements."""

    slot: int
    shard_offset_numel: int
    param_offset_numel: int
    numel: int


class BucketLayout(NamedTuple):
    """One bucket: its dtype, its slots in order, its padded size.

    Attributes:
        number: place in registration order, which is the first guess of the forward's order.
        name: for people: the unit it belongs to, or the first and last one.
        dtype: of the full tensor, ``dtypes.param``; ``itemsize`` are the bytes of its elements.
        units: indices of the units whose parameters it holds.
        numel: elements with padding, a multiple of ``nranks``.
        nranks: shards it splits into.
        dtypes: of everything that belongs to the bucket.
    """

    number: int
    name: str
    dtype: str
    itemsize: int
    frozen: bool
    units: tuple[int, ...]
    slots: tuple[Slot, ...]
    numel: int
    nranks: int
    dtypes: Dtypes

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return self.numel // self.nranks

    @property
    def nbytes(self) -> int:
        """Bytes of the whole bucket with padding, gathered."""
        return self.numel * self.itemsize

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of its full local gradient."""
        return self.numel * ITEM_BYTES[self.dtypes.gradient]

    @property
    def shard_nbytes(self) -> int:
        """Bytes of one rank's shard."""
        return self.shard_numel * ITEM_BYTES[self.dtypes.shard]

    @property
    def sum_nbytes(self) -> int:
        """Bytes of the reduced gradient of one rank's shard."""
        return self.shard_numel * ITEM_BYTES[self.dtypes.sum]

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of padding, as (start, end) in elements; they hold zero in every gradient."""
        starts = [0, *(slot.end_numel for slot in self.slots)]
        ends = [*(slot.offset_numel for slot in self.slots), self.numel]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]

    def pieces(self, rank: int) -> list[Piece]:
        """What shard ``rank`` holds of each parameter, in order; parameters it does not touch are left out."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        pieces = []
        for index, slot in enumerate(self.slots):
            start, end = max(low, slot.offset_numel), min(high, slot.end_numel)
            if start < end:
                pieces.append(Piece(index, start - low, start - slot.offset_numel, end - start))
        return pieces


class BucketRules(NamedTuple):
    """How parameters become buckets.

    Attributes:
        nranks: shards of each bucket.
        buffer_bytes: size at which a larger unit is split, and up to which small units are merged.
        fusion: False puts every parameter into a bucket of its own.
        merge_units: whether whole small units may share a bucket.
    """

    nranks: int
    buffer_bytes: int
    fusion: bool
    merge_units: bool


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def plan_buckets(params: Sequence[ParamSpec], unit_names: Sequence[str], rules: BucketRules) -> list[BucketLayout]:
    """Buckets of all ``params``, in an order that depends on nothing but the arguments (so it is every rank's).

    Args:
        params: in registration order, each parameter once.
        unit_names: name of each unit, for the buckets' names.
        rules: see ``BucketRules``.
    """
    groups: list[list[int]] = []
    for family in _families(params):
        groups.extend(_group(family, params, rules))
    groups.sort(key=lambda members: members[0])
    return [_lay_out(index, members, params, unit_names, rules.nranks) for index, members in enumerate(groups)]


def _families(params: Sequence[ParamSpec]) -> Iterable[list[int]]:
    """Parameters that may share a bucket: of the same dtypes, and frozen ones apart from those that train."""
    families: dict[tuple[Dtypes, bool], list[int]] = {}
    for index, spec in enumerate(params):
        families.setdefault((spec.all_dtypes, spec.frozen), []).append(index)
    return families.values()


def _group(family: list[int], params: Sequence[ParamSpec], rules: BucketRules) -> list[list[int]]:
    if not rules.fusion:
        return [[index] for index in family]
    units: dict[int, list[int]] = {}
    for index in family:
        units.setdefault(params[index].unit, []).append(index)
    if not rules.merge_units:
        return [part for members in units.values() for part in _split(members, params, rules.buffer_bytes)]
    return _merge(list(units.values()), params, rules.buffer_bytes)


def _merge(units: list[list[int]], params: Sequence[ParamSpec], buffer_bytes: int) -> list[list[int]]:
    """Whole neighbouring units together; a unit that is too large for one bucket in several of its own."""
    row = _TaperedRow(buffer_bytes, sum(_bytes(members, params) for members in units))
    for members in units:
        unit_bytes = _bytes(members, params)
        if row.has_room(unit_bytes) or unit_bytes <= row.next_limit_bytes():
            row.put(members, unit_bytes)
            continue
        row.close()
        for index in members:
            row.put([index], _bytes([index], params))
        row.close()
    return row.groups


class _TaperedRow:
    """Buckets that are filled one after the other, and are smaller towards both ends (see ``TAPER``)."""

    def __init__(self, buffer_bytes: int, total_bytes: int) -> None:
        self.groups: list[list[int]] = []
        self._buffer_bytes = buffer_bytes
        self._before_bytes = 0
        self._after_bytes = total_bytes
        self._limit_bytes = 0
        self._filled_bytes = 0

    def next_limit_bytes(self) -> int:
        """Of a bucket that begins here: no more than all before it, and than half of what is left."""
        tapered_bytes = min(self._before_bytes, self._after_bytes // 2, self._buffer_bytes)
        return max(tapered_bytes, self._buffer_bytes // TAPER)

    def has_room(self, nbytes: int) -> bool:
        """Whether so much fits into the bucket that was filled last."""
        return self._filled_bytes + nbytes <= self._limit_bytes

    def put(self, members: list[int], nbytes: int) -> None:
        """Adds parameters to that bucket, or to a new one if they do not fit."""
        if not self.has_room(nbytes):
            self.groups.append([])
            self._limit_bytes, self._filled_bytes = self.next_limit_bytes(), 0
        self.groups[-1].extend(members)
        self._filled_bytes += nbytes
        self._before_bytes += nbytes
        self._after_bytes -= nbytes

    def close(self) -> None:
        """What comes next gets a new bucket."""
        self._limit_bytes = 0


def _split(members: list[int], params: Sequence[ParamSpec], buffer_bytes: int) -> list[list[int]]:
    """Consecutive parameters, a new bucket where the next one would not fit; one larger than that stands alone."""
    parts: list[list[int]] = []
    filled_bytes = 0
    for index in members:
        param_bytes = _bytes([index], params)
        if not parts or filled_bytes + param_bytes > buffer_bytes:
            parts.append([])
            filled_bytes = 0
        parts[-1].append(index)
        filled_bytes += param_bytes
    return parts


def _bytes(members: Iterable[int], params: Sequence[ParamSpec]) -> int:
    return sum(round_up(params[index].numel * params[index].itemsize, ALIGNMENT_BYTES) for index in members)


def _lay_out(
    index: int, members: list[int], params: Sequence[ParamSpec], unit_names: Sequence[str], nranks: int
) -> BucketLayout:
    first = params[members[0]]
    # Everything that is cut in the same places is aligned, the narrowest included.
    aligned_numel = ALIGNMENT_BYTES // min(ITEM_BYTES[name] for name in first.all_dtypes)
    slots = []
    offset_numel = 0
    for member in members:
        slots.append(Slot(member, offset_numel, params[member].numel))
        offset_numel = round_up(offset_numel + params[member].numel, aligned_numel)
    units = tuple(dict.fromkeys(params[member].unit for member in members))
    return BucketLayout(
        number=index,
        name=_bucket_name(index, members, params, [unit_names[unit] for unit in units]),
        dtype=first.dtype,
        itemsize=first.itemsize,
        frozen=first.frozen,
        units=units,
        slots=tuple(slots),
        numel=round_up(slots[-1].end_numel, nranks * aligned_numel),
        nranks=nranks,
        dtypes=first.all_dtypes,
    )


def _bucket_name(index: int, members: list[int], params: Sequence[ParamSpec], units: list[str]) -> str:
    if len(members) == 1:
        where = params[members[0]].name
    else:
        where = units[0] if len(units) == 1 else f"{units[0]}..{units[-1]}"
    return f"{index}:{where}"


def sorted_by_first(of_buckets: Sequence[Sequence[T]], order: Sequence[T], known: Sequence[int]) -> list[int]:
    """Buckets by the first in ``order`` of the parameters that each has; others come last, as ``known`` has them."""
    places = {param: place for place, param in enumerate(order)}
    firsts = [min((places.get(param, len(places)) for param in params), default=len(places)) for params in of_buckets]
    return sorted(known, key=firsts.__getitem__)


class ModelStateBytes(NamedTuple):
    """Bytes of model state on one rank, by the formula of each stage; see ``model_state_bytes``."""

    parameters: int
    gradients: int
    gradient_shard: int
    shard: int
    moments: int

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self)


def model_state_bytes(
    buckets: Sequence[BucketLayout], stage: int, *, keeps_full: bool, moment_bytes: int, units_ahead: int = 0
) -> ModelStateBytes:
    """Bytes that stay between steps: stage 1 ``(b+g)P + (g+o+m)P/S``, stage 2 ``bP + (g+o+m)P/S`` and two
    buckets of gradients, whose storage is kept for the next backward; stage 3 ``(g+o+m)P/S``, the same two buckets, and
    ``1 + units_ahead`` units of parameters, the largest that stand side by side.

    ``b`` and ``g`` are bytes of a parameter and a gradient, ``o`` those of a persistent shard (none where the shard is
    a slice of the full tensor), ``m`` = ``moment_bytes`` the optimizer's moments for each element (Adam: 8). In mixed
    precision a reduced gradient has the bytes of the shard that it updates, not ``g``. Where the full tensor is freed
    between steps (``keeps_full`` False), ``bP`` counts only while gathered. The formula follows the ZeRO paper
    (Rajbhandari et al., 2020), with padding counted as it is laid out.
    """
    full = sum(bucket.nbytes for bucket in buckets) if stage < 3 else _largest_run_bytes(buckets, 1 + units_ahead)
    trained = [bucket for bucket in buckets if not bucket.frozen]
    trained_full = sum(bucket.gradient_nbytes for bucket in trained)
    in_flight = 2 * max((bucket.gradient_nbytes for bucket in trained), default=0)
    apart = [bucket for bucket in buckets if not (keeps_full and bucket.dtypes.shard_is_slice)]
    return ModelStateBytes(
        parameters=full,
        gradients=trained_full if stage == 1 else min(in_flight, trained_full),
        gradient_shard=sum(bucket.sum_nbytes for bucket in trained),
        shard=sum(bucket.shard_nbytes for bucket in apart),
        moments=sum(bucket.shard_numel for bucket in trained) * moment_bytes,
    )


def _largest_run_bytes(buckets: Sequence[BucketLayout], n_units: int) -> int:
    """Bytes of the largest run of ``n_units`` neighbouring units."""
    of_unit: dict[int, int] = {}
    for bucket in buckets:
        of_unit[bucket.units[0]] = of_unit.get(bucket.units[0], 0) + bucket.nbytes
    sizes = list(of_unit.values())
    return max(sum(sizes[start : start + n_units]) for start in range(len(sizes)))
