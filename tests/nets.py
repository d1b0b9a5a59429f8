"""Nets from descriptions: plain data says what a net holds and in which order it runs; all ranks build the same one.

A net of a linear layer that runs twice, the second time under recompute, and of a block that holds the same layer::

    net = Net(width=3, parts=(Part("linear"), Part("block", inner=(Part("same"),))),
              paths=((Call(0), Call(0, "recompute"), Call(1)),))
    model = build(net)
    loss = loss_of(model, paddle.ones([2, 3]), path=0)

Every part maps [batch, width] to [batch, width].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed.fleet.utils import recompute

OUT = 2
"""Features of a head."""


class Part(NamedTuple):
    """A layer that the net holds.

    Attributes:
        kind: one of ``LEAVES``; "same" for an earlier leaf once more; "sequential" or "block" of ``inner`` parts.
        size: of what is inside, at least 1; of "same", which leaf; of a block, the form of its output.
        frozen: whether the parameters of a leaf, or the own one of a block or an "aside", are not trained.
        tied: whether the weight is that of the first leaf with such a weight.
        place: how the net holds it, one of ``PLACES``; without effect on inner parts.
        inner: parts of a "sequential", leaves all, or of a "block", which may be empty.
    """

    kind: str
    size: int = 1
    frozen: bool = False
    tied: bool = False
    place: str = "attribute"
    inner: tuple[Part, ...] = ()


class Call(NamedTuple):
    """One part of the net run once, in one of ``MODES``."""

    part: int
    mode: str = "call"


class Head(NamedTuple):
    """Another output.

    Attributes:
        after: taken after so many calls, counted on from the beginning where a path has fewer.
        used: whether the loss knows of it.
    """

    after: int = 0
    used: bool = True


class Net(NamedTuple):
    """A model.

    Attributes:
        width: features of what goes in, of what goes from part to part, and of the first output.
        parts: the layers.
        paths: orders of calls; a forward takes one of them. A part may stand in none.
        heads: outputs besides the last part's.
        gains: parameters of the net itself, by which the last part's output is multiplied: 0, 1 or ``width``.
        structure: what the forward returns, one of ``STRUCTURES``.
        input_grad: whether the input has a gradient too.
    """

    width: int
    parts: tuple[Part, ...]
    paths: tuple[tuple[Call, ...], ...]
    heads: tuple[Head, ...] = ()
    gains: int = 0
    structure: str = "tuple"
    input_grad: bool = False


def build(net: Net) -> nn.Layer:
    """The model, with values from Paddle's random generator; no parameter begins at zero."""
    model = _Model(net)
    with paddle.no_grad():
        for param in model.parameters():
            param.set_value(paddle.rand(param.shape) - 0.5)
    return model


def always_trains(net: Net) -> bool:
    """Whether on every path something with a gradient runs: else the loss may have no backward.

    Cautious: what runs under ``no_grad``, or in a recompute that gives gradients only to what has some before it, does
    not count, nor does what is held a second time.
    """
    if net.gains:
        return True
    modes = ("call", "in place", "recompute", "functional")
    return all(any(call.mode in modes and _trains(net.parts[call.part]) for call in path) for path in net.paths)


def _trains(part: Part) -> bool:
    if part.kind == "sequential":
        return any(map(_trains, part.inner))
    return part.kind != "same" and not part.frozen


def loss_of(model: nn.Layer, x: paddle.Tensor, path: int) -> paddle.Tensor:
    """The sum over the outputs that count, and over what blocks have kept as an attribute."""
    net = model.net
    blocks = [layer for layer in model.sublayers() if isinstance(layer, Block)]
    for block in blocks:
        block.auxiliary = []
    x.stop_gradient = not net.input_grad
    outputs = _tensors(model(x, path))
    used = [True, *(head.used for head in net.heads)]
    loss = sum(output.square().mean() for output, counts in zip(outputs, used, strict=True) if counts)
    return loss + sum(kept for block in blocks for kept in block.auxiliary)


# -- leaves -----------------------------------------------------------------------------------------------------------


class _Bottleneck(nn.Layer):
    """Two matrices, narrow between them; a bias may have fewer elements than there are ranks."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, size)
        self.up = nn.Linear(size, width, bias_attr=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.up(F.gelu(self.down(x)))


class _Scale(nn.Layer):
    """One number, with or without a dimension."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.scale = self.create_parameter([1] if size % 2 else [])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x * self.scale


class _Vectors(nn.Layer):
    """Parameters in a list, used in another order."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([self.create_parameter([width]) for _ in range(size)])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for index in reversed(range(len(self.vectors))):
            x = F.sigmoid(x) + self.vectors[index]
        return x


class _Lookup(nn.Layer):
    """A table of which each row of the batch takes one."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, width)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.table(paddle.arange(x.shape[0]) % self.table.weight.shape[0])


class _Views(nn.Linear):
    """Works on views of its parameters only, which autograd keeps."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__(width, width)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        cut = x.shape[1] // 2
        upper = paddle.matmul(x[:, :cut], self.weight[:cut]) if cut else 0.0
        return upper + paddle.matmul(x[:, cut:], self.weight.T[:, cut:], transpose_y=True) + self.bias.unsqueeze(0)


class Aside(nn.Layer):
    """Adds what does not depend on its input: the number of its own is used between an inner layer and the output."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, width)
        self.scale = self.create_parameter([width])
        self.size = size

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.linear(paddle.ones([x.shape[0], self.size])) * self.scale


LEAVES: dict[str, Callable[[int, int], nn.Layer]] = {
    "linear": lambda width, size: nn.Linear(width, width),
    "bottleneck": _Bottleneck,
    "norm": lambda width, size: nn.LayerNorm(width),
    "scale": _Scale,
    "vectors": _Vectors,
    "lookup": _Lookup,
    "views": _Views,
    "aside": Aside,
}


# -- blocks and the net -----------------------------------------------------------------------------------------------


@dataclass
class _Pair:
    """A structure that no library knows how to walk through."""

    first: paddle.Tensor
    second: paddle.Tensor


class Block(nn.Layer):
    """Other parts and a number of its own; what it returns has a form, and something for the loss stays behind."""

    def __init__(self, form: int, layers: list[nn.Layer]) -> None:
        super().__init__()
        self.layers = nn.LayerList(layers)
        self.gain = self.create_parameter([1])
        self.form = form % 4
        self.auxiliary: list[paddle.Tensor] = []

    def forward(self, x: paddle.Tensor) -> Any:
        for layer in self.layers:
            x = paddle.tanh(_first(layer(x))) + 0.5 * x
        y = x * self.gain
        if self.form % 2:
            # Not of y, which may be changed in place.
            self.auxiliary = [(self.gain * x.square().mean()).sum() * 0.1]
        # The second one goes nowhere: its gradient never comes.
        second = x + self.gain
        return [y, (y, second), {"first": y, "second": second}, _Pair(y, second)][self.form]


def _first(output: Any) -> paddle.Tensor:
    return _tensors(output)[0]


def _tensors(output: Any) -> list[paddle.Tensor]:
    if isinstance(output, paddle.Tensor):
        return [output]
    values = (
        output if isinstance(output, (tuple, list)) else (output if isinstance(output, dict) else vars(output)).values()
    )
    return [tensor for value in values for tensor in _tensors(value)]


STRUCTURES: dict[str, Callable[[list[paddle.Tensor]], Any]] = {
    "tuple": tuple,
    "dict": lambda outputs: {f"output {index}": output for index, output in enumerate(outputs)},
    "nested": lambda outputs: {"first": outputs[0], "heads": (list(outputs[1:]),)},
}


def _functional(layer: nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    """One parameter of the layer is used outside the forward of what holds it."""
    for holder in layer.sublayers(include_self=True):
        for name in holder._parameters:
            param = getattr(holder, name)
            if len(param.shape) == 2 and param.shape[0] == x.shape[1]:
                return F.linear(x, param).mean(axis=1, keepdim=True) * x
            return x * param.flatten()[0]
    return x


def _in_place(layer: nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    return _first(layer(x)).scale_(0.7)


def _without_gradient(layer: nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    with paddle.no_grad():
        return _first(layer(x))


MODES: dict[str, Callable[[nn.Layer, paddle.Tensor], paddle.Tensor]] = {
    "call": lambda layer, x: _first(layer(x)),
    "functional": _functional,
    "in place": _in_place,
    "no grad": _without_gradient,
    "recompute": lambda layer, x: recompute(lambda y: _first(layer(y)), x, use_reentrant=False),
    "recompute, reentrant": lambda layer, x: recompute(lambda y: _first(layer(y)), x, use_reentrant=True),
}

PLACES = ("attribute", "list", "sequential", "dict")
"""An attribute of the net's own, or an item of its LayerList, Sequential or LayerDict, which are never called."""


class _Model(nn.Layer):
    """Holds the parts at their places, and runs a path."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        layers = list(_Builder(net.width).make_all(net.parts))
        for name, holder in (("list", nn.LayerList), ("sequential", _sequential), ("dict", _dict)):
            held = [layer for layer, part in zip(layers, net.parts, strict=True) if part.place == name]
            if held:
                setattr(self, f"in_{name}", holder(held))
        for index, part in enumerate(net.parts):
            if part.place == "attribute":
                setattr(self, f"part_{index}", layers[index])
        self.heads = nn.LayerList([nn.Linear(net.width, OUT) for _ in net.heads])
        if net.gains:
            self.gain = self.create_parameter([net.gains])
        # Not as an attribute, which would register them once more.
        self._parts = lambda index: layers[index]

    def forward(self, x: paddle.Tensor, path: int) -> Any:
        taps = [x]
        for call in self.net.paths[path]:
            x = paddle.tanh(MODES[call.mode](self._parts(call.part), x)) + 0.5 * x
            taps.append(x)
        last = x * self.gain if self.net.gains else x
        heads = [layer(taps[head.after % len(taps)]) for layer, head in zip(self.heads, self.net.heads, strict=True)]
        return STRUCTURES[self.net.structure]([last, *heads])


def _sequential(layers: list[nn.Layer]) -> nn.Layer:
    return nn.Sequential(*layers)


def _dict(layers: list[nn.Layer]) -> nn.Layer:
    return nn.LayerDict({f"item_{index}": layer for index, layer in enumerate(layers)})


class _Builder:
    """Makes the layers of parts, and knows the ones that were made before."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._leaves: list[nn.Layer] = []
        self._weight: paddle.Tensor | None = None

    def make_all(self, parts: tuple[Part, ...]) -> Iterator[nn.Layer]:
        yield from map(self._make, parts)

    def _make(self, part: Part) -> nn.Layer:
        if part.kind == "sequential":
            return nn.Sequential(*self.make_all(part.inner))
        if part.kind == "block":
            return _freeze(Block(part.size, list(self.make_all(part.inner))), own=True, frozen=part.frozen)
        if part.kind == "same" and self._leaves:
            return self._leaves[part.size % len(self._leaves)]
        leaf = LEAVES["linear" if part.kind == "same" else part.kind](self._width, part.size)
        self._leaves.append(leaf)
        if isinstance(leaf, nn.Linear):
            self._tie(leaf, part.tied)
        return _freeze(leaf, own=isinstance(leaf, Aside), frozen=part.frozen)

    def _tie(self, leaf: nn.Layer, tied: bool) -> None:
        if tied and self._weight is not None:
            leaf.weight = self._weight
        self._weight = leaf.weight if self._weight is None else self._weight


def _freeze(layer: nn.Layer, *, own: bool, frozen: bool) -> nn.Layer:
    for param in layer.parameters(include_sublayers=not own):
        param.stop_gradient = param.stop_gradient or frozen
    return layer
