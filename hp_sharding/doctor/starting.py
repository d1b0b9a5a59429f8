"""Starts the ranks of an examination on this machine with Paddle's launcher, and waits for the report of rank 0."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import paddle

from .report import Failure, Report, Request, collect

_SCRIPT = Path(__file__).resolve().parent.parent / "__main__.py"
_POLL_S = 0.1
_START_S = 120.0
"""How long the ranks may take to start, beside what the request allows for a late one."""
_END_S = 20.0
"""How long the launcher may take to end once the report is there."""
_GOODBYE_S = 15.0
"""How long it may take when it is asked to end."""
_LOG_CHARS = 1500
_BLAMING = ("was aborted", "status failed")
"""In the lines of the launcher, which it has two of, that say which rank has died."""


def start_ranks(nproc: int, request: Request, show: Callable[[str], None]) -> Report:
    """Runs the examination on ``nproc`` ranks and returns rank 0's report, or what there is of it.

    Args:
        nproc: number of ranks.
        request: what is wanted.
        show: called with what is being done.
    """
    with tempfile.TemporaryDirectory(prefix="hp_sharding_doctor_") as name:
        folder = Path(name)
        with (folder / "launcher.log").open("wb") as log:
            process = subprocess.Popen(
                _command(nproc, request, folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        show(f"starting {nproc} ranks")
        try:
            is_over = _await_end(process, folder, show, patience_s=_START_S + 2 * request.timeout_s)
        finally:
            _end(process, folder)
        return _collect(folder, process.returncode, is_over=is_over)


def _command(nproc: int, request: Request, folder: Path) -> list[str]:
    options = ["--hand-in", str(folder), "--max-mb", str(request.max_mb), "--timeout-s", str(request.timeout_s)]
    options += ["--quick"] if request.quick else []
    options += [part for name in request.only for part in ("--only", name)]
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--log_dir", str(folder / "log"), *_seats(nproc)]
    return [*launcher, str(_SCRIPT), "doctor", *options]


def _seats(nproc: int) -> list[str]:
    if has_devices():
        return ["--devices", ",".join(map(str, range(nproc)))]
    return ["--nproc_per_node", str(nproc), "--backend", "gloo"]


def has_devices() -> bool:
    """Whether the launcher would run ranks on something else than CPU."""
    is_built_for_one = paddle.is_compiled_with_cuda() or paddle.is_compiled_with_xpu()
    if is_built_for_one and paddle.device.get_device() != "cpu":
        return True
    return bool(paddle.device.get_all_custom_device_type())


def _await_end(
    process: subprocess.Popen[bytes], folder: Path, show: Callable[[str], None], *, patience_s: float
) -> bool:
    """Shows what rank 0 does until the launcher has ended; False if nothing new came for ``patience_s``."""
    last, since_s = "", time.monotonic()
    while process.poll() is None:
        doing = _read(folder / "doing")
        if doing and doing != last:
            last, since_s = doing, time.monotonic()
            show(doing)
        report = collect(folder)
        if report is not None and report.complete:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            return True
        if time.monotonic() - since_s > patience_s:
            return False
        time.sleep(_POLL_S)
    return True


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Ends the launcher, which ends its ranks, and then what is left of either."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GOODBYE_S)
        for pid in [process.pid, *(int(_read(path)) for path in folder.glob("rank*.pid"))]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _collect(folder: Path, code: int, *, is_over: bool) -> Report:
    report = collect(folder)
    if report is not None and report.complete:
        return report
    report = report or Report.begun()
    doing = _read(folder / "doing") or "starting the ranks"
    how = f"the launcher ended with {code}" if is_over else "nothing moved any more, and they were ended"
    blamed = [line for line in _read(folder / "launcher.log").splitlines() if any(word in line for word in _BLAMING)]
    how = f"{how}; {blamed[-1]}" if blamed else how
    text = f"not all of the report came from rank 0, last seen at: {doing}; {how}.\n{_logs(folder)}"
    return report._replace(failures=[*report.failures, Failure("ranks", None, text)])


def _logs(folder: Path) -> str:
    paths = sorted((folder / "log").glob("workerlog.*")) or [folder / "launcher.log"]
    return "\n".join(f"---- the end of {path.name}\n{_read(path)[-_LOG_CHARS:].strip()}" for path in paths)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
