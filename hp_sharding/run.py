"""``python -m hp_sharding.run script.py ...``: runs a script written for Paddle's fleet, unchanged, sharded."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from .config import ShardingConfig
from .errors import ConfigError

ENVIRONMENT = "HP_SHARDING_CONFIGS"

_EPILOG = f"""\b
Examples:
  python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo \\
      $(which hp-sharding) run --stage 3 --allgather-overlap train.py --epochs 3
  {ENVIRONMENT}='{{"stage": 1}}' python -m hp_sharding.run train.py
  python -m hp_sharding.run --stage 1 -m my_package.train --epochs 3

\b
The launcher starts files, not modules: $(which hp-sharding) run is the same as python -m hp_sharding.run.
"""

_NOT_HERE = ("units",)
"""Keys whose values are classes."""


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each key of ``ShardingConfig`` whose value can be written on a command line."""
    for field in reversed(dataclasses.fields(ShardingConfig)):
        if field.name in _NOT_HERE:
            continue
        dashed = field.name.lower().replace("_", "-")
        if isinstance(field.default, bool):
            option = click.option(f"--{dashed}/--no-{dashed}", field.name, default=None)
        else:
            option = click.option(f"--{dashed}", field.name, metavar="VALUE")
        command = option(command)
    return command


@click.command(
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "allow_interspersed_args": False},
)
@_options
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as for python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(script: str, args: tuple[str, ...], *, module: bool, **options: Any) -> None:
    """Runs SCRIPT, written for paddle.distributed.fleet, unchanged and sharded.

    In it fleet.init, distributed_model, distributed_optimizer, distributed_scaler and DistributedStrategy are those of
    hp_sharding.fleet. What cannot be replaced, such as group_sharded_parallel or a pipeline, is an error that says so.

    Options are keys of hp_sharding_configs, for strategies that do not set them; so is the JSON object in the
    environment variable HP_SHARDING_CONFIGS. Options count more.
    """
    # Not before it is needed: Paddle's fleet takes a while to import.
    from . import fleet
    from .fleet.replacing import paddles_face_replaced

    given = {key: _value(text) for key, text in options.items() if text is not None}
    settings = {**_from_environment(), **given}
    try:
        ShardingConfig.from_dict(settings)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    if not module and not Path(script).is_file():
        raise click.BadParameter(f"there is no file {script}", param_hint="SCRIPT")
    with paddles_face_replaced(fleet._SESSION, settings):
        _run_as_main(script, args, module=module)


def _run_as_main(script: str, args: tuple[str, ...], *, module: bool) -> None:
    sys.argv = [script, *args]
    sys.path[0] = str(Path.cwd() if module else Path(script).resolve().parent)
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except (EOFError, KeyboardInterrupt):
        traceback.print_exc()  # click would say "Aborted!" and no more
        sys.exit(1)


def _value(text: bool | str) -> Any:
    """What is written as a number, true, false or null is one; anything else is text."""
    if isinstance(text, bool):
        return text
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text


def _from_environment() -> Mapping[str, Any]:
    text = os.environ.get(ENVIRONMENT, "").strip()
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"{ENVIRONMENT} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise click.UsageError(f'{ENVIRONMENT} must be a JSON object, such as {{"stage": 2}}, not {text}')
    return found


if __name__ == "__main__":
    run(prog_name="python -m hp_sharding.run")
