"""What a plan knows of machines: as plain data and back, and refused where it makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hp_sharding.errors import ConfigError
from hp_sharding.plan.hardware import Hardware, Link

FULL = Hardware(
    Link(1e8, 1e-4),
    reduce=Link(9e7, 2e-4),
    replicate=Link(1e7, 1e-3),
    shares_link=False,
    compute_slowdown={"gather": 1.1, "reduce": 1.25},
    wire_slowdown={"replicate": 1.3},
    launch_s=5e-5,
    flops_s=1e14,
    update_bytes_s=2e10,
    copy_bytes_s=1e10,
    memory_bytes=8e10,
)


@pytest.mark.parametrize("hardware", [FULL, Hardware(Link(1.0, 0.0))])
def test_to_json_and_back(hardware: Hardware, tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(hardware.to_dict()))
    assert Hardware.read(path) == hardware
    path.write_text(json.dumps({"version": 1, "hardware": hardware.to_dict(), "checks": []}))
    assert Hardware.read(path) == hardware


def test_lanes_without_a_link_of_their_own_have_that_of_the_shards() -> None:
    assert FULL.link("gather") == FULL.shard
    assert FULL.link("reduce") == FULL.reduce
    assert Hardware(FULL.shard).link("replicate") == FULL.shard


def test_faster_links_cost_the_compute_more_time_by_the_byte_the_same() -> None:
    faster = FULL.with_links(2.5)
    assert faster.shard == Link(2.5e8, 1e-4)
    assert faster.link("replicate").bandwidth_bytes_s == 2.5e7
    # 1.25 times is 20 % of the time, at 2.5 times the bytes 50 %.
    assert faster.compute_slowdown["reduce"] == pytest.approx(2.0)
    assert FULL.with_links(0.5).compute_slowdown["reduce"] == pytest.approx(1 / 0.9)
    assert Hardware(Link(1e8, 0.0), compute_slowdown={"gather": 2.0}).with_links(100).compute_slowdown["gather"] < 11


def test_groups_in_one_host_have_its_link_and_others_all_cables_of_theirs() -> None:
    machine = Hardware(Link(50e9, 8e-6), reduce=Link(40e9, 8e-6), host=Link(300e9, 1e-6), host_ranks=8)
    inside = machine.of_groups(8, 64)
    assert inside.link("gather") == inside.link("reduce") == Link(300e9, 1e-6)
    assert inside.link("replicate") == Link(50e9, 8e-6)
    assert not inside.shares_link
    outside = machine.of_groups(64, 64)
    # Eight cables of 50 carry more than the link inside; seven of eight hops are inside.
    assert outside.shard == Link(300e9, (8e-6 + 7e-6) / 8)
    assert outside.shares_link
    slow = Hardware(Link(5e9, 8e-6), host=Link(300e9, 1e-6), host_ranks=8).of_groups(64, 64)
    assert slow.shard.bandwidth_bytes_s == 40e9
    assert FULL.of_groups(64, 64) == FULL


def test_replicas_in_one_host_have_its_link_too_and_share_it() -> None:
    machine = Hardware(Link(5e9, 8e-6), replicate=Link(4e9, 8e-6), host=Link(300e9, 1e-6), host_ranks=8)
    alone = machine.of_groups(4, 8)
    assert alone.link("gather") == alone.link("replicate") == Link(300e9, 1e-6)
    assert alone.shares_link
    # With a second host they are between hosts.
    assert machine.of_groups(4, 16).link("replicate") == Link(4e9, 8e-6)


def test_replicas_with_a_link_of_their_own_keep_it() -> None:
    machine = Hardware(Link(5e9, 8e-6), replicate=Link(4e9, 8e-6), shares_link=False, host=Link(3e11, 0), host_ranks=8)
    assert not machine.of_groups(16, 32).shares_link


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "with 'shard'"),
        ([], "found list"),
        ({"shard": {"bandwidth_bytes_s": 1}}, "'shard' is to have"),
        ({"shard": {"bandwidth_bytes_s": 0, "latency_s": 0}}, "bandwidth_bytes_s is to be a finite number above 0"),
        ({"shard": {"bandwidth_bytes_s": True, "latency_s": 0}}, "not True"),
        ({"shard": {"bandwidth_bytes_s": 1, "latency_s": -1}}, "latency_s is to be"),
        ({"shard": {"bandwidth_bytes_s": 1, "latency_s": float("nan")}}, "finite"),
        ({"shard": {"bandwidth_bytes_s": 1, "latency_s": 0}, "speed": 1}, "none but"),
        ({"shard": {"bandwidth_bytes_s": 1, "latency_s": 0}, "compute_slowdown": {"gather": 0.5}}, "of at least 1"),
        ({"shard": {"bandwidth_bytes_s": 1, "latency_s": 0}, "wire_slowdown": {"up": 2}}, "of 'up'"),
        ({"shard": {"bandwidth_bytes_s": 1, "latency_s": 0}, "compute_slowdown": 3}, "a factor for each lane, not 3"),
        ({"shard": {"bandwidth_bytes_s": 1, "latency_s": 0}, "flops_s": 0}, "flops_s is to be"),
    ],
)
def test_what_makes_no_sense_is_refused(values: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Hardware.from_dict(values)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    for name in (path, tmp_path / "missing.json"):
        with pytest.raises(ConfigError, match=name.name):
            Hardware.read(name)
