"""What a plan knows of the machines: links, what transfers cost the compute, and, where given, how fast that is.

The doctor's JSON report has it under the key ``"hardware"``, in the form of ``Hardware.to_dict``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError

LANES = ("gather", "reduce", "replicate")
"""Lanes that carry tensors."""

_LINKS = ("shard", "reduce", "replicate", "host")
_MOST_TAKEN = 0.9
"""Of compute, by transfers of one lane."""


class Link(NamedTuple):
    """What one collective takes: ``hops * latency_s + sent_bytes / bandwidth_bytes_s``.

    An all-gather or a reduce-scatter over n ranks has n - 1 hops, in which a rank sends (n-1)/n of the message; an
    all-reduce has both.

    Attributes:
        bandwidth_bytes_s: at which a rank sends while it receives as much.
        latency_s: of one hop, with all that a collective costs whatever its size.
    """

    bandwidth_bytes_s: float
    latency_s: float


@dataclass(frozen=True)
class Hardware:
    """Links and costs, the same for every rank. All times in seconds, all sizes in bytes.

    Attributes:
        shard: link of the all-gathers over a shard group.
        reduce: link of the reduce-scatters over it, which add up as well; None, the same.
        replicate: link of the all-reduces over the replicas; None, as ``shard``.
        shares_link: whether the replicas' traffic takes the same cable as the shard group's, each slowing the other.
        host: link inside a host, where several ranks share one; ``shard`` and ``replicate`` are then those between
            hosts, each rank's own. See ``of_groups``.
        host_ranks: ranks of a host.
        compute_slowdown: for each of ``LANES``, by how much longer compute takes while that lane alone is busy and has
            its whole link; 1.0 is not at all.
        wire_slowdown: for each, by how much longer its transfers take while compute runs beside them.
        launch_s: time of the thread that trains for each collective.
        flops_s: floating-point operations a second that layers reach; None, unknown.
        update_bytes_s: that an optimizer reads and writes; None, it takes no time.
        copy_bytes_s: at which gradients are copied into their buckets; None, it takes no time.
        memory_bytes: of a rank's device; None, unknown.
    """

    shard: Link
    reduce: Link | None = None
    replicate: Link | None = None
    shares_link: bool = True
    host: Link | None = None
    host_ranks: int = 1
    compute_slowdown: Mapping[str, float] = field(default_factory=dict)
    wire_slowdown: Mapping[str, float] = field(default_factory=dict)
    launch_s: float = 0.0
    flops_s: float | None = None
    update_bytes_s: float | None = None
    copy_bytes_s: float | None = None
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        _check("host_ranks", self.host_ranks, least=1.0)
        for name in _LINKS:
            link = getattr(self, name)
            if link is not None:
                _check(f"{name}.bandwidth_bytes_s", link.bandwidth_bytes_s, above=0.0)
                _check(f"{name}.latency_s", link.latency_s)
        for table in ("compute_slowdown", "wire_slowdown"):
            factors = getattr(self, table)
            if not isinstance(factors, Mapping):
                raise ConfigError(f"hardware: {table} is to have a factor for each lane, not {factors!r}")
            for lane, factor in factors.items():
                if lane not in LANES:
                    raise ConfigError(f"hardware: {table} of '{lane}'; expected one of {', '.join(LANES)}")
                _check(f"{table}.{lane}", factor, least=1.0)
        _check("launch_s", self.launch_s)
        for name in ("flops_s", "update_bytes_s", "copy_bytes_s", "memory_bytes"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), above=0.0)

    def link(self, lane: str) -> Link:
        """The link of one of ``LANES``."""
        own = {"reduce": self.reduce, "replicate": self.replicate}.get(lane)
        return own if own is not None else self.shard

    def of_groups(self, shard_ranks: int, total_ranks: int) -> Hardware:
        """The links of shard groups of so many ranks, which fill one host after the other.

        Inside one host they have that one's link for themselves, or share it with the replicas where all ranks are in
        that host. Over several of them a host needs what comes from outside once, and all its ranks carry a part of it:
        so a rank has ``host_ranks`` times its own bandwidth, as far as the link inside keeps up. A ring passes between
        hosts in one of ``host_ranks`` hops. Replicas on different hosts have each rank's own link between these.
        """
        if self.host is None:
            return self
        outside = self.shard
        replicate = self.replicate or outside
        if total_ranks <= self.host_ranks:
            shard, replicate, shares = self.host, self.host, True
        elif shard_ranks <= self.host_ranks:
            shard, shares = self.host, False
        else:
            bandwidth = min(self.host.bandwidth_bytes_s, self.host_ranks * outside.bandwidth_bytes_s)
            latency = (outside.latency_s + (self.host_ranks - 1) * self.host.latency_s) / self.host_ranks
            shard, shares = Link(bandwidth, latency), self.shares_link
        return dataclasses.replace(
            self, shard=shard, reduce=None, replicate=replicate, shares_link=shares, host=None, host_ranks=1
        )

    def with_links(self, factor: float) -> Hardware:
        """The same with links ``factor`` times as fast: what a byte costs the compute stays what it is."""
        _check("factor", factor, above=0.0)
        links = {name: getattr(self, name) for name in _LINKS}
        faster = {
            name: link._replace(bandwidth_bytes_s=link.bandwidth_bytes_s * factor)
            for name, link in links.items()
            if link is not None
        }
        taken = {lane: min((1 - 1 / slow) * factor, _MOST_TAKEN) for lane, slow in self.compute_slowdown.items()}
        slowdown = {lane: 1 / (1 - share) for lane, share in taken.items()}
        return dataclasses.replace(self, **faster, compute_slowdown=slowdown)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without what is None or empty."""
        found: dict[str, Any] = {}
        for key in (entry.name for entry in dataclasses.fields(self)):
            value = getattr(self, key)
            if isinstance(value, Link):
                found[key] = value._asdict()
            elif isinstance(value, Mapping):
                found |= {key: dict(value)} if value else {}
            elif value is not None:
                found[key] = value
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Hardware:
        """What ``to_dict`` gave, or a report of the doctor that has it under ``"hardware"``.

        Raises:
            ConfigError: a key is missing, unknown or has a value that makes no sense.
        """
        values = values.get("hardware", values) if isinstance(values, Mapping) else values
        known = {entry.name for entry in dataclasses.fields(cls)}
        if not isinstance(values, Mapping) or "shard" not in values or not known.issuperset(values):
            found = f"keys {', '.join(map(str, values))}" if isinstance(values, Mapping) else type(values).__name__
            raise ConfigError(
                f"hardware: expected an object with 'shard' and none but {', '.join(sorted(known))}; found {found}. "
                "'hp-sharding doctor --json' measures one"
            )
        links = {key: _link(key, value) for key, value in values.items() if key in _LINKS}
        return cls(**{**values, **links})

    @classmethod
    def read(cls, path: str | Path) -> Hardware:
        """From a JSON file, the doctor's report or ``to_dict`` alone. Raises ConfigError naming the file."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except (OSError, ValueError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from error


def _link(key: str, value: Any) -> Link | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) != set(Link._fields):
        raise ConfigError(f"hardware: '{key}' is to have {' and '.join(Link._fields)}, not {value!r}")
    return Link(**value)


def _check(name: str, value: Any, *, least: float = 0.0, above: float | None = None) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < least or (above is not None and value <= above):
        bound = f"above {above:g}" if above is not None else f"of at least {least:g}"
        raise ConfigError(f"hardware: {name} is to be a finite number {bound}, not {value!r}")
