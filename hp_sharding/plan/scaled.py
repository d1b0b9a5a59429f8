"""A scale model: the units and parameters of a model with four elements each, over buckets that know their true sizes.

The real schedule runs on it. Which parameters share a bucket, and what counts its bytes, follows from the true sizes;
only the storage is small, and not split: a shard is as long as its bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import paddle
from paddle import nn
from paddle.autograd import PyLayer

from ..layout import ITEM_BYTES, BucketLayout, BucketRules, ParamSpec, Slot, plan_buckets
from ..pool import StoragePool
from .profile import Param, Profile, Unit

_SHAPE = [2, 2]
_NUMEL = 4
"""More than one: a vector of one element is a case of its own while it is freed."""


class Use(NamedTuple):
    """Parameters that a unit's forward looks up together, and what it then takes.

    Attributes:
        unit: its name.
        params: (layer, attribute) each.
        names: the true names of those that are the unit's own.
        forward_s: of compute.
        backward_s: likewise.
        activation_bytes: from its forward to its backward.
        transient_bytes: while either runs.
    """

    unit: str
    params: tuple[tuple[nn.Layer, str], ...]
    names: tuple[str, ...]
    forward_s: float
    backward_s: float
    activation_bytes: float
    transient_bytes: float


class Player(Protocol):
    """Told by the scale model what it does: there costs become time and memory."""

    def forward(self, use: Use, *, keeps: bool) -> None:
        """The parameters are there; the compute of a forward begins. ``keeps``: a backward comes of it."""

    def backward(self, use: Use) -> None:
        """All that comes after it has been differentiated; the compute of its backward begins."""


class _Run(PyLayer):
    """What stands for compute: passes its input on, and gives every parameter a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, player: Player, use: Use, *params: paddle.Tensor) -> paddle.Tensor:
        ctx.player, ctx.use = player, use
        ctx.wanted = [None if tensor.stop_gradient else tensor.dtype for tensor in (x, *params)]
        player.forward(use, keeps=any(dtype is not None for dtype in ctx.wanted))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> Any:
        ctx.player.backward(ctx.use)
        return tuple(None if dtype is None else paddle.zeros(_SHAPE, dtype) for dtype in ctx.wanted)


class ScaledUnit(nn.Layer):
    """One unit.

    Attributes:
        places: of each of its parameters, by true name, the layer that holds it and under which attribute.
        uses: what a forward does, in order.
    """

    def __init__(self, unit: Unit, player: Player) -> None:
        super().__init__()
        self.unit = unit
        self.player = player
        self.places: dict[str, tuple[nn.Layer, str]] = {}
        self.uses: list[Use] = []
        self._holders: dict[str, nn.Layer] = {}
        for param in unit.params:
            self._hold(param)

    def _hold(self, param: Param) -> None:
        """Under names of its own: those of parameters may be any, such as that of an attribute here."""
        path = param.name.removeprefix(f"{self.unit.name}.").rpartition(".")[0]
        holder = self._holders.get(path) if path else self
        if holder is None:
            holder = self._holders[path] = nn.Layer()
            self.add_sublayer(f":{len(self._holders)}", holder)
        leaf = f"param{len(self.places)}"
        made = holder.create_parameter(
            _SHAPE, dtype=param.dtype, default_initializer=nn.initializer.Constant(0.0)
        )  # fmt: skip
        made.stop_gradient = param.frozen
        holder.add_parameter(leaf, made)
        self.places[param.name] = (holder, leaf)

    def groups(self) -> list[list[Param]]:
        """Parameters that one layer holds, in order."""
        by_layer: dict[int, list[Param]] = {}
        for param in self.unit.params:
            by_layer.setdefault(id(self.places[param.name][0]), []).append(param)
        return list(by_layer.values())

    def run(self, x: paddle.Tensor, use: Use) -> paddle.Tensor:
        """Looks the use's parameters up and takes its time."""
        params = [getattr(layer, name) for layer, name in use.params]
        return _Run.apply(x, self.player, use, *params)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Passes ``x`` on."""
        for use in self.uses:
            x = self.run(x, use)
        return x


class ScaledModel(ScaledUnit):
    """The model itself: its own parameters are looked up first, and what it does besides comes after all units."""

    def __init__(self, profile: Profile, player: Player) -> None:
        root, *others = profile.units
        super().__init__(root, player)
        self.order = [ScaledUnit(unit, player) for unit in _in_order(others)]
        for unit in self.order:
            self.add_sublayer(unit.unit.name, unit)
        places = {name: place for unit in (self, *self.order) for name, place in unit.places.items()}
        for unit in self.order:
            unit.uses = _uses(unit, places)
        self.last = _use(root, root.borrows, places, share=1.0)
        first = [[param.name for param in group if param.name not in root.borrows] for group in self.groups()]
        self.uses = [_use(root, names, places, share=0.0) for names in first if names]
        structured = {id(param): name for name, param in self.named_parameters()}
        self.true_params = {structured[id(getattr(*places[param.name]))]: param for param in profile.params}

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Passes ``x`` on."""
        x = super().forward(x)
        for unit in self.order:
            x = unit(x)
        return self.run(x, self.last)


def build_model(profile: Profile, player: Player) -> ScaledModel:
    """The scale model, a class of the model's name."""
    kind = type(profile.name, (ScaledModel,), {})
    return kind(profile, player)


def _in_order(units: Sequence[Unit]) -> list[Unit]:
    """A unit without parameters comes after those inside it, such as a decoder after its blocks.

    Before them it would come before all that trains, so that it had no backward.
    """

    def place(number: int) -> tuple[int, int]:
        name, params, *_ = units[number]
        inside = [other for other, unit in enumerate(units) if unit.name.startswith(f"{name}.") and not params]
        return (max([number, *inside]), -number)

    return [units[number] for number in sorted(range(len(units)), key=place)]


def _uses(unit: ScaledUnit, places: dict[str, tuple[nn.Layer, str]]) -> list[Use]:
    """The unit's costs dealt out to its layers by the elements of their matrices; all at once if it has none."""
    groups = [[param.name for param in group] for group in unit.groups()]
    weights = [sum(param.numel for param in group if len(param.shape) > 1) for group in unit.groups()]
    if unit.unit.borrows:
        groups.append(list(unit.unit.borrows))
        weights.append(0)
    if not groups:
        groups, weights = [[]], [0]
    total = sum(weights)
    shares = [weight / total if total else 1 / len(groups) for weight in weights]
    return [_use(unit.unit, group, places, share=share) for group, share in zip(groups, shares, strict=True)]


def _use(unit: Unit, names: Sequence[str], places: dict[str, tuple[nn.Layer, str]], *, share: float) -> Use:
    assert unit.forward_s is not None and unit.backward_s is not None, unit.name
    return Use(
        unit.name,
        tuple(places[name] for name in names),
        tuple(name for name in names if name not in unit.borrows),
        share * unit.forward_s,
        share * unit.backward_s,
        share * unit.activation_bytes,
        unit.transient_bytes if share else 0.0,
    )


# -- buckets -----------------------------------------------------------------------------------------------------------


class ScaledLayout(BucketLayout):
    """A bucket whose storage is small and whose bytes are those of ``true``."""

    true: BucketLayout

    @classmethod
    def of(cls, true: BucketLayout, numel: int) -> ScaledLayout:
        """With so many elements, at least four for each parameter."""
        slots = tuple(Slot(slot.param, index * _NUMEL, _NUMEL) for index, slot in enumerate(true.slots))
        found = cls(*true._replace(slots=slots, numel=numel, nranks=1))
        found.true = true
        return found

    @property
    def nbytes(self) -> int:
        """See ``BucketLayout``."""
        return self.true.nbytes

    @property
    def gradient_nbytes(self) -> int:
        """See ``BucketLayout``."""
        return self.true.gradient_nbytes

    @property
    def shard_nbytes(self) -> int:
        """See ``BucketLayout``."""
        return self.true.shard_nbytes

    @property
    def sum_nbytes(self) -> int:
        """See ``BucketLayout``."""
        return self.true.sum_nbytes


class Scaling:
    """Lays buckets out by true sizes, and knows them by the numbers of elements that their storage has.

    Attributes:
        layouts: once laid out.
        layout_of: of each parameter, by its true name.
    """

    def __init__(self, true_params: dict[str, Param], nranks: int) -> None:
        self.layouts: list[ScaledLayout] = []
        self.layout_of: dict[str, ScaledLayout] = {}
        self._true_params = true_params
        self._nranks = nranks
        self._numel = {param.name: param.numel for param in true_params.values()}
        self._by_numel: dict[int, BucketLayout] = {}

    def lay_out(self, specs: Sequence[ParamSpec], units: Sequence[str], rules: BucketRules) -> list[BucketLayout]:
        """See ``layout.plan_buckets``; ``specs`` are those of the scale model."""
        params = [self._true_params[spec.name] for spec in specs]
        true_specs = [
            spec._replace(name=param.name, numel=param.numel) for spec, param in zip(specs, params, strict=True)
        ]
        for true in plan_buckets(true_specs, units, rules._replace(nranks=self._nranks)):
            numel = len(true.slots) * _NUMEL
            while numel in self._by_numel:
                numel += 1
            self._by_numel[numel] = true
            self.layouts.append(ScaledLayout.of(true, numel))
            for slot in true.slots:
                self.layout_of[params[slot.param].name] = self.layouts[-1]
        return list(self.layouts)

    def gradient_bytes(self, name: str) -> int:
        """Of the local gradient of a parameter, by its true name."""
        return self._numel[name] * ITEM_BYTES[self.layout_of[name].dtypes.gradient] if name in self.layout_of else 0

    def true_bytes(self, numel: int, dtype: str) -> int:
        """Of storage for a whole bucket that has so many elements here."""
        return self._by_numel[numel].numel * ITEM_BYTES[dtype]


class LedgerPool(StoragePool):
    """Keeps blocks of the true sizes, as a pool does, without the memory: what it gives out is small.

    Args:
        look: called when a block was given out.
    """

    # What is copied by address has the length of a bucket's true bytes, of which there are not as many here.
    on_host = False

    def __init__(self, scaling: Scaling, look: Callable[[], None]) -> None:
        super().__init__()
        self._scaling = scaling
        self._look = look

    def alloc(self, numel: int, dtype: str) -> paddle.Tensor:
        """See ``StoragePool``."""
        block = self._take(self._scaling.true_bytes(numel, dtype))
        self._look()
        view = np.zeros([numel * ITEM_BYTES[dtype]], np.uint8).view(_STORED[dtype])
        return self._lend(block, view, dtype)

    @staticmethod
    def _make_block(nbytes: int) -> Any:
        # One byte, seen as often as it takes.
        return np.broadcast_to(np.zeros([1], np.uint8), [nbytes])


_STORED = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
