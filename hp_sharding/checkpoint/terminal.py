"""How a checkpoint looks on a terminal."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from .contents import Contents, StoredTensor
from .converting import Progress as Told

_WIDTH = 120
"""Where there is no terminal."""
_LISTED = 20
"""Items of a list or a dict in the state; of a larger one the rest is counted."""


def show(contents: Contents, *, wanted: str = "", with_state: bool = False) -> None:
    """Prints on stdout what is in a checkpoint.

    Args:
        contents: of the checkpoint.
        wanted: only tensors with this in their name.
        with_state: also what is not tensors.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(Text(contents.path, style="bold"), soft_wrap=True)
    _print_facts(console, contents)
    tensors = [tensor for tensor in contents.tensors if wanted in tensor.name]
    if contents.tensors:
        console.print(_table(contents, tensors, wanted))
    if with_state:
        console.print(json.dumps(_shortened(contents.state), indent=2), markup=False, soft_wrap=True)
    if contents.leftovers:
        size = size_text(sum(contents.leftovers.values()))
        count = f"{len(contents.leftovers)} file{'s' * (len(contents.leftovers) > 1)}"
        text = f"also here: {count}, {size}, of saves that did not finish or are still running"
        console.print(Text(text, style="yellow"), soft_wrap=True)
    if contents.damage:
        console.print(Text(f"cannot be loaded: {contents.damage}", style="bold red"), soft_wrap=True)


@contextlib.contextmanager
def progress(doing: str, total_bytes: int) -> Iterator[Told]:
    """A bar on stderr, where that is a terminal. Gives a function that moves it on by some bytes; any thread may."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(doing, total=total_bytes)
        yield lambda nbytes: bar.advance(task, nbytes)


def size_text(nbytes: int) -> str:
    """Such as ``1.23 GB``; units of 1024."""
    size, unit = float(nbytes), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} bytes" if unit == "bytes" else f"{size:.3g} {unit}"


def _print_facts(console: Console, contents: Contents) -> None:
    state = contents.state
    saved = "" if contents.saved_at is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(contents.saved_at))
    optimizer = state.get("optimizer") or ""
    files = f"{len(contents.files)}, {size_text(sum(contents.files.values()))}"
    version = f", version {contents.version}" if contents.version else ""
    facts = {
        "format": "whole files" if contents.version is None else f"sharded{version}",
        "saved": saved,
        "step": state.get("steps", ""),
        "ranks": state.get("n_ranks", ""),
        "optimizer": optimizer if contents.lr is None else f"{optimizer}, learning rate {contents.lr:.6g}",
        "files": files if contents.files else "",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        if fact != "":
            table.add_row(name, Text(str(fact)))
    console.print(table)


def _table(contents: Contents, tensors: list[StoredTensor], wanted: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", overflow="fold")
    table.add_column("dtype", no_wrap=True)
    for column in ("bytes", "files", "chunks"):
        table.add_column(column, justify="right", no_wrap=True)
    for tensor in tensors:
        counts = (str(len(tensor.files)), str(tensor.n_chunks))
        table.add_row(Text(tensor.name), str(list(tensor.shape)), tensor.dtype, size_text(tensor.nbytes), *counts)
    for alias, name in sorted(contents.aliases.items()):
        if wanted in alias or wanted in name:
            table.add_row(Text(alias), Text(f"= {name}"))
    of = f" of {len(contents.tensors)}" if len(tensors) != len(contents.tensors) else ""
    table.caption = f"{len(tensors)}{of} tensors, {size_text(sum(tensor.nbytes for tensor in tensors))}"
    return table


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        shown = {key: _shortened(item) for key, item in list(value.items())[:_LISTED]}
        return shown if len(value) <= _LISTED else {**shown, "...": f"{len(value) - _LISTED} more"}
    if isinstance(value, list):
        shown_items = [_shortened(item) for item in value[:_LISTED]]
        return shown_items if len(value) <= _LISTED else [*shown_items, f"... {len(value) - _LISTED} more"]
    return value
