"""How well the order of the communication hides it, on the stand-in device: hp_sharding beside Paddle's sharding V2.

    python -m benchmarks.device_step                  # two ranks, one processor core each; about three minutes
    python -m benchmarks.device_step --replicas 2     # two replicas of two ranks each
    python -m benchmarks.device_step --replicas 2 --modelled-compute 400
    python -m benchmarks.device_step --quick          # a look at whether it works; its figures mean little

V2 does not run on CPU. The stand-in (``tests/device/standin``) is a device on which it does, whose collectives take a
given time on streams of their own. What is compared is what each overlaps with what; about the speed of any
accelerator it says nothing.

First compute alone is measured. Then the bandwidth is set such that what a step of stage 2 sends takes as long as
that, and stays so. Then all contenders take turns, as in ``benchmarks.step``: same model, same batches, same size of
buckets. With ``--modelled-compute`` the layers of a small model wait as well as compute, so that ranks that share a
core do not slow each other down.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import course, device_report, links, report
from benchmarks.circumstances import machine
from benchmarks.contenders import CONTENDERS, SHARD_RANKS
from benchmarks.device_contenders import ON_DEVICE
from benchmarks.device_pace import Traffic, bandwidth_mb_s, parameter_bytes, traffic
from benchmarks.turns import serve
from tests.device import standin

if TYPE_CHECKING:
    from benchmarks.contenders import Trainee
    from benchmarks.gpt import Batches

_LITTLE_WORK = {"heads": 4, "context": 16, "vocabulary": 256, "batch": 1}
_PATIENT_S = 600.0
"""For the device: processes that wait for their turn are stopped, which must not look like a rank that is gone."""


class Size(NamedTuple):
    """Of what is trained.

    Attributes:
        shape: all fields of ``benchmarks.gpt.Shape``.
        buffer_mb: of the buckets, in whole units of 2**20 bytes as V2 wants it: a little more than a block.
    """

    shape: dict[str, int]
    buffer_mb: int


_REAL = Size({"layers": 8, "width": 256, "heads": 8, "context": 128, "vocabulary": 1024, "batch": 4}, 4)
_MODELLED = Size({"layers": 8, "width": 128, **_LITTLE_WORK}, 1)
_QUICK = Size({"layers": 2, "width": 64, **_LITTLE_WORK}, 1)


class Calibration(NamedTuple):
    """The pace of the links, and where it comes from.

    Attributes:
        compute_ms: median step of compute alone, on as many ranks as there are in the comparison.
        sent: what a rank sends in a step of stage 2.
        pace: at which sending it takes ``compute_ms``.
    """

    compute_ms: float
    sent: Traffic
    pace: standin.Pace


def main() -> None:
    """Runs the benchmark, or one rank of it."""
    options = _options()
    if options.as_rank:
        _be_rank(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    reason = standin.why_missing()
    if reason is not None:
        sys.exit(f"no stand-in device: {reason}")
    standin.built()
    calibration = _calibrate(options)
    device_report.print_pace(calibration.compute_ms, calibration.sent, calibration.pace)
    result = _measure(options, calibration)
    device_report.print_tables(result)
    if options.json:
        print(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="hp_sharding beside Paddle's sharding V2, on the stand-in device.")
    parser.add_argument("--contenders", nargs="+", choices=ON_DEVICE, default=list(ON_DEVICE), metavar="NAME")
    parser.add_argument("--replicas", type=int, default=1, help=f"of {SHARD_RANKS} ranks each")
    parser.add_argument("--modelled-compute", type=float, metavar="MS", help="layers wait this long a step, in all")
    parser.add_argument("--latency-ms", type=float, default=0.2, help="of every collective")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each contender in each round")
    parser.add_argument("--patience-s", type=float, default=120, help="seconds for waiting while others are busy")
    parser.add_argument("--buffer-mb", type=int, help="comm_buffer_size_MB of all; default: a little more than a block")
    parser.add_argument("--replicate-mb", type=float, help="hp_sharding's replicate_buffer_size_MB; default: half that")
    parser.add_argument(
        "--timeline", action="store_true", help="hp_sharding's own record of its lanes, for which it takes some time"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round of two steps")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--as-rank", choices=ON_DEVICE, help=argparse.SUPPRESS)
    parser.add_argument("--bandwidth-mb-s", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--pipe", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = _QUICK if options.quick else _MODELLED if options.modelled_compute else _REAL
    options.shape = size.shape
    options.buffer_mb = options.buffer_mb or size.buffer_mb
    options.replicate_mb = options.replicate_mb or options.buffer_mb / 2
    if options.quick:
        options.rounds, options.steps, options.patience_s = 1, 2, 0.0
    return options


# -- one rank ----------------------------------------------------------------------------------------------------------


def _be_rank(options: argparse.Namespace) -> None:
    pace = standin.Pace(latency_ms=options.latency_ms, bandwidth_mb_s=options.bandwidth_mb_s)
    # Over what the group sets for Gloo, and before Paddle's import, which loads the device.
    os.environ.update(standin.environment(pace, timeout_s=_PATIENT_S, caching=True))
    import paddle

    from benchmarks.gpt import Batches, Shape

    paddle.set_device("npu")
    shape = Shape(**options.shape)

    def build() -> tuple[Trainee, Batches]:
        sizes = {"comm_buffer_size_MB": options.buffer_mb, "replicate_buffer_size_MB": options.replicate_mb}
        trainee = CONTENDERS[options.as_rank].build(shape, {**sizes, "timeline": options.timeline})
        if not options.timeline:
            trainee.timeline = None  # so that no steps are recorded, either
        if options.modelled_compute:
            from benchmarks.device_compute import pause_in_matmuls

            pause_in_matmuls(trainee.forward, options.modelled_compute)
        trainee.drain = paddle.device.synchronize
        return trainee, Batches(shape, int(os.environ["PADDLE_TRAINER_ID"]))

    serve(connection.Connection(options.pipe), build)


# -- the run -----------------------------------------------------------------------------------------------------------


def _calibrate(options: argparse.Namespace) -> Calibration:
    """Measures compute alone, and derives the pace from it."""
    brought = _run(options, ["compute"], standin.Pace(), rounds=min(options.rounds, 3))
    compute_ms = report.row(brought.turns["compute"], None)["step_ms"]
    sent = traffic(
        parameter_bytes(options.shape),
        replicas=options.replicas,
        buffer_mb=options.buffer_mb,
        replicate_mb=options.replicate_mb,
    )
    bandwidth = bandwidth_mb_s(sent, communication_ms=compute_ms, latency_ms=options.latency_ms)
    return Calibration(compute_ms, sent, standin.Pace(latency_ms=options.latency_ms, bandwidth_mb_s=bandwidth))


def _run(options: argparse.Namespace, contenders: list[str], pace: standin.Pace, *, rounds: int) -> course.Course:
    nranks = SHARD_RANKS * options.replicas
    with links.loopback(nranks) as hosts:
        return course.run(
            contenders,
            links.seats(hosts, nranks),
            command=lambda name: _rank_command(options, name, pace),
            schedule=course.Schedule(rounds, options.steps, options.patience_s),
        )


def _rank_command(options: argparse.Namespace, name: str, pace: standin.Pace) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.device_step", "--as-rank", name]
    command += ["--latency-ms", str(pace.latency_ms), "--bandwidth-mb-s", str(pace.bandwidth_mb_s)]
    command += ["--buffer-mb", str(options.buffer_mb), "--replicate-mb", str(options.replicate_mb)]
    command += ["--modelled-compute", str(options.modelled_compute)] if options.modelled_compute else []
    return [*command, *(f"--{flag}" for flag in ("timeline", "quick") if getattr(options, flag))]


def _measure(options: argparse.Namespace, calibration: Calibration) -> dict[str, Any]:
    brought = _run(options, options.contenders, calibration.pace, rounds=options.rounds)
    rows = {name: device_report.row(turns, brought.turns.get("compute")) for name, turns in brought.turns.items()}
    share = device_report.communication_share(rows, calibration.compute_ms)
    comparable = not options.quick and brought.foreign_share <= course.FOREIGN_LIMIT and device_report.is_fair(share)
    return {
        **_circumstances(options, calibration),
        "foreign_cpu_share": brought.foreign_share,
        "turns_repeated": brought.repeated,
        "communication_of_compute": share,
        "rows": rows,
        "losses": report.compare_losses(brought.losses),
        "targets": device_report.judge(rows, replicas=options.replicas) if comparable else [],
    }


def _circumstances(options: argparse.Namespace, calibration: Calibration) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "benchmark": "device_step",
        "command": f"python -m benchmarks.device_step {' '.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "paddle": version("paddlepaddle"),
        "nranks": SHARD_RANKS * options.replicas,
        "replicas": options.replicas,
        "shape": options.shape,
        "modelled_compute_ms": options.modelled_compute,
        "timeline": options.timeline,
        "quick": options.quick,
        "rounds": options.rounds,
        "steps": options.steps,
        "buffer_mb": options.buffer_mb,
        "replicate_mb": options.replicate_mb,
        "calibration": {
            "compute_ms": calibration.compute_ms,
            **calibration.sent._asdict(),
            "latency_ms": calibration.pace.latency_ms,
            "bandwidth_mb_s": calibration.pace.bandwidth_mb_s,
        },
    }


if __name__ == "__main__":
    main()
