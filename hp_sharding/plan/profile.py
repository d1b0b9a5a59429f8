"""What a plan knows of a model: its units in the order in which they run, their parameters, and what they cost.

A profile comes from a Layer (``layers``), from a JSON list of parameters, or from the sizes of a transformer. What
compute takes is measured, or follows from floating-point operations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..layout import ITEM_BYTES
from .hardware import Hardware

_BACKWARD_FACTOR = 2.0
"""A backward is two matrix products for each one of the forward."""


class Param(NamedTuple):
    """One parameter: its structured name, its shape and Paddle's name of its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    frozen: bool = False

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class Unit(NamedTuple):
    """One unit of a model, as ``units.find_units`` has them; its own parameters in the order of their use.

    Attributes:
        name: as the user knows it.
        params: may be empty for the model itself.
        forward_s: of one forward, without communication; None, it follows from ``flops``.
        backward_s: likewise; None, ``backward_factor`` times the forward.
        flops: floating-point operations of a forward for each token.
        borrows: names of other units' parameters that it uses after all its own, such as a tied embedding; of the
            model itself also its own that it uses after all units.
        activation_bytes: that a forward leaves for the backward.
        transient_bytes: that its forward or backward needs besides, at the most.
        backward_factor: see ``backward_s``; 3 where the backward runs the forward again.
    """

    name: str
    params: tuple[Param, ...]
    forward_s: float | None = None
    backward_s: float | None = None
    flops: float = 0.0
    borrows: tuple[str, ...] = ()
    activation_bytes: int = 0
    transient_bytes: int = 0
    backward_factor: float = _BACKWARD_FACTOR


class Profile(NamedTuple):
    """A model.

    Attributes:
        name: of the model; its own unit, the first one, runs after all others.
        units: the model itself, then the others in the order of the forward.
    """

    name: str
    units: tuple[Unit, ...]

    @property
    def params(self) -> list[Param]:
        """All of them."""
        return [param for unit in self.units for param in unit.params]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(param.numel for param in self.params)

    def timed(self, hardware: Hardware, tokens: int | None) -> Profile:
        """The same with the time of every unit known.

        Args:
            hardware: ``flops_s`` of it.
            tokens: of a rank's batch.

        Raises:
            ConfigError: a unit has no time of its own, and tokens or ``flops_s`` are missing.
        """
        return self._replace(units=tuple(_timed(unit, hardware, tokens) for unit in self.units))


def _timed(unit: Unit, hardware: Hardware, tokens: int | None) -> Unit:
    forward_s = unit.forward_s
    if forward_s is None and not unit.flops:
        forward_s = 0.0
    if forward_s is None:
        if hardware.flops_s is None or tokens is None:
            raise ConfigError(
                f"unit '{unit.name}': nothing says how long its compute takes. Measure it (--measure), or give "
                "forward_ms in the list of parameters, or --tflops and --tokens"
            )
        forward_s = unit.flops * tokens / hardware.flops_s
    backward_s = unit.backward_factor * forward_s if unit.backward_s is None else unit.backward_s
    return unit._replace(forward_s=forward_s, backward_s=backward_s)


def matrix_flops(params: Sequence[Param]) -> float:
    """Of a forward for each token, if each element of a matrix is multiplied and added once."""
    return float(sum(2 * param.numel for param in params if len(param.shape) > 1))


# -- a list of parameters ----------------------------------------------------------------------------------------------


def read(path: str | Path) -> Profile:
    """From a JSON file, see ``from_dict``. Raises ConfigError naming the file."""
    try:
        return from_dict(json.loads(Path(path).read_text()))
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


def from_dict(values: Mapping[str, Any]) -> Profile:
    """From ``{"name": ..., "units": [{"name": ..., "params": [[name, shape, dtype, frozen], ...], ...}, ...]}``.

    Of a parameter ``dtype`` (else float32) and ``frozen`` (else false) may be left out. Other keys of a unit, all
    optional: ``forward_ms``, ``backward_ms``, ``backward_factor`` (2), ``flops`` of a forward for each token (else two
    for each element of a matrix), ``borrows``, ``activation_mb`` and ``transient_mb`` in units of 2**20 bytes.
    A unit of the model's own name is the model itself: what its forward does after all units.

    Raises:
        ConfigError: something is missing, unknown or senseless.
    """
    if not isinstance(values, Mapping) or not isinstance(values.get("units"), list) or not values["units"]:
        raise ConfigError("a list of parameters is an object with 'units', a list of at least one")
    name = str(values.get("name", "model"))
    units = [_unit(entry) for entry in values["units"]]
    root = next((unit for unit in units if unit.name == name), Unit(name, ()))
    profile = Profile(name, (root, *(unit for unit in units if unit is not root)))
    _check(profile)
    return profile


def to_dict(profile: Profile) -> dict[str, Any]:
    """What ``from_dict`` reads."""
    return {"name": profile.name, "units": [_unit_dict(unit) for unit in profile.units]}


_UNIT_KEYS = {
    "name", "params", "forward_ms", "backward_ms", "backward_factor", "flops", "borrows", "activation_mb",
    "transient_mb",
}  # fmt: skip
_MB = 1 << 20


def _unit(entry: Any) -> Unit:
    if not isinstance(entry, Mapping) or "name" not in entry or not _UNIT_KEYS.issuperset(entry):
        raise ConfigError(
            f"a unit is an object with 'name' and none but {', '.join(sorted(_UNIT_KEYS))}; found {entry!r:.200}"
        )
    for key in ("params", "borrows"):
        if not isinstance(entry.get(key, []), list):
            raise ConfigError(f"unit '{entry['name']}': {key} is to be a list, not {entry[key]!r:.200}")
    params = tuple(_param(value, str(entry["name"])) for value in entry.get("params", ()))
    numbers = {key: entry[key] for key in entry if key in _UNIT_KEYS - {"name", "params", "borrows"}}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ConfigError(f"unit '{entry['name']}': {key} is to be a number of at least 0, not {value!r}")
    times = {f"{what}_s": numbers[f"{what}_ms"] / 1e3 for what in ("forward", "backward") if f"{what}_ms" in numbers}
    sizes = {f"{what}_bytes": round(numbers.get(f"{what}_mb", 0) * _MB) for what in ("activation", "transient")}
    flops = float(numbers.get("flops", matrix_flops(params)))
    borrows = tuple(str(name) for name in entry.get("borrows", ()))
    factor = float(numbers.get("backward_factor", _BACKWARD_FACTOR))
    return Unit(str(entry["name"]), params, **times, flops=flops, borrows=borrows, **sizes, backward_factor=factor)


def _param(value: Any, unit: str) -> Param:
    if not isinstance(value, list) or not 2 <= len(value) <= 4 or not _is_shape(value[1]):
        raise ConfigError(f"unit '{unit}': a parameter is [name, [size, ...], dtype, frozen], not {value!r:.200}")
    found = Param(str(value[0]), tuple(value[1]), *value[2:])
    if found.numel < 1 or found.dtype not in ITEM_BYTES or not isinstance(found.frozen, bool):
        raise ConfigError(
            f"unit '{unit}': parameter '{found.name}' has shape {list(found.shape)}, dtype {found.dtype!r} and frozen "
            f"{found.frozen!r}; sizes are at least 1, known are {', '.join(ITEM_BYTES)}, frozen is true or false"
        )
    return found


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(size, int) and not isinstance(size, bool) for size in value)


def _unit_dict(unit: Unit) -> dict[str, Any]:
    times = {"forward_ms": unit.forward_s, "backward_ms": unit.backward_s}
    return {
        "name": unit.name,
        "params": [
            [param.name, list(param.shape), param.dtype, *([True] if param.frozen else [])] for param in unit.params
        ],
        **{key: value * 1e3 for key, value in times.items() if value is not None},
        "flops": unit.flops,
        "borrows": list(unit.borrows),
        "activation_mb": unit.activation_bytes / _MB,
        "transient_mb": unit.transient_bytes / _MB,
        "backward_factor": unit.backward_factor,
    }


def _check(profile: Profile) -> None:
    names = [param.name for param in profile.params]
    units = [unit.name for unit in profile.units]
    for what, found in (("unit", units), ("parameter", names)):
        twice = next((name for name in found if found.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"there are two {what}s named '{twice}'")
    unknown = [name for unit in profile.units for name in unit.borrows if name not in names]
    if unknown:
        raise ConfigError(f"'{unknown[0]}' is borrowed, but no unit has it")
    if not names:
        raise ConfigError("there is no parameter at all")


# -- a transformer -----------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Of a decoder with gated perceptrons and grouped attention, without biases.

    Attributes:
        kv_heads: heads of keys and values.
        inner: width of the perceptron.
        context: tokens of a sequence.
        recompute: whether each block keeps its input only, and its backward runs the forward once more.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    context: int
    dtype: str = "bfloat16"
    recompute: bool = True


KNOWN = {
    "7b": Sizes(32, 4096, 32, 32, 11008, 32000, 4096),
    "70b": Sizes(80, 8192, 64, 8, 28672, 32000, 4096),
}
"""Those of Llama 2 (Touvron et al., 2023)."""


def transformer(name: str, sizes: Sizes, *, tokens: int) -> Profile:
    """A model of these sizes, its embedding and output layer not tied, for batches of so many tokens on a rank."""
    item = ITEM_BYTES[sizes.dtype]
    hidden_bytes = tokens * sizes.width * item
    table = (sizes.vocabulary, sizes.width)
    # Logits and their gradient, in float32.
    head_bytes = 2 * 4 * tokens * sizes.vocabulary
    units = [
        Unit(name, ()),
        Unit("embed", (Param("embed.weight", table, sizes.dtype),), activation_bytes=hidden_bytes),
        *(_block(f"layers.{number}", sizes, tokens) for number in range(sizes.layers)),
        Unit("norm", (Param("norm.weight", (sizes.width,), sizes.dtype),), activation_bytes=hidden_bytes),
        Unit("head", (Param("head.weight", table[::-1], sizes.dtype),), flops=2.0 * math.prod(table),
             transient_bytes=head_bytes),
    ]  # fmt: skip
    return Profile(name, tuple(units))


def _block(name: str, sizes: Sizes, tokens: int) -> Unit:
    width, kv_width = sizes.width, sizes.width // sizes.heads * sizes.kv_heads
    shapes = {
        "norm1": (width,), "q": (width, width), "k": (width, kv_width), "v": (width, kv_width), "o": (width, width),
        "norm2": (width,), "gate": (width, sizes.inner), "up": (width, sizes.inner), "down": (sizes.inner, width),
    }  # fmt: skip
    params = tuple(Param(f"{name}.{part}.weight", shape, sizes.dtype) for part, shape in shapes.items())
    # Scores and their product with the values, of which the causal mask needs half.
    flops = matrix_flops(params) + 2 * sizes.context * width
    item = ITEM_BYTES[sizes.dtype]
    # Inputs of matrices and norms, with attention that keeps no scores (Dao et al., 2022): norms, q, k, v, o and its
    # input, gate, up, their activation and product.
    inside = tokens * item * (6 * width + 2 * kv_width + 4 * sizes.inner)
    kept, transient = (tokens * item * width, 2 * inside) if sizes.recompute else (inside, inside)
    return Unit(
        name, params, flops=flops, activation_bytes=kept, transient_bytes=transient,
        backward_factor=3.0 if sizes.recompute else 2.0,
    )  # fmt: skip
