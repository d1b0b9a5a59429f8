"""How fast checkpoints are written and read, beside Paddle's own files and beside plain files of as many bytes.

    python -m benchmarks.checkpoint                     # two ranks, a GPT of 32 million parameters; two minutes
    python -m benchmarks.checkpoint --folder /mnt/checkpoints --rounds 9 --json

Two ranks that have sharded parameters and AdamW's moments save and load them at the same time, each its half. Beside
it, in turns within each round: ``paddle.save`` and ``paddle.load`` of the same tensors, a file a rank, and a plain file
of exactly as many bytes a rank, written and read in one go. Whatever is written is on the disk (``fsync``) when the
clock stops; before what is read *from disk*, the system is told to forget its copy of the files. Times are medians over
rounds, of the slower rank; *x plain* is the median of the plain file's time over this one's in the same round. The last
rows are about a save that is written behind the training: how long the call takes, how long a step takes that has it
behind it, and how long one without.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import links
from benchmarks.circumstances import machine
from benchmarks.quiet import Meter, await_quiet

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.gpt import Batches

_MB = 2**20
NRANKS = 2
TARGET_SHARE = 0.8
"""Of the bandwidth of plain writing, that a save should reach at least."""
FOREIGN_LIMIT = 0.03
WRITES = {
    "plain_write": "plain file, written",
    "save": "hp_sharding.save",
    "paddle_save": "paddle.save",
}
READS = {
    "plain_read": "plain file, read",
    "load": "hp_sharding.load",
    "paddle_load": "paddle.load",
}
COLD = "_from_disk"
BEHIND = {
    "step": "a step",
    "held": "hp_sharding.save(asynchronous=True), the call",
    "step_behind": "the step that has it behind it",
    "written": "from the call to wait()",
}
"""Names of what is measured, and what they are called in the table."""


class Times(NamedTuple):
    """Of one round: milliseconds of the slower rank, by what was measured; and what others took of the processor."""

    ms: dict[str, float]
    foreign_share: float


def main() -> None:
    """Runs the benchmark, or one rank of it."""
    options = _options()
    if options.as_rank:
        print(json.dumps(_measure(options)))
        return
    folder = tempfile.mkdtemp(prefix="hp_sharding_benchmark_", dir=options.folder)
    try:
        result = {**_circumstances(options), **_run(options, folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _print(result)
    if options.json:
        print(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bandwidth of checkpoints beside Paddle's own and plain files.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=10, help="of the model; each has 38 MB of state (default: 10)")
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3])
    parser.add_argument("--patience-s", type=float, default=120, help="seconds for waiting until nothing else runs")
    parser.add_argument("--folder", default=None, help="where to write; default: the system's temporary folder")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    argv = [sys.executable, "-W", "ignore", "-m", "benchmarks.checkpoint", "--as-rank", "--folder", folder]
    argv += [f"--{name}={getattr(options, name)}" for name in ("rounds", "layers", "stage")]
    argv.append(f"--patience-s={options.patience_s}")
    with links.loopback(NRANKS) as hosts:
        outputs = links.run_ranks(argv, links.seats(hosts, NRANKS), timeout_s=1800, environment=_environment())
    ranks = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    state_bytes = sum(rank["file_bytes"] for rank in ranks)
    times_ms = ranks[0]["ms"]
    rows = {name: _row(ms, state_bytes) for name, ms in times_ms.items()}
    for name in rows.keys() - BEHIND.keys():
        rows[name]["share_of_plain"] = _share(times_ms[name], times_ms[_plain_of(name)])
    return {
        "state_mb": state_bytes / _MB,
        "rows": rows,
        "same_numbers": all(rank["same_numbers"] for rank in ranks),
        "foreign_cpu_share": statistics.fmean(ranks[0]["foreign_shares"]),
        "target_share": TARGET_SHARE,
        "target_met": rows["save"]["share_of_plain"] >= TARGET_SHARE,
    }


def _environment() -> dict[str, str]:
    """One thread a rank, and Paddle's MKL told not to pick slow kernels on AMD. Before Paddle is imported."""
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return environment | ({"MKL_DEBUG_CPU_TYPE": "5"} if "AMD" in machine() else {})


def _row(ms: list[float], state_bytes: int) -> dict[str, float]:
    median_ms = statistics.median(ms)
    return {"ms": median_ms, "min_ms": min(ms), "max_ms": max(ms), "mb_per_s": state_bytes / _MB / median_ms * 1e3}


def _share(ms: list[float], plain_ms: list[float]) -> float:
    """Of the plain file's bandwidth in the same round: the median over rounds."""
    return statistics.median(plain / own for own, plain in zip(ms, plain_ms, strict=True))


# -- a rank ------------------------------------------------------------------------------------------------------------


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """One rank's part. Times are the same on every rank."""
    import paddle.distributed as dist

    dist.init_parallel_env()
    subject = _Subject(options)
    rounds = [subject.take_round(number) for number in range(options.rounds + 1)][1:]  # the first makes the files
    return {
        "ms": {name: [each.ms[name] for each in rounds] for name in rounds[0].ms},
        "file_bytes": subject.file_bytes,
        "same_numbers": subject.same_numbers,
        "foreign_shares": [each.foreign_share for each in rounds],
    }


class _Subject:
    """What is saved and loaded, and trained meanwhile.

    Attributes:
        file_bytes: what this rank writes.
        same_numbers: whether what was loaded was what had been saved, bit for bit.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        import paddle.distributed as dist

        from benchmarks.gpt import Batches, Shape, build_model, build_optimizer
        from hp_sharding import ShardingConfig, shard

        shape = Shape(layers=options.layers)
        self._rank = dist.get_rank()
        self._patience_s = options.patience_s
        self._folder = Path(options.folder)
        self._model = build_model(shape)
        config = ShardingConfig(stage=options.stage, allgather_overlap=True, reduce_overlap=True, comm_buffer_size_MB=8)
        self._optimizer = shard(self._model, build_optimizer(self._model), config)
        self._batches: Batches = Batches(shape, self._rank)
        self.same_numbers = True
        self._step()
        self.file_bytes = self._find_file_bytes()
        self._buffer = _random_bytes(self.file_bytes)

    def take_round(self, number: int) -> Times:
        """Every variant once, in turns that begin elsewhere in each round."""
        if self._rank == 0:
            self._patience_s -= await_quiet(FOREIGN_LIMIT, self._patience_s)
        _together()
        calls = list(self._calls().items())
        start = number % len(calls)
        ms: dict[str, float] = {}
        own_begin_s = time.process_time()
        with Meter() as meter:
            for name, call in [*calls[start:], *calls[:start]]:
                for row, forgets in ((name, False), (name + COLD, True)) if name in READS else ((name, False),):
                    if forgets:
                        self._forget_cached()
                    ms[row] = _time_ms(call)
            ms |= self._train_meanwhile()
            meter.own_s = _sum(time.process_time() - own_begin_s)
        order = [row for name in (*WRITES, *READS) for row in (name, name + COLD) if row in ms]
        return Times({name: ms[name] for name in (*order, *BEHIND)}, meter.foreign_share())

    def _calls(self) -> dict[str, Callable[[], object]]:
        import hp_sharding

        plain, ours = self._folder / f"plain-{self._rank}", self._folder / "ours"
        return {
            "plain_write": lambda: _write(plain, self._buffer),
            "save": lambda: hp_sharding.save(ours, self._model, self._optimizer),
            "paddle_save": self._paddle_save,
            "plain_read": lambda: _read(plain, self._buffer),
            "load": self._load,
            "paddle_load": self._paddle_load,
        }

    def _load(self) -> None:
        import hp_sharding

        hp_sharding.load(self._folder / "ours", self._model, self._optimizer)

    def _paddle_save(self) -> None:
        import paddle

        path = self._folder / f"theirs-{self._rank}"
        paddle.save(self._state(), str(path))
        _sync(path)

    def _paddle_load(self) -> None:
        import paddle

        paddle.load(str(self._folder / f"theirs-{self._rank}"))

    def _state(self) -> dict[str, Any]:
        """This rank's shards and moments."""
        shards = {f"shard {buffer.name}": buffer.shard for buffer in self._optimizer.buffers}
        moments = {key: value for key, value in self._optimizer.state_dict().items() if hasattr(value, "numpy")}
        return {**shards, **moments}

    def _train_meanwhile(self) -> dict[str, float]:
        import hp_sharding

        found = {"step": _time_ms(self._step)}
        _together()
        begin_s = time.perf_counter()
        pending = hp_sharding.save(self._folder / "behind", self._model, self._optimizer, asynchronous=True)
        found["held"] = _max_ms(time.perf_counter() - begin_s)
        found["step_behind"] = _time_ms(self._step)
        pending.wait()
        found["written"] = _max_ms(time.perf_counter() - begin_s)
        return found

    def _step(self) -> None:
        codes, targets = self._batches.draw()
        self._model(codes, targets).backward()
        self._optimizer.step()
        self._optimizer.clear_grad()

    def _find_file_bytes(self) -> int:
        import hp_sharding

        before = [buffer.shard.clone() for buffer in self._optimizer.buffers]
        path = self._folder / "ours"
        hp_sharding.save(path, self._model, self._optimizer)
        hp_sharding.load(path, self._model, self._optimizer)
        pairs = zip(before, self._optimizer.buffers, strict=True)
        self.same_numbers = all(bool((old == buffer.shard).all()) for old, buffer in pairs)
        return sorted(path.glob("*.safetensors"))[self._rank].stat().st_size

    def _forget_cached(self) -> None:
        """The system forgets what it has of the files in memory. They are on the disk."""
        for path in (path for path in self._folder.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _random_bytes(nbytes: int) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


def _write(path: Path, data: np.ndarray[Any, Any]) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb", buffering=0) as file:
        left = memoryview(data.data)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    _sync(path.parent)


def _read(path: Path, data: np.ndarray[Any, Any]) -> None:
    with path.open("rb", buffering=0) as file:
        left = memoryview(data.data)
        while left:
            left = left[file.readinto(left) :]


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _time_ms(call: Callable[[], object]) -> float:
    """Of the slower rank."""
    _together()
    begin_s = time.perf_counter()
    call()
    return _max_ms(time.perf_counter() - begin_s)


def _together() -> None:
    import paddle.distributed as dist

    dist.barrier()


def _max_ms(seconds: float) -> float:
    return 1e3 * _reduced(seconds, "MAX")


def _sum(value: float) -> float:
    return _reduced(value, "SUM")


def _reduced(value: float, op: str) -> float:
    import paddle
    import paddle.distributed as dist

    tensor = paddle.to_tensor([value], dtype="float64")
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return float(tensor)


# -- what came of it ---------------------------------------------------------------------------------------------------


def _circumstances(options: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "benchmark": "checkpoint",
        "command": f"python -m benchmarks.checkpoint {' '.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "paddle": version("paddlepaddle"),
        "nranks": NRANKS,
        "rounds": options.rounds,
    }


def _print(result: dict[str, Any]) -> None:
    print(f"{result['machine']}; Paddle {result['paddle']}; {result['date']}; {result['state_mb']:.0f} MB of state")
    what = f"median over {result['rounds']} rounds"
    print(f"{what:<56}{'ms':>8}{'(min-max)':>16}{'MB/s':>8}{'x plain':>9}")
    for name, row in result["rows"].items():
        spread = f"({row['min_ms']:.0f}-{row['max_ms']:.0f})"
        line = f"{_title(name):<56}{row['ms']:>8.0f}{spread:>16}"
        if name not in BEHIND:
            line += f"{row['mb_per_s']:>8.0f}{row['share_of_plain']:>9.2f}"
        print(line)
    share, met = result["rows"]["save"]["share_of_plain"], "met" if result["target_met"] else "missed"
    print(f"hp_sharding.save: {share:.2f} of plain writing, at least {TARGET_SHARE:g}: {met}")
    if not result["same_numbers"]:
        print("WARNING: what was loaded was not what had been saved")
    if result["foreign_cpu_share"] > FOREIGN_LIMIT:
        share = f"{100 * result['foreign_cpu_share']:.0f} %"
        print(f"WARNING: other programs took {share} of the processor meanwhile; measure again on a quiet machine")


def _title(name: str) -> str:
    if name in BEHIND:
        return BEHIND[name]
    return (WRITES | READS)[name.removesuffix(COLD)] + (", from disk" if name.endswith(COLD) else "")


def _plain_of(name: str) -> str:
    if name in WRITES:
        return "plain_write"
    return "plain_read" + (COLD if name.endswith(COLD) else "")


if __name__ == "__main__":
    main()
