"""Programs of calls of the public API, and two sides that run them: sharded, and plain Paddle for all ranks in turn.

A program is drawn as a list of commands, each a name and arguments, and is run by both sides in the same way: what
they show at each look must agree. ``programs()`` draws only what is allowed, such as a look at a gradient while there
is one; see ``Drawing``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import paddle

import hp_sharding
from hp_sharding import full_parameters
from tests.bombs import Bomb, mine
from tests.models import SEED, Mlp, loss_of, make_batch, make_optimizer
from tests.reference import Ranks, Values, values

Command = tuple[str, dict[str, Any]]
WIDTHS = (9, 21, 17, 5)
N_LAYERS = len(WIDTHS) - 1
PLACES = [
    *(f"{where} layers.{number}" for where in ("first before", "after", "backward of") for number in (0, 2)),
    "hook after a gradient of layers.1",
    "after model",
]
TOLERANCE = 1e-5
"""Relative to the largest element, after up to 40 steps whose sums are rounded in another order."""
BACKWARDS = ("once", "two losses", "kept graph")
"""What a micro-batch does: one backward; one of the sum of two forwards; two through the same graph."""


class Program(NamedTuple):
    """What is run.

    Attributes:
        optimizer: name of Paddle's.
        settings: of ``ShardingConfig``, and ``n_replicas``.
        commands: see ``COMMANDS``.
        exact: whether both sides add up the same terms in the same order, so that they agree bit for bit.
    """

    optimizer: str
    settings: dict[str, Any]
    commands: list[Command]
    exact: bool


class Seen(NamedTuple):
    """What a command has shown: arrays by name."""

    what: str
    arrays: Values


class Subject(Protocol):
    """One side.

    Attributes:
        model: the model.
        optimizer: the optimizer, wrapped or not.
    """

    model: Any
    optimizer: Any

    def backward(self, loss: Callable[[int], paddle.Tensor]) -> None:
        """The backward of this rank's loss, or of every rank's."""

    def no_sync(self) -> Any:
        """The optimizer's; nothing on the plain side."""

    def full(self) -> Any:
        """``full_parameters``; nothing on the plain side."""

    def full_grad(self, param: paddle.Tensor) -> paddle.Tensor | None:
        """The mean gradient."""

    def set_full_grad(self, param: paddle.Tensor, value: paddle.Tensor) -> None:
        """Puts another in its place."""

    def grad_norm(self) -> float:
        """Of all gradients."""

    def clip_grad_norm(self, bound: float) -> None:
        """Scales all gradients."""

    def fail(self, place: str, number: int) -> None:
        """A batch that fails there; on the plain side nothing."""

    def save(self) -> None:
        """Keeps everything, for ``load``."""

    def load(self) -> None:
        """Goes back to what was kept last."""

    def state(self) -> Any:
        """A copy of what ``state_dict()`` gives."""

    def set_state(self, state: Any) -> None:
        """Takes that."""


class PlainSubject:
    """Plain Paddle, which runs all ranks in turn."""

    def __init__(self, program: Program, nranks: int) -> None:
        paddle.seed(SEED)
        self.model: Any = Mlp(WIDTHS)
        self.optimizer = make_optimizer(program.optimizer, self.model)
        self._ranks = Ranks(self.model, nranks)
        self._kept: Any = None

    def backward(self, loss: Callable[[int], paddle.Tensor]) -> None:
        self._ranks.backward(loss)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def full(self) -> Any:
        return contextlib.nullcontext()

    def full_grad(self, param: paddle.Tensor) -> paddle.Tensor | None:
        grad: paddle.Tensor | None = param.grad
        return grad

    def set_full_grad(self, param: paddle.Tensor, value: paddle.Tensor) -> None:
        param.grad = value

    def grad_norm(self) -> float:
        squares = [float(grad.square().sum()) for grad in self._grads()]
        return float(np.sqrt(sum(squares)))

    @paddle.no_grad()  # what Paddle has set to zero counts as a leaf that asks for a gradient
    def clip_grad_norm(self, bound: float) -> None:
        factor = min(bound / (self.grad_norm() + 1e-6), 1.0)
        for grad in self._grads():
            grad.scale_(factor)

    def fail(self, place: str, number: int) -> None:
        pass

    def save(self) -> None:
        self._kept = self.state()

    def load(self) -> None:
        self.optimizer.clear_grad(False)
        self.set_state(self._kept)

    def state(self) -> Any:
        kept = {
            (name, param): tensor.clone()
            for name, tensors in self.optimizer._accumulators.items()
            for param, tensor in tensors.items()
        }
        return values(self.model), kept, self.optimizer.get_lr()

    def set_state(self, state: Any) -> None:
        params, kept, rate = state
        for name, param in self.model.named_parameters():
            param.set_value(params[name])
        for (name, param), tensor in kept.items():
            self.optimizer._accumulators[name][param].set_value(tensor)
        self.optimizer.set_lr(rate)

    def _grads(self) -> list[paddle.Tensor]:
        return [param.grad for param in self.model.parameters() if param.grad is not None]


class ShardedSubject:
    """The sharded side, of one rank.

    Args:
        wrap: makes (model, optimizer, ...) of a model and Paddle's optimizer.
        folder: for checkpoints, the same on every rank.
    """

    def __init__(self, program: Program, rank: int, wrap: Callable[..., Any], folder: Path) -> None:
        paddle.seed(SEED)
        model = Mlp(WIDTHS)
        self._bomb = Bomb()
        self._rank = rank
        self._folder = folder
        self.model, self.optimizer, *_ = wrap(model, make_optimizer(program.optimizer, model), **program.settings)
        mine(self.model, {f"layers.{number}": layer for number, layer in enumerate(model.layers)}, self._bomb)

    def backward(self, loss: Callable[[int], paddle.Tensor]) -> None:
        loss(self._rank).backward()

    def no_sync(self) -> Any:
        return self.optimizer.no_sync()

    def full(self) -> Any:
        return full_parameters(self.model)

    def full_grad(self, param: paddle.Tensor) -> paddle.Tensor | None:
        grad: paddle.Tensor | None = self.optimizer.full_grad(param)
        return grad

    def set_full_grad(self, param: paddle.Tensor, value: paddle.Tensor) -> None:
        self.optimizer.set_full_grad(param, value)

    def grad_norm(self) -> float:
        return float(self.optimizer.grad_norm())

    def clip_grad_norm(self, bound: float) -> None:
        self.optimizer.clip_grad_norm(bound)

    def fail(self, place: str, number: int) -> None:
        with self._bomb.armed(place):
            _loss(self, number)(self._rank).backward()

    def save(self) -> None:
        hp_sharding.save(self._folder / "kept", self.model, self.optimizer)

    def load(self) -> None:
        hp_sharding.load(self._folder / "kept", self.model, self.optimizer)

    def state(self) -> Any:
        with self.full():
            params = values(self.model)
        return params, _copied(self.optimizer.state_dict()), self.optimizer.get_lr()

    def set_state(self, state: Any) -> None:
        params, kept, rate = state
        self.optimizer.set_state_dict(kept)
        with self.full():
            for name, param in self.model.named_parameters():
                param.set_value(params[name])
        self.optimizer.set_lr(rate)


# -- commands ---------------------------------------------------------------------------------------------------------


def _loss(subject: Subject, number: int) -> Callable[[int], paddle.Tensor]:
    return lambda rank: loss_of(subject.model, make_batch("mlp", number, rank))


def _backward(subject: Subject, number: int, kind: str) -> None:
    def loss(rank: int) -> paddle.Tensor:
        found = _loss(subject, number)(rank)
        if kind == "two losses":
            found = found + _loss(subject, number + 1)(rank)
        if kind == "kept graph":
            (found * 2).backward(retain_graph=True)
        return found

    subject.backward(loss)


def _no_sync(subject: Subject, numbers: list[int], nested: bool) -> None:
    with subject.no_sync():
        for number in numbers:
            with subject.no_sync() if nested else contextlib.nullcontext():
                _backward(subject, number, "once")


def _step(subject: Subject) -> None:
    subject.optimizer.step()


def _clear(subject: Subject, set_to_zero: bool) -> None:
    subject.optimizer.clear_grad(set_to_zero)


def _evaluate(subject: Subject, number: int) -> list[Seen]:
    subject.model.eval()
    with paddle.no_grad():
        output = subject.model(make_batch("mlp", number, 0)[0])
    subject.model.train()
    return [Seen("output", {"": output.numpy()})]


def _read(subject: Subject) -> list[Seen]:
    with subject.full():
        return [Seen("parameters", values(subject.model))]


def _look(subject: Subject, layer: int) -> list[Seen]:
    """Without any ceremony, as scripts do right after a step."""
    weight = subject.model.layers[layer].weight
    return [Seen("a weight", {weight.name.rpartition(".")[2]: weight.numpy()})]


def _write(subject: Subject, layer: int, factor: float) -> None:
    with subject.full():
        weight = subject.model.layers[layer].weight
        weight.set_value(weight.numpy() * np.float32(factor))


def _freeze(subject: Subject, layer: int, frozen: bool) -> None:
    for param in subject.model.layers[layer].parameters():
        param.stop_gradient = frozen


def _fail(subject: Subject, place: str, number: int, waits: bool, set_to_zero: bool) -> None:
    with subject.no_sync() if waits else contextlib.nullcontext():
        subject.fail(place, number)
    subject.optimizer.clear_grad(set_to_zero)


def _full_grad(subject: Subject, layer: int) -> list[Seen]:
    grad = subject.full_grad(subject.model.layers[layer].weight)
    return [Seen("a gradient", {"": np.zeros(0, np.float32) if grad is None else grad.numpy()})]


def _set_full_grad(subject: Subject, layer: int, value: float) -> None:
    weight = subject.model.layers[layer].weight
    subject.set_full_grad(weight, paddle.full(weight.shape, value))


def _norm(subject: Subject) -> list[Seen]:
    return [Seen("norm", {"": np.asarray([subject.grad_norm()], np.float32)})]


def _clip(subject: Subject, bound: float) -> None:
    subject.clip_grad_norm(bound)


def _rate(subject: Subject, rate: float) -> None:
    subject.optimizer.set_lr(rate)


def _save(subject: Subject) -> None:
    subject.save()


def _load(subject: Subject) -> None:
    subject.load()


def _keep(subject: Subject) -> None:
    subject.kept = subject.state()  # type: ignore[attr-defined]


def _restore(subject: Subject) -> None:
    subject.optimizer.clear_grad(False)
    subject.set_state(subject.kept)  # type: ignore[attr-defined]


COMMANDS: dict[str, Callable[..., list[Seen] | None]] = {
    "backward": _backward,
    "no_sync": _no_sync,
    "step": _step,
    "clear": _clear,
    "evaluate": _evaluate,
    "read": _read,
    "look": _look,
    "write": _write,
    "freeze": _freeze,
    "fail": _fail,
    "full_grad": _full_grad,
    "set_full_grad": _set_full_grad,
    "norm": _norm,
    "clip": _clip,
    "rate": _rate,
    "save": _save,
    "load": _load,
    "keep": _keep,
    "restore": _restore,
}


def play(subject: Subject, commands: list[Command]) -> list[Seen]:
    """Runs the commands; returns what they have shown, each with the place of its command."""
    seen: list[Seen] = []
    for number, (name, arguments) in enumerate(commands):
        shown = COMMANDS[name](subject, **arguments) or []
        seen += [Seen(f"{number}: {name}, {what}", arrays) for what, arrays in shown]
    return [*seen, *(Seen(f"at the end, {what}", arrays) for what, arrays in _read(subject))]


def compare(found: list[Seen], expected: list[Seen], program: Program) -> None:
    """Raises AssertionError for the first difference."""
    assert [each.what for each in found] == [each.what for each in expected]
    for ours, plain in zip(found, expected, strict=True):
        for name, array in plain.arrays.items():
            assert np.isfinite(array).all(), f"{ours.what} {name} is expected not to be finite"
            if program.exact and "norm" not in ours.what:
                np.testing.assert_array_equal(ours.arrays[name], array, err_msg=f"{ours.what} {name}", strict=True)
                continue
            assert ours.arrays[name].shape == array.shape, f"{ours.what} {name}"
            off = np.abs(ours.arrays[name] - array).max(initial=0.0)
            assert off <= TOLERANCE * max(float(np.abs(array).max(initial=0.0)), 0.1), f"{ours.what} {name}: {off:.2e}"


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    copied = {}
    for key, value in state.items():
        if isinstance(value, paddle.Tensor):
            copied[key] = value.clone()
            copied[key].name = value.name
        else:
            copied[key] = _copied(value) if isinstance(value, dict) else value
    return copied
