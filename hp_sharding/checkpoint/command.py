"""``hp-sharding checkpoint``: looks at checkpoints, checks them, turns one form into another. No ranks, no model."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ..errors import CheckpointError, ConfigError
from . import terminal
from .contents import Contents, contents_of_files, contents_of_folder, is_ours
from .converting import Form, outputs, stored_bytes
from .converting import convert as convert_source
from .converting import verify as verify_source
from .folder import INDEX_NAME, open_checkpoint
from .source import TensorSource
from .whole_files import FORMATS, WholeFiles

_EXIT_CODES = "Exit code: 0 all is well, 1 it is damaged or incomplete, 2 wrong use."
_ENDINGS = sorted((ending for both in FORMATS.values() for ending in both), key=len, reverse=True)
_INSPECT_EXAMPLES = f"""\b
Examples:
  python -m hp_sharding checkpoint inspect runs/step_1000                      what is in it
  python -m hp_sharding checkpoint inspect runs/step_1000 --filter layers.3.   some of its tensors
  python -m hp_sharding checkpoint inspect runs/step_1000 --state              rates, your extra values
  python -m hp_sharding checkpoint inspect runs/step_1000 --json | python -m json.tool
  python -m hp_sharding checkpoint inspect exported/model.pdparams             files of Paddle's, or safetensors

\b
{_EXIT_CODES}
"""
_VERIFY_EXAMPLES = f"""\b
Examples:
  python -m hp_sharding checkpoint verify runs/step_1000   reads every byte
  python -m hp_sharding checkpoint verify runs/step_1000 && rm -r runs/step_900

\b
{_EXIT_CODES}
"""
_CONVERT_EXAMPLES = f"""\b
Examples:
  python -m hp_sharding checkpoint convert runs/step_1000 exported/model --to paddle
                                        exported/model.pdparams and exported/model.pdopt, for plain Paddle
  python -m hp_sharding checkpoint convert runs/step_1000 exported/model --to safetensors
  python -m hp_sharding checkpoint convert exported/model runs/start --to sharded --files 8
                                        a folder that hp_sharding.load reads, from .pdparams or .safetensors
  python -m hp_sharding checkpoint convert runs/step_1000 elsewhere/step_1000 --to sharded --files 1

\b
{_EXIT_CODES}
"""


_EXAMPLES = """\b
Examples:
  python -m hp_sharding checkpoint inspect runs/step_1000                            what is in it
  python -m hp_sharding checkpoint verify runs/step_1000                             reads every byte
  python -m hp_sharding checkpoint convert runs/step_1000 exported/model --to paddle
"""


@click.group(epilog=_EXAMPLES)
def checkpoint() -> None:
    """Looks at checkpoints, checks them, and converts them to and from whole files."""


@checkpoint.command(epilog=_INSPECT_EXAMPLES)
@click.argument("path", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--filter", "wanted", metavar="TEXT", default="", help="Only tensors with this in their name.")
@click.option("--state", "with_state", is_flag=True, help="Show what is not tensors, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def inspect(path: Path, wanted: str, with_state: bool, as_json: bool) -> None:
    """Shows what is in the checkpoint DIR: step, sizes, and a table of its tensors.

    Values are not read; use verify to check them. DIR may also be a .pdparams or .safetensors file.
    """
    _check_source(path)
    with _errors():
        contents = contents_of_folder(path) if path.is_dir() else _contents_of_files(path)
    if as_json:
        click.echo(json.dumps(_as_json(contents, wanted=wanted, with_state=with_state)))
    else:
        terminal.show(contents, wanted=wanted, with_state=with_state)
    sys.exit(1 if contents.damage else 0)


@checkpoint.command(epilog=_VERIFY_EXAMPLES)
@click.argument("path", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def verify(path: Path, as_json: bool) -> None:
    """Reads all of the checkpoint DIR and compares every byte with its checksum.

    DIR may also be a .pdparams or .safetensors file, which has no checksums: a changed value does not show.
    """
    _check_source(path)
    began_s = time.monotonic()
    nbytes, failures = _verified(path)
    took_s = time.monotonic() - began_s
    if as_json:
        damaged = [{"file": error.file, "parameter": error.parameter, "message": str(error)} for error in failures]
        found = {"path": str(path), "ok": not failures, "bytes": nbytes, "took_s": took_s, "damaged": damaged}
        click.echo(json.dumps(found))
    for error in failures if not as_json else []:
        click.echo(f"error: {error}", err=True)
    if not as_json and not failures:
        how = "undamaged" if path.is_dir() else "complete, as far as can be seen without checksums"
        click.echo(f"{path} is {how}: {terminal.size_text(nbytes)} read in {took_s:.1f} s")
    sys.exit(1 if failures else 0)


@checkpoint.command(epilog=_CONVERT_EXAMPLES)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "to",
    required=True,
    type=click.Choice(["sharded", "paddle", "safetensors"]),
    help="A folder for hp_sharding.load; .pdparams and .pdopt; or .safetensors.",
)
@click.option("--files", type=click.IntRange(min=1), help="Data files of a sharded checkpoint.  [default: 1]")
@click.option("--force", is_flag=True, help="Replace what is at TARGET, once the new one is complete.")
def convert(source: Path, target: Path, to: Form, files: int | None, force: bool) -> None:
    """Writes the checkpoint SOURCE in another form to TARGET, bit for bit and in little memory.

    SOURCE is a folder, a .pdparams or .safetensors file, or the name of one without that. TARGET is a folder, or the
    name of whole files without what comes after the dot. Checksums of SOURCE are checked first. Whole files have no
    room for random states, and Paddle's none for your extra values: those stay behind.
    """
    _check_source(source)
    if files is not None and to != "sharded":
        raise click.UsageError(f"--files is for --to sharded; --to {to} gives one file of each kind")
    if to != "sharded":
        target = target.with_name(target.name.removesuffix(_ending(target)))
    _check_target(target, to, force=force)
    with (
        _errors(),
        contextlib.closing(_opened(source)) as opened,
        terminal.progress("converting", 2 * stored_bytes(opened)) as tell,
    ):
        convert_source(opened, to, target, n_files=files or 1, on_progress=tell)
    click.echo(f"wrote {', '.join(str(path) for path in outputs(target, to) if path.exists())}")


# -- the parts ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """What went wrong, in a line on stderr, and how that ends."""
    try:
        yield
    except CheckpointError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def _ending(path: Path) -> str:
    """What tells whole files of one name apart; empty for that name alone."""
    return next((ending for ending in _ENDINGS if path.name.endswith(ending) and path.name != ending), "")


def _check_source(path: Path) -> None:
    """Whether there is something that can be looked at; what state it is in shows later."""
    if path.is_dir():
        try:
            if not is_ours(path):
                raise click.UsageError(f"{path} is no checkpoint: it has no {INDEX_NAME}{_inside(path)}")
        except OSError as error:
            raise click.UsageError(f"{path} cannot be read: {error.strerror}") from error
        return
    names = [str(path)] if _ending(path) else [f"{path}{weights}" for weights, _ in FORMATS.values()]
    if not any(Path(name).is_file() for name in names):
        raise click.UsageError(f"there is no folder {path}, and no file {' or '.join(names)}")


def _inside(folder: Path) -> str:
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and is_ours(path))
    return f", but it holds checkpoints: {', '.join(found[-5:])}" if found else ""


def _check_target(target: Path, to: Form, *, force: bool) -> None:
    there = [path for path in outputs(target, to) if path.exists()]
    if to == "sharded" and target.is_dir() and not os.listdir(target):
        return
    if there and to == "sharded" and not target.is_dir():
        raise click.UsageError(f"{target} is a file, and a sharded checkpoint is a folder")
    if there and not force:
        raise click.UsageError(f"{there[0]} exists; --force replaces it")


def _opened(path: Path) -> TensorSource:
    return open_checkpoint(path) if path.is_dir() else WholeFiles(path)


def _contents_of_files(path: Path) -> Contents:
    with contextlib.closing(_opened(path)) as source:
        return contents_of_files(source)


def _verified(path: Path) -> tuple[int, list[CheckpointError]]:
    """Bytes read, and what is wrong."""
    try:
        with contextlib.closing(_opened(path)) as source:
            nbytes = stored_bytes(source)
            with terminal.progress("verifying", nbytes) as tell:
                return nbytes, verify_source(source, on_progress=tell)
    except CheckpointError as error:
        return 0, [error]


def _as_json(contents: Contents, *, wanted: str, with_state: bool) -> dict[str, Any]:
    found = {
        **contents._asdict(),
        "complete": not contents.damage,
        "tensors": [tensor._asdict() for tensor in contents.tensors if wanted in tensor.name],
        "tensor_bytes": contents.tensor_bytes,
        "lr": contents.lr,
        **{key: contents.state.get(key) for key in ("steps", "optimizer", "n_ranks")},
    }
    if not with_state:
        del found["state"]
    return found
