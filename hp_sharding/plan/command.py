"""``hp-sharding plan``: memory and step time of a training, predicted and ranked. No ranks, no devices."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError

_EXAMPLES = """\b
Examples:
  hp-sharding plan my_models.gpt:build --ranks 64 --tflops 150 --tokens 8192 --bandwidth-gbit 400
                          a Python callable that returns a Layer; its parameters are given no memory
  hp-sharding plan my_models.gpt:build --batch my_models.gpt:batch --measure --hardware report.json --ranks 8
                          its compute measured here, the links by 'hp-sharding doctor --output report.json'
  hp-sharding plan my_models.gpt:build --compute-from trace.json --hardware report.json --ranks 8
                          its compute as it was recorded
  hp-sharding plan layers.json --ranks 16 --replicas 1,2 --bandwidth-gbit 10 --latency-us 100
                          a list: {"units": [{"name": "blocks.0", "forward_ms": 3, "backward_ms": 6,
                          "params": [["blocks.0.weight", [512, 512], "float32"]]}, ...]}
  hp-sharding plan llama2-70b --ranks 512 --replicas 1,8,64 --stages 2,3 --buffer-mb 25,100 --param-dtype bfloat16 \\
      --bandwidth-gbit 400 --latency-us 10 --tflops 400 --tokens 4096 --memory-gb 80 --trace best.json
  hp-sharding plan transformer:layers=24,width=2048,heads=16,inner=5632,vocabulary=32000,context=2048 --ranks 8 ...

\b
Exit code: 0 something fits, 1 nothing fits into --memory-gb, 2 wrong use.
"""


class _Several(click.ParamType):  # type: ignore[type-arg]
    """Values between commas."""

    name = "LIST"

    def __init__(self, kind: type, least: float) -> None:
        self._kind, self._least = kind, least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            found = [self._kind(part) for part in value.split(",")]
        except ValueError:
            found = []
        if not found or min(found) < self._least:
            self.fail(f"'{value}' is not a list such as 1,2 of values of at least {self._least:g}", param, ctx)
        return found


_POSITIVE = click.FloatRange(min=0, min_open=True)
_DTYPE = click.Choice(["float32", "bfloat16", "float16"])
_JSON_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(epilog=_EXAMPLES)
@click.argument("model")
@click.option("--ranks", type=click.IntRange(min=2), default=8, show_default=True, help="All data ranks.")
@click.option("--replicas", type=_Several(int, 1), default="1", show_default=True, help="Replicas to try, such as 1,2.")
@click.option("--stages", type=_Several(int, 1), default="2,3", show_default=True, help="Stages to try.")
@click.option(
    "--buffer-mb",
    type=_Several(float, 0.001),
    default="25",
    show_default=True,
    help="Bucket sizes to try, in 2^20 bytes.",
)
@click.option(
    "--prefetch-depth", type=_Several(int, 0), default="1", show_default=True, help="Units ahead to try in stage 3."
)
@click.option(
    "--replicate-buffer-mb",
    type=_POSITIVE,
    default=25.0,
    show_default=True,
    help="What replicas add up in one go, in 2^20 bytes.",
)
@click.option("--overlap/--no-overlap", default=True, show_default=True, help="Communication behind compute.")
@click.option(
    "--param-dtype",
    type=_DTYPE,
    help="See ShardingConfig; float32 masters then. Unless given, the 16-bit dtype of a transformer:SIZES or llama2-*.",
)
@click.option("--gather-dtype", type=_DTYPE, help="See ShardingConfig.")
@click.option("--reduce-dtype", type=_DTYPE, help="See ShardingConfig.")
@click.option("--clip", is_flag=True, help="Gradients are clipped by their global norm.")
@click.option(
    "--micro-batches", type=click.IntRange(min=1), default=1, show_default=True, help="Of a step, in no_sync."
)
@click.option("--hardware", type=_JSON_FILE, help="The doctor's JSON report, or its 'hardware' alone.")
@click.option("--bandwidth-gbit", type=_POSITIVE, help="Of a rank's link to its shard group, in 10^9 bits a second.")
@click.option("--latency-us", type=click.FloatRange(min=0), help="Of one hop of a ring.")
@click.option("--replicate-bandwidth-gbit", type=_POSITIVE, help="Of a link of its own to the replicas.")
@click.option("--replicate-latency-us", type=click.FloatRange(min=0), help="Of one hop there.")
@click.option(
    "--host-ranks", type=click.IntRange(min=2), help="Ranks of a host; the links above are between hosts then."
)
@click.option("--host-bandwidth-gbit", type=_POSITIVE, help="Of a rank's link inside its host.")
@click.option("--host-latency-us", type=click.FloatRange(min=0), help="Of one hop there.")
@click.option(
    "--compute-slowdown", type=click.FloatRange(min=1), help="By how much longer compute takes beside a busy link."
)
@click.option("--tflops", type=_POSITIVE, help="10^12 operations a second that layers reach.")
@click.option("--memory-gb-s", type=_POSITIVE, help="10^9 bytes of memory a second that updates and copies pass.")
@click.option("--memory-gb", type=_POSITIVE, help="Memory of a rank, in 10^9 bytes.")
@click.option("--tokens", type=click.IntRange(min=1), help="Of a rank's batch.")
@click.option("--measure", is_flag=True, help="Run the model here and measure its compute; needs --batch.")
@click.option("--batch", help="package.module:callable; returns arguments for the model; that is not measured.")
@click.option("--compute-from", type=_JSON_FILE, help="A trace of this model's training that has its compute.")
@click.option("--top", type=click.IntRange(min=1), help="Show so many of the best only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write the best one's step as a trace.")
def plan(model: str, as_json: bool, trace: Path | None, top: int | None, **options: Any) -> None:
    """Predicts memory and step time of sharded training of MODEL, and ranks the choices.

    MODEL is a Python callable (package.module:name), a JSON list of parameters, llama2-7b, llama2-70b, or
    transformer:SIZES. The package's own scheduler runs on a clock that is simulated; nothing is sent.
    """
    from ..progress import showing_progress
    from . import terminal
    from .preparing import Request, prepare

    try:
        prepared = prepare(Request(model=model, **options))
        with showing_progress("plan", wanted=not as_json) as say:
            outcomes = prepared.run(say)
        if trace is not None:
            from ..trace import chrome

            chrome.write(outcomes[0].prediction.trace, trace)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(prepared.as_dict(outcomes[:top])))
    else:
        terminal.show(outcomes[:top], prepared.profile, memory_bytes=prepared.hardware.memory_bytes)
    sys.exit(0 if outcomes[0].fits else 1)
