"""From what was asked for on the command line to a model, machines and choices."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..config import SHORT_DTYPES, ShardingConfig
from ..errors import ConfigError
from ..layout import ITEM_BYTES
from ..trace import chrome
from .choices import Outcome, Wanted, describe, rank
from .hardware import LANES, Hardware, Link
from .profile import KNOWN, Profile, Sizes, read, to_dict, transformer
from .recorded import with_recorded
from .replay import Training

VERSION = 1
"""Of the JSON: goes up when a key changes its meaning or goes away."""
_LATENCY_US = 10.0
_OVERLAPS = ("allgather_overlap", "reduce_overlap")


class Request(NamedTuple):
    """The options of the command, by their names there."""

    model: str
    ranks: int = 8
    replicas: Sequence[int] = (1,)
    stages: Sequence[int] = (2, 3)
    buffer_mb: Sequence[float] = (25.0,)
    prefetch_depth: Sequence[int] = (1,)
    replicate_buffer_mb: float = 25.0
    overlap: bool = True
    param_dtype: str | None = None
    gather_dtype: str | None = None
    reduce_dtype: str | None = None
    clip: bool = False
    micro_batches: int = 1
    hardware: Path | None = None
    bandwidth_gbit: float | None = None
    latency_us: float | None = None
    replicate_bandwidth_gbit: float | None = None
    replicate_latency_us: float | None = None
    host_ranks: int | None = None
    host_bandwidth_gbit: float | None = None
    host_latency_us: float | None = None
    compute_slowdown: float | None = None
    tflops: float | None = None
    memory_gb_s: float | None = None
    memory_gb: float | None = None
    tokens: int | None = None
    measure: bool = False
    batch: str | None = None
    compute_from: Path | None = None


class Prepared(NamedTuple):
    """What is planned.

    Attributes:
        profile: with times.
        hardware: of the ranks.
        wanted: the choices.
        training: the rest.
    """

    profile: Profile
    hardware: Hardware
    wanted: Wanted
    training: Training

    def run(self, say: Callable[[str], None] = lambda _: None) -> list[Outcome]:
        """Predicts and ranks all choices. Raises ConfigError for what cannot be."""
        return rank(self.profile, self.hardware, self.wanted.choices(), self.training, say=say)

    def as_dict(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "version": VERSION,
            "model": to_dict(self.profile),
            "numel": self.profile.numel,
            "hardware": self.hardware.to_dict(),
            "training": self.training._asdict(),
            "choices": [_outcome_dict(outcome) for outcome in outcomes],
        }


def _outcome_dict(outcome: Outcome) -> dict[str, Any]:
    (ranks, config), found = outcome.choice, outcome.prediction
    return {
        "what": describe(outcome.choice),
        "shard_ranks": ranks.shard,
        "replicas": ranks.replicas,
        "stage": config.stage,
        "comm_buffer_size_MB": config.comm_buffer_size_MB,
        "prefetch_depth": config.prefetch_depth,
        "param_dtype": config.param_dtype,
        "fits": outcome.fits,
        **{key: value for key, value in found._asdict().items() if key != "trace"},
    }


def prepare(request: Request) -> Prepared:
    """Builds or reads the model, and measures it where that was asked for.

    Raises:
        ConfigError: something is missing, or cannot be.
    """
    _check_together(request)
    hardware = _hardware(request)
    sizes = _sizes_of(request.model)
    settings = {name: getattr(request, name) for name in ("param_dtype", "gather_dtype", "reduce_dtype")}
    if sizes is not None and sizes.dtype in SHORT_DTYPES and request.param_dtype is None:
        settings["param_dtype"] = sizes.dtype  # nobody trains such a model without masters
    settings |= dict.fromkeys(_OVERLAPS, request.overlap)
    settings["replicate_buffer_size_MB"] = request.replicate_buffer_mb
    wanted = Wanted(
        request.ranks, request.replicas, request.stages, request.buffer_mb, request.prefetch_depth, settings
    )
    wanted.choices()  # what is wrong with them is said before the model is built
    if request.measure:
        profile, hardware = _measured(request, hardware)
    else:
        profile = _profile(request, sizes)
    if request.compute_from is not None:
        profile = with_recorded(profile, chrome.read(request.compute_from))
    training = Training(clips=request.clip, micro_batches=request.micro_batches)
    return Prepared(profile.timed(hardware, request.tokens), hardware, wanted, training)


_TOGETHER = (
    ("host_bandwidth_gbit", "host_ranks"), ("host_latency_us", "host_ranks"), ("batch", "measure"),
)  # fmt: skip
_APART = (("measure", "tflops"), ("measure", "tokens"))


def _check_together(request: Request) -> None:
    """What would change nothing is a mistake."""
    for one, other in _TOGETHER:
        if getattr(request, one) is not None and not getattr(request, other):
            raise ConfigError(f"{_option(one)} says nothing without {_option(other)}")
    for one, other in _APART:
        if getattr(request, one) and getattr(request, other) is not None:
            raise ConfigError(f"{_option(one)} finds out what compute takes; leave {_option(other)} out")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _sizes_of(model: str) -> Sizes | None:
    """Of a transformer that is named or described; None for all else."""
    name, _, sizes = model.partition(":")
    if name == "transformer" and sizes:
        return _sizes(sizes)
    return KNOWN.get(name.removeprefix("llama2-")) if name.startswith("llama2-") else None


def _profile(request: Request, sizes: Sizes | None) -> Profile:
    if sizes is not None:
        return transformer(request.model.partition(":")[0], sizes, tokens=_tokens(request))
    if request.model.endswith(".json"):
        return read(request.model)
    from .layers import load, make_model, profile_of

    return profile_of(make_model(load(request.model)), ShardingConfig())


def _measured(request: Request, hardware: Hardware) -> tuple[Profile, Hardware]:
    if request.batch is None:
        raise ConfigError("--measure runs the model, so it needs --batch, a callable that returns its arguments")
    from .layers import load, make_model, profile_of
    from .measuring import measure, with_machine

    batch, model = load(request.batch), make_model(load(request.model), lazy=False)
    _check_dtype(profile_of(model, ShardingConfig()), request.param_dtype)

    def draw() -> Sequence[Any]:
        given = batch()
        return given if isinstance(given, (tuple, list)) else (given,)

    measured = measure(model, model, ShardingConfig(), draw=draw)
    return measured.profile, with_machine(hardware, measured)


def _check_dtype(profile: Profile, wanted: str | None) -> None:
    """What is measured is to be what trains."""
    other = next((param for param in profile.params if wanted not in (None, param.dtype)), None)
    if other is not None:
        raise ConfigError(
            f"--param-dtype {wanted}: the model is built with '{other.name}' in {other.dtype}, and would be measured "
            f"in that. Build it in {wanted}, or leave --param-dtype or --measure out"
        )


def _tokens(request: Request) -> int:
    if request.tokens is None:
        raise ConfigError("--tokens is missing: how many of them a rank's batch has")
    return request.tokens


def _sizes(text: str) -> Sizes:
    given = dict(re.findall(r"(\w+)=([\w]+)", text))
    numbers = {key: int(value) for key, value in given.items() if value.isdigit() and key in Sizes._fields}
    numbers.setdefault("kv_heads", numbers.get("heads", 0))
    words = {key: value for key, value in given.items() if key == "dtype"}
    missing = [key for key in Sizes._fields if key not in (*numbers, "dtype", "recompute")]
    unknown = [part for part in text.split(",") if part.partition("=")[0] not in Sizes._fields]
    if missing or unknown or not all(numbers[key] for key in numbers if key != "recompute"):
        raise ConfigError(f"transformer:{text}: expected numbers for {', '.join(Sizes._fields)}, such as layers=24")
    if words.get("dtype", "float32") not in ITEM_BYTES:
        raise ConfigError(f"transformer:{text}: known dtypes are {', '.join(ITEM_BYTES)}")
    return Sizes(**{**numbers, **words, "recompute": bool(numbers.get("recompute", 1))})


def _hardware(request: Request) -> Hardware:
    known = Hardware.read(request.hardware) if request.hardware is not None else None
    if known is None and request.bandwidth_gbit is None:
        raise ConfigError("nothing says how fast the links are: give --hardware FILE, or --bandwidth-gbit")
    hardware = known or Hardware(Link(1.0, _LATENCY_US / 1e6))
    changes: dict[str, Any] = {}
    if request.bandwidth_gbit is not None or request.latency_us is not None:
        link = _link(hardware.shard, request.bandwidth_gbit, request.latency_us)
        changes |= {"shard": link, "reduce": None}
    if request.replicate_bandwidth_gbit is not None or request.replicate_latency_us is not None:
        link = _link(hardware.link("replicate"), request.replicate_bandwidth_gbit, request.replicate_latency_us)
        changes |= {"replicate": link, "shares_link": False}
    if request.host_ranks is not None:
        if request.host_bandwidth_gbit is None:
            raise ConfigError("--host-ranks says nothing without --host-bandwidth-gbit, the speed of the link inside")
        inside = _link(hardware.shard, request.host_bandwidth_gbit, request.host_latency_us)
        changes |= {"host": inside, "host_ranks": request.host_ranks}
    if request.compute_slowdown is not None:
        changes["compute_slowdown"] = dict.fromkeys(LANES, request.compute_slowdown)
    if request.memory_gb_s is not None:
        # What is copied is read and written.
        changes |= {"update_bytes_s": request.memory_gb_s * 1e9, "copy_bytes_s": request.memory_gb_s * 1e9 / 2}
    scaled = {"flops_s": (request.tflops, 1e12), "memory_bytes": (request.memory_gb, 1e9)}
    changes |= {key: value * unit for key, (value, unit) in scaled.items() if value is not None}
    return dataclasses.replace(hardware, **changes)


def _link(known: Link, bandwidth_gbit: float | None, latency_us: float | None) -> Link:
    bandwidth = known.bandwidth_bytes_s if bandwidth_gbit is None else bandwidth_gbit * 1e9 / 8
    return Link(bandwidth, known.latency_s if latency_us is None else latency_us / 1e6)
