"""The command line: ``python -m hp_sharding``, or ``hp-sharding``. What a command does stands elsewhere."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from . import __version__
from .errors import ConfigError

_EXAMPLES = """\b
Examples:
  python -m hp_sharding doctor                           this machine, one process
  python -m hp_sharding doctor --nproc 2                 starts two ranks here, on CPU or on two devices
  python -m hp_sharding doctor --nproc 4 --quick         under half a minute; with four ranks replicas too
  python -m hp_sharding doctor --nproc 2 --only parity   the numbers alone
  python -m hp_sharding doctor --nproc 2 --output report.txt --json | tail -n 1 | python -m json.tool

\b
Several machines, or other settings of the launcher: on each of them
  python -m paddle.distributed.launch --nnodes 2 --rank 0 --host 10.0.0.1 --master 10.0.0.1:29500 \\
      --nproc_per_node 2 $(which hp-sharding) doctor --output report.txt
On devices give the launcher --devices 0,1 instead of --nproc_per_node 2.

\b
Exit code: 0 all is well, 1 a check failed or a rank died, 2 wrong use.
"""


_HOMES = {"checkpoint": "checkpoint.command", "run": "run", "plan": "plan.command", "trace": "trace.command"}
"""Where commands are that are imported only when they are asked for: Paddle takes seconds, and not all of them need it.
"""


class _Commands(click.Group):
    """Those that were added, and those in ``_HOMES``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_HOMES})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _HOMES:
            return super().get_command(ctx, cmd_name)
        try:
            home = importlib.import_module(f".{_HOMES[cmd_name]}", __package__)
        except ImportError as error:
            return _unusable(cmd_name, error)
        found: click.Command = getattr(home, cmd_name)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if not _is_for_paddle(error):
                raise
            raise click.ClickException(_why_not(error)) from error


def _unusable(name: str, error: ImportError) -> click.Command:
    """Stands for a command that cannot be imported, so that the others and their help are there."""

    def refuse(**_: Any) -> None:
        raise click.ClickException(f"{name}: {_why_not(error)}") from error

    return click.Command(
        name,
        callback=refuse,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        short_help=f"Cannot be used here: {_why_not(error)}",
    )


def _is_for_paddle(error: ImportError) -> bool:
    """Whether it is Paddle that is missing, and not a part that a user's script looks for in it."""
    return (error.name or "").partition(".")[0] == "paddle" and find_spec("paddle") is None


def _why_not(error: ImportError) -> str:
    if _is_for_paddle(error):
        return "PaddlePaddle is not installed; see https://www.paddlepaddle.org.cn/install"
    return f"{type(error).__name__}: {error}"


_MAIN_EXAMPLES = """\b
Examples:
  python -m hp_sharding doctor --nproc 2                           is this machine set up well?
  python -m hp_sharding plan my_models.gpt:build --ranks 8 --help  what would fit, and how long would a step take?
  python -m hp_sharding trace show trace.json                      where did the time of the steps go?
  python -m hp_sharding checkpoint inspect runs/step_1000          what is in it?

\b
The program hp-sharding is the same as python -m hp_sharding. Each command has its own --help.
"""


@click.group(cls=_Commands, epilog=_MAIN_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hp_sharding")
def main() -> None:
    """Tools of hp_sharding, sharded data parallel training for PaddlePaddle."""


@main.command(epilog=_EXAMPLES)
@click.option(
    "--nproc", type=click.IntRange(min=1), help="Start this many ranks on this machine, with Paddle's launcher."
)
@click.option("--quick", is_flag=True, help="Fewer repeats and smaller messages, in under half of the time.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(["parity", "asynchrony", "bandwidth", "overlap"]),
    help="Run this check alone; may be given several times.",
)
@click.option(
    "--max-mb",
    type=click.FloatRange(min=0.01, max=4096),
    help="Largest message, in units of 2^20 bytes.  [default: 64, or 16 with --quick]",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="How long to wait for a late rank.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object too, as the last line of stdout.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report to this file as well; JSON if its name ends in .json.",
)
@click.option("--hand-in", type=click.Path(file_okay=False, path_type=Path), hidden=True)
def doctor(nproc: int | None, max_mb: float | None, **options: Any) -> None:
    """Checks this machine and its ranks: the report to look at, or to paste, when something is slow or wrong.

    Numbers equal to those of one process, whether collectives run behind compute, how fast they are, and how much of
    them a training step hides. It needs several ranks: use --nproc, or the launcher. The report names this machine and
    lists environment variables of Paddle and of communication libraries; look at it before you publish it.
    """
    # Paddle, and all that draws tables, only where they are needed.
    from .doctor import Request
    from .doctor import run as examine

    _check_folder(options["output"])
    request = Request(max_mb=max_mb or (16.0 if options["quick"] else 64.0), **options)
    try:
        code = examine(request, nproc=nproc)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(code)


def _check_folder(output: Path | None) -> None:
    if output is not None and not output.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {output.absolute().parent}", param_hint="--output")
