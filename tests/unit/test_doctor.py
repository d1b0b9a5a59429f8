"""What the doctor makes of measurements: each verdict from numbers made up here, and the warnings about a machine."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from hp_sharding.comm import current_device
from hp_sharding.doctor import advice, asynchrony, bandwidth, links, machine, overlap, parity, report, terminal
from hp_sharding.doctor.foreign import Use, foreign_share
from hp_sharding.doctor.report import Failure, Report, Spread
from hp_sharding.plan.hardware import Hardware
from hp_sharding.progress import showing_progress
from hp_sharding.trace.writing import replace

MB = 1 << 20


# -- the machine -------------------------------------------------------------------------------------------------------


def _seen(**changes: Any) -> dict[str, Any]:
    """What a rank on a machine without faults tells."""
    environment = {"OMP_NUM_THREADS": "1", **changes.pop("environment", {})}
    plain = {"host": "a", "cores": [0, 1, 2, 3], "is_amd": False, "uses_mkl": True, "paddle": "3.3.1", "device": "cpu"}
    return {**plain, "environment": environment, **changes}


def _advise(*everyone: dict[str, Any], **device: Any) -> dict[str, str]:
    """Text of each warning, by its code."""
    found = machine.conclude(list(everyone), current_device()._replace(**device))
    return {one.code: one.found for one in advice.advise(found, list(everyone))}


def test_nothing_is_said_about_a_machine_without_faults() -> None:
    assert _advise(_seen(), _seen()) == {}


@pytest.mark.parametrize(
    ("code", "everyone"),
    [
        ("mkl_on_amd", [_seen(), _seen(is_amd=True)]),
        ("interface_unset", [_seen(environment={"GLOO_SOCKET_IFNAME": "eth0"}), _seen(host="b")]),
        ("ranks_share_cores", [_seen(cores=[3]), _seen(cores=[3])]),
        ("threads_exceed_cores", [_seen(environment={"OMP_NUM_THREADS": "3"})] * 2),
        ("threads_exceed_cores", [_seen(environment={"MKL_NUM_THREADS": "5"})]),
        ("serializing_variable", [_seen(environment={"CUDA_LAUNCH_BLOCKING": "1"})]),
        ("serializing_variable", [_seen(environment={"FLAGS_benchmark": "True"})]),
        ("one_communicator", [_seen(environment={"HCCL_OP_EXPANSION_MODE": "AIV"})]),
        ("debug_mode", [_seen(environment={"HP_SHARDING_DEBUG": "1"})]),
        ("environment_differs", [_seen(environment={"NCCL_ALGO": "Ring"}), _seen()]),
        ("paddle_differs", [_seen(), _seen(paddle="3.3.2")]),
        ("paddle_untested", [_seen(paddle="3.2.0")]),
    ],
)
def test_each_fault_of_a_machine_is_named(code: str, everyone: list[dict[str, Any]]) -> None:
    assert list(_advise(*everyone)) == [code]


@pytest.mark.parametrize(
    "everyone",
    [
        [_seen(is_amd=True, environment={"MKL_DEBUG_CPU_TYPE": "5"})],
        [_seen(is_amd=True, uses_mkl=False)],
        [_seen(cores=[0]), _seen(cores=[1])],  # each is pinned to a core of its own
        [_seen(environment={"CUDA_LAUNCH_BLOCKING": "0", "FLAGS_benchmark": "false"})],
        [_seen(environment={"PADDLE_TRAINER_ID": str(rank), "FLAGS_selected_gpus": str(rank)}) for rank in (0, 1)],
        [_seen(host=host, environment={"GLOO_SOCKET_IFNAME": f"eth{host}"}) for host in "ab"],
    ],
)
def test_what_only_looks_like_a_fault_is_not_named(everyone: list[dict[str, Any]]) -> None:
    assert _advise(*everyone) == {}


def test_ranks_are_named() -> None:
    assert "(rank 1)" in _advise(_seen(), _seen(is_amd=True))["mkl_on_amd"]
    assert "(ranks 0, 1)" in _advise(_seen(is_amd=True), _seen(is_amd=True))["mkl_on_amd"]


def test_one_connection_matters_on_gpu_alone() -> None:
    seen = _seen(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert list(_advise(seen, kind="gpu", backend="nccl")) == ["one_connection"]
    assert _advise(seen) == {}


def test_the_hosts_talk_over_tcp_beside_a_device_too() -> None:
    assert list(_advise(_seen(), _seen(host="b"), kind="gpu", backend="nccl")) == ["interface_unset"]


def test_hosts_hold_their_ranks() -> None:
    found = machine.conclude([_seen(), _seen(host="b"), _seen()], current_device())
    assert found.hosts == {"a": [0, 2], "b": [1]}
    assert (found.n_ranks, found.device, found.backend) == (3, "cpu", "tcp")


def test_variables_that_matter_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "HP_SHARDING_DEBUG", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "1")
    found = machine.environment()
    assert {"NCCL_DEBUG", "HP_SHARDING_DEBUG", "CUDA_DEVICE_MAX_CONNECTIONS"} <= set(found)
    assert "AWS_SECRET_ACCESS_KEY" not in found


def test_what_other_programs_took_is_what_no_rank_did() -> None:
    uses = [Use(busy_s=7.0, own_s=2.0, elapsed_s=4.0), Use(7.0, 3.0, 4.0), Use(4.0, 4.0, 4.0)]
    assert foreign_share(uses, {"a": [0, 1], "b": [2]}, n_cores=2) == pytest.approx((7 - 2 - 3) / (4 * 2))
    assert foreign_share(uses[2:], {"b": [0]}, n_cores=2) == 0.0


def test_other_programs_matter_to_times_and_not_to_numbers() -> None:
    (said,) = advice.disturbed({"parity": 0.9, "bandwidth": 0.3, "overlap": 0.01})
    assert "30 % during bandwidth" in said.found
    assert "overlap" not in said.found
    assert advice.disturbed({"parity": 0.9}) == []


# -- numbers -----------------------------------------------------------------------------------------------------------


def _of_rank(bitwise: bool = True, difference: float = 0.0, digest: str = "d", repeats: bool = True) -> dict[str, Any]:
    row = {"case": "stage 2", "optimizer": "SGD", "bitwise": bitwise, "difference": difference, "digest": digest}
    return {"reference_repeats": repeats, "rows": [row]}


@pytest.mark.parametrize(
    ("everyone", "passed"),
    [
        ([_of_rank()] * 2, True),
        ([_of_rank(), _of_rank(bitwise=False, difference=1e-9)], False),  # two ranks: every bit
        ([_of_rank(bitwise=False, difference=9e-7)] * 4, True),
        ([_of_rank()] * 3 + [_of_rank(bitwise=False, difference=2e-6)], False),
        ([_of_rank()] * 3 + [_of_rank(bitwise=False, difference=math.nan)], False),
        ([_of_rank(digest="d"), _of_rank(digest="e")], False),
        ([_of_rank(bitwise=False, difference=9e-7, repeats=False)] * 2, True),  # not even one process repeats itself
    ],
)
def test_numbers_are_right_or_wrong(everyone: list[dict[str, Any]], passed: bool) -> None:
    found = parity.conclude(everyone)
    assert found.passed is passed
    assert ("WRONG NUMBERS: stage 2 with SGD" in found.verdict) is not passed


def test_a_difference_that_is_no_number_is_shown_as_none() -> None:
    found = parity.conclude([_of_rank(), _of_rank(bitwise=False, difference=math.nan)])
    assert math.isnan(found.rows[0].difference)
    assert json.loads(report.as_json(_report(parity=found)))["results"]["parity"]["rows"][0]["difference"] is None


def test_replicas_where_each_has_two_ranks() -> None:
    assert [str(split) for split in parity.splits(2)] == ["stage 1", "stage 2", "stage 3"]
    assert [split.n_replicas for split in parity.splits(4)] == [1, 1, 1, 2, 2]
    assert len(parity.splits(5)) == 3
    assert parity.groups(3, 4, 2) == {"shard_group": [2, 3], "replicate_group": [1, 3]}
    assert parity.groups(3, 4, 1) == {"shard_group": [0, 1, 2, 3], "replicate_group": [3]}


# -- times -------------------------------------------------------------------------------------------------------------


def _flat(ms: float) -> Spread:
    return Spread(ms, ms, ms)


def _behind(launch: float, done: float, both: float) -> asynchrony.Asynchrony:
    times = {"launch_ms": launch, "done_ms": done, "compute_ms": 80.0, "beside_ms": 100.0, "both_ms": both}
    times |= {"under_load_ms": 120.0, "transfer_ms": done, "transfer_beside_ms": 1.1 * done}
    row = {"op": "all_gather", "mb": 64.0, "flops_s": 3e9, **{name: [value] * 3 for name, value in times.items()}}
    quicker = {**row, "flops_s": 6e9, **{name: [value / 2] * 3 for name, value in times.items()}}
    return asynchrony.conclude([[quicker], [row], [quicker]], "gloo")


def test_collectives_behind_compute() -> None:
    found = _behind(launch=1.0, done=100.0, both=120.0)
    assert found.rows[0].is_asynchronous is True
    assert found.rows[0].done_ms == _flat(100.0), "that of the rank that took longest"
    assert found.rows[0].slowdown == pytest.approx(100 / 80)
    assert found.rows[0].hidden_percent == pytest.approx(100 * (100 + 80 - 120) / 80)
    assert found.verdict.startswith("asynchronous")
    assert "calls of collectives by gloo return at once" in found.verdict


def test_what_transfers_and_compute_cost_each_other() -> None:
    found = _behind(launch=1.0, done=100.0, both=120.0)
    (row,) = found.rows
    assert row.lane == "gather"
    assert (row.compute_slowdown, row.wire_slowdown) == pytest.approx((1.5, 1.1))
    assert found.flops_s == 3e9, "that of the slowest rank"


def test_collectives_inside_the_call() -> None:
    found = _behind(launch=98.0, done=100.0, both=180.0)
    assert found.rows[0].hidden_percent == 0.0
    assert found.verdict.startswith("NOT asynchronous: the call of all_gather by gloo returns only when")


def test_collectives_too_short_to_tell() -> None:
    assert _behind(launch=0.4, done=0.5, both=80.0).verdict.startswith("too short")


def test_bandwidth_is_that_of_the_slowest_rank() -> None:
    times = {"all_gather": [1.0, 2.0, 4.0], "reduce_scatter": [1.0, 2.0, 3.0], "all_reduce": [2.0, 4.0, 4.0]}
    quick = [{"op": op, "nbytes": 8_000_000, "ms": [ms / 2 for ms in found]} for op, found in times.items()]
    slow = [{"op": op, "nbytes": 8_000_000, "ms": found} for op, found in times.items()]
    found = bandwidth.conclude([quick, slow, quick, quick])
    gather, scatter, reduce = found.rows
    assert gather.ms == Spread(2.0, 1.0, 4.0)
    assert gather.algorithm_gb_s == scatter.algorithm_gb_s == pytest.approx(4.0)
    assert gather.bus_gb_s == pytest.approx(4.0 * 3 / 4)
    assert reduce.algorithm_gb_s == pytest.approx(2.0)
    assert reduce.bus_gb_s == pytest.approx(2.0 * 2 * 3 / 4)
    assert found.latency_ms == 4.0
    assert found.verdict == (
        "at best all_gather 3, reduce_scatter 3, all_reduce 3 GB/s a rank; a small collective takes 4 ms"
    )


def _timed(op: str, n_ranks: int, hop_ms: float, gb_s: float) -> list[dict[str, Any]]:
    """What a link of that latency and bandwidth would take."""
    share = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}[op] * (n_ranks - 1) / n_ranks
    hops = share * n_ranks
    return [
        {"op": op, "nbytes": nbytes, "ms": [hops * hop_ms + nbytes * share / gb_s / 1e6] * 3}
        for nbytes in (4096, 262144, 16 * MB)
    ]


def test_links_are_those_that_the_times_were_made_of() -> None:
    rows = _timed("all_gather", 4, 0.2, 1.5) + _timed("reduce_scatter", 4, 0.3, 1.0) + _timed("all_reduce", 4, 9, 9)
    pairs = [{**row, "replicas": True} for row in _timed("all_reduce", 2, 0.5, 0.7)]
    found = bandwidth.conclude([rows + pairs] * 4)
    assert [(link.lane, link.n_ranks) for link in found.links] == [("gather", 4), ("reduce", 4), ("replicate", 2)]
    for link, hop_ms, gb_s in zip(found.links, (0.2, 0.3, 0.5), (1.5, 1.0, 0.7), strict=True):
        assert (link.latency_ms, link.gb_s) == pytest.approx((hop_ms, gb_s))
        assert link.error_percent == pytest.approx(0, abs=1e-6)
    assert len(found.rows) == 9, "those between replicas are apart"
    assert found.replicas[-1].bus_gb_s == pytest.approx(16 * MB / found.replicas[-1].ms.median / 1e6)


def test_times_of_no_line_still_give_a_link() -> None:
    falling = [links.Point(4e3, 2e-3), links.Point(1e6, 1e-3)]
    found = links.fit("all_gather", 2, falling)
    assert found is not None
    assert found.latency_ms == pytest.approx(1)
    assert 0 < found.gb_s < math.inf
    steep = links.fit("all_gather", 2, [links.Point(1e3, 1e-6), links.Point(1e6, 1.0)])
    assert steep is not None
    assert (steep.latency_ms, steep.gb_s) == pytest.approx((0, 1e-3))
    assert steep.error_percent == pytest.approx(100 * (1e-3 - 1e-6) / 1e-6)


def test_a_large_message_that_was_slow_does_not_hide_the_latency() -> None:
    seconds = {4e3: 1.0e-3, 256e3: 1.26e-3, 2e6: 3.0e-3, 16e6: 34e-3}
    found = links.fit("all_gather", 2, [links.Point(nbytes, took_s) for nbytes, took_s in seconds.items()])
    assert found is not None
    assert found.latency_ms == pytest.approx(1, rel=0.2)


def test_one_size_gives_no_link() -> None:
    found = bandwidth.conclude([_timed("all_gather", 2, 1, 1)[:1]] * 2)
    assert found.links == []
    assert links.hardware({"bandwidth": found}) is None
    assert links.hardware({}) is None


def test_what_compute_costs_transfers_that_are_too_short_is_not_told() -> None:
    found = bandwidth.conclude([_timed("all_gather", 2, 0.2, 1.5)] * 2)
    short, long = (_behind(launch=0.1, done=done, both=90.0) for done in (0.5, 5.0))
    for asynchronous, expected in ((short, {}), (long, {"gather": pytest.approx(1.1)})):
        hardware = links.hardware({"bandwidth": found, "asynchrony": asynchronous})
        assert hardware is not None
        assert hardware.wire_slowdown == expected
        assert hardware.compute_slowdown == {"gather": pytest.approx(1.5)}


def test_the_report_has_the_hardware_that_a_plan_takes(tmp_path: Path) -> None:
    rows = _timed("all_gather", 2, 0.2, 1.5) + _timed("reduce_scatter", 2, 0.3, 1.0) + _timed("all_reduce", 2, 1, 1)
    found = bandwidth.conclude([rows] * 2)
    written = _report(bandwidth=found, asynchrony=_behind(launch=2.0, done=100.0, both=120.0))
    replace(tmp_path / "report.json", report.as_json(written).encode())
    read = Hardware.read(tmp_path / "report.json")
    assert tuple(read.shard) == pytest.approx((1.5e9, 0.2e-3))
    assert read.reduce is not None
    assert tuple(read.reduce) == pytest.approx((1e9, 0.3e-3))
    assert read.replicate is None
    assert read.compute_slowdown == pytest.approx({"gather": 1.5})
    assert read.wire_slowdown == pytest.approx({"gather": 1.1})
    assert read.launch_s == pytest.approx(2e-3)
    assert read.flops_s == 3e9
    text = terminal.as_text(written)
    assert ["gather", "lane", "2", "0.2", "1.5", "0", "%"] in [line.split() for line in text.splitlines()]
    assert "gather: compute x 1.50, transfers x 1.10" in " ".join(text.split())
    assert json.loads(report.as_json(_report(asynchrony=_behind(1.0, 100.0, 120.0))))["hardware"] is None


def test_sizes_grow_to_the_largest() -> None:
    assert bandwidth.sizes(1.0) == [4096, 32768, 262144, MB]
    assert bandwidth.sizes(0.002) == [2097]


def _step(compute: float, serial: float, overlapped: float) -> overlap.Row:
    return overlap.Row("stage 2", _flat(compute), _flat(serial), _flat(overlapped), {"gather": 40.0, "exposed": 9.0})


def test_the_hidden_part_is_that_of_the_communication() -> None:
    assert _step(100, 180, 120).communication_ms == 80
    assert _step(100, 180, 120).hidden_percent == pytest.approx(75)
    assert _step(100, 180, 190).hidden_percent == 0.0
    assert _step(100, 180, 98).hidden_percent == 100.0


def test_the_hidden_part_is_not_told_where_it_cannot_be() -> None:
    disturbed, too_short = _step(200, 250, 106), _step(100, 104, 100)
    assert disturbed.hidden_percent is too_short.hidden_percent is None
    verdict = overlap.Overlap(8.0, 32, 3, True, [disturbed, too_short]).verdict
    assert "cannot be told" in verdict
    assert "too little communication" in verdict


def test_a_steps_time_is_that_of_the_slowest_rank() -> None:
    def of_rank(factor: float) -> dict[str, Any]:
        rounds = {"compute 1": [10, 11, 12], "serial 1": [20, 21, 22], "overlapped 1": [12, 13, 14]}
        lanes = {"1": {"gather": 5.0}}
        scaled = {name: [factor * ms for ms in found] for name, found in rounds.items()}
        return {"width": 512, "batch_rows": 7, "replicas": [1], "rounds": scaled, "lanes": lanes}

    found = overlap.conclude([of_rank(1), of_rank(2)], on_cpu=True)
    assert found.rows[0].compute_ms == Spread(22, 20, 24)
    assert found.parameters_mb == 12.0
    assert "takes processor time itself" in found.verdict
    assert "takes processor time itself" not in overlap.conclude([of_rank(1)], on_cpu=False).verdict


# -- the report --------------------------------------------------------------------------------------------------------


def _report(**results: Any) -> Report:
    return Report.begun()._replace(complete=True, results=results)


def _right() -> parity.Parity:
    return parity.conclude([_of_rank()] * 2)


def test_a_report_is_right_if_all_of_it_is() -> None:
    wrong = parity.conclude([_of_rank(), _of_rank(digest="e")])
    assert _report(parity=_right()).exit_code == 0
    assert _report(parity=wrong).exit_code == 1
    assert _report(parity=_right())._replace(complete=False).exit_code == 1
    assert _report(parity=_right())._replace(failures=[Failure("overlap", 1, "gone")]).exit_code == 1


def test_json_says_what_the_text_says() -> None:
    found = _report(parity=_right(), overlap=overlap.Overlap(8.0, 32, 3, False, [_step(100, 180, 120)]))
    data, text = json.loads(report.as_json(found)), terminal.as_text(found)
    assert (data["doctor"], data["passed"], data["exit_code"]) == (1, True, 0)
    assert data["results"]["overlap"]["rows"][0]["serial_ms"] == {"median": 180, "low": 180, "high": 180}
    for result in data["results"].values():
        assert result["verdict"] in " ".join(text.split())
    assert "all that was checked is right" in text


def test_a_failure_is_printed_with_its_rank() -> None:
    failed = _report(parity=_right())._replace(failures=[Failure("bandwidth", 3, "CommError: gone")])
    text = terminal.as_text(failed)
    assert "FAILED: bandwidth on rank 3: CommError: gone" in text
    assert "something is wrong" in text


def test_progress_is_silent_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for wanted, forced, shown in ((True, "0", False), (True, "1", True), (False, "1", False)):
        monkeypatch.setenv("TTY_COMPATIBLE", forced)
        with showing_progress("doctor", wanted=wanted) as show:
            show("weighing the ranks")
            time.sleep(0.3)
        out, err = capsys.readouterr()
        assert out == ""
        assert ("weighing the ranks" in err) is shown, (wanted, forced)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.txt"
    replace(path, b"old")
    assert path.stat().st_mode & 0o600 == 0o600

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_handed_in_comes_out(tmp_path: Path) -> None:
    assert report.collect(tmp_path) is None
    handed = _report(parity=_right())
    report.hand_in(tmp_path, handed)
    assert report.collect(tmp_path) == handed
