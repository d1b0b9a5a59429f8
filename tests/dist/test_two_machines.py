"""The README's lines for two machines, run as they stand there, give bit for bit what one machine gives."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import links
from tests import harness, machines
from tests.record_example import Record, read_records, run_example

ADDRESSES = ("10.0.0.1", "10.0.0.2")
"""Those of the README."""

SMALL = "--steps 6 --layers 2 --width 32 --context 32 --batch 8 --sample 20 --comm-buffer-size-mb 0.02".split()
CASES = {
    "two by two": ["--sharding-degree", "2"],
    "two by two, stage 3": ["--sharding-degree", "2", "--stage", "3"],
    "one shard group": ["--sharding-degree", "4"],
}
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[links.Host]]:
    """Two machines that only a cable joins; no test here without root and the ``ip`` command."""
    reason = links.available()
    if reason is not None:
        warnings.warn(f"training on two machines was NOT tested: {reason}", stacklevel=1)
        pytest.skip(reason)
    with links.shaped(2) as found:
        yield found


def _readme_lines() -> list[str]:
    """The code blocks of the section, one for each machine."""
    section = (harness.REPO_ROOT / "README.md").read_text().partition("## Two machines")[2].partition("\n## ")[0]
    return re.findall(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def _adapt(lines: str, hosts: list[links.Host], folder: Path, logs: Path, options: list[str]) -> str:
    """The README's lines with the addresses of these machines, the recording script, and more options behind it."""
    changes = {
        **{address: host.address for address, host in zip(ADDRESSES, hosts, strict=True)},
        "python -m paddle.distributed.launch": f"{sys.executable} -m paddle.distributed.launch --log_dir {logs}",
        "examples/train_gpt.py": f"tests/record_example.py {folder}",
        "eth0": hosts[0].interface,
    }
    for old, new in changes.items():
        assert old in lines or old in ADDRESSES, f"the README has no {old!r}"
        lines = lines.replace(old, new)
    return f"{lines.rstrip()} {shlex.join(options)}"


def _run_readme(hosts: list[links.Host], tmp_path: Path, options: list[str]) -> list[Record]:
    folder = tmp_path / "records"
    folder.mkdir()
    env = {**harness.machine_env(), "PYTHONPATH": str(harness.REPO_ROOT), "PYTHONWARNINGS": "ignore"}
    lines = [
        _adapt(block, hosts, folder, tmp_path / f"log{index}", options) for index, block in enumerate(_readme_lines())
    ]
    outputs = machines.run_everywhere(lines, hosts, logs=tmp_path, timeout_s=TIMEOUT_S, env=env)
    # The first rank, and so all that the example prints, is on the machine with --rank 0.
    assert ["held-out loss" in output for output in outputs] == [True, False]
    return read_records(folder)


def _on_one_machine(rank: int, nranks: int, options: list[str]) -> Record:
    return run_example(options)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_two_machines_train_as_one_does(hosts: list[links.Host], tmp_path: Path, case: str) -> None:
    options = [*SMALL, *CASES[case]]
    found = _run_readme(hosts, tmp_path, options)
    expected = harness.run(_on_one_machine, 4, options, timeout_s=60)
    assert len(found) == 4
    assert found == expected
    assert len({record.digest for record in found}) == 1, "all ranks hold the same parameters"
    assert len({tuple(record.losses) for record in found}) == 4, "every rank has batches of its own"


def test_the_readme_has_lines_for_both_machines() -> None:
    first, second = (shlex.split(lines, comments=True) for lines in _readme_lines())
    changed = [(a, b) for a, b in zip(first, second, strict=True) if a != b]
    assert changed == [("0", "1"), ADDRESSES]


def test_nothing_is_left_on_machines_that_fail_or_hang(hosts: list[links.Host], tmp_path: Path) -> None:
    """A child in a session of its own, as the launcher makes them, goes too; the error says what was written."""
    begin = time.monotonic()
    lines = ["echo one; setsid sleep 300 & sleep 0.5; exit 3", "echo two; sleep 300"]
    with pytest.raises(AssertionError, match=r"return codes \[3, None\](?s:.*)one(?s:.*)two"):
        machines.run_everywhere(lines, hosts, logs=tmp_path, timeout_s=60, env=dict(os.environ))
    assert time.monotonic() - begin < 30
    assert [machines.pids(host) for host in hosts] == [[], []]
