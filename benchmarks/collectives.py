"""How fast each collective is, beside what Paddle offers for the same purpose.

    python -m benchmarks.collectives                    # as root: links of 1 Gbit/s between 2, then 4 hosts
    python -m benchmarks.collectives --ranks 2 --sizes-mb 32 --json

Without root it runs over loopback, and says so: those times show overheads, not links. The variants take turns within
each repeat; every figure is the median over repeats of the slowest rank's time. *Wire* is the share of what the link
could carry at best: ``(n - 1) / n`` of the message leaves each rank in a gather or a reduce-scatter, twice that in an
all-reduce. *CPU* is the processor time of all threads of one rank, this machine's network stack included.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import links

_MB = 1 << 20
VARIANTS = {
    "reduce_scatter": "ours",
    "all_gather": "ours",
    "all_reduce": "ours",
    "broadcast": "ours",
    "paddle all_reduce, then slice": "paddle",
    "paddle all_gather": "paddle",
    "paddle all_reduce": "paddle",
    "paddle broadcast": "paddle",
}
"""Name of each variant, in the order of the table, and whose it is."""


def main() -> None:
    """Runs the benchmark, or one rank of it."""
    options = _options()
    if options.as_rank:
        print(json.dumps(_measure(options.sizes_mb, options.repeats)))
        return
    reason = "asked for" if options.loopback else links.available()
    rows: list[dict[str, Any]] = []
    for nranks in options.ranks:
        network = links.loopback(nranks) if reason else links.shaped(nranks, rate_mbit=options.rate_mbit)
        with network as hosts:
            rows += _run(nranks, hosts, options)
    rate_mbit = None if reason else options.rate_mbit
    for row in rows:
        row["wire_share"] = _wire_ms(row, rate_mbit) / row["ms"] if rate_mbit else None
    _print_table(rows, f"loopback ({reason})" if reason else f"links of {rate_mbit} Mbit/s")
    if options.json:
        machine = {"machine": platform.platform(), "date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0]}
        print(json.dumps({"benchmark": "collectives", **machine, "rate_mbit": rate_mbit, "rows": rows}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bandwidth of each collective beside Paddle's own.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes-mb", type=float, nargs="+", default=[0.25, 4, 32])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rate-mbit", type=int, default=links.RATE_MBIT)
    parser.add_argument("--loopback", action="store_true", help="no shaped links, even as root")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(nranks: int, hosts: list[links.Host], options: argparse.Namespace) -> list[dict[str, Any]]:
    argv = [sys.executable, "-W", "ignore", "-m", "benchmarks.collectives", "--as-rank"]
    argv += ["--repeats", str(options.repeats), "--sizes-mb", *map(str, options.sizes_mb)]
    outputs = links.run_ranks(argv, links.seats(hosts, nranks), timeout_s=600, environment={"OMP_NUM_THREADS": "1"})
    rows: list[dict[str, Any]] = json.loads(outputs[0].strip().splitlines()[-1])
    return [{"nranks": nranks, **row} for row in rows]


def _wire_ms(row: dict[str, Any], rate_mbit: int) -> float:
    trips = {"all_reduce": 2.0, "broadcast": row["nranks"] / (row["nranks"] - 1)}
    kind = row["variant"].removeprefix("paddle ").partition(",")[0]
    # The slice is all that is asked for: the wire limit is that of a reduce-scatter.
    share = 1.0 if ", then slice" in row["variant"] else trips.get(kind, 1.0)
    nbits = row["mb"] * _MB * 8 * share * (row["nranks"] - 1) / row["nranks"]
    return float(nbits / (rate_mbit * 1e6) / links.PAYLOAD_SHARE * 1e3)


def _print_table(rows: list[dict[str, Any]], network: str) -> None:
    print(f"float32, {network}")
    print(f"{'ranks':>5} {'MB':>6}  {'collective':<30} {'ms':>8} {'(min-max)':>17} {'wire %':>7} {'CPU ms':>7}")
    for row in rows:
        wire = "" if row["wire_share"] is None else f"{100 * row['wire_share']:.1f}"
        spread = f"({row['min_ms']:.2f}-{row['max_ms']:.2f})"
        print(
            f"{row['nranks']:>5} {row['mb']:>6g}  {row['variant']:<30} {row['ms']:>8.2f} {spread:>17} {wire:>7} "
            f"{row['cpu_ms']:>7.2f}"
        )


def _measure(sizes_mb: list[float], repeats: int) -> list[dict[str, Any]]:
    """One rank's part: times every variant at every size. The same list on every rank."""
    import paddle.distributed as dist

    from hp_sharding.comm import create_communicators

    dist.init_parallel_env()
    lane = create_communicators(range(dist.get_world_size()), ["bench"], timeout_s=60)["bench"]
    rows: list[dict[str, Any]] = []
    for mb in sizes_mb:
        variants = _variants(lane, int(mb * _MB) // 4)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
        for repeat in range(repeats + 1):
            for name, variant in variants.items():
                times[name].append(_time(lane, variant))
            if repeat == 0:  # the first touches fresh memory
                times = {name: [] for name in variants}
        rows += [{"variant": name, "mb": mb, **_summary(found)} for name, found in times.items()]
    return rows


def _variants(lane: Any, numel: int) -> dict[str, Callable[[], object]]:
    import paddle
    import paddle.distributed as dist

    numel -= numel % lane.nranks
    shard = slice(lane.rank * numel // lane.nranks, (lane.rank + 1) * numel // lane.nranks)
    full, result = paddle.zeros([numel]), paddle.zeros([numel // lane.nranks])
    own = full._slice(shard.start, shard.stop)

    def all_reduce_then_slice() -> None:
        dist.all_reduce(full)
        result.copy_(own, True)

    calls: list[Callable[[], object]] = [
        lambda: lane.reduce_scatter(result, full).wait(),
        lambda: lane.all_gather(full, own).wait(),
        lambda: lane.all_reduce(full).wait(),
        lambda: lane.broadcast(full, src=0).wait(),
        all_reduce_then_slice,
        lambda: dist.stream.all_gather(full, result, sync_op=True),
        lambda: dist.all_reduce(full),
        lambda: dist.broadcast(full, src=0),
    ]
    return dict(zip(VARIANTS, calls, strict=True))


def _time(lane: Any, variant: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of the slowest rank, and processor time of the hungriest one."""
    import paddle
    import paddle.distributed as dist

    lane.all_reduce(paddle.zeros([1])).wait()  # all start together
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    variant()
    spent = [time.perf_counter() - begin_s, time.process_time() - begin_cpu_s]
    worst = paddle.to_tensor(spent, dtype="float64")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    ms, cpu_ms = (1e3 * float(value) for value in worst.numpy())
    return ms, cpu_ms


def _summary(found: list[tuple[float, float]]) -> dict[str, float]:
    ms = [each[0] for each in found]
    return {
        "ms": statistics.median(ms),
        "min_ms": min(ms),
        "max_ms": max(ms),
        "cpu_ms": statistics.median(each[1] for each in found),
    }


if __name__ == "__main__":
    main()
