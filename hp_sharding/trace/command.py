"""``hp-sharding trace``: looks at traces and compares them. Needs neither ranks nor Paddle."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ..errors import ConfigError
from . import chrome
from .difference import compare
from .figures import only_steps, summary
from .headline import headline
from .spans import Trace

_EXIT_CODES = "Exit code: 0 all is well, 1 the traces cannot be compared, 2 wrong use, or a file that is no trace."
_SHOW_EXAMPLES = f"""\b
Examples:
  python -m hp_sharding trace show trace.json                          steps, lanes, what was waited for
  python -m hp_sharding trace show trace.json --picture trace.png      and a picture
  python -m hp_sharding trace show trace.json --steps 5-7 --picture trace.png
  python -m hp_sharding trace show trace.json --json | python -m json.tool

\b
A trace is made in the script, on all ranks:
  with optimizer.timeline.record(steps=3, path="trace.json"):
      ...train for three steps...
https://ui.perfetto.dev opens the same file, and so does chrome://tracing.

\b
{_EXIT_CODES}
"""
_DIFF_EXAMPLES = f"""\b
Examples:
  python -m hp_sharding trace diff before.json after.json              what takes longer, most first
  python -m hp_sharding trace diff before.json after.json --json | python -m json.tool

\b
{_EXIT_CODES}
"""


_MOST_DIGITS = 15
"""Of the number of a step."""


class _Steps(click.ParamType[list[range]]):
    """``3``, ``5-7``, ``1,3,5-7``."""

    name = "steps"

    def convert(
        self, value: str | list[range], param: click.Parameter | None, ctx: click.Context | None
    ) -> list[range]:
        if isinstance(value, list):
            return value
        found: list[range] = []
        for part in value.split(","):
            first, dash, last = part.strip().partition("-")
            if not _is_step(first) or (dash and not _is_step(last)):
                self.fail(f"'{value}' is not like 3, 5-7 or 1,3,5-7", param, ctx)
            found.append(range(int(first), int(last or first) + 1))
            if not found[-1]:
                self.fail(f"'{part.strip()}' ends before it begins", param, ctx)
        return found


def _is_step(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


_EXAMPLES = """\b
Examples:
  python -m hp_sharding trace show trace.json --picture trace.png   where the time of the steps went
  python -m hp_sharding trace diff before.json after.json           what takes longer
"""


@click.group(epilog=_EXAMPLES)
def trace() -> None:
    """Looks at traces that a training has recorded, and compares them."""


@trace.command(epilog=_SHOW_EXAMPLES)
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--steps", type=_Steps(), help="Only these steps, such as 3, 5-7 or 1,3,5-7.")
@click.option(
    "--picture", metavar="PNG", type=click.Path(dir_okay=False, path_type=Path), help="Draw them into this file, too."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def show(path: Path, steps: list[range] | None, picture: Path | None, as_json: bool) -> None:
    """Shows where the time of the steps in FILE went."""
    with _errors():
        recorded = chrome.read(path)
        found = _selected(recorded, steps)
        if as_json:
            click.echo(json.dumps(summary(found)))
        else:
            from . import tables

            tables.show(summary(found), headline(recorded, found, found.ranks))
        if picture is not None:
            from .picture import draw

            draw(recorded, picture, steps=None if steps is None else found.numbers())
            click.echo(f"wrote {picture}", err=as_json)


@trace.command(epilog=_DIFF_EXAMPLES)
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def diff(before: Path, after: Path, as_json: bool) -> None:
    """Shows what takes longer in the trace AFTER than in BEFORE: by lane, phase and layer, most first."""
    with _errors():
        traces = chrome.read(before), chrome.read(after)
    try:
        found = compare(*traces)
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(found.as_data()))
    else:
        from . import tables

        tables.show_difference(found)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """A file that cannot be used, as wrong use."""
    try:
        yield
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def _selected(found: Trace, steps: list[range] | None) -> Trace:
    if steps is None:
        return found
    numbers = [number for number in found.numbers() if any(number in some for some in steps)]
    if not numbers:
        said = ", ".join(f"{some[0]}" if len(some) == 1 else f"{some[0]}-{some[-1]}" for some in steps)
        raise ConfigError(f"the trace has steps {found.numbers()}, none of [{said}]")
    return only_steps(found, numbers)
